// schedule.h -- the learning rate as a pure function of the step.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/config.h"

namespace moetrain::core {

// Rate of update `step` (1 = the first) out of `steps`. Warm-up is linear and reaches the full rate at step == warmup_steps; decay
// then runs from the full rate to min_lr, which it has at the last step:
//   linear, cosine: over all steps after warm-up;   wsd: linearly over the last decay_fraction of the steps;   constant: never.
inline double learning_rate(const ScheduleConfig& s, double lr, std::int64_t step, std::int64_t steps) {
  if (step <= s.warmup_steps) return lr * double(step) / double(s.warmup_steps);
  std::int64_t decay_from = s.warmup_steps;
  if (s.name == ScheduleKind::wsd) decay_from = std::max(decay_from, steps - std::int64_t(std::llround(s.decay_fraction * double(steps))));
  const std::int64_t span = std::max<std::int64_t>(1, steps - decay_from);
  const double done = std::clamp(double(step - decay_from) / double(span), 0.0, 1.0);
  switch (s.name) {
    case ScheduleKind::constant: return lr;
    case ScheduleKind::linear:
    case ScheduleKind::wsd: return lr + (s.min_lr - lr) * done;
    case ScheduleKind::cosine: return s.min_lr + (lr - s.min_lr) * 0.5 * (1 + std::cos(std::numbers::pi * done));
  }
  return lr;
}

}  // namespace moetrain::core
