#!/usr/bin/env python3
"""Runs a job on all its ranks and again on one, on the same global batches, and holds the losses of both together.

against_one_rank.py JOB.yaml [--program moetrain] [--set SECTION.KEY=VALUE ...] [--out runs/against_one_rank] [--steps 3] [--relative 1e-5]

The one rank takes as micro-batches, one after another, what the ranks compute at once. Both runs begin anew, in OUT/ranks_<N> and
OUT/ranks_1; --set goes to both. MPIRUN in the environment says how ranks are started (the default is Open MPI's, for more ranks than
cores, all on this host), OMP_NUM_THREADS how many threads each has (1). It prints the losses side by side, and what the ranks took:
time, memory, rows of tokens for their experts. Exit 0: the first steps are equal within the tolerance; 1: the first difference is
printed; 2: a run failed.
"""
import argparse
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import threading
import time

from compare_runs import Unreadable, beside, first_difference, gap, metrics_of, printed

AXES = ("data_parallel", "expert_parallel", "tensor_parallel", "sequence_parallel")
MPIRUN = "mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1" + (" --allow-run-as-root" if os.geteuid() == 0 else "")


def below(pid):
    """This process, and all that it and they have started."""
    children = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


class Watched:
    """A run of the program: its ranks on this host are looked at twice a second, for the memory each had at most."""

    def __init__(self, command, program):
        self.program = program
        self.peak, self.own = {}, {}  # MiB by process: all that it touched, and what no other process shares
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMPI_MCA_btl_vader_single_copy_mechanism": "none", **os.environ}
        print("$", *command, flush=True)
        over = threading.Event()
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise Unreadable(f"{command[0]}: {error.strerror}") from error
        watcher = threading.Thread(target=self.watch, args=(process.pid, over))
        watcher.start()
        try:
            code = process.wait()
        finally:
            over.set()
            watcher.join()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds = time.monotonic() - began
        self.processor_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if code != 0:
            raise Unreadable(f"exit code {code} of: {' '.join(command)}")

    def watch(self, launcher, over):
        while not over.wait(0.5):
            for pid in below(launcher):
                try:
                    status = pathlib.Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue
                if f"Name:\t{self.program[:15]}\n" not in status:
                    continue
                for name, peaks in ("VmHWM", self.peak), ("RssAnon", self.own):
                    if size := re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE):
                        peaks[pid] = max(peaks.get(pid, 0), int(size[1]) / 1024)


def sections_of(job):
    """The keys of a job.yaml that the program wrote, by section: one a line, two blanks before it."""
    sections = {}
    for line in job.read_text(encoding="utf-8").splitlines():
        if head := re.fullmatch(r"(\w+):", line):
            section = sections.setdefault(head[1], {})
        elif entry := re.fullmatch(r"  (\w+): (.+)", line):
            section[entry[1]] = entry[2]
    return sections


def spread(values, form):
    """Least, median, most."""
    return " ".join(form.format(f(values)) for f in (min, statistics.median, max)) if values else ""


def rows_of(run, sections, ranks):
    """Rows of tokens that the experts of a rank worked on, in the layer where they are spread worst, a step: median, 95 %, most."""
    lines, before = [["rows a rank: median", "95 %", "most"]], 0
    for row in metrics_of(run)[2]:
        tokens, before = int(row["tokens"]) - before, int(row["tokens"])
        loads = [row[f"rank_load_{name}"] for name in ("median", "p95", "max")]  # over the mean; empty where no row travels
        lines.append([f"{float(load) * tokens * int(sections['model']['num_experts_per_token']) / ranks:.0f}" if load else "" for load in loads])
    return lines


def seconds_of(run):
    return [float(row["step_ms"]) / 1000 for row in metrics_of(run)[2]]


def figures(seconds, watched):
    return {
        "s a step: least, median, most": spread(seconds, "{:.2f}"),
        "s in all": f"{watched.seconds:.0f}",
        "of them not in steps: start, checkpoint, end": f"{watched.seconds - sum(seconds):.0f}",
        "processor s of all ranks": f"{watched.processor_seconds:.0f}",
        "ranks seen on this host": str(len(watched.peak)),
        "MiB a rank at most (VmHWM): least, median, most": spread(watched.peak.values(), "{:.0f}"),
        "of them its own (RssAnon), the rest is shared": spread(watched.own.values(), "{:.0f}"),
    }


def both_runs(arguments):
    sets = [word for value in arguments.set for word in ("--set", value)]
    command = [arguments.program, "check", arguments.job, *sets]
    try:
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unreadable(f"{arguments.program}: {error.strerror}") from error
    if checked.returncode != 0:
        raise Unreadable(checked.stdout + checked.stderr)
    ranks = int(re.search(r"no faults, (\d+) ranks?$", checked.stdout, re.MULTILINE)[1])
    if ranks == 1:
        raise Unreadable(f"{arguments.job}: a job of one rank, there is nothing to hold against it")

    def run(number, launcher, more):
        folder = arguments.out / f"ranks_{number}"
        words = [*sets, "--set", f"run.dir={folder}", *more, "--resume", "never"]
        return folder, Watched([*launcher, arguments.program, arguments.job, *words], pathlib.Path(arguments.program).name)

    many, of_many = run(ranks, [*os.environ.get("MPIRUN", MPIRUN).split(), "-n", str(ranks)], [])
    sections = sections_of(many / "job.yaml")
    coordinates = int(sections["parallel"]["data_parallel"]) * int(sections["parallel"]["expert_parallel"])
    accumulated = {key: coordinates * int(sections["training"][key]) for key in ("gradient_accumulation", "eval_batches")}
    values = [f"parallel.{axis}=1" for axis in AXES] + [f"training.{key}={n}" for key, n in accumulated.items()]
    one, of_one = run(1, [], [word for value in values for word in ("--set", value)])

    names = f"{ranks} ranks", "1 rank"
    seconds = [["s, " + names[0], names[1]]] + [[f"{x:.2f}" for x in pair] for pair in zip(seconds_of(many), seconds_of(one))]
    steps = [[*losses, *rows, *times] for losses, rows, times in zip(beside(many, one, names), rows_of(many, sections, ranks), seconds)]
    ours, its = figures(seconds_of(many), of_many), figures(seconds_of(one), of_one)
    print("", printed(steps), "", printed([["", *names], *([name, ours[name], its[name]] for name in ours)]), "", sep="\n")
    return many, one


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job")
    parser.add_argument("--program", default="moetrain", help="path of moetrain; else it is looked for as a shell does")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for both runs, as often as needed")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/against_one_rank"), help="folder of both runs")
    parser.add_argument("--steps", type=int, default=3, help="steps that have to be equal")
    parser.add_argument("--relative", type=float, default=1e-5, help="allowed |a - b| / max(|a|, |b|)")
    parser.add_argument("--columns", type=lambda names: names.split(","), default=["tokens", "label_tokens", "loss"], help="of metrics.csv, joined by commas")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least one is to be equal")
    try:
        many, one = both_runs(arguments)
        found, _ = first_difference(many, one, arguments.relative, None, arguments.columns, arguments.steps)
    except Unreadable as error:
        print(error, file=sys.stderr)
        return 2
    gaps = [gap(x["loss"], y["loss"]) for x, y in zip(metrics_of(many)[2], metrics_of(one)[2])]
    largest = f"the losses of the first {arguments.steps} steps are at most {max(gaps[:arguments.steps]):.1e} apart, of all {len(gaps)} {max(gaps):.1e}"
    print(f"differ: {found}; {largest}" if found else f"equal within {arguments.relative:g}: {largest}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
