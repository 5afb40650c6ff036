// expert_exchange.cpp -- counts first, then rows: each rank learns what it gets, and sorts it by expert after arrival.
#include "parallel/expert_exchange.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "memory/range.h"
#include "ops/permute.h"

namespace moetrain::parallel {
namespace {

std::int64_t bytes_of_row(ConstTensor rows) { return rows.shape[1] * size_of(rows.dtype); }

void check_rows(const ExchangePlan& plan, ConstTensor here, ConstTensor there) {
  check(here.shape.rank() == 2 && here.shape == Shape{plan.sent, here.shape[1]}, "expert exchange: rows are not (sent, D)",
        {{"sent", plan.sent}, {"rows", here.shape[0]}});
  check(there.shape == here.shape.with_dim0(plan.received) && there.dtype == here.dtype,
        "expert exchange: room for rows on their way is not (received, D) of the rows' type",
        {{"received", plan.received}, {"rows", there.shape[0]}});
}

// `rows` by the ranks that own their experts (Piece: Outgoing on the way out, Incoming on the way back).
template <class Piece, class AnyTensor>
std::vector<Piece> by_owner(const ExchangePart& part, AnyTensor rows) {
  std::vector<Piece> pieces;
  for (const auto& run : part.send) pieces.push_back({rows.rows(run.first, run.first + run.count).data, run.count * bytes_of_row(rows)});
  return pieces;
}
// The part's rows among `travelling`, in the order of arrival, by the ranks they came from.
template <class Piece, class AnyTensor>
std::vector<Piece> by_source(const ExchangePart& part, AnyTensor travelling) {
  std::vector<Piece> pieces;
  std::int64_t row = part.first_row;
  for (const auto count : part.receive_rows) {
    pieces.push_back({travelling.rows(row, row + count).data, count * bytes_of_row(travelling)});
    row += count;
  }
  return pieces;
}

}  // namespace

ExpertExchange::ExpertExchange(Communicator& group, Communicator& control, std::int64_t experts, std::int64_t parts)
    : group_(group), control_(control), experts_(experts), parts_(parts) {
  check(experts >= 1 && experts % group_.size() == 0, "expert exchange: ranks do not divide experts",
        {{"experts", experts}, {"ranks", group_.size()}});
  check(parts >= 1, "expert exchange: less than one part", {{"parts", parts}});
}

void ExpertExchange::fetch(const ops::Context& ctx, ConstTensor counts) {
  if constexpr (kHasCuda)
    if (ctx.device() == Device::cuda) {
      // What is pushed for a plan: begins and places of each run, and bounds of the experts in parts.
      if (!link_) link_ = std::make_shared<cuda::Link>((3 * experts_ + 2 * here()) * std::int64_t(sizeof(std::int64_t)));
      return link_->fetch(counts.data, counts.bytes());
    }
  on_host_.assign(counts.as<std::int64_t>(), counts.as<std::int64_t>() + counts.count());
}

std::span<const std::int64_t> ExpertExchange::fetched(Communicator& everyone) {
  if constexpr (kHasCuda)
    if (link_) {
      (group_.size() > 1 ? group_ : everyone).wait_until([&] { return link_->arrived(); });
      return {static_cast<const std::int64_t*>(link_->fetched()), std::size_t(experts_)};
    }
  return on_host_;
}

ExchangePlan ExpertExchange::plan(ops::Context& ctx, Stack& kept, std::span<const std::int64_t> counts, std::int64_t dry_rows) {
  check(std::int64_t(counts.size()) == experts_, "expert exchange: not one count an expert",
        {{"experts", experts_}, {"counts", std::int64_t(counts.size())}});
  const auto n = std::size_t(group_.size()), local = std::size_t(here());
  std::vector<std::int64_t> arriving(counts.begin(), counts.end());  // (n, E/n) by source, then local expert
  if (n > 1) {
    const std::vector<std::int64_t> sizes(n, std::int64_t(local * sizeof(std::int64_t)));
    control_.all_to_all(counts.data(), sizes, arriving.data(), sizes);
    if (ctx.dry()) {  // nothing came
      const std::size_t mine = std::size_t(group_.rank()) * local;
      for (std::size_t i = 0; i < arriving.size(); ++i) arriving[i] = counts[mine + i % local];
      if (dry_rows > 0) {  // what is not from here is from all others alike
        const auto own = counts.subspan(mine, local);
        std::int64_t left = std::max<std::int64_t>(dry_rows - std::accumulate(own.begin(), own.end(), std::int64_t(0)), 0);
        auto places = std::int64_t((n - 1) * local);
        for (std::size_t i = 0; i < arriving.size(); ++i)
          if (i / local != std::size_t(group_.rank())) {
            arriving[i] = left / places--;
            left -= arriving[i];
          }
      }
    }
  }
  for (std::size_t i = 0; i < arriving.size(); ++i)
    check(counts[i] >= 0 && arriving[i] >= 0, "expert exchange: negative count",
          {{"here", counts[i]}, {"arriving", arriving[i]}});

  ExchangePlan plan;
  std::vector<std::int64_t> first_of(std::size_t(experts_) + 1, 0);  // row here of each expert
  for (std::size_t e = 0; e < counts.size(); ++e) first_of[e + 1] = first_of[e] + counts[e];
  plan.sent = first_of.back();

  const std::size_t parts = n == 1 ? 1 : std::min(std::size_t(parts_), local);
  std::vector<std::int64_t> begins{0}, places, offsets;  // of all parts: runs in the order of arrival, and where experts begin
  for (std::size_t c = 0; c < parts; ++c) {
    auto& part = plan.parts.emplace_back();
    const std::size_t first = c * local / parts, last = (c + 1) * local / parts;
    part.first_expert = std::int64_t(first);
    part.last_expert = std::int64_t(last);
    part.offsets.assign(last - first + 1, 0);
    part.receive_rows.assign(n, 0);
    for (std::size_t r = 0; r < n; ++r) {
      part.send.push_back({first_of[r * local + first], first_of[r * local + last] - first_of[r * local + first]});
      for (std::size_t j = first; j < last; ++j) {
        part.receive_rows[r] += arriving[r * local + j];
        part.offsets[j - first + 1] += arriving[r * local + j];
      }
    }
    for (std::size_t j = 0; j < last - first; ++j) part.offsets[j + 1] += part.offsets[j];
    part.first_row = plan.received;
    plan.received += part.offsets.back();
    part.last_row = plan.received;
    if (n == 1) return plan;

    std::vector<std::int64_t> next(part.offsets.begin(), part.offsets.end() - 1);
    for (std::size_t r = 0; r < n; ++r)
      for (std::size_t j = first; j < last; ++j) {
        const std::int64_t rows = arriving[r * local + j];
        begins.push_back(begins.back() + rows);
        places.push_back(next[j - first]);
        next[j - first] += rows;
      }
    offsets.insert(offsets.end(), part.offsets.begin(), part.offsets.end());
  }

  std::vector<std::int64_t> table(begins);
  table.insert(table.end(), places.begin(), places.end());
  table.insert(table.end(), offsets.begin(), offsets.end());
  const Tensor tables = kept.take(DType::i64, {std::int64_t(table.size())});
  if constexpr (kHasCuda)
    if (link_) link_->push(tables.data, table.data(), tables.bytes());
  if (!link_) copy_to_device(ctx.device(), tables.data, table.data(), tables.bytes());
  const Tensor to = kept.take(DType::i64, {plan.received});
  std::int64_t place = 0;
  const auto taken = [&](std::size_t count) {
    place += std::int64_t(count);
    return tables.rows(place - std::int64_t(count), place);
  };
  const Tensor begins_there = taken(begins.size()), places_there = taken(places.size());
  ops::place_runs(ctx, ops::PlaceRuns{.begins = begins_there, .places = places_there, .to = to});
  for (auto& part : plan.parts) {
    part.to = part.of(to);
    const Tensor bounds = taken(part.offsets.size());
    if (ctx.device() == Device::cuda) part.device_offsets = bounds;
  }
  return plan;
}

ExchangePlan ExpertExchange::stay(Tensor offsets, std::int64_t rows) {
  ExchangePlan plan;
  plan.sent = plan.received = rows;
  auto& part = plan.parts.emplace_back();
  part.last_expert = offsets.count() - 1;
  part.last_row = rows;
  part.device_offsets = offsets;
  return plan;
}

void ExpertExchange::begin_out(const ExchangePlan& plan, const ExchangePart& part, ConstTensor rows, Tensor arrived) {
  const Range range("rows to their experts");
  check_rows(plan, rows, arrived);
  group_.begin_all_to_all(by_owner<Communicator::Outgoing>(part, rows), by_source<Communicator::Incoming>(part, arrived));
  under_way_.push_back(&part);
}

void ExpertExchange::finish_out(ops::Context& ctx, const ExchangePart& part, ConstTensor arrived, Tensor received) {
  const Range range("rows at their experts");
  for (bool came = false; !came;) {
    check(!under_way_.empty(), "expert exchange: a part is waited for that did not leave");
    came = under_way_.front() == &part;
    end_oldest();
  }
  ops::move_rows(ctx, ops::MoveRows{.x = part.of(arrived), .to = part.to, .gather = false, .y = received});
}

void ExpertExchange::begin_back(ops::Context& ctx, const ExchangePart& part, ConstTensor part_rows, Tensor leaving, Tensor rows) {
  const Range range("rows back");
  ops::move_rows(ctx, ops::MoveRows{.x = part_rows, .to = part.to, .gather = true, .y = part.of(leaving)});
  group_.begin_all_to_all(by_source<Communicator::Outgoing>(part, ConstTensor(leaving)), by_owner<Communicator::Incoming>(part, rows));
  under_way_.push_back(nullptr);
}

void ExpertExchange::finish_back() {
  while (!under_way_.empty()) end_oldest();
}

void ExpertExchange::end_oldest() {
  group_.end();
  under_way_.pop_front();
}

}  // namespace moetrain::parallel
