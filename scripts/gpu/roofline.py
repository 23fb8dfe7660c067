"""Bytes, instructions and predicted time of one decode step's attention in one layer, from the kernels' own geometry.

    python scripts/gpu/roofline.py                     Qwen3-8B, H100, H200, A100 and RTX 4090, batch 1, 8, 32
    python scripts/gpu/roofline.py --json roofline.json

Nothing here is measured on a card. Counts come from the tensors that the kernels are given, from the plan's own arithmetic and
from the machine code (docs/gpu_compile_report.json); the assumptions that turn them into times are printed with the result.
Compare with what scripts/gpu_check.sh measures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from oscar.format.codec import RowFormat
from oscar.format.side import LayerTransforms, Side
from oscar_kernel import LayerCodec
from oscar_kernel.triton import plan as triton_plan
from oscar_kernel.triton.common import LayerTensors, SideTensors
from oscar_kernel.triton.decode import JOIN
from oscar_kernel.triton.shaping import program_of
from oscar_kernel.triton.tuning import Launch

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Card:
    """Public figures of a card. bandwidth: bytes/s. clock: Hz, boost. dense_f16: matrix flop/s, float32 sums."""

    name: str
    arch: str
    bandwidth: float
    sms: int
    clock: float
    dense_f16: float
    l2_mib: int


CARDS = (
    Card("H100 SXM", "sm_90", 3.35e12, 132, 1.755e9, 989e12, 50),
    Card("H200", "sm_90", 4.8e12, 132, 1.755e9, 989e12, 50),
    Card("A100 SXM 80 GB", "sm_80", 2.039e12, 108, 1.41e9, 312e12, 40),
    Card("RTX 4090", "sm_89", 1.008e12, 128, 2.52e9, 165e12, 72),
)
COPY_SHARE = 0.90
"""Of the data sheet's bandwidth, what a large copy reaches."""
STREAM_SHARE = 0.90
"""Of a copy's bandwidth, what a kernel that gathers whole token rows can reach."""
ISSUE_SHARE = 0.65
"""Of one instruction a cycle and scheduler, what a loop with two warps a scheduler reaches."""
PEER_SHARE = 0.85
"""Of a copy's bandwidth, what the best 16-bit decode kernels reach."""
LAUNCH = 2.0e-6
"""Seconds from one kernel's end to the next one's start inside a CUDA graph."""
ROUND_TRIP = 0.7e-6
"""Seconds that a program waits for states that another has written to L2."""
SHAPING_STEP = {2: 90, 8: 140}
"""Cycles of a channel in the shaped store, by tokens of a warp: nine instructions that wait for one another, a shuffle among
them, and what else the warp does for eight tokens."""
SHAPING_ISSUE = {2: 36, 8: 89}
"""Instructions of a warp for a channel, by tokens of a warp, of sm_90's code."""
SHAPING_WARPS = 16
"""Warps of the shaped store that a multiprocessor holds: 107 registers a thread with two tokens a warp, 128 with eight."""
WIDTHS = (16, 4, 9, 9, 10, 9, 8, 9, 11, 7)
MATRIX_SHARE = 0.5
"""Of the dense rate, what the m16n8k16 instruction reaches (it is half of wgmma's on sm_90)."""


@dataclass(frozen=True)
class Shape:
    """Attention of one of `layers` layers on one rank, V folded. shaped: errors are passed on in the store."""

    heads: int = 8
    kv_group_num: int = 4
    dim: int = 128
    group_size: int = 128
    sink: int = 64
    recent: int = 256
    shaped: bool = True
    layers: int = 36

    @cached_property
    def layer(self) -> LayerTensors:
        """A layer's tensors as the kernels get them, from transforms as an artifact keeps them (float32)."""
        fmt, eye = RowFormat(self.dim, self.group_size), torch.eye(self.dim).expand(self.heads, self.dim, self.dim)
        side = Side(eye, torch.ones(self.heads), shaping=torch.zeros_like(eye) if self.shaped else None)
        return LayerTensors.of(LayerCodec.of(LayerTransforms(side, side), fmt, fmt, fold_v=True))

    @property
    def sides(self) -> tuple[SideTensors, SideTensors]:
        return self.layer.k, self.layer.v

    @property
    def row_bytes(self) -> int:
        """Of K and V of a token, all heads."""
        return self.heads * sum(side.planes.row_bytes for side in self.sides)


def traffic(shape: Shape, bs: int, n: int, items: int) -> dict[str, float]:
    """Bytes of one layer in one step, by what they are for.

    Args:
        shape: of the layer. bs: sequences. n: tokens of each. items: entries of the work list that are in use.
    """
    heads, dim, layer, windows = shape.heads, shape.dim, shape.layer, shape.sink + shape.recent
    queries = bs * heads * shape.kv_group_num
    shaping = 0
    if shape.shaped:
        # The upper half of a matrix is read once a head and block of tokens; at the end of a step rows are read again from
        # their windows and metadata from the 2-bit rows, and codes written again.
        half, tile = (1 + 16 / dim) / 2, program_of(bs, dim > 128, shape.layers)[0]
        shaping = half * -(-bs // tile) * sum(side.shaping.nbytes for side in shape.sides)
        shaping += bs * (heads * 2 * dim * 2 + shape.row_bytes)
    return {
        "2-bit rows": bs * max(0, n - windows) * shape.row_bytes,
        # Every KV head's programs read the slots; all but the first find them in L2.
        "slots": 4 * bs * n,
        "16-bit windows": bs * min(n, windows) * (heads * 2 * dim * 2 + 4),
        "transforms": layer.k.transform.nbytes + layer.k.read_transform.nbytes,
        "error shaping": shaping,
        "new tokens": bs * (heads * 2 * dim * (2 + 2) + shape.row_bytes),
        "queries and outputs": queries * (2 * dim + 2 * 2 * layer.k.planes.query_width + 2 * dim),
        # Written by one program and read by another: they stay in L2, and are counted apart.
        "partial states (L2)": 2 * items * heads * shape.kv_group_num * (dim + 1) * 4,
    }


def items_of(card: Card, shape: Shape, bs: int, n: int, waves: int) -> tuple[int, int]:
    """Items of the work list of `bs` sequences of n tokens, and tiles of the middles, by the plan's arithmetic."""
    budget = triton_plan.item_budget(bs, shape.heads, card.sms, waves)
    tiles = -(-max(0, n - shape.sink - shape.recent) // triton_plan.BLOCK_N)
    split = max(triton_plan.MIN_TILES, -(-bs * tiles // budget))
    return bs * (-(-tiles // split) + triton_plan.window_items(shape.sink, shape.recent)), bs * tiles


def shaping_seconds(card: Card, shape: Shape, tokens: int, layers: int = 1) -> float:
    """What error shaping adds to one layer's store, where a launch is for `layers` of them: its part of the launch, of the
    wait for the matrix, and of steps that wait for one another or, with many rows, for the issue slots."""
    if not shape.shaped:
        return 0.0
    tile, warps = program_of(tokens, shape.dim > 128, layers)
    # 64 registers of 4 bytes a thread are in flight.
    waits = max(1.0, shape.layer.k.shaping[0].nbytes / (warps * 32 * 64 * 4))
    chain = waits * ROUND_TRIP + shape.dim * SHAPING_STEP[tile // warps] / card.clock
    all_warps = layers * shape.heads * 2 * -(-tokens // tile) * warps
    rounds = -(-all_warps // (card.sms * SHAPING_WARPS))
    issue = all_warps * shape.dim * SHAPING_ISSUE[tile // warps] / (card.sms * 4 * card.clock * ISSUE_SHARE)
    return (LAUNCH + max(rounds * chain, issue)) / layers


def predict(card: Card, shape: Shape, bs: int, n: int, loop: int, waves: int = Launch().waves) -> dict:
    """Seconds of one layer's attention, ours and a 16-bit kernel's, and what bounds ours.

    loop: instructions for a tile of a head.
    """
    items, tiles = items_of(card, shape, bs, n, waves)
    parts = traffic(shape, bs, n, items)
    moved = sum(size for name, size in parts.items() if "L2" not in name)
    least = bs * n * shape.row_bytes
    bandwidth = card.bandwidth * COPY_SHARE
    memory = moved / (bandwidth * STREAM_SHARE)
    issue = tiles * shape.heads * loop / (card.sms * 4 * card.clock * ISSUE_SHARE)
    flops = bs * n * shape.heads * 2 * 2 * shape.dim * max(8, shape.kv_group_num)
    matrix = flops / (card.dense_f16 * MATRIX_SHARE)
    # The last program to finish merges its group's states and then the groups', a query head after the other.
    tail = shape.kv_group_num * ROUND_TRIP * (1 + (items // bs > JOIN))
    shaping = shaping_seconds(card, shape, bs, shape.layers)
    seconds = max(memory, issue, matrix) + 2 * LAUNCH + tail + shaping
    bf16 = bs * n * shape.heads * 2 * shape.dim * 2
    peer = bf16 / (bandwidth * PEER_SHARE) + 2 * LAUNCH
    bound = max((memory, "memory"), (issue, "issue"), (matrix, "matrix"))[1]
    return {
        "card": card.name, "bs": bs, "context": n, "bytes": moved, "parts": parts, "over_format_minimum": moved / least - 1,
        "bytes_per_token": moved / (bs * n), "flops": flops, "us": seconds * 1e6, "bound": bound, "memory_us": memory * 1e6,
        "issue_us": issue * 1e6, "matrix_us": matrix * 1e6, "merge_us": tail * 1e6, "shaping_us": shaping * 1e6,
        "of_copy": least / seconds / bandwidth, "bf16_us": peer * 1e6, "speedup": peer / seconds,
    }  # fmt: skip


def loop_of(arch: str, dim: int) -> int:
    """Instructions for 64 tokens of a head, from the compile report."""
    rows = json.loads((ROOT / "docs" / "gpu_compile_report.json").read_text())
    found = [r["loop_instructions"] for r in rows if r["arch"] == arch and r["kernel"] == "decode_kernel"]
    if dim != 128 or not found:
        raise SystemExit("roofline: the compile report has no decode loop for this shape; run scripts/gpu/compile_report.py")
    return found[0]  # the first case is this geometry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="sequences")
    parser.add_argument("--context", type=int, nargs="*", default=[8192, 32768, 102400], help="tokens of each")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    shape = Shape()
    print(f"One layer, {shape.heads} KV heads of {shape.dim}, {shape.kv_group_num} query heads each, V folded, windows of")
    print(f"{shape.sink} + {shape.recent} tokens; K and V of a token take {shape.row_bytes} bytes in 2 bits.")
    print("Predicted, not measured. Assumed:")
    print(f"  a copy reaches {COPY_SHARE:.0%} of the data sheet's bandwidth, this kernel at most {STREAM_SHARE:.0%} of a copy,")
    print(f"  the 16-bit peer {PEER_SHARE:.0%} of a copy; {ISSUE_SHARE:.0%} of the issue slots are used;")
    print(
        f"  {LAUNCH * 1e6:.0f} us a launch, two launches; {ROUND_TRIP * 1e6:.1f} us for each read of states in L2 by the last "
        "program;\n  heads of a token share sectors through L2."
    )
    print(f"  Error shaping: {SHAPING_STEP[2]} cycles and {SHAPING_ISSUE[2]} instructions a channel in a warp of 2 tokens,")
    print(
        f"  {SHAPING_STEP[8]} and {SHAPING_ISSUE[8]} in one of 8. To each of {shape.layers} layers it adds, in a decode step of"
    )
    print("  1 and of 32 sequences (counted below) and in a prompt of 8192 tokens, us:")
    for card in CARDS:
        steps = (shaping_seconds(card, shape, n, shape.layers) * 1e6 for n in (1, 32))
        prompt = shaping_seconds(card, shape, 8192) * 1e6
        print(f"{card.name:>18}" + "".join(f"{us:8.2f}" for us in steps) + f"{prompt:8.0f}")
    names = ("card", "bs", "context", "B/token", "over min", "us", "bound", "of copy", "16-bit us", "ratio")
    print("".join(f"{name:>{width}}" for name, width in zip(names, WIDTHS, strict=True)))
    rows = []
    for card in CARDS:
        for n in args.context:
            for bs in args.batch:
                r = predict(card, shape, bs, n, loop_of(card.arch, shape.dim))
                rows.append(r)
                print(
                    f"{r['card']:>16}{bs:4}{n:9}{r['bytes_per_token']:9.0f}{r['over_format_minimum']:10.1%}{r['us']:9.1f}"
                    f"{r['bound']:>8}{r['of_copy']:9.0%}{r['bf16_us']:11.1f}{r['speedup']:7.1f}"
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
