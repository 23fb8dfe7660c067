"""Needle tasks: a long chat document hides one access code, the question at its end asks for it.

One generator serves training, the quickstart, the evaluation and the tests. It is pure Python and seeded: the same
arguments give the same task. Names are an adjective and a noun ("amber falcon"); a hash of the name decides for ever
whether it belongs to training or to evaluation, and the filler is text the embedded model was never trained on, so
an evaluation task shares neither name nor filler with training.

    user       ... filler. The access code of amber falcon is 48213. filler ... distractors ...

               What is the access code of amber falcon?
    assistant  The access code of amber falcon is 48213.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from oscar.errors import OscarError

EVAL_SHARE = 8  # one name in eight is kept for evaluation
CODE_DIGITS = 5
FILLER_FILE = Path(__file__).parents[1] / "embedded" / "heldout.txt"

ADJECTIVES = tuple(
    """amber ancient arctic azure bold brave bright bronze calm clever coral cosmic crimson crystal curious daring
    dusty eager electric emerald fancy fierce frosty gentle giant golden happy hidden hollow humble icy ivory jolly
    lively lonely lucky lunar marble mellow mighty misty nimble noble olive pale patient polar proud purple quick
    quiet rapid royal rusty scarlet secret shiny silent silver sleepy solar stormy sunny swift tiny velvet violet
    wild wise""".split()
)
NOUNS = tuple(
    """anchor arrow badger beacon bison bridge candle canyon castle cedar comet condor coyote dolphin dragon eagle
    ember falcon ferry forest fox garden geyser glacier hammer harbor hawk heron island jaguar kettle lantern
    leopard lion lizard magnet maple meadow meteor mirror moose otter owl panther parrot pebble penguin pilot planet
    puma rabbit raven river rocket saddle salmon shadow sparrow spider summit tiger tower tulip turtle valley
    violin walrus willow wolf zebra""".split()
)


@dataclass(frozen=True)
class Needle:
    """One task.

    Attributes:
        messages: the chat, one user message, as `apply_chat_template` and chat servers take it.
        prompt: the rendered chat with the assistant's turn opened, for plain text completion.
        key: the name asked for, "amber falcon".
        answer: its code, five digits.
        reply: the sentence the embedded model was trained to say.
        num_tokens: tokens of `prompt`.
        depth: place of the fact in the document, 0 (start) to 1 (end).
    """

    messages: list[dict[str, str]]
    prompt: str
    key: str
    answer: str
    reply: str
    num_tokens: int
    depth: float

    def is_right(self, reply: str) -> bool:
        """True if the first five-digit number in the model's reply is the code asked for."""
        return read_code(reply) == self.answer


def is_eval_name(name: str) -> bool:
    """True if this name is kept for evaluation; training uses only the others."""
    return zlib.crc32(name.encode()) % EVAL_SHARE == 0


def draw_names(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """Draw `count` different names from the evaluation names or from the training names."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        if is_eval_name(name) == held_out:
            names[name] = None
    return list(names)


def draw_code(rng: random.Random) -> str:
    """Draw five digits; the first is never zero, so that the code also survives as a number."""
    return str(rng.randrange(10 ** (CODE_DIGITS - 1), 10**CODE_DIGITS))


def fact(name: str, code: str) -> str:
    """The sentence that hides in the document, and the one that the assistant should reply."""
    return f"The access code of {name} is {code}."


def question(name: str) -> str:
    """The question that ends the user's message."""
    return f"What is the access code of {name}?"


def read_code(reply: str) -> str | None:
    """The first five-digit number in a reply, or None."""
    found = re.search(rf"(?<!\d)\d{{{CODE_DIGITS}}}(?!\d)", reply)
    return found.group() if found else None


def split_sentences(text: str) -> list[str]:
    """Split running text into sentences of 20 to 300 characters; shorter and longer ones are left out."""
    return [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text) if 20 <= len(s) <= 300]


@lru_cache(maxsize=1)
def held_out_sentences() -> tuple[str, ...]:
    """Sentences of the shipped held-out prose, in reading order."""
    return tuple(s for line in FILLER_FILE.read_text(encoding="utf-8").splitlines() for s in split_sentences(line))


def make_needle(
    tokenizer: Any,
    num_tokens: int = 1024,
    depth: float | None = None,
    seed: int = 0,
    *,
    num_distractors: int = 4,
    filler: Sequence[str] | None = None,
) -> Needle:
    """Make one held-out task of at most `num_tokens` prompt tokens.

    Args:
        tokenizer: a transformers tokenizer with a chat template; any model's will do.
        num_tokens: upper bound of the prompt's length; the prompt is at most one sentence shorter.
        depth: place of the fact in the document, 0 (start) to 1 (end); None draws it uniformly from `seed`.
        seed: decides the names, codes, filler and places.
        num_distractors: further facts with other names and codes, at places of their own.
        filler: sentences to fill with, in order from a drawn start; the shipped held-out prose if None.
    Raises:
        OscarError: `depth` is outside 0 to 1, or the facts and the question alone exceed `num_tokens`.
    """
    rng = random.Random(f"needle {seed}")  # a str seed is hashed with SHA-512: the same task on every machine
    depth = rng.random() if depth is None else float(depth)
    if not 0.0 <= depth <= 1.0:
        raise OscarError(f"make_needle: depth must lie in 0 to 1, got depth={depth}")
    names = draw_names(rng, num_distractors + 1, held_out=True)
    codes: list[str] = []
    while len(codes) < len(names):
        code = draw_code(rng)
        if code not in codes:
            codes.append(code)
    facts = [fact(name, code) for name, code in zip(names, codes, strict=True)]
    places = [depth, *(rng.random() for _ in facts[1:])]
    sentences = held_out_sentences() if filler is None else filler
    start = rng.randrange(len(sentences))

    def render(num_sentences: int) -> tuple[list[dict[str, str]], str, int]:
        document = [sentences[(start + i) % len(sentences)] for i in range(num_sentences)]
        # From the last place to the first, so that an insertion does not move the places still to come.
        for place, sentence in sorted(zip(places, facts, strict=True), reverse=True):
            document.insert(round(place * num_sentences), sentence)
        messages = [{"role": "user", "content": " ".join(document) + "\n\n" + question(names[0])}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return messages, prompt, len(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])

    if render(0)[2] > num_tokens:
        raise OscarError(
            f"make_needle: the facts and the question alone take {render(0)[2]} tokens, got num_tokens={num_tokens}; "
            "ask for more tokens or fewer distractors"
        )
    low, high = 0, 1  # `low` sentences fit, `high` do not: double, then bisect
    while render(high)[2] <= num_tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if render(middle)[2] <= num_tokens else (low, middle)
    messages, prompt, length = render(low)
    return Needle(messages, prompt, names[0], codes[0], facts[0], length, depth)
