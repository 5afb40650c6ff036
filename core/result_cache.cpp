// result_cache.cpp -- operators counted through a layer, their results laid aside and found again, and the choice among them.
#include "core/result_cache.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <numeric>
#include <utility>

namespace moetrain::core {
namespace {

std::int64_t bytes_of(std::span<const ResultCache::Output> outputs) {
  std::int64_t bytes = 0;
  for (const auto& o : outputs) bytes += o.shape.count() * size_of(o.dtype);
  return bytes;
}

bool has_collective(ResultOp op) { return op == ResultOp::exchange; }

}  // namespace

const char* name_of(ResultOp op) {
  constexpr const char* kNames[kResultOps] = {"linear", "grouped_linear", "kda", "attention", "exchange"};
  return kNames[std::size_t(op)];
}

std::optional<ResultOp> cache_op(const std::string& name) {
  for (int op = 0; op < kResultOps; ++op)
    if (name == name_of(ResultOp(op))) return ResultOp(op);
  return {};
}

void choose(std::vector<Candidate>& candidates, const CacheBudget& budget, double bytes_per_second, double layer_seconds) {
  std::vector<std::size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), std::size_t(0));
  const auto worth = [&](std::size_t i) { return candidates[i].seconds / double(std::max<std::int64_t>(1, candidates[i].bytes)); };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return worth(a) > worth(b); });
  std::int64_t device = budget.device_bytes, host = budget.host_bytes;
  std::vector<double> link_seconds;  // by layer
  for (const std::size_t i : order) {
    Candidate& c = candidates[i];
    c.tier = Tier::none;
    const bool wanted = std::find(budget.ops.begin(), budget.ops.end(), c.op) != budget.ops.end();
    if (!wanted || c.bytes == 0 || !(c.seconds > 0)) continue;
    link_seconds.resize(std::max(link_seconds.size(), std::size_t(c.layer) + 1), 0);
    const double travels = double(c.bytes) / bytes_per_second;
    if (c.bytes <= device) {
      c.tier = Tier::device;
      device -= c.bytes;
    } else if (c.bytes <= host && (budget.forced || ((budget.beside || travels < c.seconds) &&
                                                     link_seconds[std::size_t(c.layer)] + travels <= layer_seconds))) {
      c.tier = Tier::host;
      host -= c.bytes;
      link_seconds[std::size_t(c.layer)] += travels;
    }
  }
}

std::string table_of(const std::vector<Candidate>& candidates) {
  std::string text = "results that backward finds (of all layers of a rank; MiB, and ms to compute them again)\n";
  char line[160];
  std::snprintf(line, sizeof line, "  %-15s %18s %18s %18s", "", "device", "host", "computed again");
  text += line;
  for (int op = 0; op < kResultOps; ++op) {
    struct Sum {
      int results = 0;
      double mib = 0, ms = 0;
    } sums[kTiers];
    for (const Candidate& c : candidates)
      if (c.op == ResultOp(op)) {
        Sum& sum = sums[std::size_t(c.tier)];
        ++sum.results;
        sum.mib += double(c.bytes) / (1 << 20);
        sum.ms += c.seconds * 1e3;
      }
    if (sums[0].results + sums[1].results + sums[2].results == 0) continue;
    std::snprintf(line, sizeof line, "\n  %-15s", name_of(ResultOp(op)));
    text += line;
    for (const Tier tier : {Tier::device, Tier::host, Tier::none}) {
      const Sum& sum = sums[std::size_t(tier)];
      std::snprintf(line, sizeof line, " %4d %6.1f %6.1f", sum.results, sum.mib, sum.ms);
      text += line;
    }
  }
  return text;
}

ResultCache::ResultCache(Memory& device, Memory& host, const CacheBudget& budget, int layers)
    : tiers_(device, host), device_(device), budget_(budget), by_layer_(std::size_t(layers)), decided_(budget.all) {}

void ResultCache::begin(int layer, bool again) {
  layer_ = layer;
  met_ = 0;
  again_ = again;
  layer_start_ = now();
}

void ResultCache::end_forward() {
  tiers_.step();
  if (decided_) return;
  forward_seconds_ += std::chrono::duration<double>(now() - layer_start_).count();
  ++forwards_;
}

// On a device time passes for work that is queued: where it is measured, all of it is waited for.
std::chrono::steady_clock::time_point ResultCache::now() {
  using Clock = std::chrono::steady_clock;
  if (const Timeline* clock = device_.link_clock().timeline)
    return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(clock->now())));
  if constexpr (kHasCuda)
    if (!decided_ && device_.device() == Device::cuda) {
      if (!reached_) reached_.emplace();
      reached_->record(nullptr);
      reached_->synchronize();
    }
  return std::chrono::steady_clock::now();
}

// The number of the operator that comes next in the layer.
int ResultCache::next(ResultOp op) {
  auto& numbers = by_layer_[std::size_t(layer_)];
  if (met_ == numbers.size()) {
    check(!again_, "result cache: a layer has more operators when it is computed again",
          {{"layer", layer_}, {"operators", std::int64_t(met_)}});
    numbers.push_back(int(known_.size()));
    known_.push_back({{.layer = layer_, .op = op, .tier = budget_.all ? Tier::device : Tier::none}});
  }
  const int number = numbers[met_++];
  check(known(number).op == op, "result cache: the operators of a layer come in another order",
        {{"layer", layer_}, {"number", number}});
  return number;
}

bool ResultCache::next_is_here() const {
  const auto& numbers = by_layer_[std::size_t(layer_)];
  return again_ && met_ < numbers.size() && tiers_.holds(numbers[met_] * kOutputs);
}

ResultCache::Result::Result(ResultCache* cache, Stack& kept, ResultOp op, std::span<const Output> outputs) : cache_(cache) {
  check(int(outputs.size()) <= kOutputs, "result cache: too many outputs", {{"outputs", std::int64_t(outputs.size())}});
  Tier tier = Tier::none;
  if (cache_) {
    number_ = cache_->next(op);
    Known& known = cache_->known(number_);
    timed_ = !cache_->decided_ && cache_->again_;
    if (!cache_->again_) {
      const std::int64_t bytes = bytes_of(outputs);
      known.bytes = std::max(known.bytes, bytes);
      known.outputs = int(outputs.size());
      tier = known.tier;
      const bool fits =
          cache_->budget_.all || has_collective(op) || cache_->device_.now(Category::cache) + bytes <= cache_->budget_.device_bytes;
      if (tier == Tier::device && !fits) tier = Tier::none;
    } else if (cache_->tiers_.holds(number_ * kOutputs)) {
      missing_ = false;
      ++cache_->figures_.hits;
      if (known.times > 0) cache_->figures_.saved_seconds += known.seconds / double(known.times);
    }
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Output& o = outputs[i];
    const int key = number_ * kOutputs + int(i);
    const bool given = o.to->present();
    if (!missing_) {
      const Tensor found = cache_->tiers_.recall(key);
      if (given)
        copy_to_device(cache_->device_.device(), o.to->data, found.data, found.bytes());
      else
        *o.to = found;
    } else if (tier != Tier::none) {
      const Tensor room = cache_->tiers_.put(key, tier, o.dtype, o.shape);
      if (given)
        copies_.push_back({room, *o.to});
      else
        *o.to = room;
    } else if (!given) {
      *o.to = kept.take(o.dtype, o.shape);
    }
  }
}

ResultCache::Result::~Result() {
  if (std::uncaught_exceptions() > 0) return;
  for (const auto& [room, from] : copies_) copy_to_device(cache_->device_.device(), room.data, from.data, from.bytes());
  if (timed_) {
    cache_->known(number_).seconds += seconds_;
    ++cache_->known(number_).times;
  }
}

void ResultCache::prefetch(int layer) {
  for (const int number : by_layer_[std::size_t(layer)])
    for (int i = 0; i < known(number).outputs; ++i)
      if (tiers_.holds(number * kOutputs + i)) tiers_.prefetch(number * kOutputs + i);
}

void ResultCache::drop(int layer) {
  for (const int number : by_layer_[std::size_t(layer)])
    for (int i = 0; i < known(number).outputs; ++i)
      if (tiers_.holds(number * kOutputs + i)) tiers_.drop(number * kOutputs + i);
}

void ResultCache::settle(std::vector<Candidate>& all, double bytes_per_second, double layer_seconds) {
  choose(all, budget_, bytes_per_second, layer_seconds);
  for (std::size_t i = 0; i < known_.size(); ++i) known_[i].tier = all[i].tier;
  decided_ = true;
}

void ResultCache::decide(parallel::Communicator& control, double bytes_per_second) {
  if (!std::exchange(warm_, true)) {
    for (Known& k : known_) k.seconds = 0, k.times = 0;
    forward_seconds_ = 0;
    forwards_ = 0;
    return;
  }
  std::vector<Candidate> all = candidates();
  std::vector<double> values{forwards_ > 0 ? forward_seconds_ / double(forwards_) : 0, -bytes_per_second};  // the slowest link
  for (const Candidate& c : all) values.insert(values.end(), {c.seconds, double(c.bytes)});
  control.all_reduce(Tensor(values.data(), DType::f64, {std::int64_t(values.size())}), parallel::Reduction::max);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].seconds = values[2 + 2 * i];
    all[i].bytes = std::int64_t(values[3 + 2 * i]);
    known_[i].seconds = all[i].seconds * double(known_[i].times);
    known_[i].bytes = all[i].bytes;
  }
  settle(all, -values[1], values[0]);
}

void ResultCache::assume() {
  std::vector<Candidate> all = candidates();
  for (Candidate& c : all) c.seconds = double(c.bytes);  // none is worth more than another
  const bool forced = std::exchange(budget_.forced, true);
  settle(all, 1, 0);
  budget_.forced = forced;
}

ResultCache::Figures ResultCache::take_figures() {
  figures_.late = tiers_.take_counts().late;
  return std::exchange(figures_, {});
}

std::vector<Candidate> ResultCache::candidates() const {
  std::vector<Candidate> all;
  for (const Known& k : known_) {
    all.push_back(k);
    all.back().seconds = k.times > 0 ? k.seconds / double(k.times) : 0;
  }
  return all;
}

}  // namespace moetrain::core
