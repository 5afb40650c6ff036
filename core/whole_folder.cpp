// whole_folder.cpp -- written beside, synced, renamed.
#include "core/whole_folder.h"

#include <fcntl.h>

#include <cstdio>
#include <filesystem>

#include "core/together.h"
#include "io/files.h"

namespace moetrain::core {
namespace fs = std::filesystem;
namespace {

// `from` takes the place of `to` at one instant, also where `to` exists (a checkpoint of an abandoned run over the same steps).
void put_in_place(const std::string& from, const std::string& to) {
  if (!fs::exists(to)) return fs::rename(from, to);
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return remove_partial(from);
  const std::string old = to + ".old" + kPartial;  // a file system that cannot exchange names: the old one is whole until the end
  fs::rename(to, old);
  std::error_code failed;
  fs::rename(from, to, failed);
  if (failed) {
    fs::rename(old, to);
    throw Error(to + ": cannot put in place: " + failed.message());
  }
  remove_partial(old);
}

}  // namespace

void remove_partial(const std::string& path) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(path, ignored)) fs::resize_file(entry.path(), 0, ignored);
  fs::remove_all(path, ignored);
}

WholeFolder::WholeFolder(parallel::Communicator& control, std::string path) : control_(control), path_(std::move(path)) {
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  partial_ = path_ + kPartial;
  together(control_, [&] {
    if (control_.rank() != 0) return;
    remove_partial(partial_);
    if (const fs::path above = fs::path(partial_).parent_path(); !above.empty()) fs::create_directories(above);
    fs::create_directory(partial_);
  });
}

WholeFolder::~WholeFolder() {
  if (!finished_ && control_.rank() == 0) remove_partial(partial_);
}

void WholeFolder::finish(const std::function<void()>& last) {
  together(control_, [&] {
    if (control_.rank() != 0) return;
    last();
    io::sync_folder(partial_);
    put_in_place(partial_, path_);
  });
  finished_ = true;
}

}  // namespace moetrain::core
