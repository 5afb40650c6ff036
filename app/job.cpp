// job.cpp -- from a job file to a Config without faults, or to the list of all of them.
#include "app/job.h"

#include <algorithm>
#include <filesystem>

#include "core/plan.h"
#include "io/files.h"
#include "io/folders.h"

namespace moetrain::app {
namespace {

std::string line_of(const std::string& path, const core::Fault& f) {
  if (!f.set.empty()) return "--set " + f.set + ": " + f.text;
  return path + (f.line > 0 ? ":" + std::to_string(f.line) : "") + ": " + (f.key.empty() ? "" : f.key + ": ") + f.text;
}

int line_of_key(const io::YamlNode& job, const char* section, const char* key) {
  const io::YamlNode* keys = job.find(section);
  const io::YamlNode* value = keys != nullptr ? keys->find(key) : nullptr;
  return value != nullptr ? value->key_line : 0;
}

bool about(const core::Fault& f, const char* key) { return f.key.rfind(key, 0) == 0; }

void judge_values(const JobArguments& job, const io::YamlNode& tree, int ranks, core::Config& config,
                  std::vector<core::Fault>& faults) {
  config = core::read_config(tree, job.set, std::filesystem::path(job.path).parent_path().string(), faults);
  core::check_config(config, tree, ranks, faults);
  const auto judged = [&](const char* key) {
    return std::any_of(faults.begin(), faults.end(), [&](const core::Fault& f) { return about(f, key); });
  };
  if (config.run.device == core::DeviceChoice::cuda && !kHasCuda && !judged("run.device"))
    faults.push_back({line_of_key(tree, "run", "device"), "run.device", "cuda: this build has no CUDA; write cpu or auto, or build where nvcc is found"});
  if (judged("run.dir") || std::any_of(faults.begin(), faults.end(), [](const core::Fault& f) { return f.key == "run"; }))
    config.run.dir.clear();  // unknown: nothing is written in the default's place
  else if (const std::string why = io::folder_fault(config.run.dir); !why.empty())
    faults.push_back({line_of_key(tree, "run", "dir"), "run.dir", "'" + config.run.dir + "' cannot be the run folder: " + why});
  try {
    if (!judged("model") && !judged("parallel") && !judged("training") && !judged("lora")) core::count_parameters(config);
  } catch (const Error& wrong) {  // patterns can only be judged against the names of the model
    const std::string text = wrong.what();
    const auto line = [&](const char* section, const char* key) {
      return text.starts_with(std::string(section) + "." + key) ? line_of_key(tree, section, key) : 0;
    };
    faults.push_back(
        {std::max({line("training", "trainable"), line("lora", "rank"), line("lora", "target"), line("lora", "dropout")}), "",
         text});
  }
}

}  // namespace

JudgedJob judge_job(const JobArguments& job, const std::string& text, int ranks, Needs needs) {
  JudgedJob judged;
  std::vector<io::YamlFault> unclear;
  const auto tree = io::parse_yaml(text, unclear);
  std::vector<core::Fault> faults;
  for (io::YamlFault& f : unclear) faults.push_back({f.line, "", std::move(f.text)});
  if (tree)
    judge_values(job, *tree, ranks, judged.config, faults);
  else
    judged.config.run.dir.clear();
  if (needs == Needs::sizes)
    std::erase_if(faults, [](const core::Fault& f) {
      return about(f, "data.train") || about(f, "data.eval") || about(f, "model.init_from") || about(f, "run.dir") || about(f, "run.device");
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
