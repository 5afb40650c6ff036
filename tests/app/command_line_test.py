#!/usr/bin/env python3
"""The program as its users meet it: help, faults, exit codes, plans, and what inspect says of files.

command_line_test.py MOETRAIN [unittest arguments]; MPIRUN in the environment says how ranks are started.
"""
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM = None
MPIRUN = os.environ.get("MPIRUN", "mpirun").split()

JOB = """\
run: {{name: small, dir: {dir}, dtype: fp32}}
model: {{preset: tiny-k3}}
data: {{train: {data}, format: bytes, sequence_length: 64}}
training: {{steps: {steps}, micro_batch_size: 2}}
optimizer: {{lr: 0.003}}
"""


def call(*words, ranks=0, timeout=300, **more):
    launcher = [*MPIRUN, "-n", str(ranks)] if ranks else []
    return subprocess.run([*launcher, PROGRAM, *map(str, words)], capture_output=True, text=True, check=False, timeout=timeout, **more)


class InAFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def write(self, name, content):
        path = self.root / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def job(self, steps=3, extra="", data=None):
        if data is None:
            data = self.write("text.txt", "a cat sat on a mat and looked at the rain. " * 200)
        self.run_dir = self.root / "run"
        return self.write("job.yaml", JOB.format(dir=self.run_dir, data=data, steps=steps) + extra)

    def exit_json(self):
        return json.loads((self.run_dir / "exit.json").read_text())


class Launch(InAFolder):
    def test_srun_without_a_way_to_mpi_is_one_error_and_no_run(self):
        job = self.job()
        said = []
        for rank in range(2):
            environment = {**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2"}
            result = call(job, env=environment)
            self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
            said += result.stderr.splitlines()
        self.assertEqual(len(said), 1, said)
        for word in ("SLURM_STEP_NUM_TASKS 2", "MPI says rank 0 of 1", "srun --mpi=pmix"):
            self.assertIn(word, said[0])
        self.assertFalse(self.run_dir.exists())


class CommandLine(InAFolder):
    def test_help_of_every_command_names_its_flags_and_an_example(self):
        flags = {
            "train": ["--resume", "--stop-after", "--set", "mpirun"],
            "check": ["--ranks", "--set"],
            "plan": ["--ranks", "--device-memory", "--host-memory", "--machine", "--search", "--json", "--set"],
            "bench": ["NAME", "--json", "--machine"],
            "inspect": ["PATH"],
            "import": ["HF_FOLDER", "--out", "--job", "mpirun", "model.init_from"],
            "export": ["CHECKPOINT", "--to", "--out", "--experts", "--base"],
            "verify": ["JOB.yaml", "--set", "run.seed"],
        }
        for command, wanted in flags.items():
            result = call(command, "--help")
            self.assertEqual((result.returncode, result.stderr), (0, ""), command)
            for word in [*wanted, "Examples:", f"moetrain {command}" if command != "train" else "moetrain job.yaml"]:
                self.assertIn(word, result.stdout, command)
        whole = call("--help")
        self.assertEqual(whole.returncode, 0)
        for command in flags:
            self.assertIn(command, whole.stdout)

    def test_version_names_the_program_and_its_libraries(self):
        result = call("--version")
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in ["moetrain 0.", "commit", "MPI", "HDF5", "CUDA"]:
            self.assertIn(word, result.stdout)

    def test_a_wrong_command_line_is_one_line_and_exit_code_2(self):
        job = self.job()
        wrong = [[], ["trian", job], ["check"], ["plan", job, "--bytes"], [job, "--lr", "1"], ["check", job, "--ranks", "0"],
                 ["check", job, "--ranks", "two"], ["plan", job, "--device-memory", "much"], [job, "--stop-after", "-1"], ["inspect", job, job],
                 ["import", self.root], ["export", self.root, "--out", "x"], ["export", self.root, "--to", "gguf", "--out", "x"],
                 ["export", self.root, "--to", "hf", "--experts", "fused", "--out", "x"], ["export", self.root, "--to", "peft", "--experts", "some", "--out", "x"],
                 ["export", self.root, "--to", "peft", "--merge", "--out", "x"],
                 ["import", self.root / "none", "--out", "x"], ["export", self.root / "none", "--to", "hf", "--out", "x"], ["import", job, "--out", "x"]]
        for words in wrong:
            result = call(*words)
            self.assertEqual(result.returncode, 2, (words, result.stdout, result.stderr))
            self.assertEqual(len(result.stderr.splitlines()), 1, (words, result.stderr))
            self.assertEqual(result.stdout, "", words)
        self.assertIn("unknown command trian", call("trian").stderr)
        for words, option in [(["--bogus"], "--bogus"), (["--bogus", job], "--bogus"), ([job, "--lr", "1"], "--lr"), (["plan", "--bytes=3"], "--bytes=3"),
                              (["export", "-x"], "-x"), (["inspect", job, "--json"], "--json")]:
            result = call(*words)
            command = words[0] if words[0] in ("plan", "export", "inspect") else "train"
            self.assertEqual((result.returncode, result.stderr), (2, f"moetrain: {command}: unknown option {option} (see moetrain {command} --help)\n"))

    def test_a_number_that_is_not_allowed_is_named_with_its_flag_and_what_is_allowed(self):
        job, ranks, size = self.job(), "expected integer in [1, 1048576]", "expected a size of at least 1 byte, as 141GB, 80GiB or 4096"
        wrong = [("check", "--ranks", ["0", "-2", "two", "1.5", "1048577", "9" * 30], ranks), ("plan", "--ranks", ["0", "x"], ranks),
                 ("train", "--stop-after", ["0", "-1", "x", "9" * 30], "expected integer >= 1"),
                 ("plan", "--device-memory", ["0", "-1", "-1GB", "GB", "5XB", "5GBs", "0.5", "nan", "1e30", ""], size),
                 ("plan", "--host-memory", ["0", "much"], size)]
        for command, flag, values, allowed in wrong:
            for value in values:
                result = call(command, job, flag, value)
                self.assertEqual((result.returncode, result.stdout), (2, ""), (flag, value))
                self.assertEqual(result.stderr, f"moetrain: {command}: {flag}: is '{value}', {allowed} (see moetrain {command} --help)\n")

    def test_sizes_are_taken_with_the_units_of_both_kinds(self):
        job = self.job()
        need = json.loads(call("plan", job, "--json").stdout)["ranks"][0]["pool_bytes"]
        for size, fits in [(need, True), (need - 1, False), ("1TB", True), ("0.001tib", True), ("1MiB", False), ("1000 kB", False), ("64G", True), ("1B", False)]:
            result = call("plan", job, "--json", "--device-memory", size)
            self.assertEqual(json.loads(result.stdout)["fits"], fits, size)

    def test_verify_without_a_gpu_or_with_a_wrong_job_is_one_error(self):
        job = self.job(data=self.root / "absent.txt")  # verify asks for no data
        blind = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        result = call("verify", job, env=blind)
        self.assertEqual((result.returncode, result.stdout), (3, ""))
        self.assertRegex(result.stderr, r"\Averify: (no GPU is seen here|this build has no CUDA); [^\n]*\n\Z")
        for words, wrong in [([job, "--set", "run.dtype=fp64"], f"{job}: run.dtype: fp64 runs on the CPU only, which is the reference itself\n"),
                             ([self.root / "none.yaml"], "none.yaml"), ([job, "--set", "model.hiden_size=3"], "did you mean hidden_size?"),
                             ([], "JOB.yaml is required"), ([job, "linear"], "linear")]:
            result = call("verify", *words, env=blind)
            self.assertEqual((result.returncode, result.stdout), (2, ""), words)
            self.assertIn(wrong, result.stderr)

    def test_what_is_no_run_is_said_by_one_rank_of_many(self):
        job = self.job()
        for words in (["plan", job], ["--version"], ["check", "--help"]):
            alone, both = call(*words), call(*words, ranks=2)
            self.assertEqual((both.returncode, both.stdout), (0, alone.stdout), both.stderr)
        result = call("inspect", job, ranks=2)
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertEqual(result.stderr.count("not an HDF5 file"), 1, result.stderr)

    def test_check_judges_a_job_for_the_ranks_that_it_was_started_with(self):
        job, two = self.job(), ["--set", "parallel.data_parallel=2"]
        result = call("check", job, *two, ranks=2)
        self.assertEqual((result.returncode, result.stdout), (0, f"{job}: no faults, 2 ranks\n"), result.stderr)
        result = call("check", job, ranks=2)
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertEqual(result.stderr.count("is 1 ranks, but there are 2"), 1, result.stderr)
        self.assertEqual(call("check", job, "--ranks", 1, ranks=2).stdout, f"{job}: no faults, 1 rank\n")
        self.assertEqual(call("check", job, *two, ranks=1).returncode, 0)  # a shell under a batch system

    def test_under_a_launcher_a_wrong_command_line_is_said_once(self):
        result = call("trian", ranks=2)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(result.stderr.count("unknown command trian"), 1, result.stderr)


class Faults(InAFolder):
    def faulty(self):
        return self.job(extra="schedule: {warmup_steps: many}\nmoe:\n  balanse: none\n", data=self.root / "absent.txt")

    def test_every_fault_has_its_line_and_is_printed_with_their_number(self):
        job = self.faulty()
        result = call("check", job)
        self.assertEqual(result.returncode, 2, result.stdout)
        lines = result.stderr.splitlines()
        self.assertEqual(lines[-1], f"{len(lines) - 1} faults")
        self.assertGreaterEqual(len(lines), 4)
        for line, words in [(3, ["data.train", "absent.txt"]), (6, ["schedule.warmup_steps"]), (8, ["moe.balanse", "balance"])]:
            found = [text for text in lines if text.startswith(f"{job}:{line}: ")]
            self.assertEqual(len(found), 1, result.stderr)
            for word in words:
                self.assertIn(word, found[0])

    def test_two_ranks_say_it_once(self):
        job = self.faulty()
        result = call(job, ranks=2)
        self.assertEqual(result.returncode, 2, result.stderr)
        for word in ["data.train", "schedule.warmup_steps", "moe.balanse", " faults"]:
            self.assertEqual(result.stderr.count(word), call("check", job).stderr.count(word), result.stderr)
        self.assertFalse(self.run_dir.exists())

    def test_a_job_that_is_not_there_is_a_fault(self):
        for words in (["check", "absent.yaml"], ["plan", "absent.yaml"], ["absent.yaml"]):
            result = call(*words)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("absent.yaml", result.stderr)
        result = call("absent.yaml", ranks=2)
        self.assertEqual(result.returncode, 2)
        self.assertEqual(result.stderr.count("absent.yaml"), 1, result.stderr)

    def test_the_wrong_number_of_ranks_names_both_numbers(self):
        job = self.job()
        result = call(job, "--set", "parallel.data_parallel=3", ranks=2)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("is 3 ranks", result.stderr)
        self.assertIn("there are 2", result.stderr)
        self.assertIn("1 fault", result.stderr)
        self.assertEqual(call("check", job, "--ranks", 1).returncode, 0)
        result = call("check", job, "--ranks", 8)
        self.assertEqual(result.returncode, 2)
        self.assertIn("there are 8", result.stderr)

    def test_check_of_a_good_job_is_0_and_leaves_nothing_behind(self):
        job = self.job()
        result = call("check", job, "--set", "training.steps=5")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertFalse(self.run_dir.exists())

    def test_set_is_judged_like_the_file(self):
        result = call("check", self.job(), "--set", "training.stepps=5")
        self.assertEqual(result.returncode, 2)
        self.assertIn("training.stepps", result.stderr)

    def test_faults_of_the_text_and_of_set_hide_no_others(self):
        job = self.job(extra="training: {epochs: 1}\n? [a]\n: 1\nmoe: {balanse: none}\n")
        result = call("check", job, "--set", "data.exclude=*", "--set", "steps=3", "--set", "optimizer.lr=-1", "--set", "training.trainable=[nowhere]")
        self.assertEqual(result.returncode, 2, result.stdout)
        lines = [line.split(str(job))[-1] for line in result.stderr.splitlines()]
        self.assertEqual(lines[:3], ["--set data.exclude=*: alias not found after *; a text that begins with * stands in quotes",
                                     "--set steps=3: expected section.key=value", "--set optimizer.lr=-1: is '-1', expected number > 0"])
        self.assertEqual(lines[3:], [":6: key training is given twice (first in line 4)", ":6: training.epochs: unknown key", ":7: a key must be a plain text",
                                     ":9: moe.balanse: unknown key, did you mean balance?", "7 faults"])
        result = call("check", self.job(), "--set", "training.trainable=[nowhere]", "--set", "optimizer.lr=-1")
        self.assertIn("'nowhere' matches no parameter", result.stderr)
        self.assertIn("2 faults", result.stderr)

    def test_a_text_whose_syntax_is_wrong_names_its_line_and_writes_nowhere(self):
        old = self.root / "runs" / "run"  # the run.dir of a job that names none
        old.mkdir(parents=True)
        for text, line, what in [("run:\n\tname: x\n", 2, "a tab in the indentation; YAML takes only spaces"), ("a: 1\nb: " + "[" * 3000, 2, "values inside values, more than")]:
            job = self.write("job.yaml", text)
            for command in ("check", "train"):
                result = call(command, job, cwd=self.root)
                self.assertEqual(result.returncode, 2, result.stdout)
                self.assertTrue(result.stderr.startswith(f"{job}:{line}: {what}"), result.stderr)
        self.assertEqual(list(old.iterdir()), [])

    def test_a_run_folder_that_cannot_be_made_is_a_fault(self):
        file = self.write("file", "")
        for command in ("check", "train"):
            result = call(command, self.job(), "--set", f"run.dir={file}/a/b")
            self.assertEqual(result.returncode, 2, result.stdout)
            self.assertIn(f":1: run.dir: '{file}/a/b' cannot be the run folder: {file} is no folder\n1 fault", result.stderr)
        self.assertEqual(call("plan", self.job(), "--set", f"run.dir={file}/a/b").returncode, 0)

    def test_a_run_folder_without_permission_is_a_fault(self):
        job, program, user = self.job(), PROGRAM, {}
        if os.geteuid() == 0:  # who may write everywhere
            program = shutil.copy(PROGRAM, self.root)
            user = {"user": 65534, "group": 65534}
        shut = self.root / "shut"
        shut.mkdir(mode=0o555)
        self.root.chmod(0o755)
        for command in ("check", "train"):
            result = subprocess.run([program, command, job, "--set", f"run.dir={shut}/a"], capture_output=True, text=True, check=False, cwd="/", **user)
            self.assertEqual(result.returncode, 2, result.stdout)
            self.assertIn(f"'{shut}/a' cannot be the run folder: {shut} cannot be written in: Permission denied\n1 fault", result.stderr)

    def test_a_pattern_of_no_parameter_is_a_fault(self):
        job = self.job()
        for words, ranks in ((["check", job], 0), ([job], 2)):
            result = call(*words, "--set", "training.trainable=[model.nowhere.*]", *(["--set", "parallel.data_parallel=2"] if ranks else []), ranks=ranks)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertEqual(result.stderr.count("model.nowhere.*"), 1, result.stderr)

    def test_adapters_of_no_matrix_and_dropout_of_experts_are_faults_at_their_line(self):
        for keys, line, what in [("{target: [attention, nowhere]}", 6, "lora.target: 'nowhere' matches no matrix of this model"),
                                 ("{dropout: 0.5, target: expert_proj}", 6, "lora.dropout: not possible for the adapter of "),
                                 ("{rank: 9999, target: attention}", 6, "lora.rank: 9999 is more than both sides of model.layers."),
                                 ("{rank: 4}", 0, "lora.target: is missing")]:
            result = call("check", self.job(extra=f"lora: {keys}\n"))
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn((f":{line}: " if line else "") + what, result.stderr)
            self.assertIn("1 fault", result.stderr)

    def test_a_checkpoint_that_is_not_there_is_a_fault(self):
        result = call(self.job(), "--resume", self.root / "step_00000007")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("step_00000007", result.stderr)
        self.assertFalse(self.run_dir.exists())

    def test_a_cuda_run_is_refused_where_nothing_can_run_it(self):
        version = call("--version").stdout
        built = "CUDA    compiled in" in version
        if built and "devices seen: 0" not in version:
            self.skipTest("a GPU is here")
        result = call(self.job(), "--set", "run.device=cuda")
        self.assertEqual(result.returncode, 3 if built else 2, result.stderr)  # the machine lacks it, or no build of this kind has it
        self.assertIn("run.device", result.stderr)

    def test_an_old_run_folder_learns_that_its_job_is_wrong(self):
        job = self.job(extra="moe: {balanse: none}\n")
        self.run_dir.mkdir()
        self.assertEqual(call(job).returncode, 2)
        end = self.exit_json()
        self.assertEqual((end["code"], end["rank"], end["step"]), (2, 0, None))
        self.assertIn("moe.balanse", end["cause"])


class Plans(InAFolder):
    def plan(self, preset, *words):
        job = self.write("job.yaml", f"model: {{preset: {preset}}}\ndata: {{train: nowhere, format: tokens, sequence_length: 4096}}\ntraining: {{steps: 10}}\n")
        result = call("plan", job, "--json", *words)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_the_presets_have_their_published_parameters(self):
        wanted = {
            "kimi-k3": (2779484476000, 104189612640, 2722740830208),
            "kimi-k3.1": (2779663002208, 104368138848, 2722740830208),
            "kimi-linear-48b": (49122681728, 3106972544, 47110422528),
        }
        for preset, (total, active, experts) in wanted.items():
            p = self.plan(preset)["parameters"]
            self.assertEqual((p["total"], p["active_per_token"], p["routed_experts"], p["trunk"]), (total, active, experts, total - experts), preset)

    def test_keys_and_sums_are_those_of_the_contract(self):
        plan = self.plan("kimi-k3", "--set", "parallel.expert_parallel=128", "--device-memory", "141GB")
        self.assertEqual(set(plan), {"parameters", "ranks", "fits", "step", "advice"})
        self.assertEqual(sum(rank["count"] for rank in plan["ranks"]), 128)
        self.assertEqual([rank["rank"] for rank in plan["ranks"]], sorted(rank["rank"] for rank in plan["ranks"]))
        categories = {"weights", "gradients", "optimizer", "activations", "cache", "loss", "communication", "workspace", "total"}
        for rank in plan["ranks"]:
            self.assertEqual(set(rank["device_bytes"]), categories)
            self.assertEqual(set(rank["host_bytes"]), categories)
            parts = [rank["device_bytes"][name] for name in categories - {"total"}]
            self.assertLessEqual(max(parts), rank["device_bytes"]["total"])
            self.assertLessEqual(rank["device_bytes"]["total"], sum(parts))
            self.assertLessEqual(rank["device_bytes"]["total"], rank["pool_bytes"])
        # bf16 weights, masters and moments of fp32: 14 bytes a parameter over the ranks, a little more where rows do not divide.
        held = sum((r["device_bytes"]["optimizer"]) * r["count"] for r in plan["ranks"])
        self.assertAlmostEqual(held / (12 * plan["parameters"]["trainable"]), 1, delta=1e-3)
        self.assertIs(plan["fits"], False)
        self.assertTrue(plan["advice"] and all(isinstance(line, str) for line in plan["advice"]))
        for name in ("model_flops", "bytes_gathered", "bytes_exchanged"):
            self.assertGreater(plan["step"][name], 0, name)
        for rank in plan["ranks"]:
            self.assertEqual(list(rank["phases"]), ["load", "forward", "backward", "step", "save"])
            for memory in ("device_bytes", "host_bytes"):
                for phase in rank["phases"].values():
                    self.assertEqual(set(phase[memory]), categories)
                for name in categories:
                    self.assertEqual(max(phase[memory][name] for phase in rank["phases"].values()), rank[memory][name], name)

    def test_a_step_has_a_predicted_time_on_a_machine_alone(self):
        plan = self.plan("kimi-k3", "--set", "parallel.expert_parallel=128", "--set", "run.device=cpu")
        self.assertEqual(set(plan["step"]), {"model_flops", "bytes_gathered", "bytes_exchanged", "predicted_ms"})
        self.assertIsNone(plan["step"]["predicted_ms"])
        self.assertIsNone(plan["fits"])
        plan = self.plan("kimi-k3", "--set", "parallel.expert_parallel=128", "--set", "run.device=cuda")
        self.assertEqual(plan["step"]["machine"], "h200")
        self.assertIsNone(plan["fits"])
        named = self.plan("kimi-k3", "--set", "parallel.expert_parallel=128", "--machine", "h200")
        self.assertIs(named["fits"], False)  # in its memory
        self.assertEqual(named["step"], plan["step"])
        parts = named["step"]["parts_ms"]
        kinds = ["linear", "grouped_linear", "kda", "attention", "sparse_attention", "indexer", "loss", "optimizer", "rows"]
        self.assertEqual(list(parts), [*kinds, "slowed_by_messages", "waits"])
        self.assertEqual(set(parts["waits"]), {"weights", "sums", "experts_rows", "other_ranks", "its_host", "host_memory"})
        whole = sum(sum(parts[kind].values()) for kind in kinds) + parts["slowed_by_messages"] + sum(parts["waits"].values())
        self.assertAlmostEqual(whole / named["step"]["predicted_ms"], 1, delta=1e-9)
        for word in ("predicted for h200", "waits: experts rows", "tokens/s", "does not fit"):
            self.assertIn(word, call("plan", self.root / "job.yaml", "--machine", "h200", "--set", "parallel.expert_parallel=128").stdout)

    def test_machines_that_do_not_fit_the_job_are_one_error(self):
        self.plan("tiny-k3")
        job, description = self.root / "job.yaml", self.write("m.yaml", "name: m\ndevice: cpu\nmemry: 1GB\n")
        for words, wrong in [(["--machine", ""], "must not be empty"), (["--machine", "h9000"], "neither a machine (h200) nor a file"), (["--machine", description], f"{description}:3: memry: unknown key"),
                             (["--machine", "h200", "--set", "run.device=cpu"], "run.device is cpu, and machine h200 is a GPU"),
                             (["--machine", "h200", "--set", "run.dtype=fp64"], "run.dtype fp64 runs on the CPU only"),
                             (["--search", "--set", "run.device=cpu"], "name a machine")]:
            result = call("plan", job, *words)
            self.assertEqual((result.returncode, result.stdout), (2, ""), words)
            self.assertIn(wrong, result.stderr)

    def test_a_search_proposes_what_check_and_plan_agree_with(self):
        batch = ["--set", "training.gradient_accumulation=16"]
        found = self.plan("tiny-k3", *batch, "--machine", "h200", "--search", "--ranks", 4, "--device-memory", "200MB")
        self.assertGreater(found["tried"], 0)
        self.assertTrue(found["proposals"])
        times = [p["predicted_ms"] for p in found["proposals"]]
        self.assertEqual(times, sorted(times))
        job = self.root / "job.yaml"
        for p in found["proposals"][:2]:
            self.assertLessEqual(p["device_bytes"], 200_000_000)
            set_lines = [word for line in p["set"] for word in ("--set", line)]
            self.assertEqual(call("check", job, "--ranks", 4, *batch, *set_lines, "--set", "data.train=/", "--set", "data.format=bytes").returncode, 0, p)
            plan = json.loads(call("plan", job, *batch, *set_lines, "--machine", "h200", "--json").stdout)
            self.assertAlmostEqual(plan["step"]["predicted_ms"] / p["predicted_ms"], 1, delta=1e-9)
            self.assertEqual(max(rank["pool_bytes"] for rank in plan["ranks"]), p["device_bytes"])
        text = call("plan", job, *batch, "--machine", "h200", "--search", "--ranks", 4, "--device-memory", "200MB").stdout
        self.assertIn("--set parallel.", text)
        text = call("plan", job, *batch, "--machine", "h200", "--search", "--ranks", 4, "--device-memory", "1MB").stdout
        self.assertIn("no layout of 4 ranks fits", text)
        self.assertIn("the least is", text)

    def test_the_jobs_of_2_8_T_parameters_are_checked_and_planned_in_seconds(self):
        for name, ranks, holds in [("kimi-k3.1-lora-128", 128, {"64 GB": "no", "80 GB": "yes", "141 GB": "yes"}),
                                   ("kimi-k3.1-full", 896, {"64 GB": "no", "80 GB": "no", "141 GB": "yes"})]:
            job = pathlib.Path(__file__).resolve().parents[2] / f"configs/{name}.yaml"
            start = time.monotonic()
            result = call("check", job)
            self.assertEqual((result.returncode, result.stdout), (0, f"{job}: no faults, {ranks} ranks\n"), result.stderr)
            text = call("plan", job, "--machine", "h200").stdout
            self.assertLess(time.monotonic() - start, 30)
            for size, word in holds.items():
                self.assertIn(f"{size} {word}", text)
            self.assertIn("experts ", text)

    def test_a_machine_is_measured_into_a_file_that_plan_takes(self):
        out = self.root / "mine.yaml"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        result = call("bench", "--machine", out, env=environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"{out}: written", result.stdout)
        self.plan("tiny-k3")
        job = self.root / "job.yaml"
        for dtype in ("fp32", "bf16", "fp64"):
            result = call("plan", job, "--json", "--machine", out, "--set", f"run.dtype={dtype}")
            self.assertGreater(json.loads(result.stdout)["step"]["predicted_ms"], 0, result.stderr)
        for words, wrong in [(["--machine", out], "exists already"), (["--machine", self.root / "none/m.yaml"], "there is no folder"),
                             (["linear", "--machine", "x.yaml"], "without NAME"), (["--machine", ""], "must not be empty")]:
            result = call("bench", *words, env=environment)
            self.assertEqual((result.returncode, len(result.stderr.splitlines())), (2, 1), (words, result.stderr))
            self.assertIn(wrong, result.stderr)

    def test_fits_is_said_only_against_a_memory(self):
        self.assertIsNone(self.plan("tiny-k3")["fits"])
        self.assertIs(self.plan("tiny-k3", "--device-memory", "64GiB")["fits"], True)
        self.assertIs(self.plan("tiny-k3", "--device-memory", "1MB")["fits"], False)
        self.assertEqual(self.plan("tiny-k3", "--device-memory", "64GiB")["advice"], [])

    def test_ranks_that_the_job_does_not_make_up_are_a_fault(self):
        self.plan("tiny-k3", "--ranks", 1)
        result = call("plan", self.root / "job.yaml", "--ranks", 4)
        self.assertEqual(result.returncode, 2)
        self.assertIn("there are 4", result.stderr)

    def test_people_get_a_table(self):
        self.plan("tiny-k3")
        result = call("plan", self.root / "job.yaml")
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in ["active a token", "optimizer", "backward", "MiB", "TFLOP", "exchanged", "fits a device of"]:
            self.assertIn(word, result.stdout)


class Runs(InAFolder):
    def test_a_run_ends_with_0_and_says_so(self):
        result = call(self.job())
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.exit_json()["code"], 0)
        self.assertEqual(len((self.run_dir / "metrics.csv").read_text().splitlines()), 4)
        self.assertNotIn("[rank", result.stdout)

    def test_contents_that_cannot_be_read_are_a_failure_of_the_run(self):
        data = self.write("broken.h5", b"\x89HDF\r\n\x1a\nand no more")
        job = self.job(data=data)
        result = call(job, "--set", "data.format=tokens")
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertIn("broken.h5", result.stderr)
        end = self.exit_json()
        self.assertEqual((end["code"], end["rank"]), (3, 0))
        self.assertIn("broken.h5", end["cause"])
        result = call(job, "--set", "data.format=tokens", "--set", "parallel.data_parallel=2", ranks=2)
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertEqual(result.stderr.count("broken.h5"), 1, result.stderr)

    def test_stop_after_and_resume_go_on_where_the_run_stood(self):
        job = self.job(steps=4)
        self.assertEqual(call(job, "--stop-after", 2).returncode, 0)
        self.assertEqual(len((self.run_dir / "metrics.csv").read_text().splitlines()), 3)
        self.assertEqual(call("train", job).returncode, 0)
        self.assertEqual(len((self.run_dir / "metrics.csv").read_text().splitlines()), 5)

    def test_resume_takes_a_step_folder_or_the_newest_of_a_run_folder(self):
        job = self.job(steps=4)
        self.assertEqual(call(job, "--stop-after", 2, "--set", "checkpoint.every=1").returncode, 0)
        checkpoints = self.run_dir / "checkpoints"
        for path, step in [(checkpoints / "step_00000001", 1), (self.run_dir, 2), (checkpoints, 2)]:
            result = call(job, "--resume", path, "--stop-after", 1, "--set", f"run.dir={self.root}/from {path.name}", "--set", "optimizer.lr=0.1")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(f"at step {step}\n", result.stdout)
        for path in (self.root, job):
            result = call(job, "--resume", path)
            self.assertEqual(result.returncode, 3, result.stdout)
            self.assertTrue(result.stderr.endswith(f"{path}: neither the folder of a checkpoint nor a run folder that has one\n"), result.stderr)

    def test_a_signal_at_the_very_start_saves_and_stops_with_5(self):
        job = self.job(steps=1000000)
        process = subprocess.Popen([PROGRAM, str(job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        # From its first instruction on; until then the system's own answer to a signal would be tested.
        caught = 0
        while not caught >> signal.SIGUSR1 - 1 & 1:
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=300)
        self.assertEqual(process.returncode, 5, out + err)
        self.assertEqual(self.exit_json()["code"], 5)
        self.assertTrue((self.run_dir / "checkpoints" / "latest").exists())

    def test_a_folder_of_another_model_is_refused(self):
        job = self.job(steps=1)
        self.assertEqual(call(job).returncode, 0)
        result = call(job, "--set", "optimizer.lr=0.1", "--set", "training.steps=2")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("another job", result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)


class Inspect(InAFolder):
    def test_a_checkpoint_tells_its_step_and_tensors(self):
        self.assertEqual(call(self.job(steps=2)).returncode, 0)
        checkpoints = self.run_dir / "checkpoints"
        step = checkpoints / "step_00000002"
        for path in (self.run_dir, checkpoints, step, step / "checkpoint.h5"):
            result = call("inspect", path)
            self.assertEqual(result.returncode, 0, result.stderr)
            for word in ["step 2,", "model.embed_tokens.weight", "[257, 64]", "total:"]:
                self.assertIn(word, result.stdout)
        shard = next(step.glob("shard_*.h5"))
        shard.write_bytes(shard.read_bytes()[:-1])
        self.assertEqual(call("inspect", step).returncode, 3)

    def test_other_hdf5_files_are_said_to_be_neither(self):
        self.assertEqual(call(self.job(steps=1)).returncode, 0)
        for file, why in [(self.run_dir / "metrics.h5", "its data set tokens is fp64, no integers"),
                          (next(self.run_dir.glob("checkpoints/step_*/shard_*.h5")), "it has no data set tokens")]:
            result = call("inspect", file)
            self.assertEqual((result.returncode, result.stdout), (3, ""))
            self.assertEqual(result.stderr, f"{file}: an HDF5 file, but neither a token file nor a checkpoint: {why}\n")

    def test_a_folder_of_links_is_listed_as_the_files_are(self):
        header = json.dumps({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}).encode()
        (self.root / "blobs").mkdir()
        (self.root / "snapshot").mkdir()
        self.write("blobs/1f", struct.pack("<Q", len(header)) + header + bytes(4))
        (self.root / "snapshot" / "model.safetensors").symlink_to("../blobs/1f")
        result = call("inspect", self.root / "snapshot")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("snapshot/model.safetensors: 1 tensors", result.stdout)

    def test_safetensors_are_read_by_their_headers(self):
        header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
                  "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]}}
        text = json.dumps(header).encode()
        whole = struct.pack("<Q", len(text)) + text + bytes(16)
        path = self.write("model.safetensors", whole)
        self.write("config.json", json.dumps({"model_type": "kimi_linear", "text_config": {"hidden_size": 64}}))
        result = call("inspect", self.root)
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in ["a BF16 [2, 3]", "b F32 []", "total: 2 tensors, 7 elements", "kimi_linear", "text_config.hidden_size: 64"]:
            self.assertIn(word, result.stdout)
        wide = dict(header, a={"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 12]})
        text = json.dumps(wide).encode()
        for broken in (whole[:-1], whole[:5], whole[:20], b"", struct.pack("<Q", 1 << 62) + bytes(16), struct.pack("<Q", len(text)) + text + bytes(16)):
            path.write_bytes(broken)
            result = call("inspect", path)
            self.assertEqual(result.returncode, 3, (broken, result.stdout))
            self.assertIn("model.safetensors", result.stderr)

    def test_what_is_nothing_of_ours_is_said_to_be_so(self):
        self.assertEqual(call("inspect", self.root / "absent").returncode, 2)
        self.assertEqual(call("inspect", self.root).returncode, 3)
        self.assertEqual(call("inspect", self.write("text.txt", "words")).returncode, 3)


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()
