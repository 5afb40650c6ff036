// job.cpp -- from a job file to a Config without faults, or to the list of all of them.
#include "app/job.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/plan.h"
#include "io/files.h"

namespace moetrain::app {
namespace {

std::string line_of(const std::string& path, const core::Fault& f) {
  return path + (f.line > 0 ? ":" + std::to_string(f.line) : "") + ": " + (f.key.empty() ? "" : f.key + ": ") + f.text;
}

int line_of_key(const io::YamlNode& job, const char* section, const char* key) {
  const io::YamlNode* keys = job.find(section);
  const io::YamlNode* value = keys != nullptr ? keys->find(key) : nullptr;
  return value != nullptr ? value->key_line : 0;
}

bool about(const core::Fault& f, const char* key) { return f.key.rfind(key, 0) == 0; }

}  // namespace

JudgedJob judge_job(const JobArguments& job, const std::string& text, int ranks, Needs needs) {
  const io::YamlNode tree = io::parse_yaml(text, job.path);
  std::vector<core::Fault> faults;
  JudgedJob judged;
  judged.config = core::read_config(tree, job.set, std::filesystem::path(job.path).parent_path().string(), faults);
  core::check_config(judged.config, tree, ranks, faults);
  const bool device_judged = std::any_of(faults.begin(), faults.end(), [](const core::Fault& f) { return about(f, "run.device"); });
  if (judged.config.run.device == core::DeviceChoice::cuda && !device_judged)
    faults.push_back({line_of_key(tree, "run", "device"), "run.device", "cuda: this version trains on the CPU; write cpu or auto"});
  const std::string& dir = judged.config.run.dir;
  std::error_code unknown;  // what cannot be looked at is left to the run
  if (std::filesystem::exists(dir, unknown) && !std::filesystem::is_directory(dir, unknown))
    faults.push_back({line_of_key(tree, "run", "dir"), "run.dir", dir + ": is there, but no folder"});
  try {
    if (faults.empty()) core::count_parameters(judged.config);
  } catch (const Error& wrong) {  // patterns can only be judged against the names of the model
    faults.push_back({line_of_key(tree, "training", "trainable"), "", wrong.what()});
  }
  if (needs == Needs::sizes)
    std::erase_if(faults, [](const core::Fault& f) {
      return about(f, "data.train") || about(f, "data.eval") || about(f, "run.dir") || about(f, "run.device");
    });
  std::stable_sort(faults.begin(), faults.end(), [](const core::Fault& a, const core::Fault& b) { return a.line < b.line; });
  for (const core::Fault& f : faults) judged.faults += line_of(job.path, f) + "\n";
  if (!faults.empty()) judged.faults += std::to_string(faults.size()) + (faults.size() == 1 ? " fault" : " faults");
  return judged;
}

core::Config read_job(const JobArguments& job, int ranks, Needs needs) {
  JudgedJob judged = judge_job(job, job_text(job), ranks, needs);
  if (!judged.faults.empty()) throw Error(judged.faults, ExitCode::bad_job);
  return std::move(judged.config);
}

std::string job_text(const JobArguments& job) {
  try {
    return io::read_text(job.path);
  } catch (const Error& wrong) {
    throw Error(wrong.what(), ExitCode::bad_job);
  }
}

}  // namespace moetrain::app
