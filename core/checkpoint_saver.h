// checkpoint_saver.h -- checkpoints of a run on their way to the disk: at once, or beside the steps that follow.
//
//   main thread, all ranks together                      the writer of a rank
//   rows copied into host memory (only beside steps) ->  its file written, synced, summed up
//   sums of all ranks' files exchanged               ->  on rank 0: the view; the folder gets its name, then `latest` moves, then older
//   all agree that it went well                          ones go
// A checkpoint is complete or absent: written into step_N.partial, synced, renamed. The writer makes no call of MPI or of a device.
// Rows that the job leaves as they are lie in a file of their own, which later checkpoints of the run share by a hard link.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "core/checkpoint.h"
#include "core/checkpoint_files.h"
#include "memory/buffer.h"

namespace moetrain::core {

// The rows of this rank that a checkpoint holds: those that training changes, and those that the job leaves as they are.
using SavedRows = std::array<std::vector<SavedTensor>, 2>;
SavedRows saved_rows(Trainer& trainer);

// Room in host memory for rows to save; on Device::dry it is only counted.
class HostCopy {
 public:
  HostCopy() = default;
  HostCopy(Memory& host, const SavedRows& rows);
  bool fits(const SavedRows& rows) const;
  void take(Device from, SavedRows& rows);  // copied; the rows are those of the copy from then on

 private:
  OwnedTensor weights_, optimizer_;
};

class CheckpointSaver {
 public:
  struct Saved {
    std::int64_t step;
    double copying, seconds;  // the steps waited for; until it was on the disk
  };
  // One for a run whose weights are there: what the job leaves as it is does not change between saves. Keeps the newest `keep` (0: all).
  // saved is told on every rank.
  CheckpointSaver(Trainer& trainer, std::string folder, std::int64_t keep, std::function<void(const Saved&)> saved = {});
  ~CheckpointSaver() { given_up_ = true; }  // one that is under way is given up

  // Collective, all of them; what fails fails on every rank, and leaves what was there, or says that the new one is complete and only
  // `latest` still names the one before.
  void save();     // on the disk on return
  void begin();    // copied on return, written by advance and finish; waits for the one before
  void advance();  // one stage further; waits for this rank's writer
  void finish();   // all that was begun is on the disk
  bool working() const;  // not collective: would advance wait?
  const Memory& host() const { return host_; }  // of the copies

 private:
  enum class Stage : std::uint8_t { none, files, place };
  struct ViewTensor {  // of the whole model
    std::string dataset;
    DType dtype;
    int param;
  };
  struct Owned {  // rows of a whole parameter that a rank's file holds; columns 0: all of them
    std::int64_t row, rows, column, columns;
  };
  void start(bool beside);
  void gather_ownership();
  void write_files();
  void write_file(const std::string& path, const std::vector<SavedTensor>& rows) const;
  void declare(io::Hdf5File& view) const;
  void put_in_place();
  std::string not_saved() const { return "checkpoint " + step_name(step_) + " was not saved, the one before is as it was: "; }

  Trainer& trainer_;
  parallel::Communicator& control_;
  std::string folder_;
  std::int64_t keep_;
  std::function<void(const Saved&)> saved_;
  Memory host_{Device::cpu};
  HostCopy copy_;
  Stage stage_ = Stage::none;
  bool beside_ = false;
  std::int64_t step_ = 0;
  std::chrono::steady_clock::time_point start_;
  double copying_ = 0;
  // Of the one under way; the writer's alone from its start to its end.
  SavedRows rows_;
  std::vector<ViewTensor> view_;
  std::vector<Shape> shapes_;              // by parameter, whole
  std::vector<bool> frozen_;               // by parameter
  std::vector<Owned> owned_;               // (ranks, parameters)
  std::optional<CheckpointFiles> files_;
  bool linked_ = false;  // the frozen file is there
  // Of the one before: where the frozen rows of this rank already are.
  std::string last_;
  std::optional<io::Checksum> frozen_sum_;
  std::atomic<bool> given_up_ = false;
  std::future<void> writer_;  // the last member: its end is waited for before the others go
};

}  // namespace moetrain::core
