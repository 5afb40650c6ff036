// token_file_test.cpp -- is every wrong data file refused with its name and the place of the fault?
#include "io/token_file.h"

#include <filesystem>

#include "memory/check.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using io::TokenData;
using io::TokenFile;
using test::contains;
using test::error_of;

namespace {

std::vector<std::int32_t> all_tokens(const TokenFile& file) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(file.tokens()));
  file.read(0, file.tokens(), ids.data());
  return ids;
}

}  // namespace

TEST_CASE("a token file gives back tokens, documents and labels in both widths", "[io][cpu]") {
  const test::TempFolder folder;
  const auto vocab = GENERATE(std::int64_t{100}, std::int64_t{163840});
  io::write_token_file(folder / "t.h5", {{1, 2, 3, vocab - 1}, {0, 3}, {-100, 2, -100, 5}, vocab, "mine"});
  const auto file = TokenFile::open_tokens(folder / "t.h5", vocab);
  CHECK(all_tokens(file) == std::vector<std::int32_t>{1, 2, 3, std::int32_t(vocab - 1)});
  CHECK(file.documents() == std::vector<std::int64_t>{0, 3});
  REQUIRE(file.has_labels());
  std::int32_t labels[2];
  file.read_labels(2, 2, labels);
  CHECK(labels[0] == -100);
  CHECK(labels[1] == 5);
  const auto raw = io::Hdf5File::open(folder / "t.h5");
  CHECK(raw.info("tokens").type == (vocab == 100 ? "uint16" : "uint32"));
  CHECK(raw.integer_attribute("vocab_size") == vocab);
  CHECK(raw.text_attribute("tokenizer") == "mine");
}

TEST_CASE("without documents and labels a token file is one document", "[io][cpu]") {
  const test::TempFolder folder;
  io::write_token_file(folder / "t.h5", {{1, 2}, {}, {}, 10, ""});
  const auto file = TokenFile::open_tokens(folder / "t.h5", 10);
  CHECK(file.documents() == std::vector<std::int64_t>{0});
  CHECK_FALSE(file.has_labels());
}

TEST_CASE("ids outside the vocabulary name file, position, id and vocabulary", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "t.h5";
  io::write_token_file(path, {{1, 2, 9, 3, 10}, {}, {0, 0, 0, 10, -1}, 10, ""});
  const auto file = TokenFile::open_tokens(path, 10);
  std::int32_t ids[5];
  file.read(0, 4, ids);
  CHECK(error_of([&] { file.read(2, 3, ids); }) == "3: " + path + ": token 4 is id 10, the vocabulary has 10");
  CHECK(error_of([&] { file.read_labels(1, 3, ids); }) ==
        "3: " + path + ": label 3 is 10, neither -100 nor in the vocabulary of 10");
  CHECK(contains(error_of([&] { file.read_labels(4, 1, ids); }), "label 4 is -1, neither"));
  CHECK_THROWS_AS(file.read(3, 3, ids), Error);
  io::write_token_file(folder / "wide.h5", {{1, 4294967295}, {}, {}, 100000, ""});
  const auto wide = TokenFile::open_tokens(folder / "wide.h5", 100000);
  CHECK(contains(error_of([&] { all_tokens(wide); }), "token 1 is id 4294967295, the vocabulary has 100000"));
}

TEST_CASE("what a token file says wrongly about itself is refused when it is opened", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "t.h5";
  const auto fault = [&](const TokenData& data) {
    io::write_token_file(path, data);
    return error_of([&] { TokenFile::open_tokens(path, 10); });
  };
  CHECK(fault({{1, 2, 3}, {0, 3}, {}, 10, ""}) == "3: " + path + ": documents[1] is 3, there are 3 tokens");
  CHECK(fault({{1, 2, 3}, {0, 2, 2}, {}, 10, ""}) == "3: " + path + ": documents[2] is 2, not after the one before, 2");
  CHECK(fault({{1, 2, 3}, {0, 2, 1}, {}, 10, ""}) == "3: " + path + ": documents[2] is 1, not after the one before, 2");
  CHECK(fault({{1, 2, 3}, {1}, {}, 10, ""}) == "3: " + path + ": documents[0] is 1, the first document begins at token 0");
  CHECK(contains(fault({{1, 2, 3}, {0, -1}, {}, 10, ""}), "documents[1] is -1, not after"));
  CHECK(fault({{1, 2, 3}, {}, {1, 2}, 10, ""}) == "3: " + path + ": labels has 2 values, tokens 3");
  CHECK(fault({{}, {}, {}, 10, ""}) == "3: " + path + ": empty: it holds no tokens");
  const float real[] = {1, 2, 3};
  {
    auto file = io::Hdf5File::create(path);
    file.write("other", {real, DType::f32, {3}});
  }
  CHECK(contains(error_of([&] { TokenFile::open_tokens(path, 10); }), path + ": not a token file: there is no data set tokens"));
  {
    auto file = io::Hdf5File::create(path);
    file.write("tokens", {real, DType::f32, {3}});
  }
  CHECK(
      contains(error_of([&] { TokenFile::open_tokens(path, 10); }), path + ": tokens is fp32 [3], integers of one dim are needed"));
  {
    auto file = io::Hdf5File::create(path);
    const std::int32_t ids[] = {1, 2, 3, 4};
    file.write("tokens", {ids, DType::i32, {2, 2}});
  }
  CHECK(contains(error_of([&] { TokenFile::open_tokens(path, 10); }), "tokens is int32 [2, 2], integers of one dim are needed"));
}

TEST_CASE("a vocabulary that is none or more than the model's is refused when the file is opened", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "t.h5";
  for (const std::int64_t claimed : {-1, 0, 11}) {
    io::write_token_file(path, {{1, 2, 3}, {}, {}, claimed, ""});
    CHECK(error_of([&] { TokenFile::open_tokens(path, 10); }) ==
          "3: " + path + ": made for a vocabulary of " + std::to_string(claimed) + " (attribute vocab_size), the model's has 10");
  }
}

TEST_CASE("tokens that nobody wrote are refused when the file is opened", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "t.h5";
  const std::int32_t ids[] = {1, 2, 3};
  const auto fault = [&] { return error_of([&] { TokenFile::open_tokens(path, 10); }); };
  {
    auto file = io::Hdf5File::create(path);
    file.create_appendable("tokens", DType::i32, {}, 2);
    file.set_rows("tokens", 5);
  }
  CHECK(contains(fault(), "3: " + path + ": tokens was never written"));
  {
    auto file = io::Hdf5File::open(path, io::Access::write);
    file.write_rows("tokens", 0, {ids, DType::i32, {3}});
  }
  CHECK(contains(fault(), path + ": tokens was written only in part"));
  {
    auto file = io::Hdf5File::create(path);
    file.create_dataset("tokens", DType::i32, {3});
  }
  CHECK(contains(fault(), path + ": tokens was never written"));
  {
    auto file = io::Hdf5File::create(path);
    file.write("tokens", {ids, DType::i32, {3}});
    file.create_dataset("labels", DType::i32, {3});
  }
  CHECK(contains(fault(), path + ": labels was never written"));
}

TEST_CASE("a last chunk that reaches past the last token is whole", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "t.h5";
  const std::int32_t ids[] = {1, 2, 3, 4, 5};
  const auto chunk = GENERATE(std::int64_t{2}, std::int64_t{1000});
  {
    auto file = io::Hdf5File::create(path);
    file.create_appendable("tokens", DType::i32, {}, chunk);
    file.set_rows("tokens", 5);
    file.write_rows("tokens", 0, {ids, DType::i32, {5}});
  }
  CHECK(all_tokens(TokenFile::open_tokens(path, 10)) == std::vector<std::int32_t>{1, 2, 3, 4, 5});
}

TEST_CASE("tokens of another file are read, and refused when it is missing, empty or does not cover them", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "t.h5", part = folder / "part.h5";
  const std::int32_t ids[] = {1, 2, 3};
  const auto fault = [&] { return error_of([&] { TokenFile::open_tokens(path, 10); }); };
  const auto virtual_of = [&](std::int64_t rows, const std::string& source) {
    auto file = io::Hdf5File::create(path);
    file.create_virtual("tokens", DType::i32, {rows}, {{source, "ids", 0, 3}});
  };
  virtual_of(3, "part.h5");
  CHECK(contains(fault(), "3: " + path + ": tokens has a part that cannot be read: " + part + ": cannot open: No such file"));
  {
    auto file = io::Hdf5File::create(part);
    file.create_dataset("ids", DType::i32, {3});
  }
  CHECK(contains(fault(), path + ": tokens has a part that cannot be read: " + part + ": ids was never written"));
  io::Hdf5File::create(part).write("ids", {ids, DType::i32, {2}});
  CHECK(contains(fault(), part + ": ids is [2], 3 rows are needed"));
  io::Hdf5File::create(part).write("ids", {ids, DType::i32, {3}});
  {
    const auto file = TokenFile::open_tokens(path, 10);
    CHECK(all_tokens(file) == std::vector<std::int32_t>{1, 2, 3});
  }
  virtual_of(4, "part.h5");
  CHECK(contains(fault(), path + ": tokens has 4 values, of which 1 come from no source"));
  {
    auto file = io::Hdf5File::create(path);
    file.create_virtual("tokens", DType::i32, {3}, {{".", "tokens", 0, 3}});
  }
  CHECK(contains(fault(), path + ": tokens comes from sources of sources"));
}

TEST_CASE("a token file cut short is refused by name", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "t.h5";
  io::write_token_file(path, {std::vector<std::int64_t>(10000, 3), {}, {}, 10, ""});
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4000);
  const auto message = error_of([&] { TokenFile::open_tokens(path, 10); });
  CHECK(contains(message, "3: " + path));
  CHECK(contains(message, "truncated file"));
}

TEST_CASE("bytes are ids as they stand, with an end of document after the last", "[io][cpu]") {
  const test::TempFolder folder;
  const auto path = folder.file("a.txt",
                                "\xEF\xBB\xBF"
                                "a\r\n\xFFz");
  const auto file = TokenFile::open_bytes(path);
  CHECK(all_tokens(file) == std::vector<std::int32_t>{0xEF, 0xBB, 0xBF, 'a', '\r', '\n', 0xFF, 'z', 256});
  std::int32_t ids[2];
  file.read(8, 1, ids);
  CHECK(ids[0] == 256);
  file.read(6, 2, ids);
  CHECK(ids[1] == 'z');
  std::filesystem::resize_file(path, 4);
  CHECK(contains(error_of([&] { file.read(3, 2, ids); }), path + ": ends at byte 4, 5 expected"));
  CHECK(contains(error_of([&] { TokenFile::open_bytes(folder.file("e", "")); }), "/e: empty: it holds no bytes"));
}

TEST_CASE("a chat file tells what of it teaches nothing, and refuses labels that are no mask", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "c.h5";
  const auto fault = [&](const TokenData& data) {
    io::write_token_file(path, data);
    return error_of([&] { TokenFile::open_chat(path, 10, false); });
  };
  const auto remarks = [&](const TokenData& data) {
    io::write_token_file(path, data);
    return TokenFile::open_chat(path, 10, false).remarks();
  };
  CHECK(contains(fault({{1, 2, 3}, {0, 2}, {}, 10, ""}),
                 "3: " + path + ": there is no data set labels, which data.format chat needs"));
  CHECK(fault({{1, 2, 3}, {0, 2}, {-100, 3, -100}, 10, ""}) ==
        "3: " + path + ": label 1 is 3, the token is 2; in data.format chat a label is the token beside it or -100");
  CHECK(fault({{1, 2, 3, 4}, {0, 2}, {-100, -100, -100, -100}, 10, ""}) ==
        "3: " + path + ": no document has a label: there is nothing to learn");
  CHECK(contains(fault({{1, 2}, {}, {1, -100}, 10, ""}), "no document has a label"));  // a first token is predicted by nothing
  CHECK(remarks({{1, 2, 3, 4, 5}, {0, 2}, {-100, 2, -100, 4, 5}, 10, ""}).empty());
  CHECK(remarks({{1, 2, 3, 4, 5}, {0, 1, 3, 4}, {-100, -100, 3, 4, -100}, 10, ""}) ==
        std::vector<std::string>{path + ": 3 of 4 documents have no label and teach nothing, counted from 0: 0, 2, 3"});
  // More than is looked at together, and the only label in the last piece.
  TokenData long_one{std::vector<std::int64_t>(3'000'000, 1), {0, 2'999'990}, std::vector<std::int64_t>(3'000'000, -100), 10, ""};
  long_one.labels[2'999'995] = 1;
  CHECK(remarks(long_one) ==
        std::vector<std::string>{path + ": 1 of 2 documents have no label and teach nothing, counted from 0: 0"});
}

TEST_CASE("lines left out as bad refuse a chat file or are told, as the caller says", "[io][cpu]") {
  const test::TempFolder folder;
  const std::string path = folder / "c.h5";
  TokenData data{{1, 2, 3}, {}, {-100, 2, -100}, 10, ""};
  data.bad_lines = "a.jsonl:2: not JSON\na.jsonl:7: no turn of the assistant\n";
  io::write_token_file(path, data);
  const std::string told = path + ": made without 2 bad lines (a.jsonl:2: not JSON; a.jsonl:7: no turn of the assistant)";
  CHECK(error_of([&] { TokenFile::open_chat(path, 10, false); }) ==
        "3: " + told + "; mend them, or let the job say data.bad_lines: skip");
  CHECK(TokenFile::open_chat(path, 10, true).remarks() == std::vector<std::string>{told});
  for (int n = 0; n < 9; ++n) data.bad_lines += "b:" + std::to_string(n) + ": x\n";
  io::write_token_file(path, data);
  CHECK(contains(TokenFile::open_chat(path, 10, true).remarks().at(0), "without 11 bad lines (a.jsonl:2: not JSON; "));
  CHECK(contains(TokenFile::open_chat(path, 10, true).remarks().at(0), "; b:2: x and 6 more)"));
}
