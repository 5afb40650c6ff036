#!/usr/bin/env python3
"""What goes wrong around a run, and what is then said: one clear error, the right exit code, and the checkpoint before intact.

failure_test.py MOETRAIN [unittest arguments]; MPIRUN in the environment says how ranks are started.
"""
import os
import resource
import shutil
import signal
import subprocess
import time
import unittest

from runs import MPIRUN, TWO, Runs, alive, main, ranks_of, wait_for


class Failures(Runs):
    def setUp(self):
        super().setUp()
        self.checkpoints = self.run_dir / "checkpoints"

    def job(self, *words, **more):
        return super().job(*words, shuffle="false", **more)

    def refused(self, job, *words, code, says, ranks=0, **more):
        """One line on stderr (mpirun adds its own, a list of faults their number), and exit.json with the same code."""
        result = self.call(job, *words, ranks=ranks, code=code, **more)
        for word in says:
            self.assertEqual(result.stderr.count(str(word)), 1, (word, result.stderr))
        if not ranks:
            lines = result.stderr.splitlines()
            self.assertEqual(len(lines[:-1] if lines[-1] == "1 fault" else lines), 1, result.stderr)
        if self.run_dir.is_dir():
            end = self.exit_json()
            self.assertEqual(end["code"], code)
            return end
        return None


class Checkpoints(Failures):
    def test_a_damaged_one_is_refused_with_3_and_one_line_and_the_run_goes_on_once_it_is_whole_again(self):
        job = self.job(4, extra="checkpoint: {every: 1, keep: 0}\n")
        self.call(job, "--stop-after", 2)
        new, old = self.checkpoints / "step_00000002", self.checkpoints / "step_00000001"
        whole = self.root / "whole"
        shutil.copytree(self.checkpoints, whole)
        shard, view = new / "shard_00000.h5", new / "checkpoint.h5"

        def flip():
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)

        damages = [
            (lambda: os.truncate(shard, shard.stat().st_size // 2), [shard]),
            (flip, [shard, "corrupt"]),
            (shard.unlink, [shard, "missing"]),
            (lambda: shutil.copy(old / "shard_00000.h5", shard), [shard]),
            (lambda: shutil.copy(self.run_dir / "metrics.h5", view), [view]),
            ((new / "checkpoint.crc32").unlink, ["not a checkpoint"]),
            (lambda: (self.checkpoints / "latest").write_text("step_00000007\n"), ["step_00000007", "latest"]),
        ]
        for number, (damage, says) in enumerate(damages):
            with self.subTest(number):
                damage()
                end = self.refused(job, code=3, says=says)
                self.assertIsNone(end["step"])
                self.assertTrue(self.inspected(old))
                if number < 6:
                    self.assertFalse(self.inspected(new))
                shutil.rmtree(self.checkpoints)
                shutil.copytree(whole, self.checkpoints)
        os.truncate(shard, 100)
        self.refused(job, *TWO, ranks=2, code=3, says=[f"{shard}: has 100 bytes"])
        shutil.copy(whole / "step_00000002/shard_00000.h5", shard)
        self.call(job)
        self.assertEqual(self.exit_json()["step"], 4)

    def test_of_another_model_data_or_optimizer_is_refused_with_2_and_another_layout_is_not(self):
        job = self.job(2)
        self.call(job, "--stop-after", 1)
        other = self.write("other.txt", "other words " * 600)
        for change, says in [("model.num_shared_experts=2", ["model.num_shared_experts is '1' there and '2' here"]),
                             (f"data.train={other}", ["data.train", str(other)]),
                             ("optimizer.weight_decay=0.5", ["optimizer.weight_decay is '0.1' there and '0.5' here"]),
                             ("run.seed=9", ["run.seed is '1' there and '9' here"])]:
            self.refused(job, "--set", change, code=2, says=[*says, "belongs to another job"])
        self.refused(job, *TWO, "--set", "model.num_shared_experts=2", ranks=2, code=2, says=["belongs to another job"])
        self.assertTrue(self.inspected(self.checkpoints / "step_00000001"))
        self.call(job, "--set", "parallel.expert_parallel=2", "--set", "parallel.sharding=none", ranks=2)

    def test_a_disk_without_space_ends_the_run_with_3_and_the_one_before_is_intact(self):
        # At once; beside the next step; and beside nothing, where the last step saves and only the end is left to tell.
        for beside, every, steps in ((False, 2, 6), (True, 2, 6), (True, 4, 4)):
            with self.subTest(beside=beside, steps=steps):
                shutil.rmtree(self.run_dir, ignore_errors=True)
                job = self.job(steps, extra=f"checkpoint: {{every: {every}, keep: 0, async: {str(beside).lower()}}}\n")
                self.call(job, "--stop-after", 2)
                bytes_before = {path: path.read_bytes() for path in (self.checkpoints / "step_00000002").iterdir()}
                most = max(len(content) for content in bytes_before.values()) - 4096
                limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
                # Started by itself a rank makes files of its own for MPI, which are larger than a small shard.
                result = subprocess.run(self.words(job), capture_output=True, text=True, check=False, preexec_fn=limit,
                                        env={**os.environ, "OMPI_MCA_ess_singleton_isolated": "1"})
                self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
                self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
                for word in ("step_00000004 was not saved", "step_00000004.partial/", ".h5: cannot write: File too large"):
                    self.assertIn(word, result.stderr)
                end = self.exit_json()
                self.assertEqual((end["code"], end["rank"]), (3, 0))
                self.assertIn(end["step"], range(4, steps + 1) if beside else (4,))  # whenever the disk has answered
                self.assertIn("File too large", end["cause"])
                self.assertIn("was not saved", (self.run_dir / "log.txt").read_text())
                self.assertEqual(sorted(path.name for path in self.checkpoints.iterdir()), ["latest", "step_00000002"])
                self.assertEqual(bytes_before, {path: path.read_bytes() for path in (self.checkpoints / "step_00000002").iterdir()})
                self.call(job)
                self.assertEqual((self.run_dir / "metrics.csv").read_text().count("\n"), steps + 1)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("mount"), "only root can make a small disk")
    def test_a_full_disk_is_the_same_under_two_ranks(self):
        disk = self.root / "disk"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", disk], capture_output=True, check=False).returncode:
            self.skipTest("mounting is not allowed here")
        self.addCleanup(subprocess.run, ["umount", disk], check=False)
        self.run_dir = disk / "run"
        self.checkpoints = self.run_dir / "checkpoints"
        job = self.job(20, extra="checkpoint: {every: 1, keep: 0}\n")
        end = self.refused(job, *TWO, ranks=2, code=3, says=["was not saved", "No space left on device"])
        last = int((self.checkpoints / "latest").read_text().strip().removeprefix("step_"))
        self.assertEqual(end["step"], last + 1)
        self.assertTrue(self.inspected(self.checkpoints))
        self.assertFalse(list(self.checkpoints.glob("*.partial")))
        self.call(job, *TWO, "--set", "checkpoint.keep=1", "--set", f"training.steps={last + 2}", "--set", "checkpoint.every=0",
                  "--stop-after", 1, ranks=2, code=3)  # as full as before
        shutil.rmtree(self.checkpoints / "step_00000001")
        self.call(job, *TWO, "--set", "checkpoint.every=0", "--stop-after", 1, ranks=2)


class Data(Failures):
    def tokens(self, ids, name="tokens.h5"):
        text = self.write("ids.txt", "\n".join(map(str, ids)) + "\n")
        how = self.write("how.txt", f"PATH tokens\nINPUT-CLASS TEXTUIN\nINPUT-SIZE 16\nRANK 1\nDIMENSION-SIZES {len(ids)}\nOUTPUT-CLASS UIN\nOUTPUT-SIZE 16\n")
        path = self.root / name
        subprocess.run(["h5import", text, "-c", how, "-o", path], check=True, capture_output=True)
        return path

    @unittest.skipUnless(shutil.which("h5import"), "h5import is not here")
    def test_an_id_outside_the_vocabulary_in_the_middle_of_a_run(self):
        ids = [n * 7 % 250 for n in range(4000)]
        ids[64 * 5 + 3] = 300
        path = self.tokens(ids)
        job = self.job(30, data=path, form="tokens")
        end = self.refused(job, code=3, says=[f"{path}: token 323 is id 300, the vocabulary has 257"])
        self.assertEqual((end["rank"], end["step"]), (0, 5))
        shutil.rmtree(self.run_dir)
        end = self.refused(job, *TWO, ranks=2, code=3, says=[f"{path}: token 323 is id 300, the vocabulary has 257"])
        self.assertEqual((end["rank"], end["step"]), (1, 2))

    def test_token_files_that_are_empty_cut_or_foreign(self):
        self.call(self.job(2))
        foreign = self.run_dir / "metrics.h5"
        checkpoint = self.checkpoints / "step_00000002/checkpoint.h5"
        cut = self.write("cut.h5", foreign.read_bytes()[:-100])
        self.run_dir = self.root / "other"
        for path, says in [(self.write("empty.h5", b""), ["empty.h5", "not an HDF5 file"]), (cut, [cut, "truncated"]),
                           (foreign, [foreign, "integers of one dim are needed"]), (checkpoint, [checkpoint, "not a token file"]), (self.data, [self.data, "not an HDF5 file"])]:
            self.refused(self.job(data=path, form="tokens"), code=3, says=says)
        self.refused(self.job(data=cut, form="tokens"), *TWO, ranks=2, code=3, says=["truncated"])
        empty = self.write("empty.txt", b"")
        self.refused(self.job(data=empty), code=3, says=[f"{empty}: empty"])
        folder = self.root / "folder"
        folder.mkdir()
        self.refused(self.job(data=folder), code=3, says=[folder, "no file with contents"])

    def test_paths_that_lead_nowhere_are_faults_of_the_job(self):
        link = self.root / "link"
        link.symlink_to(self.root / "gone")
        for path in (self.root / "absent", link, self.data / "inside"):
            self.refused(self.job(data=path), code=2, says=[path])
            self.assertFalse(self.run_dir.exists())

    def test_a_run_folder_that_cannot_be_one(self):
        for path in (self.data, self.data / "run"):
            result = self.call(self.job(run_dir=path), code=2)
            self.assertIn(f"run.dir: '{path}' cannot be the run folder: {self.data} is no folder", result.stderr)


class Ranks(Failures):
    def test_a_killed_rank_ends_all_within_30_seconds_and_is_named_and_the_run_goes_on(self):
        job = self.job(1000000, extra="checkpoint: {every: 2}\n")
        process = self.start(job, *TWO, ranks=2)
        wait_for(lambda: (self.checkpoints / "latest").exists(), "a checkpoint")
        ranks = ranks_of(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        out, err = process.communicate(timeout=60)
        self.assertLess(time.monotonic() - killed, 30)
        self.assertNotEqual(process.returncode, 0)
        self.assertRegex(out + err, r"rank 1\b.*(signal 9|[Kk]illed)")
        wait_for(lambda: not any(alive(pid) for pid in ranks), "the end of the ranks", 5)
        if (self.run_dir / "exit.json").exists():  # rank 0 had the time to write it before mpirun ended it too
            end = self.exit_json()
            self.assertEqual((end["code"], end["rank"]), (4, 1), end)
        self.assertTrue(self.inspected(self.checkpoints))
        self.call(job, *TWO, "--stop-after", 1, ranks=2)

    def test_a_failure_of_one_rank_alone_ends_all_with_one_line_that_names_it(self):
        large = ["--set", "model.hidden_size=2048", "--set", "model.vocab_size=16384"]  # half a gigabyte a rank
        command = [self.program, str(self.job(1000000)), *TWO, *large]
        # KiB of data, which shared libraries hardly are: short of the weights, where all ranks agree; short of a step, where none waits
        for limit, step in ((350000, None), (950000, 0)):
            words = [*MPIRUN, "-n", "1", *command, ":", "-n", "1", "bash", "-c", f"ulimit -d {limit}; exec {' '.join(command)}"]
            start = time.monotonic()
            result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
            self.assertLess(time.monotonic() - start, 60)
            self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
            told = [line for line in result.stderr.splitlines() if "rank 1: " in line and "out of host memory" in line]
            self.assertEqual(len(told), 1, result.stderr)
            self.assertNotIn("rank 0: ", result.stderr)
            end = self.exit_json()
            self.assertEqual((end["code"], end["rank"], end["step"]), (3, 1, step))

    def test_a_pool_too_small_ends_with_3_and_says_who_holds_what(self):
        job = self.job(2)
        for limit, asked in ((20, "weights"), (400, "gradients")):  # KiB
            self.refused(job, "--set", f"memory.device_limit={limit}KiB", code=3,
                         says=[f"out of host memory: ", f" asked for {asked} of a pool of {limit}.00 KiB; held: ", "memory.device_limit"])

    def test_steps_without_finite_gradients_end_with_6(self):
        job = self.job(50, extra="schedule: {name: constant}\n")
        result = self.call(job, *TWO, "--set", "optimizer.lr=1e30", "--set", "training.max_nonfinite=3", ranks=2, code=6)
        self.assertEqual(result.stderr.count("is not finite; update skipped"), 3, result.stderr)
        end = self.exit_json()
        self.assertEqual((end["code"], end["rank"]), (6, None))
        self.assertEqual(end["step"], (self.run_dir / "metrics.csv").read_text().count("\n") - 1)
        self.assertIn("3 steps in a row", end["cause"])


if __name__ == "__main__":
    main()
