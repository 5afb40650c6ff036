// safetensors.h -- what a safetensors file holds, from its header alone: names, types, shapes and where the bytes lie.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace moetrain::io {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as the file says: BF16, F32, U8 ...
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0, end = 0;  // bytes of the file
  std::int64_t elements() const;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  std::int64_t file_bytes = 0;
};

// Eight bytes of length (little endian), that many bytes of JSON, then the tensors. A header that does not fit the file is an Error
// that names file and tensor: a file cut short is seen here and not when a weight is used.
SafetensorsHeader read_safetensors_header(const std::string& path);

}  // namespace moetrain::io
