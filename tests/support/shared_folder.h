// shared_folder.h -- a folder that all ranks of an MPI test share.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "parallel/communicator.h"
#include "tests/support/temp_folder.h"

namespace moetrain::test {

// One folder for all ranks: the first makes it and takes it away.
class SharedFolder {
 public:
  SharedFolder() : world_(parallel::mpi_world()) {
    if (world_->rank() == 0) own_.emplace();
    std::string path = own_ ? own_->path() : "";
    auto bytes = std::int64_t(path.size());
    world_->broadcast(&bytes, sizeof bytes, 0);
    path.resize(std::size_t(bytes));
    world_->broadcast(path.data(), bytes, 0);
    path_ = path;
  }
  ~SharedFolder() { world_->barrier(); }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  parallel::Communicator& world() const { return *world_; }

 private:
  std::unique_ptr<parallel::Communicator> world_;
  std::optional<TempFolder> own_;
  std::string path_;
};

}  // namespace moetrain::test
