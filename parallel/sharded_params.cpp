// sharded_params.cpp -- who holds which rows when: storage, gathers and reductions of every unit.
#include "parallel/sharded_params.h"

#include <algorithm>

#include "memory/range.h"

namespace moetrain::parallel {
namespace {

void* offset_by(Tensor t, std::int64_t rows) {  // the address of a row; null on Device::dry
  return t.data == nullptr ? nullptr : static_cast<std::byte*>(t.data) + rows * t.shape.row() * size_of(t.dtype);
}

template <class Bucket>
bool has(const Bucket& bucket, int unit) {
  return std::find(bucket.units.begin(), bucket.units.end(), unit) != bucket.units.end();
}

}  // namespace

ShardedParams::ShardedParams(Memory& memory, std::vector<ShardedTensor> tensors, std::vector<Unit> units, const Options& options)
    : memory_(memory),
      tensors_(std::move(tensors)),
      units_(std::move(units)),
      storage_(tensors_.size()),
      open_(units_.size(), 0),
      from_host_(memory),
      came_(units_.size()),
      gathering_(units_.size(), false),
      options_(options) {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    check(units_[u].group != nullptr, "sharded params: a unit has no group", {{"unit", std::int64_t(u)}});
    for (const int t : units_[u].tensors) {
      check(0 <= t && std::size_t(t) < tensors_.size() && storage_[std::size_t(t)].unit < 0,
            "sharded params: a unit lists a tensor that does not exist or is in another",
            {{"unit", std::int64_t(u)}, {"tensor", t}});
      storage_[std::size_t(t)].unit = int(u);
    }
  }
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    const auto& tensor = tensors_[t];
    auto& own = storage_[t];
    check(own.unit >= 0, "sharded params: a tensor is in no unit", {{"tensor", std::int64_t(t)}});
    check(tensor.shape.rank() >= 1 && (tensor.dtype == DType::f32 || tensor.dtype == DType::f64 || tensor.dtype == DType::bf16),
          "sharded params: a tensor has no rows or is not floating", {{"tensor", std::int64_t(t)}});
    const Sharding sharding = sharding_of(units_[std::size_t(own.unit)]);
    const Shape shard = tensor.shape.with_dim0(padded_shard_rows(int(t))), padded = padded_shape(int(t));
    const Shape whole = sharding == Sharding::none ? tensor.shape : padded;
    const Unit& its = units_[std::size_t(own.unit)];
    check(!its.in_host || (options_.host && (sharding == Sharding::none || sharding == Sharding::full)),
          "sharded params: a unit in host memory is whole or sharded fully", {{"unit", own.unit}});
    own.weight = PlacedTensor(memory_, its.in_host ? options_.host : nullptr, Category::weights, tensor.dtype,
                              sharding == Sharding::full ? shard : whole);
    if (!tensor.trainable) continue;
    const bool in_shards = scatters_each_micro_batch(units_[std::size_t(own.unit)]);
    (in_shards ? own.gradient_shard : own.gradient) =
        OwnedTensor(memory_, Category::gradients, real_of(tensor.dtype), in_shards ? shard : whole);
  }
}

const ShardedParams::Storage& ShardedParams::storage(int tensor) const {
  check(0 <= tensor && std::size_t(tensor) < storage_.size(), "sharded params: no such tensor", {{"tensor", tensor}});
  return storage_[std::size_t(tensor)];
}
const Unit& ShardedParams::unit(int unit) const {
  check(0 <= unit && std::size_t(unit) < units_.size(), "sharded params: no such unit", {{"unit", unit}});
  return units_[std::size_t(unit)];
}
int ShardedParams::unit_of(int tensor) const { return storage(tensor).unit; }
bool ShardedParams::trains(int u) const {
  const auto& tensors = unit(u).tensors;
  return std::any_of(tensors.begin(), tensors.end(), [&](int t) { return tensors_[std::size_t(t)].trainable; });
}

std::int64_t ShardedParams::padded_shard_rows(int tensor) const {
  return shard_rows(tensors_[std::size_t(tensor)].shape[0], unit(unit_of(tensor)).group->size());
}
Shape ShardedParams::padded_shape(int tensor) const {
  return tensors_[std::size_t(tensor)].shape.with_dim0(padded_shard_rows(tensor) * unit(unit_of(tensor)).group->size());
}
Rows ShardedParams::shard(int tensor) const {
  const Communicator& group = *unit(unit_of(tensor)).group;
  return shard_of(tensors_[std::size_t(tensor)].shape[0], group.rank(), group.size());
}
Rows ShardedParams::update_rows(int tensor) const {
  if (sharding_of(unit(unit_of(tensor))) != Sharding::none) return shard(tensor);
  return {0, tensors_[std::size_t(tensor)].shape[0]};
}

void ShardedParams::begin_step() {
  for (auto& own : storage_) {
    check(!own.gradient.present() || !scatters_each_micro_batch(unit(own.unit)),
          "sharded params: a step begins with gradients that were not reduced", {{"unit", own.unit}});
    own.blank = own.gradient.present();
    own.shard_blank = own.gradient_shard.present();
    if (options_.poison)
      for (const Tensor t : {own.gradient.view(), own.gradient_shard.view()}) fill(memory_.device(), t.data, 0xff, t.bytes());
  }
  in_step_ = true;
}

void ShardedParams::clear(Storage& own, std::int64_t first_row) const {
  if (!own.blank) return;
  const Tensor whole = own.gradient.view(), rest = whole.rows(first_row, whole.shape[0]);
  fill(memory_.device(), rest.data, 0, rest.bytes());
  own.blank = false;
}

void ShardedParams::open(int u) { ++open_[std::size_t(u)]; }

// Room for the whole weights; those in host memory start for their place in it.
void ShardedParams::fetch(int u) {
  const Unit& it = unit(u);
  if (!it.in_host || it.tensors.empty() || storage(it.tensors.front()).gathered.present()) return;
  for (const int t : it.tensors) {
    auto& own = storage_[std::size_t(t)];
    const bool sharded = sharding_of(it) == Sharding::full;
    own.gathered = OwnedTensor(memory_, Category::weights, tensors_[std::size_t(t)].dtype,
                               sharded ? padded_shape(t) : tensors_[std::size_t(t)].shape);
    const Tensor from = own.weight.view();
    from_host_.copy(Transfer::Way::to_device, offset_by(own.gathered.view(), sharded ? it.group->rank() * from.shape[0] : 0),
                    from.data, from.bytes(), came_[std::size_t(u)]);
  }
}

void ShardedParams::begin_gather(int u) {
  const Unit& it = unit(u);
  fetch(u);
  if (sharding_of(it) != Sharding::full || it.tensors.empty() || gathering_[std::size_t(u)]) return;
  std::vector<Communicator::Gather> pieces;
  for (const int t : it.tensors) {
    auto& own = storage_[std::size_t(t)];
    const Tensor shard = own.weight.view();
    if (!it.in_host) own.gathered = OwnedTensor(memory_, Category::weights, shard.dtype, padded_shape(t));
    const Tensor all = own.gathered.view();
    pieces.push_back({it.in_host ? offset_by(all, it.group->rank() * shard.shape[0]) : shard.data, all.data, shard.bytes()});
  }
  from_host_.wait(came_[std::size_t(u)]);
  it.group->begin_all_gather(pieces);
  under_way_.push_back({{{u}, {}}, /*gather=*/true});
  gathering_[std::size_t(u)] = true;
}

void ShardedParams::prefetch(int u) {
  const Range range("prefetch weights");
  begin_gather(u);
}

void ShardedParams::gather(int u) {
  const Range range("gather weights");
  open(u);
  begin_gather(u);
  end_all_until(u, true);
  from_host_.wait(came_[std::size_t(u)]);
}

void ShardedParams::end_oldest() {
  UnderWay& first = under_way_.front();
  unit(first.units.front()).group->end();
  std::size_t i = 0;
  for (const int u : first.units)
    for (const int t : unit(u).tensors)
      if (!first.gather && tensors_[std::size_t(t)].trainable) {
        storage_[std::size_t(t)].gradient_shard = std::move(first.sums[i++]);
        storage_[std::size_t(t)].gradient = {};
        storage_[std::size_t(t)].shard_blank = false;
      }
  under_way_.pop_front();
}

bool ShardedParams::travels(int u, bool gather) const {
  return std::any_of(under_way_.begin(), under_way_.end(), [&](const UnderWay& w) { return w.gather == gather && has(w, u); });
}

void ShardedParams::end_all_until(int u, bool gather) {
  for (std::size_t b = 0; !gather && b < filling_.size(); ++b)
    if (has(filling_[b], u)) begin_reduction(b);
  while (travels(u, gather)) end_oldest();
}

void ShardedParams::end_reductions() {
  while (std::any_of(under_way_.begin(), under_way_.end(), [](const UnderWay& w) { return !w.gather; })) end_oldest();
}

void ShardedParams::release(int u) {
  const Unit& it = unit(u);
  check(open_[std::size_t(u)] > 0, "sharded params: released more often than gathered", {{"unit", u}});
  check(!travels(u, true), "sharded params: released while its weights travel", {{"unit", u}});
  if (--open_[std::size_t(u)] > 0) return;
  for (const int t : it.tensors) {
    auto& own = storage_[std::size_t(t)];
    check(!own.gradient.present() || !scatters_each_micro_batch(it) || !own.gradient_shard.present(),
          "sharded params: released before its gradients were reduced", {{"unit", u}, {"tensor", t}});
    if (gathered_goes(it)) own.gathered = {};
  }
  if (gathered_goes(it)) gathering_[std::size_t(u)] = false;
}

// The whole gradient of one micro-batch starts as zeros (blank in the first), but for this rank's own rows: they start as the sum of
// the micro-batches before, so that the reduce-scatter adds to it and needs no sum of its own.
void ShardedParams::make_gradient(int tensor) {
  Storage& own = storage_[std::size_t(tensor)];
  end_all_until(own.unit, false);  // of the micro-batch before
  if (own.gradient.present()) return;
  const Tensor sum = own.gradient_shard.view();
  own.gradient = OwnedTensor(memory_, Category::gradients, sum.dtype, padded_shape(tensor));
  own.blank = true;
  if (own.shard_blank) return;
  clear(own);
  const Tensor whole = own.gradient.view();
  copy_to_device(memory_.device(), offset_by(whole, unit(own.unit).group->rank() * sum.shape[0]), sum.data, sum.bytes());
}

// sums[i] (c rows) = the sum over ranks of this rank's rows of the i-th trainable tensor of the units. False: there is none.
bool ShardedParams::begin_scatter(const Bucket& bucket) {
  std::vector<Communicator::Scatter> pieces;
  for (const int u : bucket.units)
    for (const int t : unit(u).tensors) {
      if (!tensors_[std::size_t(t)].trainable) continue;
      const Tensor whole = storage(t).gradient.view(), sum = bucket.sums[pieces.size()].view();
      pieces.push_back({whole.data, sum.data, sum.count(), sum.dtype});
    }
  if (!pieces.empty()) unit(bucket.units.front()).group->begin_reduce_scatter(pieces);
  return !pieces.empty();
}

void ShardedParams::begin_reduction(std::size_t bucket) {
  UnderWay leaves{std::move(filling_[bucket]), /*gather=*/false};
  filling_.erase(filling_.begin() + std::ptrdiff_t(bucket));
  if (begin_scatter(leaves)) under_way_.push_back(std::move(leaves));
}

void ShardedParams::reduce(int u) {
  const Range range("reduce gradients");
  const Unit& it = unit(u);
  check(open_[std::size_t(u)] > 0, "sharded params: reduced while not gathered", {{"unit", u}});
  if (!scatters_each_micro_batch(it) || !trains(u)) return;
  for (const int t : it.tensors)
    if (tensors_[std::size_t(t)].trainable) {
      make_gradient(t);
      clear(storage_[std::size_t(t)]);
    }
  const auto same_group = [&](const Bucket& b) { return unit(b.units.front()).group == it.group; };
  auto bucket = std::find_if(filling_.begin(), filling_.end(), same_group);
  if (bucket == filling_.end()) bucket = filling_.insert(bucket, Bucket{});
  bucket->units.push_back(u);
  bucket->bytes += it.gradient_bytes;
  for (const int t : it.tensors)
    if (tensors_[std::size_t(t)].trainable) bucket->sums.push_back(std::move(storage_[std::size_t(t)].gradient_shard));
  if (bucket->bytes >= options_.bucket_bytes) begin_reduction(std::size_t(bucket - filling_.begin()));
}

void ShardedParams::finish_gradients() {
  while (!filling_.empty()) begin_reduction(0);
  end_reductions();
  for (Storage& own : storage_) {  // what nothing was added to
    clear(own);
    if (own.shard_blank) fill(memory_.device(), own.gradient_shard.view().data, 0, own.gradient_shard.view().bytes());
    own.shard_blank = false;
  }
  for (const Unit& it : units_) {
    if (it.group->size() == 1 || scatters_each_micro_batch(it)) continue;
    if (it.sharding == Sharding::none) {
      for (const int t : it.tensors)
        if (tensors_[std::size_t(t)].trainable) it.group->all_reduce(storage(t).gradient.view(), Reduction::sum);
      continue;
    }
    Bucket sums{{int(&it - units_.data())}, {}};  // a reduce-scatter may not write into what it reads
    for (const int t : it.tensors)
      if (tensors_[std::size_t(t)].trainable)
        sums.sums.emplace_back(memory_, Category::gradients, real_of(tensors_[std::size_t(t)].dtype),
                               tensors_[std::size_t(t)].shape.with_dim0(padded_shard_rows(t)));
    if (begin_scatter(sums)) it.group->end();
    std::size_t i = 0;
    for (const int t : it.tensors) {
      if (!tensors_[std::size_t(t)].trainable) continue;
      const Tensor sum = sums.sums[i++].view();
      copy_to_device(memory_.device(), offset_by(storage(t).gradient.view(), it.group->rank() * sum.shape[0]), sum.data,
                     sum.bytes());
    }
  }
}

void ShardedParams::publish() {
  check(under_way_.empty(), "sharded params: published while weights or sums travel", {{"under way", std::int64_t(under_way_.size())}});
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const Unit& it = units_[u];
    check(open_[u] == 0, "sharded params: published while gathered", {{"unit", std::int64_t(u)}});
    for (const int t : it.tensors) storage_[std::size_t(t)].gathered = {};
    gathering_[u] = false;
    if (it.group->size() == 1 || it.sharding == Sharding::none || it.sharding == Sharding::full) continue;
    std::vector<Communicator::Gather> pieces;
    for (const int t : it.tensors) {
      if (in_step_ && !tensors_[std::size_t(t)].trainable) continue;
      const Tensor all = storage(t).weight.view();
      const std::int64_t rows = padded_shard_rows(t);
      pieces.push_back({offset_by(all, it.group->rank() * rows), all.data, rows * all.shape.row() * size_of(all.dtype)});
    }
    if (!pieces.empty()) it.group->all_gather(pieces);
  }
  in_step_ = false;
}

bool ShardedParams::holds(int tensor) const { return open_[std::size_t(unit_of(tensor))] > 0; }

ConstTensor ShardedParams::weight(int tensor) const {
  check(holds(tensor) && !travels(unit_of(tensor), true), "sharded params: a weight is read while not gathered",
        {{"tensor", tensor}});
  const Storage& own = storage(tensor);
  const Tensor all = own.gathered.present() ? own.gathered.view() : own.weight.view();
  return all.rows(0, tensors_[std::size_t(tensor)].shape[0]);
}

Tensor ShardedParams::gradient(int tensor) {
  check(holds(tensor), "sharded params: a gradient is asked while not gathered", {{"tensor", tensor}});
  if (!tensors_[std::size_t(tensor)].trainable) return {};
  make_gradient(tensor);
  clear(storage_[std::size_t(tensor)]);
  return storage(tensor).gradient.view().rows(0, tensors_[std::size_t(tensor)].shape[0]);
}

ShardedParams::FirstGradient ShardedParams::first_gradient(int tensor) {
  check(holds(tensor), "sharded params: a gradient is asked while not gathered", {{"tensor", tensor}});
  if (!tensors_[std::size_t(tensor)].trainable) return {};
  make_gradient(tensor);
  Storage& own = storage_[std::size_t(tensor)];
  const bool write = own.blank;
  const std::int64_t rows = tensors_[std::size_t(tensor)].shape[0];
  clear(own, rows);  // the rows that pad it are summed over ranks too
  return {own.gradient.view().rows(0, rows), write};
}

Tensor ShardedParams::stored(int tensor, Rows rows) const {
  const Rows mine = update_rows(tensor);
  check(mine.begin <= rows.begin && rows.end <= mine.end, "sharded params: rows of another rank",
        {{"tensor", tensor}, {"begin", rows.begin}, {"end", rows.end}, {"mine_begin", mine.begin}, {"mine_end", mine.end}});
  const std::int64_t first = sharding_of(unit(unit_of(tensor))) == Sharding::full ? mine.begin : 0;
  return storage(tensor).weight.view().rows(rows.begin - first, rows.end - first);
}

Tensor ShardedParams::stored_gradient(int tensor, Rows rows) const {
  const Rows mine = update_rows(tensor);
  check(mine.begin <= rows.begin && rows.end <= mine.end, "sharded params: gradient rows of another rank",
        {{"tensor", tensor}, {"begin", rows.begin}, {"end", rows.end}, {"mine_begin", mine.begin}, {"mine_end", mine.end}});
  if (!tensors_[std::size_t(tensor)].trainable) return {};
  const Storage& own = storage(tensor);
  check(!travels(own.unit, false), "sharded params: a gradient is read while its sum travels", {{"tensor", tensor}});
  if (!own.gradient_shard.present()) return own.gradient.view().rows(rows.begin, rows.end);
  return own.gradient_shard.view().rows(rows.begin - mine.begin, rows.end - mine.begin);
}

}  // namespace moetrain::parallel
