"""Bytes, instructions and predicted time of one decode step's attention in one layer, from the kernels' own geometry.

    python scripts/gpu_roofline.py                     Qwen3-8B, H100, H200, A100 and RTX 4090, batch 1, 8, 32
    python scripts/gpu_roofline.py --json roofline.json

Nothing here is measured on a card. Counts come from the tensors that the kernels read and write and from the machine code
(docs/gpu_compile_report.json); the assumptions that turn them into times are printed with the result. Compare with what
scripts/gpu_check.sh measures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Card:
    """Public figures of a card. bandwidth: bytes/s. clock: Hz, boost. dense_f16: matrix flop/s, float32 sums."""

    name: str
    arch: int
    bandwidth: float
    sms: int
    clock: float
    dense_f16: float
    l2_mib: int


CARDS = (
    Card("H100 SXM", 90, 3.35e12, 132, 1.755e9, 989e12, 50),
    Card("H200", 90, 4.8e12, 132, 1.755e9, 989e12, 50),
    Card("A100 SXM 80 GB", 80, 2.039e12, 108, 1.41e9, 312e12, 40),
    # Ada has no entry of its own in the report; its code is close to Ampere's.
    Card("RTX 4090", 80, 1.008e12, 128, 2.52e9, 165e12, 72),
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
WIDTHS = (16, 4, 9, 9, 10, 9, 8, 9, 11, 7)
MATRIX_SHARE = 0.5
"""Of the dense rate, what the m16n8k16 instruction reaches (it is half of wgmma's on sm_90)."""


@dataclass(frozen=True)
class Shape:
    """Attention of one layer on one rank."""

    heads: int = 8
    ratio: int = 4
    dim: int = 128
    group: int = 128
    sink: int = 64
    recent: int = 256

    @property
    def row_bytes(self) -> int:
        """Of K or V of one head: codes and a (centre, step) pair a group. oscar.codec.RowFormat says the same."""
        return self.dim // 4 + 4 * self.dim // self.group


def traffic(shape: Shape, bs: int, n: int, items: int) -> dict[str, float]:
    """Bytes of one layer in one step, by what they are for.

    Args:
        shape: of the layer. bs: sequences. n: tokens of each. items: entries of the work list that are in use.
    """
    heads, dim, windows = shape.heads, shape.dim, shape.sink + shape.recent
    return {
        "2-bit rows": bs * max(0, n - windows) * heads * 2 * shape.row_bytes,
        # Every KV head's programs read the slots; all but the first find them in L2.
        "slots": 4 * bs * n,
        "16-bit windows": bs * min(n, windows) * heads * 2 * dim * 2,
        # K's and the queries' matrices; V's is folded.
        "transforms": heads * dim * dim * (8 + 4),
        "queries and outputs": bs * heads * shape.ratio * dim * (2 + 2 + 2 + 2),
        # Written by one kernel and read by the next: it stays in L2, and is counted apart.
        "partial states (L2)": 2 * items * heads * shape.ratio * (dim + 1) * 4,
    }


def predict(card: Card, shape: Shape, bs: int, n: int, loop: int, waves: int = 8, tile: int = 64) -> dict:
    """Seconds of one layer's attention, ours and a 16-bit kernel's, and what bounds ours."""
    windows = -(-(shape.sink + shape.recent) // 128)
    budget = max(bs, -(-card.sms * waves // shape.heads))
    tiles = bs * -(-max(0, n - shape.sink - shape.recent) // 64)
    items = min(budget + bs, bs * -(-tiles // (bs * max(4, -(-tiles // budget))))) + bs * windows
    parts = traffic(shape, bs, n, items)
    moved = sum(size for name, size in parts.items() if "L2" not in name)
    least = bs * n * shape.heads * 2 * shape.row_bytes
    bandwidth = card.bandwidth * COPY_SHARE
    memory = moved / (bandwidth * STREAM_SHARE)
    instructions = tiles * shape.heads * loop * (64 // tile)
    issue = instructions / (card.sms * 4 * card.clock * ISSUE_SHARE)
    flops = bs * n * shape.heads * 2 * 2 * shape.dim * max(8, shape.ratio)
    matrix = flops / (card.dense_f16 * MATRIX_SHARE)
    seconds = max(memory, issue, matrix) + 2 * LAUNCH
    bf16 = bs * n * shape.heads * 2 * shape.dim * 2
    peer = bf16 / (bandwidth * PEER_SHARE) + 2 * LAUNCH
    bound = max((memory, "memory"), (issue, "issue"), (matrix, "matrix"))[1]
    return {
        "card": card.name, "bs": bs, "context": n, "bytes": moved, "partial_bytes_l2": parts["partial states (L2)"],
        "over_format_minimum": moved / least - 1, "bytes_per_token": moved / (bs * n), "flops": flops,
        "us": seconds * 1e6, "bound": bound, "memory_us": memory * 1e6, "issue_us": issue * 1e6, "matrix_us": matrix * 1e6,
        "of_copy": least / seconds / bandwidth, "bf16_us": peer * 1e6, "speedup": peer / seconds,
    }  # fmt: skip


def loop_of(arch: int, dim: int) -> int:
    """Instructions for 64 tokens of a head, from the compile report."""
    rows = json.loads((ROOT / "docs" / "gpu_compile_report.json").read_text())
    found = [r["loop_instructions"] for r in rows if r["arch"] == arch and r["kernel"] == "decode_kernel"]
    if dim != 128 or not found:
        raise SystemExit("gpu_roofline: the compile report has no decode loop for this shape; run gpu_compile_report.py")
    return found[0]  # the first case is this geometry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="sequences")
    parser.add_argument("--context", type=int, nargs="*", default=[8192, 32768, 102400], help="tokens of each")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    shape = Shape()
    windows = f"{shape.sink} + {shape.recent}"
    print(f"One layer, {shape.heads} KV heads of {shape.dim}, {shape.ratio} query heads each, windows of {windows}")
    print(f"tokens; a row of one head takes {shape.row_bytes} bytes, K and V of a token {shape.heads * 2 * shape.row_bytes}.")
    print("Predicted, not measured. Assumed:")
    print(f"  a copy reaches {COPY_SHARE:.0%} of the data sheet's bandwidth, this kernel at most {STREAM_SHARE:.0%} of a copy,")
    print(f"  the 16-bit peer {PEER_SHARE:.0%} of a copy; {ISSUE_SHARE:.0%} of the issue slots are used;")
    print(
        f"  {LAUNCH * 1e6:.0f} us a launch, two launches; heads of a token share sectors through L2; partial states stay in L2."
    )
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
