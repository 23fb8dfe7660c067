"""The ablation's arms are what their names say."""

import importlib.util
from pathlib import Path

import pytest
import torch

from oscar.format.identity import ModelIdentity
from oscar.format.linalg import inverses
from oscar.methods import transform
from oscar.methods.statistics import LayerStatistics

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "ablation.py"


@pytest.fixture(scope="module")
def ablation():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("ablation", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def statistics():
    """Two heads of 32 channels with correlations, and a mean in the keys."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(2, 400, 32, generator=generator, dtype=torch.float64) @ torch.randn(2, 32, 32).double() for _ in range(6)
    ]
    rows[1] += 3
    q, k, v, s, surrogate, w = (x.mT @ x / 400 for x in rows)
    return LayerStatistics(400, q, k, rows[1].mean(1), v, rows[2].mean(1), s, surrogate, w)


def test_arms(ablation, statistics):
    model = ModelIdentity("Qwen3ForCausalLM", 1, 4, 2, 32, 32, {}, "", None)
    arms = {arm.name: arm for arm in ablation.make_arms({0: statistics}, model)}
    assert list(arms) == [*ablation.PAPER, *ablation.OURS]
    codecs = {name: arm.codecs[0] for name, arm in arms.items()}
    default, found = codecs["oscar-shaped"], transform.oscar_shaped(statistics)
    assert torch.equal(default.k_transform, found.k_transform.float().double())
    assert torch.equal(default.v_shaping, found.v_shaping.float())

    def differ(name: str) -> set[str]:
        other = codecs[name]
        return {
            key
            for key, x in vars(default).items()
            if not (
                torch.equal(x, y)
                if isinstance(x, torch.Tensor) and isinstance(y := vars(other)[key], torch.Tensor)
                else x == vars(other)[key]
            )
        }

    assert differ("no shaping") == {"k_shaping", "v_shaping"}
    assert differ("no shaping of K") == {"k_shaping"}
    assert differ("keys rotated (U.H.P), not balanced") == {"k_transform", "q_transform", "k_shaping"}
    assert differ("W_O unknown") == {"v_transform", "v_inverse", "v_shaping"}
    assert differ("value mean off, put back after") == {"v_transform", "v_inverse", "v_shaping", "v_mean"}
    assert differ("Gaussian level table") == {"k_levels", "v_levels"}
    assert differ("clip 0.98 / 0.96") == {"k_clip", "v_clip"}
    assert differ("groups of half a row (2.5 bits)") == {"k_format", "v_format"}
    assert torch.equal(codecs["U.H.P (oscar)"].k_transform, transform.oscar(statistics).k_transform.float().double())


@pytest.mark.parametrize("name", ["half_balanced", "sorted_directions"])
def test_changed_maps_still_balance_or_rotate(name, ablation, statistics):
    """Half-way maps undo less of the spread; the order of directions changes no cost at all."""
    full = transform.oscar_shaped(statistics)
    changed = getattr(ablation, name)(statistics, full)

    def price(t: torch.Tensor) -> torch.Tensor:
        inverse = inverses(t)
        covariance = statistics.k_moment - statistics.k_mean.unsqueeze(-1) * statistics.k_mean.unsqueeze(-2)
        paid = torch.einsum("hii->h", inverse @ statistics.q_moment @ inverse.mT)
        return paid * torch.einsum("hii->h", t.mT @ covariance @ t)

    best, other = price(full.k_transform), price(changed.k_transform)
    if name == "sorted_directions":
        torch.testing.assert_close(other, best, atol=0, rtol=1e-9)
    else:
        assert (best < other).all() and (other < price(transform.oscar(statistics).k_transform)).all()
