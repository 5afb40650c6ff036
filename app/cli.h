// cli.h -- the commands and their few flags, as values; no option of a training run lives here, those are keys of the job file.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace moetrain::app {

struct JobArguments {
  std::string path;
  std::vector<std::string> set;  // section.key=value, applied after the file
};
struct TrainArguments {
  JobArguments job;
  std::string resume = "auto";
  std::int64_t stop_after = 0;  // 0: all steps
};
struct CheckArguments {
  JobArguments job;
  int ranks = 0;  // 0: whatever the job's axes make up
};
struct PlanArguments {
  JobArguments job;
  int ranks = 0;
  std::optional<std::int64_t> device_memory, host_memory;  // bytes
  std::string machine;                                     // a name or a file; empty: that of the job's device, where there is one
  bool search = false, json = false;
};
struct InspectArguments {
  std::string path;
};
struct ImportArguments {
  std::string folder, out;
  std::string job;  // file to be written; empty: none
};
struct ExportArguments {
  std::string checkpoint, to, out;
  bool merge = false;                      // of hf
  std::string experts = "separate", base;  // of peft
};
struct BenchArguments {
  std::vector<std::string> names;  // empty: all
  std::string machine;             // file to be written; empty: none
  bool json = false;
};
struct VerifyArguments {
  JobArguments job;
};
struct Answer {
  std::string text;  // help or the version, as asked for
};
using Command = std::variant<TrainArguments, CheckArguments, PlanArguments, InspectArguments, ImportArguments, ExportArguments,
                             BenchArguments, VerifyArguments, Answer>;

Command parse(int argc, const char* const* argv);  // a wrong command line is an Error of one line

}  // namespace moetrain::app
