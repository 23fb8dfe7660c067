"""Extend attention: new tokens over a 2-bit prefix and among themselves, beside torch SDPA on a BF16 cache.

    python sgl-kernel/benchmark/bench_extend_attention.py --json out.json

Milliseconds a call of the attention alone, without the writes that come with it (`bench_store_kv.py` measures those), and the
microseconds of a whole call that has next to nothing to do. SDPA gets the causal mask it needs for a prefix and its best
layout; building the mask is not counted.
"""

from __future__ import annotations

import statistics
import time

import common
import torch
import torch.nn.functional as F
from common import SHAPES, Shape

from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS
from oscar_kernel import plan_read


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--prefix", type=int, nargs="*", default=[0, 4096, 16384], help="cached tokens")
    parser.add_argument("--new", type=int, nargs="+", default=[512], help="new tokens")
    parser.add_argument("--rounds", type=int, default=5, help="calls that are timed (default: %(default)s)")
    args = parser.parse_args()
    record = common.begin(args) | {"overhead_us": {}, "cases": []}
    for name in args.shape.split(","):
        shape = SHAPES[name]
        if args.overhead_calls:
            record["overhead_us"][name] = call_overhead(shape, args.overhead_calls)
            what = f"{name}, one call of 1 new token over {common.OVERHEAD_TOKENS} with its writes"
            print(common.overhead_line(what, record["overhead_us"][name]), flush=True)
        for prefix in args.prefix:
            for new in args.new:
                c = run_case(shape, prefix, new, args.rounds)
                record["cases"].append(c)
                print(
                    f"{name} {new} new over {prefix}: {c['oscar_ms']:.1f} ms ({c['oscar_gflops']:.0f} GFLOP/s), "
                    f"{c['best16_name']} {c['best16_ms']:.1f} ms, {c['ratio']:.2f}x",
                    flush=True,
                )
    common.end(args, record)


def call_overhead(shape: Shape, calls: int) -> dict:
    """What one extend of one token costs, its writes included, as `common.overhead` gives it."""
    slots = common.paged_slots(1, common.OVERHEAD_TOKENS)
    windows = common.full_windows(slots, *common.OVERHEAD_WINDOWS)
    free = int(slots.max()) + 1
    layers = common.random_layers(shape, 1, free + 1, windows.no_row)
    extend = layers.batch_extend()
    nowhere = torch.tensor([windows.no_row])
    extend.plan(slots, torch.arange(1), [common.OVERHEAD_TOKENS], [0, 1], windows, torch.tensor([free]), nowhere)
    q, k, v = (torch.randn(1, n, shape.head_dim).bfloat16() for n in (shape.num_qo_heads, *[shape.num_kv_heads] * 2))
    return common.overhead(lambda: extend.run(0, q, k, v, sm_scale=shape.head_dim**-0.5), calls)


def run_case(shape: Shape, prefix: int, new: int, rounds: int) -> dict:
    """Figures of `new` tokens over `prefix` cached ones, all configurations interleaved."""
    heads, group, dim = shape.num_kv_heads, shape.num_qo_heads // shape.num_kv_heads, shape.head_dim
    torch.manual_seed(0)
    q = torch.randn(new, heads * group, dim).bfloat16()
    k_new, v_new = (torch.randn(new, heads, dim).bfloat16() for _ in range(2))
    slots = common.paged_slots(1, prefix)
    windows = common.full_windows(slots, DEFAULT_SINK_TOKENS, DEFAULT_RECENT_TOKENS)
    # The op below the public interface: `BatchExtend.run` also writes the new tokens, which the peers do not.
    layer = common.random_layers(shape, 1, prefix + 65, windows.no_row).by_id[0]
    plan = layer.plan(plan_read(slots, torch.arange(1), [prefix], windows))

    def oscar():
        return layer.extend(q, k_new, v_new, [0, new], plan, dim**-0.5, 0.0)

    k, v = (torch.randn(1, heads, prefix + new, dim).bfloat16() for _ in range(2))
    mask = torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix)
    bias = torch.zeros(new, prefix + new, dtype=torch.bfloat16).masked_fill_(~mask, float("-inf"))
    rows = q.transpose(0, 1).unsqueeze(0)

    def plain():
        if prefix == 0:
            return F.scaled_dot_product_attention(rows, k, v, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(rows, k, v, attn_mask=bias, enable_gqa=True)

    def expanded():
        wide = [x.repeat_interleave(group, 1) for x in (k, v)]
        if prefix == 0:
            return F.scaled_dot_product_attention(rows, *wide, is_causal=True)
        return F.scaled_dot_product_attention(rows, *wide, attn_mask=bias)

    runs = {"oscar": oscar, "sdpa enable_gqa": plain, "sdpa heads expanded": expanded}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if i:
                times[name].append(1e3 * (time.perf_counter() - begin))
    median = {name: statistics.median(values) for name, values in times.items()}
    best16 = min(("sdpa enable_gqa", "sdpa heads expanded"), key=median.get)
    flops = 4 * heads * group * dim * new * (prefix + (new + 1) / 2)
    return {
        "shape": shape.name,
        "prefix": prefix,
        "new": new,
        "oscar_ms": median["oscar"],
        "best16_ms": median[best16],
        "best16_name": best16,
        "ratio": median[best16] / median["oscar"],
        "oscar_gflops": flops / median["oscar"] / 1e6,
        "arms": {name: common.summary(values) for name, values in times.items()},
    }


if __name__ == "__main__":
    main()
