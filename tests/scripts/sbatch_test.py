#!/usr/bin/env python3
"""moetrain.sbatch queues a job again when that helps, a limited number of times in a row, and with a false srun and scontrol says so."""
import json
import os
import pathlib
import subprocess
import unittest

from in_a_folder import InAFolder

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/moetrain.sbatch"
SRUN = """#!/bin/bash
echo "$*" >> srun.log
. ./what_happens
"""
SCONTROL = """#!/bin/bash
echo "$*" >> scontrol.log
exit $(cat scontrol_code 2>/dev/null || echo 0)
"""


class Requeue(InAFolder):
    def setUp(self):
        super().setUp()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            self.write(f"bin/{name}", text).chmod(0o755)

    def run_job(self, happens, *words, job_id="77", **environment):
        self.write("what_happens", happens)
        before = self.requeues()
        env = {**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", **environment}
        env.pop("SLURM_JOB_ID", None)
        if job_id:
            env["SLURM_JOB_ID"] = job_id
        result = subprocess.run(["bash", SCRIPT, *words], cwd=self.root, env=env, capture_output=True, text=True, check=False)
        return result.returncode, self.requeues() - before, result.stderr

    def requeues(self):
        path = self.root / "scontrol.log"
        return path.read_text().count("requeue 77\n") if path.exists() else 0

    @staticmethod
    def ends(code, step=None, launcher=None):
        """A run that saves a step, writes exit.json, and whose launcher gives a code."""
        saved = f"echo step_{step:08} > runs/big/checkpoints/latest; " if step else ""
        told = f"echo '{json.dumps({'code': code, 'cause': 'x', 'rank': None, 'step': step})}' > runs/big/exit.json; " if code is not None else ""
        return f"mkdir -p runs/big/checkpoints; rm -f runs/big/exit.json; {saved}{told}exit {code if launcher is None else launcher}"

    def test_by_the_code_a_run_ends_with(self):
        for happens, code, again in ((self.ends(5, 3), 0, 1), (self.ends(4, 4), 0, 1), (self.ends(5, 5, launcher=1), 0, 1),
                                     (self.ends(4, 6, launcher=137), 0, 1), (self.ends(None, 7, launcher=137), 0, 1),
                                     (self.ends(0, 8), 0, 0), (self.ends(3, 9), 3, 0), (self.ends(3, 10, launcher=137), 3, 0), (self.ends(6, 11), 6, 0), ("exit 2", 2, 0),
                                     (self.ends(None, 12, launcher=1), 1, 0)):
            with self.subTest(happens):
                self.assertEqual(self.run_job(happens, "big.yaml")[:2], (code, again))

    def test_a_limited_number_of_times_without_a_newer_checkpoint(self):
        self.assertEqual(self.run_job(self.ends(5, 1), "big.yaml")[:2], (0, 1))
        for _ in range(2):
            self.assertEqual(self.run_job(self.ends(4, 1), "big.yaml", MAX_REQUEUES="3")[:2], (0, 1))
        self.assertEqual(self.run_job(self.ends(4, 2), "big.yaml", MAX_REQUEUES="3")[:2], (0, 1))  # progress: it starts anew
        for _ in range(2):
            self.assertEqual(self.run_job(self.ends(4, 2), "big.yaml", MAX_REQUEUES="3")[:2], (0, 1))
        code, again, said = self.run_job(self.ends(4, 2), "big.yaml", MAX_REQUEUES="3")
        self.assertEqual((code, again), (4, 0))
        self.assertIn("a rank was lost; queued again 3 times without a newer checkpoint than step_00000002: given up", said)
        self.assertEqual(self.run_job(self.ends(4, 2), "big.yaml", MAX_REQUEUES="3")[:2], (0, 1))  # submitted by hand once more

    def test_a_run_that_never_saves_is_given_up_too(self):
        self.write("runs/big/exit.json", '{"code": 3}')  # of a run before, which says nothing about this one
        lost = "exit 137"
        self.assertEqual([self.run_job(lost, "big.yaml", MAX_REQUEUES="2")[:2] for _ in range(3)], [(0, 1), (0, 1), (137, 0)])

    def test_the_job_its_options_and_its_folder_reach_the_program(self):
        self.run_job(self.ends(0, 1), "jobs/big.yaml", "--set", "run.seed=3", MOETRAIN="/opt/moetrain")
        self.run_job(self.ends(0, 1), "big.yaml", RUN_DIR="/disk/of mine", SRUN="srun --mpi=pmi2")
        self.assertEqual((self.root / "srun.log").read_text().splitlines(), [
            "--mpi=pmix --kill-on-bad-exit=1 /opt/moetrain train jobs/big.yaml --set run.seed=3 --set run.dir=runs/big",
            "--mpi=pmi2 moetrain train big.yaml --set run.dir=/disk/of mine"])

    def test_what_is_not_to_be_is_said(self):
        self.assertEqual(self.run_job("exit 0")[:2], (2, 0))
        self.assertEqual(self.run_job("exit 0", "big.yaml", job_id="")[:2], (2, 0))
        self.write("scontrol_code", "1")
        code, _, said = self.run_job(self.ends(5, 1), "big.yaml")
        self.assertEqual(code, 5)
        self.assertIn("scontrol could not queue job 77 again", said)


if __name__ == "__main__":
    unittest.main()
