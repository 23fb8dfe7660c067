"""The default method: balanced maps and shaped rounding noise (docs/method.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oscar.format.side import LayerTransforms
from oscar.methods.matrices import balance, shape_noise
from oscar.methods.registry import method, side
from oscar.methods.statistics import LayerStatistics


class Shape(NamedTuple):
    """What the theory leaves open on a side, chosen by divergence on a real model (docs/method.md).

    Attributes:
        exponent: of `balance`.
        floor: of `shape_noise`.
    """

    exponent: float
    floor: float


KEYS = Shape(exponent=0.17, floor=0.05)
"""Keys: queries look at few directions, so the geometric mean of the error weight falls faster towards whitening than the power
of what is rounded grows."""
VALUES = Shape(exponent=0.25, floor=0.1)
"""Values: W_O looks at all directions, so there is little to shape, and no other pair was better by more than noise."""

PLAIN = 0.1
"""Share of the plain moments in those weighted by attention, which few tokens decide. A larger share is no help at positions
beyond those that were calibrated: plain moments alone fail there as well (docs/LOG.md)."""


@method("oscar-shaped", "balanced maps and shaped rounding")
def oscar_shaped(statistics: LayerStatistics, share_heads: bool = False) -> LayerTransforms:
    """Balanced maps, key mean taken off, rounding noise shaped: the default."""
    return shaped(statistics, share_heads)


def shaped(
    statistics: LayerStatistics, share_heads: bool = False, keys: Shape = KEYS, values: Shape = VALUES
) -> LayerTransforms:
    """The default method with any exponents and floors; clip ratios are not set.

    Keys: an error of a key costs x C_q x^T, the keys themselves have the covariance C_k - mean^T mean. Values: an error of a
    value costs x W_o x^T (x x^T where the output projection is unknown), values have C_v. All of these are weighted by
    attention where the statistics are (`moments`). `balance` trades the power of what is stored for the cost of an error in it,
    and the rounding errors are shaped by that cost (`shape_noise`). Source: docs/method.md.
    """
    made = []
    k, v = moments(statistics)
    for (cost, covariance, mean), shape in ((k, keys), (v, values)):
        if share_heads:
            cost, covariance = (x.mean(0, keepdim=True).expand_as(x) for x in (cost, covariance))
        transform = balance(cost, covariance, shape.exponent)
        made.append(side(transform, mean, shape_noise(transform, cost, shape.floor)))
    return LayerTransforms(*made)


Moments = tuple[Tensor, Tensor, Tensor | None]
"""(cost, covariance, mean) of a side."""


def moments(s: LayerStatistics) -> tuple[Moments, Moments]:
    """Cost, covariance and mean of keys and of values: the attended moments with a share PLAIN of the plain ones.

    A head whose attention never left the windows has no attended moments, nor has a model whose statistics were saved without
    them; the plain moments then stand alone.
    """
    dim = s.v_moment.shape[-1]
    v_cost = torch.eye(dim, dtype=torch.float64).expand_as(s.v_moment) if s.output_moment is None else s.output_moment
    k_moment = _mixed(s.attended_k_moment, s.k_moment, s.attended_q_moment)
    k_mean = _mixed(s.attended_k_mean, s.k_mean, s.attended_q_moment)
    q_moment = _mixed_cost(s.attended_q_moment, s.q_moment)
    v_moment = _mixed(s.attended_v_moment, s.v_moment, s.attended_output_moment)
    v_cost = _mixed_cost(s.attended_output_moment, v_cost)
    return (q_moment, k_moment - k_mean.unsqueeze(-1) * k_mean.unsqueeze(-2), k_mean), (v_cost, v_moment, None)


def _mixed(attended: Tensor | None, plain: Tensor, cost: Tensor | None) -> Tensor:
    """The first with a share PLAIN of the second, head by head; heads whose attended cost is zero, or missing: the second."""
    if attended is None or cost is None:
        return plain
    power = torch.diagonal(cost, dim1=-2, dim2=-1).sum(-1)
    share = torch.where(power > 0, PLAIN, 1.0).double().view(-1, *[1] * (plain.dim() - 1))
    return (1 - share) * attended + share * plain


def _mixed_cost(attended: Tensor | None, plain: Tensor) -> Tensor:
    """The same for costs, each scaled to trace 1: only their directions count."""
    return plain if attended is None else _mixed(_unit(attended), _unit(plain), attended)


def _unit(cost: Tensor) -> Tensor:
    """A cost scaled to trace 1 in each head, or left at zero: only its directions count."""
    trace = torch.diagonal(cost, dim1=-2, dim2=-1).sum(-1)[:, None, None]
    return cost / torch.where(trace > 0, trace, 1.0)
