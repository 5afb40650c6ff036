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

  // Some heads at a time, W rows, zero but for the queries.
  const std::int64_t most = std::max<std::int64_t>(1, (std::int64_t(1) << 23) / (W * C));
  const Tensor latent64 = c.wide(in.latent, range(in.selected.window, T)),
               k_extra64 = c.wide(in.k_extra, range(in.selected.window, T)), indices64 = c.host_of(in.selected.of_window(), {W, K}),
               probability64 = c.host_zeros({std::int64_t(rows.size()), K}), dlatent64 = c.host_zeros(latent64.shape),
               dk_extra64 = c.host_zeros(k_extra64.shape);
  const auto each_group = [&](auto body) {
    for (std::int64_t n = 0; n < N; n += most) {
      Scope scope(c.host_tensors());
      const Places heads = range(n, std::min(n + most, N));
      const auto some = std::int64_t(heads.size());
      const auto queries = [&](ConstTensor t) {
        const std::int64_t H = t.shape[2];
        const Tensor all = c.host_zeros({W, some, H}), few = c.wide(t, rows, columns_of_heads(heads, H));
        for (std::size_t r = 0; r < rows.size(); ++r)
          std::copy_n(few.as<double>() + std::int64_t(r) * some * H, some * H,
                      all.as<double>() + (rows[r] - in.selected.window) * some * H);
        return all;
      };
      const Tensor o64 = c.host_zeros({W, some, C}), lse64 = c.host_zeros({W, some}), p64 = c.host_zeros({W, K}),
                   q_latent64 = queries(in.q_latent), q64 = queries(in.q);
      ops::sparse_attention(c.host(), ops::SparseAttentionForward{.q_latent = q_latent64,
                                                                  .q = q64,
                                                                  .latent = latent64,
                                                                  .k_extra = k_extra64,
                                                                  .indices = indices64,
                                                                  .scale = in.scale,
                                                                  .o_latent = o64,
                                                                  .lse = lse64,
                                                                  .probability = p64});
      body(heads, queries, q_latent64, q64, o64, lse64, p64);
    }
  };
  const auto of_rows = [&](ConstTensor t) {  // of the window
    const Tensor few = c.host_zeros({std::int64_t(rows.size()), t.shape.row()});
    for (std::size_t r = 0; r < rows.size(); ++r)
      std::copy_n(t.as<double>() + (rows[r] - in.selected.window) * t.shape.row(), t.shape.row(),
                  few.as<double>() + std::int64_t(r) * t.shape.row());
    return few;
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
  each_group([&](const Places& heads, auto&, Tensor, Tensor, Tensor o64, Tensor lse64, Tensor p64) {
    c.compare("o_latent", in.o, rows, columns_of_heads(heads, C), of_rows(o64), bound);
    c.compare("lse", in.lse, rows, heads, of_rows(lse64), {1e-4, 1e-5});
    const Tensor p = of_rows(p64);
    for (std::int64_t i = 0; i < p.count(); ++i)
      probability64.as<double>()[i] += p.as<double>()[i] * double(heads.size()) / double(N);
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
  each_group([&](const Places& heads, auto& queries, Tensor q_latent64, Tensor q64, Tensor, Tensor lse64, Tensor) {
    const auto some = std::int64_t(heads.size());
    const Tensor dq_latent64 = c.host_zeros({W, some, C}), dq64 = c.host_zeros({W, some, Hq}), dl = c.host_zeros(dlatent64.shape),
                 dk = c.host_zeros(dk_extra64.shape);
    ops::sparse_attention(c.host(), ops::SparseAttentionBackward{.do_latent = queries(dout),
                                                                 .q_latent = q_latent64,
                                                                 .q = q64,
                                                                 .latent = latent64,
                                                                 .k_extra = k_extra64,
                                                                 .indices = indices64,
                                                                 .o_latent = queries(in.o),
                                                                 .lse = lse64,
                                                                 .scale = in.scale,
                                                                 .dq_latent = dq_latent64,
                                                                 .dq = dq64,
                                                                 .dlatent = dl,
                                                                 .dk_extra = dk});
    c.compare("dq_latent", dq_latent, rows, columns_of_heads(heads, C), of_rows(dq_latent64), bound);
    if (He > 0) {  // of q only its last columns are an input
      Places extra, extra64;
      for (std::size_t n = 0; n < heads.size(); ++n)
        for (std::int64_t h = in.Hn; h < Hq; ++h) {
          extra.push_back(heads[n] * Hq + h);
          extra64.push_back(std::int64_t(n) * Hq + h);
        }
      const Tensor few = of_rows(dq64), want = c.host_zeros({few.shape[0], std::int64_t(extra64.size())});
      for (std::int64_t r = 0; r < few.shape[0]; ++r)
        for (std::size_t i = 0; i < extra64.size(); ++i)
          want.as<double>()[r * want.shape[1] + std::int64_t(i)] = few.as<double>()[r * few.shape[1] + extra64[i]];
      c.compare("dq", dq, rows, extra, want, bound);
    }
    for (std::int64_t i = 0; i < dl.count(); ++i) dlatent64.as<double>()[i] += dl.as<double>()[i];
    for (std::int64_t i = 0; i < dk.count(); ++i) dk_extra64.as<double>()[i] += dk.as<double>()[i];
  });
  c.compare("dlatent", dlatent, range(in.selected.window, T), dlatent64, bound);
  if (He > 0) c.compare("dk_extra", dk_extra, range(in.selected.window, T), dk_extra64, bound);
  c.tell();
}

}  // namespace moetrain::app
