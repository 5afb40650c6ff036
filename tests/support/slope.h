// slope.h -- is a gradient the slope of its own forward? Central differences in f64.
#pragma once
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/tensors.h"

namespace moetrain::test {

// Compares gradient (f64, as x) with (f(x + h e_i) - f(x - h e_i)) / 2h for `samples` elements i of x spread over it (all, when
// it has no more), f being a scalar function of everything that reads x's storage. Each gap must be within
// relative * max(|slope|, root mean square of the sampled slopes) + absolute. Empty when it holds, else the worst place.
// The step is extrapolated once (Richardson: 4/3 of the half step minus 1/3 of the full one), so that the error is O(h^4).
// A gradient that is zero at every sample is refused unless absolute > 0 says that is meant.
inline std::string slope_difference(const std::function<double()>& f, Tensor x, ConstTensor gradient, double relative = 1e-6,
                                    double absolute = 0, std::int64_t samples = 64, double h = 1e-3) {
  check(x.dtype == DType::f64 && gradient.dtype == DType::f64 && x.count() == gradient.count(), "slope: x and gradient must be f64 of one count");
  const std::int64_t n = x.count(), used = std::min(n, samples);
  double* p = x.as<double>();
  const double* g = gradient.as<double>();
  std::vector<double> slopes;
  std::vector<std::int64_t> places;
  double sum = 0;
  for (std::int64_t s = 0; s < used; ++s) {
    const std::int64_t i = used == n ? s : std::int64_t(double(s) * double(n) / double(used)) + s % std::max<std::int64_t>(1, n / used);
    const double x0 = p[i], step = h * std::max(1.0, std::abs(x0));
    auto at = [&](double dx) {
      p[i] = x0 + dx;
      const double y = f();
      p[i] = x0;
      return y;
    };
    const double full = (at(step) - at(-step)) / (2 * step), half = (at(step / 2) - at(-step / 2)) / step;
    slopes.push_back((4 * half - full) / 3);
    places.push_back(i);
    sum += slopes.back() * slopes.back();
  }
  const double rms = used > 0 ? std::sqrt(sum / double(used)) : 0;
  if (!std::isfinite(rms)) return "a slope is not finite";
  if (!(rms > 0) && !(absolute > 0)) return "every sampled slope is zero: nothing was tested";
  std::string worst;
  double worst_excess = 0;
  for (std::size_t s = 0; s < places.size(); ++s) {
    const double gap = std::abs(g[places[s]] - slopes[s]), bound = relative * std::max(std::abs(slopes[s]), rms) + absolute;
    if (!(gap <= bound) && !(gap / bound <= worst_excess)) {
      worst_excess = gap / bound;
      worst = "[" + std::to_string(places[s]) + "] gradient " + std::to_string(g[places[s]]) + ", slope " + std::to_string(slopes[s]) +
              ", gap / rms " + std::to_string(gap / (rms > 0 ? rms : 1));
      if (!(gap == gap)) return worst;
    }
  }
  return worst;
}

// sum_i y_i c_i with fixed pseudo-random c: a scalar whose gradient with respect to y is c (write c into dy).
inline double weighted_sum(ConstTensor y, ConstTensor c) {
  double s = 0;
  for (std::int64_t i = 0; i < y.count(); ++i) s += Bench::get(y, i) * Bench::get(c, i);
  return s;
}

}  // namespace moetrain::test
