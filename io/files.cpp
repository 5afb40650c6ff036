// files.cpp -- POSIX calls with their errno turned into an Error that names the path.
#include "io/files.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/file.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "memory/check.h"

namespace moetrain::io {

namespace {

[[noreturn]] void refuse(const std::string& path, const char* what, int cause) {
  throw Error(path + ": cannot " + what + ": " + std::strerror(cause));
}

Descriptor open_file(const std::string& path, int flags, const char* what) {
  const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  if (descriptor < 0) refuse(path, what, errno);
  return Descriptor(descriptor);
}

void write_all(int descriptor, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t n = ::write(descriptor, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) refuse(path, "write", errno);
    text.remove_prefix(std::size_t(n));
  }
}

// Bytes read into out: fewer than asked only at the end of the file.
std::int64_t read_up_to(int descriptor, char* out, std::int64_t count, const std::string& path) {
  std::int64_t done = 0;
  while (done < count) {
    const ssize_t n = ::read(descriptor, out + done, std::size_t(count - done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) refuse(path, "read", errno);
    if (n == 0) break;
    done += n;
  }
  return done;
}

void sync(const std::string& path, int flags) {
  const Descriptor file = open_file(path, O_RDONLY | flags, "open");
  if (::fsync(file.get()) != 0) refuse(path, "sync", errno);
}

std::string folder_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

constexpr std::int64_t kBlockBytes = 1 << 20;

}  // namespace

void close_descriptor(int descriptor) noexcept {
  if (::close(descriptor) != 0) spdlog::warn("closing a file: {}", std::strerror(errno));
}

std::string read_text(const std::string& path) {
  const Descriptor file = open_file(path, O_RDONLY, "open");
  std::string text;
  for (;;) {
    const auto before = std::int64_t(text.size());
    text.resize(std::size_t(before + kBlockBytes));
    const auto n = read_up_to(file.get(), text.data() + before, kBlockBytes, path);
    text.resize(std::size_t(before + n));
    if (n < kBlockBytes) return text;
  }
}

void write_text_atomically(const std::string& path, std::string_view text, const std::string& part) {
  const std::string beside = path + part;
  try {
    Descriptor file = open_file(beside, O_WRONLY | O_CREAT | O_TRUNC, "create");
    write_all(file.get(), text, beside);
    if (::fsync(file.get()) != 0) refuse(beside, "sync", errno);
    if (::close(file.release()) != 0) refuse(beside, "close", errno);
    if (::rename(beside.c_str(), path.c_str()) != 0) refuse(path, "put in place", errno);
  } catch (const Error&) {
    ::unlink(beside.c_str());
    throw;
  }
  sync_folder(folder_of(path));
}

void sync_file(const std::string& path) { sync(path, 0); }

void sync_folder(const std::string& path) { sync(path, O_DIRECTORY); }

Checksum checksum_of_file(const std::string& path) {
  const Descriptor file = open_file(path, O_RDONLY, "open");
  std::vector<char> block(kBlockBytes);
  Checksum sum;
  for (;;) {
    const auto n = read_up_to(file.get(), block.data(), kBlockBytes, path);
    sum.crc32 = std::uint32_t(::crc32(sum.crc32, reinterpret_cast<const Bytef*>(block.data()), uInt(n)));
    sum.bytes += n;
    if (n < kBlockBytes) return sum;
  }
}

namespace {

Descriptor locked(Descriptor file, const std::string& path, const std::string& refusal) {
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) throw Error(path + ": " + refusal, ExitCode::bad_job);
  return file;
}

}  // namespace

Descriptor lock_file(const std::string& path, const std::string& refusal) {
  return locked(open_file(path, O_RDWR | O_CREAT, "create"), path, refusal);
}

Descriptor lock_folder(const std::string& path, const std::string& refusal) {
  Descriptor folder = locked(open_file(path, O_RDONLY | O_DIRECTORY, "open"), path, refusal);
  struct stat held {}, there {};  // it may have been renamed, finished, before it was locked
  if (::fstat(folder.get(), &held) != 0 || ::stat(path.c_str(), &there) != 0 || held.st_ino != there.st_ino)
    throw Error(path + ": " + refusal, ExitCode::bad_job);
  return folder;
}

void read_bytes(const std::string& path, std::int64_t begin, std::int64_t count, std::uint8_t* out) {
  const Descriptor file = open_file(path, O_RDONLY, "open");
  if (::lseek(file.get(), begin, SEEK_SET) < 0) refuse(path, "seek", errno);
  const auto n = read_up_to(file.get(), reinterpret_cast<char*>(out), count, path);
  if (n != count)
    throw Error(path + ": ends at byte " + std::to_string(begin + n) + ", " + std::to_string(begin + count) +
                " expected: the file became shorter while it was in use");
}

RawFile::RawFile(const std::string& path) : path_(path), file_(open_file(path, O_WRONLY, "open")) {}

void RawFile::write(std::int64_t place, const void* data, std::int64_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(file_.get(), from, std::size_t(bytes), off_t(place));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) refuse(path_, "write", errno);
    from += n;
    place += n;
    bytes -= n;
  }
}

void RawFile::finish() {
  if (::fsync(file_.get()) != 0) refuse(path_, "sync", errno);
  if (::close(file_.release()) != 0) refuse(path_, "close", errno);
}

bool link_file(const std::string& from, const std::string& to, std::int64_t bytes) {
  struct stat found {};
  if (::stat(from.c_str(), &found) != 0 || found.st_size != bytes) return false;
  return ::link(from.c_str(), to.c_str()) == 0;
}

AppendFile::AppendFile(const std::string& path) : path_(path), file_(open_file(path, O_WRONLY | O_CREAT | O_APPEND, "open")) {}

void AppendFile::append(std::string_view text) { write_all(file_.get(), text, path_); }

}  // namespace moetrain::io
