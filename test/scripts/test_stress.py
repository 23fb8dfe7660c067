"""Stress variants compute the same, and have the keys and values they are made for."""

import json

import pytest
import stress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oscar.calibration.run_transformers import capturing

IDS = torch.arange(3, 51)


def _rows(model) -> dict[int, tuple]:
    """layer -> (k, v), [num_kv_heads, num_tokens, head_dim] each."""
    seen = {}
    with capturing(model, lambda c: seen.update({c.layer_id: (c.k[0], c.v[0])})) as run:
        run(IDS.unsqueeze(0))
    return seen


@pytest.mark.parametrize("name", stress.VARIANTS)
def test_variant_computes_the_same(name, make_model):
    model = make_model("Qwen3")
    with torch.inference_mode():
        before = model(IDS.unsqueeze(0)).logits
    change = stress.apply(name, model, IDS)
    with torch.inference_mode():
        after = model(IDS.unsqueeze(0)).logits
    assert change == float((after - before).abs().max())
    # Factors that are powers of two cancel to the last bit, whatever the order of a sum; a general basis rounds.
    assert change == 0 if name != "unrelated-heads" else 0 < change < 1e-3


@pytest.mark.parametrize(("name", "k_channels", "v_channels"), [("k-outliers", 8, 0), ("v-outliers", 0, 4), ("outliers", 8, 4)])
def test_outliers_are_where_they_should_be(name, k_channels, v_channels, make_model):
    model = make_model("Qwen3")
    before = _rows(model)
    stress.apply(name, model, IDS)
    for layer_id, new in _rows(model).items():
        for x, y, channels in zip(before[layer_id], new, (k_channels, v_channels), strict=True):
            ratio = (y.square().sum(1) / x.square().sum(1)).sqrt()  # [num_kv_heads, head_dim]
            large = (ratio / stress.FACTOR - 1).abs() < 1e-4
            assert (large.sum(-1) == channels).all() and (ratio[~large] - 1).abs().max() < 1e-4


def test_offset_is_made_large_where_the_mean_is(make_model):
    model = make_model("Qwen3")
    before = _rows(model)
    stress.apply("k-offset", model, IDS)
    for layer_id, (k, _) in _rows(model).items():
        share = [float(x.mean(1).square().sum() / x.square().mean(1).sum()) for x in (before[layer_id][0], k)]
        assert share[1] > 1.3 * share[0], f"layer {layer_id}: share of the mean in the keys' energy {share}"


def test_unrelated_heads_have_oblique_values(make_model):
    model = make_model("Qwen3")
    before = _rows(model)
    stress.apply("unrelated-heads", model, IDS)
    for layer_id, (k, v) in _rows(model).items():
        torch.testing.assert_close(k.abs(), before[layer_id][0].abs(), atol=1e-3, rtol=1e-3)
        for head in range(len(v)):
            found = torch.linalg.lstsq(before[layer_id][1][head].double(), v[head].double()).solution
            values = torch.linalg.svdvals(found)
            assert float(values[0] / values[-1]) == pytest.approx(stress.CONDITION, rel=0.05)


def test_written_variant_loads_and_keeps_the_folder(tmp_path, make_model):
    from oscar.embedded import embedded_model

    source = embedded_model()
    stress.write("outliers", source, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    model, original = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (tmp_path, source))
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path)("The access code of amber falcon is 48213.")["input_ids"]])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, atol=1e-4, rtol=0)


def test_refusals(make_model):
    with pytest.raises(ValueError, match="variant must be one of plain"):
        stress.apply("nothing", make_model("Qwen3"), IDS)
    with pytest.raises(ValueError, match="expected a Qwen3 model in float32 without projection biases, got llama"):
        stress.apply("outliers", make_model("Llama"), IDS)


def test_a_broken_variant_is_noticed(make_model, monkeypatch):
    def broken(model, passage):
        model.model.layers[0].self_attn.k_norm.weight[0] *= 2

    monkeypatch.setitem(stress.VARIANTS, "broken", broken)
    with pytest.raises(RuntimeError, match="broken was to change no output, a logit moved by"):
        stress.apply("broken", make_model("Qwen3"), IDS)
