// import.h -- weights from elsewhere: a Hugging Face folder becomes a checkpoint, or a run starts from either.
#pragma once
#include <string>

#include "core/trainer.h"

namespace moetrain::core {

// Collective: each rank reads its rows and writes its shard; memory holds some tens of MiB at a time. `out` appears whole or not at
// all, a checkpoint at step 0 of weights alone; it must not be there. Returns the job in it: the model of the folder, and run.dtype
// the type of its matrices. Nothing is converted but MXFP4 and F16, whose values bf16 and fp32 hold.
Config import_folder(parallel::Communicator& control, const std::string& folder, const std::string& out);

// Collective: the weights of a Hugging Face folder or of a checkpoint (its master weights, where the run has them too), converted
// to run.dtype. Its model must be that of the job. Fails on every rank or on none, before any value is used.
void initialize_from(Trainer& trainer, const std::string& path);

}  // namespace moetrain::core
