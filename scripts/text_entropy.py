#!/usr/bin/env python3
"""How predictable is a byte text from the one byte before it? A loss below this shows that a model has learned more than pairs of bytes.

text_entropy.py PATH... | --job JOB.yaml   [--metrics RUN/metrics.csv]

Reads files and folders as `format: bytes` does: a file is a document, hidden or empty files are skipped, links are followed but nothing is
read twice, id 256 ends a document. Prints the entropies in nats a byte (the unit of the loss); with --metrics also the mean loss of the last ten steps and the
newest held-out loss.
"""
import argparse
import array
import csv
import fnmatch
import math
import pathlib
import re
import sys

IDS = 257
END = 256


def matches(pattern, name):
    """* and ? as the program knows them; [ stands for itself."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def place(path):
    found = path.stat()
    return found.st_dev, found.st_ino


def files_of_folder(folder, patterns=("*",)):
    """Every file below of a fitting name, once: first what lies there without a link, then what links lead to, in the order of their paths."""
    met, files, linked_folders, linked_files = set(), [], [folder], []
    while linked_folders:
        linked_folders.sort()
        entered = [linked_folders.pop(0)]
        while entered:
            here = entered.pop()
            if place(here) in met:
                continue
            met.add(place(here))
            for path in here.iterdir():
                if path.name.startswith("."):
                    continue
                if path.is_dir():
                    (linked_folders if path.is_symlink() else entered).append(path)
                elif not any(matches(p, path.name) for p in patterns):
                    continue
                elif path.is_symlink():
                    linked_files.append(path)
                elif path.is_file():
                    met.add(place(path))
                    files.append(path)
    for path in sorted(linked_files):
        if not path.exists():
            raise SystemExit(f"text_entropy: {path}: a link that leads nowhere")
        if path.is_file() and place(path) not in met:
            met.add(place(path))
            files.append(path)
    return sorted(files)


def documents(paths, exclude):
    """The files that the program reads: named ones, and of a folder every one that is not excluded."""
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            yield from (p for p in files_of_folder(path) if not any(matches(e, p.name) for e in exclude))
        elif path.is_file():
            yield path
        elif not path.exists():
            raise SystemExit(f"text_entropy: {path}: no such file or folder")


def pair_counts(paths, exclude):
    """counts[a * IDS + b]: how often id b follows id a inside a document; and the number of documents."""
    counts = array.array("q", bytes(8 * IDS * IDS))
    files = 0
    for path in documents(paths, exclude):
        text = path.read_bytes()
        if not text:
            continue
        files += 1
        for a, b in zip(text, text[1:]):
            counts[a * IDS + b] += 1
        counts[text[-1] * IDS + END] += 1
    return counts, files


def entropies(counts):
    """(order 0, order 1): of an id among those that follow another, alone and given the one before it; and how many pairs there are."""
    total = sum(counts)
    if total == 0:
        raise SystemExit("text_entropy: no text")

    def bits_lost(part, whole):  # sum of -n log(n / whole)
        return -sum(n * math.log(n / whole) for n in part if n)

    order0 = bits_lost([sum(counts[b::IDS]) for b in range(IDS)], total) / total
    rows = [counts[a * IDS : (a + 1) * IDS] for a in range(IDS)]
    order1 = sum(bits_lost(row, sum(row)) for row in rows) / total
    return order0, order1, total


def data_list(job, key):
    """data.<key> of a job file: one text, a [list] on a line, or a list of lines; empty when it is not there."""
    section, found = "", None
    for line in pathlib.Path(job).read_text(encoding="utf-8").splitlines():
        line = line.split(" #")[0].rstrip()
        top = re.match(r"(\w+):", line)
        if top:
            section = top.group(1)
        value = re.match(rf"\s+{key}:\s*(.*)$", line) if section == "data" else None
        item = re.match(r"\s*-\s+(.+)$", line)
        if value:
            found = [p for p in re.split(r"[\[\],]\s*", value.group(1)) if p.strip()]
        elif found is not None and item and section == "data":
            found.append(item.group(1))
        elif found is not None and line.strip() and not line.lstrip().startswith("#"):
            break
    return [p.strip().strip("'\"") for p in found or []]


def losses(metrics):
    with open(metrics, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    last = [float(row["loss"]) for row in rows if row["loss"]][-10:]  # a step without labels has none
    if not last:
        raise SystemExit(f"text_entropy: {metrics} has no loss")
    held_out = [(row["step"], float(row["eval_loss"])) for row in rows if row.get("eval_loss")]
    return sum(last) / len(last), len(last), held_out[-1] if held_out else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--job")
    parser.add_argument("--metrics")
    arguments = parser.parse_args()
    if bool(arguments.paths) == bool(arguments.job):
        parser.error("name either paths or a job")
    exclude = data_list(arguments.job, "exclude") if arguments.job else []
    paths = arguments.paths or data_list(arguments.job, "train")
    if not paths:
        parser.error(f"{arguments.job} names no data.train")
    counts, files = pair_counts(paths, exclude)
    order0, order1, total = entropies(counts)
    print(f"training text: {files} documents, {total} predictions")
    print(f"order-0 entropy                  {order0:.4f} nats (how often each byte occurs)")
    print(f"order-1 entropy                  {order1:.4f} nats (the best any model of byte pairs can reach)")
    if arguments.metrics:
        loss, steps, held_out = losses(arguments.metrics)
        print(f"mean loss of the last {steps:2d} steps    {loss:.4f} nats ({'below' if loss < order1 else 'not below'} the order-1 entropy)")
        if held_out:
            print(f"held-out loss at step {held_out[0]:10s} {held_out[1]:.4f} nats")
        else:
            print("held-out loss                    none (no evaluation in this run)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
