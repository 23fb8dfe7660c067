"""Extend: new tokens over a 2-bit prefix and among themselves, beside torch SDPA on a BF16 cache.

    python sgl-kernel/benchmark/bench_extend_attention.py --json out.json

SDPA gets the causal mask it needs for a prefix and its best layout; building the mask is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from bench_decode_attention import make_plan, paged_slots
from common import SHAPES, machine, random_layer, summary

from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS
from oscar_kernel import extend_attention
from oscar_kernel.cpu import library as cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prefix", type=int, nargs="+", default=[0, 4096, 16384], help="cached tokens")
    parser.add_argument("--new", type=int, nargs="+", default=[512], help="new tokens")
    parser.add_argument("--shape", default="qwen3-8b", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine()["text"])
    cases = []
    for name in args.shape.split(","):
        shape = SHAPES[name]
        for prefix in args.prefix:
            for new in args.new:
                cases.append(run_case(shape, prefix, new, args.rounds))
                c = cases[-1]
                print(
                    f"{name} {new} new over {prefix}: {c['oscar_ms']:.1f} ms ({c['oscar_gflops']:.0f} GFLOP/s), "
                    f"{c['best16_name']} {c['best16_ms']:.1f} ms, {c['ratio']:.2f}x",
                    flush=True,
                )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine(), "threads": args.threads, "isa": cpu.default_isa(), "cases": cases}, file, indent=1)


def run_case(shape, prefix: int, new: int, rounds: int) -> dict:
    heads, group, dim = shape.num_kv_heads, shape.num_qo_heads // shape.num_kv_heads, shape.head_dim
    torch.manual_seed(0)
    q = torch.randn(new, heads * group, dim).bfloat16()
    k_new, v_new = (torch.randn(new, heads, dim).bfloat16() for _ in range(2))
    if prefix:
        plan, num_rows = make_plan(paged_slots(1, prefix, 64), DEFAULT_SINK_TOKENS, DEFAULT_RECENT_TOKENS)
    else:
        plan, num_rows = make_plan(torch.zeros(1, 0, dtype=torch.int32), 0, 0)
    codec, cache = random_layer(shape, prefix + 65, num_rows, seed=0)

    def oscar():
        return extend_attention(q, k_new, v_new, [0, new], cache, codec, plan, dim**-0.5, impl="cpu")

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

    arms = {"oscar": oscar, "sdpa enable_gqa": plain, "sdpa heads expanded": expanded}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds + 1):
        for name, run in arms.items():
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
        "arms": {name: summary(values) for name, values in times.items()},
    }


if __name__ == "__main__":
    main()
