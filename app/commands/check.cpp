// check.cpp -- every fault of a job at once, or the word that there is none.
#include <iostream>

#include "app/commands.h"
#include "app/job.h"

namespace moetrain::app {

ExitCode check(const CheckArguments& arguments) {
  const core::Config config = read_job(arguments.job, arguments.ranks, Needs::everything);
  std::cout << arguments.job.path << ": no faults, " << config.parallel.mesh().ranks() << " ranks\n";
  return ExitCode::done;
}

}  // namespace moetrain::app
