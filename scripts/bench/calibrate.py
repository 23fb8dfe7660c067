"""Time and peak memory of a whole calibration against one plain forward pass over the same tokens.

    python scripts/bench/calibrate.py --model MODEL --tokens 8192 65536

Each arm runs in a process of its own, so that its peak memory is its own. The plain arm loads the model and runs the decoder
once over the tokens; the other is `oscar.calibrate`: text, statistics, matrices and the held-out error. The time
that the plain arm takes to load the model is taken off both. CPU seconds stand beside the clock's, since other work on the
machine changes only the latter.
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

import torch

from oscar import config
from oscar.calibration import sources
from oscar.calibration.calibrate import CalibrationOptions, calibrate, check
from oscar.calibration.load_model import load_model, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--text", metavar="FILE", help="text to read (default: Python's own sources)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536], metavar="N")
    parser.add_argument("--max-length", type=int, default=4096, metavar="N", help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--method", default=config.DEFAULT_METHOD, metavar="NAME", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--output", metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--arm", choices=("forward", "calibrate"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.arm:
        print(json.dumps(measure(options.arm, settings(options, options.tokens[0]))))
        return
    rows = []
    for tokens in options.tokens:
        arms = {arm: run(arm, options, tokens) for arm in ("forward", "calibrate")}
        plain, whole = arms["forward"], arms["calibrate"]
        for name in ("seconds", "cpu_seconds"):
            whole[name] -= plain["load"][name]
        rows.append({"tokens": tokens, "max_length": options.max_length, "method": options.method} | arms)
        print(
            f"{tokens:,} tokens: forward {plain['seconds']:.1f} s ({plain['cpu_seconds']:.1f} of CPU), calibration "
            f"{whole['seconds']:.1f} s ({whole['cpu_seconds']:.1f}): ratio {whole['seconds'] / plain['seconds']:.2f} "
            f"({whole['cpu_seconds'] / plain['cpu_seconds']:.2f}); peak {plain['peak_mib']:.0f} and "
            f"{whole['peak_mib']:.0f} MiB",
            flush=True,
        )
    if options.output:
        Path(options.output).write_text(json.dumps(rows, indent=1) + "\n")


def settings(options: argparse.Namespace, tokens: int) -> CalibrationOptions:
    """What both arms read: `tokens` tokens of the text in sequences of --max-length."""
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


def run(arm: str, options: argparse.Namespace, tokens: int) -> dict:
    """The figures of one arm, out of a process of its own."""
    text = options.text or python_sources(tokens)
    command = [sys.executable, __file__, "--arm", arm, "--model", options.model, "--text", str(text), "--tokens", str(tokens)]
    command += ["--max-length", str(options.max_length), "--method", options.method, "--threads", str(options.threads)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def measure(arm: str, settings: CalibrationOptions) -> dict:
    """{"seconds", "cpu_seconds": of the arm; "load": those of loading the model; "peak_mib": largest resident memory}."""
    _, model_config = check(settings)  # imports what both arms need
    if arm == "calibrate":
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
