"""Greedy decoding through the reader."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from oscar.evaluation.reader import DocumentCache, Reader, Windows


def generate(
    reader: Reader,
    first: Tensor,
    cache: DocumentCache,
    windows: Windows,
    stop: Collection[int],
    max_new_tokens: int,
    guess: Sequence[int] = (),
) -> list[int]:
    """The greedy answer to a prompt.

    A guess at the answer only saves time: its tokens are run together, and kept as far as each is what greedy decoding would
    have chosen. Positions that guesses wrote are written again before anything reads them.

    Args:
        reader: of the model.
        first: [vocab_size], logits after the prompt: `Reading.logits[-1]`, or those that `Reader.prefill` returned.
        cache: the prompt stored, with room for max_new_tokens; its lengths are as before on return.
        windows: (sink_tokens, recent_tokens).
        stop: tokens that end the answer.
        max_new_tokens: longest answer, in tokens.
        guess: tokens that the answer may consist of; after a wrong one, the rest is tried again in its place.
    Returns:
        The new tokens, the one that ended the answer included.
    """
    start, tried = cache.lens[0], len(guess)
    answer = [int(first.argmax())]
    while answer[-1] not in stop and len(answer) < max_new_tokens:
        fed = [answer[-1], *guess[len(answer) : min(len(answer) + tried, max_new_tokens - 1)]]
        cache.lens = [start + len(answer) - 1]
        best = reader.decode(cache, torch.tensor([fed]), windows)[0].argmax(-1).tolist()
        for i, token in enumerate(best):
            answer.append(token)
            if token in stop or fed[i + 1 : i + 2] != [token]:
                break
        # Of a guess that went wrong, less is run at once, so that a useless one costs little more than none.
        tried = min(2 * tried, len(guess)) if i + 1 == len(best) else min(max(i, 1), tried)
    cache.lens = [start]
    return answer
