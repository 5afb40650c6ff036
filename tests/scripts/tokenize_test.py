#!/usr/bin/env python3
"""Texts and conversations become the tokens, labels and documents that they should, token by token; what is wrong is told with its line.

The tokenizer is made here: a byte is an id, and so is each <|mark|>; it stands in for the package `tokenizers` where a test does not need
the real one. Skipped where no Python has h5py and jinja2 (python3-h5py, python3-jinja2); tests of train_bpe.py need tokenizers as well.
PYTHON in the environment names another interpreter to look at.
"""
import json
import os
import pathlib
import subprocess
import sys
import unittest

from in_a_folder import InAFolder

ROOT = pathlib.Path(__file__).resolve().parents[2]
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
STAND_IN = f"""
import re
MARKS = {MARKS!r}
class Encoding:
    def __init__(self, text):
        pieces = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
        self.ids = [i for p in pieces for i in ([256 + MARKS.index(p)] if p in MARKS else p.encode())]
class Tokenizer:
    @staticmethod
    def from_file(path): return Tokenizer()
    def get_vocab(self, with_added_tokens): return {{**{{f"byte {{b}}": b for b in range(256)}}, **{{m: 256 + n for n, m in enumerate(MARKS)}}}}
    def encode_batch(self, texts, add_special_tokens): return [Encoding(t) for t in texts]
"""
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
DUMP = """
import h5py, json, sys
f = h5py.File(sys.argv[1])
out = {n: f[n][()].tolist() for n in f if n != "bad_lines"}
out["types"] = {n: str(f[n].dtype) for n in f if n != "bad_lines"}
out["bad_lines"] = f["bad_lines"].asstr()[()] if "bad_lines" in f else None
out.update({k: v if isinstance(v, str) else int(v) for k, v in f.attrs.items()})
print(json.dumps(out))
"""


def python_with(*modules):
    for python in filter(None, [os.environ.get("PYTHON"), sys.executable, "/usr/bin/python3"]):
        if os.path.isfile(python) and subprocess.run([python, "-c", "import " + ", ".join(modules)], capture_output=True).returncode == 0:
            return python
    return None


PYTHON = python_with("h5py", "jinja2")
PYTHON_BPE = python_with("h5py", "jinja2", "tokenizers")


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def tokenize(root, *words, config):
    """Runs tokenize.py with the stand-in and a configuration; writes root/out.h5."""
    for name, text in {"modules/tokenizers.py": STAND_IN, "tokenizer/tokenizer.json": "{}",
                       "tokenizer/tokenizer_config.json": json.dumps(config)}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    command = [PYTHON, "-B", ROOT / "scripts/tokenize.py", "--tokenizer", root / "tokenizer", "--out", root / "out.h5", *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(root / "modules")})


class OfTexts(InAFolder):
    def script(self, python, name, *words, path=""):
        return subprocess.run([python, "-B", str(ROOT / "scripts" / name), *map(str, words)], capture_output=True, text=True, check=False,
                              env={**os.environ, "PYTHONPATH": str(path)})

    def dumped(self, python, name):
        return json.loads(subprocess.run([python, "-c", DUMP, str(self.root / name)], capture_output=True, text=True, check=True).stdout)


@unittest.skipUnless(PYTHON, "no Python with h5py and jinja2")
class Tokenize(OfTexts):
    def tokenize(self, *words, template=TEMPLATE, config=None):
        return tokenize(self.root, *words, config=config or {"eos_token": {"content": "<|end|>"}, "chat_template": template})

    def chat(self, *lines, **more):
        """The token file of the lines, and what was told; a line is a record or bytes."""
        data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        result = self.tokenize("--chat", self.write("c.jsonl", data + b"\n"), **more)
        self.assertEqual(result.returncode, 0, result.stderr)
        return self.dumped(PYTHON, "out.h5"), result

    def refused(self, *words, **more):
        result = self.tokenize(*words, **more)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertFalse((self.root / "out.h5").exists())
        self.assertFalse((self.root / "out.h5.part").exists())
        self.assertNotIn("Traceback", result.stderr)
        return result.stderr

    @staticmethod
    def documents(file):
        """[(text, learned text)]: dots where a label is -100."""
        spell = lambda ids: b"".join(bytes([i]) if 0 <= i < 256 else b"." if i == -100 else MARKS[i - 256].encode() for i in ids).decode()
        starts = file["documents"] + [len(file["tokens"])]
        for token, label in zip(file["tokens"], file["labels"]):
            assert label in (-100, token)
        return [(spell(file["tokens"][a:b]), spell(file["labels"][a:b])) for a, b in zip(starts, starts[1:])]

    def test_only_what_the_assistant_says_has_labels_with_the_end_of_its_turn(self):
        file, result = self.chat({"messages": [said("system", "be"), said("user", "a"), said("assistant", "bc"), said("user", "d"),
                                               said("assistant", "e")]},
                                 {"prompt": "f", "response": "g"})
        first = "<|system|>be<|end|>\n<|user|>a<|end|>\n<|assistant|>bc<|end|>\n<|user|>d<|end|>\n<|assistant|>e<|end|>\n"
        hidden = "." * 5 + "." * 4 + "."  # a mark is one token
        self.assertEqual(self.documents(file), [
            (first, hidden + "bc<|end|>\n" + "." * 5 + "e<|end|>\n"),
            ("<|user|>f<|end|>\n<|assistant|>g<|end|>\n", "....." + "g<|end|>\n"),
        ])
        self.assertEqual(file["types"], {"documents": "int64", "labels": "int32", "tokens": "uint16"})
        self.assertEqual((file["vocab_size"], file["bad_lines"]), (261, None))
        self.assertIn("out.h5: 30 tokens, 10 of them labels, 2 documents, vocabulary of 261, 0 bad left out", result.stdout)

    def test_marks_of_a_template_say_what_is_learned(self):
        file, _ = self.chat({"messages": [said("user", "a"), said("assistant", "b"), said("assistant", "c")]}, template=MARKED)
        self.assertEqual(self.documents(file), [("<|user|>a<|end|><|assistant|>b<|end|><|assistant|>c<|end|>", "....b<|end|>.c<|end|>")])

    def test_characters_of_several_bytes_keep_their_labels(self):
        file, _ = self.chat({"prompt": "né 漢", "response": "🙂 ö"}, '{"prompt": "\\u00e9", "response": "\\ud83d\\ude42"}'.encode())
        self.assertEqual([learned.lstrip(".") for _, learned in self.documents(file)], ["🙂 ö<|end|>\n", "🙂<|end|>\n"])

    def test_a_line_of_a_million_letters_is_one_conversation(self):
        file, _ = self.chat({"prompt": "p" * 1_200_000, "response": "r" * 300_000}, {"prompt": "a", "response": "b"})
        self.assertEqual(len(file["tokens"]), 1_500_000 + 6 + 8)
        self.assertEqual(file["labels"].count(-100), 1_200_004 + 5)
        self.assertEqual(file["documents"], [0, 1_500_006])

    def test_bad_lines_are_told_with_their_numbers_and_noted_in_the_file(self):
        good = {"prompt": "a", "response": "b"}
        bad = {
            b'{"messages": [': "not JSON",
            b"[" * 100_000: "not JSON",
            b'"text"': "no JSON object",
            b'{"text": "a"}': "neither 'messages' nor 'prompt' and 'response'",
            b'{"prompt": "a"}': "no text in 'response'",
            b'{"prompt": ["a"], "response": "b"}': "no text in 'prompt'",
            b'{"messages": {}}': "'messages' is no list",
            b'{"messages": []}': "no turn of the assistant",
            b'{"messages": ["a"]}': "message 1 is no object",
            b'{"messages": [{"role": "bot", "content": "a"}]}': "message 1 has the role 'bot', not one of system, user, assistant, tool",
            b'{"messages": [{"content": "a"}]}': "message 1 has the role None",
            b'{"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}': "message 1 has no text in 'content'",
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}': "message 2: the assistant says nothing",
            b'{"prompt": "", "response": "b"}': "message 1: the user says nothing",
            b'{"messages": [{"role": "user", "content": "a"}]}': "no turn of the assistant: nothing to learn",
            b'{"prompt": "a", "response": "\xff"}': "not UTF-8 at byte 29",
            b'{"prompt": "a", "response": "\\ud800"}': "half of a surrogate pair",
        }
        file, result = self.chat(good, *bad, b"", good)
        told = result.stderr.splitlines()
        self.assertEqual(len(told), len(bad), result.stderr)
        for number, (line, why) in enumerate(zip(told, bad.values()), 2):
            self.assertTrue(line.startswith(f"left out: {self.root}/c.jsonl:{number}: {why}"), (line, why))
        self.assertEqual(file["bad_lines"], "".join(line.removeprefix("left out: ") + "\n" for line in told))
        self.assertEqual(len(file["documents"]), 2)
        self.assertIn(f"{len(bad)} bad left out", result.stdout)

    def test_nothing_but_bad_lines_writes_no_file(self):
        self.assertIn("no document gave a token", self.refused("--chat", self.write("c.jsonl", "{}\n")))

    def test_a_template_that_rewrites_earlier_turns_is_not_guessed_at(self):
        lines = self.write("c.jsonl", json.dumps({"messages": [said("user", "a"), said("assistant", "b"), said("user", "c")]}))
        self.assertIn("c.jsonl:1: message 2: the chat template writes it otherwise when more follows",
                      self.refused("--chat", lines, template=FORGETFUL))

    def test_templates_that_are_none_or_refuse(self):
        lines = self.write("c.jsonl", '{"prompt": "a", "response": "b"}')
        self.assertIn("tokenizer: no chat template; --chat-template", self.refused("--chat", lines, config={"eos_token": "<|end|>"}))
        self.assertIn("no chat template that Jinja reads", self.refused("--chat", lines, template="{% for %}"))
        self.assertIn("c.jsonl:1: the chat template: odd", self.refused("--chat", lines, template="{{ raise_exception('odd') }}"))
        self.assertIn("shows nothing of the assistant", self.refused("--chat", lines, template="{{ messages[0].content }}"))
        self.assertEqual(self.tokenize("--chat", "--skip-bad", lines).returncode, 2)

    def test_the_template_of_a_file_or_of_a_list_of_names_is_taken(self):
        lines = self.write("c.jsonl", '{"prompt": "a", "response": "b"}')
        for words, more in (
            (["--chat-template", self.write("t.jinja", MARKED)], {}),
            ([], {"config": {"chat_template": [{"name": "tools", "template": ""}, {"name": "default", "template": MARKED}]}}),
        ):
            self.assertEqual(self.tokenize("--chat", *words, lines, **more).returncode, 0)
            self.assertEqual(self.documents(self.dumped(PYTHON, "out.h5"))[0][1], "....b<|end|>")

    def test_texts_of_files_lines_and_folders_are_documents_that_end(self):
        self.write("d/1.txt", "ab")
        self.write("d/2.txt", "")
        self.write("d/3.jsonl", '{"text": "é"}\n\n{"text": "cd"}\n')
        self.write("d/4.html", "<p>")
        (self.root / "d/5.html").symlink_to("nowhere")
        result = self.tokenize("--only", "*.txt", "--only", "*.jsonl", self.root / "d")
        self.assertEqual(result.returncode, 0, result.stderr)
        file = self.dumped(PYTHON, "out.h5")
        self.assertEqual(file["tokens"], [97, 98, 260, 0xC3, 0xA9, 260, 99, 100, 260])
        self.assertEqual(file["documents"], [0, 3, 6])
        self.assertNotIn("labels", file)

    def test_bad_texts_stop_or_are_left_out(self):
        path = self.write("t.jsonl", b'{"text": "a"}\n{"text": 1}\n{"text": "\\ud800"}\n\xff\n')
        self.assertIn("t.jsonl:2: no text in a field 'text'", self.refused(path))
        result = self.tokenize("--skip-bad", path)
        self.assertEqual(result.stderr.count("left out: "), 3, result.stderr)
        self.assertIn("2 tokens, 1 documents, vocabulary of 261, 3 bad left out", result.stdout)

    def test_documents_kept_for_evaluation_are_the_others_and_equal_texts_go_together(self):
        texts = [f"text {n % 150}" for n in range(300)]
        path = self.write("t.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in texts))
        self.assertEqual(self.tokenize("--eval", self.root / "eval.h5", "--eval-every", "5", path).returncode, 0)
        split = []
        for name in ("out.h5", "eval.h5"):
            file = self.dumped(PYTHON, name)
            starts = file["documents"] + [len(file["tokens"])]
            split.append([bytes(file["tokens"][a : b - 1]).decode() for a, b in zip(starts, starts[1:])])
        self.assertEqual(sorted(split[0] + split[1]), sorted(texts))
        self.assertFalse(set(split[0]) & set(split[1]))
        self.assertTrue(20 <= len(split[1]) <= 100, len(split[1]))


@unittest.skipUnless(PYTHON_BPE, "no Python with tokenizers, h5py and jinja2")
class TrainBpe(OfTexts):
    TEXT = " ".join(f"{a}{b}" for a in ("read", "writ", "load", "stor", "gather") for b in ("ing", "er", "able", "s")) + "\n\tÄ 漢 12345\r\n"

    def trained(self, *words):
        return self.script(PYTHON_BPE, "train_bpe.py", "--out", self.root / "bpe", *words)

    def test_every_text_comes_back_and_a_conversation_is_masked(self):
        self.assertEqual(self.trained("--entries", "300", self.write("t.txt", self.TEXT * 3)).returncode, 0)
        odd = " a  b\n\n\n c\t\t🙂 4567 don't <|end|>x\u0300 \u0000"
        spoken = self.write("c.jsonl", json.dumps({"messages": [said("user", odd), said("assistant", " reading\n")]}) + "\n")
        for words in ([self.write("odd.txt", odd)], ["--chat", spoken]):
            result = self.script(PYTHON_BPE, "tokenize.py", "--tokenizer", self.root / "bpe", "--out", self.root / "out.h5", *words)
            self.assertEqual(result.returncode, 0, result.stderr)
            file = self.dumped(PYTHON_BPE, "out.h5")
            spell = ("import sys, json, tokenizers; t = tokenizers.Tokenizer.from_file(sys.argv[1]); "
                     "print(json.dumps(t.decode(json.loads(sys.argv[2]), skip_special_tokens=False)))")
            spelled = lambda ids: json.loads(self.checked([PYTHON_BPE, "-c", spell, str(self.root / "bpe/tokenizer.json"), json.dumps(ids)]))
            self.assertEqual(file["vocab_size"], 300)
            if "labels" not in file:
                self.assertEqual(spelled(file["tokens"]), odd + "<|end|>")
            else:
                self.assertEqual(spelled(file["tokens"]), f"<|turn|>user\n{odd}<|end|><|turn|>assistant\n reading\n<|end|>")
                learned = [i for i in file["labels"] if i != -100]
                self.assertEqual(spelled(learned), " reading\n<|end|>")
                self.assertEqual(file["labels"][-len(learned):], learned)

    def checked(self, command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def test_too_little_text_is_told(self):
        result = self.trained("--entries", "5000", self.write("t.txt", self.TEXT))
        self.assertEqual(result.returncode, 1)
        self.assertIn("entries, not 5000: more text is needed", result.stderr)

    def test_the_same_text_gives_the_same_tokenizer(self):
        text = self.write("t.txt", self.TEXT * 2)
        found = []
        for _ in range(2):
            self.assertEqual(self.trained("--entries", "290", text).returncode, 0)
            found.append((self.root / "bpe/tokenizer.json").read_bytes())
        self.assertEqual(*found)


class WithoutPackages(OfTexts):
    def test_a_missing_package_is_named(self):
        blocked = self.write("modules/tokenizers.py", "raise ModuleNotFoundError('none', name='tokenizers')\n").parent
        result = self.script(sys.executable, "train_bpe.py", "--out", self.root / "bpe", self.write("t.txt", "text"), path=blocked)
        self.assertEqual(result.returncode, 1)
        self.assertIn("train_bpe.py: needs the Python package tokenizers", result.stderr)


if __name__ == "__main__":
    unittest.main()
