// token_file.cpp -- checks what a data file claims about itself when it is opened, and every id when it is read.
#include "io/token_file.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "io/files.h"
#include "memory/check.h"

namespace moetrain::io {

namespace {

std::int64_t rows_of(const Hdf5File& file, const std::string& name) {
  const auto info = file.info(name);
  if (!info.integers || info.shape.rank() != 1)
    throw Error(file.path() + ": " + name + " is " + info.type + " " + info.shape.text() + ", integers of one dim are needed");
  file.check_complete(name);
  return info.shape[0];
}

std::vector<std::int64_t> checked_documents(const Hdf5File& file, std::int64_t tokens) {
  if (!file.has("documents")) return {0};
  auto documents = file.read_integers("documents", 0, rows_of(file, "documents"));
  const auto refuse = [&](std::size_t n, const std::string& why) {
    throw Error(file.path() + ": documents[" + std::to_string(n) + "] is " + std::to_string(documents[n]) + ", " + why);
  };
  if (documents.empty()) throw Error(file.path() + ": documents is empty; leave it out when there is one document");
  if (documents[0] != 0) refuse(0, "the first document begins at token 0");
  for (std::size_t n = 0; n < documents.size(); ++n) {
    if (documents[n] >= tokens) refuse(n, "there are " + std::to_string(tokens) + " tokens");
    if (n > 0 && documents[n] <= documents[n - 1]) refuse(n, "not after the one before, " + std::to_string(documents[n - 1]));
  }
  return documents;
}

// A few of many: "2, 5, 9 and 4 more".
std::string first_of(const std::vector<std::string>& all, const std::string& between) {
  std::string text;
  for (std::size_t n = 0; n < std::min<std::size_t>(all.size(), 5); ++n) text += (n > 0 ? between : "") + all[n];
  return all.size() > 5 ? text + " and " + std::to_string(all.size() - 5) + " more" : text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

constexpr std::int64_t kPiece = 1 << 20;  // labels looked at together

}  // namespace

TokenFile TokenFile::open_tokens(const std::string& path, std::int64_t vocab_size) {
  TokenFile opened(path);
  opened.hdf5_ = Hdf5File::open(path);
  const Hdf5File& file = *opened.hdf5_;
  if (!file.has("tokens")) throw Error(path + ": not a token file: there is no data set tokens");
  if (const auto claimed = file.integer_attribute("vocab_size"); claimed && (*claimed < 1 || *claimed > vocab_size))
    throw Error(path + ": made for a vocabulary of " + std::to_string(*claimed) + " (attribute vocab_size), the model's has " +
                std::to_string(vocab_size));
  opened.tokens_ = rows_of(file, "tokens");
  if (opened.tokens_ == 0) throw Error(path + ": empty: it holds no tokens");
  opened.vocab_size_ = vocab_size;
  opened.documents_ = checked_documents(file, opened.tokens_);
  opened.has_labels_ = file.has("labels");
  if (opened.has_labels_)
    if (const auto labels = rows_of(file, "labels"); labels != opened.tokens_)
      throw Error(path + ": labels has " + std::to_string(labels) + " values, tokens " + std::to_string(opened.tokens_));
  return opened;
}

// Counted from 0. A document's first token is predicted by nothing, so its label is none.
std::vector<std::int64_t> TokenFile::documents_without_label() const {
  std::vector<std::int64_t> without;
  std::vector<std::int32_t> ids(kPiece), labels(kPiece);
  std::size_t document = 0;
  bool labelled = false;
  for (std::int64_t begin = 0; begin < tokens_; begin += kPiece) {
    const std::int64_t count = std::min(kPiece, tokens_ - begin);
    read(begin, count, ids.data());
    read_labels(begin, count, labels.data());
    for (std::int64_t i = 0; i < count; ++i) {
      const auto id = ids[std::size_t(i)], label = labels[std::size_t(i)];
      if (label != kIgnored && label != id)
        throw Error(path_ + ": label " + std::to_string(begin + i) + " is " + std::to_string(label) + ", the token is " +
                    std::to_string(id) + "; in data.format chat a label is the token beside it or " + std::to_string(kIgnored));
      if (document + 1 < documents_.size() && begin + i == documents_[document + 1]) {
        if (!labelled) without.push_back(std::int64_t(document));
        ++document;
        labelled = false;
      }
      labelled = labelled || (label != kIgnored && begin + i != documents_[document]);
    }
  }
  if (!labelled) without.push_back(std::int64_t(document));
  return without;
}

TokenFile TokenFile::open_chat(const std::string& path, std::int64_t vocab_size, bool skip_bad_lines) {
  TokenFile opened = open_tokens(path, vocab_size);
  if (!opened.has_labels_)
    throw Error(path + ": there is no data set labels, which data.format chat needs; scripts/tokenize.py --chat writes it");
  if (opened.hdf5_->has("bad_lines")) {
    const auto bad = lines_of(opened.hdf5_->read_text("bad_lines"));
    const std::string told = path + ": made without " + std::to_string(bad.size()) + " bad lines (" + first_of(bad, "; ") + ")";
    if (!skip_bad_lines) throw Error(told + "; mend them, or let the job say data.bad_lines: skip");
    opened.remarks_.push_back(told);
  }
  std::vector<std::string> without;
  for (const auto document : opened.documents_without_label()) without.push_back(std::to_string(document));
  if (without.size() == opened.documents_.size()) throw Error(path + ": no document has a label: there is nothing to learn");
  if (!without.empty())
    opened.remarks_.push_back(path + ": " + std::to_string(without.size()) + " of " + std::to_string(opened.documents_.size()) +
                              " documents have no label and teach nothing, counted from 0: " + first_of(without, ", "));
  return opened;
}

TokenFile TokenFile::open_bytes(const std::string& path) {
  TokenFile opened(path);
  std::error_code failed;
  const auto bytes = std::filesystem::file_size(path, failed);
  if (failed) throw Error(path + ": cannot open: " + failed.message());
  if (bytes == 0) throw Error(path + ": empty: it holds no bytes");
  std::uint8_t first = 0;
  read_bytes(path, 0, 1, &first);  // a file without permission is refused now, not in the middle of a run
  opened.tokens_ = std::int64_t(bytes) + 1;
  opened.documents_ = {0};
  return opened;
}

void TokenFile::read(std::int64_t begin, std::int64_t count, std::int32_t* out) const {
  check(0 <= begin && 0 <= count && begin + count <= tokens_, "token file: tokens out of range",
        {{"begin", begin}, {"count", count}, {"tokens", tokens_}});
  if (!hdf5_) {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(std::min(count, std::max<std::int64_t>(0, tokens_ - 1 - begin))));
    if (!bytes.empty()) read_bytes(path_, begin, std::int64_t(bytes.size()), bytes.data());
    std::copy(bytes.begin(), bytes.end(), out);
    if (std::int64_t(bytes.size()) < count) out[count - 1] = kEndOfDocument;
    return;
  }
  const auto ids = hdf5_->read_integers("tokens", begin, count);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto id = ids[std::size_t(i)];
    if (id < 0 || id >= vocab_size_)
      throw Error(path_ + ": token " + std::to_string(begin + i) + " is id " + std::to_string(id) + ", the vocabulary has " +
                  std::to_string(vocab_size_));
    out[i] = std::int32_t(id);
  }
}

void TokenFile::read_labels(std::int64_t begin, std::int64_t count, std::int32_t* out) const {
  check(has_labels_, "token file: there are no labels");
  const auto labels = hdf5_->read_integers("labels", begin, count);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto label = labels[std::size_t(i)];
    if (label != kIgnored && (label < 0 || label >= vocab_size_))
      throw Error(path_ + ": label " + std::to_string(begin + i) + " is " + std::to_string(label) + ", neither " +
                  std::to_string(kIgnored) + " nor in the vocabulary of " + std::to_string(vocab_size_));
    out[i] = std::int32_t(label);
  }
}

void write_token_file(const std::string& path, const TokenData& data) {
  auto file = Hdf5File::create(path);
  file.write_unsigned("tokens", data.vocab_size <= 65536 ? 16 : 32, data.tokens);
  if (!data.documents.empty()) file.write("documents", {data.documents.data(), DType::i64, {std::int64_t(data.documents.size())}});
  if (!data.labels.empty()) {
    const std::vector<std::int32_t> labels(data.labels.begin(), data.labels.end());
    file.write("labels", {labels.data(), DType::i32, {std::int64_t(labels.size())}});
  }
  if (!data.bad_lines.empty()) file.write_text("bad_lines", data.bad_lines);
  file.set_attribute("vocab_size", data.vocab_size);
  file.set_attribute("tokenizer", data.tokenizer);
  file.close();
}

}  // namespace moetrain::io
