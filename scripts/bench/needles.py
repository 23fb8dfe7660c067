"""Facts hidden in long prompts, asked over HTTP: stock BF16, --kv-quant oscar, and plain INT2 (no transforms, no windows).

Prints one table: the share of exact answers with its 95 % interval, and how many tokens the cache holds. plot_gain.py draws
what --json writes.
"""

import argparse
import concurrent.futures
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import setups
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import make_needle
from oscar.evaluation.task_scores import wilson

NO_WINDOWS = ("--oscar-sink-tokens", "0", "--oscar-recent-tokens", "0")


def run(model: str, flags: tuple[str, ...], needles: list, workers: int, name: str) -> dict:
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
    setups.add_model(parser)
    parser.add_argument("--n", type=int, default=100, help="prompts, the same for each configuration (default 100)")
    parser.add_argument("--tokens", type=int, default=2048, help="length of a prompt in tokens (default 2048)")
    parser.add_argument("--workers", type=int, default=4, help="requests under way at once (default 4)")
    parser.add_argument("--mem-fraction-static", default="0.3", help="share of free memory for weights and cache (default 0.3)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()

    model = str(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    needles = [make_needle(tokenizer, args.tokens, seed=seed) for seed in range(args.n)]
    common = ("--mem-fraction-static", args.mem_fraction_static)
    with tempfile.TemporaryDirectory() as folder:
        ours, plain = Path(folder) / "oscar.kvq", Path(folder) / "int2.kvq"
        setups.run_calibrate(model, ours)
        setups.run_calibrate(model, plain, "--method", "identity")
        flags_of = {
            "BF16": (),
            "oscar, 2 bits": ("--kv-quant", "oscar", "--oscar-artifact", str(ours)),
            "plain INT2": ("--kv-quant", "oscar", "--oscar-artifact", str(plain), *NO_WINDOWS),
        }
        results = {name: run(model, (*common, *flags), needles, args.workers, name) for name, flags in flags_of.items()}

    table = Table(title=f"{args.n} facts hidden in prompts of {args.tokens} tokens, asked over HTTP")
    for column in ("KV cache", "exact match", "95 % interval", "tokens of cache", "bytes a token"):
        table.add_column(column, justify="left" if column == "KV cache" else "right")
    wide = results["oscar, 2 bits"]["cache"]["bytes_per_token_bf16"]
    for name, found in results.items():
        low, high = found["interval"]
        size = found["cache"]["bytes_per_token"] if found["cache"] else wide
        shown = setups.label(name, found["cache"])
        table.add_row(shown, f"{found['exact']:.1%}", f"{low:.1%} to {high:.1%}", f"{found['tokens']:,}", f"{size:,}")
    Console(width=110).print(table)
    if args.json:
        versions = {name: version(name) for name in ("oscar-kv", "sglang", "torch", "transformers")}
        record = {"model": Path(model).name, "n": args.n, "tokens": args.tokens, "arms": results, "versions": versions}
        record["machine"] = {"processor": platform.machine(), "python": platform.python_version()}
        setups.write_json(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
