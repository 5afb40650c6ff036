// permute.cpp -- a counting sort of slots, and rows copied or summed where it says.
#include "ops/permute.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <utility>

#include "ops/cpu/expert_ids.h"
#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

using cpu::acc_t;

constexpr std::int64_t kWorthThreads = 1 << 16;  // elements
constexpr std::int64_t kTile = 256;              // columns summed at once, so that a sum stays in the first cache

// lowest: kDropped where a slot may have no row.
constexpr std::int64_t kDropped = -1;
void check_rows(ConstTensor rows, std::int64_t R, std::int64_t lowest) {
  const auto* row = rows.as<std::int64_t>();
  for (std::int64_t i = 0; i < rows.count(); ++i)
    check(row[i] >= lowest && row[i] < R, "permute: not a row", {{"slot", i}, {"row", row[i]}, {"rows", R}});
}

void copy_row(Tensor to, std::int64_t to_row, ConstTensor from, std::int64_t from_row) {
  const auto bytes = from.shape[1] * size_of(from.dtype);
  std::memcpy(static_cast<std::byte*>(to.data) + to_row * bytes, static_cast<const std::byte*>(from.data) + from_row * bytes,
              std::size_t(bytes));
}

template <class T>
void collect(const CollectRows& a) {
  using R = acc_t<T>;
  const auto tokens = a.y.shape[0], D = a.y.shape[1], K = a.slot_row.shape[1];
  const auto* slot_row = a.slot_row.as<std::int64_t>();
  const R* weights = a.weights.present() ? a.weights.as<R>() : nullptr;
  const T* rows = a.rows.as<T>();
  T* y = a.y.as<T>();
#pragma omp parallel for schedule(static) if (tokens * K * D > kWorthThreads)
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t d0 = 0; d0 < D; d0 += kTile) {
      R sum[kTile] = {};
      const auto width = std::min(kTile, D - d0);
      for (std::int64_t k = 0; k < K; ++k) {
        if (slot_row[t * K + k] < 0) continue;
        const T* row = rows + slot_row[t * K + k] * D + d0;
        const R w = weights ? weights[t * K + k] : R(1);
#pragma omp simd
        for (std::int64_t d = 0; d < width; ++d) sum[d] += w * R(row[d]);
      }
      for (std::int64_t d = 0; d < width; ++d) y[t * D + d0 + d] = T(a.add ? R(y[t * D + d0 + d]) + sum[d] : sum[d]);
    }
}

template <class T>
void collect_backward(const CollectRowsBackward& a) {
  using R = acc_t<T>;
  const auto tokens = a.dy.shape[0], D = a.dy.shape[1], K = a.slot_row.shape[1];
  const auto* slot_row = a.slot_row.as<std::int64_t>();
  const R* weights = a.weights.as<R>();
#pragma omp parallel for schedule(static) if (tokens * K * D > kWorthThreads)
  for (std::int64_t i = 0; i < tokens * K; ++i) {
    if (slot_row[i] < 0) continue;
    const T* dy = a.dy.as<T>() + i / K * D;
    T* drow = a.drows.as<T>() + slot_row[i] * D;
#pragma omp simd
    for (std::int64_t d = 0; d < D; ++d) drow[d] = T(weights[i] * R(dy[d]));
  }
}

template <class R>
void divide_dots(const WeightGradients& a) {
  const auto* slot_row = a.slot_row.as<std::int64_t>();
  const R *dots = a.dots.as<R>(), *weights = a.weights.as<R>();
  for (std::int64_t i = 0; i < a.slot_row.count(); ++i)
    a.dweights.as<R>()[i] = slot_row[i] < 0 || weights[i] == 0 ? R(0) : dots[slot_row[i]] / weights[i];
}

}  // namespace

void cpu::sort_slots(Context&, const SortSlots& a) {
  const auto E = a.counts.shape[0], slots = a.experts.count();
  check_expert_ids(a.experts, E, Dropped::allowed);
  const auto* experts = a.experts.as<std::int32_t>();
  auto *row = a.slot_row.as<std::int64_t>(), *counts = a.counts.as<std::int64_t>();
  std::fill_n(counts, E, 0);
  for (std::int64_t i = 0; i < slots; ++i)
    if (experts[i] >= 0) ++counts[experts[i]];
  std::int64_t start = 0;
  for (std::int64_t e = 0; e < E; ++e) start += std::exchange(counts[e], start);
  if (a.offsets.present()) {
    auto* offsets = a.offsets.as<std::int64_t>();
    std::copy_n(counts, E, offsets);
    offsets[E] = start;
  }
  for (std::int64_t i = 0; i < slots; ++i) row[i] = experts[i] < 0 ? kDropped : counts[experts[i]]++;
  for (std::int64_t e = E - 1; e > 0; --e) counts[e] -= counts[e - 1];  // each is the end of its rows by now
}

void cpu::spread_rows(Context&, const SpreadRows& a) {
  const auto tokens = a.x.shape[0], K = a.slot_row.shape[1];
  check_rows(a.slot_row, a.rows.shape[0], kDropped);
  const auto* slot_row = a.slot_row.as<std::int64_t>();
#pragma omp parallel for schedule(static) if (a.rows.count() > kWorthThreads)
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t k = 0; k < K; ++k)
      if (slot_row[t * K + k] >= 0) copy_row(a.rows, slot_row[t * K + k], a.x, t);
}

void cpu::collect_rows(Context&, const CollectRows& a) {
  check_rows(a.slot_row, a.rows.shape[0], kDropped);
  with_storage(a.rows.dtype, [&](auto type) { collect<decltype(type)>(a); });
}

void cpu::collect_rows(Context&, const CollectRowsBackward& a) {
  check_rows(a.slot_row, a.drows.shape[0], kDropped);
  with_storage(a.drows.dtype, [&](auto type) { collect_backward<decltype(type)>(a); });
}

void cpu::weight_gradients(Context&, const WeightGradients& a) {
  check_rows(a.slot_row, a.dots.shape[0], kDropped);
  a.dots.dtype == DType::f64 ? divide_dots<double>(a) : divide_dots<float>(a);
}

void cpu::place_runs(Context&, const PlaceRuns& a) {
  const auto *begins = a.begins.as<std::int64_t>(), *places = a.places.as<std::int64_t>();
  const std::int64_t runs = a.places.count(), R = a.to.count();
  check(begins[0] == 0 && begins[runs] == R, "place_runs: runs do not cover the rows", {{"last", begins[runs]}, {"R", R}});
  auto* to = a.to.as<std::int64_t>();
  for (std::int64_t n = 0; n < runs; ++n) {
    check(begins[n] <= begins[n + 1], "place_runs: begins do not ascend", {{"run", n}});
    std::iota(to + begins[n], to + begins[n + 1], places[n]);
  }
}

void cpu::move_rows(Context&, const MoveRows& a) {
  const auto R = a.x.shape[0];
  check_rows(a.to, R, 0);
  const auto* to = a.to.as<std::int64_t>();
#pragma omp parallel for schedule(static) if (a.x.count() > kWorthThreads)
  for (std::int64_t r = 0; r < R; ++r) copy_row(a.y, a.gather ? r : to[r], a.x, a.gather ? to[r] : r);
}

}  // namespace moetrain::ops
