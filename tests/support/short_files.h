// short_files.h -- a full disk or a quota, as a write meets it.
#pragma once
#include <sys/resource.h>

#include <algorithm>
#include <csignal>

namespace moetrain::test {

// While it lives, a write of this process past so many bytes of a file fails.
class ShortFiles {
 public:
  explicit ShortFiles(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit now{std::min(bytes, before_.rlim_max), before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &now);
  }
  ~ShortFiles() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  ShortFiles(const ShortFiles&) = delete;
  ShortFiles& operator=(const ShortFiles&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = std::signal(SIGXFSZ, SIG_IGN);
};

}  // namespace moetrain::test
