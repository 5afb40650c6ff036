// device.h -- which device a rank trains on.
#pragma once
#include "app/session.h"
#include "core/config.h"

namespace moetrain::app {

// The device that the job asks for, the same kind on every rank; on CUDA each rank has made one GPU of its host its own. `auto` is
// CUDA where every rank has a GPU for itself, else the CPU, and says so. Collective. Errors on all ranks: no GPU where the job
// wants one, a GPU this build has no kernels for. Ranks that share a GPU, where the job asks for CUDA, are warned of.
Device choose_device(Session& session, const core::Config& config);

}  // namespace moetrain::app
