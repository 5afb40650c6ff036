// expert_capacity.cpp -- rounds of offers; the last offer that an expert takes is found byte by byte of its key, from the top.
#include "parallel/expert_capacity.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "memory/stream.h"

namespace moetrain::parallel {
namespace {

using Counts = std::vector<std::int64_t>;

class Places {
 public:
  Places(ops::Context& ctx, Communicator& control, const LimitExperts& a)
      : ctx_(ctx), control_(control), a_(a), E_(a.logits.shape[1]), offers_(std::size_t(E_)) {
    const auto numbers = [&](Shape shape) { return ctx_.scratch.take(DType::i64, shape); };
    scores_ = ctx_.scratch.take(a_.logits.dtype, a_.experts.shape);
    counts_ = numbers({E_});
    row_of_ = numbers({E_});
    last_ = numbers({E_});
    ties_ = numbers({E_});
    histogram_ = numbers({E_, ops::kKeyBins});
  }

  // Offers to each expert, of all ranks. room: empty for the first.
  const Counts& offer(const Counts& room) {
    const Tensor there = room.empty() ? Tensor{} : row_of_;  // free between rounds
    if (there.present()) put(there, room);
    ops::offer_slots(ctx_, ops::OfferSlots{.logits = a_.logits,
                                           .bias = a_.bias,
                                           .rule = a_.rule,
                                           .chosen = a_.chosen,
                                           .room = there,
                                           .experts = a_.experts,
                                           .scores = scores_,
                                           .counts = counts_});
    get(offers_, counts_);
    sum(offers_);
    return offers_;
  }

  // The experts take as many offers as they have room, the best. On Device::dry, which counts scratch, all have to choose.
  void take(const Counts& room) {
    Counts row_of(std::size_t(E_), -1), wanted;
    for (std::size_t e = 0; e < row_of.size(); ++e)
      if (offers_[e] > room[e] || ctx_.dry()) {
        row_of[e] = std::int64_t(wanted.size());
        wanted.push_back(room[e]);
      }
    if (wanted.empty()) return;
    put(row_of_, row_of);
    const auto n = std::int64_t(wanted.size());
    const Tensor last = last_.rows(0, n), ties = ties_.rows(0, n);
    put(ties, ties_taken(last, wanted));
    ops::take_offers(
        ctx_, ops::TakeOffers{
                  .chosen = a_.chosen, .scores = scores_, .row_of = row_of_, .last = last, .ties = ties, .experts = a_.experts});
  }

 private:
  // Writes the key of the last of the `wanted` best offers of each row; returns how many offers of that very key are taken here.
  Counts ties_taken(Tensor last, Counts wanted) {
    const std::size_t n = wanted.size();
    const Tensor histogram = histogram_.rows(0, std::int64_t(n));
    Counts key(n, 0), equal(n, 0), equal_here(n, 0);
    put(last, key);
    for (std::int64_t known = 0; known < ops::kKeyBytes; ++known) {
      ops::offer_histogram(ctx_, ops::OfferHistogram{.experts = a_.experts,
                                                     .scores = scores_,
                                                     .row_of = row_of_,
                                                     .leading = last,
                                                     .known = known,
                                                     .histogram = histogram});
      Counts here(n * ops::kKeyBins);
      get(here, histogram);
      Counts all = here;
      sum(all);
      for (std::size_t i = 0; i < n; ++i) {
        std::size_t bin = (i + 1) * ops::kKeyBins - 1;  // from the best down; there are more offers than wanted
        for (; wanted[i] > all[bin]; --bin) wanted[i] -= all[bin];
        key[i] = key[i] * ops::kKeyBins + std::int64_t(bin % ops::kKeyBins);
        equal[i] = all[bin];
        equal_here[i] = here[bin];
      }
      put(last, key);
    }
    if (wanted == equal) return equal_here;
    // Earlier ranks have the earlier tokens.
    Counts of_ranks(n * std::size_t(control_.size()));
    const Communicator::Gather piece{equal_here.data(), of_ranks.data(), std::int64_t(n * sizeof(std::int64_t))};
    control_.all_gather({&piece, 1});
    for (std::size_t i = 0; i < n; ++i) {
      for (int r = 0; r < control_.rank(); ++r) wanted[i] -= of_ranks[std::size_t(r) * n + i];
      equal_here[i] = std::clamp<std::int64_t>(wanted[i], 0, equal_here[i]);
    }
    return equal_here;
  }

  void put(Tensor there, const Counts& here) const {
    if (!ctx_.dry()) copy_to_device(ctx_.device(), there.data, here.data(), there.bytes());
  }
  // A copy waits for the device, and would wait for ever for a peer that is gone.
  void get(Counts& here, ConstTensor there) const {
    if constexpr (kHasCuda)
      if (ctx_.device() == Device::cuda) {
        cuda::Event written;
        written.record(ctx_.stream);
        (a_.data ? *a_.data : control_).wait_until([&] { return written.reached(); });
      }
    if (!ctx_.dry()) copy_to_host(ctx_.device(), here.data(), there.data, there.bytes());
  }
  void sum(Counts& counts) const {
    control_.all_reduce(Tensor(counts.data(), DType::i64, {std::int64_t(counts.size())}), Reduction::sum);
  }

  ops::Context& ctx_;
  Communicator& control_;
  const LimitExperts& a_;
  std::int64_t E_;
  Tensor scores_, counts_, row_of_, last_, ties_, histogram_;
  Counts offers_;
};

}  // namespace

std::int64_t expert_places(double factor, std::int64_t slots, std::int64_t experts) {
  const double places = std::min(factor * double(slots) / double(experts), double(slots));
  const double whole = std::nearbyint(places);
  return std::int64_t(std::abs(places - whole) <= 1e-12 * whole ? whole : std::ceil(places));
}

Limited limit_experts(ops::Context& ctx, Communicator& control, const LimitExperts& a) {
  Scope scope(ctx.scratch);
  Places places(ctx, control, a);
  Counts offers = places.offer({});
  const std::int64_t slots = std::accumulate(offers.begin(), offers.end(), std::int64_t(0));
  Counts room(offers.size(), expert_places(a.factor, slots, std::int64_t(offers.size())));
  Limited limited{.dropped = slots};
  for (bool first = true;; first = false) {
    places.take(room);
    for (std::size_t e = 0; e < room.size(); ++e) {
      const std::int64_t taken = std::min(offers[e], room[e]);
      room[e] -= taken;
      limited.dropped -= taken;
      if (!first) limited.rerouted += taken;
    }
    if (!a.reroute || limited.dropped == 0) return limited;
    offers = places.offer(room);
    if (std::all_of(offers.begin(), offers.end(), [](std::int64_t n) { return n == 0; })) return limited;
  }
}

}  // namespace moetrain::parallel
