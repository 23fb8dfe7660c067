"""Store of new tokens: transform, clip, quantise, pack and both writes, in the library and in the PyTorch reference.

    python sgl-kernel/benchmark/bench_store_kv.py --json out.json

Milliseconds a call, and the microseconds of a call for one token of one layer whose transforms are in the caches. The library
and the reference run interleaved over several layers, so that a layer's transforms come from memory as they do in serving.
"""

from __future__ import annotations

import statistics
import time

import common
import torch
from common import SHAPES, Shape

from oscar_kernel import Layers

NUM_SLOTS, NUM_ROWS = 4096, 64


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 512, 2048], help="new tokens a call")
    parser.add_argument("--layers", type=int, default=28, help="layers cycled (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="calls that are timed (default: %(default)s)")
    args = parser.parse_args()
    record = common.begin(args) | {"overhead_us": {}, "cases": []}
    for name in args.shape.split(","):
        shape = SHAPES[name]
        ours = common.random_layers(shape, args.layers, NUM_SLOTS, NUM_ROWS)
        layers = {i: (ours.cache(i), ours.codec(i)) for i in range(args.layers)}
        by_impl = {"cpu": ours, "reference": Layers(layers, shape.num_qo_heads, impl="reference")}
        if args.overhead_calls:
            k, v, loc, rows = new_tokens(shape, 1)
            found = common.overhead(lambda: ours.store(0, k, v, loc, rows), args.overhead_calls)  # noqa: B023
            record["overhead_us"][name] = found
            print(common.overhead_line(f"{name}, one store of 1 token", found), flush=True)
        for n in args.tokens:
            case = run_case(shape, n, by_impl, args.rounds)
            record["cases"].append(case)
            ms, reference = case["cpu_ms"], case["reference_ms"]
            print(f"{name} {n:5d} tokens: {ms:.3f} ms, reference {reference:.3f} ms ({case['ratio']:.1f}x)", flush=True)
    common.end(args, record)


def new_tokens(shape: Shape, n: int) -> tuple[torch.Tensor, ...]:
    """k, v, loc and window rows of n tokens, the first of which go into windows."""
    k, v = (torch.randn(n, shape.num_kv_heads, shape.head_dim).bfloat16() for _ in range(2))
    rows = torch.full((n,), NUM_ROWS)
    rows[: min(n, NUM_ROWS)] = torch.arange(min(n, NUM_ROWS))
    return k, v, torch.randperm(NUM_SLOTS)[:n], rows


def run_case(shape: Shape, n: int, by_impl: dict[str, Layers], rounds: int) -> dict:
    """Figures of n tokens a call; the reference runs in every fourth round."""
    k, v, loc, rows = new_tokens(shape, n)
    num_layers = len(by_impl["cpu"].by_id)
    times: dict[str, list[float]] = {impl: [] for impl in by_impl}
    for i in range(rounds + num_layers):
        for impl, values in times.items():
            if impl == "reference" and i % 4:
                continue
            begin = time.perf_counter()
            by_impl[impl].store(i % num_layers, k, v, loc, rows)
            if i >= num_layers:  # the first round brings every layer into memory
                values.append(1e3 * (time.perf_counter() - begin))
    ours, reference = (statistics.median(times[impl]) for impl in ("cpu", "reference"))
    return {
        "shape": shape.name,
        "tokens": n,
        "cpu_ms": ours,
        "reference_ms": reference,
        "ratio": reference / ours,
        "rows_per_second": 2e3 * n * shape.num_kv_heads / ours,
        "arms": {impl: common.summary(values) for impl, values in times.items()},
    }


if __name__ == "__main__":
    main()
