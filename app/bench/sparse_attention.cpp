// sparse_attention.cpp -- the 2048 selected positions of the model's sparse attention: 64 heads over a latent of 512 and 64 more.
#include "ops/sparse_attention.h"

#include <cmath>
#include <numeric>

#include "app/bench/bench.h"
#include "ops/cuda/key_tiles.h"
#include "ops/random.h"

namespace moetrain::app {
namespace {

// K causal positions a row, each as likely: a row's positions are s, s + g, s + 2 g, ... modulo its length, for a random start and
// a random step g without a divisor in common with it; all where there are at most K, then -1.
std::vector<std::int32_t> random_positions(std::int64_t T, std::int64_t K) {
  std::vector<std::int32_t> indices(std::size_t(T * K), -1);
  for (std::int64_t t = 0; t < T; ++t) {
    const std::int64_t n = t + 1;
    auto step = std::int64_t(ops::uniform(11, 0, std::uint64_t(t)) * double(n)),
         at = std::int64_t(ops::uniform(11, 1, std::uint64_t(t)) * double(n));
    while (step < 1 || std::gcd(step, n) != 1) ++step;
    for (std::int64_t k = 0; k < std::min(K, n); ++k, at = (at + step) % n) indices[std::size_t(t * K + k)] = std::int32_t(at);
  }
  return indices;
}

}  // namespace

void bench_sparse_attention(const Ceilings& ceilings, const Report& report) {
  for (const std::int64_t N : {64, 16}) {
    const std::int64_t T = 8192, C = 512, He = 64, Hq = 192, K = 2048;
    BenchCase b(ceilings);
    const auto bf16 = DType::bf16, f32 = DType::f32;
    const Tensor q_latent = b.normal(bf16, {T, N, C}), q = b.normal(bf16, {T, N, Hq}), latent = b.normal(bf16, {T, C}),
                 k_extra = b.normal(bf16, {T, He}), dout = b.normal(bf16, {T, N, C});
    const Tensor o = b.empty(bf16, {T, N, C}), lse = b.empty(f32, {T, N}), probability = b.empty(f32, {T, K});
    const Tensor dq_latent = b.empty(bf16, {T, N, C}), dq = b.empty(bf16, q.shape), dlatent = b.empty(bf16, {T, C}),
                 dk_extra = b.empty(bf16, {T, He}), indices = b.of(random_positions(T, K), {T, K});
    const double scale = 1 / std::sqrt(192.0), pairs = double(N) * (double(T) * double(K) - double(K) * double(K - 1) / 2);
    const double products = 2 * pairs * double(C + He + C);
    const double bytes = 2 * double(N * T) * double(C + He + C) + 2 * double(T) * double(C + He) + 4 * double(T * K);
    const auto forward = [&](Tensor wanted) {
      ops::sparse_attention(b.context(), ops::SparseAttentionForward{.q_latent = q_latent,
                                                                     .q = q,
                                                                     .latent = latent,
                                                                     .k_extra = k_extra,
                                                                     .indices = indices,
                                                                     .scale = scale,
                                                                     .o_latent = o,
                                                                     .lse = lse,
                                                                     .probability = wanted});
    };
    const auto backward = [&] {
      ops::sparse_attention(b.context(), ops::SparseAttentionBackward{.do_latent = dout,
                                                                      .q_latent = q_latent,
                                                                      .q = q,
                                                                      .latent = latent,
                                                                      .k_extra = k_extra,
                                                                      .indices = indices,
                                                                      .o_latent = o,
                                                                      .lse = lse,
                                                                      .scale = scale,
                                                                      .dq_latent = dq_latent,
                                                                      .dq = dq,
                                                                      .dlatent = dlatent,
                                                                      .dk_extra = dk_extra});
    };
    const std::string shape = "T8192 top-2048 512+64 N" + std::to_string(N);
    report(b.time("sparse_attention forward", shape, products, bytes, [&] { forward({}); }));
    report(b.time("sparse_attention forward with probability", shape, products, bytes + 4 * double(T * K),
                  [&] { forward(probability); }));
    report(b.time("sparse_attention forward + backward", shape, products * (1 + 2.53), 4 * bytes, [&] {
      forward({});
      backward();
    }));
    if (N != 64) continue;
    {  // the parts of backward for the last rows of queries: their lists, and the sums over keys
      const std::int64_t rows = 528, first = T - rows, parts = ops::cuda::key_parts(T, 9);
      const Tensor pair_products = b.normal(bf16, {rows, K, 128}), sums = b.zeros(f32, {parts, T, C + He});
      const ops::cuda::KeyLists lists{.listed = b.empty(DType::i32, {rows, K}).as<std::int32_t>(),
                                      .counts = b.empty(DType::i32, {rows}).as<std::int32_t>(),
                                      .sets = b.empty(DType::i32, {rows, ops::cuda::key_words(T)}).as<std::int32_t>(),
                                      .starts = b.empty(DType::i32, {rows, ops::cuda::key_words(T) + 1}).as<std::int32_t>(),
                                      .rows = rows,
                                      .K = K,
                                      .keys = T};
      const auto list = [&] { ops::cuda::list_keys(b.context(), indices.rows(first, T).as<std::int32_t>(), lists); };
      report(b.time("sparse_attention lists of keys", "528 rows, " + shape, 0, 8 * double(rows * K), list));
      report(b.time("sparse_attention sums over keys", "528 rows, " + shape, 2 * double(rows * K * N) * double(2 * C + He),
                    2 * double(pair_products.count()), [&] {
                      ops::cuda::sum_key_tiles(b.context(), ops::cuda::KeyTiles{.lists = lists,
                                                                                .pairs = pair_products,
                                                                                .value0 = q_latent.rows(first, T),
                                                                                .value1 = dout.rows(first, T),
                                                                                .value2 = q.rows(first, T),
                                                                                .both = 8,
                                                                                .first = Hq - He,
                                                                                .panels = 9,
                                                                                .reach = T,
                                                                                .sums = sums.as<float>()});
                    }));
    }
  }
}

}  // namespace moetrain::app
