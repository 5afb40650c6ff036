// checkpoint_mpi_test.cpp -- checkpoints of four ranks: a stopped run resumes bit for bit, any layout loads what any other wrote,
// and a failure of one rank is everyone's.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>

#include "core/checkpoint_saver.h"
#include "core/together.h"
#include "core/train_loop.h"
#include "io/files.h"
#include "io/hdf5_file.h"
#include "io/token_file.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/shared_folder.h"
#include "tests/support/short_files.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;
using parallel::Sharding;
namespace fs = std::filesystem;

namespace {

// Ranks of the job's four that are a world of their own with this rank; collective over all four.
std::unique_ptr<parallel::Communicator> world_of(int ranks) {
  auto all = parallel::mpi_world();
  REQUIRE(all->size() == 4);
  std::vector<int> members;
  for (int r = all->rank() / ranks * ranks; int(members.size()) < ranks; ++r) members.push_back(r);
  return all->subgroup(members);
}

struct Layout {
  int data = 1, expert = 1;
  Sharding sharding = Sharding::full;
  bool expert_sharding = true;
  int sequence = 1, tensor = 1;
  int ranks() const { return data * expert * sequence * tensor; }
};

core::Config config_of(DType dtype, const Layout& l) {
  core::Config c = tiny_config();
  c.run.dtype = dtype;
  c.moe.balance = core::Balance::quantile;
  c.moe.quantile_bins = 50;
  c.parallel.data_parallel = l.data;
  c.parallel.expert_parallel = l.expert;
  c.parallel.sequence_parallel = l.sequence;
  c.parallel.tensor_parallel = l.tensor;
  c.parallel.sharding = l.sharding;
  c.parallel.expert_sharding = l.expert_sharding;
  c.training.gradient_accumulation = 8 / (l.data * l.expert);
  return c;
}

struct Held {
  std::string dataset;
  std::int64_t first;  // element of the whole that is the first here, and
  std::int64_t row;    // from there on those of a row
  Tensor rows;
};
// What this rank stores of every tensor that a checkpoint holds.
std::vector<Held> held_by(core::Trainer& t) {
  std::vector<Held> all;
  for (int i = 0; i < t.table().size(); ++i) {
    const auto rows = t.params().update_rows(i);
    const std::string& name = t.table()[i].name;
    const std::int64_t row = t.table()[i].shape.row(),
                       first = (t.layout().first_row[std::size_t(i)] + rows.begin) * row + t.layout().first_column[std::size_t(i)];
    all.push_back({name, first, row, t.params().stored(i, rows)});
    if (t.optimizer().has_master(i)) all.push_back({"master/" + name, first, row, t.optimizer().master(i, rows)});
    if (!t.optimizer().has_state(i)) continue;
    all.push_back({"optimizer/exp_avg/" + name, first, row, t.optimizer().exp_avg(i, rows)});
    all.push_back({"optimizer/exp_avg_sq/" + name, first, row, t.optimizer().exp_avg_sq(i, rows)});
  }
  return all;
}

std::vector<std::string> tensors_of(const io::Hdf5File& view) {
  std::vector<std::string> all;
  for (const auto& name : view.names())
    if (name != "job" && name != "layout" && name != "shards") all.push_back(name);
  for (const char* group : {"master", "optimizer/exp_avg", "optimizer/exp_avg_sq"})
    if (view.has(group))
      for (const auto& name : view.names(group)) all.push_back(std::string(group) + "/" + name);
  return all;
}

// Every tensor of a checkpoint as a stranger reads it: whole, through the view.
using Whole = std::map<std::string, std::string>;
Whole whole_tensors(const std::string& path) {
  const auto view = io::Hdf5File::open(path + "/checkpoint.h5");
  Whole all;
  for (const auto& name : tensors_of(view)) {
    const auto info = view.info(name);
    std::string bytes(std::size_t(info.shape.count() * size_of(info.dtype)), '\0');
    view.read(name, Tensor(bytes.data(), info.dtype, info.shape));
    all[name] = std::move(bytes);
  }
  return all;
}

// Names the first tensor of this rank whose bits are not those of the whole.
std::string differs(core::Trainer& t, const Whole& whole) {
  for (const Held& h : held_by(t)) {
    const auto found = whole.find(h.dataset);
    if (found == whole.end()) return "no " + h.dataset;
    const auto size = size_of(h.rows.dtype);
    for (std::int64_t r = 0; r < h.rows.shape[0]; ++r) {
      const Tensor here = h.rows.rows(r, r + 1);
      if (std::memcmp(found->second.data() + (h.first + r * h.row) * size, here.data, std::size_t(here.bytes())) != 0)
        return h.dataset;
    }
  }
  return {};
}

io::TokenData some_tokens(std::int64_t count) {
  io::TokenData d{.tokens = {}, .documents = {}, .labels = {}, .vocab_size = 61, .tokenizer = "none"};
  for (std::int64_t i = 0; i < count; ++i) {
    const auto r = ops::philox(3, 1, std::uint64_t(i));
    d.tokens.push_back(std::int64_t(r[0] % 4 != 0 && i > 0 ? (std::uint64_t(d.tokens.back()) * 5 + 3) % 61 : r[1] % 61));
    if (i % 100 == 0) d.documents.push_back(i);
  }
  return d;
}

// The columns of metrics.csv that are equal in equal runs: the first eight are step to label_tokens.
std::vector<std::string> bit_equal_part(const std::string& csv) {
  std::vector<std::string> lines;
  std::string line;
  int commas = 0;
  for (const char c : io::read_text(csv)) {
    if (c == '\n')
      lines.push_back(line), line.clear(), commas = 0;
    else if ((commas += c == ',') < 8)
      line += c;
  }
  return lines;
}

ExitCode run(const core::Config& c, const core::TrainOptions& options = {}) {
  return core::train(c, parallel::mpi_world(), Device::cpu, options);
}

}  // namespace

TEST_CASE("20 steps are 8 steps, a stop of one rank, and the rest: metrics, expert counts and every tensor to the last bit") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    CAPTURE(int(dtype));
    const SharedFolder folder;
    core::Config c = config_of(dtype, {2, 2});
    c.training.steps = 20;
    c.data.format = io::DataFormat::tokens;
    c.data.train = {folder / "tokens.h5"};
    if (folder.world().rank() == 0) io::write_token_file(c.data.train[0], some_tokens(3000));
    folder.world().barrier();
    c.run.dir = folder / "through";
    CHECK(run(c) == ExitCode::done);
    c.checkpoint = {.every = 3, .keep = 2, .async = true};  // which changes no number
    c.run.dir = folder / "stopped";
    int asked = 0;  // a signal that reaches one rank, before its ninth step
    CHECK(run(c, {.stop_requested = [&] { return ++asked == 9 && folder.world().rank() == 2; }}) == ExitCode::stopped);
    CHECK(fs::path(core::latest_checkpoint(c.run.dir + "/checkpoints")).filename() == "step_00000008");
    CHECK(run(c, {.stop_after = 5}) == ExitCode::done);
    CHECK(fs::path(core::latest_checkpoint(c.run.dir + "/checkpoints")).filename() == "step_00000013");
    CHECK(run(c) == ExitCode::done);
    const auto a = bit_equal_part(folder / "through/metrics.csv"), b = bit_equal_part(folder / "stopped/metrics.csv");
    REQUIRE(a.size() == 21);
    CHECK(a[0] == "step,tokens,loss,balance_loss,indexer_loss,grad_norm,lr,label_tokens");
    CHECK(a == b);
    CHECK(io::read_text(folder / "through/expert_tokens.csv") == io::read_text(folder / "stopped/expert_tokens.csv"));
    if (folder.world().rank() == 0) {
      const Whole want = whole_tensors(folder / "through/checkpoints/step_00000020"),
                  got = whole_tensors(folder / "stopped/checkpoints/step_00000020");
      CHECK(want.size() > 100);
      CHECK(want == got);
    }
  }
}

TEST_CASE("what any of nine layouts saved, every other loads to the last bit, and its next ten losses are those of the run that went on") {
  const std::vector<Layout> layouts{{1, 1, Sharding::full},
                                    {4, 1, Sharding::full},
                                    {1, 4, Sharding::optimizer},
                                    {2, 2, Sharding::full},
                                    {1, 2, Sharding::gradients, true, 1, 2},
                                    {2, 2, Sharding::none},
                                    {2, 2, Sharding::full, false},
                                    {1, 1, Sharding::none, true, 1, 4},
                                    {1, 2, Sharding::gradients, true, 2}};
  const SharedFolder folder;
  int number = 0;
  for (const bool tied : {false, true})
    for (const Layout& from : layouts) {
      CAPTURE(tied, from.data, from.expert, from.sequence, from.tensor, int(from.sharding), from.expert_sharding);
      const auto job = [&](DType dtype, const Layout& l) {
        core::Config c = config_of(dtype, l);
        if (tied) c.model = tiny_linear_config().model;
        c.model.num_attention_heads = c.model.linear_attn.num_heads = 4;
        c.model.num_hidden_layers = 2;
        c.model.linear_attn.full_attn_layers = {2};
        c.data.sequence_length = 16;
        c.training.steps = 12;
        c.training.gradient_accumulation = 4 / (l.data * l.expert);
        return c;
      };
      // fp64: what is loaded goes on alike. bf16: masters beside the weights.
      for (const DType dtype : {DType::f64, DType::bf16}) {
        const std::string saved = folder / ("from_" + std::to_string(number++));
        Whole whole;
        std::vector<double> want;
        const auto next_losses = [&](core::Trainer& t) {  // the first tells of a tied head
          std::vector<double> losses;
          for (int s = 0; s < (tied ? 1 : 10); ++s) losses.push_back(t.step(synthetic_step(t)).loss);
          return losses;
        };
        {
          core::Trainer t(job(dtype, from), world_of(from.ranks()), Device::cpu, /*poison=*/true);
          t.initialize();
          for (int s = 0; s < 2; ++s) t.step(synthetic_step(t));
          // Worlds of fewer ranks train the same; one of them writes.
          if (folder.world().rank() < from.ranks()) core::CheckpointSaver(t, saved, 2).save();
          folder.world().barrier();
          whole = whole_tensors(saved + "/step_00000002");
          CHECK(differs(t, whole) == "");
          if (dtype == DType::f64) want = next_losses(t);
          else t.step(synthetic_step(t));
          CHECK(differs(t, whole) != "");
        }
        CHECK(std::count_if(whole.begin(), whole.end(), [](const auto& w) { return w.first.starts_with("master/"); }) >
              (dtype == DType::bf16 ? 10 : -1));
        for (const Layout& to : layouts) {
          CAPTURE(to.data, to.expert, to.sequence, to.tensor, int(to.sharding), to.expert_sharding);
          core::Trainer t(job(dtype, to), world_of(to.ranks()), Device::cpu, /*poison=*/true);
          core::load_checkpoint(t, saved + "/step_00000002", true);
          CHECK(differs(t, whole) == "");
          const auto p = t.progress();
          CHECK((p.step == 2 && p.updates == 2 && p.sequences == 8));
          if (dtype != DType::f64) continue;
          const auto losses = next_losses(t);
          CHECK(difference(losses, want, 1e-9) == "");
          if (&to == &from) CHECK(losses == want);
        }
      }
    }
}

TEST_CASE("four ranks write beside training what they write at once, and files of frozen rows are shared by each") {
  for (const bool adapters : {false, true}) {
    const SharedFolder folder;
    core::Config c = config_of(DType::bf16, {2, 2});
    if (adapters) c.lora = core::LoraConfig{.target = {"attention", "shared"}};
    core::Trainer t(c, world_of(4), Device::cpu, /*poison=*/true);
    t.initialize();
    core::CheckpointSaver once(t, folder / "once", 2), beside(t, folder / "beside", 2);
    for (int s = 1; s <= 3; ++s) {
      t.step(synthetic_step(t));
      once.save();
      beside.begin();
    }
    beside.finish();
    const std::string name = "/step_00000003";
    const auto sums = [](const std::string& path) { return io::Hdf5File::open(path + "/checkpoint.h5").read_text("shards"); };
    CHECK(sums(folder / "once" + name) == sums(folder / "beside" + name));
    CHECK(whole_tensors(folder / "once" + name) == whole_tensors(folder / "beside" + name));
    const std::string file = name + "/frozen_0000" + std::to_string(folder.world().rank()) + ".h5";
    CHECK(fs::exists(folder / "beside" + file) == adapters);
    if (adapters) CHECK(fs::hard_link_count(folder / "beside" + file) == 2);
    CHECK(core::read_checkpoint_summary(folder / "beside" + name).shards.size() == (adapters ? 8 : 4));
    core::Trainer other(c, world_of(4), Device::cpu, /*poison=*/true);
    core::load_checkpoint(other, folder / "beside" + name, true);
    CHECK(other.step(synthetic_step(other)).loss == t.step(synthetic_step(t)).loss);
  }
}

TEST_CASE("every row of every tensor is in exactly one shard, and no hole in the view reads as fill") {
  for (const Layout& l : {Layout{2, 2, Sharding::full}, Layout{4, 1, Sharding::none}}) {
    const SharedFolder folder;
    core::Trainer t(config_of(DType::bf16, l), world_of(4), Device::cpu);
    t.initialize();
    const auto r = t.step(synthetic_step(t));
    CAPTURE(r.loss, r.grad_norm, int(r.skipped));
    core::CheckpointSaver(t, folder / "c", 2).save();
    if (folder.world().rank() != 0) continue;  // the others wait for the folder's end
    const std::string path = folder / "c/step_00000001";
    const auto view = io::Hdf5File::open(path + "/checkpoint.h5");
    const auto summary = core::read_checkpoint_summary(path);
    CHECK(summary.shards.size() == 4);
    std::map<std::string, std::int64_t> rows;
    for (const auto& shard : summary.shards) {
      const auto file = io::Hdf5File::open(path + "/" + shard);
      for (const auto& name : tensors_of(file)) rows[name] += file.info(name).shape[0];
    }
    bool bf16 = false, uneven = false;
    for (const auto& name : tensors_of(view)) {
      CAPTURE(name);
      const auto info = view.info(name);
      bf16 = bf16 || info.dtype == DType::bf16;
      uneven = uneven || info.shape[0] % 4 != 0;
      CHECK(rows[name] == info.shape[0]);
      std::vector<std::byte> all(std::size_t(info.shape.count() * size_of(info.dtype)));
      const Tensor x(all.data(), info.dtype, info.shape);
      view.read(name, x);
      const auto values = values_of(x);
      CHECK(std::none_of(values.begin(), values.end(), [](double v) { return std::isnan(v); }));
    }
    CHECK(bf16);
    CHECK(uneven);
  }
}

TEST_CASE("a damaged shard is found by one rank and refused by all with the same words, and nothing was loaded") {
  const SharedFolder folder;
  core::Trainer t(config_of(DType::f32, {2, 2}), world_of(4), Device::cpu);
  t.initialize();
  core::CheckpointSaver(t, folder / "c", 2).save();
  const std::string path = folder / "c/step_00000000", shard = path + "/shard_00002.h5";
  t.step(synthetic_step(t));
  std::vector<std::vector<double>> before;
  for (const Held& h : held_by(t)) before.push_back(values_of(h.rows));
  if (folder.world().rank() == 0) fs::resize_file(shard, fs::file_size(shard) - 8);
  folder.world().barrier();
  const auto said = error_of([&] { core::load_checkpoint(t, path, true); });
  CHECK(contains(said, "3: " + shard + ": has "));
  const auto held = held_by(t);
  for (std::size_t i = 0; i < held.size(); ++i) CHECK(values_of(held[i].rows) == before[i]);
  CHECK(t.progress().step == 1);
}

TEST_CASE("a save that fails on one rank fails on all, and the checkpoint before stays the latest") {
  const SharedFolder folder;
  core::Trainer t(config_of(DType::f32, {2, 2}), world_of(4), Device::cpu);
  t.initialize();
  core::CheckpointSaver(t, folder / "c", 2).save();
  t.step(synthetic_step(t));
  std::string said;
  {
    const ShortFiles short_files(folder.world().rank() == 2 ? 10000 : RLIM_INFINITY);
    said = error_of([&] { core::CheckpointSaver(t, folder / "c", 2).save(); });
  }
  CHECK(contains(said, "3: checkpoint step_00000001 was not saved, the one before is as it was: "));
  CHECK(fs::path(core::latest_checkpoint(folder / "c")).filename() == "step_00000000");
  CHECK(core::read_checkpoint_summary(core::latest_checkpoint(folder / "c")).step == 0);
  CHECK_FALSE(fs::exists(folder / "c/step_00000001"));
  core::CheckpointSaver(t, folder / "c", 2).save();
  CHECK(core::read_checkpoint_summary(core::latest_checkpoint(folder / "c")).step == 1);
}

TEST_CASE("a write beside training that fails on one rank fails on all at the next advance and names its file") {
  const SharedFolder folder;
  core::Trainer t(config_of(DType::f32, {2, 2}), world_of(4), Device::cpu);
  t.initialize();
  core::CheckpointSaver saver(t, folder / "c", 2);
  saver.begin();
  t.step(synthetic_step(t));
  {
    saver.finish();
    const ShortFiles short_files(folder.world().rank() == 2 ? 10000 : RLIM_INFINITY);
    saver.begin();
    t.step(synthetic_step(t));
    const auto said = error_of([&] { saver.advance(); });
    CHECK(contains(said, "3: checkpoint step_00000001 was not saved, the one before is as it was: " + folder / "c/step_00000001.partial/shard_00002.h5"));
  }
  CHECK(core::read_checkpoint_summary(core::latest_checkpoint(folder / "c")).step == 0);
  folder.world().barrier();
  CHECK_FALSE(fs::exists(folder / "c/step_00000001.partial"));
  saver.begin();
  saver.finish();
  CHECK(core::read_checkpoint_summary(core::latest_checkpoint(folder / "c")).step == 2);
}

TEST_CASE("a checkpoint that latest could not be moved to is said to be complete, and is") {
  const SharedFolder folder;
  core::Trainer t(config_of(DType::f32, {2, 2}), world_of(4), Device::cpu);
  t.initialize();
  core::CheckpointSaver(t, folder / "c", 1).save();
  t.step(synthetic_step(t));
  if (folder.world().rank() == 0) fs::create_directories(folder / "c/latest.part");
  folder.world().barrier();
  const std::string path = folder / "c/step_00000001";
  const auto said = error_of([&] { core::CheckpointSaver(t, folder / "c", 1).save(); });
  CHECK(contains(said, "3: checkpoint " + path + " is complete, but latest was not updated: "));
  CHECK(fs::path(core::latest_checkpoint(folder / "c")).filename() == "step_00000000");
  CHECK(core::read_checkpoint_summary(core::latest_checkpoint(folder / "c")).step == 0);
  core::load_checkpoint(t, path, true);
  CHECK(t.progress().step == 1);
}

TEST_CASE("a trainer whose share does not fit into the memory of one rank is refused by all with its words") {
  core::Config c = config_of(DType::f32, {2, 2});
  auto world = world_of(4);
  if (world->rank() == 2) c.model.vocab_size = std::int64_t(1) << 50;
  const auto said = error_of([&] { core::Trainer(c, std::move(world), Device::cpu); });
  CHECK(contains(said, "3: out of host memory: "));
}

TEST_CASE("an Error of any rank is the lowest such rank's words and code on every rank") {
  const SharedFolder folder;
  auto& world = folder.world();
  try {
    core::together(world, [&] {
      if (world.rank() == 3) throw Error("three", ExitCode::bad_job);
      if (world.rank() == 1) throw Error("one", ExitCode::gave_up);
    });
    CHECK(false);
  } catch (const core::AgreedError& e) {
    CHECK(e.rank() == 1);
    CHECK(std::string(e.what()) == "one");
    CHECK(e.code() == ExitCode::gave_up);
  }
}
