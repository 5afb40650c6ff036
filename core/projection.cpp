// projection.cpp -- weights, factors and gradients of the table handed to the matrix ops.
#include "core/projection.h"

#include "ops/dropout.h"
#include "ops/elementwise.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/random.h"

namespace moetrain::core {
namespace {

// The last dim is the row's width, everything before it rows.
ConstTensor as_rows(ConstTensor x, std::int64_t width) {
  return x.present() ? x.reshape({width > 0 ? x.count() / width : x.shape[0], width}) : x;
}
Tensor as_rows(Tensor x, std::int64_t width) {
  return x.present() ? x.reshape({width > 0 ? x.count() / width : x.shape[0], width}) : x;
}

ConstTensor by_head(ConstTensor w, std::int64_t heads) { return w.reshape({heads, w.shape[0] / heads, w.shape[1]}); }
Tensor by_head(Tensor w, std::int64_t heads) { return w.present() ? w.reshape({heads, w.shape[0] / heads, w.shape[1]}) : w; }

// --- adapters: y += B low with low = scale A drop(x), and back

bool drops(const Pass& pass, const Adapter& adapter) { return adapter.dropout > 0 && pass.mode != PassMode::evaluate; }

void drop(Pass& pass, const Adapter& adapter, ConstTensor x, Tensor y) {
  const std::int64_t width = pass.table[adapter.a].shape[1];
  const std::int64_t column = x.shape[1] < width ? parallel::part_of(width, pass.tensor->rank(), pass.tensor->ranks()).begin : 0;
  for (const Text& text : pass.text)
    ops::dropout(pass.ctx, ops::Dropout{.seed = pass.config.run.seed,
                                        .stream = ops::stream_of(pass.table[adapter.a].name),
                                        .first_token = text.place,
                                        .share = adapter.dropout,
                                        .x = x.rows(text.begin, text.end),
                                        .y = y.rows(text.begin, text.end),
                                        .column = column,
                                        .width = width});
}

// What A multiplies.
ConstTensor inputs(Pass& pass, const Adapter& adapter, ConstTensor x) {
  if (!drops(pass, adapter)) return x;
  const Tensor left = pass.ctx.scratch.take(x.dtype, x.shape);
  drop(pass, adapter, x, left);
  return left;
}

// scale x A^T (rows, rank) for rows x of any expert or none.
Tensor reduced(Pass& pass, const Adapter& adapter, ConstTensor x) {
  const ConstTensor a = pass.params.weight(adapter.a);
  const Tensor low = pass.scratch({x.shape[0], a.shape[0]});
  ops::linear(pass.ctx, ops::LinearForward{.x = x, .w = a, .y = low});
  ops::scale(pass.ctx, ops::Scale{.factor = adapter.scale, .y = low});
  return low;
}

// From dlow, not yet scaled: the gradient of A, and that of x added to dx. `in`: what A multiplied.
void reduced_backward(Pass& pass, const Adapter& adapter, Tensor dlow, ConstTensor in, Tensor dx) {
  Scope scope(pass.ctx.scratch);
  ops::scale(pass.ctx, ops::Scale{.factor = adapter.scale, .y = dlow});
  const auto [da, write] = pass.params.first_gradient(adapter.a);
  const bool apart = dx.present() && drops(pass, adapter);
  const Tensor din = apart ? pass.ctx.scratch.take(dx.dtype, dx.shape) : dx;
  ops::linear(
      pass.ctx,
      ops::LinearBackward{
          .dy = dlow, .x = in, .w = pass.params.weight(adapter.a), .dx = din, .dw = da, .add_dx = !apart, .write_dw = write});
  if (!apart) return;
  drop(pass, adapter, din, din);
  ops::add(pass.ctx, ops::Add{.x = din, .y = dx});
}

bool shared(ConstTensor a) { return a.shape.rank() == 2; }
ConstTensor of_part(ConstTensor w, const parallel::ExchangePart& part) { return w.rows(part.first_expert, part.last_expert); }
Tensor of_part(Tensor w, const parallel::ExchangePart& part) { return w.rows(part.first_expert, part.last_expert); }

void multiply_grouped(Pass& pass, ConstTensor w, const parallel::ExchangePart& part, ConstTensor x, Tensor y) {
  ops::grouped_linear(pass.ctx,
                      ops::GroupedLinearForward{
                          .x = x, .w = of_part(w, part), .y = y, .offsets = part.offsets, .device_offsets = part.device_offsets});
}
void multiply_grouped_back(Pass& pass, ConstTensor w, const parallel::ExchangePart& part, ConstTensor dy, Tensor dx) {
  ops::grouped_linear(pass.ctx, ops::GroupedLinearBackward{.dy = dy,
                                                           .x = {},
                                                           .w = of_part(w, part),
                                                           .dx = dx,
                                                           .dw = {},
                                                           .offsets = part.offsets,
                                                           .device_offsets = part.device_offsets});
}
void add_gradient(Pass& pass, const parallel::ShardedParams::FirstGradient& gradient, const parallel::ExchangePart& part,
                  ConstTensor dy, ConstTensor x) {
  ops::grouped_linear(pass.ctx, ops::GroupedLinearBackward{.dy = dy,
                                                           .x = x,
                                                           .w = {},
                                                           .dx = {},
                                                           .dw = of_part(gradient.dw, part),
                                                           .offsets = part.offsets,
                                                           .device_offsets = part.device_offsets,
                                                           .write_dw = gradient.write});
}

// scale x A^T (rows, rank) by the rows' experts.
Tensor reduced(Pass& pass, const Adapter& adapter, const parallel::ExchangePart& part, ConstTensor x) {
  const ConstTensor a = pass.params.weight(adapter.a);
  if (shared(a)) return reduced(pass, adapter, x);
  const Tensor low = pass.scratch({x.shape[0], a.shape[1]});
  multiply_grouped(pass, a, part, x, low);
  ops::scale(pass.ctx, ops::Scale{.factor = adapter.scale, .y = low});
  return low;
}

// The gradient of scale x A^T before its scale: scale dy B.
Tensor reduced_gradient(Pass& pass, const Adapter& adapter, const parallel::ExchangePart& part, ConstTensor dy) {
  const ConstTensor b = pass.params.weight(adapter.b);
  const Tensor dlow = pass.scratch({dy.shape[0], b.shape[2]});
  multiply_grouped_back(pass, b, part, dy, dlow);
  ops::scale(pass.ctx, ops::Scale{.factor = adapter.scale, .y = dlow});
  return dlow;
}

// y += B low, by the rows' experts.
void add_adapted(Pass& pass, int id, const parallel::ExchangePart& part, ConstTensor x, Tensor y) {
  const Adapter& adapter = pass.table[id].adapter;
  if (!adapter.present()) return;
  Scope scope(pass.ctx.scratch);
  const Tensor low = reduced(pass, adapter, part, x), more = pass.ctx.scratch.take(y.dtype, y.shape);
  multiply_grouped(pass, pass.params.weight(adapter.b), part, low, more);
  ops::add(pass.ctx, ops::Add{.x = more, .y = y});
}

void add_adapted_back(Pass& pass, int id, const parallel::ExchangePart& part, ConstTensor dy, Tensor dx) {
  const Adapter& adapter = pass.table[id].adapter;
  if (!adapter.present()) return;
  Scope scope(pass.ctx.scratch);
  const Tensor dlow = reduced_gradient(pass, adapter, part, dy);
  const ConstTensor a = pass.params.weight(adapter.a);
  if (shared(a)) return ops::linear(pass.ctx, ops::LinearBackward{.dy = dlow, .x = {}, .w = a, .dx = dx, .dw = {}, .add_dx = true});
  const Tensor more = pass.ctx.scratch.take(dx.dtype, dx.shape);
  multiply_grouped_back(pass, a, part, dlow, more);
  ops::add(pass.ctx, ops::Add{.x = more, .y = dx});
}

void add_adapter_gradient(Pass& pass, int id, const GroupedGradient& gradient, const parallel::ExchangePart& part, ConstTensor dy,
                          ConstTensor x) {
  const Adapter& adapter = pass.table[id].adapter;
  if (!adapter.present()) return;
  Scope scope(pass.ctx.scratch);
  add_gradient(pass, gradient.b, part, dy, reduced(pass, adapter, part, x));
  const Tensor dlow = reduced_gradient(pass, adapter, part, dy);
  if (gradient.shared_a.present())
    ops::linear(pass.ctx, ops::LinearBackward{.dy = dlow, .x = x, .w = {}, .dx = {}, .dw = gradient.shared_a});
  else
    add_gradient(pass, gradient.a, part, dlow, x);
}

}  // namespace

void project(Pass& pass, int id, ConstTensor x, Tensor y, bool add) {
  const ConstTensor w = pass.params.weight(id);
  x = as_rows(x, w.shape[1]);
  y = as_rows(y, w.shape[0]);
  ops::linear(pass.ctx, ops::LinearForward{.x = x, .w = w, .y = y, .add = add});
  const Adapter& adapter = pass.table[id].adapter;
  if (!adapter.present()) return;
  Scope scope(pass.ctx.scratch);
  const Tensor low = reduced(pass, adapter, inputs(pass, adapter, x));
  ops::linear(pass.ctx, ops::LinearForward{.x = low, .w = pass.params.weight(adapter.b), .y = y, .add = true});
}

void project_result(Pass& pass, int id, ConstTensor x, Tensor& y, Shape shape, DType dtype) {
  auto result = pass.result(ResultOp::linear, {{&y, dtype, shape}});
  result.compute([&] { project(pass, id, x, y); });
}

void project_backward(Pass& pass, int id, ConstTensor dy, ConstTensor x, Tensor dx, bool add_dx) {
  const ConstTensor w = pass.params.weight(id);
  const auto [dw, write] = pass.params.first_gradient(id);
  dy = as_rows(dy, w.shape[0]);
  x = as_rows(x, w.shape[1]);
  dx = as_rows(dx, w.shape[1]);
  if (dw.present() || dx.present())
    ops::linear(pass.ctx, ops::LinearBackward{.dy = dy, .x = x, .w = w, .dx = dx, .dw = dw, .add_dx = add_dx, .write_dw = write});
  const Adapter& adapter = pass.table[id].adapter;
  if (!adapter.present()) return;
  Scope scope(pass.ctx.scratch);
  const ConstTensor in = inputs(pass, adapter, x);
  const Tensor low = reduced(pass, adapter, in), dlow = pass.scratch(low.shape);
  const auto [db, write_b] = pass.params.first_gradient(adapter.b);
  ops::linear(pass.ctx, ops::LinearBackward{
                            .dy = dy, .x = low, .w = pass.params.weight(adapter.b), .dx = dlow, .dw = db, .write_dw = write_b});
  reduced_backward(pass, adapter, dlow, in, dx);
}

void project_grouped(Pass& pass, int id, const parallel::ExchangePart& part, ConstTensor x, Tensor y) {
  multiply_grouped(pass, pass.params.weight(id), part, x, y);
  add_adapted(pass, id, part, x, y);
}

void project_grouped_backward(Pass& pass, int id, const parallel::ExchangePart& part, ConstTensor dy, Tensor dx) {
  multiply_grouped_back(pass, pass.params.weight(id), part, dy, dx);
  add_adapted_back(pass, id, part, dy, dx);
}

GroupedGradient grouped_gradient(Pass& pass, int id) {
  GroupedGradient g{.w = pass.params.first_gradient(id)};
  const Adapter& adapter = pass.table[id].adapter;
  if (!adapter.present()) return g;
  g.b = pass.params.first_gradient(adapter.b);
  if (shared(pass.params.weight(adapter.a)))
    g.shared_a = pass.params.gradient(adapter.a);
  else
    g.a = pass.params.first_gradient(adapter.a);
  return g;
}

void project_grouped_gradient(Pass& pass, int id, const GroupedGradient& gradient, const parallel::ExchangePart& part,
                              ConstTensor dy, ConstTensor x) {
  if (gradient.w.dw.present()) add_gradient(pass, gradient.w, part, dy, x);
  add_adapter_gradient(pass, id, gradient, part, dy, x);
}

void project_grouped(Pass& pass, TwoWeights ids, const parallel::ExchangePart& part, ConstTensor x, Tensor first_y,
                     Tensor second_y) {
  ops::grouped_linear(pass.ctx, ops::GroupedLinearForward{.x = x,
                                                          .w = of_part(pass.params.weight(ids.first), part),
                                                          .y = first_y,
                                                          .w2 = of_part(pass.params.weight(ids.second), part),
                                                          .y2 = second_y,
                                                          .offsets = part.offsets,
                                                          .device_offsets = part.device_offsets});
  add_adapted(pass, ids.first, part, x, first_y);
  add_adapted(pass, ids.second, part, x, second_y);
}

void project_grouped_backward(Pass& pass, TwoWeights ids, const parallel::ExchangePart& part, ConstTensor first_dy,
                              ConstTensor second_dy, Tensor dx) {
  ops::grouped_linear(pass.ctx, ops::GroupedLinearBackward{.dy = first_dy,
                                                           .x = {},
                                                           .w = of_part(pass.params.weight(ids.first), part),
                                                           .dx = dx,
                                                           .dw = {},
                                                           .dy2 = second_dy,
                                                           .w2 = of_part(pass.params.weight(ids.second), part),
                                                           .offsets = part.offsets,
                                                           .device_offsets = part.device_offsets});
  add_adapted_back(pass, ids.first, part, first_dy, dx);
  add_adapted_back(pass, ids.second, part, second_dy, dx);
}

void project_grouped_gradient(Pass& pass, TwoWeights ids, const TwoGradients& gradients, const parallel::ExchangePart& part,
                              ConstTensor first_dy, ConstTensor second_dy, ConstTensor x) {
  const auto &first = gradients.first.w, &second = gradients.second.w;
  if (!first.dw.present() || !second.dw.present() || first.write != second.write) {  // one of them is frozen, or further on
    project_grouped_gradient(pass, ids.first, gradients.first, part, first_dy, x);
    project_grouped_gradient(pass, ids.second, gradients.second, part, second_dy, x);
    return;
  }
  ops::grouped_linear(pass.ctx, ops::GroupedLinearBackward{.dy = first_dy,
                                                           .x = x,
                                                           .w = {},
                                                           .dx = {},
                                                           .dw = of_part(first.dw, part),
                                                           .dy2 = second_dy,
                                                           .dw2 = of_part(second.dw, part),
                                                           .offsets = part.offsets,
                                                           .device_offsets = part.device_offsets,
                                                           .write_dw = first.write});
  add_adapter_gradient(pass, ids.first, gradients.first, part, first_dy, x);
  add_adapter_gradient(pass, ids.second, gradients.second, part, second_dy, x);
}

void project_heads(Pass& pass, int id, const HeadSlice& s, ConstTensor x, Tensor y) {
  const auto multiply = [&](int w, ConstTensor from, Tensor to) {
    ops::head_linear(pass.ctx, ops::HeadLinearForward{.direction = s.direction,
                                                      .w = by_head(pass.params.weight(w), s.heads),
                                                      .row = s.row,
                                                      .width = s.width,
                                                      .x = from,
                                                      .column = s.column,
                                                      .y = to});
  };
  multiply(id, x, y);
  const Adapter& adapter = pass.table[id].adapter;
  if (!adapter.present()) return;
  Scope scope(pass.ctx.scratch);
  const ConstTensor a = pass.params.weight(adapter.a);
  const std::int64_t rank = a.shape[0], C = a.shape[1];
  if (s.direction == ops::HeadDirection::from_latent) {
    const Tensor low = reduced(pass, adapter, as_rows(x, C)), more = pass.scratch(y.shape);
    multiply(adapter.b, low.reshape({x.shape[0], s.heads, rank}), more);
    ops::add(pass.ctx, ops::Add{.x = more, .y = y});
  } else {
    const Tensor low = pass.scratch({x.shape[0], s.heads, rank});  // B^T x, and y += low A
    multiply(adapter.b, x, low);
    ops::scale(pass.ctx, ops::Scale{.factor = adapter.scale, .y = low});
    ops::linear(pass.ctx,
                ops::LinearBackward{.dy = as_rows(low, rank), .x = {}, .w = a, .dx = as_rows(y, C), .dw = {}, .add_dx = true});
  }
}

void project_heads_backward(Pass& pass, int id, const HeadSlice& s, ConstTensor dy, ConstTensor x, Tensor dx) {
  const auto back = [&](int w, ConstTensor dto, ConstTensor from, Tensor dfrom) {
    ops::head_linear(pass.ctx, ops::HeadLinearBackward{.direction = s.direction,
                                                       .w = by_head(pass.params.weight(w), s.heads),
                                                       .row = s.row,
                                                       .width = s.width,
                                                       .x = from,
                                                       .column = s.column,
                                                       .dy = dto,
                                                       .dx = dfrom,
                                                       .dw = by_head(pass.params.gradient(w), s.heads)});
  };
  back(id, dy, x, dx);
  const Adapter& adapter = pass.table[id].adapter;
  if (!adapter.present()) return;
  Scope scope(pass.ctx.scratch);
  const ConstTensor a = pass.params.weight(adapter.a);
  const std::int64_t rank = a.shape[0], C = a.shape[1];
  const Shape by_rank{x.shape[0], s.heads, rank};
  if (s.direction == ops::HeadDirection::from_latent) {
    const Tensor low = reduced(pass, adapter, as_rows(x, C)), dlow = pass.scratch(by_rank);
    back(adapter.b, dy, low.reshape(by_rank), dlow);
    reduced_backward(pass, adapter, as_rows(dlow, rank), as_rows(x, C), as_rows(dx, C));
  } else {
    // y += low A with low = scale B^T x: A's gradient is low^T dy, that of B^T x is scale A dy.
    const Tensor low = pass.scratch(by_rank), more = pass.ctx.scratch.zeros(dx.dtype, dx.shape);
    ops::head_linear(pass.ctx, ops::HeadLinearForward{.direction = s.direction,
                                                      .w = by_head(pass.params.weight(adapter.b), s.heads),
                                                      .row = s.row,
                                                      .width = s.width,
                                                      .x = x,
                                                      .column = s.column,
                                                      .y = low});
    ops::scale(pass.ctx, ops::Scale{.factor = adapter.scale, .y = low});
    const auto [da, write] = pass.params.first_gradient(adapter.a);
    ops::linear(pass.ctx,
                ops::LinearBackward{.dy = as_rows(low, rank), .x = as_rows(dy, C), .w = {}, .dx = {}, .dw = da, .write_dw = write});
    const Tensor dlow = reduced(pass, adapter, as_rows(dy, C));
    back(adapter.b, dlow.reshape(by_rank), x, more);
    ops::add(pass.ctx, ops::Add{.x = more, .y = dx});
  }
}

namespace {

// The labels among this rank's words, and statistics over everyone's.
void cut_vocabulary(Pass& pass, std::int64_t V, ops::CrossEntropy& loss) {
  const parallel::TensorSplit& tensor = *pass.tensor;
  auto& ctx = pass.ctx;
  const auto words = parallel::part_of(V, tensor.rank(), tensor.ranks());
  const Tensor labels = ctx.scratch.take(DType::i32, loss.labels.shape);
  ops::local_ids(ctx, ops::LocalIds{.ids = loss.labels, .first = words.begin, .count = words.count(), .words = V, .y = labels});
  loss.labels = labels;
  if (tensor.rank() != 0) loss.loss = ctx.scratch.zeros(loss.loss.dtype, {1});
  loss.merge = [&](Tensor running) {
    Scope scope(ctx.scratch);
    const Tensor parts = ctx.scratch.take(running.dtype, {tensor.ranks(), running.shape[0], running.shape[1]});
    tensor.gather_values(running, parts);
    ops::merge_sums(ctx, ops::MergeSums{.parts = parts, .all = running});
  };
}

}  // namespace

// With an adapter the logits are those of [x | scale A drop(x)] and [W | B], so that the loss is cut in blocks as ever; the
// gradient of [W | B] is made whole for the sake of B's columns.
void project_loss(Pass& pass, int id, ops::CrossEntropy loss) {
  Scope scope(pass.ctx.scratch);
  if (pass.tensor) cut_vocabulary(pass, pass.table[id].shape[0], loss);
  const ConstTensor w = pass.params.weight(id);
  const bool trains = loss.dhidden.present();
  const Adapter& adapter = pass.table[id].adapter;
  if (!adapter.present()) {
    const auto [dw, write] = trains ? pass.params.first_gradient(id) : parallel::ShardedParams::FirstGradient{};
    loss.weight = w;
    loss.dweight = dw;
    loss.write_dweight = write;
    return ops::cross_entropy(pass.ctx, loss);
  }
  const ConstTensor x = loss.hidden, b = pass.params.weight(adapter.b);
  const std::int64_t T = x.shape[0], V = w.shape[0], D = w.shape[1], rank = b.shape[1];
  const auto beside = [&](ConstTensor left, ConstTensor right) {
    const Tensor both = pass.ctx.scratch.take(left.dtype, {left.shape[0], D + rank});
    ops::copy_columns(pass.ctx, ops::CopyColumns{.x = left, .x_column = 0, .y = both, .y_column = 0, .width = D});
    ops::copy_columns(pass.ctx, ops::CopyColumns{.x = right, .x_column = 0, .y = both, .y_column = D, .width = rank});
    return both;
  };
  const ConstTensor in = inputs(pass, adapter, x);
  const Tensor dx = loss.dhidden;
  loss.hidden = beside(x, reduced(pass, adapter, in));
  loss.weight = beside(w, b);
  if (trains) {
    loss.dhidden = pass.scratch({T, D + rank});
    loss.dweight = pass.scratch_real({V, D + rank});
    loss.write_dweight = true;
  }
  ops::cross_entropy(pass.ctx, loss);
  if (!trains) return;
  const Tensor dlow = pass.scratch({T, rank}), db = pass.scratch_real({V, rank});
  ops::copy_columns(pass.ctx, ops::CopyColumns{.x = loss.dweight, .x_column = D, .y = db, .y_column = 0, .width = rank});
  ops::add(pass.ctx, ops::Add{.x = db, .y = pass.params.gradient(adapter.b)});
  ops::copy_columns(pass.ctx, ops::CopyColumns{.x = loss.dhidden, .x_column = 0, .y = dx, .y_column = 0, .width = D});
  ops::copy_columns(pass.ctx, ops::CopyColumns{.x = loss.dhidden, .x_column = D, .y = dlow, .y_column = 0, .width = rank});
  reduced_backward(pass, adapter, dlow, in, dx);
}

}  // namespace moetrain::core
