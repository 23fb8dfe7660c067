"""Graded tasks in process: answers decoded greedily and, teacher-forced, how much of the right answer is the first choice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from oscar.evaluation import needles
from oscar.evaluation.configurations import Configuration
from oscar.evaluation.generate import generate
from oscar.evaluation.reader import Reader, Windows
from oscar.evaluation.tasks import Task

CHANCE = 0.05
"""A task that 16 bits answer no more often than this says nothing about a cache."""


@dataclass
class TaskScores:
    """One configuration with one size of windows on the tasks of one kind.

    Attributes:
        shares: of each task, `Task.score` of the generated answer.
        depths: of each task, the fact's place, or None.
        forced: of each task, share of the expected codes' tokens that are the first choice when the right answer is given up
            to them; empty where answers come from a server.
    """

    shares: list[float] = field(default_factory=list)
    depths: list[float | None] = field(default_factory=list)
    forced: list[float] = field(default_factory=list)
    unreadable: int = 0
    """Answers without any code: a model that does not answer, or an answer cut short, is not a wrong digit."""

    def add(self, task: Task, reply: str | None, forced: float | None = None) -> None:
        """Grade an answer and count it in; None: nothing was generated."""
        if reply is not None:
            self.shares.append(task.score(reply))
            self.unreadable += needles.read_code(reply) is None
            self.depths.append(task.depth)
        if forced is not None:
            self.forced.append(forced)

    def summary(self) -> dict:
        """JSON-able: n; of answers exact, ci, score (mean share) and unreadable (a share); forced; as far as measured."""
        result: dict = {"n": max(len(self.shares), len(self.forced))}
        if n := len(self.shares):
            right = sum(share == 1 for share in self.shares)
            result |= {"exact": right / n, "ci": list(wilson(right, n)), "score": sum(self.shares) / n}
            result["unreadable"] = self.unreadable / n
        return result | ({"forced": sum(self.forced) / len(self.forced)} if self.forced else {})

    def by_depth(self, parts: int = 4) -> list[list[int]]:
        """[right, asked] in each part of the depth, from the start to the end; empty without depths."""
        result = [[0, 0] for _ in range(parts)]
        for share, depth in zip(self.shares, self.depths, strict=True):
            if depth is None:
                return []
            part = result[min(int(depth * parts), parts - 1)]
            part[0] += share == 1
            part[1] += 1
        return result


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927): honest near 0 and 1, where the normal one is not."""
    z, p = 1.96, right / n
    middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - spread) / (1 + z * z / n)), min(1.0, (middle + spread) / (1 + z * z / n))


def score_tasks(
    reader: Reader,
    tokenizer,
    stop: set[int],
    tasks: Sequence[Task],
    configurations: Sequence[Configuration],
    windows: Sequence[Windows],
    advance: Callable[[int], None] = lambda tokens: None,
    generated: bool = True,
    served_context: bool = False,
) -> dict[tuple[str, Windows], TaskScores]:
    """All configurations with all windows on the same tasks of one kind.

    Each prompt is read exactly once, and stored once for each configuration.

    The first configuration's answer serves as the guess for the others, which changes their speed and nothing else.

    Args:
        reader: of the model.
        tokenizer: the model's, a fast one (it gives character offsets).
        stop: tokens that end an answer.
        tasks: what to ask.
        configurations, windows: what to compare.
        advance: told the prompt tokens that are done.
        generated: False leaves out the answers and measures under teacher forcing alone.
        served_context: each configuration reads the prompt its own way (`Reader.prefill`) instead of sharing the exact reading.
    Returns:
        (configuration's name, windows) -> scores.
    """
    scores = {(configuration.name, w): TaskScores() for configuration in configurations for w in windows}
    for task in tasks:
        prompt = torch.tensor(tokenizer(task.prompt, add_special_tokens=False, verbose=False)["input_ids"])
        right, codes = _answer_tokens(tokenizer, task.reply)
        reading = reader.read(prompt, len(prompt))
        guess = right
        for configuration in configurations:
            room, first = max(task.max_new_tokens, len(right)), reading.logits[-1]
            if served_context:
                cache, first = reader.prefill(prompt, configuration.codecs, room)
            else:
                cache = reader.cache([reading], configuration.codecs, room)
            for w in windows:
                reply = None
                if generated:
                    answer = generate(reader, first, cache, w, stop, task.max_new_tokens, guess)
                    guess = answer if guess is right else guess
                    reply = tokenizer.decode(answer, skip_special_tokens=True)
                logits = reader.decode(cache, torch.tensor([right[:-1]]), w)[0]
                choice = torch.cat((first.unsqueeze(0), logits)).argmax(-1).cpu()
                forced = float((choice == torch.tensor(right))[codes].double().mean())
                scores[configuration.name, w].add(task, reply, forced)
        advance(task.num_tokens)
    return scores


def _answer_tokens(tokenizer, reply: str) -> tuple[list[int], torch.Tensor]:
    """Tokens of a right answer, and which of them belong to its codes, [num_tokens] bool."""
    made = tokenizer(reply, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = [m.span() for m in re.finditer(rf"(?<!\d)\d{{{needles.CODE_DIGITS}}}(?!\d)", reply)]
    inside = [any(first < end and last > begin for begin, end in spans) for first, last in made["offset_mapping"]]
    return made["input_ids"], torch.tensor(inside)
