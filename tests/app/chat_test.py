#!/usr/bin/env python3
"""Conversations from their lines to the loss: the script, the job's word about bad lines, the labels of a step."""
import csv
import json
import pathlib
import sys
import unittest

from runs import TWO, Runs, main

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))
import tokenize_test

CHAT = ["--set", "model.vocab_size=261"]


@unittest.skipUnless(tokenize_test.PYTHON, "no Python with h5py and jinja2")
class Chat(Runs):
    def tokenized(self, *lines):
        path = self.write("c.jsonl", "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        result = tokenize_test.tokenize(self.root, "--chat", path, config={"chat_template": tokenize_test.MARKED})
        self.assertEqual(result.returncode, 0, result.stderr)
        return self.root / "out.h5"

    def rows(self):
        with open(self.run_dir / "metrics.csv", newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def test_a_step_counts_the_labels_that_the_assistant_gave_it(self):
        # Each is 24 tokens, of which "yes" and the end of the turn are learned; 32 of them fill the 12 sequences of three steps.
        data = self.tokenized(*({"prompt": f"is it really {n:02d}??", "response": "yes"} for n in range(32)))
        self.call(self.job(steps=3, data=data, form="chat"), *CHAT, *TWO, "--set", "training.micro_batch_size=2", ranks=2)
        rows = self.rows()
        self.assertEqual(sum(int(row["label_tokens"]) for row in rows), 32 * 4)
        self.assertTrue(all(float(row["loss"]) > 0 for row in rows))

    def test_bad_lines_are_refused_or_skipped_as_the_job_says(self):
        good = {"prompt": "a", "response": "b" * 50}
        data = self.tokenized(good, "{\n", good, {"prompt": "a"})
        job = self.job(data=data, form="chat")
        told = f"out.h5: made without 2 bad lines ({self.root}/c.jsonl:2: not JSON"
        refused = self.call(job, *CHAT, code=3)
        self.assertIn(told, refused.stderr)
        self.assertIn(f"{self.root}/c.jsonl:4: no text in 'response'); mend them, or let the job say data.bad_lines: skip", refused.stderr)
        skipped = self.call(job, *CHAT, "--set", "data.bad_lines=skip")
        self.assertEqual(skipped.stderr.count(told), 1, skipped.stderr)
        self.assertIn(told, (self.run_dir / "log.txt").read_text())
        self.assertEqual(len(self.rows()), 3)

    def test_a_token_file_without_labels_is_no_chat(self):
        result = tokenize_test.tokenize(self.root, self.data, config={})
        self.assertEqual(result.returncode, 0, result.stderr)
        refused = self.call(self.job(data=self.root / "out.h5", form="chat"), *CHAT, code=3)
        self.assertIn("out.h5: there is no data set labels, which data.format chat needs", refused.stderr)


if __name__ == "__main__":
    main()
