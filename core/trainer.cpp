// trainer.cpp -- bring-up of a run's state, fresh weights, and evaluation.
#include "core/trainer.h"

#include "core/lora.h"
#include "core/plan.h"
#include "core/together.h"
#include "ops/random.h"
#include "ops/random_normal.h"

namespace moetrain::core {
namespace {

// A job that leaves the device open is planned for a GPU where this build knows one: plans are made where no GPU is.
Device planned_device(const Config& c) {
  const bool cpu = c.run.device == DeviceChoice::cpu || c.run.dtype == DType::f64 || c.moe.capacity_factor > 0 ||
                   c.parallel.sequence_parallel > 1 || (c.run.device == DeviceChoice::automatic && !kHasCuda);
  return cpu ? Device::cpu : Device::cuda;
}

}  // namespace

Trainer::Trainer(const Config& config, std::unique_ptr<parallel::Communicator> world, Device device, bool poison)
    : config_(config),
      mesh_(config.parallel.mesh(), std::move(world), device),
      memory_(device, config.memory.device_limit.value_or(ByteSize{}).bytes),
      scratch_(memory_, Category::workspace, poison),
      kept_(memory_, Category::activations, poison, Area::high),
      ctx_{.scratch = scratch_, .plans_for = planned_device(config)},
      model_(config.model, table_) {
  together(*mesh_.world().control, [&] { allocate(poison); });
}

void Trainer::allocate(bool poison) {
  blas_ = ops::make_blas(memory_);
  ctx_.blas = blas_.get();
  const auto& world = *mesh_.world().control;
  if (memory_.device() == Device::cuda && world.size() > 1)  // blocks grow while the low stack is in use
    memory_.set_floor(memory_.pool().blocks_most() + plan_rank(config_, world.rank()).device_blocks);
  choose_trained(config_, table_);
  layout_ = make_layout(config_, table_, mesh_);
  params_ = std::make_unique<parallel::ShardedParams>(memory_, layout_.tensors, layout_.units, config_.parallel.reshard_after_use, poison);
  optimizer_ = std::make_unique<Optimizer>(memory_, config_.optimizer, table_, *params_);
  const std::int64_t layers = model_.moe_layers(), E = config_.model.num_experts;
  if (layers > 0)
    exchange_ = std::make_unique<parallel::ExpertExchange>(*mesh_.expert().data, *mesh_.expert().control, E, config_.moe.overlap_chunks);

  if (const int slices = mesh_.shape().sequence; slices > 1)
    sequence_ = std::make_unique<parallel::SequenceSplit>(*mesh_.sequence().data, config_.data.sequence_length / slices);

  const DType real = real_of(config_.run.dtype);
  auto own = [&](DType dtype, Shape shape) { return OwnedTensor(memory_, Category::workspace, dtype, shape); };
  lm_ = own(real, {1});
  balance_ = own(real, {1});
  indexer_ = own(real, {1});
  counts_ = own(DType::i64, {layers, E});
  if (config_.moe.balance == Balance::quantile && layers > 0) histogram_ = own(DType::i64, {layers, E, config_.moe.quantile_bins});
  const AuxiliaryScope scope = config_.moe.auxiliary_scope;
  if (config_.moe.balance == Balance::auxiliary && (scope == AuxiliaryScope::global_batch || sequence_))
    shared_counts_ = own(DType::i64, {layers, scope == AuxiliaryScope::sequence ? config_.training.micro_batch_size : 1, E});
}

void Trainer::initialize() {
  for (int i = 0; i < table_.size(); ++i) initialize(i);
  params_->publish();
}

void Trainer::initialize(int i) {
  if (memory_.device() == Device::dry) return;
  const auto rows = params_->update_rows(i);
  const auto first = layout_.first_row[std::size_t(i)];
  const parallel::Rows whole{first + rows.begin, first + rows.end};
  auto fresh = [&](Tensor to) {
    if (!to.present()) return;
    if (table_[i].init == Init::normal)
      return ops::random_normal(ctx_, ops::RandomNormal{.seed = config_.run.seed,
                                                        .stream = ops::stream_of(table_[i].name),
                                                        .first = whole.begin * table_[i].shape.row(),
                                                        .deviation = config_.model.initializer_range,
                                                        .y = to});
    if (memory_.device() == Device::cpu)
      return initialize_rows(table_[i], config_.model.initializer_range, config_.run.seed, whole, to);
    std::vector<std::byte> host(std::size_t(to.bytes()));
    initialize_rows(table_[i], config_.model.initializer_range, config_.run.seed, whole, {host.data(), to.dtype, to.shape});
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
  std::int64_t labels = 0;
  for (const io::Batch& host : batches) {
    labels += host.label_count();
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
