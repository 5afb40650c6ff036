#!/usr/bin/env python3
"""A rank that is stopped, killed or never comes: it is named, all end with 4 within the limit, exit.json says it, and the run goes on.

lost_rank_test.py MOETRAIN [unittest arguments]; MPIRUN in the environment says how ranks are started.
"""
import os
import random
import re
import shutil
import signal
import subprocess
import time
import unittest

from runs import MPIRUN, TWO, Runs, alive, main, ranks_of, wait_for

LIMIT = 6
SLACK = 4  # the end of mpirun and a busy machine
FOUR = ["--set", "parallel.data_parallel=2", "--set", "parallel.expert_parallel=2"]


class LostRanks(Runs):
    def job(self, steps=1000000, extra="checkpoint: {every: 2}\n", **more):
        return super().job(steps, extra + f"monitor: {{collective_timeout_s: {LIMIT}}}\n", shuffle="false", **more)

    def setUp(self):
        super().setUp()
        self.checkpoints = self.run_dir / "checkpoints"

    def under_way(self, job, *words, ranks, after=lambda self: (self.checkpoints / "latest").exists(), pause=1):  # of some beats
        process = self.start(job, *words, ranks=ranks)
        wait_for(lambda: after(self), "a run that is under way")
        time.sleep(pause)
        return process, ranks_of(process.pid)

    def lost(self, process, pids, rank, since, says):
        """All are gone in time, with 4, one line that names the rank, and the same in exit.json."""
        out, err = self.end(process, 4)
        self.assertLess(time.monotonic() - since, LIMIT + SLACK)
        wait_for(lambda: not any(alive(pid) for pid in pids), "the end of the ranks", 5)
        told = [line for line in err.splitlines() if re.search(rf"\brank {rank} (has not answered|is gone|did not come)", line)]
        self.assertEqual(len(told), 1, out + err)
        end = self.exit_json()
        self.assertEqual((end["code"], end["rank"]), (4, rank), end)
        self.assertIn(end["cause"], told[0])
        for word in says:
            self.assertRegex(told[0], word)
        return end

    def goes_on(self, job, *words, ranks):
        self.assertTrue(self.inspected(self.checkpoints))
        self.call(job, *words, "--stop-after", 1, ranks=ranks)
        self.assertEqual(self.exit_json()["code"], 0)

    def test_stopped_between_saves(self):
        job = self.job()
        process, pids = self.under_way(job, *FOUR, ranks=4)
        os.kill(pids[2], signal.SIGSTOP)
        end = self.lost(process, pids, 2, time.monotonic(), [r"has not answered for \d", "last seen in (forward|backward|step|save)", "; rank [013] stands in .* waiting in collective"])
        self.assertGreaterEqual(end["step"], 2)
        self.goes_on(job, *FOUR, ranks=4)

    def test_stopped_in_forward(self):
        large = ["--set", "model.hidden_size=512", "--set", "data.sequence_length=1024", "--set", "training.micro_batch_size=4", "--set", "parallel.sharding=full", "--set", "parallel.bucket_size=0"]
        process, pids = self.under_way(self.job(extra=""), *TWO, *large, ranks=2, after=lambda self: (self.run_dir / "metrics.csv").exists())
        os.kill(pids[1], signal.SIGSTOP)
        self.lost(process, pids, 1, time.monotonic(), ["; rank 0 stands in (forward|backward|step)(, layer [0-9]+)?, waiting in collective [0-9]+, (all-gather|reduce-scatter|all-reduce) of [0-9]+ .*over (dense|world)"])
        self.assertFalse(self.checkpoints.exists() and any(self.checkpoints.iterdir()))  # nothing is saved when a peer is gone

    def test_stopped_in_a_save(self):
        job = self.job(extra="checkpoint: {every: 1}\n")
        process, pids = self.under_way(job, *TWO, "--set", "model.hidden_size=1024", ranks=2,
                                       after=lambda self: (self.checkpoints / "latest").exists() and list(self.checkpoints.glob("*.partial/shard_00001*")), pause=0)
        os.kill(pids[1], signal.SIGSTOP)
        self.lost(process, pids, 1, time.monotonic(), ["rank 0 stands in save, waiting in collective [0-9]+, all-(reduce|gather)"])
        self.goes_on(job, *TWO, "--set", "model.hidden_size=1024", ranks=2)

    def test_killed_where_the_launcher_does_nothing(self):
        """mpirun, which would end the others by itself, is stopped meanwhile."""
        job = self.job()
        process, pids = self.under_way(job, *FOUR, "--set", "monitor.collective_timeout_s=600", ranks=4)
        os.kill(process.pid, signal.SIGSTOP)
        since = time.monotonic()
        os.kill(pids[3], signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in pids), "the end of the ranks", LIMIT + SLACK)  # long before 600 s
        self.assertLess(time.monotonic() - since, LIMIT + SLACK)
        os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=60)
        told = [line for line in err.splitlines() if "rank 3 is gone; it was last seen in " in line]
        self.assertEqual(len(told), 1, out + err)
        end = self.exit_json()
        self.assertEqual((end["code"], end["rank"]), (4, 3))
        self.goes_on(job, *FOUR, ranks=4)

    def test_one_that_never_starts(self):
        words = [*MPIRUN, "-n", "3", self.program, self.job(), *FOUR, ":", "-n", "1", "sleep", "100"]
        for there in (False, True):
            if there:
                self.run_dir.mkdir()
            since = time.monotonic()
            result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
            self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
            self.assertLess(time.monotonic() - since, LIMIT + 2 * SLACK)  # mpirun's start too
            told = [line for line in result.stderr.splitlines() if "rank 3 did not come within " in line]
            self.assertEqual(len(told), 1, result.stderr)
            self.assertIn("waiting in start of MPI", told[0])
            self.assertLess(float(re.search(r"within ([0-9.]+) s", told[0])[1]), LIMIT + 1.5)
            end = self.exit_json()
            self.assertEqual((end["code"], end["rank"], end["step"]), (4, 3, None))
            shutil.rmtree(self.run_dir)

    def test_at_random_moments_from_start_to_exit(self):
        chance = random.Random(11)
        job = self.job(steps=6, extra="checkpoint: {every: 1}\n")
        self.call(job, *TWO, ranks=2)
        lost = 0
        for _ in range(4):
            shutil.rmtree(self.run_dir)
            process = self.start(job, *TWO, ranks=2)
            wait_for(lambda: len(ranks_of(process.pid)) == 2, "two ranks")
            pids = ranks_of(process.pid)
            time.sleep(chance.uniform(0, 1.5))
            for pid in pids[1:]:
                if alive(pid):
                    os.kill(pid, signal.SIGSTOP)
            out, err = process.communicate(timeout=LIMIT + SLACK + 10)
            self.assertIn(process.returncode, (0, 4), out + err)
            lost += process.returncode == 4
            wait_for(lambda: not any(alive(pid) for pid in pids), "the end of the ranks", 5)
            self.assertEqual(self.exit_json()["code"], process.returncode, out + err)
            if (self.checkpoints / "latest").exists():
                self.assertTrue(self.inspected(self.checkpoints))
        self.assertGreater(lost, 0)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("unshare"), "only root can give a rank another host name")
    def test_ranks_of_two_hosts_see_each_other_in_the_run_folder(self):
        command = " ".join(map(str, [self.program, self.job(), *TWO]))
        other = ["unshare", "--uts", "bash", "-c", f"hostname other-host; exec {command}"]
        if subprocess.run([*other[:2], "true"], check=False, capture_output=True).returncode:
            self.skipTest("host names cannot be changed here")
        process = subprocess.Popen([*MPIRUN, "-n", "1", *command.split(), ":", "-n", "1", *other], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.kill, process)
        wait_for((self.checkpoints / "latest").exists, "a checkpoint")
        self.assertEqual(sorted(path.name for path in (self.run_dir / ".ranks").iterdir()), ["rank_0", "rank_1"])
        pids = ranks_of(process.pid)
        os.kill(pids[1], signal.SIGSTOP)
        self.lost(process, pids, 1, time.monotonic(), ["has not answered for"])


if __name__ == "__main__":
    main()
