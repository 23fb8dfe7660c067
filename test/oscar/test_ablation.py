"""The ablation's outliers change no output, and its simulated 2-bit attention is the model's own where nothing is coded."""

import importlib.util
from pathlib import Path

import pytest
import torch

from oscar.artifact import LayerTransforms
from oscar.codec import RowFormat

SCRIPT = Path(__file__).parents[2] / "scripts" / "ablation.py"


@pytest.fixture(scope="module")
def ablation():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("ablation", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_outliers_change_no_output(ablation, make_model):
    model, ids = make_model("Qwen3"), torch.arange(40).unsqueeze(0)
    with torch.inference_mode():
        before = model(ids, use_cache=True)
        ablation.add_outliers(model)
        after = model(ids, use_cache=True)
    torch.testing.assert_close(after.logits, before.logits, atol=1e-4, rtol=1e-5)
    for old, new in zip(before.past_key_values.layers, after.past_key_values.layers, strict=True):
        for x, y, channels in ((old.keys, new.keys, 8), (old.values, new.values, 4)):
            ratio = (y.square().sum((0, 2)) / x.square().sum((0, 2))).sqrt()  # [num_kv_heads, head_dim]
            large = (ratio / 16 - 1).abs() < 0.05
            assert (large.sum(-1) == channels).all() and (ratio[~large] - 1).abs().max() < 0.05


def test_quantised_attention_is_exact_inside_the_windows(ablation, make_model):
    model, ids = make_model("Qwen3"), torch.arange(30).unsqueeze(0)
    eye = torch.eye(32).expand(2, 32, 32)
    layers = dict.fromkeys(range(2), LayerTransforms(eye, eye, torch.ones(2), torch.ones(2)))
    with torch.inference_mode():
        before = model(ids).logits
        with ablation.quantised(model, layers, RowFormat(32), 0, 30):
            torch.testing.assert_close(model(ids).logits, before, atol=1e-3, rtol=1e-4)
        with ablation.quantised(model, layers, RowFormat(32), 0, 4):
            assert (model(ids).logits - before).abs().max() > 0.1
        torch.testing.assert_close(model(ids).logits, before, atol=0, rtol=0)
