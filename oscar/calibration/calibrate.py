"""Calibration: a model and text in, an artifact out. The steps, in order:

    1. read the model's identity and refuse what cannot work, before any weight is read
    2. load the model; take the user's text or let the model write some; hold a tenth back
    3. one pass over the text: second moments (skipped by methods that need no data; `oscar-surrogate` takes two); or read
       saved ones instead of 2 and 3
    4. statistics -> matrices
    5. if asked, half of the held-out text: the clip quantiles that change attention's output least
    6. the (other half of the) held-out text: what 2 bits cost, layer by layer

No activation is stored; memory is the model, one forward pass and O(layers * heads * head_dim^2) sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict

import torch

import oscar
from oscar import support
from oscar.calibration import clip_search, sources, text
from oscar.calibration import run_sglang as sglang_capture
from oscar.calibration import saved as saved_statistics
from oscar.calibration.heldout import LayerErrorSums, total
from oscar.calibration.load_model import load_model, load_tokenizer
from oscar.calibration.options import CalibrationOptions, check, check_enough, formats, max_length, needs_data
from oscar.calibration.run_transformers import LayerCapture, capturing
from oscar.calibration.saved import Statistics, mix, token_digest
from oscar.calibration.text import Sequence
from oscar.errors import OscarError
from oscar.format.artifact import Artifact
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms
from oscar.methods import METHODS
from oscar.methods.statistics import LayerStatistics, MomentSums, SurrogateSums, difficulty, output_moment
from oscar.progress import Steps

logger = logging.getLogger(__name__)

TOKENS_AT_ONCE = 1024
"""Tokens whose outer products are summed together: any number gives the same sums, and their float64 copies stay in the cache
(a third less CPU time than 4096 at head_dim 128)."""


def calibrate(options: CalibrationOptions) -> Artifact:
    """Calibrate a model; the same options on the same machine and software give the same artifact, byte for byte.

    Args:
        options: see CalibrationOptions.
    Returns:
        The artifact, with held-out errors in its provenance; `artifact.save` writes it.
    Raises:
        OscarError: the input cannot work, as one sentence.
    """
    identity, model_config = check(options)
    unserved = support.refused(model_config)
    if unserved:
        logger.warning("oscar: %s", support.not_served(unserved))
    with Steps(options.progress) as steps:
        inside = options.backend == "sglang"
        # Before the slow step, since lines and files may be bad.
        given = _read_text(options, identity, model_config) if options.text else None
        statistics = None if options.from_stats is None else _saved(options, identity)
        model = None if inside else load_model(options.model, model_config, options.dtype, options.device)
        if statistics is None:
            statistics = collect(options, identity, model, model_config, steps, given)
            if options.save_stats is not None:
                saved_statistics.save(statistics, options.save_stats)
        coded = {i: layer for i, layer in statistics.layers.items() if i not in options.skip_layers}
        layers = build(options, coded)
        artifact = Artifact(
            model=identity,
            method=options.method,
            group_size=options.group_size or identity.head_dim,
            sink_tokens=options.sink_tokens,
            recent_tokens=options.recent_tokens,
            num_tokens=statistics.num_tokens if METHODS[options.method].needs_text else 0,
            layers=layers,
        )
        held_out = statistics.held_out
        if options.clip == "search":
            chosen_on, held_out = halves(held_out)
            if not chosen_on:
                raise OscarError("--clip search: expected at least two held-out tokens, got fewer; raise --tokens")
            if inside:
                with steps.step("clip search", _num_tokens(chosen_on)) as advance:
                    artifact.layers = sglang_capture.search_clip(artifact, _engine(options), chosen_on, advance)
            else:
                artifact.layers = _search_clip(options, identity, model, layers, chosen_on, steps)
        if inside:
            with steps.step("held-out error", _num_tokens(held_out)) as advance:
                errors = sglang_capture.measure(artifact, _engine(options), held_out, advance)
        else:
            errors = _measure(options, identity, model, artifact.layers, held_out, steps)
        artifact.provenance = _provenance(options, statistics, held_out, errors)
        if unserved:
            artifact.provenance["not_served"] = [list(pair) for pair in unserved]
    return artifact


def build(options: CalibrationOptions, statistics: dict[int, LayerStatistics]) -> dict[int, LayerTransforms]:
    """Step 5: statistics -> transforms and clip ratios, layer by layer."""
    method, clip = METHODS[options.method], (options.k_clip, options.v_clip)
    return {
        layer_id: method(layer, options.share_heads, clip).map(lambda x: x.float().contiguous())
        for layer_id, layer in sorted(statistics.items())
    }


def collect(
    options: CalibrationOptions,
    identity: ModelIdentity,
    model,
    model_config,
    steps: Steps,
    given: list[Sequence] | None = None,
) -> Statistics:
    """Steps 2 and 3: the text, and what the model's attention consumes while it is read.

    Args:
        options, identity, model_config: as `check` returned them.
        model: as `load_model` returned it; None: SGLang runs it.
        steps: where progress is drawn.
        given: the user's text, read already; None: it is read, or the model writes some.
    """
    import transformers

    if given is None:
        given = (
            _read_text(options, identity, model_config) if options.text else _write_text(options, model, model_config, steps)
        )
    sequences, asked = given, {source.name: source.tokens for source in sources.parse(options.text, options.tokens)}
    held_out = [s for s in sequences if s.held_out]
    fit = [s for s in sequences if not s.held_out] if needs_data(options) else []
    layers = _statistics(options, identity, model, fit, steps)
    whole = dict(mix(sequences))
    return Statistics(
        model=identity,
        layers=layers,
        held_out=held_out,
        num_tokens=_num_tokens(fit),
        data=[{"source": s, "tokens": n, "asked": round(n * asked.get(s, whole[s]) / whole[s])} for s, n in mix(fit)],
        longest_sequence=max((len(s.tokens) for s in fit), default=0),
        token_digest=token_digest([*fit, *held_out]),
        seed=options.seed,
        dtype=options.dtype if model is None else str(model.dtype).removeprefix("torch."),
        device=f"{options.tp} ranks" if model is None else model.device.type,
        backend=options.backend,
        versions={"oscar": oscar.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    )


def halves(held_out: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Each held-out sequence cut in two: the first halves to choose on, the second halves to report on."""
    cut = [(s, len(s.tokens) // 2) for s in held_out]
    first = [Sequence(s.tokens[:n], s.source, True) for s, n in cut if n]
    return first, [Sequence(s.tokens[n:], s.source, True) for s, n in cut]


def _engine(options: CalibrationOptions) -> sglang_capture.Engine:
    return sglang_capture.Engine(options.model, options.tp, options.dtype, dict(options.engine))


def _read_text(options: CalibrationOptions, identity: ModelIdentity, model_config) -> list[Sequence]:
    """Step 2, the user's text: token sequences, the held-out ones marked."""
    tokenizer = load_tokenizer(options.model)
    if tokenizer is None:
        raise OscarError(f"{options.model}: expected a tokenizer beside the weights to read --text, found none")
    length = max_length(options, model_config)
    wanted = sources.parse(options.text, options.tokens)
    result = [s for source in wanted for s in sources.sequences(source, tokenizer, length, options.seed)]
    if needs_data(options):
        check_enough(sum(len(s.tokens) for s in result if not s.held_out), identity, "found in the text")
    return result


def _write_text(options: CalibrationOptions, model, model_config, steps: Steps) -> list[Sequence]:
    """Step 2, text that the model writes."""
    tokenizer, length = load_tokenizer(options.model), max_length(options, model_config)
    with steps.step("write text", options.tokens) as advance:
        return text.from_model(model, tokenizer, options.tokens, length, options.seed, advance)


def _statistics(
    options: CalibrationOptions, identity: ModelIdentity, model, fit: list[Sequence], steps: Steps
) -> dict[int, LayerStatistics]:
    """Step 3: finished statistics by layer."""
    if not needs_data(options):
        return _no_statistics(identity)
    check_enough(_num_tokens(fit), identity, "found in the text")
    if model is None:
        with steps.step("statistics", _num_tokens(fit)) as advance:
            moments = sglang_capture.capture(identity, _engine(options), fit, advance)
        statistics = {i: sums.finish() for i, sums in moments.items()}
        if not METHODS[options.method].needs_surrogate:
            return statistics
        q_moments = {i: layer.q_moment for i, layer in statistics.items()}
        with steps.step("surrogate weights", _num_tokens(fit)) as advance:
            found = sglang_capture.surrogate(identity, _engine(options), fit, q_moments, advance)
        return {i: layer.with_surrogate(found[i]) for i, layer in statistics.items()}
    moments = {i: MomentSums(i) for i in range(identity.num_layers)}

    def observe(capture: LayerCapture) -> None:
        _check_shapes(capture, identity)
        sums = moments[capture.layer_id]
        if sums.output_moment is None and capture.output_weight is not None:
            sums.output_moment = output_moment(capture.output_weight, identity.num_kv_heads, identity.v_head_dim)
        # In parts: the float64 copies of a long sequence would outgrow the forward pass.
        for part in zip(*(x.split(TOKENS_AT_ONCE) for x in capture.tokens()), strict=True):
            sums.add(*part)

    _run(model, observe, fit, steps, "statistics")
    statistics = {i: sums.finish() for i, sums in moments.items()}
    if not METHODS[options.method].needs_surrogate:
        return statistics

    surrogates = {i: SurrogateSums(i, layer.q_moment) for i, layer in statistics.items()}

    def again(capture: LayerCapture) -> None:
        _, k, v, _ = capture.tokens()
        for part in zip(k.split(TOKENS_AT_ONCE), v.split(TOKENS_AT_ONCE), strict=True):
            surrogates[capture.layer_id].add(*part)

    _run(model, again, fit, steps, "surrogate weights")
    return {i: layer.with_surrogate(surrogates[i].finish()) for i, layer in statistics.items()}


def _no_statistics(identity: ModelIdentity) -> dict[int, LayerStatistics]:
    """Shapes alone, for methods that read nothing else."""
    shapes = [(identity.num_kv_heads, d, d) for d in (identity.head_dim, identity.v_head_dim)]
    k, v = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
    return dict.fromkeys(range(identity.num_layers), LayerStatistics(0, k, k, k[:, 0], v, v[:, 0], v))


def _saved(options: CalibrationOptions, identity: ModelIdentity) -> Statistics:
    """Saved statistics; refused if they are not this model's or lack what the method reads."""
    statistics = saved_statistics.load(options.from_stats, identity)
    lacks = any(layer.v_surrogate_moment is None for layer in statistics.layers.values())
    if METHODS[options.method].needs_surrogate and lacks:
        raise OscarError(
            f"{options.from_stats}: expected the surrogate moments that --method {options.method} reads, found none; "
            f"save them with --save-stats and the same --method"
        )
    return statistics


def _search_clip(
    options: CalibrationOptions,
    identity: ModelIdentity,
    model,
    layers: dict[int, LayerTransforms],
    sequences: list[Sequence],
    steps: Steps,
) -> dict[int, LayerTransforms]:
    """Step 5: the same transforms with the best quantiles of the grid."""
    windows = options.sink_tokens, options.recent_tokens
    searches = {i: clip_search.ClipSearch(layer, *formats(options, identity), *windows) for i, layer in layers.items()}

    def observe(capture: LayerCapture) -> None:
        if capture.layer_id in searches:
            searches[capture.layer_id].add(capture)

    _run(model, observe, sequences, steps, "clip search")
    return {i: search.best() for i, search in searches.items()}


def _measure(
    options: CalibrationOptions,
    identity: ModelIdentity,
    model,
    layers: dict[int, LayerTransforms],
    held_out: list[Sequence],
    steps: Steps,
) -> dict[str, dict[int, LayerErrorSums]]:
    """Step 6: error sums by source and layer."""
    k_format, v_format = formats(options, identity)
    windows = options.sink_tokens, options.recent_tokens
    result = {}
    for source in dict.fromkeys(s.source for s in held_out):
        result[source] = {i: LayerErrorSums(layer, k_format, v_format, *windows) for i, layer in layers.items()}

        def observe(capture: LayerCapture, sums: dict[int, LayerErrorSums] = result[source]) -> None:
            _check_shapes(capture, identity)
            if capture.layer_id in sums:
                sums[capture.layer_id].add(capture)

        _run(model, observe, [s for s in held_out if s.source == source], steps, "held-out error")
    return result


def _run(model, observer: Callable[[LayerCapture], None], sequences: list[Sequence], steps: Steps, description: str) -> None:
    """One captured forward pass over each sequence."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers

    def observe(capture: LayerCapture) -> None:
        observer(capture)
        advance(capture.q.shape[2] / num_layers)

    with steps.step(description, _num_tokens(sequences)) as advance, capturing(model, observe) as run:
        for sequence in sequences:
            run(sequence.tokens.unsqueeze(0).to(model.device))


def _num_tokens(sequences: list[Sequence]) -> int:
    return sum(len(s.tokens) for s in sequences)


def _provenance(options: CalibrationOptions, statistics: Statistics, held_out: list[Sequence], errors: dict) -> dict:
    """JSON-able record: nothing of the machine in it but what changes the numbers."""
    layers = list(next(iter(errors.values()))) if errors else []
    used = METHODS[options.method].needs_text
    return {
        "seed": statistics.seed,
        "share_heads": options.share_heads,
        "clip": {"how": options.clip, "grid": list(clip_search.GRID)} if options.clip == "search" else {"how": options.clip},
        "dtype": statistics.dtype,
        "device": statistics.device,
        "backend": statistics.backend,
        "data": statistics.data if used else [],
        "longest_sequence": statistics.longest_sequence if used else 0,
        "token_digest": statistics.token_digest,
        "versions": statistics.versions,
        "shape": {str(i): difficulty(layer) for i, layer in statistics.layers.items() if layer.num_tokens},
        "held_out": {
            "tokens": _num_tokens(held_out),
            "longest_sequence": max((len(s.tokens) for s in held_out), default=0),
            "layers": {str(i): _rounded(total(by_layer[i] for by_layer in errors.values())) for i in layers},
            "sources": [
                {"source": source, "tokens": tokens, **_rounded(total(errors[source].values()))}
                for source, tokens in mix(held_out)
            ],
            "all": _rounded(total(sums for by_layer in errors.values() for sums in by_layer.values())),
        },
    }


def _check_shapes(capture: LayerCapture, identity: ModelIdentity) -> None:
    """Raise unless the layer has the geometry that the artifact will claim for every layer."""
    got = capture.k.shape[1], capture.k.shape[-1], capture.v.shape[-1]
    expected = identity.num_kv_heads, identity.head_dim, identity.v_head_dim
    if got != expected:
        raise OscarError(
            f"layer {capture.layer_id}: expected (num_kv_heads, head_dim, v_head_dim) = {expected} as in config.json, "
            f"got {got}; layers of different shapes are not supported"
        )


def _rounded(error) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in asdict(error).items()}
