"""Measuring the exported model as a user would, through transformers."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from loop import Log
from network import TrainingModel

from oscar.evaluation import needles

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
