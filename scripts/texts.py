"""Texts as tokenize.py and train_bpe.py read them: files and folders, plain or gzip, a document each; a .jsonl file, a document a line."""
import gzip
import json
import pathlib
import zlib

from text_entropy import files_of_folder


class BadInput(Exception):
    """A fault of the data, told in one line."""


def files_of(paths, only):
    """Files as named, and those of folders, in the order of their paths; with patterns only those whose name fits one."""
    for path in paths:
        if pathlib.Path(path).is_dir():
            yield from map(str, files_of_folder(pathlib.Path(path), only or ['*']))
        else:
            yield path


def opened(path):
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def decoded(data, place):
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise BadInput(f"{place}: not UTF-8 at byte {wrong.start}") from None


def record_of(line, place):
    try:
        return json.loads(decoded(line, place))
    except json.JSONDecodeError as wrong:
        raise BadInput(f"{place}: not JSON: {wrong.msg} at column {wrong.colno}") from None
    except (RecursionError, ValueError) as wrong:  # nested too deeply, a number of too many digits
        raise BadInput(f"{place}: not JSON that can be read: {wrong}") from None


def records_of(path, on_bad):
    """(place, what the line holds) for each line of a file of JSON lines; a bad one is handed to on_bad, which raises or lets it go."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield f"{path}:{number}", record_of(line.rstrip(), f"{path}:{number}")
                except BadInput as wrong:
                    on_bad(wrong)


def texts_of(path, field, on_bad):
    """The documents of one file."""
    if not path.removesuffix(".gz").endswith(".jsonl"):
        try:
            with opened(path) as file:
                yield decoded(file.read(), path)
        except (BadInput, EOFError, zlib.error) as wrong:
            on_bad(wrong if isinstance(wrong, BadInput) else BadInput(f"{path}: {wrong}"))
        return
    for place, record in records_of(path, on_bad):
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            on_bad(BadInput(f"{place}: no text in a field {field!r}"))
        elif any("\ud800" <= letter <= "\udfff" for letter in text):
            on_bad(BadInput(f"{place}: half of a surrogate pair, which is no character"))
        else:
            yield text


def is_held_out(text, every):
    """Whether a document is one of those kept for evaluation: of `every` documents about one, and equal texts together."""
    return every > 0 and zlib.crc32(text.encode()) % every == 0
