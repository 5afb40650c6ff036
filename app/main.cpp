// main.cpp -- the program: parses, runs a command, and turns an Error into one log line and an exit code.
#include <spdlog/spdlog.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <new>

#include "app/cli.h"
#include "app/commands.h"
#include "app/session.h"
#include "core/together.h"

namespace {

using namespace moetrain;

int failed(const std::string& cause, ExitCode code) {
  spdlog::error("{}", cause);
  return int(code);
}

int told(const std::function<ExitCode()>& body) {
  try {
    const int code = int(body());
    std::cout.flush();
    if (std::fflush(stdout) != 0 || std::ferror(stdout) || !std::cout)
      throw Error(std::string("standard output cannot be written: ") + std::strerror(errno));
    return code;
  } catch (const Error& e) {
    return failed(e.what(), e.code());
  } catch (const std::bad_alloc&) {
    return failed("out of host memory", ExitCode::run_failed);
  } catch (const std::exception& e) {
    return failed(e.what(), ExitCode::run_failed);
  }
}

// What is no run is done and said by one rank; the others wait for its exit code and leave with it.
int by_one_rank(const std::function<ExitCode(int ranks)>& body, int& argc, char**& argv) {
  if (!app::started_by_launcher()) {
    app::release_stop_signals();
    return told([&] { return body(1); });
  }
  app::Session session(argc, argv);
  app::release_stop_signals();
  int code = 0;
  if (session.rank() == 0) code = told([&] { return body(session.size()); });
  std::fflush(stdout);
  session.control().broadcast(&code, sizeof code, 0);
  return code;
}

// What all ranks do together. A failure that they agree on is told once; one of a single rank ends the others, who wait for it.
int by_all_ranks(const std::function<ExitCode(parallel::Communicator&)>& body, int& argc, char**& argv) {
  if (!app::started_by_launcher()) {
    app::release_stop_signals();
    return told([&] { return body(*parallel::solo()); });
  }
  app::Session session(argc, argv);
  app::release_stop_signals();
  int code = 0;
  try {
    session.check_launch();
    code = int(body(session.control()));
  } catch (const core::AgreedError& e) {
    code = int(e.code());
    if (session.rank() == 0) failed(e.what(), e.code());
  } catch (const std::exception& e) {
    session.fail_alone(ExitCode::run_failed, e.what());
  }
  session.control().barrier();
  return code;
}

ExitCode run(const app::Command& command, int ranks) {
  if (const auto* check = std::get_if<app::CheckArguments>(&command)) return app::check(*check, ranks);
  if (const auto* plan = std::get_if<app::PlanArguments>(&command)) return app::plan(*plan);
  if (const auto* inspect = std::get_if<app::InspectArguments>(&command)) return app::inspect(*inspect);
  if (const auto* bench = std::get_if<app::BenchArguments>(&command)) return app::bench(*bench);
  if (const auto* verify = std::get_if<app::VerifyArguments>(&command)) return app::verify(*verify);
  std::cout << std::get<app::Answer>(command).text;
  return ExitCode::done;
}

}  // namespace

int main(int argc, char** argv) {
  app::keep_stop_signals();
  std::signal(SIGXFSZ, SIG_IGN);  // a write past the size that files may have is to fail with its reason, not to end us without a word
  app::open_log(0);
  app::Command command;
  try {
    command = app::parse(argc, argv);
  } catch (const Error& wrong) {
    const Error refusal("moetrain: " + std::string(wrong.what()), wrong.code());
    return by_one_rank([&](int) -> ExitCode { throw refusal; }, argc, argv);
  }
  if (const auto* train = std::get_if<app::TrainArguments>(&command)) return told([&] { return app::train(*train, argc, argv); });
  if (const auto* import = std::get_if<app::ImportArguments>(&command))
    return by_all_ranks([&](parallel::Communicator& control) { return app::import(*import, control); }, argc, argv);
  if (const auto* exports = std::get_if<app::ExportArguments>(&command))
    return by_all_ranks([&](parallel::Communicator& control) { return app::export_to(*exports, control); }, argc, argv);
  if (const auto* bench = std::get_if<app::BenchArguments>(&command); bench && !bench->machine.empty())
    return by_all_ranks([&](parallel::Communicator& control) { return app::bench_machine(*bench, control); }, argc, argv);
  return by_one_rank([&](int ranks) { return run(command, ranks); }, argc, argv);
}
