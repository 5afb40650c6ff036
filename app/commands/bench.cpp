// bench.cpp -- the table of operators on this machine's GPU, each beside the time that its bytes and FLOPs need at least.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>

#include "app/commands.h"
#include "io/json.h"
#include "memory/cuda_memory.h"
#ifdef MOETRAIN_HAS_CUDA
#include "app/bench/bench.h"
#endif

namespace moetrain::app {

#ifdef MOETRAIN_HAS_CUDA
namespace {

struct Named {
  const char* name;
  void (*run)(const Ceilings&, const Report&);
};
constexpr Named kBenches[] = {{"linear", bench_linear},
                              {"grouped_linear", bench_grouped_linear},
                              {"kda", bench_kda},
                              {"attention", bench_attention},
                              {"sparse_attention", bench_sparse_attention},
                              {"indexer", bench_indexer},
                              {"attn_res", bench_attn_res},
                              {"router", bench_router},
                              {"permute", bench_permute},
                              {"adamw", bench_adamw},
                              {"cross_entropy", bench_cross_entropy}};

void print_line(const Figure& f, double floor_ms) {
  std::printf("%-34s %-40s %9.3f ms  floor %8.3f ms  %5.2f x  %7.1f TFLOP/s  %7.1f GB/s  %8.1f MiB scratch\n", f.op.c_str(),
              f.shape.c_str(), f.ms, floor_ms, f.ms / floor_ms, f.flops / f.ms * 1e-9, f.bytes / f.ms * 1e-6,
              double(f.scratch_bytes) / double(1 << 20));
  std::fflush(stdout);
}

}  // namespace

ExitCode bench(const BenchArguments& arguments) {
  std::string known;
  for (const Named& b : kBenches) known += std::string(known.empty() ? "" : ", ") + b.name;
  for (const std::string& name : arguments.names)
    if (std::none_of(std::begin(kBenches), std::end(kBenches), [&](const Named& b) { return name == b.name; }))
      throw Error("bench: no operator " + name + "; there are " + known, ExitCode::bad_job);
  if (cuda::devices() == 0) throw Error("bench: no GPU is seen here; nvidia-smi tells whether the driver sees one");
  const cuda::DeviceInfo device = cuda::use_device(0);
  const Ceilings ceilings = measure_ceilings();
  io::Json lines = io::Json::array();
  if (!arguments.json)
    std::printf("%s; copy %.2f TB/s, bf16 product %.0f TFLOP/s (8192^3, random data)\n", device.name.c_str(),
                ceilings.copy_bytes_per_s * 1e-12, ceilings.bf16_flops_per_s * 1e-12);
  const auto report = [&](const Figure& f) {
    const double floor_ms = 1e3 * std::max(f.flops / ceilings.bf16_flops_per_s, f.bytes / ceilings.copy_bytes_per_s);
    if (!arguments.json) return print_line(f, floor_ms);
    lines.push_back({{"op", f.op},
                     {"shape", f.shape},
                     {"ms", f.ms},
                     {"floor_ms", floor_ms},
                     {"flops", f.flops},
                     {"bytes", f.bytes},
                     {"scratch_bytes", f.scratch_bytes}});
  };
  for (const Named& b : kBenches)
    if (arguments.names.empty() || std::count(arguments.names.begin(), arguments.names.end(), b.name) > 0) b.run(ceilings, report);
  if (arguments.json)
    std::printf("%s\n", io::Json({{"device", device.name},
                                  {"copy_bytes_per_s", ceilings.copy_bytes_per_s},
                                  {"bf16_flops_per_s", ceilings.bf16_flops_per_s},
                                  {"figures", lines}})
                            .dump(2)
                            .c_str());
  return ExitCode::done;
}
#else
ExitCode bench(const BenchArguments&) { throw Error("bench: this build has no CUDA", ExitCode::bad_job); }
#endif

}  // namespace moetrain::app
