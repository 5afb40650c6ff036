// step_time.h -- how long a step takes on a described machine: the clock of a dry run, and where its time goes.
//
//   step = sum over operators of t (core/machine.h)
//        + what messages beside them slow them down
//        + what the device stands still for weights, sums and experts' rows of other ranks, for what lies in host memory, and for
//          its host, which needs queue seconds an operator and waits where it has to know how many rows go to whom
//
// The dry run makes every call of the real one, in its order: what is computed again is counted again, what is kept or found is
// not, and a message stands in the way only as far as it is not there when it is waited for (memory/timeline.h). Routing is
// balanced. Not in it: reading data, writing checkpoints and log lines, evaluation.
#pragma once
#include <memory>

#include "core/machine.h"
#include "memory/timeline.h"
#include "ops/context.h"
#include "parallel/communicator.h"

namespace moetrain::core {

// In seconds.
struct StepTime {
  std::array<PassRates, ops::kWorkKinds> work{};    // of operators, forward and backward
  double slowed = 0;                                // of them by messages
  double queueing = 0;                              // the device stands still for its host
  std::array<double, parallel::kPurposes> waits{};  // for other ranks
  double host = 0;                                  // for what lies in host memory
  double total() const;
  void add(const StepTime& o, double times);
};

// One rank's. Outlives the dry run that it clocks.
class StepClock {
 public:
  explicit StepClock(const Machine& machine);
  StepClock(const StepClock&) = delete;
  StepClock& operator=(const StepClock&) = delete;
  const parallel::Network& network() const { return network_; }
  void watch(ops::Context& ctx, Memory& device);  // operators, and copies to and from the host, take their time from now on
  // Since the clock began; of other ranks, as their groups have counted it.
  StepTime so_far(const parallel::Traffic& traffic) const;

 private:
  Machine machine_;
  Timeline timeline_;
  parallel::Network network_;
  std::array<PassRates, ops::kWorkKinds> work_{};
};

}  // namespace moetrain::core
