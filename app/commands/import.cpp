// import.cpp -- a Hugging Face folder becomes a checkpoint, and the model section of a job that starts from it.
#include "core/import.h"

#include <filesystem>

#include "app/commands.h"
#include "core/together.h"
#include "io/files.h"

namespace moetrain::app {
namespace fs = std::filesystem;
namespace {

io::YamlNode map_of(std::string key, io::YamlNode value) {
  io::YamlNode map;
  map.kind = io::YamlNode::map;
  map.entries.emplace_back(std::move(key), std::move(value));
  return map;
}

// The model as it was understood; whatever else a job needs is the user's to say. The bias that selects experts stays as it was
// trained.
std::string job_of(const ImportArguments& a, core::Config config) {
  config.model.init_from = a.out;
  config.moe.balance = core::Balance::none;
  const io::YamlNode all = core::config_to_yaml(config);
  const auto value = [&](const char* section, const char* key) { return map_of(key, *all.find(section)->find(key)); };
  io::YamlNode job = map_of("run", value("run", "dtype"));
  job.entries.emplace_back("model", *all.find("model"));
  job.entries.emplace_back("moe", value("moe", "balance"));
  return "# The model of " + a.folder +
         " and its weights. data.train, data.sequence_length and training.steps have to be added.\n" + io::to_yaml(job);
}

}  // namespace

ExitCode import(const ImportArguments& a, parallel::Communicator& control) {
  core::together(control, [&] {
    if (a.job.empty()) return;
    if (fs::exists(a.job)) throw Error(a.job + ": exists already", ExitCode::bad_job);
    const fs::path job = fs::absolute(a.job).lexically_normal(), out = fs::absolute(a.out + "/").lexically_normal().parent_path();
    if (job == out) throw Error(a.job + ": is to be the checkpoint too", ExitCode::bad_job);
    if (!fs::is_directory(job.parent_path()))
      throw Error(a.job + ": there is no folder " + job.parent_path().string(), ExitCode::bad_job);
  });
  const core::Config config = core::import_folder(control, a.folder, a.out);
  core::together(control, [&] {
    if (control.rank() == 0 && !a.job.empty()) io::write_text_atomically(a.job, job_of(a, config));
  });
  return ExitCode::done;
}

}  // namespace moetrain::app
