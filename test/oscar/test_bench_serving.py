"""The scripts that measure served speed: equal memory is divided as they say, and the random model is what it claims."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("per_token, per_request", [(2308, 6 << 20), (16384, 0)])
def test_the_largest_batch_fits_its_budget_and_one_more_does_not(per_token, per_request, monkeypatch):
    arm = script("bench_serving", monkeypatch).Arm("x", [], per_token, per_request)
    budget, tokens = 600 << 20, 16416
    batch = arm.largest_batch(budget, tokens)
    assert arm.tokens(budget, batch) >= batch * tokens
    assert arm.tokens(budget, batch + 1) < (batch + 1) * (tokens + 64)
    assert (batch + 1) * per_request + arm.tokens(budget, batch) * per_token <= budget


def test_a_random_model_repeats_and_has_its_geometry(tmp_path, monkeypatch):
    make = script("make_random_model", monkeypatch).make
    size = make(tmp_path / "a", layers=1, seed=3)
    make(tmp_path / "b", layers=1, seed=3)
    assert size > 30 << 20
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (16, 8, 128)
    with safe_open(tmp_path / "a/model.safetensors", "pt") as file:
        assert str(file.get_tensor("model.layers.0.mlp.down_proj.weight").dtype) == "torch.bfloat16"
        assert not any(".layers.1." in name for name in file.keys())
