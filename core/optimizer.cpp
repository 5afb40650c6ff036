// optimizer.cpp -- state over shards, the norm in rank order, the update.
#include "core/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/adamw.h"
#include "ops/reduce.h"

namespace moetrain::core {
namespace {

constexpr std::size_t kRooms = 3;
constexpr std::int64_t kAlignment = 256;  // bytes, of each tensor in a room

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

Tensor flat(Tensor t) { return t.present() ? t.reshape({t.count()}) : t; }

}  // namespace

Optimizer::Optimizer(Memory& memory, const Offload& offload, const OptimizerConfig& config, const ParamTable& table,
                     parallel::ShardedParams& params)
    : config_(config),
      table_(table),
      params_(params),
      host_(offload.host),
      states_(std::size_t(table.size())),
      down_(memory),
      up_(memory) {
  std::int64_t bytes = 0;
  for (int i = 0; i < table.size(); ++i) {
    if (!table[i].trainable) continue;
    trained_.push_back(i);
    const auto& t = params.tensors()[std::size_t(i)];
    const DType real = real_of(t.dtype);
    const Shape shape = t.shape.with_dim0(params.update_rows(i).count());
    State& s = states_[std::size_t(i)];
    if (t.dtype != real) s.master = PlacedTensor(memory, host_, Category::optimizer, real, shape);
    s.exp_avg = PlacedTensor(memory, host_, Category::optimizer, real, shape);
    s.exp_avg_sq = PlacedTensor(memory, host_, Category::optimizer, real, shape);
    for (const Tensor m : {s.exp_avg.view(), s.exp_avg_sq.view()})
      fill(host_ ? host_->device() : memory.device(), m.data, 0, m.bytes());
    if (host_)
      for (const PlacedTensor* k : {&s.master, &s.exp_avg, &s.exp_avg_sq}) bytes += k->present() ? aligned(k->view().bytes()) : 0;
    if (params.in_host(i)) bytes += aligned(shape.count() * size_of(t.dtype));
  }
  for (std::size_t r = 0; bytes > 0 && r < kRooms; ++r)
    rooms_.emplace_back(memory, Category::optimizer, DType::u8, Shape{std::min(bytes, offload.slice_bytes)});
}

Tensor Optimizer::rows_of(const PlacedTensor& t, int i, parallel::Rows rows) const {
  if (!t.present()) return {};
  const auto held = params_.update_rows(i);
  return t.view().rows(rows.begin - held.begin, rows.end - held.begin);
}

Tensor Optimizer::master(int i, parallel::Rows rows) const {
  const State& s = states_[std::size_t(i)];
  if (!s.exp_avg.present()) return {};
  return s.master.present() ? rows_of(s.master, i, rows) : params_.stored(i, rows);
}

double Optimizer::norm(ops::Context& ctx, parallel::Communicator& everyone) {
  Scope scope(ctx.scratch);
  const Tensor sum = ctx.scratch.zeros(DType::f64, {1});
  std::vector<ConstTensor> gradients;
  for (int i = 0; i < table_.size(); ++i)
    if (table_[i].trainable) gradients.push_back(params_.stored_gradient(i, params_.shard(i)));
  ops::sum_of_squares(ctx, ops::SumOfSquares{.x = gradients, .sum = sum});
  double mine = 0;
  copy_to_host(ctx.device(), &mine, sum.data, sum.bytes());
  std::vector<double> parts(std::size_t(everyone.size()));
  const parallel::Communicator::Gather piece{&mine, parts.data(), sizeof mine};
  everyone.all_gather({&piece, 1});
  double total = 0;
  for (const double part : parts) total += part;  // rank order: the same bits everywhere
  return std::sqrt(total);
}

std::vector<ops::AdamWShard> Optimizer::shards_to_update() {
  std::vector<ops::AdamWShard> shards;
  for (const int i : trained_) {
    const auto rows = params_.update_rows(i);
    const Tensor stored = params_.stored(i, rows);
    shards.push_back({.gradient = flat(params_.stored_gradient(i, rows)),
                      .master = flat(master(i, rows)),
                      .exp_avg = flat(exp_avg(i, rows)),
                      .exp_avg_sq = flat(exp_avg_sq(i, rows)),
                      .weight = has_master(i) ? flat(stored) : Tensor{},
                      .weight_decay = table_[i].decay ? config_.weight_decay : 0});
  }
  return shards;
}

void Optimizer::update(ops::Context& ctx, double lr, double gradient_scale) {
  ++updates_;
  const auto shards = shards_to_update();
  ops::AdamW step{.shards = shards,
                  .lr = lr,
                  .beta1 = config_.beta1,
                  .beta2 = config_.beta2,
                  .eps = config_.eps,
                  .gradient_scale = gradient_scale,
                  .step = updates_};
  rooms_.empty() ? ops::adamw(ctx, step) : update_in_slices(ctx, step, shards);
}

// Elements in order, cut where a room is full. Slice s comes while s - 1 is worked on and s - 2 leaves.
void Optimizer::update_in_slices(ops::Context& ctx, ops::AdamW step, const std::vector<ops::AdamWShard>& shards) {
  struct Part {
    Tensor there, here;  // the same elements in host memory and on the device
    bool read;           // they are not only written
  };
  struct Stage {
    std::vector<ops::AdamWShard> here;
    std::vector<Part> parts;
    std::int64_t used = 0;
    Transfer::Mark came, left;
  };
  Stage stages[kRooms];
  const std::int64_t room = rooms_[0].view().bytes();
  std::size_t shard = 0;
  std::int64_t done = 0;  // of that shard
  struct Away {
    Tensor* tensor;
    bool read;
  };
  const auto away = [&](ops::AdamWShard& s) {
    const bool weight_away = params_.in_host(trained_[shard]), own_master = s.weight.present();
    std::vector<Away> tensors;
    if (own_master ? host_ != nullptr : weight_away) tensors.push_back({&s.master, true});
    for (Tensor* moment : {&s.exp_avg, &s.exp_avg_sq})
      if (host_) tensors.push_back({moment, true});
    if (own_master && weight_away) tensors.push_back({&s.weight, false});
    return tensors;
  };
  const auto bring = [&](Stage& stage, Tensor space) {
    stage.here.clear();
    stage.parts.clear();
    stage.used = 0;
    up_.follow(stage.left);  // what lay in this room is gone
    while (shard < shards.size()) {
      ops::AdamWShard part = shards[shard];
      const auto tensors = away(part);
      const std::int64_t left = part.master.count() - done;
      std::int64_t element = 0, all = 0, narrowest = kAlignment;
      for (const Away& t : tensors) {
        const std::int64_t size = size_of(t.tensor->dtype);
        element += size, all += aligned(left * size), narrowest = std::min(narrowest, size);
      }
      const std::int64_t kept_together = kAlignment / narrowest, free = room - stage.used;  // where it is cut all stay aligned
      const std::int64_t n = all <= free ? left : free / element / kept_together * kept_together;
      if (n == 0 && left > 0) break;
      for (Tensor* t : {&part.master, &part.exp_avg, &part.exp_avg_sq, &part.weight})
        if (t->present()) *t = t->rows(done, done + n);
      part.gradient = part.gradient.rows(done, done + n);
      for (const Away& t : tensors) {
        auto* data = static_cast<std::byte*>(space.data);
        const Tensor here(data ? data + stage.used : nullptr, t.tensor->dtype, t.tensor->shape);
        stage.parts.push_back({*t.tensor, here, t.read});
        *t.tensor = here;
        stage.used += aligned(here.bytes());
      }
      stage.here.push_back(part);
      done += n;
      if (done < shards[shard].master.count()) break;
      ++shard;
      done = 0;
    }
    for (const Part& p : stage.parts)
      if (p.read) up_.copy(Transfer::Way::to_device, p.here.data, p.there.data, p.there.bytes(), stage.came);
  };
  bring(stages[0], rooms_[0].view());
  for (std::size_t s = 0; !stages[s % kRooms].here.empty(); ++s) {
    Stage& now = stages[s % kRooms];
    bring(stages[(s + 1) % kRooms], rooms_[(s + 1) % kRooms].view());
    up_.wait(now.came);
    step.shards = now.here;
    ops::adamw(ctx, step);
    for (const Part& p : now.parts) down_.copy(Transfer::Way::to_host, p.there.data, p.here.data, p.here.bytes(), now.left);
  }
  check(shard == shards.size(), "optimizer: a room holds no element", {{"bytes", room}});
  for (const Stage& stage : stages) down_.wait(stage.left);
}

}  // namespace moetrain::core
