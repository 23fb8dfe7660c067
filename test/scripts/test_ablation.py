"""The ablation's configurations are what their names say."""

import importlib.util
from pathlib import Path

import pytest
import torch

from oscar import methods
from oscar.format.identity import ModelIdentity
from oscar.format.linalg import inverses
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


def test_configurations(ablation, statistics):
    model = ModelIdentity("Qwen3ForCausalLM", 1, 4, 2, 32, 32, {}, "", None)
    made = {configuration.name: configuration for configuration in ablation.make_configurations({0: statistics}, model)}
    assert list(made) == [*ablation.PAPER, *ablation.OURS]
    codecs = {name: configuration.codecs[0] for name, configuration in made.items()}
    default, found = codecs["oscar-shaped"], methods.oscar_shaped(statistics)
    assert torch.equal(default.k.transform, found.k.transform.float().double())
    assert torch.equal(default.v.shaping, found.v.shaping.float())

    def differ(name: str) -> set[str]:
        def same(x, y) -> bool:
            return torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x is y or x == y

        other, pairs = codecs[name], {}
        for side in ("k", "v"):
            mine, theirs = vars(getattr(default, side)), vars(getattr(other, side))
            pairs |= {f"{side}.{key}": (mine[key], theirs[key]) for key in mine}
        return {key for key, pair in pairs.items() if not same(*pair)}

    assert differ("no shaping") == {"k.shaping", "v.shaping"}
    assert differ("no shaping of K") == {"k.shaping"}
    assert differ("keys rotated (U.H.P), not balanced") == {"k.transform", "k.read_transform", "k.shaping"}
    assert differ("W_O unknown") == {"v.transform", "v.read_transform", "v.shaping"}
    assert differ("clip 0.98 / 0.96") == {"k.clip", "v.clip"}
    assert differ("groups of half a row (2.5 bits)") == {"k.fmt", "v.fmt"}
    assert torch.equal(codecs["U.H.P (oscar)"].k.transform, methods.oscar(statistics).k.transform.float().double())


@pytest.mark.parametrize("name", ["half_balanced", "sorted_directions"])
def test_changed_maps_still_balance_or_rotate(name, ablation, statistics):
    """Half-way maps undo less of the spread; the order of directions changes no cost at all."""
    full = methods.oscar_shaped(statistics)
    changed = getattr(ablation, name)(statistics, full)

    def price(t: torch.Tensor) -> torch.Tensor:
        inverse = inverses(t)
        covariance = statistics.k_moment - statistics.k_mean.unsqueeze(-1) * statistics.k_mean.unsqueeze(-2)
        paid = torch.einsum("hii->h", inverse @ statistics.q_moment @ inverse.mT)
        return paid * torch.einsum("hii->h", t.mT @ covariance @ t)

    best, other = price(full.k.transform), price(changed.k.transform)
    if name == "sorted_directions":
        torch.testing.assert_close(other, best, atol=0, rtol=1e-9)
    else:
        assert (best < other).all() and (other < price(methods.oscar(statistics).k.transform)).all()
