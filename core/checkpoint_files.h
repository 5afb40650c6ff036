// checkpoint_files.h -- the files of a checkpoint: their names and checksums, written so that it is complete or absent, and
// verified.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/trainer.h"
#include "core/weight_pieces.h"
#include "io/files.h"
#include "io/hdf5_file.h"

namespace moetrain::core {

std::string view_path(const std::string& checkpoint);  // the one view over all shards
std::string shard_name(int rank);
std::string layout_text(const Config& config);

struct CheckpointHeader {  // what a view holds besides tensors
  Progress progress;
  std::uint64_t seed = 0;
  std::string job, layout;
};

// Writes the rows of one rank, or declares all tensors over the ranks' shards.
using WriteFile = std::function<void(io::Hdf5File&)>;

// Collective: the step folder `path` appears with all its files on the disk, or what was there stays. Fails on every rank or on
// none.
void write_checkpoint(parallel::Communicator& control, const std::string& path, const CheckpointHeader& header,
                      const WriteFile& shard, const WriteFile& view);

Config config_of(const io::Hdf5File& view);  // the job in it, of which only the sections model and lora are judged
// Its values by parameter of `table`, from a master where there is one; adapters are not merged.
WeightSource weights_of(std::shared_ptr<const io::Hdf5File> view, std::shared_ptr<const ParamTable> table);

// The type of a parameter in it; an Error where it is missing or has another shape.
DType dtype_in(const io::Hdf5File& view, const Param& p);

struct FileSum {
  std::string file;
  io::Checksum sum;
};
// The view's own file is verified, then what it says about the shards is returned.
std::vector<FileSum> verified_view(const std::string& checkpoint);
void verify(const std::string& checkpoint, const FileSum& f);
// Collective: each rank its share of the files, since a checkpoint of many terabytes is read once.
void verify_shards(parallel::Communicator& control, const std::string& checkpoint, const std::vector<FileSum>& shards);
// Collective: the whole checkpoint is verified, and nothing stands yet where it is to be exported to.
void verify_for_export(parallel::Communicator& control, const std::string& checkpoint, const std::string& out);

}  // namespace moetrain::core
