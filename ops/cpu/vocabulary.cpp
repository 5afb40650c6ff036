// vocabulary.cpp -- one value a token.
#include "ops/vocabulary.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

template <class R>
void merge(const MergeSums& a) {
  const std::int64_t ranks = a.parts.shape[0], s = a.parts.shape[2];
  const R* parts = a.parts.as<R>();
  R* all = a.all.as<R>();
  for (std::int64_t t = 0; t < s; ++t) {
    const auto of = [&](std::int64_t r, std::int64_t what) { return double(parts[(r * 3 + what) * s + t]); };
    double top = of(0, 0), sum = 0, label = 0;
    for (std::int64_t r = 1; r < ranks; ++r) top = std::max(top, of(r, 0));
    for (std::int64_t r = 0; r < ranks; ++r) {
      sum += of(r, 1) * std::exp(of(r, 0) - top);
      label += of(r, 2);
    }
    all[t] = R(top);
    all[s + t] = R(sum);
    all[2 * s + t] = R(label);
  }
}

}  // namespace

void cpu::local_ids(Context&, const LocalIds& a) {
  const auto* id = a.ids.as<std::int32_t>();
  auto* y = a.y.as<std::int32_t>();
  for (std::int64_t t = 0; t < a.ids.count(); ++t) {
    check((0 <= id[t] && id[t] < a.words) || id[t] == kIgnored, "local_ids: an id is outside the vocabulary",
          {{"t", t}, {"id", id[t]}, {"V", a.words}});
    const std::int64_t here = id[t] - a.first;
    y[t] = id[t] == kIgnored ? kIgnored : 0 <= here && here < a.count ? std::int32_t(here) : kElsewhere;
  }
}

void cpu::merge_sums(Context&, const MergeSums& a) { a.parts.dtype == DType::f64 ? merge<double>(a) : merge<float>(a); }

}  // namespace moetrain::ops
