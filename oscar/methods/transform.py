"""Methods: small pure functions from statistics to matrices. Row-vector convention throughout: x is stored as x @ T.

The paper's transform is T = U H P (METHOD 1.4):

    U  eigenvectors of the target second moment as columns, ascending eigenvalues
    H  an orthogonal matrix with entries of equal magnitude, so that every channel of x U H has the same diagonal in
       the metric (Lemma 1): no channel matters more than another, and four levels fit all alike
    P  output channel r(i) is channel d-1-i of x U H, r the bit reversal: it spreads neighbours over groups

The K target is C_q, the V target the score-weighted V. Everything is float64 on the CPU with eigenvector signs fixed:
the same statistics give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from oscar import config
from oscar.format.linalg import inverses
from oscar.methods.statistics import LayerStatistics, symmetrise

SHRINKAGE = 1e-3
"""How far `balance` shrinks correlations towards none: a small calibration set does not know its weakest directions."""

FLOOR = 0.1
"""Least weight of a direction in `shape_noise`, in units of the mean weight: else all error would go where the calibration text
never looked."""


@dataclass(frozen=True)
class Transforms:
    """What a method decides for one layer, all float64 on the CPU.

    Attributes:
        k_transform: [num_kv_heads, head_dim, head_dim], k' = (k - k_mean) @ T; queries get T^-T.
        v_transform: [num_kv_heads, v_head_dim, v_head_dim]; outputs get T^-1.
        k_mean: [num_kv_heads, head_dim] or None.
        k_shaping, v_shaping: strictly upper triangular, of the transforms' shapes, or None; see `oscar/format/codec.py`.
    """

    k_transform: Tensor
    v_transform: Tensor
    k_mean: Tensor | None = None
    k_shaping: Tensor | None = None
    v_shaping: Tensor | None = None


def identity(statistics: LayerStatistics, share_heads: bool = False) -> Transforms:
    """No transform: plain 2-bit, the control every method has to beat. share_heads changes nothing."""
    return Transforms(*(_same_for_heads(torch.eye(d, dtype=torch.float64), statistics) for d in _dims(statistics)))


def hadamard(statistics: LayerStatistics, share_heads: bool = False) -> Transforms:
    """The equaliser alone, data-free. share_heads changes nothing. Source: QuaRot, arXiv 2404.00456."""
    return Transforms(*(_same_for_heads(equaliser(d), statistics) for d in _dims(statistics)))


def oscar(statistics: LayerStatistics, share_heads: bool = False) -> Transforms:
    """The paper's U H P with the paper's targets: C_q for K, V^T S^T S V with the true causal softmax S for V.

    Source: arXiv 2605.17757 (METHOD 1.1, 1.4). Its public implementation shares a matrix over the heads of a layer, which
    can be fatal (METHOD 0.7); here a KV head has its own unless share_heads is set.
    """
    return Transforms(rotate(statistics.q_moment, share_heads), rotate(statistics.v_score_moment, share_heads))


def oscar_surrogate(statistics: LayerStatistics, share_heads: bool = False) -> Transforms:
    """U H P with the V target of the paper's public implementation, `sst`: tokens weighted by k C_q k^T, no softmax.

    Source: the public OSCAR implementation (METHOD 1.3); shared over heads it is what the published files hold.
    """
    return Transforms(rotate(statistics.q_moment, share_heads), rotate(statistics.v_surrogate_moment, share_heads))


def raw(statistics: LayerStatistics, share_heads: bool = False) -> Transforms:
    """U H P of K^T K and V^T V, the reconstruction targets that the paper ablates against. Source: arXiv 2605.17757."""
    return Transforms(rotate(statistics.k_moment, share_heads), rotate(statistics.v_moment, share_heads))


def oscar_shaped(statistics: LayerStatistics, share_heads: bool = False) -> Transforms:
    """Balanced maps, key mean taken off, rounding noise shaped: the default.

    Keys: an error of a key costs x C_q x^T, the keys themselves have the covariance C_k - mean^T mean. Values: an error of a
    value costs x W_o x^T (x x^T where the output projection is unknown), values have C_v. Each side is mapped so that cost and
    covariance become one and the same matrix with a flat diagonal (`balance`), and the rounding errors are shaped by that
    cost (`shape_noise`). Source: docs/method.md.
    """
    s, dim = statistics, statistics.v_moment.shape[-1]
    cost = torch.eye(dim, dtype=torch.float64).expand_as(s.v_moment) if s.output_moment is None else s.output_moment
    keys = s.k_moment - s.k_mean.unsqueeze(-1) * s.k_mean.unsqueeze(-2)
    sides = (s.q_moment, keys), (cost, s.v_moment)
    if share_heads:
        sides = tuple(tuple(x.mean(0, keepdim=True).expand_as(x) for x in side) for side in sides)
    k_transform, v_transform = (balance(*side) for side in sides)
    shaping = (shape_noise(t, side[0]) for t, side in zip((k_transform, v_transform), sides, strict=True))
    return Transforms(k_transform, v_transform, s.k_mean, *shaping)


METHODS: dict[str, Callable[[LayerStatistics, bool], Transforms]] = {
    "oscar-shaped": oscar_shaped,
    "oscar": oscar,
    "oscar-surrogate": oscar_surrogate,
    "raw": raw,
    "hadamard": hadamard,
    "identity": identity,
}
DATA_FREE = frozenset({"hadamard", "identity"})
"""Methods that read only shapes: calibration skips the passes over the text."""

NEEDS_SURROGATE = frozenset({"oscar-surrogate"})
"""Methods that read the surrogate V moment, which takes a second pass over the text."""


def default_clip(method: str) -> tuple[float, float]:
    """(k_clip, v_clip) quantiles of a method: the paper's, and 1 (nothing clipped) for plain 2-bit."""
    return (1.0, 1.0) if method == "identity" else (config.DEFAULT_K_CLIP, config.DEFAULT_V_CLIP)


def rotate(moment: Tensor, share_heads: bool = False, parts: str = "UHP") -> Tensor:
    """Orthogonal transform of a second moment.

    Args:
        moment: [num_kv_heads, d, d] float64, symmetric and positive semidefinite.
        share_heads: average the moments first, as they are: a head with more energy has more say (METHOD 1.3).
        parts: factors in order, of U, H and P; "UHP" is the paper's, "U", "UP", "UH", "HP" are its ablations.
    Returns:
        [num_kv_heads, d, d] float64, T with x @ T.
    Source: arXiv 2605.17757; METHOD 1.4.
    """
    num_kv_heads, d = moment.shape[0], moment.shape[-1]
    if share_heads:
        moment = moment.mean(0, keepdim=True)
    result = torch.eye(d, dtype=torch.float64).expand(moment.shape[0], d, d)
    for part in parts:
        result = result @ {"U": eigenvectors, "H": lambda m: equaliser(d), "P": lambda m: permutation(d)}[part](moment)
    return result.expand(num_kv_heads, d, d).contiguous()


def balance(cost: Tensor, covariance: Tensor) -> Tensor:
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
    t = torch.linalg.solve_triangular(lower.mT, vectors * values.pow(0.25).unsqueeze(-2), upper=True)
    d = t.shape[-1]
    t = t[..., scattered(d)] @ equaliser(d)
    power = torch.diagonal(t.mT @ c @ t, dim1=-2, dim2=-1).sum(-1) / torch.diagonal(c, dim1=-2, dim2=-1).sum(-1)
    return (t / power.sqrt()[:, None, None]).contiguous()


def shape_noise(transform: Tensor, cost: Tensor) -> Tensor:
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
    weight = torch.where(mean > 0, stored / mean.clamp(min=1e-300), one) + FLOOR * one
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


@lru_cache
def equaliser(d: int) -> Tensor:
    """Orthogonal [d, d] float64 matrix whose entries are as equal in magnitude as we can make them.

    A Hadamard matrix wherever one of these constructions gives one, all entries +-1/sqrt(d) and Lemma 1 exact:
      d = 2^a               Sylvester's, in natural order, as the paper uses it
      d = 2^a (q + 1)       Sylvester's (x) Paley's first for prime q = 3 mod 4: 80 = 4 x 20, 96 = 8 x 12, 192 = 16 x 12
      d = 2^a 2(q + 1)      Sylvester's (x) Paley's second for a prime q = 1 mod 4: 112 = 4 x 28
    so for every head_dim in use (64, 80, 96, 112, 128, 192, 256). Otherwise (d odd, or no such q) Sylvester's of the
    even part (x) the discrete Hartley matrix cos + sin of the odd part m, whose entries stay below sqrt(2/m).

    Do not write into the result: it is cached.
    """
    odd = d
    while odd % 2 == 0:
        odd //= 2
    if odd == 1:
        return sylvester(d)
    order = odd * 4
    while order <= d and d % order == 0:
        if (core := _paley(order)) is not None:
            return torch.kron(sylvester(d // order), core)
        order *= 2
    angle = torch.arange(odd, dtype=torch.float64) * (2 * torch.pi / odd)
    turns = torch.arange(odd)[:, None] * torch.arange(odd)[None, :] % odd
    hartley = (angle[turns].cos() + angle[turns].sin()) / odd**0.5
    return torch.kron(sylvester(d // odd), hartley)


@lru_cache
def scattered(d: int) -> Tensor:
    """An order of d indices in which neighbours lie far apart: by the fractional parts of multiples of the golden ratio."""
    return (torch.arange(d, dtype=torch.float64) * ((5**0.5 - 1) / 2)).frac().argsort()


def sylvester(d: int) -> Tensor:
    """Sylvester's Hadamard matrix of a power of two in natural order, [[h, h], [h, -h]], scaled to be orthogonal."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < d:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h / d**0.5


def permutation(d: int) -> Tensor:
    """P: [d, d] float64 with x P moving channel d-1-i to channel r(i), r(i) the bit reversal of i.

    For d not a power of two, r lists the bit reversals of the next power of two that are below d, in order (the same
    thing where d is one). With one group a row, P changes only which channels share a byte.
    Source: METHOD 1.4.
    """
    bits = max(d - 1, 0).bit_length()
    reversed_bits = [int(format(i, f"0{bits}b")[::-1], 2) for i in range(1 << bits)] if bits else [0]
    target = [r for r in reversed_bits if r < d]
    p = torch.zeros(d, d, dtype=torch.float64)
    p[torch.arange(d - 1, -1, -1), torch.tensor(target)] = 1
    return p


def _paley(order: int) -> Tensor | None:
    """Paley's Hadamard matrix of this order over a prime field, scaled to be orthogonal; None where no prime fits.

    Source: R. E. A. C. Paley, On Orthogonal Matrices, J. Math. Phys. 12 (1933).
    """
    q = order - 1
    if q % 4 == 3 and _is_prime(q):
        skew = torch.zeros(order, order, dtype=torch.float64)
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, _jacobsthal(q)
        return (skew + torch.eye(order, dtype=torch.float64)) / order**0.5
    q = order // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        conference = torch.zeros(q + 1, q + 1, dtype=torch.float64)
        conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _jacobsthal(q)
        off = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        on = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        one = torch.eye(q + 1, dtype=torch.float64)
        return (torch.kron(conference, off) + torch.kron(one, on)) / order**0.5
    return None


def shape(statistics: LayerStatistics) -> dict:
    """What is hard about a layer's rows, as JSON-able numbers with six digits.

    Returns:
        "k_outlier", "v_outlier": largest channel's root mean square over the median channel's, the worst head's; 1 is flat.
        "k_spectrum", "v_spectrum": share of tr(C) in the 1, 2, 4, ... largest eigenvalues, mean over heads; C is the target
        that `oscar` diagonalises, C_q for K and V^T S^T S V for V.
    """
    result = {}
    for side, rows, target in (
        ("k", statistics.k_moment, statistics.q_moment),
        ("v", statistics.v_moment, statistics.v_score_moment),
    ):
        rms = torch.diagonal(rows, dim1=-2, dim2=-1).clamp(min=0).sqrt()
        ratio = rms.amax(-1) / rms.median(-1).values.clamp(min=torch.finfo(torch.float64).tiny)
        result[f"{side}_outlier"] = float(f"{min(float(ratio.max()), 1e9):.6g}")
        values = torch.linalg.eigvalsh(target).flip(-1).clamp(min=0)
        share = values.cumsum(-1) / values.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        counts = [1 << i for i in range(share.shape[-1].bit_length()) if 1 << i <= share.shape[-1]]
        result[f"{side}_spectrum"] = [float(f"{x:.6g}") for x in share.mean(0)[torch.tensor(counts) - 1]]
    return result


def _jacobsthal(q: int) -> Tensor:
    """[q, q] of quadratic characters of i - j modulo the prime q: 0, +1 for squares, -1 otherwise."""
    character = torch.full((q,), -1.0, dtype=torch.float64)
    character[torch.arange(q) ** 2 % q] = 1
    character[0] = 0
    return character[(torch.arange(q)[:, None] - torch.arange(q)[None, :]) % q]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))


def _shrink(moment: Tensor) -> Tensor:
    """Correlations shrunk by SHRINKAGE, scales left as they are; a channel that is always zero gets a little variance."""
    diagonal = torch.diagonal(moment, dim1=-2, dim2=-1)
    least = 1e-9 * diagonal.mean(-1, keepdim=True).clamp(min=1e-30)
    return symmetrise(moment) + torch.diag_embed(SHRINKAGE * diagonal.clamp(min=0) + least)


def _dims(statistics: LayerStatistics) -> tuple[int, int]:
    return statistics.k_moment.shape[-1], statistics.v_moment.shape[-1]


def _same_for_heads(matrix: Tensor, statistics: LayerStatistics) -> Tensor:
    return matrix.expand(statistics.k_moment.shape[0], *matrix.shape).contiguous()
