// session.cpp -- signal flag, log sink, a rank's share of the cores, and the order of bring-up.
#include "app/session.h"

#include <omp.h>
#include <sched.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "core/together.h"

namespace moetrain::app {
namespace {

volatile std::sig_atomic_t last_stop_signal = 0;  // a handler can reach nothing but a variable like this

void note_stop_signal(int signal) { last_stop_signal = signal; }

void on_stop_signals(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGUSR1, SIGTERM}) sigaction(signal, &action, nullptr);
}

class SplitSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit SplitSink(int rank) : prefix_(rank > 0 ? "[rank " + std::to_string(rank) + "] " : "") {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    std::FILE* to = message.level >= spdlog::level::warn ? stderr : stdout;
    std::string line = prefix_;
    if (message.level == spdlog::level::warn) line += "warning: ";
    line.append(message.payload.data(), message.payload.size());
    line += '\n';
    std::fwrite(line.data(), 1, line.size(), to);
    std::fflush(to);
  }
  void flush_() override {
    std::fflush(stdout);
    std::fflush(stderr);
  }
  std::string prefix_;
};

// Where a rank runs: its host, and the cores there that the launcher lets it use.
struct Seat {
  char host[256];
  cpu_set_t cores;
};
std::vector<Seat> seats(parallel::Communicator& world) {
  Seat mine{};
  gethostname(mine.host, sizeof mine.host - 1);
  if (sched_getaffinity(0, sizeof mine.cores, &mine.cores) != 0) CPU_ZERO(&mine.cores);
  std::vector<Seat> all(std::size_t(world.size()));
  const parallel::Communicator::Gather piece{&mine, all.data(), sizeof mine};
  world.all_gather({&piece, 1});
  return all;
}
// Its cores, shared with the ranks that may run on the same ones.
int share_of_cores(const std::vector<Seat>& all, const Seat& mine) {
  const auto sharing = std::count_if(all.begin(), all.end(), [&](const Seat& s) { return std::memcmp(&s, &mine, sizeof s) == 0; });
  return std::max(1, CPU_COUNT(&mine.cores) / int(sharing));
}

std::unique_ptr<parallel::Watchdog> watch_over_others(const std::optional<parallel::Launched>& launched, double limit_s,
                                                      const Session::Tell& tell) {
  if (!launched || launched->ranks == 1) return nullptr;
  return std::make_unique<parallel::Watchdog>(*launched, limit_s, tell);
}

}  // namespace

// A launcher may have started us with them blocked, and a blocked signal would wait for ever.
void keep_stop_signals() {
  on_stop_signals(note_stop_signal);
  sigset_t ours;
  sigemptyset(&ours);
  for (const int signal : {SIGUSR1, SIGTERM}) sigaddset(&ours, signal);
  sigprocmask(SIG_UNBLOCK, &ours, nullptr);
}
bool stop_signal_kept() { return last_stop_signal != 0; }
void release_stop_signals() {
  on_stop_signals(SIG_DFL);
  if (stop_signal_kept()) std::raise(last_stop_signal);
}

void open_log(int rank) {
  auto logger =
      std::make_shared<spdlog::logger>(rank > 0 ? "rank " + std::to_string(rank) : "moetrain", std::make_shared<SplitSink>(rank));
  spdlog::set_default_logger(std::move(logger));
}

bool started_by_launcher() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"})
    if (std::getenv(name) != nullptr) return true;
  return false;
}

void check_launch(const parallel::Launched& launch, int rank, int size) {
  if (launch.ranks == size && launch.rank == rank) return;
  throw Error(launch.launcher + " says " + launch.variables + ", but MPI says rank " + std::to_string(rank) + " of " + std::to_string(size) +
                  ": they do not know each other, and every process would be a run of its own. Start moetrain with `srun --mpi=pmix` (`srun "
                  "--mpi=list` says what srun has), or with the mpirun of the MPI that it was built with, " + parallel::mpi_version(),
              ExitCode::bad_job);
}

void Session::check_launch() {
  if (launched_ && size() == 1 && launched_->rank > 0) spdlog::set_level(spdlog::level::off);  // where each is alone, the first speaks for all
  core::together(control(), [&] {
    if (launched_) app::check_launch(*launched_, rank(), size());
  });
}

Session::Session(int& argc, char**& argv, double limit_s, Tell tell)
    : launched_(parallel::launched()),
      tell_([tell = std::move(tell)](ExitCode code, const std::string& cause, int rank) {
        if (tell) tell(code, cause, rank);
        spdlog::error("{}{}", code == ExitCode::rank_lost ? "" : "rank " + std::to_string(rank) + ": ", cause);  // that names its ranks
      }),
      watchdog_(watch_over_others(launched_, limit_s, tell_)),
      mpi_(argc, argv, journal()) {
  keep_stop_signals();  // again: network libraries that MPI loads put handlers of their own in place of ours
  open_log(rank());
  control_ = parallel::mpi_world(parallel::kRoundBytes, journal());
  const std::vector<Seat> all = seats(*control_);
  const Seat& mine = all[std::size_t(rank())];
  on_one_host_ = std::all_of(all.begin(), all.end(), [&](const Seat& s) { return std::strcmp(s.host, mine.host) == 0; });
  if (std::getenv("OMP_NUM_THREADS") == nullptr) omp_set_num_threads(share_of_cores(all, mine));
}

void Session::fail_alone(ExitCode code, const std::string& cause) {
  if (watchdog_ && code == ExitCode::rank_lost) watchdog_->lost(cause);
  if (!watchdog_) tell_(code, cause, rank());
  else if (!watchdog_->failed(code, cause)) spdlog::error("rank {}: {}", rank(), cause);
  mpi_.abort(int(code));
}

}  // namespace moetrain::app
