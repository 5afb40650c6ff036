// sparse_attention.cpp -- attention of some queries over their selected positions, all heads.
#include "ops/sparse_attention.h"

#include <cmath>

#include "app/verify/selection.h"
#include "app/verify/verify.h"

namespace moetrain::app {
namespace {

// The queries that are compared and all their keys lie in the last positions, so that the reference need not hold all of a long
// sequence.
struct Inputs {
  std::int64_t T, N, C, Hn, He;
  Selection selected;
  double scale;
  Tensor q_latent, q, latent, k_extra, indices, o, lse, probability;
  explicit Inputs(OpCase& c)
      : T(c.T()),
        N(c.model().num_attention_heads),
        C(c.model().kv_lora_rank),
        Hn(c.model().qk_nope_head_dim),
        He(c.model().qk_rope_head_dim),
        selected(c, 64),
        scale(1 / std::sqrt(double(Hn + He))),
        q_latent(c.normal(c.storage(), {T, N, C}, std::sqrt(double(Hn) / double(C)))),
        q(c.normal(c.storage(), {T, N, Hn + He})),
        latent(c.normal(c.storage(), {T, C})),
        k_extra(c.normal(c.storage(), {T, He})),
        indices(c.put(selected.indices, {T, selected.K})),
        o(c.empty(c.storage(), {T, N, C})),
        lse(c.empty(c.real(), {T, N})),
        probability(c.empty(c.real(), {T, selected.K})) {}
};

struct Group {  // of heads
  Places heads;
  Tensor q_latent, q, o, lse, probability;
};

// Of q only the last columns of a head are an input.
Places last_columns(const Places& heads, std::int64_t Hq, std::int64_t He) {
  Places columns;
  for (const std::int64_t n : heads)
    for (std::int64_t h = Hq - He; h < Hq; ++h) columns.push_back(n * Hq + h);
  return columns;
}

void add(ConstTensor x, Tensor sum, double share) {
  for (std::int64_t i = 0; i < x.count(); ++i) sum.as<double>()[i] += share * x.as<double>()[i];
}

}  // namespace

void verify_sparse_attention(const Verification& v) {
  OpCase c(v);
  const Inputs in(c);
  const auto [T, N, C, He] = std::tuple(in.T, in.N, in.C, in.He);
  const std::int64_t Hq = in.Hn + He, K = in.selected.K, W = T - in.selected.window;
  const Places& rows = in.selected.rows;
  const std::string shape = sizes({{"T", T}, {"N", N}, {"C", C}, {"He", He}, {"K", K}});
  const bool learns = c.config().loss.indexer_coefficient != 0, narrow = c.storage() == DType::bf16;
  const Bound bound = narrow ? Bound{0.1, 1e-2} : Bound{1e-3, 1e-4};
  const Tensor dout = c.normal(c.storage(), {T, N, C}), dq_latent = c.empty(c.storage(), {T, N, C}),
               dq = c.empty(c.storage(), in.q.shape), dlatent = c.empty(c.storage(), in.latent.shape),
               dk_extra = c.empty(c.storage(), in.k_extra.shape);
  c.keep_rows(dout, rows);  // sums over queries in dlatent and dk_extra are then those of the compared ones

  const Places window = range(in.selected.window, T), queries = in.selected.rows_of_window();
  const Tensor latent64 = c.wide(in.latent, window), k_extra64 = c.wide(in.k_extra, window),
               indices64 = c.host_of(in.selected.of_window(), {W, K}), probability64 = c.host_zeros({std::int64_t(rows.size()), K}),
               dlatent64 = c.host_zeros(latent64.shape), dk_extra64 = c.host_zeros(k_extra64.shape);
  // Of the window, zero but for the queries.
  const auto queries_of = [&](ConstTensor t, const Places& heads) {
    const std::int64_t H = t.shape[2], some = std::int64_t(heads.size());
    const Tensor all = c.host_zeros({W, some, H}), few = c.wide(t, rows, columns_of_heads(heads, H));
    for (std::size_t r = 0; r < rows.size(); ++r)
      std::copy_n(few.as<double>() + std::int64_t(r) * some * H, some * H, all.as<double>() + queries[r] * some * H);
    return all;
  };
  const auto each_group = [&](auto body) {  // of heads, few enough to hold
    const std::int64_t most = std::max<std::int64_t>(1, (std::int64_t(1) << 23) / (W * C));
    for (std::int64_t n = 0; n < N; n += most) {
      Scope scope(c.host_tensors());
      const Places heads = range(n, std::min(n + most, N));
      const auto some = std::int64_t(heads.size());
      const Group g{heads,
                    queries_of(in.q_latent, heads),
                    queries_of(in.q, heads),
                    c.host_zeros({W, some, C}),
                    c.host_zeros({W, some}),
                    learns ? c.host_zeros({W, K}) : Tensor{}};
      ops::sparse_attention(c.host(), ops::SparseAttentionForward{.q_latent = g.q_latent,
                                                                  .q = g.q,
                                                                  .latent = latent64,
                                                                  .k_extra = k_extra64,
                                                                  .indices = indices64,
                                                                  .scale = in.scale,
                                                                  .o_latent = g.o,
                                                                  .lse = g.lse,
                                                                  .probability = g.probability});
      body(g);
    }
  };

  c.run("sparse_attention forward", shape, [&](ops::Context& ctx) {
    ops::sparse_attention(ctx, ops::SparseAttentionForward{.q_latent = in.q_latent,
                                                           .q = in.q,
                                                           .latent = in.latent,
                                                           .k_extra = in.k_extra,
                                                           .indices = in.indices,
                                                           .scale = in.scale,
                                                           .o_latent = in.o,
                                                           .lse = in.lse,
                                                           .probability = learns ? in.probability : Tensor{}});
  });
  each_group([&](const Group& g) {
    c.compare("o_latent", in.o, rows, columns_of_heads(g.heads, C), c.pick(g.o, queries), bound);
    c.compare("lse", in.lse, rows, g.heads, c.pick(g.lse, queries), {1e-4, 1e-5});
    if (learns) add(c.pick(g.probability, queries), probability64, double(g.heads.size()) / double(N));
  });
  if (learns) c.compare("probability", in.probability, rows, probability64, {2e-3, 2e-4});
  c.tell();

  c.run("sparse_attention backward", shape, [&](ops::Context& ctx) {
    ops::sparse_attention(ctx, ops::SparseAttentionBackward{.do_latent = dout,
                                                            .q_latent = in.q_latent,
                                                            .q = in.q,
                                                            .latent = in.latent,
                                                            .k_extra = in.k_extra,
                                                            .indices = in.indices,
                                                            .o_latent = in.o,
                                                            .lse = in.lse,
                                                            .scale = in.scale,
                                                            .dq_latent = dq_latent,
                                                            .dq = dq,
                                                            .dlatent = dlatent,
                                                            .dk_extra = dk_extra});
  });
  each_group([&](const Group& g) {
    const Tensor dq_latent64 = c.host_zeros(g.q_latent.shape), dq64 = c.host_zeros(g.q.shape), dl = c.host_zeros(dlatent64.shape),
                 dk = c.host_zeros(dk_extra64.shape);
    ops::sparse_attention(c.host(), ops::SparseAttentionBackward{.do_latent = queries_of(dout, g.heads),
                                                                 .q_latent = g.q_latent,
                                                                 .q = g.q,
                                                                 .latent = latent64,
                                                                 .k_extra = k_extra64,
                                                                 .indices = indices64,
                                                                 .o_latent = queries_of(in.o, g.heads),
                                                                 .lse = g.lse,
                                                                 .scale = in.scale,
                                                                 .dq_latent = dq_latent64,
                                                                 .dq = dq64,
                                                                 .dlatent = dl,
                                                                 .dk_extra = dk});
    c.compare("dq_latent", dq_latent, rows, columns_of_heads(g.heads, C), c.pick(dq_latent64, queries), bound);
    if (He > 0)
      c.compare("dq", dq, rows, last_columns(g.heads, Hq, He),
                c.pick(dq64, queries, last_columns(range(0, std::int64_t(g.heads.size())), Hq, He)), bound);
    add(dl, dlatent64, 1);
    add(dk, dk_extra64, 1);
  });
  c.compare("dlatent", dlatent, window, dlatent64, bound);
  if (He > 0) c.compare("dk_extra", dk_extra, window, dk_extra64, bound);
  c.tell();
}

}  // namespace moetrain::app
