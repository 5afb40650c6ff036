// train.cpp -- the run under MPI: a job that all ranks agree on, and an end in which every failure is told once.
#include <spdlog/spdlog.h>

#include <filesystem>

#include "app/commands.h"
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

void read_agreed(Session& session, const TrainArguments& arguments, core::Config& config) {
  const std::string text = shared_text(session, arguments.job);
  core::together(session.control(), [&] {
    JudgedJob judged = judge_job(arguments.job, text, session.size(), Needs::everything);
    config = std::move(judged.config);
    if (!judged.faults.empty()) throw Error(judged.faults, ExitCode::bad_job);
    const std::string& from = arguments.resume;
    if (from != "auto" && from != "never" && !std::filesystem::exists(from))
      throw Error("--resume " + from + ": no such checkpoint", ExitCode::bad_job);
  });
}

// A job that never ran leaves no folder behind, but whoever watches an old one learns why nothing happens.
void write_exit(const std::string& dir, ExitCode code, const std::string& cause, int rank) {
  try {
    if (dir.empty() || (code == ExitCode::bad_job && !std::filesystem::is_directory(dir))) return;
    std::filesystem::create_directories(dir);
    io::write_exit(dir, code, cause, rank, std::nullopt);
  } catch (const std::exception& e) {
    spdlog::warn("{}/exit.json was not written: {}", dir, e.what());
  }
}

ExitCode leave_together(Session& session, const core::AgreedError& e, const std::string& dir) {
  if (session.rank() == 0) {
    const bool of_the_job = e.code() == ExitCode::bad_job && e.rank() == 0;
    spdlog::error("{}{}", of_the_job ? "" : "rank " + std::to_string(e.rank()) + ": ", e.what());
    write_exit(dir, e.code(), e.what(), e.rank());
  }
  session.control().barrier();
  return e.code();
}

[[noreturn]] void leave_alone(Session& session, const std::string& cause, ExitCode code, const std::string& dir) {
  spdlog::error("rank {}: {}", session.rank(), cause);
  write_exit(dir, code, cause, session.rank());
  session.abort(int(code));
}

}  // namespace

ExitCode train(const TrainArguments& arguments, int& argc, char**& argv) {
  Session session(argc, argv);
  core::Config config;
  const std::string& dir = config.run.dir;
  config.run.dir.clear();  // until the job says which
  try {
    read_agreed(session, arguments, config);
    if (session.rank() == 0 && config.run.device == core::DeviceChoice::automatic) spdlog::info("run.device auto: cpu");
    const core::TrainOptions options{
        .resume = arguments.resume, .stop_after = arguments.stop_after, .stop_requested = stop_signal_kept};
    const ExitCode code = core::train(config, parallel::mpi_world(), Device::cpu, options);
    session.control().barrier();
    return code;
  } catch (const core::AgreedError& e) {
    return leave_together(session, e, dir);
  } catch (const Error& e) {
    leave_alone(session, e.what(), e.code(), dir);
  } catch (const std::bad_alloc&) {
    leave_alone(session, "out of host memory", ExitCode::run_failed, dir);
  } catch (const std::exception& e) {
    leave_alone(session, e.what(), ExitCode::run_failed, dir);
  }
}

}  // namespace moetrain::app
