// attention.cpp -- dense attention: the whole history of some heads, and the mean over all heads in which the indexer is taught.
#include "ops/attention.h"

#include <cmath>

#include "app/verify/verify.h"

namespace moetrain::app {
namespace {

// The documents of the first T tokens.
std::vector<std::int64_t> first_documents(const std::vector<std::int64_t>& starts, std::int64_t T) {
  std::vector<std::int64_t> some;
  for (const std::int64_t s : starts)
    if (s < T) some.push_back(s);
  some.push_back(T);
  return some;
}

struct Inputs {
  std::int64_t T, N, Hn, He, Hv;
  double scale;
  Tensor q, kv, k_extra, o, lse;
  Inputs(OpCase& c, std::int64_t tokens)
      : T(tokens),
        N(c.model().num_attention_heads),
        Hn(c.model().qk_nope_head_dim),
        He(c.model().qk_rope_head_dim),
        Hv(c.model().v_head_dim),
        scale(1 / std::sqrt(double(Hn + He))),
        q(c.normal(c.storage(), {T, N, Hn + He})),
        kv(c.normal(c.storage(), {T, N, Hn + Hv})),
        k_extra(c.normal(c.storage(), {T, He})),
        o(c.empty(c.storage(), {T, N, Hv})),
        lse(c.empty(c.real(), {T, N})) {}
  std::string shape() const { return sizes({{"T", T}, {"N", N}, {"Hn", Hn}, {"He", He}, {"Hv", Hv}}); }
};

// Weights rounded to bf16 show most in the few rows that have large values.
Bound bound_of(const OpCase& c) { return c.storage() == DType::bf16 ? Bound{0.1, 8e-3} : Bound{1e-3, 1e-4}; }

// do is zero but for the heads that the reference computes, so that the sum over heads in dk_extra is theirs alone.
void verify_heads(const Verification& v) {
  OpCase c(v);
  const Inputs in(c, c.T());
  const auto [T, N, Hn, He, Hv] = std::tuple(in.T, in.N, in.Hn, in.He, in.Hv);
  const Places heads = c.sample(N, 2), all = range(0, T);
  const auto n = std::int64_t(heads.size());
  const auto some = [&](ConstTensor t, std::int64_t width) {
    return c.wide(t, all, columns_of_heads(heads, width)).reshape({T, n, width});
  };
  const ops::Documents documents = c.documents(), on_host{c.starts()};
  const Tensor q64 = some(in.q, Hn + He), kv64 = some(in.kv, Hn + Hv), k_extra64 = c.wide(in.k_extra),
               o64 = c.host_zeros({T, n, Hv}), lse64 = c.host_zeros({T, n});
  c.run("attention forward", in.shape(), [&](ops::Context& ctx) {
    ops::attention(ctx, ops::AttentionForward{.q = in.q,
                                              .kv = in.kv,
                                              .k_extra = in.k_extra,
                                              .scale = in.scale,
                                              .documents = documents,
                                              .o = in.o,
                                              .lse = in.lse,
                                              .probability = {}});
  });
  ops::attention(c.host(), ops::AttentionForward{.q = q64,
                                                 .kv = kv64,
                                                 .k_extra = k_extra64,
                                                 .scale = in.scale,
                                                 .documents = on_host,
                                                 .o = o64,
                                                 .lse = lse64,
                                                 .probability = {}});
  c.compare("o", in.o, all, columns_of_heads(heads, Hv), o64, bound_of(c));
  c.compare("lse", in.lse, all, heads, lse64, {1e-4, 1e-5});
  c.tell();

  const Tensor dout = c.normal(c.storage(), {T, N, Hv}), dq = c.empty(c.storage(), in.q.shape),
               dkv = c.empty(c.storage(), in.kv.shape), dk_extra = c.empty(c.storage(), in.k_extra.shape);
  c.keep_columns(dout, columns_of_heads(heads, Hv));
  const Tensor dq64 = c.host_zeros(q64.shape), dkv64 = c.host_zeros(kv64.shape), dk_extra64 = c.host_zeros(k_extra64.shape);
  c.run("attention backward", in.shape(), [&](ops::Context& ctx) {
    ops::attention(ctx, ops::AttentionBackward{.do_ = dout,
                                               .q = in.q,
                                               .kv = in.kv,
                                               .k_extra = in.k_extra,
                                               .o = in.o,
                                               .lse = in.lse,
                                               .scale = in.scale,
                                               .documents = documents,
                                               .dq = dq,
                                               .dkv = dkv,
                                               .dk_extra = dk_extra});
  });
  ops::attention(c.host(), ops::AttentionBackward{.do_ = some(dout, Hv),
                                                  .q = q64,
                                                  .kv = kv64,
                                                  .k_extra = k_extra64,
                                                  .o = some(in.o, Hv),
                                                  .lse = lse64,
                                                  .scale = in.scale,
                                                  .documents = on_host,
                                                  .dq = dq64,
                                                  .dkv = dkv64,
                                                  .dk_extra = dk_extra64});
  c.compare("dq", dq, all, columns_of_heads(heads, Hn + He), dq64, bound_of(c));
  c.compare("dkv", dkv, all, columns_of_heads(heads, Hn + Hv), dkv64, bound_of(c));
  if (He > 0) c.compare("dk_extra", dk_extra, dk_extra64, bound_of(c));
  c.tell();
}

// A mean over all heads cannot be had for few of them: all heads of fewer tokens.
void verify_probability(const Verification& v) {
  OpCase c(v);
  const Inputs in(c, std::min<std::int64_t>(c.T(), 1024));
  const std::int64_t T = in.T, N = in.N;
  const std::vector<std::int64_t> starts = first_documents(c.starts(), T);
  const ops::Documents on_host{starts}, documents{starts, c.put(starts, {std::int64_t(starts.size())})};
  const std::int64_t W = on_host.longest();
  const Tensor probability = c.empty(c.real(), {T, W}), probability64 = c.host_zeros({T, W});
  const auto call = [&](ops::Context& ctx, ConstTensor q, ConstTensor kv, ConstTensor k_extra, const ops::Documents& of, Tensor o,
                        Tensor lse, Tensor p) {
    ops::attention(
        ctx, ops::AttentionForward{
                 .q = q, .kv = kv, .k_extra = k_extra, .scale = in.scale, .documents = of, .o = o, .lse = lse, .probability = p});
  };
  c.run("attention forward, with probability", in.shape(),
        [&](ops::Context& ctx) { call(ctx, in.q, in.kv, in.k_extra, documents, in.o, in.lse, probability); });
  const Tensor o64 = c.host_zeros(in.o.shape), lse64 = c.host_zeros({T, N});
  call(c.host(), c.wide(in.q), c.wide(in.kv), c.wide(in.k_extra), on_host, o64, lse64, probability64);
  c.compare("o", in.o, o64, bound_of(c));
  c.compare("probability", probability, probability64, {1e-3, 1e-4});
  c.tell();
}

}  // namespace

void verify_attention(const Verification& v) {
  verify_heads(v);
  if (v.config.model.dsa && v.config.loss.indexer_coefficient != 0) verify_probability(v);
}

}  // namespace moetrain::app
