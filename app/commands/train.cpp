// train.cpp -- the run under MPI: a job that all ranks agree on, and an end in which every failure is told once.
#include <spdlog/spdlog.h>

#include <filesystem>
#include <mutex>
#include <new>
#include <optional>

#include "app/commands.h"
#include "app/device.h"
#include "app/job.h"
#include "app/session.h"
#include "core/together.h"
#include "core/train_loop.h"
#include "io/folders.h"
#include "io/run_log.h"

namespace moetrain::app {
namespace {

// Rank 0's file for everyone, so that no two ranks train different jobs.
std::string shared_text(Session& session, const JobArguments& job) {
  auto& control = session.control();
  std::string text;
  core::together(control, [&] {
    if (session.rank() == 0) text = job_text(job);
  });
  auto bytes = std::int64_t(text.size());
  control.broadcast(&bytes, sizeof bytes, 0);
  text.resize(std::size_t(bytes));
  control.broadcast(text.data(), bytes, 0);
  return text;
}

// How the run ended, told by the rank that it ended on, and by a thread of it where the rank itself is stuck.
class Ending {
 public:
  explicit Ending(std::string dir) : dir_(std::move(dir)) {}
  void dir(const std::string& dir) {
    const std::lock_guard lock(mutex_);
    dir_ = dir;
  }
  void step(std::int64_t step) {
    const std::lock_guard lock(mutex_);
    step_ = step;
  }
  // A job that never ran leaves no folder behind, but whoever watches an old one learns why nothing happens.
  void write(ExitCode code, const std::string& cause, int rank) const {
    const std::lock_guard lock(mutex_);
    std::error_code failed;
    if (dir_.empty()) return;
    if (code != ExitCode::bad_job) std::filesystem::create_directories(dir_, failed);
    if (!std::filesystem::is_directory(dir_, failed)) return;
    try {
      io::write_exit(dir_, code, cause, rank, step_);
    } catch (const std::exception& e) {
      spdlog::warn("{}/exit.json was not written: {}", dir_, e.what());
    }
  }

 private:
  mutable std::mutex mutex_;
  std::string dir_;                   // run.dir; empty where the job does not say which
  std::optional<std::int64_t> step_;  // that the run stood at
};

void read_agreed(Session& session, const TrainArguments& arguments, core::Config& config, Ending& ending) {
  const std::string text = shared_text(session, arguments.job);
  core::together(session.control(), [&] {
    JudgedJob judged = judge_job(arguments.job, text, session.size(), Needs::everything);
    config = std::move(judged.config);
    ending.dir(config.run.dir);
    if (!judged.faults.empty()) throw Error(judged.faults, ExitCode::bad_job);
    const std::string& from = arguments.resume;
    if (from != "auto" && from != "never" && !std::filesystem::exists(from))
      throw Error("--resume " + from + ": no such checkpoint", ExitCode::bad_job);
  });
}

ExitCode leave_together(Session& session, const core::AgreedError& e, const Ending& ending) {
  if (session.rank() == 0) {
    const bool names_none = e.code() == ExitCode::rank_lost || (e.code() == ExitCode::bad_job && e.rank() == 0);
    spdlog::error("{}{}", names_none ? "" : "rank " + std::to_string(e.rank()) + ": ", e.what());
    ending.write(e.code(), e.what(), e.rank());
  }
  session.control().barrier();
  return e.code();
}

// What the job says of the wait for other ranks and of its folder, as far as this process can read it before it knows the others:
// they may never come. What is wrong with the job is told later, by all.
core::Config first_look(const JobArguments& job) {
  try {
    return judge_job(job, job_text(job), 1, Needs::sizes).config;
  } catch (const std::exception&) {
    return {};
  }
}

// Ranks of other hosts see each other through the run folder.
void watch_over_hosts(Session& session, const std::string& run_dir) {
  if (session.on_one_host()) return;
  const std::string folder = run_dir + "/.ranks";
  core::together(session.control(), [&] {
    if (session.rank() != 0) return;
    std::filesystem::remove_all(folder);
    io::make_folder(folder);
  });
  session.watchdog()->move_to(folder);
}

}  // namespace

ExitCode train(const TrainArguments& arguments, int& argc, char**& argv) {
  const bool launched = started_by_launcher();
  const core::Config look = launched ? first_look(arguments.job) : core::Config{};
  Ending ending(launched ? look.run.dir : "");
  Session session(argc, argv, look.monitor.collective_timeout_s, [&](ExitCode code, const std::string& cause, int rank) {
    ending.write(code, cause, rank);
  });
  core::Config config;
  try {
    session.check_launch();
    read_agreed(session, arguments, config, ending);
    if (session.watchdog()) session.watchdog()->limit(config.monitor.collective_timeout_s);
    const Device device = choose_device(session, config);
    watch_over_hosts(session, config.run.dir);
    const core::TrainOptions options{.resume = arguments.resume,
                                     .stop_after = arguments.stop_after,
                                     .stop_requested = stop_signal_kept,
                                     .reached = [&](std::int64_t step) { ending.step(step); }};
    const ExitCode code = core::train(config, parallel::mpi_world(parallel::kRoundBytes, session.journal()), device, options);
    session.control().barrier();
    return code;
  } catch (const core::AgreedError& e) {
    return leave_together(session, e, ending);
  } catch (const Error& e) {
    session.fail_alone(e.code(), e.what());
  } catch (const std::bad_alloc&) {
    session.fail_alone(ExitCode::run_failed, "out of host memory");
  } catch (const std::exception& e) {
    session.fail_alone(ExitCode::run_failed, e.what());
  }
}

}  // namespace moetrain::app
