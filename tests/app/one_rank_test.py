#!/usr/bin/env python3
"""Full training of 896 experts on 16 ranks, data 2 x expert 8, is that of one rank: scripts/against_one_rank.py on configs/full_128_ranks.yaml.

one_rank_test.py MOETRAIN [unittest arguments]; MPIRUN in the environment says how ranks are started.
"""
import unittest

from runs import Runs, main


class OneRank(Runs):
    def held(self, ranks, steps, *words, code=0):
        return self.against_one_rank("--set", f"parallel.expert_parallel={ranks // 2}", "--set", f"data.train={self.data}", "--set", f"training.steps={steps}",
                                     "--set", "schedule.warmup_steps=0", "--steps", steps, *words, code=code)

    def test_in_fp64_losses_and_norms_are_those_of_one_rank(self):
        self.held(16, 3, "--set", "run.dtype=fp64", "--relative", "1e-9", "--columns", "tokens,label_tokens,loss,indexer_loss,grad_norm")

    def test_in_fp32_losses_are_those_of_one_rank(self):
        # Small weights: a tie of scores that rounding decides otherwise moves a loss by 1e-7, not 1e-5 (tests/bench/full_128_ranks.md).
        out = self.held(16, 3, "--set", "model.initializer_range=0.02")
        self.assertRegex(out, r"\| ranks seen on this host \| 16 \|")

    def test_a_job_that_differs_by_layout_is_told(self):
        # Places of experts are counted by micro-batch, of which the one rank has more.
        out = self.held(4, 2, "--set", "run.dtype=fp64", "--set", "moe.capacity_factor=1", "--relative", "1e-9", code=1)
        self.assertIn("differ: step 1, loss: ", out)
        self.held(4, 2, "--set", "run.dtype=fp16", code=2)


if __name__ == "__main__":
    main()
