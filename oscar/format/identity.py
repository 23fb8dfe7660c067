"""Whose artifact it is: a model's geometry, RoPE settings, and digests of its config and weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from oscar.errors import OscarError
from oscar.format.sealed_file import json_bytes

ARTIFACT_NAME = "oscar.safetensors"
"""Name under which an artifact is found beside a model's weights."""
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10


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
        return hashlib.sha256(json_bytes(dataclasses.asdict(self))).hexdigest()[:24]

    @classmethod
    def from_path(cls, model_path: str | Path) -> ModelIdentity:
        """Read a model folder's config and digest its weights.

        Raises:
            OscarError: no such folder, no readable config.json, or no attention geometry in it.
        """
        path = Path(model_path)
        config_file = path / "config.json"
        if not config_file.is_file():
            raise OscarError(f"{path}: expected a model folder with config.json, found none; check --model-path")
        try:
            config = json.loads(config_file.read_text())
            geometry = cls.from_config(config)
        except (json.JSONDecodeError, KeyError, TypeError, ZeroDivisionError) as error:
            raise OscarError(f"{config_file}: cannot read the attention geometry of this model ({error!r})") from error
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
            config_hash=hashlib.sha256(json_bytes(what_attention_sees)).hexdigest(),
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


def _weight_digest(folder: Path) -> str | None:
    """Digest of weight files: names, sizes, safetensors headers and evenly spaced samples; None without weights.

    Hashing samples keeps a 100 GB model at milliseconds; a fine-tune changes (nearly) every weight, so samples see it.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    files = [f for f in files if f.name != ARTIFACT_NAME]
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
