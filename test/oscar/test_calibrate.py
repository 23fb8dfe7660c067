"""Capture and calibration on tiny random models: what is counted, what is refused, and same inputs, same bytes."""

import dataclasses
import json

import pytest
import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from oscar import artifact as artifacts
from oscar import text
from oscar.calibrate import CalibrationError, CalibrationOptions, calibrate
from oscar.capture import UnsupportedModelError, capturing, check_supported
from oscar.heldout import attend_mixed
from oscar.report import warnings
from oscar.statistics import MomentSums, NonFiniteError

PROSE = "Second moments are summed in double precision while the model reads; nothing else is kept. "


def quick(model, **changes) -> CalibrationOptions:
    return CalibrationOptions(**{"model": model, "tokens": 1024, "max_length": 128, "progress": False} | changes)


def captures(model, ids, mask=None) -> list:
    seen = []
    with capturing(model, seen.append) as run:
        run(ids, mask)
    return seen


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def test_capture_is_what_attention_sees(family, make_model):
    """K and V equal the model's own cache, and attention over what was captured gives the captured output."""
    model, ids = make_model(family), random_ids(1, 40)
    seen = captures(model, ids)
    assert [c.layer_id for c in seen] == [0, 1]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    for c, layer in zip(seen, cache.layers, strict=True):
        kept = layer.keys.shape[2]  # a sliding window's cache keeps the newest
        torch.testing.assert_close(c.k[:, :, -kept:], layer.keys, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(c.v[:, :, -kept:], layer.values, atol=2e-4, rtol=2e-4)
        distance = torch.arange(40)[:, None] - torch.arange(40)[None, :]
        visible = (distance >= 0) & (distance < (c.sliding_window or 40))
        none = torch.zeros_like(visible)
        output = attend_mixed(c.q[0], (c.k[0], c.v[0]), (c.k[0], c.v[0]), none, visible, c.sm_scale, c.logit_cap)
        torch.testing.assert_close(output.transpose(0, 1), c.output[0], atol=1e-4, rtol=1e-4)


def test_padding_is_not_counted(make_model):
    model, ids = make_model("Qwen3"), random_ids(2, 48)
    mask = torch.ones_like(ids)
    mask[1, :17] = 0  # padded on the left, as batches are for generation
    padded, alone = MomentSums(0), MomentSums(0)
    padded.add(*captures(model, ids, mask)[0].tokens())
    for row in (ids[:1], ids[1:, 17:]):
        alone.add(*captures(model, row)[0].tokens())
    padded, alone = padded.finish(), alone.finish()
    assert padded.num_tokens == alone.num_tokens == 48 + 31
    # Positions of the padded row differ (the library numbers the padding too); V of layer 0 does not see positions.
    torch.testing.assert_close(padded.v_moment, alone.v_moment, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(padded.v_mean, alone.v_mean, atol=1e-4, rtol=1e-5)


def test_hooks_are_undone_even_after_an_error(make_model):
    model, ids = make_model("Qwen3"), random_ids(1, 8)
    before = model.config._attn_implementation, set(AttentionInterface().keys()), set(AttentionMaskInterface().keys())

    def fail(capture):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), capturing(model, fail) as run:
        run(ids)
    after = model.config._attn_implementation, set(AttentionInterface().keys()), set(AttentionMaskInterface().keys())
    assert after == before


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: transformers.DeepseekV3Config(), "latent attention"),
        (lambda: transformers.BartConfig(), "encoder-decoder"),
        (lambda: transformers.GptOssConfig(), "learned attention sinks"),
        (lambda: transformers.Qwen3NextConfig(), "layers of kind linear_attention"),
        (lambda: transformers.MambaConfig(), "layers of kind"),
    ],
)
def test_refused_by_name(config, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(config())


def test_same_inputs_same_bytes(tiny_models, tmp_path):
    for name in ("once", "again"):
        artifacts.save(calibrate(quick(tiny_models(chat=True))), tmp_path / name)
    assert (tmp_path / "once").read_bytes() == (tmp_path / "again").read_bytes()
    artifacts.save(calibrate(quick(tiny_models(chat=True), seed=1)), tmp_path / "other")
    assert (tmp_path / "once").read_bytes() != (tmp_path / "other").read_bytes()


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_artifact_loads_for_its_model(name, tiny_models, tmp_path):
    folder = tiny_models(name)
    artifact = calibrate(quick(folder))
    artifacts.save(artifact, tmp_path / "a")
    loaded = artifacts.load(tmp_path / "a", artifacts.ModelIdentity.from_path(folder))
    held_out = loaded.provenance["held_out"]
    fit = sum(d["tokens"] for d in loaded.provenance["data"])
    assert loaded.num_tokens == fit == 1024 - held_out["tokens"]
    assert sorted(held_out["layers"]) == ["0", "1"]
    for layer in loaded.layers.values():
        for t in (layer.k_transform, layer.v_transform):
            torch.testing.assert_close(t @ t.mT, torch.eye(t.shape[-1]).expand_as(t), atol=1e-5, rtol=0)
    assert json.loads(json.dumps(loaded.provenance)) == loaded.provenance
    assert str(folder) not in json.dumps(loaded.provenance)


def test_identity_is_the_plain_control(tiny_models):
    artifact = calibrate(quick(tiny_models(), method="identity"))
    errors = artifact.provenance["held_out"]["all"]
    assert artifact.num_tokens == 0  # no statistics, nothing counted
    assert all(torch.equal(layer.k_transform, torch.eye(32).expand(2, 32, 32)) for layer in artifact.layers.values())
    for side in ("k", "v", "attention"):
        assert errors[side] == pytest.approx(errors[f"plain_{side}"], rel=1e-5)


def test_windows_that_cover_the_sequence_leave_no_error(tiny_models):
    held_out = calibrate(quick(tiny_models(), sink_tokens=8, recent_tokens=128)).provenance["held_out"]["all"]
    assert held_out["served"] < 1e-6 < held_out["attention"]
    narrow = calibrate(quick(tiny_models(), sink_tokens=4, recent_tokens=8)).provenance["held_out"]["all"]
    assert 0 < narrow["served"] < narrow["attention"]


def test_sources_share_the_tokens_evenly(tiny_models, tmp_path):
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text(PROSE * 10)
    long.write_text(PROSE * 2000)
    provenance = calibrate(quick(tiny_models(), text=(short, long))).provenance
    tokens = {d["source"]: d["tokens"] for d in provenance["data"]}
    assert tokens["short.txt"] == pytest.approx(tokens["long.txt"], rel=0.1)
    assert [s["source"] for s in provenance["held_out"]["sources"]] == ["short.txt", "long.txt"]


def test_nonfinite_weights_name_layer_and_side(tmp_path, make_model, make_tokenizer):
    model = make_model("Qwen3")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3] = float("nan")
    model.save_pretrained(tmp_path)
    (tmp_path / "t.txt").write_text(PROSE * 20)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(NonFiniteError, match="layer 1, value"):
        calibrate(quick(tmp_path, text=(tmp_path / "t.txt",)))


def test_too_few_tokens(tiny_models, tmp_path):
    with pytest.raises(CalibrationError, match="too few tokens: expected at least 64"):
        calibrate(quick(tiny_models(), tokens=40))
    file = tmp_path / "short.txt"
    file.write_text("a few words")
    with pytest.raises(CalibrationError, match="too few tokens"):
        calibrate(quick(tiny_models(), text=(file,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 48}, "group_size must divide head_dim"),
        ({"method": "magic"}, "method must be one of"),
        ({"k_clip": 1.5}, "k_clip must be in"),
        ({"sink_tokens": -1}, "sink_tokens must not be negative"),
        ({"device": "nowhere"}, "expected a device"),
    ],
)
def test_bad_options(changes, message, tiny_models):
    with pytest.raises(CalibrationError, match=message):
        calibrate(quick(tiny_models(), **changes))


def test_missing_weights_are_noticed(tmp_path, make_model, make_tokenizer):
    model = make_model("Qwen3")
    weights = {k: v for k, v in model.state_dict().items() if "layers.1.self_attn.k_proj" not in k}
    model.save_pretrained(tmp_path, state_dict=weights)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CalibrationError, match=r"lack model.layers.1.self_attn.k_proj.weight"):
        calibrate(quick(tmp_path))


def test_model_text_has_its_length_and_is_seeded(make_model, make_tokenizer):
    model, tokenizer = make_model("Qwen3"), make_tokenizer(chat=True)
    texts = [text.from_model(model, tokenizer, 350, 100, seed) for seed in (3, 3, 4)]
    tokens = [torch.cat([s.tokens for s in sequences]) for sequences in texts]
    assert [(len(s.tokens), s.held_out) for s in texts[0]] == [(100, False)] * 3 + [(15, False), (35, True)]
    assert torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[0], tokens[2])
    assert int(tokens[0].max()) < len(tokenizer)  # never an entry that pads the model's vocabulary
    assert sum(len(s.tokens) for s in text.from_model(model, None, 20, 10, 0)) == 20


def test_model_text_is_what_plain_sampling_gives(make_model, make_tokenizer, monkeypatch):
    """The cache that grows by doubling changes nothing but the time."""
    for family in ("Qwen3", "Mistral"):  # Mistral has sliding windows
        model, tokenizer = make_model(family), make_tokenizer()
        ours = text.from_model(model, tokenizer, 200, 200, 0)
        with monkeypatch.context() as patch:
            patch.setattr(text, "_roomy_cache", lambda model: transformers.DynamicCache(config=model.config))
            plain = text.from_model(model, tokenizer, 200, 200, 0)
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(ours, plain, strict=True))


def test_share_keeps_sequences_long_and_holds_a_tenth_out():
    assert text.share(16384, 4096) == [(4096, False)] * 3 + [(2458, False), (1638, True)]
    assert text.share(100, 4096) == [(90, False), (10, True)]
    assert sum(n for n, _ in text.share(131072, 4096)) == 131072
    assert sum(n for n, held_out in text.share(131072, 4096) if held_out) == 13107


@pytest.mark.parametrize("repeats", [5, 100, 60000])
def test_text_files_of_any_size(repeats, tmp_path, make_tokenizer):
    """All of a small file in order; evenly spaced pieces of a large one, never cut inside a character."""
    file, tokenizer = tmp_path / "t.txt", make_tokenizer()
    file.write_text("aé漢😀" * repeats, encoding="utf-8")  # ten bytes, one token each
    taken = text.from_file(file, tokenizer, 1024, 128)
    total = min(1024, 10 * repeats)
    assert [(len(s.tokens), s.held_out) for s in taken] == text.share(total, 128)
    if 10 * repeats <= 1024:
        assert tokenizer.decode(torch.cat([s.tokens for s in taken])) == file.read_text(encoding="utf-8")


def test_mix_and_the_worse_source_are_said(tiny_models, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(PROSE * 40)
    artifact = calibrate(quick(tiny_models(), text=(tmp_path / "a.txt", tmp_path / "b.txt")))
    assert warnings(artifact) == []
    artifact.provenance["held_out"]["sources"][1]["attention"] *= 2
    assert len(warnings(artifact)) == 1 and warnings(artifact)[0].startswith("b.txt is clearly worse off than a.txt")


def test_options_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CalibrationOptions("m").tokens = 3
