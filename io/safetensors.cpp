// safetensors.cpp -- reads and doubts the header: lengths, offsets and the size of every tensor.
#include "io/safetensors.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "io/files.h"
#include "io/json.h"
#include "memory/check.h"

namespace moetrain::io {
namespace {

constexpr std::int64_t kLengthBytes = 8;

// 0: a type this reader does not know, whose size is then not checked. Sub-byte types are counted in bits.
std::int64_t bits_of(const std::string& dtype) {
  static const std::map<std::string, std::int64_t> bits{
      {"F64", 64}, {"I64", 64}, {"U64", 64}, {"F32", 32}, {"I32", 32},    {"U32", 32},    {"F16", 16},    {"BF16", 16}, {"I16", 16},
      {"U16", 16}, {"I8", 8},   {"U8", 8},   {"BOOL", 8}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F4", 4}};
  const auto it = bits.find(dtype);
  return it == bits.end() ? 0 : it->second;
}

std::int64_t header_length(const std::string& path, std::int64_t file_bytes) {
  if (file_bytes < kLengthBytes) throw Error(path + ": not a safetensors file: it has " + std::to_string(file_bytes) + " bytes");
  std::uint8_t raw[kLengthBytes];
  read_bytes(path, 0, kLengthBytes, raw);
  std::uint64_t length = 0;
  for (int i = int(kLengthBytes); i-- > 0;) length = length << 8 | raw[i];
  if (length > std::uint64_t(file_bytes - kLengthBytes))
    throw Error(path + ": cut short or not a safetensors file: its header would have " + std::to_string(length) +
                " bytes, the file has " + std::to_string(file_bytes));
  return std::int64_t(length);
}

SafetensorsEntry entry_of(const std::string& name, const Json& tensor, std::int64_t data) {
  SafetensorsEntry e;
  e.name = name;
  e.dtype = tensor.at("dtype").get<std::string>();
  e.shape = tensor.at("shape").get<std::vector<std::int64_t>>();
  const auto offsets = tensor.at("data_offsets").get<std::vector<std::int64_t>>();
  if (offsets.size() != 2) throw Error("data_offsets are not two numbers");
  e.begin = data + offsets[0];
  e.end = data + offsets[1];
  return e;
}

void check_entry(const std::string& path, const SafetensorsEntry& e, std::int64_t data, std::int64_t file_bytes) {
  auto refuse = [&](const std::string& why) { throw Error(path + ": " + e.name + ": " + why); };
  if (std::any_of(e.shape.begin(), e.shape.end(), [](std::int64_t d) { return d < 0; })) refuse("its shape has a negative dim");
  if (e.begin < data || e.end < e.begin) refuse("its bytes end before they begin");
  if (e.end > file_bytes)
    refuse("it ends at byte " + std::to_string(e.end) + ", the file has " + std::to_string(file_bytes) + ": cut short");
  if (const std::int64_t bits = bits_of(e.dtype); bits > 0 && (e.elements() * bits + 7) / 8 != e.end - e.begin)
    refuse(std::to_string(e.elements()) + " elements of " + e.dtype + " do not fill its " + std::to_string(e.end - e.begin) +
           " bytes");
}

}  // namespace

std::int64_t SafetensorsEntry::elements() const {
  std::int64_t n = 1;
  for (const auto d : shape) n *= d;
  return n;
}

SafetensorsHeader read_safetensors_header(const std::string& path) {
  std::error_code failed;
  const auto size = std::filesystem::file_size(path, failed);
  if (failed) throw Error(path + ": cannot open: " + failed.message());
  SafetensorsHeader header;
  header.file_bytes = std::int64_t(size);
  const std::int64_t length = header_length(path, header.file_bytes), data = kLengthBytes + length;
  std::string text(std::size_t(length), '\0');
  read_bytes(path, kLengthBytes, length, reinterpret_cast<std::uint8_t*>(text.data()));
  try {
    const Json json = Json::parse(text);
    for (const auto& [name, tensor] : json.items())
      if (name != "__metadata__") header.entries.push_back(entry_of(name, tensor, data));
  } catch (const std::exception& wrong) {
    throw Error(path + ": its header is not one of safetensors: " + wrong.what());
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  for (const auto& e : header.entries) check_entry(path, e, data, header.file_bytes);
  return header;
}

}  // namespace moetrain::io
