// attn_res.cpp -- the mix over depth with the most sources that the model has, and the norm that follows in the same pass.
#include "ops/attn_res.h"

#include <cmath>

#include "app/verify/verify.h"

namespace moetrain::app {

void verify_attn_res(const Verification& v) {
  OpCase c(v);
  const auto& m = c.model();
  const std::int64_t T = c.T(), D = m.hidden_size, Z = (m.num_hidden_layers - 1) / *m.attn_res_block_size + 2;
  const double eps = m.rms_norm_eps;
  std::vector<ConstTensor> sources;
  std::vector<Tensor> dsources;
  for (std::int64_t z = 0; z < Z; ++z) {
    sources.push_back(c.normal(c.storage(), {T, D}));
    dsources.push_back(c.zeros(c.real(), {T, D}));
  }
  const Tensor gamma = c.normal(c.storage(), {D}, 0.1, 1), query = c.normal(c.storage(), {1, D}, 1 / std::sqrt(double(D))),
               w = c.normal(c.storage(), {D}, 0.1, 1), dy = c.normal(c.storage(), {T, D}), y = c.empty(c.storage(), {T, D}),
               normed = c.empty(c.storage(), {T, D}), weights = c.empty(c.real(), {T, Z}), r = c.empty(c.real(), {T}),
               dgamma = c.zeros(c.real(), {D}), dquery = c.zeros(c.real(), {1, D});
  const Tensor gamma64 = c.wide(gamma), query64 = c.wide(query), w64 = c.wide(w), dgamma64 = c.host_zeros({D}),
               dquery64 = c.host_zeros({1, D});
  const std::string shape = sizes({{"T", T}, {"D", D}, {"Z", Z}});

  struct Reference {
    std::vector<ConstTensor> sources;
    Tensor y, weights, normed, r;
  };
  const auto reference = [&](const Places& rows) {
    const auto n = std::int64_t(rows.size());
    Reference f{{}, c.host_zeros({n, D}), c.host_zeros({n, Z}), c.host_zeros({n, D}), c.host_zeros({n})};
    for (const ConstTensor& s : sources) f.sources.push_back(c.wide(s, rows));
    ops::attn_res(c.host(),
                  ops::AttnResForward{.sources = f.sources,
                                      .gamma = gamma64,
                                      .query = query64,
                                      .eps = eps,
                                      .y = f.y,
                                      .weights = f.weights,
                                      .norm = ops::RmsNormForward{.x = f.y, .w = w64, .y = f.normed, .r = f.r, .eps = eps}});
    return f;
  };
  const auto reference_backward = [&](const Places& rows, const Reference& f, Tensor dgamma_to, Tensor dquery_to) {
    std::vector<Tensor> d;
    for (const ConstTensor& s : f.sources) d.push_back(c.host_zeros(s.shape));
    ops::attn_res(c.host(), ops::AttnResBackward{.dy = c.wide(dy, rows),
                                                 .sources = f.sources,
                                                 .gamma = gamma64,
                                                 .query = query64,
                                                 .eps = eps,
                                                 .weights = f.weights,
                                                 .dsources = d,
                                                 .dgamma = dgamma_to,
                                                 .dquery = dquery_to});
    return d;
  };

  c.run("attn_res forward, with norm", shape, [&](ops::Context& ctx) {
    ops::attn_res(ctx, ops::AttnResForward{.sources = sources,
                                           .gamma = gamma,
                                           .query = query,
                                           .eps = eps,
                                           .y = y,
                                           .weights = weights,
                                           .norm = ops::RmsNormForward{.x = y, .w = w, .y = normed, .r = r, .eps = eps}});
  });
  const Places rows = c.sample(T, 64);
  const Reference few = reference(rows);
  c.compare("y", y, rows, few.y, c.stored());
  c.compare("weights", weights, rows, few.weights, {1e-3, 1e-4});
  c.compare("normed", normed, rows, few.normed, c.stored());
  c.tell();

  c.run(
      "attn_res backward", shape,
      [&] {
        c.clear({dgamma, dquery});
        for (const Tensor& d : dsources) c.clear({d});
      },
      [&](ops::Context& ctx) {
        ops::attn_res(ctx, ops::AttnResBackward{.dy = dy,
                                                .sources = sources,
                                                .gamma = gamma,
                                                .query = query,
                                                .eps = eps,
                                                .weights = weights,
                                                .dsources = dsources,
                                                .dgamma = dgamma,
                                                .dquery = dquery});
      });
  const auto dfew = reference_backward(rows, few, {}, {});
  for (std::size_t z = 0; z < dsources.size(); ++z) c.compare("dsources", dsources[z], rows, dfew[z], OpCase::summed());
  each_block(T, Z * D, [&](std::int64_t begin, std::int64_t end) {
    Scope scope(c.host_tensors());
    const Places block = range(begin, end);
    reference_backward(block, reference(block), dgamma64, dquery64);
  });
  c.compare("dgamma", dgamma, dgamma64, OpCase::summed());
  c.compare("dquery", dquery, dquery64, OpCase::summed());
  c.tell();
}

}  // namespace moetrain::app
