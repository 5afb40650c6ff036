// token_file.h -- one file of training data as a row of token ids with its documents; read a piece at a time, since it may be
// larger than the memory.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/hdf5_file.h"

namespace moetrain::io {

inline constexpr std::int32_t kEndOfDocument = 256;  // follows the bytes of a file; bytes themselves are ids 0 .. 255
inline constexpr std::int32_t kIgnored = -100;       // a label that does not count

// Ids that lie outside the vocabulary are an Error with file and position, at the moment they are read.
class TokenFile {
 public:
  // HDF5: `tokens` (1-D integers), optional `documents` (1-D, first token of each), optional `labels` (beside the tokens), optional
  // attribute `vocab_size` (the tokenizer's, at most the model's). Data sets with rows that nobody wrote are refused.
  static TokenFile open_tokens(const std::string& path, std::int64_t vocab_size);
  // A token file with a loss mask, as scripts/tokenize.py --chat makes it: each label is the token itself or kIgnored, and some
  // token has one. What it reads all labels for are `remarks`: documents that teach nothing, and lines of the text that were left
  // out as bad (`bad_lines`), which are an Error unless they are to be skipped.
  static TokenFile open_chat(const std::string& path, std::int64_t vocab_size, bool skip_bad_lines);
  static TokenFile open_bytes(const std::string& path);  // any file: one document, closed by kEndOfDocument

  const std::string& path() const { return path_; }
  std::int64_t tokens() const { return tokens_; }
  const std::vector<std::int64_t>& documents() const { return documents_; }  // first token of each; the first is 0
  bool has_labels() const { return has_labels_; }
  const std::vector<std::string>& remarks() const { return remarks_; }  // what the user should know about the file
  void read(std::int64_t begin, std::int64_t count, std::int32_t* out) const;
  void read_labels(std::int64_t begin, std::int64_t count, std::int32_t* out) const;

 private:
  explicit TokenFile(std::string path) : path_(std::move(path)) {}
  std::vector<std::int64_t> documents_without_label() const;
  std::string path_;
  std::optional<Hdf5File> hdf5_;  // absent: bytes
  std::int64_t tokens_ = 0, vocab_size_ = 0;
  std::vector<std::int64_t> documents_;
  std::vector<std::string> remarks_;
  bool has_labels_ = false;
};

// What a token file holds. Also the way for a program, or a test, to make one without Python.
struct TokenData {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> documents;  // empty: the file has none
  std::vector<std::int64_t> labels;     // empty: the file has none
  std::int64_t vocab_size = 0;
  std::string tokenizer;
  std::string bad_lines = {};  // one a line: place and reason; empty: the file has none
};
void write_token_file(const std::string& path, const TokenData& data);

}  // namespace moetrain::io
