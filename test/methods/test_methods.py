"""Transforms: the paper's U H P to the letter, Lemma 1, ragged head dimensions, per head against shared."""

import subprocess
import sys

import pytest
import torch

from oscar import methods
from oscar.format.codec import RowFormat, decode, encode
from oscar.format.linalg import inverses
from oscar.methods import METHODS
from oscar.methods.hadamard import equaliser, permutation
from oscar.methods.matrices import balance, eigenvectors, rotate, shape_noise
from oscar.methods.statistics import LayerStatistics

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
ODD_DIMS = (4, 20, 28, 36, 100, 7, 30)


def random_moment(heads: int, d: int, seed: int = 0) -> torch.Tensor:
    """[heads, d, d] float64, eigenvalues over four decades, eigenvectors of their own for each head."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(heads, d, d, generator=generator, dtype=torch.float64)).Q
    return (basis * torch.logspace(-2, 2, d, dtype=torch.float64)) @ basis.mT


def statistics_of(moment: torch.Tensor) -> LayerStatistics:
    return LayerStatistics(100, moment, moment, moment[:, 0], moment, moment[:, 0], moment, moment)


@pytest.mark.parametrize("d", HEAD_DIMS + ODD_DIMS)
def test_equaliser(d):
    h = equaliser(d)
    torch.testing.assert_close(h @ h.T, torch.eye(d, dtype=torch.float64), atol=1e-12, rtol=0)
    bound = 1 if d in HEAD_DIMS else 2**0.5  # a Hadamard matrix for every head_dim in use
    assert h.abs().max() * d**0.5 <= bound + 1e-12


def test_sylvester_is_natural_order():
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.equal(equaliser(4), expected.double())
    row, column = torch.arange(64)[:, None], torch.arange(64)[None, :]
    bits = sum((row >> b & column >> b & 1) for b in range(6))
    assert torch.equal(equaliser(64), (1 - 2 * (bits % 2)).double() / 8)


def test_permutation_by_hand():
    # d = 8: bit reversal r = 0 4 2 6 1 5 3 7; output channel j is channel 7 - r(j).
    x = torch.arange(8, dtype=torch.float64)
    assert (x @ permutation(8)).tolist() == [7, 3, 5, 1, 6, 2, 4, 0]
    # d = 6: the reversals of 0..7 below six are 0 4 2 1 5 3; channel 5 - i goes to the i-th of them.
    assert (torch.arange(6, dtype=torch.float64) @ permutation(6)).tolist() == [5, 2, 3, 0, 4, 1]


@pytest.mark.parametrize("d", HEAD_DIMS + ODD_DIMS)
def test_permutation(d):
    p = permutation(d)
    assert (p.sum(0) == 1).all() and (p.sum(1) == 1).all() and ((p == 0) | (p == 1)).all()


@pytest.mark.parametrize("d", (64, 80, 96, 128))
def test_paper_transform(d):
    moment = random_moment(2, d)
    t = rotate(moment)
    torch.testing.assert_close(t @ t.mT, torch.eye(d, dtype=torch.float64).expand(2, d, d), atol=1e-10, rtol=0)

    # Lemma 1: every coordinate carries the same importance, the mean eigenvalue.
    diagonal = torch.diagonal(t.mT @ moment @ t, dim1=1, dim2=2)
    mean = torch.diagonal(moment, dim1=1, dim2=2).mean(1, keepdim=True)
    torch.testing.assert_close(diagonal, mean.expand(2, d), atol=1e-9, rtol=1e-9)

    # Factor by factor: U has ascending eigenvalues and H and P are the fixed matrices.
    u = eigenvectors(moment)
    values = torch.diagonal(u.mT @ moment @ u, dim1=1, dim2=2)
    assert (values.diff(dim=1) > 0).all()
    torch.testing.assert_close(t, u @ equaliser(d) @ permutation(d), atol=1e-12, rtol=0)
    for parts in ("U", "UP", "UH", "HP"):
        part = rotate(moment, parts=parts)
        torch.testing.assert_close(part @ part.mT, t @ t.mT, atol=1e-10, rtol=0)


def test_signs_are_fixed():
    moment = random_moment(3, 16)
    u = eigenvectors(moment)
    assert (u.gather(1, u.abs().argmax(1, keepdim=True)) > 0).all()
    assert torch.equal(u, eigenvectors(moment.clone()))


def test_sharing_averages_the_moments_as_they_are():
    moment = random_moment(2, 16) * torch.tensor([1.0, 100.0], dtype=torch.float64).view(2, 1, 1)
    shared = rotate(moment, share_heads=True)
    assert torch.equal(shared[0], shared[1])
    torch.testing.assert_close(shared[:1], rotate(moment.mean(0, keepdim=True)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("share_heads", [False, True])
def test_methods(method, share_heads):
    k, v = random_moment(2, 64), random_moment(2, 32, seed=1)
    statistics = LayerStatistics(100, k, k, torch.zeros(2, 64).double(), v, torch.zeros(2, 32).double(), v, v)
    found = METHODS[method](statistics, share_heads)
    for matrix, d in ((found.k.transform, 64), (found.v.transform, 32)):
        assert matrix.shape == (2, d, d) and matrix.dtype == torch.float64 and matrix.is_contiguous()
        if method == "oscar-shaped":
            continue  # not orthogonal; tested below
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(d).double().expand(2, d, d), atol=1e-10, rtol=0)


def test_targets_are_not_swapped():
    names = ("q_moment", "k_moment", "v_moment", "v_score_moment", "v_surrogate_moment")
    moment = {name: random_moment(1, 16, seed=i) for i, name in enumerate(names)}
    statistics = LayerStatistics(1, k_mean=moment["k_moment"][:, 0], v_mean=moment["v_moment"][:, 0], **moment)
    expected = {
        "oscar": ("q_moment", "v_score_moment"),
        "oscar-surrogate": ("q_moment", "v_surrogate_moment"),
        "raw": ("k_moment", "v_moment"),
    }
    for method, sides in expected.items():
        found = METHODS[method](statistics, False)
        for matrix, name in zip((found.k.transform, found.v.transform), sides, strict=True):
            assert torch.equal(matrix, rotate(moment[name]))


def test_per_head_halves_the_error_of_unrelated_heads():
    """Two heads, each with one strong direction of its own, as trained key heads have.

    In its own basis U H P turns a strong direction into equal magnitudes, which a four-level grid meets; in the other
    head's basis it stays spread like noise.
    """
    d, generator = 64, torch.Generator().manual_seed(3)
    fmt, clip = RowFormat(d), torch.full((2,), 0.96)
    spread = torch.full((d,), 0.004, dtype=torch.float64)
    spread[-1] = 1
    basis = torch.linalg.qr(torch.randn(2, d, d, generator=generator, dtype=torch.float64)).Q
    x = (torch.randn(2, 2000, d, generator=generator, dtype=torch.float64) * spread) @ basis.mT
    moment = x.mT @ x / 2000

    def error(share_heads: bool) -> float:
        t = rotate(moment, share_heads)
        rows = (x @ t).transpose(0, 1).float()
        back = decode(encode(rows, fmt, clip), fmt).transpose(0, 1).double() @ t.mT
        return ((back - x).norm() / x.norm()).item()

    assert error(False) <= error(True) / 2


def test_same_statistics_same_bytes():
    statistics = statistics_of(random_moment(2, 80))
    once, again = (methods.oscar(statistics, False) for _ in range(2))
    assert torch.equal(once.k.transform, again.k.transform) and torch.equal(once.v.transform, again.v.transform)


def lopsided(heads: int, d: int, seed: int = 0) -> torch.Tensor:
    """[heads, d, d] second moments with eigenvalues over three decades in bases of their own."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(heads, d, d, generator=generator, dtype=torch.float64)).Q
    return (basis * torch.logspace(-3, 0, d, dtype=torch.float64)) @ basis.mT


@pytest.mark.parametrize("d", [16, 80, 128])
def test_balance_makes_cost_and_covariance_one_flat_matrix(d):
    cost, covariance = lopsided(2, d), lopsided(2, d, seed=1)
    t = balance(cost, covariance)
    inverse = inverses(t)
    mapped, paid = t.mT @ covariance @ t, inverse @ cost @ inverse.mT
    power = torch.diagonal(mapped, dim1=1, dim2=2)
    torch.testing.assert_close(power.sum(1), torch.diagonal(covariance, dim1=1, dim2=2).sum(1), atol=0, rtol=2e-2)
    for matrix in (mapped, paid):
        diagonal = torch.diagonal(matrix, dim1=1, dim2=2)
        torch.testing.assert_close(diagonal, diagonal.mean(1, keepdim=True).expand(2, d), atol=0, rtol=5e-2)
    scale = (torch.diagonal(paid, dim1=1, dim2=2).sum(1) / power.sum(1))[:, None, None]
    assert ((paid - scale * mapped).norm() / paid.norm()).item() < 2e-2

    def price(t: torch.Tensor) -> torch.Tensor:
        i = inverses(t)
        return torch.einsum("hii->h", i @ cost @ i.mT) * torch.einsum("hii->h", t.mT @ covariance @ t)

    for other in (torch.eye(d).double().expand(2, d, d), rotate(cost), rotate(covariance)):
        assert (price(t) < 0.9 * price(other)).all()


def test_balance_follows_a_change_of_scales():
    """Large channels that queries undo, as trained models have, leave what is stored as it was."""
    cost, covariance = lopsided(1, 32), lopsided(1, 32, seed=1)
    scale = torch.ones(32, dtype=torch.float64)
    scale[torch.tensor([3, 11, 17])] = 64
    plain = balance(cost, covariance)
    scaled = balance(cost / scale / scale[:, None], covariance * scale * scale[:, None])
    stored, stored_scaled = plain.mT @ covariance @ plain, scaled.mT @ (covariance * scale * scale[:, None]) @ scaled
    ratio = stored_scaled.diagonal(dim1=1, dim2=2).sum() / stored.diagonal(dim1=1, dim2=2).sum()
    values, values_scaled = torch.linalg.eigvalsh(stored), torch.linalg.eigvalsh(stored_scaled / ratio)
    torch.testing.assert_close(values_scaled, values, atol=1e-3 * values.max().item(), rtol=2e-2)


@pytest.mark.parametrize("d", [16, 80, 128])
def test_shaped_noise_costs_less(d):
    cost = lopsided(2, d)
    t = balance(cost, lopsided(2, d, seed=1))
    shaping = shape_noise(t, cost)
    assert shaping.shape == (2, d, d) and not shaping.tril().any()
    x = torch.randn(500, 2, d, generator=torch.Generator().manual_seed(2))
    fmt, clip = RowFormat(d), torch.full((2,), 0.96)
    inverse = inverses(t)

    def paid(shaping) -> float:
        error = decode(encode(x, fmt, clip, shaping=shaping), fmt).double() - x.double()
        return torch.einsum("nhd,hde,nhe->", error, inverse @ cost @ inverse.mT, error).item()

    assert paid(shaping.float()) < 0.75 * paid(None)


def test_a_map_for_each_head_costs_less_than_a_shared_one():
    """Two heads whose costs and covariances have nothing to do with each other: in what the default method minimises."""
    cost, covariance = (torch.cat([lopsided(1, 16, seed=seed + head) for head in range(2)]) for seed in (10, 20))
    own = balance(cost, covariance)
    shared = balance(*(x.mean(0, keepdim=True).expand_as(x) for x in (cost, covariance)))

    def price(t):
        inverse = inverses(t)
        paid = torch.diagonal(inverse @ cost @ inverse.mT, dim1=-2, dim2=-1).sum(-1)
        return paid * torch.diagonal(t.mT @ covariance @ t, dim1=-2, dim2=-1).sum(-1)

    assert (price(own) < 0.7 * price(shared)).all()


def test_shaping_without_an_output_projection_or_a_signal():
    moment = random_moment(2, 16)
    zero = torch.zeros_like(moment)
    for statistics in (
        LayerStatistics(100, moment, moment, moment[:, 0] * 0, moment, moment[:, 0], moment, None, None),
        LayerStatistics(100, zero, zero, zero[:, 0], zero, zero[:, 0], zero, None, zero),
    ):
        found = methods.oscar_shaped(statistics)
        assert all(torch.isfinite(x).all() for _, _, x in found.tensors())


def test_inverses_are_right_when_threads_were_set():
    """In a process of its own: what goes wrong stays wrong, and other tests invert stacks too."""
    code = """
import torch
from oscar.format.linalg import inverses
torch.set_num_threads(2)
for d in (160, 192, 256):
    t = torch.randn(8, d, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    error = (inverses(t) @ t - torch.eye(d, dtype=torch.float64)).abs().max().item()
    assert error < 1e-8, (d, error)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
