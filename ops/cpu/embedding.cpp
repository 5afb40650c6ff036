// embedding.cpp -- copies rows out; gathers gradients with columns shared among the threads, so that equal ids never meet.
#include "ops/embedding.h"

#include <algorithm>
#include <cstring>

#include "ops/cpu/reals.h"

namespace moetrain::ops {
namespace {

void check_ids(ConstTensor ids, std::int64_t V) {
  const auto* id = ids.as<std::int32_t>();
  for (std::int64_t t = 0; t < ids.count(); ++t)
    check((0 <= id[t] && id[t] < V) || id[t] == kElsewhere, "embedding: an id is outside the table",
          {{"t", t}, {"id", id[t]}, {"V", V}});
}

template <class T>
void backward(const EmbeddingBackward& a) {
  using R = cpu::acc_t<T>;
  const std::int64_t tokens = a.dy.shape[0], D = a.dy.shape[1];
  const auto* id = a.ids.as<std::int32_t>();
  const T* dy = a.dy.as<T>();
  R* dtable = a.dtable.as<R>();
  constexpr std::int64_t kColumns = 64;  // of one share: whole cache lines, so that threads do not share any
#pragma omp parallel for if (tokens * D > cpu::kWorthThreads)
  for (std::int64_t begin = 0; begin < D; begin += kColumns) {
    const std::int64_t columns = std::min(kColumns, D - begin);
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (id[t] == kElsewhere) continue;
      const T* from = dy + t * D + begin;
      R* to = dtable + id[t] * D + begin;
#pragma omp simd
      for (std::int64_t d = 0; d < columns; ++d) to[d] += R(from[d]);
    }
  }
}

}  // namespace

void cpu::embedding(Context&, const EmbeddingForward& a) {
  check_ids(a.ids, a.table.shape[0]);
  const std::int64_t T = a.y.shape[0], row = a.y.shape[1] * size_of(a.y.dtype);
  const auto* id = a.ids.as<std::int32_t>();
  const auto* table = static_cast<const std::byte*>(a.table.data);
  auto* y = static_cast<std::byte*>(a.y.data);
#pragma omp parallel for if (a.y.count() > kWorthThreads)
  for (std::int64_t t = 0; t < T; ++t)
    id[t] == kElsewhere ? std::memset(y + t * row, 0, std::size_t(row))
                        : std::memcpy(y + t * row, table + id[t] * row, std::size_t(row));
}

void cpu::embedding(Context&, const EmbeddingBackward& a) {
  check_ids(a.ids, a.dtable.shape[0]);
  with_storage(a.dy.dtype, [&](auto storage) { backward<decltype(storage)>(a); });
}

}  // namespace moetrain::ops
