"""Time and peak memory of a whole calibration against one plain forward pass over the same tokens.

    python scripts/bench/calibrate.py --model MODEL --tokens 8192 65536

Each of the two runs in a process of its own, so that its peak memory is its own. The plain one loads the model and runs the
decoder once over the tokens; the other is `oscar.calibrate`: text, statistics, matrices and the held-out error. The time that
the plain one takes to load the model is taken off both. Times are in seconds, memory in MiB. CPU seconds stand beside the
clock's, since other work on the machine changes only the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import setups
import torch

from oscar import config
from oscar.calibration import sources
from oscar.calibration.calibrate import CalibrationOptions, calibrate, check
from oscar.calibration.load_model import load_model, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder")
    parser.add_argument("--text", metavar="FILE", help="text to read (default: Python's own sources)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536], metavar="N", help="calibration tokens")
    parser.add_argument("--max-length", type=int, default=4096, metavar="N", help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--method", default=config.DEFAULT_METHOD, metavar="NAME", help="method (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    parser.add_argument("--side", choices=("forward", "calibrate"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.side:
        print(json.dumps(measure(options.side, settings(options, options.tokens[0]))))
        return
    rows = []
    for tokens in options.tokens:
        sides = {side: run(side, options, tokens) for side in ("forward", "calibrate")}
        plain, whole = sides["forward"], sides["calibrate"]
        for name in ("seconds", "cpu_seconds"):
            whole[name] -= plain["load"][name]
        rows.append({"tokens": tokens, "max_length": options.max_length, "method": options.method} | sides)
        print(
            f"{tokens:,} tokens: forward {plain['seconds']:.1f} s ({plain['cpu_seconds']:.1f} of CPU), calibration "
            f"{whole['seconds']:.1f} s ({whole['cpu_seconds']:.1f}): ratio {whole['seconds'] / plain['seconds']:.2f} "
            f"({whole['cpu_seconds'] / plain['cpu_seconds']:.2f}); peak {plain['peak_mib']:.0f} and "
            f"{whole['peak_mib']:.0f} MiB",
            flush=True,
        )
    if options.json:
        setups.write_json(options.json, rows)


def settings(options: argparse.Namespace, tokens: int) -> CalibrationOptions:
    """What both sides read: `tokens` tokens of the text in sequences of --max-length."""
    return CalibrationOptions(
        options.model,
        text=(options.text,),
        tokens=tokens,
        max_length=options.max_length,
        method=options.method,
        dtype="float32",
        device="cpu",
        progress=False,
    )


def run(side: str, options: argparse.Namespace, tokens: int) -> dict:
    """The figures of one side, out of a process of its own."""
    text = options.text or python_sources(tokens)
    command = [sys.executable, __file__, "--side", side, "--model", options.model, "--text", str(text), "--tokens", str(tokens)]
    command += ["--max-length", str(options.max_length), "--method", options.method, "--threads", str(options.threads)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def measure(side: str, settings: CalibrationOptions) -> dict:
    """{"seconds", "cpu_seconds": of the side; "load": those of loading the model; "peak_mib": largest resident memory}."""
    _, model_config = check(settings)  # imports what both sides need
    if side == "calibrate":
        clock = Clock()
        calibrate(settings)
        return {**clock.read(), "peak_mib": peak_mib()}
    tokenizer = load_tokenizer(settings.model)
    (source,) = sources.parse(settings.text, settings.tokens)
    sequences = sources.sequences(source, tokenizer, settings.max_length, settings.seed)
    clock = Clock()
    model = load_model(settings.model, model_config, settings.dtype, settings.device)
    load, clock = clock.read(), Clock()
    with torch.inference_mode():
        for sequence in sequences:
            model.base_model(input_ids=sequence.tokens.unsqueeze(0), use_cache=False)
    return {**clock.read(), "load": load, "peak_mib": peak_mib(), "tokens": sum(len(s.tokens) for s in sequences)}


class Clock:
    """Seconds since it was made, by the clock and of this process's CPU time."""

    def __init__(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict:
        return {"seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.cpu}


def peak_mib() -> float:
    """Largest resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def python_sources(tokens: int) -> Path:
    """A file of Python's standard library with text enough for so many tokens, made once in the folder for temporary files."""
    path = Path(tempfile.gettempdir()) / f"oscar-bench-{tokens}.txt"
    if not path.is_file():
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        path.write_text("\n".join(f.read_text(encoding="utf-8") for f in files)[: 8 * tokens], encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
