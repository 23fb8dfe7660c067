"""Draw the time of one decode call against the length of the context, from the figures of bench_decode_attention.py.

python sgl-kernel/benchmark/plot_decode.py docs/decode.json docs/decode.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

# Colours of Okabe and Ito, which colour-blind readers tell apart; each configuration also has its own marker.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#7a5230")
MARKERS = "osD^vP"
LABELS = {"oscar int2": "OSCAR, 2 bits", "oscar bf16": "our kernels, BF16"}
LIMITS = {"int2_bytes": (":", "read bandwidth, 2 bits"), "bf16_bytes": ("--", "read bandwidth, BF16")}


def draw(record: dict, path: Path) -> None:
    """Write the picture of the cases with one sequence, one panel a shape that has several contexts.

    Args:
        record: what the benchmark writes.
        path: PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    alone = [case for case in record["cases"] if case["batch"] == 1]
    shapes: dict[str, list[dict]] = {}
    for case in sorted(alone, key=lambda c: c["ctx"]):
        shapes.setdefault(case["shape"], []).append(case)
    panels = {name: cases for name, cases in shapes.items() if len(cases) > 1} or shapes
    fig, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels) + 2.6, 4.4), squeeze=False, layout="constrained")
    for axis, (shape, cases) in zip(axes[0], panels.items(), strict=True):
        x = [c["ctx"] for c in cases]
        for i, name in enumerate(cases[0]["arms"]):
            found = [c["arms"][name] for c in cases]
            colour, label = COLOURS[i % len(COLOURS)], LABELS.get(name, name)
            axis.plot(x, [f["median"] for f in found], color=colour, marker=MARKERS[i % len(MARKERS)], label=label)
            axis.fill_between(x, [f["p25"] for f in found], [f["p75"] for f in found], color=colour, alpha=0.2)
        for key, (style, label) in LIMITS.items():
            axis.plot(x, [c[key] / c["bandwidth_gbps"] / 1e6 for c in cases], style, color="black", label=label)
        axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="one call, ms", title=f"{shape}, one sequence")
        axis.set_xticks(x, [f"{n // 1024}K" for n in x])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(True, alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    # In the order of the curves' right ends, the slowest first, so that the eye finds them.
    order = sorted(range(len(handles)), key=lambda i: -handles[i].get_ydata()[-1])
    fig.legend([handles[i] for i in order], [labels[i] for i in order], loc="outside right center", frameon=False)
    fig.suptitle(record["machine"]["text"], fontsize=9)
    fig.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", type=Path, help="JSON of bench_decode_attention.py --json; times in ms, sizes in bytes")
    parser.add_argument("output", type=Path, help="PNG to write")
    args = parser.parse_args()
    draw(json.loads(args.figures.read_text(encoding="utf-8")), args.output)


if __name__ == "__main__":
    main()
