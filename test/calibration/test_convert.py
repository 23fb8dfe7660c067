"""Public rotation files: every layout reads the same, and nothing in a file is believed or run."""

import json
import os
import pickle

import pytest
import torch

from oscar.calibration.convert import METHOD, convert, read
from oscar.calibration.report import warnings
from oscar.commands import main as cli
from oscar.errors import OscarError
from oscar.format import artifact as artifacts

HEADS, D, LAYERS = 2, 32, 2  # of the tiny Qwen3


def rotations(heads: int | None, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (D, D) if heads is None else (heads, D, D)
    return [torch.linalg.qr(torch.randn(*shape, generator=generator, dtype=torch.float64)).Q.float() for _ in range(LAYERS)]


def content(matrices, version=1, objective="qqt_r_h_pbr", key=int, **more) -> dict:
    layers = {key(i): {"layer_id": i, "rotation": r, "eigenvalues": torch.arange(D).float()} for i, r in enumerate(matrices)}
    return {"format_version": version, "objective": objective, "source_grouping": "layer", "layers": layers} | more


@pytest.fixture
def files(tmp_path):
    """Writes (K, V) files and returns their paths; give content or take the layer-wise default."""

    def write(k=None, v=None):
        paths = tmp_path / "k.pt", tmp_path / "v.pt"
        torch.save(k or content(rotations(None)), paths[0])
        torch.save(v or content(rotations(None, 1), objective="sst_r_h_pbr"), paths[1])
        return paths

    return write


@pytest.mark.parametrize("key", [int, str])
@pytest.mark.parametrize("version, heads", [(1, None), (2, HEADS), (2, None)])
def test_layouts(version, heads, key, files, tiny_models, tmp_path):
    k, v = rotations(heads), rotations(heads, 1)
    paths = files(content(k, version, key=key), content(v, version, "sst_r_h_pbr", key))
    made = convert(*paths, tiny_models())
    artifacts.save(made, tmp_path / "a")
    loaded = artifacts.load(tmp_path / "a", artifacts.ModelIdentity.from_path(tiny_models()))
    for i in range(LAYERS):
        assert torch.equal(loaded.layers[i].k.transform, k[i].expand(HEADS, D, D))
        assert torch.equal(loaded.layers[i].v.transform, v[i].expand(HEADS, D, D))
        assert loaded.layers[i].k.clip.tolist() == pytest.approx([0.96] * HEADS)
        assert loaded.layers[i].v.clip.tolist() == pytest.approx([0.92] * HEADS)
    assert (loaded.method, loaded.group_size, loaded.num_tokens) == (METHOD, D, 0)
    record = loaded.provenance["converted_from"]
    assert record["k"]["objective"] == "qqt_r_h_pbr" and record["v"]["format_version"] == version
    assert len(record["k"]["sha256"]) == 64 and loaded.provenance["share_heads"] == (heads is None)


def test_conversion_asks_the_same_table(files, tiny_models, tmp_path):
    """A model that serving refuses is converted with a warning where calibration takes it, and refused where it does not."""
    made = convert(*files(), tiny_models("Gemma3Text"))
    assert len([line for line in warnings(made) if "sliding-window attention" in line]) == 1
    config = json.loads((tiny_models() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 32}))
    with pytest.raises(OscarError, match=r"latent attention \(MLA\) \(kv_lora_rank=32\)"):
        convert(*files(), tmp_path)


class Evil:
    """Pickled, it asks the reader to make a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_code_in_a_pickle_is_refused_and_not_run(files, tiny_models, tmp_path):
    trap = tmp_path / "trap"
    k, v = files()
    for write in (torch.save, lambda x, path: path.write_bytes(pickle.dumps(x, protocol=2))):
        write({"format_version": 1, "layers": {0: Evil(trap)}}, k)
        with pytest.raises(OscarError, match="would run code from it, which is refused"):
            convert(k, v, tiny_models())
    assert not trap.exists()


@pytest.mark.parametrize("keep", [0, 100, 0.5])
def test_cut_and_foreign_files(keep, files, tiny_models):
    k, v = files()
    data = k.read_bytes()
    k.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(OscarError, match="not a whole file of torch.save"):
        convert(k, v, tiny_models())
    k.write_bytes(b"hello")
    with pytest.raises(OscarError, match="not a whole file of torch.save"):
        convert(k, v, tiny_models())
    with pytest.raises(OscarError, match="expected a rotation file, found none"):
        convert(k.with_name("none"), v, tiny_models())


def bad(**changes) -> dict:
    return content(rotations(None)) | changes


def one_layer(**changes) -> dict:
    result = content(rotations(None))
    result["layers"][1] |= changes
    return result


@pytest.mark.parametrize(
    "k, words",
    [
        (bad(format_version=99), "format version 99, this build reads 1 and 2"),
        (bad(format_version=None), "format version None"),
        (bad(layers=[1]), "a dictionary with 'layers', got a dict"),
        (bad(objective="sst_r_h_pbr"), "objective 'sst_r_h_pbr' is for V; give the K file here"),
        (bad(layers={"first": {}}), "expected layer numbers as keys of 'layers', got 'first'"),
        (content(rotations(None)[:1]), r"expected layers 0 to 1 of this model, got 1 \(0 to 0\)"),
        (content(rotations(None) * 2), r"expected layers 0 to 1 of this model, got 4 \(0 to 3\)"),
        (
            one_layer(rotation=torch.eye(16)),
            r"layer 1: expected a rotation of shape \(32, 32\) or \(2, 32, 32\), got \(16, 16\)",
        ),
        (one_layer(rotation=torch.eye(D).expand(4, D, D).clone()), r"got \(4, 32, 32\)"),
        (one_layer(rotation=1.01 * torch.eye(D)), r"layer 1: expected an orthogonal matrix.*0.0201"),
        (one_layer(rotation=torch.full((D, D), float("nan"))), "expected an orthogonal matrix"),
        (one_layer(rotation="R"), "expected a tensor of floats as 'rotation', got a str"),
        (one_layer(rotation=torch.eye(D).long()), "expected a tensor of floats"),
        ({"weights": torch.ones(3)}, "expected a rotation file"),
    ],
)
def test_bad_content(k, words, files, tiny_models):
    with pytest.raises(OscarError, match=words):
        convert(*files(k), tiny_models())


def test_missing_layers_stay_in_16_bits_if_allowed(files, tiny_models):
    k, v = content(rotations(None)), content(rotations(None, 1), objective="sst_r_h_pbr")
    del k["layers"][0]
    with pytest.raises(OscarError, match=r"got 1 \(1 to 1\), without layer 0; --allow-native-layers keeps those in 16 bits"):
        convert(*files(k, v), tiny_models())
    with pytest.raises(OscarError, match="expected the same layers as in .*, but layer 0 is in one of them only"):
        convert(*files(k, v), tiny_models(), allow_native_layers=True)
    del v["layers"][0]
    assert convert(*files(k, v), tiny_models(), allow_native_layers=True).native_layers == [0]


def test_twice_the_same_layer(files, tiny_models):
    k = content(rotations(None))
    k["layers"] |= {"1": k["layers"][1]}
    with pytest.raises(OscarError, match="layer 1 is there twice"):
        convert(*files(k), tiny_models())


def test_rotation_is_what_the_file_says(files, tiny_models):
    """A permutation in the file is the permutation in the artifact: applied from the right, not transposed."""
    shift = torch.eye(D).roll(1, 1)  # x @ shift moves every channel up by one
    k, _ = files(content([shift, shift]))
    matrices, _ = read(k, "K", artifacts.ModelIdentity.from_path(tiny_models()))
    x = torch.arange(D).float()
    assert torch.equal(x @ matrices[0][1], x.roll(1))


def test_commands(files, tiny_models, tmp_path, capsys):
    output, model = tmp_path / "a.safetensors", str(tiny_models())
    arguments = ["convert", *map(str, files()), "--model", model, "--output", str(output)]
    assert cli.main(arguments) == 0
    assert "share one transform" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == METHOD and found["file_bytes"] == output.stat().st_size
    assert cli.main(["verify", str(output), "--model", model]) == 0
    printed = capsys.readouterr().out
    assert "whole and unchanged, 2 layers of method rotation-files" in printed and "made for" in printed
    assert cli.main(["inspect", str(output)]) == 0
    assert "qqt_r_h_pbr" in capsys.readouterr().out
    assert cli.main([*arguments, "--k-clip", "2"]) == cli.BAD_INPUT
    assert capsys.readouterr().err == "oscar convert: k_clip must be in (0, 1], got 2.0\n"
    assert cli.main([*arguments, "--group-size", "5"]) == cli.BAD_INPUT
    assert "group_size must divide head_dim" in capsys.readouterr().err


def test_verify_says_what_is_wrong(files, tiny_models, tmp_path, capsys):
    output = tmp_path / "a.safetensors"
    made = convert(*files(), tiny_models())
    made.layers[1].v.transform[1, :, 3] = 0
    with pytest.raises(OscarError, match="layers.1.v_transform, head 1: expected a matrix that can be inverted"):
        artifacts.save(made, output)
    artifacts.save(convert(*files(), tiny_models()), output)
    assert cli.main(["verify", str(output), "--model", str(tiny_models(rope_theta=7.0))]) == cli.BAD_INPUT
    assert "made for another model" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path / "none")]) == cli.BAD_INPUT
    assert cli.main(["verify", str(output), "--json"]) == 0
    assert '"condition": 1.0' in capsys.readouterr().out
