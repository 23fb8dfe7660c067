"""What every method is compared with: no transform, the equaliser alone, and the targets that the paper ablates against."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar.format.side import LayerTransforms
from oscar.methods.hadamard import equaliser
from oscar.methods.matrices import rotate
from oscar.methods.registry import method, side
from oscar.methods.statistics import LayerStatistics


@method("hadamard", "QuaRot's Hadamard rotation alone; needs no text", needs_text=False)
def hadamard(statistics: LayerStatistics, share_heads: bool = False) -> LayerTransforms:
    """The equaliser alone. share_heads changes nothing. Source: QuaRot, arXiv 2404.00456."""
    return _same_for_heads(equaliser, statistics)


@method("identity", "no transform and nothing clipped: plain 2-bit; needs no text", needs_text=False, clip=(1.0, 1.0))
def identity(statistics: LayerStatistics, share_heads: bool = False) -> LayerTransforms:
    """No transform: plain 2-bit, the control every method has to beat. share_heads changes nothing."""
    return _same_for_heads(lambda d: torch.eye(d, dtype=torch.float64), statistics)


@method("raw", "the paper's failed ablation: rotations from the moments of K and V themselves")
def raw(statistics: LayerStatistics, share_heads: bool = False) -> LayerTransforms:
    """U H P of K^T K and V^T V, the reconstruction targets that the paper ablates against. Source: arXiv 2605.17757."""
    return LayerTransforms(
        side(rotate(statistics.k_moment, share_heads)),
        side(rotate(statistics.v_moment, share_heads)),
    )


def _same_for_heads(matrix, statistics: LayerStatistics) -> LayerTransforms:
    """One matrix(dim) for every head of a side."""

    def every(moment: Tensor) -> Tensor:
        return matrix(moment.shape[-1]).expand_as(moment).contiguous()

    return LayerTransforms(side(every(statistics.k_moment)), side(every(statistics.v_moment)))
