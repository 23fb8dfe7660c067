"""Every method on a real model, on prose, code and chat, over contexts and windows: the tables of docs/quality.md.

    python scripts/real_model.py smollm2
    python scripts/bench/quality_table.py [--contexts 1024 2048] [--scale 1]

Compute and weights are float32, in one process of as many threads as --threads says. Methods are calibrated on the same text,
Python's help topics and sources of its standard library. Each document is read exactly once and shared by all methods and
windows. Evaluation text: held-out prose and code of this repository, which shares no file with the calibration text, and
chats that the model writes itself (in 16 bits, from questions of this script).

The page and the figures (docs/quality.json) are written after every context, so that a run that is broken off leaves what it
has; contexts that a run does not measure keep their tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pydoc_data.topics
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import setups
import torch
from transformers import AutoConfig, AutoTokenizer

from oscar import config
from oscar.calibration.calibrate import collect
from oscar.calibration.load_model import load_model
from oscar.calibration.options import CalibrationOptions
from oscar.embedded import embedded_model
from oscar.evaluation import configurations as making
from oscar.evaluation.reader import Reader
from oscar.evaluation.run import HELD_OUT
from oscar.evaluation.text_scores import TextScores, read_documents, score_text
from oscar.format.identity import ModelIdentity
from oscar.progress import Steps

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "quality"
METHODS = ("bf16", "int2", "hadamard", "oscar", config.DEFAULT_METHOD)
WINDOWS = ((0, 0), (4, 16), (64, 256))
CONTINUATION = 128
SIZES = {
    1024: {"prose": 2, "code": 2, "chat": 2},
    2048: {"prose": 2, "code": 2, "chat": 1},
    4096: {"prose": 1, "code": 1},
    8064: {"prose": 1, "code": 1},
}
"""context -> documents of each kind of text at --scale 1; context and continuation are what the model reaches, 8,192."""
MODULES = (
    "argparse",
    "ast",
    "asyncio/base_events",
    "decimal",
    "difflib",
    "email/message",
    "heapq",
    "http/client",
    "statistics",
)
"""Sources of the standard library for calibration, as far as no line of them is in the held-out code."""
QUESTIONS = (
    "How do I bake bread at home?",
    "Explain what a black hole is.",
    "Write a short poem about the sea.",
    "What is the difference between a virus and a bacterium?",
    "Give me tips for learning to play the guitar.",
    "Write a Python function that reverses a string, and explain it.",
    "Why did the Roman Empire fall?",
    "How does a refrigerator work?",
    "Plan a weekend in Lisbon.",
    "What should I know before I adopt a cat?",
    "Explain recursion to a child.",
    "How do plants drink water?",
    "Write an email to my landlord about a broken heater.",
    "What is inflation, and why does it matter?",
    "Describe a sunrise in the mountains.",
    "How can I sleep better?",
)
"""What the model is asked for the chats."""
BEGIN, END = "<!-- table: begin, written by scripts/bench/quality_table.py -->", "<!-- table: end -->"


def calibration_text() -> tuple[str, str]:
    """Two files in WORK, written if they are not there: help topics and sources, neither with lines of the held-out text."""
    WORK.mkdir(parents=True, exist_ok=True)
    held_out = {
        line.strip() for name in HELD_OUT for line in (embedded_model() / name).read_text(encoding="utf-8").splitlines()
    }
    library = Path(sysconfig.get_path("stdlib"))
    texts = {
        "topics.txt": list(pydoc_data.topics.topics.values()),
        "sources.txt": [(library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES],
    }
    for name, parts in texts.items():
        parts = [part for part in parts if not any(len(line) > 60 and line.strip() in held_out for line in part.splitlines())]
        (WORK / name).write_text("\n\n".join(parts), encoding="utf-8")
    return str(WORK / "topics.txt"), str(WORK / "sources.txt")


def chat_tokens(folder: Path, model, tokenizer) -> torch.Tensor:
    """Chats one after the other, [num_tokens] int64: QUESTIONS and sampled answers, the same for the same model."""
    file = WORK / f"{folder.name}-chat.json"
    if not file.is_file():
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        asked = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        batch = tokenizer(asked, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        torch.manual_seed(config.DEFAULT_SEED)
        answered = model.generate(**batch, max_new_tokens=160, do_sample=True, temperature=1.0, top_k=0)
        starts = batch["attention_mask"].argmax(1).tolist()
        texts = [tokenizer.decode(row[start:]) for row, start in zip(answered, starts, strict=True)]
        end = tokenizer.eos_token
        file.write_text(json.dumps([text.rstrip(end).rstrip() + f"{end}\n" for text in texts], indent=1), encoding="utf-8")
    text = "".join(json.loads(file.read_text(encoding="utf-8")))
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def documents(kind: str, tokenizer, chat: torch.Tensor, tokens: int, most: int) -> list[torch.Tensor]:
    """At most so many documents of this kind, [tokens] int64 each."""
    if kind == "chat":
        return list(chat[: len(chat) // tokens * tokens].split(tokens))[:most]
    file = embedded_model() / HELD_OUT[("prose", "code").index(kind)]
    return read_documents([file], tokenizer, tokens, most)


def together(scores: list[TextScores]) -> TextScores:
    """The scores of several kinds of text as one."""
    result = TextScores()
    for one in scores:
        for name in ("kl", "agrees", "loss", "exact_loss"):
            getattr(result, name).extend(getattr(one, name))
    return result


def measure(reader: Reader, made: list, identity, context: int, chosen: dict[str, list]) -> list[dict]:
    """One row for each method and windows; 16 bits need no windows."""
    bf16, others = [made[0]], made[1:]
    by_kind: dict[str, dict] = {}
    for kind, tokens in chosen.items():
        by_kind[kind] = score_text(reader, tokens, context, bf16, WINDOWS[:1], errors_on=0)
        by_kind[kind] |= score_text(reader, tokens, context, others, WINDOWS, errors_on=0)
    rows = []
    for one in made:
        for w in WINDOWS[:1] if one is made[0] else WINDOWS:
            parts = {kind: scores[one.name, w] for kind, scores in by_kind.items()}
            rows.append(
                {"method": one.name, "windows": list(w), "bits_per_element": one.bits_per_element(identity, context, w)}
                | figures(together(list(parts.values())))
                | {"kinds": {kind: figures(part) for kind, part in parts.items()}}
            )
    return rows


def figures(scores: TextScores) -> dict:
    """The figures of a row; what belongs to layers and parts of the continuation is left out."""
    kept = ("perplexity", "perplexity_ratio", "perplexity_ratio_ci", "kl_mean", "kl_ci", "kl_by_document", "top1_agreement")
    found = scores.summary()
    return {name: found[name] for name in (*kept, "positions")}


def tables(record: dict) -> str:
    """The tables as Markdown, one a context."""
    lines = []
    for context, entry in sorted(record["contexts"].items(), key=lambda item: int(item[0])):
        kinds = entry["documents"]
        counts = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
        lines += [f"### Context {int(context):,}: {counts}; {entry['seconds']:.0f} CPU seconds", ""]
        names = ["method", "windows", "bits", "KL", "top-1", "perplexity over 16 bits", *(f"KL, {kind}" for kind in kinds)]
        lines += ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        for row in entry["rows"]:
            low, high = row["perplexity_ratio_ci"]
            cells = [
                f"`{row['method']}`",
                "none" if row["windows"] == [0, 0] else "{}, {}".format(*row["windows"]),
                f"{row['bits_per_element']:.2f}",
                f"{row['kl_mean']:.2g} ± {(row['kl_ci'][1] - row['kl_ci'][0]) / 2:.1g}",
                f"{row['top1_agreement']:.1%}",
                f"{row['perplexity_ratio']:.3f} ({low:.3f} to {high:.3f})",
                *(f"{row['kinds'][kind]['kl_mean']:.2g}" for kind in kinds),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "build" / "models" / "smollm2"
    parser.add_argument("--model", type=Path, default=default, metavar="DIR", help="folder (default: build/models/smollm2)")
    parser.add_argument("--contexts", nargs="+", type=int, default=list(SIZES), help="contexts in tokens (default: all)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help=f"bf16 first (default: {' '.join(METHODS)})")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on documents (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="calibration tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads (default: one a core)")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "docs" / "quality.json", help="file for the figures (default: docs/quality.json)"
    )
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "quality.md", help="page the tables go into (default: docs/quality.md)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder, began = arguments.model, time.process_time()
    model_config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model, identity = load_model(folder, model_config, "float32", "cpu"), ModelIdentity.from_path(folder)
    options = CalibrationOptions(
        folder, text=calibration_text(), tokens=arguments.tokens, method=arguments.methods[-1], dtype="float32", device="cpu"
    )
    statistics = collect(options, identity, model, model_config, Steps(True))
    made = [making.from_method(name, options, identity, statistics.layers) for name in arguments.methods]
    print(f"calibrated: {time.process_time() - began:.0f} CPU seconds", file=sys.stderr, flush=True)
    reader, chat = Reader(model), chat_tokens(folder, model, tokenizer)
    print(f"chats of {len(chat):,} tokens: {time.process_time() - began:.0f} CPU seconds", file=sys.stderr, flush=True)
    record = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.is_file() else {}
    contexts = record.get("contexts", {})
    for context in arguments.contexts:
        began = time.process_time()
        counts = {kind: max(1, round(count * arguments.scale)) for kind, count in SIZES[context].items()}
        chosen = {kind: documents(kind, tokenizer, chat, context + CONTINUATION, count) for kind, count in counts.items()}
        rows = measure(reader, made, identity, context, chosen)
        seconds = round(time.process_time() - began, 1)
        contexts[str(context)] = {
            "documents": {kind: len(tokens) for kind, tokens in chosen.items()},
            "seconds": seconds,
            "rows": rows,
        }
        record = {
            "model": folder.name,
            "fingerprint": identity.fingerprint,
            "continuation": CONTINUATION,
            "calibration": statistics.data,
            "contexts": contexts,
            "versions": {name: version(name) for name in ("oscar-kv", "torch", "transformers")},
            "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": arguments.threads},
        }
        setups.write_json(arguments.json, record)
        setups.write_between(arguments.page, BEGIN, END, tables(record))
        print(f"context {context}: {seconds:.0f} CPU seconds", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
