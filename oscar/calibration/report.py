"""What an artifact says, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from oscar import support
from oscar.errors import OscarError
from oscar.format import sizing
from oscar.format.artifact import Artifact
from oscar.format.identity import ModelIdentity

RECOMMENDED, USABLE = 0.1, 0.25
"""Largest error of attention's output, as served, that is called recommended, and usable with larger windows."""
MAX_CONDITION = 1e4
"""Largest condition number of a transform that `oscar verify` lets pass: float32 then undoes it to about 1e-3."""
FALLS_SHORT = 0.95
"""Share of the tokens asked of a source below which a shortage is said."""
CLEARLY_WORSE = 1.25
"""Ratio of attention errors from which one source of text is called worse than another."""


def by_layer(entries: dict[str, dict]) -> dict[int, dict]:
    """A part of the provenance by layer number, in order. JSON has names for keys, and an artifact sorts them as text."""
    return {i: entries[str(i)] for i in sorted(map(int, entries))}


def summary(artifact: Artifact, name: str) -> Table:
    """A table of what the artifact is made of. name: of its file."""
    description, provenance, model = describe(artifact), artifact.provenance, artifact.model
    clip = description["clip"]
    rows = {
        "model": f"{model.architecture}, {model.num_layers} layers, {model.num_qo_heads} query and {model.num_kv_heads} KV "
        f"heads of {model.head_dim}" + ("" if model.v_head_dim == model.head_dim else f" (V: {model.v_head_dim})"),
        "fingerprint": model.fingerprint,
        "method": artifact.method + (", heads share a transform" if provenance.get("share_heads") else ""),
        "clip quantile": f"K {clip['k']}, V {clip['v']}",
        "bits per element": f"{description['bits_per_element']:.3f} in groups of {artifact.group_size}",
        "bytes per token": f"{description['bytes_per_token']:,} ({description['bytes_per_token_16_bit']:,} in 16 bits)",
        "windows": f"first {artifact.sink_tokens} and newest {artifact.recent_tokens} tokens in 16 bits",
        "statistics": f"{artifact.num_tokens:,} tokens, longest sequence {provenance.get('longest_sequence', 0):,}",
        "text": "; ".join(f"{d['source']}: {d['tokens']:,} tokens" for d in provenance.get("data", [])) or "none needed",
        "seed, dtype": f"{provenance.get('seed')}, {provenance.get('dtype')} on {provenance.get('device')}",
        "made with": ", ".join(f"{k} {v}" for k, v in provenance.get("versions", {}).items()),
    }
    for side, source in provenance.get("converted_from", {}).items():
        rows[f"{side.upper()} from"] = f"{source['file']}, {source['objective']}, sha256 {source['sha256'][:16]}"
    table = Table(title=f"OSCAR artifact {name}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows.items():
        table.add_row(*row)
    return table


def show(artifact: Artifact, console: Console) -> None:
    """Print the held-out errors as a table, then what they mean in plain sentences."""
    held_out = artifact.provenance.get("held_out", {})
    rows = [(f"layer {i}", errors) for i, errors in by_layer(held_out.get("layers", {})).items()]
    sources = held_out.get("sources", [])
    rows += [(s["source"], s) for s in sources] if len(sources) > 1 else []
    if not rows:
        console.print("No held-out text: the error was not measured.")
        return
    title = f"Relative error on {held_out['tokens']:,} held-out tokens, plain 2-bit → this artifact"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("K", "V", "attention", "as served"):
        table.add_column(name, justify="right")
    for name, errors in [*rows, ("all", held_out["all"])]:
        cells = [f"{errors[f'plain_{side}']:.3f} → {errors[side]:.3f}" for side in ("k", "v", "attention")]
        table.add_row(name, *cells, f"{errors['served']:.3f}")
    console.print(table)
    everything = held_out["all"]
    windows = f"the first {artifact.sink_tokens} and newest {artifact.recent_tokens} tokens"
    served = f"as served, with {windows} in 16 bits, by {everything['served']:.1%}"
    if held_out["longest_sequence"] <= artifact.sink_tokens + artifact.recent_tokens:
        served = f"as served was not measured: no held-out sequence is longer than {windows}"
    mix = artifact.provenance.get("data", [])
    if len(mix) > 1:
        tokens = sum(d["tokens"] for d in mix)
        parts = (f"{d['source']} {d['tokens']:,} tokens ({d['tokens'] / tokens:.0%})" for d in mix)
        console.print(f"Text: {', '.join(parts)}.", highlight=False, soft_wrap=True)
    console.print(
        f"With every token in 2 bits, attention's output is off by {everything['attention']:.1%} "
        f"(plain 2-bit: {everything['plain_attention']:.1%}); {served}.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"Verdict: {verdict(artifact)['sentence']}", highlight=False, soft_wrap=True)


def verdict(artifact: Artifact) -> dict:
    """Whether to serve with this artifact, from the error of attention's output on held-out text.

    The number is the error as served, windows included, of the source that is worst off. Thresholds: RECOMMENDED and USABLE.
    Without held-out sequences at least twice as long as the windows there is no verdict: next to nothing was read in 2 bits.

    Returns:
        {"label": "recommended", "usable with larger windows", "not recommended" or "unknown"; "error": the number or None;
        "sentence": both, with the thresholds}.
    """
    held_out = artifact.provenance.get("held_out", {})
    sources = held_out.get("sources", [])
    windows = artifact.sink_tokens + artifact.recent_tokens
    if not sources or held_out["longest_sequence"] < max(2 * windows, 1):
        reason = "the error was not measured; `oscar calibrate` measures it"
        if sources:
            reason = f"no held-out sequence has twice the {windows} tokens of the windows; give more text or a larger --tokens"
        return {"label": "unknown", "error": None, "sentence": f"no verdict: {reason}."}
    worst = max(sources, key=lambda source: source["served"])
    error = worst["served"]
    label = "recommended" if error <= RECOMMENDED else "usable with larger windows" if error <= USABLE else "not recommended"
    where = f" on {worst['source']}, the source that is worst off" if len(sources) > 1 else ""
    advice = {
        "recommended": "",
        "usable with larger windows": f" Try --oscar-recent-tokens {2 * artifact.recent_tokens or 256}.",
        "not recommended": " Calibrate on more text like what you serve, or serve this model in 16 bits.",
    }[label]
    sentence = (
        f"{label}: as served, in sequences of up to {held_out['longest_sequence']:,} tokens, attention's output is off by "
        f"{error:.1%}{where}. Up to {RECOMMENDED:.0%} is recommended, up to {USABLE:.0%} usable with larger windows.{advice}"
    )
    return {"label": label, "error": error, "sentence": sentence}


def say_warnings(artifact: Artifact, console: Console) -> None:
    """Print the sentences of `warnings`."""
    for line in warnings(artifact):
        console.print(f"Note: {line}", highlight=False, soft_wrap=True)


def warnings(artifact: Artifact) -> list[str]:
    """Sentences on what a user of this artifact should know; often none."""
    result = []
    if sentence := support.not_served(artifact.provenance.get("not_served", [])):
        result.append(sentence)
    if artifact.native_layers:
        missing = ", ".join(map(str, artifact.native_layers))
        result.append(f"no transforms of layers {missing}; they stay in 16 bits if served with --oscar-allow-native-layers.")
    held_out = artifact.provenance.get("held_out", {}).get("all")
    if artifact.provenance.get("share_heads") and artifact.model.num_kv_heads > 1 and artifact.method != "identity":
        result.append(
            "the KV heads of a layer share one transform; `oscar calibrate` without --share-heads gives each its own, which is "
            "often far better."
        )
    if held_out and artifact.method != "identity" and held_out["attention"] > held_out["plain_attention"]:
        result.append("on the held-out text this method is no better than plain 2-bit; give more or other text.")
    for entry in artifact.provenance.get("data", []):
        asked = entry.get("asked", entry["tokens"])
        if entry["tokens"] < FALLS_SHORT * asked:
            result.append(
                f"{entry['source']} holds only {entry['tokens']:,} of the {asked:,} tokens asked of it; give more text."
            )
    sources = sorted(artifact.provenance.get("held_out", {}).get("sources", []), key=lambda s: s["attention"])
    if len(sources) > 1 and sources[-1]["attention"] > CLEARLY_WORSE * sources[0]["attention"]:
        best, worst = sources[0], sources[-1]
        result.append(
            f"{worst['source']} is clearly worse off than {best['source']} ({worst['attention']:.1%} against "
            f"{best['attention']:.1%} with every token in 2 bits); give it more tokens if it is what you serve."
        )
    return result


def describe(artifact: Artifact) -> dict:
    """JSON-able description of an artifact: everything but the matrices."""
    model = artifact.model
    k_format, v_format = artifact.k_format, artifact.v_format
    native = len(artifact.native_layers)

    def clip(side: str) -> float | str:
        ratios = torch.cat([getattr(layer, side).clip for layer in artifact.layers.values()])
        low, high = (float(f"{x:.4g}") for x in (ratios.min(), ratios.max()))
        return low if low == high else f"{low} to {high}"

    return {
        "model": asdict(model) | {"fingerprint": model.fingerprint},
        "method": artifact.method,
        "group_size": artifact.group_size,
        "sink_tokens": artifact.sink_tokens,
        "recent_tokens": artifact.recent_tokens,
        "num_tokens": artifact.num_tokens,
        "clip": {"k": clip("k"), "v": clip("v")},
        "native_layers": artifact.native_layers,
        "bits_per_element": sizing.bits_per_element(k_format, v_format, native / model.num_layers),
        "bytes_per_token": sizing.bytes_per_token(model.num_layers, model.num_kv_heads, k_format, v_format, native),
        "bytes_per_token_16_bit": sizing.bytes_per_token_16_bit(
            model.num_layers, model.num_kv_heads, model.head_dim, model.v_head_dim
        ),
        "verdict": verdict(artifact),
        "warnings": warnings(artifact),
        "provenance": artifact.provenance,
    }


def verify(artifact: Artifact, path: str | Path) -> dict:
    """Check what `artifact.load` leaves to this slower look: that every transform can be undone.

    Args:
        artifact: as loaded.
        path: its file, for the sentence.
    Returns:
        JSON-able {"layers", "native_layers", "method", "architecture", "fingerprint", "condition": the largest condition
        number}.
    Raises:
        OscarError: a transform is singular or nearly so; layer, side and head are named.
    """
    worst = 1.0
    for layer_id, layer in artifact.layers.items():
        for side in ("k", "v"):
            for head, matrix in enumerate(getattr(layer, side).transform.double()):
                values = torch.linalg.svdvals(matrix)
                condition = float(values[0] / values[-1]) if values[-1] > 0 else float("inf")
                if condition > MAX_CONDITION:
                    raise OscarError(
                        f"{path}: layers.{layer_id}.{side}_transform, head {head}: expected an invertible matrix, got "
                        f"condition number {condition:.3g} (at most {MAX_CONDITION:g} passes); run `oscar calibrate` again"
                    )
                worst = max(worst, condition)
    return {
        "layers": len(artifact.layers),
        "native_layers": artifact.native_layers,
        "method": artifact.method,
        "architecture": artifact.model.architecture,
        "fingerprint": artifact.model.fingerprint,
        "condition": worst,
    }


def artifact_bytes(identity: ModelIdentity) -> int:
    """Size of the artifact's tensors, which is nearly all of the file."""
    squares = identity.head_dim**2 + identity.v_head_dim**2
    return 4 * identity.num_layers * identity.num_kv_heads * (squares + 2)
