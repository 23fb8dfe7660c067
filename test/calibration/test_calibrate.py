"""Capture and calibration on tiny random models: what is counted, what is refused, and same inputs, same bytes."""

import dataclasses
import json

import pytest
import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from oscar.calibration.calibrate import CalibrationOptions, calibrate
from oscar.calibration.clip_search import GRID
from oscar.calibration.heldout import attend_mixed
from oscar.calibration.report import warnings
from oscar.calibration.run_transformers import capturing, check_supported
from oscar.errors import OscarError
from oscar.format import artifact as artifacts
from oscar.methods.statistics import LayerStatistics, MomentSums, difficulty

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


def test_capture_is_what_attention_sees(family, make_model, monkeypatch):
    """K and V equal the model's own cache, and attention over what was captured gives the captured output."""
    monkeypatch.setattr("oscar.calibration.run_transformers._QUERIES_AT_ONCE", 16)  # three tiles where scores are formed
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
        (lambda: transformers.Qwen3NextConfig(), "layer_types has linear_attention"),
        (lambda: transformers.MambaConfig(), "linear-attention or Mamba layers"),
        (lambda: transformers.Llama4TextConfig(), "chunked attention"),
    ],
)
def test_refused_by_name(config, reason):
    with pytest.raises(OscarError, match=reason):
        check_supported(config())


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3Text", "Qwen3"])
def test_what_serving_refuses_is_said_in_the_log_and_in_the_report(name, tiny_models, tmp_path, caplog):
    """Calibration takes these models before serving does; nobody finds that out at the start of a server."""
    artifact = calibrate(quick(tiny_models(name), method="hadamard", tokens=256))
    artifacts.save(artifact, tmp_path / "a")
    said = [line for line in warnings(artifacts.load(tmp_path / "a")) if "--kv-quant oscar" in line]
    logged = [record.getMessage() for record in caplog.records if "--kv-quant oscar" in record.getMessage()]
    if name == "Qwen3":
        assert not said and not logged and "not_served" not in artifact.provenance
        return
    (line,) = said
    assert logged == [f"oscar: {line}"] and "does not serve this model yet" in line
    assert "sliding-window attention" in line and "is not in the 2-bit format yet" in line
    assert ("soft cap" in line) == (name == "Gemma2")


def test_same_inputs_same_bytes(tiny_models, tmp_path):
    for name in ("once", "again"):
        artifacts.save(calibrate(quick(tiny_models(chat=True))), tmp_path / name)
    assert (tmp_path / "once").read_bytes() == (tmp_path / "again").read_bytes()
    artifacts.save(calibrate(quick(tiny_models(chat=True), seed=1)), tmp_path / "other")
    assert (tmp_path / "once").read_bytes() != (tmp_path / "other").read_bytes()


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_artifact_loads_for_its_model(name, tiny_models, tmp_path):
    folder = tiny_models(name)
    artifact = calibrate(quick(folder, method="oscar"))
    artifacts.save(artifact, tmp_path / "a")
    loaded = artifacts.load(tmp_path / "a", artifacts.ModelIdentity.from_path(folder))
    held_out = loaded.provenance["held_out"]
    fit = sum(d["tokens"] for d in loaded.provenance["data"])
    assert loaded.num_tokens == fit == 1024 - held_out["tokens"]
    assert sorted(held_out["layers"]) == ["0", "1"]
    for layer in loaded.layers.values():
        for t in (layer.k.transform, layer.v.transform):
            torch.testing.assert_close(t @ t.mT, torch.eye(t.shape[-1]).expand_as(t), atol=1e-5, rtol=0)
    assert json.loads(json.dumps(loaded.provenance)) == loaded.provenance
    assert str(folder) not in json.dumps(loaded.provenance)


def test_identity_is_the_plain_control(tiny_models):
    artifact = calibrate(quick(tiny_models(), method="identity"))
    errors = artifact.provenance["held_out"]["all"]
    assert artifact.num_tokens == 0  # no statistics, nothing counted
    assert all(torch.equal(layer.k.transform, torch.eye(32).expand(2, 32, 32)) for layer in artifact.layers.values())
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
    with pytest.raises(OscarError, match="layer 1, value"):
        calibrate(quick(tmp_path, text=(tmp_path / "t.txt",)))


def test_too_few_tokens(tiny_models, tmp_path):
    with pytest.raises(OscarError, match="too few tokens: expected at least 64"):
        calibrate(quick(tiny_models(), tokens=40))
    file = tmp_path / "short.txt"
    file.write_text("a few words")
    with pytest.raises(OscarError, match="too few tokens"):
        calibrate(quick(tiny_models(), text=(file,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 48}, "group_size must divide head_dim"),
        ({"method": "magic"}, "method must be one of"),
        ({"k_clip": 1.5}, "k_clip must be in"),
        ({"sink_tokens": -1}, "sink_tokens must not be negative"),
        ({"device": "nowhere"}, "expected a device"),
        ({"clip": "best"}, "clip must be one of paper, search"),
        ({"clip": "search", "k_clip": 0.9}, "expected either a search or fixed quantiles"),
        ({"from_stats": "f", "text": ("t",)}, "expected no --text beside it"),
        ({"from_stats": "f", "save_stats": "g"}, "expected no --save-stats beside it"),
        ({"from_stats": "f"}, "expected a file of statistics, found none"),
    ],
)
def test_bad_options(changes, message, tiny_models):
    with pytest.raises(match=message):
        calibrate(quick(tiny_models(), **changes))


def test_missing_weights_are_noticed(tmp_path, make_model, make_tokenizer):
    model = make_model("Qwen3")
    weights = {k: v for k, v in model.state_dict().items() if "layers.1.self_attn.k_proj" not in k}
    model.save_pretrained(tmp_path, state_dict=weights)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(OscarError, match=r"lack model.layers.1.self_attn.k_proj.weight"):
        calibrate(quick(tmp_path))


def test_sequences_are_as_long_as_the_context(tiny_models, tmp_path, monkeypatch):
    """The model's context length, unless it or the budget is longer than the cap, or the user says."""
    (tmp_path / "t.txt").write_text(PROSE * 100)

    def longest(**changes) -> int:
        options = CalibrationOptions(tiny_models(), text=(tmp_path / "t.txt",), tokens=2000, progress=False, **changes)
        return calibrate(options).provenance["longest_sequence"]

    assert longest() == 512 and longest(max_length=4096) == 512 and longest(max_length=100) == 100
    monkeypatch.setattr("oscar.config.LONGEST_SEQUENCE", 300)
    assert longest() == 300


def test_skipped_layers_change_nothing_in_the_others(tiny_models):
    whole, part = (
        calibrate(quick(tiny_models(), clip="search")),
        calibrate(quick(tiny_models(), clip="search", skip_layers=(0,))),
    )
    assert part.native_layers == [0] and whole.native_layers == []
    for side, name, tensor in part.layers[1].tensors():
        assert torch.equal(tensor, getattr(getattr(whole.layers[1], side), name))
    held_out = [a.provenance["held_out"]["layers"] for a in (whole, part)]
    assert held_out[1] == {"1": held_out[0]["1"]}


def saved(tmp_path, model, **changes) -> bytes:
    """Bytes of the artifact that these options give."""
    artifacts.save(calibrate(quick(model, **changes)), tmp_path / "a")
    return (tmp_path / "a").read_bytes()


@pytest.mark.parametrize("method, clip", [("oscar", "paper"), ("raw", "paper"), ("oscar", "search"), ("hadamard", "paper")])
def test_saved_statistics_give_the_same_artifact(method, clip, tiny_models, tmp_path):
    model, stats = tiny_models(chat=True), tmp_path / "stats"
    calibrate(quick(model, save_stats=stats))
    direct = saved(tmp_path, model, method=method, clip=clip)
    again = saved(tmp_path, model, method=method, clip=clip, from_stats=stats, tokens=5000, seed=9)
    if method == "hadamard":  # it reads no statistics, so a direct run keeps none to draw
        direct, again = (artifacts.load(tmp_path / "a") for _ in range(2))
        assert direct.provenance["held_out"] == again.provenance["held_out"]
    else:
        assert direct == again


def test_saved_surrogate_statistics(tiny_models, tmp_path):
    model, stats = tiny_models(), tmp_path / "stats"
    calibrate(quick(model, save_stats=stats))
    with pytest.raises(OscarError, match="expected the surrogate moments that --method oscar-surrogate reads"):
        calibrate(quick(model, method="oscar-surrogate", from_stats=stats))
    calibrate(quick(model, method="oscar-surrogate", save_stats=stats))
    direct = saved(tmp_path, model, method="oscar-surrogate")
    assert direct == saved(tmp_path, model, method="oscar-surrogate", from_stats=stats)


def test_statistics_of_another_model_or_changed_are_refused(tiny_models, tmp_path):
    stats = tmp_path / "stats"
    calibrate(quick(tiny_models(), save_stats=stats))
    with pytest.raises(OscarError, match="statistics of another model: rope is .* in the statistics"):
        calibrate(quick(tiny_models(rope_theta=7.0), from_stats=stats))
    data = bytearray(stats.read_bytes())
    data[-20] ^= 1
    stats.write_bytes(data)
    with pytest.raises(OscarError, match=r"(layers|held_out)\.\S+ was changed .*--save-stats` again"):
        calibrate(quick(tiny_models(), from_stats=stats))
    stats.write_bytes(data[:-9])
    with pytest.raises(OscarError, match="not a whole safetensors file"):
        calibrate(quick(tiny_models(), from_stats=stats))
    artifacts.save(calibrate(quick(tiny_models())), stats)
    with pytest.raises(OscarError, match="expected an OSCAR statistics file"):
        calibrate(quick(tiny_models(), from_stats=stats))


def test_bad_text_is_found_before_the_model_is_loaded(tiny_models, tmp_path, monkeypatch):
    from oscar.calibration import calibrate as module

    def never(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr(module, "load_model", never)
    (tmp_path / "t.jsonl").write_text('{"text": "fine"}\nnot JSON')
    with pytest.raises(OscarError, match="line 2"):
        calibrate(quick(tiny_models(), text=(tmp_path / "t.jsonl",)))
    (tmp_path / "t.txt").write_text("a few words")
    with pytest.raises(OscarError, match="too few tokens: expected at least 64 for head_dim 32, got 10 found in the text"):
        calibrate(quick(tiny_models(), text=(tmp_path / "t.txt",)))


def test_one_transform_each_halves_the_error_of_unrelated_heads(tmp_path, make_model, make_tokenizer):
    """A model whose two KV heads each have one strong direction of their own, in K (where queries have it too) and in V.

    K's lies in channels that RoPE hardly turns. Sharing costs many times the error, and is warned about.
    """
    model, generator = make_model("Llama", head_dim=64, rope_theta=1e9), torch.Generator().manual_seed(5)
    slow = torch.tensor([*range(16, 32), *range(48, 64)])
    with torch.no_grad():
        k_basis, v_basis = torch.zeros(2, 64), torch.randn(2, 64, generator=generator)
        k_basis[:, slow] = torch.randn(2, 32, generator=generator)
        for layer in model.model.layers:
            attention = layer.self_attn
            for projection, basis in ((attention.q_proj, k_basis), (attention.k_proj, k_basis), (attention.v_proj, v_basis)):
                weight = projection.weight.view(2, -1, 64, 48).mul_(0.002)
                strong = torch.randn(*weight.shape[:2], 1, 48, generator=generator)
                weight += torch.nn.functional.normalize(basis, dim=-1)[:, None, :, None] * strong
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    options = {"method": "oscar", "sink_tokens": 4, "recent_tokens": 16}
    own, shared = (calibrate(quick(tmp_path, share_heads=s, **options)) for s in (False, True))
    for name in ("k", "v", "attention", "served"):
        assert own.provenance["held_out"]["all"][name] < 0.5 * shared.provenance["held_out"]["all"][name], name
    assert not any("share one transform" in line for line in warnings(own))
    assert any("share one transform" in line for line in warnings(shared))


def test_searched_artifact(tiny_models):
    artifact = calibrate(quick(tiny_models(), clip="search", sink_tokens=2, recent_tokens=8))
    assert artifact.provenance["clip"] == {"how": "search", "grid": list(GRID)}
    clips = torch.cat([torch.cat((layer.k.clip, layer.v.clip)) for layer in artifact.layers.values()])
    assert all(any(abs(c - g) < 1e-6 for g in GRID) for c in clips.tolist())
    paper = calibrate(quick(tiny_models(), sink_tokens=2, recent_tokens=8))
    assert artifact.provenance["held_out"]["tokens"] == (paper.provenance["held_out"]["tokens"] + 1) // 2


def test_output_projection_is_found(family, make_model):
    model = make_model(family)
    for capture, layer in zip(captures(model, random_ids(1, 8)), model.model.layers, strict=True):
        projection = layer.self_attn.dense if family == "Phi" else layer.self_attn.o_proj
        assert capture.output_weight is projection.weight


def test_shape_of_rows():
    """One channel of eight ten times as large; a target with all its energy in one direction."""
    k = torch.diag(torch.tensor([100.0] + [1.0] * 7).double()).expand(2, 8, 8)
    one = torch.zeros(2, 8, 8).double()
    one[:, 0, 0] = 5
    eye = torch.eye(8).double().expand(2, 8, 8)
    found = difficulty(LayerStatistics(10, one, k, k[:, 0], eye, eye[:, 0], eye))
    assert found["k_outlier"] == 10 and found["v_outlier"] == 1
    assert found["k_spectrum"] == [1, 1, 1, 1] and found["v_spectrum"] == [0.125, 0.25, 0.5, 1]


def quick_model(folder, make_model, make_tokenizer) -> CalibrationOptions:
    """Options for a tiny model saved in this folder."""
    make_model("Qwen3").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return quick(folder)


def test_options_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CalibrationOptions("m").tokens = 3
