// session.h -- what a process needs around a command: stop signals, the log, threads, and MPI for those that train.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "parallel/communicator.h"
#include "parallel/mpi_session.h"

namespace moetrain::app {

void keep_stop_signals();  // SIGUSR1 and SIGTERM set a flag from now on; nothing else happens
bool stop_signal_kept();
void release_stop_signals();  // they end the process again, also one that came before

// The default logger: information as plain lines to stdout, warnings and errors to stderr; other ranks than 0 say who they are.
void open_log(int rank);

bool started_by_launcher();  // by mpirun or srun, so that MPI will find other ranks

// What a launcher says of ranks in the environment, by its own variables.
struct Launch {
  std::string launcher, variables;
  int rank = 0, size = 1;
};
std::optional<Launch> launch_of(const std::function<const char*(const char*)>& environment);  // environment(name): null if not set
// An Error with what to do where MPI says otherwise: then every process would be a run of its own.
void check_launch(const Launch& launch, int rank, int size);

// MPI up, log named, threads shared out; taken down in reverse order.
class Session {
 public:
  Session(int& argc, char**& argv);
  void check_launch();  // collective, fails on every rank
  int rank() const { return mpi_.rank(); }
  int size() const { return mpi_.size(); }
  int local_rank() const { return mpi_.local_rank(); }  // among the ranks of this host
  int local_size() const { return mpi_.local_size(); }
  parallel::Communicator& control() { return *control_; }
  [[noreturn]] void abort(int exit_code) { mpi_.abort(exit_code); }

 private:
  std::optional<Launch> launch_;  // before MPI, which puts its own variables there
  parallel::MpiSession mpi_;
  std::unique_ptr<parallel::Communicator> control_;
};

}  // namespace moetrain::app
