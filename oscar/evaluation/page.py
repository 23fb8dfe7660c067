"""The report for people: a table on the terminal, one picture, one HTML page."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oscar.format.sealed_file import write_whole

_COLOURS = ("#1f6fb4", "#d1622b", "#3a923a", "#b0417b", "#7a5195", "#8c6d31", "#17a2b8", "#666666")
_SMALLEST_KL = 1e-7
"""Divergences below are drawn here: rounding, not loss."""


def table(report: dict) -> list[list[str]]:
    """Header and one row a method, as text; a dash where something was not measured."""
    rows = [["method", "bits", "retrieval", "95 %", "perplexity", "KL mean", "KL 99 %", "top-1", "attention"]]
    for name, entry in report["methods"].items():
        layers = entry.get("attn_rel_err")
        low, high = entry.get("retrieval_ci", (0, 0))
        rows.append(
            [
                name,
                _text(entry.get("bits_per_element"), ".2f"),
                _text(entry.get("retrieval_exact"), ".1%"),
                f"{low:.0%} to {high:.0%}" if high else "-",
                _text(entry.get("perplexity"), ".3f"),
                _text(entry.get("kl_mean"), ".2g"),
                _text(entry.get("kl_p99"), ".2g"),
                _text(entry.get("top1_agreement"), ".1%"),
                _text(max(layers) if layers else None, ".2g"),
            ]
        )
    return rows


def hard_table(report: dict) -> list[list[str]]:
    """The same for the hard tasks: answers all right, then code tokens right under teacher forcing; [] without any."""
    kinds = list(dict.fromkeys(kind for entry in report["methods"].values() for kind in entry.get("recall_hard", {})))
    rows = [["method", *kinds]]
    for name, entry in report["methods"].items():
        found = [entry.get("recall_hard", {}).get(kind, {}) for kind in kinds]
        rows.append([name, *(f"{_text(f.get('exact'), '.0%')}, {_text(f.get('forced'), '.1%')}" for f in found)])
    return rows if kinds else []


def notes(report: dict) -> list[str]:
    """Sentences that keep a reader from taking a number for more than it is."""
    sinks, recent = report["windows"]
    result = [
        f"Context {report['context']:,} tokens, windows {sinks} + {recent} in 16 bits, {report['n']} retrieval prompts. "
        "Bits are per element, windows included. Attention: relative error of its output, the worst layer's.",
    ]
    for name, entry in report["methods"].items():
        if "prompt_tokens" not in entry:
            continue
        if entry["prompt_tokens"] is None:
            result.append(f"The server of {name} did not say how many tokens of a prompt it read.")
        else:
            low, high = entry["prompt_tokens"]
            short = f", and of {entry['shortened']} it read less than was sent" if entry["shortened"] else ""
            result.append(f"The server of {name} counted {low:,} to {high:,} tokens in a prompt{short}.")
    if hard_table(report):
        result.append(
            "Hard tasks: answers that are all right as generated, then tokens of codes that are right when the right answer is "
            "given up to them."
        )
    if report["at_chance"]:
        names = ", ".join(report["at_chance"])
        result.append(f"At chance in the first row, so its generated answers tell nothing of the cache: {names}.")
    widths = [e["retrieval_ci"][1] - e["retrieval_ci"][0] for e in report["methods"].values() if "retrieval_ci" in e]
    if widths and max(widths) > 0.1:
        result.append(
            f"Intervals of retrieval are up to {max(widths):.0%} wide: closer rows are not told apart; give a larger --n."
        )
    return result


def show(report: dict, console: Console) -> None:
    """Print the tables and their notes."""
    for title, rows in (("what the KV cache costs", table(report)), ("hard tasks", hard_table(report))):
        if not rows:
            continue
        grid = Table(title=f"{report['model']}: {title}", title_justify="left")
        for i, name in enumerate(rows[0]):
            grid.add_column(name, justify="left" if i == 0 else "right")
        for row in rows[1:]:
            grid.add_row(*row)
        console.print(grid)
    for line in notes(report):
        console.print(line, highlight=False, soft_wrap=True)


def draw(report: dict) -> bytes:
    """PNG: divergence against bits, error of attention per layer, retrieval over depth, agreement along the continuation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 7.4), layout="constrained")
    FigureCanvasAgg(figure)
    sinks, recent = report["windows"]
    figure.suptitle(f"{report['model']}, context {report['context']:,}, windows {sinks} + {recent} in 16 bits")
    quality, layers, depth, along = figure.subplots(2, 2).flatten()
    _label(quality, "Divergence against size", "bits per element, windows included", "mean KL to 16 bits (nats)")
    _label(layers, "Error of attention's output", "layer", "relative error")
    _label(depth, f"Retrieval over depth, {report['n']} prompts", "place of the fact (quarters of the prompt)", "share right")
    _label(along, "Top-1 agreement along the continuation", "quarter of the continuation", "share of positions")
    for colour, (name, entry) in zip(_COLOURS * 9, report["methods"].items(), strict=False):
        style = {"color": colour, "label": name, "marker": "o", "ms": 4, "lw": 1.2}
        if "kl_mean" in entry:
            low, high = (max(x, _SMALLEST_KL) for x in entry["kl_ci"])
            mean = max(entry["kl_mean"], _SMALLEST_KL)
            spread = [[mean - low], [max(high - mean, 0)]]
            quality.errorbar([entry["bits_per_element"]], [mean], spread, fmt="o", color=colour, capsize=3, label=name)
            layers.plot(range(len(entry["attn_rel_err"])), entry["attn_rel_err"], **style)
            along.plot([1, 2, 3, 4], entry["top1_by_quarter"], **style)
        parts = [(i + 1, right / asked) for i, (right, asked) in enumerate(entry.get("retrieval_by_depth", [])) if asked]
        if parts:
            depth.plot(*zip(*parts, strict=True), **style)
    if any("kl_mean" in entry for entry in report["methods"].values()):
        quality.set_yscale("log")
        quality.set_xscale("log", base=2)
        quality.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        quality.margins(x=0.15)
        layers.set_yscale("log")
        layers.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        along.set_xticks([1, 2, 3, 4])
    depth.set_xticks([1, 2, 3, 4])
    depth.set_ylim(-0.05, 1.05)
    for axis in (quality, layers, depth, along):
        if axis.has_data():
            axis.legend(frameon=False, fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130)
    return data.getvalue()


def write_page(report: dict, path: str | Path) -> None:
    """One self-contained HTML file: table, notes, picture, settings. Raises OscarError: it cannot be written."""
    tables = "".join(map(_html_table, filter(None, (table(report), hard_table(report)))))
    said = "".join(f"<p>{html.escape(line)}</p>\n" for line in notes(report))
    settings = _html_table([["setting", "value"], *([str(k), str(v)] for k, v in report["settings"].items())])
    image = base64.b64encode(draw(report)).decode()
    title = html.escape(f"{report['model']}: what the KV cache costs")
    text = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px sans-serif; margin: 2em; max-width: 75em }} table {{ border-collapse: collapse; margin: 1em 0 }}
td, th {{ border: 1px solid #ccc; padding: .3em .6em; text-align: right }} td:first-child, th:first-child {{ text-align: left }}
img {{ max-width: 100% }}</style></head>
<body><h1>{title}</h1>
{tables}{said}<img alt="Divergence against bits, error per layer, retrieval over depth" src="data:image/png;base64,{image}">
<h2>Settings</h2>
{settings}</body></html>
"""
    write_whole(Path(path), text.encode(), "page")


def _html_table(rows: list[list[str]]) -> str:
    header, *body = [[html.escape(cell) for cell in row] for row in rows]
    lines = ["".join(f"<th>{cell}</th>" for cell in header), *("".join(f"<td>{cell}</td>" for cell in row) for row in body)]
    return "<table>\n" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>\n"


def _label(axis, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
