"""Artifacts: what is written comes back; what was tampered with does not."""

import dataclasses
import hashlib
import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from oscar.errors import OscarError
from oscar.format.artifact import Artifact, cache_path, find, load, save
from oscar.format.identity import ModelIdentity
from oscar.format.sealed_file import seal
from oscar.format.side import LayerTransforms, Side, kv_heads_of_rank

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 32,
    "rope_theta": 5e4,
}


def make(**changes):
    eye = torch.eye(64).expand(2, 64, 64).clone()
    k, v = Side(eye, torch.full((2,), 0.96)), Side(eye, torch.full((2,), 0.92))
    fields = {
        "model": ModelIdentity.from_config(CONFIG),
        "method": "identity",
        "group_size": 64,
        "sink_tokens": 64,
        "recent_tokens": 256,
        "num_tokens": 100,
        "layers": {i: LayerTransforms(k, v) for i in range(2)},
        "provenance": {"seed": 0},
    }
    return Artifact(**fields | changes)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "a.safetensors"
    save(make(), path)
    return path


def test_round_trip_and_equal_bytes(saved, tmp_path):
    artifact = load(saved, ModelIdentity.from_config(CONFIG))
    assert artifact.k_format.row_bytes == 20 and sorted(artifact.layers) == [0, 1]
    assert torch.equal(artifact.layers[1].k.transform, torch.eye(64).expand(2, 64, 64))
    save(artifact, tmp_path / "b.safetensors")
    assert saved.read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def changed(layer, side, **tensors):
    return dataclasses.replace(layer, **{side: dataclasses.replace(getattr(layer, side), **tensors)})


def test_means_and_shaping_survive(tmp_path):
    artifact, triangle = make(), torch.rand(2, 64, 64).triu(1)
    artifact.layers[0] = changed(artifact.layers[0], "k", mean=torch.ones(2, 64))
    artifact.layers[1] = changed(artifact.layers[1], "v", shaping=triangle)
    save(artifact, tmp_path / "a.safetensors")
    again = load(tmp_path / "a.safetensors")
    assert again.layers[0].k.mean.sum() == 128 and torch.equal(again.layers[1].v.shaping, triangle)


def test_tensors_that_this_build_does_not_read_are_refused(saved, tmp_path):
    """Level tables and means of values could stand in a file of version 1."""
    for name, message in (
        ("k_levels", "layers.1.k_levels is nothing that this build reads"),
        ("v_mean", "v_mean: expected none"),
    ):
        with safe_open(saved, "pt") as file:
            header = json.loads(file.metadata()["oscar"])
            tensors = {key: file.get_tensor(key) for key in file.keys()} | {f"layers.1.{name}": torch.ones(2, 4)}
        for digest in ("digests", "tensor_digest", "header_digest"):
            del header[digest]
        save_file(tensors, tmp_path / "old.safetensors", {"oscar": seal(header, tensors)})
        with pytest.raises(OscarError, match=message):
            load(tmp_path / "old.safetensors")


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_byte_is_found(saved, where):
    data = bytearray(saved.read_bytes())
    (header_size,) = struct.unpack("<Q", data[:8])
    body = 8 + header_size
    data[{"first": body, "middle": (body + len(data)) // 2, "last": len(data) - 1}[where]] ^= 0x10
    saved.write_bytes(data)
    with pytest.raises(OscarError, match="tensor_digest|finite"):
        load(saved)


def test_any_flipped_bit_of_the_header_is_found(saved):
    """Every eighth bit, another one in each byte: lengths, names, offsets, spelling, digests and the padding."""
    data = saved.read_bytes()
    (header_size,) = struct.unpack("<Q", data[:8])
    for i in range(8 + header_size):
        flipped = bytearray(data)
        flipped[i] ^= 1 << i % 8
        saved.write_bytes(flipped)
        with pytest.raises(OscarError):
            load(saved)


@pytest.mark.parametrize("layer, part", [(0, "k_transform"), (1, "v_clip")])
def test_the_changed_tensor_is_named(tmp_path, layer, part):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    save(make(), path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    tensors[f"layers.{layer}.{part}"].view(-1)[0] += 0.01
    save_file(tensors, path, metadata)
    with pytest.raises(OscarError, match=f"layers.{layer}.{part} was changed after it was written"):
        load(path)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
def test_slices_of_ranks_rebuild_the_artifact(tp_size):
    """8 KV heads: slices side by side are the whole; with more ranks than heads, copies have the same bytes."""
    generator = torch.Generator().manual_seed(0)
    config = CONFIG | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}

    def random(*shape):
        return torch.rand(shape, generator=generator)

    layer = LayerTransforms(Side(random(8, 8, 8), random(8), mean=random(8, 8)), Side(random(8, 8, 8), random(8)))
    num_kv_heads = ModelIdentity.from_config(config).num_kv_heads
    ranks = [layer.of_heads(kv_heads_of_rank(num_kv_heads, rank, tp_size)) for rank in range(tp_size)]
    copies = max(1, tp_size // 8)
    for side, name, whole in layer.tensors():
        pieces = [getattr(getattr(rank, side), name) for rank in ranks]
        assert torch.equal(torch.cat(pieces[::copies]), whole)
        for first in range(0, tp_size, copies):
            assert all(torch.equal(pieces[first], p) for p in pieces[first : first + copies])
    assert ranks[0].v.mean is None


def test_ranks_that_do_not_fit():
    with pytest.raises(ValueError, match="--tp 3 must divide the model's 2 KV heads or be a multiple of them"):
        kv_heads_of_rank(2, 0, 3)
    with pytest.raises(ValueError, match="expected a rank from 0 to 1, got 2"):
        kv_heads_of_rank(2, 2, 2)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncation_is_found(saved, keep):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(OscarError, match="not a whole safetensors file"):
        load(saved)


@pytest.mark.parametrize(
    "field, old, new",
    [
        ("method", '"method":"identity"', '"method":"hadamard"'),
        ("provenance", '"seed":0', '"seed":1'),
        ("group_size", '"group_size":64', '"group_size":32'),
        ("meta_dtype", '"meta_dtype":"float16"', '"meta_dtype":"bfloat16"'),
        ("sink_tokens", '"sink_tokens":64', '"sink_tokens":65'),
        ("recent_tokens", '"recent_tokens":256', '"recent_tokens":255'),
        ("num_tokens", '"num_tokens":100', '"num_tokens":101'),
        ("model.architecture", '"architecture":"Qwen3', '"architecture":"Qwen2'),
        ("model.num_layers", '"num_layers":2', '"num_layers":3'),
        ("model.num_qo_heads", '"num_qo_heads":4', '"num_qo_heads":8'),
        ("model.num_kv_heads", '"num_kv_heads":2', '"num_kv_heads":1'),
        ("model.head_dim", '"head_dim":64,"num', '"head_dim":60,"num'),
        ("model.v_head_dim", '"v_head_dim":64', '"v_head_dim":60'),
        ("model.config_hash", '"config_hash":"', '"config_hash":"0'),
        ("model.weight_digest", '"weight_digest":null', '"weight_digest":"0"'),
        ("model.rope", '"rope_theta":50000.0', '"rope_theta":60000.0'),
    ],
)
def test_an_edited_field_is_named(saved, field, old, new):
    data = saved.read_bytes()
    # The header is a JSON string inside safetensors' own JSON.
    old, new = (fragment.replace('"', '\\"').encode() for fragment in (old, new))
    assert data.count(old) == 1
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size].rstrip(b" ").replace(old, new), data[8 + size :]
    header += b" " * (-len(header) % 8)
    saved.write_bytes(struct.pack("<Q", len(header)) + header + body)
    with pytest.raises(OscarError, match=rf"{field} was changed after it was written \(header_digest"):
        load(saved)


def test_unknown_version_and_foreign_files(saved, tmp_path):
    data = saved.read_bytes()
    saved.write_bytes(data.replace(b'format_version\\":1', b'format_version\\":9'))
    with pytest.raises(OscarError, match="format version 9, this build reads 1; run `oscar calibrate` again"):
        load(saved)
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(OscarError, match="no readable OSCAR header"):
        load(tmp_path / "weights.safetensors")
    with pytest.raises(OscarError, match="expected an artifact file, found none"):
        load(tmp_path / "nowhere.safetensors")


def test_missing_parts(tmp_path):
    artifact = make()
    del artifact.layers[1]
    save(artifact, tmp_path / "a.safetensors")
    words = "expected transforms of all 2 layers, found none of layer 1; give --oscar-allow-native-layers"
    with pytest.raises(OscarError, match=words):
        load(tmp_path / "a.safetensors")
    loaded = load(tmp_path / "a.safetensors", native_layers=True)
    assert loaded.native_layers == [1] and sorted(loaded.layers) == [0]
    with pytest.raises(OscarError, match="expected transforms of at least one layer, found none"):
        save(make(layers={}), tmp_path / "none.safetensors")
    save(make(layers=make().layers | {2: make().layers[0]}), tmp_path / "more.safetensors")
    with pytest.raises(OscarError, match="expected layers 0 to 1, got layer 2"):
        load(tmp_path / "more.safetensors", native_layers=True)
    k_only = make()
    k_only.layers = {i: dataclasses.replace(layer, v=Side(None, None)) for i, layer in k_only.layers.items()}
    save(k_only, tmp_path / "k.safetensors")
    for allowed in (False, True):  # half a layer is never meant
        with pytest.raises(OscarError, match="layers.0.v_transform is missing"):
            load(tmp_path / "k.safetensors", native_layers=allowed)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_hidden_layers": 3}, "num_layers is 2 in the artifact and 3 in the model"),
        ({"head_dim": 128}, "head_dim is 64"),
        ({"rope_theta": 1e6}, "rope is"),
        ({"rms_norm_eps": 1e-5}, "config_hash is"),
    ],
)
def test_another_model_is_refused(saved, change, words):
    with pytest.raises(OscarError, match=words):
        load(saved, ModelIdentity.from_config(CONFIG | change))


def test_weights_are_part_of_the_identity(tmp_path):
    from safetensors.torch import save_file

    identities = []
    for value in (1.0, 1.5):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_file({"w": torch.full((50000,), value)}, folder / "model.safetensors")
        identities.append(ModelIdentity.from_path(folder))
    assert identities[0].weight_digest != identities[1].weight_digest
    assert identities[0].fingerprint != identities[1].fingerprint
    path = tmp_path / "a.safetensors"
    save(make(model=identities[0]), path)
    with pytest.raises(OscarError, match="weight_digest"):
        load(path, identities[1])
    assert load(path, dataclasses.replace(identities[0], weight_digest=None))


@pytest.mark.parametrize(
    "side, field, value, words",
    [
        ("k", "clip", torch.tensor([0.0, 1.0]), "clip ratios in"),
        ("v", "transform", torch.eye(64), "expected shape"),
        ("k", "transform", torch.full((2, 64, 64), float("nan")), "finite"),
        ("v", "mean", torch.ones(2, 64), "values keep their mean"),
        ("k", "shaping", torch.ones(2, 64, 64), "below the diagonal"),
    ],
)
def test_an_artifact_that_does_not_hold_together_is_not_written(tmp_path, side, field, value, words):
    artifact = make()
    artifact.layers[1] = changed(artifact.layers[1], side, **{field: value})
    with pytest.raises(OscarError, match=words):
        save(artifact, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OscarError, match="cannot write the artifact"):
        save(make(), tmp_path / "file" / "a.safetensors")


def test_no_space_leaves_nothing(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oscar.format.sealed_file.os.fsync", full)
    with pytest.raises(OscarError, match="No space left on device.*MiB are needed"):
        save(make(), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_find_prefers_the_one_beside_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    identity = ModelIdentity.from_config(CONFIG)
    assert find(tmp_path, identity) is None
    save(make(), cache_path(identity))
    assert find(tmp_path, identity) == cache_path(identity)
    save(make(), tmp_path / "oscar.kvq")
    assert find(tmp_path, identity) == tmp_path / "oscar.kvq"


def test_artifact_of_version_0_1_0_is_found_in_the_cache_and_fits(tmp_path, monkeypatch):
    """Its name in the cache and its identity follow the rule of then: RoPE settings as spelled, all fields in the hash."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rope = {"rope_theta": 5e4}
    seen = {k: v for k, v in CONFIG.items() if k != "architectures"}
    then = ModelIdentity.from_config(CONFIG)
    digest = hashlib.sha256(json.dumps(seen, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    then = dataclasses.replace(then, rope=rope, config_hash=digest)
    path = tmp_path / "cache" / "oscar" / f"{then.fingerprint}.safetensors"
    save(make(model=then), path)
    now = ModelIdentity.from_path(tmp_path)
    assert now.config_hash != digest
    assert find(tmp_path, now) == path
    assert load(path, now).model == then
    other = ModelIdentity.from_path(tmp_path, {"rope_theta": 6e4})
    assert find(tmp_path, other) is None
    with pytest.raises(OscarError, match="made for another model: rope is"):
        load(path, other)


def test_name_that_would_be_loaded_as_weights(tmp_path):
    save(make(), tmp_path / "oscar.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OscarError, match="is loaded as weights; name it .*oscar.kvq instead"):
        save(make(), tmp_path / "oscar.safetensors")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "overrides", "same"),
    [
        # One setting, spelled as transformers 4 and 5 and SGLang's documentation spell it.
        ({"rope_theta": 1e6}, {}, {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}),
        ({"rope_theta": 1e6}, {"rope_scaling": YARN}, {"rope_theta": 1e6, "rope_scaling": YARN}),
        ({"rope_theta": 1e6}, {"rope_scaling": YARN}, {"rope_parameters": {"rope_theta": 1e6} | YARN}),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            {"rope_scaling": YARN},
            {"rope_theta": 1e6, "rope_scaling": YARN},
        ),
        (
            {"rope_theta": 1e6},
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        ({"rope_theta": 1e6}, {"rope_theta": 5e6}, {"rope_theta": 5e6}),
        ({"rope_parameters": {"rope_theta": 1e6}}, {"rope_theta": 5e6}, {"rope_parameters": {"rope_theta": 5e6}}),
    ],
)
def test_override_makes_the_model_that_a_copy_would_be(tmp_path, config, overrides, same):
    base = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    for name, changes in (("served", config), ("copy", same)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(base | changes))
    served = ModelIdentity.from_path(tmp_path / "served", overrides)
    assert served == ModelIdentity.from_path(tmp_path / "copy")
    assert served.difference(ModelIdentity.from_path(tmp_path / "copy")) is None
    if overrides:
        plain = ModelIdentity.from_path(tmp_path / "served")
        assert "rope is" in plain.difference(served) and "rope is" in served.difference(plain)


@pytest.mark.parametrize("config", ["{", "{}", '{"num_attention_heads": 0, "hidden_size": 4, "num_hidden_layers": 1}'])
def test_models_without_geometry(tmp_path, config):
    with pytest.raises(OscarError, match="expected a model folder"):
        ModelIdentity.from_path(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(OscarError, match="attention geometry"):
        ModelIdentity.from_path(tmp_path)
