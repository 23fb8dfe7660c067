"""Lower every Triton kernel for NVIDIA cards that need not be there, and write what the machine code uses.

    python scripts/gpu_compile_report.py            docs/gpu_compile_report.md and .json

Takes a few minutes of CPU time; needs Triton's wheel (it brings ptxas and the disassembler) and no card. Exit status 1 if any
kernel spills registers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from pathlib import Path

import triton

from oscar_kernel.triton_compile import ARCHITECTURES, Lowered, cases, distinct_launches, lower

HEAD = """\
# What the Triton kernels compile to

Written by `scripts/gpu_compile_report.py` with Triton {version}, on a machine without a card: the wrappers' own launches,
lowered to machine code. These are counts, not times.

- registers: of a thread. spilled: bytes of local memory of a thread; none is wanted. Known and open: extend with heads of 256.
- shared: bytes of a program. warps: of a program.
- loads: how many load instructions move so many bytes a thread from global memory, asynchronous copies included. A row of
  head_dim 128 with one group is 36 bytes, so its codes are aligned to 4 bytes and are loaded by 4; with groups of 32 it is 48
  bytes.
- matrix: matrix instructions. loop: instructions of decode's loop over 2-bit rows, all warps together, for 64 tokens of one
  KV head, K and V.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(ARCHITECTURES), help="e.g. 80 90 100 120")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "gpu_compile_report.md")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    args = parser.parse_args()
    work = [(case, i, arch) for case in cases() for i in range(len(distinct_launches(case))) for arch in args.arch]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        rows = pool.starmap(lowered, work, chunksize=1)
    args.out.with_suffix(".json").write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    args.out.write_text(report(rows))
    return 1 if any(row.spill_bytes for row in rows) else 0


def lowered(case: str, index: int, arch: int) -> Lowered:
    row = lower(distinct_launches(case)[index], arch, case)
    print(f"{case}: {row.kernel}: sm_{arch}: {row.registers} registers, {row.spill_bytes} bytes spilled", flush=True)
    return row


def report(rows) -> str:
    """The rows as a page."""
    lines = [
        *HEAD.format(version=triton.__version__).splitlines(),
        "| case | kernel | card | registers | spilled | shared | warps | loads | matrix | loop |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        loads = ", ".join(f"{n} x {size} B" for size, n in row.global_loads.items())
        matrix = ", ".join(f"{n} x {name}" for name, n in row.mma.items())
        cells = (
            row.case, row.kernel, f"sm_{row.arch}", row.registers, row.spill_bytes, row.shared_bytes, row.warps, loads, matrix,
            row.loop_instructions or "",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
