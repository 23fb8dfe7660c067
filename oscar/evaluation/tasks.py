"""Tasks whose answers can be graded by a program: seeded, in plain text, the same for every tokenizer.

    retrieval   one fact among filler and four distractors (`oscar.evaluation.needles`); good models saturate it
    twins       16 facts whose names share an adjective or a noun with others: both fields have to be right
    list        four of eight facts asked for at once
    order       all five codes, in the order in which they appear
    chain       a code passed on from name to name four times; the last one's code is asked for
    recite      a table of 24 numbered rows is begun again; the rest has to follow, row by row, some 350 tokens of it

`recite` is the long generation with a running state: what comes next depends on how far the recital has got, and one wrong
digit is one row lost. It is plain text for completion; the others are chats. Each is filled with prose to the same length.
Sources: single and multi-query needles, variable tracking: RULER, arXiv 2404.06654.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oscar.errors import OscarError
from oscar.evaluation import needles

HARD = ("twins", "list", "order", "chain", "recite")
"""Tasks of `recall-hard`."""
RECITED = 24
"""Rows of one recital."""


@dataclass(frozen=True)
class Task:
    """One prompt and what counts as right.

    Attributes:
        kind: a key of MAKERS.
        messages: the chat; None where the prompt is plain text.
        prompt: text to complete, the chat template applied.
        expected: codes that have to come, in this order.
        reply: a right answer, word by word, if the model speaks as the embedded one does; a guess, never used for grading.
        max_new_tokens: room for the answer, in tokens.
        depth: place of the fact in the document, 0 (start) to 1 (end); None where there are several.
        num_tokens: tokens of `prompt`.
    """

    kind: str
    messages: list[dict[str, str]] | None
    prompt: str
    expected: tuple[str, ...]
    reply: str
    max_new_tokens: int
    depth: float | None
    num_tokens: int

    def score(self, reply: str) -> float:
        """Share of the expected codes that the reply gives in their places, 0 to 1."""
        found = re.findall(rf"(?<!\d)\d{{{needles.CODE_DIGITS}}}(?!\d)", reply)
        return sum(a == b for a, b in zip(found, self.expected, strict=False)) / len(self.expected)


def make(kind: str, tokenizer: Any, num_tokens: int, seed: int) -> Task:
    """One task of at most num_tokens prompt tokens.

    Args:
        kind: a key of MAKERS.
        tokenizer: a transformers tokenizer with a chat template.
        num_tokens: upper bound of the prompt's length; the prompt is at most one sentence shorter.
        seed: another seed, another task.
    Raises:
        OscarError: no such kind, or it needs more tokens.
    """
    if kind not in MAKERS:
        raise OscarError(f"tasks: kind must be one of {', '.join(MAKERS)}, got {kind!r}")
    return MAKERS[kind](tokenizer, num_tokens, seed)


def _retrieval(tokenizer: Any, num_tokens: int, seed: int) -> Task:
    needle = needles.make_needle(tokenizer, num_tokens, seed=seed)
    return Task(
        "retrieval", needle.messages, needle.prompt, (needle.answer,), needle.reply, 32, needle.depth, needle.num_tokens
    )


def _twins(tokenizer: Any, num_tokens: int, seed: int) -> Task:
    rng = random.Random(f"twins {seed}")
    adjectives, nouns = rng.sample(needles.ADJECTIVES, 4), rng.sample(needles.NOUNS, 4)
    codes = _codes(rng, [f"{a} {n}" for a in adjectives for n in nouns])
    name = rng.choice(list(codes))
    facts, expected = [needles.fact(*item) for item in codes.items()], (codes[name],)
    return _chat("twins", tokenizer, num_tokens, rng, facts, needles.question(name), expected, needles.fact(name, *expected))


def _list(tokenizer: Any, num_tokens: int, seed: int) -> Task:
    rng = random.Random(f"list {seed}")
    codes = _codes(rng, needles.draw_names(rng, 8, held_out=True))
    asked = rng.sample(list(codes), 4)
    question = f"What are the access codes of {', '.join(asked[:-1])} and {asked[-1]}?"
    reply = " ".join(needles.fact(name, codes[name]) for name in asked)
    expected = tuple(codes[name] for name in asked)
    return _chat("list", tokenizer, num_tokens, rng, [needles.fact(*i) for i in codes.items()], question, expected, reply)


def _order(tokenizer: Any, num_tokens: int, seed: int) -> Task:
    rng = random.Random(f"order {seed}")
    codes = _codes(rng, needles.draw_names(rng, 5, held_out=True))
    facts, question = (
        [needles.fact(*item) for item in codes.items()],
        "List all access codes in the order in which they appear.",
    )
    return _chat("order", tokenizer, num_tokens, rng, facts, question, tuple(codes.values()), " ".join(facts))


def _chain(tokenizer: Any, num_tokens: int, seed: int) -> Task:
    rng = random.Random(f"chain {seed}")
    names = needles.draw_names(rng, 10, held_out=True)
    facts, codes = [], []
    for chain in (names[:5], names[5:]):
        codes.append(needles.draw_code(rng))
        facts.append(needles.fact(chain[0], codes[-1]))
        facts += [f"The access code of {b} is the access code of {a}." for a, b in itertools.pairwise(chain)]
    order = sorted(rng.sample(range(10), 5))  # where the first chain's links stand; both keep their own order
    links = [iter(facts[:5]), iter(facts[5:])]
    mixed = [next(links[0 if i in order else 1]) for i in range(10)]
    reply = needles.fact(names[4], codes[0])
    return _chat("chain", tokenizer, num_tokens, rng, mixed, needles.question(names[4]), (codes[0],), reply)


def _recite(tokenizer: Any, num_tokens: int, seed: int) -> Task:
    rng = random.Random(f"recite {seed}")
    codes = _codes(rng, needles.draw_names(rng, RECITED, held_out=True))
    rows = [f"{i}. {name} {code}\n" for i, (name, code) in enumerate(codes.items(), 1)]

    def render(filler: list[str]) -> tuple[None, str]:
        return None, "\n".join((" ".join(filler), "".join(rows), rows[0]))

    rest = "".join(rows[1:])
    return _filled("recite", tokenizer, num_tokens, rng, render, tuple(codes.values())[1:], rest, _length(tokenizer, rest) + 16)


MAKERS: dict[str, Callable[[Any, int, int], Task]] = {
    "retrieval": _retrieval,
    "twins": _twins,
    "list": _list,
    "order": _order,
    "chain": _chain,
    "recite": _recite,
}


def _codes(rng: random.Random, names: Sequence[str]) -> dict[str, str]:
    """A code of its own for every name."""
    codes: dict[str, None] = {}
    while len(codes) < len(names):
        codes[needles.draw_code(rng)] = None
    return dict(zip(names, codes, strict=True))


def _chat(
    kind: str,
    tokenizer: Any,
    num_tokens: int,
    rng: random.Random,
    facts: list[str],
    question: str,
    expected: tuple[str, ...],
    reply: str,
) -> Task:
    """Facts in their order at random places in filler, then the question."""
    places = sorted(rng.random() for _ in facts)

    def render(filler: list[str]) -> tuple[list[dict[str, str]], str]:
        document = list(filler)
        for place, sentence in reversed(list(zip(places, facts, strict=True))):
            document.insert(round(place * len(filler)), sentence)
        messages = [{"role": "user", "content": " ".join(document) + "\n\n" + question}]
        return messages, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    return _filled(kind, tokenizer, num_tokens, rng, render, expected, reply, _length(tokenizer, reply) + 16)


def _filled(
    kind: str,
    tokenizer: Any,
    num_tokens: int,
    rng: random.Random,
    render: Callable[[list[str]], tuple[list[dict[str, str]] | None, str]],
    expected: tuple[str, ...],
    reply: str,
    room: int,
) -> Task:
    """As much filler as fits, found by bisection."""
    sentences = needles.held_out_sentences()
    start = rng.randrange(len(sentences))

    def filler(count: int) -> list[str]:
        return [sentences[(start + i) % len(sentences)] for i in range(count)]

    def fits(count: int) -> bool:
        return _length(tokenizer, render(filler(count))[1]) <= num_tokens

    if not fits(0):
        need = _length(tokenizer, render([])[1])
        raise OscarError(f"tasks: {kind} takes at least {need} tokens, got num_tokens={num_tokens}; ask for a longer context")
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    messages, prompt = render(filler(low))
    return Task(kind, messages, prompt, expected, reply, room, None, _length(tokenizer, prompt))


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
