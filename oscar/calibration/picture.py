"""One picture of an artifact: errors per layer before and after, and what was hard about the rows."""

from __future__ import annotations

import io
from pathlib import Path

from oscar.calibration.report import by_layer
from oscar.format.artifact import Artifact
from oscar.format.sealed_file import write_whole

FORMATS = ("png", "svg", "pdf")
_BEFORE, _AFTER, _SERVED = "#b0b0b0", "#1f6fb4", "#d1622b"


def draw(artifact: Artifact, path: str | Path) -> None:
    """Write the picture, whole or not at all.

    Args:
        artifact: with held-out errors in its provenance, as `calibrate` makes it; what is missing leaves its panel empty.
        path: file whose suffix is one of FORMATS.
    Raises:
        OscarError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    held_out = artifact.provenance.get("held_out", {})
    errors, shape = by_layer(held_out.get("layers", {})), by_layer(artifact.provenance.get("shape", {}))
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    model = artifact.model
    figure.suptitle(
        f"{model.architecture}, {model.num_layers} layers, {model.num_kv_heads} KV heads of {model.head_dim}: "
        f"2-bit cache, method {artifact.method}, {held_out.get('tokens', 0):,} held-out tokens"
    )
    for axis, side, title in zip(axes[0], ("k", "v", "attention"), ("keys", "values", "attention's output"), strict=True):
        _labels(axis, f"Error of {title}", "layer", "relative error")
        if not errors:
            _empty(axis, "not measured")
            continue
        rows = list(errors.values())
        axis.plot(list(errors), [e[f"plain_{side}"] for e in rows], "o-", color=_BEFORE, label="plain 2-bit")
        axis.plot(list(errors), [e[side] for e in rows], "o-", color=_AFTER, label="this artifact")
        if side == "attention":
            axis.plot(list(errors), [e["served"] for e in rows], "s-", color=_SERVED, label="as served, with windows")
        axis.set_ylim(bottom=0)
        _legend(axis)
    _whole_numbers(axes[0])
    spectra = axes[1][:2]
    for axis, side, title in zip(spectra, ("k", "v"), ("query energy $C_Q$", "attention-weighted values $C_S$"), strict=True):
        _labels(axis, f"Spectrum of {title}", "strongest directions", "share of energy")
        if not shape:
            _empty(axis, "method reads no text")
            continue
        for i, entry in shape.items():
            values = entry[f"{side}_spectrum"]
            shade = (i + 1) / len(shape)
            axis.plot([1 << n for n in range(len(values))], values, color=_AFTER, alpha=0.25 + 0.75 * shade, lw=1)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_ylim(0, 1.02)
        axis.text(0.97, 0.05, "one line a layer, later ones darker", transform=axis.transAxes, ha="right", fontsize=8)
    axis = axes[1][2]
    _labels(axis, "Outlier channels", "layer", "largest channel / median channel (RMS)")
    if shape:
        for side, colour, name in (("k", _AFTER, "keys"), ("v", _SERVED, "values")):
            axis.plot(list(shape), [e[f"{side}_outlier"] for e in shape.values()], "o-", color=colour, label=name)
        axis.set_yscale("log")
        axis.set_ylim(bottom=0.9)
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axis.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "125" else "")
        axis.axhline(1, color=_BEFORE, lw=0.8)
        _legend(axis)
        _whole_numbers([axis])
    else:
        _empty(axis, "method reads no text")
    path, data = Path(path), io.BytesIO()
    figure.savefig(data, format=path.suffix.lstrip(".").lower(), dpi=130)
    write_whole(path, data.getvalue(), "picture")


def _labels(axis, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8, which="both")


def _legend(axis) -> None:
    """Below the title and above the panel, where no curve is."""
    axis.set_title(axis.get_title(), fontsize=10, pad=18)
    axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=3, borderpad=0)


def _whole_numbers(axes) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _empty(axis, reason: str) -> None:
    axis.text(0.5, 0.5, reason, transform=axis.transAxes, ha="center", color="grey")
    axis.set_xticks([])
    axis.set_yticks([])
