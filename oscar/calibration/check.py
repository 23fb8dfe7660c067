"""Every refusal of a calibration that needs no weight read, and what follows from its options alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from oscar import config
from oscar.calibration import run_sglang, sources
from oscar.calibration.load_model import DTYPES, first_line, override_config
from oscar.calibration.options import BACKENDS, CLIPS, CalibrationOptions
from oscar.calibration.run_transformers import check_supported
from oscar.errors import OscarError
from oscar.format.codec import RowFormat
from oscar.format.identity import ModelIdentity
from oscar.methods import METHODS

MIN_TOKENS_PER_DIM = 2
"""Fewest tokens a head dimension: below one the value moment is singular whatever the text."""


def check(options: CalibrationOptions):
    """Refuse everything that can be refused without reading a weight.

    Returns:
        (ModelIdentity, the model's Hugging Face configuration).
    Raises:
        OscarError: the input cannot work, as one sentence.
    """
    from transformers import AutoConfig

    if options.method not in METHODS:
        raise OscarError(f"method must be one of {', '.join(METHODS)}, got {options.method!r}")
    if options.dtype not in ("auto", *DTYPES):
        raise OscarError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {options.dtype!r}")
    for name in ("tokens", "max_length"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise OscarError(f"{name} must be positive, got {value}")
    for name in ("sink_tokens", "recent_tokens"):
        if getattr(options, name) < 0:
            raise OscarError(f"{name} must not be negative, got {getattr(options, name)}")
    for name in ("k_clip", "v_clip"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= 1:
            raise OscarError(f"{name} must be in (0, 1], got {value}")
    if not Path(options.model, "config.json").is_file():  # not left to the library, which would ask the network
        raise OscarError(f"{options.model}: expected a model folder with config.json, found none; check the path")
    try:
        model_config = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
        override_config(model_config, options.json_model_override_args)
    except (OSError, ValueError, KeyError) as error:
        raise OscarError(f"{options.model}: cannot read the model's configuration: {first_line(error)}") from error
    check_supported(model_config)
    if options.clip not in CLIPS:
        raise OscarError(f"clip must be one of {', '.join(CLIPS)}, got {options.clip!r}")
    _check_backend(options)
    if options.clip == "search" and (options.k_clip is not None or options.v_clip is not None):
        raise OscarError("clip: expected either a search or fixed quantiles, got both")
    if options.from_stats is not None and (options.text or options.save_stats is not None):
        other = "--text" if options.text else "--save-stats"
        raise OscarError(f"--from-stats {options.from_stats}: expected no {other} beside it; the file has its own text")
    for source in sources.parse(options.text, options.tokens):
        sources.check(source)
    identity = ModelIdentity.from_path(options.model, options.json_model_override_args)
    check_skipped(options.skip_layers, identity)
    try:
        formats(options, identity)
    except ValueError as error:
        raise OscarError(f"group size does not fit this model: {error}") from error
    if identity.weight_digest is None:
        raise OscarError(f"{options.model}: expected weight files (*.safetensors), found none; check --model")
    if needs_data(options):
        check_enough(
            sum(s.tokens for s in sources.parse(options.text, options.tokens)) or options.tokens, identity, "asked for"
        )
    return identity, model_config


def check_skipped(skip_layers: Sequence[int], identity: ModelIdentity) -> None:
    """Raise OscarError unless these are layers of the model, and not all of them."""
    if bad := [i for i in skip_layers if not 0 <= i < identity.num_layers]:
        raise OscarError(f"--skip-layers: expected layers from 0 to {identity.num_layers - 1}, got {bad[0]}")
    if len(set(skip_layers)) == identity.num_layers:
        raise OscarError(f"--skip-layers: expected fewer than all {identity.num_layers} layers; serve with --kv-quant none")


def formats(options: CalibrationOptions, identity: ModelIdentity) -> tuple[RowFormat, RowFormat]:
    """Row formats of K and V; a group as wide as a K row means a whole row on the V side too."""
    size = options.group_size
    v_size = identity.v_head_dim if size in (None, identity.head_dim) else size
    return RowFormat(identity.head_dim, size), RowFormat(identity.v_head_dim, v_size)


def needs_data(options: CalibrationOptions) -> bool:
    """Whether any text has to be read for the statistics."""
    return METHODS[options.method].needs_text or options.save_stats is not None


def max_length(options: CalibrationOptions, model_config) -> int:
    """Longest sequence in tokens."""
    context = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = options.max_length or config.LONGEST_SEQUENCE
    if context and options.backend == "sglang":
        context = max(1, context - run_sglang.CONTEXT_MARGIN)
    return min(longest, context or longest)


def check_enough(tokens: int, identity: ModelIdentity, where: str) -> None:
    """Raise OscarError unless the tokens are enough for the statistics of a head. where: how they were counted."""
    need = MIN_TOKENS_PER_DIM * max(identity.head_dim, identity.v_head_dim)
    if tokens < need:
        raise OscarError(
            f"too few tokens: expected at least {need} for head_dim {identity.head_dim}, got {tokens} {where}; "
            "give more text or a larger --tokens"
        )


def _check_backend(options: CalibrationOptions) -> None:
    """Refuse what a backend cannot do."""
    if options.backend not in BACKENDS:
        raise OscarError(f"backend must be one of {', '.join(BACKENDS)}, got {options.backend!r}")
    if options.backend == "hf":
        if options.tp != 1 or options.engine_args:
            raise OscarError("--tp and --engine-args are for --backend sglang; expected neither with --backend hf")
        return
    if options.tp < 1:
        raise OscarError(f"tp must be positive, got {options.tp}")
    if options.device != "auto":
        raise OscarError("--backend sglang does not support --device; give SGLang's own through --engine-args")
    if importlib.util.find_spec("sglang") is None:
        raise OscarError("--backend sglang: expected the package sglang, found none; install it or use --backend hf")
