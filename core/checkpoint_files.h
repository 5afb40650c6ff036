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
#include "core/whole_folder.h"
#include "io/files.h"
#include "io/hdf5_file.h"

namespace moetrain::core {

std::string view_path(const std::string& checkpoint);  // the one view over all shards
std::string file_name(const char* kind, int rank);  // of a shard
std::string layout_text(const Config& config);

struct CheckpointHeader {  // what a view holds besides tensors
  Progress progress;
  std::uint64_t seed = 0;
  std::string job, layout;
};

// Files that every rank writes one of: of the rows that training changes, and, where a job has such, of those that it leaves as they are.
inline constexpr const char *kShard = "shard", *kFrozen = "frozen";

struct FileSum {
  std::string file;
  io::Checksum sum;
};

// A checkpoint on its way to the disk: rank by rank its files, their sums brought together, the view over them, the step folder `path`
// that appears with all of them. Who leaves before that leaves what was there. Members that are not collective belong to any one
// thread, and the next one to call waits for its end.
class CheckpointFiles {
 public:
  // Collective.
  CheckpointFiles(parallel::Communicator& control, const std::string& path, IfThere if_there, CheckpointHeader header);
  // This rank's file of a kind: made by write(its path), or the file of an earlier checkpoint under another name as well. On the disk
  // on return. Every rank has files of the same kinds, in one order.
  void add(const char* kind, const std::function<void(const std::string&)>& write);
  bool add_link(const char* kind, const std::string& checkpoint, const io::Checksum& sum);  // false: not here
  const io::Checksum& sum(std::size_t number) const { return mine_[number]; }              // of this rank's file
  void share_sums();                                                                       // collective
  void appear(const std::function<void(io::Hdf5File&)>& view);                             // rank 0 alone; declares all tensors

 private:
  parallel::Communicator& control_;
  CheckpointHeader header_;
  WholeFolder folder_;
  std::vector<const char*> kinds_;
  std::vector<io::Checksum> mine_, all_;
};

Config config_of(const io::Hdf5File& view);  // the job in it, of which only the sections model and lora are judged
// Its values by parameter of `table`, from a master where there is one; adapters are not merged.
WeightSource weights_of(std::shared_ptr<const io::Hdf5File> view, std::shared_ptr<const ParamTable> table);

// The type of a parameter in it; an Error where it is missing or has another shape.
DType dtype_in(const io::Hdf5File& view, const Param& p);

// The view's own file is verified, then what it says about the shards is returned.
std::vector<FileSum> verified_view(const std::string& checkpoint);
void verify(const std::string& checkpoint, const FileSum& f);
// Collective: each rank its share of the files, since a checkpoint of many terabytes is read once.
void verify_shards(parallel::Communicator& control, const std::string& checkpoint, const std::vector<FileSum>& shards);
// Collective: the view is verified, open() reads what it says and refuses what cannot be done with it, then all its files are verified.
void open_verified(parallel::Communicator& control, const std::string& checkpoint, const std::function<void()>& open);

}  // namespace moetrain::core
