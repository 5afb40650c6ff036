// device.cpp -- GPUs counted, shared out by local rank, and each looked at before anything is put on it.
#include "app/device.h"

#include <spdlog/spdlog.h>

#include <cstdlib>

#include "core/together.h"
#include "memory/cuda_memory.h"

namespace moetrain::app {
namespace {

std::string visible() {
  const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
  return list != nullptr ? " (CUDA_VISIBLE_DEVICES is '" + std::string(list) + "')" : "";
}

// A launcher shows a rank all GPUs of its host, or only the one that is meant for it.
int index_of(const Session& session) { return session.local_rank() % cuda::devices(); }

Device on_cpu(const Session& session, const std::string& why) {
  if (session.rank() == 0) spdlog::info("run.device auto: cpu{}", why);
  return Device::cpu;
}

}  // namespace

Device choose_device(Session& session, const core::Config& config) {
  const bool automatic = config.run.device == core::DeviceChoice::automatic;
  if constexpr (kHasCuda) {
    if (const char* reason = config.cpu_only(); automatic && reason)
      return on_cpu(session, std::string(" (") + reason + " runs there only)");
    if (config.run.device != core::DeviceChoice::cpu) {
      std::int64_t devices = cuda::devices();
      core::together(session.control(), [&] {
        if (!automatic && devices == 0)
          throw Error("run.device: cuda, but no GPU is seen here" + visible() + "; nvidia-smi tells whether the driver sees one");
      });
      session.control().all_reduce(Tensor(&devices, DType::i64, {1}), parallel::Reduction::min);
      if (devices == 0) return on_cpu(session, " (no GPU is seen" + std::string(session.size() > 1 ? " by every rank)" : ")"));
      if (const auto pair = parallel::shared_device(session.control(), index_of(session))) {
        const std::string shared = fmt::format("ranks {} and {} would share GPU {} of {}{}", pair->first, pair->second,
                                               pair->device, pair->host, visible());
        if (automatic) return on_cpu(session, " (" + shared + "; run.device: cuda lets them)");
        if (session.rank() == 0)
          spdlog::warn(
              "{}: what they exchange goes through host memory, which is for trying a job out; start one rank a GPU for speed",
              shared);
      }
      if (config.run.deterministic) {  // sums over ranks in one order, whatever NCCL would choose by load and topology
        setenv("NCCL_ALGO", "Ring", /*overwrite=*/0);
        setenv("NCCL_PROTO", "Simple", 0);
      }
      cuda::DeviceInfo mine;
      core::together(session.control(), [&] { mine = cuda::use_device(index_of(session)); });
      if (session.rank() == 0)
        spdlog::info("run.device {}: cuda, {} with {:.1f} GiB{}", automatic ? "auto" : "cuda", mine.name,
                     double(mine.memory_bytes) / double(std::int64_t(1) << 30),
                     session.size() > 1 ? fmt::format(", {} of them", session.size()) : "");
      return Device::cuda;
    }
  }
  return automatic ? on_cpu(session, "") : Device::cpu;
}

}  // namespace moetrain::app
