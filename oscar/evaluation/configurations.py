"""The ways to keep a cache that are compared: 16 bits, the lossless codec, methods calibrated here, artifacts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from oscar.calibration.calibrate import build
from oscar.calibration.check import formats
from oscar.calibration.options import CalibrationOptions
from oscar.errors import OscarError
from oscar.evaluation.reader import Windows
from oscar.format import sizing
from oscar.format.artifact import Artifact
from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms
from oscar.methods import METHODS
from oscar.methods.statistics import LayerStatistics
from oscar_kernel import LayerCodec

BF16, LOSSLESS = "bf16", "lossless"
ALIASES = {"int2": "identity"}
"""Other names of methods: plain 2-bit is `identity`, no transform and nothing clipped."""
SHARED = "-shared"
"""Suffix of a method whose KV heads share one transform."""


@dataclass(frozen=True)
class Configuration:
    """One way to keep a cache.

    Attributes:
        name: in reports.
        codecs: layer -> codec, all layers of the model.
        k_format, v_format: rows of the layers that are quantised.
        native_layers: how many layers stay in 16 bits.
    """

    name: str
    codecs: dict[int, LayerCodec]
    k_format: sizing.Format
    v_format: sizing.Format
    native_layers: int = 0

    def bits_per_element(self, model: ModelIdentity, context: int, windows: Windows) -> float:
        """Bits of one number of K or V of a request of this length: rows, maps and 16-bit windows."""
        geometry = model.num_layers, model.num_kv_heads
        elements = context * model.num_layers * model.num_kv_heads * (model.head_dim + model.v_head_dim)
        if self.name == BF16:
            return 8 * context * sizing.bytes_per_token_16_bit(*geometry, model.head_dim, model.v_head_dim) / elements
        slot = sizing.bytes_per_token(*geometry, self.k_format, self.v_format, self.native_layers)
        return 8 * (context + sizing.window_slots(context, *windows)) * slot / elements


def check_names(names: Iterable[str]) -> None:
    """Raise OscarError unless each is bf16, lossless, or a method with or without "-shared"."""
    known = (BF16, LOSSLESS, *ALIASES, *METHODS)
    for name in names:
        if name not in known and _method(name)[0] not in METHODS:
            raise OscarError(f"--methods: expected names out of {', '.join(known)}, methods with {SHARED} too, got {name!r}")


def needs_statistics(names: Iterable[str]) -> bool:
    """Whether any of these is calibrated on text."""
    return any((m := METHODS.get(_method(name)[0])) is not None and m.needs_text for name in names)


def needs_surrogate(names: Iterable[str]) -> str | None:
    """A method among these that takes a second pass over the calibration text, or None."""
    return next((m for m in (_method(name)[0] for name in names) if m in METHODS and METHODS[m].needs_surrogate), None)


def from_method(
    name: str,
    options: CalibrationOptions,
    model: ModelIdentity,
    statistics: dict[int, LayerStatistics],
    device: str | torch.device = "cpu",
) -> Configuration:
    """A configuration by its name.

    Args:
        name: as `check_names` lets it pass.
        options: group size and clip ratios; its method and share_heads are replaced.
        model: of the statistics.
        statistics: layer -> statistics; only shapes are read for methods that need no data.
        device: where the codecs go.
    """
    if name in (BF16, LOSSLESS):
        dtype = "bfloat16" if name == BF16 else "float32"
        k_format, v_format = (LosslessFormat(d, dtype) for d in (model.head_dim, model.v_head_dim))
        return Configuration(name, {i: native_codec(model, dtype, device) for i in range(model.num_layers)}, k_format, v_format)
    method, shared = _method(name)
    layers = build(replace(options, method=method, share_heads=shared), statistics)
    return from_layers(name, model, layers, *formats(options, model), device)


def from_artifact(artifact: Artifact, path: str | Path, device: str | torch.device = "cpu") -> Configuration:
    """What a server with this artifact does; named after the file."""
    return from_layers(Path(path).stem, artifact.model, artifact.layers, artifact.k_format, artifact.v_format, device)


def native_codec(model: ModelIdentity, dtype: str, device: str | torch.device = "cpu") -> LayerCodec:
    """Rows as they are, in "bfloat16" as a layer without transforms is served, or in "float32"."""
    return LayerCodec.native(model.num_kv_heads, model.head_dim, model.v_head_dim, dtype, device)


def from_layers(
    name: str,
    model: ModelIdentity,
    layers: dict[int, LayerTransforms],
    k_format: RowFormat,
    v_format: RowFormat,
    device: str | torch.device = "cpu",
) -> Configuration:
    """A configuration out of transforms; layers that are not there stay in 16 bits."""
    codecs = {i: LayerCodec.of(layer, k_format, v_format, device) for i, layer in layers.items()}
    missing = set(range(model.num_layers)) - set(layers)
    codecs |= {i: native_codec(model, "bfloat16", device) for i in missing}
    return Configuration(name, dict(sorted(codecs.items())), k_format, v_format, len(missing))


def _method(name: str) -> tuple[str, bool]:
    """(method, heads share a transform)."""
    base = name.removesuffix(SHARED)
    return ALIASES.get(base, base), base != name
