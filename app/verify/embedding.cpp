// embedding.cpp -- rows of the table, and the whole sums of gradients of some of them.
#include "ops/embedding.h"

#include "app/verify/verify.h"

namespace moetrain::app {

void verify_embedding(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T(), V = c.model().vocab_size, D = c.model().hidden_size;
  std::vector<std::int32_t> ids(std::size_t(T), 0);
  for (std::int32_t& id : ids)  // low ids come often
    id = std::int32_t(std::min(c.random(std::uint64_t(V)), c.random(std::uint64_t(V))) %
                      std::uint64_t(1 + c.random(std::uint64_t(V))));
  const Tensor there = c.put(ids, {T}), table = c.normal(c.storage(), {V, D}, c.model().initializer_range),
               y = c.empty(c.storage(), {T, D}), dy = c.normal(c.real(), {T, D}), dtable = c.zeros(c.real(), {V, D});
  const Places rows = c.sample(T, 64);
  const std::string shape = sizes({{"T", T}, {"V", V}, {"D", D}});

  c.run("embedding forward", shape,
        [&](ops::Context& ctx) { ops::embedding(ctx, ops::EmbeddingForward{.ids = there, .table = table, .y = y}); });
  Places chosen, used;  // ids of those rows, and each once
  for (const std::int64_t t : rows) chosen.push_back(ids[std::size_t(t)]);
  c.compare("y", y, rows, c.wide(table, chosen), OpCase::exact());
  c.tell();

  c.run(
      "embedding backward", shape, [&] { c.clear({dtable}); },
      [&](ops::Context& ctx) { ops::embedding(ctx, ops::EmbeddingBackward{.ids = there, .dy = dy, .dtable = dtable}); });
  used = chosen;
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  const auto n = std::int64_t(used.size());
  const Tensor dtable64 = c.host_zeros({n, D});
  each_block(T, D, [&](std::int64_t begin, std::int64_t end) {
    Scope scope(c.host_tensors());
    Places tokens;
    std::vector<std::int32_t> nth;
    for (std::int64_t t = begin; t < end; ++t) {
      const auto at = std::lower_bound(used.begin(), used.end(), std::int64_t(ids[std::size_t(t)]));
      if (at == used.end() || *at != ids[std::size_t(t)]) continue;
      tokens.push_back(t);
      nth.push_back(std::int32_t(at - used.begin()));
    }
    ops::embedding(c.host(), ops::EmbeddingBackward{
                                 .ids = c.host_of(nth, {std::int64_t(nth.size())}), .dy = c.wide(dy, tokens), .dtable = dtable64});
  });
  c.compare("dtable", dtable, used, dtable64, OpCase::summed());
  c.tell();
}

}  // namespace moetrain::app
