// session.h -- what a process needs around a command: stop signals, the log, threads, and MPI for those that train.
#pragma once
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "parallel/communicator.h"
#include "parallel/mpi_session.h"
#include "parallel/watchdog.h"

namespace moetrain::app {

void keep_stop_signals();  // SIGUSR1 and SIGTERM set a flag from now on; nothing else happens
bool stop_signal_kept();
void release_stop_signals();  // they end the process again, also one that came before

// The default logger: information as plain lines to stdout, warnings and errors to stderr; other ranks than 0 say who they are.
void open_log(int rank);

bool started_by_launcher();  // by mpirun or srun, so that MPI will find other ranks

// An Error with what to do where MPI says otherwise: then every process would be a run of its own.
void check_launch(const parallel::Launched& launched, int rank, int size);

// MPI up, log named, threads shared out; taken down in reverse order. Under a launcher a watchdog is there before MPI and after it.
class Session {
 public:
  using Tell = parallel::Watchdog::Tell;
  // limit_s: how long this rank may wait for others. tell: called before a line is logged of an end that one rank brings about, of
  // itself or of another; from any thread.
  Session(int& argc, char**& argv, double limit_s = std::numeric_limits<double>::infinity(), Tell tell = {});
  void check_launch();  // collective, fails on every rank
  int rank() const { return mpi_.rank(); }
  int size() const { return mpi_.size(); }
  int local_rank() const { return mpi_.local_rank(); }  // among the ranks of this host
  int local_size() const { return mpi_.local_size(); }
  parallel::Communicator& control() { return *control_; }
  bool on_one_host() const { return on_one_host_; }  // all ranks
  parallel::Watchdog* watchdog() { return watchdog_.get(); }  // null: there are no other ranks
  std::shared_ptr<parallel::Journal> journal() const { return watchdog_ ? watchdog_->journal() : nullptr; }
  // A failure of this rank alone, for which the others may be waiting: it is told, and ends them all.
  [[noreturn]] void fail_alone(ExitCode code, const std::string& cause);

 private:
  std::optional<parallel::Launched> launched_;  // before MPI, which puts its own variables there
  Tell tell_;
  std::unique_ptr<parallel::Watchdog> watchdog_;
  parallel::MpiSession mpi_;
  bool on_one_host_ = true;
  std::unique_ptr<parallel::Communicator> control_;
};

}  // namespace moetrain::app
