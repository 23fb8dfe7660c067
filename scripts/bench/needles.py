"""Facts hidden in long prompts, asked over HTTP: stock BF16, --kv-quant oscar, and plain INT2 (no transforms, no windows).

Prints one table and writes JSON (--json); plot_gain.py draws it.
"""

import argparse
import concurrent.futures
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from oscar.embedded import embedded_model
from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import make_needle
from oscar.evaluation.task_scores import wilson

NO_WINDOWS = ("--oscar-sink-tokens", "0", "--oscar-recent-tokens", "0")


def calibrate(model: str, output: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "oscar", "calibrate", "--model", model, "--output", str(output), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_arm(model: str, flags: tuple[str, ...], needles: list, workers: int, name: str) -> dict:
    """Ask every needle of one server; right answers, capacity and flags."""
    with LocalServer(model, *flags) as server, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        replies = pool.map(lambda needle: server.chat(needle.messages), needles)
        marks = [n.is_right(reply) for n, reply in track(zip(needles, replies, strict=True), name, total=len(needles))]
        info = server.info()
    state = info["internal_states"][0]
    low, high = wilson(sum(marks), len(marks))
    cache = state.get("oscar")
    if cache:
        cache["artifact"] = Path(cache["artifact"]).name
    return {
        "flags": [Path(flag).name for flag in flags],
        "attention_backend": info["attention_backend"],
        "n": len(marks),
        "exact": sum(marks) / len(marks),
        "interval": [low, high],
        "wrong_seeds": [i for i, mark in enumerate(marks) if not mark],
        "tokens": info["max_total_num_tokens"],
        "cache": cache,
        "startup_seconds": round(server.startup_seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="model folder (default: the embedded model)")
    parser.add_argument("--n", type=int, default=100, help="prompts an arm (default 100)")
    parser.add_argument("--tokens", type=int, default=2048, help="length of a prompt in tokens (default 2048)")
    parser.add_argument("--workers", type=int, default=4, help="requests under way at once (default 4)")
    parser.add_argument("--mem-fraction-static", default="0.3", help="share of free memory for weights and cache (default 0.3)")
    parser.add_argument("--json", default=None, help="file for the figures")
    args = parser.parse_args()

    model = args.model or str(embedded_model())
    tokenizer = AutoTokenizer.from_pretrained(model)
    needles = [make_needle(tokenizer, args.tokens, seed=seed) for seed in range(args.n)]
    common = ("--mem-fraction-static", args.mem_fraction_static)
    with tempfile.TemporaryDirectory() as folder:
        ours, plain = Path(folder) / "oscar.safetensors", Path(folder) / "int2.safetensors"
        calibrate(model, ours)
        calibrate(model, plain, "--method", "identity")
        arms = {
            "BF16": (),
            "oscar, 2 bits": ("--kv-quant", "oscar", "--oscar-artifact", str(ours)),
            "plain INT2": ("--kv-quant", "oscar", "--oscar-artifact", str(plain), *NO_WINDOWS),
        }
        results = {name: run_arm(model, (*common, *flags), needles, args.workers, name) for name, flags in arms.items()}

    table = Table(title=f"{args.n} facts hidden in prompts of {args.tokens} tokens, asked over HTTP")
    for column in ("KV cache", "exact match", "95 % interval", "tokens of cache", "bytes a token"):
        table.add_column(column, justify="left" if column == "KV cache" else "right")
    wide = results["oscar, 2 bits"]["cache"]["bytes_per_token_bf16"]
    for name, arm in results.items():
        low, high = arm["interval"]
        size = arm["cache"]["bytes_per_token"] if arm["cache"] else wide
        table.add_row(name, f"{arm['exact']:.1%}", f"{low:.1%} to {high:.1%}", f"{arm['tokens']:,}", f"{size:,}")
    Console(width=110).print(table)
    if args.json:
        versions = {name: version(name) for name in ("oscar-kv", "sglang", "torch", "transformers")}
        record = {"model": Path(model).name, "n": args.n, "tokens": args.tokens, "arms": results, "versions": versions}
        record["machine"] = {"processor": platform.machine(), "python": platform.python_version()}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
