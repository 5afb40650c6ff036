// device.h -- where bytes live and work runs. On `dry` shapes are checked and bytes counted, nothing is stored or computed.
#pragma once
#include <cstdint>

namespace moetrain {

enum class Device : std::uint8_t { cpu, cuda, dry };

#ifdef MOETRAIN_HAS_CUDA
inline constexpr bool kHasCuda = true;
#else
inline constexpr bool kHasCuda = false;
#endif

}  // namespace moetrain
