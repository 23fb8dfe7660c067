"""The report for people: a table on the terminal, one picture, one HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from oscar.format.sealed_file import write_whole

_COLOURS = ("#1f6fb4", "#d1622b", "#3a923a", "#b0417b", "#7a5195", "#8c6d31", "#17a2b8", "#666666")
_NOTHING = "-"
_SMALLEST_KL = 1e-7
"""Divergences below are drawn here: rounding, not loss."""


def table(report: dict) -> list[list[str]]:
    """Header and one row a method, as text; columns of what was measured, a dash where it was not for this method."""
    rows = [["method", "bits", "perplexity", "KL mean", "KL 99 %", "top-1", "attention", "retrieval", "95 %"]]
    for name, entry in report["methods"].items():
        layers = entry.get("attn_rel_err")
        low, high = entry.get("retrieval_ci", (0, 0))
        rows.append(
            [
                name,
                _text(entry.get("bits_per_element"), ".2f"),
                _text(entry.get("perplexity"), ".3f"),
                _text(entry.get("kl_mean"), ".2g"),
                _text(entry.get("kl_p99"), ".2g"),
                _text(entry.get("top1_agreement"), ".1%"),
                _text(max(layers) if layers else None, ".2g"),
                _text(entry.get("retrieval_exact"), ".1%"),
                f"{low:.0%} to {high:.0%}" if high else _NOTHING,
            ]
        )
    measured = [i for i in range(len(rows[0])) if any(row[i] != _NOTHING for row in rows[1:])]
    return [[row[i] for i in measured] for row in rows]


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
    entries = report["methods"].values()
    prompts = f", {report['n']} retrieval prompts" if _asked_for_facts(report) else ""
    result = [f"Context {report['context']:,} tokens, windows {sinks} + {recent} in 16 bits{prompts}."]
    result[0] += " Bits are per element, windows included."
    if any("attn_rel_err" in entry for entry in entries):
        result[0] += " Attention: relative error of its output, the worst layer's."
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
    widths = [e["retrieval_ci"][1] - e["retrieval_ci"][0] for e in entries if "retrieval_ci" in e]
    if widths and max(widths) > 0.1:
        result.append(
            f"Intervals of retrieval are up to {max(widths):.0%} wide: closer rows are not told apart; give a larger --n."
        )
    return result


def show(report: dict, console: Console) -> None:
    """Print the tables and their notes. What does not fit beside the names goes into another table below."""
    for title, rows in (("what the KV cache costs", table(report)), ("hard tasks", hard_table(report))):
        for part in _fitting(rows, console.width):
            grid = Table(title=f"{report['model']}: {title}", title_justify="left")
            for i, name in enumerate(part[0]):
                grid.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
            for row in part[1:]:
                grid.add_row(*row)
            console.print(grid)
    for line in notes(report):
        console.print(line, highlight=False, soft_wrap=True)


def _fitting(rows: list[list[str]], width: int) -> list[list[list[str]]]:
    """The rows cut by columns into as few tables as fit into `width` characters; each begins with the first column."""
    if not rows:
        return []
    needs = [max(map(len, column)) + 3 for column in zip(*rows, strict=True)]  # a space to each side and a line
    parts: list[list[int]] = [[]]
    room = width - 1 - needs[0]
    for i, need in list(enumerate(needs))[1:]:
        if parts[-1] and need > room:
            parts.append([])
            room = width - 1 - needs[0]
        parts[-1].append(i)
        room -= need
    return [[[row[i] for i in (0, *part)] for row in rows] for part in parts]


def draw(report: dict) -> bytes:
    """PNG, a panel for each of these that was measured: divergence against bits, error of attention per layer, agreement along
    the continuation, retrieval over depth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = report["methods"].values()
    panels: list[Callable] = []
    if any("kl_mean" in entry for entry in entries):
        panels += [_draw_quality, _draw_layers, _draw_agreement]
    if _asked_for_facts(report):
        panels.append(_draw_depth)
    columns = max(1, min(len(panels), 2))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(6 * columns, 0.9 + 3.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    sinks, recent = report["windows"]
    figure.suptitle(f"{report['model']}, context {report['context']:,}, windows {sinks} + {recent} in 16 bits")
    grid = figure.add_gridspec(rows, 2 * columns)  # in halves, so that an odd last panel stands in the middle
    curves: dict[str, Any] = {}
    for i, panel in enumerate(panels):
        first = 2 * (i % columns) + (1 if len(panels) % columns and i == len(panels) - 1 else 0)
        axis = figure.add_subplot(grid[i // columns, first : first + 2])
        panel(axis, report)
        handles, labels = axis.get_legend_handles_labels()
        curves |= dict(zip(labels, handles, strict=True))
    # One legend for all panels, where no curve is.
    figure.legend(
        list(curves.values()),
        list(curves),
        loc="outside lower center",
        ncols=max(1, min(len(curves), 5)),
        frameon=False,
        fontsize=8,
    )
    if not panels:
        figure.text(0.5, 0.5, "nothing to draw: text and retrieval were not measured", ha="center", color="grey")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130)
    return data.getvalue()


def _styles(report: dict) -> list[tuple[dict, dict]]:
    """(figures, style of the curve) of each method; the same style in every panel."""
    styles = (
        {"color": c, "label": n, "marker": "o", "ms": 4, "lw": 1.2}
        for c, n in zip(_COLOURS * 9, report["methods"], strict=False)
    )
    return list(zip(report["methods"].values(), styles, strict=True))


def _draw_quality(axis, report: dict) -> None:
    _label(axis, "Divergence against size", "bits per element, windows included", "mean KL to 16 bits (nats)")
    for entry, style in _styles(report):
        if "kl_mean" in entry:
            mean, low, high = (max(x, _SMALLEST_KL) for x in (entry["kl_mean"], *entry["kl_ci"]))
            spread = [[mean - low], [max(high - mean, 0)]]
            axis.errorbar([entry["bits_per_element"]], [mean], spread, capsize=3, **style | {"ls": "none"})
    axis.set_yscale("log")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.margins(x=0.15)


def _draw_layers(axis, report: dict) -> None:
    from matplotlib.ticker import MaxNLocator

    _label(axis, "Error of attention's output", "layer", "relative error")
    for entry, style in _styles(report):
        if "attn_rel_err" in entry:
            axis.plot(range(len(entry["attn_rel_err"])), entry["attn_rel_err"], **style)
    axis.set_yscale("log")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _draw_agreement(axis, report: dict) -> None:
    _label(axis, "Top-1 agreement along the continuation", "quarter of the continuation", "share of positions")
    for entry, style in _styles(report):
        if "top1_by_quarter" in entry:
            axis.plot([1, 2, 3, 4], entry["top1_by_quarter"], **style)
    axis.set_xticks([1, 2, 3, 4])


def _draw_depth(axis, report: dict) -> None:
    title = f"Retrieval over depth, {report['n']} prompts"
    _label(axis, title, "place of the fact (quarters of the prompt)", "share right")
    for entry, style in _styles(report):
        parts = [(i + 1, right / asked) for i, (right, asked) in enumerate(entry.get("retrieval_by_depth", [])) if asked]
        axis.plot(*zip(*parts, strict=True) if parts else ([], []), **style)
    axis.set_xticks([1, 2, 3, 4])
    axis.set_ylim(-0.05, 1.05)


def _asked_for_facts(report: dict) -> bool:
    return any("retrieval_exact" in entry for entry in report["methods"].values())


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
{tables}{said}<img alt="The figures of the tables, drawn" src="data:image/png;base64,{image}">
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
    return _NOTHING if value is None else format(value, form)
