// whole_folder.cpp -- written beside, synced, renamed.
#include "core/whole_folder.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "core/together.h"

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

bool there(const std::string& path) { return fs::symlink_status(path).type() != fs::file_type::not_found; }  // a link to nowhere too

[[noreturn]] void refuse(const std::string& path) { throw Error(path + ": exists already", ExitCode::bad_job); }

// `from` gets the name `to` if nothing has it, not even since an instant ago.
void put_if_free(const std::string& from, const std::string& to) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (errno == EEXIST || there(to)) refuse(to);
  fs::rename(from, to);  // a file system that knows no such flag; says why where it cannot
}

void remove_contents(const std::string& path) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(path, ignored))  // what another folder has too stays whole there
    if (entry.hard_link_count(ignored) == 1) fs::resize_file(entry.path(), 0, ignored);
  for (const auto& entry : fs::directory_iterator(path, ignored)) fs::remove_all(entry.path(), ignored);
}

// What no writer of ours leaves is somebody's, and is not deleted.
void check_left(const std::string& folder, const fs::directory_entry& entry) {
  const std::string end = entry.path().extension();
  const bool ours = end == ".h5" || end == ".json" || end == ".yaml" || end == ".safetensors" || end == ".part";
  if (!ours || !entry.is_regular_file())
    throw Error(folder + ": holds " + entry.path().filename().string() + ", which nothing that was interrupted left; it has to go first",
                ExitCode::bad_job);
}

}  // namespace

void remove_partial(const std::string& path) {
  remove_contents(path);
  std::error_code ignored;
  fs::remove(path, ignored);
}

WholeFolder::WholeFolder(parallel::Communicator& control, std::string path, IfThere if_there)
    : control_(control), path_(std::move(path)), if_there_(if_there) {
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  partial_ = path_ + kPartial;
  together(control_, [&] {
    if (control_.rank() != 0) return;
    if (if_there_ == IfThere::refused && there(path_)) refuse(path_);
    if (const fs::path above = fs::path(partial_).parent_path(); !above.empty()) fs::create_directories(above);
    fs::create_directory(partial_);  // says why where it cannot; one that is there is no error
    lock_ = io::lock_folder(partial_, "another process is writing it");
    for (const auto& entry : fs::directory_iterator(partial_)) check_left(partial_, entry);
    remove_contents(partial_);
  });
}

WholeFolder::~WholeFolder() {
  if (!finished_ && control_.rank() == 0) remove_partial(partial_);
}

void WholeFolder::finish(const std::function<void()>& last) {
  together(control_, [&] {
    if (control_.rank() == 0) appear(last);
  });
}

void WholeFolder::appear(const std::function<void()>& last) {
  last();
  io::sync_folder(partial_);
  if_there_ == IfThere::replaced ? put_in_place(partial_, path_) : put_if_free(partial_, path_);
  lock_ = {};
  finished_ = true;
}

}  // namespace moetrain::core
