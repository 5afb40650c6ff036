// plan_report.h -- what a plan has of bytes by phase and of time, as tables for people and as JSON for programs.
#pragma once
#include <string>

#include "core/plan.h"
#include "io/json.h"

namespace moetrain::app {

std::string bytes_text(std::int64_t bytes);  // in the largest unit of 1024 that leaves at least 1: 512 B, 1.50 KiB, 78.32 GiB
std::string fixed(double value, int digits);

// A line a category that holds something, a column a phase, and the most of any phase; then the peak of their sum.
void print_bytes(const core::RankPlan& rank);
io::Json bytes_json(const CategoryBytes& bytes, std::int64_t total);
io::Json phases_json(const core::RankPlan& rank);

// A line a kind of operator, forward and backward; then what else the step's time goes to.
void print_time(const core::StepTime& time, double tokens, double flops, int ranks);
io::Json parts_json(const core::StepTime& time);  // ms

}  // namespace moetrain::app
