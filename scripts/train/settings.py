"""Shape and curriculum of the embedded model: every number that a run goes by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

VOCAB_SIZE = 2048
HIDDEN_SIZE = 256
INTERMEDIATE_SIZE = 768
NUM_LAYERS = 4
NUM_QO_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 128
ROPE_THETA = 1e5
RMS_EPS = 1e-6
MAX_SPAN = 8192  # positions seen in training, gaps included; also `max_position_embeddings`

END_OF_TEXT, IM_START, IM_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Qwen's split, digits one by one: a loader that swaps in Qwen's own pre-tokenizer changes nothing.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum.

    Attributes:
        tokens: training tokens of the stage, in millions.
        lengths: row length -> its share of the micro-batches, which all have `MICRO_BATCH_TOKENS` tokens.
        kinds: (text, repeat, restate, chat) shares of the rows.
        micro_batches: micro-batches of `MICRO_BATCH_TOKENS` tokens in one step.
    """

    tokens: float
    lengths: dict[int, float]
    kinds: tuple[float, float, float, float]
    micro_batches: int = 2


MICRO_BATCH_TOKENS = 4096
STAGES = (
    Stage(1.2, {64: 1.0}, (0.10, 0.15, 0.75, 0.00), micro_batches=1),
    Stage(2.0, {64: 0.4, 128: 0.6}, (0.25, 0.10, 0.25, 0.40), micro_batches=1),
    Stage(4.0, {64: 0.1, 128: 0.4, 256: 0.5}, (0.35, 0.05, 0.10, 0.50)),
    Stage(5.0, {128: 0.1, 256: 0.4, 512: 0.35, 1024: 0.15}, (0.50, 0.03, 0.04, 0.43)),
    Stage(6.0, {256: 0.4, 512: 0.35, 1024: 0.15, 2048: 0.1}, (0.50, 0.02, 0.03, 0.45)),
    Stage(6.0, {256: 0.3, 512: 0.3, 1024: 0.2, 2048: 0.15, 4096: 0.05}, (0.50, 0.02, 0.03, 0.45)),
)
DECAY_TOKENS = 8.0  # millions at the end of the run, over which the learning rates fall linearly to zero
WARMUP_STEPS = 40
MUON_LR = 0.02  # hidden matrices
ADAM_LR = 3e-3  # embedding and norms
WEIGHT_DECAY = 0.05
GAP_SHARE = 0.5  # part of the rows of at most 512 tokens that get position gaps
DIGIT_WEIGHT = 4.0  # weight of a code's digit in the answer loss; the other tokens of a reply weigh 1


def schedule() -> Iterator[tuple[int, Stage]]:
    """(tokens before the step, stage) of every step of the run."""
    done = 0
    for stage in STAGES:
        size = stage.micro_batches * MICRO_BATCH_TOKENS
        for _ in range(math.ceil(stage.tokens * 1e6 / size)):
            yield done, stage
            done += size


def total_tokens() -> int:
    """Training tokens of the whole run."""
    return sum(stage.micro_batches * MICRO_BATCH_TOKENS for _, stage in schedule())


def lr_scale(step: int, tokens: int, total: int) -> float:
    """Warm-up, plateau, linear decay to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (total - tokens) / (DECAY_TOKENS * 1e6))
