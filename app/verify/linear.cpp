// linear.cpp -- the model's projections, one of each pair of widths, and the slices of kv_b_proj that absorbed attention uses.
#include "ops/linear.h"

#include <set>

#include "app/verify/verify.h"
#include "core/model.h"
#include "ops/head_linear.h"

namespace moetrain::app {
namespace {

struct Projection {
  std::string name;
  std::int64_t O, I;
  bool real;  // are its results
  auto kind() const { return std::tuple(O, I, real); }
};

// The matrices of the table that multiply rows of tokens; the head's does so inside the loss.
std::vector<Projection> projections(const core::Config& config) {
  core::ParamTable table;
  const core::Model model(config.model, table);
  const bool sparse = config.model.dsa && config.loss.indexer_stage == core::IndexerStage::sparse;
  std::vector<Projection> found;
  std::set<std::tuple<std::int64_t, std::int64_t, bool>> known;
  for (const core::Param& p : table.all()) {
    if (!p.decay || p.unit != core::UnitKind::trunk || p.shape.rank() != 2) continue;
    std::string name = p.name.substr(p.name.find('.', std::string("model.layers.").size()) + 1);
    name.resize(name.rfind(".weight"));
    name.erase(0, name.find('.') + 1);  // the sub-layer
    if (sparse && name == "kv_b_proj") continue;
    const bool real = name == "gate" || name == "indexer.weights_proj";
    const Projection projection{name, p.shape[0], p.shape[1], real};
    if (known.insert(projection.kind()).second) found.push_back(projection);
  }
  return found;
}

void verify_projection(const Verification& v, const Projection& p) {
  OpCase c(v);
  const std::int64_t T = c.T(), O = p.O, I = p.I;
  const DType out = p.real ? c.real() : c.storage();
  const Tensor x = c.normal(c.storage(), {T, I}), w = c.normal(c.storage(), {O, I}, c.model().initializer_range),
               y = c.empty(out, {T, O}), dy = c.normal(out, {T, O}), dx = c.empty(c.storage(), {T, I}),
               dw = c.zeros(c.real(), {O, I});
  const Places rows = c.sample(T, 64), outputs = c.sample(O, 64);
  const std::string name = "linear " + p.name, shape = sizes({{"T", T}, {"I", I}, {"O", O}});

  c.run(name + " forward", shape, [&](ops::Context& ctx) { ops::linear(ctx, ops::LinearForward{.x = x, .w = w, .y = y}); });
  const Tensor x64 = c.wide(x, rows);
  each_block(O, I, [&](std::int64_t begin, std::int64_t end) {
    Scope scope(c.host_tensors());
    const Tensor y64 = c.host_zeros({x64.shape[0], end - begin});
    ops::linear(c.host(), ops::LinearForward{.x = x64, .w = c.wide(w.rows(begin, end)), .y = y64});
    c.compare("y", y, rows, range(begin, end), y64, p.real ? OpCase::summed() : c.stored());
  });
  c.tell();

  c.run(
      name + " backward", shape, [&] { c.clear({dw}); },
      [&](ops::Context& ctx) { ops::linear(ctx, ops::LinearBackward{.dy = dy, .x = x, .w = w, .dx = dx, .dw = dw}); });
  const Tensor dx64 = c.host_zeros(x64.shape), dw64 = c.host_zeros({std::int64_t(outputs.size()), I});
  each_block(O, I, [&](std::int64_t begin, std::int64_t end) {
    Scope scope(c.host_tensors());
    ops::linear(c.host(), ops::LinearBackward{.dy = c.wide(dy, rows, range(begin, end)),
                                              .x = {},
                                              .w = c.wide(w.rows(begin, end)),
                                              .dx = dx64,
                                              .dw = {},
                                              .add_dx = true});
  });
  each_block(T, std::max(I, O), [&](std::int64_t begin, std::int64_t end) {
    Scope scope(c.host_tensors());
    const Places block = range(begin, end);
    ops::linear(c.host(),
                ops::LinearBackward{.dy = c.wide(dy, block, outputs), .x = c.wide(x, block), .w = {}, .dx = {}, .dw = dw64});
  });
  c.compare("dx", dx, rows, dx64, c.stored());
  c.compare("dw", dw, outputs, dw64, OpCase::summed());
  c.tell();
}

void verify_head_linear(const Verification& v, ops::HeadDirection direction) {
  OpCase c(v);
  const auto& m = c.model();
  const bool to = direction == ops::HeadDirection::to_latent;
  const std::int64_t T = c.T(), N = m.num_attention_heads, C = m.kv_lora_rank, Hn = m.qk_nope_head_dim, Hv = m.v_head_dim,
                     He = m.qk_rope_head_dim, row = to ? 0 : Hn, width = to ? Hn : Hv;
  const Shape latent{T, N, C}, heads{T, N, to ? Hn + He : Hv};
  const Tensor w = c.normal(c.storage(), {N, Hn + Hv, C}, c.model().initializer_range),
               x = c.normal(c.storage(), to ? heads : latent), dy = c.normal(c.storage(), to ? latent : heads),
               y = c.empty(c.storage(), dy.shape), dx = c.empty(c.storage(), x.shape), dw = c.zeros(c.real(), w.shape);
  const Places rows = c.sample(T, 64), some_heads = c.sample(N, 2);
  const std::string name = to ? "head_linear to_latent" : "head_linear from_latent";
  const std::string shape = sizes({{"T", T}, {"N", N}, {"H", width}, {"C", C}});
  const auto few = std::int64_t(rows.size());
  const Tensor w64 = c.wide(w);
  Places written;  // columns of the slice, on the heads' side
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t h = 0; h < width; ++h) written.push_back(n * heads[2] + h);
  const auto picked = [&](ConstTensor t) { return c.pick(t, range(0, few), written); };

  c.run(name + " forward", shape, [&](ops::Context& ctx) {
    ops::head_linear(
        ctx, ops::HeadLinearForward{.direction = direction, .w = w, .row = row, .width = width, .x = x, .column = 0, .y = y});
  });
  const Tensor x64 = c.wide(x, rows), y64 = c.host_zeros(y.shape.with_dim0(few));
  ops::head_linear(c.host(), ops::HeadLinearForward{
                                 .direction = direction, .w = w64, .row = row, .width = width, .x = x64, .column = 0, .y = y64});
  to ? c.compare("y", y, rows, y64, c.stored()) : c.compare("y", y, rows, written, picked(y64), c.stored());
  c.tell();

  c.run(
      name + " backward", shape, [&] { c.clear({dw}); },
      [&](ops::Context& ctx) {
        ops::head_linear(
            ctx,
            ops::HeadLinearBackward{
                .direction = direction, .w = w, .row = row, .width = width, .x = x, .column = 0, .dy = dy, .dx = dx, .dw = dw});
      });
  const Tensor dx64 = c.host_zeros(x64.shape);
  ops::head_linear(c.host(), ops::HeadLinearBackward{.direction = direction,
                                                     .w = w64,
                                                     .row = row,
                                                     .width = width,
                                                     .x = x64,
                                                     .column = 0,
                                                     .dy = c.wide(dy, rows),
                                                     .dx = dx64,
                                                     .dw = {}});
  to ? c.compare("dx", dx, rows, written, picked(dx64), c.stored()) : c.compare("dx", dx, rows, dx64, c.stored());
  const auto taken = std::int64_t(some_heads.size());
  const Tensor some_w = c.wide(w, some_heads), dw64 = c.host_zeros(some_w.shape);
  each_block(T, N * std::max(C, heads[2]), [&](std::int64_t begin, std::int64_t end) {
    Scope scope(c.host_tensors());
    const auto part = [&](ConstTensor t) {
      const std::int64_t width_of_head = t.shape[2];
      return c.wide(t, range(begin, end), columns_of_heads(some_heads, width_of_head)).reshape({end - begin, taken, width_of_head});
    };
    ops::head_linear(c.host(), ops::HeadLinearBackward{.direction = direction,
                                                       .w = some_w,
                                                       .row = row,
                                                       .width = width,
                                                       .x = part(x),
                                                       .column = 0,
                                                       .dy = part(dy),
                                                       .dx = {},
                                                       .dw = dw64});
  });
  c.compare("dw", dw, some_heads, dw64, OpCase::summed());
  c.tell();
}

}  // namespace

void verify_linear(const Verification& v) {
  for (const Projection& p : projections(v.config)) verify_projection(v, p);
  if (!v.config.model.dsa || v.config.loss.indexer_stage != core::IndexerStage::sparse) return;
  verify_head_linear(v, ops::HeadDirection::to_latent);
  verify_head_linear(v, ops::HeadDirection::from_latent);
}

}  // namespace moetrain::app
