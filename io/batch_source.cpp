// batch_source.cpp -- lays the files end to end as one stream, cuts it into windows and finds the window of any sequence number.
#include "io/batch_source.h"

#include <algorithm>
#include <filesystem>

#include "io/folders.h"
#include "io/pattern.h"
#include "io/permutation.h"
#include "io/token_file.h"
#include "memory/check.h"

namespace moetrain::io {

namespace {

// The files that the paths mean, in their order.
std::vector<std::string> files_of(const std::vector<std::string>& paths, const std::vector<std::string>& exclude) {
  namespace fs = std::filesystem;
  std::vector<std::string> files;
  for (const auto& path : paths) {
    std::error_code failed;
    const auto kind = fs::status(path, failed).type();
    if (kind == fs::file_type::not_found) throw Error(path + ": no such file or folder", ExitCode::bad_job);
    if (kind == fs::file_type::none) throw Error(path + ": cannot open: " + failed.message());
    if (kind != fs::file_type::directory) {
      files.push_back(path);
      continue;
    }
    const auto before = files.size();
    for (auto& file : files_of_folder(path)) {
      const std::string name = fs::path(file).filename();
      const bool excluded =
          std::any_of(exclude.begin(), exclude.end(), [&](const auto& pattern) { return matches(pattern, name); });
      if (excluded) continue;
      const bool empty = fs::file_size(file, failed) == 0;
      if (failed) throw Error(file + ": cannot open: " + failed.message());
      if (!empty) files.push_back(std::move(file));
    }
    if (files.size() == before) throw Error(path + ": the folder holds no file with contents");
  }
  if (files.empty()) throw Error("data: no path is given", ExitCode::bad_job);
  return files;
}

TokenFile opened(const std::string& path, const DataOptions& options) {
  switch (options.format) {
    case DataFormat::bytes:
      return TokenFile::open_bytes(path);
    case DataFormat::tokens:
      return TokenFile::open_tokens(path, options.vocab_size);
    case DataFormat::chat:
      return TokenFile::open_chat(path, options.vocab_size, options.skip_bad_lines);
  }
  throw Error("data: no such format");
}

struct Window {  // tokens [begin, end) of the stream
  std::int64_t begin, end;
};

}  // namespace

std::int64_t Batch::label_count() const { return std::int64_t(labels.size()) - std::count(labels.begin(), labels.end(), kIgnored); }

struct BatchSource::Impl {
  DataOptions options;
  std::vector<TokenFile> files;
  std::vector<std::int64_t> file_begins;     // (files+1) in the stream
  std::vector<std::int64_t> documents;       // (documents+1) in the stream
  std::vector<std::int64_t> windows_before;  // (documents+1), without packing
  std::vector<std::string> remarks;
  std::int64_t windows = 0;

  std::int64_t tokens() const { return file_begins.back(); }

  Window window(std::int64_t w) const {
    const std::int64_t S = options.sequence_length;
    if (options.packing) return {w * S, std::min(tokens(), (w + 1) * S)};
    const auto after = std::upper_bound(windows_before.begin(), windows_before.end(), w);
    const auto d = std::size_t(after - windows_before.begin()) - 1;
    const std::int64_t begin = documents[d] + (w - windows_before[d]) * S;
    return {begin, std::min(documents[d + 1], begin + S)};
  }

  // Calls piece(file, begin in the file, count, offset in the output) for every file that stream tokens [begin, end) touch.
  template <class Piece>
  void pieces(std::int64_t begin, std::int64_t end, Piece piece) const {
    auto f = std::size_t(std::upper_bound(file_begins.begin(), file_begins.end(), begin) - file_begins.begin()) - 1;
    for (std::int64_t at = begin; at < end; ++f) {
      const std::int64_t stop = std::min(end, file_begins[f + 1]);
      piece(files[f], at - file_begins[f], stop - at, at - begin);
      at = stop;
    }
  }

  std::vector<std::int32_t> read(std::int64_t begin, std::int64_t end) const {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(end - begin));
    pieces(begin, end, [&](const TokenFile& file, std::int64_t from, std::int64_t count, std::int64_t to) {
      file.read(from, count, ids.data() + to);
    });
    return ids;
  }

  void append(Window sequence, Slice slice, Batch& batch) const;
};

void BatchSource::Impl::append(Window sequence, Slice slice, Batch& batch) const {
  const std::int64_t share = options.sequence_length / slice.of, place = std::min(sequence.end, sequence.begin + slice.index * share);
  const Window window{place, std::min(sequence.end, place + share)};
  const std::int64_t base = std::int64_t(batch.tokens.size());
  const std::int64_t length = window.end - window.begin;
  if (length == 0) {  // the sequence ends before this slice
    batch.documents.push_back(base);
    batch.sequences.push_back(base);
    batch.pieces.push_back({.length = sequence.end - sequence.begin});
    return;
  }
  const std::int64_t seen = std::min(window.end + 1, tokens()) - window.begin;
  // One token more than the window: the label of its last position.
  auto ids = read(window.begin, window.begin + seen);
  batch.tokens.insert(batch.tokens.end(), ids.begin(), ids.begin() + length);
  pieces(window.begin, window.begin + seen, [&](const TokenFile& file, std::int64_t from, std::int64_t count, std::int64_t to) {
    if (file.has_labels()) file.read_labels(from, count, ids.data() + to);
  });
  ids.erase(ids.begin());
  ids.resize(std::size_t(length), kIgnored);
  auto document = std::upper_bound(documents.begin(), documents.end(), window.begin);
  if (slice.of > 1)
    batch.pieces.push_back({window.begin - std::max(sequence.begin, document[-1]),
                            window.end < sequence.end && !std::binary_search(document, documents.end(), window.end),
                            sequence.end - sequence.begin});
  batch.documents.push_back(base);
  for (; document != documents.end() && *document <= window.end; ++document) {
    ids[std::size_t(*document - window.begin - 1)] = kIgnored;  // the last token of a document predicts nothing
    if (*document < window.end) batch.documents.push_back(base + *document - window.begin);
  }
  batch.labels.insert(batch.labels.end(), ids.begin(), ids.end());
  batch.sequences.push_back(base + length);
}

BatchSource::BatchSource(const DataOptions& options) : impl_(std::make_unique<Impl>()) {
  if (options.sequence_length < 1)
    throw Error("data: sequence_length is " + std::to_string(options.sequence_length) + ", at least 1 is needed",
                ExitCode::bad_job);
  if (options.format == DataFormat::bytes && options.vocab_size <= kEndOfDocument)
    throw Error("data: format bytes has the ids 0 .. 256, vocab_size " + std::to_string(options.vocab_size) + " is too small",
                ExitCode::bad_job);
  auto& impl = *impl_;
  impl.options = options;
  impl.file_begins = {0};
  for (const auto& path : files_of(options.paths, options.exclude)) {
    impl.files.push_back(opened(path, options));
    const auto& remarks = impl.files.back().remarks();
    impl.remarks.insert(impl.remarks.end(), remarks.begin(), remarks.end());
    for (const auto begin : impl.files.back().documents()) impl.documents.push_back(impl.file_begins.back() + begin);
    impl.file_begins.push_back(impl.file_begins.back() + impl.files.back().tokens());
  }
  impl.documents.push_back(impl.tokens());
  const std::int64_t S = options.sequence_length;
  if (options.packing) {
    impl.windows = (impl.tokens() + S - 1) / S;
    return;
  }
  impl.windows_before = {0};
  for (std::size_t d = 0; d + 1 < impl.documents.size(); ++d)
    impl.windows_before.push_back(impl.windows_before.back() + (impl.documents[d + 1] - impl.documents[d] + S - 1) / S);
  impl.windows = impl.windows_before.back();
}

BatchSource::~BatchSource() = default;

std::int64_t BatchSource::tokens() const { return impl_->tokens(); }
const std::vector<std::string>& BatchSource::remarks() const { return impl_->remarks; }
std::int64_t BatchSource::windows() const { return impl_->windows; }

Batch BatchSource::read(std::int64_t first, std::int64_t count, Slice slice) const {
  check(first >= 0 && count >= 0, "batch source: sequences are counted from 0", {{"first", first}, {"count", count}});
  const std::int64_t S = impl_->options.sequence_length;
  check(slice.of >= 1 && 0 <= slice.index && slice.index < slice.of && S % slice.of == 0, "batch source: no such slice of a sequence",
        {{"slice", slice.index}, {"of", slice.of}, {"sequence_length", S}});
  const std::int64_t W = impl_->windows;
  Batch batch;
  batch.sequences = {0};
  for (std::int64_t n = first; n < first + count; ++n) {
    const std::int64_t place = n % W;
    const std::int64_t w = impl_->options.shuffle ? permuted(place, W, impl_->options.seed, std::uint64_t(n / W)) : place;
    impl_->append(impl_->window(w), slice, batch);
  }
  batch.documents.push_back(batch.sequences.back());
  return batch;
}

}  // namespace moetrain::io
