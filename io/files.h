// files.h -- plain files: read whole, replaced whole, appended to and summed up; every failure names the path and its cause.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "memory/handle.h"

namespace moetrain::io {

void close_descriptor(int descriptor) noexcept;
using Descriptor = Handle<int, close_descriptor, -1>;

std::string read_text(const std::string& path);

// The file is the old one or the new one at any moment, also after a power cut: written beside, as path + part, synced, renamed,
// folder synced. Writers of one path at the same time need a part each.
void write_text_atomically(const std::string& path, std::string_view text, const std::string& part = ".part");

void sync_file(const std::string& path);    // returns when its bytes are on the disk
void sync_folder(const std::string& path);  // returns when its names are on the disk

// Held until the descriptor dies; refused as a fault of the job while another process holds it. Where the disk knows no locks,
// nothing is held.
Descriptor lock_file(const std::string& path, const std::string& refusal);
Descriptor lock_folder(const std::string& path, const std::string& refusal);  // the same of a folder that is there

struct Checksum {
  std::uint32_t crc32 = 0;  // zlib's, over all bytes
  std::int64_t bytes = 0;
  bool operator==(const Checksum&) const = default;
};
Checksum checksum_of_file(const std::string& path);

// A file opened and closed for one read, because a folder may hold more files than a process may keep open.
void read_bytes(const std::string& path, std::int64_t begin, std::int64_t count, std::uint8_t* out);

// Bytes written at their places in a file that is there; on the disk when finish returns.
class RawFile {
 public:
  explicit RawFile(const std::string& path);
  void write(std::int64_t place, const void* data, std::int64_t bytes);
  void finish();

 private:
  std::string path_;
  Descriptor file_;
};

// `to` becomes another name of the file `from`, if it has so many bytes and the disk has such names; false: it has not.
bool link_file(const std::string& from, const std::string& to, std::int64_t bytes);

// Appends whole pieces; each has reached the operating system when append returns, so it survives the end of the process.
class AppendFile {
 public:
  explicit AppendFile(const std::string& path);
  void append(std::string_view text);

 private:
  std::string path_;
  Descriptor file_;
};

}  // namespace moetrain::io
