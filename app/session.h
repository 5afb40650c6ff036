// session.h -- what a process needs around a command: stop signals, the log, threads, and MPI for those that train.
#pragma once
#include <memory>

#include "parallel/communicator.h"
#include "parallel/mpi_session.h"

namespace moetrain::app {

void keep_stop_signals();  // SIGUSR1 and SIGTERM set a flag from now on; nothing else happens
bool stop_signal_kept();
void release_stop_signals();  // they end the process again, also one that came before

// The default logger: information as plain lines to stdout, warnings and errors to stderr; other ranks than 0 say who they are.
void open_log(int rank);

bool started_by_launcher();  // by mpirun or srun, so that MPI will find other ranks

// MPI up, log named, threads shared out; taken down in reverse order.
class Session {
 public:
  Session(int& argc, char**& argv);
  int rank() const { return mpi_.rank(); }
  int size() const { return mpi_.size(); }
  int local_rank() const { return mpi_.local_rank(); }  // among the ranks of this host
  int local_size() const { return mpi_.local_size(); }
  parallel::Communicator& control() { return *control_; }
  [[noreturn]] void abort(int exit_code) { mpi_.abort(exit_code); }

 private:
  parallel::MpiSession mpi_;
  std::unique_ptr<parallel::Communicator> control_;
};

}  // namespace moetrain::app
