"""Store of new tokens: transform, clip, quantise, pack and both writes, in the library and in the PyTorch reference.

    python sgl-kernel/benchmark/bench_store_kv.py --json out.json

Both arms run interleaved over several layers, so that a layer's transforms come from memory as they do in serving.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from common import SHAPES, machine, random_layer, summary

from oscar_kernel import store_kv
from oscar_kernel.cpu import library as cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 512, 2048], help="new tokens a call")
    parser.add_argument("--shape", default="qwen3-8b", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, default=28, help="layers cycled")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine()["text"])
    cases = []
    for name in args.shape.split(","):
        shape = SHAPES[name]
        layers = [random_layer(shape, 4096, 64, seed=i) for i in range(args.layers)]
        for n in args.tokens:
            k, v = (torch.randn(n, shape.num_kv_heads, shape.head_dim).bfloat16() for _ in range(2))
            loc = torch.randperm(4096)[:n]
            rows = torch.full((n,), 64)
            rows[: min(n, 64)] = torch.arange(min(n, 64))
            times: dict[str, list[float]] = {"cpu": [], "reference": []}
            for i in range(args.rounds + args.layers):
                codec, cache = layers[i % args.layers]
                for impl, values in times.items():
                    if impl == "reference" and i % 4:
                        continue
                    begin = time.perf_counter()
                    store_kv(k, v, loc, rows, cache, codec, impl=impl)
                    if i >= args.layers:  # the first round prepares each layer
                        values.append(1e3 * (time.perf_counter() - begin))
            ours, reference = (statistics.median(times[impl]) for impl in ("cpu", "reference"))
            cases.append(
                {
                    "shape": name,
                    "tokens": n,
                    "cpu_ms": ours,
                    "reference_ms": reference,
                    "ratio": reference / ours,
                    "rows_per_second": 2e3 * n * shape.num_kv_heads / ours,
                    "arms": {impl: summary(values) for impl, values in times.items()},
                }
            )
            print(f"{name} {n:5d} tokens: {ours:.3f} ms, reference {reference:.3f} ms ({reference / ours:.1f}x)", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine(), "threads": args.threads, "isa": cpu.default_isa(), "cases": cases}, file, indent=1)


if __name__ == "__main__":
    main()
