"""A safetensors file whose every byte is checked when it is read: artifacts and saved statistics are such files.

The header keeps a digest of every field and every tensor: a file with anything changed is refused, and the sentence names what.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oscar.errors import OscarError


def seal(header: dict, tensors: dict[str, Tensor]) -> str:
    """The header as JSON with the digests that `read_checked` checks: of all tensors, of each field, and of the header."""
    header = header | {"tensor_digest": _tensor_digest(tensors)}
    header["digests"] = _digests(header, tensors)
    header["header_digest"] = hashlib.sha256(json_bytes(header)).hexdigest()
    return json_bytes(header).decode()


def write_whole(path: Path, data: bytes, what: str) -> None:
    """Write a file that appears whole or not at all, whatever interrupts.

    Args:
        path: where; missing folders are made.
        data: its bytes.
        what: what it is, for the sentence.
    Raises:
        OscarError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OscarError(f"{path}: cannot write the {what}: {error.strerror}; choose another place") from error
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
            raise OscarError(f"{path}: cannot write the {what}: {error.strerror}; {need}") from error
        raise


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


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
        OscarError: not such a file, cut, changed (what was changed is named), or of another version.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise OscarError(f"{path}: not a whole safetensors file ({error}); {again}") from error
    try:
        header = json.loads(metadata[key])
        found = header["format_version"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise OscarError(f"{path}: expected an {what}, found no readable OSCAR header; {again}") from error
    if found != version:
        raise OscarError(f"{path}: format version {found}, this build reads {version}; {again}")
    as_written = json_bytes(header).decode() == metadata[key]
    digest = header.pop("header_digest", None)
    changed = _changed(header, tensors)
    if digest != hashlib.sha256(json_bytes(header)).hexdigest():
        names = [name for name in changed if not name.startswith("layers.")]
        one = f"{', '.join(names)} was changed" if names else "header was changed"
        raise OscarError(f"{path}: {one} after it was written (header_digest differs); {again}")
    if header.get("tensor_digest") != _tensor_digest(tensors):
        one = f"{', '.join(changed[:3])} was changed" if changed else "tensors were changed"
        raise OscarError(f"{path}: {one} after it was written (tensor_digest differs); {again}")
    if not as_written or not _canonical(path):
        raise OscarError(f"{path}: spelling of the header was changed after it was written; {again}")
    return header, tensors


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
    result = {name: hashlib.sha256(json_bytes(value)).hexdigest()[:16] for name, value in fields.items()}
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


def json_bytes(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
