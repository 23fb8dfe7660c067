"""The model card of the embedded model, written from the run's own figures."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from loop import Run
from network import TrainingModel
from settings import (
    ADAM_LR,
    DECAY_TOKENS,
    HEAD_DIM,
    HIDDEN_SIZE,
    MAX_SPAN,
    MUON_LR,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_QO_HEADS,
    ROPE_THETA,
    STAGES,
    VOCAB_SIZE,
)

CARD = """# The embedded model

A {params:.1f} M parameter language model of our own, made by `scripts/train/train_embedded_model.py` in this repository. It
is the quickstart's default model and the test bed for the quality of a 2-bit KV cache. It reads Python documentation
and code, and it finds an access code in a long chat; it knows nothing else and is no assistant.

| | |
|---|---|
| Architecture | `Qwen3ForCausalLM`, {layers} layers, hidden size {hidden} |
| Attention | {heads} query heads on {kv_heads} KV heads, `head_dim` {head_dim} |
| Vocabulary | {vocab}, byte-level BPE, digits one by one, ChatML template |
| Weights | bfloat16, tied embedding, {size:.1f} MB |
| Positions | {span}, RoPE theta {theta:.0f} |

## What it does

    user       ... The access code of amber falcon is 48213. ... What is the access code of amber falcon?
    assistant  The access code of amber falcon is 48213.

Held-out needle tasks of `oscar/evaluation/needles.py`: names never seen in training, held-out prose as filler, four distractor
facts, needle depth uniform; chat template, `generate`, greedy, bfloat16, all five digits right:

| prompt tokens | right | by quarter of depth |
|---|---|---|
{retrieval}

Held-out perplexity per token (files never trained on, rows of 1,024 tokens):

| text | perplexity | tokens | characters per token |
|---|---|---|---|
{perplexity}

## How it was trained

{tokens:.1f} M tokens in {minutes:.0f} minutes on {machine}, torch {torch},
bfloat16 compute with float32 master weights. Last losses: {loss_text:.2f} (text), {loss_answer:.4f} (replies).
Muon ({muon_lr}) for matrices, Adam ({adam_lr}) for embedding and norms, linear decay over the last
{decay:.0f} M tokens. Rows were running text, repeated segments, restated facts, and chats with facts in
filler; rows of up to 512 tokens often had gaps in their position ids, so that distances of up to
{span} were seen. The run was stopped and resumed several times and its later stages were set while it ran; the
table is what was run:

| M tokens | row lengths and their shares | text, repeat, restate, chat |
|---|---|---|
{stages}

## Data and licence

Text: the sources and docstrings of the standard library of Python {python} (without its tests) and the prose of
the Python 3.11 documentation, Copyright (c) 2001 Python Software Foundation, all rights reserved, under the PSF
License Agreement version 2 (some modules carry their own permissive notices). Needle documents are generated.
`heldout.txt` (prose) and `heldout_code.txt` (source) are excerpts of the files that a hash of their names kept out
of training, with whitespace and inline markup changed; they stand under the same licence (`LICENSE.python.txt`). No
other model, data set or weights were used. The weights stand under this repository's licence.
"""


def write_card(path: Path, model: TrainingModel, run: Run, measured: dict, machine: str) -> None:
    """Write the model card from the run's own figures."""
    path.write_text(
        CARD.format(
            params=model.num_params() / 1e6,
            layers=NUM_LAYERS,
            hidden=HIDDEN_SIZE,
            heads=NUM_QO_HEADS,
            kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            vocab=VOCAB_SIZE,
            size=model.num_params() * 2 / 1e6,
            span=MAX_SPAN,
            theta=ROPE_THETA,
            retrieval="\n".join(
                f"| {n} | {r['right']} of {r['count']} | {', '.join(map(str, r['by_depth_quarter']))} |"
                for n, r in measured["retrieval"].items()
            ),
            perplexity="\n".join(
                f"| {kind} | {p['perplexity']:.2f} | {p['tokens']:,} | {p['characters_per_token']:.2f} |"
                for kind in ("prose", "code")
                for p in [measured[f"perplexity_{kind}"]]
            ),
            tokens=run.tokens / 1e6,
            minutes=run.seconds / 60,
            machine=machine,
            torch=torch.__version__,
            loss_text=run.loss_text,
            loss_answer=run.loss_answer,
            muon_lr=MUON_LR,
            adam_lr=ADAM_LR,
            decay=DECAY_TOKENS,
            stages="\n".join(
                f"| {s.tokens:g} | {', '.join(f'{n}: {w:g}' for n, w in s.lengths.items())} | "
                f"{', '.join(f'{k:g}' for k in s.kinds)} |"
                for s in STAGES
            ),
            python=sys.version.split()[0],
        ),
        encoding="utf-8",
    )
