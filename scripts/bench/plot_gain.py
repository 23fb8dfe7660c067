"""Draw the README's picture from the figures of bench_needles.py: tokens in the same memory, and facts found again."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"BF16": "#8a8f98", "oscar, 2 bits": "#1a7f5a", "plain INT2": "#c8553d"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", help="JSON of bench_needles.py --json")
    parser.add_argument("output", help="PNG to write")
    args = parser.parse_args()
    record = json.loads(Path(args.figures).read_text())
    arms = record["arms"]
    names = list(arms)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")

    base = arms["BF16"]["tokens"]
    ratios = [arms[name]["tokens"] / base for name in names]
    left.bar(names, ratios, color=[COLOURS[name] for name in names])
    for x, ratio in enumerate(ratios):
        left.text(x, ratio, f"{ratio:.2f}x", ha="center", va="bottom")
    left.set_title("Tokens of KV cache in the same memory", fontsize=10)
    left.set_ylim(0, max(ratios) * 1.15)
    left.set_ylabel("relative to BF16")

    exact = [100 * arms[name]["exact"] for name in names]
    bounds = [[100 * bound for bound in arms[name]["interval"]] for name in names]
    # An interval's end may miss 100 % by a rounding error.
    errors = [[max(0, e - low), max(0, high - e)] for e, (low, high) in zip(exact, bounds, strict=True)]
    right.bar(names, exact, color=[COLOURS[name] for name in names], yerr=list(zip(*errors, strict=True)), capsize=4)
    for x, value in enumerate(exact):
        right.text(x + 0.06, value + 1, f"{value:.0f}%", ha="left", va="bottom")
    right.set_title(f"{record['n']} facts in prompts of {record['tokens']} tokens: found again", fontsize=10)
    right.set_ylim(0, 118)
    right.set_ylabel("exact match, % (95 % interval)")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.output, dpi=130)


if __name__ == "__main__":
    main()
