// whole_folder.h -- a folder that appears whole or not at all, however many ranks write its files.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "io/files.h"
#include "parallel/communicator.h"

namespace moetrain::core {

inline constexpr const char* kPartial = ".partial";  // ends the name of a folder that is being written

enum class IfThere : std::uint8_t { replaced, refused };  // what happens to a `path` that stands already

// Files go into `path`.partial, which takes the place of `path` at the end, or the name if nothing has it. Whoever leaves before that, by an Error on any rank,
// leaves what was there as it was. What an interrupted writer left in `path`.partial is cleared; what no writer leaves there, or one
// that is still at work, is refused as a fault of the job. Collective: every member but appear, on every rank.
class WholeFolder {
 public:
  WholeFolder(parallel::Communicator& control, std::string path, IfThere if_there);
  ~WholeFolder();
  WholeFolder(const WholeFolder&) = delete;
  WholeFolder& operator=(const WholeFolder&) = delete;

  const std::string& partial() const { return partial_; }
  void finish(const std::function<void()>& last);  // rank 0 writes what is written last; all files have to be on the disk then
  void appear(const std::function<void()>& last);  // finish as rank 0 does it by itself, in any thread; the caller tells the others

 private:
  parallel::Communicator& control_;
  std::string path_, partial_;
  IfThere if_there_;
  io::Descriptor lock_;  // of the partial folder, on rank 0
  bool finished_ = false;  // on rank 0
};

// What writing that was cut short has left. Contents go first: an open file keeps its blocks past the loss of its name, and
// exit.json has to find room on a full disk.
void remove_partial(const std::string& folder);

}  // namespace moetrain::core
