"""Calibration text as token sequences: plain files, or text that the model writes itself. `sources` mixes files.

Long sequences matter as much as many tokens: keys and queries are taken after RoPE, so their statistics depend on the
positions they were seen at. A budget is therefore cut into few long sequences, up to the model's context length.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from oscar.errors import OscarError

HELD_OUT_SHARE = 0.1
SELF_SOURCE = "written by the model"
DOCUMENT_TOKENS = 512
_PARTS_AT_ONCE = 32
_CHECKED_BYTES = 1 << 20
_PART_CHARS = 1 << 16
_BYTES_PER_TOKEN = 16  # read per token wanted; more than any tokenizer needs on natural text

SEEDS = (
    "Once upon a time, in a small town by the sea,",
    "The history of mathematics begins",
    "def merge_sort(items):\n",
    "Chapter 1\n\nIt was late in the evening when",
    "The patient presented with",
    "# Installation\n\nTo install the package,",
    "Dear colleagues,\n\nI am writing to",
    "Question: A train leaves the station at 9:40 and travels at 80 km per hour. ",
    "In 1969, the first",
    "import numpy as np\n\n",
    "Abstract. We study",
    "Breaking news: officials said on Monday that",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n",
    '{"name": "example", "version": "1.0.0", ',
    "SELECT customer_id, SUM(amount) FROM orders ",
    "Theorem. Let f be a continuous function on",
    "La ville de Paris est",
    "Die Entwicklung der modernen Physik",
    "El presidente anunció que",
    "<html>\n<head>\n<title>",
)
"""Openings of documents the model continues."""
REQUESTS = (
    "Tell me a long story about a lighthouse keeper.",
    "Explain how photosynthesis works, step by step.",
    "Write a Python program that counts the words in a file, and explain it.",
    "What were the main causes of the First World War? Answer in detail.",
    "Solve this: a shop sells pens at 3 for 2 euros. How much do 45 pens cost? Show your reasoning.",
    "Summarise the plot of a well-known novel.",
    "Give me a week of vegetarian dinners with shopping lists.",
    "Describe how a computer network delivers a packet from one machine to another.",
    "Translate 'Where is the nearest station?' into five languages and comment on each.",
    "Compare three ways to sort a list, with code and complexity.",
    "Write a letter of complaint about a delayed parcel.",
    "List the planets of the solar system and two facts on each.",
)
"""Requests for models with a chat template."""


@dataclass(frozen=True)
class Sequence:
    """Tokens that are read together.

    Attributes:
        tokens: [num_tokens] int64.
        source: name of the file, or SELF_SOURCE.
        held_out: kept from the statistics, used to measure the error.
    """

    tokens: Tensor
    source: str
    held_out: bool


def num_tokens(sequences: list[Sequence]) -> int:
    """Tokens of all sequences together."""
    return sum(len(s.tokens) for s in sequences)


def share(budget: int, max_length: int) -> list[tuple[int, bool]]:
    """(length in tokens, held out) of the sequences a budget is cut into: the last tenth is held out."""
    held_out = max(1, round(budget * HELD_OUT_SHARE))

    def cut(total: int) -> list[int]:
        return [min(max_length, total - start) for start in range(0, total, max_length)]

    return [(n, False) for n in cut(budget - held_out)] + [(n, True) for n in cut(held_out)]


def from_file(path: str | Path, tokenizer, budget: int, max_length: int, name: str | None = None) -> list[Sequence]:
    """Token sequences of a UTF-8 text file, evenly spaced over it if it holds more than the budget.

    Args:
        path: the file.
        tokenizer: the model's tokenizer; its start token, if it adds one, opens every sequence.
        budget: tokens to take; fewer come back if the file holds fewer.
        max_length: longest sequence in tokens.
        name: what reports call the source; None: the file's name.
    Returns:
        Sequences in file order, so that the end of the file is held out.
    Raises:
        OscarError: the file cannot be read, is empty, or is not UTF-8 text.
    """
    path = Path(path)
    start = start_tokens(tokenizer)
    pieces = share(budget, max_length)
    texts, whole = _read(path, [length for length, _ in pieces])
    # Beyond a piece's length nothing is kept.
    runs = [token_ids(tokenizer, piece, None if whole else n) for piece, (n, _) in zip(texts, pieces, strict=False)]
    if whole:
        (ids,) = runs
        spare = len(ids) - sum(length for length, _ in pieces)
        if spare < 0:
            pieces, spare = share(len(ids), max_length), 0
        runs, used = [], 0
        for i, (length, _) in enumerate(pieces):
            first = used + spare * i // max(1, len(pieces) - 1)
            runs.append(ids[first : first + length])
            used += length
    sequences = []
    for run, (length, held_out) in zip(runs, pieces, strict=True):
        tokens = torch.cat((torch.tensor(start, dtype=torch.long), run))[:length]
        if len(tokens):
            sequences.append(Sequence(tokens.clone(), name or path.name, held_out))
    return sequences


def token_ids(tokenizer, text: str, limit: int | None = None) -> Tensor:
    """Token ids of a text without special tokens, [num_tokens] int64; no more than `limit` of them.

    It is cut before spaces into parts of up to _PART_CHARS: what a tokenizer makes of a text takes many times the memory of the
    ids.
    """
    parts, first, found = [torch.empty(0, dtype=torch.long)], 0, 0
    while first < len(text) and (limit is None or found < limit):
        last = first + _PART_CHARS
        if last < len(text) and (space := text.rfind(" ", first + 1, last)) > 0:
            last = space
        ids = tokenizer(text[first:last], add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(torch.tensor(ids, dtype=torch.long))
        first, found = last, found + len(ids)
    return torch.cat(parts)[:limit]


def start_tokens(tokenizer) -> list[int]:
    """[bos] if the tokenizer opens text with it, else []."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and bos in tokenizer("a")["input_ids"][:1] else []


def from_model(
    model,
    tokenizer,
    budget: int,
    max_length: int,
    seed: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[Sequence]:
    """Text that the model writes: sampled at temperature 1 from document openings and, with a chat template, requests.

    It is written in parts of DOCUMENT_TOKENS, many at a time, and the parts are joined to long sequences, as in
    pretraining. Sampling token by token is the slow step of calibration, and its cost grows with the length written in
    one go. Where the model ends a text, its part goes on with the next opening.

    Args:
        model: a Hugging Face causal language model in eval mode.
        tokenizer: its tokenizer; None starts every part at the configured start token.
        budget: tokens in all.
        max_length: longest sequence in tokens.
        seed: the same seed gives the same text on the same machine and software.
        advance: told the tokens written since the last call.
    Returns:
        Sequences of exactly the budget.
    """
    generator = torch.Generator().manual_seed(seed)
    openings = _openings(model.config, tokenizer)
    order = torch.randperm(len(openings), generator=generator).tolist()
    opening = (openings[i] for i in itertools.cycle(order))
    ends = end_tokens(model, tokenizer)
    vocabulary = None if tokenizer is None else len(tokenizer)
    length = min(DOCUMENT_TOKENS, max_length, budget)
    num_parts = math.ceil(budget / length)
    parts = []
    with torch.inference_mode():
        for first in range(0, num_parts, _PARTS_AT_ONCE):
            rows = min(_PARTS_AT_ONCE, num_parts - first)
            parts.append(_write(model, rows, length, opening, ends, vocabulary, generator, advance))
    return _as_sequences(torch.cat(parts), budget, max_length)


def from_engine(
    write: Callable[[list[list[int]], int, int], Tensor], model_config, tokenizer, budget: int, max_length: int, seed: int
) -> list[Sequence]:
    """The same from a model that another program runs.

    Args:
        write: (openings, parts, length in tokens) -> [parts, length] int64 of text that goes on from them.
        model_config: the model's configuration.
        tokenizer, budget, max_length, seed: as for `from_model`.
    """
    openings = _openings(model_config, tokenizer)
    order = torch.randperm(len(openings), generator=torch.Generator().manual_seed(seed)).tolist()
    length = min(DOCUMENT_TOKENS, max_length, budget)
    return _as_sequences(write([openings[i] for i in order], math.ceil(budget / length), length), budget, max_length)


def _as_sequences(parts: Tensor, budget: int, max_length: int) -> list[Sequence]:
    """Parts [num_parts, length], joined and cut into sequences of exactly the budget."""
    pieces = share(budget, max_length)
    runs = parts.flatten()[:budget].split([n for n, _ in pieces])
    return [Sequence(run, SELF_SOURCE, held_out) for run, (_, held_out) in zip(runs, pieces, strict=True)]


def _write(
    model,
    rows: int,
    length: int,
    opening: Iterator[list[int]],
    ends: set[int],
    vocabulary: int | None,
    generator: torch.Generator,
    advance: Callable[[int], None],
) -> Tensor:
    """[rows, length] int64 of text; an opening is fed token by token, so rows need no padding."""
    pending = [list(next(opening)) for _ in range(rows)]
    written = torch.empty(rows, length, dtype=torch.long)
    cache, sampled = _roomy_cache(model), [0] * rows
    for position in range(length):
        for row in range(rows):
            if not pending[row] and sampled[row] in ends:
                pending[row] = list(next(opening))
        written[:, position] = torch.tensor([p.pop(0) if p else s for p, s in zip(pending, sampled, strict=True)])
        if position + 1 < length:
            ids = written[:, position : position + 1].to(model.device)
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            logits = logits[:, -1, :vocabulary].float().cpu()
            sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator).flatten().tolist()
        advance(rows)
    return written


def _roomy_cache(model):
    """The library's cache for this model, its plain layers growing by doubling: by default every token copies them all."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class RoomyLayer(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
            old = self.get_seq_length()
            new = old + key_states.shape[-2]
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.room = [x.new_empty(*x.shape[:2], 0, x.shape[-1]) for x in (key_states, value_states)]
            if new > self.room[0].shape[-2]:
                grown = [x.new_empty(*x.shape[:2], max(64, 2 * new), x.shape[-1]) for x in self.room]
                for to, x in zip(grown, self.room, strict=True):
                    to[:, :, :old] = x[:, :, :old]
                self.room = grown
            for to, x in zip(self.room, (key_states, value_states), strict=True):
                to[:, :, old:new] = x
            self.keys, self.values = (x[:, :, :new] for x in self.room)
            return self.keys, self.values

    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _openings(model_config, tokenizer) -> list[list[int]]:
    """Token lists a row can start with; at least one, none empty."""
    if tokenizer is None:
        start = getattr(model_config, "bos_token_id", None)
        return [[start if isinstance(start, int) else 0]]
    start = start_tokens(tokenizer)
    result = [start] if start else []
    result += [start + tokenizer(text, add_special_tokens=False)["input_ids"] for text in SEEDS]
    if getattr(tokenizer, "chat_template", None):
        for text in REQUESTS:
            chat = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            result.append(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return [ids for ids in result if ids] or [[0]]


def end_tokens(model, tokenizer) -> set[int]:
    """Tokens after which the model has nothing more to say."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = set(ends) if isinstance(ends, list) else {ends}
    return {end for end in (*ends, getattr(tokenizer, "eos_token_id", None)) if end is not None}


def check_file(path: Path) -> None:
    """Raise OscarError unless the file can be read, is not empty and begins as UTF-8 text; cheap for any size."""
    with _reading(path) as file:
        raw = file.read(_CHECKED_BYTES)
    _decode(path, raw[: len(raw) - _cut_off(raw)] if len(raw) == _CHECKED_BYTES else raw)
    if not raw.strip():
        raise OscarError(f"--text {path}: the file is empty; give a file with text")


def _read(path: Path, lengths: list[int]) -> tuple[list[str], bool]:
    """(texts, whether they are the one whole file): enough text for sequences of these lengths in tokens."""
    wanted = [length * _BYTES_PER_TOKEN for length in lengths]
    with _reading(path) as file:
        spare = file.seek(0, os.SEEK_END) - sum(wanted)
        if spare <= 0:
            file.seek(0)
            return [_decode(path, file.read())], True
        pieces, used = [], 0
        for i, size in enumerate(wanted):
            file.seek(used + spare * i // max(1, len(wanted) - 1))
            used += size
            raw = file.read(size).lstrip(bytes(range(0x80, 0xC0)))  # may begin and end inside a character
            pieces.append(_decode(path, raw[: len(raw) - _cut_off(raw)]))
        return pieces, False


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise OscarError(f"--text {path}: expected a readable text file: {os.strerror(error.errno or 0)}") from error


def _decode(path: Path, raw: bytes) -> str:
    if b"\0" in raw:
        reason = "a zero byte"
    else:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = error.reason
    raise OscarError(f"--text {path}: expected plain UTF-8 text, found {reason}; convert the file or give another")


def _cut_off(raw: bytes) -> int:
    """Bytes of an unfinished character at the end of raw, 0 to 3."""
    for back in range(1, min(4, len(raw)) + 1):
        lead = raw[-back]
        if lead >= 0xC0:
            need = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return back if need > back else 0
        if lead < 0x80:
            return 0
    return 0
