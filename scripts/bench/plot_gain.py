"""Draw the README's picture: bits an element against the length of a request, and facts found again in long prompts.

    python scripts/bench/plot_gain.py docs/needles.json docs/gain.png

The left panel is counted with `oscar.format.sizing` for the geometry of a model, the embedded one by default; the right one is
drawn from the figures of needles.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import setups
from transformers import AutoConfig

from oscar.format import sizing
from oscar.format.codec import RowFormat

# Colours of Okabe and Ito, which colour-blind readers tell apart; lines also differ in dashes.
COLOURS = {"BF16": "#5f6670", "oscar, 2 bits": "#0072B2", "plain INT2": "#D55E00"}
STYLES = {"BF16": "--", "oscar, 2 bits": "-", "plain INT2": ":"}
LENGTHS = [round(1024 * 2 ** (i / 8)) for i in range(57)]
"""1K to 128K tokens; every eighth gets a tick."""
MARKED = (2048, 131072)


def bits_per_element(model: Path, tokens: int, windows: tuple[int, int]) -> float:
    """Bits of one number of K or V of a request of so many tokens: rows, slot map and windows (sink_tokens, recent_tokens)."""
    config = AutoConfig.from_pretrained(model)
    geometry, head_dim = (config.num_hidden_layers, config.num_key_value_heads), config.head_dim
    fmt = RowFormat(head_dim)
    slots = tokens + sizing.window_slots(tokens, *windows)
    return (
        16
        * slots
        * sizing.bytes_per_token(*geometry, fmt, fmt)
        / (tokens * sizing.bytes_per_token_16_bit(*geometry, head_dim, head_dim))
    )


def draw_bits(axis, model: Path, configurations: dict) -> None:
    """Bits an element of each configuration of needles.py, and what two lengths come to in tokens for the same memory."""
    for name, found in configurations.items():
        cache = found["cache"]
        windows = (cache["sink_tokens"], cache["recent_tokens"]) if cache else (0, 0)
        bits = [bits_per_element(model, n, windows) if cache else 16.0 for n in LENGTHS]
        axis.plot(LENGTHS, bits, STYLES[name], color=COLOURS[name], linewidth=2)
        for n in MARKED if any(windows) else ():
            at_length = bits_per_element(model, n, windows)
            axis.plot(n, at_length, "o", color=COLOURS[name])
            at = {"xytext": (8, 6), "ha": "left"} if n == MARKED[0] else {"xytext": (4, 10), "ha": "right"}
            text = f"{at_length:.2f} bits at {n:,} tokens:\n{16 / at_length:.1f}x the tokens of BF16"
            axis.annotate(text, (n, at_length), textcoords="offset points", va="bottom", **at)
        text = setups.label(name, cache)
        if any(windows):
            at, offset, side = (LENGTHS[0], bits[0]), (10, 2), "left"
        elif cache:
            at, offset, side, text = (LENGTHS[0], bits[0]), (0, -14), "left", f"{text}: {bits[0]:.2f} bits"
        else:
            at, offset, side = (LENGTHS[-1], bits[-1]), (0, -14), "right"
        axis.annotate(text, at, offset, textcoords="offset points", color=COLOURS[name], ha=side)
    axis.set_xscale("log", base=2)
    axis.set_xticks(LENGTHS[::8], [f"{n // 1024}K" for n in LENGTHS[::8]])
    axis.set(ylim=(0, 17.5), yticks=(0, 4, 8, 12, 16), xlabel="tokens of a request", ylabel="bits an element")
    axis.set_title("What a number of the KV cache takes, windows included", fontsize=11)


def draw_found(axis, record: dict) -> None:
    """Facts found, with intervals."""
    found = list(record["arms"].values())
    names = [setups.label(name, one["cache"]).replace(", ", ",\n") for name, one in record["arms"].items()]
    exact = [100 * one["exact"] for one in found]
    bounds = [[100 * bound for bound in one["interval"]] for one in found]
    # An interval's end may miss 100 % by a rounding error.
    errors = [[max(0, e - low), max(0, high - e)] for e, (low, high) in zip(exact, bounds, strict=True)]
    colours = [COLOURS[name] for name in record["arms"]]
    axis.bar(names, exact, color=colours, yerr=list(zip(*errors, strict=True)), capsize=5, width=0.65)
    for x, one in enumerate(found):
        text = f"{round(one['exact'] * one['n'])} of {one['n']}"
        axis.text(x, max(exact[x], bounds[x][1]) + 2, text, ha="center", va="bottom")
    axis.set(ylim=(0, 115), yticks=range(0, 101, 25), ylabel="found, % (95 % interval)")
    axis.set_title(f"{record['n']} facts in prompts of {record['tokens']:,} tokens", fontsize=11)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="JSON of needles.py --json")
    parser.add_argument("output", type=Path, help="PNG to write")
    setups.add_model(parser, "model whose bits are counted")
    args = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    record = json.loads(args.figures.read_text(encoding="utf-8"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    draw_bits(left, args.model, record["arms"])
    draw_found(right, record)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.output, dpi=130)


if __name__ == "__main__":
    main()
