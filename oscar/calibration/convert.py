"""The public implementation's rotation files, read into an artifact. Nothing in them is executed.

A RotationZoo pair is two torch-pickled dictionaries, one for K and one for V:

    {"format_version": 1 or 2, "objective": "qqt_r_h_pbr", "source_grouping": "layer", "layers": {0 or "0": {"rotation": R}}}

R is [head_dim, head_dim], shared by the KV heads of a layer, or [num_kv_heads, head_dim, head_dim]; it acts as ours do,
x @ R. The files carry no clip, so the published quantiles are used unless others are given.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import torch
from torch import Tensor

import oscar
from oscar import config, support
from oscar.calibration.run_transformers import check_supported
from oscar.errors import OscarError
from oscar.format.artifact import Artifact
from oscar.format.codec import RowFormat
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms, Side

METHOD = "rotation-files"
READS = (1, 2)
"""Format versions of the public files that this build reads."""
ORTHOGONAL_TO = 1e-3
"""Largest entry of |R R^T - I| that passes: float32 rounding of the public files stays near 1e-6, bfloat16 near 1e-2."""
_SIDES = {"qqt": "K", "ktk": "K", "sst": "V", "vtv": "V"}


def convert(
    k_path: str | Path,
    v_path: str | Path,
    model: str | Path,
    k_clip: float = config.DEFAULT_K_CLIP,
    v_clip: float = config.DEFAULT_V_CLIP,
    group_size: int | None = None,
    sink_tokens: int = config.DEFAULT_SINK_TOKENS,
    recent_tokens: int = config.DEFAULT_RECENT_TOKENS,
    allow_native_layers: bool = False,
) -> Artifact:
    """Make an artifact of a pair of rotation files for a model.

    Args:
        k_path, v_path: the two files.
        model: model folder the rotations were made for; only its configuration and weight digest are read.
        k_clip, v_clip: clip quantiles in (0, 1].
        group_size: elements that share a centre and a step; None: head_dim, as in the public launch scripts.
        sink_tokens, recent_tokens: windows recorded.
        allow_native_layers: let both files lack the same layers, which then stay in 16 bits.
    Raises:
        OscarError: a file cannot be used, the two do not fit the model, or calibration refuses the model too.
    """
    for name, value in (("k_clip", k_clip), ("v_clip", v_clip)):
        if not 0 < value <= 1:
            raise OscarError(f"{name} must be in (0, 1], got {value}")
    for name, value in (("sink_tokens", sink_tokens), ("recent_tokens", recent_tokens)):
        if value < 0:
            raise OscarError(f"{name} must not be negative, got {value}")
    identity = ModelIdentity.from_path(model)
    model_config = json.loads(Path(model, "config.json").read_text())
    check_supported(model_config)
    unserved = support.refused(model_config)
    size = identity.head_dim if group_size is None else group_size
    try:
        for dim in (identity.head_dim, identity.v_head_dim):
            RowFormat(dim, dim if size == identity.head_dim else size)
    except ValueError as error:
        raise OscarError(f"group size does not fit this model: {error}") from error
    k, k_record = read(k_path, "K", identity, allow_native_layers)
    v, v_record = read(v_path, "V", identity, allow_native_layers)
    if differ := sorted(k.keys() ^ v.keys()):
        raise OscarError(f"{v_path}: expected the same layers as in {k_path}, but layer {differ[0]} is in one of them only")
    heads = identity.num_kv_heads
    layers = {
        i: LayerTransforms(*(Side(x[i], torch.full((heads,), float(c))) for x, c in ((k, k_clip), (v, v_clip)))) for i in k
    }
    return Artifact(
        model=identity,
        method=METHOD,
        group_size=size,
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        num_tokens=0,
        layers=layers,
        provenance={
            "converted_from": {"k": k_record, "v": v_record},
            "share_heads": k_record["shared_by_heads"] or v_record["shared_by_heads"],
            "versions": {"oscar": oscar.__version__},
            **({"not_served": [list(pair) for pair in unserved]} if unserved else {}),
        },
    )


def read(
    path: str | Path, side: str, identity: ModelIdentity, allow_native_layers: bool = False
) -> tuple[dict[int, Tensor], dict]:
    """Read and check one rotation file.

    Args:
        path: the file.
        side: "K" or "V".
        identity: the model it has to fit.
        allow_native_layers: let layers be missing.
    Returns:
        (layer_id -> [num_kv_heads, d, d] float32, JSON-able record of where they come from).
    Raises:
        OscarError: see the sentences below.
    """
    path = Path(path)
    content = _unpickle(path)
    if not isinstance(content, dict) or not isinstance(content.get("layers"), dict):
        raise OscarError(f"{path}: expected a rotation file, a dictionary with 'layers', got {_kind(content)}")
    version = content.get("format_version")
    if version not in READS:
        raise OscarError(f"{path}: rotation file format version {version!r}, this build reads {READS[0]} and {READS[1]}")
    objective = str(content.get("objective", "unknown"))
    if _SIDES.get(objective.split("_")[0], side) != side:
        raise OscarError(f"{path}: objective {objective!r} is for {_SIDES[objective.split('_')[0]]}; give the {side} file here")
    layers = _numbered(path, content["layers"])
    expected = set(range(identity.num_layers))
    missing = expected - layers.keys()
    if layers.keys() - expected or not layers or (missing and not allow_native_layers):
        found = f"{len(layers)} ({min(layers, default=0)} to {max(layers, default=0)})"
        lacks = f", without layer {', '.join(map(str, sorted(missing)))}" if missing else ""
        advice = "; --allow-native-layers keeps those in 16 bits" if missing and layers.keys() <= expected and layers else ""
        raise OscarError(f"{path}: expected layers 0 to {identity.num_layers - 1} of this model, got {found}{lacks}{advice}")
    d, heads = (identity.head_dim if side == "K" else identity.v_head_dim), identity.num_kv_heads
    result, shared = {}, False
    for i in sorted(layers):
        entry = layers[i]
        rotation = entry.get("rotation") if isinstance(entry, dict) else None
        if not isinstance(rotation, Tensor) or not rotation.is_floating_point():
            raise OscarError(f"{path}: layer {i}: expected a tensor of floats as 'rotation', got {_kind(rotation)}")
        if tuple(rotation.shape) not in ((d, d), (heads, d, d)):
            raise OscarError(
                f"{path}: layer {i}: expected a rotation of shape {(d, d)} or {(heads, d, d)}, got {tuple(rotation.shape)}"
            )
        off = orthogonality(rotation)
        if not off <= ORTHOGONAL_TO:  # NaN too
            raise OscarError(
                f"{path}: layer {i}: expected an orthogonal matrix, got one with |R R^T - I| up to {off:.3g} "
                f"(at most {ORTHOGONAL_TO:g} passes)"
            )
        shared |= rotation.dim() == 2 and heads > 1
        result[i] = rotation.float().expand(heads, d, d).contiguous()
    record = {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "format_version": version,
        "objective": objective,
        "source_grouping": str(content.get("source_grouping", "unknown")),
        "shared_by_heads": shared,
    }
    return result, record


def orthogonality(rotation: Tensor) -> float:
    """Largest entry of |R R^T - I|. rotation [..., d, d], any float dtype."""
    rotation = rotation.double()
    return float((rotation @ rotation.mT - torch.eye(rotation.shape[-1], dtype=torch.float64)).abs().max())


def _unpickle(path: Path):
    if not path.is_file():
        raise OscarError(f"{path}: expected a rotation file, found none; check the path")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "global" not in str(error).lower() and "unsupported" not in str(error).lower():
            raise OscarError(f"{path}: not a whole file of torch.save; download it again") from error
        raise OscarError(
            f"{path}: reading this file would run code from it, which is refused; expected plain tensors and dictionaries"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise OscarError(f"{path}: not a whole file of torch.save; download it again") from error


def _numbered(path: Path, layers: dict) -> dict[int, object]:
    """The same layers with int keys."""
    result = {}
    for key, value in layers.items():
        try:
            number = int(key)
        except (TypeError, ValueError) as error:
            raise OscarError(f"{path}: expected layer numbers as keys of 'layers', got {key!r}") from error
        if number in result:
            raise OscarError(f"{path}: layer {number} is there twice")
        result[number] = value
    return result


def _kind(value) -> str:
    return "none" if value is None else f"a {type(value).__name__}"
