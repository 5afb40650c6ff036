// elementwise.cpp -- residual sums, casts between storage and sums, column slices, and the gate of latent attention.
#include "ops/elementwise.h"

#include "app/verify/verify.h"

namespace moetrain::app {
namespace {

void verify_sums(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T(), D = c.model().hidden_size;
  const Tensor a = c.normal(c.storage(), {T, D}), b = c.normal(c.storage(), {T, D}), y = c.empty(c.storage(), {T, D}),
               wide = c.zeros(c.real(), {T, D}), narrow = c.empty(c.storage(), {T, D});
  const Places rows = c.sample(T, 64);
  const std::string shape = sizes({{"T", T}, {"D", D}});
  const Tensor a64 = c.wide(a, rows), y64 = c.host_zeros(a64.shape);

  c.run("sum", shape, [&](ops::Context& ctx) { ops::sum(ctx, ops::Sum{.a = a, .b = b, .y = y}); });
  ops::sum(c.host(), ops::Sum{.a = a64, .b = c.wide(b, rows), .y = y64});
  c.compare("y", y, rows, y64, c.stored());
  c.tell();

  c.run(
      "add to a real sum", shape, [&] { c.clear({wide}); },
      [&](ops::Context& ctx) {
        ops::add(ctx, ops::Add{.x = a, .y = wide});
        ops::add(ctx, ops::Add{.x = b, .y = wide});
      });
  c.compare("y", wide, rows, y64, OpCase::summed());
  c.tell();

  c.run("copy to storage", shape, [&](ops::Context& ctx) { ops::copy(ctx, ops::Copy{.x = wide, .y = narrow}); });
  c.compare("y", narrow, rows, y64, c.stored());
  c.tell();
}

void verify_columns(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T(), C = c.model().kv_lora_rank, He = c.model().qk_rope_head_dim;
  const Tensor both = c.normal(c.storage(), {T, C + He}), latent = c.empty(c.storage(), {T, C}),
               extra = c.empty(c.storage(), {T, He});
  const Places rows = c.sample(T, 64);
  c.run("copy_columns", sizes({{"T", T}, {"C", C}, {"He", He}}), [&](ops::Context& ctx) {
    ops::copy_columns(ctx, ops::CopyColumns{.x = both, .x_column = 0, .y = latent, .y_column = 0, .width = C});
    if (He > 0) ops::copy_columns(ctx, ops::CopyColumns{.x = both, .x_column = C, .y = extra, .y_column = 0, .width = He});
  });
  c.compare("latent", latent, rows, c.wide(both, rows, range(0, C)), OpCase::exact());
  if (He > 0) c.compare("extra", extra, rows, c.wide(both, rows, range(C, C + He)), OpCase::exact());
  c.tell();
}

void verify_sigmoid_gate(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T(), P = c.model().num_attention_heads * c.model().v_head_dim;
  const auto normal = [&] { return c.normal(c.storage(), {T, P}); };
  const Tensor x = normal(), gate = normal(), dy = normal(), y = c.empty(c.storage(), {T, P}), dx = c.empty(c.storage(), {T, P}),
               dgate = c.empty(c.storage(), {T, P});
  const Places rows = c.sample(T, 64);
  const std::string shape = sizes({{"T", T}, {"P", P}});
  const Tensor x64 = c.wide(x, rows), gate64 = c.wide(gate, rows), y64 = c.host_zeros(x64.shape), dx64 = c.host_zeros(x64.shape),
               dgate64 = c.host_zeros(x64.shape);

  c.run("sigmoid_gate forward", shape,
        [&](ops::Context& ctx) { ops::sigmoid_gate(ctx, ops::SigmoidGateForward{.x = x, .gate = gate, .y = y}); });
  ops::sigmoid_gate(c.host(), ops::SigmoidGateForward{.x = x64, .gate = gate64, .y = y64});
  c.compare("y", y, rows, y64, c.stored());
  c.tell();

  c.run("sigmoid_gate backward", shape, [&](ops::Context& ctx) {
    ops::sigmoid_gate(ctx, ops::SigmoidGateBackward{.dy = dy, .x = x, .gate = gate, .dx = dx, .dgate = dgate});
  });
  ops::sigmoid_gate(c.host(),
                    ops::SigmoidGateBackward{.dy = c.wide(dy, rows), .x = x64, .gate = gate64, .dx = dx64, .dgate = dgate64});
  c.compare("dx", dx, rows, dx64, c.stored());
  c.compare("dgate", dgate, rows, dgate64, c.stored());
  c.tell();
}

void verify_scale(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T(), J = c.model().dsa->index_n_heads;
  const Tensor x = c.normal(c.real(), {T, J}), y = c.empty(c.real(), {T, J});
  const double factor = 0.3;
  c.run("scale", sizes({{"T", T}, {"J", J}}), [&](ops::Context& ctx) {
    ops::copy(ctx, ops::Copy{.x = x, .y = y});
    ops::scale(ctx, ops::Scale{.factor = factor, .y = y});
  });
  const Tensor y64 = c.wide(x);
  ops::scale(c.host(), ops::Scale{.factor = factor, .y = y64});
  c.compare("y", y, y64, OpCase::summed());
  c.tell();
}

}  // namespace

void verify_elementwise(const Verification& v) {
  const auto& m = v.config.model;
  verify_sums(v);
  if (m.kv_lora_rank > 0) verify_columns(v);
  if (m.mla_use_output_gate) verify_sigmoid_gate(v);
  if (m.dsa) verify_scale(v);
}

}  // namespace moetrain::app
