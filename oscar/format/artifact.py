"""The calibration artifact: one safetensors file with the transforms of every layer and a JSON header that says whose they are.

Tensors, for each layer i: `layers.{i}.k_transform` [num_kv_heads, head_dim, head_dim], `layers.{i}.v_transform`
[num_kv_heads, v_head_dim, v_head_dim] (float32, rows are vectors: x @ T), `layers.{i}.k_clip`, `layers.{i}.v_clip`
[num_kv_heads] float32, and optionally `k_mean`, `v_mean` [num_kv_heads, head_dim], `k_levels`, `v_levels` [num_kv_heads, 4] and
`k_shaping`, `v_shaping` [num_kv_heads, head_dim, head_dim], strictly upper triangular (see `oscar/format/codec.py`).
Only T is stored; what queries and outputs need (T^-T and T^-1) follows from it when it is loaded.

The header keeps a digest of every field and every tensor: a file with anything changed is refused, and the sentence names what.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_save
from torch import Tensor

from oscar.errors import OscarError
from oscar.format.codec import FORMAT_VERSION, RowFormat

FILE_NAME = "oscar.safetensors"
"""Name under which an artifact is found beside a model's weights."""
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10


class ArtifactError(OscarError):
    """An artifact or a model that cannot be used, as one sentence for the user."""


@dataclass(frozen=True)
class ModelIdentity:
    """What an artifact is calibrated for.

    Args:
        architecture: class name in the model's config.
        num_layers, num_qo_heads, num_kv_heads, head_dim, v_head_dim: geometry of the whole model (not of one rank).
        rope: RoPE settings of the config.
        config_hash: SHA-256 of the config fields that change what attention computes.
        weight_digest: SHA-256 over weight file headers and samples of their content; None where it is not known.
    """

    architecture: str
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope: dict
    config_hash: str
    weight_digest: str | None

    @property
    def fingerprint(self) -> str:
        """24 hex digits that name this model in the cache folder."""
        return hashlib.sha256(_json_bytes(dataclasses.asdict(self))).hexdigest()[:24]

    @classmethod
    def from_path(cls, model_path: str | Path) -> ModelIdentity:
        """Read a model folder's config and digest its weights.

        Raises:
            ArtifactError: no such folder, no readable config.json, or no attention geometry in it.
        """
        path = Path(model_path)
        config_file = path / "config.json"
        if not config_file.is_file():
            raise ArtifactError(f"{path}: expected a model folder with config.json, found none; check --model-path")
        try:
            config = json.loads(config_file.read_text())
            geometry = cls.from_config(config)
        except (json.JSONDecodeError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ArtifactError(f"{config_file}: cannot read the attention geometry of this model ({error!r})") from error
        return dataclasses.replace(geometry, weight_digest=_weight_digest(path))

    @classmethod
    def from_config(cls, config: dict) -> ModelIdentity:
        """Geometry from a config.json dictionary; weight_digest is None.

        Raises:
            KeyError: a field without which the geometry is unknown is missing.
        """
        text = config.get("text_config") or config
        num_qo_heads = text["num_attention_heads"]
        head_dim = text.get("head_dim") or text["hidden_size"] // num_qo_heads
        rope = {k: text[k] for k in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor") if text.get(k)}
        what_attention_sees = {k: v for k, v in text.items() if k not in _NOT_IDENTITY}
        return cls(
            architecture=(config.get("architectures") or ["unknown"])[0],
            num_layers=text["num_hidden_layers"],
            num_qo_heads=num_qo_heads,
            num_kv_heads=text.get("num_key_value_heads") or num_qo_heads,
            head_dim=head_dim,
            v_head_dim=text.get("v_head_dim") or head_dim,
            rope=rope,
            config_hash=hashlib.sha256(_json_bytes(what_attention_sees)).hexdigest(),
            weight_digest=None,
        )

    def difference(self, other: ModelIdentity, whose: str = "artifact") -> str | None:
        """Name and both values of the first field that differs, or None. An unknown weight digest matches any.

        whose: what self belongs to, for the sentence.
        """
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.name in ("config_hash", "weight_digest") and None in (mine, theirs):
                continue
            if mine != theirs:
                return f"{f.name} is {_short(mine)} in the {whose} and {_short(theirs)} in the model"
        return None


# Fields of config.json that change between exports of the same model and never change what attention computes.
_NOT_IDENTITY = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_NOT_IDENTITY |= {"bos_token_id", "eos_token_id", "pad_token_id"}


@dataclass
class LayerTransforms:
    """Transforms and clip ratios of one layer; shapes in the module's docstring."""

    k_transform: Tensor
    v_transform: Tensor
    k_clip: Tensor
    v_clip: Tensor
    k_mean: Tensor | None = None
    v_mean: Tensor | None = None
    k_levels: Tensor | None = None
    v_levels: Tensor | None = None
    k_shaping: Tensor | None = None
    v_shaping: Tensor | None = None

    def of_heads(self, heads: slice) -> LayerTransforms:
        """The part of these KV heads, as views; every tensor has the heads first."""
        return LayerTransforms(**{name: None if x is None else x[heads] for name, x in vars(self).items()})


def kv_heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> slice:
    """KV heads of one tensor-parallel rank; with more ranks than heads each head lives on several ranks.

    Args:
        num_kv_heads: KV heads of the whole model.
        tp_rank, tp_size: 0 <= tp_rank < tp_size.
    Raises:
        ValueError: neither number divides the other, or there is no such rank.
    """
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"kv_heads_of_rank: expected a rank from 0 to {tp_size - 1}, got {tp_rank}")
    if num_kv_heads % tp_size == 0:
        per_rank = num_kv_heads // tp_size
        return slice(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    if tp_size % num_kv_heads == 0:
        head = tp_rank // (tp_size // num_kv_heads)
        return slice(head, head + 1)
    raise ValueError(f"--tp {tp_size} must divide the model's {num_kv_heads} KV heads or be a multiple of them")


@dataclass
class Artifact:
    """Everything that calibration decided.

    Args:
        model: the model it is for.
        method: name of the method that made the transforms.
        group_size: elements of K that share a centre and a step; it divides head_dim and v_head_dim.
        meta_dtype: "float16" or "bfloat16".
        sink_tokens, recent_tokens: windows it was made for, in tokens.
        num_tokens: real tokens in the statistics.
        layers: layer_id -> LayerTransforms; a layer that is not here stays in 16 bits.
        provenance: JSON-able record: data mix, seed, versions, held-out errors.
    """

    model: ModelIdentity
    method: str
    group_size: int
    meta_dtype: str
    sink_tokens: int
    recent_tokens: int
    num_tokens: int
    layers: dict[int, LayerTransforms]
    provenance: dict = field(default_factory=dict)

    @property
    def k_format(self) -> RowFormat:
        return RowFormat(self.model.head_dim, self.group_size, self.meta_dtype)

    @property
    def v_format(self) -> RowFormat:
        group_size = self.model.v_head_dim if self.group_size == self.model.head_dim else self.group_size
        return RowFormat(self.model.v_head_dim, group_size, self.meta_dtype)

    @property
    def native_layers(self) -> list[int]:
        """Layers without transforms, whose K and V stay in 16 bits."""
        return [i for i in range(self.model.num_layers) if i not in self.layers]

    def of_rank(self, tp_rank: int, tp_size: int) -> dict[int, LayerTransforms]:
        """layer_id -> what one tensor-parallel rank serves with. Raises ValueError as `kv_heads_of_rank` does."""
        heads = kv_heads_of_rank(self.model.num_kv_heads, tp_rank, tp_size)
        return {layer_id: layer.of_heads(heads) for layer_id, layer in self.layers.items()}


_HEADER_FIELDS = ("method", "group_size", "meta_dtype", "sink_tokens", "recent_tokens", "num_tokens", "provenance")


def save(artifact: Artifact, path: str | Path) -> None:
    """Write the artifact; the file appears whole or not at all. Equal artifacts give equal bytes.

    Raises:
        ArtifactError: the file cannot be written, or the artifact does not hold together.
    """
    path = Path(path)
    tensors = {
        f"layers.{layer_id}.{name}": tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for layer_id, layer in artifact.layers.items()
        for name, tensor in vars(layer).items()
        if tensor is not None
    }
    header = {name: getattr(artifact, name) for name in _HEADER_FIELDS}
    header |= {"format_version": FORMAT_VERSION, "model": dataclasses.asdict(artifact.model)}
    _check(artifact, path)
    write_whole(path, safetensors_save(tensors, metadata={"oscar": seal(header, tensors)}), "artifact")


def seal(header: dict, tensors: dict[str, Tensor]) -> str:
    """The header as JSON with the digests that `read_checked` checks: of all tensors, of each field, and of the header."""
    header = header | {"tensor_digest": _tensor_digest(tensors)}
    header["digests"] = _digests(header, tensors)
    header["header_digest"] = hashlib.sha256(_json_bytes(header)).hexdigest()
    return _json_bytes(header).decode()


def write_whole(path: Path, data: bytes, what: str) -> None:
    """Write a file that appears whole or not at all, whatever interrupts.

    Args:
        path: where; missing folders are made.
        data: its bytes.
        what: what it is, for the sentence.
    Raises:
        ArtifactError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ArtifactError(f"{path}: cannot write the {what}: {error.strerror}; choose another place") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            need = f"{len(data) / 2**20:.1f} MiB are needed"
            raise ArtifactError(f"{path}: cannot write the {what}: {error.strerror}; {need}") from error
        raise


def load(path: str | Path, model: ModelIdentity | None = None, native_layers: bool = False) -> Artifact:
    """Read and check an artifact.

    Args:
        path: the file.
        model: refuse the artifact unless it was made for this model.
        native_layers: let layers be missing, which then stay in 16 bits.
    Raises:
        ArtifactError: missing, truncated or changed file, another format version, missing tensors, or another model.
    """
    path = Path(path)
    again = "run `oscar calibrate` again"
    if not path.is_file():
        raise ArtifactError(f"{path}: expected an artifact file, found none; make one with `oscar calibrate`")
    header, tensors = read_checked(path, "oscar", "OSCAR artifact", FORMAT_VERSION, again)
    try:
        identity = ModelIdentity(**header["model"])
        layers: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            _, layer_id, part = name.split(".")
            layers.setdefault(int(layer_id), {})[part] = tensor
        for layer_id, parts in sorted(layers.items()):
            if missing := [part for part in ("k_transform", "v_transform", "k_clip", "v_clip") if part not in parts]:
                raise ArtifactError(f"{path}: layers.{layer_id}.{missing[0]} is missing; {again}")
            if layer_id >= identity.num_layers:
                raise ArtifactError(f"{path}: expected layers 0 to {identity.num_layers - 1}, got layer {layer_id}; {again}")
        artifact = Artifact(
            model=identity,
            layers={layer_id: LayerTransforms(**parts) for layer_id, parts in sorted(layers.items())},
            **{name: header[name] for name in _HEADER_FIELDS},
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{path}: header or tensor names are not those of an artifact ({error!r}); {again}") from error
    _check(artifact, path)
    if artifact.native_layers and not native_layers:
        missing = ", ".join(map(str, artifact.native_layers))
        raise ArtifactError(
            f"{path}: expected transforms of all {identity.num_layers} layers, found none of layer {missing}; give "
            "--oscar-allow-native-layers (`oscar verify`: --allow-native-layers) to keep what is missing in 16 bits, or "
            f"{again}"
        )
    if model is not None and (difference := identity.difference(model)):
        raise ArtifactError(f"{path}: made for another model: {difference}; run `oscar calibrate` for this model")
    return artifact


def read_checked(path: Path, key: str, what: str, version: int, again: str) -> tuple[dict, dict[str, Tensor]]:
    """Header and tensors of a file that `save` or a sibling wrote, every byte of it checked.

    Args:
        path: the file, which exists.
        key: metadata entry that holds the JSON header.
        what: what it should be, for the sentence.
        version: the one format version that is read.
        again: what the user can do about a bad file.
    Returns:
        (header without its own digest, name -> tensor).
    Raises:
        ArtifactError: not such a file, cut, changed (what was changed is named), or of another version.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not a whole safetensors file ({error}); {again}") from error
    try:
        header = json.loads(metadata[key])
        found = header["format_version"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{path}: expected an {what}, found no readable OSCAR header; {again}") from error
    if found != version:
        raise ArtifactError(f"{path}: format version {found}, this build reads {version}; {again}")
    as_written = _json_bytes(header).decode() == metadata[key]
    digest = header.pop("header_digest", None)
    changed = _changed(header, tensors)
    if digest != hashlib.sha256(_json_bytes(header)).hexdigest():
        names = [name for name in changed if not name.startswith("layers.")]
        one = f"{', '.join(names)} was changed" if names else "header was changed"
        raise ArtifactError(f"{path}: {one} after it was written (header_digest differs); {again}")
    if header.get("tensor_digest") != _tensor_digest(tensors):
        one = f"{', '.join(changed[:3])} was changed" if changed else "tensors were changed"
        raise ArtifactError(f"{path}: {one} after it was written (tensor_digest differs); {again}")
    if not as_written or not _canonical(path):
        raise ArtifactError(f"{path}: spelling of the header was changed after it was written; {again}")
    return header, tensors


def cache_path(model: ModelIdentity) -> Path:
    """Where self-calibration keeps the artifact of this model: `$XDG_CACHE_HOME` or `~/.cache`, then `oscar/`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "oscar" / f"{model.fingerprint}.safetensors"


def find(model_path: str | Path, model: ModelIdentity) -> Path | None:
    """The artifact beside the weights, else the cached one, else None. Only names are looked at; `load` checks."""
    for candidate in (Path(model_path) / FILE_NAME, cache_path(model)):
        if candidate.is_file():
            return candidate
    return None


def _check(artifact: Artifact, path: Path) -> None:
    """Raise unless shapes, ranges and formats hold together."""
    identity = artifact.model
    if not artifact.layers:
        raise ArtifactError(f"{path}: expected transforms of at least one layer, found none; run `oscar calibrate` again")
    try:
        artifact.k_format, artifact.v_format  # noqa: B018 - the constructors check
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}") from error
    heads, dims = identity.num_kv_heads, {"k": identity.head_dim, "v": identity.v_head_dim}
    shapes = {"transform": lambda d: (heads, d, d), "clip": lambda d: (heads,)}
    shapes |= {"mean": lambda d: (heads, d), "levels": lambda d: (heads, 4), "shaping": lambda d: (heads, d, d)}
    for layer_id, layer in artifact.layers.items():
        for name, tensor in vars(layer).items():
            if tensor is None:
                continue
            side, kind = name.split("_")
            where = f"{path}: layers.{layer_id}.{name}"
            expected = shapes[kind](dims[side])
            if tuple(tensor.shape) != expected:
                raise ArtifactError(f"{where}: expected shape {expected}, got {tuple(tensor.shape)}")
            if not torch.isfinite(tensor).all():
                raise ArtifactError(f"{where}: expected finite numbers, got NaN or infinity")
            if kind == "clip" and not ((tensor > 0) & (tensor <= 1)).all():
                raise ArtifactError(f"{where}: expected clip ratios in (0, 1], got {tensor.tolist()}")
            if kind == "shaping" and tensor.tril().any():
                raise ArtifactError(f"{where}: expected nothing on or below the diagonal, got entries there")
            if kind == "levels":
                on_grid = (tensor * 256 == (tensor * 256).round()).all() and (tensor.abs() < 4).all()
                if not on_grid or (tensor.diff(dim=-1) <= 0).any():
                    raise ArtifactError(f"{where}: expected ascending multiples of 1/256 in (-4, 4), got {tensor.tolist()}")


def _weight_digest(folder: Path) -> str | None:
    """Digest of weight files: names, sizes, safetensors headers and evenly spaced samples; None without weights.

    Hashing samples keeps a 100 GB model at milliseconds; a fine-tune changes (nearly) every weight, so samples see it.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    files = [f for f in files if f.name != FILE_NAME]
    if not files:
        return None
    digest = hashlib.sha256()
    for name in files:
        size = name.stat().st_size
        digest.update(f"{name.name}:{size}\n".encode())
        with name.open("rb") as file:
            if name.suffix == ".safetensors" and size >= 8:
                (header_size,) = struct.unpack("<Q", file.read(8))
                digest.update(file.read(min(header_size, size - 8)))
            for i in range(_SAMPLES):
                file.seek((size - min(size, _SAMPLE_BYTES)) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _tensor_digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        _feed(digest, name, tensors[name])
    return digest.hexdigest()


def _feed(digest, name: str, tensor: Tensor) -> None:
    tensor = tensor.contiguous()
    digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _digests(header: dict, tensors: dict[str, Tensor]) -> dict[str, str]:
    """16 hex digits for every header field, fields of the model one by one, and every tensor."""
    fields = {name: value for name, value in header.items() if name not in ("model", "digests", "tensor_digest")}
    fields |= {f"model.{name}": value for name, value in header.get("model", {}).items()}
    result = {name: hashlib.sha256(_json_bytes(value)).hexdigest()[:16] for name, value in fields.items()}
    for name, tensor in tensors.items():
        digest = hashlib.sha256()
        _feed(digest, name, tensor)
        result[name] = digest.hexdigest()[:16]
    return result


def _changed(header: dict, tensors: dict[str, Tensor]) -> list[str]:
    """Names of header fields and tensors that are not as they were written, sorted."""
    before, model = header.get("digests"), header.get("model", {})
    if not isinstance(before, dict) or not isinstance(model, dict):
        return []
    now = _digests(header, tensors)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _canonical(path: Path) -> bool:
    """Whether the file's own JSON is spelled as the library spells it: nothing is hidden in spaces and escapes."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        text = file.read(size).decode()
    return json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) == text.rstrip(" ")


def _json_bytes(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:16] + "…"
