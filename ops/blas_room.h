// blas_room.h -- what products hold of a CUDA device's memory for as long as a run lasts; a dry run for such a device takes it too.
#pragma once
#include <cstdint>

namespace moetrain::ops {

inline constexpr std::int64_t kBlasWorkspaceBytes = std::int64_t(32) << 20;  // cuBLAS's own advice for Hopper
inline constexpr std::int64_t kBlasCounterBytes = 2 * std::int64_t(sizeof(std::uint32_t));

}  // namespace moetrain::ops
