// kda.cpp -- the KDA sub-layer between its projections, convolutions and gated norm included; and the delta rule's part of it.
#include "app/bench/bench.h"
#include "ops/cuda/kda_passes.h"
#include "ops/elementwise.h"

namespace moetrain::app {

void bench_kda(const Ceilings& ceilings, const Report& report) {
  for (const auto [B, S] : {std::array<std::int64_t, 2>{1, 8192}, {4, 4096}, {1, 65536}}) {
    const std::int64_t T = B * S, N = 32, H = 128, P = N * H, C = 64;
    BenchCase b(ceilings);
    const auto bf16 = DType::bf16, f32 = DType::f32;
    std::vector<std::int64_t> starts;
    for (std::int64_t n = 0; n <= B; ++n) starts.push_back(n * S);
    auto wide = [&] { return b.empty(bf16, {T, P}); };
    const ops::KdaAttention x{.q_in = b.normal(bf16, {T, P}),
                              .k_in = b.normal(bf16, {T, P}),
                              .v_in = b.normal(bf16, {T, P}),
                              .f = b.normal(bf16, {T, P}),
                              .b = b.normal(bf16, {T, N}),
                              .gate = b.normal(bf16, {T, P}),
                              .q_conv = b.normal(f32, {P, 1, 4}, 0.5),
                              .k_conv = b.normal(f32, {P, 1, 4}, 0.5),
                              .v_conv = b.normal(f32, {P, 1, 4}, 0.5),
                              .a_log = b.zeros(f32, {N}),
                              .dt_bias = b.normal(f32, {N, H}, 1, -4),
                              .o_norm = b.normal(f32, {H}, 0.1, 1),
                              .lower_bound = -5,
                              .scale = 1 / std::sqrt(double(H)),
                              .l2_eps = 1e-6,
                              .norm_eps = 1e-5,
                              .documents = b.documents(starts),
                              .initial_state = {}};
    const ops::KdaAttentionForward forward{.x = x, .o = b.empty(bf16, {T, N, H}), .y = b.empty(bf16, {T, N, H}), .final_state = {}};
    const ops::KdaAttentionBackward backward{.x = x,
                                             .dy = b.normal(bf16, {T, N, H}),
                                             .o = forward.o,
                                             .dfinal_state = {},
                                             .dq_in = wide(),
                                             .dk_in = wide(),
                                             .dv_in = wide(),
                                             .df = wide(),
                                             .db = b.empty(bf16, {T, N}),
                                             .dgate = wide(),
                                             .dq_conv = b.zeros(f32, {P, 1, 4}),
                                             .dk_conv = b.zeros(f32, {P, 1, 4}),
                                             .dv_conv = b.zeros(f32, {P, 1, 4}),
                                             .da_log = b.zeros(f32, {N}),
                                             .ddt_bias = b.zeros(f32, {N, H}),
                                             .do_norm = b.zeros(f32, {H}),
                                             .dinitial_state = {}};
    const std::string shape = "B" + std::to_string(B) + " T" + std::to_string(S) + " N32 H128";
    // of the delta rule alone: 6 T H^2 + 3 T C H + T C^2 multiplications and additions a head (Kimi Linear, eq. 13)
    const double flops = double(N) * double(T) * double(6 * H * H + 3 * C * H + C * C), bytes = 2 * double(T) * double(7 * P + N);
    report(b.time("kda_attention forward", shape, flops, bytes, [&] { ops::kda_attention(b.context(), forward); }));
    report(b.time("kda_attention forward + backward", shape, 3.5 * flops, 2 * bytes + 2 * double(T) * double(7 * P), [&] {
      ops::kda_attention(b.context(), forward);
      ops::kda_attention(b.context(), backward);
    }));
    // What a slice of a sequence costs beside: the maps of its states, here of all documents, and the states after eight slices.
    const Tensor map = b.empty(f32, x.maps()), maps = b.normal(f32, {8 * B, N, H, 2 * H}, 1 / std::sqrt(double(H)));
    const double map_flops = 1.5 * flops;  // of prepare, and two scans without o
    report(b.time("kda_attention map forward", shape, map_flops, bytes,
                  [&] { ops::kda_attention(b.context(), ops::KdaAttentionMap{.x = x, .map = map}); }));
    report(b.time("kda_attention map backward", shape, map_flops, 2 * bytes, [&] {
      ops::kda_attention(b.context(), ops::KdaAttentionMapBackward{.x = x, .dy = backward.dy, .o = forward.o, .map = map});
    }));
    const Tensor state = b.empty(f32, x.states());
    report(b.time("kda_fold of 8", shape, 7 * 2 * double(B * N * H) * double(H * H), double(maps.bytes()),
                  [&] { ops::kda_fold(b.context(), ops::KdaFold{.maps = maps, .first = 0, .end = 8, .state = state}); }));
    // The delta rule alone, as others time it, is the scan and all of prepare but its convolutions, norms and gates.
    const ops::KdaTiles tiles(b.stack(), x, ops::KdaTiles::For::backward);
    const Tensor none;
    ops::KdaTiles without_states = tiles;
    without_states.s = none;
    report(b.time("  of it prepare", shape, flops / 2, bytes, [&] { ops::cuda::kda_prepare(b.context(), x, tiles); }));
    report(b.time("  of it scan", shape, flops / 2, bytes,
                  [&] { ops::cuda::kda_scan(b.context(), x, without_states, forward.o, none); }));
    for (const Tensor& t : {tiles.do_, tiles.dr, tiles.ds})
      ops::copy(b.context(), ops::Copy{.x = b.normal(bf16, t.shape, 0.1), .y = t});
    report(b.time("  of it scan, states kept", shape, flops / 2, bytes,
                  [&] { ops::cuda::kda_scan(b.context(), x, tiles, none, none); }));
    report(b.time("  of it gradients", shape, flops, 2 * bytes, [&] { ops::cuda::kda_gradients(b.context(), backward, tiles); }));
  }
}

}  // namespace moetrain::app
