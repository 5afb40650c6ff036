// files_test.cpp -- do files hold what was asked, and do failures say which file and why?
#include "io/files.h"

#include <signal.h>
#include <sys/resource.h>
#include <zlib.h>

#include <filesystem>

#include "io/folders.h"
#include "memory/check.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using test::contains;
using test::error_of;

namespace {

// While it lives no file may grow past a size: what a full disk or a quota looks like to a write.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    handler_ = ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

}  // namespace

TEST_CASE("a text written atomically is read back whole and leaves nothing beside it", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "a.txt", text = std::string("x\0y\n", 4) + std::string(3 << 20, 'z');
  io::write_text_atomically(path, "old");
  io::write_text_atomically(path, text);
  CHECK(io::read_text(path) == text);
  CHECK(io::files_of_folder(folder.path()) == std::vector<std::string>{path});
  io::write_text_atomically(path, "");
  CHECK(io::read_text(path).empty());
}

TEST_CASE("a full disk is an error and the old text stays", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "latest";
  io::write_text_atomically(path, "step_1");
  std::string message;
  {
    const FileSizeLimit limit(4096);
    message = error_of([&] { io::write_text_atomically(path, std::string(10000, 'x')); });
  }
  CHECK(contains(message, path));
  CHECK(contains(message, "cannot write: File too large"));
  CHECK(io::read_text(path) == "step_1");
  CHECK(io::files_of_folder(folder.path()).size() == 1);
}

TEST_CASE("failures of files name path and cause", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string absent = folder / "absent";
  CHECK(error_of([&] { io::read_text(absent); }) == "3: " + absent + ": cannot open: No such file or directory");
  CHECK(error_of([&] { io::read_text(folder.path()); }) == "3: " + folder.path() + ": cannot read: Is a directory");
  CHECK(
      contains(error_of([&] { io::write_text_atomically(absent + "/x", "y"); }), absent + "/x.part: cannot create: No such file"));
  CHECK(contains(error_of([&] { io::sync_file(absent); }), absent + ": cannot open: No such file"));
  CHECK(contains(error_of([&] { io::sync_folder(folder.file("f", "1")); }), "/f: cannot open: Not a directory"));
  CHECK(contains(error_of([&] { io::checksum_of_file(absent); }), absent + ": cannot open: No such file"));
  CHECK(contains(error_of([&] { io::files_of_folder(absent); }), absent + ": cannot list: No such file"));
  std::uint8_t bytes[8];
  CHECK(contains(error_of([&] { io::read_bytes(folder.file("g", "12345"), 2, 8, bytes); }), "/g: ends at byte 5, 10 expected"));
}

TEST_CASE("a checksum covers every byte of the file", "[io][cpu]") {
  const test::TempFolder folder;
  CHECK(io::checksum_of_file(folder.file("digits", "123456789")) == io::Checksum{0xcbf43926u, 9});  // the check value of CRC-32
  CHECK(io::checksum_of_file(folder.file("empty", "")) == io::Checksum{0, 0});
  std::string large((1 << 20) * 2 + 77, 'a');
  const auto sum = io::checksum_of_file(folder.file("large", large));
  CHECK(sum.bytes == std::int64_t(large.size()));
  CHECK(sum.crc32 == ::crc32(0, reinterpret_cast<const Bytef*>(large.data()), uInt(large.size())));
  large.back() = 'b';
  CHECK(io::checksum_of_file(folder.file("large", large)).crc32 != sum.crc32);
}

TEST_CASE("an append file adds to what is there", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder.file("log", "one\n");
  {
    io::AppendFile log(path);
    log.append("two\n");
    CHECK(io::read_text(path) == "one\ntwo\n");
  }
  io::AppendFile(path).append("three\n");
  CHECK(io::read_text(path) == "one\ntwo\nthree\n");
}

TEST_CASE("a lock is refused while it is held and given again afterwards", "[io][cpu]") {
  const test::TempFolder folder;
  {
    const auto held = io::lock_file(folder / "lock", "in use");
    CHECK(error_of([&] { io::lock_file(folder / "lock", "in use"); }) == "2: " + (folder / "lock") + ": in use");
  }
  CHECK(error_of([&] { io::lock_file(folder / "lock", "in use"); }) == "nothing was thrown");
}
