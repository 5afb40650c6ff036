// session_test.cpp -- what launchers say in the environment, held to what MPI says.
#include "app/session.h"

#include <map>

#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

std::optional<parallel::Launched> launched(const std::map<std::string, std::string>& variables) {
  return parallel::launched([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}
std::string said(const std::map<std::string, std::string>& variables, int rank, int size) {
  return error_of([&] { app::check_launch(launched(variables).value(), rank, size); });
}

}  // namespace

TEST_CASE("a launcher that MPI knows is obeyed, and one that it does not is an error with both views", "[app][cpu]") {
  CHECK_FALSE(launched({}));
  CHECK_FALSE(launched({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}));  // a batch script, which is one process
  CHECK(said({{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "2"}}, 2, 4) == "nothing was thrown");
  CHECK(contains(said({{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "2"}}, 0, 1),
                 "2: srun says SLURM_STEP_NUM_TASKS 4, SLURM_PROCID 2, but MPI says rank 0 of 1: "));
  CHECK(contains(said({{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}}, 1, 4), "mpirun of Open MPI says "));
  CHECK(contains(said({{"PMI_SIZE", "4"}, {"PMI_RANK", "1"}}, 2, 4), "PMI_SIZE 4, PMI_RANK 1, but MPI says rank 2 of 4"));
  // Daemons of mpirun are tasks of srun, one a host: the ranks are mpirun's.
  CHECK(said({{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}, {"OMPI_COMM_WORLD_SIZE", "16"}, {"OMPI_COMM_WORLD_RANK", "9"}}, 9, 16) ==
        "nothing was thrown");
}
