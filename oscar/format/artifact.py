"""The calibration artifact: one file in safetensors layout with the transforms of every layer and a JSON header that says
whose they are.

Tensors, for each layer i and each side s in (k, v), all float32, heads first (see `side.Side`):

    layers.{i}.{s}_transform   [num_kv_heads, dim, dim]
    layers.{i}.{s}_clip        [num_kv_heads]
    layers.{i}.k_mean          [num_kv_heads, head_dim], optional
    layers.{i}.{s}_shaping     [num_kv_heads, dim, dim], optional

A layer without tensors stays in 16 bits. What the reader applies follows from the transform when the file is loaded.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save as safetensors_save
from torch import Tensor

from oscar.errors import OscarError
from oscar.format import linalg
from oscar.format.codec import FORMAT_VERSION, RowFormat
from oscar.format.identity import ARTIFACT_NAME, ARTIFACT_SUFFIX, ModelIdentity
from oscar.format.sealed_file import read_checked, seal, write_whole
from oscar.format.side import SIDES, LayerTransforms, Side

_HEADER_FIELDS = ("method", "group_size", "sink_tokens", "recent_tokens", "num_tokens", "provenance")
_META_DTYPE = "float16"
"""Type of centre and step. The header has named it since version 1, when it could be another."""


@dataclass
class Artifact:
    """Everything that calibration decided.

    Args:
        model: the model it is for.
        method: name of the method that made the transforms.
        group_size: elements of K that share a centre and a step; it divides head_dim and v_head_dim.
        sink_tokens, recent_tokens: windows it was made for, in tokens.
        num_tokens: real tokens in the statistics.
        layers: layer_id -> LayerTransforms; a layer that is not here stays in 16 bits.
        provenance: JSON-able record: data mix, seed, versions, held-out errors.
    """

    model: ModelIdentity
    method: str
    group_size: int
    sink_tokens: int
    recent_tokens: int
    num_tokens: int
    layers: dict[int, LayerTransforms]
    provenance: dict = field(default_factory=dict)

    @property
    def k_format(self) -> RowFormat:
        return RowFormat(self.model.head_dim, self.group_size)

    @property
    def v_format(self) -> RowFormat:
        group_size = self.model.v_head_dim if self.group_size == self.model.head_dim else self.group_size
        return RowFormat(self.model.v_head_dim, group_size)

    @property
    def native_layers(self) -> list[int]:
        """Layers without transforms, whose K and V stay in 16 bits."""
        return [i for i in range(self.model.num_layers) if i not in self.layers]


def save(artifact: Artifact, path: str | Path) -> None:
    """Write the artifact; the file appears whole or not at all. Equal artifacts give equal bytes.

    Raises:
        OscarError: the file cannot be written or would be taken for weights, or the artifact does not hold together.
    """
    path = Path(path)
    check_place(path)
    tensors = {
        f"layers.{layer_id}.{side}_{name}": tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for layer_id, layer in artifact.layers.items()
        for side, name, tensor in layer.tensors()
    }
    header = {name: getattr(artifact, name) for name in _HEADER_FIELDS}
    header |= {"format_version": FORMAT_VERSION, "meta_dtype": _META_DTYPE, "model": dataclasses.asdict(artifact.model)}
    _check(artifact, path)
    write_whole(path, safetensors_save(tensors, metadata={"oscar": seal(header, tensors)}), "artifact")


def check_place(path: Path) -> None:
    """Refuse a name under which SGLang would load an artifact as weights of a model. Raises OscarError."""
    if path.suffix == ".safetensors" and (path.parent / "config.json").is_file():
        raise OscarError(
            f"{path}: beside a model's weights a file that ends in .safetensors is loaded as weights; name it "
            f"{path.parent / ARTIFACT_NAME} instead"
        )


def load(path: str | Path, model: ModelIdentity | None = None, native_layers: bool = False) -> Artifact:
    """Read and check an artifact.

    Args:
        path: the file.
        model: refuse the artifact unless it was made for this model.
        native_layers: let layers be missing, which then stay in 16 bits.
    Raises:
        OscarError: missing, truncated or changed file, another format version, missing tensors, or another model.
    """
    path = Path(path)
    again = "run `oscar calibrate` again"
    if not path.is_file():
        raise OscarError(f"{path}: expected an artifact file, found none; make one with `oscar calibrate`")
    header, tensors = read_checked(path, "oscar", "OSCAR artifact", FORMAT_VERSION, again)
    try:
        identity = ModelIdentity(**header["model"])
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            _, layer_id, part = name.split(".")
            parts.setdefault(int(layer_id), {})[part] = tensor
        artifact = Artifact(
            model=identity,
            layers={i: _layer(parts[i], i, identity, path, again) for i in sorted(parts)},
            **{name: header[name] for name in _HEADER_FIELDS},
        )
        meta_dtype = header["meta_dtype"]
    except OscarError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise OscarError(f"{path}: header or tensor names are not those of an artifact ({error!r}); {again}") from error
    if meta_dtype != _META_DTYPE:
        raise OscarError(f"{path}: expected meta_dtype {_META_DTYPE}, got {meta_dtype}; {again}")
    _check(artifact, path)
    if artifact.native_layers and not native_layers:
        missing = ", ".join(map(str, artifact.native_layers))
        raise OscarError(
            f"{path}: expected transforms of all {identity.num_layers} layers, found none of layer {missing}; give "
            "--oscar-allow-native-layers (`oscar verify`: --allow-native-layers) to keep what is missing in 16 bits, or "
            f"{again}"
        )
    if model is not None and (difference := identity.difference(model)):
        raise OscarError(f"{path}: made for another model: {difference}; run `oscar calibrate` for this model")
    return artifact


def _layer(parts: dict[str, Tensor], layer_id: int, identity: ModelIdentity, path: Path, again: str) -> LayerTransforms:
    """A layer's tensors by the names they have in the file, "k_transform" and so on, as two sides."""
    known = {f"{side}_{f.name}" for side in SIDES for f in dataclasses.fields(Side)}
    if unknown := sorted(set(parts) - known):
        raise OscarError(f"{path}: layers.{layer_id}.{unknown[0]} is nothing that this build reads; {again}")
    for name in ("k_transform", "v_transform", "k_clip", "v_clip"):
        if name not in parts:
            raise OscarError(f"{path}: layers.{layer_id}.{name} is missing; {again}")
    if layer_id >= identity.num_layers:
        raise OscarError(f"{path}: expected layers 0 to {identity.num_layers - 1}, got layer {layer_id}; {again}")
    sides = ({name[2:]: x for name, x in parts.items() if name.startswith(side)} for side in SIDES)
    return LayerTransforms(*(Side(**tensors) for tensors in sides))


def cache_path(model: ModelIdentity, suffix: str = ARTIFACT_SUFFIX) -> Path:
    """Where self-calibration keeps the artifact of this model: `$XDG_CACHE_HOME` or `~/.cache`, then `oscar/`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "oscar" / f"{model.fingerprint}{suffix}"


def find(model_path: str | Path, model: ModelIdentity) -> Path | None:
    """The artifact beside the weights, else the cached one, else the one that version 0.1.0 cached, else None.

    Only names are looked at; `load` checks.
    """
    candidates = [Path(model_path) / ARTIFACT_NAME, cache_path(model)]
    if model.before is not None:
        candidates.append(cache_path(model.before, ".safetensors"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _check(artifact: Artifact, path: Path) -> None:
    """Raise unless shapes, ranges and formats hold together."""
    identity = artifact.model
    if not artifact.layers:
        raise OscarError(f"{path}: expected transforms of at least one layer, found none; run `oscar calibrate` again")
    try:
        artifact.k_format, artifact.v_format  # noqa: B018 - the constructors check
    except ValueError as error:
        raise OscarError(f"{path}: {error}") from error
    heads, dims = identity.num_kv_heads, {"k": identity.head_dim, "v": identity.v_head_dim}
    for layer_id, layer in artifact.layers.items():
        if layer.v.mean is not None:
            raise OscarError(f"{path}: layers.{layer_id}.v_mean: expected none, values keep their mean")
        for side, name, tensor in layer.tensors():
            d = dims[side]
            expected = {"clip": (heads,), "mean": (heads, d)}.get(name, (heads, d, d))
            where = f"{path}: layers.{layer_id}.{side}_{name}"
            if tuple(tensor.shape) != expected:
                raise OscarError(f"{where}: expected shape {expected}, got {tuple(tensor.shape)}")
            if not torch.isfinite(tensor).all():
                raise OscarError(f"{where}: expected finite numbers, got NaN or infinity")
            if name == "clip" and not ((tensor > 0) & (tensor <= 1)).all():
                raise OscarError(f"{where}: expected clip ratios in (0, 1], got {tensor.tolist()}")
            if name == "transform" and (head := linalg.singular(tensor)) is not None:
                raise OscarError(
                    f"{where}, head {head}: expected a matrix that can be inverted, got a singular one; run `oscar calibrate` "
                    "again"
                )
            if name == "shaping" and tensor.tril().any():
                raise OscarError(f"{where}: expected nothing on or below the diagonal, got entries there")
