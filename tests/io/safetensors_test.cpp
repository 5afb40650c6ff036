// safetensors_test.cpp -- headers doubted, folders with and without an index, values converted, files written and read back.
#include "io/safetensors.h"

#include <cstring>

#include "io/mxfp4.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

std::string file_text(const std::string& header, const std::string& data) {
  std::string length(8, '\0');
  const std::uint64_t n = header.size();
  std::memcpy(length.data(), &n, 8);
  return length + header + data;
}
std::string one(const std::string& name, int bytes) {
  return file_text("{\"" + name + "\":{\"dtype\":\"U8\",\"shape\":[" + std::to_string(bytes) + "],\"data_offsets\":[0," +
                       std::to_string(bytes) + "]}}",
                   std::string(std::size_t(bytes), 'x'));
}
std::vector<double> read(const io::SafetensorsFolder& folder, const std::string& name, std::int64_t first, std::int64_t count,
                         DType dtype) {
  const auto& place = folder.tensors.at(name);
  std::vector<std::byte> raw(std::size_t(count * size_of(dtype)));
  const Tensor to(raw.data(), dtype, {count});
  io::read_safetensors_values(folder.path_of(place), place.entry, first, to);
  return values_of(to);
}

}  // namespace

TEST_CASE("a written safetensors file is read back by name, shape, type and value", "[io][cpu]") {
  const TempFolder folder;
  const float wide[3] = {1.5F, -2, 1e-30F};
  const bf16 narrow[2] = {bf16(0.5F), bf16(-3.F)};
  io::SafetensorsWriter writer(folder / "model.safetensors", {{.name = "a \"b\"", .dtype = "F32", .shape = {3, 1}},
                                                              {.name = "c", .dtype = "BF16", .shape = {2}}});
  writer.append(wide, sizeof wide);
  CHECK(contains(error_of([&] { writer.close(); }), "missing=4"));
  writer.append(narrow, sizeof narrow);
  writer.close();
  const auto read_back = io::read_safetensors_folder(folder.path());
  REQUIRE(read_back.tensors.size() == 2);
  CHECK(read_back.tensors.at("a \"b\"").entry.text() == "F32 [3, 1]");
  CHECK(read_back.tensors.at("c").entry.text() == "BF16 [2]");
  CHECK(read_back.tensors.at("a \"b\"").entry.begin % 8 == 0);
  CHECK(read(read_back, "a \"b\"", 0, 3, DType::f32) == std::vector<double>{1.5, -2, double(1e-30F)});
  CHECK(read(read_back, "a \"b\"", 1, 1, DType::bf16) == std::vector<double>{-2});
  CHECK(read(read_back, "c", 0, 2, DType::f64) == std::vector<double>{0.5, -3});
}

TEST_CASE("half precision is read to the last of its bits", "[io][cpu]") {
  const TempFolder folder;
  const std::uint16_t bits[5] = {0x3c00, 0xc001, 0x0001, 0x7bff,
                                 0x83ff};  // 1, -2 - 2^-9, the least, the largest, below the normal ones
  folder.file("x.safetensors", file_text(R"({"h":{"dtype":"F16","shape":[5],"data_offsets":[0,10]}})",
                                         std::string(reinterpret_cast<const char*>(bits), 10)));
  CHECK(read(io::read_safetensors_folder(folder.path()), "h", 0, 5, DType::f64) ==
        std::vector<double>{1, -2 - 0x1p-9, 0x1p-24, 65504, -1023 * 0x1p-24});
}

TEST_CASE("an index decides which file holds a tensor, and is held to the files", "[io][cpu]") {
  const TempFolder folder;
  folder.file("a.safetensors", one("x", 3));
  folder.file("b.safetensors", one("y", 4));
  CHECK(io::read_safetensors_folder(folder.path()).tensors.size() == 2);
  auto indexed = [&](const std::string& map) {
    folder.file("model.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
    return error_of([&] { io::read_safetensors_folder(folder.path()); });
  };
  CHECK(indexed(R"("x": "a.safetensors", "y": "b.safetensors")") == "nothing was thrown");
  CHECK(contains(indexed(R"("x": "a.safetensors", "y": "a.safetensors")"), "a.safetensors: y: missing"));
  CHECK(contains(indexed(R"("x": "b.safetensors", "y": "b.safetensors")"), "b.safetensors: x: missing"));
  CHECK(contains(indexed(R"("x": "a.safetensors", "z": "b.safetensors")"), "b.safetensors: y: in this file, but not in"));
  CHECK(contains(indexed(R"("x": "c.safetensors")"), "c.safetensors: cannot open"));
  CHECK(contains(indexed(R"("x": "../a.safetensors")"), "is not the name of a file beside it"));
  CHECK(contains(indexed(R"("x": 3)"), "not an index"));
}

TEST_CASE("a name in two files, overlapping bytes, and shapes past counting are refused", "[io][cpu]") {
  const TempFolder folder;
  CHECK(contains(error_of([&] { io::read_safetensors_folder(folder.path()); }), "holds neither"));
  folder.file("a.safetensors", one("x", 3));
  folder.file("b.safetensors", one("x", 4));
  CHECK(contains(error_of([&] { io::read_safetensors_folder(folder.path()); }),
                 "b.safetensors: x: is in " + folder / "a.safetensors"));
  const std::string path = folder.file(
      "c.st",
      file_text(R"({"p":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"q":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
                "1234567"));
  CHECK(contains(error_of([&] { io::read_safetensors_header(path); }), "q: begins at byte"));
  const std::string huge =
      folder.file("d.st", file_text(R"({"p":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", ""));
  CHECK(contains(error_of([&] { io::read_safetensors_header(huge); }), "p: its shape has more elements"));
}

TEST_CASE("a name that stands twice, bytes of no tensor and sizes that are no whole numbers are refused", "[io][cpu]") {
  const TempFolder folder;
  const std::string a = R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})", b = R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]})";
  const auto refused = [&](const std::string& header, const std::string& data) {
    folder.file("model.safetensors", file_text(header, data));
    return error_of([&] { io::read_safetensors_folder(folder.path()); });
  };
  folder.file("model.safetensors", file_text("{" + a + "}", "xx"));
  CHECK(io::read_safetensors_folder(folder.path()).tensors.size() == 1);
  CHECK(contains(refused("{" + a + "," + a + "}", "xx"), "the key 'a' stands there twice"));
  CHECK(contains(refused("{" + a + "," + b + "}", "xxxxx"), "belong to no tensor"));
  CHECK(contains(refused("{" + a + "}", "xxx"), "belong to no tensor"));
  CHECK(contains(refused(R"({"a":{"dtype":"U8","shape":[2.5],"data_offsets":[0,2]}})", "xx"), "which is no whole number"));
}

TEST_CASE("offsets that no file has are refused before they are counted with", "[io][cpu]") {
  const TempFolder folder;
  for (const char* offsets : {"[-8,8]", "[0,9223372036854775807]", "[18446744073709551615,8]", "[8]", "[0,16]", "[8,0]"}) {
    CAPTURE(offsets);
    const std::string path = folder.file(
        "x.st", file_text("{\"p\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":" + std::string(offsets) + "}}", "12345678"));
    const std::string why = error_of([&] { io::read_safetensors_header(path); });
    CHECK(contains(why, "3: " + path));
    CHECK(contains(why, "p: "));
  }
}

TEST_CASE("mxfp4 decodes every code at every scale to what its bits say", "[io][cpu]") {
  std::uint8_t packed[16], scale[1];
  for (int byte = 0; byte < 16; ++byte)
    packed[byte] = std::uint8_t(byte % 8 * 2 | (byte % 8 * 2 + 1) << 4);  // codes 0 .. 15, twice
  const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int s = 0; s < 253; ++s) {
    scale[0] = std::uint8_t(s);
    bf16 out[32];
    io::decode_mxfp4(packed, scale, Tensor(out, DType::bf16, {1, 32}));
    for (int i = 0; i < 32; ++i) REQUIRE(double(float(out[i])) == std::ldexp((i % 16 < 8 ? 1 : -1) * magnitudes[i % 8], s - 127));
  }
  scale[0] = 255;
  float out[32];
  io::decode_mxfp4(packed, scale, Tensor(out, DType::f32, {1, 32}));
  CHECK(std::isnan(out[3]));
  float odd[48];
  CHECK(contains(error_of([&] { io::decode_mxfp4(packed, scale, Tensor(odd, DType::f32, {1, 48})); }), "whole groups"));
}
