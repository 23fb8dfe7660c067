"""Statistics and errors taken inside SGLang, for models that only SGLang can hold. This side of it does not import SGLang.

Token ids go to a process of `sglang.srt.oscar.capture` in a file, the sums of every tensor-parallel rank come back in files:

    request.safetensors     sequence.{j} int64 token ids, layers.{i} float64 C_q for the surrogate; the header says the task,
                            the engine's arguments and each sequence's source
    artifact.safetensors    for "clip" and "errors": the artifact
    rank-{r}.safetensors    float64, over this rank's heads, and in the header the tokens counted in each layer
        "statistics"        layers.{i}.{sum} of `MomentSums`, layers.{i}.output_moment where W_O is a plain matrix
        "surrogate"         layers.{i}.v_surrogate_moment
        "clip"              layers.{i}.k, layers.{i}.v [quantiles, heads], the errors of `ClipSearch`
        "errors"            {source}.{i}.{error} [2], those of `LayerErrorSums`
    text.safetensors        for "write": text [parts, length] int64 that goes on from the sequences of the request

Ranks that hold the same KV head hold different query heads of it, so sums over queries add up, the output metric is averaged,
and sums over keys and values are taken once. The engine is started once a task: nothing is kept of an activation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from oscar.calibration.clip_search import ClipSearch
from oscar.calibration.heldout import LayerErrorSums
from oscar.calibration.text import Sequence
from oscar.errors import OscarError
from oscar.format import artifact as artifacts
from oscar.format.artifact import Artifact
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms, kv_heads_of_rank
from oscar.methods import attended
from oscar.methods.statistics import MomentSums

MODULE = "sglang.srt.oscar.capture"
CONTEXT_MARGIN = 8
"""Tokens of the context that a sequence must leave free: SGLang keeps some for the answer and for itself."""
_HOW = {"q_moment": "sum", "v_score_moment": "sum", "output_moment": "mean"} | dict.fromkeys(attended.SUMS, "sum")
"""What becomes of several ranks' values of one KV head, where they are not equal."""


Advance = Callable[[int], None]


@dataclass(frozen=True)
class Engine:
    """How SGLang is started.

    Attributes:
        model: model folder.
        tp_size: tensor-parallel ranks.
        dtype: "auto", "float32", "bfloat16" or "float16".
        more: further arguments of SGLang's engine, by their Python names.
    """

    model: str | Path
    tp_size: int = 1
    dtype: str = "auto"
    more: dict = field(default_factory=dict)


def capture(
    identity: ModelIdentity, engine: Engine, sequences: list[Sequence], advance: Advance = lambda tokens: None
) -> dict[int, MomentSums]:
    """Serve the sequences with SGLang and sum what its attention consumes.

    Args:
        identity: of the model.
        engine: how it is started.
        sequences: read one after another, each from position 0.
        advance: told the tokens served since the last call.
    Returns:
        layer_id -> sums, of every layer.
    Raises:
        OscarError: the engine ended with an error (its own messages are on stderr), or did not see exactly these tokens.
    """
    with _serve(identity, engine, "statistics", sequences, advance) as files:
        return merge(identity, files, sequences)


def surrogate(
    identity: ModelIdentity,
    engine: Engine,
    sequences: list[Sequence],
    q_moments: dict[int, Tensor],
    advance: Advance = lambda tokens: None,
) -> dict[int, Tensor]:
    """The second pass that `SurrogateSums` takes.

    Args:
        identity, engine, sequences, advance: as in `capture`.
        q_moments: layer_id -> C_q of the first pass, [num_kv_heads, head_dim, head_dim] float64.
    Returns:
        layer_id -> [num_kv_heads, v_head_dim, v_head_dim] float64.
    Raises:
        OscarError: as `capture`.
    """
    given = {f"layers.{i}": moment for i, moment in q_moments.items()}
    with _serve(identity, engine, "surrogate", sequences, advance, given) as files:
        layers = _by_layer(identity, files, sequences)
        return {i: _join(identity, [p["v_surrogate_moment"] for p in parts], 0, "once") for i, parts in layers.items()}


def search_clip(
    artifact: Artifact, engine: Engine, sequences: list[Sequence], advance: Advance = lambda tokens: None
) -> dict[int, LayerTransforms]:
    """The artifact's layers with the quantiles that `ClipSearch` finds. Raises OscarError as `capture`."""
    formats = artifact.k_format, artifact.v_format, artifact.sink_tokens, artifact.recent_tokens
    result = {}
    with _serve(artifact.model, engine, "clip", sequences, advance, artifact=artifact) as files:
        layers = _by_layer(artifact.model, files, sequences)
        for i, transforms in artifact.layers.items():
            search = ClipSearch(transforms, *formats)
            search.errors = {side: _join(artifact.model, [p[side] for p in layers[i]], 1, "sum") for side in ("k", "v")}
            result[i] = search.best()
    return result


def measure(
    artifact: Artifact, engine: Engine, sequences: list[Sequence], advance: Advance = lambda tokens: None
) -> dict[str, dict[int, LayerErrorSums]]:
    """Error sums by source and layer, as `heldout` defines them, out of SGLang's own queries, keys and values.

    Raises:
        OscarError: as `capture`.
    """
    formats = artifact.k_format, artifact.v_format, artifact.sink_tokens, artifact.recent_tokens
    result: dict[str, dict[int, LayerErrorSums]] = {}
    with _serve(artifact.model, engine, "errors", sequences, advance, artifact=artifact) as files:
        for tensors in _ranks(artifact.model, files, sequences):
            for key, (error, square) in tensors.items():
                source, layer_id, name = key.rsplit(".", 2)
                layers = result.setdefault(source, {i: LayerErrorSums(t, *formats) for i, t in artifact.layers.items()})
                pair = layers[int(layer_id)].sums[name]
                pair[0] += float(error)
                pair[1] += float(square)
    return {source: result[source] for source in dict.fromkeys(s.source for s in sequences)}


def write(
    engine: Engine,
    openings: list[list[int]],
    parts: int,
    length: int,
    seed: int,
    advance: Advance = lambda tokens: None,
) -> Tensor:
    """Text that the model writes, sampled at temperature 1. Where it ends a text, the part goes on with the next opening.

    Args:
        engine, advance: as in `capture`.
        openings: token lists that a text can start with, none empty.
        parts, length: how many, and tokens of each.
        seed: of the sampling.
    Returns:
        [parts, length] int64.
    Raises:
        OscarError: the engine ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="oscar-write-") as name:
        folder = Path(name)
        settings = {"model_path": str(engine.model), "tp_size": engine.tp_size, "dtype": engine.dtype, "random_seed": seed}
        header = {"task": "write", "engine": json.dumps(settings | engine.more), "parts": str(parts), "length": str(length)}
        header["sources"] = json.dumps(["opening"] * len(openings))
        save_file(
            {f"sequence.{j}": torch.tensor(ids) for j, ids in enumerate(openings)}, folder / "request.safetensors", header
        )
        _run(engine, folder, advance, parts * length)
        with safe_open(folder / "text.safetensors", "pt") as file:
            return file.get_tensor("text")


@contextmanager
def _serve(
    identity: ModelIdentity,
    engine: Engine,
    task: str,
    sequences: list[Sequence],
    advance: Advance,
    given: dict[str, Tensor] | None = None,
    artifact: Artifact | None = None,
) -> Iterator[list[Path]]:
    """Run the engine over the sequences; yields the files of its ranks, in rank order."""
    try:
        for rank in range(engine.tp_size):
            kv_heads_of_rank(identity.num_kv_heads, rank, engine.tp_size)
    except ValueError as error:
        raise OscarError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="oscar-capture-") as name:
        folder = Path(name)
        settings = {"model_path": str(engine.model), "tp_size": engine.tp_size, "dtype": engine.dtype} | engine.more
        header = {"task": task, "engine": json.dumps(settings), "sources": json.dumps([s.source for s in sequences])}
        tokens = {f"sequence.{j}": s.tokens.clone() for j, s in enumerate(sequences)}
        save_file(tokens | (given or {}), folder / "request.safetensors", header)
        if artifact is not None:
            artifacts.save(artifact, folder / "artifact.safetensors")
        _run(engine, folder, advance, sum(len(s.tokens) for s in sequences))
        yield [folder / f"rank-{rank}.safetensors" for rank in range(engine.tp_size)]


def _run(engine: Engine, folder: Path, advance: Advance, tokens: int) -> None:
    """Run the engine on the request in a folder; tokens: that it will have served in the end. Raises OscarError."""
    command = [sys.executable, "-m", MODULE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2) as process:  # stderr, also in a notebook
        told = 0
        while (code := _wait(process)) is None:
            served = folder / "served"
            done = int(served.read_text() or 0) if served.exists() else 0
            advance(done - told)
            told = done
        advance(tokens - told)
    if code:
        raise OscarError(f"{engine.model}: SGLang ended with exit code {code} (its message is above); try --backend hf")


def _wait(process: subprocess.Popen) -> int | None:
    """The exit code, or None after half a second."""
    try:
        return process.wait(0.5)
    except subprocess.TimeoutExpired:
        return None


def merge(identity: ModelIdentity, files: list[Path], sequences: list[Sequence]) -> dict[int, MomentSums]:
    """Sums of the whole model from those of its ranks, in rank order.

    Raises:
        OscarError: a rank's file or a layer is missing, or a rank counted other tokens than were sent.
    """
    tokens = sum(len(s.tokens) for s in sequences)
    result = {}
    for layer_id, parts in _by_layer(identity, files, sequences).items():
        joined = {
            name: _join(identity, [part[name] for part in parts], 0, _HOW.get(name, "once"))
            for name in parts[0]
            if all(name in part for part in parts)
        }
        result[layer_id] = MomentSums(layer_id)
        result[layer_id].output_moment = joined.pop("output_moment", None)
        result[layer_id].merge(joined, tokens, tokens * (identity.num_qo_heads // identity.num_kv_heads))
    return result


def _by_layer(identity: ModelIdentity, files: list[Path], sequences: list[Sequence]) -> dict[int, list[dict[str, Tensor]]]:
    """layer_id -> name -> tensor of each rank."""
    ranks = _ranks(identity, files, sequences)
    return {
        i: [{key.removeprefix(prefix): x for key, x in rank.items() if key.startswith(prefix)} for rank in ranks]
        for i, prefix in ((i, f"layers.{i}.") for i in range(identity.num_layers))
    }


def _ranks(identity: ModelIdentity, files: list[Path], sequences: list[Sequence]) -> list[dict[str, Tensor]]:
    """Tensors of each rank, once every layer of every rank is found to have counted the tokens that were sent."""
    expected, result = sum(len(s.tokens) for s in sequences), []
    for rank, path in enumerate(files):
        if not path.is_file():
            raise OscarError(f"rank {rank}: expected its sums in {path.name}, found none")
        with safe_open(path, "pt") as file:
            counts = json.loads(file.metadata()["counts"])
            result.append({key: file.get_tensor(key) for key in file.keys()})
        for layer_id in range(identity.num_layers):
            if (found := counts.get(str(layer_id), 0)) != expected:
                raise OscarError(f"rank {rank}, layer {layer_id}: expected {expected} real tokens, counted {found}")
    return result


def _join(identity: ModelIdentity, parts: list[Tensor], dim: int, how: str) -> Tensor:
    """One tensor over all KV heads from those of the ranks.

    Args:
        identity: of the model.
        parts: by rank, with the rank's KV heads in dimension `dim`.
        how: what becomes of several ranks' values of one head: "sum", "mean" or, being equal, "once".
    """
    shape = list(parts[0].shape)
    shape[dim] = identity.num_kv_heads
    whole = parts[0].new_zeros(shape)
    share = max(1, len(parts) // identity.num_kv_heads) if how == "mean" else 1
    for rank, part in enumerate(parts):
        heads = kv_heads_of_rank(identity.num_kv_heads, rank, len(parts))
        to = whole.narrow(dim, heads.start, heads.stop - heads.start)
        to.copy_(part if how == "once" else to + part / share)
    return whole
