"""The sentences that a user sees, and the Markdown table for docs/, both made from the table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oscar.support.server_options import Option
from oscar.support.table import HARDWARE, MODEL_FEATURES, ON_CPU, Feature


def model_feature(key: str) -> Feature:
    """The row of a model feature. Raises KeyError for an unknown key."""
    return {feature.key: feature for feature in MODEL_FEATURES}[key]


def model_name(config: Any) -> str:
    """What a sentence calls a model of which only the Hugging Face configuration is known."""
    kind = config.get("model_type") if isinstance(config, dict) else getattr(config, "model_type", None)
    return f"a model of type {kind or 'unknown'!r}"


def model_refusal(key: str, model: str, detail: str = "") -> str:
    """The sentence for a model that has a refused feature; the caller puts the program's name before it.

    Args:
        key: of the feature.
        model: what the sentence calls the model.
        detail: what was found, e.g. "head_dim=90".
    """
    return f"--kv-quant oscar cannot serve {model}: it has {_has(key, detail)}; {model_feature(key).alternative}"


def not_served(found: Iterable[tuple[str, str]]) -> str | None:
    """One sentence that says why serving refuses a model that was calibrated, or None where nothing found is refused.

    Args:
        found: (key, detail) pairs, as `detect.refused` returned them when the model was calibrated.
    """
    rows = {row.key: row for row in MODEL_FEATURES}
    reasons = [_has(key, detail) for key, detail in found if key in rows and not rows[key].supported]
    return f"--kv-quant oscar does not serve this model yet: it has {'; it has '.join(reasons)}." if reasons else None


def _has(key: str, detail: str) -> str:
    """A feature, what was found of it, and why it is refused, as a clause after "it has"."""
    feature = model_feature(key)
    return f"{feature.title}{f' ({detail})' if detail else ''}, and {feature.reason}"


def option_refusal(option: Option, value: Any) -> str:
    """The sentence for a server option whose value is refused; names both flags and what works instead."""
    given = option.flag if value is True else f"{option.flag} {_written(value)}"
    works = ""
    if option.allowed[0] not in (None, False, True) and option.allowed != (1,):
        works = f" (works with {option.flag} {option.allowed[0]})"
    alternative = option.alternative.format(flag=option.flag)
    return f"oscar: --kv-quant oscar does not go with {given}: {option.reason}{works}; {alternative}"


def hardware_refusal(kind: str) -> str | None:
    """The sentence for a kind of machine, or None where it is supported; an unknown kind is refused too."""
    for row in HARDWARE:
        if row.key == kind:
            if row.supported:
                return None
            return f"oscar: --kv-quant oscar does not run on {row.title}: {row.reason}; {ON_CPU}"
    known = ", ".join(row.key for row in HARDWARE if row.supported)
    return f"oscar: --kv-quant oscar does not know the device {kind!r} (it knows {known}); {ON_CPU}"


def architecture_refusal(key: str, card: str) -> str | None:
    """The sentence for a GPU that the kernels do not know, or None. key: "sm_90"; card: the GPU's own name."""
    from oscar_kernel import architectures  # the package imports torch

    clause = architectures.unknown(key, card)
    if clause is None:
        return None
    return f"oscar: {clause}; give --oscar-kernels reference (plain PyTorch, slow), or {ON_CPU}"


def _written(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def markdown() -> str:
    """Models and hardware as a Markdown table, for docs/support.md."""
    from oscar_kernel import architectures  # the package imports torch

    lines = ["| what | with --kv-quant oscar | why, and what to do |", "|---|---|---|"]
    for row in MODEL_FEATURES:
        verdict = "yes" if row.supported else " ".join(filter(None, ("refused at start", row.where)))
        offline = f"; {' and '.join(row.offline)} of such a model works" if row.offline else ""
        remark = row.reason if row.supported else f"{row.reason}; {row.alternative}{offline}"
        lines.append(f"| {row.title} | {verdict} | {remark} |")
    for row in HARDWARE:
        verdict, remark = ("yes", row.reason) if row.supported else ("refused at start", f"{row.reason}; {ON_CPU}")
        lines.append(f"| {row.title} | {verdict} | {remark} |")
    for card in architectures.ARCHITECTURES.values():
        remark = "never run there, nor lowered"
        if card.in_report:
            remark = f"never run there; {card.remark or 'lowered without a card'}"
        lines.append(f"| {card.key}: {card.name} | Triton kernels | {remark} |")
    return "\n".join(lines)
