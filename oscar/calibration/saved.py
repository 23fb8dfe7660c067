"""Statistics of a model and text, and their file: `oscar calibrate --save-stats F`, and `--from-stats F` to go on from there.

One safetensors file, checked to the last byte as an artifact is. Tensors, for each layer i: `layers.{i}.{name}` float64 for
every moment and mean of `LayerStatistics`; and `held_out.{j}` int64, the token ids of the held-out sequences, so that another
method is measured on the same text. The header says whose statistics they are and what text was read.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save as safetensors_save

from oscar.calibration.text import Sequence
from oscar.errors import OscarError
from oscar.format.identity import ModelIdentity
from oscar.format.sealed_file import read_checked, seal, write_whole
from oscar.methods.statistics import LayerStatistics

VERSION = 1
_KEY = "oscar_statistics"
_MOMENTS = tuple(f.name for f in dataclasses.fields(LayerStatistics) if f.name != "num_tokens")
_RECORD = ("num_tokens", "data", "longest_sequence", "token_digest", "seed", "dtype", "device", "backend", "versions")


@dataclass(frozen=True)
class Statistics:
    """Everything that calibration learns from the text.

    Attributes:
        model: whose.
        layers: layer_id -> LayerStatistics.
        held_out: sequences kept from the statistics.
        num_tokens: real tokens in the statistics.
        data: [{"source", "tokens", "asked"}], the mix of what was read, held-out part left out of "tokens" and "asked".
        longest_sequence: in tokens.
        token_digest: SHA-256 over all token ids, held-out ones included.
        seed: of the text.
        dtype, device: of the forward pass.
        backend: "hf" or "sglang".
        versions: of what computed them.
    """

    model: ModelIdentity
    layers: dict[int, LayerStatistics]
    held_out: list[Sequence]
    num_tokens: int
    data: list[dict]
    longest_sequence: int
    token_digest: str
    seed: int
    dtype: str
    device: str
    backend: str
    versions: dict


def save(statistics: Statistics, path: str | Path) -> None:
    """Write the file, whole or not at all. Raises OscarError where it cannot be written."""
    path = Path(path)
    tensors = {
        f"layers.{i}.{name}": getattr(layer, name).contiguous()
        for i, layer in statistics.layers.items()
        for name in _MOMENTS
        if getattr(layer, name) is not None
    }
    tensors |= {f"held_out.{j}": s.tokens.clone() for j, s in enumerate(statistics.held_out)}
    header = {name: getattr(statistics, name) for name in _RECORD}
    header |= {"format_version": VERSION, "model": dataclasses.asdict(statistics.model)}
    header["held_out_sources"] = [s.source for s in statistics.held_out]
    write_whole(path, safetensors_save(tensors, metadata={_KEY: seal(header, tensors)}), "statistics")


def load(path: str | Path, model: ModelIdentity) -> Statistics:
    """Read and check the file.

    Args:
        path: the file.
        model: refuse statistics of another model.
    Raises:
        OscarError: missing, cut, changed, of another version, or of another model.
    """
    path = Path(path)
    again = "run `oscar calibrate --save-stats` again"
    if not path.is_file():
        raise OscarError(f"{path}: expected a file of statistics, found none; make one with `oscar calibrate --save-stats`")
    header, tensors = read_checked(path, _KEY, "OSCAR statistics file", VERSION, again)
    try:
        identity = ModelIdentity(**header["model"])
        layers: dict[int, dict] = {i: {} for i in range(identity.num_layers)}
        for name, tensor in tensors.items():
            kind, number, *part = name.split(".")
            if kind == "layers":
                layers[int(number)][part[0]] = tensor
        held_out = [
            Sequence(tensors[f"held_out.{j}"], source, held_out=True) for j, source in enumerate(header["held_out_sources"])
        ]
        found = Statistics(
            model=identity,
            layers={i: LayerStatistics(num_tokens=header["num_tokens"], **parts) for i, parts in layers.items()},
            held_out=held_out,
            **{name: header[name] for name in _RECORD},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise OscarError(f"{path}: header or tensor names are not those of statistics ({error!r}); {again}") from error
    if difference := identity.difference(model, "statistics"):
        raise OscarError(f"{path}: statistics of another model: {difference}; run `oscar calibrate` without --from-stats")
    return found


def mix(sequences: list[Sequence]) -> list[tuple[str, int]]:
    """(source, tokens) in order of first appearance."""
    counts: dict[str, int] = {}
    for s in sequences:
        counts[s.source] = counts.get(s.source, 0) + len(s.tokens)
    return list(counts.items())


def token_digest(sequences: Iterable[Sequence]) -> str:
    """SHA-256 over all token ids: two artifacts with the same digest saw the same text."""
    digest = hashlib.sha256()
    for s in sequences:
        digest.update(len(s.tokens).to_bytes(8, "little") + s.tokens.numpy().tobytes())
    return digest.hexdigest()
