"""The command line: what it prints, and one sentence for each mistake."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import oscar.embedded
from oscar import config
from oscar.calibration.options import CalibrationOptions
from oscar.commands import main as cli
from oscar.commands.from_dataclass import read_options
from oscar.format import artifact as artifacts

PROSE = "The command line reads files and writes files. " * 60


def run(*arguments) -> int:
    """Exit status of one command in this process."""
    try:
        return cli.main([str(a) for a in arguments])
    except SystemExit as exit_:  # argparse
        return exit_.code


def fails(capsys, *arguments) -> str:
    """Run a command that must fail; returns its one line on stderr."""
    capsys.readouterr()
    assert run(*arguments) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith(f"oscar {arguments[0]}: ")
    return lines[0]


@pytest.fixture
def made(tiny_models, tmp_path):
    """An artifact made through the command line, and its model's folder."""
    file = tmp_path / "a.safetensors"
    assert run("calibrate", "--model", tiny_models(), "--output", file, "--tokens", 1024, "--quiet") == 0
    return file, tiny_models()


def test_calibrate_prints_table_and_sentence(tiny_models, tmp_path, capsys):
    file = tmp_path / "new" / "a.safetensors"
    arguments = ("--model", tiny_models(), "--output", file, "--tokens", 1024, "--recent-tokens", 16, "--sink-tokens", 4)
    assert run("calibrate", *arguments, "--share-heads") == 0
    captured = capsys.readouterr()
    words = ("held-out tokens", "layer 1", "all", "as served", "16 bits", "Verdict: ", "without --share-heads", "Wrote")
    for word in words:
        assert word in captured.out, word
    for step in ("write text", "statistics", "held-out error", "left"):  # the progress bar
        assert step in captured.err
    artifact = artifacts.load(file)
    assert (artifact.recent_tokens, artifact.sink_tokens) == (16, 4)
    assert torch.equal(artifact.layers[0].k.transform[0], artifact.layers[0].k.transform[1])
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_picture_json_and_verdict(tiny_models, tmp_path, capsys):
    picture, file = tmp_path / "a.png", tmp_path / "a.safetensors"
    arguments = ("calibrate", "--model", tiny_models(), "--output", file, "--tokens", 1024, "--recent-tokens", 16)
    assert run(*arguments, "--sink-tokens", 4, "--picture", picture, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"]["label"] in ("recommended", "usable with larger windows", "not recommended")
    assert picture.read_bytes().startswith(b"\x89PNG")
    first = picture.read_bytes()
    assert run("inspect", file, "--picture", picture) == 0
    assert "Verdict: " + found["verdict"]["label"] in capsys.readouterr().out and picture.read_bytes() == first
    assert "expected a file that ends in .png" in fails(capsys, "inspect", file, "--picture", tmp_path / "a.doc")
    assert "--picture" in fails(capsys, "inspect", file, "--picture", file / "a.png")
    hadamard = (*arguments[:5], "--method", "hadamard", "--tokens", 256, "--quiet", "--picture", tmp_path / "b.svg")
    assert run(*hadamard) == 0 and "method reads no text" in (tmp_path / "b.svg").read_text()


def test_statistics_are_saved_and_read(tiny_models, tmp_path, capsys):
    stats, files = tmp_path / "stats", [tmp_path / name for name in "ab"]
    base = ("calibrate", "--model", tiny_models(), "--tokens", 1024, "--quiet")
    assert run(*base, "--output", files[0], "--save-stats", stats) == 0
    assert run(*base, "--output", files[1], "--from-stats", stats) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    line = fails(capsys, *base, "--output", files[1], "--from-stats", files[0])
    assert "expected an OSCAR statistics file" in line
    assert "--save-stats" in fails(capsys, *base, "--output", files[1], "--save-stats", stats / "x")


def test_quiet_is_quiet(tiny_models, tmp_path, capsys):
    run("calibrate", "--model", tiny_models(), "--output", tmp_path / "a", "--method", "hadamard", "--tokens", 256, "--quiet")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_defaults_are_the_config():
    found = cli.build_parser().parse_args(["calibrate", "--model", "m", "--output", "o"])
    options = read_options(CalibrationOptions, found)
    assert options == CalibrationOptions("m")
    assert (options.tokens, options.max_length) == (config.DEFAULT_CALIBRATION_TOKENS, None)
    assert (options.sink_tokens, options.recent_tokens) == (config.DEFAULT_SINK_TOKENS, config.DEFAULT_RECENT_TOKENS)
    assert (options.method, options.seed, options.share_heads) == (config.DEFAULT_METHOD, config.DEFAULT_SEED, False)


def test_methods_are_those_of_the_registry(capsys):
    from oscar.methods import METHODS

    for command in ("calibrate", "evaluate"):
        assert run(command, "--help") == 0
        shown = re.sub(r"-\s+", "-", capsys.readouterr().out)  # lines are broken at dashes
        assert all(re.search(rf"(?<![\w-]){name}(?![\w-])", shown) for name in METHODS)
    words = ["calibrate", "--model", "m", "--output", "o", "--method"]
    for name in METHODS:
        assert cli.build_parser().parse_args([*words, name]).method == name


def test_inspect(made, capsys):
    file, folder = made
    assert run("inspect", file) == 0
    printed = capsys.readouterr().out
    for word in ("Qwen3ForCausalLM", "2 layers", "bits per element", "written by the model", "held-out tokens"):
        assert word in printed, word
    assert run("inspect", file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["fingerprint"] == artifacts.ModelIdentity.from_path(folder).fingerprint
    assert found["bytes_per_token"] == 2 * 2 * 2 * (32 // 4 + 4) + 5
    assert found["clip"] == {"k": config.DEFAULT_K_CLIP, "v": config.DEFAULT_V_CLIP}
    assert found["file_bytes"] == file.stat().st_size


def test_layers_are_in_the_order_of_their_numbers(tiny_models, tmp_path, capsys, monkeypatch):
    """A file sorts its keys as text: 0, 1, 10, 11, 2. People read 0, 1, 2."""
    from matplotlib.axes import Axes

    drawn, plot = [], Axes.plot

    def watch(axis, x, *more, **style):
        drawn.append(list(x))
        return plot(axis, x, *more, **style)

    monkeypatch.setattr(Axes, "plot", watch)
    file, model = tmp_path / "a", tiny_models(num_hidden_layers=12)
    arguments = ("calibrate", "--model", model, "--output", file, "--tokens", 512, "--picture", tmp_path / "a.png")
    assert run(*arguments) == 0
    made = capsys.readouterr().out
    assert run("inspect", file, "--picture", tmp_path / "b.png") == 0
    for printed in (made, capsys.readouterr().out):
        assert list(map(int, re.findall(r"layer (\d+) ", printed))) == list(range(12))
    by_layer = [x for x in drawn if len(x) == 12]
    assert len(by_layer) == 2 * (7 + 2) and all(x == list(range(12)) for x in by_layer)  # errors, then outlier channels
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_plan(tiny_models, capsys):
    arguments = ("plan", "--model", tiny_models(head_dim=128), "--context", 100000, "--memory-gib", 1)
    assert run(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_per_token_16_bit"] == 2 * 2 * 2 * 128 * 2
    assert found["bytes_per_token"] == 2 * 2 * 2 * 36 + 5 and found["bits_per_element"] == 2.25
    row = found["contexts"][0]
    assert row["bytes"] == (100032 + 2560) * 293 and row["requests"] == 2**30 // row["bytes"]
    assert run(*arguments) == 0
    assert "6.99 times fewer" in capsys.readouterr().out


@pytest.mark.parametrize(
    "longest, contexts",
    [(512, [512]), (8192, [4096, 8192]), (40960, [4096, 32768, 40960]), (131072, [4096, 32768, 131072])],
)
def test_plan_lists_lengths_that_the_model_has(longest, contexts, tiny_models, capsys):
    model = tiny_models(num_hidden_layers=12, max_position_embeddings=longest)
    assert run("plan", "--model", model, "--json") == 0
    assert [row["tokens"] for row in json.loads(capsys.readouterr().out)["contexts"]] == contexts
    assert run("plan", "--model", model, "--context", 2 * longest, "--json") == 0  # asked for by name
    assert [row["tokens"] for row in json.loads(capsys.readouterr().out)["contexts"]] == [2 * longest]


def test_layers_in_16_bits(tiny_models, tmp_path, capsys):
    file, model = tmp_path / "a", tiny_models(head_dim=128)
    assert run("plan", "--model", model, "--skip-layers", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_per_token"] == 2 * 2 * 36 + 2 * 2 * 256 + 5 and found["bits_per_element"] == (2.25 + 16) / 2
    assert run(*calibrate_with(model, file, "--skip-layers", "1")) == 0
    assert "no transforms of layers 1; they stay in 16 bits" in capsys.readouterr().out
    assert run("inspect", file, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["native_layers"] == [1] and shown["bytes_per_token"] == found["bytes_per_token"]
    assert sorted(shown["provenance"]["held_out"]["layers"]) == ["0"]
    assert "found none of layer 1" in fails(capsys, "verify", file)
    assert run("verify", file, "--allow-native-layers") == 0
    assert "layers 1 stay in 16 bits" in capsys.readouterr().out
    for layers, words in (("2", "expected layers from 0 to 1, got 2"), ("0,1", "fewer than all 2 layers"), ("x", "got 'x'")):
        assert words in fails(capsys, *calibrate_with(model, file, "--skip-layers", layers))


def test_help_says_units_and_defaults(capsys):
    assert run("calibrate", "--help") == 0
    text = capsys.readouterr().out
    assert f"default: {config.DEFAULT_CALIBRATION_TOKENS}" in text and "tokens" in text
    for command in ("calibrate", "convert", "inspect", "verify", "plan", "needle", "model-path"):
        assert run(command, "--help") == 0


@pytest.mark.parametrize("words", [[], *([name] for name in cli.COMMANDS if name not in ("calibrate", "evaluate"))])
def test_help_loads_no_torch(words):
    """Those of `calibrate` and `evaluate` do, for the names of the methods."""
    code = (
        "import atexit, os, sys; from oscar.commands.main import main\n"
        "heavy = lambda: os._exit(any(name in sys.modules for name in ('torch', 'transformers', 'rich')))\n"
        f"atexit.register(heavy); main({[*words, '--help']!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and (not words or words[0] in done.stdout), done.stderr


def test_only_the_command_that_runs_is_imported():
    code = (
        "import sys; from oscar.commands.main import main; main(['model-path'])\n"
        "sys.exit(any('oscar.commands.' + name in sys.modules for name in ('calibrate', 'plan', 'evaluate')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "oscar", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "calibrate" in done.stdout


def calibrate_with(model, output, *more) -> tuple:
    return ("calibrate", "--model", model, "--output", output, "--tokens", 1024, *more)


def test_missing_model(tmp_path, capsys):
    line = fails(capsys, *calibrate_with(tmp_path / "nowhere", tmp_path / "a"))
    assert "nowhere: expected a model folder with config.json" in line


def test_broken_config(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    assert "config" in fails(capsys, *calibrate_with(tmp_path, tmp_path / "a"))


def test_no_weights(tiny_models, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((tiny_models() / "config.json").read_bytes())
    assert "expected weight files" in fails(capsys, *calibrate_with(tmp_path, tmp_path / "a"))


@pytest.mark.parametrize("cut", [100, 4000])
def test_truncated_weights(cut, tiny_models, tmp_path, capsys):
    for file in tiny_models().iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:-cut] if file.suffix == ".safetensors" else data)
    assert "cannot load the model" in fails(capsys, *calibrate_with(tmp_path, tmp_path / "a"))


@pytest.mark.parametrize("content", [b"", b"  \n\t\n", b"\x89PNG\r\n\x1a\n\0\0", b"caf\xe9 au lait", b"text\0text"])
def test_text_that_is_empty_or_not_text(content, tiny_models, tmp_path, capsys):
    (tmp_path / "t").write_bytes(content)
    line = fails(capsys, *calibrate_with(tiny_models(), tmp_path / "a", "--text", tmp_path / "t"))
    assert ("the file is empty" if not content.strip() else "expected plain UTF-8 text") in line
    assert not (tmp_path / "a").exists()


def test_text_that_is_missing_or_a_folder(tiny_models, tmp_path, capsys):
    for path in (tmp_path / "none", tmp_path):
        line = fails(capsys, *calibrate_with(tiny_models(), tmp_path / "a", "--text", path))
        assert "expected a readable text file" in line


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "bart", "qwen3_next"])
def test_unsupported_model(model_type, tmp_path, capsys):
    from transformers import AutoConfig

    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    assert repr(model_type) in fails(capsys, *calibrate_with(tmp_path, tmp_path / "a"))


def test_too_few_tokens(tiny_models, tmp_path, capsys):
    line = fails(capsys, "calibrate", "--model", tiny_models(), "--output", tmp_path / "a", "--tokens", 12)
    assert "too few tokens: expected at least 64 for head_dim 32, got 12" in line


def test_nonfinite(make_model, make_tokenizer, tmp_path, capsys):
    model = make_model("Llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = float("inf")
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "t").write_text(PROSE)
    line = fails(capsys, *calibrate_with(tmp_path, tmp_path / "a", "--text", tmp_path / "t", "--quiet"))
    assert "layer 0, key: expected finite numbers" in line


def test_output_that_cannot_be_written(tiny_models, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("x")
    assert "cannot write in" in fails(capsys, *calibrate_with(tiny_models(), tmp_path / "file" / "a"))
    assert "expected a file name" in fails(capsys, *calibrate_with(tiny_models(), tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert "cannot write in" in fails(capsys, *calibrate_with(tiny_models(), tmp_path / "a"))


def test_no_space(tiny_models, tmp_path, capsys, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    line = fails(capsys, *calibrate_with(tiny_models(), tmp_path / "a"))
    assert "MiB are needed, 0.0 MiB are free" in line


def test_interrupt_leaves_the_old_file(tiny_models, tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("oscar.calibration.runner.TransformersRunner.measure", interrupted)
    (tmp_path / "a").write_text("old")
    model = tiny_models()
    capsys.readouterr()
    assert run(*calibrate_with(model, tmp_path / "a", "--quiet")) == cli.INTERRUPTED
    assert capsys.readouterr().err == "\noscar calibrate: interrupted, no artifact was written\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"
    stats = tmp_path / "s"
    assert run(*calibrate_with(tiny_models(), tmp_path / "a", "--quiet", "--save-stats", stats)) == cli.INTERRUPTED
    assert capsys.readouterr().err.endswith(f"no artifact was written; {stats} is whole, go on with --from-stats\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "s"] and (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("flag", ["--output", "--save-stats"])
def test_interrupt_while_writing_leaves_no_half_file(flag, tiny_models, tmp_path, capsys, monkeypatch):
    real, calls = os.fsync, []

    def interrupted(handle):
        calls.append(handle)
        if len(calls) == (2 if flag == "--output" else 1):  # the statistics are written first
            raise KeyboardInterrupt
        return real(handle)

    monkeypatch.setattr("oscar.format.artifact.os.fsync", interrupted)
    files = "--save-stats", tmp_path / "s", "--quiet"
    assert run(*calibrate_with(tiny_models(), tmp_path / "a", *files)) == cli.INTERRUPTED
    assert [p.name for p in tmp_path.iterdir()] == ([] if flag == "--save-stats" else ["s"])


def test_bad_arguments_are_one_line(capsys):
    assert "--model" in fails(capsys, "calibrate", "--output", "x")
    assert "invalid int value" in fails(capsys, "calibrate", "--model", "m", "--output", "x", "--tokens", "many")
    assert "invalid choice" in fails(capsys, "calibrate", "--model", "m", "--output", "x", "--method", "magic")
    assert run("frobnicate") == cli.BAD_INPUT


def test_inspect_of_bad_files(made, tmp_path, capsys):
    assert "expected an artifact file" in fails(capsys, "inspect", tmp_path / "none")
    data = made[0].read_bytes()
    (tmp_path / "cut").write_bytes(data[:-10])
    assert "not a whole safetensors file" in fails(capsys, "inspect", tmp_path / "cut")
    (tmp_path / "flip").write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])
    assert "layers.1.v_transform was changed" in fails(capsys, "inspect", tmp_path / "flip")


def test_model_path_and_needle(tmp_path, capsys, monkeypatch, make_tokenizer):
    monkeypatch.setattr(oscar.embedded, "__file__", str(tmp_path / "__init__.py"))
    assert "no embedded model" in fails(capsys, "model-path")
    (tmp_path / "config.json").write_text("{}")
    assert run("model-path") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)

    from oscar.evaluation import needles

    sentences = tuple(f"Sentence number {i} says nothing of interest to anyone." for i in range(50))
    monkeypatch.setattr(needles, "held_out_sentences", lambda: sentences)
    make_tokenizer(chat=True).save_pretrained(tmp_path)
    assert run("needle", "--tokens", 1500, "--depth", 0.5, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] in found["prompt"] and 1400 < found["num_tokens"] <= 1500
    assert run("needle", "--tokens", 1500, "--depth", 0.5) == 0
    captured = capsys.readouterr()
    assert captured.out.rstrip("\n") == found["prompt"].rstrip("\n") and found["answer"] in captured.err
    assert "got num_tokens=10" in fails(capsys, "needle", "--tokens", 10)
