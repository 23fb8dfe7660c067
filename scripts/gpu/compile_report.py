"""Lower every Triton kernel for cards that need not be there, and write what the machine code uses.

    python scripts/gpu/compile_report.py            docs/gpu_compile_report.md and .json

Takes several minutes of CPU time; needs Triton's wheel (it brings ptxas, the disassembler and LLVM for AMD) and no card. Exit
status 1 if a kernel spills registers where `oscar.support` does not say so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from pathlib import Path

import triton
from compile_kernels import EVERY_CASE, MAIN_CASE, REPORTED, Lowered, cases, distinct_launches, lower

from oscar_kernel.architectures import ARCHITECTURES, SPILLS

HEAD = """\
# What the Triton kernels compile to

Written by `scripts/gpu/compile_report.py` with Triton {version}, on a machine without a card: the wrappers' own launches,
lowered to machine code. These are counts, not times. {every} get every case, the others the first.

- registers: of a thread. spilled: bytes of local memory of a thread; none is allowed, but on {spilling}.
- shared: bytes of a program. warps: of a program (of 64 threads on gfx9).
- loads: how many load instructions move so many bytes a thread from global memory, asynchronous copies included. A row of
  head_dim 128 with one group is 36 bytes, so its codes are aligned to 4 bytes and are loaded by 4; with groups of 32 it is 48
  bytes.
- matrix: matrix instructions; none on sm_75, where Triton multiplies without them. loop: instructions of decode's loop over
  2-bit rows, all warps together, for 64 tokens of one KV head, K and V; on NVIDIA cards.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", nargs="*", default=list(REPORTED), help="e.g. sm_80 sm_90 gfx942")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "gpu_compile_report.md")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    args = parser.parse_args()
    work = [
        (case, i, arch)
        for case in cases()
        for arch in args.arch
        if case == MAIN_CASE or arch in EVERY_CASE
        for i in range(len(distinct_launches(case, arch)))
    ]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        rows = pool.starmap(lowered, work, chunksize=1)
    args.out.with_suffix(".json").write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    args.out.write_text(report(rows))
    return 1 if any(row.spill_bytes and ARCHITECTURES[row.arch].remark != SPILLS for row in rows) else 0


def lowered(case: str, index: int, arch: str) -> Lowered:
    row = lower(distinct_launches(case, arch)[index], arch, case)
    print(f"{case}: {row.kernel}: {arch}: {row.registers} registers, {row.spill_bytes} bytes spilled", flush=True)
    return row


def report(rows) -> str:
    """The rows as a page, a table a case."""
    spilling = ", ".join(key for key, row in ARCHITECTURES.items() if row.remark == SPILLS)
    lines = HEAD.format(version=triton.__version__, every=", ".join(EVERY_CASE), spilling=spilling).splitlines()
    for case in dict.fromkeys(row.case for row in rows):
        lines += [
            f"## {case}",
            "",
            "| kernel | card | registers | spilled | shared | warps | loads | matrix | loop |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in sorted((row for row in rows if row.case == case), key=lambda row: row.kernel):
            loads = ", ".join(f"{n} x {size} B" for size, n in row.global_loads.items())
            matrix = ", ".join(f"{n} x {name}" for name, n in row.mma.items())
            cells = (
                row.kernel, row.arch, row.registers, row.spill_bytes, row.shared_bytes, row.warps, loads, matrix,
                row.loop_instructions or "",
            )  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
