// norms.cpp -- RMSNorm at each width of the model, and the layer norm of the indexer's keys.
#include <set>

#include "app/verify/verify.h"
#include "ops/layernorm.h"
#include "ops/rmsnorm.h"

namespace moetrain::app {
namespace {

void verify_rmsnorm(const Verification& v, std::int64_t D) {
  OpCase c(v);
  const std::int64_t T = c.T();
  const double eps = c.model().rms_norm_eps;
  const Tensor x = c.normal(c.storage(), {T, D}), w = c.normal(c.storage(), {D}, 0.1, 1), dy = c.normal(c.storage(), {T, D}),
               y = c.empty(c.storage(), {T, D}), r = c.empty(c.real(), {T}), dx = c.empty(c.storage(), {T, D}),
               dw = c.zeros(c.real(), {D});
  const Places rows = c.sample(T, 256);
  const auto few = std::int64_t(rows.size());
  const std::string shape = sizes({{"T", T}, {"D", D}});
  const Tensor x64 = c.wide(x, rows), w64 = c.wide(w), y64 = c.host_zeros({few, D}), r64 = c.host_zeros({few});

  c.run("rmsnorm forward", shape,
        [&](ops::Context& ctx) { ops::rmsnorm(ctx, ops::RmsNormForward{.x = x, .w = w, .y = y, .r = r, .eps = eps}); });
  ops::rmsnorm(c.host(), ops::RmsNormForward{.x = x64, .w = w64, .y = y64, .r = r64, .eps = eps});
  c.compare("y", y, rows, y64, c.stored());
  c.compare("r", r, rows, r64, {1e-5, 1e-6});
  c.tell();

  c.run(
      "rmsnorm backward", shape, [&] { c.clear({dw}); },
      [&](ops::Context& ctx) { ops::rmsnorm(ctx, ops::RmsNormBackward{.dy = dy, .x = x, .w = w, .r = r, .dx = dx, .dw = dw}); });
  const Tensor dx64 = c.host_zeros({few, D}), dw64 = c.host_zeros({D});
  ops::rmsnorm(c.host(), ops::RmsNormBackward{.dy = c.wide(dy, rows), .x = x64, .w = w64, .r = r64, .dx = dx64, .dw = {}});
  each_block(T, D, [&](std::int64_t begin, std::int64_t end) {
    Scope scope(c.host_tensors());
    const Places block = range(begin, end);
    ops::rmsnorm(c.host(),
                 ops::RmsNormBackward{
                     .dy = c.wide(dy, block), .x = c.wide(x, block), .w = w64, .r = c.wide(r, block), .dx = {}, .dw = dw64});
  });
  c.compare("dx", dx, rows, dx64, c.stored());
  c.compare("dw", dw, dw64, OpCase::summed());
  c.tell();
}

void verify_layernorm(const Verification& v) {
  OpCase c(v);
  const auto& dsa = *c.model().dsa;
  const std::int64_t T = c.T(), D = dsa.index_head_dim;
  const Tensor x = c.normal(c.storage(), {T, D}), w = c.normal(c.storage(), {D}, 0.1, 1),
               b = dsa.index_norm_bias ? c.normal(c.storage(), {D}, 0.1) : Tensor{}, dy = c.normal(c.storage(), {T, D}),
               y = c.empty(c.storage(), {T, D}), mean = c.empty(c.real(), {T}), r = c.empty(c.real(), {T}),
               dx = c.empty(c.storage(), {T, D}), dw = c.zeros(c.real(), {D}), db = c.zeros(c.real(), {D});
  const std::string shape = sizes({{"T", T}, {"D", D}});
  const Tensor x64 = c.wide(x), w64 = c.wide(w), y64 = c.host_zeros({T, D}), mean64 = c.host_zeros({T}), r64 = c.host_zeros({T}),
               dx64 = c.host_zeros({T, D}), dw64 = c.host_zeros({D}), db64 = c.host_zeros({D});

  c.run("layernorm forward", shape, [&](ops::Context& ctx) {
    ops::layernorm(ctx, ops::LayerNormForward{.x = x, .w = w, .b = b, .y = y, .mean = mean, .r = r, .eps = dsa.index_norm_eps});
  });
  ops::layernorm(c.host(), ops::LayerNormForward{.x = x64,
                                                 .w = w64,
                                                 .b = b.present() ? ConstTensor(c.wide(b)) : ConstTensor{},
                                                 .y = y64,
                                                 .mean = mean64,
                                                 .r = r64,
                                                 .eps = dsa.index_norm_eps});
  c.compare("y", y, y64, c.stored());
  c.compare("r", r, r64, {1e-5, 1e-6});
  c.tell();

  c.run(
      "layernorm backward", shape,
      [&] {
        c.clear({dw, db});
      },
      [&](ops::Context& ctx) {
        ops::layernorm(ctx, ops::LayerNormBackward{.dy = dy, .x = x, .w = w, .mean = mean, .r = r, .dx = dx, .dw = dw, .db = db});
      });
  ops::layernorm(c.host(), ops::LayerNormBackward{
                               .dy = c.wide(dy), .x = x64, .w = w64, .mean = mean64, .r = r64, .dx = dx64, .dw = dw64, .db = db64});
  c.compare("dx", dx, dx64, c.stored());
  c.compare("dw", dw, dw64, OpCase::summed());
  c.compare("db", db, db64, OpCase::summed());
  c.tell();
}

}  // namespace

void verify_norms(const Verification& v) {
  const auto& m = v.config.model;
  std::set<std::int64_t> widths{m.hidden_size, m.kv_lora_rank};
  if (m.q_lora_rank) widths.insert(*m.q_lora_rank);
  if (m.latent_moe_use_norm) widths.insert(m.expert_width());
  widths.erase(0);
  for (const std::int64_t D : widths) verify_rmsnorm(v, D);
  if (m.dsa) verify_layernorm(v);
}

}  // namespace moetrain::app
