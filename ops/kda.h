// kda.h -- Kimi Delta Attention: the gated delta rule, as recurrence (reference) and in chunked WY form (the one that trains).
#pragma once
#include "ops/context.h"
#include "ops/documents.h"

namespace moetrain::ops {

enum class KdaForm : std::uint8_t { chunked, recurrent };
inline constexpr std::int64_t kKdaChunk = 64, kKdaSubChunk = 16;  // rows

struct KdaForward {
  KdaForm form = KdaForm::chunked;
  ConstTensor q;     // (T, N, H), L2-normalised
  ConstTensor k;     // (T, N, H), L2-normalised
  ConstTensor v;     // (T, N, Hv)
  ConstTensor g;     // (T, N, H) real, log decay <= 0
  ConstTensor beta;  // (T, N) real
  double scale;      // of the score, H^-1/2
  bool bounded_gate; // g >= -5: diagonal sub-blocks may be factored through their middle row
  Documents documents;
  ConstTensor initial_state;  // (documents, N, H, Hv) real; absent: zero
  Tensor o;          // (T, N, Hv)
  Tensor final_state;         // (documents, N, H, Hv) real; absent: not wanted
  void check_shapes() const;
};

struct KdaBackward {
  KdaForm form = KdaForm::chunked;
  ConstTensor do_;   // (T, N, Hv)
  ConstTensor q;     // (T, N, H)
  ConstTensor k;     // (T, N, H)
  ConstTensor v;     // (T, N, Hv)
  ConstTensor g;     // (T, N, H) real
  ConstTensor beta;  // (T, N) real
  double scale;
  bool bounded_gate;
  Documents documents;
  ConstTensor initial_state;   // (documents, N, H, Hv) real; absent: zero
  ConstTensor dfinal_state;    // (documents, N, H, Hv) real; absent: zero
  Tensor dq;         // (T, N, H)
  Tensor dk;         // (T, N, H)
  Tensor dv;         // (T, N, Hv)
  Tensor dg;         // (T, N, H) real
  Tensor dbeta;      // (T, N) real
  Tensor dinitial_state;       // (documents, N, H, Hv) real; absent: not wanted
  void check_shapes() const;
};

namespace cpu {
void kda(Context&, const KdaForward&);
void kda(Context&, const KdaBackward&);
}  // namespace cpu

inline void kda(Context& ctx, const KdaForward& a) {
  dispatch(ctx, "kda forward", a, [&] { cpu::kda(ctx, a); });
}
inline void kda(Context& ctx, const KdaBackward& a) {
  dispatch(ctx, "kda backward", a, [&] { cpu::kda(ctx, a); });
}

}  // namespace moetrain::ops
