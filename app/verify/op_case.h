// op_case.h -- one operator of a job as a device computes it, beside the CPU's f64 backend on the same values, widened.
//
// Inputs are random and lie on the device; the reference reads the rows and columns that it needs from there. It computes few rows,
// heads or experts, chosen by the job's seed, but every sum over its whole length.
#pragma once
#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/config.h"
#include "memory/stack.h"
#include "ops/context.h"
#include "ops/documents.h"

namespace moetrain::app {

using Places = std::vector<std::int64_t>;  // rows or columns, ascending
Places range(std::int64_t begin, std::int64_t end);
Places columns_of_heads(const Places& heads, std::int64_t width);  // of rows that hold heads of this width

// The errors of results that should be `want`: the largest of an element, |got - want| / max(|want|, root mean square of want), and
// that of all together, |got - want| / |want|. NaN where a NaN or infinity is among them, infinite where nothing but zeros is
// wanted and something else came.
struct Gap {
  double element = 0, norm = 0;
};
Gap gap_of(std::span<const double> got, std::span<const double> want);
using Bound = Gap;  // the most that is allowed

// What was found of one pass of one operator.
struct Verdict {
  std::string op, shape, output;  // output: the one closest to its bound, or past it
  DType dtype = DType::none;
  Gap gap;
  Bound bound;
  double ms = 0;              // of the device, its kernels loaded before
  std::int64_t compared = 0;  // elements of all outputs
  bool right = true;
};

struct Verification {
  Device device;
  const core::Config& config;
  std::function<void(const Verdict&)> tell;
  // Sees the values that are about to be compared, and may change them: how a test asks whether a wrong one is found.
  std::function<void(const std::string& op, const std::string& output, Tensor got)> disturb = {};
};

class OpCase {
 public:
  explicit OpCase(const Verification& verification);
  const core::Config& config() const { return verification_.config; }
  const core::ModelConfig& model() const { return config().model; }
  DType storage() const { return config().run.dtype; }
  DType real() const { return real_of(storage()); }
  std::int64_t T() const { return config().training.micro_batch_size * config().data.sequence_length; }
  std::int64_t local_experts() const { return model().num_experts / config().parallel.expert_parallel; }
  std::int64_t rows_of_experts() const { return T() * model().num_experts_per_token; }  // where routing is balanced

  // Of the job's kind of storage. The error of a value stored so, and of a real one that is a sum of such.
  Bound stored() const { return storage() == DType::bf16 ? Bound{2e-2, 4e-3} : Bound{3e-4, 3e-5}; }
  static Bound summed() { return {1e-3, 1e-4}; }
  static Bound exact() { return {}; }

  // On the device.
  Tensor normal(DType dtype, Shape shape, double deviation = 1, double mean = 0);  // a large one repeats a block
  Tensor zeros(DType dtype, Shape shape) { return tensors_.zeros(dtype, shape); }
  Tensor empty(DType dtype, Shape shape);  // NaN
  template <class T>
  Tensor put(const std::vector<T>& values, Shape shape) {
    const Tensor t = tensors_.take(DTypeOf<T>::value, shape);
    check(t.count() == std::int64_t(values.size()), "verify: values do not fill the shape");
    copy_to_device(verification_.device, t.data, values.data(), t.bytes());
    return t;
  }
  void keep_rows(Tensor t, const Places& rows);        // all others become 0
  void keep_columns(Tensor t, const Places& columns);  // of a row of dim 0
  // As packing gives them: a sequence of short documents and a long one, the others whole.
  ops::Documents documents();
  const std::vector<std::int64_t>& starts() const { return starts_; }

  Places sample(std::int64_t n, std::int64_t count);  // of 0..n-1: the first, the last and others
  std::uint64_t random(std::uint64_t below);

  // On the host.
  ops::Context& host() { return host_; }
  Stack& host_tensors() { return host_tensors_; }
  Tensor host_zeros(Shape shape) { return host_tensors_.zeros(DType::f64, shape); }
  template <class T>
  Tensor host_of(const std::vector<T>& values, Shape shape) {
    const Tensor t = host_tensors_.take(DTypeOf<T>::value, shape);
    check(t.count() == std::int64_t(values.size()), "verify: values do not fill the shape");
    std::copy(values.begin(), values.end(), t.template as<T>());
    return t;
  }
  Tensor fetch(ConstTensor t) { return fetch(t, range(0, t.shape[0])); }
  Tensor fetch(ConstTensor t, const Places& rows);  // of the device, as it is stored
  Tensor wide(ConstTensor t);                       // of the device, in f64
  Tensor wide(ConstTensor t, const Places& rows);
  Tensor wide(ConstTensor t, const Places& rows, const Places& columns);  // (rows, columns)
  Tensor pick(ConstTensor host, const Places& rows);                      // of the host, f64
  Tensor pick(ConstTensor host, const Places& rows, const Places& columns);

  // Runs the op twice, the first time to load its kernels, after `prepare` each time.
  void run(std::string op, std::string shape, const std::function<void()>& prepare, const std::function<void(ops::Context&)>& call);
  void run(std::string op, std::string shape, const std::function<void(ops::Context&)>& call) {
    run(
        std::move(op), std::move(shape), [] {}, call);
  }
  void clear(std::initializer_list<Tensor> outputs) const;                           // those that add, before they do
  void compare(const char* output, ConstTensor got, ConstTensor want, Bound bound);  // got: on the device
  void compare(const char* output, ConstTensor got, const Places& rows, ConstTensor want, Bound bound);
  void compare(const char* output, ConstTensor got, const Places& rows, const Places& columns, ConstTensor want, Bound bound);
  void judge(const char* output, Tensor got, ConstTensor want, Bound bound);  // both on the host, f64
  void tell();                                                                // of the run and all that was compared since

 private:
  const Verification& verification_;
  Memory memory_{verification_.device}, host_memory_{Device::cpu};
  Stack tensors_{memory_, Category::activations, /*poison=*/false, Area::high}, scratch_{memory_, Category::workspace};
  Stack host_tensors_{host_memory_, Category::activations}, host_scratch_{host_memory_, Category::workspace};
  ops::OwnedBlas blas_;
  ops::OpTimes times_;
  ops::Context device_, host_{.scratch = host_scratch_};
  std::vector<std::int64_t> starts_;
  std::uint64_t stream_ = 0, draws_ = 0;
  Verdict verdict_;
};

// Calls f(begin, end) over blocks of 0..n-1, each of about 2^22 elements in rows of `width`.
template <class F>
void each_block(std::int64_t n, std::int64_t width, F f) {
  const std::int64_t block = std::max<std::int64_t>(1, (std::int64_t(1) << 22) / std::max<std::int64_t>(width, 1));
  for (std::int64_t begin = 0; begin < n; begin += block) f(begin, std::min(begin + block, n));
}

std::string sizes(std::initializer_list<Named> dims);  // "T8192 D2048"

}  // namespace moetrain::app
