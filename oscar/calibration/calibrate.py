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

import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch

import oscar
from oscar import support
from oscar.calibration import clip_search, run_sglang, saved, sources, text
from oscar.calibration.check import check, check_enough, max_length, needs_data
from oscar.calibration.heldout import total
from oscar.calibration.load_model import load_model, load_tokenizer
from oscar.calibration.options import CalibrationOptions
from oscar.calibration.run_sglang import Engine
from oscar.calibration.runner import Runner, SglangRunner, TransformersRunner
from oscar.calibration.saved import Statistics, mix, token_digest
from oscar.calibration.text import Sequence, num_tokens
from oscar.errors import OscarError
from oscar.format.artifact import Artifact
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms
from oscar.methods import METHODS
from oscar.methods.statistics import LayerStatistics, difficulty
from oscar.progress import Steps

logger = logging.getLogger(__name__)


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
        # Before the slow step, since lines and files may be bad.
        given = _read_text(options, identity, model_config) if options.text else None
        statistics = None if options.from_stats is None else _saved(options, options.from_stats, identity)
        inside = options.backend == "sglang"
        how = options.dtype, options.device, options.trust_remote_code
        model = None if inside else load_model(options.model, model_config, *how)
        if statistics is None:
            statistics = collect(options, identity, model, model_config, steps, given)
            if options.save_stats is not None:
                saved.save(statistics, options.save_stats)
        artifact = Artifact(
            model=identity,
            method=options.method,
            group_size=options.group_size or identity.head_dim,
            sink_tokens=options.sink_tokens,
            recent_tokens=options.recent_tokens,
            num_tokens=statistics.num_tokens if METHODS[options.method].needs_text else 0,
            layers=build(options, {i: s for i, s in statistics.layers.items() if i not in options.skip_layers}),
        )
        runner, held_out = _runner(options, identity, model, steps), statistics.held_out
        if options.clip == "search":
            chosen_on, held_out = halves(held_out)
            if not chosen_on:
                raise OscarError("--clip search: expected at least two held-out tokens, got fewer; raise --tokens")
            artifact.layers = runner.search_clip(artifact, chosen_on)
        errors = runner.measure(artifact, held_out)
        artifact.provenance = _provenance(options, statistics, held_out, errors)
        if unserved:
            artifact.provenance["not_served"] = [list(pair) for pair in unserved]
    return artifact


def build(options: CalibrationOptions, statistics: dict[int, LayerStatistics]) -> dict[int, LayerTransforms]:
    """Step 4: statistics -> transforms and clip quantiles, layer by layer."""
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

    if given is None and options.text:
        given = _read_text(options, identity, model_config)
    sequences = _write_text(options, model, model_config, steps) if given is None else given
    held_out = [s for s in sequences if s.held_out]
    fit = [s for s in sequences if not s.held_out] if needs_data(options) else []
    if needs_data(options):
        check_enough(num_tokens(fit), identity, "found in the text")
        runner = _runner(options, identity, model, steps)
        layers = runner.statistics(fit, surrogate=METHODS[options.method].needs_surrogate)
    else:
        layers = _no_statistics(identity)
    asked = {source.name: source.tokens for source in sources.parse(options.text, options.tokens)}
    whole = dict(mix(sequences))
    return Statistics(
        model=identity,
        layers=layers,
        held_out=held_out,
        num_tokens=num_tokens(fit),
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


def _runner(options: CalibrationOptions, identity: ModelIdentity, model, steps: Steps) -> Runner:
    """Transformers with this model, or SGLang where there is none in this process."""
    if model is not None:
        return TransformersRunner(model, identity, steps)
    return SglangRunner(_engine(options), identity, steps)


def _engine(options: CalibrationOptions) -> Engine:
    """How SGLang is started."""
    more = dict(options.engine_args)
    if options.json_model_override_args:
        more["json_model_override_args"] = json.dumps(dict(options.json_model_override_args))
    if options.trust_remote_code:
        more["trust_remote_code"] = True
    return Engine(options.model, options.tp, options.dtype, more)


def _read_text(options: CalibrationOptions, identity: ModelIdentity, model_config) -> list[Sequence]:
    """Step 2, the user's text: token sequences, the held-out ones marked."""
    tokenizer = load_tokenizer(options.model, options.trust_remote_code)
    if tokenizer is None:
        raise OscarError(f"{options.model}: expected a tokenizer beside the weights to read --text, found none")
    length = max_length(options, model_config)
    wanted = sources.parse(options.text, options.tokens)
    result = [s for source in wanted for s in sources.sequences(source, tokenizer, length, options.seed)]
    if needs_data(options):
        check_enough(num_tokens([s for s in result if not s.held_out]), identity, "found in the text")
    return result


def _write_text(options: CalibrationOptions, model, model_config, steps: Steps) -> list[Sequence]:
    """Step 2, text that the model writes."""
    tokenizer, length = load_tokenizer(options.model, options.trust_remote_code), max_length(options, model_config)
    with steps.step("write text", options.tokens) as advance:
        if model is None:

            def write(openings: list[list[int]], parts: int, length: int) -> torch.Tensor:
                return run_sglang.write(_engine(options), openings, parts, length, options.seed, advance)

            return text.from_engine(write, model_config, tokenizer, options.tokens, length, options.seed)
        return text.from_model(model, tokenizer, options.tokens, length, options.seed, advance)


def _no_statistics(identity: ModelIdentity) -> dict[int, LayerStatistics]:
    """Shapes alone, for methods that read nothing else."""
    shapes = [(identity.num_kv_heads, d, d) for d in (identity.head_dim, identity.v_head_dim)]
    k, v = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
    return dict.fromkeys(range(identity.num_layers), LayerStatistics(0, k, k, k[:, 0], v, v[:, 0], v))


def _saved(options: CalibrationOptions, path: str | Path, identity: ModelIdentity) -> Statistics:
    """Saved statistics; refused if they are not this model's or lack what the method reads."""
    statistics = saved.load(path, identity)
    lacks = any(layer.v_surrogate_moment is None for layer in statistics.layers.values())
    if METHODS[options.method].needs_surrogate and lacks:
        raise OscarError(
            f"{path}: expected the surrogate moments that --method {options.method} reads, found none; "
            f"save them with --save-stats and the same --method"
        )
    return statistics


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
            "tokens": num_tokens(held_out),
            "longest_sequence": max((len(s.tokens) for s in held_out), default=0),
            "layers": {str(i): _rounded(total(by_layer[i] for by_layer in errors.values())) for i in layers},
            "sources": [
                {"source": source, "tokens": tokens, **_rounded(total(errors[source].values()))}
                for source, tokens in mix(held_out)
            ],
            "all": _rounded(total(sums for by_layer in errors.values() for sums in by_layer.values())),
        },
    }


def _rounded(error) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in asdict(error).items()}
