// check.cpp -- every fault of a job at once, or the word that there is none.
#include <iostream>

#include "app/commands.h"
#include "app/job.h"

namespace moetrain::app {

ExitCode check(const CheckArguments& arguments, int ranks) {
  // A batch system may start a shell, too, as its one task; so only more than one rank says what the job is to run on.
  const int judged = arguments.ranks > 0 ? arguments.ranks : ranks > 1 ? ranks : 0;
  const core::Config config = read_job(arguments.job, judged, Needs::everything);
  const std::int64_t made_for = config.parallel.mesh().ranks();
  std::cout << arguments.job.path << ": no faults, " << made_for << (made_for == 1 ? " rank\n" : " ranks\n");
  return ExitCode::done;
}

}  // namespace moetrain::app
