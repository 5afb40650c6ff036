// capacity.h -- experts with a limited number of places: what one rank works out of who gets them (parallel/expert_capacity.h).
//
// A slot offers itself to an expert e, with the biased score c[t,e] by which ops/router.h chooses. An expert takes its best offers:
// the higher score first, of equals the earlier token. What is not taken is a dropped slot, which may offer itself again. Scores
// are compared in steps: tokens of one history, as the first ones of documents, have one score, and its rounding, which is another
// for every cut of the tokens, must not choose between them.
//
//   offer_slots      no room given: experts = chosen, and every slot offers itself to its expert
//                    room given:    every dropped slot offers itself to the best expert that the router could choose for its
//                                   token, that has room and that no slot of the token holds (k ascending); others offer nothing
//                    scores[t,k] = c of the offer, NaN without one; counts[e] = offers to e
//   offer_histogram  of the offers whose key begins with leading[row_of[e]]: histogram[row_of[e], next byte of the key] = how many.
//                    row_of[e] = -1: not counted
//   take_offers      an offer to e is taken when row_of[e] = -1, or its key is above last[row_of[e]], or equal and one of the first
//                    ties[row_of[e]] such offers here, in the order of tokens; else experts[t,k] = ~chosen[t,k], a dropped slot
//
//   key(c) = floor(c / kScoreStep + 1/2) + 2^31, inside four bytes
//
// A score is computed as ops/router does. Nothing aliases. Integers but for scores: bitwise repeatable for any number of threads.
// On CUDA as in ops/router: f32 and at most 1024 experts, whose numbers are not checked.
#pragma once
#include "ops/router.h"

namespace moetrain::ops {

inline constexpr double kScoreStep = 1.0 / 65536;
inline constexpr std::int64_t kKeyBytes = 4, kKeyBins = 256;

// The checks that the structs below share.
inline void check_offers(ConstTensor experts, ConstTensor scores, At why) {
  check(experts.shape.rank() == 2 && experts.dtype == DType::i32 && scores.shape == experts.shape &&
            (scores.dtype == DType::f32 || scores.dtype == DType::f64),
        why, {{"T", experts.shape[0]}, {"K", experts.shape[1]}, {"scores", scores.count()}, {"dtype", int(scores.dtype)}});
}
inline void check_per_row(ConstTensor t, std::int64_t rows, At why) {
  check(t.shape == Shape{rows} && t.dtype == DType::i64, why, {{"rows", rows}, {"values", t.count()}, {"dtype", int(t.dtype)}});
}

struct OfferSlots {
  ConstTensor logits;  // (T, E) real
  ConstTensor bias;    // (E) real
  RouterRule rule;
  ConstTensor chosen;  // (T, K) i32, the router's choice
  ConstTensor room;    // (E) i64, places left; absent: the first offers
  Tensor experts;      // (T, K) i32, written at first, then what take_offers left of it
  Tensor scores;       // (T, K) real, written
  Tensor counts;       // (E) i64, written
  Work work(const Context&) const { return {.bytes = bytes_of(logits, chosen, experts, scores)}; }
  void check_shapes() const {
    const auto T = logits.shape[0], E = logits.shape[1];
    check(logits.shape.rank() == 2 && E >= 1 && bias.shape == Shape{E} && bias.dtype == logits.dtype,
          "offer_slots: logits and bias are not (T, E) and (E) of one type", {{"T", T}, {"E", E}, {"bias", bias.count()}});
    rule.check_fits(E, experts.shape[1]);
    check_offers(experts, scores, "offer_slots: experts and scores are not (T, K) i32 and real");
    check(experts.shape[0] == T && scores.dtype == logits.dtype && chosen.shape == experts.shape && chosen.dtype == DType::i32,
          "offer_slots: chosen is not (T, K) i32 of the experts",
          {{"T", T}, {"chosen", chosen.count()}, {"experts", experts.count()}});
    check(!room.present() || (room.shape == Shape{E} && room.dtype == DType::i64), "offer_slots: room is not (E) i64",
          {{"E", E}, {"room", room.count()}});
    check(counts.shape == Shape{E} && counts.dtype == DType::i64, "offer_slots: counts are not (E) i64",
          {{"E", E}, {"counts", counts.count()}});
  }
};

struct OfferHistogram {
  ConstTensor experts;  // (T, K) i32
  ConstTensor scores;   // (T, K) real
  ConstTensor row_of;   // (E) i64, below n
  ConstTensor leading;  // (n) i64, the first `known` bytes of a key
  std::int64_t known = 0;
  Tensor histogram;  // (n, 256) i64, written
  Work work(const Context&) const { return {.bytes = bytes_of(experts, scores, histogram)}; }
  void check_shapes() const {
    check_offers(experts, scores, "offer_histogram: experts and scores are not (T, K) i32 and real");
    check_per_row(row_of, row_of.count(), "offer_histogram: row_of is not (E) i64");
    check_per_row(leading, histogram.shape[0], "offer_histogram: leading is not (n) i64 of the histogram");
    check(histogram.shape == Shape{leading.count(), kKeyBins} && histogram.dtype == DType::i64 && known >= 0 && known < kKeyBytes,
          "offer_histogram: histogram is not (n, 256) i64, or a key has no further byte",
          {{"bins", histogram.shape[1]}, {"dtype", int(histogram.dtype)}, {"known", known}});
  }
};

struct TakeOffers {
  ConstTensor chosen;  // (T, K) i32
  ConstTensor scores;  // (T, K) real
  ConstTensor row_of;  // (E) i64, below n
  ConstTensor last;    // (n) i64, a key
  ConstTensor ties;    // (n) i64
  Tensor experts;      // (T, K) i32; of the offers that are not taken: written
  struct Scratch {
    Tensor tied;     // (T, K) i32, the row of an offer whose key is the last, else -1
    Tensor place;    // (T, K) i64, of that offer among those of its row,
    Tensor counts;   // (n) i64, which are so many
    Tensor offsets;  // (n+1) i64, and begin there
  };
  Scratch take_scratch(Context& ctx) const {  // of the CUDA backend
    if (ctx.dry() && ctx.plans_for == Device::cpu) return {};
    const std::int64_t n = last.count();
    return {ctx.scratch.take(DType::i32, experts.shape), ctx.scratch.take(DType::i64, experts.shape),
            ctx.scratch.take(DType::i64, {n}), ctx.scratch.take(DType::i64, {n + 1})};
  }
  Work work(const Context&) const { return {.bytes = bytes_of(chosen, scores, experts)}; }
  void check_shapes() const {
    check_offers(experts, scores, "take_offers: experts and scores are not (T, K) i32 and real");
    check(chosen.shape == experts.shape && chosen.dtype == DType::i32, "take_offers: chosen is not (T, K) i32 of the experts",
          {{"chosen", chosen.count()}, {"experts", experts.count()}});
    check_per_row(row_of, row_of.count(), "take_offers: row_of is not (E) i64");
    check_per_row(last, last.count(), "take_offers: last is not (n) i64");
    check_per_row(ties, last.count(), "take_offers: ties are not (n) i64 of last");
  }
};

namespace cpu {
void offer_slots(Context&, const OfferSlots&);
void offer_histogram(Context&, const OfferHistogram&);
void take_offers(Context&, const TakeOffers&);
}  // namespace cpu
namespace cuda {
void offer_slots(Context&, const OfferSlots&);
void offer_histogram(Context&, const OfferHistogram&);
void take_offers(Context&, const TakeOffers&);
}  // namespace cuda

inline void offer_slots(Context& ctx, const OfferSlots& a) {
  dispatch(
      ctx, "offer_slots forward", a, [&] { cpu::offer_slots(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::offer_slots(ctx, a);
      });
}
inline void offer_histogram(Context& ctx, const OfferHistogram& a) {
  dispatch(
      ctx, "offer_histogram forward", a, [&] { cpu::offer_histogram(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::offer_histogram(ctx, a);
      });
}
inline void take_offers(Context& ctx, const TakeOffers& a) {
  dispatch(
      ctx, "take_offers forward", a, [&] { cpu::take_offers(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::take_offers(ctx, a);
      });
}

}  // namespace moetrain::ops
