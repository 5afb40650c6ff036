// verify.cpp -- the table of a job's operators on this machine's GPU, each beside the f64 reference, that is looked at before a new
// machine is trusted.
#include "app/verify/verify.h"

#include <cstdio>

#include "app/commands.h"
#include "app/job.h"
#include "memory/cuda_memory.h"

namespace moetrain::app {
namespace {

void print_heading() {
  std::printf("%-42s %-32s %-5s %-18s %9s %9s %9s %9s %11s\n", "operator", "shape", "dtype", "worst output", "element", "allowed",
              "norm", "allowed", "ms");
}

void print_line(const Verdict& f) {
  std::printf("%-42s %-32s %-5s %-18s %9.1e %9.1e %9.1e %9.1e %11.3f  %s\n", f.op.c_str(), f.shape.c_str(), name_of(f.dtype),
              f.output.c_str(), f.gap.element, f.bound.element, f.gap.norm, f.bound.norm, f.ms, f.right ? "ok" : "WRONG");
  std::fflush(stdout);
}

// The GPU's name; an Error where there is none that this build can use.
std::string use_gpu() {
  if constexpr (kHasCuda) {
    if (cuda::devices() == 0) throw Error("verify: no GPU is seen here; nvidia-smi tells whether the driver sees one");
    return cuda::use_device(0).name;
  }
  throw Error("verify: this build has no CUDA; there is no GPU to verify");
}

}  // namespace

ExitCode verify(const VerifyArguments& arguments) {
  const core::Config config = read_job(arguments.job, 0, Needs::sizes);
  if (config.run.dtype == DType::f64)
    throw Error(arguments.job.path + ": run.dtype: fp64 runs on the CPU only, which is the reference itself", ExitCode::bad_job);
  std::printf("%s: %s\n", config.run.name.c_str(), use_gpu().c_str());
  print_heading();
  int right = 0, all = 0;
  verify_all({.device = Device::cuda, .config = config, .tell = [&](const Verdict& found) {
                ++all;
                right += found.right;
                print_line(found);
              }});
  std::printf("%d of %d operators are right\n", right, all);
  return right == all ? ExitCode::done : ExitCode::run_failed;
}

}  // namespace moetrain::app
