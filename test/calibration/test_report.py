"""What an artifact says of itself: the verdict, the mix of text, warnings."""

import dataclasses

import pytest
import torch

from oscar.calibration.calibrate import CalibrationOptions, calibrate
from oscar.calibration.report import RECOMMENDED, USABLE, describe, verdict, warnings
from oscar.calibration.run_transformers import LayerCapture
from oscar.format.codec import RowFormat
from oscar.format.side import LayerTransforms, Side
from oscar.methods.matrices import rotate

PROSE = "Second moments are summed in double precision while the model reads; nothing else is kept. "


def quick(model, **changes) -> CalibrationOptions:
    return CalibrationOptions(**{"model": model, "tokens": 1024, "max_length": 128, "progress": False} | changes)


def quick_model(folder, make_model, make_tokenizer) -> CalibrationOptions:
    """Options for a tiny model saved in this folder."""
    make_model("Qwen3").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return quick(folder)


def test_mix_and_the_worse_source_are_said(tiny_models, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(PROSE * 40)
    artifact = calibrate(quick(tiny_models(), text=(tmp_path / "a.txt", tmp_path / "b.txt")))
    assert warnings(artifact) == []
    artifact.provenance["held_out"]["sources"][1]["attention"] *= 2
    assert len(warnings(artifact)) == 1 and warnings(artifact)[0].startswith("b.txt is clearly worse off than a.txt")


@pytest.mark.parametrize(
    "served, label",
    [(RECOMMENDED, "recommended"), (RECOMMENDED + 0.001, "usable with larger windows"), (USABLE + 0.001, "not recommended")],
)
def test_verdict(served, label, tiny_models, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(PROSE * 40)
    options = quick(tiny_models(), text=(tmp_path / "a.txt", tmp_path / "b.txt"), sink_tokens=4, recent_tokens=8)
    artifact = calibrate(options)
    held_out = artifact.provenance["held_out"]
    held_out["sources"][0]["served"], held_out["sources"][1]["served"] = 0.01, served
    found = verdict(artifact)
    assert (found["label"], found["error"]) == (label, served) and describe(artifact)["verdict"] == found
    for word in (f"{label}: as served", f"{served:.1%}", "b.txt", "10%", "25%"):
        assert word in found["sentence"], word
    artifact.recent_tokens = 100  # too little was read outside of the windows
    assert verdict(artifact)["label"] == "unknown"
    assert "no held-out sequence has twice the 104 tokens of the windows" in verdict(artifact)["sentence"]
    held_out["sources"] = []
    assert verdict(artifact)["label"] == "unknown"


def test_a_source_unlike_the_text_is_said(tmp_path, make_model, make_tokenizer):
    """Calibrated on A, the error on B, whose channels vary otherwise, is clearly larger and is said (FIELD C4)."""
    from oscar.calibration.heldout import LayerErrorSums, total

    generator = torch.Generator().manual_seed(0)
    bases = torch.linalg.qr(torch.randn(2, 64, 64, generator=generator)).Q
    spread = torch.full((64,), 0.01)
    spread[:2] = 1
    rows = [(torch.randn(2, 300, 64, generator=generator) * spread) @ basis.T for basis in bases]  # A and B
    moment = (rows[0].mT @ rows[0]).double() / 300
    t = rotate(moment).float()
    layer = LayerTransforms(Side(t, torch.full((2,), 0.96)), Side(t, torch.full((2,), 0.96)))
    errors = []
    for x in rows:
        sums = LayerErrorSums(layer, RowFormat(64), RowFormat(64), 0, 0)
        real = torch.ones(1, 300, dtype=torch.bool)
        sums.add(LayerCapture(0, 8 * x[None], x[None], x[None], x[None].transpose(1, 2), real, 64**-0.5, None, None))
        errors.append(total([sums]))
    assert errors[1].v > 1.25 * errors[0].v and errors[1].attention > 1.25 * errors[0].attention
    artifact = calibrate(quick_model(tmp_path, make_model, make_tokenizer))
    sources = [{"source": n, "tokens": 300, **dataclasses.asdict(e)} for n, e in zip("AB", errors, strict=True)]
    artifact.provenance["held_out"]["sources"] = sources
    assert any(line.startswith("B is clearly worse off than A") for line in warnings(artifact))
