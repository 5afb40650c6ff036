// checkpoint_test.cpp -- a checkpoint on one rank: every bit comes back, every damage is refused, and the one before survives;
// and a whole run in its folder: resume, metrics, and how it ends.
#include "core/checkpoint_saver.h"

#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/monitor.h"
#include "core/plan.h"
#include "core/together.h"
#include "core/train_loop.h"
#include "io/files.h"
#include "io/hdf5_file.h"
#include "io/in_hdf5.h"
#include "io/token_file.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/short_files.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;
namespace fs = std::filesystem;

namespace {

core::Config config_of(DType dtype) {
  core::Config c = tiny_config();
  c.run.dtype = dtype;
  c.moe.balance = core::Balance::quantile;
  c.moe.quantile_bins = 50;
  return c;
}

std::unique_ptr<core::Trainer> fresh(const core::Config& c) {
  auto t = std::make_unique<core::Trainer>(c, parallel::solo(), Device::cpu, /*poison=*/true);
  t->initialize();
  return t;
}
std::unique_ptr<core::Trainer> trained(const core::Config& c, int steps) {
  auto t = fresh(c);
  for (int s = 0; s < steps; ++s) t->step(synthetic_step(*t));
  return t;
}

// Every byte a trainer holds across steps.
std::string bytes_of(core::Trainer& t) {
  std::string all;
  auto add = [&](ConstTensor x) { all.append(static_cast<const char*>(x.data), std::size_t(x.bytes())); };
  for (int i = 0; i < t.table().size(); ++i) {
    const auto rows = t.params().update_rows(i);
    add(t.params().stored(i, rows));
    if (t.optimizer().has_master(i)) add(t.optimizer().master(i, rows));
    if (t.optimizer().has_state(i)) add(t.optimizer().exp_avg(i, rows)), add(t.optimizer().exp_avg_sq(i, rows));
  }
  const auto p = t.progress();
  for (const std::int64_t n : {p.step, p.updates, p.sequences, p.tokens}) all += std::to_string(n) + " ";
  return all;
}

std::string contents(const std::string& path) { return io::read_text(path); }
void overwrite(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}
using Names = std::vector<std::string>;

// What the checksums in a checkpoint say about its files.
std::string sums_of(const std::string& path) { return io::Hdf5File::open(path + "/checkpoint.h5").read_text("shards"); }

// A process's largest resident set since it was last asked, in bytes.
std::int64_t resident_peak() {
  std::ifstream status("/proc/self/status");
  std::int64_t kib = 0;
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) kib = std::stoll(line.substr(6));
  std::ofstream("/proc/self/clear_refs") << "5";
  return kib * 1024;
}

}  // namespace

TEST_CASE("weights, masters, moments, bias and progress come back to the last bit, in every type") {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    CAPTURE(int(dtype));
    const TempFolder folder;
    const core::Config c = config_of(dtype);
    auto a = trained(c, 3), b = fresh(c);
    core::CheckpointSaver(*a, folder.path(), 2).save();
    REQUIRE(bytes_of(*a) != bytes_of(*b));
    core::load_checkpoint(*b, core::latest_checkpoint(folder.path()), true);
    CHECK(bytes_of(*a) == bytes_of(*b));
    const auto x = a->step(synthetic_step(*a)), y = b->step(synthetic_step(*b));
    CHECK(x.loss == y.loss);
    CHECK(x.grad_norm == y.grad_norm);
    CHECK(bytes_of(*a) == bytes_of(*b));
  }
}

TEST_CASE("the view holds what the rank holds, under public names and in its own type; pinned tensors and bias stay fp32") {
  const TempFolder folder;
  auto t = trained(config_of(DType::bf16), 2);
  core::CheckpointSaver(*t, folder.path(), 2).save();
  const auto view = io::Hdf5File::open(folder / "step_00000002/checkpoint.h5");
  int pinned = 0, masters = 0, biases = 0;
  for (int i = 0; i < t->table().size(); ++i) {
    const auto& p = t->table()[i];
    CAPTURE(p.name);
    const auto rows = t->params().update_rows(i);
    auto same = [&](const std::string& name, ConstTensor held) {
      const auto info = view.info(name);
      REQUIRE(info.shape == p.shape);
      REQUIRE(info.dtype == held.dtype);
      std::vector<std::byte> read(std::size_t(held.bytes()));
      view.read(name, Tensor(read.data(), held.dtype, held.shape));
      CHECK(std::memcmp(read.data(), held.data, read.size()) == 0);
    };
    same(p.name, t->params().stored(i, rows));
    CHECK(view.info(p.name).dtype == (p.pinned ? DType::f32 : DType::bf16));
    pinned += p.pinned;
    biases += p.unit == core::UnitKind::router_bias && p.pinned;
    CHECK(view.has("master/" + p.name) == (!p.pinned && p.trainable && p.unit != core::UnitKind::router_bias));
    if (t->optimizer().has_master(i)) ++masters, same("master/" + p.name, t->optimizer().master(i, rows));
    if (t->optimizer().has_state(i)) {
      same("optimizer/exp_avg/" + p.name, t->optimizer().exp_avg(i, rows));
      same("optimizer/exp_avg_sq/" + p.name, t->optimizer().exp_avg_sq(i, rows));
    }
  }
  CHECK(pinned > 0);
  CHECK(masters > 0);
  CHECK(biases == t->model().moe_layers());
  CHECK(view.integer_attribute("step") == 2);
  CHECK(view.integer_attribute("tokens_seen") == t->progress().tokens);
  CHECK(view.integer_attribute("seed") == 1);
}

TEST_CASE("a damaged checkpoint is refused before a value is used, and the message says what is wrong with which file") {
  const TempFolder folder;
  const core::Config c = config_of(DType::f32);
  auto t = trained(c, 1);
  core::CheckpointSaver(*t, folder / "all", 0).save();
  t->step(synthetic_step(*t));
  core::CheckpointSaver(*t, folder / "all", 0).save();
  const std::string old = folder / "all/step_00000001", good = folder / "all/step_00000002";
  struct Damage {
    const char* name;
    std::function<void(const std::string&)> make;
    std::vector<std::string> words;
  };
  const std::vector<Damage> damages = {
      {"cut",
       [](const std::string& p) { fs::resize_file(p + "/shard_00000.h5", fs::file_size(p + "/shard_00000.h5") - 1); },
       {"shard_00000.h5", "was written with"}},
      {"empty", [](const std::string& p) { overwrite(p + "/shard_00000.h5", ""); }, {"shard_00000.h5", "has 0 bytes"}},
      {"flipped",
       [](const std::string& p) {
         auto bytes = contents(p + "/shard_00000.h5");
         bytes[bytes.size() * 3 / 4] ^= 1;
         overwrite(p + "/shard_00000.h5", bytes);
       },
       {"shard_00000.h5", "checksum differs"}},
      {"missing", [](const std::string& p) { fs::remove(p + "/shard_00000.h5"); }, {"shard_00000.h5", "missing"}},
      {"of another",
       [&](const std::string& p) {
         fs::copy_file(old + "/shard_00000.h5", p + "/shard_00000.h5", fs::copy_options::overwrite_existing);
       },
       {"shard_00000.h5", "checksum differs"}},
      {"view flipped",
       [](const std::string& p) {
         auto bytes = contents(p + "/checkpoint.h5");
         bytes[bytes.size() / 2] ^= 64;
         overwrite(p + "/checkpoint.h5", bytes);
       },
       {"checkpoint.h5", "checksum differs"}},
      {"foreign",
       [](const std::string& p) {
         io::write_token_file(p + "/checkpoint.h5",
                              {.tokens = {1, 2}, .documents = {}, .labels = {}, .vocab_size = 9, .tokenizer = "none"});
       },
       {"checkpoint.h5", "was written with"}},
      {"foreign with its own checksum",
       [](const std::string& p) {
         io::write_token_file(p + "/checkpoint.h5",
                              {.tokens = {1, 2}, .documents = {}, .labels = {}, .vocab_size = 9, .tokenizer = "none"});
         const auto sum = io::checksum_of_file(p + "/checkpoint.h5");
         char line[64];
         std::snprintf(line, sizeof line, "checkpoint.h5 %lld %08x\n", static_cast<long long>(sum.bytes), sum.crc32);
         overwrite(p + "/checkpoint.crc32", line);
       },
       {"checkpoint.h5", "not the view of a checkpoint"}},
      {"no view", [](const std::string& p) { fs::remove(p + "/checkpoint.h5"); }, {"not a checkpoint", "checkpoint.h5"}},
      {"no checksum", [](const std::string& p) { fs::remove(p + "/checkpoint.crc32"); }, {"checkpoint.crc32", "missing"}},
      {"bad checksum",
       [](const std::string& p) { overwrite(p + "/checkpoint.crc32", "checkpoint.h5 12 zzzz\n"); },
       {"checkpoint.crc32", "unreadable checksum"}},
      {"empty checksum",
       [](const std::string& p) { overwrite(p + "/checkpoint.crc32", ""); },
       {"checkpoint.crc32", "lists no files"}},
  };
  for (const Damage& d : damages) {
    CAPTURE(d.name);
    const std::string path = folder / "damaged";
    fs::remove_all(path);
    fs::copy(good, path);
    d.make(path);
    auto b = fresh(c);
    const auto before = bytes_of(*b);
    const auto said = error_of([&] { core::load_checkpoint(*b, path, true); });
    CAPTURE(said);
    CHECK(said.substr(0, 3) == "3: ");
    for (const auto& word : d.words) CHECK(contains(said, word));
    CHECK(contains(error_of([&] { core::read_checkpoint_summary(path); }), d.words[0]));
    CHECK(bytes_of(*b) == before);
    core::load_checkpoint(*b, old, true);
    CHECK(b->progress().step == 1);
  }
  auto b = fresh(c);
  CHECK(contains(error_of([&] { core::load_checkpoint(*b, folder / "nowhere", true); }), "not a checkpoint folder"));
  overwrite(folder / "all/latest", "step_00000009\n");
  CHECK(contains(error_of([&] { core::latest_checkpoint(folder / "all"); }),
                 "3: " + (folder / "all/latest") + ": names 'step_00000009'"));
  overwrite(folder / "all/latest", "");
  CHECK(contains(error_of([&] { core::latest_checkpoint(folder / "all"); }), "is empty"));
  overwrite(folder / "all/latest", std::string(3000, '\x80'));
  CHECK(contains(error_of([&] { core::latest_checkpoint(folder / "all"); }), "does not hold the name of a checkpoint"));
  CHECK(core::latest_checkpoint(folder / "nowhere").empty());
}

TEST_CASE("a checkpoint of another job is refused with code 2, the key and both values; where it may differ it is taken") {
  const TempFolder folder;
  const core::Config c = config_of(DType::f64);
  core::CheckpointSaver(*trained(c, 1), folder.path(), 2).save();
  const std::string path = core::latest_checkpoint(folder.path());
  struct Row {
    std::function<void(core::Config&)> change;
    std::vector<std::string> words;
  };
  for (const Row& row : std::vector<Row>{
           {[](auto& o) { o.model.hidden_size = 25; }, {"model.hidden_size is '24' there and '25' here"}},
           {[](auto& o) { o.model.dsa->index_topk = 5; }, {"model.dsa_config.index_topk is '4' there and '5' here"}},
           {[](auto& o) { o.model.attn_res_block_size.reset(); }, {"model.attn_res_block_size is '2' there and absent here"}},
           {[](auto& o) { o.data.sequence_length = 16; }, {"data.sequence_length is '32' there and '16' here"}},
           {[](auto& o) {
              o.data.train = {"b", "c"};
            },
            {"data.train is", "[b, c]"}},
           {[](auto& o) { o.optimizer.lr = 0.5; }, {"optimizer.lr is '0.01' there and '0.5' here"}},
           {[](auto& o) { o.run.seed = 2; }, {"run.seed is '1' there and '2' here"}},
           {[](auto& o) { o.run.dtype = DType::f32; }, {"run.dtype is 'fp64' there and 'fp32' here"}},
           {[](auto& o) { o.training.trainable = {"model.layers.*"}; }, {"training.trainable is", "model.layers.*"}}}) {
    core::Config other = c;
    row.change(other);
    auto t = fresh(other);
    const auto before = bytes_of(*t);
    const auto said = error_of([&] { core::load_checkpoint(*t, path, true); });
    CAPTURE(said);
    CHECK(said.substr(0, 3) == "2: ");
    for (const auto& word : row.words) CHECK(contains(said, word));
    CHECK(bytes_of(*t) == before);
  }
  core::Config free = c;
  free.data.eval = {"elsewhere"};
  free.training.steps = 99;
  free.training.micro_batch_size = 2;
  free.schedule.name = core::ScheduleKind::cosine;
  free.checkpoint.every = 3;
  free.parallel.sharding = parallel::Sharding::none;
  auto t = fresh(free);
  core::load_checkpoint(*t, path, true);
  CHECK(t->progress().step == 1);
  core::Config start = c;  // another curve from the same weights
  start.optimizer.lr = 0.5;
  auto u = fresh(start);
  core::load_checkpoint(*u, path, false);
  CHECK(u->progress().step == 1);
  for (const auto& [change, words] : std::vector<std::pair<std::function<void(core::ModelConfig&)>, std::string>>{
           {[](auto& m) { m.intermediate_size = 41; }, "model.intermediate_size is '40' there and '41' here"},
           {[](auto& m) { m.routed_scaling_factor = 3; }, "model.routed_scaling_factor is '1' there and '3' here"}}) {
    core::Config other = c;
    change(other.model);
    auto v = fresh(other);
    const auto said = error_of([&] { core::load_checkpoint(*v, path, false); });
    CAPTURE(said);
    CHECK(said.substr(0, 3) == "2: ");
    CHECK(contains(said, words));
    CHECK(contains(said, "needs a run.dir and weights of its own"));
  }
  start.run.dtype = DType::f32;
  auto w = fresh(start);
  const auto said = error_of([&] { core::load_checkpoint(*w, path, false); });
  CHECK(said.substr(0, 3) == "3: ");
  CHECK(contains(said, " there, this job needs fp32"));
}

TEST_CASE("keep N: the newest stay, those of an abandoned run go first, and what a cut save left goes too") {
  const TempFolder folder;
  auto t = fresh(config_of(DType::f32));
  auto save_at = [&](std::int64_t step, std::int64_t keep) {
    t->set_progress({.step = step, .updates = step, .sequences = step, .tokens = step});
    core::CheckpointSaver(*t, folder.path(), keep).save();
    CHECK(core::latest_checkpoint(folder.path()) == folder / fs::path(core::latest_checkpoint(folder.path())).filename().string());
    CHECK(core::read_checkpoint_summary(core::latest_checkpoint(folder.path())).step == step);
  };
  for (const std::int64_t step : {1, 2, 3, 4}) save_at(step, 2);
  CHECK(names_in(folder.path()) == Names{"latest", "step_00000003", "step_00000004"});
  fs::create_directories(folder / "step_00000009.partial");
  fs::create_directories(folder / "step_00000001_mine");
  folder.file("step_00000009.partial/shard_00000.h5", "half a shard");
  folder.file("step_00000002.partial/shard_00000.h5", "another half");
  save_at(2, 2);  // the run was begun anew: 3 and 4 are of the abandoned one
  CHECK(names_in(folder.path()) == Names{"latest", "step_00000001_mine", "step_00000002", "step_00000004"});
  save_at(3, 2);
  CHECK(names_in(folder.path()) == Names{"latest", "step_00000001_mine", "step_00000002", "step_00000003"});
  save_at(3, 2);  // in place of itself
  CHECK(names_in(folder.path()) == Names{"latest", "step_00000001_mine", "step_00000002", "step_00000003"});
  save_at(99999999, 2);
  save_at(100000000, 2);  // one digit more: newer all the same
  save_at(100000001, 2);
  CHECK(names_in(folder.path()) == Names{"latest", "step_00000001_mine", "step_100000000", "step_100000001"});
  save_at(100000002, 0);
  save_at(100000003, 0);
  CHECK(names_in(folder.path()).size() == 6);
}

TEST_CASE("a save that the disk refuses is one Error, leaves no half checkpoint, and the one before is as it was") {
  const TempFolder folder;
  auto t = trained(config_of(DType::f32), 1);
  core::CheckpointSaver(*t, folder.path(), 2).save();
  const auto before = contents(folder / "step_00000001/shard_00000.h5");
  t->step(synthetic_step(*t));
  rlimit old{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  // Each part of a save: the first byte of a shard, its middle, its end, and the view where it is the larger file.
  const auto whole = fs::file_size(folder / "step_00000001/shard_00000.h5");
  for (const std::uintmax_t bytes : {std::uintmax_t(0), std::uintmax_t(3000), whole / 2, whole - 100}) {
    CAPTURE(bytes);
    rlimit low = old;
    low.rlim_cur = bytes;
    REQUIRE(setrlimit(RLIMIT_FSIZE, &low) == 0);
    const auto said = error_of([&] { core::CheckpointSaver(*t, folder.path(), 2).save(); });
    REQUIRE(setrlimit(RLIMIT_FSIZE, &old) == 0);
    CAPTURE(said);
    CHECK(said.substr(0, 3) == "3: ");
    CHECK(contains(said, "step_00000002 was not saved"));
    CHECK(contains(said, "File too large"));
    CHECK(!contains(said, "\n"));
    CHECK(names_in(folder.path()) == Names{"latest", "step_00000001"});
    CHECK(contents(folder / "step_00000001/shard_00000.h5") == before);
    CHECK(core::read_checkpoint_summary(core::latest_checkpoint(folder.path())).step == 1);
  }
  std::signal(SIGXFSZ, handler);
  core::CheckpointSaver(*t, folder.path(), 2).save();
  auto b = fresh(t->config());
  core::load_checkpoint(*b, core::latest_checkpoint(folder.path()), true);
  CHECK(bytes_of(*b) == bytes_of(*t));
}

namespace {

// A language with something to learn, as a token file of the tiny model's vocabulary.
io::TokenData some_tokens(std::int64_t count) {
  io::TokenData d{.tokens = {}, .documents = {}, .labels = {}, .vocab_size = 61, .tokenizer = "none"};
  for (std::int64_t i = 0; i < count; ++i) {
    const auto r = ops::philox(3, 1, std::uint64_t(i));
    d.tokens.push_back(std::int64_t(r[0] % 4 != 0 && i > 0 ? (std::uint64_t(d.tokens.back()) * 5 + 3) % 61 : r[1] % 61));
    if (i % 100 == 0) d.documents.push_back(i);
  }
  return d;
}

core::Config run_config(const TempFolder& folder, const std::string& name, const io::TokenData& data = some_tokens(4000)) {
  core::Config c = config_of(DType::f32);
  c.run.dir = folder / name;
  c.data.train = {folder / "tokens.h5"};
  c.data.format = io::DataFormat::tokens;
  c.training.steps = 9;
  io::write_token_file(c.data.train[0], data);
  return c;
}

ExitCode run(const core::Config& c, const core::TrainOptions& options = {}) {
  return core::train(c, parallel::solo(), Device::cpu, options);
}

struct Csv {
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
  explicit Csv(const std::string& path) {
    std::istringstream lines(contents(path));
    for (std::string line; std::getline(lines, line);) {
      std::vector<std::string> fields;
      for (std::size_t begin = 0; begin <= line.size();) {
        const auto comma = std::min(line.find(',', begin), line.size());
        fields.push_back(line.substr(begin, comma - begin));
        begin = comma + 1;
      }
      if (columns.empty())
        columns = fields;
      else
        rows.push_back(fields);
    }
  }
  std::vector<std::string> column(const std::string& name) const {
    const auto c = std::size_t(std::find(columns.begin(), columns.end(), name) - columns.begin());
    REQUIRE(c < columns.size());
    std::vector<std::string> values;
    for (const auto& row : rows) values.push_back(row.at(c));
    return values;
  }
};
constexpr const char* kBitEqual[] = {"step", "tokens", "loss", "balance_loss", "indexer_loss", "grad_norm", "lr", "label_tokens"};

}  // namespace

TEST_CASE("a run that is stopped and resumed is the run that was not, bit for bit, also after rows past the checkpoint") {
  const TempFolder folder;
  const core::Config through = run_config(folder, "through");
  CHECK(run(through) == ExitCode::done);
  core::Config parts = run_config(folder, "parts");
  parts.checkpoint.keep = 0;
  CHECK(run(parts, {.stop_after = 4}) == ExitCode::done);
  CHECK(run(parts, {.stop_after = 2}) == ExitCode::done);
  int asked = 0;
  CHECK(run(parts, {.stop_requested = [&] { return ++asked == 3; }}) == ExitCode::stopped);
  CHECK(Csv(folder / "parts/metrics.csv").rows.size() == 8);
  CHECK(contains(contents(folder / "parts/exit.json"), "\"code\": 5"));
  overwrite(folder / "parts/checkpoints/latest", "step_00000004\n");  // as if the later ones had been lost
  CHECK(run(parts) == ExitCode::done);
  const Csv a(folder / "through/metrics.csv"), b(folder / "parts/metrics.csv");
  CHECK(a.rows.size() == 9);
  for (const char* name : kBitEqual) {
    CAPTURE(name);
    CHECK(a.column(name) == b.column(name));
  }
  CHECK(contents(folder / "through/expert_tokens.csv") == contents(folder / "parts/expert_tokens.csv"));
  auto x = fresh(through), y = fresh(parts);
  core::load_checkpoint(*x, core::latest_checkpoint(folder / "through/checkpoints"), true);
  core::load_checkpoint(*y, core::latest_checkpoint(folder / "parts/checkpoints"), true);
  CHECK(x->progress().step == 9);
  CHECK(bytes_of(*x) == bytes_of(*y));
}

TEST_CASE(
    "metrics.csv has every column of the contract, and metrics.h5 the same values bit for bit, with the rows of every expert") {
  const TempFolder folder;
  core::Config c = run_config(folder, "run");
  c.moe.balance = core::Balance::auxiliary;
  c.data.eval = c.data.train;
  c.training.eval_every = 4;
  c.training.eval_batches = 2;
  CHECK(run(c) == ExitCode::done);
  const Csv csv(folder / "run/metrics.csv");
  const auto h5 = io::Hdf5File::open(folder / "run/metrics.h5");
  REQUIRE(csv.rows.size() == 9);
  CHECK(csv.columns[0] == "step");
  for (const char* name : {"step",
                           "tokens",
                           "loss",
                           "balance_loss",
                           "indexer_loss",
                           "grad_norm",
                           "lr",
                           "label_tokens",
                           "step_ms",
                           "tokens_per_s",
                           "model_tflops",
                           "mfu",
                           "device_peak_bytes",
                           "pool_peak_bytes",
                           "pool_fragmentation",
                           "host_peak_bytes",
                           "expert_load_max",
                           "expert_load_p95",
                           "expert_load_median",
                           "expert_load_min",
                           "rank_load_max",
                           "rank_load_p95",
                           "rank_load_median",
                           "dropped_tokens",
                           "rerouted_tokens",
                           "exposed_comm_ms",
                           "cache_hits",
                           "cache_bytes_host",
                           "eval_loss"}) {
    CAPTURE(name);
    const auto texts = csv.column(name);
    std::vector<double> stored(texts.size());
    h5.read(name, Tensor(stored.data(), DType::f64, {std::int64_t(stored.size())}));
    for (std::size_t i = 0; i < texts.size(); ++i)
      if (texts[i].empty())
        CHECK(std::isnan(stored[i]));
      else
        CHECK(std::strtod(texts[i].c_str(), nullptr) == stored[i]);
  }
  for (const char* name : {"mfu", "rank_load_max", "dropped_tokens", "rerouted_tokens", "cache_hits", "cache_bytes_host"})
    CHECK(csv.column(name) == Names(9));
  CHECK(csv.column("eval_loss")[3] != "");
  CHECK(csv.column("eval_loss")[4] == "");
  CHECK(csv.column("eval_loss")[8] != "");
  const auto info = h5.info("expert_tokens");
  REQUIRE(info.shape == Shape{9, 4, 8});
  std::vector<std::int64_t> counts(std::size_t(info.shape.count()));
  h5.read("expert_tokens", Tensor(counts.data(), DType::i64, info.shape));
  const auto tokens = csv.column("tokens");
  for (std::size_t row = 0; row < 9; ++row) {
    const std::int64_t step_tokens = std::stoll(tokens[row]) - (row > 0 ? std::stoll(tokens[row - 1]) : 0);
    for (std::size_t layer = 0; layer < 4; ++layer) {
      std::int64_t sum = 0;
      for (std::size_t e = 0; e < 8; ++e) sum += counts[(row * 4 + layer) * 8 + e];
      CHECK(sum == step_tokens * c.model.num_experts_per_token);
    }
  }
}

TEST_CASE("time by op is told once, after the steps that were asked for or those of a shorter run") {
  const TempFolder folder;
  core::Config c = run_config(folder, "run");
  std::string log;
  const auto told = [&](std::int64_t profile_steps, std::int64_t stop_after) {  // by this run alone
    c.monitor.profile_steps = profile_steps;
    const std::size_t before = log.size();
    CHECK(run(c, {.stop_after = stop_after}) == ExitCode::done);
    return (log = contents(folder / "run/log.txt")).substr(before);
  };
  const auto tables = [](const std::string& text) {
    const auto first = text.find("time by op");
    return first == text.npos ? 0 : text.find("time by op", first + 1) == text.npos ? 1 : 2;
  };
  for (const std::int64_t asked : {2, 3, 20}) {
    const std::string text = told(asked, 3);
    CHECK(contains(text, "time by op on this rank, a step, over " + std::to_string(std::min<std::int64_t>(asked, 3)) + " steps"));
    CHECK(contains(text, " calls"));
    CHECK(tables(text) == 1);
  }
  CHECK(contains(told(5, 0), "no time by op: this run did no step"));
  CHECK(tables(told(0, 0)) == 0);
}

TEST_CASE("a run whose data has no label at all ends well: no loss is told, every update skipped, no weight changed") {
  const TempFolder folder;
  auto data = some_tokens(2000);
  data.labels.assign(data.tokens.size(), -100);
  core::Config c = run_config(folder, "run", data);
  c.training.steps = 3;
  c.training.max_nonfinite = 1;  // not what such a step is
  c.data.eval = c.data.train;
  CHECK(run(c) == ExitCode::done);
  const Csv csv(folder / "run/metrics.csv");
  CHECK(csv.column("loss") == Names{"", "", ""});
  CHECK(csv.column("eval_loss") == Names{"", "", ""});
  CHECK(csv.column("skipped") == Names{"1", "1", "1"});
  CHECK(csv.column("label_tokens") == Names{"0", "0", "0"});
  const std::string log = contents(folder / "run/log.txt");
  CHECK(contains(log, "step 3/3  loss no label  norm"));
  CHECK(contains(log, "step 3: no label in the whole batch; update skipped"));
  CHECK(contains(log, "step 3: no label in what is read of data.eval"));
  CHECK_FALSE(contains(log, "  eval "));
  auto t = fresh(c), loaded = fresh(c);
  core::load_checkpoint(*loaded, core::latest_checkpoint(folder / "run/checkpoints"), true);
  CHECK(loaded->progress().updates == 0);
  t->set_progress(loaded->progress());
  CHECK(bytes_of(*t) == bytes_of(*loaded));
}

TEST_CASE("steps without finite gradients are skipped, counted and given up on, from the checkpoint that holds them on") {
  const TempFolder folder;
  core::Config c = run_config(folder, "run");
  c.training.max_nonfinite = 3;
  auto t = fresh(c);
  t->params().stored(t->table().find("model.norm.weight"), {0, 1}).as<float>()[0] = std::numeric_limits<float>::infinity();
  core::CheckpointSaver(*t, folder / "run/checkpoints", 2).save();
  CHECK(run(c) == ExitCode::gave_up);
  CHECK(Csv(folder / "run/metrics.csv").column("skipped") == Names{"1", "1", "1"});
  CHECK(contains(contents(folder / "run/exit.json"), "\"code\": 6"));
  CHECK(contains(contents(folder / "run/exit.json"), "\"step\": 3"));
  CHECK(names_in(folder / "run/checkpoints") == Names{"latest", "step_00000000"});
}

TEST_CASE("an id outside the vocabulary ends the run where it is met, with file and position, and the log says so too") {
  const TempFolder folder;
  auto data = some_tokens(4000);
  data.tokens[170] = 61;
  core::Config c = run_config(folder, "run", data);
  c.data.shuffle = false;
  std::int64_t reached = -1;
  const auto said = error_of([&] { run(c, {.reached = [&](std::int64_t step) { reached = step; }}); });
  CHECK(said == "3: " + c.data.train[0] + ": token 170 is id 61, the vocabulary has 61");
  CHECK(reached == 5);
  CHECK(contains(contents(folder / "run/log.txt"), "token 170 is id 61"));
  core::Config e = run_config(folder, "eval");
  e.data.eval = {folder / "bad.h5"};
  data.tokens[170] = 1;
  data.tokens[40] = 77;
  io::write_token_file(e.data.eval[0], data);
  e.data.shuffle = false;
  reached = -1;
  CHECK(contains(error_of([&] { run(e, {.reached = [&](std::int64_t step) { reached = step; }}); }), "bad.h5: token 40 is id 77"));
  CHECK(reached == -1);  // before the first step: an evaluation reads the same sequences every time
}

TEST_CASE("together turns any exception into the same Error, and lets one from inside pass") {
  const auto world = parallel::solo();
  CHECK(error_of([&] { core::together(*world, [] { throw std::runtime_error("words"); }); }) == "3: words");
  CHECK(error_of([&] { core::together(*world, [] { throw Error("job", ExitCode::bad_job); }); }) == "2: job");
  CHECK(error_of([&] { core::together(*world, [] { throw std::bad_alloc(); }); }) == "3: out of host memory");
  CHECK(error_of([&] { core::together(*world, [&] { core::together(*world, [] { throw Error("inner"); }); }); }) == "3: inner");
  CHECK(error_of([&] { core::together(*world, [] {}); }) == "nothing was thrown");
}

TEST_CASE("a checkpoint written beside training has the bytes of one written at once, whatever the steps do meanwhile") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    CAPTURE(int(dtype));
    const TempFolder folder;
    auto t = trained(config_of(dtype), 2);
    core::CheckpointSaver(*t, folder / "once", 2).save();
    std::vector<std::int64_t> told;
    core::CheckpointSaver saver(*t, folder / "beside", 2, [&](const core::CheckpointSaver::Saved& s) { told.push_back(s.step); });
    {
      const io::InHdf5 turn;  // the writer has to wait for it
      saver.begin();
      t->step(synthetic_step(*t));
      CHECK(saver.working());
      CHECK_FALSE(fs::exists(folder / "beside/latest"));
    }
    saver.advance();  // the files; then the view
    saver.advance();
    CHECK_FALSE(saver.working());
    CHECK(told == std::vector<std::int64_t>{2});
    CHECK(names_in(folder / "beside") == Names{"latest", "step_00000002"});
    CHECK(sums_of(folder / "once/step_00000002") == sums_of(folder / "beside/step_00000002"));
    auto a = fresh(config_of(dtype)), b = fresh(config_of(dtype));
    core::load_checkpoint(*a, folder / "once/step_00000002", true);
    core::load_checkpoint(*b, folder / "beside/step_00000002", true);
    CHECK(bytes_of(*a) == bytes_of(*b));
    CHECK(bytes_of(*a) != bytes_of(*t));
  }
}

TEST_CASE("the next save waits for the one before, and one that is given up leaves nothing") {
  const TempFolder folder;
  auto t = trained(config_of(DType::f32), 1);
  {
    core::CheckpointSaver saver(*t, folder.path(), 0);
    for (int s = 0; s < 3; ++s) {
      saver.begin();
      t->step(synthetic_step(*t));
    }
    CHECK(core::read_checkpoint_summary(folder / "step_00000002").step == 2);
    const io::InHdf5 turn;
    CHECK(fs::exists(folder / "step_00000003.partial"));
  }
  CHECK(names_in(folder.path()) == Names{"latest", "step_00000001", "step_00000002"});
}

TEST_CASE("a write beside training that fails is told by the next advance or the end, names the file, and costs that checkpoint alone") {
  const TempFolder folder;
  auto t = trained(config_of(DType::f32), 1);
  core::CheckpointSaver saver(*t, folder.path(), 2);
  saver.save();
  for (const bool at_the_end : {false, true}) {
    t->step(synthetic_step(*t));
    const std::string name = core::step_name(t->progress().step), file = folder / name + ".partial/shard_00000.h5";
    std::string said;
    {
      const ShortFiles short_files(100000);
      saver.begin();
      said = error_of([&] { at_the_end ? saver.finish() : saver.advance(); });
    }
    CHECK(contains(said, "3: checkpoint " + name + " was not saved, the one before is as it was: " + file + ": cannot write: File too large"));
    CHECK(names_in(folder.path()) == Names{"latest", "step_00000001"});
    saver.finish();
  }
  saver.begin();
  saver.finish();
  CHECK(core::read_checkpoint_summary(core::latest_checkpoint(folder.path())).step == 3);
}

TEST_CASE("a save at once holds no more than a block beside what a rank stores, one beside training what the plan says") {
  core::Config c = config_of(DType::f32);
  c.model.vocab_size = 200000;  // 19 MB a tensor of embedding or head
  c.checkpoint.every = 1;
  c.checkpoint.async = true;
  const core::Plan plan = core::make_plan(c);
  const auto& host = plan.ranks.at(0).host_bytes;
  const std::int64_t planned = host[std::size_t(Category::weights)] + host[std::size_t(Category::optimizer)];
  CHECK(planned > 115000000);
  const TempFolder folder;
  auto t = fresh(c);
  core::CheckpointSaver saver(*t, folder.path(), 1);
  resident_peak();
  const std::int64_t before = resident_peak();
  saver.save();
  const std::int64_t at_once = resident_peak();
  CHECK(at_once - before < 16 << 20);
  CHECK(saver.host().peak() == 0);
  const std::int64_t between = resident_peak();  // with what libraries keep of the first save
  saver.begin();
  saver.finish();
  const std::int64_t beside = resident_peak();
  CHECK(saver.host().peak() == planned);
  CHECK(saver.host().peaks() == host);
  CHECK(beside - between > planned * 9 / 10);
  CHECK(beside - between < planned + (16 << 20));
}

TEST_CASE("what a job leaves as it is lies on the disk once, whole in every checkpoint that has it") {
  core::Config c = config_of(DType::bf16);
  c.training.trainable = {"lm_head.weight", "*layers.3*"};
  const TempFolder folder;
  auto t = trained(c, 1);
  core::CheckpointSaver saver(*t, folder / "c", 2);
  const auto frozen = [&](int step) { return folder / "c/" + core::step_name(step) + "/frozen_00000.h5"; };
  saver.save();
  CHECK(names_in(folder / "c/step_00000001") == Names{"checkpoint.crc32", "checkpoint.h5", "frozen_00000.h5", "shard_00000.h5"});
  const std::string left = contents(frozen(1));
  for (int step = 2; step <= 4; ++step) {
    t->step(synthetic_step(*t));
    step % 2 == 0 ? saver.begin() : saver.save();
  }
  saver.finish();
  std::int64_t changing = 0;
  const core::SavedRows rows = core::saved_rows(*t);
  for (const core::SavedTensor& tensor : rows[0]) changing += tensor.rows.bytes();
  CHECK(saver.host().peak() == changing);
  CHECK(names_in(folder / "c") == Names{"latest", "step_00000003", "step_00000004"});
  CHECK(fs::hard_link_count(frozen(4)) == 2);
  CHECK(fs::equivalent(frozen(3), frozen(4)));
  CHECK(contents(frozen(4)) == left);
  // A writer that was cut short holds the file as well; what clears it up harms no other.
  fs::create_directories(folder / "c/step_00000005.partial");
  fs::create_hard_link(frozen(4), folder / "c/step_00000005.partial/frozen_00000.h5");
  t->step(synthetic_step(*t));
  saver.save();
  CHECK(contents(frozen(5)) == left);
  // A copy elsewhere is whole, and so is the last one left.
  fs::copy(folder / "c/step_00000005", folder / "copy");
  fs::remove_all(folder / "c/step_00000004");
  for (const std::string& path : {folder / "copy", folder / "c/step_00000005"}) {
    auto b = fresh(c);
    core::load_checkpoint(*b, path, true);
    CHECK(bytes_of(*b) == bytes_of(*t));
  }
  // Where the one before is gone or is another, it is written again.
  fs::remove_all(folder / "c/step_00000005");
  t->step(synthetic_step(*t));
  saver.save();
  CHECK(contents(frozen(6)) == left);
  CHECK(fs::hard_link_count(frozen(6)) == 1);
  auto b = fresh(c);
  core::load_checkpoint(*b, folder / "c/step_00000006", true);
  CHECK(bytes_of(*b) == bytes_of(*t));
}
