#!/usr/bin/env python3
"""One rank of four leaves out a collective, or makes one of another size: it is named with both collectives, and all end with 4 in time.

lost_rank_test.py LOST_RANK [unittest arguments]; MPIRUN in the environment says how ranks are started.
"""
import os
import re
import subprocess
import sys
import time
import unittest

MPIRUN = os.environ.get("MPIRUN", "mpirun").split()
LIMIT = 3


class LostRank(unittest.TestCase):
    program = ""

    def ends(self, way, ranks=4):
        start = time.monotonic()
        result = subprocess.run([*MPIRUN, "-n", str(ranks), self.program, way, str(LIMIT)], capture_output=True, text=True, check=False, timeout=120)
        return result, time.monotonic() - start

    def astray(self, way, differs, *others):
        result, seconds = self.ends(way)
        self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
        self.assertLess(seconds, LIMIT + 8)  # with mpirun's own start and end
        told = re.findall(r"^end 4 of rank 1: (.*)$", result.stderr, re.M)
        self.assertEqual(len(told), 1, result.stderr)
        self.assertEqual(result.stderr.count("end 4 of"), 1, result.stderr)
        self.assertIn(f"rank 1 differs from the others: it is in {differs}", told[0])
        for other in others:
            self.assertIn(other, told[0])

    def test_ranks_that_agree_end_with_0_and_nobody_is_named(self):
        result, _ = self.ends("agree")
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "balances agree\n", ""))

    def test_a_collective_left_out(self):
        self.astray("skip", "collective 12, all-reduce of 5 fp64 over half (2 ranks) in forward, layer 3",
                    "the others are in collective 12, all-reduce of 3 fp64 over world (4 ranks) in forward, layer 3")

    def test_a_collective_of_a_smaller_group_left_out(self):
        self.astray("skip_half", "collective 13, all-reduce of 4000 fp64 over world (4 ranks) in forward, layer 3",
                    "the others are in collective 13, all-reduce of 5 fp64 over half (2 ranks) in forward, layer 3")

    def test_a_collective_of_another_count(self):
        self.astray("count", "collective 14, all-reduce of 7000 fp64 over world (4 ranks) in forward, layer 3",
                    "the others are in collective 14, all-reduce of 4000 fp64 over world (4 ranks) in forward, layer 3")


if __name__ == "__main__":
    LostRank.program = os.path.abspath(sys.argv.pop(1))
    unittest.main()
