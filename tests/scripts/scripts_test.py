#!/usr/bin/env python3
"""The scripts around the program do what they say: runs compared, text measured, curves drawn, presets embedded."""
import math
import os
import pathlib
import subprocess
import sys
import unittest
import xml.etree.ElementTree as xml

from in_a_folder import InAFolder

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = "step,tokens,loss,balance_loss,indexer_loss,grad_norm,lr,label_tokens,step_ms,expert_load_max,eval_loss"
ROWS = [
    ["1", "64", "5.5451774444795623", "", "", "1.25", "0.001", "60", "10.5", "1.5", ""],
    ["2", "128", "5.4000000000000004", "", "", "1.125", "0.001", "61", "11.5", "1.25", "5.5"],
]


def script(name, *arguments):
    command = [sys.executable, "-B", str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class OfRuns(InAFolder):
    def run_of(self, name, rows=None, header=HEADER, experts=None):
        self.write(f"{name}/metrics.csv", "\n".join([header] + [",".join(r) for r in (rows or ROWS)]) + "\n")
        if experts is not None:
            self.write(f"{name}/expert_tokens.csv", experts)
        return self.root / name

    def changed(self, row, column, value):
        rows = [list(r) for r in ROWS]
        rows[row][HEADER.split(",").index(column)] = value
        return rows


class CompareRuns(OfRuns):
    def compared(self, rows, *options, **more):
        return script("compare_runs.py", self.run_of("a"), self.run_of("b", rows, **more), *options)

    def test_equal_runs_are_equal_and_times_do_not_count(self):
        self.assertEqual(self.compared(self.changed(0, "step_ms", "99")).returncode, 0)

    def test_one_unit_in_the_last_place_of_a_loss_is_a_difference(self):
        result = self.compared(self.changed(1, "loss", repr(math.nextafter(5.4, 6))))
        self.assertEqual(result.returncode, 1)
        self.assertIn("step 2, loss", result.stdout)

    def test_each_promised_column_is_compared(self):
        for column in ["tokens", "loss", "grad_norm", "lr", "label_tokens", "expert_load_max", "balance_loss"]:
            self.assertEqual(self.compared(self.changed(1, column, "77")).returncode, 1, column)

    def test_two_spellings_of_one_number_are_equal(self):
        self.assertEqual(self.compared(self.changed(0, "lr", "1e-3")).returncode, 0)

    def test_a_tolerance_holds_from_its_one_side_to_the_other(self):
        near, far = self.changed(0, "loss", repr(5.5451774444795623 * (1 + 5e-10))), self.changed(0, "loss", repr(5.5451774444795623 * (1 + 5e-9)))
        self.assertEqual(self.compared(near, "--relative", "1e-9").returncode, 0)
        self.assertEqual(self.compared(far, "--relative", "1e-9").returncode, 1)

    def test_no_tolerance_lets_nan_or_an_empty_field_pass(self):
        for value in ["nan", ""]:
            self.assertEqual(self.compared(self.changed(0, "loss", value), "--relative", "1").returncode, 1, value)

    def test_counts_know_no_tolerance(self):
        self.assertEqual(self.compared(self.changed(0, "tokens", "65"), "--relative", "1").returncode, 1)

    def test_a_missing_row_or_column_is_a_difference(self):
        self.assertEqual(self.compared(ROWS[:1]).returncode, 1)
        self.assertEqual(self.compared([r[:-2] + r[-1:] for r in ROWS], header=HEADER.replace(",expert_load_max", "")).returncode, 1)

    def test_tokens_of_one_expert_are_compared(self):
        a, b = self.run_of("a", experts="1,3,5\n2,4,4\n"), self.run_of("b", experts="1,3,5\n2,5,3\n")
        result = script("compare_runs.py", a, b)
        self.assertEqual(result.returncode, 1)
        self.assertIn("step 2, count 1", result.stdout)
        self.assertEqual(script("compare_runs.py", a, a).returncode, 0)

    def test_some_columns_or_the_first_steps_alone(self):
        self.assertEqual(self.compared(self.changed(1, "loss", "77"), "--columns", "step,grad_norm").returncode, 0)
        self.assertEqual(self.compared(self.changed(1, "loss", "77"), "--columns", "step,loss").returncode, 1)
        self.assertEqual(self.compared(self.changed(1, "loss", "77"), "--steps", "1").returncode, 0)
        self.assertEqual(self.compared(self.changed(0, "loss", "77"), "--steps", "1").returncode, 1)
        for options in ["--columns", "lost"], ["--steps", "3"], ["--steps", "0"]:
            result = self.compared(ROWS, *options)
            self.assertEqual(result.returncode, 2, result.stdout)
            self.assertEqual(result.stdout, "")

    def test_a_table_has_both_runs_and_how_far_they_are_apart(self):
        result = self.compared(self.changed(1, "loss", "5.3999"), "--table", "--relative", "1e-4")
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        self.assertEqual(lines[0], "| step | loss, A | B | gap | grad_norm, A | B | gap |")
        self.assertEqual(lines[2:4], ["| 1 | 5.54517744 | 5.54517744 | 0.0e+00 | 1.25 | 1.25 | 0.0e+00 |",
                                      "| 2 | 5.4 | 5.3999 | 1.9e-05 | 1.125 | 1.125 | 0.0e+00 |"])

    def test_nothing_to_compare_is_not_equality(self):
        self.write("a/metrics.csv", HEADER + "\n")
        self.assertEqual(script("compare_runs.py", self.root / "a", self.root / "a").returncode, 2)
        self.assertEqual(script("compare_runs.py", self.root / "absent", self.root / "a").returncode, 2)


class TextEntropy(OfRuns):
    def test_a_text_worked_by_hand(self):
        # "abab" and its end: a is followed by b twice, b by a and by the end once each: (2 * 0 + 2 * log 2) / 4.
        self.write("text/one.txt", b"abab")
        result = script("text_entropy.py", self.root / "text")
        self.assertIn("1 documents, 4 predictions", result.stdout)
        self.assertIn(f"order-1 entropy                  {math.log(2) / 2:.4f}", result.stdout)
        # alone: b twice, a once, the end once
        self.assertIn(f"order-0 entropy                  {1.5 * math.log(2):.4f}", result.stdout)

    def test_pairs_do_not_cross_documents_and_nothing_is_read_twice(self):
        self.write("text/one.txt", b"ab")
        self.write("text/sub/two.txt", b"ab")
        self.write("text/.hidden", b"zzzz")
        self.write("text/empty", b"")
        os.symlink(self.root / "text/one.txt", self.root / "text/link.txt")
        os.symlink(self.root / "text/sub", self.root / "text/linked")
        result = script("text_entropy.py", self.root / "text")
        self.assertIn("2 documents, 4 predictions", result.stdout)
        self.assertIn("order-1 entropy                  0.0000", result.stdout)
        self.write("blobs/1f", b"ab")
        os.symlink("../blobs/1f", self.root / "text/three.txt")
        os.symlink("../blobs/1f", self.root / "text/again.txt")
        self.assertIn("3 documents, 6 predictions", script("text_entropy.py", self.root / "text").stdout)

    def test_a_job_names_its_texts_in_each_way_of_writing_a_list(self):
        text = self.write("one.txt", b"abab")
        for train in [f"{text}", f"[{text}]", f'["{text}"]  # all of it', f"\n    - {text}\n    - {text}", f"\n  - '{text}'"]:
            job = self.write("job.yaml", f"run:\n  dir: x\ndata:\n  format: bytes\n  train: {train}\n  eval: {self.root}\ntraining:\n  steps: 1\n")
            result = script("text_entropy.py", "--job", job)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(f"order-1 entropy                  {math.log(2) / 2:.4f}", result.stdout, train)

    def test_losses_stand_beside_the_entropy(self):
        text = self.write("one.txt", b"abab")
        run = self.run_of("run", [*ROWS, ["3", "192", "", "", "", "0", "0.001", "0", "9.5", "1.5", ""]])  # without labels
        result = script("text_entropy.py", text, "--metrics", run / "metrics.csv")
        self.assertIn(f"last  2 steps    {(5.5451774444795623 + 5.4) / 2:.4f} nats (not below", result.stdout)
        self.assertRegex(result.stdout, r"held-out loss at step 2 +5\.5000")


class PlotRun(OfRuns):
    def drawn(self, rows):
        run = self.run_of("run", rows)
        result = script("plot_run.py", run)
        self.assertEqual(result.returncode, 0, result.stderr)
        return xml.parse(run / "loss.svg").getroot()

    def find(self, root, kind, name):
        return [e for e in root.iter(f"{{http://www.w3.org/2000/svg}}{kind}") if e.get("class") == name]

    def test_a_run_gives_a_curve_a_mean_and_its_held_out_points(self):
        root = self.drawn(ROWS)
        self.assertEqual(len(self.find(root, "path", "raw")), 1)
        self.assertEqual(len(self.find(root, "path", "mean")), 1)
        self.assertEqual(len(self.find(root, "circle", "point")), 1)

    def test_a_loss_that_falls_goes_down_and_one_that_is_not_finite_leaves_a_gap(self):
        rows = [[str(s), "", "nan" if s == 2 else str(9 - s)] + [""] * 8 for s in range(1, 5)]
        path = self.find(self.drawn(rows), "path", "raw")[0].get("d")
        self.assertEqual(path.count("M"), 2)
        heights = [float(piece.split()[1]) for piece in path.replace("L", "M").split("M")[1:]]
        self.assertEqual(heights, sorted(heights))
        self.assertGreater(heights[-1], heights[0])

    def test_one_row_is_enough_and_none_is_refused(self):
        self.drawn(ROWS[:1])
        self.write("none/metrics.csv", HEADER + "\n")
        self.assertNotEqual(script("plot_run.py", self.root / "none").returncode, 0)


class Presets(InAFolder):
    def test_names_keep_their_dots_and_texts_their_every_character(self):
        text = 'a: "x;y" # [1, 2] \\n ${no}\n'
        self.write("models/kimi-k3.1.yaml", text)
        self.write("models/kimi-k3.yaml", "b: 1\n")
        self.write("machines/m.1.yaml", "c: 2\n")
        out = self.root / "presets.cpp"
        subprocess.run(["cmake", "-D", f"FOLDER={self.root}", "-D", f"OUTPUT={out}", "-P", str(ROOT / "core/embed_presets.cmake")], check=True)
        source = out.read_text()
        models, machines = source.split("kMachines[] = {")
        self.assertIn(f'{{"kimi-k3.1", R"yaml({text})yaml"}}', models)
        self.assertIn('{"kimi-k3", R"yaml(b: 1\n)yaml"}', models)
        self.assertIn('{"m.1", R"yaml(c: 2\n)yaml"}', machines)


if __name__ == "__main__":
    unittest.main()
