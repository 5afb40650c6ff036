// run_log.h -- the run folder's record: one row a step in metrics.csv and metrics.h5, and exit.json at the end.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/files.h"
#include "io/hdf5_file.h"
#include "memory/check.h"
#include "memory/tensor.h"

namespace moetrain::io {

// A row goes to expert_tokens.csv (the journal), metrics.h5 and metrics.csv, in this order, and is in the log once its line in
// metrics.csv is whole: whatever a crash left over in the other two is cut, or metrics.h5 is built anew from the two texts.
class RunLog {
 public:
  // Makes the folder. The first column is `step`. layers * experts may be 0: no expert counts are kept then.
  RunLog(const std::string& dir, std::vector<std::string> columns, std::int64_t layers, std::int64_t experts);

  // Rows of later steps are cut, also a torn last line; 0: a fresh log. Needed before the first append. Earlier rows that have
  // other columns are fitted by name. Returns the number of rows that remain.
  std::int64_t resume_after(std::int64_t step);

  // One value a column, std::nullopt where it does not apply; expert_tokens (layers, experts) i64, absent if there are none.
  void append(const std::vector<std::optional<double>>& values, ConstTensor expert_tokens);

 private:
  struct Row {
    std::int64_t step;
    std::vector<std::optional<double>> values;
  };
  bool has_experts() const { return layers_ * experts_ > 0; }
  std::vector<Row> rows_kept(std::int64_t last_step);
  void cut_journal(std::int64_t last_step);
  bool h5_agrees(const std::vector<Row>& rows) const;
  void rebuild_h5(const std::vector<Row>& rows);
  void write_to_h5(const std::vector<std::optional<double>>& values, ConstTensor expert_tokens);
  std::string path(const char* name) const { return dir_ + "/" + name; }

  std::string dir_;
  std::vector<std::string> columns_;
  std::int64_t layers_, experts_, last_step_ = 0;
  std::optional<AppendFile> csv_, journal_;
  std::optional<Hdf5File> h5_;
};

std::string number_text(double value);  // reads back bit for bit; whole numbers without an exponent

// exit.json {code, cause, rank, step}; what is not known is null. Of ranks that write at the same time the last one stands.
void write_exit(const std::string& dir, ExitCode code, const std::string& cause, std::optional<int> rank,
                std::optional<std::int64_t> step);
void remove_exit(const std::string& dir);  // it need not be there

}  // namespace moetrain::io
