"""Fixed matrices: Hadamard matrices and what stands in for them, the bit reversal, and a scattered order."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


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
    Source: arXiv 2605.17757, the permutation P.
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


def _jacobsthal(q: int) -> Tensor:
    """[q, q] of quadratic characters of i - j modulo the prime q: 0, +1 for squares, -1 otherwise."""
    character = torch.full((q,), -1.0, dtype=torch.float64)
    character[torch.arange(q) ** 2 % q] = 1
    character[0] = 0
    return character[(torch.arange(q)[:, None] - torch.arange(q)[None, :]) % q]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))
