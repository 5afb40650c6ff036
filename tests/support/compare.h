// compare.h -- what "equal" means in a test: every element within a bound, never NaN, and something other than zeros compared.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "memory/tensor.h"

namespace moetrain::test {

// The elements of a host tensor of any numeric type, as f64.
inline std::vector<double> values_of(ConstTensor t) {
  std::vector<double> v(static_cast<std::size_t>(t.count()));
  for (std::size_t i = 0; i < v.size(); ++i) switch (t.dtype) {
      case DType::f64: v[i] = static_cast<const double*>(t.data)[i]; break;
      case DType::f32: v[i] = double(static_cast<const float*>(t.data)[i]); break;
      case DType::bf16: v[i] = double(float(static_cast<const bf16*>(t.data)[i])); break;
      case DType::i32: v[i] = static_cast<const std::int32_t*>(t.data)[i]; break;
      case DType::i64: v[i] = double(static_cast<const std::int64_t*>(t.data)[i]); break;
      default: fail("compare: dtype", {{"dtype", std::int64_t(t.dtype)}});
    }
  return v;
}

inline std::string digits(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.12g", x);
  return text;
}

// Empty when every |got - want| <= relative * max(|want|, root mean square of want) + absolute; else the first place that is not.
// Written as !(gap <= bound), so NaN never passes. All-zero expectations are refused unless absolute > 0 says they are meant.
inline std::string difference(const std::vector<double>& got, const std::vector<double>& want, double relative, double absolute = 0) {
  if (got.size() != want.size()) return "sizes differ: " + std::to_string(got.size()) + " and " + std::to_string(want.size());
  double sum = 0;
  for (const double w : want) sum += w * w;
  const double rms = want.empty() ? 0 : std::sqrt(sum / double(want.size()));
  if (!std::isfinite(rms)) return "an expected value is not finite";  // its bound would let anything pass
  if (!(rms > 0) && !(absolute > 0)) return "nothing to compare: every expected value is zero";
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double bound = relative * std::max(std::abs(want[i]), rms) + absolute;
    if (!(std::abs(got[i] - want[i]) <= bound))
      return "[" + std::to_string(i) + "] got " + digits(got[i]) + ", want " + digits(want[i]) + ", off by " +
             digits((got[i] - want[i]) / (rms > 0 ? rms : 1)) + " rms";
  }
  return {};
}
inline std::string difference(ConstTensor got, ConstTensor want, double relative, double absolute = 0) {
  return difference(values_of(got), values_of(want), relative, absolute);
}

}  // namespace moetrain::test
