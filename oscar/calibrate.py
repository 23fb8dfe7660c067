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

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import oscar
from oscar import clip_search, config, saved_statistics, sglang_capture, sources, text, transform
from oscar.artifact import Artifact, ArtifactError, LayerTransforms, ModelIdentity
from oscar.capture import LayerCapture, UnsupportedModelError, capturing, check_supported
from oscar.codec import RowFormat
from oscar.heldout import LayerErrorSums, total
from oscar.load_model import DTYPES, LoadError, first_line, load_model, load_tokenizer
from oscar.progress import Steps
from oscar.saved_statistics import Statistics, mix, token_digest
from oscar.statistics import LayerStatistics, MomentSums, NonFiniteError, SurrogateSums, output_moment
from oscar.text import Sequence, TextError

CLIPS = ("paper", "search")
BACKENDS = ("hf", "sglang")
MIN_TOKENS_PER_DIM = 2
"""Fewest tokens a head dimension: below one the value moment is singular whatever the text."""


class CalibrationError(ValueError):
    """Calibration cannot go on, as one sentence for the user."""


CALIBRATION_ERRORS = (
    ArtifactError,
    CalibrationError,
    LoadError,
    NonFiniteError,
    TextError,
    UnsupportedModelError,
    sglang_capture.EngineError,
)
"""What `calibrate` raises for input that cannot work; each message is one sentence to print as it is."""


@dataclass(frozen=True)
class CalibrationOptions:
    """Everything that decides an artifact's bytes.

    Attributes:
        model: model folder, Hugging Face layout.
        text: text files, "FILE" or "FILE:TOKENS" each (see `oscar.sources`); none: the model writes its own text.
        tokens: budget over all text, held-out part included; where every file has a budget of its own, their sum counts.
        method: a name in `transform.METHODS`.
        share_heads: one transform for all KV heads of a layer, as the public implementation has it.
        group_size: elements that share a centre and a step; None: head_dim.
        meta_dtype: type of centre and step.
        clip: "paper": the method's fixed quantiles; "search": chosen per layer, head and side on held-out text.
        k_clip, v_clip: fixed quantile of |x| in (0, 1] for one side; None: the method's own.
        sink_tokens, recent_tokens: windows recorded and used to measure the error as served.
        max_length: longest sequence in tokens; the model's context length caps it.
        seed: of the text that the model writes, and of the order in which JSON lines are taken.
        dtype: "float32", "bfloat16", "float16" or "auto": the checkpoint's own on an accelerator; on CPU float32 if the
            model then fits in half of the machine's memory.
        device: a torch device or "auto": the accelerator if there is one.
        backend: "hf": Transformers runs the model; "sglang": SGLang does (see `oscar.sglang_capture`).
        tp: tensor-parallel ranks of SGLang.
        engine: further arguments of SGLang's engine, (name, value) pairs.
        save_stats: also write the statistics to this file.
        from_stats: take statistics and held-out text from this file instead of `text`, `tokens`, `max_length` and `seed`.
        progress: draw a progress bar on stderr.
    """

    model: str | Path
    text: tuple[str | Path, ...] = ()
    tokens: int = config.DEFAULT_CALIBRATION_TOKENS
    method: str = config.DEFAULT_METHOD
    share_heads: bool = False
    group_size: int | None = None
    meta_dtype: str = config.DEFAULT_META_DTYPE
    clip: str = "paper"
    k_clip: float | None = None
    v_clip: float | None = None
    sink_tokens: int = config.DEFAULT_SINK_TOKENS
    recent_tokens: int = config.DEFAULT_RECENT_TOKENS
    max_length: int = config.DEFAULT_MAX_LENGTH
    seed: int = config.DEFAULT_SEED
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "hf"
    tp: int = 1
    engine: tuple[tuple[str, object], ...] = ()
    save_stats: str | Path | None = None
    from_stats: str | Path | None = None
    progress: bool = True


def calibrate(options: CalibrationOptions) -> Artifact:
    """Calibrate a model; the same options on the same machine and software give the same artifact, byte for byte.

    Args:
        options: see CalibrationOptions.
    Returns:
        The artifact, with held-out errors in its provenance; `artifact.save` writes it.
    Raises:
        One of CALIBRATION_ERRORS: the input cannot work, as one sentence.
    """
    identity, model_config = check(options)
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
        layers = build(options, identity, statistics.layers)
        held_out = statistics.held_out
        if options.clip == "search":
            chosen_on, held_out = halves(held_out)
            if not chosen_on:
                raise CalibrationError("--clip search: expected at least two held-out tokens, got fewer; raise --tokens")
            layers = _search_clip(options, identity, model, layers, chosen_on, steps)
        artifact = Artifact(
            model=identity,
            method=options.method,
            group_size=options.group_size or identity.head_dim,
            meta_dtype=options.meta_dtype,
            sink_tokens=options.sink_tokens,
            recent_tokens=options.recent_tokens,
            num_tokens=0 if options.method in transform.DATA_FREE else statistics.num_tokens,
            layers=layers,
        )
        if inside:
            errors = sglang_capture.measure(artifact, _engine(options), held_out)
        else:
            errors = _measure(options, identity, model, layers, held_out, steps)
        artifact.provenance = _provenance(options, statistics, held_out, errors)
    return artifact


def check(options: CalibrationOptions):
    """Step 1: everything that can be refused without reading a weight.

    Returns:
        (ModelIdentity, the model's Hugging Face configuration).
    Raises:
        One of CALIBRATION_ERRORS.
    """
    from transformers import AutoConfig

    if options.method not in transform.METHODS:
        raise CalibrationError(f"method must be one of {', '.join(transform.METHODS)}, got {options.method!r}")
    if options.dtype not in ("auto", *DTYPES):
        raise CalibrationError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {options.dtype!r}")
    for name in ("tokens", "max_length"):
        if getattr(options, name) <= 0:
            raise CalibrationError(f"{name} must be positive, got {getattr(options, name)}")
    for name in ("sink_tokens", "recent_tokens"):
        if getattr(options, name) < 0:
            raise CalibrationError(f"{name} must not be negative, got {getattr(options, name)}")
    for name in ("k_clip", "v_clip"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= 1:
            raise CalibrationError(f"{name} must be in (0, 1], got {value}")
    if not Path(options.model, "config.json").is_file():  # not left to the library, which would ask the network
        raise CalibrationError(f"{options.model}: expected a model folder with config.json, found none; check the path")
    try:
        model_config = AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError, KeyError) as error:
        raise CalibrationError(f"{options.model}: cannot read the model's configuration: {first_line(error)}") from error
    check_supported(model_config)
    if options.clip not in CLIPS:
        raise CalibrationError(f"clip must be one of {', '.join(CLIPS)}, got {options.clip!r}")
    _check_backend(options)
    if options.clip == "search" and (options.k_clip is not None or options.v_clip is not None):
        raise CalibrationError("clip: expected either a search or fixed quantiles, got both")
    if options.from_stats is not None and (options.text or options.save_stats is not None):
        other = "--text" if options.text else "--save-stats"
        raise CalibrationError(f"--from-stats {options.from_stats}: expected no {other} beside it; the file has its own text")
    for source in sources.parse(options.text, options.tokens):
        sources.check(source)
    identity = ModelIdentity.from_path(options.model)
    try:
        formats(options, identity)
    except ValueError as error:
        raise CalibrationError(f"group size does not fit this model: {error}") from error
    if identity.weight_digest is None:
        raise CalibrationError(f"{options.model}: expected weight files (*.safetensors), found none; check --model")
    if _needs_data(options):
        _check_enough(
            sum(s.tokens for s in sources.parse(options.text, options.tokens)) or options.tokens, identity, "asked for"
        )
    return identity, model_config


def formats(options: CalibrationOptions, identity: ModelIdentity) -> tuple[RowFormat, RowFormat]:
    """Row formats of K and V; a group as wide as a K row means a whole row on the V side too."""
    size = options.group_size
    v_size = identity.v_head_dim if size in (None, identity.head_dim) else size
    return RowFormat(identity.head_dim, size, options.meta_dtype), RowFormat(identity.v_head_dim, v_size, options.meta_dtype)


def build(
    options: CalibrationOptions, identity: ModelIdentity, statistics: dict[int, LayerStatistics]
) -> dict[int, LayerTransforms]:
    """Step 5: statistics -> transforms and clip ratios, layer by layer."""
    own_k, own_v = transform.default_clip(options.method)
    k_clip = own_k if options.k_clip is None else options.k_clip
    v_clip = own_v if options.v_clip is None else options.v_clip
    layers = {}
    for layer_id, layer in sorted(statistics.items()):
        k_transform, v_transform = transform.METHODS[options.method](layer, options.share_heads)
        layers[layer_id] = LayerTransforms(
            k_transform=k_transform.float().contiguous(),
            v_transform=v_transform.float().contiguous(),
            k_clip=torch.full((identity.num_kv_heads,), k_clip),
            v_clip=torch.full((identity.num_kv_heads,), v_clip),
        )
    return layers


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
    fit = [s for s in sequences if not s.held_out] if _needs_data(options) else []
    layers = _statistics(options, identity, model, fit, steps)
    whole = dict(mix(sequences))
    return Statistics(
        model=identity,
        layers=layers,
        held_out=held_out,
        num_tokens=sum(len(s.tokens) for s in fit),
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


def _check_backend(options: CalibrationOptions) -> None:
    """Refuse what a backend cannot do."""
    if options.backend not in BACKENDS:
        raise CalibrationError(f"backend must be one of {', '.join(BACKENDS)}, got {options.backend!r}")
    if options.backend == "hf":
        if options.tp != 1 or options.engine:
            raise CalibrationError("--tp and --engine-args are for --backend sglang; expected neither with --backend hf")
        return
    if options.tp < 1:
        raise CalibrationError(f"tp must be positive, got {options.tp}")
    if not options.text and options.from_stats is None:
        raise CalibrationError("--backend sglang: expected --text, got none; only --backend hf lets the model write its own")
    for name, refused in (("--clip search", options.clip == "search"), ("--device", options.device != "auto")):
        if refused:
            raise CalibrationError(f"--backend sglang does not support {name}; use --backend hf")
    if options.method in transform.NEEDS_SURROGATE:
        raise CalibrationError(
            f"--backend sglang reads the text once, --method {options.method} needs it twice; use --backend hf"
        )
    if importlib.util.find_spec("sglang") is None:
        raise CalibrationError("--backend sglang: expected the package sglang, found none; install it or use --backend hf")


def _engine(options: CalibrationOptions) -> sglang_capture.Engine:
    return sglang_capture.Engine(options.model, options.tp, options.dtype, dict(options.engine))


def _needs_data(options: CalibrationOptions) -> bool:
    return options.method not in transform.DATA_FREE or options.save_stats is not None


def _max_length(options: CalibrationOptions, model_config) -> int:
    context = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(options.max_length, context or options.max_length)


def _read_text(options: CalibrationOptions, identity: ModelIdentity, model_config) -> list[Sequence]:
    """Step 2, the user's text: token sequences, the held-out ones marked."""
    tokenizer = load_tokenizer(options.model)
    if tokenizer is None:
        raise CalibrationError(f"{options.model}: expected a tokenizer beside the weights to read --text, found none")
    length = _max_length(options, model_config)
    wanted = sources.parse(options.text, options.tokens)
    result = [s for source in wanted for s in sources.sequences(source, tokenizer, length, options.seed)]
    if _needs_data(options):
        _check_enough(sum(len(s.tokens) for s in result if not s.held_out), identity, "found in the text")
    return result


def _write_text(options: CalibrationOptions, model, model_config, steps: Steps) -> list[Sequence]:
    """Step 2, text that the model writes."""
    tokenizer, length = load_tokenizer(options.model), _max_length(options, model_config)
    with steps.step("write text", options.tokens) as advance:
        return text.from_model(model, tokenizer, options.tokens, length, options.seed, advance)


def _statistics(
    options: CalibrationOptions, identity: ModelIdentity, model, fit: list[Sequence], steps: Steps
) -> dict[int, LayerStatistics]:
    """Step 3: finished statistics by layer."""
    if not _needs_data(options):
        return _no_statistics(identity)
    _check_enough(sum(len(s.tokens) for s in fit), identity, "found in the text")
    if model is None:
        moments = sglang_capture.capture(identity, _engine(options), fit)
        return {i: sums.finish() for i, sums in moments.items()}
    moments = {i: MomentSums(i) for i in range(identity.num_layers)}

    def observe(capture: LayerCapture) -> None:
        _check_shapes(capture, identity)
        sums = moments[capture.layer_id]
        if sums.output_moment is None and capture.output_weight is not None:
            sums.output_moment = output_moment(capture.output_weight, identity.num_kv_heads, identity.v_head_dim)
        sums.add(*capture.tokens())

    _run(model, observe, fit, steps, "statistics")
    statistics = {i: sums.finish() for i, sums in moments.items()}
    if options.method not in transform.NEEDS_SURROGATE:
        return statistics

    surrogates = {i: SurrogateSums(i, layer.q_moment) for i, layer in statistics.items()}

    def again(capture: LayerCapture) -> None:
        _, k, v, _ = capture.tokens()
        surrogates[capture.layer_id].add(k, v)

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
    if options.method in transform.NEEDS_SURROGATE and lacks:
        raise CalibrationError(
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
    _run(model, lambda capture: searches[capture.layer_id].add(capture), sequences, steps, "clip search")
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
            sums[capture.layer_id].add(capture)

        _run(model, observe, [s for s in held_out if s.source == source], steps, "held-out error")
    return result


def _run(model, observer: Callable[[LayerCapture], None], sequences: list[Sequence], steps: Steps, description: str) -> None:
    """One captured forward pass over each sequence."""
    with steps.step(description, sum(len(s.tokens) for s in sequences)) as advance, capturing(model, observer) as run:
        for sequence in sequences:
            run(sequence.tokens.unsqueeze(0).to(model.device))
            advance(len(sequence.tokens))


def _provenance(options: CalibrationOptions, statistics: Statistics, held_out: list[Sequence], errors: dict) -> dict:
    """JSON-able record: nothing of the machine in it but what changes the numbers."""
    layers = list(next(iter(errors.values()))) if errors else []
    used = options.method not in transform.DATA_FREE
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
        "shape": {str(i): transform.shape(layer) for i, layer in statistics.layers.items() if layer.num_tokens},
        "held_out": {
            "tokens": sum(len(s.tokens) for s in held_out),
            "longest_sequence": max((len(s.tokens) for s in held_out), default=0),
            "layers": {str(i): _rounded(total(by_layer[i] for by_layer in errors.values())) for i in layers},
            "sources": [
                {"source": source, "tokens": tokens, **_rounded(total(errors[source].values()))}
                for source, tokens in mix(held_out)
            ],
            "all": _rounded(total(sums for by_layer in errors.values() for sums in by_layer.values())),
        },
    }


def _check_enough(tokens: int, identity: ModelIdentity, where: str) -> None:
    need = MIN_TOKENS_PER_DIM * max(identity.head_dim, identity.v_head_dim)
    if tokens < need:
        raise CalibrationError(
            f"too few tokens: expected at least {need} for head_dim {identity.head_dim}, got {tokens} {where}; "
            "give more text or a larger --tokens"
        )


def _check_shapes(capture: LayerCapture, identity: ModelIdentity) -> None:
    """Raise unless the layer has the geometry that the artifact will claim for every layer."""
    got = capture.k.shape[1], capture.k.shape[-1], capture.v.shape[-1]
    expected = identity.num_kv_heads, identity.head_dim, identity.v_head_dim
    if got != expected:
        raise UnsupportedModelError(
            f"layer {capture.layer_id}: expected (num_kv_heads, head_dim, v_head_dim) = {expected} as in config.json, "
            f"got {got}; layers of different shapes are not supported"
        )


def _rounded(error) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in asdict(error).items()}
