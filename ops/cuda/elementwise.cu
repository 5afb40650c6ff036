// elementwise.cu -- one pack of 16 bytes a thread; the elements past the last pack one by one. Bound by the bytes they touch.
#include "ops/cuda/copy_rows.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/storage.cuh"
#include "ops/elementwise.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr unsigned int kThreads = 256;

// grid (ceil((packs + rest) / kThreads)), block (kThreads): body.at<kCount>(i) for every pack, body.at<1>(i) for the rest
template <int kCount, class Body>
__global__ void elementwise_kernel(Body body, std::int64_t n) {
  const std::int64_t packs = n / kCount, i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < packs)
    body.template at<kCount>(i * kCount);
  else if (packs * kCount + (i - packs) < n)
    body.template at<1>(packs * kCount + (i - packs));
}

template <int kCount, class Body>
void run(Context& ctx, const Body& body, std::int64_t n, bool packed) {
  if (packed)
    launch(ctx, elementwise_kernel<kCount, Body>, {blocks(n / kCount + n % kCount, kThreads), kThreads}, body, n);
  else
    launch(ctx, elementwise_kernel<1, Body>, {blocks(n, kThreads), kThreads}, body, n);
}

template <class X, class Y>
struct AddTo {
  const X* x;
  Y* y;
  template <int kCount>
  __device__ void at(std::int64_t i) const {
    const auto xs = load_floats<kCount>(x + i);
    auto ys = load_floats<kCount>(y + i);
    for (int j = 0; j < kCount; ++j) ys.at[j] += xs.at[j];
    store_floats<kCount>(y + i, ys);
  }
};

template <class X, class Y>
struct CopyTo {
  const X* x;
  Y* y;
  template <int kCount>
  __device__ void at(std::int64_t i) const {
    if constexpr (std::is_same_v<X, Y>)
      store<kCount>(y + i, load<kCount>(x + i));
    else
      store_floats<kCount>(y + i, load_floats<kCount>(x + i));
  }
};

template <class T>
struct SumOf {
  const T *a, *b;
  T* y;
  template <int kCount>
  __device__ void at(std::int64_t i) const {
    auto as = load_floats<kCount>(a + i);
    const auto bs = load_floats<kCount>(b + i);
    for (int j = 0; j < kCount; ++j) as.at[j] += bs.at[j];
    store_floats<kCount>(y + i, as);
  }
};

template <class T>
struct ScaleBy {
  float factor;
  T* y;
  template <int kCount>
  __device__ void at(std::int64_t i) const {
    auto ys = load_floats<kCount>(y + i);
    for (int j = 0; j < kCount; ++j) ys.at[j] *= factor;
    store_floats<kCount>(y + i, ys);
  }
};

template <class T>
struct GateForward {
  const T *x, *gate;
  T* y;
  template <int kCount>
  __device__ void at(std::int64_t i) const {
    auto xs = load_floats<kCount>(x + i);
    const auto gates = load_floats<kCount>(gate + i);
    for (int j = 0; j < kCount; ++j) xs.at[j] *= sigmoid(gates.at[j]);
    store_floats<kCount>(y + i, xs);
  }
};

template <class T>
struct GateBackward {
  const T *dy, *x, *gate;
  T *dx, *dgate;
  template <int kCount>
  __device__ void at(std::int64_t i) const {
    auto dys = load_floats<kCount>(dy + i), xs = load_floats<kCount>(x + i);
    const auto gates = load_floats<kCount>(gate + i);
    for (int j = 0; j < kCount; ++j) {
      const float s = sigmoid(gates.at[j]);
      xs.at[j] *= dys.at[j] * s * (1.0F - s);
      dys.at[j] *= s;
    }
    store_floats<kCount>(dx + i, dys);
    store_floats<kCount>(dgate + i, xs);
  }
};

}  // namespace

void cuda::add(Context& ctx, const Add& a) {
  with_storage(a.x.dtype, [&](auto x) {
    with_storage(a.y.dtype, [&](auto y) {
      using X = device_t<decltype(x)>;
      using Y = device_t<decltype(y)>;
      run<kPackOf<X, Y>>(ctx, AddTo<X, Y>{device_pointer<decltype(x)>(a.x), device_pointer<decltype(y)>(a.y)}, a.y.count(),
                         aligned({a.x, a.y}));
    });
  });
}

void cuda::copy(Context& ctx, const Copy& a) {
  with_storage(a.x.dtype, [&](auto x) {
    with_storage(a.y.dtype, [&](auto y) {
      using X = device_t<decltype(x)>;
      using Y = device_t<decltype(y)>;
      run<kPackOf<X, Y>>(ctx, CopyTo<X, Y>{device_pointer<decltype(x)>(a.x), device_pointer<decltype(y)>(a.y)}, a.y.count(),
                         aligned({a.x, a.y}));
    });
  });
}

void cuda::sum(Context& ctx, const Sum& a) {
  with_storage(a.y.dtype, [&](auto storage) {
    using S = decltype(storage);
    run<kPackOf<S>>(ctx, SumOf<device_t<S>>{device_pointer<S>(a.a), device_pointer<S>(a.b), device_pointer<S>(a.y)}, a.y.count(),
                    aligned({a.a, a.b, a.y}));
  });
}

void cuda::scale(Context& ctx, const Scale& a) {
  with_storage(a.y.dtype, [&](auto storage) {
    using S = decltype(storage);
    run<kPackOf<S>>(ctx, ScaleBy<device_t<S>>{float(a.factor), device_pointer<S>(a.y)}, a.y.count(), aligned({a.y}));
  });
}

void cuda::copy_columns(Context& ctx, const CopyColumns& a) {
  const std::int64_t size = size_of(a.x.dtype);
  copy_rows<std::int64_t>(ctx,
                          {.from = static_cast<const std::byte*>(a.x.data) + a.x_column * size,
                           .to = static_cast<std::byte*>(a.y.data) + a.y_column * size,
                           .rows = a.x.shape[0],
                           .bytes = a.width * size,
                           .from_stride = a.x.shape[1] * size,
                           .to_stride = a.y.shape[1] * size},
                          nullptr, nullptr);
}

void cuda::sigmoid_gate(Context& ctx, const SigmoidGateForward& a) {
  with_storage(a.y.dtype, [&](auto storage) {
    using S = decltype(storage);
    run<kPackOf<S>>(ctx, GateForward<device_t<S>>{device_pointer<S>(a.x), device_pointer<S>(a.gate), device_pointer<S>(a.y)},
                    a.y.count(), aligned({a.x, a.gate, a.y}));
  });
}

void cuda::sigmoid_gate(Context& ctx, const SigmoidGateBackward& a) {
  with_storage(a.x.dtype, [&](auto storage) {
    using S = decltype(storage);
    run<kPackOf<S>>(ctx,
                    GateBackward<device_t<S>>{device_pointer<S>(a.dy), device_pointer<S>(a.x), device_pointer<S>(a.gate),
                                              device_pointer<S>(a.dx), device_pointer<S>(a.dgate)},
                    a.x.count(), aligned({a.dy, a.x, a.gate, a.dx, a.dgate}));
  });
}

}  // namespace moetrain::ops
