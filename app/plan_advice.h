// plan_advice.h -- does a plan fit, and what makes it fit if not.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/plan.h"

namespace moetrain::app {

struct MemoryLimits {
  std::optional<std::int64_t> device, host;  // bytes of a device, and of the host for one rank
};
std::optional<bool> fits(const core::Plan& plan, const MemoryLimits& limits);  // nothing where no memory was named

// A line for each change of the job that needs less of what is short, the best first; none where the plan fits. Each is planned, so
// the figures are what the job would need and no guess; on the machine of the plan where it has one, then with the time of a step.
std::vector<std::string> advice(const core::Config& job, const core::Plan& plan, const MemoryLimits& limits,
                                const core::Machine* machine);

}  // namespace moetrain::app
