// main.cpp -- the program: parses, runs a command, and turns an Error into one log line and an exit code.
#include <spdlog/spdlog.h>

#include "app/cli.h"
#include "app/commands.h"
#include "app/session.h"

namespace {

using namespace moetrain;

int run(const app::Command& command, int& argc, char**& argv) {
  if (const auto* train = std::get_if<app::TrainArguments>(&command)) return int(app::train(*train, argc, argv));
  app::release_stop_signals();
  if (const auto* check = std::get_if<app::CheckArguments>(&command)) return int(app::check(*check));
  if (const auto* plan = std::get_if<app::PlanArguments>(&command)) return int(app::plan(*plan));
  return int(app::inspect(std::get<app::InspectArguments>(command)));
}

// Every rank has the same wrong command line; one of them says so.
int refuse(const Error& wrong, int& argc, char**& argv) {
  if (!app::started_by_launcher()) {
    spdlog::error("moetrain: {}", wrong.what());
    return int(wrong.code());
  }
  app::Session session(argc, argv);
  if (session.rank() == 0) spdlog::error("moetrain: {}", wrong.what());
  session.control().barrier();
  return int(wrong.code());
}

}  // namespace

int main(int argc, char** argv) {
  app::keep_stop_signals();
  app::open_log(0);
  std::optional<app::Command> command;
  try {
    command = app::parse(argc, argv);
  } catch (const Error& wrong) {
    return refuse(wrong, argc, argv);
  }
  try {
    return command ? run(*command, argc, argv) : int(ExitCode::done);
  } catch (const Error& e) {
    spdlog::error("{}", e.what());
    return int(e.code());
  } catch (const std::exception& e) {
    spdlog::error("{}", e.what());
    return int(ExitCode::run_failed);
  }
}
