"""What tests of whole runs share: a folder with a small job and its text, the program alone or under mpirun, and what a run leaves."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MPIRUN = os.environ.get("MPIRUN", "mpirun").split()

JOB = """\
run: {{name: small, dir: {dir}, dtype: {dtype}}}
model: {{preset: tiny-k3.1, hidden_size: 32, intermediate_size: 64, num_experts: 8}}
data: {{train: {data}, format: {form}, sequence_length: 64, shuffle: {shuffle}}}
training: {{steps: {steps}}}
optimizer: {{lr: 0.003}}
"""
TWO = ["--set", "parallel.data_parallel=2"]


def wait_for(holds, what, seconds=120):
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.005)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ranks_of(launcher):
    """Process ids of the ranks that a launcher has started, in the order of their ranks."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            environment = (path.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if name != "moetrain" or int(rest.split()[1]) != launcher:
            continue
        rank = [int(e.partition(b"=")[2]) for e in environment if e.startswith((b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK="))]
        found.append((rank[0] if rank else -1, int(path.parent.name)))
    return [pid for rank, pid in sorted(found) if rank >= 0]


class Runs(unittest.TestCase):
    program = ""  # path of moetrain

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.run_dir = self.root / "run"
        self.data = self.write("text.txt", "".join(f"a cat sat on mat {n * n % 97} and looked at the rain. " for n in range(400)))

    def write(self, name, content):
        path = self.root / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def job(self, steps=3, extra="", dtype="fp32", data=None, form="bytes", shuffle="true", run_dir=None):
        values = {"dir": run_dir or self.run_dir, "dtype": dtype, "data": data or self.data, "form": form, "shuffle": shuffle, "steps": steps}
        return self.write("job.yaml", JOB.format(**values) + extra)

    def words(self, job, *words, ranks=0):
        launcher = [*MPIRUN, "-n", str(ranks)] if ranks else []
        return [*launcher, self.program, str(job), *map(str, words)]

    def call(self, job, *words, ranks=0, code=0, **more):
        result = subprocess.run(self.words(job, *words, ranks=ranks), capture_output=True, text=True, check=False, timeout=300, **more)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result

    def start(self, job, *words, ranks=0):
        process = subprocess.Popen(self.words(job, *words, ranks=ranks), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.kill, process)
        return process

    @staticmethod
    def kill(process):
        """Also the ranks, which a killed launcher leaves running and holding its pipes."""
        if process.poll() is not None:
            return
        for pid in [*ranks_of(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()

    def end(self, process, code, seconds=120):
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.fail(f"no end within {seconds} s")
        self.assertEqual(process.returncode, code, out + err)
        return out, err

    def against_one_rank(self, *words, code=0):
        """What scripts/against_one_rank.py says of configs/full_128_ranks.yaml."""
        command = [sys.executable, "-B", ROOT / "scripts/against_one_rank.py", ROOT / "configs/full_128_ranks.yaml", "--program", self.program, "--out", self.run_dir]
        result = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, check=False, timeout=900)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result.stdout

    def exit_json(self, run_dir=None):
        return json.loads(((run_dir or self.run_dir) / "exit.json").read_text())

    def inspected(self, path):
        return subprocess.run([self.program, "inspect", path], capture_output=True, text=True, check=False).returncode == 0


def main():
    Runs.program = os.path.abspath(sys.argv.pop(1))
    unittest.main()
