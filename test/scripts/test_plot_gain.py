"""The README's picture is drawn from what is counted and measured."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import setups

from oscar.embedded import embedded_model

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "needles.json"


@pytest.fixture
def plot_gain():
    spec = importlib.util.spec_from_file_location("plot_gain", ROOT / "scripts" / "bench" / "plot_gain.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("tokens", "bits"), [(2048, 5.11), (131072, 2.31)])
def test_bits_of_the_marked_lengths(plot_gain, tokens, bits):
    assert tokens in plot_gain.MARKED
    assert round(plot_gain.bits_per_element(embedded_model(), tokens, (64, 256)), 2) == bits


def test_bits_without_windows_do_not_depend_on_the_length(plot_gain):
    assert {round(plot_gain.bits_per_element(embedded_model(), n, (0, 0)), 2) for n in plot_gain.LENGTHS} == {2.27}


def test_configurations_are_named_with_their_windows():
    arms = json.loads(FIGURES.read_text())["arms"].items()
    names = [setups.label(name, arm["cache"]) for name, arm in arms]
    assert names == ["BF16", "oscar-shaped, windows 64/256", "plain INT2, no windows"]


def test_the_picture_is_drawn(plot_gain, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plot_gain.py", str(FIGURES), str(tmp_path / "gain.png")])
    plot_gain.main()
    assert (tmp_path / "gain.png").read_bytes()[:4] == b"\x89PNG"
