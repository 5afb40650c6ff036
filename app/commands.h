// commands.h -- what each command does with its arguments; the exit code comes back, failures are thrown.
#pragma once
#include "app/cli.h"
#include "memory/check.h"
#include "parallel/communicator.h"

namespace moetrain::app {

ExitCode train(const TrainArguments& arguments, int& argc, char**& argv);
ExitCode check(const CheckArguments& arguments, int ranks);  // ranks: this process was started as one of so many
ExitCode plan(const PlanArguments& arguments);
ExitCode inspect(const InspectArguments& arguments);
ExitCode import(const ImportArguments& arguments, parallel::Communicator& control);  // collective, as export is
ExitCode export_to(const ExportArguments& arguments, parallel::Communicator& control);
ExitCode bench(const BenchArguments& arguments);
ExitCode bench_machine(const BenchArguments& arguments, parallel::Communicator& control);  // collective
ExitCode verify(const VerifyArguments& arguments);

}  // namespace moetrain::app
