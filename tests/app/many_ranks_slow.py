#!/usr/bin/env python3
"""128 ranks: full training is that of one rank, and a checkpoint that they wrote is one file to h5py: every tensor whole, with the shape and
values of one rank's, and every checksum.

many_ranks_slow.py MOETRAIN [unittest arguments]; MPIRUN in the environment says how ranks are started. Checkpoints need h5py.
"""
import os
import subprocess
import unittest
import zlib

from runs import MPIRUN, Runs, main

try:
    import h5py
    import numpy
except ImportError:
    h5py = None

JOB = """\
run: {{name: many, dir: {dir}, dtype: {dtype}}}
model: {{preset: tiny-k3.1, hidden_size: 16, intermediate_size: 24, num_experts: 128}}
parallel: {{data_parallel: 2, expert_parallel: 64}}
data: {{train: {data}, format: bytes, sequence_length: 16}}
training: {{steps: 2}}
optimizer: {{lr: 0.003}}
"""


def tensors(view):
    found = {}
    view.visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) and item.shape else None)
    return found


class FullTraining(Runs):
    def test_is_that_of_one_rank(self):
        for dtype, steps, *words in ("fp64", 3, "--relative", "1e-9", "--columns", "tokens,label_tokens,loss,indexer_loss,grad_norm"), ("fp32", 2):
            out = self.against_one_rank("--set", f"data.train={self.data}", "--set", f"training.steps={steps}", "--set", "schedule.warmup_steps=0",
                                        "--set", f"run.dtype={dtype}", "--out", self.root / dtype, "--steps", steps, *words)
            self.assertRegex(out, r"\| ranks seen on this host \| 128 \|")


@unittest.skipUnless(h5py, "h5py is not here")
class ManyRanks(Runs):
    def save(self, dtype, name, ranks, *words):
        folder = self.root / name
        job = self.write("many.yaml", JOB.format(dir=folder, dtype=dtype, data=self.data))
        launcher = [*MPIRUN, "-n", str(ranks)] if ranks > 1 else []
        result = subprocess.run([*launcher, self.program, job, *words], capture_output=True, text=True, check=False, timeout=900,
                                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return folder / "checkpoints/step_00000002"

    def test_write_one_file(self):
        one = ["--set", "parallel.data_parallel=1", "--set", "parallel.expert_parallel=1", "--set", "training.gradient_accumulation=128"]
        many, alone = self.save("fp32", "of_128", 128), self.save("fp32", "of_1", 1, *one)
        with h5py.File(many / "checkpoint.h5") as a, h5py.File(alone / "checkpoint.h5") as b:
            found, wanted = tensors(a), tensors(b)
            self.assertEqual(sorted(found), sorted(wanted))
            self.assertGreater(len(found), 100)
            self.assertIn("model.layers.1.block_sparse_moe.experts.w1", found)
            for name, data in found.items():
                self.assertEqual((data.shape, data.dtype), (wanted[name].shape, wanted[name].dtype), name)
                x, y = data[...], wanted[name][...]
                self.assertTrue(numpy.isfinite(x).all(), name)
                self.assertTrue(numpy.allclose(x, y, rtol=1e-3, atol=1e-5), (name, abs(x - y).max()))
            self.assertEqual(int(a.attrs["step"]), 2)
            lines = [line.split() for line in a["shards"][()].decode().splitlines()]
        self.assertEqual([line[0] for line in lines], [f"shard_{rank:05}.h5" for rank in range(128)])
        for name, size, crc in lines:
            content = (many / name).read_bytes()
            self.assertEqual((len(content), f"{zlib.crc32(content):08x}"), (int(size), crc), name)
        self.assertTrue(self.inspected(many))


if __name__ == "__main__":
    main()
