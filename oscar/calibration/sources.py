"""The user's calibration text: several sources with a token budget each, plain text or JSON lines.

    FILE            shares what the other sources leave of the tokens
    FILE:TOKENS     takes this many

A `.jsonl` file has one JSON object a line: {"text": ...}, {"prompt": ...} or {"messages": [{"role": ..., "content": ...}]}.
Prompts and messages are formatted with the model's chat template. Lines are taken in a seeded random order, each cut at the
longest sequence, and joined end to end, so that a source with long samples takes no more tokens than it was given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from oscar.calibration import text
from oscar.calibration.text import Sequence
from oscar.errors import OscarError

KINDS = ("text", "prompt", "messages")


@dataclass(frozen=True)
class Source:
    """One file of text.

    Attributes:
        path: the file.
        tokens: tokens to take; the held-out part is included.
        name: what reports call it: the file's name, with its folder where two files have the same.
    """

    path: Path
    tokens: int
    name: str


def parse(items: Iterable[str | Path], tokens: int) -> list[Source]:
    """Sources with their budgets.

    Args:
        items: "FILE" or "FILE:TOKENS" each.
        tokens: budget over all sources. Where every source brings its own, their sum counts instead.
    Raises:
        OscarError: nothing is left for a source without a budget of its own, a budget is not positive, or a file comes twice.
    """
    pieces = [split(str(item)) for item in items]
    given = sum(n for _, n in pieces if n is not None)
    open_ended = sum(n is None for _, n in pieces)
    each = (tokens - given) // open_ended if open_ended else 0
    if open_ended and each <= 0:
        free = next(path for path, n in pieces if n is None)
        raise OscarError(f"--text {free}: the other sources take {given} of {tokens} tokens, none is left; raise --tokens")
    paths = [Path(path) for path, _ in pieces]
    if twice := [p for i, p in enumerate(paths) if p in paths[:i]]:
        raise OscarError(f"--text {twice[0]}: expected every file once, got it twice")
    names = [p.name if sum(q.name == p.name for q in paths) == 1 else f"{p.parent.name}/{p.name}" for p in paths]
    if len(set(names)) < len(names):
        names = [str(p) for p in paths]
    return [Source(p, each if n is None else n, name) for p, (_, n), name in zip(paths, pieces, names, strict=True)]


def check(source: Source) -> None:
    """Refuse, before any weight is read, a file that cannot be used. Reads its beginning only."""
    text.check_file(source.path)
    if _is_lines(source.path):
        next(_samples(source.path, [0]))


def sequences(source: Source, tokenizer, max_length: int, seed: int) -> list[Sequence]:
    """Token sequences of one source, the last tenth held out.

    Args:
        source: see Source; fewer tokens come back if the file holds fewer.
        tokenizer: the model's; its start token, if it adds one, opens every plain sample.
        max_length: longest sequence in tokens; a longer sample is cut.
        seed: of the order of JSON lines.
    Raises:
        OscarError: the file cannot be read or a line cannot be used; the line is named.
    """
    if not _is_lines(source.path):
        return text.from_file(source.path, tokenizer, source.tokens, max_length, source.name)
    offsets = _line_offsets(source.path)
    order = torch.randperm(len(offsets), generator=torch.Generator().manual_seed(seed)).tolist()
    taken, found = [torch.empty(0, dtype=torch.long)], 0
    for number, sample in _samples(source.path, [offsets[i] for i in order], order):
        if found >= source.tokens:
            break
        taken.append(torch.tensor(_tokens(source.path, number, sample, tokenizer)[:max_length], dtype=torch.long))
        found += len(taken[-1])
    ids = torch.cat(taken)[: source.tokens]
    result, used = [], 0
    for length, held_out in text.share(len(ids), max_length) if len(ids) else []:
        result.append(Sequence(ids[used : used + length].clone(), source.name, held_out))
        used += length
    return result


def split(item: str) -> tuple[str, int | None]:
    """(file, tokens) of "FILE:TOKENS"; tokens are None where none are given. Raises OscarError: they are not positive."""
    path, colon, count = item.rpartition(":")
    if not colon or Path(item).exists() or not count.lstrip("-").isdigit():
        return item, None
    if int(count) <= 0:
        raise OscarError(f"--text {item}: expected a positive number of tokens after the colon, got {count}")
    return path, int(count)


def _is_lines(path: Path) -> bool:
    return path.suffix.lower() == ".jsonl"


def _line_offsets(path: Path) -> list[int]:
    """Byte offsets of the lines that are not blank."""
    offsets, at = [], 0
    with _reading(path) as file:
        for line in file:
            if line.strip():
                offsets.append(at)
            at += len(line)
    return offsets


def _samples(path: Path, offsets: list[int], numbers: list[int] | None = None) -> Iterator[tuple[int, dict]]:
    """(line as counted from 1 over lines that are not blank, its object) for each offset, checked."""
    with _reading(path) as file:
        for offset, number in zip(offsets, range(len(offsets)) if numbers is None else numbers, strict=True):
            file.seek(offset)
            line = file.readline()
            while line and not line.strip():
                line = file.readline()
            where = f"--text {path}, line {number + 1}"
            try:
                sample = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise OscarError(f"{where}: expected one JSON object, found text that is not JSON ({error})") from error
            if not isinstance(sample, dict) or not any(kind in sample for kind in KINDS):
                found = f"keys {', '.join(sample)}" if isinstance(sample, dict) else f"a {type(sample).__name__}"
                raise OscarError(f'{where}: expected an object with "text", "prompt" or "messages", got {found}')
            kind = next(kind for kind in reversed(KINDS) if kind in sample)
            if not isinstance(sample[kind], list if kind == "messages" else str):
                expected = "a list of messages" if kind == "messages" else "a string"
                raise OscarError(f'{where}: expected {expected} as "{kind}", got a {type(sample[kind]).__name__}')
            if kind == "messages" and not (sample[kind] and all(_is_message(m) for m in sample[kind])):
                raise OscarError(f'{where}: expected messages with "role" and "content", got {str(sample[kind])[:60]}')
            yield number, sample


def _tokens(path: Path, number: int, sample: dict, tokenizer) -> list[int]:
    """Token ids of one sample; plain text and a prompt without a template end with the end token, if there is one."""
    where = f"--text {path}, line {number + 1}"
    chat = sample.get("messages")
    if chat is None and "prompt" in sample and getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": sample["prompt"]}]
    if chat is None:
        ids = tokenizer(sample.get("prompt", sample.get("text")), add_special_tokens=False, verbose=False)["input_ids"]
        end = getattr(tokenizer, "eos_token_id", None)
        return text.start_tokens(tokenizer) + ids + ([] if end is None else [end])
    if not getattr(tokenizer, "chat_template", None):
        raise OscarError(f'{where}: this model has no chat template for "messages"; give "text" instead')
    try:
        formatted = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=_asks(chat))
    except Exception as error:  # templates raise what they like
        raise OscarError(f"{where}: the model's chat template does not take these messages: {error}") from error
    return tokenizer(formatted, add_special_tokens=False, verbose=False)["input_ids"]


def _asks(chat: list) -> bool:
    """Whether the model is to speak next: then the template opens its turn, as the server does."""
    return chat[-1]["role"] == "user"


def _is_message(message) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _reading(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise OscarError(f"--text {path}: expected a readable text file: {os.strerror(error.errno or 0)}") from error
