// grouped_linear.cpp -- the experts' matrices: some rows and outputs of a few of them, the fullest among them.
#include "ops/grouped_linear.h"

#include <cmath>

#include "app/verify/verify.h"
#include "ops/linear.h"

namespace moetrain::app {
namespace {

// Rows of e experts, R in all: the first has none, the others very different numbers.
std::vector<std::int64_t> random_offsets(OpCase& c, std::int64_t e, std::int64_t R) {
  std::vector<double> shares(std::size_t(e), 0.0);
  double sum = 0;
  for (std::int64_t g = e > 1 ? 1 : 0; g < e; ++g) {
    const double u = double(1 + c.random(1000)) / 1000;
    shares[std::size_t(g)] = u * u;
    sum += u * u;
  }
  std::vector<std::int64_t> offsets{0};
  double before = 0;
  for (const double share : shares) {
    before += share;
    offsets.push_back(std::int64_t(std::llround(before / sum * double(R))));
  }
  offsets.back() = R;
  return offsets;
}

void verify_matrix(const Verification& v, const char* name, std::int64_t O, std::int64_t I) {
  OpCase c(v);
  const std::int64_t e = c.local_experts(), R = c.rows_of_experts();
  const std::vector<std::int64_t> offsets = random_offsets(c, e, R);
  const auto held = [&](std::int64_t g) { return offsets[std::size_t(g) + 1] - offsets[std::size_t(g)]; };
  Places experts;
  std::int64_t fullest = 0;
  for (std::int64_t g = 0; g < e; ++g)
    if (held(g) > held(fullest)) fullest = g;
  for (const std::int64_t g : c.sample(e, 4))
    if (held(g) > 0 && g != fullest && experts.size() < 2) experts.push_back(g);
  experts.insert(std::upper_bound(experts.begin(), experts.end(), fullest), fullest);

  const Tensor x = c.normal(c.storage(), {R, I}), w = c.normal(c.storage(), {e, O, I}, c.model().initializer_range),
               y = c.empty(c.storage(), {R, O}), dy = c.normal(c.storage(), {R, O}), dx = c.empty(c.storage(), {R, I}),
               dw = c.zeros(c.real(), {e, O, I}), there = c.put(offsets, {e + 1});
  Places rows;
  std::vector<std::int64_t> few{0};
  for (const std::int64_t g : experts) {
    for (const std::int64_t r : c.sample(held(g), 16)) rows.push_back(offsets[std::size_t(g)] + r);
    few.push_back(std::int64_t(rows.size()));
  }
  const std::string op = std::string("grouped_linear ") + name, shape = sizes({{"R", R}, {"e", e}, {"I", I}, {"O", O}});
  const Tensor w64 = c.wide(w, experts), x64 = c.wide(x, rows), y64 = c.host_zeros({few.back(), O}),
               dx64 = c.host_zeros({few.back(), I});

  c.run(op + " forward", shape, [&](ops::Context& ctx) {
    ops::grouped_linear(ctx, ops::GroupedLinearForward{.x = x, .w = w, .y = y, .offsets = offsets, .device_offsets = there});
  });
  ops::grouped_linear(c.host(), ops::GroupedLinearForward{.x = x64, .w = w64, .y = y64, .offsets = few});
  c.compare("y", y, rows, y64, c.stored());
  c.tell();

  c.run(
      op + " backward", shape, [&] { c.clear({dw}); },
      [&](ops::Context& ctx) {
        ops::grouped_linear(ctx, ops::GroupedLinearBackward{
                                     .dy = dy, .x = x, .w = w, .dx = dx, .dw = dw, .offsets = offsets, .device_offsets = there});
      });
  ops::grouped_linear(c.host(),
                      ops::GroupedLinearBackward{.dy = c.wide(dy, rows), .x = {}, .w = w64, .dx = dx64, .dw = {}, .offsets = few});
  c.compare("dx", dx, rows, dx64, c.stored());
  for (const std::int64_t g : experts) {
    Scope scope(c.host_tensors());
    const Places outputs = c.sample(O, 16);
    const Tensor dw64 = c.host_zeros({std::int64_t(outputs.size()), I});
    each_block(held(g), std::max(I, O), [&](std::int64_t begin, std::int64_t end) {
      Scope block_scope(c.host_tensors());
      const Places block = range(offsets[std::size_t(g)] + begin, offsets[std::size_t(g)] + end);
      ops::linear(c.host(),
                  ops::LinearBackward{.dy = c.wide(dy, block, outputs), .x = c.wide(x, block), .w = {}, .dx = {}, .dw = dw64});
    });
    c.compare("dw", dw.rows(g, g + 1).reshape({O, I}), outputs, dw64, OpCase::summed());
  }
  if (held(0) == 0) c.compare("dw of no rows", dw.rows(0, 1).reshape({O, I}), {0}, c.host_zeros({1, I}), OpCase::exact());
  c.tell();
}

}  // namespace

void verify_grouped_linear(const Verification& v) {
  const std::int64_t F = v.config.model.moe_intermediate_size, Z = v.config.model.expert_width();
  verify_matrix(v, "w1", F, Z);
  verify_matrix(v, "w2", Z, F);
}

}  // namespace moetrain::app
