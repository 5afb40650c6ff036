// train_step.cpp -- one optimizer step: batch, forward, backward, sums over ranks, norm, update, balance.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/schedule.h"
#include "core/trainer.h"
#include "ops/balance.h"

namespace moetrain::core {
namespace {

// The sign of a NaN means nothing, but is printed.
double without_nan_sign(double x) { return std::isnan(x) ? std::numeric_limits<double>::quiet_NaN() : x; }

}  // namespace

StepResult Trainer::step(std::span<const io::Batch> micro_batches) {
  mesh_.world().control->enter(parallel::Phase::step);
  const Totals totals = count(micro_batches);
  StepResult result;
  result.step = progress_.step + 1;
  result.tokens = totals.tokens;
  result.label_tokens = totals.labels;
  result.lr = learning_rate(config_.schedule, config_.optimizer.lr, result.step, config_.training.steps);
  zero_sums();
  if (totals.labels == 0) {
    result.skipped = Skipped::no_labels;
  } else {
    params_->begin_step();
    for (std::size_t m = 0; m < micro_batches.size(); ++m) {
      enter(MemoryPhase::forward);
      Scope scope(kept_);
      const MicroBatch batch = upload(micro_batches[m], first_sequence(std::int64_t(m)));
      Pass pass = make_pass(batch, totals, PassMode::train);
      model_.forward(pass, layout_);
      enter(MemoryPhase::backward);
      model_.backward(pass, layout_);
    }
    enter(MemoryPhase::step);
    mesh_.world().control->enter(parallel::Phase::step);
    params_->finish_gradients();
    reduce_losses(totals, result);
    result.grad_norm = without_nan_sign(optimizer_->norm(ctx_, *mesh_.world().control));
    if (!std::isfinite(result.grad_norm) || !std::isfinite(result.loss)) result.skipped = Skipped::nonfinite;
  }
  reduce_counts(result);
  if (result.skipped == Skipped::no) {
    const Range range("update");
    const double clip = config_.training.grad_clip;
    optimizer_->update(ctx_, result.lr, clip > 0 ? std::min(1.0, clip / (result.grad_norm + 1e-6)) : 1.0);
    update_balance(result);
  }
  params_->publish();
  if (results_ && !results_->decided() && result.skipped != Skipped::no_labels && memory_.device() != Device::dry)
    results_->decide(*mesh_.world().control, config_.memory.cache.host.bytes > 0 ? link_bytes_per_second(memory_.device()) : 1);
  progress_.step = result.step;
  progress_.sequences += config_.sequences_per_step();
  progress_.tokens += totals.tokens;
  return result;
}

// Counted before the first backward, so that every term of the loss has its final scale. A sequence counts where its first slice
// is, and a slice once, whoever shares it. On Device::dry a batch is its offsets alone, and every token counts as labelled.
Trainer::Totals Trainer::count(std::span<const io::Batch> batches) {
  std::int64_t sums[3] = {};
  if (mesh_.here().tensor != 0 && memory_.device() != Device::dry) batches = {};
  for (const io::Batch& b : batches) {
    sums[0] += memory_.device() == Device::dry ? b.sequences.back() : b.label_count();
    sums[1] += b.sequences.back();
    if (mesh_.here().sequence == 0) sums[2] += std::int64_t(b.sequences.size()) - 1;
  }
  mesh_.world().control->all_reduce(Tensor(sums, DType::i64, {3}), parallel::Reduction::sum);
  return {sums[0], sums[1], sums[2]};
}

// The places of sequences and documents among those of other ranks. A slice's documents stand one after another in the list, at
// least one, be it empty.
void Trainer::place(const io::Batch& b, std::int64_t first_sequence, MicroBatch& m) const {
  const std::int64_t B = std::int64_t(b.sequences.size()) - 1, S = config_.data.sequence_length;
  const std::int64_t skipped = sequence_ ? sequence_->rank() * sequence_->share() : 0;  // of every sequence, by this rank
  for (std::int64_t n = 0; n < B; ++n) {
    const Text here{b.sequences[std::size_t(n)], b.sequences[std::size_t(n) + 1], (first_sequence + n) * S + skipped};
    const bool follows = !m.text.empty() && m.text.back().place + m.text.back().end - m.text.back().begin == here.place;
    follows ? void(m.text.back().end = here.end) : m.text.push_back(here);
  }
  if (!sequence_) return;
  check(std::int64_t(b.pieces.size()) == B, "a batch of whole sequences where they are cut over ranks",
        {{"sequences", B}, {"pieces", std::int64_t(b.pieces.size())}});
  m.gathered_text = {{0, B * S, first_sequence * S}};
  const auto& starts = b.documents;
  for (std::size_t n = 0, d = 0; n < std::size_t(B); ++n) {
    const std::int64_t begin = b.sequences[n], end = b.sequences[n + 1];
    const auto& piece = b.pieces[n];
    m.lengths.push_back(piece.length);
    for (bool first = true; first || starts[d] < end; ++d, first = false) {
      const std::int64_t before = first ? piece.before : 0, key = std::int64_t(n) * S + skipped + starts[d] - begin - before;
      m.pieces.push_back({before, key, before > 0 ? std::int64_t(n) : -1, piece.goes_on && starts[d + 1] == end ? std::int64_t(n) : -1});
    }
  }
  m.documents.pieces = m.pieces;
  m.documents.slices = B;
}

// The rows of a slice that are this rank's, as a slice of its slices.
std::unique_ptr<MicroBatch> Trainer::share_of(const MicroBatch& slice) {
  const auto here = tensor_->rows(slice.T());
  auto m = std::make_unique<MicroBatch>();
  m->tokens = slice.tokens.rows(here.begin, here.end);
  m->labels = slice.labels.rows(here.begin, here.end);
  const auto inside = [&](std::int64_t row) { return std::clamp(row, here.begin, here.end) - here.begin; };
  for (const std::int64_t offset : slice.sequences) m->own_sequences.push_back(inside(offset));
  m->sequences = m->own_sequences;
  m->lengths = slice.lengths;
  for (std::size_t n = 1; slice.lengths.empty() && n < slice.sequences.size(); ++n)
    m->lengths.push_back(slice.sequences[n] - slice.sequences[n - 1]);
  for (const Text& t : slice.text) {
    const std::int64_t begin = inside(t.begin), end = inside(t.end);
    if (begin < end) m->text.push_back({begin, end, t.place + begin + here.begin - t.begin});
  }
  const ops::Documents& all = slice.documents;
  m->own_starts = {0};
  for (std::int64_t n = 0; n < all.count(); ++n) {
    const std::int64_t begin = std::max(all.begin(n), here.begin), end = std::min(all.end(n), here.end);
    if (begin >= end) continue;
    const std::int64_t before = all.before(n) + begin - all.begin(n);
    m->own_starts.push_back(end - here.begin);
    m->pieces.push_back({before, all.first_key(n), before > 0 ? 0 : -1, -1});
  }
  m->documents = {.starts = m->own_starts, .pieces = m->pieces, .slices = 1};
  return m;
}

MicroBatch Trainer::upload(const io::Batch& b, std::int64_t first_sequence) {
  mesh_.settle();  // the copies below wait for the device, and would wait for ever for a peer that is gone
  const std::int64_t T = b.sequences.back();
  auto put = [&](DType dtype, Shape shape, const void* host) {
    const Tensor t = kept_.take(dtype, shape);
    copy_to_device(memory_.device(), t.data, host, t.bytes());
    return t;
  };
  MicroBatch m;
  m.documents.starts = b.documents;
  m.tokens = put(DType::i32, {T}, b.tokens.data());
  m.labels = put(DType::i32, {T}, b.labels.data());
  m.sequences = b.sequences;
  place(b, first_sequence, m);
  if (tensor_) m.share = share_of(m);
  const bool for_cuda = memory_.device() == Device::cuda || (ctx_.dry() && ctx_.plans_for == Device::cuda);
  for (MicroBatch* part : {&m, m.share.get()}) {
    if (!part || !for_cuda) continue;
    ops::Documents& d = part->documents;
    d.on_device = put(DType::i64, {d.count() + 1}, d.starts.data());
    if (!d.whole()) d.pieces_on_device = put(DType::i64, {d.count(), 4}, d.pieces.data());
  }
  return m;
}

Pass Trainer::make_pass(const MicroBatch& batch, const Totals& totals, PassMode mode) {
  const MicroBatch& here = batch.share ? *batch.share : batch;
  auto one_over = [](std::int64_t n) { return n > 0 ? 1 / double(n) : 0; };
  return {.ctx = ctx_,
          .kept = kept_,
          .params = *params_,
          .table = table_,
          .exchange = exchange_.get(),
          .sequence = sequence_.get(),
          .tensor = tensor_.get(),
          .balanced = config_.moe.auxiliary_scope == AuxiliaryScope::global_batch ? *mesh_.world().data : *mesh_.readers().data,
          .everyone = *mesh_.world().data,
          .everyone_on_host = *mesh_.world().control,
          .config = config_,
          .batch = &here,
          .slice = &batch,
          .rows_here = &here,
          .scales = {one_over(totals.labels), one_over(totals.tokens), one_over(totals.sequences)},
          .losses = {lm_.view(), balance_.view(), indexer_.view()},
          .balance = {counts_.view(), histogram_.view(), shared_counts_.view()},
          .rows = rows_,
          .mode = mode,
          .dtype = config_.run.dtype,
          .results = mode == PassMode::train ? results_.get() : nullptr,
          .text = here.text};
}

void Trainer::zero_sums() {
  for (const OwnedTensor* t : {&lm_, &balance_, &indexer_, &counts_, &histogram_, &shared_counts_})
    fill(memory_.device(), t->view().data, 0, t->view().bytes());
  rows_ = {.received = std::vector<std::int64_t>(std::size_t(model_.moe_layers()), 0)};
}

void Trainer::reduce_losses(const Totals& totals, StepResult& result) {
  mesh_.settle();
  const Tensor sums[3] = {lm_.view(), balance_.view(), indexer_.view()};
  double values[3] = {};
  for (int i = 0; i < 3; ++i) {
    if (sums[i].dtype == DType::f64) {
      copy_to_host(memory_.device(), &values[i], sums[i].data, sizeof(double));
    } else {
      float v = 0;
      copy_to_host(memory_.device(), &v, sums[i].data, sizeof v);
      values[i] = double(v);
    }
  }
  mesh_.world().control->all_reduce(Tensor(values, DType::f64, {3}), parallel::Reduction::sum);
  for (double& value : values) value = without_nan_sign(value);
  if (totals.labels > 0) result.loss = values[0] / double(totals.labels);
  if (model_.moe_layers() > 0 && (config_.moe.balance == Balance::auxiliary || config_.moe.z_loss != 0))
    result.balance_loss = values[1];
  if (config_.model.dsa && config_.loss.indexer_coefficient != 0 && totals.tokens > 0)
    result.indexer_loss = values[2] / double(totals.tokens);
}

// Exact counts of the global batch, on every rank; the device's sums are left as they are.
void Trainer::reduce_counts(StepResult& result) {
  const Tensor counts = counts_.view();
  if (counts.count() == 0) return;
  auto& control = *mesh_.world().control;
  const auto all = std::size_t(counts.count()), ranks = std::size_t(control.size());
  std::vector<std::int64_t> sums(all + rows_.received.size() * ranks, 0);
  copy_to_host(memory_.device(), sums.data(), counts.data, counts.bytes());
  for (std::size_t l = 0; l < rows_.received.size(); ++l) sums[all + l * ranks + std::size_t(control.rank())] = rows_.received[l];
  control.all_reduce(Tensor(sums.data(), DType::i64, {std::int64_t(sums.size())}), parallel::Reduction::sum);
  const auto end_of_counts = sums.begin() + counts.count();
  result.expert_tokens.assign(sums.begin(), end_of_counts);
  result.rank_rows.assign(end_of_counts, sums.end());
  result.rerouted = rows_.rerouted;
  result.dropped = rows_.dropped;
}

void Trainer::update_balance(const StepResult& result) {
  const Balance rule = config_.moe.balance;
  if (rule != Balance::quantile && rule != Balance::sign) return;
  const auto biases = model_.router_biases();
  if (std::all_of(biases.begin(), biases.end(), [&](int bias) { return table_[bias].frozen; })) return;
  if (histogram_.present()) mesh_.world().data->all_reduce(histogram_.view(), parallel::Reduction::sum);
  const std::int64_t E = config_.model.num_experts;
  for (std::size_t l = 0; l < biases.size(); ++l) {
    if (table_[biases[l]].frozen) continue;
    const auto layer = std::int64_t(l);
    const Tensor bias = params_->stored(biases[l], {0, E});
    if (rule == Balance::quantile) {
      ops::quantile_update(
          ctx_, ops::QuantileUpdate{.histogram = histogram_.view().rows(layer, layer + 1).reshape({E, config_.moe.quantile_bins}),
                                    .experts_per_token = config_.model.num_experts_per_token,
                                    .bias = bias});
    } else {
      Scope scope(scratch_);
      const Tensor counts = scratch_.take(DType::i64, {E});
      copy_to_device(memory_.device(), counts.data, result.expert_tokens.data() + layer * E, counts.bytes());
      ops::sign_update(ctx_, ops::SignUpdate{.counts = counts, .rate = config_.moe.sign_rate, .bias = bias});
    }
  }
}

}  // namespace moetrain::core
