// folders.cpp -- a walk that enters every folder once, however many links lead there.
#include "io/folders.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "memory/check.h"

namespace moetrain::io {

namespace fs = std::filesystem;

namespace {

using Place = std::pair<dev_t, ino_t>;  // a file or a folder itself, whatever its names

class Walk {
 public:
  // All that lies below without a link comes before what links lead to, and those are followed in the order of their paths, so that
  // the same files have the same names on every machine.
  std::vector<fs::path> files(const fs::path& folder) {
    enter(folder);
    while (!linked_folders_.empty()) enter(linked_folders_.extract(linked_folders_.begin()).value());
    for (const fs::path& link : linked_files_)
      if (struct stat found{}; ::stat(link.c_str(), &found) != 0 || is_new(found)) files_.push_back(link);
    std::sort(files_.begin(), files_.end());
    return std::move(files_);
  }

 private:
  bool is_new(const struct stat& found) { return met_.emplace(found.st_dev, found.st_ino).second; }

  void enter(const fs::path& folder) {
    struct stat found {};
    if (::stat(folder.c_str(), &found) == 0 && !is_new(found)) return;
    std::error_code failed;
    for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed)) add(entry->path());
    if (failed) throw Error(folder.string() + ": cannot list: " + failed.message());
  }

  void add(const fs::path& path) {
    if (path.filename().string()[0] == '.') return;
    struct stat itself {
    }, found{};
    if (::lstat(path.c_str(), &itself) != 0) return;  // gone since it was listed
    const bool link = S_ISLNK(itself.st_mode), leads = ::stat(path.c_str(), &found) == 0;
    if (leads && S_ISDIR(found.st_mode)) {
      if (link)
        linked_folders_.insert(path);
      else
        enter(path);
    } else if (link && (!leads || S_ISREG(found.st_mode))) {
      linked_files_.insert(path);
    } else if (leads && S_ISREG(found.st_mode)) {
      is_new(found);
      files_.push_back(path);
    }
  }

  std::set<Place> met_;
  std::set<fs::path> linked_folders_, linked_files_;
  std::vector<fs::path> files_;
};

}  // namespace

std::vector<std::string> files_of_folder(const std::string& path) {
  const auto found = Walk().files(path);
  return {found.begin(), found.end()};
}

void make_folder(const std::string& path) {
  std::error_code failed;
  fs::create_directories(path, failed);
  if (failed) throw Error(path + ": cannot make the folder: " + failed.message());
}

std::string folder_fault(const std::string& path) {
  std::error_code failed;
  for (fs::path at = fs::absolute(path, failed); !failed; at = at.parent_path()) {
    struct stat found {};
    if (::stat(at.c_str(), &found) == 0) {
      if (!S_ISDIR(found.st_mode)) return at.string() + " is no folder";
      if (::access(at.c_str(), W_OK | X_OK) != 0) return at.string() + " cannot be written in: " + std::strerror(errno);
      return {};
    }
    if (errno != ENOENT && errno != ENOTDIR) return at.string() + ": " + std::strerror(errno);
    if (::lstat(at.c_str(), &found) == 0) return at.string() + " is a link that leads nowhere";
    if (at == at.root_path()) break;
  }
  return failed ? failed.message() : "there is no such place";
}

}  // namespace moetrain::io
