"""Who runs the model over the text: Transformers in this process, or SGLang in processes of its own. One interface for both.

A runner makes a pass over token sequences for each thing that is summed: the statistics, the clip search, the held-out error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from oscar.calibration import run_sglang
from oscar.calibration.clip_search import ClipSearch
from oscar.calibration.heldout import LayerErrorSums
from oscar.calibration.run_transformers import LayerCapture, capturing
from oscar.calibration.text import Sequence, num_tokens
from oscar.errors import OscarError
from oscar.format.artifact import Artifact
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms
from oscar.methods.statistics import LayerStatistics, MomentSums, SurrogateSums, output_moment
from oscar.progress import Steps

TOKENS_AT_ONCE = 1024
"""Tokens whose outer products are summed together: any number gives the same sums, and their float64 copies stay in the cache
(a third less CPU time than 4096 at head_dim 128)."""


class Runner(Protocol):
    """What calibration asks of either. Each pass draws its progress, and raises OscarError where the model cannot be read."""

    def statistics(self, sequences: list[Sequence], surrogate: bool) -> dict[int, LayerStatistics]:
        """layer_id -> statistics of these sequences. surrogate: with a second pass for `v_surrogate_moment`."""

    def search_clip(self, artifact: Artifact, sequences: list[Sequence]) -> dict[int, LayerTransforms]:
        """The artifact's layers with the clip quantiles that change attention's output least on these sequences."""

    def measure(self, artifact: Artifact, sequences: list[Sequence]) -> dict[str, dict[int, LayerErrorSums]]:
        """source -> layer_id -> sums of errors under the artifact."""


class TransformersRunner:
    """A Hugging Face model in this process.

    Args:
        model: as `load_model` returned it.
        identity: its identity; a layer of another shape is refused.
        steps: where progress is drawn.
    """

    def __init__(self, model, identity: ModelIdentity, steps: Steps):
        self.model, self.identity, self.steps = model, identity, steps

    def statistics(self, sequences: list[Sequence], surrogate: bool) -> dict[int, LayerStatistics]:
        identity = self.identity
        moments = {i: MomentSums(i) for i in range(identity.num_layers)}

        def add(capture: LayerCapture) -> None:
            sums = moments[capture.layer_id]
            if sums.output_moment is None and capture.output_weight is not None:
                sums.output_moment = output_moment(capture.output_weight, identity.num_kv_heads, identity.v_head_dim)
            # In parts: the float64 copies of a long sequence would outgrow the forward pass.
            for part in zip(*(x.split(TOKENS_AT_ONCE) for x in capture.tokens()), strict=True):
                sums.add(*part)
            for sequence in range(len(capture.real)):
                sums.attend(*capture.tokens(sequence), **capture.how)

        self._run(add, sequences, "statistics")
        statistics = {i: sums.finish() for i, sums in moments.items()}
        if not surrogate:
            return statistics
        surrogates = {i: SurrogateSums(i, layer.q_moment) for i, layer in statistics.items()}

        def add_surrogate(capture: LayerCapture) -> None:
            _, k, v, _ = capture.tokens()
            for part in zip(k.split(TOKENS_AT_ONCE), v.split(TOKENS_AT_ONCE), strict=True):
                surrogates[capture.layer_id].add(*part)

        self._run(add_surrogate, sequences, "surrogate weights")
        return {i: layer.with_surrogate(surrogates[i].finish()) for i, layer in statistics.items()}

    def search_clip(self, artifact: Artifact, sequences: list[Sequence]) -> dict[int, LayerTransforms]:
        settings = artifact.k_format, artifact.v_format, artifact.sink_tokens, artifact.recent_tokens
        searches = {i: ClipSearch(layer, *settings) for i, layer in artifact.layers.items()}
        self._run(_into(searches), sequences, "clip search")
        return {i: search.best() for i, search in searches.items()}

    def measure(self, artifact: Artifact, sequences: list[Sequence]) -> dict[str, dict[int, LayerErrorSums]]:
        settings = artifact.k_format, artifact.v_format, artifact.sink_tokens, artifact.recent_tokens
        result = {}
        for source in dict.fromkeys(s.source for s in sequences):
            result[source] = {i: LayerErrorSums(layer, *settings) for i, layer in artifact.layers.items()}
            self._run(_into(result[source]), [s for s in sequences if s.source == source], "held-out error")
        return result

    def _run(self, observer: Callable[[LayerCapture], None], sequences: list[Sequence], description: str) -> None:
        """One captured forward pass over each sequence."""

        def observe(capture: LayerCapture) -> None:
            _check_shapes(capture, self.identity)
            observer(capture)
            advance(capture.q.shape[2] / self.identity.num_layers)

        with self.steps.step(description, num_tokens(sequences)) as advance, capturing(self.model, observe) as run:
            for sequence in sequences:
                run(sequence.tokens.unsqueeze(0).to(self.model.device))


class SglangRunner:
    """SGLang, started once for each pass.

    Args:
        engine: how it is started.
        identity: of the model.
        steps: where progress is drawn.
    """

    def __init__(self, engine: run_sglang.Engine, identity: ModelIdentity, steps: Steps):
        self.engine, self.identity, self.steps = engine, identity, steps

    def statistics(self, sequences: list[Sequence], surrogate: bool) -> dict[int, LayerStatistics]:
        with self.steps.step("statistics", num_tokens(sequences)) as advance:
            moments = run_sglang.capture(self.identity, self.engine, sequences, advance)
        statistics = {i: sums.finish() for i, sums in moments.items()}
        if not surrogate:
            return statistics
        q_moments = {i: layer.q_moment for i, layer in statistics.items()}
        with self.steps.step("surrogate weights", num_tokens(sequences)) as advance:
            found = run_sglang.surrogate(self.identity, self.engine, sequences, q_moments, advance)
        return {i: layer.with_surrogate(found[i]) for i, layer in statistics.items()}

    def search_clip(self, artifact: Artifact, sequences: list[Sequence]) -> dict[int, LayerTransforms]:
        with self.steps.step("clip search", num_tokens(sequences)) as advance:
            return run_sglang.search_clip(artifact, self.engine, sequences, advance)

    def measure(self, artifact: Artifact, sequences: list[Sequence]) -> dict[str, dict[int, LayerErrorSums]]:
        with self.steps.step("held-out error", num_tokens(sequences)) as advance:
            return run_sglang.measure(artifact, self.engine, sequences, advance)


def _into(sums: dict[int, ClipSearch] | dict[int, LayerErrorSums]) -> Callable[[LayerCapture], None]:
    """Adds a capture to its layer's sums; layers that stay in 16 bits have none."""

    def add(capture: LayerCapture) -> None:
        if capture.layer_id in sums:
            sums[capture.layer_id].add(capture)

    return add


def _check_shapes(capture: LayerCapture, identity: ModelIdentity) -> None:
    """Raise unless the layer has the geometry that the artifact will claim for every layer."""
    got = capture.k.shape[1], capture.k.shape[-1], capture.v.shape[-1]
    expected = identity.num_kv_heads, identity.head_dim, identity.v_head_dim
    if got != expected:
        raise OscarError(
            f"layer {capture.layer_id}: expected (num_kv_heads, head_dim, v_head_dim) = {expected} as in config.json, "
            f"got {got}; layers of different shapes are not supported"
        )
