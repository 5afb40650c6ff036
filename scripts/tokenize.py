#!/usr/bin/env python3
"""Turns texts into a token file of moetrain by any Hugging Face tokenizer, in pieces, so that the texts may exceed the memory.

tokenize.py --tokenizer NAME_OR_FOLDER --out tokens.h5 FILE...

A .jsonl file holds one document a line, in the field that --field names; any other file is one document. Empty documents are
left out. A line that is no JSON object with a text in that field is an error that names file and line, or with --skip-bad is
left out and counted. The file appears under its name only when it is complete.
Needs: h5py, numpy, and tokenizers (transformers where there is no tokenizer.json).
"""
import argparse
import json
import os
import sys

sys.path.append(sys.path.pop(0))  # this folder last: its tokenize.py must not hide the standard module of that name

import h5py
import numpy

PIECE_TOKENS = 1 << 20  # written at once; also the chunk of the data sets
BATCH_DOCUMENTS = 256  # encoded at once


class BadInput(Exception):
    """A fault of the data, told in one line."""


class Encoder:
    """Texts to ids, without the marks that a tokenizer would put around a chat or a sentence pair."""

    def __init__(self, name):
        self.name = name
        file = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
        self.end_text = None
        if os.path.isfile(file):
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(file)
            self.ids_of = tokenizer.get_vocab(with_added_tokens=True)
            self.encode = lambda texts: [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
            self.end_text = self.end_in(os.path.join(os.path.dirname(file), "tokenizer_config.json"))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(name)
            self.ids_of = tokenizer.get_vocab()
            self.encode = lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]
            self.end_text = tokenizer.eos_token
        self.vocab_size = max(self.ids_of.values()) + 1

    @staticmethod
    def end_in(path):
        if not os.path.isfile(path):
            return None
        with open(path, encoding="utf-8") as file:
            token = json.load(file).get("eos_token")
        return token.get("content") if isinstance(token, dict) else token


class TokenWriter:
    """Collects documents and writes them a piece at a time."""

    def __init__(self, path, encoder):
        self.file = h5py.File(path, "w")
        self.dtype = numpy.uint16 if encoder.vocab_size <= 1 << 16 else numpy.uint32
        grows = {"shape": (0,), "maxshape": (None,)}
        self.tokens = self.file.create_dataset("tokens", dtype=self.dtype, chunks=(PIECE_TOKENS,), **grows)
        self.documents = self.file.create_dataset("documents", dtype=numpy.int64, chunks=(1 << 14,), **grows)
        self.file.attrs["vocab_size"] = numpy.int64(encoder.vocab_size)
        self.file.attrs["tokenizer"] = encoder.name
        self.pending, self.starts, self.count, self.document_count = [], [], 0, 0

    def add(self, ids):
        self.starts.append(self.count)
        self.pending.extend(ids)
        self.count += len(ids)
        self.document_count += 1
        if len(self.pending) >= PIECE_TOKENS:
            self.flush()

    def flush(self):
        for dataset, values in ((self.tokens, self.pending), (self.documents, self.starts)):
            if values:
                dataset.resize(dataset.shape[0] + len(values), axis=0)
                dataset[-len(values):] = numpy.asarray(values, dtype=dataset.dtype)
            values.clear()

    def close(self):
        self.flush()
        self.file.close()


def decoded(data, place):
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise BadInput(f"{place}: not UTF-8 at byte {wrong.start}") from None


def text_of_line(line, field, place):
    try:
        record = json.loads(decoded(line, place))
    except json.JSONDecodeError as wrong:
        raise BadInput(f"{place}: not JSON: {wrong.msg} at column {wrong.colno}") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise BadInput(f"{place}: no text in a field {field!r}")
    return record[field]


def texts_of(path, field, on_bad):
    """The documents of one file; a bad one is handed to on_bad, which raises or lets it go."""
    if not path.endswith(".jsonl"):
        with open(path, "rb") as file:
            try:
                yield decoded(file.read(), path)
            except BadInput as wrong:
                on_bad(wrong)
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield text_of_line(line, field, f"{path}:{number}")
            except BadInput as wrong:
                on_bad(wrong)


def batches(texts, size):
    batch = []
    for text in texts:
        if text:
            batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def tokenize(options):
    encoder = Encoder(options.tokenizer)
    end_text = options.end_of_document or encoder.end_text
    if end_text and end_text not in encoder.ids_of:
        raise BadInput(f"{options.tokenizer}: no token {end_text!r}")
    end = [encoder.ids_of[end_text]] if end_text else []
    skipped = []

    def on_bad(wrong):
        if not options.skip_bad:
            raise wrong
        skipped.append(wrong)
        print(f"skipped: {wrong}", file=sys.stderr)

    part = options.out + ".part"
    try:
        writer = TokenWriter(part, encoder)
        for path in options.files:
            for batch in batches(texts_of(path, options.field, on_bad), BATCH_DOCUMENTS):
                for ids in encoder.encode(batch):
                    if ids:
                        writer.add(list(ids) + end)
        writer.close()
        if writer.count == 0:
            raise BadInput("no document gave a token")
        os.replace(part, options.out)
    finally:
        if os.path.exists(part):
            os.remove(part)
    print(f"{options.out}: {writer.count} tokens, {writer.document_count} documents, vocabulary of {encoder.vocab_size}, "
          f"{len(skipped)} bad skipped")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="Hugging Face name, a folder, or a tokenizer.json")
    parser.add_argument("--out", required=True, help="the token file to write")
    parser.add_argument("--field", default="text", help="where a .jsonl line has its text (text)")
    parser.add_argument("--end-of-document", help="token put after each document (the tokenizer's own, if its configuration names one)")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad documents out instead of stopping")
    parser.add_argument("files", nargs="+", metavar="FILE")
    try:
        tokenize(parser.parse_args())
    except (BadInput, OSError) as wrong:
        sys.exit(f"tokenize.py: {wrong}")


if __name__ == "__main__":
    main()
