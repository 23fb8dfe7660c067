"""Calibration: a model and text in, an artifact out. The steps, in order:

    1. read the model's identity and refuse what cannot work, before any weight is read
    2. load the model; take the user's text or let the model write some; hold a tenth back
    3. pass 1 over the text: second moments            (skipped by methods that need no data)
    4. pass 2 over the text: the surrogate's weighted V (only for the method that uses it)
    5. statistics -> matrices
    6. held-out text: what 2 bits cost, layer by layer

No activation is stored; memory is the model, one forward pass and O(layers * heads * head_dim^2) sums.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import oscar
from oscar import config, text, transform
from oscar.artifact import Artifact, ArtifactError, LayerTransforms, ModelIdentity
from oscar.capture import LayerCapture, UnsupportedModelError, capturing, check_supported
from oscar.codec import RowFormat
from oscar.heldout import LayerErrorSums, total
from oscar.statistics import LayerStatistics, MomentSums, NonFiniteError, SurrogateSums
from oscar.text import Sequence, TextError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIN_TOKENS_PER_DIM = 2
"""Fewest tokens a head dimension: below one the value moment is singular whatever the text."""


class CalibrationError(ValueError):
    """Calibration cannot go on, as one sentence for the user."""


CALIBRATION_ERRORS = (ArtifactError, CalibrationError, NonFiniteError, TextError, UnsupportedModelError)
"""What `calibrate` raises for input that cannot work; each message is one sentence to print as it is."""


@dataclass(frozen=True)
class CalibrationOptions:
    """Everything that decides an artifact's bytes.

    Attributes:
        model: model folder, Hugging Face layout.
        text: UTF-8 text files; none: the model writes its own text.
        tokens: budget over all text, held-out part included, spread evenly over files.
        method: a name in `transform.METHODS`.
        share_heads: one transform for all KV heads of a layer, as the public implementation has it.
        group_size: elements that share a centre and a step; None: head_dim.
        meta_dtype: type of centre and step.
        k_clip, v_clip: quantile of |x| in (0, 1]; None: the method's own.
        sink_tokens, recent_tokens: windows recorded and used to measure the error as served.
        max_length: longest sequence in tokens; the model's context length caps it.
        seed: of the text that the model writes.
        dtype: "float32", "bfloat16", "float16" or "auto": the checkpoint's own on an accelerator; on CPU float32 if the
            model then fits in half of the machine's memory.
        device: a torch device or "auto": the accelerator if there is one.
        progress: draw a progress bar on stderr.
    """

    model: str | Path
    text: tuple[str | Path, ...] = ()
    tokens: int = config.DEFAULT_CALIBRATION_TOKENS
    method: str = config.DEFAULT_METHOD
    share_heads: bool = False
    group_size: int | None = None
    meta_dtype: str = config.DEFAULT_META_DTYPE
    k_clip: float | None = None
    v_clip: float | None = None
    sink_tokens: int = config.DEFAULT_SINK_TOKENS
    recent_tokens: int = config.DEFAULT_RECENT_TOKENS
    max_length: int = config.DEFAULT_MAX_LENGTH
    seed: int = config.DEFAULT_SEED
    dtype: str = "auto"
    device: str = "auto"
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
    with _Steps(options.progress) as steps:
        model, tokenizer = _load(options, identity, model_config)
        sequences = _sequences(options, model, tokenizer, model_config, steps)
        fit = [s for s in sequences if not s.held_out]
        held_out = [s for s in sequences if s.held_out]
        statistics = _statistics(options, identity, model, fit, steps)
        layers = build(options, identity, statistics)
        errors = _measure(options, identity, model, layers, held_out, steps)
    needs_data = options.method not in transform.DATA_FREE
    return Artifact(
        model=identity,
        method=options.method,
        group_size=options.group_size or identity.head_dim,
        meta_dtype=options.meta_dtype,
        sink_tokens=options.sink_tokens,
        recent_tokens=options.recent_tokens,
        num_tokens=sum(len(s.tokens) for s in fit) if needs_data else 0,
        layers=layers,
        provenance=_provenance(options, model, fit if needs_data else [], held_out, errors),
    )


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
        raise CalibrationError(f"{options.model}: cannot read the model's configuration: {_first_line(error)}") from error
    check_supported(model_config)
    for path in options.text:
        text.check_file(Path(path))
    identity = ModelIdentity.from_path(options.model)
    try:
        formats(options, identity)
    except ValueError as error:
        raise CalibrationError(f"group size does not fit this model: {error}") from error
    if options.method not in transform.DATA_FREE:
        _check_enough(options.tokens, identity, "asked for")
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


def _load(options: CalibrationOptions, identity: ModelIdentity, model_config):
    """Step 2a: (model in eval mode, tokenizer or None)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    device = _device(options.device)
    dtype = _dtype(options, model_config, device)
    if identity.weight_digest is None:
        raise CalibrationError(f"{options.model}: expected weight files (*.safetensors), found none; check --model")
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            options.model, config=model_config, dtype=dtype, output_loading_info=True
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(options.model)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            tokenizer = None
    except Exception as error:  # every library below has errors of its own for a damaged file
        raise CalibrationError(f"{options.model}: cannot load the model: {_first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise CalibrationError(
            f"{options.model}: the weight files lack {missing[0]} and {len(missing) - 1} more; check the download"
        )
    if options.text and tokenizer is None:
        raise CalibrationError(f"{options.model}: expected a tokenizer beside the weights to read --text, found none")
    return model.to(device).eval(), tokenizer


def _sequences(options: CalibrationOptions, model, tokenizer, model_config, steps: _Steps) -> list[Sequence]:
    """Step 2b: token sequences, the held-out ones marked."""
    context = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    max_length = min(options.max_length, context or options.max_length)
    if not options.text:
        with steps.step("write text", options.tokens) as advance:
            return text.from_model(model, tokenizer, options.tokens, max_length, options.seed, advance)
    budget = max(1, options.tokens // len(options.text))
    return [s for path in options.text for s in text.from_file(path, tokenizer, budget, max_length)]


def _statistics(
    options: CalibrationOptions, identity: ModelIdentity, model, fit: list[Sequence], steps: _Steps
) -> dict[int, LayerStatistics]:
    """Steps 3 and 4: finished statistics by layer."""
    if options.method in transform.DATA_FREE:
        shapes = [(identity.num_kv_heads, d, d) for d in (identity.head_dim, identity.v_head_dim)]
        k, v = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
        empty = LayerStatistics(0, k, k, k[:, 0], v, v[:, 0], v)
        return dict.fromkeys(range(identity.num_layers), empty)
    _check_enough(sum(len(s.tokens) for s in fit), identity, "found in the text")

    moments = {i: MomentSums(i) for i in range(identity.num_layers)}

    def first(capture: LayerCapture) -> None:
        _check_shapes(capture, identity)
        moments[capture.layer_id].add(*capture.tokens())

    _run(model, first, fit, steps, "statistics, keys")
    statistics = {i: sums.finish() for i, sums in moments.items()}
    if options.method not in transform.NEEDS_SURROGATE:
        return statistics

    surrogates = {i: SurrogateSums(i, layer.q_moment) for i, layer in statistics.items()}

    def second(capture: LayerCapture) -> None:
        _, k, v, _ = capture.tokens()
        surrogates[capture.layer_id].add(k, v)

    _run(model, second, fit, steps, "statistics, values")
    return {i: layer.with_surrogate(surrogates[i].finish()) for i, layer in statistics.items()}


def _measure(
    options: CalibrationOptions,
    identity: ModelIdentity,
    model,
    layers: dict[int, LayerTransforms],
    held_out: list[Sequence],
    steps: _Steps,
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


def _run(model, observer: Callable[[LayerCapture], None], sequences: list[Sequence], steps: _Steps, description: str) -> None:
    """One captured forward pass over each sequence."""
    with steps.step(description, sum(len(s.tokens) for s in sequences)) as advance, capturing(model, observer) as run:
        for sequence in sequences:
            run(sequence.tokens.unsqueeze(0).to(model.device))
            advance(len(sequence.tokens))


def _provenance(options: CalibrationOptions, model, fit: list[Sequence], held_out: list[Sequence], errors: dict) -> dict:
    """JSON-able record: nothing of the machine in it but what changes the numbers."""
    import transformers

    layers = list(next(iter(errors.values()))) if errors else []
    return {
        "seed": options.seed,
        "share_heads": options.share_heads,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "data": [{"source": name, "tokens": count} for name, count in _mix(fit)],
        "longest_sequence": max((len(s.tokens) for s in fit), default=0),
        "token_digest": _token_digest([*fit, *held_out]),
        "versions": {"oscar": oscar.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "held_out": {
            "tokens": sum(len(s.tokens) for s in held_out),
            "longest_sequence": max((len(s.tokens) for s in held_out), default=0),
            "layers": {str(i): _rounded(total(by_layer[i] for by_layer in errors.values())) for i in layers},
            "sources": [
                {"source": source, "tokens": tokens, **_rounded(total(errors[source].values()))}
                for source, tokens in _mix(held_out)
            ],
            "all": _rounded(total(sums for by_layer in errors.values() for sums in by_layer.values())),
        },
    }


class _Steps:
    """Progress bars on stderr, one a step, drawn from the first step on; or nothing."""

    def __init__(self, show: bool):
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True)) if show else None

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *_) -> None:
        if self._progress is not None and self._progress.live.is_started:
            self._progress.stop()

    @contextmanager
    def step(self, description: str, total_tokens: int) -> Iterator[Callable[[int], None]]:
        """Open a bar over total_tokens; yields advance(tokens)."""
        if self._progress is None:
            yield lambda tokens: None
            return
        self._progress.start()
        task = self._progress.add_task(description, total=total_tokens)
        yield lambda tokens: self._progress.advance(task, tokens)


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


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CalibrationError(f"device {name!r}: expected a device that torch can use here: {_first_line(error)}") from error
    return device


def _dtype(options: CalibrationOptions, model_config, device: torch.device) -> torch.dtype:
    own = model_config.get_text_config(decoder=True).dtype or model_config.dtype or torch.float32
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    if device.type != "cpu" or own == torch.float32:
        return own
    weights = sum(f.stat().st_size for f in Path(options.model).glob("*.safetensors"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.float32 if weights / own.itemsize * 4 <= memory / 2 else own


def _mix(sequences: list[Sequence]) -> list[tuple[str, int]]:
    """(source, tokens) in order of first appearance."""
    counts: dict[str, int] = {}
    for s in sequences:
        counts[s.source] = counts.get(s.source, 0) + len(s.tokens)
    return list(counts.items())


def _token_digest(sequences: Iterable[Sequence]) -> str:
    """SHA-256 over all token ids: two artifacts with the same digest saw the same text."""
    digest = hashlib.sha256()
    for s in sequences:
        digest.update(len(s.tokens).to_bytes(8, "little") + s.tokens.numpy().tobytes())
    return digest.hexdigest()


def _rounded(error) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in asdict(error).items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
