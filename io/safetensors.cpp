// safetensors.cpp -- reads and doubts headers: lengths, offsets and the size of every tensor; values on demand; files written.
#include "io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>

#include "io/json.h"
#include "memory/check.h"

namespace moetrain::io {
namespace fs = std::filesystem;
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little endian, and read as they are");

constexpr std::int64_t kLengthBytes = 8;
constexpr const char* kIndex = "model.safetensors.index.json";

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

SafetensorsEntry entry_of(const std::string& name, const KeyedJson& tensor, std::int64_t data) {
  SafetensorsEntry e;
  e.name = name;
  e.dtype = tensor.at("dtype").get<std::string>();
  for (const char* integers : {"shape", "data_offsets"})
    for (const auto& n : tensor.at(integers))
      if (!n.is_number_integer()) throw Error(name + ": its " + integers + " has " + n.dump() + ", which is no whole number");
  e.shape = tensor.at("shape").get<std::vector<std::int64_t>>();
  const auto offsets = tensor.at("data_offsets").get<std::vector<std::int64_t>>();
  constexpr std::int64_t kFar = std::int64_t(1) << 62;  // no file is that long, and sums of it can be counted
  if (offsets.size() != 2 || std::any_of(offsets.begin(), offsets.end(), [](std::int64_t o) { return o < 0 || o > kFar; }))
    throw Error(name + ": data_offsets are not two places in a file");
  e.begin = data + offsets[0];
  e.end = data + offsets[1];
  return e;
}

void check_entry(const std::string& path, const SafetensorsEntry& e, std::int64_t data, std::int64_t file_bytes) {
  constexpr std::int64_t kMost = std::int64_t(1) << 56;  // elements, so that their bits can be counted
  auto refuse = [&](const std::string& why) { throw Error(path + ": " + e.name + ": " + why); };
  std::int64_t n = 1;
  for (const std::int64_t d : e.shape) {
    if (d < 0) refuse("its shape has a negative dim");
    if (__builtin_mul_overflow(n, std::max<std::int64_t>(d, 1), &n) || n > kMost)
      refuse("its shape has more elements than a file can hold");
  }
  if (e.begin < data || e.end < e.begin) refuse("its bytes end before they begin");
  if (e.end > file_bytes)
    refuse("it ends at byte " + std::to_string(e.end) + ", the file has " + std::to_string(file_bytes) + ": cut short");
  if (const std::int64_t bits = bits_of(e.dtype); bits > 0 && (e.elements() * bits + 7) / 8 != e.end - e.begin)
    refuse(std::to_string(e.elements()) + " elements of " + e.dtype + " do not fill its " + std::to_string(e.end - e.begin) +
           " bytes");
}

// JSON of a file of the folder; whatever it is not is told with the file's name.
template <class Read>
void parsed(const std::string& path, const std::string& text, const char* is_not, Read read) {
  try {
    read(parse_json<KeyedJson>(text));
  } catch (const std::exception& wrong) {
    throw Error(path + ": " + is_not + ": " + wrong.what());
  }
}

// Name of each tensor, and the file it is in, by the index.
std::unordered_map<std::string, std::string> read_index(const std::string& path) {
  std::unordered_map<std::string, std::string> map;
  parsed(path, read_text(path), "not an index of safetensors", [&](const KeyedJson& json) {
    for (const auto& [name, file] : json.at("weight_map").items()) {
      const auto text = file.get<std::string>();
      if (fs::path(text).filename() != text || text.empty() || text == "." || text == "..")
        throw Error("'" + text + "', which is to hold " + name + ", is not the name of a file beside it");
      map.emplace(name, text);
    }
  });
  return map;
}

std::vector<std::string> safetensors_files(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const fs::path& path = entry.path(); path.extension() == ".safetensors" && !path.filename().string().starts_with('.'))
      names.push_back(path.filename());
  if (names.empty()) throw Error(folder + ": holds neither " + std::string(kIndex) + " nor a .safetensors file");
  return names;
}

float half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float magnitude = exponent == 31  ? (fraction ? std::nanf("") : INFINITY)
                          : exponent == 0 ? std::ldexp(float(fraction), -24)
                                          : std::ldexp(float(1024 + fraction), exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

struct F16 {
  std::uint16_t bits;
  explicit operator double() const { return half(bits); }
  explicit operator float() const { return half(bits); }
  explicit operator bf16() const { return bf16(half(bits)); }
};

template <class From, class To>
void convert(const std::uint8_t* from, To* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    From value;
    std::memcpy(&value, from + i * std::int64_t(sizeof value), sizeof value);  // a tensor may begin at any byte
    if constexpr (std::is_same_v<From, bf16>)
      to[i] = To(float(value));
    else
      to[i] = To(value);
  }
}
template <class From>
void convert(const std::uint8_t* from, Tensor to) {
  switch (to.dtype) {
    case DType::f64:
      return convert<From>(from, to.as<double>(), to.count());
    case DType::f32:
      return convert<From>(from, to.as<float>(), to.count());
    case DType::bf16:
      return convert<From>(from, to.as<bf16>(), to.count());
    default:
      fail("safetensors: values are read as floating types", {{"asked", std::int64_t(to.dtype)}});
  }
}

}  // namespace

std::int64_t SafetensorsEntry::elements() const {
  std::int64_t n = 1;
  for (const auto d : shape) n *= d;
  return n;
}

std::string SafetensorsEntry::text() const {
  std::string s = dtype + " [";
  for (std::size_t i = 0; i < shape.size(); ++i) s += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

SafetensorsHeader read_safetensors_header(const std::string& path) {
  std::error_code failed;
  const auto size = fs::file_size(path, failed);
  if (failed) throw Error(path + ": cannot open: " + failed.message());
  SafetensorsHeader header;
  header.file_bytes = std::int64_t(size);
  const std::int64_t length = header_length(path, header.file_bytes), data = kLengthBytes + length;
  std::string text(std::size_t(length), '\0');
  read_bytes(path, kLengthBytes, length, reinterpret_cast<std::uint8_t*>(text.data()));
  parsed(path, text, "its header is not one of safetensors", [&](const KeyedJson& json) {
    for (const auto& [name, tensor] : json.items())
      if (name != "__metadata__") header.entries.push_back(entry_of(name, tensor, data));
  });
  std::sort(header.entries.begin(), header.entries.end(),
            [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::int64_t used = data;
  const auto all_used = [&](std::int64_t next) {
    if (next > used)
      throw Error(path + ": bytes " + std::to_string(used) + " to " + std::to_string(next) + " belong to no tensor");
  };
  for (std::size_t i = 0; i < header.entries.size(); ++i) {
    check_entry(path, header.entries[i], data, header.file_bytes);
    if (i > 0 && header.entries[i].begin < header.entries[i - 1].end)
      throw Error(path + ": " + header.entries[i].name + ": begins at byte " + std::to_string(header.entries[i].begin) +
                  ", inside the bytes of " + header.entries[i - 1].name);
    all_used(header.entries[i].begin);
    used = header.entries[i].end;
  }
  all_used(header.file_bytes);
  return header;
}

SafetensorsFolder read_safetensors_folder(const std::string& folder) {
  const std::string index_path = folder + "/" + kIndex;
  const bool indexed = fs::exists(index_path);
  const auto index = indexed ? read_index(index_path) : std::unordered_map<std::string, std::string>{};
  std::vector<std::string> names;
  if (indexed)
    for (const auto& [tensor, file] : index) names.push_back(file);
  else
    names = safetensors_files(folder);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());

  SafetensorsFolder all;
  for (const std::string& name : names) {
    const int file = int(all.files.size());
    all.files.push_back(folder + "/" + name);
    for (auto& e : read_safetensors_header(all.files.back()).entries) {
      const auto said = index.find(e.name);
      if (indexed && said == index.end()) throw Error(all.files.back() + ": " + e.name + ": in this file, but not in " + kIndex);
      if (indexed && said->second != name)
        throw Error(all.files.back() + ": " + e.name + ": in this file, but by " + kIndex + " in " + said->second);
      const std::string tensor = e.name;
      if (const auto [there, fresh] = all.tensors.try_emplace(tensor, SafetensorsFolder::Place{file, std::move(e)}); !fresh)
        throw Error(all.files.back() + ": " + tensor + ": is in " + all.path_of(there->second) + " too");
    }
  }
  for (const auto& [tensor, file] : index)
    if (!all.tensors.contains(tensor))
      throw Error(folder + "/" + file + ": " + tensor + ": missing, though " + kIndex + " names it");
  return all;
}

bool is_safetensors_float(const std::string& dtype) {
  return dtype == "BF16" || dtype == "F32" || dtype == "F64" || dtype == "F16";
}

const char* safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "F64";
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    default:
      fail("safetensors: not a floating type", {{"dtype", std::int64_t(dtype)}});
  }
}

void read_safetensors_values(const std::string& path, const SafetensorsEntry& e, std::int64_t first, Tensor to) {
  check(is_safetensors_float(e.dtype) && first >= 0 && first + to.count() <= e.elements(), "safetensors: values out of range",
        {{"first", first}, {"count", to.count()}, {"elements", e.elements()}});
  const std::int64_t size = bits_of(e.dtype) / 8;
  std::vector<std::uint8_t> raw(std::size_t(to.count() * size));
  read_bytes(path, e.begin + first * size, to.count() * size, raw.data());
  if (e.dtype == "BF16") return convert<bf16>(raw.data(), to);
  if (e.dtype == "F32") return convert<float>(raw.data(), to);
  if (e.dtype == "F64") return convert<double>(raw.data(), to);
  convert<F16>(raw.data(), to);
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries) : path_(path), file_(path) {
  std::string header = "{";
  for (const SafetensorsEntry& e : entries) {
    const std::int64_t bytes = e.elements() * bits_of(e.dtype) / 8;
    header += (header.size() > 1 ? "," : "") + Json(e.name).dump() + ":{\"dtype\":\"" + e.dtype +
              "\",\"shape\":" + Json(e.shape).dump() + ",\"data_offsets\":[" + std::to_string(missing_) + "," +
              std::to_string(missing_ + bytes) + "]}";
    missing_ += bytes;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the tensors begin where any type may
  std::string length;
  for (int byte = 0; byte < int(kLengthBytes); ++byte) length += char(std::uint64_t(header.size()) >> 8 * byte & 255);
  file_.append(length);
  file_.append(header);
}

void SafetensorsWriter::append(const void* bytes, std::int64_t count) {
  missing_ -= count;
  file_.append({static_cast<const char*>(bytes), std::size_t(count)});
}

void SafetensorsWriter::close() {
  check(missing_ == 0, "safetensors: the tensors' bytes are not those of the header", {{"missing", missing_}});
  sync_file(path_);
}

void write_safetensors_index(const std::string& folder, const std::vector<SafetensorsIndexEntry>& entries,
                             std::int64_t total_bytes) {
  std::string text = "{\n  \"metadata\": {\"total_size\": " + std::to_string(total_bytes) + "},\n  \"weight_map\": {";
  for (std::size_t i = 0; i < entries.size(); ++i)
    text += (i > 0 ? ",\n    " : "\n    ") + Json(entries[i].name).dump() + ": " + Json(entries[i].file).dump();
  write_text_atomically(folder + "/" + kIndex, text + "\n  }\n}\n");
}

}  // namespace moetrain::io
