// elementwise.h -- one value from one place: sums, gates, casts and column slices.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct Add {
  ConstTensor x;  // any shape, any floating type
  Tensor y;       // same count, any floating type; y += x
  void check_shapes() const;
};

struct Sum {
  ConstTensor a;  // any shape, floating
  ConstTensor b;  // same
  Tensor y;       // = a + b; may alias either
  void check_shapes() const;
};

struct Copy {
  ConstTensor x;  // any shape, any floating type
  Tensor y;       // same count, any floating type; rounded to nearest even
  void check_shapes() const;
};

struct Scale {
  double factor;
  Tensor y;       // y *= factor
  void check_shapes() const;
};

struct CopyColumns {
  ConstTensor x;  // (T, X)
  std::int64_t x_column;
  Tensor y;       // (T, Y)
  std::int64_t y_column;
  std::int64_t width;
  void check_shapes() const;
};

struct SigmoidGateForward {
  ConstTensor x;     // any shape
  ConstTensor gate;  // same count, before the sigmoid
  Tensor y;          // x sigmoid(gate)
  void check_shapes() const;
};

struct SigmoidGateBackward {
  ConstTensor dy;    // same count as x
  ConstTensor x;     // any shape
  ConstTensor gate;  // same count
  Tensor dx;         // may alias dy
  Tensor dgate;
  void check_shapes() const;
};

namespace cpu {
void add(Context&, const Add&);
void sum(Context&, const Sum&);
void copy(Context&, const Copy&);
void scale(Context&, const Scale&);
void copy_columns(Context&, const CopyColumns&);
void sigmoid_gate(Context&, const SigmoidGateForward&);
void sigmoid_gate(Context&, const SigmoidGateBackward&);
}  // namespace cpu

inline void add(Context& ctx, const Add& a) {
  dispatch(ctx, "add forward", a, [&] { cpu::add(ctx, a); });
}
inline void sum(Context& ctx, const Sum& a) {
  dispatch(ctx, "sum forward", a, [&] { cpu::sum(ctx, a); });
}
inline void copy(Context& ctx, const Copy& a) {
  dispatch(ctx, "copy forward", a, [&] { cpu::copy(ctx, a); });
}
inline void scale(Context& ctx, const Scale& a) {
  dispatch(ctx, "scale forward", a, [&] { cpu::scale(ctx, a); });
}
inline void copy_columns(Context& ctx, const CopyColumns& a) {
  dispatch(ctx, "copy_columns forward", a, [&] { cpu::copy_columns(ctx, a); });
}
inline void sigmoid_gate(Context& ctx, const SigmoidGateForward& a) {
  dispatch(ctx, "sigmoid_gate forward", a, [&] { cpu::sigmoid_gate(ctx, a); });
}
inline void sigmoid_gate(Context& ctx, const SigmoidGateBackward& a) {
  dispatch(ctx, "sigmoid_gate backward", a, [&] { cpu::sigmoid_gate(ctx, a); });
}

}  // namespace moetrain::ops
