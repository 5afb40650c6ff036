// capacity.cpp -- offers of slots to experts with few places, how many have each key, and which are taken.
#include "ops/capacity.h"

#include <algorithm>
#include <cmath>

#include "app/verify/routing.h"
#include "app/verify/verify.h"
#include "parallel/expert_capacity.h"

namespace moetrain::app {
namespace {

Tensor as_f64(OpCase& c, ConstTensor t) {  // whole numbers
  std::vector<double> values(std::size_t(t.count()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = t.dtype == DType::i32 ? double(t.as<std::int32_t>()[i]) : double(t.as<std::int64_t>()[i]);
  return c.host_of(values, t.shape);
}

// Scores, with -1 for those who offer nothing.
Tensor offered(OpCase& c, ConstTensor scores) {
  const Tensor all = c.host_zeros(scores.shape);
  for (std::int64_t i = 0; i < scores.count(); ++i) {
    const double score = scores.dtype == DType::f64 ? scores.as<double>()[i] : double(scores.as<float>()[i]);
    all.as<double>()[i] = std::isnan(score) ? -1 : score;
  }
  return all;
}

}  // namespace

// Every expert has to choose, so that all offers are counted, and taken by the same scores on both sides.
void verify_capacity(const Verification& v) {
  OpCase c(v);
  const auto& m = c.model();
  const std::int64_t T = c.T(), E = m.num_experts, K = m.num_experts_per_token;
  const std::int64_t places = parallel::expert_places(c.config().moe.capacity_factor, T * K, E);
  const ops::RouterRule rule{m.num_expert_group, m.topk_group, m.moe_renormalize, m.routed_scaling_factor};
  const std::vector<std::int32_t> choice = random_experts(c, T, E, K);
  const Tensor logits = c.normal(c.real(), {T, E}), bias = c.normal(c.real(), {E}, 0.05), chosen = c.put(choice, {T, K}),
               experts = c.empty(DType::i32, {T, K}), scores = c.empty(c.real(), {T, K}), counts = c.empty(DType::i64, {E});
  const std::string shape = sizes({{"T", T}, {"E", E}, {"K", K}});
  const Places rows = c.sample(T, 256);
  const Tensor logits64 = c.wide(logits, rows), bias64 = c.wide(bias);
  const auto offer = [&](Tensor room) {
    return ops::OfferSlots{.logits = logits,
                           .bias = bias,
                           .rule = rule,
                           .chosen = chosen,
                           .room = room,
                           .experts = experts,
                           .scores = scores,
                           .counts = counts};
  };
  const auto offered64 = [&](Tensor room, Tensor of) {  // by some of the tokens
    const auto n = std::int64_t(rows.size());
    const Tensor s = c.host_zeros({n, K}), sums = c.host_tensors().take(DType::i64, {E});
    ops::offer_slots(c.host(), ops::OfferSlots{.logits = logits64,
                                               .bias = bias64,
                                               .rule = rule,
                                               .chosen = c.fetch(chosen, rows),
                                               .room = room,
                                               .experts = of,
                                               .scores = s,
                                               .counts = sums});
    return offered(c, s);
  };
  std::vector<std::int64_t> wanted(std::size_t(E), 0), row_of(std::size_t(E), 0);
  for (const std::int32_t e : choice) ++wanted[std::size_t(e)];
  for (std::size_t e = 0; e < row_of.size(); ++e) row_of[e] = std::int64_t(e);

  c.run("offer_slots", shape, [&](ops::Context& ctx) { ops::offer_slots(ctx, offer({})); });
  c.compare("experts", experts, as_f64(c, c.host_of(choice, {T, K})), OpCase::exact());
  c.compare("counts", counts, as_f64(c, c.host_of(wanted, {E})), OpCase::exact());
  c.compare("scores", scores, rows, offered64({}, c.host_tensors().take(DType::i32, {std::int64_t(rows.size()), K})), {1e-5, 1e-6});
  c.tell();

  const Tensor scores_here = c.fetch(scores), all = offered(c, scores_here), experts_here = c.host_of(choice, {T, K});
  std::vector<std::vector<std::int64_t>> keys(static_cast<std::size_t>(E));
  for (std::size_t i = 0; i < choice.size(); ++i)
    keys[std::size_t(choice[i])].push_back(std::int64_t(std::floor(all.as<double>()[i] / ops::kScoreStep + 0.5)) + (1LL << 31));
  std::vector<std::int64_t> last(std::size_t(E), 0), ties(std::size_t(E), 0), room(std::size_t(E), 0), leading(std::size_t(E), 0);
  for (std::size_t e = 0; e < keys.size(); ++e) {
    std::sort(keys[e].begin(), keys[e].end(), std::greater<>());
    const std::int64_t taken = std::min(places, wanted[e]);
    room[e] = places - taken;
    if (taken == 0) continue;
    last[e] = keys[e][std::size_t(taken) - 1];
    ties[e] = taken - (std::find(keys[e].begin(), keys[e].end(), last[e]) - keys[e].begin());
    leading[e] = last[e] >> 8;
  }
  const Tensor row_of_there = c.put(row_of, {E}), row_of_here = c.host_of(row_of, {E}),
               histogram = c.empty(DType::i64, {E, ops::kKeyBins}),
               histogram_want = c.host_tensors().take(DType::i64, {E, ops::kKeyBins});
  const auto count = [&](ops::Context& ctx, Tensor of, Tensor by, Tensor rows_of, Tensor begin, Tensor to) {
    ops::offer_histogram(ctx, ops::OfferHistogram{.experts = of,
                                                  .scores = by,
                                                  .row_of = rows_of,
                                                  .leading = begin,
                                                  .known = ops::kKeyBytes - 1,
                                                  .histogram = to});
  };
  const Tensor leading_there = c.put(leading, {E});
  c.run("offer_histogram", shape, [&](ops::Context& ctx) { count(ctx, experts, scores, row_of_there, leading_there, histogram); });
  count(c.host(), experts_here, scores_here, row_of_here, c.host_of(leading, {E}), histogram_want);
  c.compare("histogram", histogram, as_f64(c, histogram_want), OpCase::exact());
  c.tell();

  const Tensor last_there = c.put(last, {E}), ties_there = c.put(ties, {E});
  c.run(
      "take_offers", shape, [&] { copy_to_device(v.device, experts.data, choice.data(), experts.bytes()); },
      [&](ops::Context& ctx) {
        ops::take_offers(ctx, ops::TakeOffers{.chosen = chosen,
                                              .scores = scores,
                                              .row_of = row_of_there,
                                              .last = last_there,
                                              .ties = ties_there,
                                              .experts = experts});
      });
  ops::take_offers(c.host(), ops::TakeOffers{.chosen = c.host_of(choice, {T, K}),
                                             .scores = scores_here,
                                             .row_of = row_of_here,
                                             .last = c.host_of(last, {E}),
                                             .ties = c.host_of(ties, {E}),
                                             .experts = experts_here});
  c.compare("experts", experts, as_f64(c, experts_here), OpCase::exact());
  c.tell();

  const Tensor room_there = c.put(room, {E});
  c.run(
      "offer_slots, of dropped ones", shape, [&] { copy_to_device(v.device, experts.data, experts_here.data, experts.bytes()); },
      [&](ops::Context& ctx) { ops::offer_slots(ctx, offer(room_there)); });
  std::vector<std::int32_t> left;
  for (const std::int64_t t : rows)
    left.insert(left.end(), experts_here.as<std::int32_t>() + t * K, experts_here.as<std::int32_t>() + (t + 1) * K);
  c.judge("offered scores", offered(c, c.fetch(scores, rows)),
          offered64(c.host_of(room, {E}), c.host_of(left, {std::int64_t(rows.size()), K})), {1e-5, 1e-6});
  c.tell();
}

}  // namespace moetrain::app
