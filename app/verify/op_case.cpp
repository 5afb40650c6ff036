// op_case.cpp -- inputs on a device, values back on the host, and how far two results are apart.
#include "app/verify/op_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#include "ops/random.h"

namespace moetrain::app {
namespace {

constexpr std::int64_t kPieceBytes = 32 << 20;  // of a transfer

void store(DType dtype, std::byte* to, std::int64_t i, double v) {
  if (dtype == DType::bf16)
    reinterpret_cast<bf16*>(to)[i] = bf16(v);
  else if (dtype == DType::f32)
    reinterpret_cast<float*>(to)[i] = float(v);
  else
    reinterpret_cast<double*>(to)[i] = v;
}

template <class T>
void widen(const std::byte* from, const Places& columns, double* to) {
  const T* x = reinterpret_cast<const T*>(from);
  for (std::size_t c = 0; c < columns.size(); ++c) to[c] = double(x[columns[c]]);
}
void widen(DType dtype, const std::byte* from, const Places& columns, double* to) {
  switch (dtype) {
    case DType::bf16:
      return widen<bf16>(from, columns, to);
    case DType::f32:
      return widen<float>(from, columns, to);
    case DType::f64:
      return widen<double>(from, columns, to);
    case DType::i32:
      return widen<std::int32_t>(from, columns, to);
    case DType::i64:
      return widen<std::int64_t>(from, columns, to);
    default:
      fail("verify: a type without values", {{"dtype", std::int64_t(dtype)}});
  }
}

// f(first of them, how many) for every run of consecutive rows, none larger than a piece.
template <class F>
void each_run(const Places& rows, std::int64_t row_bytes, F f) {
  const auto most = std::size_t(std::max<std::int64_t>(1, kPieceBytes / std::max<std::int64_t>(row_bytes, 1)));
  for (std::size_t i = 0; i < rows.size();) {
    std::size_t n = 1;
    while (i + n < rows.size() && n < most && rows[i + n] == rows[i] + std::int64_t(n)) ++n;
    f(i, n);
    i += n;
  }
}

// Documents of one sequence after another: the last is cut, into a few short ones and the long rest.
std::vector<std::int64_t> packed(std::int64_t sequences, std::int64_t S, bool packing) {
  std::vector<std::int64_t> starts;
  for (std::int64_t n = 0; n < sequences; ++n) starts.push_back(n * S);
  if (packing)
    for (const std::int64_t at : {std::int64_t(1), S / 64 + 2, S / 16 + 3, S / 8 + 5})
      if (const std::int64_t start = (sequences - 1) * S + at; at < S && start > starts.back()) starts.push_back(start);
  starts.push_back(sequences * S);
  return starts;
}

}  // namespace

Places range(std::int64_t begin, std::int64_t end) {
  Places places(std::size_t(end - begin));
  std::iota(places.begin(), places.end(), begin);
  return places;
}

Places columns_of_heads(const Places& heads, std::int64_t width) {
  Places columns;
  for (const std::int64_t n : heads)
    for (std::int64_t h = 0; h < width; ++h) columns.push_back(n * width + h);
  return columns;
}

Gap gap_of(std::span<const double> got, std::span<const double> want) {
  check(got.size() == want.size(), "verify: results and reference differ in number",
        {{"got", std::int64_t(got.size())}, {"want", std::int64_t(want.size())}});
  double squares = 0, gaps = 0, worst = 0;
  for (const double w : want) squares += w * w;
  const double rms = std::sqrt(squares / double(std::max<std::size_t>(want.size(), 1)));
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double off = std::abs(got[i] - want[i]), of = std::max(std::abs(want[i]), rms);
    if (off == 0) continue;
    gaps += off * off;
    worst = std::max(worst, off / of);
  }
  if (!std::isfinite(squares) || !std::isfinite(gaps)) return {std::nan(""), std::nan("")};
  return {worst, gaps == 0 ? 0 : std::sqrt(gaps / squares)};
}

OpCase::OpCase(const Verification& verification)
    : verification_(verification),
      blas_(ops::make_blas(memory_)),
      device_{.scratch = scratch_, .times = &times_, .blas = blas_.get()},
      starts_(packed(config().training.micro_batch_size, config().data.sequence_length, config().data.packing)) {}

Tensor OpCase::normal(DType dtype, Shape shape, double deviation, double mean) {
  constexpr std::int64_t kBlock = (1 << 20) + 7;  // elements; a prime, so that no two of a million rows are alike
  const Tensor t = tensors_.take(dtype, shape);
  const std::int64_t n = std::min(kBlock, t.count());
  std::vector<std::byte> block(std::size_t(n * size_of(dtype)));
#pragma omp parallel for if (n > 10000)
  for (std::int64_t i = 0; i < n; ++i)
    store(dtype, block.data(), i, mean + deviation * ops::normal(config().run.seed, stream_, std::uint64_t(i)));
  ++stream_;
  for (std::int64_t at = 0; at < t.bytes(); at += std::int64_t(block.size()))
    copy_to_device(verification_.device, static_cast<std::byte*>(t.data) + at, block.data(),
                   std::min(std::int64_t(block.size()), t.bytes() - at));
  return t;
}

Tensor OpCase::empty(DType dtype, Shape shape) {
  const Tensor t = tensors_.take(dtype, shape);
  fill(verification_.device, t.data, 0xff, t.bytes());
  return t;
}

void OpCase::keep_rows(Tensor t, const Places& rows) {
  std::int64_t done = 0;
  const auto zero_to = [&](std::int64_t row) {
    const Tensor between = t.rows(done, std::max(done, row));
    fill(verification_.device, between.data, 0, between.bytes());
    done = row + 1;
  };
  for (const std::int64_t row : rows) zero_to(row);
  zero_to(t.shape[0]);
}

void OpCase::keep_columns(Tensor t, const Places& columns) {
  const std::int64_t row_bytes = t.shape.row() * size_of(t.dtype), size = size_of(t.dtype);
  std::vector<std::byte> there, here;
  const Places rows = range(0, t.shape[0]);
  each_run(rows, row_bytes, [&](std::size_t first, std::size_t n) {
    const Tensor piece = t.rows(rows[first], rows[first] + std::int64_t(n));
    there.resize(std::size_t(piece.bytes()));
    here.assign(there.size(), std::byte(0));
    copy_to_host(verification_.device, there.data(), piece.data, piece.bytes());
    for (std::size_t r = 0; r < n; ++r)
      for (const std::int64_t c : columns) {
        const auto at = r * std::size_t(row_bytes) + std::size_t(c * size);
        std::memcpy(here.data() + at, there.data() + at, std::size_t(size));
      }
    copy_to_device(verification_.device, piece.data, here.data(), piece.bytes());
  });
}

ops::Documents OpCase::documents() { return {starts_, put(starts_, {std::int64_t(starts_.size())})}; }

std::uint64_t OpCase::random(std::uint64_t below) {
  return std::uint64_t(ops::uniform(config().run.seed, ops::stream_of("verify"), draws_++) * double(below));
}

Places OpCase::sample(std::int64_t n, std::int64_t count) {
  if (n <= count) return range(0, n);
  std::set<std::int64_t> chosen{0, n - 1};
  while (std::int64_t(chosen.size()) < count) chosen.insert(std::int64_t(random(std::uint64_t(n))));
  return {chosen.begin(), chosen.end()};
}

Tensor OpCase::fetch(ConstTensor t, const Places& rows) {
  const Tensor to = host_tensors_.take(t.dtype, t.shape.with_dim0(std::int64_t(rows.size())));
  const std::int64_t row_bytes = t.shape.row() * size_of(t.dtype);
  each_run(rows, row_bytes, [&](std::size_t first, std::size_t n) {
    copy_to_host(verification_.device, static_cast<std::byte*>(to.data) + std::int64_t(first) * row_bytes,
                 static_cast<const std::byte*>(t.data) + rows[first] * row_bytes, std::int64_t(n) * row_bytes);
  });
  return to;
}

Tensor OpCase::wide(ConstTensor t, const Places& rows, const Places& columns) {
  const std::int64_t row_bytes = t.shape.row() * size_of(t.dtype);
  const Tensor to = host_tensors_.take(DType::f64, {std::int64_t(rows.size()), std::int64_t(columns.size())});
  std::vector<std::byte> piece;
  each_run(rows, row_bytes, [&](std::size_t first, std::size_t n) {
    piece.resize(n * std::size_t(row_bytes));
    copy_to_host(verification_.device, piece.data(), static_cast<const std::byte*>(t.data) + rows[first] * row_bytes,
                 std::int64_t(piece.size()));
#pragma omp parallel for if (n * columns.size() > 10000)
    for (std::size_t r = 0; r < n; ++r)
      widen(t.dtype, piece.data() + r * std::size_t(row_bytes), columns, to.as<double>() + (first + r) * columns.size());
  });
  return to;
}
Tensor OpCase::wide(ConstTensor t, const Places& rows) {
  return wide(t, rows, range(0, t.shape.row())).reshape(t.shape.with_dim0(std::int64_t(rows.size())));
}
Tensor OpCase::wide(ConstTensor t) { return wide(t, range(0, t.shape[0])); }

Tensor OpCase::pick(ConstTensor host, const Places& rows, const Places& columns) {
  const Tensor to = host_tensors_.take(DType::f64, {std::int64_t(rows.size()), std::int64_t(columns.size())});
  for (std::size_t r = 0; r < rows.size(); ++r)
    widen(DType::f64, reinterpret_cast<const std::byte*>(host.as<double>() + rows[r] * host.shape.row()), columns,
          to.as<double>() + r * columns.size());
  return to;
}
Tensor OpCase::pick(ConstTensor host, const Places& rows) {
  return pick(host, rows, range(0, host.shape.row())).reshape(host.shape.with_dim0(std::int64_t(rows.size())));
}

void OpCase::clear(std::initializer_list<Tensor> outputs) const {
  for (const Tensor& t : outputs) fill(verification_.device, t.data, 0, t.bytes());
}

void OpCase::run(std::string op, std::string shape, const std::function<void()>& prepare,
                 const std::function<void(ops::Context&)>& call) {
  verdict_ = {.op = std::move(op), .shape = std::move(shape), .dtype = storage()};
  for (int i = 0; i < 2; ++i) {
    prepare();
    times_ = {};
    call(device_);
  }
  times_.collect();
  for (const auto& [name, entry] : times_.by_op) verdict_.ms += 1e3 * entry.seconds;
}

void OpCase::compare(const char* output, ConstTensor got, const Places& rows, const Places& columns, ConstTensor want,
                     Bound bound) {
  Scope scope(host_tensors_);
  judge(output, wide(got, rows, columns), want, bound);
}
void OpCase::compare(const char* output, ConstTensor got, const Places& rows, ConstTensor want, Bound bound) {
  compare(output, got, rows, range(0, got.shape.row()), want, bound);
}
void OpCase::compare(const char* output, ConstTensor got, ConstTensor want, Bound bound) {
  compare(output, got, range(0, got.shape[0]), want, bound);
}

void OpCase::judge(const char* output, Tensor got, ConstTensor want, Bound bound) {
  if (verification_.disturb) verification_.disturb(verdict_.op, output, got);
  const auto values = [](ConstTensor t) { return std::span(t.as<double>(), std::size_t(t.count())); };
  const Gap gap = gap_of(values(got), values(want));
  const bool right = gap.element <= bound.element && gap.norm <= bound.norm;  // false for NaN
  const auto nearness = [](bool good, const Gap& g, const Bound& b) {
    const auto part = [](double x, double most) { return x == 0 ? 0 : x / most; };
    return good ? std::max(part(g.element, b.element), part(g.norm, b.norm)) : std::numeric_limits<double>::infinity();
  };
  if (verdict_.output.empty() || (verdict_.right && nearness(right, gap, bound) > nearness(true, verdict_.gap, verdict_.bound))) {
    verdict_.output = output;
    verdict_.gap = gap;
    verdict_.bound = bound;
  }
  verdict_.right = verdict_.right && right;
  verdict_.compared += got.count();
}

void OpCase::tell() {
  verdict_.right = verdict_.right && verdict_.compared > 0;
  verification_.tell(verdict_);
}

std::string sizes(std::initializer_list<Named> dims) {
  std::string text;
  for (const Named& d : dims) text += (text.empty() ? "" : " ") + std::string(d.name) + std::to_string(d.value);
  return text;
}

}  // namespace moetrain::app
