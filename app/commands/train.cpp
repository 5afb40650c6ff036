// train.cpp -- the run under MPI: a job that all ranks agree on, and an end in which every failure is told once.
#include <spdlog/spdlog.h>

#include <filesystem>
#include <new>
#include <optional>

#include "app/commands.h"
#include "app/device.h"
#include "app/job.h"
#include "app/session.h"
#include "core/together.h"
#include "core/train_loop.h"
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

// How the run ended, told by the rank that it ended on.
struct Ending {
  std::string dir;                   // run.dir; empty until the job says which
  std::optional<std::int64_t> step;  // that the run stood at
};

void read_agreed(Session& session, const TrainArguments& arguments, core::Config& config, Ending& ending) {
  const std::string text = shared_text(session, arguments.job);
  core::together(session.control(), [&] {
    JudgedJob judged = judge_job(arguments.job, text, session.size(), Needs::everything);
    config = std::move(judged.config);
    ending.dir = config.run.dir;
    if (!judged.faults.empty()) throw Error(judged.faults, ExitCode::bad_job);
    const std::string& from = arguments.resume;
    if (from != "auto" && from != "never" && !std::filesystem::exists(from))
      throw Error("--resume " + from + ": no such checkpoint", ExitCode::bad_job);
  });
}

// A job that never ran leaves no folder behind, but whoever watches an old one learns why nothing happens.
void write_exit(const Ending& ending, ExitCode code, const std::string& cause, int rank) {
  std::error_code failed;
  if (ending.dir.empty()) return;
  if (code != ExitCode::bad_job) std::filesystem::create_directories(ending.dir, failed);
  if (!std::filesystem::is_directory(ending.dir, failed)) return;
  try {
    io::write_exit(ending.dir, code, cause, rank, ending.step);
  } catch (const std::exception& e) {
    spdlog::warn("{}/exit.json was not written: {}", ending.dir, e.what());
  }
}

ExitCode leave_together(Session& session, const core::AgreedError& e, const Ending& ending) {
  if (session.rank() == 0) {
    const bool of_the_job = e.code() == ExitCode::bad_job && e.rank() == 0;
    spdlog::error("{}{}", of_the_job ? "" : "rank " + std::to_string(e.rank()) + ": ", e.what());
    write_exit(ending, e.code(), e.what(), e.rank());
  }
  session.control().barrier();
  return e.code();
}

// The others may wait for this rank in a collective, so it ends them all.
[[noreturn]] void leave_alone(Session& session, const std::string& cause, ExitCode code, const Ending& ending) {
  spdlog::error("rank {}: {}", session.rank(), cause);
  write_exit(ending, code, cause, session.rank());
  session.abort(int(code));
}

}  // namespace

ExitCode train(const TrainArguments& arguments, int& argc, char**& argv) {
  Session session(argc, argv);
  core::Config config;
  Ending ending;
  try {
    session.check_launch();
    read_agreed(session, arguments, config, ending);
    const Device device = choose_device(session, config);
    const core::TrainOptions options{.resume = arguments.resume,
                                     .stop_after = arguments.stop_after,
                                     .stop_requested = stop_signal_kept,
                                     .reached = [&](std::int64_t step) { ending.step = step; }};
    const ExitCode code = core::train(config, parallel::mpi_world(), device, options);
    session.control().barrier();
    return code;
  } catch (const core::AgreedError& e) {
    return leave_together(session, e, ending);
  } catch (const Error& e) {
    leave_alone(session, e.what(), e.code(), ending);
  } catch (const std::bad_alloc&) {
    leave_alone(session, "out of host memory", ExitCode::run_failed, ending);
  } catch (const std::exception& e) {
    leave_alone(session, e.what(), ExitCode::run_failed, ending);
  }
}

}  // namespace moetrain::app
