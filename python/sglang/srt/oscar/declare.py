"""Declare what the workers need: the artifact, the windows, the backend and the CUDA graphs that go with it.

What is declared travels to the workers inside `ServerArgs`; there `flags.settings_of` reads it back.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from sglang.srt.oscar import check_upstream, entry
from sglang.srt.oscar.find_artifact import find_artifact
from sglang.srt.oscar.refusal import refuse

from oscar import support
from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS
from oscar.format.sealed_file import file_digest
from oscar.format.sizing import PAGE_SIZE, SLOTS_PER_ROW

logger = logging.getLogger(__name__)

SOURCE = "oscar"
"""Who declares, in SGLang's list of resolved overrides."""


def declare_settings(server_args: Any) -> None:
    """Check upstream, find or make the artifact, and declare backend, windows and artifact for the workers.

    Args:
        server_args: SGLang's `ServerArgs`, while it resolves; nothing happens with --kv-quant none.
    Raises:
        OscarRefusal: the installed SGLang is not the one that we hook, the artifact is unusable or cannot be made, or
            what SGLang chose for the model does not go with --kv-quant oscar.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    cfg = resolving_view(server_args)
    if cfg.kv_quant != "oscar":
        return
    try:
        check_upstream.check()
    except check_upstream.UpstreamMismatch as error:
        raise refuse(str(error)) from None
    _check_plugin()
    _check_resolved(cfg)
    path, artifact = find_artifact(server_args)
    sinks = _first(cfg.oscar_sink_tokens, artifact.sink_tokens, DEFAULT_SINK_TOKENS)
    recent = _first(cfg.oscar_recent_tokens, artifact.recent_tokens, DEFAULT_RECENT_TOKENS)
    codec, kernels = cfg.oscar_codec or "int2", cfg.oscar_kernels or "auto"
    page_size = _page_size(cfg)
    _warn(sinks, recent, codec)
    declare_resolution(
        server_args,
        SOURCE,
        attention_backend="oscar",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        cuda_graph_config=_graphs(cfg, codec, kernels),
        page_size=page_size,
        oscar_artifact=str(path),
        oscar_artifact_digest=file_digest(path),
        oscar_sink_tokens=sinks,
        oscar_recent_tokens=recent,
        oscar_calibrate=cfg.oscar_calibrate or "auto",
        oscar_codec=codec,
        oscar_kernels=kernels,
    )
    logger.info(
        "oscar: 2-bit KV cache with artifact %s (method %s), %d sink and %d recent tokens of at most %d in 16 bits",
        path,
        artifact.method,
        sinks,
        recent,
        model_config_of(server_args).context_len,
    )


def declare_eager_prefill(server_args: Any) -> None:
    """Turn the CUDA graphs of prefill off before SGLang sets memory aside for them.

    Args:
        server_args: SGLang's `ServerArgs`, while it resolves; nothing happens with --kv-quant none.
    Raises:
        OscarRefusal: --cuda-graph-config asks for such graphs.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    cfg = resolving_view(server_args)
    if cfg.kv_quant != "oscar":
        return
    asked = cfg.cuda_graph_config or {}
    asked = asked if isinstance(asked, dict) else asked.to_dict()
    prefill = (asked.get("prefill") or {}).get("backend")
    if prefill not in (None, "disabled"):
        raise refuse(
            f"oscar: --kv-quant oscar does not go with --cuda-graph-config that has {prefill} graphs of prefill: the plan of a "
            "prefill depends on every length; leave them out, or " + support.OFF
        )
    declare_resolution(server_args, SOURCE, disable_prefill_cuda_graph=True)


def check_backends(server_args: Any) -> None:
    """Refuse a model for which SGLang chose another attention backend after ours was declared.

    Args:
        server_args: SGLang's `ServerArgs`, all but resolved; nothing happens with --kv-quant none.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    if cfg.kv_quant != "oscar":
        return
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(cfg, name)
        if value != "oscar" and (value is not None or name == "attention_backend"):
            raise refuse(
                f"oscar: --kv-quant oscar cannot serve {cfg.model_path}: sglang sets {support.flag_of(name)} {value} for it, "
                "and only the oscar backend reads the 2-bit KV cache; " + support.OFF
            )


def _check_plugin() -> None:
    """Refuse if `entry.register` failed or a hook was not taken: SGLang logs that and would go on without us."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins

    load_plugins()  # does nothing the second time; benchmarks resolve without it
    if "oscar" not in ATTENTION_BACKENDS:
        raise refuse(
            "oscar: the plugin of oscar-kv did not load in this process (if it failed, its error is above); reinstall it, "
            "and let SGLANG_PLUGINS, if set, name oscar too"
        )
    if missing := entry.missing_hooks():
        raise refuse(
            f"oscar: sglang did not take the hook of oscar-kv on {missing[0]} (its error is above), and without it the cache "
            "would not be the 2-bit one; reinstall oscar-kv, or " + support.OFF
        )


def _check_resolved(cfg: Any) -> None:
    """Refuse what SGLang itself chose for the model since `check_flags` looked; the attention backend is replaced anyway."""
    for option in support.REFUSED:
        value = getattr(cfg, option.field)
        if value not in option.allowed and not option.field.endswith("attention_backend"):
            raise refuse(f"{support.option_refusal(option, value)} (set by SGLang for {cfg.model_path})")


def _warn(sinks: int, recent: int, codec: str) -> None:
    """Log choices that cost quality or memory."""
    if sinks == 0 or recent == 0:
        logger.warning(
            "oscar: windows of %d first and %d newest tokens in 16 bits; quality at 2 bits depends on both "
            "(defaults %d and %d)",
            sinks,
            recent,
            DEFAULT_SINK_TOKENS,
            DEFAULT_RECENT_TOKENS,
        )
    if codec == "lossless":
        logger.warning("oscar: --oscar-codec lossless is for debugging: the KV cache takes twice the memory of 16 bits")


def _page_size(cfg: Any) -> int:
    """Slots of a page: what the user asked for, else the largest usual one that SGLang's chunks of a prefill are made of.

    Raises:
        OscarRefusal: no row of the windows fits into such pages.
    """
    if cfg.page_size is not None:
        if cfg.page_size % SLOTS_PER_ROW:
            raise refuse(
                "oscar: --kv-quant oscar keeps the 16-bit windows in pages of the pool: expected --page-size to be a multiple "
                f"of {SLOTS_PER_ROW}, got {cfg.page_size}; leave it out ({PAGE_SIZE})"
            )
        return cfg.page_size
    chunk = cfg.chunked_prefill_size
    if chunk is None or chunk <= 0:
        return PAGE_SIZE
    if chunk % SLOTS_PER_ROW:
        raise refuse(
            f"oscar: --kv-quant oscar needs chunks that are whole pages of the pool: expected --chunked-prefill-size to be a "
            f"multiple of {SLOTS_PER_ROW}, better of {PAGE_SIZE}, got {chunk}"
        )
    return math.gcd(PAGE_SIZE, chunk)


def _graphs(cfg: Any, codec: str, kernels: str) -> Any:
    """SGLang's configuration of CUDA graphs without those that we cannot serve: prefill never, decode on Triton kernels only.

    Raises:
        OscarRefusal: breakable graphs in decode.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    # Off since `declare_eager_prefill`; some models turn them on again.
    graphs = with_phase(cfg.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
    if cfg.device != "cuda" or kernels == "reference" or codec == "lossless" or cfg.oscar_debug_checks:
        return with_phase(graphs, Phase.DECODE, backend=Backend.DISABLED)
    if graphs[Phase.DECODE].backend == Backend.BREAKABLE:
        raise refuse(
            "oscar: --kv-quant oscar does not go with breakable CUDA graphs in decode: the plan of a step is part of the "
            "graph; use full ones (the default) or --disable-cuda-graph, or " + support.OFF
        )
    return graphs


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)
