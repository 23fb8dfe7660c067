"""The default method: balanced maps and shaped rounding noise (docs/method.md)."""

from __future__ import annotations

import torch

from oscar.format.side import LayerTransforms
from oscar.methods.matrices import balance, shape_noise
from oscar.methods.registry import method, side
from oscar.methods.statistics import LayerStatistics


@method("oscar-shaped", "balanced maps and shaped rounding")
def oscar_shaped(statistics: LayerStatistics, share_heads: bool = False) -> LayerTransforms:
    """Balanced maps, key mean taken off, rounding noise shaped: the default.

    Keys: an error of a key costs x C_q x^T, the keys themselves have the covariance C_k - mean^T mean. Values: an error of a
    value costs x W_o x^T (x x^T where the output projection is unknown), values have C_v. Each side is mapped so that cost and
    covariance become one and the same matrix with a flat diagonal (`balance`), and the rounding errors are shaped by that
    cost (`shape_noise`). Source: docs/method.md.
    """
    s, dim = statistics, statistics.v_moment.shape[-1]
    v_cost = torch.eye(dim, dtype=torch.float64).expand_as(s.v_moment) if s.output_moment is None else s.output_moment
    keys = s.k_moment - s.k_mean.unsqueeze(-1) * s.k_mean.unsqueeze(-2)
    made = []
    for cost, covariance, mean in ((s.q_moment, keys, s.k_mean), (v_cost, s.v_moment, None)):
        if share_heads:
            cost, covariance = (x.mean(0, keepdim=True).expand_as(x) for x in (cost, covariance))
        transform = balance(cost, covariance)
        made.append(side(transform, mean, shape_noise(transform, cost)))
    return LayerTransforms(*made)
