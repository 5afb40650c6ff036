// step_time.cpp -- operators and messages of a dry run put on a machine's clock.
#include "core/step_time.h"

namespace moetrain::core {

double StepTime::total() const {
  double sum = slowed + queueing + host;
  for (const PassRates& passes : work) sum += passes[0] + passes[1];
  for (const double wait : waits) sum += wait;
  return sum;
}

void StepTime::add(const StepTime& o, double times) {
  for (std::size_t k = 0; k < work.size(); ++k)
    for (std::size_t pass = 0; pass < 2; ++pass) work[k][pass] += times * o.work[k][pass];
  slowed += times * o.slowed;
  queueing += times * o.queueing;
  for (std::size_t p = 0; p < waits.size(); ++p) waits[p] += times * o.waits[p];
  host += times * o.host;
}

StepClock::StepClock(const Machine& machine)
    : machine_(machine), timeline_(machine.beside, machine.drag), network_(machine.network) {
  network_.timeline = &timeline_;
}

void StepClock::watch(ops::Context& ctx, Memory& device) {
  device.take_time({&timeline_, machine_.host_bytes_per_s});
  ctx.on_work = [this](const char*, const ops::Work& work) {
    const double seconds = machine_.seconds(work);
    work_[std::size_t(work.kind)][work.backward] += seconds;
    timeline_.work(seconds, machine_.queue_s);
  };
}

StepTime StepClock::so_far(const parallel::Traffic& traffic) const {
  return {.work = work_,
          .slowed = timeline_.dragged(),
          .queueing = timeline_.idle(),
          .waits = traffic.exposed_seconds,
          .host = timeline_.stood(Timeline::Lane::to_host) + timeline_.stood(Timeline::Lane::to_device)};
}

}  // namespace moetrain::core
