#!/usr/bin/env python3
"""Train the small language model that ships in `oscar/embedded/`, from text to package data, on a CPU.

    python scripts/train/train_embedded_model.py --docs DOCS --work WORK

reads the running Python's standard library and the Python documentation's reStructuredText sources (`DOCS`; Debian's
package `python3.11-doc` has them under `html/_sources`), trains a byte-level BPE and a Qwen3-shaped model, measures
it on held-out text and held-out needle tasks, and writes config, weights, tokenizer, held-out text and model card.
An interrupted run goes on from its last checkpoint when it is started again with the same `--work`. Run it alone:
two Zen 5 cores trained 15,000 tokens/s (rows of 64 and 256 tokens), and 5,000 to 8,000 beside other jobs.

Retrieval does not come by itself: what is asked decides what is learnt. The curriculum (`STAGES`) starts with
64-token rows that restate facts, then mixes in longer rows and never drops the short ones. Rows of up to 512 tokens
often get gaps in their position ids, so that distances of up to `MAX_SPAN` are seen at the price of a short row.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import re
import shutil
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from oscar.evaluation import needles

Log = Callable[[str], None]

# --- shape ------------------------------------------------------------------------------------------------------------

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

# --- schedule ---------------------------------------------------------------------------------------------------------


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

# --- text -------------------------------------------------------------------------------------------------------------

HELD_OUT_SHARE = 16  # one file in sixteen is never trained on
HELD_OUT_PROSE_BYTES = 300_000
HELD_OUT_CODE_BYTES = 150_000
SKIPPED = re.compile(r"(^|/)(site-packages|tests?|idle_test|__pycache__|encodings|pydoc_data|lib2to3|__phello__)/")


@dataclass
class Corpus:
    """Text by use; a document is one file's prose or one file's source."""

    prose: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    held_out_prose: list[str] = field(default_factory=list)
    held_out_code: list[str] = field(default_factory=list)


def is_prose(paragraph: str) -> bool:
    """True for a paragraph of sentences, as opposed to code, tables and lists."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return (
        len(paragraph) >= 60
        and paragraph[0].isupper()
        and paragraph[-1] in ".!?"
        and letters >= 0.9 * len(paragraph)
        and ">>>" not in paragraph
    )


def plain_text(rst: str) -> str:
    """Take inline reStructuredText markup away: roles, literals, emphasis, links."""
    rst = re.sub(r":[\w:+.-]+:`[!~]?([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", rst)
    rst = re.sub(r"`([^`<]*?)\s*<[^`>]*>`_{1,2}", r"\1", rst)
    rst = re.sub(r"``([^`]*)``", r"\1", rst)
    return re.sub(r"[*`|]{1,2}([^*`|]+)[*`|]{1,2}_?", r"\1", rst)


def paragraphs_of(text: str) -> list[str]:
    """Prose paragraphs of a docstring or a documentation page, each on one line."""
    found = (" ".join(plain_text(part).split()) for part in re.split(r"\n\s*\n", text))
    return [p for p in found if p and is_prose(p)]


def prose_of_source(source: str) -> str:
    """The prose paragraphs of a module's docstrings."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(dict.fromkeys(paragraphs_of(ast.get_docstring(node) or "")))
    return "\n".join(found)


def load_corpus(stdlib: Path, docs: Path) -> Corpus:
    """Read the standard library and the documentation; a hash of a file's name keeps some of them out of training."""
    corpus = Corpus()
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if SKIPPED.search("/" + name):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            prose = prose_of_source(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        held_out = zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0
        (corpus.held_out_code if held_out else corpus.code).append(source)
        (corpus.held_out_prose if held_out else corpus.prose).append(prose)
    for path in sorted(docs.rglob("*.rst.txt")):
        name = path.relative_to(docs).as_posix()
        if name.endswith("changelog.rst.txt"):
            continue
        prose = "\n".join(dict.fromkeys(paragraphs_of(path.read_text(encoding="utf-8"))))
        held_out = zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0
        (corpus.held_out_prose if held_out else corpus.prose).append(prose)
    for documents in vars(corpus).values():
        documents[:] = [d for d in documents if len(d) >= 200]
    if len(corpus.prose) < 200 or len(corpus.code) < 200:
        raise ValueError(
            f"load_corpus: expected hundreds of files, found {len(corpus.prose)} with prose under {docs} and "
            f"{len(corpus.code)} with code under {stdlib}; check --docs and --stdlib"
        )
    random.Random(0).shuffle(corpus.held_out_prose)
    random.Random(0).shuffle(corpus.held_out_code)
    # A paragraph that also stands in a training file is no longer held out.
    trained = set("\n".join(corpus.prose).splitlines())
    prose = "\n\n".join("\n".join(p for p in document.splitlines() if p not in trained) for document in corpus.held_out_prose)
    corpus.held_out_prose = [prose[: prose.rindex("\n", 0, HELD_OUT_PROSE_BYTES)].strip() + "\n"]
    code = "\n\n".join(corpus.held_out_code)
    corpus.held_out_code = [code[: code.rindex("\n", 0, HELD_OUT_CODE_BYTES)].strip() + "\n"]
    return corpus


def render_chat(turns: list[tuple[str, str]]) -> str:
    """What `CHAT_TEMPLATE` makes of these (role, content) turns."""
    return "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in turns)


def train_tokenizer(corpus: Corpus):
    """Train the byte-level BPE on the training text and on some needle documents, so that its names are short."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(1)
    facts = [
        needles.fact(name, needles.draw_code(rng)) + " " + needles.question(name)
        for name in needles.draw_names(rng, 2000, held_out=False)
        for _ in range(4)
    ]
    text = [*corpus.prose, *(source[:20_000] for source in corpus.code), "user\nassistant\n", *facts]
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


# --- rows -------------------------------------------------------------------------------------------------------------


class RowMaker:
    """Makes training rows: token ids, the loss weights of text and of answers, position ids."""

    def __init__(self, corpus: Corpus, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_of_text, self.im_start, self.im_end = (tokenizer.token_to_id(s) for s in SPECIALS)
        self.digits = {tokenizer.token_to_id(d) for d in "0123456789"}
        self.newline = tokenizer.encode("\n").ids[0]
        self.assistant = tokenizer.encode(IM_START + "assistant\n").ids
        vocab = tokenizer.get_vocab()
        self.pauses = {i for token, i in vocab.items() if token[0] in ".Ċ" or token.endswith("Ċ")}
        self.prose = self._stream(corpus.prose)
        self.code = self._stream(corpus.code)
        sentences = [s for document in corpus.prose for p in document.splitlines() for s in needles.split_sentences(p)]
        self.sentences = list(zip(sentences, (len(e.ids) for e in tokenizer.encode_batch(sentences)), strict=True))
        self.words = sorted({w for s in sentences for w in re.findall(r"\b[a-z]{3,9}\b", s)})

    def _stream(self, documents: list[str]) -> Tensor:
        ids: list[int] = []
        for encoding in self.tokenizer.encode_batch(documents):
            ids += [self.end_of_text, *encoding.ids]
        return torch.tensor(ids, dtype=torch.int32)

    def text_ids(self, rng: random.Random, length: int) -> list[int]:
        """A run of running text, three fifths of it code."""
        stream = self.code if rng.random() < 0.6 else self.prose
        start = rng.randrange(len(stream) - length)
        return stream[start : start + length].tolist()

    def names(self, rng: random.Random, count: int) -> list[str]:
        """Different training names: mostly from the shared lists, at times from any words; at times much alike."""
        kind = rng.random()
        if kind < 0.2:  # any words, so that the model copies names instead of knowing them
            draw = lambda: " ".join(rng.sample(self.words, rng.choice((1, 2, 2, 3))))  # noqa: E731
        elif kind < 0.5:  # a few adjectives and nouns: facts that differ in one word
            side = max(3, math.isqrt(2 * count) + 1)
            adjectives, nouns = rng.sample(needles.ADJECTIVES, side), rng.sample(needles.NOUNS, side)
            draw = lambda: f"{rng.choice(adjectives)} {rng.choice(nouns)}"  # noqa: E731
        else:
            return needles.draw_names(rng, count, held_out=False)
        found: dict[str, None] = {}
        for _ in range(20 * count):
            name = draw()
            if not needles.is_eval_name(name):
                found[name] = None
            if len(found) == count:
                return list(found)
        return needles.draw_names(rng, count, held_out=False)

    def make(self, rng: random.Random, kind: str, length: int) -> tuple[list, list, list, list]:
        """One row: ids, text weights and answer weights of `length` + 1 tokens, position ids of `length`."""
        ids, text, answer = getattr(self, "_" + kind)(rng, length + 1)
        if len(ids) <= length:  # fill the row with running text
            rest = [self.end_of_text, *self.text_ids(rng, length - len(ids))][: length + 1 - len(ids)]
            ids, text, answer = ids + rest, text + [1.0] * len(rest), answer + [0.0] * len(rest)
        ids, text, answer = ids[: length + 1], text[: length + 1], answer[: length + 1]
        positions = list(range(length))
        if kind in ("chat", "restate") and length <= 512 and rng.random() < GAP_SHARE:
            places = [i + 1 for i in range(length - 1) if ids[i] in self.pauses]
            if places:
                budget = int(MAX_SPAN ** rng.uniform(0.5, 1.0)) - length
                chosen = sorted(rng.choices(places, k=rng.randint(1, 4)))
                sizes = [rng.random() for _ in chosen]
                for place, size in zip(chosen, sizes, strict=True):
                    gap = max(0, int(budget * size / sum(sizes)))
                    positions[place:] = [p + gap for p in positions[place:]]
        return ids, text, answer, positions

    def _text(self, rng: random.Random, length: int):
        return self.text_ids(rng, length), [1.0] * length, [0.0] * length

    def _repeat(self, rng: random.Random, length: int):
        """A segment said again and again; only the repeats count."""
        size = rng.randint(max(8, length // 8), length // 2)
        if rng.random() < 0.5:
            segment = [rng.randrange(3, VOCAB_SIZE) for _ in range(size)]
        else:
            segment = self.text_ids(rng, size)
        ids = (segment * (length // size + 1))[:length]
        return ids, [0.0] * length, [0.0] * size + [1.0] * (length - size)

    def _restate(self, rng: random.Random, length: int):
        """Facts, then the same facts in another order; only what follows can be known counts fully."""
        count = max(1, length // 30)
        facts = [needles.fact(name, needles.draw_code(rng)) for name in self.names(rng, count)]
        again = rng.sample(facts, count)
        ids = self.tokenizer.encode(" ".join(facts + again)).ids
        answer, digits = [0.0] * len(ids), 0
        for i, token in enumerate(ids):
            if token in self.digits:
                digits += 1
                if digits > needles.CODE_DIGITS * count:
                    answer[i] = DIGIT_WEIGHT
        return ids, [0.02] * len(ids), answer

    def _chat(self, rng: random.Random, length: int):
        """A document with facts in filler, then questions; at times the document goes on between the questions."""
        num_questions = 1 + int(rng.random() * max(1, min(length // 80, 16)))
        budget = max(0, length - 6 - 36 * num_questions)
        most = max(1, min(budget // 15, 24))
        num_facts = round(math.exp(rng.uniform(0.0, math.log(most + 0.49))))
        codes = {name: needles.draw_code(rng) for name in self.names(rng, num_facts)}
        budget -= 15 * num_facts
        items: list[tuple[str, str | None]] = []
        start = rng.randrange(len(self.sentences))
        while True:
            sentence, size = self.sentences[(start + len(items)) % len(self.sentences)]
            budget -= size + 1
            if budget < 0:
                break
            items.append((sentence, None))
        places = sorted(((rng.randint(0, len(items)), name) for name in codes), reverse=True)
        for place, name in places:
            items.insert(place, (needles.fact(name, codes[name]), name))
        first = next(i for i, (_, name) in enumerate(items) if name) + 1
        if rng.random() < 0.5:
            cuts = [len(items)] * num_questions
        else:
            cuts = sorted(rng.randint(first, len(items)) for _ in range(num_questions))
        turns: list[tuple[str, str]] = []
        unasked: list[str] = []
        done = 0
        for cut in cuts:
            unasked += [name for _, name in items[done:cut] if name]
            name = unasked.pop(rng.randrange(len(unasked))) if unasked else rng.choice(list(codes))
            if name not in {n for _, n in items[:cut]}:
                continue
            part = " ".join(text for text, _ in items[done:cut])
            turns.append(("user", (part + "\n\n" if part else "") + needles.question(name)))
            turns.append(("assistant", needles.fact(name, codes[name])))
            done = cut
        ids = self.tokenizer.encode(render_chat(turns)).ids
        text, answer = [0.3] * len(ids), [0.0] * len(ids)
        in_reply = False
        for i, token in enumerate(ids):
            if in_reply:
                text[i], answer[i] = 0.0, DIGIT_WEIGHT if token in self.digits else 1.0
                in_reply = token != self.im_end
            elif token == self.newline and ids[i + 1 - len(self.assistant) : i + 1] == self.assistant:
                in_reply = True
        return ids, text, answer

    def micro_batch(self, rng: random.Random, stage: Stage) -> tuple[int, dict[str, Tensor]]:
        """Rows of one length: flat ids, targets, weights and position ids of `MICRO_BATCH_TOKENS` tokens."""
        length = rng.choices(list(stage.lengths), list(stage.lengths.values()))[0]
        kinds = rng.choices(("text", "repeat", "restate", "chat"), stage.kinds, k=MICRO_BATCH_TOKENS // length)
        rows = [self.make(rng, kind, length) for kind in kinds]
        return length, {
            "ids": torch.tensor([t for row in rows for t in row[0][:-1]]),
            "targets": torch.tensor([t for row in rows for t in row[0][1:]]),
            "text": torch.tensor([w for row in rows for w in row[1][1:]]),
            "answer": torch.tensor([w for row in rows for w in row[2][1:]]),
            "positions": torch.tensor([p for row in rows for p in row[3]]),
        }


# --- model ------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm over the last axis, in float32 inside."""
    scaled = x.float()
    scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + RMS_EPS)
    return weight * scaled.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [num_tokens, num_heads, head_dim], halves paired; cos and sin are [num_tokens, head_dim / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def before_attention(x, norm, q_w, k_w, v_w, q_norm, k_norm, cos, sin):
    """Norm, projections, QK-norm and RoPE of all tokens, [num_tokens, hidden] -> q, k, v [num_tokens, heads, 128]."""
    h = rms_norm(x, norm)
    q = rotate(rms_norm(F.linear(h, q_w).view(-1, NUM_QO_HEADS, HEAD_DIM), q_norm), cos, sin)
    k = rotate(rms_norm(F.linear(h, k_w).view(-1, NUM_KV_HEADS, HEAD_DIM), k_norm), cos, sin)
    return q, k, F.linear(h, v_w).view(-1, NUM_KV_HEADS, HEAD_DIM)


def after_attention(x, attended, o_w, norm, gate_w, up_w, down_w):
    """Output projection and MLP, with their residuals."""
    x = x + F.linear(attended, o_w)
    h = rms_norm(x, norm)
    return x + F.linear(F.silu(F.linear(h, gate_w)) * F.linear(h, up_w), down_w)


def attend_written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Causal attention as two batched products; twice as fast as SDPA's CPU kernel for rows of at most 512 tokens."""
    length = mask.shape[0]
    group = NUM_QO_HEADS // NUM_KV_HEADS
    num_rows = q.shape[0] // length
    q = q.view(num_rows, length, NUM_KV_HEADS, group, HEAD_DIM).permute(0, 2, 3, 1, 4)
    q = q.reshape(-1, group * length, HEAD_DIM)
    k = k.view(num_rows, length, NUM_KV_HEADS, HEAD_DIM).permute(0, 2, 3, 1).reshape(-1, HEAD_DIM, length)
    v = v.view(num_rows, length, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2).reshape(-1, length, HEAD_DIM)
    scores = torch.bmm(q, k).view(-1, group, length, length).float() * HEAD_DIM**-0.5 + mask
    weights = scores.softmax(-1).to(v.dtype).view(-1, group * length, length)
    out = torch.bmm(weights, v).view(num_rows, NUM_KV_HEADS, group, length, HEAD_DIM)
    return out.permute(0, 3, 1, 2, 4).reshape(-1, NUM_QO_HEADS * HEAD_DIM)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Causal attention through SDPA, for the longer rows."""
    q, k, v = (t.view(-1, length, t.shape[1], HEAD_DIM).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(-1, NUM_QO_HEADS * HEAD_DIM)


def token_losses(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each token, [num_tokens] float32, through the tied head."""
    return F.cross_entropy(F.linear(rms_norm(x, norm), embedding).float(), targets, reduction="none")


class TrainingModel:
    """The Qwen3 maths over flat tokens: float32 master weights, a bfloat16 copy that computes, HF's parameter names."""

    LAYER_NAMES = (
        "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.q_norm self_attn.k_norm "
        "self_attn.o_proj post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj"
    ).split()

    def __init__(self, seed: int, compiled: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        q_size, kv_size = NUM_QO_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
        shapes = {
            "self_attn.q_proj": (q_size, HIDDEN_SIZE),
            "self_attn.k_proj": (kv_size, HIDDEN_SIZE),
            "self_attn.v_proj": (kv_size, HIDDEN_SIZE),
            "self_attn.o_proj": (HIDDEN_SIZE, q_size),
            "mlp.gate_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            "mlp.up_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            "mlp.down_proj": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
        self.master: dict[str, Tensor] = {
            "model.embed_tokens.weight": torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) * 0.02
        }
        for layer in range(NUM_LAYERS):
            for name in self.LAYER_NAMES:
                if name in shapes:
                    std = 0.02 / math.sqrt(2 * NUM_LAYERS) if name.endswith(("o_proj", "down_proj")) else 0.02
                    weight = torch.randn(shapes[name], generator=generator) * std
                else:
                    weight = torch.ones(HEAD_DIM if name.endswith(("q_norm", "k_norm")) else HIDDEN_SIZE)
                self.master[f"model.layers.{layer}.{name}.weight"] = weight
        self.master["model.norm.weight"] = torch.ones(HIDDEN_SIZE)
        self.weights = {name: w.bfloat16().requires_grad_() for name, w in self.master.items()}
        inverse = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angles = torch.arange(MAX_SPAN).float()[:, None] * inverse
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.masks: dict[int, Tensor] = {}
        self.eager = (before_attention, attend_written_out, after_attention, token_losses)
        self.parts = tuple(torch.compile(part, dynamic=False) for part in self.eager) if compiled else self.eager

    def num_params(self) -> int:
        """Parameters, the tied head counted once."""
        return sum(w.numel() for w in self.master.values())

    def copy_master(self) -> None:
        """Round the master weights into the computing copy."""
        with torch.no_grad():
            for name, weight in self.master.items():
                self.weights[name].copy_(weight)

    def losses(self, ids: Tensor, targets: Tensor, positions: Tensor, length: int, *, eager: bool = False) -> Tensor:
        """Cross-entropy of every token, [num_tokens] float32; rows of `length` tokens lie one after the other."""
        before, written_out, after, head = self.eager if eager else self.parts
        hidden = self._hidden(ids, positions, length, before, written_out, after)
        return head(hidden, self.weights["model.norm.weight"], self.weights["model.embed_tokens.weight"], targets)

    def logits(self, ids: Tensor, length: int) -> Tensor:
        """Logits of every token, eagerly, [num_tokens, vocab] bfloat16."""
        positions = torch.arange(length).repeat(len(ids) // length)
        hidden = self._hidden(ids, positions, length, *self.eager[:3])
        return F.linear(rms_norm(hidden, self.weights["model.norm.weight"]), self.weights["model.embed_tokens.weight"])

    def _hidden(self, ids: Tensor, positions: Tensor, length: int, before, written_out, after) -> Tensor:
        if length not in self.masks:
            above = torch.full((length, length), float("-inf")).triu(1) if length <= 512 else torch.empty(0)
            self.masks[length] = above  # SDPA needs none
        cos, sin = self.cos[positions], self.sin[positions]
        x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        for layer in range(NUM_LAYERS):
            w = [self.weights[f"model.layers.{layer}.{name}.weight"] for name in self.LAYER_NAMES]
            q, k, v = before(x, *w[:6], cos, sin)
            attended = written_out(q, k, v, self.masks[length]) if length <= 512 else attend_sdpa(q, k, v, length)
            x = after(x, attended, *w[6:])
        return x


class Optimizer:
    """Muon for the hidden matrices, Adam (0.9, 0.95) for the embedding and the norms.

    Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (the quintic
    Newton-Schulz iteration and its coefficients).
    """

    def __init__(self, model: TrainingModel) -> None:
        self.model = model
        self.matrices: dict[tuple[int, ...], list[str]] = {}
        self.others: list[str] = []
        for name, weight in model.master.items():
            if weight.dim() == 2 and "embed" not in name:
                self.matrices.setdefault(tuple(weight.shape), []).append(name)
            else:
                self.others.append(name)
        self.state = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in model.master.items()}
        self.steps = 0

    @staticmethod
    def orthogonalize(x: Tensor) -> Tensor:
        """Push all singular values of [batch, rows, columns] matrices towards one."""
        transposed = x.shape[1] > x.shape[2]
        x = (x.mT if transposed else x).bfloat16()
        x = x / (x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype) + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return (x.mT if transposed else x).float()

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update the master weights from the copies' gradients; `scale` multiplies both learning rates."""
        self.steps += 1
        grads = {name: w.grad.float() for name, w in self.model.weights.items()}
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        clip = min(1.0, 1.0 / (float(norm) + 1e-6))
        for shape, names in self.matrices.items():
            updates = []
            for name in names:
                momentum = self.state[name][0].mul_(0.95).add_(grads[name], alpha=0.05)
                updates.append(grads[name].mul(0.05).add_(momentum, alpha=0.95))
            lr = MUON_LR * scale * max(1.0, shape[0] / shape[1]) ** 0.5
            for name, update in zip(names, self.orthogonalize(torch.stack(updates)), strict=True):
                self.model.master[name].mul_(1 - MUON_LR * scale * WEIGHT_DECAY).add_(update, alpha=-lr)
        for name in self.others:
            first, second = self.state[name]
            grad = grads[name].mul_(clip)
            first.lerp_(grad, 0.1)
            second.lerp_(grad.square(), 0.05)
            update = first / (1 - 0.9**self.steps) / ((second / (1 - 0.95**self.steps)).sqrt() + 1e-8)
            self.model.master[name].add_(update, alpha=-ADAM_LR * scale)
        for weight in self.model.weights.values():
            weight.grad = None
        self.model.copy_master()


# --- training ---------------------------------------------------------------------------------------------------------


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


class Watch:
    """Quick held-out figures while training: exact replies by length, perplexity of prose and code."""

    def __init__(self, model: TrainingModel, tokenizer, chat_tokenizer, corpus: Corpus) -> None:
        self.model, self.tokenizer, self.chat_tokenizer = model, tokenizer, chat_tokenizer
        self.streams = {
            "prose": tokenizer.encode(corpus.held_out_prose[0]).ids,
            "code": tokenizer.encode(corpus.held_out_code[0]).ids,
        }
        self.tasks: dict[int, list[needles.Needle]] = {}

    @torch.no_grad()
    def retrieval(self, num_tokens: int, count: int) -> float:
        """Share of held-out tasks whose whole reply is the greedy choice (one forward pass a batch, no generation)."""
        tasks = self.tasks.setdefault(
            num_tokens,
            [needles.make_needle(self.chat_tokenizer, num_tokens, seed=10_000 + i) for i in range(count)],
        )
        right, length = 0, num_tokens + 32
        batch = max(1, 4096 // length)
        for at in range(0, count, batch):
            rows, replies = [], []
            for task in tasks[at : at + batch]:
                prompt = self.tokenizer.encode(task.prompt).ids
                reply = self.tokenizer.encode(task.reply + IM_END).ids
                rows += prompt + reply + [0] * (length - len(prompt) - len(reply))
                replies.append((len(prompt), reply))
            best = self.model.logits(torch.tensor(rows), length).argmax(-1).view(-1, length)
            right += sum(best[i, n - 1 : n - 1 + len(r)].tolist() == r for i, (n, r) in enumerate(replies))
        return right / count

    @torch.no_grad()
    def perplexity(self, kind: str, num_rows: int, length: int = 512) -> float:
        """Perplexity per token over rows from the start of the held-out text."""
        total = 0.0
        for row in range(num_rows):
            ids = torch.tensor(self.streams[kind][row * length : (row + 1) * length + 1])
            total += float(self.model.losses(ids[:-1], ids[1:], torch.arange(length), length, eager=True).mean())
        return math.exp(total / num_rows)


@dataclass(frozen=True)
class Run:
    """How far a run has come; the losses are running means."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_text: float = 0.0
    loss_answer: float = 0.0


def save_checkpoint(path: Path, model: TrainingModel, optimizer: Optimizer, run: Run) -> None:
    """Write everything that a resumed run needs; the rows of a step follow from the seed and the step."""
    state = {"master": model.master, "state": optimizer.state, "run": asdict(run)}
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load_checkpoint(path: Path, model: TrainingModel, optimizer: Optimizer) -> Run:
    """Restore a checkpoint in place."""
    saved = torch.load(path)
    for name, weight in saved["master"].items():
        model.master[name].copy_(weight)
        optimizer.state[name] = saved["state"][name]
    run = Run(**saved["run"])
    optimizer.steps = run.steps
    model.copy_master()
    return run


def train(args: argparse.Namespace, model: TrainingModel, rows: RowMaker, watch: Watch, log: Log) -> Run:
    """Run the curriculum from the last checkpoint on."""
    optimizer = Optimizer(model)
    checkpoint = args.work / "checkpoint.pt"
    run = load_checkpoint(checkpoint, model, optimizer) if checkpoint.exists() else Run()
    done, total, started = run.steps, total_tokens(), time.time() - run.seconds
    log(f"{model.num_params():,} parameters, {total:,} tokens, from step {done}")
    seen = {"text": run.loss_text, "answer": run.loss_answer, "digit": 0.0}
    recent = time.time()
    for step, (tokens, stage) in enumerate(schedule()):
        if step < done:
            continue
        sums, num_digits = dict.fromkeys(seen, 0.0), 1
        generators = [random.Random(f"{args.seed} {step} {i}") for i in range(stage.micro_batches)]
        batches = [rows.micro_batch(generator, stage) for generator in generators]
        weights = {k: max(1.0, sum(float(batch[k].sum()) for _, batch in batches)) for k in ("text", "answer")}
        for length, batch in batches:
            losses = model.losses(batch["ids"], batch["targets"], batch["positions"], length)
            parts = {k: (losses * batch[k]).sum() / weights[k] for k in ("text", "answer")}
            (parts["text"] + parts["answer"]).backward()
            for kind, part in parts.items():
                sums[kind] += float(part.detach())
            digits = batch["answer"] == DIGIT_WEIGHT
            sums["digit"] += float(losses.detach()[digits].sum())
            num_digits += int(digits.sum())
        sums["digit"] /= num_digits
        optimizer.step(lr_scale(step, tokens, total))
        for kind in seen:
            seen[kind] += (sums[kind] - seen[kind]) * (0.05 if step > 20 else 0.5)
        size = stage.micro_batches * MICRO_BATCH_TOKENS
        run = Run(step + 1, tokens + size, time.time() - started, seen["text"], seen["answer"])
        if (step + 1) % 25 == 0:
            rate = 25 * size / (time.time() - recent)
            log(
                f"step {step + 1} tokens {run.tokens / 1e6:.2f}M/{total / 1e6:.0f}M text {seen['text']:.3f} answer "
                f"{seen['answer']:.4f} digit {seen['digit']:.4f} {rate:.0f} tok/s {run.seconds:.0f} s"
            )
            recent = time.time()
        if (step + 1) % args.watch_steps == 0 or run.tokens == total:
            save_checkpoint(checkpoint, model, optimizer, run)
            longest = max(stage.lengths)
            lengths = [n for n in (256, 512, 1024, 2048, 4096) if n <= max(256, 4 * longest)]
            exact = " ".join(f"{n}:{watch.retrieval(n, 32 if n <= 2048 else 8):.2f}" for n in lengths)
            prose, code = watch.perplexity("prose", 16), watch.perplexity("code", 16)
            log(f"  exact {exact} | perplexity prose {prose:.1f} code {code:.1f}")
            recent = time.time()
    return run


# --- export -----------------------------------------------------------------------------------------------------------


def wrap_tokenizer(tokenizer):
    """The tokenizer as transformers knows it, with the chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_SPAN,
    )


def edit_json(path: Path, **changes) -> None:
    """Set keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export(model: TrainingModel, tokenizer, corpus: Corpus, licence: Path, folder: Path) -> None:
    """Write the package data but for the card; `folder` is new."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config

    folder.mkdir(parents=True)
    end_of_text, _, im_end = (tokenizer.token_to_id(s) for s in SPECIALS)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_QO_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_SPAN,
        rms_norm_eps=RMS_EPS,
        rope_theta=ROPE_THETA,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=end_of_text,  # starts every document in training, as Qwen3 names it
        eos_token_id=im_end,
        pad_token_id=end_of_text,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    edit_json(folder / "config.json", rope_theta=ROPE_THETA)  # for readers that do not know `rope_parameters`
    generation = GenerationConfig(do_sample=False, eos_token_id=[im_end, end_of_text], pad_token_id=end_of_text)
    generation.save_pretrained(folder)
    wrap_tokenizer(tokenizer).save_pretrained(folder)
    # The class name that transformers 4 and 5 both know.
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    weights = {name: w.detach().clone().contiguous() for name, w in model.weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "heldout.txt").write_text(corpus.held_out_prose[0], encoding="utf-8")
    (folder / "heldout_code.txt").write_text(corpus.held_out_code[0], encoding="utf-8")
    shutil.copyfile(licence, folder / "LICENSE.python.txt")


def publish(source: Path, target: Path) -> None:
    """Move finished files into place one by one, each by a rename, so that a reader never sees half a file."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        part = target / f".{path.name}.part"
        shutil.copyfile(path, part)
        part.replace(target / path.name)


# --- evaluation through transformers ----------------------------------------------------------------------------------

EVAL_COUNTS = {256: 100, 512: 100, 1024: 100, 2048: 100, 4096: 50, 8000: 16}  # prompt tokens -> number of tasks


@torch.no_grad()
def evaluate(folder: Path, model: TrainingModel, log: Log) -> dict:
    """Measure the exported folder as a user would: `AutoModelForCausalLM`, `generate`, greedy, bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor(tokenizer(needles.make_needle(tokenizer, 512).prompt)["input_ids"])
    ours, theirs = model.logits(ids, len(ids)).float(), exported(ids[None]).logits[0].float()
    difference = float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
    log(f"  our logits against transformers', relative RMS difference {difference:.4f}")
    result: dict = {"logit_rms_difference": difference, "retrieval": {}}
    for num_tokens, count in EVAL_COUNTS.items():
        right, by_depth = 0, [0] * 4
        for i in range(count):
            task = needles.make_needle(tokenizer, num_tokens, depth=(i + 0.5) / count, seed=20_000 + i)
            prompt = torch.tensor([tokenizer(task.prompt)["input_ids"]])
            out = exported.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32)
            hit = task.is_right(tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True))
            right += hit
            by_depth[i * 4 // count] += hit
        result["retrieval"][num_tokens] = {"right": right, "count": count, "by_depth_quarter": by_depth}
        log(f"  {num_tokens} tokens: {right}/{count} exact, by depth quarter {by_depth}")
    for kind, name in (("prose", "heldout.txt"), ("code", "heldout_code.txt")):
        text = (folder / name).read_text(encoding="utf-8")
        ids = torch.tensor(tokenizer(text)["input_ids"])
        rows = ids[: len(ids) // 1024 * 1024].view(-1, 1024)
        total = sum(float(exported(row[None], labels=row[None]).loss) for row in rows) / len(rows)
        result[f"perplexity_{kind}"] = {
            "perplexity": math.exp(total),
            "tokens": rows.numel(),
            "characters_per_token": len(text) / len(ids),
        }
        log(f"  {kind}: perplexity {math.exp(total):.2f} over {rows.numel()} tokens")
    return result


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--docs", type=Path, required=True, help="folder with the documentation's .rst.txt files")
    stdlib = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--stdlib", type=Path, default=stdlib, help="default: this Python's standard library")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint, tokenizer and log")
    parser.add_argument("--out", type=Path, default=root / "oscar" / "embedded", help="default: oscar/embedded")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile; half the speed")
    parser.add_argument("--watch-steps", type=int, default=400, help="steps from figures to figures; default: 400")
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores", help="how the card names this machine")
    parser.add_argument("--export-only", action="store_true", help="export and measure the last checkpoint as it is")
    args = parser.parse_args()

    from tokenizers import Tokenizer

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)

    def log(line: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {line}"
        print(line, flush=True)
        with open(args.work / "log.txt", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    corpus = load_corpus(args.stdlib, args.docs)
    log(", ".join(f"{name} {sum(map(len, d)) / 1e6:.2f} MB in {len(d)} documents" for name, d in vars(corpus).items()))
    args.out.mkdir(parents=True, exist_ok=True)
    needles.FILLER_FILE = args.work / "heldout.txt"  # the held-out text that goes with this run
    needles.FILLER_FILE.write_text(corpus.held_out_prose[0], encoding="utf-8")
    saved_tokenizer = args.work / "tokenizer.json"
    if not saved_tokenizer.exists():
        train_tokenizer(corpus).save(str(saved_tokenizer))
    tokenizer = Tokenizer.from_file(str(saved_tokenizer))
    model = TrainingModel(args.seed, compiled=not args.no_compile)
    if args.export_only:
        run = load_checkpoint(args.work / "checkpoint.pt", model, Optimizer(model))
    else:
        rows = RowMaker(corpus, tokenizer)
        log(f"prose {len(rows.prose):,} tokens, code {len(rows.code):,}, {len(rows.sentences):,} filler sentences")
        run = train(args, model, rows, Watch(model, tokenizer, wrap_tokenizer(tokenizer), corpus), log)
    staging = args.work / "export"
    shutil.rmtree(staging, ignore_errors=True)
    export(model, tokenizer, corpus, args.stdlib / "LICENSE.txt", staging)
    measured = evaluate(staging, model, log)
    (args.work / "measured.json").write_text(json.dumps(measured, indent=1))
    write_card(staging / "MODEL_CARD.md", model, run, measured, args.machine)
    publish(staging, args.out)
    sizes = ", ".join(f"{p.name} {p.stat().st_size / 1e6:.2f} MB" for p in sorted(args.out.iterdir()))
    log(f"wrote {args.out}: {sizes}")


if __name__ == "__main__":
    main()
