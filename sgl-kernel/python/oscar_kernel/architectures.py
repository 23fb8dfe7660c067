"""GPU architectures that the Triton kernels know: one table behind launch shapes, refusals, docs and the compile report.

Standard library only, so that documentation is built from here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture that the Triton kernels know.

    Args:
        key: "sm_90" or "gfx942".
        name: cards of that kind.
        shared_kib: shared memory that one program may take, in KiB.
        columns: queries that the narrowest matrix instruction takes.
        in_report: whether docs/gpu_compile_report.md lowers the kernels for it.
        remark: what a user should know.
    """

    key: str
    name: str
    shared_kib: int
    columns: int = 8
    in_report: bool = True
    remark: str = ""

    @property
    def backend(self) -> tuple[str, int | str, int]:
        """Backend of Triton, its name for the architecture, and threads of a warp."""
        if self.key.startswith("sm_"):
            return "cuda", int(self.key[3:]), 32
        return "hip", self.key, 64 if self.key.startswith("gfx9") else 32


_NO_MATRIX = "Triton multiplies there without matrix instructions, so expect little speed"
SPILLS = "registers are spilled to memory there, so expect little speed"
ARCHITECTURES = {
    row.key: row
    for row in (
        Architecture("sm_75", "Turing: T4, RTX 20", 64, remark=_NO_MATRIX),
        Architecture("sm_80", "A100", 163),
        Architecture("sm_86", "RTX 30, A10, A40", 99),
        Architecture("sm_87", "Jetson Orin", 163, in_report=False),
        Architecture("sm_89", "RTX 40, L4, L40", 99),
        Architecture("sm_90", "H100, H200, GH200", 227),
        Architecture("sm_100", "data-centre Blackwell: B200, GB200", 227),
        Architecture("sm_103", "data-centre Blackwell: B300, GB300", 227),
        Architecture("sm_120", "consumer Blackwell: RTX 50, RTX PRO", 99),
        Architecture("sm_121", "consumer Blackwell: DGX Spark", 99, in_report=False),
        Architecture("gfx90a", "MI200", 64, columns=16, in_report=False),
        Architecture("gfx942", "MI300", 64, columns=16),
        Architecture("gfx950", "MI350", 160, columns=16, in_report=False),
        Architecture("gfx1100", "RX 7900", 64, columns=16, remark=SPILLS),
    )
}
"""Cards that are not here are refused. None has run the kernels yet: they are lowered to machine code for each `in_report`."""


def unknown(key: str, card: str) -> str | None:
    """What is wrong with an unknown GPU, as a clause, or None. key: as in ARCHITECTURES; card: its own name."""
    if key in ARCHITECTURES:
        return None
    known = ", ".join(f"{row.key} ({row.name})" for row in ARCHITECTURES.values())
    return f"the kernels do not know {card} ({key}), they know {known}"
