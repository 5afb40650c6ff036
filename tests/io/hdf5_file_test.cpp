// hdf5_file_test.cpp -- do data sets keep their bits, and is every wrong file, type, row and source refused in words?
#include "io/hdf5_file.h"

#include <hdf5.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "io/files.h"
#include "memory/check.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using io::Access;
using io::Hdf5File;
using test::contains;
using test::error_of;

namespace {

bool same_bits(ConstTensor a, ConstTensor b) {
  return a.dtype == b.dtype && a.shape == b.shape && std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0;
}

}  // namespace

TEST_CASE("data sets of every type come back bit for bit", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  const auto dtype = GENERATE(DType::f32, DType::f64, DType::bf16, DType::i32, DType::i64);
  CAPTURE(name_of(dtype));
  const auto x = bench.filled(dtype, {3, 2, 2}, [](std::int64_t i) { return i * 37 - 100; });
  if (dtype == DType::f32) std::memset(x.data, 0xff, 4);  // a NaN with all its bits
  if (dtype == DType::bf16) {
    const std::uint16_t odd[] = {0x7f80, 0xff80, 0x7fc1, 0x0001, 0x8000, 0x7f7f};  // infinities, NaN, smallest, -0, largest
    std::memcpy(x.data, odd, sizeof odd);
  }
  const std::string path = folder / "x.h5", name = "model.layers.0.block_sparse_moe.experts.w1";
  {
    auto file = Hdf5File::create(path);
    file.write(name, x);
    file.write("optimizer/exp_avg/" + name, x);
    file.close();
  }
  const auto file = Hdf5File::open(path);
  const auto info = file.info(name);
  CHECK(info.dtype == dtype);
  CHECK(info.type == name_of(dtype));
  CHECK(info.shape == Shape{3, 2, 2});
  const auto y = bench.empty(dtype, {3, 2, 2});
  file.read("optimizer/exp_avg/" + name, y);
  CHECK(same_bits(x, y));
  const auto rows = bench.empty(dtype, {2, 2, 2});
  file.read_rows(name, 1, rows);
  CHECK(same_bits(x.rows(1, 3), rows));
  CHECK(bench.guards_hold());
  CHECK(file.names() == std::vector<std::string>{name});
  CHECK(file.groups() == std::vector<std::string>{"optimizer"});
  CHECK(file.names("optimizer/exp_avg") == std::vector<std::string>{name});
  CHECK(file.has("optimizer/exp_avg/" + name));
  CHECK_FALSE(file.has("optimizer/exp_avg_sq/" + name));
}

TEST_CASE("bf16 in a file is the same number to any other program", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  const std::vector<double> values = {1, -2.5, 0.15625, 3.3895313892515355e38, 9.183549615799121e-41};  // the last is the smallest
  Hdf5File::create(folder / "x.h5").write("w", bench.of(DType::bf16, {5}, values));
  const hid_t file = H5Fopen((folder / "x.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), dataset = H5Dopen2(file, "w", H5P_DEFAULT);
  std::vector<double> read(5);
  CHECK(H5Dread(dataset, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, read.data()) >= 0);
  H5Dclose(dataset);
  H5Fclose(file);
  CHECK(read == values);
}

TEST_CASE("rows are written where they belong and a scalar is a data set too", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  auto file = Hdf5File::create(folder / "x.h5");
  file.create_dataset("a", DType::f32, {5, 3});
  const auto x = bench.normal(DType::f32, {5, 3});
  file.write_rows("a", 3, x.rows(3, 5));
  file.write_rows("a", 0, x.rows(0, 3));
  file.write_rows("a", 2, x.rows(2, 2));  // no rows: nothing happens
  const auto y = bench.empty(DType::f32, {5, 3});
  file.read("a", y);
  CHECK(same_bits(x, y));
  const auto scalar = bench.of(DType::f64, {}, {2.5}), back = bench.empty(DType::f64, {});
  file.write("s", scalar);
  file.read("s", back);
  CHECK(same_bits(scalar, back));
  CHECK(file.info("s").shape == Shape{});
}

TEST_CASE("another type, another shape and rows outside are refused with both sides named", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  const std::string path = folder / "x.h5";
  auto file = Hdf5File::create(path);
  file.write("w", bench.normal(DType::bf16, {4, 3}));
  CHECK(error_of([&] { file.read("w", bench.empty(DType::f32, {4, 3})); }) == "3: " + path + ": w holds bf16, fp32 is asked for");
  CHECK(contains(error_of([&] { file.write("w", bench.normal(DType::f64, {4, 3})); }), "w holds bf16, fp64 is asked for"));
  CHECK(contains(error_of([&] {
                   file.read("w", bench.empty(DType::bf16, {3, 4}));
                 }),
                 path + ": w is [4, 3], [3, 4] at row 0 does not fit"));
  CHECK(contains(error_of([&] {
                   file.read_rows("w", 3, bench.empty(DType::bf16, {2, 3}));
                 }),
                 "w is [4, 3], [2, 3] at row 3 does not fit"));
  CHECK(contains(error_of([&] { file.read_rows("w", -1, bench.empty(DType::bf16, {2, 3})); }), "at row -1 does not fit"));
  CHECK(contains(error_of([&] { file.read("v", bench.empty(DType::bf16, {1})); }), path + ": cannot open v: HDF5: "));
  CHECK(contains(error_of([&] { file.create_dataset("w", DType::f32, {1}); }), path + ": cannot create w: HDF5: "));
}

TEST_CASE("files that are absent, foreign or cut short are refused by name", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  const std::string path = folder / "x.h5";
  {
    auto file = Hdf5File::create(path);
    file.write("w", bench.normal(DType::f64, {1000}));
    file.close();
  }
  CHECK(error_of([&] { Hdf5File::open(folder / "no.h5"); }) ==
        "3: " + (folder / "no.h5") + ": cannot open: No such file or directory");
  CHECK(contains(error_of([&] { Hdf5File::open(folder.path()); }), folder.path() + ": cannot open: not a file"));
  const auto foreign = folder.file("f.h5", "this is a text, not data");
  CHECK(error_of([&] { Hdf5File::open(foreign); }) == "3: " + foreign + ": not an HDF5 file (24 bytes)");
  CHECK(contains(error_of([&] { Hdf5File::open(folder.file("e.h5", "")); }), "/e.h5: not an HDF5 file (0 bytes)"));
  CHECK(contains(error_of([&] { Hdf5File::create(folder / "no/x.h5"); }), "/no/x.h5: cannot create the file: HDF5: "));
  for (const int keep : {9, 5, 1}) {
    CAPTURE(keep);
    std::filesystem::resize_file(path, std::filesystem::file_size(path) * std::uintmax_t(keep) / 10);
    const auto message = error_of([&] { Hdf5File::open(path); });
    CHECK(contains(message, path));
    CHECK(contains(message, "truncated file"));
  }
}

TEST_CASE("a file opened to be read cannot be written", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  const auto x = bench.normal(DType::f32, {4});
  Hdf5File::create(folder / "x.h5").write("w", x);
  auto file = Hdf5File::open(folder / "x.h5");
  CHECK(contains(error_of([&] { file.write("w", x); }), "cannot write w"));
  auto again = Hdf5File::open(folder / "x.h5", Access::read);
  CHECK(again.has("w"));
}

TEST_CASE("an appendable data set grows by rows, is seen by a reader after a flush, and can be cut", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  const auto x = bench.filled(DType::i64, {5, 2, 3}, [](std::int64_t i) { return i; });
  auto file = Hdf5File::create(folder / "x.h5");
  file.create_appendable("column", DType::f64, {}, 2);
  file.create_appendable("counts", DType::i64, {2, 3}, 1);
  for (std::int64_t n = 0; n < 5; ++n) {
    const double value = 0.1 * double(n);
    file.append_row("column", {&value, DType::f64, {}});
    file.append_row("counts", x.rows(n, n + 1).reshape({2, 3}));
  }
  file.flush();
  {
    const auto reader = Hdf5File::open(folder / "x.h5");
    const auto y = bench.empty(DType::i64, {5, 2, 3});
    reader.read("counts", y);
    CHECK(same_bits(x, y));
  }
  file.set_rows("column", 3);
  const auto column = bench.empty(DType::f64, {3});
  file.read("column", column);
  CHECK(test::Bench::get(column, 2) == 0.2);
  CHECK_THROWS_AS(file.append_row("counts", x.rows(0, 2)), Error);
}

TEST_CASE("a virtual data set reads its parts, also after the folder moved, and never a missing one", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  const auto dtype = GENERATE(DType::bf16, DType::f64);
  const auto x = bench.normal(dtype, {7, 2});
  std::filesystem::create_directories(folder / "step");
  {
    Hdf5File::create(folder / "step/rank_0.h5").write("master/w", x.rows(0, 4));
    Hdf5File::create(folder / "step/rank_1.h5").write("master/w", x.rows(4, 6));
    auto whole = Hdf5File::create(folder / "step/checkpoint.h5");
    whole.create_virtual("master/w", dtype, {7, 2},
                         {{"rank_0.h5", "master/w", 0, 4}, {"rank_1.h5", "master/w", 4, 2}, {"rank_2.h5", "master/w", 6, 0}});
  }
  std::filesystem::rename(folder / "step", folder / "moved");
  const auto y = bench.zeros(dtype, {7, 2});
  {
    const auto whole = Hdf5File::open(folder / "moved/checkpoint.h5");
    CHECK(whole.info("master/w").dtype == dtype);
    whole.read("master/w", y);
    CHECK(same_bits(x.rows(0, 6), y.rows(0, 6)));
    CHECK(std::isnan(test::Bench::get(y, 12)));  // of no source
    const auto part = bench.empty(dtype, {3, 2});
    whole.read_rows("master/w", 2, part);
    CHECK(same_bits(x.rows(2, 5), part));
  }
  Hdf5File::create(folder / "moved/rank_1.h5").write("master/w", x.rows(4, 5));
  {
    const auto whole = Hdf5File::open(folder / "moved/checkpoint.h5");
    const auto message = error_of([&] { whole.read("master/w", y); });
    CHECK(contains(message, "checkpoint.h5: master/w has a part that cannot be read"));
    CHECK(contains(message, "rank_1.h5: master/w is [1, 2], 2 rows are needed"));
  }
  std::filesystem::remove(folder / "moved/rank_1.h5");
  const auto whole = Hdf5File::open(folder / "moved/checkpoint.h5");
  for (int twice = 0; twice < 2; ++twice)
    CHECK(contains(error_of([&] { whole.read("master/w", y); }), "rank_1.h5: cannot open: No such file"));
  const auto head = bench.empty(dtype, {4, 2});
  whole.read_rows("master/w", 0, head);  // touches only the part that is there
  CHECK(same_bits(x.rows(0, 4), head));
}

TEST_CASE("parts of rows and columns make a virtual data set whole, and are read as such", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  const auto dtype = GENERATE(DType::bf16, DType::f64);
  const auto x = bench.normal(dtype, {5, 7});
  const auto block = [&](std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
    return bench.filled(dtype, {rows, columns},
                        [&](std::int64_t i) { return test::Bench::get(x, (row + i / columns) * 7 + column + i % columns); });
  };
  const std::string view = folder / "checkpoint.h5";
  {
    Hdf5File::create(folder / "a.h5").write("w", block(0, 3, 0, 4));
    Hdf5File::create(folder / "b.h5").write("w", block(3, 2, 0, 4));
    Hdf5File::create(folder / "c.h5").write("w", block(0, 5, 4, 3));
    auto whole = Hdf5File::create(view);
    whole.create_virtual("w", dtype, {5, 7}, {{"a.h5", "w", 0, 3, 0, 4}, {"b.h5", "w", 3, 2, 0, 4}, {"c.h5", "w", 0, 5, 4, 3}});
    CHECK_THROWS_AS(whole.create_virtual("v", dtype, {5, 7}, {{"a.h5", "w", 0, 3, 4, 4}}), Error);
  }
  {
    const auto whole = Hdf5File::open(view);
    whole.check_complete("w");
    const auto y = bench.empty(dtype, {5, 7}), part = bench.empty(dtype, {3, 4});
    whole.read("w", y);
    CHECK(same_bits(x, y));
    whole.read_block("w", 1, 2, part);
    CHECK(same_bits(part, block(1, 3, 2, 4)));
    CHECK(contains(error_of([&] { whole.read_block("w", 1, 4, part); }), "[3, 4] at row 1, column 4 does not fit"));
  }
  std::filesystem::remove(folder / "c.h5");
  CHECK(contains(error_of([&] {
                   Hdf5File::open(view).read_block("w", 1, 2, bench.empty(dtype, {3, 4}));
                 }),
                 "c.h5: cannot open: No such file"));
}

TEST_CASE("attributes and long texts come back as they were written", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "x.h5", text = std::string(200000, 'j') + "\n\"é\"\n";
  {
    auto file = Hdf5File::create(path);
    file.set_attribute("step", std::int64_t(1));
    file.set_attribute("step", std::int64_t{1} << 60);
    file.set_attribute("seed", std::int64_t(-7));
    file.set_attribute("tokenizer", std::string("old"));
    file.set_attribute("tokenizer", std::string("some/name"));
    file.write_text("job", "short");
    file.write_text("job", text);
    file.write_text("none", "");
    file.close();
  }
  const auto file = Hdf5File::open(path);
  CHECK(file.integer_attribute("step") == std::int64_t{1} << 60);
  CHECK(file.integer_attribute("seed") == -7);
  CHECK_FALSE(file.integer_attribute("absent").has_value());
  CHECK(file.text_attribute("tokenizer") == "some/name");
  CHECK_FALSE(file.text_attribute("absent").has_value());
  CHECK(file.read_text("job") == text);
  CHECK(file.read_text("none").empty());
  CHECK(
      contains(error_of([&] { (void)file.integer_attribute("tokenizer"); }), path + ": attribute tokenizer is text, one integer"));
  CHECK(contains(error_of([&] { (void)file.text_attribute("step"); }), path + ": step is int64, not a text"));
}

TEST_CASE("unsigned integers are read as 64-bit numbers and floats are not integers", "[io][cpu]") {
  const test::TempFolder folder;
  test::Bench bench;
  const std::string path = folder / "x.h5";
  auto file = Hdf5File::create(path);
  file.write_unsigned("small", 16, {0, 65535, 7});
  file.write_unsigned("large", 32, {4294967295, 1});
  file.write("float", bench.normal(DType::f32, {3}));
  CHECK(file.read_integers("small", 1, 2) == std::vector<std::int64_t>{65535, 7});
  CHECK(file.read_integers("large", 0, 2) == std::vector<std::int64_t>{4294967295, 1});
  CHECK(file.info("small").type == "uint16");
  CHECK(file.info("small").integers);
  CHECK(contains(error_of([&] { file.read_integers("small", 2, 2); }), path + ": small holds 3 values, 2 at 2 are asked for"));
  CHECK(contains(error_of([&] { file.read_integers("float", 0, 2); }), path + ": float is fp32 of 1 dims, integers"));
  CHECK(contains(error_of([&] { file.write_unsigned("bad", 16, {1, 65536}); }), "(position=1, value=65536, limit=65535)"));
}
