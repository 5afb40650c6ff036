// batch_source_test.cpp -- is sequence n the same whoever asks, is every token met once an epoch, and do labels stop at documents?
#include "io/batch_source.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "io/permutation.h"
#include "io/token_file.h"
#include "memory/check.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using io::Batch;
using io::BatchSource;
using io::DataFormat;
using io::DataOptions;
using test::contains;
using test::error_of;
using Ids = std::vector<std::int32_t>;
using Offsets = std::vector<std::int64_t>;

namespace {

DataOptions options(std::vector<std::string> paths, DataFormat format, std::int64_t S, bool packing, bool shuffle) {
  return {.paths = std::move(paths),
          .format = format,
          .sequence_length = S,
          .packing = packing,
          .shuffle = shuffle,
          .seed = 42,
          .exclude = {},
          .skip_bad_lines = false,
          .vocab_size = 1000};
}

// A token file of n ascending ids, so that a window tells its place, with documents of 1 .. 7 tokens.
std::string ascending(const test::TempFolder& folder, const std::string& name, std::int64_t first, std::int64_t n) {
  io::TokenData data;
  for (std::int64_t i = 0, document = 0; i < n; ++i) {
    if (i == document) {
      data.documents.push_back(i);
      document += 1 + (i * 5 + first) % 7;
    }
    data.tokens.push_back(first + i);
  }
  data.vocab_size = 1000;
  io::write_token_file(folder / name, data);
  return folder / name;
}

}  // namespace

TEST_CASE("packed windows, worked by hand", "[io][cpu]") {
  const test::TempFolder folder;
  folder.file("1.txt", "abc");
  folder.file("2.txt", "d");
  folder.file("3.txt", "efgh");
  folder.file("0.txt", "");  // skipped
  const BatchSource source(options({folder.path()}, DataFormat::bytes, 4, true, false));
  // stream: a b c 256 | d 256 | e f g h 256
  CHECK(source.tokens() == 11);
  REQUIRE(source.windows() == 3);
  const Batch first = source.read(0, 1);
  CHECK(first.tokens == Ids{'a', 'b', 'c', 256});
  CHECK(first.labels == Ids{'b', 'c', 256, -100});
  CHECK(first.documents == Offsets{0, 4});
  const Batch both = source.read(1, 2);
  CHECK(both.tokens == Ids{'d', 256, 'e', 'f', 'g', 'h', 256});
  CHECK(both.labels == Ids{256, -100, 'f', 'g', 'h', 256, -100});  // f sees g past the end of its window
  CHECK(both.sequences == Offsets{0, 4, 7});
  CHECK(both.documents == Offsets{0, 2, 4, 7});
  CHECK(both.label_count() == 5);
  const Batch wrapped = source.read(2, 2);
  CHECK(wrapped.tokens == Ids{'g', 'h', 256, 'a', 'b', 'c', 256});
}

TEST_CASE("slices of windows, worked by hand", "[io][cpu]") {
  const test::TempFolder folder;
  io::write_token_file(folder / "t.h5", {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {0, 1, 4}, {}, 1000, ""});
  const BatchSource source(options({folder / "t.h5"}, DataFormat::tokens, 8, true, false));
  // windows: 1 | 2 3 4 | 5 6 7 8, 9 10; in slices of 4 a document begins at the border, in slices of 2 some go over it
  const Batch half = source.read(0, 2, {1, 2});
  CHECK(half.tokens == Ids{5, 6, 7, 8});
  CHECK(half.labels == Ids{6, 7, 8, 9});
  CHECK(half.sequences == Offsets{0, 4, 4});  // of the short window it has nothing
  CHECK(half.documents == Offsets{0, 4, 4});
  REQUIRE(half.pieces.size() == 2);
  CHECK(half.pieces[0].before == 0);
  CHECK_FALSE(half.pieces[0].goes_on);  // a window ends here, the document in the next window is another sequence's
  CHECK(half.pieces[1].length == 2);
  const Batch second = source.read(0, 1, {1, 4}), fourth = source.read(0, 1, {3, 4});
  CHECK(second.tokens == Ids{3, 4});
  CHECK(second.labels == Ids{4, -100});
  CHECK(second.documents == Offsets{0, 2});
  CHECK(second.pieces[0].before == 1);
  CHECK_FALSE(second.pieces[0].goes_on);
  CHECK(second.pieces[0].length == 8);
  CHECK(fourth.tokens == Ids{7, 8});
  CHECK(fourth.pieces[0].before == 2);
  CHECK(source.read(0, 1, {0, 4}).pieces[0].goes_on);
  CHECK(source.read(0, 1, {2, 4}).pieces[0].goes_on);
  CHECK_THROWS_AS(source.read(0, 1, {0, 3}), Error);  // 3 does not divide 8
}

TEST_CASE("the slices of any window join to it", "[io][cpu]") {
  const test::TempFolder folder;
  const std::vector<std::string> paths = {ascending(folder, "b.h5", 0, 301), ascending(folder, "a.h5", 301, 57)};
  const bool packing = GENERATE(true, false);
  const std::int64_t S = 16, parts = GENERATE(2, 4, 16);
  CAPTURE(packing, parts);
  const BatchSource source(options(paths, DataFormat::tokens, S, packing, true));
  for (std::int64_t n = 0; n < source.windows(); ++n) {
    const Batch whole = source.read(n, 1);
    Batch joined;
    joined.documents = {0};
    for (std::int64_t part = 0; part < parts; ++part) {
      const Batch slice = source.read(n, 1, {part, parts});
      const auto base = std::int64_t(joined.tokens.size());
      const bool continues = slice.pieces[0].before > 0;
      if (continues) CHECK(slice.pieces[0].before == base - joined.documents.back());
      for (std::size_t d = continues; d + 1 < slice.documents.size(); ++d)
        if (base + slice.documents[d] > joined.documents.back()) joined.documents.push_back(base + slice.documents[d]);
      joined.tokens.insert(joined.tokens.end(), slice.tokens.begin(), slice.tokens.end());
      joined.labels.insert(joined.labels.end(), slice.labels.begin(), slice.labels.end());
      CHECK(slice.pieces[0].length == whole.sequences.back());
      const auto end = std::int64_t(joined.tokens.size());
      const bool starts = std::binary_search(whole.documents.begin(), whole.documents.end(), end);
      CHECK(slice.pieces[0].goes_on == (!slice.tokens.empty() && !starts));
    }
    if (joined.documents.back() < whole.sequences.back()) joined.documents.push_back(whole.sequences.back());
    CHECK(joined.tokens == whole.tokens);
    CHECK(joined.labels == whole.labels);
    CHECK(joined.documents == whole.documents);
  }
}

TEST_CASE("windows without packing never cross a document", "[io][cpu]") {
  const test::TempFolder folder;
  io::write_token_file(folder / "t.h5", {{1, 2, 3, 4, 5, 6, 7, 8}, {0, 1, 6}, {}, 1000, ""});
  const BatchSource source(options({folder / "t.h5"}, DataFormat::tokens, 2, false, false));
  REQUIRE(source.windows() == 5);  // [1] [2 3] [4 5] [6] [7 8]
  const Batch all = source.read(0, 5);
  CHECK(all.tokens == Ids{1, 2, 3, 4, 5, 6, 7, 8});
  CHECK(all.labels == Ids{-100, 3, 4, 5, 6, -100, 8, -100});
  CHECK(all.sequences == Offsets{0, 1, 3, 5, 6, 8});
  CHECK(all.documents == all.sequences);
}

TEST_CASE("labels of a file stand beside its tokens and replace the ids", "[io][cpu]") {
  const test::TempFolder folder;
  io::write_token_file(folder / "a.h5", {{1, 2, 3, 4}, {0, 3}, {-100, 20, -100, 40}, 1000, ""});
  io::write_token_file(folder / "b.h5", {{5, 6, 7}, {}, {}, 1000, ""});
  const BatchSource source(options({folder / "a.h5", folder / "b.h5"}, DataFormat::tokens, 5, true, false));
  const Batch all = source.read(0, 2);
  CHECK(all.tokens == Ids{1, 2, 3, 4, 5, 6, 7});
  CHECK(all.labels == Ids{20, -100, -100, -100, 6, 7, -100});
  CHECK(all.label_count() == 3);
}

TEST_CASE("packed conversations are documents of their own, and only labelled tokens are predicted", "[io][cpu]") {
  const test::TempFolder folder;
  // Two conversations and a third without a label; in the second the first token has one, which nothing predicts.
  io::write_token_file(
      folder / "c.h5",
      {{1, 2, 3, 4, 5, 6, 7, 8, 9}, {0, 4, 7}, {-100, -100, 3, 4, 5, -100, 7, -100, -100}, 1000, "", "c.jsonl:2: bad\n"});
  auto chat = options({folder / "c.h5"}, DataFormat::chat, 6, true, false);
  CHECK(contains(error_of([&] { BatchSource source(chat); }), "c.jsonl:2: bad"));
  chat.skip_bad_lines = true;
  const BatchSource source(chat);
  CHECK(source.remarks().size() == 2);
  const Batch all = source.read(0, 2);
  CHECK(all.tokens == Ids{1, 2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(all.labels == Ids{-100, 3, 4, -100, -100, 7, -100, -100, -100});
  CHECK(all.sequences == Offsets{0, 6, 9});
  CHECK(all.documents == Offsets{0, 4, 6, 7, 9});
  CHECK(all.label_count() == 3);
}

TEST_CASE("every epoch meets every token and every label once, in its own order", "[io][cpu]") {
  const test::TempFolder folder;
  const std::vector<std::string> paths = {ascending(folder, "b.h5", 0, 301), ascending(folder, "a.h5", 301, 57)};
  const bool packing = GENERATE(true, false);
  const std::int64_t S = GENERATE(1, 3, 16);
  CAPTURE(packing, S);
  const BatchSource source(options(paths, DataFormat::tokens, S, packing, true));
  const BatchSource plain(options(paths, DataFormat::tokens, S, packing, false));
  const auto W = source.windows();
  std::vector<Ids> orders;
  const Batch straight = plain.read(0, W);
  CHECK(std::is_sorted(straight.tokens.begin(), straight.tokens.end()));
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    Batch all = source.read(epoch * W, W);
    orders.push_back(all.tokens);
    Ids met = all.tokens, want(358);
    for (int i = 0; i < 358; ++i) want[std::size_t(i)] = i;
    std::sort(met.begin(), met.end());
    CHECK(met == want);
    CHECK(all.label_count() == straight.label_count());
    for (std::size_t t = 0; t < all.tokens.size(); ++t)
      if (all.labels[t] != -100) CHECK(all.labels[t] == all.tokens[t] + 1);
    CHECK(std::is_sorted(all.documents.begin(), all.documents.end(), std::less_equal<>()));  // strictly ascending
    CHECK(std::includes(all.documents.begin(), all.documents.end(), all.sequences.begin(), all.sequences.end()));
    CHECK(all.documents.back() == 358);
  }
  CHECK(orders[0] != orders[1]);
  CHECK(orders[1] != orders[2]);
  CHECK(orders[0] != straight.tokens);
}

TEST_CASE("sequence n does not depend on how the data is asked for", "[io][cpu]") {
  const test::TempFolder folder;
  const auto path = ascending(folder, "t.h5", 0, 500);
  const BatchSource source(options({path}, DataFormat::tokens, 7, true, true));
  const std::int64_t W = source.windows(), global_batch = 12;
  const Batch whole = source.read(0, 3 * W);
  const auto sequence = [](const Batch& b, std::int64_t i) {
    return Ids(b.tokens.begin() + b.sequences[std::size_t(i)], b.tokens.begin() + b.sequences[std::size_t(i) + 1]);
  };
  // Two steps on 4 coordinates, then the run goes on with 3: together they read what one coordinate would.
  std::map<std::int64_t, Ids> met;
  std::int64_t consumed = 0;
  for (const std::int64_t C : {4, 4, 3, 1}) {
    for (std::int64_t micro = 0; micro < global_batch / C; ++micro)
      for (std::int64_t c = 0; c < C; ++c) {
        const std::int64_t n = consumed + micro * C + c;
        CHECK(met.emplace(n, source.read(n, 1).tokens).second);
      }
    consumed += global_batch;
  }
  REQUIRE(std::int64_t(met.size()) == consumed);
  for (const auto& [n, tokens] : met) CHECK(tokens == sequence(whole, n));
  const Batch later = BatchSource(options({path}, DataFormat::tokens, 7, true, true)).read(W + 5, 3);
  for (std::int64_t i = 0; i < 3; ++i) CHECK(sequence(later, i) == sequence(whole, W + 5 + i));
  auto other = options({path}, DataFormat::tokens, 7, true, true);
  other.seed = 43;
  CHECK(BatchSource(other).read(0, W).tokens != source.read(0, W).tokens);
}

TEST_CASE("the order is one to one for every size and looks like no line", "[io][cpu]") {
  for (std::int64_t n = 1; n <= 300; ++n) {
    std::vector<bool> met(static_cast<std::size_t>(n), false);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto place = io::permuted(i, n, 7, 3);
      REQUIRE((place >= 0 && place < n));
      REQUIRE_FALSE(met[std::size_t(place)]);
      met[std::size_t(place)] = true;
    }
  }
  // The correlation of a random order with the straight one has deviation 1 / sqrt(n).
  const std::int64_t n = 100000;
  double product = 0;
  std::int64_t neighbours = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto place = io::permuted(i, n, 1, 0);
    product += (double(i) - double(n - 1) / 2) * (double(place) - double(n - 1) / 2);
    neighbours += std::abs(place - io::permuted((i + 1) % n, n, 1, 0)) == 1;
  }
  CHECK(std::abs(product * 12 / (double(n) * double(n) * double(n))) < 5 / std::sqrt(double(n)));
  CHECK(neighbours < 12);  // two are expected
  const std::int64_t large = (std::int64_t{1} << 40) + 12345;
  CHECK(io::permuted(large - 1, large, 1, 0) < large);
  CHECK(io::permuted(5, large, 1, 0) != io::permuted(5, large, 1, 1));
}

TEST_CASE("data that cannot be read is refused by name, and the job is blamed where it is the job", "[io][cpu]") {
  const test::TempFolder folder;
  const auto fault = [](const DataOptions& o) { return error_of([&] { BatchSource source(o); }); };
  const auto text = folder.file("t.txt", "text");
  CHECK(fault(options({folder / "no"}, DataFormat::bytes, 4, true, true)) == "2: " + (folder / "no") + ": no such file or folder");
  CHECK(contains(fault(options({}, DataFormat::bytes, 4, true, true)), "2: data: no path is given"));
  CHECK(contains(fault(options({text}, DataFormat::bytes, 0, true, true)), "2: data: sequence_length is 0"));
  auto small = options({text}, DataFormat::bytes, 4, true, true);
  small.vocab_size = 256;
  CHECK(contains(fault(small), "2: data: format bytes has the ids 0 .. 256, vocab_size 256 is too small"));
  small.vocab_size = 257;
  CHECK(fault(small) == "nothing was thrown");
  const auto empty = folder.file("empty.txt", "");
  CHECK(fault(options({empty}, DataFormat::bytes, 4, true, true)) == "3: " + empty + ": empty: it holds no bytes");
  std::filesystem::create_directories(folder / "hollow");
  folder.file("hollow/empty.txt", "");
  folder.file("hollow/.hidden", "text");
  CHECK(fault(options({folder / "hollow"}, DataFormat::bytes, 4, true, true)) ==
        "3: " + (folder / "hollow") + ": the folder holds no file with contents");
  CHECK(contains(fault(options({text}, DataFormat::tokens, 4, true, true)), "3: " + text + ": not an HDF5 file (4 bytes)"));
  io::write_token_file(folder / "bad.h5", {{1, 2, 3, 4, 1000, 5}, {}, {}, 1000, ""});
  const BatchSource source(options({text, ascending(folder, "good.h5", 0, 10)}, DataFormat::bytes, 4, true, false));
  const BatchSource bad(options({folder / "good.h5", folder / "bad.h5"}, DataFormat::tokens, 4, true, false));
  CHECK(bad.read(0, 2).tokens.size() == 8);
  CHECK(error_of([&] { bad.read(3, 1); }) == "3: " + (folder / "bad.h5") + ": token 4 is id 1000, the vocabulary has 1000");
}

TEST_CASE("excluded names are left out of a folder, not out of a path that is given") {
  test::TempFolder folder;
  for (const char* name : {"MPL-2.0", "GPL-3", "GPL-2"}) folder.file(name, std::string(10, 'x'));
  auto with = [&](std::vector<std::string> exclude, std::string path) {
    return BatchSource({.paths = {path}, .sequence_length = 4, .exclude = std::move(exclude), .vocab_size = 1000}).tokens();
  };
  CHECK(with({}, folder.path()) == 33);
  CHECK(with({"MPL-2.0"}, folder.path()) == 22);
  CHECK(with({"GPL*"}, folder.path()) == 11);
  CHECK(with({"MPL-2.0"}, folder.path() + "/MPL-2.0") == 11);
  CHECK(with({"[GM]*"}, folder.path()) == 33);  // not as a shell: patterns are those of parameter names
  CHECK(contains(error_of([&] { with({"*"}, folder.path()); }), "no file with contents"));
}

TEST_CASE("a folder of links to files elsewhere is data, and a link that leads nowhere is refused by name", "[io][cpu]") {
  const test::TempFolder folder;
  folder.file("blobs/1", std::string(10, 'x'));
  folder.file("data/own", std::string(20, 'y'));
  std::filesystem::create_symlink("own", folder / "data/same");
  std::filesystem::create_symlink("../blobs/1", folder / "data/link");
  CHECK(BatchSource(options({folder / "data"}, DataFormat::bytes, 4, true, true)).tokens() == 32);
  std::filesystem::create_symlink("../blobs/2", folder / "data/lost");
  CHECK(error_of([&] { BatchSource source(options({folder / "data"}, DataFormat::bytes, 4, true, true)); }) ==
        "3: " + (folder / "data/lost") + ": cannot open: No such file or directory");
}
