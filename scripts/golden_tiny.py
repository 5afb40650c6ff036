"""Independent f64 oracle of the whole model: writes tests/golden/tiny.h5 and tiny_plain.h5 straight from the equations.

Nothing here is shared with the trainer. Speed does not matter: KDA runs token by token, attention is a dense masked matrix, experts
are a loop, and every gradient comes from automatic differentiation. One file, so that it reads against the equations in one go.

    python scripts/golden_tiny.py                 write both files
    python scripts/golden_tiny.py --check         only hold the oracle against numpy loops and finite differences
"""
import argparse
import json
import math
import pathlib
import sys

sys.path.append(sys.path.pop(0))  # this folder last: its tokenize.py must not hide the standard module of that name

import h5py
import numpy as np
import torch

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

IGNORED = -100
LATENT_NORM_EPS = 1e-6  # q_a and kv_a norms have their own eps in the public code
L2_EPS = 1e-6
QUANTILE_BINS = 1000
STEPS = 10

TINY = {
    "model_type": "kimi_linear",
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "intermediate_size": 64,
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "full_attn_layers": [4, 5],
    },
    "dsa_config": {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 5},
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "routed_scaling_factor": 1.0,
    "moe_renormalize": True,
}

PLAIN = {
    "model_type": "kimi_linear",
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "mla_use_nope": True,
    "intermediate_size": 64,
    "linear_attn_config": {"num_heads": 3, "head_dim": 16, "short_conv_kernel_size": 4, "full_attn_layers": [4, 5]},
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "routed_expert_hidden_size": None,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "routed_scaling_factor": 2.446,
    "moe_renormalize": True,
}


def is_full_attention(config, layer):
    return layer + 1 in config["linear_attn_config"]["full_attn_layers"]


def is_moe(config, layer):
    return layer >= config["first_k_dense_replace"]


def parameter_shapes(config):
    """Canonical checkpoint names and shapes; the experts of a layer are one tensor a matrix."""
    D, V = config["hidden_size"], config["vocab_size"]
    attn_res = config.get("attn_res_block_size")
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    if attn_res:
        shapes |= {"model.output_attn_res_norm.weight": (D,), "model.output_attn_res_proj.weight": (1, D)}
    for layer in range(config["num_hidden_layers"]):
        block = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
        if attn_res:
            for place in ("self_attention_res", "mlp_res"):
                block |= {f"{place}_norm.weight": (D,), f"{place}_proj.weight": (1, D)}
        attention = mla_shapes(config) if is_full_attention(config, layer) else kda_shapes(config)
        block |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        block |= moe_shapes(config) if is_moe(config, layer) else mlp_shapes("mlp", D, config["intermediate_size"])
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def kda_shapes(config):
    linear = config["linear_attn_config"]
    D, N, H, taps = config["hidden_size"], linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    shapes = {}
    for which in "qkv":
        shapes |= {f"{which}_proj.weight": (N * H, D), f"{which}_conv1d.weight": (N * H, 1, taps)}
    shapes |= {"f_a_proj.weight": (H, D), "f_b_proj.weight": (N * H, H), "b_proj.weight": (N, D)}
    shapes |= {"A_log": (N,), "dt_bias": (N * H,)}
    if linear.get("use_full_rank_gate"):
        shapes |= {"g_proj.weight": (N * H, D)}
    else:
        shapes |= {"g_a_proj.weight": (H, D), "g_b_proj.weight": (N * H, H)}
    return shapes | {"o_norm.weight": (H,), "o_proj.weight": (D, N * H)}


def mla_shapes(config):
    D, N = config["hidden_size"], config["num_attention_heads"]
    nope, extra, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    if q_rank:
        shapes = {"q_a_proj.weight": (q_rank, D), "q_a_layernorm.weight": (q_rank,)}
        shapes |= {"q_b_proj.weight": (N * (nope + extra), q_rank)}
    else:
        shapes = {"q_proj.weight": (N * (nope + extra), D)}
    shapes |= {
        "kv_a_proj_with_mqa.weight": (kv_rank + extra, D),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (N * (nope + value), kv_rank),
    }
    if config.get("mla_use_output_gate"):
        shapes |= {"g_proj.weight": (N * value, D)}
    shapes |= {"o_proj.weight": (D, N * value)}
    if "dsa_config" in config:
        heads, width = config["dsa_config"]["index_n_heads"], config["dsa_config"]["index_head_dim"]
        shapes |= {
            "indexer.wq_b.weight": (heads * width, q_rank),
            "indexer.wk.weight": (width, D),
            "indexer.k_norm.weight": (width,),
            "indexer.k_norm.bias": (width,),
            "indexer.weights_proj.weight": (heads, D),
        }
    return shapes


def mlp_shapes(prefix, D, F):
    return {f"{prefix}.gate_proj.weight": (F, D), f"{prefix}.up_proj.weight": (F, D), f"{prefix}.down_proj.weight": (D, F)}


def moe_shapes(config):
    D, E, I = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    latent = config["routed_expert_hidden_size"]
    width = latent or D
    shapes = {"gate.weight": (E, D), "gate.e_score_correction_bias": (E,)}
    if latent:
        shapes |= {"routed_expert_down_proj.weight": (latent, D), "routed_expert_up_proj.weight": (D, latent)}
        if config.get("latent_moe_use_norm"):
            shapes |= {"routed_expert_norm.weight": (latent,)}
    shapes |= {"experts.w1": (E, I, width), "experts.w3": (E, I, width), "experts.w2": (E, width, I)}
    shapes |= mlp_shapes("shared_experts", D, config["num_shared_experts"] * I)
    return {f"block_sparse_moe.{name}": shape for name, shape in shapes.items()}


def draw_weights(config, seed):
    """No tensor is left at a neutral value: a term that is dropped, or a weight that is swapped, must show."""
    rng = np.random.default_rng(seed)
    bounded = config["linear_attn_config"].get("gate_lower_bound") is not None
    weights = {}
    for name, shape in parameter_shapes(config).items():
        noise = rng.standard_normal(shape)
        if name.endswith("A_log"):
            # the published start is log U(1, 16) for the softplus gate and 0 for the bounded one
            value = 0.3 * noise if bounded else np.log(rng.uniform(1, 16, shape))
        elif name.endswith("dt_bias"):
            dt = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
            value = dt + np.log(-np.expm1(-dt))
        elif name.endswith(("e_score_correction_bias", "k_norm.bias")):
            value = 0.1 * noise
        elif len(shape) == 1:
            value = 1 + 0.1 * noise
        elif name.endswith("res_proj.weight"):
            value = 0.05 * noise
        elif name.endswith("embed_tokens.weight"):
            value = noise
        else:
            value = noise / math.sqrt(shape[-1])
        weights[name] = torch.tensor(value)
    return weights


def rms_norm(x, weight, eps):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) + bias


def spans(documents):
    return list(zip(documents[:-1].tolist(), documents[1:].tolist()))


def short_conv(u, weight, documents):
    """Causal depthwise convolution; the last tap meets the current token, and a document starts with an empty history."""
    taps = weight.shape[-1]
    out = []
    for begin, end in spans(documents):
        history = torch.cat([torch.zeros(taps - 1, u.shape[1]), u[begin:end]])
        out.append(sum(weight[:, 0, i] * history[i : i + end - begin] for i in range(taps)))
    return torch.cat(out)


def kda_recurrence(q, k, v, g, beta, documents):
    """The state of a head decays a channel, then forgets what it held under k and stores v there; read after the update."""
    T, N, H = q.shape
    out = []
    for begin, end in spans(documents):
        state = torch.zeros(N, H, H)
        for t in range(begin, end):
            state = state * g[t].exp()[:, :, None]
            held = torch.einsum("nkv,nk->nv", state, k[t])
            state = state + beta[t][:, None, None] * k[t][:, :, None] * (v[t] - held)[:, None, :]
            out.append(torch.einsum("nkv,nk->nv", state, q[t]) * H**-0.5)
    return torch.stack(out)


def kda(config, w, x, documents):
    linear = config["linear_attn_config"]
    T, N, H = x.shape[0], linear["num_heads"], linear["head_dim"]

    def projected(which):
        c = short_conv(x @ w(f"{which}_proj.weight").T, w(f"{which}_conv1d.weight"), documents)
        return (c * torch.sigmoid(c)).view(T, N, H)

    def l2(y):
        return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + L2_EPS)

    q, k, v = l2(projected("q")), l2(projected("k")), projected("v")
    f = (x @ w("f_a_proj.weight").T) @ w("f_b_proj.weight").T
    z = (f + w("dt_bias")).view(T, N, H)
    rate = w("A_log").exp()[None, :, None]
    bound = linear.get("gate_lower_bound")
    g = -rate * torch.logaddexp(z, torch.zeros_like(z)) if bound is None else bound * torch.sigmoid(rate * z)
    beta = torch.sigmoid(x @ w("b_proj.weight").T)
    o = kda_recurrence(q, k, v, g, beta, documents)
    if linear.get("use_full_rank_gate"):
        gate = x @ w("g_proj.weight").T
    else:
        gate = (x @ w("g_a_proj.weight").T) @ w("g_b_proj.weight").T
    y = rms_norm(o, w("o_norm.weight"), config["rms_norm_eps"]) * torch.sigmoid(gate.view(T, N, H))
    return y.reshape(T, N * H) @ w("o_proj.weight").T


def causal_mask(documents):
    T = int(documents[-1])
    mask = torch.zeros(T, T, dtype=torch.bool)
    for begin, end in spans(documents):
        mask[begin:end, begin:end] = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
    return mask


def masked_softmax(score, mask):
    return torch.softmax(score.masked_fill(~mask, -math.inf), -1)


def choose(scores, candidates, count, later_wins):
    """The best `count` candidates by score; equal scores go to the later (or the earlier) candidate."""
    return sorted(candidates, key=lambda c: (-scores[c], -c if later_wins else c))[:count]


def margin(scores, candidates, count):
    """How far the choice is from another one; exactly equal scores are settled by the tie rule, hence no danger."""
    ranked = sorted((scores[c] for c in candidates), reverse=True)
    gaps = [a - b for a, b in zip(ranked[:count], ranked[1:]) if a != b]
    return min(gaps, default=math.inf)


def indexer_scores(config, w, x, cq):
    heads, width = config["dsa_config"]["index_n_heads"], config["dsa_config"]["index_head_dim"]
    x, cq = x.detach(), cq.detach()
    q = (cq @ w("indexer.wq_b.weight").T).view(-1, heads, width)
    k = layer_norm(x @ w("indexer.wk.weight").T, w("indexer.k_norm.weight"), w("indexer.k_norm.bias"), config["rms_norm_eps"])
    head_weight = (x @ w("indexer.weights_proj.weight").T) * heads**-0.5 * width**-0.5
    return (head_weight[:, :, None] * torch.relu(torch.einsum("tjd,sd->tjs", q, k))).sum(1)


def mla(config, w, x, documents, record, fixed):
    T, N = x.shape[0], config["num_attention_heads"]
    nope, extra, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rank = config["kv_lora_rank"]
    if config["q_lora_rank"]:
        cq = rms_norm(x @ w("q_a_proj.weight").T, w("q_a_layernorm.weight"), LATENT_NORM_EPS)
        q = cq @ w("q_b_proj.weight").T
    else:
        q = x @ w("q_proj.weight").T
    q = q.view(T, N, nope + extra)
    latent = x @ w("kv_a_proj_with_mqa.weight").T
    k_extra = latent[:, rank:]
    c = rms_norm(latent[:, :rank], w("kv_a_layernorm.weight"), LATENT_NORM_EPS)
    kv = (c @ w("kv_b_proj.weight").T).view(T, N, nope + value)

    mask = causal_mask(documents)
    if "dsa_config" in config:
        scores = indexer_scores(config, w, x, cq)
        top = config["dsa_config"]["index_topk"]
        if fixed:
            indices = fixed["selected_indices"][len(record["selected_indices"])]
        else:
            indices = torch.full((T, top), -1)
            listed = scores.tolist()
            for t in range(T):
                keys = torch.nonzero(mask[t]).flatten().tolist()
                chosen = choose(listed[t], keys, top, later_wins=True)
                indices[t, : len(chosen)] = torch.tensor(chosen)
                record["index_margin"] = min(record["index_margin"], margin(listed[t], keys, top))
        record["selected_indices"].append(indices)
        mask = torch.zeros(T, T, dtype=torch.bool)
        for t in range(T):
            mask[t, [s for s in indices[t].tolist() if s >= 0]] = True

    score = torch.einsum("tnd,snd->nts", q[..., :nope], kv[..., :nope]) + torch.einsum("tnd,sd->nts", q[..., nope:], k_extra)
    probability = masked_softmax(score * (nope + extra) ** -0.5, mask)
    o = torch.einsum("nts,snd->tnd", probability, kv[..., nope:]).reshape(T, N * value)

    if "dsa_config" in config:
        target = probability.detach().mean(0)
        log_index = torch.where(mask, torch.log_softmax(scores.masked_fill(~mask, -math.inf), -1), 0.0)
        log_target = torch.where(mask, target, 1.0).log()
        record["indexer_loss"] = record["indexer_loss"] + (target * (log_target - log_index)).sum() / T
    if config.get("mla_use_output_gate"):
        o = o * torch.sigmoid(x @ w("g_proj.weight").T)
    return o @ w("o_proj.weight").T


def gated(config, gate, up):
    if config["hidden_act"] == "silu":
        return gate * torch.sigmoid(gate) * up
    b1, b2 = config["activation_situ_beta"], config["activation_situ_linear_beta"]
    return b1 * torch.tanh(gate / b1) * torch.sigmoid(gate) * b2 * torch.tanh(up / b2)


def mlp(config, w, prefix, x):
    hidden = gated(config, x @ w(f"{prefix}.gate_proj.weight").T, x @ w(f"{prefix}.up_proj.weight").T)
    return hidden @ w(f"{prefix}.down_proj.weight").T


def moe(config, w, x, record, fixed):
    T, E, K = x.shape[0], config["num_experts"], config["num_experts_per_token"]
    scores = torch.sigmoid(x @ w("gate.weight").T)
    bias = w("gate.e_score_correction_bias")
    biased = (scores + bias).tolist()
    if fixed:
        experts = fixed["selected_experts"][len(record["selected_experts"])]
    else:
        experts = torch.tensor([choose(biased[t], range(E), K, later_wins=False) for t in range(T)])
        record["router_margin"] = min([record["router_margin"], *(margin(biased[t], range(E), K) for t in range(T))])
    record["selected_experts"].append(experts)
    record["scores"].append(scores.detach())

    weight = torch.gather(scores, 1, experts)
    if config["moe_renormalize"]:
        weight = weight / (weight.sum(1, keepdim=True) + 1e-20)
    weight = weight * config["routed_scaling_factor"]

    latent = config["routed_expert_hidden_size"]
    z = x @ w("routed_expert_down_proj.weight").T if latent else x
    routed = torch.zeros_like(z)
    for e in range(E):
        rows, slots = torch.nonzero(experts == e, as_tuple=True)
        hidden = gated(config, z[rows] @ w("experts.w1")[e].T, z[rows] @ w("experts.w3")[e].T)
        routed = routed.index_add(0, rows, weight[rows, slots][:, None] * (hidden @ w("experts.w2")[e].T))
    if latent:
        if config.get("latent_moe_use_norm"):
            routed = rms_norm(routed, w("routed_expert_norm.weight"), config["rms_norm_eps"])
        routed = routed @ w("routed_expert_up_proj.weight").T
    return routed + mlp(config, w, "shared_experts", x)


def attn_res(config, sources, norm_weight, query):
    """One softmax a token over depth; keys are normalised, values are raw."""
    rows = torch.stack(sources)
    score = (rms_norm(rows, norm_weight, config["rms_norm_eps"]) * query[0]).sum(-1)
    return (torch.softmax(score, 0)[:, :, None] * rows).sum(0)


def forward(config, weights, tokens, documents, fixed=None):
    """Logits of all tokens, and what was chosen on the way. `fixed` is an earlier record whose choices are used again."""
    record = {"selected_experts": [], "selected_indices": [], "scores": [], "indexer_loss": torch.zeros(())}
    record |= {"index_margin": math.inf, "router_margin": math.inf}
    eps, size = config["rms_norm_eps"], config.get("attn_res_block_size")
    stream = weights["model.embed_tokens.weight"][tokens.flatten()]
    bank = []
    for layer in range(config["num_hidden_layers"]):
        block = lambda name, layer=layer: weights[f"model.layers.{layer}.{name}"]
        attn_weight = lambda name: block(f"self_attn.{name}")
        moe_weight = lambda name: block(f"block_sparse_moe.{name}")

        def mixed(place, stream):
            if not size or not bank:
                return stream
            return attn_res(config, [*bank, stream], block(f"{place}_norm.weight"), block(f"{place}_proj.weight"))

        a = mixed("self_attention_res", stream)
        if size and layer % size == 0:
            bank.append(stream)
            stream = torch.zeros_like(stream)
        normed = rms_norm(a, block("input_layernorm.weight"), eps)
        if is_full_attention(config, layer):
            stream = stream + mla(config, attn_weight, normed, documents, record, fixed)
        else:
            stream = stream + kda(config, attn_weight, normed, documents)
        normed = rms_norm(mixed("mlp_res", stream), block("post_attention_layernorm.weight"), eps)
        if is_moe(config, layer):
            stream = stream + moe(config, moe_weight, normed, record, fixed)
        else:
            stream = stream + mlp(config, block, "mlp", normed)
    if size:
        query = weights["model.output_attn_res_proj.weight"]
        stream = attn_res(config, [*bank, stream], weights["model.output_attn_res_norm.weight"], query)
    return rms_norm(stream, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T, record


def cross_entropy(logits, labels):
    labels = labels.flatten()
    kept = labels != IGNORED
    return -torch.log_softmax(logits[kept], -1)[torch.arange(int(kept.sum())), labels[kept]].mean()


def gradients(config, weights, batch, fixed=None):
    """Losses and d(lm_loss + indexer_loss); a parameter that is never read has gradient 0, the selection bias has none."""
    leaves = {n: t.clone().requires_grad_(not n.endswith("e_score_correction_bias")) for n, t in weights.items()}
    logits, record = forward(config, leaves, batch["tokens"], batch["documents"], fixed)
    lm_loss = cross_entropy(logits, batch["labels"])
    (lm_loss + record["indexer_loss"]).backward()
    grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items() if t.requires_grad}
    return lm_loss.detach(), record["indexer_loss"].detach(), logits.detach(), record, grads


def decays(name, tensor):
    return tensor.dim() > 1 and not name.endswith(("conv1d.weight", "res_proj.weight"))


def quantile_bias(scores, bias, K, margins):
    """The bias with which each expert would win K / E of these tokens, read off a histogram of what it would have needed."""
    T, E = scores.shape
    low, high = bias.min() - 1, bias.max() + 1
    width = (high - low) / QUANTILE_BINS
    cutoff = np.sort(scores + bias, axis=1)[:, E - K - 1]
    position = (cutoff[:, None] - scores - low) / width
    margins.append(np.abs(position - np.round(position)).min())
    bins = np.clip(np.floor(position).astype(int), 0, QUANTILE_BINS - 1)
    new = np.zeros(E)
    rank = K * T / E
    for e in range(E):
        count = np.bincount(bins[:, e], minlength=QUANTILE_BINS)
        reached = np.cumsum(count)
        at = int(np.argmax(reached >= rank))  # the first bin that reaches the rank
        new[e] = low + width * (at + (rank - (reached[at] - count[at])) / count[at])
    return new - new.mean()


def train(config, weights, batches, balance):
    """Ten AdamW steps; the loss of a step is the one before its update."""
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.95, 1e-8, 0.1
    weights = {n: t.clone() for n, t in weights.items()}
    m = {n: torch.zeros_like(t) for n, t in weights.items()}
    v = {n: torch.zeros_like(t) for n, t in weights.items()}
    out = {"losses": [], "indexer_losses": [], "grad_norm": []}
    margins = {"router": [], "index": [], "bin": []}
    for step, batch in enumerate(batches, 1):
        lm_loss, indexer_loss, _, record, grads = gradients(config, weights, batch)
        norm = math.sqrt(sum(float(g.pow(2).sum()) for g in grads.values()))
        clip = min(1.0, 1.0 / (norm + 1e-6))
        for name, grad in grads.items():
            g = grad * clip
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            update = (m[name] / (1 - beta1**step)) / ((v[name] / (1 - beta2**step)).sqrt() + eps)
            if decays(name, weights[name]):
                update = update + decay * weights[name]
            weights[name] = weights[name] - lr * update
        if balance == "quantile":
            biases = [n for n in weights if n.endswith("e_score_correction_bias")]
            for name, scores in zip(biases, record["scores"]):
                new = quantile_bias(scores.numpy(), weights[name].numpy(), config["num_experts_per_token"], margins["bin"])
                weights[name] = torch.tensor(new)
        out["losses"].append(float(lm_loss))
        out["indexer_losses"].append(float(indexer_loss))
        out["grad_norm"].append(norm)
        margins["router"].append(record["router_margin"])
        margins["index"].append(record["index_margin"])
    return {n: np.array(x) for n, x in out.items()}, weights, {n: min(x, default=math.inf) for n, x in margins.items()}


def draw_batch(rng, vocab, sequences=2, length=40, cuts=None):
    """Tokens that half follow a rule, three documents a sequence, labels shifted inside documents and a few taken out."""
    T = sequences * length
    if cuts is None:
        cuts = [sorted(rng.choice(np.arange(1, length), 2, replace=False)) for _ in range(sequences)]
    documents = [0]
    for s in range(sequences):
        documents += [s * length + int(c) for c in cuts[s]] + [(s + 1) * length]
    tokens = rng.integers(0, vocab, T)
    follow = rng.random(T) < 0.5
    for t in range(1, T):
        if follow[t]:
            tokens[t] = (7 * tokens[t - 1] + 3) % vocab
    labels = np.append(tokens[1:], IGNORED)
    labels[np.array(documents[1:]) - 1] = IGNORED
    labels[rng.choice(T, 4, replace=False)] = IGNORED
    shape = (sequences, length)
    return {
        "tokens": torch.tensor(tokens.reshape(shape)),
        "labels": torch.tensor(labels.reshape(shape)),
        "documents": torch.tensor(documents),
    }


def check_kda_against_numpy(config, weights, seed):
    """One KDA layer again, as scalar loops over heads and tokens that share no function with the model above."""
    linear = config["linear_attn_config"]
    N, H, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    rng = np.random.default_rng(seed)
    starts = [0, 9, 10, 23]
    x = rng.standard_normal((23, config["hidden_size"]))
    w = {n.removeprefix("model.layers.1.self_attn."): t.numpy() for n, t in weights.items() if ".1.self_attn." in n}
    sigmoid = lambda a: 1 / (1 + np.exp(-a))
    want = np.zeros_like(x)
    for first, last in zip(starts[:-1], starts[1:]):
        part = x[first:last]
        qkv = []
        for which in "qkv":
            u = part @ w[f"{which}_proj.weight"].T
            c = np.zeros_like(u)
            for t in range(len(part)):
                for tap in range(taps):
                    if t - (taps - 1) + tap >= 0:
                        c[t] += w[f"{which}_conv1d.weight"][:, 0, tap] * u[t - (taps - 1) + tap]
            qkv.append(c * sigmoid(c))
        if "g_proj.weight" in w:
            gate = part @ w["g_proj.weight"].T
        else:
            gate = part @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
        z = part @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]
        joined = np.zeros((len(part), N * H))
        for n in range(N):
            cols = slice(n * H, (n + 1) * H)
            a = np.exp(w["A_log"][n])
            S = np.zeros((H, H))
            for t in range(len(part)):
                q, k, v = (p[t, cols] for p in qkv)
                q, k = q / np.sqrt(q @ q + L2_EPS), k / np.sqrt(k @ k + L2_EPS)
                bound = linear.get("gate_lower_bound")
                log_decay = -a * np.log1p(np.exp(z[t, cols])) if bound is None else bound * sigmoid(a * z[t, cols])
                b = sigmoid(w["b_proj.weight"][n] @ part[t])
                S = (np.eye(H) - b * np.outer(k, k)) @ np.diag(np.exp(log_decay)) @ S + b * np.outer(k, v)
                o = S.T @ q / np.sqrt(H)
                o = o / np.sqrt((o * o).mean() + config["rms_norm_eps"]) * w["o_norm.weight"]
                joined[t, cols] = o * sigmoid(gate[t, cols])
        want[first:last] = joined @ w["o_proj.weight"].T
    got = kda(config, lambda name: weights[f"model.layers.1.self_attn.{name}"], torch.tensor(x), torch.tensor(starts)).numpy()
    return np.abs(got - want).max() / np.abs(want).max()


def check_slopes(config, weights, batch, per_tensor=2, seed=5):
    """Central differences of lm_loss (of indexer_loss for the indexer) against the gradients, choices held fixed.

    A detached value stays fixed too, so the indexer's slopes are those of its own parameters only.
    """
    _, _, _, record, grads = gradients(config, weights, batch)
    rng = np.random.default_rng(seed)
    worst = ("", 0.0)
    for name, grad in grads.items():
        for flat in rng.choice(grad.numel(), min(per_tensor, grad.numel()), replace=False):
            losses = []
            for sign in (1, -1):
                moved = dict(weights)
                moved[name] = weights[name].clone()
                moved[name].view(-1)[flat] += sign * 1e-5
                with torch.no_grad():
                    logits, seen = forward(config, moved, batch["tokens"], batch["documents"], record)
                    own = seen["indexer_loss"] if ".indexer." in name else cross_entropy(logits, batch["labels"])
                losses.append(float(own))
            slope = (losses[0] - losses[1]) / 2e-5
            gap = abs(slope - float(grad.view(-1)[flat])) / (float(grad.abs().max()) + 1e-6)
            if not gap <= worst[1]:
                worst = (name, gap)
    return worst


def write(path, config, seed, final_names, with_quantile):
    weights = draw_weights(config, seed)
    rng = np.random.default_rng(seed + 1)
    vocab = config["vocab_size"]
    batch = draw_batch(rng, vocab, cuts=[[17, 18], [7, 21]])
    batches = [draw_batch(rng, vocab) for _ in range(STEPS)]
    lm_loss, indexer_loss, logits, record, grads = gradients(config, weights, batch)
    trained, final, margins = train(config, weights, batches, "none")
    E = config["num_experts"]
    counts = [[int((chosen == e).sum()) for e in range(E)] for chosen in record["selected_experts"]]

    with h5py.File(path, "w") as file:
        file["config"] = np.bytes_(json.dumps(config))
        for name, tensor in weights.items():
            file[f"weights/{name}"] = tensor.numpy()
        for name, tensor in grads.items():
            file[f"gradients/{name}"] = tensor.numpy()
        for name in final_names:
            file[f"final_weights/{name}"] = final[name].numpy()
        file["tokens"] = batch["tokens"].numpy().astype(np.int32)
        file["labels"] = batch["labels"].numpy().astype(np.int32)
        file["documents"] = batch["documents"].numpy()
        file["logits"] = logits.numpy()
        file["lm_loss"] = float(lm_loss)
        file["expert_counts"] = np.array(counts, dtype=np.int64)
        file["selected_experts"] = torch.stack(record["selected_experts"]).numpy().astype(np.int32)
        for name in ("tokens", "labels"):
            file[f"{name}_steps"] = torch.stack([b[name] for b in batches]).numpy().astype(np.int32)
        file["documents_steps"] = torch.stack([b["documents"] for b in batches]).numpy()
        file["losses"], file["grad_norm"] = trained["losses"], trained["grad_norm"]
        if "dsa_config" in config:
            file["indexer_loss"] = float(indexer_loss)
            file["indexer_losses"] = trained["indexer_losses"]
            file["selected_indices"] = torch.stack(record["selected_indices"]).numpy().astype(np.int32)
        if with_quantile:
            balanced, final, quantile_margins = train(config, weights, batches, "quantile")
            file["losses_quantile"] = balanced["losses"]
            for name in final:
                if name.endswith("e_score_correction_bias"):
                    file[f"final_bias_quantile/{name}"] = final[name].numpy()
            margins = {n: min(margins[n], quantile_margins[n]) for n in margins}

    nudged = {n: t * (1 + 1e-15 * torch.tensor(rng.standard_normal(t.shape))) for n, t in weights.items()}
    drift = [np.abs(train(config, nudged, batches, "none")[0]["losses"] - trained["losses"]).max()]
    if with_quantile:
        drift.append(np.abs(train(config, nudged, batches, "quantile")[0]["losses"] - balanced["losses"]).max())
    print(f"{path.name}: {sum(t.numel() for t in weights.values())} parameters, {path.stat().st_size} bytes")
    print(f"  lm_loss {float(lm_loss):.6f}  indexer_loss {float(indexer_loss):.6f}")
    print(f"  losses {trained['losses']}")
    print(f"  grad_norm {trained['grad_norm']}")
    if with_quantile:
        print(f"  losses_quantile {balanced['losses']}")
    print("  nearest other choice: " + ", ".join(f"{what} {near:.1e}" for what, near in margins.items()))
    print(f"  losses move by {max(drift):.1e} when all weights move by 1e-15")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent.parent / "tests" / "golden")
    parser.add_argument("--check", action="store_true", help="hold the oracle against numpy loops and finite differences")
    args = parser.parse_args()
    if args.check:
        for title, config, seed in (("tiny", TINY, 22), ("tiny_plain", PLAIN, 30)):
            weights = draw_weights(config, seed)
            batch = draw_batch(np.random.default_rng(seed + 1), config["vocab_size"], cuts=[[17, 18], [7, 21]])
            print(f"{title}: KDA layer against numpy loops, relative {check_kda_against_numpy(config, weights, 3):.1e}")
            name, gap = check_slopes(config, weights, batch)
            print(f"{title}: worst slope against finite differences, relative {gap:.1e} ({name})")
        return
    write(args.out / "tiny.h5", TINY, 22, [
        "model.embed_tokens.weight",
        "model.layers.2.self_attn.A_log",
        "model.layers.4.self_attn.indexer.wq_b.weight",
    ], with_quantile=True)
    write(args.out / "tiny_plain.h5", PLAIN, 30, [
        "model.layers.2.self_attn.dt_bias",
        "model.layers.3.self_attn.kv_b_proj.weight",
        "model.layers.1.block_sparse_moe.experts.w2",
    ], with_quantile=False)


if __name__ == "__main__":
    main()
