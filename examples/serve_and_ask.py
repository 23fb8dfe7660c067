"""Serve a model with --kv-quant oscar, ask it for a fact hidden in a long prompt, and show what the cache saves."""

import argparse
import sys

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from oscar.embedded import embedded_model
from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import make_needle
from oscar.format.sizing import window_slots


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(embedded_model()), help="model folder (default: the embedded model)")
    parser.add_argument("--artifact", help="calibration artifact (default: found or made at start)")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompt in tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which prompt (default: %(default)s)")
    parser.add_argument("--log", help="file for the server's log")
    args = parser.parse_args()

    console = Console(width=110, highlight=False)
    needle = make_needle(AutoTokenizer.from_pretrained(args.model), args.tokens, seed=args.seed)
    flags = ["--kv-quant", "oscar", *(["--oscar-artifact", args.artifact] if args.artifact else [])]
    console.print(f"$ python -m sglang.launch_server --model-path {args.model} {' '.join(flags)}", soft_wrap=True)
    with LocalServer(args.model, *flags, log=args.log) as server:
        console.print(f"  ready after {server.startup_seconds:.0f} s; log: {server.log}", soft_wrap=True)
        reply = server.chat(needle.messages)
        cache = server.info()["internal_states"][0]["oscar"]
    right = needle.is_right(reply)
    console.print(f"\nprompt    {needle.num_tokens} tokens; the fact stands at {needle.depth:.0%} of the text")
    console.print(f"question  {needle.messages[0]['content'].splitlines()[-1]}")
    console.print(f"answer    {reply.strip()}   [{'right' if right else f'wrong, it is {needle.answer}'}]", markup=False)

    memory, windows = cache["pool_bytes"], (cache["sink_tokens"], cache["recent_tokens"])
    own = window_slots(1 << 20, *windows, cache["page_size"])
    bf16, two_bit = cache["bytes_per_token_bf16"], cache["bytes_per_token"]
    table = Table("", title="\nKV cache in the same memory", title_justify="left")
    for column in ("BF16", "2-bit (oscar)", "ratio"):
        table.add_column(column, justify="right")
    table.add_row("bytes a token", f"{bf16:,}", f"{two_bit:,}", f"{bf16 / two_bit:.2f}")
    tokens = memory // bf16, cache["tokens"]
    table.add_row("tokens", f"{tokens[0]:,}", f"{tokens[1]:,}", f"{tokens[1] / tokens[0]:.2f}")
    console.print(table)
    console.print(
        f"{memory / 2**20:,.0f} MiB of cache; a running request takes as much as {own:,} tokens more for its 16-bit windows "
        f"(first {windows[0]} and newest {windows[1]} tokens)"
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
