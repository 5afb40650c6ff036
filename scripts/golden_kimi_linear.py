"""Second oracle, by other hands: the KimiLinear class of the transformers library, run in f64; writes tests/golden/kimi_linear.h5,
and the same weights in f32 as the folder that the library itself saves, tests/golden/kimi_linear_hf.

The class widens to f32 wherever a half-precision model would need it. Under `widening_to_f64` those very casts widen to f64, so
that the numbers hold to rounding; a plain f32 run beside it shows that nothing else changed. Names are turned back into those of
the public checkpoint, and the equations of golden_tiny.py are held against the result.

    python scripts/golden_kimi_linear.py
    python scripts/golden_kimi_linear.py --exported FOLDER     holds a folder that moetrain exported from kimi_linear_hf to it
"""
import argparse
import contextlib
import json
import math
import pathlib
import shutil
import sys

sys.path.append(sys.path.pop(0))  # this folder last: its tokenize.py must not hide the standard module of that name

import h5py
import numpy as np
import torch
import transformers
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM

import golden_tiny

CONFIG = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "mla_use_nope": True,
    "intermediate_size": 64,
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
    },
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "routed_scaling_factor": 2.446,
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
}
SEQUENCES, LENGTH = 2, 70  # longer than one chunk of 64, and not a multiple of it


@contextlib.contextmanager
def widening_to_f64():
    float32, widen = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = float32, widen


def build():
    # a padding id would silence the gradient of one embedding row
    config = KimiLinearConfig(**CONFIG, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    config._attn_implementation = config._experts_implementation = "eager"
    expected = {
        "num_experts_per_tok": 2, "num_local_experts": 4, "n_shared_experts": 1, "n_group": 1, "norm_topk_prob": True,
        "linear_head_dim": 16, "linear_num_heads": 3, "q_lora_rank": None, "routed_scaling_factor": 2.446,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    }
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise SystemExit(f"the library reads {name} as {getattr(config, name)}, not {value}")
    return KimiLinearForCausalLM(config).eval()


def randomize(model, seed):
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        uniform = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        if name.endswith("A_log"):
            state[name] = (1 + 15 * uniform).log()
        elif name.endswith("dt_bias"):
            dt = (math.log(1e-3) + uniform * math.log(100)).exp()
            state[name] = dt + (-torch.expm1(-dt)).log()
        elif name.endswith("e_score_correction_bias"):
            state[name] = 0.1 * noise
        elif tensor.dim() == 1:
            state[name] = 1 + 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            state[name] = noise
        else:
            state[name] = noise / math.sqrt(tensor.shape[-1])
    # f32 values in f64: both runs below start from the same numbers
    model.double().load_state_dict({n: t.float().double() for n, t in state.items()})


def canonical(tensors):
    """In-memory names and fused tensors of the library back to the checkpoint's, the experts of a layer stacked."""
    out = {}
    for name, tensor in tensors.items():
        if not name.startswith("model.layers.0."):
            name = name.replace(".mlp.", ".block_sparse_moe.")
        name = name.replace(".forget_gate.", ".")
        if name.endswith("self_attn.conv1d.weight"):
            for which, part in zip("qkv", tensor.chunk(3)):
                out[name.replace("conv1d", f"{which}_conv1d")] = part
        elif name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            out[stem + "w1"], out[stem + "w3"] = tensor.chunk(2, dim=1)
        elif name.endswith("experts.down_proj"):
            out[name.replace("down_proj", "w2")] = tensor
        elif name.endswith("A_log"):
            out[name] = tensor.flatten()
        else:
            out[name] = tensor
    return {n: t.detach().contiguous() for n, t in out.items()}


def run(model, tokens, unshifted_labels):
    model.zero_grad()
    result = model(input_ids=tokens, labels=unshifted_labels, use_cache=False)
    result.loss.backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    if missing:
        raise SystemExit(f"no gradient: {missing}")
    return result.logits.detach(), result.loss.detach(), canonical({n: p.grad for n, p in model.named_parameters()})


def gap(a, b):
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def compare_exported(folder, saved):
    """The library finds every tensor in what was imported from `saved` and exported again, with the same bits."""
    models = [KimiLinearForCausalLM.from_pretrained(path, output_loading_info=True) for path in (saved, folder)]
    for _, report in models:
        if any(report.values()):
            raise SystemExit(f"the library does not load it as it is: {report}")
    ours, theirs = (model.state_dict() for model, _ in reversed(models))
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()):
        raise SystemExit("weights differ")
    print(f"{folder}: loaded by the library, {len(theirs)} tensors with the same bits")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent.parent / "tests" / "golden")
    parser.add_argument("--exported", type=pathlib.Path)
    args = parser.parse_args()

    torch.set_default_dtype(torch.float32)
    if args.exported:
        return compare_exported(args.exported, args.out / "kimi_linear_hf")
    model = build()
    randomize(model, 40)
    weights = canonical(dict(model.state_dict()))
    shapes = golden_tiny.parameter_shapes(CONFIG | {"routed_expert_hidden_size": None})
    if {n: tuple(t.shape) for n, t in weights.items()} != shapes:
        raise SystemExit("names or shapes differ from the canonical ones")

    rng = np.random.default_rng(41)
    tokens = torch.tensor(rng.integers(0, CONFIG["vocab_size"], (SEQUENCES, LENGTH)))
    unshifted = tokens.clone()
    unshifted[0, 5:9] = golden_tiny.IGNORED
    labels = torch.full_like(unshifted, golden_tiny.IGNORED)
    labels[:, :-1] = unshifted[:, 1:]
    documents = torch.arange(SEQUENCES + 1) * LENGTH

    with widening_to_f64():
        logits, loss, grads = run(model, tokens, unshifted)
    if logits.dtype != torch.float64:
        raise SystemExit("the run was not in f64")
    narrow_logits, narrow_loss, narrow_grads = run(model.float(), tokens, unshifted)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"loss {float(loss):.9f}; plain f32 run: loss {gap(narrow_loss, loss):.1e}, logits {gap(narrow_logits, logits):.1e}, "
          f"gradients {max(gap(narrow_grads[n], g) for n, g in grads.items()):.1e} (relative)")

    torch.set_default_dtype(torch.float64)
    config = CONFIG | {"routed_expert_hidden_size": None}
    batch = {"tokens": tokens, "labels": labels, "documents": documents}
    own_loss, _, own_logits, _, own_grads = golden_tiny.gradients(config, weights, batch)
    if set(own_grads) != set(grads):
        raise SystemExit("the two programs disagree on which parameters have gradients")
    worst = max((gap(own_grads[n], g), n) for n, g in grads.items())
    print(f"equations of golden_tiny.py: loss {gap(own_loss, loss):.1e}, logits {gap(own_logits, logits.flatten(0, 1)):.1e}, "
          f"gradients {worst[0]:.1e} ({worst[1]}) (relative)")
    if not max(gap(own_logits, logits.flatten(0, 1)), worst[0]) < 1e-10:
        raise SystemExit("the two programs disagree")

    path = args.out / "kimi_linear.h5"
    with h5py.File(path, "w") as file:
        file["config"] = np.bytes_(json.dumps(CONFIG))
        for name, tensor in weights.items():
            file[f"weights/{name}"] = tensor.numpy()
        for name, tensor in grads.items():
            file[f"gradients/{name}"] = tensor.numpy()
        file["tokens"] = tokens.numpy().astype(np.int32)
        file["labels"] = labels.numpy().astype(np.int32)
        file["documents"] = documents.numpy().astype(np.int64)
        file["logits"] = logits.flatten(0, 1).numpy()
        file["lm_loss"] = float(loss)
    folder = args.out / "kimi_linear_hf"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size="200KB")  # three files and an index
    (folder / "generation_config.json").unlink(missing_ok=True)
    print(f"{path.name}: {sum(t.numel() for t in weights.values())} parameters, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
