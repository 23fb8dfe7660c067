"""The report's table and picture: what was measured and nothing else, whole names, layers in order; on a deep model."""

import io
from types import SimpleNamespace

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from oscar.evaluation.options import EvaluationOptions
from oscar.evaluation.page import draw, notes, show, table, write_page
from oscar.evaluation.run import evaluate

METHODS = ("bf16", "int2", "oscar-surrogate-shared", "oscar-shared", "oscar-shaped")
LAYERS = 12
PROSE = "Second moments are summed in double precision while the model reads; nothing else is kept. "


@pytest.fixture(scope="module")
def report(tiny_models, tmp_path_factory) -> dict:
    """Divergence and perplexity alone, of a model with more than ten layers."""
    text = tmp_path_factory.mktemp("text") / "prose.txt"
    text.write_text(PROSE * 30, encoding="utf-8")
    options = EvaluationOptions(
        tiny_models(num_hidden_layers=LAYERS),
        METHODS,
        tasks=("divergence", "perplexity"),
        context=64,
        continuation=16,
        documents=3,
        sink_tokens=2,
        recent_tokens=4,
        text=(text,),
        calibration_text=(text,),
        calibration_tokens=512,
        progress=False,
    )
    return evaluate(options)


@pytest.fixture(scope="module")
def with_retrieval(report) -> dict:
    """The same, as if retrieval had been asked for too."""
    found = {"retrieval_exact": 0.5, "retrieval_ci": [0.45, 0.55], "retrieval_by_depth": [[1, 2]] * 4}
    return report | {"methods": {name: entry | found for name, entry in report["methods"].items()}}


def drawn(report: dict, monkeypatch) -> SimpleNamespace:
    """Titles of the panels, the curves over layers, and the legends, each with the panels that it lies on."""
    found = SimpleNamespace(titles=[], curves=[], on_panels=0, labels=[])

    def savefig(figure: Figure, *args, **kwargs) -> None:
        save(figure, *args, **kwargs)
        found.titles = [axis.get_title() for axis in figure.axes]
        boxes = [legend.get_window_extent() for legend in figure.legends]
        found.on_panels = sum(box.overlaps(axis.get_tightbbox()) for box in boxes for axis in figure.axes)
        found.on_panels += sum(axis.get_legend() is not None for axis in figure.axes)
        found.labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]

    def plot(axis: Axes, *args, **kwargs):
        found.curves.append((kwargs["label"], list(args[0]), list(args[1])))
        return draw_plot(axis, *args, **kwargs)

    save, draw_plot = Figure.savefig, Axes.plot
    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(Axes, "plot", plot)
    assert draw(report).startswith(b"\x89PNG")
    return found


def printed(report: dict, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(report, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_names_are_whole(report, with_retrieval, width):
    for some in (report, with_retrieval):
        lines = [line for line in printed(some, width).splitlines() if line.startswith(("│", "┃"))]
        text = "\n".join(lines)
        assert "…" not in text and max(map(len, lines)) <= width
        tables = text.count(" method ")
        assert tables == (1 if width == 200 else 2)
        assert all(text.count(f" {name} ") == tables for name in METHODS)
        assert all(text.count(f" {name} ") == 1 for name in table(some)[0][1:])


def test_columns_and_notes_are_of_what_was_measured(report, with_retrieval):
    assert table(report)[0] == ["method", "bits", "perplexity", "KL mean", "KL 99 %", "top-1", "attention"]
    assert table(with_retrieval)[0][-2:] == ["retrieval", "95 %"]
    assert "prompts" not in " ".join(notes(report)) and "200 retrieval prompts" in " ".join(notes(with_retrieval))
    assert all("-" not in row for row in table(report)[1:])


def test_picture_has_a_panel_for_each_thing_measured(report, with_retrieval, monkeypatch):
    found = drawn(report, monkeypatch)
    assert len(found.titles) == 3 and not any("prompts" in title for title in found.titles)
    assert found.labels == list(METHODS) and found.on_panels == 0
    layers = [(label, y) for label, x, y in found.curves if x == list(range(LAYERS))]
    assert layers == [(name, report["methods"][name]["attn_rel_err"]) for name in METHODS]
    found = drawn(with_retrieval, monkeypatch)
    assert len(found.titles) == 4 and "Retrieval over depth, 200 prompts" in found.titles and found.on_panels == 0


def test_a_report_without_anything_to_draw(report, monkeypatch, tmp_path):
    bare = report | {"methods": {"bf16": {"bits_per_element": 16.0}}}
    assert drawn(bare, monkeypatch).titles == []
    write_page(bare, tmp_path / "a.html")
    assert "<th>bits</th></tr>" in (tmp_path / "a.html").read_text(encoding="utf-8")
