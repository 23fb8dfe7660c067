"""Training the embedded model from its last checkpoint on, with quick held-out figures on the way."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from corpus import Corpus
from network import TrainingModel
from optimizer import Optimizer
from rows import RowMaker
from settings import DIGIT_WEIGHT, IM_END, MICRO_BATCH_TOKENS, lr_scale, schedule, total_tokens

from oscar.evaluation import needles

Log = Callable[[str], None]


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
