"""The tables of a real model: every row is measured and stated with its bits, and the page is what the figures say."""

from pathlib import Path

import pytest
import quality_table
import torch

from oscar.calibration.options import CalibrationOptions
from oscar.embedded import embedded_model
from oscar.evaluation import configurations as making
from oscar.evaluation.reader import Reader
from oscar.evaluation.run import HELD_OUT
from oscar.format.identity import ModelIdentity

WORDS = "Second moments are summed in double precision while the model reads; nothing else is kept. "


def test_rows_of_a_small_model(make_model, make_tokenizer, tmp_path):
    model, tokenizer = make_model("Qwen3", num_hidden_layers=12), make_tokenizer()
    model.save_pretrained(tmp_path)
    identity = ModelIdentity.from_path(tmp_path)
    options = CalibrationOptions(tmp_path, method="identity", dtype="float32", device="cpu")
    made = [making.from_method(name, options, identity, {}) for name in ("bf16", "lossless")]
    stream = torch.tensor(tokenizer(WORDS * 20)["input_ids"])
    chosen = {kind: list(stream[start:].split(96))[:2] for kind, start in (("prose", 0), ("chat", 7))}
    rows = quality_table.measure(Reader(model), made, identity, 64, chosen)
    assert [(row["method"], tuple(row["windows"])) for row in rows] == [
        ("bf16", (0, 0)),
        *(("lossless", windows) for windows in quality_table.WINDOWS),
    ]
    for row in rows:
        parts = row["kinds"]
        assert row["positions"] == 4 * 32 and row["kl_mean"] < 1e-3
        assert row["kl_mean"] == pytest.approx(sum(parts[kind]["kl_mean"] for kind in chosen) / 2)
        assert row["kl_by_document"] == [x for kind in chosen for x in parts[kind]["kl_by_document"]]
    record = {"contexts": {"64": {"documents": {"prose": 2, "chat": 2}, "seconds": 1.0, "rows": rows}}}
    lines = quality_table.tables(record).splitlines()
    assert lines[0] == "### Context 64: 2 of prose, 2 of chat; 1 CPU seconds" and len(lines) == 4 + len(rows)
    assert all(line.count("|") == lines[2].count("|") for line in lines[3:]) and "| 64, 256 |" in lines[-1]


def test_calibration_and_evaluation_share_no_text(monkeypatch, tmp_path):
    monkeypatch.setattr(quality_table, "WORK", tmp_path)
    found = [Path(file).read_text(encoding="utf-8") for file in quality_table.calibration_text()]
    assert all(len(text) > 100_000 for text in found)
    held_out = {line.strip() for name in HELD_OUT for line in (embedded_model() / name).read_text("utf-8").splitlines()}
    for text in found:
        assert not [line for line in text.splitlines() if len(line) > 60 and line.strip() in held_out]


def test_chats_are_cut_into_documents():
    made = quality_table.documents("chat", None, torch.arange(1000), 300, 2)
    assert [document.tolist() for document in made] == [list(range(300)), list(range(300, 600))]
