// trainer.cpp -- bring-up of a run's state, fresh weights, and evaluation.
#include "core/trainer.h"

#include <algorithm>

#include "core/lora.h"
#include "core/together.h"
#include "ops/blas_room.h"
#include "ops/random.h"
#include "ops/random_normal.h"

namespace moetrain::core {
namespace {

std::optional<CacheBudget> cache_budget(const MemoryConfig& m, bool beside) {
  if (m.activation_checkpointing == Checkpointing::selective) return CacheBudget{.all = true};
  if (m.cache.ops.empty()) return {};
  CacheBudget budget{
      .forced = m.cache.ops[0] != "auto", .beside = beside, .device_bytes = m.cache.device.bytes, .host_bytes = m.cache.host.bytes};
  for (int op = 0; op < kResultOps; ++op)
    if (!budget.forced || std::find(m.cache.ops.begin(), m.cache.ops.end(), name_of(ResultOp(op))) != m.cache.ops.end())
      budget.ops.push_back(ResultOp(op));
  return budget;
}

}  // namespace

Device planned_device(const Config& c) {
  const bool cpu = c.run.device == DeviceChoice::cpu || c.cpu_only() || (c.run.device == DeviceChoice::automatic && !kHasCuda);
  return cpu ? Device::cpu : Device::cuda;
}

Trainer::Trainer(const Config& config, std::unique_ptr<parallel::Communicator> world, Device device, bool poison)
    : config_(config),
      mesh_(config.parallel.mesh(), std::move(world), device),
      memory_(device, config.memory.device_limit.value_or(io::ByteCount{}).bytes),
      host_memory_(device == Device::dry ? Device::dry : Device::cpu),
      scratch_(memory_, Category::workspace, poison),
      kept_(memory_, Category::activations, poison, Area::kept),
      ctx_{.scratch = scratch_, .plans_for = planned_device(config)},
      model_(config.model, table_, config.parallel.tensor_parallel) {
  together(*mesh_.world().control, [&] { allocate(poison); });
}

void Trainer::allocate(bool poison) {
  blas_ = ops::make_blas(memory_);
  ctx_.blas = blas_.get();
  if (ctx_.dry() && ctx_.plans_for == Device::cuda)
    for (const std::int64_t bytes : {ops::kBlasWorkspaceBytes, ops::kBlasCounterBytes})
      planned_blas_.emplace_back(memory_, Category::workspace, bytes);
  choose_trained(config_, table_);
  layout_ = make_layout(config_, table_, mesh_);
  params_ = std::make_unique<parallel::ShardedParams>(
      memory_, layout_.tensors, layout_.units,
      parallel::ShardedParams::Options{config_.parallel.reshard_after_use, config_.parallel.bucket_size.bytes, poison,
                                       &host_memory_});
  optimizer_ = std::make_unique<Optimizer>(
      memory_, Optimizer::Offload{config_.memory.offload.optimizer ? &host_memory_ : nullptr, config_.memory.offload.slice.bytes},
      config_.optimizer, table_, *params_);
  const std::int64_t layers = model_.moe_layers(), E = config_.model.num_experts;
  if (layers > 0)
    exchange_ = std::make_unique<parallel::ExpertExchange>(*mesh_.expert().data, *mesh_.expert().control, E, config_.moe.overlap_chunks);

  if (const int slices = mesh_.shape().sequence; slices > 1)
    sequence_ = std::make_unique<parallel::SequenceSplit>(*mesh_.sequence().data, config_.data.sequence_length / slices);

  if (mesh_.shape().tensor > 1) tensor_ = std::make_unique<parallel::TensorSplit>(*mesh_.tensor().data);

  if (const auto budget = cache_budget(config_.memory, planned_device(config_) == Device::cuda))
    results_ = std::make_unique<ResultCache>(memory_, host_memory_, *budget, int(config_.model.num_hidden_layers));

  const DType real = real_of(config_.run.dtype);
  auto own = [&](DType dtype, Shape shape) { return OwnedTensor(memory_, Category::workspace, dtype, shape); };
  lm_ = own(real, {1});
  balance_ = own(real, {1});
  indexer_ = own(real, {1});
  counts_ = own(DType::i64, {layers, E});
  if (config_.moe.balance == Balance::quantile && layers > 0) histogram_ = own(DType::i64, {layers, E, config_.moe.quantile_bins});
  const AuxiliaryScope scope = config_.moe.auxiliary_scope;
  if (config_.moe.balance == Balance::auxiliary && (scope == AuxiliaryScope::global_batch || mesh_.readers().data->size() > 1))
    shared_counts_ = own(DType::i64, {layers, scope == AuxiliaryScope::sequence ? config_.training.micro_batch_size : 1, E});
}

void Trainer::initialize() {
  for (int i = 0; i < table_.size(); ++i) initialize(i);
  params_->publish();
}

void Trainer::initialize(int i) {
  if (memory_.device() == Device::dry) return;
  const auto rows = params_->update_rows(i);
  const auto first = layout_.first_row[std::size_t(i)], column = layout_.first_column[std::size_t(i)];
  const parallel::Rows whole{first + rows.begin, first + rows.end};
  auto fresh = [&](Tensor to) {
    if (!to.present()) return;
    if (table_[i].init == Init::normal)
      return ops::random_normal(ctx_, ops::RandomNormal{.seed = config_.run.seed,
                                                        .stream = ops::stream_of(table_[i].name),
                                                        .first = whole.begin * table_[i].shape.row() + column,
                                                        .deviation = config_.model.initializer_range,
                                                        .y = to,
                                                        .stride = table_[i].shape.row()});
    if (memory_.device() == Device::cpu)
      return initialize_rows(table_[i], config_.model.initializer_range, config_.run.seed, whole, to, column);
    std::vector<std::byte> host(std::size_t(to.bytes()));
    initialize_rows(table_[i], config_.model.initializer_range, config_.run.seed, whole, {host.data(), to.dtype, to.shape}, column);
    copy_to_device(memory_.device(), to.data, host.data(), to.bytes());
  };
  fresh(params_->stored(i, rows));
  if (optimizer_->has_master(i)) fresh(optimizer_->master(i, rows));
}

Progress Trainer::progress() const {
  Progress p = progress_;
  p.updates = optimizer_->updates();
  return p;
}

void Trainer::set_progress(const Progress& p) {
  progress_ = p;
  optimizer_->set_updates(p.updates);
}

std::vector<io::Batch> Trainer::next_batches(const io::BatchSource& source) const {
  std::vector<io::Batch> batches;
  for (std::int64_t m = 0; m < config_.training.gradient_accumulation; ++m)
    batches.push_back(source.read(first_sequence(m), config_.training.micro_batch_size, slice()));
  return batches;
}

std::int64_t Trainer::first_sequence(std::int64_t m) const {
  return progress_.sequences + (m * mesh_.data_coordinates() + mesh_.data_coordinate()) * config_.training.micro_batch_size;
}

std::vector<io::Batch> Trainer::evaluation_batches(const io::BatchSource& source, std::int64_t batches) const {
  const std::int64_t C = mesh_.data_coordinates(), d = mesh_.data_coordinate(), size = config_.training.micro_batch_size;
  const std::int64_t sequences = std::min(batches * config_.sequences_per_step(), source.windows());
  std::vector<io::Batch> mine;
  for (std::int64_t m = 0; m * C * size < sequences; ++m) {
    const std::int64_t first = std::min(sequences, (m * C + d) * size);
    mine.push_back(source.read(first, std::min(size, sequences - first), slice()));
  }
  return mine;
}

std::optional<double> Trainer::evaluate(std::span<const io::Batch> batches, Tensor logits) {
  zero_sums();
  enter(MemoryPhase::forward);
  std::int64_t labels = 0;
  for (const io::Batch& host : batches) {
    if (mesh_.here().tensor == 0) labels += host.label_count();
    Scope scope(kept_);
    const MicroBatch batch = upload(host);
    Pass pass = make_pass(batch, {}, PassMode::evaluate);
    model_.forward(pass, layout_, logits);
  }
  mesh_.world().control->all_reduce(Tensor(&labels, DType::i64, {1}), parallel::Reduction::sum);
  StepResult result;
  reduce_losses({.labels = labels}, result);
  return labels > 0 ? std::optional(result.loss) : std::nullopt;
}

}  // namespace moetrain::core
