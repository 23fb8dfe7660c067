"""What each part of a method buys, one at a time: the paper's factors, then ours.

    python scripts/bench/ablation.py [--variants plain outliers] [--json F.json]
    python scripts/bench/ablation.py --model DIR --variants plain --calibration-text FILE [--only oscar-shaped "no shaping"]

Every configuration is read through the serving kernels (`oscar.evaluation.reader`), on any model, and on variants of the
embedded one that compute the same with harder keys and values (`stress.py`): context exact, continuation teacher-forced, small
windows so that nearly everything is read from 2 bits. Columns: relative error of attention's output (mean over layers), mean KL
to exact attention in nats with half of its 95 % interval, top-1 agreement, perplexity over that of exact attention, and KL over
that of the first configuration of the table on the same documents, a geometric mean with its 95 % interval.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path

import setups
import stress
import torch

from oscar import config, methods
from oscar.evaluation.configurations import Configuration, from_layers
from oscar.evaluation.reader import Reader
from oscar.evaluation.text_scores import score_text
from oscar.format.codec import RowFormat
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms
from oscar.methods import shaped as default_method
from oscar.methods.hadamard import equaliser, scattered
from oscar.methods.matrices import eigenvectors, rotate, shape_noise
from oscar.methods.registry import side
from oscar.methods.shaped import KEYS, VALUES, Shape, moments
from oscar.methods.statistics import LayerStatistics

WINDOWS = "4/16"
CLIP = (config.DEFAULT_K_CLIP, config.DEFAULT_V_CLIP)
OURS_CLIP = methods.oscar_shaped.clip

Build = Callable[[LayerStatistics], LayerTransforms]
Change = Callable[[LayerStatistics, LayerTransforms], LayerTransforms]


def layer(found: LayerTransforms, clip: tuple[float, float] = CLIP) -> LayerTransforms:
    """Transforms with fixed clip quantiles, in the artifact's precision."""
    sides = (replace(side, clip=torch.full_like(side.clip, c)) for side, c in zip((found.k, found.v), clip, strict=True))
    return LayerTransforms(*sides).map(lambda x: x.float().contiguous())


def paper(factors: str, k_target: str, v_target: str, clip: tuple[float, float] = CLIP, share: bool = False) -> Build:
    """U, H and P in any combination, on any target."""

    def build(s: LayerStatistics) -> LayerTransforms:
        sides = (side(rotate(getattr(s, target), share, factors)) for target in (k_target, v_target))
        return layer(LayerTransforms(*sides), clip)

    return build


def shaped(change: Change, clip: tuple[float, float] = OURS_CLIP) -> Build:
    """The default method with something taken away or put in its place."""
    return lambda s: layer(change(s, methods.oscar_shaped(s)), clip)


def with_shapes(keys: Shape = KEYS, values: Shape = VALUES, clip: tuple[float, float] = OURS_CLIP) -> Build:
    """The default method with other exponents and floors."""
    return lambda s: layer(default_method.shaped(s, False, keys, values), clip)


def with_keys(s: LayerStatistics, t: LayerTransforms, k: torch.Tensor) -> LayerTransforms:
    """The layer with another map of the keys, and shaping made anew for it."""
    return replace(t, k=replace(t.k, transform=k, shaping=shape_noise(k, moments(s)[0][0], KEYS.floor)))


def with_values(s: LayerStatistics, t: LayerTransforms, v: torch.Tensor) -> LayerTransforms:
    """The layer with another map of the values, and shaping made anew for it."""
    return replace(t, v=replace(t.v, transform=v, shaping=shape_noise(v, moments(s)[1][0], VALUES.floor)))


def rotated_keys(s: LayerStatistics, t: LayerTransforms) -> LayerTransforms:
    return with_keys(s, t, rotate(s.q_moment))


def rotated_values(s: LayerStatistics, t: LayerTransforms) -> LayerTransforms:
    return with_values(s, t, rotate(s.v_score_moment))


def without_output_projection(s: LayerStatistics, t: LayerTransforms) -> LayerTransforms:
    return methods.oscar_shaped(replace(s, output_moment=None, attended_output_moment=None))


def half_balanced(s: LayerStatistics, t: LayerTransforms) -> LayerTransforms:
    """Half-way (in the logarithm) between the balanced map and a rotation."""

    def half(full: torch.Tensor) -> torch.Tensor:
        product = full @ full.mT
        vectors = eigenvectors(product)
        values = torch.diagonal(vectors.mT @ product @ vectors, dim1=-2, dim2=-1)
        d = full.shape[-1]
        return (vectors * values.pow(0.25).unsqueeze(-2))[..., scattered(d)] @ equaliser(d)

    return with_values(s, with_keys(s, t, half(t.k.transform)), half(t.v.transform))


def sorted_directions(s: LayerStatistics, t: LayerTransforms) -> LayerTransforms:
    """The same map, but the equaliser gets the directions in the order of their eigenvalues."""

    def in_order(full: torch.Tensor) -> torch.Tensor:
        d = full.shape[-1]
        before = full @ equaliser(d).mT
        return before[..., scattered(d).argsort()] @ equaliser(d)

    return with_values(s, with_keys(s, t, in_order(t.k.transform)), in_order(t.v.transform))


def key_mean_kept(s: LayerStatistics, t: LayerTransforms) -> LayerTransforms:
    attended_mean = None if s.attended_k_mean is None else s.attended_k_mean * 0
    return methods.oscar_shaped(replace(s, k_mean=s.k_mean * 0, attended_k_mean=attended_mean))


def unattended(s: LayerStatistics, *names: str) -> LayerStatistics:
    """Statistics with plain moments in the place of these attended ones, or of all."""
    if s.attended_k_moment is None or not names:
        return replace(s, **{f.name: None for f in fields(s) if f.name.startswith("attended_")})
    return replace(s, **{f"attended_{name}": getattr(s, name) for name in names})


def unshaped(t: LayerTransforms, *sides: str) -> LayerTransforms:
    """Without shaping in these sides."""
    return replace(t, **{name: replace(getattr(t, name), shaping=None) for name in sides})


TARGETS = ("q_moment", "v_score_moment")
# name: (build, group size; None: head_dim)
PAPER: dict[str, tuple[Build, int | None]] = {
    "none (plain INT2)": (paper("", *TARGETS, (1.0, 1.0)), None),
    "none, clipped": (paper("", *TARGETS), None),
    "U": (paper("U", *TARGETS), None),
    "U.P": (paper("UP", *TARGETS), None),
    "H.P": (paper("HP", *TARGETS), None),
    "U.H": (paper("UH", *TARGETS), None),
    "U.H.P (oscar)": (paper("UHP", *TARGETS), None),
    "U.H.P, heads share": (paper("UHP", *TARGETS, share=True), None),
    "U.H.P, public surrogate for V": (paper("UHP", "q_moment", "v_surrogate_moment"), None),
    "U.H.P, raw targets": (paper("UHP", "k_moment", "v_moment"), None),
    "U, groups of half a row": (paper("U", *TARGETS), 2),
    "U.H, groups of half a row": (paper("UH", *TARGETS), 2),
    "U.H.P, groups of half a row": (paper("UHP", *TARGETS), 2),
}
OURS: dict[str, tuple[Build, int | None]] = {
    "oscar-shaped": (shaped(lambda s, t: t), None),
    "no shaping": (shaped(lambda s, t: unshaped(t, "k", "v")), None),
    "no shaping of K": (shaped(lambda s, t: unshaped(t, "k")), None),
    "no shaping of V": (shaped(lambda s, t: unshaped(t, "v")), None),
    "keys rotated (U.H.P), not balanced": (shaped(rotated_keys), None),
    "values rotated (U.H.P), not balanced": (shaped(rotated_values), None),
    "half balanced": (shaped(half_balanced), None),
    "key mean kept": (shaped(key_mean_kept), None),
    "attention not weighted": (shaped(lambda s, t: methods.oscar_shaped(unattended(s))), None),
    "attention not weighted: queries": (shaped(lambda s, t: methods.oscar_shaped(unattended(s, "q_moment"))), None),
    "attention not weighted: keys": (shaped(lambda s, t: methods.oscar_shaped(unattended(s, "k_moment", "k_mean"))), None),
    "attention not weighted: values": (shaped(lambda s, t: methods.oscar_shaped(unattended(s, "v_moment"))), None),
    "attention not weighted: W_O": (shaped(lambda s, t: methods.oscar_shaped(unattended(s, "output_moment"))), None),
    "W_O unknown": (shaped(without_output_projection), None),
    "directions in order": (shaped(sorted_directions), None),
    "heads share": (lambda s: layer(methods.oscar_shaped(s, True)), None),
    "keys balanced (0.25, 0.1)": (with_shapes(keys=Shape(0.25, 0.1)), None),
    "keys nearer to white (0.05)": (with_shapes(keys=KEYS._replace(exponent=0.05)), None),
    "keys, floor 0.1": (with_shapes(keys=KEYS._replace(floor=0.1)), None),
    "keys, floor 0.005": (with_shapes(keys=KEYS._replace(floor=0.005)), None),
    "values nearer to white (0.13, 0.02)": (with_shapes(values=Shape(0.13, 0.02)), None),
    "clip 0.98 / 0.96": (shaped(lambda s, t: t, (0.98, 0.96)), None),
    "clip 0.92 / 0.88": (shaped(lambda s, t: t, (0.92, 0.88)), None),
    "groups of half a row (2.5 bits)": (shaped(lambda s, t: t), 2),
}


def make_configurations(
    layers: dict[int, LayerStatistics], model: ModelIdentity, only: Collection[str] = ()
) -> list[Configuration]:
    """All configurations of both tables, or those with these names."""
    made = []
    for name, (build, parts) in (PAPER | OURS).items():
        if only and name not in only:
            continue
        formats = (RowFormat(d, d // (parts or 1)) for d in (model.head_dim, model.v_head_dim))
        made.append(from_layers(name, model, {i: build(s) for i, s in layers.items()}, *formats))
    return made


def measure(variant: str, given: list, arguments) -> dict[str, dict]:
    """Figures of all configurations on one variant. given: calibration text. arguments: of the command line."""
    subject = setups.Subject.of(variant, arguments.model, given)
    made = make_configurations(subject.layers, subject.identity, arguments.only)
    documents = subject.documents(arguments.context + arguments.continuation, arguments.documents)
    windows = tuple(map(int, arguments.windows.split("/")))
    scores = score_text(Reader(subject.model), documents, arguments.context, made, [windows], errors_on=4)
    return {configuration.name: scores[configuration.name, windows].summary() for configuration in made}


def paired(found: list[float], base: list[float]) -> tuple[float, float, float]:
    """Geometric mean of found / base over documents, and its 95 % interval: documents differ far more than configurations."""
    logs = torch.tensor([math.log(max(a, 1e-12) / max(b, 1e-12)) for a, b in zip(found, base, strict=True)])
    spread = 1.96 * float(logs.std()) / len(logs) ** 0.5 if len(logs) > 1 else 0.0
    return tuple(math.exp(float(logs.mean()) + d) for d in (0.0, -spread, spread))


def table(name: str, configurations: dict, found: dict) -> str:
    """One table as text, with the configurations that were measured."""
    shown = [configuration for configuration in configurations if configuration in found]
    header = f"{'configuration':<38}{'attention':>11}{'KL':>10}{'+-':>9}{'top-1':>8}{'perplexity':>12}  KL over the first's"
    lines = [f"\n{name}", header]
    for configuration in shown:
        f = found[configuration]
        error = sum(f["attn_rel_err"]) / len(f["attn_rel_err"])
        half = (f["kl_ci"][1] - f["kl_ci"][0]) / 2
        ratio, low, high = paired(f["kl_by_document"], found[shown[0]]["kl_by_document"])
        lines.append(
            f"{configuration:<38}{error:>11.3f}{f['kl_mean']:>10.4f}{half:>9.4f}{f['top1_agreement']:>8.1%}"
            f"{f['perplexity_ratio']:>12.4f}  {ratio:.2f} [{low:.2f}, {high:.2f}]"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    setups.add_model(parser)
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["plain", "outliers"],
        choices=list(stress.VARIANTS),
        help="stress models; any but plain needs the embedded model (default: plain outliers)",
    )
    parser.add_argument("--only", nargs="+", default=(), choices=[*PAPER, *OURS], metavar="NAME", help="these rows alone")
    parser.add_argument(
        "--calibration-text", nargs="+", default=(), metavar="FILE[:TOKENS]", help="default: the model writes its own"
    )
    parser.add_argument(
        "--tokens", type=int, default=config.DEFAULT_CALIBRATION_TOKENS, help="calibration tokens (default: %(default)s)"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens before a continuation (default: %(default)s)")
    parser.add_argument("--continuation", type=int, default=256, help="tokens decoded (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=16, help="most documents (default: %(default)s)")
    parser.add_argument("--windows", default=WINDOWS, metavar="SINK/RECENT", help="tokens (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    given, results = setups.calibration_text(arguments.model, arguments.tokens, arguments.calibration_text), {}
    for variant in arguments.variants:
        results[variant] = measure(variant, given, arguments)
        for name, rows in (("the paper's factors", PAPER), ("ours, one change at a time", OURS)):
            if rows.keys() & results[variant].keys():
                print(table(f"{variant}: {name}", rows, results[variant]), flush=True)
    if arguments.json:
        setups.write_json(arguments.json, results)


if __name__ == "__main__":
    sys.exit(main())
