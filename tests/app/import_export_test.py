#!/usr/bin/env python3
"""Hugging Face folders in and out: what import and export write, runs that start from it, and every bad input by its words and code.

import_export_test.py MOETRAIN [unittest arguments]; MPIRUN in the environment says how ranks are started.
"""
import json
import os
import pathlib
import shutil
import struct
import subprocess
import time

from runs import Runs, TWO, main

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "kimi_linear_hf"  # saved by the transformers library


def header_of(path):
    with open(path, "rb") as file:
        return json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))


class Folders(Runs):
    def tool(self, *words, code=0, ranks=0):
        return self.call(words[0], *words[1:], code=code, ranks=ranks)

    def copy(self, name="copy"):
        return pathlib.Path(shutil.copytree(GOLDEN, self.root / name))

    def change(self, folder, **keys):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | keys).items() if v is not ...}))

    def refused(self, words, code, *parts):
        before = sorted(self.root.rglob("*"))
        result = self.tool(*words, code=code)
        for part in parts:
            self.assertIn(str(part), result.stderr)
        self.assertEqual(sorted(self.root.rglob("*")), before, "something was left behind")
        return result


class RoundTrips(Folders):
    def test_a_library_folder_becomes_a_checkpoint_and_a_folder_again_on_any_number_of_ranks(self):
        result = self.tool("import", GOLDEN, "--out", self.root / "one")
        self.assertIn("115 tensors, 113317 parameters, fp32", result.stdout)
        self.tool("import", GOLDEN, "--out", self.root / "three", ranks=3)
        self.assertIn("written by 3 ranks", self.tool("inspect", self.root / "three").stdout)
        self.tool("export", self.root / "one", "--to", "hf", "--out", self.root / "hf1")
        self.tool("export", self.root / "three", "--to", "hf", "--out", self.root / "hf3", ranks=2)
        for name in ("config.json", "model.safetensors"):
            self.assertEqual((self.root / "hf1" / name).read_bytes(), (self.root / "hf3" / name).read_bytes(), name)
        header, saved = header_of(self.root / "hf1" / "model.safetensors"), {}
        for path in GOLDEN.glob("*.safetensors"):
            saved |= header_of(path)
        saved.pop("__metadata__")
        public = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): entry["shape"] for name, entry in saved.items()}
        self.assertEqual({name: entry["shape"] for name, entry in header.items()}, public)

    def test_a_job_that_import_writes_trains_once_data_is_added(self):
        self.call(self.job(2, dtype="bf16"))
        self.tool("export", self.run_dir, "--to", "hf", "--out", self.root / "hf")
        out, job, run = self.root / "start", self.root / "start.yaml", self.root / "next"
        self.tool("import", self.root / "hf", "--out", out, "--job", job)
        self.assertIn("balance: none", job.read_text())
        faults = self.tool("check", job, code=2).stderr
        self.assertEqual([line.split(": ")[1] for line in faults.splitlines()[:-1]], ["data.train", "data.sequence_length", "training.steps"])
        sets = [word for key in (f"run.dir={run}", f"data.train={self.data}", "data.sequence_length=64", "training.steps=2") for word in ("--set", key)]
        self.assertIn(f"weights from {out}", self.call(job, *sets).stdout)
        self.assertTrue(self.inspected(run))

    def test_a_run_starts_from_a_folder_or_a_checkpoint_alike_and_its_resume_does_not(self):
        first = self.job(2, dtype="bf16")
        self.call(first)
        self.tool("export", self.run_dir, "--to", "hf", "--out", self.root / "hf")
        losses = []
        for start in (self.root / "hf", self.root / "imported"):
            if not start.exists():
                self.tool("import", self.root / "hf", "--out", start, ranks=2)
            run = self.root / f"run from {start.name}"
            job = self.job(3, dtype="bf16", run_dir=run)
            result = self.call(job, "--set", f"model.init_from={start}", "--stop-after", "2", *TWO, ranks=2)
            self.assertIn(f"weights from {start}", result.stdout)
            resumed = self.call(job, "--set", f"model.init_from={start}", *TWO, ranks=2)
            self.assertIn("resumed from", resumed.stdout)
            self.assertNotIn("weights from", resumed.stdout)
            losses.append([row.split(",")[:3] for row in (run / "metrics.csv").read_text().splitlines()])
        self.assertEqual(losses[0], losses[1])
        self.assertLess(float(losses[0][1][2]), 5.5)  # not the loss of fresh weights, near ln 257
        refused = self.call(self.job(3, run_dir=self.root / "other"), "--resume", self.root / "imported", code=3)
        self.assertIn("model.init_from", refused.stderr)


    def test_adapters_are_exported_alone_on_any_number_of_ranks_and_only_where_there_are_some(self):
        self.call(self.job(2, "lora: {target: [attention, expert_proj]}\n", dtype="bf16"))
        for out, ranks in ((self.root / "one", 0), (self.root / "two", 2)):
            self.tool("export", self.run_dir, "--to", "peft", "--base", "a/name", "--out", out, ranks=ranks)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            self.assertEqual((self.root / "one" / name).read_bytes(), (self.root / "two" / name).read_bytes(), name)
        config = json.loads((self.root / "one" / "adapter_config.json").read_text())
        self.assertEqual((config["r"], config["base_model_name_or_path"]), (8, "a/name"))
        expert = header_of(self.root / "one" / "adapter_model.safetensors")["base_model.model.model.layers.1.block_sparse_moe.experts.7.w1.lora_A.weight"]
        self.assertEqual((expert["dtype"], expert["shape"][0]), ("BF16", 8))
        self.refused(["export", self.run_dir, "--to", "peft", "--experts", "fused", "--out", self.root / "no"], 2, "no class for a model with")
        self.tool("import", GOLDEN, "--out", self.root / "plain")
        self.refused(["export", self.root / "plain", "--to", "peft", "--out", self.root / "no"], 2, "holds no adapters")


class BadInput(Folders):
    def test_paths_that_lead_nowhere_or_are_taken_end_with_2(self):
        taken, out = self.copy("taken"), self.root / "out"
        self.refused(["import", self.root / "none", "--out", out], 2, "none: no such folder")
        self.refused(["import", GOLDEN, "--out", taken], 2, "taken: exists already")
        self.refused(["import", GOLDEN, "--out", out, "--job", taken / "config.json"], 2, "config.json: exists already")
        self.refused(["export", self.root / "none", "--to", "hf", "--out", out], 2, "none: no such checkpoint")
        self.refused(["export", taken, "--to", "hf", "--out", out], 3, "taken: holds no checkpoint")
        self.refused(["export", taken, "--to", "hf", "--base", "x", "--out", out], 2, "--experts and --base are of --to peft")
        job = self.job()
        self.assertIn("model.init_from: 'none' does not exist", self.tool("check", job, "--set", "model.init_from=none", code=2).stderr)
        for command in ("check", "train"):
            self.assertIn(f": model.init_from: '{job}' is a file; expected a folder: of Hugging Face, of a checkpoint, or of a run\n1 fault\n",
                          self.tool(command, job, "--set", f"model.init_from={job}", code=2).stderr)

    def test_contents_that_are_wrong_end_with_3_by_file_tensor_and_numbers(self):
        out = self.root / "out"

        def judged(change, *parts):
            folder = self.copy(f"copy{len(list(self.root.iterdir()))}")
            change(folder)
            self.refused(["import", folder, "--out", out], 3, *parts)

        judged(lambda f: (f / "config.json").unlink(), "config.json: cannot open")
        judged(lambda f: (f / "config.json").write_text("{"), "config.json: not the config.json of a model")
        judged(lambda f: self.change(f, model_type="llama", architectures=["LlamaForCausalLM"]), "model_type: is 'llama'", "architectures")
        judged(lambda f: self.change(f, rms_norm_eps=...), "config.json: rms_norm_eps: is missing")
        judged(lambda f: self.change(f, num_experts=5), "model.layers.1.block_sparse_moe.experts.4.w1.weight: missing",
               "gate.weight: is F32 [4, 48], config.json makes it [5, 48]")
        judged(lambda f: self.change(f, v_head_dim=11), "kv_b_proj.weight: is F32 [66, 16], config.json makes it [69, 16]")
        judged(lambda f: self.change(f, layer_types=["linear_attention"] * 4), "layer_types make layers [] full attention")
        judged(lambda f: (f / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.safetensors: cannot open")
        judged(lambda f: os.truncate(f / "model-00003-of-00003.safetensors", 50000), "model-00003-of-00003.safetensors: ", "cut short")

        def with_a_nan(f):
            path = f / "model-00001-of-00003.safetensors"
            data = bytearray(path.read_bytes())
            begin = 8 + struct.unpack("<Q", data[:8])[0] + header_of(path)["model.embed_tokens.weight"]["data_offsets"][0]
            data[begin + 40:begin + 44] = struct.pack("<f", float("nan"))
            path.write_bytes(data)
        judged(with_a_nan, "model-00001-of-00003.safetensors: model.embed_tokens.weight: element 10 is not a finite number")

    def test_a_run_does_not_start_from_another_model(self):
        job = self.job()
        refused = self.call(job, "--set", f"model.init_from={GOLDEN}", code=2)
        empty = self.root / "empty"
        empty.mkdir()
        self.assertIn(f"model.init_from: {empty}: neither a Hugging Face folder", self.call(job, "--set", f"model.init_from={empty}", code=3).stderr)
        self.assertRegex(refused.stderr, r"init_from: .*kimi_linear_hf is another model: model\.\w+ is '?\w+'? there and '?\w+'? here")

    def test_a_process_killed_in_the_middle_leaves_nothing_that_loads_and_the_next_one_clears_up(self):
        whole = self.root / "whole"
        self.tool("import", GOLDEN, "--out", whole)
        for command, *words in (["import", GOLDEN], ["export", whole, "--to", "hf"]):
            for delay in (0.004, 0.008, 0.016, 0.032):
                out = self.root / f"{command} {delay}"
                process = subprocess.Popen([self.program, command, *words, "--out", out], stdout=subprocess.DEVNULL)
                time.sleep(delay)
                process.kill()
                process.wait()
                if not out.exists():
                    self.tool(command, *words, "--out", out)
                self.assertTrue(self.inspected(out))
                self.assertFalse(pathlib.Path(f"{out}.partial").exists())


if __name__ == "__main__":
    main()
