// plan_report.cpp -- tables of bytes by phase and of predicted time.
#include "app/plan_report.h"

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <sstream>

namespace moetrain::app {
namespace {

constexpr int kName = 20, kColumn = 12;

void print_line(const std::string& name, const std::vector<std::string>& columns) {
  std::cout << "  " << std::left << std::setw(kName) << name << std::right;
  for (const std::string& column : columns) std::cout << std::setw(kColumn) << column;
  std::cout << "\n";
}

void print_phases(const std::array<PhaseBytes, kMemoryPhases>& phases, const CategoryBytes& most, std::int64_t total) {
  for (int c = 0; c < kCategories; ++c) {
    if (most[std::size_t(c)] == 0) continue;
    std::vector<std::string> columns;
    for (const PhaseBytes& p : phases) columns.push_back(bytes_text(p.by_category[std::size_t(c)]));
    columns.push_back(bytes_text(most[std::size_t(c)]));
    print_line(name_of(Category(c)), columns);
  }
  std::vector<std::string> columns;
  for (const PhaseBytes& p : phases) columns.push_back(bytes_text(p.total));
  columns.push_back(bytes_text(total));
  print_line("peak of the sum", columns);
}

constexpr std::pair<parallel::Purpose, const char*> kWaits[] = {{parallel::Purpose::gather, "weights"},
                                                                {parallel::Purpose::reduce, "sums"},
                                                                {parallel::Purpose::exchange, "experts_rows"},
                                                                {parallel::Purpose::other, "other_ranks"}};

}  // namespace

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string bytes_text(std::int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  auto value = double(bytes);
  for (; value >= 1024 && unit < 6; ++unit) value /= 1024;
  return fixed(value, unit == 0 ? 0 : 2) + " " + kUnits[unit];
}

void print_bytes(const core::RankPlan& rank) {
  std::vector<std::string> names;
  for (int p = 0; p < kMemoryPhases; ++p) names.emplace_back(name_of(MemoryPhase(p)));
  names.emplace_back("most");
  print_line("device memory", names);
  print_phases(rank.device_phases, rank.device_bytes, rank.device_total);
  print_line("pool", {"", "", "", "", "", bytes_text(rank.device_pool)});
  if (rank.host_total == 0) return;
  print_line("host memory", names);
  print_phases(rank.host_phases, rank.host_bytes, rank.host_total);
}

io::Json bytes_json(const CategoryBytes& bytes, std::int64_t total) {
  io::Json j;
  for (int c = 0; c < kCategories; ++c) j[name_of(Category(c))] = bytes[std::size_t(c)];
  j["total"] = total;
  return j;
}

io::Json phases_json(const core::RankPlan& rank) {
  io::Json j;
  for (std::size_t p = 0; p < kMemoryPhases; ++p) {
    const PhaseBytes &device = rank.device_phases[p], &host = rank.host_phases[p];
    j[name_of(MemoryPhase(p))] = {{"device_bytes", bytes_json(device.by_category, device.total)},
                                  {"host_bytes", bytes_json(host.by_category, host.total)}};
  }
  return j;
}

void print_time(const core::StepTime& time, double tokens, double flops, int ranks) {
  const double seconds = time.total();
  const auto ms = [](double s) { return fixed(1e3 * s, 2) + " ms"; };
  print_line("", {"forward", "backward", "share"});
  const auto share = [&](double s) { return fixed(100 * s / seconds, 1) + " %"; };
  for (int k = 0; k < ops::kWorkKinds; ++k) {
    const auto& [forward, backward] = time.work[std::size_t(k)];
    if (forward + backward > 0)
      print_line(name_of(ops::WorkKind(k)), {ms(forward), backward > 0 ? ms(backward) : "", share(forward + backward)});
  }
  const auto other = [&](const std::string& name, double s) {
    if (s > 1e-9) print_line(name, {ms(s), "", share(s)});
  };
  other("slowed by messages", time.slowed);
  other("waits: launches", time.queueing);
  for (const auto& [purpose, name] : kWaits) {
    std::string words = std::string("waits: ") + name;
    std::replace(words.begin(), words.end(), '_', ' ');
    other(words, time.waits[std::size_t(purpose)]);
  }
  other("waits: host memory", time.host);
  print_line("a step",
             {ms(seconds), "",
              fixed(tokens / seconds, 0) + " tokens/s, " + fixed(flops / seconds / ranks * 1e-12, 1) + " model TFLOP/s a rank"});
}

io::Json parts_json(const core::StepTime& time) {
  io::Json j;
  for (int k = 0; k < ops::kWorkKinds; ++k)
    j[name_of(ops::WorkKind(k))] = {{"forward", 1e3 * time.work[std::size_t(k)][0]},
                                    {"backward", 1e3 * time.work[std::size_t(k)][1]}};
  j["slowed_by_messages"] = 1e3 * time.slowed;
  for (const auto& [purpose, name] : kWaits) j["waits"][name] = 1e3 * time.waits[std::size_t(purpose)];
  j["waits"]["its_host"] = 1e3 * time.queueing;
  j["waits"]["host_memory"] = 1e3 * time.host;
  return j;
}

}  // namespace moetrain::app
