#!/usr/bin/env python3
"""Are two runs the same? Compares what has to be bit-equal: step, tokens, loss, balance_loss, indexer_loss, grad_norm, lr, label_tokens
and every column of expert counts, row by row.

compare_runs.py A B [--relative 1e-9] [--absolute 0] [--columns loss,grad_norm] [--steps 3] [--table]

A and B are run folders, or metrics.csv files (then the tokens an expert got, which stand in expert_tokens.csv beside, are not compared;
nor are they under a tolerance, or with --columns). --steps compares the first rows alone; --table prints the losses and gradient norms of
all rows side by side. Exit 0: equal; 1: the first difference is printed; 2: something cannot be read.
"""
import argparse
import csv
import pathlib
import struct
import sys

COLUMNS = ["step", "tokens", "loss", "balance_loss", "indexer_loss", "grad_norm", "lr", "label_tokens"]
COUNTS = {"step", "tokens", "label_tokens"}  # never judged by a tolerance


class Unreadable(Exception):
    pass


def metrics_of(path):
    path = pathlib.Path(path)
    path = path / "metrics.csv" if path.is_dir() else path
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
    if not rows or "step" not in rows[0]:
        raise Unreadable(f"{path}: no header with a column step")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(rows[0]):
            raise Unreadable(f"{path}:{number}: {len(row)} fields, the header has {len(rows[0])}")
    return path, rows[0], [dict(zip(rows[0], row)) for row in rows[1:]]


def number(text, where):
    try:
        return float(text)
    except ValueError as error:
        raise Unreadable(f"{where}: '{text}' is no number") from error


def same(column, a, b, relative, absolute, where):
    if a == b:
        return True
    if not a or not b:  # empty means "does not apply": equal to nothing but itself
        return False
    if column in COUNTS:
        return number(a, where) == number(b, where) and a.isdigit() == b.isdigit()
    x, y = number(a, where), number(b, where)
    if struct.pack("<d", x) == struct.pack("<d", y):
        return True
    if relative is None and absolute is None:
        return False
    return abs(x - y) <= (relative or 0.0) * max(abs(x), abs(y)) + (absolute or 0.0)  # false for NaN


def first_difference(a, b, relative=None, absolute=None, columns=None, steps=None):
    """The first difference as text, or None; and how many rows were compared. Of some columns or the first steps alone, where told."""
    path_a, header_a, rows_a = metrics_of(a)
    path_b, header_b, rows_b = metrics_of(b)
    if steps is not None:
        if steps < 1:
            raise Unreadable(f"{steps} steps: nothing would be compared")
        for path, rows in (path_a, rows_a), (path_b, rows_b):
            if len(rows) < steps:
                raise Unreadable(f"{path}: {len(rows)} rows, {steps} are to be compared")
        rows_a, rows_b = rows_a[:steps], rows_b[:steps]
    for column in columns or []:
        if column not in header_a and column not in header_b:
            raise Unreadable(f"{path_a}: no column {column}")
    columns = columns or COLUMNS + sorted(c for c in set(header_a) | set(header_b) if c.startswith("expert_") or c in ("dropped_tokens", "rerouted_tokens"))
    for column in columns:
        if (column in header_a) != (column in header_b):
            return f"column {column} is only in {path_a if column in header_a else path_b}", 0
    columns = [c for c in columns if c in header_a]
    for at, (row_a, row_b) in enumerate(zip(rows_a, rows_b)):
        for column in columns:
            if not same(column, row_a[column], row_b[column], relative, absolute, f"row {at + 1}, {column}"):
                return f"step {row_a['step']}, {column}: {row_a[column] or 'empty'} and {row_b[column] or 'empty'}", at
    if len(rows_a) != len(rows_b):
        return f"{path_a} has {len(rows_a)} rows, {path_b} has {len(rows_b)}", min(len(rows_a), len(rows_b))
    if not rows_a:
        raise Unreadable(f"{path_a} and {path_b} have no rows: nothing was compared")
    return None, len(rows_a)


def gap(a, b):
    """|a - b| / max(|a|, |b|) of two fields; NaN where one is empty."""
    x, y = (float(field or "nan") for field in (a, b))
    return abs(x - y) / (max(abs(x), abs(y)) or 1.0)


def beside(a, b, names=("A", "B"), columns=("loss", "grad_norm")):
    """Lines of a table in Markdown, a row a step that both runs have, as lists of cells: each column of both, and the relative gap."""
    lines = [["step"] + [cell for column in columns for cell in (f"{column}, {names[0]}", names[1], "gap")]]
    for x, y in zip(metrics_of(a)[2], metrics_of(b)[2]):
        pairs = [(x[column], y[column]) for column in columns]
        lines.append([x["step"]] + [cell for p, q in pairs for cell in (*(f"{float(n or 'nan'):.9g}" for n in (p, q)), f"{gap(p, q):.1e}")])
    return lines


def printed(lines):
    """The table that lists of cells are, the first its head."""
    head, *rows = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + " ---: |" * len(lines[0]), *rows])


def counts_of(run, steps):
    """Lines of expert_tokens.csv (step, then tokens an expert) of these steps; None where the run keeps no such file."""
    path = pathlib.Path(run) / "expert_tokens.csv"
    if not path.is_file():
        return None
    lines = (line.split(",") for line in path.read_text(encoding="utf-8").splitlines())
    return {line[0]: line[1:] for line in lines if line[0] in steps}


def count_difference(a, b):
    """The first difference between the tokens each expert got, as text, or None; and why nothing was compared, if so."""
    steps = {row["step"] for row in metrics_of(a)[2]}
    first, second = counts_of(a, steps), counts_of(b, steps)
    if first is None and second is None:
        return None, "no expert_tokens.csv"
    if first is None or second is None:
        return f"expert_tokens.csv is only in {b if first is None else a}", ""
    for step in sorted(steps, key=float):
        x, y = first.get(step), second.get(step)
        if x == y:
            continue
        if x is None or y is None or len(x) != len(y):
            return f"step {step}, tokens an expert: {len(x or [])} and {len(y or [])} counts", ""
        at = next(i for i in range(len(x)) if x[i] != y[i])
        return f"step {step}, count {at + 1} of expert_tokens.csv: {x[at]} and {y[at]} tokens", ""
    return None, ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--relative", type=float, help="allowed |a - b| / max(|a|, |b|); not given: bit for bit")
    parser.add_argument("--absolute", type=float, help="allowed |a - b| besides")
    parser.add_argument("--columns", type=lambda names: names.split(","), help="these alone are compared, joined by commas")
    parser.add_argument("--steps", type=int, help="compare the first rows alone")
    parser.add_argument("--table", action="store_true", help="print losses and gradient norms side by side")
    arguments = parser.parse_args()
    try:
        if arguments.table:
            print(printed(beside(arguments.a, arguments.b)))
        found, rows = first_difference(arguments.a, arguments.b, arguments.relative, arguments.absolute, arguments.columns, arguments.steps)
        skipped = ""
        if not found and arguments.relative is None and arguments.absolute is None and not arguments.columns and arguments.steps is None:
            found, skipped = count_difference(arguments.a, arguments.b)
    except Unreadable as error:
        print(error, file=sys.stderr)
        return 2
    if found:
        print(f"differ: {found}")
        return 1
    kind = "bit-equal" if arguments.relative is None and arguments.absolute is None else "equal within the tolerance"
    print(f"{kind}: {rows} rows" + (f" (tokens an expert not compared: {skipped})" if skipped else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
