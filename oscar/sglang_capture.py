"""Statistics and errors taken inside SGLang, for models that only SGLang can hold. This side of it does not import SGLang.

Token ids go to a process of `sglang.srt.oscar.capture` in a file, the sums of every tensor-parallel rank come back in files:

    request.safetensors     sequence.{j} int64 token ids; the header says model, engine arguments and each sequence's source
    artifact.safetensors    only where errors are to be measured: the artifact
    rank-{r}.safetensors    layers.{i}.{sum} float64, the sums of `MomentSums` over this rank's heads; or, measuring,
                            {source}.{i}.{error} float64 [2], those of `LayerErrorSums`

Ranks that hold the same KV head hold different query heads of it, so sums over queries add up and sums over keys and values
are taken once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from oscar import artifact as artifacts
from oscar.artifact import Artifact, ModelIdentity, kv_heads_of_rank
from oscar.heldout import LayerErrorSums
from oscar.statistics import MomentSums
from oscar.text import Sequence

MODULE = "sglang.srt.oscar.capture"
_PER_QUERY = ("q_moment", "v_score_moment")


class EngineError(ValueError):
    """SGLang could not capture, as one sentence."""


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


def capture(identity: ModelIdentity, engine: Engine, sequences: list[Sequence]) -> dict[int, MomentSums]:
    """Serve the sequences with SGLang and sum what its attention consumes.

    Args:
        identity: of the model.
        engine: how it is started.
        sequences: read one after another, each from position 0.
    Returns:
        layer_id -> sums, of every layer.
    Raises:
        EngineError: the engine ended with an error (its own messages are on stderr), or did not see exactly these tokens.
    """
    with _serve(identity, engine, sequences) as files:
        return merge(identity, files, sequences)


def measure(artifact: Artifact, engine: Engine, sequences: list[Sequence]) -> dict[str, dict[int, LayerErrorSums]]:
    """Error sums by source and layer, as `oscar.heldout` defines them, out of SGLang's own queries, keys and values.

    Raises:
        EngineError: as `capture`.
    """
    formats = artifact.k_format, artifact.v_format, artifact.sink_tokens, artifact.recent_tokens
    result: dict[str, dict[int, LayerErrorSums]] = {}
    with _serve(artifact.model, engine, sequences, artifact) as files:
        for path in files:
            for key, (error, square) in _read(path, files.index(path))[1].items():
                source, layer_id, name = key.rsplit(".", 2)
                layers = result.setdefault(source, {i: LayerErrorSums(t, *formats) for i, t in artifact.layers.items()})
                pair = layers[int(layer_id)].sums[name]
                pair[0] += float(error)
                pair[1] += float(square)
    return {source: result[source] for source in dict.fromkeys(s.source for s in sequences)}


@contextmanager
def _serve(
    identity: ModelIdentity, engine: Engine, sequences: list[Sequence], artifact: Artifact | None = None
) -> Iterator[list[Path]]:
    """Run the engine over the sequences; yields the files of its ranks, in rank order."""
    try:
        for rank in range(engine.tp_size):
            kv_heads_of_rank(identity.num_kv_heads, rank, engine.tp_size)
    except ValueError as error:
        raise EngineError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="oscar-capture-") as name:
        folder = Path(name)
        settings = {"model_path": str(engine.model), "tp_size": engine.tp_size, "dtype": engine.dtype} | engine.more
        header = {"engine": json.dumps(settings), "sources": json.dumps([s.source for s in sequences])}
        tokens = {f"sequence.{j}": s.tokens.clone() for j, s in enumerate(sequences)}
        save_file(tokens, folder / "request.safetensors", header)
        if artifact is not None:
            artifacts.save(artifact, folder / "artifact.safetensors")
        command = [sys.executable, "-m", MODULE, str(folder)]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False).returncode
        if code:
            raise EngineError(f"{engine.model}: SGLang ended with exit code {code} (its message is above); try --backend hf")
        yield [folder / f"rank-{rank}.safetensors" for rank in range(engine.tp_size)]


def _read(path: Path, rank: int) -> tuple[dict, dict[str, Tensor]]:
    """(tokens counted by layer, tensors) of one rank."""
    if not path.is_file():
        raise EngineError(f"rank {rank}: expected its sums in {path.name}, found none")
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["counts"]), {key: file.get_tensor(key) for key in file.keys()}


def merge(identity: ModelIdentity, files: list[Path], sequences: list[Sequence]) -> dict[int, MomentSums]:
    """Sums of the whole model from those of its ranks, in rank order.

    Raises:
        EngineError: a rank's file or a layer is missing, or a rank counted other tokens than were sent.
    """
    expected = sum(len(s.tokens) for s in sequences)
    parts = [_read(path, rank) for rank, path in enumerate(files)]
    result = {}
    for layer_id in range(identity.num_layers):
        whole: dict[str, Tensor] = {}
        for rank, (counts, tensors) in enumerate(parts):
            found = counts.get(str(layer_id), 0)
            if found != expected:
                raise EngineError(f"rank {rank}, layer {layer_id}: expected {expected} real tokens, counted {found}")
            heads = kv_heads_of_rank(identity.num_kv_heads, rank, len(parts))
            prefix = f"layers.{layer_id}."
            for name, value in ((k.removeprefix(prefix), x) for k, x in tensors.items() if k.startswith(prefix)):
                to = whole.setdefault(name, value.new_zeros(identity.num_kv_heads, *value.shape[1:]))
                to[heads] = to[heads] + value if name in _PER_QUERY else value
        result[layer_id] = MomentSums(layer_id)
        result[layer_id].merge(whole, expected, expected * (identity.num_qo_heads // identity.num_kv_heads))
    return result
