#!/usr/bin/env python3
"""Trains a byte-level BPE tokenizer on texts and writes it as a Hugging Face folder: tokenizer.json, tokenizer_config.json.

train_bpe.py --out FOLDER [--entries 32768] FILE_OR_FOLDER...

Files are read as tokenize.py reads them. Every text can be encoded: the 256 bytes are entries, and what is no special token comes back as
it was. The last entries are the special tokens <|end|>, which tokenize.py puts after a document, and <|turn|> of the chat template that is
written with it. With --eval-every N the documents that `tokenize.py --eval` keeps for evaluation are left out here too.
Needs: tokenizers (pip install tokenizers).
"""
import argparse
import json
import os
import sys

sys.path.append(sys.path.pop(0))  # this folder last: its tokenize.py must not hide the standard module of that name

from texts import BadInput, files_of, is_held_out, texts_of

END, TURN = "<|end|>", "<|turn|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


def fail(wrong):
    raise wrong


def trained(texts, entries):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Words with the blank before them, up to three digits, runs of other signs, line ends: no entry crosses these.
    pieces = Regex(r" ?\p{L}[\p{L}\p{M}]*| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in (END, TURN)]
    trainer = trainers.BpeTrainer(
        vocab_size=entries - len(special), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(special)
    return tokenizer


def train(options):
    read = {"documents": 0, "bytes": 0}

    def texts():
        for path in files_of(options.paths, options.only):
            for text in texts_of(path, options.field, fail):
                if text and not is_held_out(text, options.eval_every):
                    read["documents"] += 1
                    read["bytes"] += len(text.encode())
                    yield text

    tokenizer = trained(texts(), options.entries)
    size = tokenizer.get_vocab_size()
    if size < options.entries:
        raise BadInput(f"{read['bytes']} bytes of text give {size} entries, not {options.entries}: more text is needed")
    os.makedirs(options.out, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": CHAT_TEMPLATE}
    with open(os.path.join(options.out, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    tokenizer.save(os.path.join(options.out, "tokenizer.json"))
    print(f"{options.out}: {size} entries from {read['documents']} documents of {read['bytes']} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FOLDER")
    parser.add_argument("--entries", type=int, default=32768, help="of the vocabulary, special tokens included (32768)")
    parser.add_argument("--eval-every", type=int, default=0, metavar="N", help="leave out the documents of tokenize.py --eval-every N")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="of a folder only files of such names, with * and ?; repeatable")
    parser.add_argument("--field", default="text", help="where a .jsonl line has its text (text)")
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER")
    options = parser.parse_args()
    if options.entries < 258:
        parser.error("--entries: 256 bytes and 2 special tokens need 258")
    try:
        train(options)
    except (BadInput, OSError) as wrong:
        sys.exit(f"train_bpe.py: {wrong}")
    except ModuleNotFoundError as missing:
        sys.exit(f"train_bpe.py: needs the Python package {missing.name}: pip install {missing.name}")


if __name__ == "__main__":
    main()
