#!/usr/bin/env python3
"""Adapters as the peft library loads them, onto the transformers library's Kimi-Linear and onto one with modules of single experts:
its logits and loss are those of the run. Skipped where peft, transformers (5.24) and h5py are not installed.

peft_test.py MOETRAIN [unittest arguments]
"""
import csv
import json
import os
import pathlib
import sys
import unittest
import warnings

from runs import Runs, main

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "kimi_linear_hf"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
try:
    import h5py
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM
except ImportError as missing:
    WITHOUT = str(missing)
else:
    WITHOUT = ""
    sys.path.append(str(ROOT / "scripts"))
    from golden_kimi_linear import widening_to_f64

LENGTH = 64
JOB = """\
data: {{train: {data}, format: tokens, sequence_length: 64}}
training: {{steps: {steps}}}
optimizer: {{lr: 0.03}}
lora: {{rank: 3, alpha: 5, rslora: {rslora}, shared_a: {shared_a}, target: {target}}}
"""
EVERYTHING = "[attention, shared, expert_proj, head, '*.mlp.*', '*.gate.weight']"


class OfSingleExperts(torch.nn.Module if not WITHOUT else object):
    """What published code has where the library has stacked tensors."""

    def __init__(self, stacked):
        super().__init__()
        for e, (gate_up, down) in enumerate(zip(stacked.gate_up_proj.detach(), stacked.down_proj.detach())):
            expert = torch.nn.Module()
            for name, weight in (("w1", gate_up.chunk(2)[0]), ("w3", gate_up.chunk(2)[1]), ("w2", down)):
                linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
                linear.weight.data.copy_(weight)
                expert.add_module(name, linear)
            self.add_module(str(e), expert)

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for t in range(x.shape[0]):
            for e, weight in zip(chosen[t].tolist(), weights[t]):
                m = getattr(self, str(e))
                out[t] += weight * m.w2(torch.nn.functional.silu(m.w1(x[t])) * m.w3(x[t]))
        return out


def with_published_names(model):
    """The library's model with the module names of published code; its type is no longer one whose names peft translates."""
    model.config.model_type = "published"
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            moe = layer._modules.pop("mlp")
            moe.experts = OfSingleExperts(moe.experts)
            layer.block_sparse_moe = layer.__dict__["mlp"] = moe
        gate = getattr(layer.self_attn, "forget_gate", None)
        for name in ("f_a_proj", "f_b_proj") if gate is not None else ():
            setattr(layer.self_attn, name, gate._modules.pop(name))
            gate.__dict__[name] = lambda x, attention=layer.self_attn, name=name: getattr(attention, name)(x)
    return model


@unittest.skipIf(WITHOUT, WITHOUT)
class Adapters(Runs):
    def tokens(self, name, count, seed):
        path = self.root / name
        values = torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(seed))
        with h5py.File(path, "w") as file:
            file["tokens"] = values.numpy().astype("uint16")
            file.attrs["vocab_size"] = 61
            file.attrs["tokenizer"] = "none"
        return path, values[None]

    def tuned(self, target=EVERYTHING, rslora="false", shared_a="false"):
        """A run that has moved every adapter, and another that only tells its loss on one sequence."""
        self.call("import", GOLDEN, "--out", self.root / "base", "--job", self.root / "base.yaml")
        model = (self.root / "base.yaml").read_text()

        def run(name, start, data, steps):
            keys = {"rslora": rslora, "shared_a": shared_a, "target": target}
            job = self.write(name + ".yaml", model + JOB.format(data=data, steps=steps, **keys))
            self.call(job, *(word for key in (f"model.init_from={start}", f"run.dir={self.root / name}", "run.dtype=fp64") for word in ("--set", key)))
        long, _ = self.tokens("long.h5", 40 * LENGTH, 1)
        short, ids = self.tokens("short.h5", LENGTH, 2)
        run("run", GOLDEN, long, 12)
        run("again", self.run_dir, short, 1)
        with open(self.root / "again" / "metrics.csv", newline="", encoding="utf-8") as file:
            row = next(csv.DictReader(file))
        self.assertEqual(int(row["label_tokens"]), LENGTH - 1)
        return ids, float(row["loss"])

    def exported(self, *words):
        self.call("export", self.run_dir, "--to", "peft", "--out", self.root / "adapters", *words)
        return self.root / "adapters", json.loads((self.root / "adapters" / "adapter_config.json").read_text())

    def results(self, model, ids):
        with torch.no_grad(), widening_to_f64():
            result = model(input_ids=ids, labels=ids, use_cache=False)
        return result.logits, float(result.loss)

    def base(self, folder=GOLDEN):
        model = KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32 if folder == GOLDEN else torch.float64)
        model.config._attn_implementation = model.config._experts_implementation = "eager"
        model = model.double()
        if folder != GOLDEN:  # the library has rounded routers to f32
            saved = load_file(folder / "model.safetensors")
            for i, layer in enumerate(model.model.layers):
                if hasattr(layer.mlp, "gate"):
                    layer.mlp.gate.weight.data.copy_(saved[f"model.layers.{i}.block_sparse_moe.gate.weight"])
        return model.eval()

    def loaded(self, model, folder):
        """Every tensor of the file found its place, and no place was left without one."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")  # peft 0.21 looks for them among modules alone
            adapted = PeftModel.from_pretrained(model, folder)
        places = {n: p for n, p in adapted.named_parameters() if ".lora_" in n}
        tensors = load_file(folder / "adapter_model.safetensors")
        self.assertEqual(sorted(n.replace(".default", "") for n in places), sorted(tensors))
        for name, place in places.items():
            self.assertTrue(torch.equal(place, tensors[name.replace(".default", "")].to(place.dtype)), name)
        return adapted

    def check(self, model, ids, loss):
        if not (self.root / "merged").exists():
            self.call("export", self.run_dir, "--to", "hf", "--merge", "--out", self.root / "merged")
        want, _ = self.results(self.base(self.root / "merged"), ids)
        before, _ = self.results(self.base(), ids)
        got, got_loss = self.results(model, ids)
        gap, moved = ((x - want).abs().max() / want.abs().max() for x in (got, before))
        print(f"{self._testMethodName}: logits {gap:.1e} from ours, base {moved:.1e}; loss {got_loss:.12f}, ours {loss:.12f}")
        self.assertLess(gap, 1e-10)
        self.assertGreater(moved, 0.1)
        self.assertLess(abs(got_loss - loss), 1e-10 * loss)

    def fused(self, **lora):
        ids, loss = self.tuned(**lora)
        folder, config = self.exported("--experts", "fused")
        self.check(self.loaded(self.base(), folder), ids, loss)
        return config, load_file(folder / "adapter_model.safetensors")

    def one_by_one(self, **lora):
        ids, loss = self.tuned(**lora)
        folder, config = self.exported()
        for name, tensor in load_file(folder / "adapter_model.safetensors").items():
            self.assertEqual(tensor.shape[0 if ".lora_A." in name else 1], config["r"])
        self.check(self.loaded(with_published_names(self.base()), folder), ids, loss)
        self.check(PeftModel.from_pretrained(self.base(), folder), ids, loss)  # the library stacks them itself

    def test_fused_experts_on_the_librarys_model(self):
        config, tensors = self.fused()
        self.assertEqual(config["base_model_name_or_path"], str(GOLDEN))
        for layer in range(1, 4):
            for part, rank in (("", config["r"]), ("base_layer.", 2 * config["r"])):
                stem = f"base_model.model.model.layers.{layer}.mlp.experts.{part}"
                self.assertEqual(tensors[stem + "lora_A.weight"].shape[0], 4 * rank)
                b = tensors[stem + "lora_B.weight"].reshape(-1, rank, 4)
                for e in range(1, 4):  # a test of the order needs experts that differ
                    self.assertGreater((b[:, :, e] - b[:, :, 0]).abs().max(), 1e-3)

    def test_fused_experts_with_an_a_that_they_share_and_the_root_of_the_rank(self):
        self.fused(shared_a="true", rslora="true")

    def test_experts_alone(self):
        config, _ = self.fused(target="expert_proj")
        self.assertEqual((config["target_modules"], config["target_parameters"]), ([], ["experts.down_proj", "experts.gate_up_proj"]))

    def test_some_projections_of_experts_in_some_layers(self):
        config, _ = self.fused(target="['*.layers.1.*.w1', '*.layers.1.*.w2', '*.layers.2.*.w3', '*.layers.3.*.w?', '*.layers.2.*.q_proj.weight']")
        self.assertEqual(config["rank_pattern"], {"3.mlp.experts.gate_up_proj": 6})

    def test_experts_one_by_one_on_a_model_of_published_names(self):
        self.one_by_one()

    def test_experts_one_by_one_with_an_a_that_they_share_and_the_root_of_the_rank(self):
        self.one_by_one(shared_a="true", rslora="true")


if __name__ == "__main__":
    main()
