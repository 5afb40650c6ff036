// export.h -- a checkpoint as a Hugging Face folder.
#pragma once
#include <cstdint>
#include <string>

#include "parallel/communicator.h"

namespace moetrain::core {

struct ExportOptions {
  bool merge = false;                        // of a checkpoint with adapters, and of no other: weights with them merged in
  std::int64_t file_bytes = 5'000'000'000;  // of the tensors of a file, if it holds more than one
};

// Collective: each rank writes some of the files, a tensor at a time. The text model under its public names without a prefix,
// experts one by one, A_log in its public shape, every tensor in the type it is stored in: importing the folder gives the same
// weights bit by bit. `out` appears whole or not at all; it must not be there. checkpoint: a step folder.
void export_folder(parallel::Communicator& control, const std::string& checkpoint, const std::string& out, const ExportOptions& options = {});

}  // namespace moetrain::core
