#!/usr/bin/env python3
"""Whole runs as their users live with them: stopped and resumed bit for bit, signals at any moment, kills in the middle of a save.

run_test.py MOETRAIN [unittest arguments]; MPIRUN in the environment says how ranks are started.
"""
import csv
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import unittest

from runs import MPIRUN, TWO, Runs, main, ranks_of, wait_for

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
FOUR = ["--set", "parallel.data_parallel=2", "--set", "parallel.expert_parallel=2", "--set", "training.gradient_accumulation=2"]
BIT_EQUAL = ["step", "tokens", "loss", "balance_loss", "indexer_loss", "grad_norm", "lr", "label_tokens"]


def catches(pid, number):
    """Whether the process has a handler for the signal; until then the system's own answer would be tested."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return int(caught, 16) >> number - 1 & 1 == 1


def forwards_signals():
    """Whether this mpirun passes SIGUSR1 on to its ranks: tried with a shell, which notices between two short sleeps."""
    rank = 'trap "echo got; exit 0" USR1; echo ready; for n in $(seq 50); do sleep 0.2; done'
    with subprocess.Popen([*MPIRUN, "-n", "2", "bash", "-c", rank], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launcher:
        for _ in range(2):
            launcher.stdout.readline()
        launcher.send_signal(signal.SIGUSR1)
        return launcher.stdout.read().count("got") == 2


class WholeRuns(Runs):
    def steps_done(self, run_dir=None):
        path = (run_dir or self.run_dir) / "metrics.csv"
        return max(0, path.read_text().count("\n") - 1) if path.exists() else 0

    def rows(self):
        with (self.run_dir / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def latest(self, run_dir=None):
        folder = (run_dir or self.run_dir) / "checkpoints"
        return folder / (folder / "latest").read_text().strip()

    def equal_runs(self, a, b):
        result = subprocess.run([sys.executable, "-B", SCRIPTS / "compare_runs.py", a, b], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        if shutil.which("h5diff"):
            apart = [word for name in ("/job", "/shards") for word in ("--exclude-path", name)]  # they hold run.dir, and sums over dates
            result = subprocess.run(["h5diff", *apart, self.latest(a) / "checkpoint.h5", self.latest(b) / "checkpoint.h5"],
                                    capture_output=True, text=True, check=False)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        for shard in sorted(self.latest(a).glob("shard_*.h5")):
            self.assertEqual(shard.stat().st_size, (self.latest(b) / shard.name).stat().st_size)


class Resume(WholeRuns):
    def test_four_ranks_stopped_by_a_signal_to_one_and_by_steps_end_as_if_never_stopped(self):
        for dtype in ("fp32", "bf16"):
            through, stopped = self.root / f"through_{dtype}", self.root / f"stopped_{dtype}"
            self.call(self.job(12, dtype=dtype, run_dir=through), *FOUR, ranks=4)
            job = self.job(12, dtype=dtype, run_dir=stopped)
            process = self.start(job, *FOUR, ranks=4)
            wait_for(lambda: self.steps_done(stopped) >= 2, "two steps")
            os.kill(ranks_of(process.pid)[2], signal.SIGUSR1)
            self.end(process, 5)
            end = self.exit_json(stopped)
            self.assertEqual((end["code"], end["step"]), (5, self.steps_done(stopped)))
            self.assertEqual(self.latest(stopped).name, f"step_{end['step']:08}")
            self.assertLess(end["step"], 12)
            self.call(job, *FOUR, "--stop-after", 1, ranks=4)
            self.assertEqual(self.steps_done(stopped), end["step"] + 1)
            self.call(job, *FOUR, ranks=4)
            self.equal_runs(through, stopped)

    def test_the_job_that_a_run_wrote_down_is_the_run(self):
        self.call(self.job(4, extra="moe: {balance: auxiliary}\nschedule: {name: wsd, warmup_steps: 2}\n"))
        again = self.root / "again"
        self.call(self.run_dir / "job.yaml", "--set", f"run.dir={again}")
        self.equal_runs(self.run_dir, again)
        names = [line for line in (self.run_dir / "job.yaml").read_text().splitlines() if " dir:" not in line]
        self.assertEqual(names, [line for line in (again / "job.yaml").read_text().splitlines() if " dir:" not in line])

    def test_rows_past_the_checkpoint_are_cut_when_a_run_resumes(self):
        job = self.job(5, extra="checkpoint: {every: 2, keep: 0}\n")
        self.call(job)
        whole = [{name: row[name] for name in BIT_EQUAL} for row in self.rows()]
        (self.run_dir / "checkpoints/latest").write_text("step_00000002\n")
        self.call(job, "--stop-after", 1)
        self.assertEqual(self.steps_done(), 3)
        self.call(job)
        again = [{name: row[name] for name in BIT_EQUAL} for row in self.rows()]
        self.assertEqual(whole, again)

    def test_a_folder_of_one_layout_goes_on_under_another(self):
        job = self.job(4)
        self.call(job, "--stop-after", 2, "--set", "training.gradient_accumulation=2")
        self.call(job, "--stop-after", 1, *TWO, ranks=2)
        self.call(job, "--set", "parallel.expert_parallel=2", "--set", "parallel.sharding=none", ranks=2)
        self.assertEqual(self.steps_done(), 4)

    @unittest.skipUnless(shutil.which("h5dump"), "h5dump is not here")
    def test_h5dump_reads_the_view_of_a_bf16_run(self):
        self.call(self.job(1, dtype="bf16"), *TWO, ranks=2)
        view = self.latest() / "checkpoint.h5"
        header = subprocess.run(["h5dump", "-H", view], capture_output=True, text=True, check=False)
        self.assertEqual((header.returncode, header.stderr), (0, ""))
        for word in ("model.embed_tokens.weight", "exp_avg_sq", "master", "tokens_seen", "16-bit little-endian floating-point"):
            self.assertIn(word, header.stdout)
        values = subprocess.run(["h5dump", "-y", "-d", "/model.norm.weight", view], capture_output=True, text=True, check=False)
        self.assertEqual(values.returncode, 0, values.stderr)
        numbers = [float(n) for n in values.stdout.split("DATA {")[1].partition("}")[0].replace(",", " ").split()]
        self.assertEqual(len(numbers), 32)
        self.assertTrue(all(0.9 < n < 1.1 for n in numbers), numbers)


class Signals(WholeRuns):
    def stopped(self, process):
        self.end(process, 5)
        end = self.exit_json()
        self.assertEqual((end["code"], end["step"]), (5, self.steps_done()))
        self.assertEqual(self.latest().name, f"step_{end['step']:08}")
        self.assertFalse(list(self.run_dir.glob("checkpoints/*.partial")))
        self.assertTrue(self.inspected(self.run_dir))

    def test_during_an_evaluation(self):
        process = self.start(self.job(1000000), "--set", f"data.eval={self.data}", "--set", "training.eval_every=1", "--set", "training.eval_batches=40")
        wait_for(lambda: self.run_dir.exists() and self.steps_done() >= 1, "a step")
        time.sleep(0.3)  # the step takes a fortieth of the time of its evaluation
        process.send_signal(signal.SIGTERM)
        self.stopped(process)

    def test_during_a_save(self):
        process = self.start(self.job(1000000, extra="checkpoint: {every: 1}\n"))
        wait_for(lambda: list(self.run_dir.glob("checkpoints/*.partial")), "a save")
        process.send_signal(signal.SIGUSR1)
        self.stopped(process)

    def test_that_the_launcher_left_blocked_still_stops(self):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            process = self.start(self.job(1000000))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        wait_for(lambda: self.run_dir.exists() and self.steps_done() >= 1, "a step")
        process.send_signal(signal.SIGUSR1)
        self.stopped(process)

    def test_of_one_rank_at_the_start(self):
        process = self.start(self.job(1000000), *TWO, ranks=2)
        wait_for(lambda: len(ranks_of(process.pid)) == 2 and all(catches(pid, signal.SIGTERM) for pid in ranks_of(process.pid)), "two ranks")
        os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
        self.stopped(process)

    def test_to_mpirun_reaches_all(self):
        if not forwards_signals():
            self.skipTest(f"{MPIRUN[0]} does not pass SIGUSR1 on to its ranks here")
        process = self.start(self.job(1000000), *TWO, ranks=2)
        wait_for(lambda: self.steps_done() >= 1, "a step")
        process.send_signal(signal.SIGUSR1)
        self.stopped(process)

    def test_sigterm_to_mpirun_leaves_a_folder_that_goes_on(self):
        job = self.job(1000000, extra="checkpoint: {every: 1}\n")
        process = self.start(job, *TWO, ranks=2)
        wait_for(lambda: (self.run_dir / "checkpoints/latest").exists(), "a checkpoint")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        self.assertNotEqual(process.returncode, 0)
        if (self.run_dir / "exit.json").exists():  # the ranks had the time to save, or one saw the other killed
            self.assertIn(self.exit_json()["code"], (4, 5))
        self.call(job, *TWO, "--stop-after", 1, ranks=2)
        self.assertEqual(self.exit_json()["step"], self.steps_done())


class Kills(WholeRuns):
    def test_at_random_points_of_saves_always_leave_one_checkpoint_that_loads(self):
        job = self.job(1000000, extra="checkpoint: {every: 1, keep: 1}\n")
        chance = random.Random(5)
        cut = 0
        for _ in range(8):
            before = self.latest().name if (self.run_dir / "checkpoints/latest").exists() else ""
            process = self.start(job)
            wait_for(lambda: (self.run_dir / "checkpoints/latest").exists() and self.latest().name > before, "a new checkpoint")
            time.sleep(chance.uniform(0, 0.15))
            wait_for(lambda: list(self.run_dir.glob("checkpoints/*.partial")), "a save")
            time.sleep(chance.uniform(0, 0.1))
            process.kill()
            process.communicate()
            cut += bool(list(self.run_dir.glob("checkpoints/*.partial")))
            self.assertTrue(self.inspected(self.latest()))
            self.assertFalse((self.run_dir / "exit.json").exists())
        self.assertGreater(cut, 0)
        self.call(job, "--stop-after", 1)
        left = sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())
        self.assertEqual(left, ["latest", self.latest().name])
        steps = [int(row["step"]) for row in self.rows()]
        self.assertEqual(steps, list(range(1, len(steps) + 1)))


if __name__ == "__main__":
    main()
