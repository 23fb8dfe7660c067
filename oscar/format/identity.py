"""Whose artifact it is: a model's geometry, RoPE settings, and digests of its config and weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar.errors import OscarError
from oscar.format.sealed_file import json_bytes

ARTIFACT_SUFFIX = ".kvq"
"""How the name of an artifact ends. Its bytes are those of a safetensors file; with that ending SGLang's weight loader, which
reads every `*.safetensors` beside single-file weights, would take it for weights of the model."""
ARTIFACT_NAME = "oscar" + ARTIFACT_SUFFIX
"""Name under which an artifact is found beside a model's weights."""
OLD_ARTIFACT_NAME = "oscar.safetensors"
"""That name in version 0.1.0."""
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class ModelIdentity:
    """What an artifact is calibrated for.

    Args:
        architecture: class name in the model's config.
        num_layers, num_qo_heads, num_kv_heads, head_dim, v_head_dim: geometry of the whole model (not of one rank).
        rope: RoPE settings, spelled one way whatever the config's spelling (`rope_settings`).
        config_hash: SHA-256 of the other config fields that change what attention computes.
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

    before = None
    """The same model's identity by the rule of earlier versions, where `from_path` read it and nothing was overridden. Not a
    field: it is neither written nor compared, it only finds and accepts artifacts that were made then."""

    @property
    def fingerprint(self) -> str:
        """24 hex digits that name this model in the cache folder."""
        return hashlib.sha256(json_bytes(dataclasses.asdict(self))).hexdigest()[:24]

    @classmethod
    def from_path(cls, model_path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelIdentity:
        """Read a model folder's config and digest its weights.

        Args:
            model_path: the folder.
            overrides: fields of the config that are replaced when it is served, as --json-model-override-args has them.
        Raises:
            OscarError: no such folder, no readable config.json, or no attention geometry in it.
        """
        path = Path(model_path)
        config_file = path / "config.json"
        if not config_file.is_file():
            raise OscarError(f"{path}: expected a model folder with config.json, found none; check --model-path")
        try:
            config = json.loads(config_file.read_text())
            identity = cls.from_config(override(config, overrides or {}))
            before = None if overrides else cls._from_config_before(config)
        except (json.JSONDecodeError, KeyError, TypeError, ZeroDivisionError, AttributeError) as error:
            raise OscarError(f"{config_file}: cannot read the attention geometry of this model ({error!r})") from error
        digest = _weight_digest(path)
        identity = dataclasses.replace(identity, weight_digest=digest)
        if before is not None:
            object.__setattr__(identity, "before", dataclasses.replace(before, weight_digest=digest))  # frozen
        return identity

    @classmethod
    def from_config(cls, config: dict) -> ModelIdentity:
        """Geometry from a config.json dictionary; weight_digest is None.

        Raises:
            KeyError: a field without which the geometry is unknown is missing.
        """
        text = config.get("text_config") or config
        seen = {k: v for k, v in text.items() if k not in _NOT_IDENTITY | _ROPE_FIELDS}
        return cls._with(config, rope_settings(text), seen)

    @classmethod
    def _from_config_before(cls, config: dict) -> ModelIdentity:
        """By the rule of earlier versions: RoPE settings as they are spelled, and all fields in the hash."""
        text = config.get("text_config") or config
        rope = {k: text[k] for k in sorted(_ROPE_FIELDS) if text.get(k)}
        return cls._with(config, rope, {k: v for k, v in text.items() if k not in _NOT_IDENTITY})

    @classmethod
    def _with(cls, config: dict, rope: dict, what_attention_sees: dict) -> ModelIdentity:
        text = config.get("text_config") or config
        num_qo_heads = text["num_attention_heads"]
        head_dim = text.get("head_dim") or text["hidden_size"] // num_qo_heads
        return cls(
            architecture=(config.get("architectures") or ["unknown"])[0],
            num_layers=text["num_hidden_layers"],
            num_qo_heads=num_qo_heads,
            num_kv_heads=text.get("num_key_value_heads") or num_qo_heads,
            head_dim=head_dim,
            v_head_dim=text.get("v_head_dim") or head_dim,
            rope=rope,
            config_hash=hashlib.sha256(json_bytes(what_attention_sees)).hexdigest(),
            weight_digest=None,
        )

    def difference(self, other: ModelIdentity, whose: str = "artifact") -> str | None:
        """Name and both values of the first field that differs, or None. An unknown weight digest matches any.

        whose: what self belongs to, for the sentence.
        """
        if other.before is not None and self._difference(other.before, whose) is None:
            return None
        return self._difference(other, whose)

    def _difference(self, other: ModelIdentity, whose: str) -> str | None:
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.name in ("config_hash", "weight_digest") and None in (mine, theirs):
                continue
            if f.name == "rope":
                mine, theirs = rope_settings(mine), rope_settings(theirs)
            if mine != theirs:
                return f"{f.name} is {_short(mine)} in the {whose} and {_short(theirs)} in the model"
        return None


# Fields of config.json that change between exports of the same model and never change what attention computes.
_NOT_IDENTITY = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_NOT_IDENTITY |= {"bos_token_id", "eos_token_id", "pad_token_id"}
_ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}


def rope_settings(text: Mapping[str, Any]) -> dict:
    """RoPE settings in one spelling: `rope_type` and its parameters, `rope_theta`, `partial_rotary_factor`, without None.

    Configs have a `rope_theta` beside a `rope_scaling`, or all of it in `rope_parameters`; where both are there the library
    takes `rope_scaling`.

    Args:
        text: the part of a config that describes the language model, or what this function returned.
    """
    returned = "rope_type" in text or (bool(text) and all(isinstance(value, Mapping) for value in text.values()))
    settings = dict(text.get("rope_scaling") or text.get("rope_parameters") or (text if returned else {}))
    if any(isinstance(value, Mapping) for value in settings.values()):  # one dictionary for each kind of layer
        return {kind: rope_settings(value) if isinstance(value, Mapping) else value for kind, value in settings.items()}
    if "type" in settings:
        settings.setdefault("rope_type", settings.pop("type"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if settings.get(name) is None and text.get(name) is not None:
            settings[name] = text[name]
    settings.setdefault("rope_type", "default")
    return {k: float(v) if type(v) is int else v for k, v in settings.items() if v is not None}


def override(config: dict, overrides: Mapping[str, Any]) -> dict:
    """A config.json dictionary with fields replaced as SGLang replaces them: RoPE settings and parts of the config are
    merged with what is there, all else is set."""
    result = dict(config)
    for name, value in overrides.items():
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, Mapping):
            merged = rope_settings(result) | {"rope_type" if k == "type" else k: v for k, v in value.items()}
            result = {k: v for k, v in result.items() if k not in _ROPE_FIELDS} | {"rope_parameters": merged}
        elif name.endswith("_config") and isinstance(value, Mapping) and isinstance(result.get(name), dict):
            result[name] = override(result[name], value)
        else:
            result[name] = value
            if name == "rope_theta" and isinstance(result.get("rope_parameters"), dict):
                result["rope_parameters"] = result["rope_parameters"] | {name: value}
    return result


def _weight_digest(folder: Path) -> str | None:
    """Digest of weight files: names, sizes, safetensors headers and evenly spaced samples; None without weights.

    Hashing samples keeps a 100 GB model at milliseconds; a fine-tune changes (nearly) every weight, so samples see it.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    files = [f for f in files if f.name != OLD_ARTIFACT_NAME]
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


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:16] + "…"
