"""Launch shapes of the Triton kernels for each kind of card: one small table, with where its figures come from.

An entry is keyed by (architecture, head_dim, kv_group_num, batch bucket); 0 and "any" stand for any. The most specific entry
that fits counts. `source` says "estimated" until somebody has measured: estimates come from the machine code
(docs/gpu_compile_report.md: registers, and instructions of the main loop for 64 tokens), not from a clock.
`scripts/gpu_check.sh --tune` measures the candidates on a card and prints entries to put here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from oscar_kernel.architectures import ARCHITECTURES, Architecture, unknown
from oscar_kernel.triton.common import interpreted


@dataclass(frozen=True)
class Launch:
    """Shape of the decode kernel's launch.

    Args:
        block_n: tokens of a tile. window_tile: 16-bit rows of a tile. num_warps: of a program. num_stages: tiles in flight.
        waves: programs for each multiprocessor that a step is split into; more is better balanced and more to merge.
        a_token: keep running sums a token (one value group only), which saves shuffles and takes registers.
        join: partial states are merged by the programs that finish last, in the same launch; else by a launch of its own.
        source: "estimated", or card, date and what was measured.
    """

    block_n: int = 64
    window_tile: int = 16
    num_warps: int = 1
    num_stages: int = 3
    waves: int = 8
    a_token: bool = False
    join: bool = True
    source: str = "estimated"


TABLE: dict[tuple[str, int, int, str], Launch] = {
    # One warp a program: a plane of 16 words is one matrix instruction high, so a second warp would repeat the first's work.
    ("any", 0, 0, "any"): Launch(),
    # Wide rows: a plane is two instructions high.
    ("any", 256, 0, "any"): Launch(block_n=32, window_tile=32, num_warps=2, waves=6),
    ("sm_80", 256, 0, "any"): Launch(block_n=32, num_warps=2, waves=6),  # 32 window rows spill there, 16 on sm_90
    ("any", 192, 0, "any"): Launch(block_n=32, num_warps=2, waves=6),
    # No matrix instructions: a product is spread over ordinary registers, which four warps have.
    ("sm_75", 0, 0, "any"): Launch(block_n=32, num_warps=4, waves=4),
    # Operands are held twice there: the smallest tile spills least.
    ("gfx1100", 0, 0, "any"): Launch(block_n=16),
}

CANDIDATES = tuple(
    Launch(block_n=n, num_warps=w, num_stages=s, waves=waves, a_token=a, join=join, source="candidate")
    for n in (32, 64, 128)
    for w in (1, 2)
    for s in (2, 3)
    for waves in (6, 8, 12)
    for a in (False, True)
    for join in (True, False)
    if n * w < 256 and not (a and n == 128)
)
"""What `--tune` tries."""


def batch_bucket(bs: int) -> str:
    """Small batches are bound by latency and splitting, large ones by bandwidth."""
    return "1-4" if bs <= 4 else "5-16" if bs <= 16 else "17+"


def decode_launch(arch: str, head_dim: int, kv_group_num: int, bs: int, groups: int = 1) -> Launch:
    """The most specific entry of the table.

    Args:
        arch: key of `ARCHITECTURES`. head_dim: of values. kv_group_num: query heads a KV head. bs: sequences.
        groups: value groups of a row.
    """
    found = Launch()
    for a in ("any", arch):
        for d in (0, head_dim):
            for r in (0, kv_group_num):
                for b in ("any", batch_bucket(bs)):
                    found = TABLE.get((a, d, r, b), found)
    return replace(found, a_token=False) if groups > 1 else found


def extend_launch(card: Architecture, columns: int, head_dim: int, v_head_dim: int, groups: int) -> tuple[int, int]:
    """Queries of a program of the extend kernel, and its warps: as many as the registers hold beside a tile.

    Args:
        card: where it runs. columns: queries there are (tokens times query heads of a KV head).
        head_dim, v_head_dim: of keys and values. groups: value groups of a row.
    """
    limit, num_warps = 16 if head_dim + v_head_dim > 256 else 64, 8
    # Where the report would show a few spilled registers otherwise.
    if card.key == "sm_75":
        limit, num_warps = 16, 4
    elif card.columns == 16:
        limit = min(limit, 32 if card.key.startswith("gfx9") and groups == 1 else 16)
    return max(16, min(limit, 1 << max(0, columns - 1).bit_length())), num_warps


_assumed: str | None = None


@contextmanager
def assuming(arch: str | None) -> Iterator[None]:
    """Choose launches as for another architecture, to lower kernels for a card that is not here. None: no change."""
    global _assumed
    kept, _assumed = _assumed, arch
    try:
        yield
    finally:
        _assumed = kept


INTERPRETER = Architecture("interpreter", "Triton's interpreter", 99, in_report=False)


def architecture(device: torch.device) -> Architecture:
    """What kind of card a device is.

    Raises:
        RuntimeError: one that these kernels do not know.
    """
    return ARCHITECTURES[_assumed] if _assumed is not None else _architecture(device)


@lru_cache(maxsize=8)
def _architecture(device: torch.device) -> Architecture:
    if interpreted() or device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        key = properties.gcnArchName.split(":")[0]
    else:
        key = f"sm_{properties.major}{properties.minor}"
    if (sentence := unknown(key, properties.name)) is not None:
        raise RuntimeError(sentence)
    return ARCHITECTURES[key]
