// run_log_test.cpp -- after any crash and any resume, do metrics.csv and metrics.h5 tell the same story?
#include "io/run_log.h"

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>

#include "memory/check.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using io::Hdf5File;
using io::RunLog;
using test::contains;
using test::error_of;

namespace {

constexpr std::int64_t kLayers = 2, kExperts = 3;
const std::vector<std::string> kColumns = {"step", "loss", "mfu"};

RunLog log_in(const test::TempFolder& folder) { return {folder / "run", kColumns, kLayers, kExperts}; }

double loss_at(std::int64_t step) { return 1.0 / double(step); }

void append_step(RunLog& log, std::int64_t step) {
  std::int64_t counts[kLayers * kExperts];
  for (std::int64_t i = 0; i < kLayers * kExperts; ++i) counts[i] = 100 * step + i;
  log.append({double(step), loss_at(step), std::nullopt}, {counts, DType::i64, {kLayers, kExperts}});
}

std::string csv_up_to(std::int64_t step) {
  std::string csv = "step,loss,mfu\n";
  for (std::int64_t n = 1; n <= step; ++n) csv += std::to_string(n) + "," + io::number_text(loss_at(n)) + ",\n";
  return csv;
}

// Empty when the folder's files hold steps 1 .. last and nothing else.
std::string difference_from_steps(const test::TempFolder& folder, std::int64_t last) {
  if (io::read_text(folder / "run/metrics.csv") != csv_up_to(last))
    return "metrics.csv: " + io::read_text(folder / "run/metrics.csv");
  const auto file = Hdf5File::open(folder / "run/metrics.h5");
  if (file.names() != std::vector<std::string>{"expert_tokens", "loss", "mfu", "step"}) return "other data sets";
  for (const auto& column : kColumns)
    if (file.info(column).dtype != DType::f64 || file.info(column).shape != Shape{last}) return column + " has another shape";
  if (file.info("expert_tokens").shape != Shape{last, kLayers, kExperts}) return "expert_tokens has another shape";
  std::vector<double> step(static_cast<std::size_t>(last)), loss(step), mfu(step);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(last * kLayers * kExperts));
  file.read("step", {step.data(), DType::f64, {last}});
  file.read("loss", {loss.data(), DType::f64, {last}});
  file.read("mfu", {mfu.data(), DType::f64, {last}});
  file.read("expert_tokens", {counts.data(), DType::i64, {last, kLayers, kExperts}});
  std::size_t c = 0;
  for (std::int64_t n = 1; n <= last; ++n) {
    const auto i = std::size_t(n - 1);
    if (step[i] != double(n) || loss[i] != loss_at(n) || !std::isnan(mfu[i])) return "row " + std::to_string(n) + " differs";
    for (std::int64_t e = 0; e < kLayers * kExperts; ++e)
      if (counts[c++] != 100 * n + e) return "counts of step " + std::to_string(n) + " differ";
  }
  return {};
}

}  // namespace

TEST_CASE("numbers are written so that they read back bit for bit", "[io][cpu]") {
  CHECK(io::number_text(100000) == "100000");
  CHECK(io::number_text(0.1) == "0.1");
  CHECK(io::number_text(-3) == "-3");
  CHECK(io::number_text(0) == "0");
  CHECK(io::number_text(-0.0) == "-0");
  CHECK(io::number_text(std::numeric_limits<double>::quiet_NaN()) == "nan");
  CHECK(io::number_text(-std::numeric_limits<double>::quiet_NaN()) == "nan");
  CHECK(io::number_text(-std::numeric_limits<double>::infinity()) == "-inf");
  for (const double x : {1.0 / 3, 1e300, 5e-324, 123456789012345680.0, -2.5e-7, 8.9e15})
    CHECK(std::strtod(io::number_text(x).c_str(), nullptr) == x);
}

TEST_CASE("a log holds its rows in both files", "[io][cpu]") {
  const test::TempFolder folder;
  auto log = log_in(folder);
  CHECK(log.resume_after(0) == 0);
  CHECK(difference_from_steps(folder, 0).empty());
  for (std::int64_t step = 1; step <= 3; ++step) {
    append_step(log, step);
    CHECK(difference_from_steps(folder, step) == "");  // while the log is still open
  }
}

TEST_CASE("a resumed log continues as if it had never stopped", "[io][cpu]") {
  const test::TempFolder folder;
  {
    auto log = log_in(folder);
    log.resume_after(0);
    for (std::int64_t step = 1; step <= 6; ++step) append_step(log, step);
  }
  auto log = log_in(folder);
  CHECK(log.resume_after(4) == 4);
  CHECK(difference_from_steps(folder, 4) == "");
  append_step(log, 5);
  CHECK(difference_from_steps(folder, 5) == "");
  CHECK(log.resume_after(100) == 5);
  CHECK(difference_from_steps(folder, 5) == "");
  CHECK(log.resume_after(0) == 0);
  CHECK(difference_from_steps(folder, 0) == "");
}

TEST_CASE("a crash in the middle of a row costs that row and no other", "[io][cpu]") {
  const test::TempFolder folder;
  {
    auto log = log_in(folder);
    log.resume_after(0);
    for (std::int64_t step = 1; step <= 3; ++step) append_step(log, step);
  }
  const std::string csv = folder / "run/metrics.csv", h5 = folder / "run/metrics.h5", journal = folder / "run/expert_tokens.csv";
  std::int64_t left = 3;
  SECTION("the line of the table is torn") {
    std::filesystem::resize_file(csv, csv_up_to(3).size() - 1);
    left = 2;
  }
  SECTION("only the journal has the row, torn") { io::AppendFile(journal).append("4,400,40"); }
  SECTION("journal and half of metrics.h5 have the row") {
    io::AppendFile(journal).append("4,400,401,402,403,404,405\n");
    auto file = Hdf5File::open(h5, io::Access::write);
    file.set_rows("step", 4);
    file.set_rows("loss", 4);
  }
  SECTION("metrics.h5 is cut short") { std::filesystem::resize_file(h5, std::filesystem::file_size(h5) / 2); }
  SECTION("metrics.h5 is gone") { std::filesystem::remove(h5); }
  SECTION("metrics.h5 is no HDF5 file") { folder.file("run/metrics.h5", "garbage"); }
  SECTION("metrics.h5 lacks a row") { Hdf5File::open(h5, io::Access::write).set_rows("loss", 2); }
  SECTION("metrics.h5 is of another run") {
    const double other = 7;
    Hdf5File::open(h5, io::Access::write).write_rows("loss", 1, {&other, DType::f64, {1}});
  }
  SECTION("the table ends in zeros, as after a power cut") { io::AppendFile(csv).append(std::string(20, '\0') + "\n"); }
  auto log = log_in(folder);
  CHECK(log.resume_after(3) == left);
  CHECK(difference_from_steps(folder, left) == "");
  append_step(log, left + 1);
  CHECK(difference_from_steps(folder, left + 1) == "");
  std::filesystem::remove(h5);  // now the journal alone knows the counts
  log.resume_after(left + 1);
  CHECK(difference_from_steps(folder, left + 1) == "");
}

TEST_CASE("counts that the journal lost are -1 and not invented", "[io][cpu]") {
  const test::TempFolder folder;
  {
    auto log = log_in(folder);
    log.resume_after(0);
    for (std::int64_t step = 1; step <= 2; ++step) append_step(log, step);
  }
  folder.file("run/expert_tokens.csv", "2,200,201,202,203,204,205\n");
  std::filesystem::remove(folder / "run/metrics.h5");
  auto log = log_in(folder);
  log.resume_after(2);
  std::int64_t counts[12];
  Hdf5File::open(folder / "run/metrics.h5").read("expert_tokens", {counts, DType::i64, {2, kLayers, kExperts}});
  CHECK(counts[0] == -1);
  CHECK(counts[5] == -1);
  CHECK(counts[6] == 200);
  CHECK(counts[11] == 205);
}

TEST_CASE("rows written with other columns are fitted by name", "[io][cpu]") {
  const test::TempFolder folder;
  folder.file("run/metrics.csv", "step,old,loss\n1,5,0.25\n2,6,nan\n");
  RunLog log(folder / "run", kColumns, 0, 0);
  CHECK(log.resume_after(2) == 2);
  log.append({3, 0.5, 0.125}, {});
  CHECK(io::read_text(folder / "run/metrics.csv") == "step,loss,mfu\n1,0.25,\n2,nan,\n3,0.5,0.125\n");
  const auto file = Hdf5File::open(folder / "run/metrics.h5");
  CHECK(file.names() == std::vector<std::string>{"loss", "mfu", "step"});
  CHECK_FALSE(std::filesystem::exists(folder / "run/expert_tokens.csv"));
}

TEST_CASE("a log refuses what it cannot record", "[io][cpu]") {
  const test::TempFolder folder;
  auto log = log_in(folder);
  CHECK(contains(error_of([&] { append_step(log, 1); }), "resume_after comes before append"));
  log.resume_after(0);
  append_step(log, 2);
  CHECK(contains(error_of([&] { append_step(log, 2); }), "steps must ascend (step=2, last=2)"));
  CHECK(contains(error_of([&] { log.append({3, 1}, {}); }), "(values=2, columns=3)"));
  CHECK(contains(error_of([&] { log.append({3, 1, 1}, {}); }), "expert counts are not (layers, experts)"));
  CHECK(contains(error_of([&] { RunLog(folder.file("f", "1") + "/run", kColumns, 0, 0); }), "/f/run: cannot make the folder"));
  folder.file("run/metrics.csv", "loss,step\n1,1\n");
  CHECK(contains(error_of([&] { log.resume_after(1); }), "metrics.csv:1: the first column is not step"));
}

TEST_CASE("exit.json says how a run ended and goes when asked", "[io][cpu]") {
  const test::TempFolder folder;
  io::write_exit(folder.path(), ExitCode::rank_lost, "rank 3 \"lost\"\n\xFF", 3, std::nullopt);
  const auto exit = nlohmann::json::parse(io::read_text(folder / "exit.json"));
  CHECK(exit.at("code") == 4);
  CHECK(exit.at("rank") == 3);
  CHECK(exit.at("step").is_null());
  CHECK(contains(exit.at("cause").get<std::string>(), "rank 3 \"lost\"\n"));
  CHECK(exit.size() == 4);
  io::write_exit(folder.path(), ExitCode::stopped, "signal", std::nullopt, 17);
  CHECK(nlohmann::json::parse(io::read_text(folder / "exit.json")).at("step") == 17);
  folder.file("exit.json.2-77.part", "{");  // its writer was killed
  io::remove_exit(folder.path());
  CHECK(std::filesystem::is_empty(folder.path()));
  io::remove_exit(folder.path());
  CHECK(contains(error_of([&] { io::write_exit(folder / "no", ExitCode::done, "", 0, 0); }), "/no/exit.json.0-"));
}

TEST_CASE("exit.json of ranks that fail at the same time is whole at any moment", "[io][cpu]") {
  const test::TempFolder folder;
  const auto write = [&](int rank) {
    return std::async(std::launch::async, [&folder, rank] {
      return error_of([&] {
        for (int n = 0; n < 100; ++n)
          io::write_exit(folder.path(), ExitCode::run_failed, std::string(std::size_t(1000 * rank), 'x'), rank, n);
        throw Error("written");
      });
    });
  };
  auto first = write(1), second = write(2);
  while (second.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (!std::filesystem::exists(folder / "exit.json")) continue;
    const auto exit = nlohmann::json::parse(io::read_text(folder / "exit.json"));
    REQUIRE(exit.at("cause").get<std::string>().size() == exit.at("rank").get<std::size_t>() * 1000);
  }
  CHECK(first.get() == "3: written");
  CHECK(second.get() == "3: written");
}
