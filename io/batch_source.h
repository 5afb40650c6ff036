// batch_source.h -- sequence n of a run as a function of (seed, n): every layout and every accumulation sees the same data.
//
// The token stream is all documents of all files in order. With packing, window w is tokens [w S, w S + S) of the stream, cut at
// document ends only by `documents`; the stream's tail shorter than S is the last window, so no token is lost. Without packing a
// window is at most S tokens of one document. Epoch e visits the windows in an order that is a permutation keyed by (seed, e);
// shuffle false keeps the stream's order. Sequence n is window order(n mod W) of epoch n / W.
// labels[t] is the token after t where that lies in the same document (also past the window's end), else -100. A token file's own
// labels stand beside its tokens, as Hugging Face data has them, and replace the ids: labels[t] is the file's label of the token
// after t. A slice is a run of equal share of every sequence's S positions: what a shorter sequence lacks is missing in the last
// ones, and the label of a slice's last token is that of the sequence. There is no padding. Hidden files of a folder (names that begin with a dot) and empty files of a folder are skipped;
// links of a folder are followed (io/folders.h). A path that does not exist is a fault of the job; bad contents are a fault of the
// run. One thread may read at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moetrain::io {

enum class DataFormat : std::uint8_t { bytes, tokens, chat };

struct DataOptions {
  std::vector<std::string> paths;  // files or folders; a folder stands for its files in the order of files_of_folder
  DataFormat format = DataFormat::bytes;
  std::int64_t sequence_length = 0;
  bool packing = true;
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::vector<std::string> exclude;  // patterns (io/pattern.h) of names of files left out of folders
  bool skip_bad_lines = false;       // chat: train without the lines that were left out of a file as bad; else that is an Error
  std::int64_t vocab_size = 0;       // ids outside are an error that names file and position
};

struct Slice {  // which of how many
  std::int64_t index = 0, of = 1;
};

struct Batch {
  std::vector<std::int32_t> tokens;     // (T)
  std::vector<std::int32_t> labels;     // (T), -100: ignored
  std::vector<std::int64_t> sequences;  // (B+1) offsets of the sequences
  std::vector<std::int64_t> documents;  // (N+1) offsets of the documents; holds all of `sequences`
  struct Piece {               // of a sequence of which a slice is here
    std::int64_t before = 0;   // tokens of its first document here that lie before it
    bool goes_on = false;      // its last document here does, in the next slice
    std::int64_t length = 0;   // of the whole sequence
  };
  std::vector<Piece> pieces = {};  // (B); empty where sequences are whole
  std::int64_t label_count() const;
};

class BatchSource {
 public:
  explicit BatchSource(const DataOptions& options);  // opens and checks the files
  ~BatchSource();
  std::int64_t tokens() const;                               // of the stream
  const std::vector<std::string>& remarks() const;           // what the user should know about the files
  std::int64_t windows() const;                              // W, sequences of an epoch
  // Sequences first .. first + count - 1 of the run, or a slice of each; `of` divides S.
  Batch read(std::int64_t first, std::int64_t count, Slice slice = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moetrain::io
