// safetensors.h -- safetensors files: what one or a folder of them holds, from headers alone; reading values; writing one.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/files.h"
#include "memory/tensor.h"

namespace moetrain::io {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as the file says: BF16, F32, U8 ...
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0, end = 0;  // bytes of the file
  std::int64_t elements() const;
  std::string text() const;  // "BF16 [2, 3]"
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  std::int64_t file_bytes = 0;
};

// Eight bytes of length (little endian), that many bytes of JSON, then the tensors. A header that does not fit the file is an Error
// that names file and tensor: a file cut short is seen here and not when a weight is used.
SafetensorsHeader read_safetensors_header(const std::string& path);

struct SafetensorsFolder {
  struct Place {
    int file = 0;
    SafetensorsEntry entry;
  };
  std::vector<std::string> files;                  // paths, sorted
  std::unordered_map<std::string, Place> tensors;  // by name
  const std::string& path_of(const Place& place) const { return files[std::size_t(place.file)]; }
};

// The files that model.safetensors.index.json names, each tensor in the file it is said to be in and no other; without an index
// every .safetensors file that lies directly in the folder, each name once.
SafetensorsFolder read_safetensors_folder(const std::string& folder);

// Floating types, whose values can be read; F16 among them.
bool is_safetensors_float(const std::string& dtype);
const char* safetensors_dtype(DType dtype);  // of the floating types

// Elements [first, first + to.count()) of a floating entry, converted to the floating type of `to` (host memory).
void read_safetensors_values(const std::string& path, const SafetensorsEntry& entry, std::int64_t first, Tensor to);

// One file: the header at once, then the tensors' bytes in the order of `entries`.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries);
  void append(const void* bytes, std::int64_t count);
  void close();  // every byte was given and is on the disk

 private:
  std::string path_;
  AppendFile file_;
  std::int64_t missing_ = 0;  // bytes still to come
};

// {"metadata": {"total_size": ...}, "weight_map": {name: file, ...}}
struct SafetensorsIndexEntry {
  std::string name, file;
};
void write_safetensors_index(const std::string& folder, const std::vector<SafetensorsIndexEntry>& entries,
                             std::int64_t total_bytes);

}  // namespace moetrain::io
