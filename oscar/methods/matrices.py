"""The matrices that methods are made of: rotations, balanced maps, and the shaping of rounding noise.

Row-vector convention throughout: x is stored as x @ T. Everything is float64 on the CPU with eigenvector signs fixed: the same
statistics give the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar.format.linalg import inverses
from oscar.methods.hadamard import equaliser, permutation, scattered
from oscar.methods.statistics import symmetrise

SHRINKAGE = 1e-3
"""How far `balance` shrinks correlations towards none: a small calibration set does not know its weakest directions."""

BALANCED = 0.25
"""Exponent of `balance` at which cost and covariance of the stored rows are one matrix."""

FLOOR = 0.1
"""Least weight of a direction in `shape_noise`, in units of the mean weight: else all error would go where the calibration text
never looked."""


def rotate(moment: Tensor, share_heads: bool = False, parts: str = "UHP") -> Tensor:
    """Orthogonal transform of a second moment.

    Args:
        moment: [num_kv_heads, d, d] float64, symmetric and positive semidefinite.
        share_heads: average the moments first, as they are: a head with more energy has more say.
        parts: factors in order, of U, H and P; "UHP" is the paper's, "U", "UP", "UH", "HP" are its ablations.
    Returns:
        [num_kv_heads, d, d] float64, T with x @ T.
    Source: arXiv 2605.17757.
    """
    num_kv_heads, d = moment.shape[0], moment.shape[-1]
    if share_heads:
        moment = moment.mean(0, keepdim=True)
    result = torch.eye(d, dtype=torch.float64).expand(moment.shape[0], d, d)
    for part in parts:
        result = result @ {"U": eigenvectors, "H": lambda m: equaliser(d), "P": lambda m: permutation(d)}[part](moment)
    return result.expand(num_kv_heads, d, d).contiguous()


def balance(cost: Tensor, covariance: Tensor, exponent: float = BALANCED) -> Tensor:
    """The map after which four equal levels cost least: T with T^-1 cost T^-T = T^T covariance T, of flat diagonal.

    A row x is stored as x T. Its quantization error is about white with a power proportional to the row's, so it costs
    tr(T^-1 cost T^-T) * tr(T^T covariance T), which is least for T T^T = C^-1/2 (C^1/2 M C^1/2)^1/2 C^-1/2, M the cost and C
    the covariance. With C = L L^T and L^T M L = V Lambda V^T that is T = L^-T V Lambda^1/4 times any orthogonal matrix, and
    both sides become Lambda^1/2; an equaliser last gives every channel the same share of both. Its input directions are in
    scattered order: in the order of eigenvalues the products would keep a structure that shaping cannot use.

    The result follows any invertible change of basis of the keys that queries undo (values and W_O alike), so a model's outlier
    channels, which are such a change, cost nothing.

    Args:
        cost, covariance: [num_kv_heads, d, d] float64, positive semidefinite.
    Returns:
        [num_kv_heads, d, d] float64; rows keep their mean square.
    Source: docs/method.md; the balanced form without Hadamard is known from transform coding (arXiv 2608.04074).
    """
    m, c = _shrink(cost), _shrink(covariance)
    lower = torch.linalg.cholesky(c)
    product = symmetrise(lower.mT @ m @ lower)
    vectors = eigenvectors(product)
    values = torch.diagonal(vectors.mT @ product @ vectors, dim1=-2, dim2=-1)
    values = torch.maximum(values, 1e-12 * values.amax(-1, keepdim=True).clamp(min=1e-200))
    t = torch.linalg.solve_triangular(lower.mT, vectors * values.pow(exponent).unsqueeze(-2), upper=True)
    d = t.shape[-1]
    t = t[..., scattered(d)] @ equaliser(d)
    power = torch.diagonal(t.mT @ c @ t, dim1=-2, dim2=-1).sum(-1) / torch.diagonal(c, dim1=-2, dim2=-1).sum(-1)
    return (t / power.sqrt()[:, None, None]).contiguous()


def shape_noise(transform: Tensor, cost: Tensor, floor: float = FLOOR) -> Tensor:
    """Shaping matrix of a side: with it, errors e of x T cost the sum of D_i * (fresh rounding error of channel i)^2.

    The cost in the stored space, M' = T^-1 cost T^-T scaled to mean diagonal 1, with FLOOR on every direction, factors as
    M' = U D U^T with U unit upper triangular. Then e M' e^T = sum_i D_i (e_i + sum_{j<i} e_j U_ji)^2, and rounding
    x_i - sum_{j<i} e_j U_ji instead of x_i makes the i-th bracket that rounding's own error. The geometric mean of D is the
    geometric mean of the eigenvalues of M', where rounding each channel alone pays their arithmetic mean.

    Args:
        transform: [num_kv_heads, d, d] float64, T.
        cost: [num_kv_heads, d, d] float64, in the model's own space.
    Returns:
        [num_kv_heads, d, d] float64, U without its diagonal, rounded to float16: a GPU reads half the bytes in every step.
    Source: docs/method.md; the same factorisation rounds weights in arXiv 2307.13304 (LDLQ).
    """
    inverse = inverses(transform)
    stored = symmetrise(inverse @ cost @ inverse.mT)
    mean = torch.diagonal(stored, dim1=-2, dim2=-1).mean(-1)[:, None, None]
    one = torch.eye(stored.shape[-1], dtype=torch.float64)
    weight = torch.where(mean > 0, stored / mean.clamp(min=1e-300), one) + floor * one
    lower = torch.linalg.cholesky(weight.flip(-1, -2))
    upper = (lower / torch.diagonal(lower, dim1=-2, dim2=-1).unsqueeze(-2)).flip(-1, -2)
    return upper.triu(1).half().to(upper.dtype)


def eigenvectors(moment: Tensor) -> Tensor:
    """Columns are eigenvectors, eigenvalues ascending; the largest entry of each (the first of equals) is positive.

    [..., d, d] float64 symmetric -> [..., d, d] float64.
    """
    vectors = torch.linalg.eigh(symmetrise(moment.double().cpu())).eigenvectors
    largest = vectors.abs().argmax(dim=-2, keepdim=True)
    return vectors * vectors.gather(-2, largest).sign()


def _shrink(moment: Tensor) -> Tensor:
    """Correlations shrunk by SHRINKAGE, scales left as they are; a channel that is always zero gets a little variance."""
    diagonal = torch.diagonal(moment, dim1=-2, dim2=-1)
    least = 1e-9 * diagonal.mean(-1, keepdim=True).clamp(min=1e-30)
    return symmetrise(moment) + torch.diag_embed(SHRINKAGE * diagonal.clamp(min=0) + least)
