#!/usr/bin/env python3
"""One rank killed at random moments: all are gone in time, a checkpoint loads, and the run goes on as if it had never been cut.

kill_test.py MOETRAIN [unittest arguments]; MPIRUN in the environment says how ranks are started, MOETRAIN_KILLS how many kills each test
does (4), MOETRAIN_SEED which.
"""
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import unittest

from runs import TWO, Runs, alive, main, ranks_of, wait_for

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
KILLS = int(os.environ.get("MOETRAIN_KILLS", "4"))
IN_TIME = 30  # seconds, from the kill to the end of all ranks


class OneRank(Runs):
    def steps_done(self):
        path = self.run_dir / "metrics.csv"
        return max(0, path.read_text().count("\n") - 1) if path.exists() else 0

    def saved(self):
        path = self.run_dir / "checkpoints/latest"
        return int(path.read_text().strip().removeprefix("step_")) if path.exists() else 0

    def partial(self):
        return bool(list(self.run_dir.glob("checkpoints/*.partial")))

    def when(self, moment, process, first, chance):
        """Waits for the moment, or for the end of a run that was faster."""
        over = lambda: process.poll() is not None
        if moment == "start":
            wait_for(lambda: over() or len(ranks_of(process.pid)) == 2, "two ranks")
            time.sleep(chance.uniform(0, 1))
        elif moment == "step":
            wait_for(lambda: over() or self.steps_done() > first, "a step")
            time.sleep(chance.uniform(0, 0.3))
        elif moment == "save":
            wait_for(lambda: over() or self.partial(), "a save")
            time.sleep(chance.uniform(0, 0.02))
        elif moment == "next save":
            wait_for(lambda: over() or self.saved() > first, "a checkpoint")
            wait_for(lambda: over() or self.partial(), "a save")
        else:  # exit: after the last step of --stop-after
            wait_for(lambda: over() or self.steps_done() >= first + 4, "the last step")
            time.sleep(chance.uniform(0, 0.2))

    def kills(self, beside):
        seed = int(os.environ.get("MOETRAIN_SEED", random.randrange(1000000)))
        chance = random.Random(seed)
        print(f"MOETRAIN_SEED={seed}", file=sys.stderr)
        saving = f"checkpoint: {{every: 1, keep: 2, async: {str(beside).lower()}}}\n"
        job = self.job(1000000, extra=saving + "schedule: {name: constant}\n")
        self.call(job, *TWO, "--stop-after", 1, ranks=2)
        cut, moments = 0, ["save", "step", "exit", "start", "next save"]
        for kill in range(KILLS):
            moment, rank, first = moments[kill % len(moments)], chance.randrange(2), self.saved()
            with self.subTest(kill=kill, moment=moment, rank=rank, first=first, seed=seed):
                (self.run_dir / "exit.json").unlink(missing_ok=True)  # of the run before, which stays until the next one has begun
                process = self.start(job, *TWO, "--stop-after", 4, ranks=2)
                self.when(moment, process, first, chance)
                ranks = ranks_of(process.pid)
                was_saving = self.partial()
                if len(ranks) == 2 and alive(ranks[rank]):
                    os.kill(ranks[rank], signal.SIGKILL)
                killed = time.monotonic()
                try:
                    process.communicate(timeout=IN_TIME)
                except subprocess.TimeoutExpired:
                    self.fail(f"not all ranks ended within {IN_TIME} s")
                wait_for(lambda: not any(alive(pid) for pid in ranks), "the end of the ranks", max(1, killed + IN_TIME - time.monotonic()))
                if process.returncode != 0:  # a run that was over before the kill says so
                    cut += was_saving
                    self.assertIn(self.exit_code(), (None, 4))
                self.assertGreaterEqual(self.saved(), first)
                self.assertTrue(self.inspected(self.run_dir / "checkpoints"), moment)
        self.assertGreater(cut, 0, "no kill came during a save")
        self.call(job, *TWO, "--stop-after", 1, ranks=2)
        last = self.saved()
        self.assertFalse(self.partial())
        through = self.root / "through"
        self.call(job, *TWO, "--stop-after", last, "--set", f"run.dir={through}", "--set", "checkpoint.every=0", ranks=2)
        result = subprocess.run([sys.executable, "-B", SCRIPTS / "compare_runs.py", through, self.run_dir], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        shards = [(folder / f"checkpoints/step_{last:08}/shard_{rank:05}.h5").read_bytes() for rank in range(2) for folder in (through, self.run_dir)]
        self.assertEqual(shards[0], shards[1])
        self.assertEqual(shards[2], shards[3])

    def exit_code(self):
        return self.exit_json()["code"] if (self.run_dir / "exit.json").exists() else None

    def test_killed_while_steps_wait_for_saves(self):
        self.kills(beside=False)

    def test_killed_while_saves_run_beside_steps(self):
        self.kills(beside=True)


if __name__ == "__main__":
    main()
