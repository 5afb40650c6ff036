// expert_exchange.cpp -- counts first, then rows: each rank learns what it gets, and sorts it by expert after arrival.
#include "parallel/expert_exchange.h"

#include <numeric>

#include "ops/elementwise.h"
#include "ops/permute.h"

namespace moetrain::parallel {
namespace {

std::vector<std::int64_t> times(const std::vector<std::int64_t>& rows, std::int64_t bytes) {
  std::vector<std::int64_t> sizes;
  for (const auto n : rows) sizes.push_back(n * bytes);
  return sizes;
}

void check_rows(const ExchangePlan& plan, ConstTensor here, ConstTensor there) {
  check(here.shape.rank() == 2 && here.shape == Shape{plan.sent(), here.shape[1]}, "expert exchange: rows are not (sent, D)",
        {{"sent", plan.sent()}, {"rows", here.shape[0]}});
  check(there.shape == here.shape.with_dim0(plan.received()) && there.dtype == here.dtype,
        "expert exchange: received is not (received, D) of the rows' type",
        {{"received", plan.received()}, {"rows", there.shape[0]}});
}

}  // namespace

std::int64_t ExchangePlan::sent() const { return std::accumulate(send_rows.begin(), send_rows.end(), std::int64_t(0)); }

ExpertExchange::ExpertExchange(Communicator& group, Communicator& control, std::int64_t experts)
    : group_(group), control_(control), experts_(experts) {
  check(experts >= 1 && experts % group_.size() == 0, "expert exchange: ranks do not divide experts",
        {{"experts", experts}, {"ranks", group_.size()}});
}

ExchangePlan ExpertExchange::plan(Stack& kept, std::span<const std::int64_t> counts) {
  check(std::int64_t(counts.size()) == experts_, "expert exchange: not one count an expert",
        {{"experts", experts_}, {"counts", std::int64_t(counts.size())}});
  const Device device = kept.memory().device();
  const auto n = std::size_t(group_.size()), local = std::size_t(experts_) / n;
  std::vector<std::int64_t> arriving(counts.begin(), counts.end());  // (n, E/n) by source, then local expert
  if (n > 1) {
    const std::vector<std::int64_t> sizes(n, std::int64_t(local * sizeof(std::int64_t)));
    control_.all_to_all(counts.data(), sizes, arriving.data(), sizes);
    if (device == Device::dry)  // nothing came: let every rank have the counts of this one
      for (std::size_t i = 0; i < arriving.size(); ++i) arriving[i] = counts[std::size_t(group_.rank()) * local + i % local];
  }

  ExchangePlan plan;
  plan.send_rows.resize(n);
  plan.receive_rows.resize(n);
  plan.offsets.assign(local + 1, 0);
  for (std::size_t r = 0; r < n; ++r)
    for (std::size_t j = 0; j < local; ++j) {
      check(counts[r * local + j] >= 0 && arriving[r * local + j] >= 0, "expert exchange: negative count");
      plan.send_rows[r] += counts[r * local + j];
      plan.receive_rows[r] += arriving[r * local + j];
      plan.offsets[j + 1] += arriving[r * local + j];
    }
  for (std::size_t j = 0; j < local; ++j) plan.offsets[j + 1] += plan.offsets[j];
  plan.received_rows = plan.offsets.back();
  if (n == 1) return plan;
  if (device == Device::cuda) {
    plan.device_offsets = kept.take(DType::i64, {std::int64_t(local) + 1});
    copy_to_device(device, plan.device_offsets.data, plan.offsets.data(), plan.device_offsets.bytes());
  }

  plan.to = kept.take(DType::i64, {plan.received()});
  if (device == Device::dry) return plan;
  std::vector<std::int64_t> to, next(plan.offsets.begin(), plan.offsets.end() - 1);
  to.reserve(std::size_t(plan.received()));
  for (std::size_t r = 0; r < n; ++r)
    for (std::size_t j = 0; j < local; ++j)
      for (std::int64_t i = 0; i < arriving[r * local + j]; ++i) to.push_back(next[j]++);
  copy_to_device(device, plan.to.data, to.data(), plan.to.bytes());
  return plan;
}

ExchangePlan ExpertExchange::stay(Tensor offsets, std::int64_t rows) {
  ExchangePlan plan;
  plan.send_rows = plan.receive_rows = {rows};
  plan.device_offsets = offsets;
  plan.received_rows = rows;
  return plan;
}

void ExpertExchange::out(ops::Context& ctx, const ExchangePlan& plan, ConstTensor rows, Tensor received) {
  check_rows(plan, rows, received);
  if (group_.size() == 1) return ops::copy(ctx, ops::Copy{.x = rows, .y = received});
  Scope temporaries(ctx.scratch);
  const Tensor arrived = ctx.scratch.take(received.dtype, received.shape);
  const auto row_bytes = rows.shape[1] * size_of(rows.dtype);
  group_.all_to_all(rows.data, times(plan.send_rows, row_bytes), arrived.data, times(plan.receive_rows, row_bytes));
  ops::move_rows(ctx, ops::MoveRows{.x = arrived, .to = plan.to, .gather = false, .y = received});
}

void ExpertExchange::back(ops::Context& ctx, const ExchangePlan& plan, ConstTensor received, Tensor rows) {
  check_rows(plan, rows, received);
  if (group_.size() == 1) return ops::copy(ctx, ops::Copy{.x = received, .y = rows});
  Scope temporaries(ctx.scratch);
  const Tensor leaving = ctx.scratch.take(received.dtype, received.shape);
  ops::move_rows(ctx, ops::MoveRows{.x = received, .to = plan.to, .gather = true, .y = leaving});
  const auto row_bytes = rows.shape[1] * size_of(rows.dtype);
  group_.all_to_all(leaving.data, times(plan.receive_rows, row_bytes), rows.data, times(plan.send_rows, row_bytes));
}

}  // namespace moetrain::parallel
