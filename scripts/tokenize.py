#!/usr/bin/env python3
"""Turns texts or conversations into a token file of moetrain by any Hugging Face tokenizer, in pieces, so that they may exceed the memory.

tokenize.py --tokenizer NAME_OR_FOLDER --out tokens.h5 FILE_OR_FOLDER...
tokenize.py --tokenizer NAME_OR_FOLDER --chat --out chat.h5 FILE.jsonl...

Texts: a .jsonl file holds one document a line, in the field that --field names; any other file is one document; .gz is unpacked. Empty
documents are left out. A line that is no JSON object with a text in that field, or a file that is not UTF-8, is an error that names it,
or with --skip-bad is left out and counted.

Conversations (--chat, for data.format chat): a line is {"messages": [{"role": "system", "user", "assistant" or "tool", "content"}, ...]}
or {"prompt", "response"}. The tokenizer's chat template is applied; labels are the tokens that the assistant says, with those that close
its turn, and -100 elsewhere. A turn's text is encoded by itself, as a prompt is that waits for its answer. Lines that are no such
conversation are told with their numbers and left out; the token file notes them, and the job decides (data.bad_lines).

--eval writes one of --eval-every documents, chosen by their contents, to a file of its own. A file appears under its name only when it is
complete.
Needs: h5py, numpy, and tokenizers (transformers where there is no tokenizer.json); jinja2 for --chat.
"""
import argparse
import contextlib
import json
import os
import sys

sys.path.append(sys.path.pop(0))  # this folder last: its tokenize.py must not hide the standard module of that name

import h5py
import numpy

from conversations import BadConversation, ChatTemplate
from texts import BadInput, files_of, is_held_out, records_of, texts_of

PIECE_TOKENS = 1 << 20  # written at once; also the chunk of the data sets
BATCH_DOCUMENTS = 256  # encoded at once
IGNORED = -100


def text_in(path):
    """What a file holds; nothing where there is none."""
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


class Encoder:
    """Texts to ids, without the marks that a tokenizer would put around a chat or a sentence pair."""

    def __init__(self, name, trust_remote_code=False):
        self.name = name
        file = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
        if os.path.isfile(file):
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(file)
            folder = os.path.dirname(file)
            config = json.loads(text_in(os.path.join(folder, "tokenizer_config.json")) or "{}")
            self.ids_of = tokenizer.get_vocab(with_added_tokens=True)
            self.encode = lambda texts: [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
            self.special_tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()
                                   if key.endswith("_token") and isinstance(value, (str, dict))}
            self.chat_template = text_in(os.path.join(folder, "chat_template.jinja")) or config.get("chat_template")
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            self.ids_of = tokenizer.get_vocab()
            self.encode = lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]
            self.special_tokens = dict(tokenizer.special_tokens_map)
            self.chat_template = tokenizer.chat_template
        if isinstance(self.chat_template, list):  # several, with names
            self.chat_template = {one["name"]: one["template"] for one in self.chat_template}
        if isinstance(self.chat_template, dict):
            self.chat_template = self.chat_template.get("default")
        self.vocab_size = max(self.ids_of.values()) + 1

    def end(self, text):
        """The ids that close a document."""
        text = text or self.special_tokens.get("eos_token")
        if text and text not in self.ids_of:
            raise BadInput(f"{self.name}: no token {text!r}")
        return [self.ids_of[text]] if text else []

    def template(self, path):
        source = text_in(path) if path else self.chat_template
        if not source:
            raise BadInput(f"{path or self.name}: no chat template; --chat-template names a file that has one")
        try:
            return ChatTemplate(source, self.special_tokens)
        except BadConversation as wrong:
            raise BadInput(f"{path or self.name}: {wrong}") from None


class TokenWriter:
    """Collects documents and writes them a piece at a time. The file has its name once it is committed, and is gone if it never is."""

    def __init__(self, path, encoder, has_labels):
        self.path, self.part = path, path + ".part"
        self.file = h5py.File(self.part, "w")
        self.tokens, self.documents, self.labels = [], [], []
        id_type = numpy.uint16 if encoder.vocab_size <= 1 << 16 else numpy.uint32
        self.grow("tokens", id_type, PIECE_TOKENS)
        self.grow("documents", numpy.int64, 1 << 14)
        if has_labels:
            self.grow("labels", numpy.int32, PIECE_TOKENS)
        self.file.attrs["vocab_size"] = numpy.int64(encoder.vocab_size)
        self.file.attrs["tokenizer"] = encoder.name
        self.count = self.document_count = self.label_count = 0

    def grow(self, name, dtype, chunk):
        self.file.create_dataset(name, shape=(0,), maxshape=(None,), dtype=dtype, chunks=(chunk,))

    def add(self, ids, labels):
        self.documents.append(self.count)
        self.tokens.extend(ids)
        self.labels.extend(labels)
        self.count += len(ids)
        self.document_count += 1
        self.label_count += len(labels) - labels.count(IGNORED)
        if len(self.tokens) >= PIECE_TOKENS:
            self.flush()

    def flush(self):
        for name, dataset in self.file.items():
            values = getattr(self, name)
            if values:
                dataset.resize(dataset.shape[0] + len(values), axis=0)
                dataset[-len(values):] = numpy.asarray(values, dtype=dataset.dtype)
        for values in (self.tokens, self.documents, self.labels):
            values.clear()

    def commit(self, bad_lines):
        if self.count == 0:
            raise BadInput(f"{self.path}: no document gave a token")
        self.flush()
        if bad_lines:
            self.file["bad_lines"] = "".join(f"{line}\n" for line in bad_lines)
        self.file.close()
        os.replace(self.part, self.path)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.file.close()
        if os.path.exists(self.part):
            os.remove(self.part)


def conversations_of(path, template, on_bad):
    for place, record in records_of(path, on_bad):
        try:
            yield template.parts(record)
        except BadConversation as wrong:
            on_bad(BadInput(f"{place}: {wrong}"))


def batches(items, size):
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def encoded(documents, encoder):
    """(text, ids, labels) of each document; a document is a list of (text, learned)."""
    for batch in batches(documents, BATCH_DOCUMENTS):
        pieces = iter(encoder.encode([text for parts in batch for text, _ in parts]))
        for parts in batch:
            ids, labels = [], []
            for _, learned in parts:
                piece = list(next(pieces))
                ids += piece
                labels += piece if learned else [IGNORED] * len(piece)
            yield "".join(text for text, _ in parts), ids, labels


def tokenize(options):
    encoder = Encoder(options.tokenizer, options.trust_remote_code)
    bad = []

    def on_bad(wrong):
        if not (options.skip_bad or options.chat):
            raise wrong
        bad.append(str(wrong))
        print(f"left out: {wrong}", file=sys.stderr)

    paths = files_of(options.paths, options.only)
    if options.chat:
        template, end = encoder.template(options.chat_template), []
        documents = (parts for path in paths for parts in conversations_of(path, template, on_bad))
    else:
        end = encoder.end(options.end_of_document)
        documents = ([(text, True)] for path in paths for text in texts_of(path, options.field, on_bad) if text)

    with contextlib.ExitStack() as files:
        writers = [files.enter_context(TokenWriter(path, encoder, options.chat)) for path in (options.out, options.eval) if path]
        for text, ids, labels in encoded(documents, encoder):
            if ids:
                held_out = options.eval and is_held_out(text, options.eval_every)
                writers[bool(held_out)].add(ids + end, labels)
        for writer in writers:
            writer.commit(bad if options.chat else [])
    for writer in writers:
        learned = f"{writer.label_count} of them labels, " if options.chat else ""
        print(f"{writer.path}: {writer.count} tokens, {learned}{writer.document_count} documents, vocabulary of {encoder.vocab_size}, "
              f"{len(bad)} bad left out")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="Hugging Face name, a folder, or a tokenizer.json")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the program that comes with a tokenizer, as those of Kimi do")
    parser.add_argument("--out", required=True, help="the token file to write")
    parser.add_argument("--eval", help="a second token file, of documents that are kept from the first")
    parser.add_argument("--eval-every", type=int, default=50, metavar="N", help="of N documents about one goes there (50)")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="of a folder only files of such names, with * and ?; repeatable")
    parser.add_argument("--chat", action="store_true", help="lines are conversations; writes labels")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja file instead of the tokenizer's own template")
    parser.add_argument("--field", default="text", help="where a .jsonl line has its text (text)")
    parser.add_argument("--end-of-document", help="token put after each text (the tokenizer's own, if its configuration names one)")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad texts out instead of stopping")
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER")
    options = parser.parse_args()
    if options.chat and (options.skip_bad or options.end_of_document):
        parser.error("with --chat the job decides about bad lines, and the chat template how a conversation ends")
    try:
        tokenize(options)
    except (BadInput, OSError) as wrong:
        sys.exit(f"tokenize.py: {wrong}")
    except ModuleNotFoundError as missing:
        sys.exit(f"tokenize.py: needs the Python package {missing.name}: pip install {missing.name}")


if __name__ == "__main__":
    main()
