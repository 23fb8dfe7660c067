#!/usr/bin/env python3
"""Train the small language model that ships in `oscar/embedded/`, from text to package data, on a CPU.

    python scripts/train/train_embedded_model.py --docs DOCS --work WORK

reads the running Python's standard library and the Python documentation's reStructuredText sources (`DOCS`; Debian's
package `python3.11-doc` has them under `html/_sources`), trains a byte-level BPE and a Qwen3-shaped model, measures
it on held-out text and held-out needle tasks, and writes config, weights, tokenizer, held-out text and model card.
An interrupted run goes on from its last checkpoint when it is started again with the same `--work`. Run it alone:
two Zen 5 cores trained 15,000 tokens/s (rows of 64 and 256 tokens), and 5,000 to 8,000 beside other jobs.

Retrieval does not come by itself: what is asked decides what is learnt. The curriculum (`STAGES` in `settings.py`) starts with
64-token rows that restate facts, then mixes in longer rows and never drops the short ones. Rows of up to 512 tokens
often get gaps in their position ids, so that distances of up to `MAX_SPAN` are seen at the price of a short row.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from card import write_card
from corpus import load_corpus
from export import export, publish
from loop import Watch, load_checkpoint, train
from measure import evaluate
from network import TrainingModel
from optimizer import Optimizer
from rows import RowMaker
from tokens import train_tokenizer, wrap_tokenizer

from oscar.evaluation import needles


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
