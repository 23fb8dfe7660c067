"""Every method on every stress model, at three contexts and sizes of the windows: the tables of docs/quality-embedded.md.

    python scripts/bench/stress_table.py [--scale 1] [--jobs 2]

The embedded model writes the calibration text once; its variants compute the same, so they are calibrated on the same tokens.
Per variant and context, each document and prompt is read exactly once and shared by all methods and windows. Variants run in
processes of one thread each. All figures also go into build/stress.json: divergence in nats, agreement as a share, bits an
element.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, in the workers too

import setups
import stress
import torch

from oscar import config
from oscar.calibration import text
from oscar.evaluation import configurations as making
from oscar.evaluation.reader import Reader
from oscar.evaluation.task_scores import score_tasks
from oscar.evaluation.tasks import make
from oscar.evaluation.text_scores import score_text
from oscar.methods import METHODS

ROOT = Path(__file__).parents[2]
WINDOWS = ((0, 0), (4, 16), (64, 256))
CONTINUATION = 256
SIZES = {1024: (12, 100), 2048: (12, 60), 4096: (8, 30)}
"""context: (documents, retrieval prompts) at --scale 1."""
HARD = {2048: {"twins": 8, "list": 8, "recite": 8}}
"""context: {hard task: prompts}; scored under teacher forcing, since the embedded model does not answer them freely."""
PAPER = ("oscar-shared", "oscar")
BEGIN, END = "<!-- table: begin, written by scripts/bench/stress_table.py -->", "<!-- table: end -->"


def methods() -> list[str]:
    """16 bits, the controls, the paper's method in its forms, then whatever else there is."""
    first = ["bf16", "int2", "hadamard", "raw", "oscar-surrogate-shared", *PAPER]
    return first + [name for name in METHODS if name not in (*first, "identity", "oscar-surrogate")]


def measure(job: tuple[str, str, list, dict, float]) -> tuple[str, dict]:
    """One variant: {context: {"S,R": {method: figures}}} and the seconds each context took."""
    name, folder, given, sizes, scale = job
    torch.set_num_threads(1)
    subject = setups.Subject.of(name, Path(folder), given)
    tokenizer, identity = subject.tokenizer, subject.identity
    made = [making.from_method(method, subject.options, identity, subject.layers) for method in methods()]
    reader, stop = Reader(subject.model), text.end_tokens(subject.model, tokenizer)
    result: dict = {}
    for context, (documents, prompts) in sizes.items():
        began = time.monotonic()
        chosen = subject.documents(context + CONTINUATION, max(2, round(documents * scale)))
        found = score_text(reader, chosen, context, made, WINDOWS, errors_on=2)
        asked = [make("retrieval", tokenizer, context, seed) for seed in range(max(1, round(prompts * scale)))]
        graded = {"retrieval": score_tasks(reader, tokenizer, stop, asked, made, WINDOWS)}
        for kind, count in HARD.get(context, {}).items():
            asked = [make(kind, tokenizer, context, seed) for seed in range(max(1, round(count * scale)))]
            graded[kind] = score_tasks(reader, tokenizer, stop, asked, made, WINDOWS, generated=False)
        cells = {}
        for w in WINDOWS:
            cells[f"{w[0]},{w[1]}"] = {
                configuration.name: {"bits_per_element": configuration.bits_per_element(identity, context, w)}
                | found[configuration.name, w].summary()
                | {kind: scores[configuration.name, w].summary() for kind, scores in graded.items()}
                for configuration in made
            }
        result[str(context)] = {"cells": cells, "documents": len(chosen), "seconds": round(time.monotonic() - began, 1)}
        print(f"{name}, context {context}: {result[str(context)]['seconds']:.0f} s", file=sys.stderr, flush=True)
    return name, result


def ours() -> str | None:
    """The method that is to beat the paper's: the default, or the newest there is."""
    others = [name for name in methods() if name not in ("bf16", "int2", "hadamard", "raw", "oscar-surrogate-shared", *PAPER)]
    return config.DEFAULT_METHOD if config.DEFAULT_METHOD not in PAPER else (others[-1] if others else None)


def tables(record: dict) -> str:
    """The tables as Markdown."""
    variants, lines = record["variants"], []
    names = list(variants)
    some = variants[names[0]]
    if record["ours"]:
        lines += [f"### `{record['ours']}` against the better of `oscar` and `oscar-shared`", ""]
        lines += [
            f"Mean KL of `{record['ours']}` as a share of the lower mean KL of the two, ± half its 95 % interval over",
            "documents (the same ones for both).",
            "",
        ]
        lines += ["| context | windows | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
        for context in some:
            for w in some[context]["cells"]:
                cells = [variants[name][context]["cells"][w] for name in names]
                lines.append(f"| {context} | {w} | " + " | ".join(_share(c, record["ours"]) for c in cells) + " |")
        lines.append("")
    for context, entry in some.items():
        for w, cells in entry["cells"].items():
            bits = ", ".join(sorted({f"{c['bits_per_element']:.2f}" for m, c in cells.items() if m != "bf16"}))
            lines += [f"### Context {context}, windows {w}: {bits} bits per element with windows", ""]
            lines += ["| method | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
            lines += [
                f"| `{method}` | " + " | ".join(_cell(variants[name][context]["cells"][w][method]) for name in names) + " |"
                for method in cells
            ]
            lines.append("")
    for context in HARD:
        if str(context) not in some:
            continue
        for w, cells in some[str(context)]["cells"].items():
            lines += [f"### Hard tasks under teacher forcing, context {context}, windows {w}", ""]
            lines += [f"Code tokens that are the first choice: {', '.join(HARD[context])}.", ""]
            lines += ["| method | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
            for method in cells:
                found = [variants[name][str(context)]["cells"][w][method] for name in names]
                values = (", ".join(f"{cell[kind]['forced']:.1%}" for kind in HARD[context]) for cell in found)
                lines.append(f"| `{method}` | " + " | ".join(values) + " |")
            lines.append("")
    return "\n".join(lines)


def _share(cells: dict, method: str) -> str:
    """KL of a method over that of the better of PAPER, with the interval of a ratio estimate over documents."""
    best = min(PAPER, key=lambda name: cells[name]["kl_mean"])
    ours, paper = (torch.tensor(cells[name]["kl_by_document"], dtype=torch.float64) for name in (method, best))
    share = ours.sum() / paper.sum()
    spread = 1.96 * (ours - share * paper).square().mean().sqrt() / (len(ours) - 1) ** 0.5 / paper.mean()
    return f"{share:.2f} ± {spread:.2f}"


def _cell(cell: dict) -> str:
    low, high = cell["kl_ci"]
    right = round(cell["retrieval"]["exact"] * cell["retrieval"]["n"])
    kl = f"{cell['kl_mean']:.2g} ± {(high - low) / 2:.1g}"
    return f"{kl}; {cell['top1_agreement']:.1%}; {right}/{cell['retrieval']['n']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    setups.add_model(parser, "Qwen3 folder with held-out texts")
    parser.add_argument("--variants", nargs="+", default=list(stress.VARIANTS), help="stress models (default: all)")
    parser.add_argument("--contexts", nargs="+", type=int, default=list(SIZES), help="contexts in tokens (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on documents and prompts (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=config.DEFAULT_CALIBRATION_TOKENS, help="calibration tokens (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "build" / "stress.json", help="file for the figures (default: build/stress.json)"
    )
    parser.add_argument(
        "--page",
        type=Path,
        default=ROOT / "docs" / "quality-embedded.md",
        help="page the tables go into (default: docs/quality-embedded.md)",
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    given = setups.written_text(arguments.model, arguments.tokens)
    print(f"calibration text: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    sizes = {context: SIZES[context] for context in arguments.contexts}
    jobs = [(name, str(arguments.model), given, sizes, arguments.scale) for name in arguments.variants]
    found: dict[str, dict] = {}
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for name, figures in pool.imap_unordered(measure, jobs):
            found[name] = figures
            # After every variant, so that a run that is broken off leaves what it has.
            record = {
                "model": arguments.model.name,
                "continuation": CONTINUATION,
                "calibration_tokens": arguments.tokens,
                "ours": ours(),
                "variants": {name: found[name] for name in arguments.variants if name in found},
                "seconds": round(time.monotonic() - began),
                "versions": {name: version(name) for name in ("oscar-kv", "torch", "transformers")},
                "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "jobs": arguments.jobs},
            }
            setups.write_json(arguments.json, record)
            setups.write_between(arguments.page, BEGIN, END, tables(record))
    print(f"{time.monotonic() - began:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
