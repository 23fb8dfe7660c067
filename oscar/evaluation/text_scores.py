"""Divergence from exact attention and perplexity, teacher-forced over continuations of running text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from oscar.calibration.sources import split
from oscar.calibration.text import check_file, start_tokens
from oscar.errors import OscarError
from oscar.evaluation.configurations import Configuration
from oscar.evaluation.reader import Reader, Reading, Windows

QUARTERS = 4
"""Parts of the continuation that top-1 agreement is also reported for: does the error grow with what was written?"""


class TextScores:
    """Sums of one configuration with one size of windows over documents.

    All in float64 from float32 logits. Divergence is KL(exact || configuration) in nats of the next-token distribution after
    each continuation token. Perplexity is that of the continuation's tokens after its first, and its ratio to exact
    attention's.
    """

    def __init__(self) -> None:
        self.kl: list[Tensor] = []  # a document each, [continuation]
        self.agrees: list[Tensor] = []
        self.loss: list[Tensor] = []  # a document each, [continuation - 1]
        self.exact_loss: list[Tensor] = []
        self.errors: list[list[tuple[float, float]]] = []

    def add(self, reading: Reading, logits: Tensor, errors: list[tuple[float, float]] | None) -> None:
        """Count a document in.

        Args:
            reading: the document, exactly.
            logits: [continuation, vocab_size] float32, the configuration's.
            errors: as `Reader.attention_error` returns them; None: not measured on this document.
        """
        exact, found = (x.double().log_softmax(-1) for x in (reading.logits[1:], logits))
        target = reading.tokens[reading.context + 1 :].unsqueeze(1)
        self.kl.append((exact.exp() * (exact - found)).sum(-1))
        self.agrees.append((exact.argmax(-1) == found.argmax(-1)).double())
        self.loss.append(-found[:-1].gather(1, target).squeeze(1))
        self.exact_loss.append(-exact[:-1].gather(1, target).squeeze(1))
        if errors is not None:
            self.errors.append(errors)

    def summary(self, divergence: bool = True, perplexity: bool = True) -> dict:
        """JSON-able figures; intervals are of the mean over documents, 1.96 standard errors to each side."""
        result: dict = {}
        if perplexity:
            more, spread = _mean([a - b for a, b in zip(self.loss, self.exact_loss, strict=True)])
            result |= {
                "perplexity": math.exp(float(torch.cat(self.loss).mean())),
                "perplexity_ratio": math.exp(more),
                "perplexity_ratio_ci": [math.exp(more - spread), math.exp(more + spread)],
            }
        if divergence:
            kl, agrees = torch.cat(self.kl), torch.stack(self.agrees)
            mean, spread = _mean(self.kl)
            layers = [[sum(part) for part in zip(*sums, strict=True)] for sums in zip(*self.errors, strict=True)]
            result |= {
                "kl_mean": mean,
                "kl_ci": [max(0.0, mean - spread), mean + spread],
                "kl_by_document": [float(document.mean()) for document in self.kl],
                "kl_p99": float(kl.quantile(0.99)),
                "kl_max": float(kl.max()),
                "top1_agreement": float(agrees.mean()),
                "top1_by_quarter": [float(part.mean()) for part in agrees.tensor_split(QUARTERS, dim=1)],
                "attn_rel_err": [(error / square) ** 0.5 for error, square in layers],
                "positions": len(kl),
            }
        return result


def score_text(
    reader: Reader,
    documents: Iterable[Tensor],
    context: int,
    configurations: Sequence[Configuration],
    windows: Sequence[Windows],
    advance: Callable[[int], None] = lambda tokens: None,
    errors_on: int | None = None,
    served_context: bool = False,
) -> dict[tuple[str, Windows], TextScores]:
    """All configurations with all windows on the same documents.

    Each document is read exactly once, and stored once for each configuration.

    Args:
        reader: of the model.
        documents: [num_tokens] int64 each, all of one length, at least two tokens longer than the context.
        context: tokens of each document that are the context.
        configurations, windows: what to compare.
        advance: told the tokens that are done.
        errors_on: documents, the first ones, that attention's error is measured on too; None: all.
        served_context: each configuration reads the context its own way (`Reader.prefill`); otherwise all share the exact
            reading.
    Returns:
        (configuration's name, windows) -> scores.
    """
    scores = {(configuration.name, w): TextScores() for configuration in configurations for w in windows}
    for number, tokens in enumerate(documents):
        reading = reader.read(tokens, context)
        continuation = tokens[context:].unsqueeze(0)
        for configuration in configurations:
            room = continuation.shape[1]
            if served_context:
                cache, _ = reader.prefill(tokens[:context], configuration.codecs, room)
            else:
                cache = reader.cache([reading], configuration.codecs, room)
            for w in windows:
                logits = reader.decode(cache, continuation, w)[0]
                measured = errors_on is None or number < errors_on
                errors = reader.attention_error(cache, reading, w) if measured else None
                scores[configuration.name, w].add(reading, logits, errors)
        advance(len(tokens))
    return scores


def read_documents(files: Sequence[str | Path], tokenizer, length: int, count: int) -> list[Tensor]:
    """Documents of exactly this length, evenly spaced over each file, as many of each as can be.

    Args:
        files: UTF-8 text, "FILE" or "FILE:TOKENS" each. A file with a budget gives documents of at most so many tokens in all;
            the others share what is left of the count.
        tokenizer: the model's; its start token, if it adds one, opens every document.
        length: tokens of a document.
        count: documents in all; fewer come back where the files are too short, each part of them used once.
    Returns:
        [length] int64 each.
    Raises:
        OscarError: a file cannot be read, or no document fits.
    """
    start, result = start_tokens(tokenizer), []
    budgets = [(Path(path), tokens) for path, tokens in (split(str(file)) for file in files)]
    shares = _shares([None if tokens is None else tokens // length for _, tokens in budgets], count)
    for (path, _), most in zip(budgets, shares, strict=True):
        check_file(path)
        ids = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        size = length - len(start)
        wanted = min(most, len(ids) // size)
        spare = len(ids) - wanted * size
        starts = [n * size + spare * n // max(1, wanted - 1) for n in range(wanted)]
        result += [torch.tensor(start + ids[at : at + size]) for at in starts]
    if not result:
        names = ", ".join(path.name for path, _ in budgets)
        raise OscarError(f"--text {names}: expected at least {length} tokens in a row, found fewer; give more text")
    return result


def _shares(given: list[int | None], count: int) -> list[int]:
    """Documents of each file: those it was given, and an even share of what the count leaves for each of the others."""
    left, result = count, []
    for number in given:
        result.append(0 if number is None else min(number, left))
        left -= result[-1]
    without = [i for i, number in enumerate(given) if number is None]
    for rank, i in enumerate(without):
        result[i] = left // len(without) + (rank < left % len(without))
    return result


def _mean(documents: list[Tensor]) -> tuple[float, float]:
    """Mean over positions, and 1.96 standard errors of the mean over documents (0 for a single one)."""
    means = torch.stack([d.mean() for d in documents])
    spread = 1.96 * float(means.std()) / len(means) ** 0.5 if len(means) > 1 else 0.0
    return float(torch.cat(documents).mean()), spread
