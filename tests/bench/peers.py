#!/usr/bin/env python3
"""What PyTorch and its best kernels reach on the shapes of `moetrain bench`, to be run on the same GPU beside it.

peers.py [kda] [attention] [grouped_linear] [cross_entropy] [indexer]      all unless told; needs torch, and fla for kda
Each line: op, shape, median of event timings in ms, peak memory above the inputs in MiB.
"""
import sys

import torch

DEVICE = "cuda"


def normal(*shape, dtype=torch.bfloat16, deviation=1.0):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).mul_(deviation).to(dtype)


def report(op, shape, run, warm_ups=3, runs=15):
    try:
        for _ in range(warm_ups):
            run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = []
        for _ in range(runs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"{op:<34} {shape:<40} {sorted(times)[len(times) // 2]:9.3f} ms  {peak:9.1f} MiB", flush=True)
    except Exception as e:  # a peer that cannot run the shape is a line of the table too
        print(f"{op:<34} {shape:<40} failed: {type(e).__name__}: {str(e)[:120]}", flush=True)


def kda():
    from fla.ops.kda import chunk_kda

    for B, T in [(1, 8192), (4, 4096), (1, 65536)]:
        N, H = 32, 128
        shape = f"B{B} T{T} N{N} H{H}"
        q, k, v, g = (normal(B, T, N, H).requires_grad_() for _ in range(4))
        beta = normal(B, T, N).requires_grad_()
        a_log = torch.zeros(N, device=DEVICE, requires_grad=True)
        dt_bias = torch.zeros(N * H, device=DEVICE, requires_grad=True)
        do = normal(B, T, N, H)

        def forward():
            return chunk_kda(q, k, v, g, beta, A_log=a_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True,
                             use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0)[0]

        def forward_only():
            with torch.no_grad():
                forward()

        def both():
            for x in (q, k, v, g, beta, a_log, dt_bias):
                x.grad = None
            forward().backward(do)

        report("fla chunk_kda forward", shape, forward_only)
        report("fla chunk_kda forward + backward", shape, both)


def attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    T, N, Hq, Hv = 8192, 32, 192, 128
    q, k = (normal(1, N, T, Hq).requires_grad_() for _ in range(2))
    v, do = normal(1, N, T, Hv).requires_grad_(), normal(1, N, T, Hv)

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_only():
        with torch.no_grad():
            forward()

    def both():
        q.grad = k.grad = v.grad = None
        forward().backward(do)

    report("cudnn attention forward", f"T{T} N{N} {Hq}/{Hv}", forward_only)
    report("cudnn attention forward + backward", f"T{T} N{N} {Hq}/{Hv}", both)


def skewed(groups, rows):
    weights = torch.rand(groups, generator=torch.Generator().manual_seed(1)) ** 2 + 0.05
    sizes = (weights / weights.sum() * rows).long()
    sizes[-1] += rows - sizes.sum()
    return sizes


def grouped_linear():
    for D, I, groups, rows, even in [(2048, 1024, 14, 16384, True), (2048, 1024, 14, 131072, False), (7168, 2048, 14, 131072, False),
                                     (2048, 1024, 896, 131072, False)]:
        sizes = torch.full((groups,), rows // groups) if even else skewed(groups, rows)
        sizes[-1] += rows - sizes.sum()
        offsets = torch.cumsum(sizes, 0).to(torch.int32).to(DEVICE)
        up, down = normal(groups, 2 * I, D, deviation=0.02), normal(groups, D, I, deviation=0.02)
        x, h, y, dh = normal(rows, D), normal(rows, I), normal(rows, D), normal(rows, 2 * I)
        shape = f"D{D} I{I} groups {groups} rows {rows}" + ("" if even else " skewed")
        mm = torch._grouped_mm
        report("grouped_mm forward", shape, lambda: (mm(x, up.transpose(1, 2), offs=offsets), mm(h, down.transpose(1, 2), offs=offsets)))
        report("grouped_mm dgrad", shape, lambda: (mm(dh, up, offs=offsets), mm(y, down, offs=offsets)))
        report("grouped_mm wgrad (bf16 dW)", shape, lambda: (mm(dh.t(), x, offs=offsets), mm(y.t(), h, offs=offsets)))


def cross_entropy():
    T, V = 8192, 163840
    for D in (7168, 2304):
        hidden, weight = normal(T, D), normal(V, D, deviation=0.02)
        logits = normal(T, V)

        def products():
            torch.matmul(hidden, weight.t(), out=logits)
            return logits @ weight, logits.t() @ hidden

        report("three products, bf16 dW", f"N{T} V{V} D{D}", products)
        del logits


def indexer():
    scores = torch.randn(8192, 8192, device=DEVICE)
    report("torch.topk 2048", "8192 x 8192 f32", lambda: torch.topk(scores, 2048, dim=-1, sorted=False))


if __name__ == "__main__":
    cases = {f.__name__: f for f in (kda, attention, grouped_linear, cross_entropy, indexer)}
    unknown = [name for name in sys.argv[1:] if name not in cases]
    if unknown:
        sys.exit(f"peers.py: no case {unknown[0]}; there are {', '.join(cases)}")
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}")
    for name, run in cases.items():
        if len(sys.argv) < 2 or name in sys.argv[1:]:
            try:
                run()
            except ImportError as e:
                print(f"{name}: left out, {e}")
