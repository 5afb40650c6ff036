// params.cpp -- the table, and fresh values from a counter-based generator.
#include "core/params.h"

#include <algorithm>
#include <cmath>

#include "io/pattern.h"
#include "ops/random.h"

namespace moetrain::core {

int ParamTable::add(Param p) {
  const int index = size();
  if (!by_name_.emplace(p.name, index).second) throw Error("parameter declared twice: " + p.name);
  params_.push_back(std::move(p));
  return index;
}

int ParamTable::find(const std::string& name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? -1 : it->second;
}

void ParamTable::freeze_all_but(const std::vector<std::string>& patterns) {
  std::vector<bool> used(patterns.size());
  for (Param& p : params_) {
    bool wanted = false;
    for (std::size_t i = 0; i < patterns.size(); ++i)
      if (io::matches(patterns[i], p.name)) used[i] = wanted = true;
    p.frozen = !wanted;
    p.trainable = p.trainable && wanted;
  }
  for (std::size_t i = 0; i < patterns.size(); ++i)
    if (!used[i]) throw Error("training.trainable: pattern '" + patterns[i] + "' matches no parameter", ExitCode::bad_job);
}

std::int64_t ParamTable::count() const {
  std::int64_t n = 0;
  for (const Param& p : params_) n += p.shape.count();
  return n;
}

double initial_value(const Param& p, double initializer_range, std::uint64_t seed, std::int64_t index) {
  const auto stream = ops::stream_of(p.name);
  const auto i = std::uint64_t(index);
  switch (p.init) {
    case Init::normal:
      return initializer_range * ops::normal(seed, stream, i);
    case Init::one:
      return 1;
    case Init::zero:
      return 0;
    case Init::fan_in:
      return (2 * ops::uniform(seed, stream, i) - 1) / std::sqrt(double(p.shape[p.shape.rank() - 1]));
    case Init::log_decay:
      return std::log(1 + 15 * ops::uniform(seed, stream, i));
    case Init::dt_bias: {
      const double low = std::log(1e-3), high = std::log(1e-1);
      const double dt = std::max(1e-4, std::exp(low + (high - low) * ops::uniform(seed, stream, i)));
      return dt + std::log(-std::expm1(-dt));
    }
  }
  return 0;
}

void initialize_rows(const Param& p, double initializer_range, std::uint64_t seed, parallel::Rows rows, Tensor to,
                     std::int64_t column) {
  const std::int64_t whole = p.shape.row(), row = to.shape.row(), n = to.count();
  check(to.shape[0] == rows.count() && column + row <= whole, "initialize_rows: rows do not fit",
        {{"rows", rows.count()}, {"to", to.shape[0]}, {"column", column}, {"width", row}, {"of", whole}});
#pragma omp parallel for if (n > 10000)
  for (std::int64_t i = 0; i < n; ++i) {
    const double v = initial_value(p, initializer_range, seed, (rows.begin + i / row) * whole + column + i % row);
    if (to.dtype == DType::f64)
      static_cast<double*>(to.data)[i] = v;
    else if (to.dtype == DType::f32)
      static_cast<float*>(to.data)[i] = float(v);
    else
      static_cast<bf16*>(to.data)[i] = bf16(v);
  }
}

}  // namespace moetrain::core
