// bench_machine.cpp -- what this machine does in a second, written for `moetrain plan --machine`.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <filesystem>

#include "app/commands.h"
#include "core/measure_machine.h"
#include "core/together.h"
#include "io/files.h"
#include "memory/cuda_memory.h"

namespace moetrain::app {
namespace fs = std::filesystem;
namespace {

using HostName = std::array<char, 256>;

// Ranks of the first rank's host, and which of them this one is.
std::pair<int, int> ranks_here(parallel::Communicator& control) {
  HostName mine{};
  ::gethostname(mine.data(), mine.size() - 1);
  std::vector<HostName> all(std::size_t(control.size()));
  const parallel::Communicator::Gather piece{&mine, all.data(), sizeof mine};
  control.all_gather({&piece, 1});
  int count = 0, before = 0;
  for (std::size_t r = 0; r < all.size(); ++r) {
    count += all[r] == all[0];
    before += all[r] == mine && int(r) < control.rank();
  }
  if (control.size() % count != 0)
    throw Error("bench --machine: " + std::to_string(control.size()) + " ranks are not as many on every host");
  return {count, before};
}

}  // namespace

ExitCode bench_machine(const BenchArguments& a, parallel::Communicator& control) {
  core::together(control, [&] {
    if (fs::exists(a.machine)) throw Error(a.machine + ": exists already", ExitCode::bad_job);
    if (const fs::path folder = fs::absolute(a.machine).parent_path(); !fs::is_directory(folder))
      throw Error(a.machine + ": there is no folder " + folder.string(), ExitCode::bad_job);
  });
  const auto [local_ranks, local_rank] = ranks_here(control);
  Device device = Device::cpu;
  core::together(control, [&, local = local_rank] {
    if constexpr (kHasCuda)
      if (const int seen = cuda::devices(); seen > 0) {
        if (local >= seen)
          throw Error("bench --machine: rank " + std::to_string(local) + " of this host has no GPU; " + std::to_string(seen) +
                      " are seen");
        cuda::use_device(local);
        device = Device::cuda;
      }
  });
  const core::Machine machine =
      core::measure_machine(fs::path(a.machine).stem(), device, control, local_ranks, [&](const std::string& what) {
        if (control.rank() == 0) spdlog::info("{}", what);
      });
  core::together(control, [&] {
    if (control.rank() != 0) return;
    const std::string links =
        control.size() == 1 ? "links are those of copies in its memory" : "links are those of one host, between hosts too";
    io::write_text_atomically(a.machine, "# Measured by moetrain bench --machine on " + std::to_string(control.size()) +
                                             " ranks, " + std::to_string(local_ranks) + " a host" +
                                             (control.size() == local_ranks ? "; " + links : "") +
                                             ". messages.drag is not measured.\n" + io::to_yaml(core::machine_to_yaml(machine)));
    spdlog::info("{}: written", a.machine);
  });
  return ExitCode::done;
}

}  // namespace moetrain::app
