// job.h -- a job file read and judged whole, for every command that takes one.
#pragma once
#include <string>

#include "app/cli.h"
#include "core/config.h"

namespace moetrain::app {

enum class Needs : std::uint8_t {
  everything,  // the data must be there and the device usable
  sizes        // what a plan needs: neither data nor device
};

struct JudgedJob {
  core::Config config;  // as far as it could be understood; run.dir is empty when it could not
  std::string faults;   // every one, a line each with file, line and key, then their number; empty: none
};

std::string job_text(const JobArguments& job);  // a file that cannot be read is a fault of the job
JudgedJob judge_job(const JobArguments& job, const std::string& text, int ranks, Needs needs);
core::Config read_job(const JobArguments& job, int ranks, Needs needs);  // faults are thrown

}  // namespace moetrain::app
