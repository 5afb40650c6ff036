// selection.h -- positions selected for every query of a job, and the queries among them that a reference computes.
#pragma once
#include "app/verify/op_case.h"

namespace moetrain::app {

struct Selection {
  std::int64_t T, K;                  // K positions a query at most
  std::int64_t window;                // compared queries and their positions are not before this one
  Places rows;                        // the compared queries
  std::vector<std::int32_t> indices;  // (T, K), causal, inside the document, each once; then -1
  Selection(OpCase& c, std::int64_t compared);
  // (T, K): those of the compared queries, -1 for all others.
  std::vector<std::int32_t> of_rows() const;
  // The same, counted from the window on: (T - window, K), and the compared queries.
  std::vector<std::int32_t> of_window() const;
  Places rows_of_window() const;
};

}  // namespace moetrain::app
