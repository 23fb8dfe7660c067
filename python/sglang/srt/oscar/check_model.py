"""Refuse a machine or a model that `oscar.support` does not claim, once SGLang knows which they are."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.oscar.cpu import platform
from sglang.srt.oscar.flags import OPTIONS
from sglang.srt.oscar.refusal import refuse, unreadable

from oscar import support


def check_model(server_args: Any) -> None:
    """Refuse a machine or a model that the table in `oscar.support` does not claim.

    Args:
        server_args: SGLang's `ServerArgs`, while it resolves; nothing happens with --kv-quant none.
    Raises:
        OscarRefusal: the first feature found, or the reason why the model cannot be read.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    cfg = resolving_view(server_args)
    if cfg.kv_quant != "oscar":
        return
    _check_machine(cfg.device, cfg.oscar_kernels)
    try:
        model_config = model_config_of(server_args)
    except Exception as error:
        raise unreadable(cfg.model_path, error) from None
    for key, detail in refused_features(model_config, _compiled(cfg)):
        raise refuse(f"oscar: {support.model_refusal(key, cfg.model_path, detail)}")
    heads, ranks = model_config.get_total_num_kv_heads(), cfg.tp_size
    if heads % ranks and ranks % heads:
        raise refuse(
            f"oscar: --kv-quant oscar needs a --tp-size that divides the {heads} KV heads of {cfg.model_path} or is a multiple "
            f"of them, got --tp-size {ranks}; change --tp-size, or serve with --kv-quant none"
        )
    if cfg.device == "cpu" and ranks > heads:
        raise refuse(
            f"oscar: on a CPU sglang cannot give the {heads} KV heads of {cfg.model_path} to more ranks than heads, got "
            f"--tp-size {ranks}; give at most --tp-size {heads}"
        )
    for name in ("oscar_sink_tokens", "oscar_recent_tokens"):
        value = getattr(server_args, name)
        if value is not None and value > model_config.context_len:
            raise refuse(
                f"oscar: {OPTIONS[name]} {value} is more than the context length of {model_config.context_len} tokens, so "
                "every token would stay in 16 bits; give a smaller window, or serve with --kv-quant none"
            )


def _check_machine(device: str, kernels: str | None) -> None:
    """Refuse a machine on which nothing of ours runs, or not the implementation that was asked for.

    Args:
        device: as SGLang names it, e.g. "cuda" (also for ROCm) or "cpu".
        kernels: --oscar-kernels as it was given.
    """
    import torch

    kind = "rocm" if device == "cuda" and torch.version.hip else device
    if (sentence := support.hardware_refusal(kind)) is not None:
        raise refuse(sentence)
    if kind != "cpu" and kernels == "cpu":
        raise refuse(f"oscar: --oscar-kernels cpu, the C++ library, does not run on {kind}; drop it, or {support.ON_CPU}")
    if kind == "cuda" and kernels != "reference":
        major, minor = torch.cuda.get_device_capability()
        sentence = support.architecture_refusal(f"sm_{major}{minor}", torch.cuda.get_device_name())
        if sentence is not None:
            raise refuse(sentence)
    if kind == "cpu" and kernels in (None, "auto", "cpu"):
        _check_library(kernels)
    if kind == "cpu" and not platform.is_current():
        raise refuse(
            "oscar: --kv-quant oscar runs on the CPU only on its own platform, and another one was chosen when sglang was "
            "imported; unset SGLANG_USE_CPU_ENGINE, or give --device cpu on the command line (from Python, hide the GPUs "
            'with CUDA_VISIBLE_DEVICES="")'
        )


def _check_library(kernels: str | None) -> None:
    """Refuse settings of the C++ library that its first call in a worker would stumble over: OSCAR_CPU_ISA, OSCAR_CPU_LIBRARY.

    Args:
        kernels: --oscar-kernels as it was given.
    """
    from oscar_kernel.cpu.library import LIBRARY, library

    try:
        found = library() is not None
    except (RuntimeError, AttributeError) as error:
        raise refuse(f"oscar: {str(error).removeprefix('oscar_kernel: ')}; change or unset it") from None
    if found:
        return
    if os.environ.get("OSCAR_CPU_LIBRARY"):
        raise refuse(f"oscar: OSCAR_CPU_LIBRARY={LIBRARY} is no library that can be loaded (why is above); change or unset it")
    if kernels == "cpu":
        raise refuse(
            f"oscar: --oscar-kernels cpu needs the C++ library {LIBRARY.name}, which cannot be loaded (why is above); install "
            "oscar-kv again, or drop --oscar-kernels (PyTorch steps in, slowly)"
        )


def _compiled(cfg: Any) -> bool:
    """Whether the backend will insist on compiled kernels: PyTorch steps in on a CPU, where `auto` finds no kernels, only."""
    if cfg.oscar_kernels in (None, "auto"):
        return cfg.device == "cuda" and cfg.oscar_codec != "lossless"
    return cfg.oscar_kernels != "reference"


def refused_features(model_config: Any, compiled: bool = False) -> list[tuple[str, str]]:
    """The features for which serving refuses a model.

    `oscar.support` reads the model's own config, for all who ask. What is added here only SGLang knows: its lists of
    architectures (those that do not generate, those with latent attention, sinks or a second KV pool), config classes of its
    own, and whether this start serves text alone (--language-model-only), in which case images and audio do not matter.

    Args:
        model_config: SGLang's `ModelConfig`.
        compiled: whether Triton kernels or the C++ library have to take the model.
    Returns:
        (key of `support.MODEL_FEATURES`, what was found) pairs, the most telling first; empty if the model is served.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    found = dict(support.refused(model_config.hf_config, context_len=model_config.context_len, compiled=compiled))
    if not model_config.is_multimodal:
        found.pop("multimodal", None)
    kind = model_config.attention_arch.name
    try:
        heads = model_config.get_total_num_kv_heads()
    except Exception:  # whatever SGLang's own reading of an unknown config raises
        heads = None
    known_to_sglang = {
        "encoder_decoder": model_config.is_encoder_decoder,
        "not_generative": not model_config.is_generation,
        "multimodal": model_config.is_multimodal,
        "mla": kind == "MLA",
        "linear_attention": kind == "SSM" or mambaish_config(model_config) is not None,
        "attention_sinks": model_config.has_attention_sinks,
        "sliding_window": model_config.is_hybrid_swa,
        "alibi": getattr(model_config, "use_alibi", False),
        "unreadable_geometry": not heads or not model_config.head_dim,
    }
    found = {key: "" for key, present in known_to_sglang.items() if present} | found
    return [(row.key, found[row.key]) for row in support.MODEL_FEATURES if row.key in found and not row.supported]
