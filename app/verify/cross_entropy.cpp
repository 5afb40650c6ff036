// cross_entropy.cpp -- the loss of some tokens over the whole vocabulary, in the blocks that the model would choose.
//
// Its reference holds the logits of these tokens alone: the weight of a large vocabulary in f64 would fill a host.
#include "ops/cross_entropy.h"

#include <cmath>

#include "app/verify/verify.h"
#include "core/head.h"
#include "ops/linear.h"

namespace moetrain::app {
namespace {

// Of the labelled tokens, without gradient_scale.
struct Reference {
  Tensor loss, dhidden;  // (1), (n, D)
  Tensor g;              // (n, V) gradients of the logits
  Reference(OpCase& c, ConstTensor hidden64, ConstTensor weight, std::span<const std::int32_t> labels)
      : loss(c.host_zeros({1})), dhidden(c.host_zeros(hidden64.shape)), g(c.host_zeros({hidden64.shape[0], weight.shape[0]})) {
    const std::int64_t n = hidden64.shape[0], V = weight.shape[0], D = hidden64.shape[1];
    const auto columns = [&](std::int64_t begin, std::int64_t end, bool back, Tensor block) {  // between g and a block of it
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t o = begin; o < end; ++o) {
          double &whole = g.as<double>()[i * V + o], &part = block.as<double>()[i * (end - begin) + o - begin];
          back ? part = whole : whole = part;
        }
    };
    each_block(V, D, [&](std::int64_t begin, std::int64_t end) {
      Scope scope(c.host_tensors());
      const Tensor block = c.host_zeros({n, end - begin});
      ops::linear(c.host(), ops::LinearForward{.x = hidden64, .w = c.wide(weight.rows(begin, end)), .y = block});
      columns(begin, end, false, block);
    });
    for (std::int64_t i = 0; i < n; ++i) {
      double* row = g.as<double>() + i * V;
      const double most = *std::max_element(row, row + V), label = row[labels[std::size_t(i)]];
      double sum = 0;
      for (std::int64_t o = 0; o < V; ++o) sum += std::exp(row[o] - most);
      for (std::int64_t o = 0; o < V; ++o) row[o] = std::exp(row[o] - most) / sum;
      row[labels[std::size_t(i)]] -= 1;
      *loss.as<double>() += std::log(sum) + most - label;
    }
    each_block(V, D, [&](std::int64_t begin, std::int64_t end) {
      Scope scope(c.host_tensors());
      const Tensor block = c.host_zeros({n, end - begin});
      columns(begin, end, true, block);
      ops::linear(
          c.host(),
          ops::LinearBackward{.dy = block, .x = {}, .w = c.wide(weight.rows(begin, end)), .dx = dhidden, .dw = {}, .add_dx = true});
    });
  }
};

}  // namespace

void verify_cross_entropy(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T(), V = c.model().vocab_size, D = c.model().hidden_size;
  const bool narrow = c.storage() == DType::bf16;  // logits are then rounded to bf16
  const Places rows = c.sample(T, 64);
  const auto n = std::int64_t(rows.size());
  std::vector<std::int32_t> all(std::size_t(T), 0), few(std::size_t(T), ops::kIgnored), chosen;
  for (std::int32_t& label : all) label = std::int32_t(c.random(std::uint64_t(V)));
  for (const std::int64_t t : rows) {
    few[std::size_t(t)] = all[std::size_t(t)];
    chosen.push_back(all[std::size_t(t)]);
  }
  // Logits of a deviation of 3: a few words have most of the probability, so that no part of a gradient drowns in another.
  const Tensor hidden = c.normal(c.storage(), {T, D}), weight = c.normal(c.storage(), {V, D}, 3 / std::sqrt(double(D))),
               labels = c.put(all, {T}), some_labels = c.put(few, {T}), loss = c.zeros(c.real(), {1}),
               dhidden = c.empty(c.storage(), {T, D}), dweight = c.zeros(c.real(), {V, D});
  const Tensor hidden64 = c.wide(hidden, rows);
  const Reference want(c, hidden64, weight, chosen);
  const std::string shape = sizes({{"T", T}, {"V", V}, {"D", D}});
  const auto run = [&](const char* name, ConstTensor of) {
    c.run(
        name, shape,
        [&] {
          c.clear({loss, dweight});
        },
        [&](ops::Context& ctx) {
          const core::LossBlocks blocks = core::chosen_blocks(c.config().loss, ctx, c.storage(), V);
          ops::cross_entropy(ctx, ops::CrossEntropy{.hidden = hidden,
                                                    .weight = weight,
                                                    .labels = of,
                                                    .seq_chunk = blocks.seq,
                                                    .vocab_chunk = blocks.vocab,
                                                    .gradient_scale = 1,
                                                    .loss = loss,
                                                    .dhidden = dhidden,
                                                    .dweight = dweight});
        });
  };
  const Bound bound = narrow ? Bound{8e-2, 1e-2} : Bound{1e-3, 1e-4};
  // The words that are likely have logits of 8 and more, which bf16 knows to within 1/32, and so their probabilities to 3 %.
  const Bound likely = narrow ? Bound{0.4, 4e-2} : bound;
  run("cross_entropy, rows", labels);
  c.compare("dhidden", dhidden, rows, want.dhidden, bound);
  c.tell();

  run("cross_entropy, sums", some_labels);
  c.compare("loss", loss, want.loss, narrow ? Bound{2e-3, 2e-3} : Bound{1e-5, 1e-5});
  c.compare("dhidden", dhidden, rows, want.dhidden, bound);
  Places words(chosen.begin(), chosen.end()), others;
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  for (const std::int64_t o : c.sample(V, 128))
    if (!std::binary_search(words.begin(), words.end(), o)) others.push_back(o);
  struct Words {
    const char* name;
    const Places& outputs;
    Bound allowed;
  };
  for (const auto& [name, outputs, allowed] :
       {Words{"dweight of labels", words, bound}, Words{"dweight of others", others, likely}}) {
    if (outputs.empty()) continue;
    const auto width = std::int64_t(outputs.size());
    const Tensor g = c.host_zeros({n, width}), dweight64 = c.host_zeros({width, D});
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t o = 0; o < width; ++o) g.as<double>()[i * width + o] = want.g.as<double>()[i * V + outputs[std::size_t(o)]];
    ops::linear(c.host(), ops::LinearBackward{.dy = g, .x = hidden64, .w = {}, .dx = {}, .dw = dweight64});
    c.compare(name, dweight, outputs, dweight64, allowed);
  }
  c.tell();
}

}  // namespace moetrain::app
