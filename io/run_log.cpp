// run_log.cpp -- keeps three files telling the same story, whichever of them a crash cut short.
#include "io/run_log.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/folders.h"

namespace moetrain::io {

namespace {

constexpr const char *kCsv = "metrics.csv", *kH5 = "metrics.h5", *kJournal = "expert_tokens.csv", *kExit = "exit.json";
constexpr const char* kExpertTokens = "expert_tokens";
constexpr std::int64_t kColumnChunkRows = 1024;
constexpr std::int64_t kExpertChunkBytes = 1 << 16;
constexpr std::int64_t kUnknownCount = -1;  // of a step whose line is missing in the journal

std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields;
  std::size_t begin = 0;
  for (std::size_t comma = line.find(','); comma != std::string::npos; comma = line.find(',', begin)) {
    fields.push_back(line.substr(begin, comma - begin));
    begin = comma + 1;
  }
  fields.push_back(line.substr(begin));
  return fields;
}

std::vector<std::string> whole_lines(const std::string& text) {  // a last line without its end is torn, and left out
  std::vector<std::string> lines;
  std::size_t begin = 0;
  for (std::size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

std::optional<double> value_of(const std::string& field) {
  double value = 0;
  const auto [end, failed] = std::from_chars(field.data(), field.data() + field.size(), value);
  if (failed != std::errc() || end != field.data() + field.size()) return std::nullopt;
  return value;
}

std::optional<std::int64_t> step_of(const std::string& line) {
  const auto value = value_of(line.substr(0, line.find(',')));
  if (!value || !(*value >= 0 && *value < 9e15) || *value != std::floor(*value)) return std::nullopt;
  return std::int64_t(*value);
}

std::string csv_line(const std::vector<std::optional<double>>& values) {
  std::string line;
  for (std::size_t i = 0; i < values.size(); ++i) line += (i > 0 ? "," : "") + (values[i] ? number_text(*values[i]) : "");
  return line + "\n";
}

}  // namespace

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";  // whatever its sign bit
  char digits[64];
  const bool whole = value == std::floor(value) && std::abs(value) < 9e15 && !(value == 0 && std::signbit(value));
  const auto end = whole ? std::to_chars(digits, digits + sizeof digits, std::int64_t(value)).ptr
                         : std::to_chars(digits, digits + sizeof digits, value).ptr;
  return {digits, end};
}

RunLog::RunLog(const std::string& dir, std::vector<std::string> columns, std::int64_t layers, std::int64_t experts)
    : dir_(dir), columns_(std::move(columns)), layers_(layers), experts_(experts) {
  check(!columns_.empty() && columns_[0] == "step", "run log: the first column is step");
  make_folder(dir);
}

std::int64_t RunLog::resume_after(std::int64_t step) {
  csv_.reset();
  journal_.reset();
  h5_.reset();
  const auto rows = rows_kept(step);
  std::string csv;
  for (const auto& column : columns_) csv += (csv.empty() ? "" : ",") + column;
  csv += "\n";
  for (const auto& row : rows) csv += csv_line(row.values);
  if (!std::filesystem::exists(path(kCsv)) || read_text(path(kCsv)) != csv) write_text_atomically(path(kCsv), csv);
  last_step_ = rows.empty() ? 0 : rows.back().step;
  cut_journal(last_step_);
  if (h5_agrees(rows)) {
    h5_ = Hdf5File::open(path(kH5), Access::write);
    for (const auto& column : columns_) h5_->set_rows(column, std::int64_t(rows.size()));
    if (has_experts()) h5_->set_rows(kExpertTokens, std::int64_t(rows.size()));
    h5_->flush();
  } else {
    rebuild_h5(rows);
  }
  csv_.emplace(path(kCsv));
  if (has_experts()) journal_.emplace(path(kJournal));
  return std::int64_t(rows.size());
}

std::vector<RunLog::Row> RunLog::rows_kept(std::int64_t last_step) {
  std::vector<Row> rows;
  if (last_step <= 0 || !std::filesystem::exists(path(kCsv))) return rows;
  const auto lines = whole_lines(read_text(path(kCsv)));
  if (lines.empty()) return rows;
  const auto header = fields_of(lines[0]);
  std::vector<std::size_t> places;  // of our columns in the file; past its end: not there
  for (const auto& column : columns_)
    places.push_back(std::size_t(std::find(header.begin(), header.end(), column) - header.begin()));
  if (places[0] != 0) throw Error(path(kCsv) + ":1: the first column is not step; move the file away to begin anew");
  for (std::size_t n = 1; n < lines.size(); ++n) {
    const auto fields = fields_of(lines[n]);
    const auto step = step_of(lines[n]);
    if (fields.size() != header.size() || !step || *step <= (rows.empty() ? 0 : rows.back().step)) {
      spdlog::warn("{}:{}: not a row; it and the rows after it are dropped", path(kCsv), n + 1);
      break;
    }
    if (*step > last_step) break;
    Row row{*step, {}};
    for (const auto place : places) row.values.push_back(place < fields.size() ? value_of(fields[place]) : std::nullopt);
    rows.push_back(std::move(row));
  }
  return rows;
}

void RunLog::cut_journal(std::int64_t last_step) {
  const std::string name = path(kJournal);
  if (!std::filesystem::exists(name)) return;
  std::ifstream file(name, std::ios::binary);
  std::uintmax_t kept = 0;
  // getline meets the end of the file, not of a line, in a torn last line.
  for (std::string line; std::getline(file, line) && !file.eof(); kept += line.size() + 1)
    if (const auto step = step_of(line); !step || *step > last_step) break;
  std::error_code failed;
  std::filesystem::resize_file(name, kept, failed);
  if (failed) throw Error(name + ": cannot cut: " + failed.message());
}

bool RunLog::h5_agrees(const std::vector<Row>& rows) const {
  if (!std::filesystem::exists(path(kH5))) return false;
  const auto count = std::int64_t(rows.size());
  try {
    const auto file = Hdf5File::open(path(kH5));
    auto names = columns_;
    if (has_experts()) names.push_back(kExpertTokens);
    std::sort(names.begin(), names.end());
    if (file.names() != names) return false;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const auto info = file.info(columns_[c]);
      if (info.dtype != DType::f64 || info.shape.rank() != 1 || info.shape[0] < count) return false;
      std::vector<double> stored(rows.size());
      file.read_rows(columns_[c], 0, {stored.data(), DType::f64, {count}});
      for (std::size_t n = 0; n < rows.size(); ++n) {
        const auto& value = rows[n].values[c];
        if (value && !std::isnan(*value) ? stored[n] != *value : !std::isnan(stored[n])) return false;
      }
    }
    if (!has_experts()) return true;
    const auto info = file.info(kExpertTokens);
    return info.dtype == DType::i64 && info.shape.rank() == 3 && info.shape[0] >= count &&
           info.shape == Shape{info.shape[0], layers_, experts_};
  } catch (const Error& wrong) {
    spdlog::warn("{}; it is built anew from {} and {}", wrong.what(), kCsv, kJournal);
    return false;
  }
}

void RunLog::rebuild_h5(const std::vector<Row>& rows) {
  h5_ = Hdf5File::create(path(kH5));
  for (const auto& column : columns_) h5_->create_appendable(column, DType::f64, {}, kColumnChunkRows);
  if (has_experts()) {
    const std::int64_t row_bytes = layers_ * experts_ * size_of(DType::i64);
    h5_->create_appendable(kExpertTokens, DType::i64, {layers_, experts_},
                           std::max<std::int64_t>(1, kExpertChunkBytes / row_bytes));
  }
  std::ifstream journal(path(kJournal), std::ios::binary);
  std::string line;
  bool more = has_experts() && bool(std::getline(journal, line));
  std::vector<std::int64_t> counts(static_cast<std::size_t>(layers_ * experts_));
  for (const auto& row : rows) {
    while (more && step_of(line).value_or(0) < row.step) more = bool(std::getline(journal, line));
    const auto fields = more && step_of(line) == row.step ? fields_of(line) : std::vector<std::string>{};
    std::fill(counts.begin(), counts.end(), kUnknownCount);
    if (fields.size() == counts.size() + 1)
      for (std::size_t i = 0; i < counts.size(); ++i)
        counts[i] = std::int64_t(value_of(fields[i + 1]).value_or(double(kUnknownCount)));
    write_to_h5(row.values, {counts.data(), DType::i64, {layers_, experts_}});
  }
  h5_->flush();
}

void RunLog::write_to_h5(const std::vector<std::optional<double>>& values, ConstTensor expert_tokens) {
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    const double value = values[c].value_or(std::numeric_limits<double>::quiet_NaN());
    h5_->append_row(columns_[c], {&value, DType::f64, {}});
  }
  if (has_experts()) h5_->append_row(kExpertTokens, expert_tokens);
}

void RunLog::append(const std::vector<std::optional<double>>& values, ConstTensor expert_tokens) {
  check(h5_.has_value() && csv_.has_value(), "run log: resume_after comes before append");
  check(values.size() == columns_.size(), "run log: a row needs one value a column",
        {{"values", std::int64_t(values.size())}, {"columns", std::int64_t(columns_.size())}});
  check(values[0].has_value() && *values[0] > double(last_step_), "run log: steps must ascend",
        {{"step", std::int64_t(values[0].value_or(0))}, {"last", last_step_}});
  if (has_experts()) {
    check(expert_tokens.dtype == DType::i64 && expert_tokens.shape == Shape{layers_, experts_},
          "run log: expert counts are not (layers, experts)",
          {{"layers", layers_}, {"experts", experts_}, {"counts", expert_tokens.count()}});
    std::string line = number_text(*values[0]);
    for (std::int64_t i = 0; i < expert_tokens.count(); ++i) line += "," + std::to_string(expert_tokens.as<std::int64_t>()[i]);
    journal_->append(line + "\n");
  }
  write_to_h5(values, expert_tokens);
  h5_->flush();
  csv_->append(csv_line(values));
  last_step_ = std::int64_t(*values[0]);
}

void write_exit(const std::string& dir, ExitCode code, const std::string& cause, std::optional<int> rank,
                std::optional<std::int64_t> step) {
  nlohmann::ordered_json exit;
  exit["code"] = int(code);
  exit["cause"] = cause;
  exit["rank"] = nullptr;
  exit["step"] = nullptr;
  if (rank) exit["rank"] = *rank;
  if (step) exit["step"] = *step;
  // Ranks that fail alone write at the same time, on one host or on several.
  const std::string part = "." + (rank ? std::to_string(*rank) + "-" : "") + std::to_string(::getpid()) + ".part";
  // A cause may quote a file name that is not UTF-8.
  write_text_atomically(dir + "/" + kExit, exit.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n", part);
}

void remove_exit(const std::string& dir) {
  std::error_code failed;
  std::vector<std::filesystem::path> found;  // the file, and parts of writers that were killed
  for (std::filesystem::directory_iterator entry(dir, failed), end; !failed && entry != end; entry.increment(failed))
    if (entry->path().filename().string().starts_with(kExit)) found.push_back(entry->path());
  for (const auto& path : found)
    if (!failed) std::filesystem::remove(path, failed);
  if (failed) throw Error(dir + "/" + kExit + ": cannot remove: " + failed.message());
}

}  // namespace moetrain::io
