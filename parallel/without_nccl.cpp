// without_nccl.cpp -- the device group of a build without NCCL: one rank.
#include "parallel/communicator.h"

namespace moetrain::parallel {

std::unique_ptr<Communicator> nccl_on_devices(std::unique_ptr<Communicator> host) {
  if (host->size() > 1)
    throw Error("this build has no NCCL, so it trains on one GPU only, not on " + std::to_string(host->size()) +
                    " ranks; install libnccl-dev and build again, or set run.device: cpu",
                ExitCode::bad_job);
  return solo(Device::cuda);
}

}  // namespace moetrain::parallel
