// export_peft.h -- the adapters of a checkpoint as a folder that the peft library loads beside the model they were trained on.
#pragma once
#include <cstdint>
#include <string>

#include "parallel/communicator.h"

namespace moetrain::core {

// How the model that is to take them holds a layer's experts.
enum class ExpertLayout : std::uint8_t {
  separate,  // modules experts.E.w1, w2, w3 under the names of the public checkpoints; if all three have adapters in every layer,
             // adapter_config.json also tells newer peft (0.21) how to stack them for the class below
  fused      // the tensors experts.gate_up_proj (E, 2 F, D) and experts.down_proj (E, D, F) of transformers' KimiLinearForCausalLM
};

struct PeftOptions {
  ExpertLayout experts = ExpertLayout::separate;
  std::string base;  // base_model_name_or_path, a folder's name for its prefix too; empty: the run's model.init_from
};

// Collective: adapter_config.json and adapter_model.safetensors, every factor in the type it is stored in.
//   separate:  A (r, I) and B (O, r) of every expert; an A that experts share is written for each
//   fused:     A (E R, I), row e R + k, and B (O, R E), column k E + e; R = r, and 2 r where gate and up both have adapters, whose
//              B are then the two blocks of a diagonal: its scale stays, by an alpha of its own in alpha_pattern
// An Error, by name, for a checkpoint without adapters, for what was trained beside them, and for fused experts of a model that
// the library has no class for. `out` appears whole or not at all; it must not be there. checkpoint: a step folder.
void export_adapters(parallel::Communicator& control, const std::string& checkpoint, const std::string& out,
                     const PeftOptions& options);

}  // namespace moetrain::core
