"""Which cards the Triton kernels run on, and the launch shapes for each: one small table, with where its figures come from.

An entry is keyed by (architecture, head_dim, group ratio, batch bucket); 0 stands for any. The most specific entry that fits
counts. `source` says "estimated" until somebody has measured: estimates come from the machine code (docs/gpu_compile_report.md:
registers, and instructions of the main loop for 64 tokens), not from a clock. `scripts/gpu_check.sh --tune` measures the
candidates on a card and prints entries to put here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from oscar_kernel.triton_common import interpreted


@dataclass(frozen=True)
class Architecture:
    """A kind of card.

    Args:
        name: for people. shared_kib: shared memory that one program may take, in KiB. bf16: whether it multiplies bfloat16
        matrices. remark: what a user should know.
    """

    name: str
    shared_kib: int
    bf16: bool = True
    remark: str = "never run there; lowered without spills (docs/gpu_compile_report.md)"


NOT_LOWERED = "never run there, and not in the compile report"
CAPABILITIES = {
    "sm_80": Architecture("A100", 163),
    "sm_86": Architecture("RTX 30, A10, A40", 99, remark=NOT_LOWERED),
    "sm_87": Architecture("Jetson Orin", 163, remark=NOT_LOWERED),
    "sm_89": Architecture("RTX 40, L4, L40", 99, remark=NOT_LOWERED),
    "sm_90": Architecture("H100, H200, GH200", 227),
    "sm_100": Architecture("B200, GB200 (data-centre Blackwell)", 227),
    "sm_103": Architecture("B300 (data-centre Blackwell)", 227, remark=NOT_LOWERED),
    "sm_120": Architecture("RTX 50, RTX PRO (consumer Blackwell)", 99),
    "sm_121": Architecture("DGX Spark (consumer Blackwell)", 99, remark=NOT_LOWERED),
    "gfx90a": Architecture("MI200", 64, remark=NOT_LOWERED),
    "gfx942": Architecture("MI300", 64, remark=NOT_LOWERED),
    "gfx950": Architecture("MI350", 160, remark=NOT_LOWERED),
    "gfx1100": Architecture("RX 7900", 64, remark=NOT_LOWERED),
}
"""Cards that are not here are refused. sm_75 (Turing) is missing because it does not multiply bfloat16 matrices, which the
16-bit windows need."""


@dataclass(frozen=True)
class Launch:
    """Shape of the decode kernel's launch.

    Args:
        block_n: tokens of a tile. window_tile: 16-bit rows of a tile. num_warps: of a program. num_stages: tiles in flight.
        waves: programs for each multiprocessor that a step is split into; more is better balanced and more to merge.
        a_token: keep running sums a token (one value group only), which saves shuffles and takes registers.
        source: "estimated", or card, date and what was measured.
    """

    block_n: int = 64
    window_tile: int = 16
    num_warps: int = 1
    num_stages: int = 3
    waves: int = 8
    a_token: bool = False
    source: str = "estimated"


TABLE: dict[tuple[str, int, int, str], Launch] = {
    # One warp a program: a plane of 16 words is one matrix instruction high, so a second warp would repeat the first's work.
    ("any", 0, 0, "any"): Launch(),
    # Wide rows: a plane is two instructions high.
    ("any", 256, 0, "any"): Launch(block_n=32, num_warps=2, waves=6),
    ("any", 192, 0, "any"): Launch(block_n=32, num_warps=2, waves=6),
}

CANDIDATES = tuple(
    Launch(block_n=n, num_warps=w, num_stages=s, waves=waves, a_token=a, source="candidate")
    for n in (32, 64, 128)
    for w in (1, 2)
    for s in (2, 3, 4)
    for waves in (6, 8, 12)
    for a in (False, True)
    if n * w < 256 and not (a and n == 128)
)
"""What `--tune` tries."""


def batch_bucket(bs: int) -> str:
    """Small batches are bound by latency and splitting, large ones by bandwidth."""
    return "1-4" if bs <= 4 else "5-16" if bs <= 16 else "17+"


def choose(arch: str, head_dim: int, ratio: int, bs: int, groups: int = 1, levels: bool = False) -> Launch:
    """The most specific entry of the table.

    Args:
        arch: as in CAPABILITIES. head_dim: of values. ratio: query heads a KV head. bs: sequences.
        groups: value groups of a row. levels: whether a side has a level table.
    """
    found = Launch()
    for a in ("any", arch):
        for d in (0, head_dim):
            for r in (0, ratio):
                for b in ("any", batch_bucket(bs)):
                    found = TABLE.get((a, d, r, b), found)
    if groups > 1:
        found = replace(found, a_token=False)
    # A lookup holds its planes longer; with half the tokens no register is spilled.
    return replace(found, block_n=min(found.block_n, 32)) if levels else found


@lru_cache(maxsize=8)
def architecture(device: torch.device) -> str:
    """Key of CAPABILITIES for a device.

    Raises:
        RuntimeError: the card is not one these kernels run on.
    """
    if interpreted() or device.type == "cpu":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        key = properties.gcnArchName.split(":")[0]
    else:
        key = f"sm_{properties.major}{properties.minor}"
    if key not in CAPABILITIES:
        known = ", ".join(f"{arch} ({row.name})" for arch, row in CAPABILITIES.items())
        raise RuntimeError(
            f"oscar_kernel (Triton): {properties.name} is {key}, which these kernels do not run on; they know {known}. "
            "Use the PyTorch reference (impl='reference') there"
        )
    return key
