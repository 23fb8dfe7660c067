"""The user's text: budgets and mixes, JSON lines, chat templates, and one sentence for each bad line."""

import json
from pathlib import Path

import pytest
import torch

from oscar.calibration import sources, text
from oscar.calibration.calibrate import CalibrationOptions, calibrate
from oscar.calibration.report import warnings
from oscar.errors import OscarError


def write(path: Path, samples: list) -> Path:
    path.write_text("\n".join(s if isinstance(s, str) else json.dumps(s) for s in samples))
    return path


def tokens_of(path, tokenizer, tokens=10**6, max_length=10**6, seed=0) -> torch.Tensor:
    (source,) = sources.parse((path,), tokens)
    return torch.cat([s.tokens for s in sources.sequences(source, tokenizer, max_length, seed)])


def test_budgets(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    found = sources.parse((f"{a}:300", b, str(c)), 1000)
    assert [(s.path, s.tokens, s.name) for s in found] == [(a, 300, "a"), (b, 350, "b"), (c, 350, "c")]
    assert [s.tokens for s in sources.parse((f"{a}:300", f"{b}:20"), 1000)] == [300, 20]
    assert sources.parse((), 1000) == []


def test_a_colon_in_a_name_is_a_name_if_there_is_such_a_file(tmp_path):
    odd = tmp_path / "log:12"
    odd.write_text("x")
    assert sources.parse((str(odd),), 100)[0].path == odd
    assert sources.parse((f"{odd}:7",), 100)[0].tokens == 7
    assert sources.parse((f"{tmp_path}/x:y",), 100)[0].path == tmp_path / "x:y"


@pytest.mark.parametrize(
    "items, words",
    [
        (("a:900", "b:200", "c"), "--text c: the other sources take 1100 of 1000 tokens"),
        (("a:0",), "a positive number of tokens after the colon, got 0"),
        (("a:-5",), "got -5"),
        (("a", "a:5"), "--text a: expected every file once, got it twice"),
    ],
)
def test_budgets_that_cannot_be(items, words):
    with pytest.raises(OscarError, match=words):
        sources.parse(items, 1000)


def test_files_of_the_same_name_keep_apart(tmp_path):
    found = sources.parse((tmp_path / "en" / "t.txt", tmp_path / "fr" / "t.txt"), 100)
    assert [s.name for s in found] == ["en/t.txt", "fr/t.txt"]


def test_text_and_prompts(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    ids = tokens_of(write(tmp_path / "a.jsonl", [{"text": "one"}, "", {"prompt": "two"}]), tokenizer)
    assert sorted(tokenizer.decode(ids).split("<|end|>")) == ["", "one", "two"]  # samples end with the end token


def test_chat_is_formatted_with_the_template(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer(chat=True)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert tokenizer.decode(tokens_of(write(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer)) == (
        "<|user|>hi<|end|><|assistant|>ho<|end|>"
    )
    for sample in ({"messages": chat[:1]}, {"prompt": "hi"}):  # the model's turn is opened, as the server does
        found = tokenizer.decode(tokens_of(write(tmp_path / "a.jsonl", [sample]), tokenizer))
        assert found == "<|user|>hi<|end|><|assistant|>"


def test_order_is_seeded_and_samples_are_cut(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    file = write(tmp_path / "a.jsonl", [{"text": chr(65 + i) * (4 + 100 * (i == 3))} for i in range(20)])
    once, again, other = (tokens_of(file, tokenizer, seed=s) for s in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert sorted(once.tolist()) == sorted(other.tolist())  # all of a small file, in another order
    assert tokenizer.decode(tokens_of(file, tokenizer, max_length=10)).count("D") == 10
    pieces = sources.sequences(sources.Source(file, 50, "a"), tokenizer, 20, 0)
    assert [(len(s.tokens), s.held_out) for s in pieces] == text.share(50, 20)


@pytest.mark.parametrize("asked", [(512, 512), (256, 768), (900, 124)])
def test_mix_is_what_was_asked_even_with_long_samples(asked, tiny_models, tmp_path):
    """FIELD C10: samples of one source are twenty times as long."""
    short = write(tmp_path / "short.jsonl", [{"text": f"{i:03d} and words. "} for i in range(400)])
    long = write(tmp_path / "long.jsonl", [{"text": f"{i:03d} and words. " * 20} for i in range(400)])
    options = CalibrationOptions(
        tiny_models(), text=(f"{short}:{asked[0]}", f"{long}:{asked[1]}"), max_length=128, progress=False
    )
    artifact = calibrate(options)
    data = artifact.provenance["data"]
    total = sum(d["tokens"] for d in data)
    for entry, tokens in zip(data, asked, strict=True):
        assert abs(entry["tokens"] / total - tokens / sum(asked)) < 0.05
        assert abs(entry["asked"] - entry["tokens"]) <= 1
    assert calibrate(options).provenance == artifact.provenance
    assert not any("holds only" in line for line in warnings(artifact))


def test_a_source_that_runs_out_is_said(tiny_models, tmp_path):
    short = write(tmp_path / "short.jsonl", [{"text": "few words. "}] * 10)
    long = write(tmp_path / "long.jsonl", [{"text": "many words. " * 50}] * 50)
    artifact = calibrate(CalibrationOptions(tiny_models(), text=(short, long), tokens=1024, max_length=128, progress=False))
    lines = [line for line in warnings(artifact) if "short.jsonl" in line and "holds only" in line]
    assert len(lines) == 1


@pytest.mark.parametrize(
    "line, words",
    [
        ("not json", "line 2: expected one JSON object, found text that is not JSON"),
        ("[1]", "line 2: expected an object with .* got a list"),
        ('{"content": "x", "id": 3}', "got keys content, id"),
        ('{"text": 3}', 'line 2: expected a string as "text", got a int'),
        ('{"messages": "hi"}', 'expected a list of messages as "messages", got a str'),
        ('{"messages": [{"content": "hi"}, 3]}', 'line 2: expected messages with "role" and "content"'),
        ('{"messages": []}', 'line 2: expected messages with "role" and "content"'),
    ],
)
def test_bad_lines_are_named(line, words, tmp_path, make_tokenizer):
    file = write(tmp_path / "a.jsonl", [{"text": "fine"}, line])
    with pytest.raises(OscarError, match=words):
        tokens_of(file, make_tokenizer(chat=True))


def test_a_template_that_refuses_is_quoted(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(
        OscarError, match="line 1: the model's chat template does not take these messages: roles must alternate"
    ):
        tokens_of(file, tokenizer)


def test_messages_without_a_template(tmp_path, make_tokenizer):
    file = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(OscarError, match="line 1: this model has no chat template"):
        tokens_of(file, make_tokenizer())


@pytest.mark.parametrize("content", ["", " \n\n", "plain words, no JSON"])
def test_bad_files_are_refused_before_the_model_is_loaded(content, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(OscarError, match="the file is empty" if not content.strip() else "line 1"):
        sources.check(sources.Source(file, 100, "a"))
