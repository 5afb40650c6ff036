// attention.cpp -- dense causal attention of heads [128 nope | 64 extra], alone and of packed documents.
#include "ops/attention.h"

#include <cmath>

#include "app/bench/bench.h"

namespace moetrain::app {
namespace {

void bench_case(const Ceilings& ceilings, const Report& report, std::int64_t N, std::int64_t Hn, std::int64_t He, std::int64_t Hv,
                std::vector<std::int64_t> starts) {
  BenchCase b(ceilings);
  const std::int64_t T = starts.back();
  const Tensor q = b.normal(DType::bf16, {T, N, Hn + He}), kv = b.normal(DType::bf16, {T, N, Hn + Hv}),
               k_extra = b.normal(DType::bf16, {T, He}), dout = b.normal(DType::bf16, {T, N, Hv}),
               o = b.empty(DType::bf16, {T, N, Hv}), lse = b.empty(DType::f32, {T, N}), dq = b.empty(DType::bf16, q.shape),
               dkv = b.empty(DType::bf16, kv.shape), dk_extra = b.empty(DType::bf16, k_extra.shape);
  double pairs = 0;  // of a query and a key that it sees
  for (std::size_t n = 0; n + 1 < starts.size(); ++n)
    pairs += double(starts[n + 1] - starts[n]) * double(starts[n + 1] - starts[n] + 1) / 2;
  const std::string shape = "T" + std::to_string(T) + " N" + std::to_string(N) + " " + std::to_string(Hn) + "+" +
                            std::to_string(He) + "/" + std::to_string(Hv) +
                            (starts.size() > 2 ? ", " + std::to_string(starts.size() - 1) + " documents" : "");
  const auto documents = b.documents(std::move(starts));
  const double scale = 1 / std::sqrt(double(Hn + He));
  const auto forward = [&] {
    ops::attention(
        b.context(),
        ops::AttentionForward{.q = q, .kv = kv, .k_extra = k_extra, .scale = scale, .documents = documents, .o = o, .lse = lse});
  };
  const auto backward = [&] {
    ops::attention(b.context(), ops::AttentionBackward{.do_ = dout,
                                                       .q = q,
                                                       .kv = kv,
                                                       .k_extra = k_extra,
                                                       .o = o,
                                                       .lse = lse,
                                                       .scale = scale,
                                                       .documents = documents,
                                                       .dq = dq,
                                                       .dkv = dkv,
                                                       .dk_extra = dk_extra});
  };
  const double keys = double(Hn + He), values = double(Hv), per_width = 2 * pairs * double(N);
  const double bytes = double(q.bytes() + kv.bytes() + k_extra.bytes() + o.bytes() + lse.bytes());
  report(b.time("attention forward", shape, per_width * (keys + values), bytes, forward));
  report(b.time("attention forward + backward", shape, per_width * (4 * keys + 3 * values), 3 * bytes, [&] {
    forward();
    backward();
  }));
}

}  // namespace

void bench_attention(const Ceilings& ceilings, const Report& report) {
  bench_case(ceilings, report, 32, 128, 64, 128, {0, 8192});
  bench_case(ceilings, report, 32, 128, 64, 128, {0, 700, 1000, 2048, 4500, 4600, 8192});
  bench_case(ceilings, report, 16, 64, 32, 64, {0, 8192});
}

}  // namespace moetrain::app
