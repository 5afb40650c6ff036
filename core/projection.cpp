// projection.cpp -- weights and gradients of the table handed to the matrix ops.
#include "core/projection.h"

#include "ops/grouped_linear.h"
#include "ops/linear.h"

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

}  // namespace

void project(Pass& pass, int id, ConstTensor x, Tensor y, bool add) {
  const ConstTensor w = pass.params.weight(id);
  ops::linear(pass.ctx, ops::LinearForward{.x = as_rows(x, w.shape[1]), .w = w, .y = as_rows(y, w.shape[0]), .add = add});
}

void project_backward(Pass& pass, int id, ConstTensor dy, ConstTensor x, Tensor dx, bool add_dx) {
  const ConstTensor w = pass.params.weight(id);
  const auto [dw, write] = pass.params.first_gradient(id);
  if (!dw.present() && !dx.present()) return;
  ops::linear(pass.ctx, ops::LinearBackward{.dy = as_rows(dy, w.shape[0]),
                                            .x = as_rows(x, w.shape[1]),
                                            .w = w,
                                            .dx = as_rows(dx, w.shape[1]),
                                            .dw = dw,
                                            .add_dx = add_dx,
                                            .write_dw = write});
}

void project_grouped(Pass& pass, int id, const parallel::ExchangePart& part, ConstTensor x, Tensor y) {
  ops::grouped_linear(pass.ctx, ops::GroupedLinearForward{.x = x,
                                                          .w = pass.params.weight(id).rows(part.first_expert, part.last_expert),
                                                          .y = y,
                                                          .offsets = part.offsets,
                                                          .device_offsets = part.device_offsets});
}

void project_grouped_backward(Pass& pass, int id, const parallel::ExchangePart& part, ConstTensor dy, Tensor dx) {
  ops::grouped_linear(pass.ctx, ops::GroupedLinearBackward{.dy = dy,
                                                           .x = {},
                                                           .w = pass.params.weight(id).rows(part.first_expert, part.last_expert),
                                                           .dx = dx,
                                                           .dw = {},
                                                           .offsets = part.offsets,
                                                           .device_offsets = part.device_offsets});
}

void project_grouped_gradient(Pass& pass, const parallel::ShardedParams::FirstGradient& gradient,
                              const parallel::ExchangePart& part, ConstTensor dy, ConstTensor x) {
  if (!gradient.dw.present()) return;
  ops::grouped_linear(pass.ctx, ops::GroupedLinearBackward{.dy = dy,
                                                           .x = x,
                                                           .w = {},
                                                           .dx = {},
                                                           .dw = gradient.dw.rows(part.first_expert, part.last_expert),
                                                           .offsets = part.offsets,
                                                           .device_offsets = part.device_offsets,
                                                           .write_dw = gradient.write});
}

void project_grouped(Pass& pass, TwoWeights ids, const parallel::ExchangePart& part, ConstTensor x, Tensor first_y,
                     Tensor second_y) {
  ops::grouped_linear(pass.ctx,
                      ops::GroupedLinearForward{.x = x,
                                                .w = pass.params.weight(ids.first).rows(part.first_expert, part.last_expert),
                                                .y = first_y,
                                                .w2 = pass.params.weight(ids.second).rows(part.first_expert, part.last_expert),
                                                .y2 = second_y,
                                                .offsets = part.offsets,
                                                .device_offsets = part.device_offsets});
}

void project_grouped_backward(Pass& pass, TwoWeights ids, const parallel::ExchangePart& part, ConstTensor first_dy,
                              ConstTensor second_dy, Tensor dx) {
  ops::grouped_linear(pass.ctx,
                      ops::GroupedLinearBackward{.dy = first_dy,
                                                 .x = {},
                                                 .w = pass.params.weight(ids.first).rows(part.first_expert, part.last_expert),
                                                 .dx = dx,
                                                 .dw = {},
                                                 .dy2 = second_dy,
                                                 .w2 = pass.params.weight(ids.second).rows(part.first_expert, part.last_expert),
                                                 .offsets = part.offsets,
                                                 .device_offsets = part.device_offsets});
}

void project_grouped_gradient(Pass& pass, const TwoGradients& gradients, const parallel::ExchangePart& part, ConstTensor first_dy,
                              ConstTensor second_dy, ConstTensor x) {
  const auto& [first, second] = gradients;
  if (!first.dw.present() || !second.dw.present() || first.write != second.write) {  // one of them is frozen, or further on
    project_grouped_gradient(pass, first, part, first_dy, x);
    project_grouped_gradient(pass, second, part, second_dy, x);
    return;
  }
  ops::grouped_linear(pass.ctx, ops::GroupedLinearBackward{.dy = first_dy,
                                                           .x = x,
                                                           .w = {},
                                                           .dx = {},
                                                           .dw = first.dw.rows(part.first_expert, part.last_expert),
                                                           .dy2 = second_dy,
                                                           .dw2 = second.dw.rows(part.first_expert, part.last_expert),
                                                           .offsets = part.offsets,
                                                           .device_offsets = part.device_offsets,
                                                           .write_dw = first.write});
}

void project_heads(Pass& pass, int id, const HeadSlice& s, ConstTensor x, Tensor y) {
  ops::head_linear(pass.ctx, ops::HeadLinearForward{.direction = s.direction,
                                                    .w = by_head(pass.params.weight(id), s.heads),
                                                    .row = s.row,
                                                    .width = s.width,
                                                    .x = x,
                                                    .column = s.column,
                                                    .y = y});
}

void project_heads_backward(Pass& pass, int id, const HeadSlice& s, ConstTensor dy, ConstTensor x, Tensor dx) {
  ops::head_linear(pass.ctx, ops::HeadLinearBackward{.direction = s.direction,
                                                     .w = by_head(pass.params.weight(id), s.heads),
                                                     .row = s.row,
                                                     .width = s.width,
                                                     .x = x,
                                                     .column = s.column,
                                                     .dy = dy,
                                                     .dx = dx,
                                                     .dw = by_head(pass.params.gradient(id), s.heads)});
}

}  // namespace moetrain::core
