"""Refuse a machine or a model that `oscar.support` does not claim, once SGLang knows which they are."""

from __future__ import annotations

from typing import Any

from sglang.srt.oscar.cpu import platform
from sglang.srt.oscar.flags import OPTIONS
from sglang.srt.oscar.refusal import refuse, unreadable

from oscar import support


def check_model(server_args: Any) -> None:
    """Refuse a machine or a model that the table in `oscar.support` does not claim.

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
    for key, detail in refused_features(model_config):
        raise refuse(support.model_refusal(key, cfg.model_path, detail))
    heads, ranks = model_config.get_total_num_kv_heads(), cfg.tp_size
    if heads % ranks and ranks % heads:
        raise refuse(
            f"oscar: --kv-quant oscar needs a --tp-size that divides the {heads} KV heads of {cfg.model_path} or is a multiple "
            f"of them, got --tp-size {ranks}; change --tp-size, or serve with --kv-quant none"
        )
    for name in ("oscar_sink_tokens", "oscar_recent_tokens"):
        value = getattr(server_args, name)
        if value is not None and value > model_config.context_len:
            raise refuse(
                f"oscar: {OPTIONS[name]} {value} is more than the context length of {model_config.context_len} tokens, so "
                "every token would stay in 16 bits; give a smaller window, or serve with --kv-quant none"
            )


def _check_machine(device: str, kernels: str | None) -> None:
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
    if kind == "cpu" and not platform.is_current():
        raise refuse(
            "oscar: --kv-quant oscar runs on the CPU only on its own platform, and another one was chosen when sglang was "
            "imported; unset SGLANG_USE_CPU_ENGINE, or give --device cpu on the command line (from Python, hide the GPUs "
            'with CUDA_VISIBLE_DEVICES="")'
        )


def refused_features(model_config: Any) -> list[tuple[str, str]]:
    """The features of a model that `oscar.support` refuses.

    Args:
        model_config: SGLang's `ModelConfig`.
    Returns:
        (key of `support.MODEL_FEATURES`, what was found), the most telling first; empty if the model is served.
    """
    text = model_config.hf_text_config
    found: list[tuple[str, str]] = []

    def add(key: str, present: Any, detail: str = "") -> None:
        if present:
            found.append((key, detail))

    kind = model_config.attention_arch.name
    add("encoder_decoder", model_config.is_encoder_decoder)
    add("not_generative", not model_config.is_generation)
    add("multimodal", model_config.is_multimodal)
    add("mla", kind == "MLA", f"kv_lora_rank={getattr(text, 'kv_lora_rank', None)}")
    add("linear_attention", kind == "SSM" or _is_hybrid_linear(model_config))
    add("attention_sinks", model_config.has_attention_sinks)
    names = ("index_topk", "compress_ratios", "sparse_attention_config", "sparse_config", "dsa_config")
    sparse = [name for name in names if getattr(text, name, None)]
    add("sparse_attention", sparse, ", ".join(sparse))
    window = _sliding_window(model_config)
    add("sliding_window", window, window)
    shared = getattr(text, "num_kv_shared_layers", 0)
    add("shared_kv_layers", shared, f"num_kv_shared_layers={shared}")
    sizes = [model_config.head_dim, model_config.swa_head_dim, getattr(text, "global_head_dim", None)]
    sizes = sorted({size for size in sizes if size})
    add("several_head_sizes", len(sizes) > 1, f"head_dim {' and '.join(map(str, sizes))}")
    add("alibi", getattr(model_config, "use_alibi", False) or getattr(text, "alibi", False))
    add("logit_cap", getattr(text, "attn_logit_softcapping", None))
    try:
        heads = model_config.get_total_num_kv_heads()
    except Exception:
        heads = None
    add("unreadable_geometry", not heads or not model_config.head_dim, f"KV heads {heads}, head_dim {model_config.head_dim}")
    for name in ("head_dim", "v_head_dim"):
        size = getattr(model_config, name)
        add("head_dim", size and size % 4, f"{name}={size}")
    return found


def _is_hybrid_linear(model_config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def _sliding_window(model_config: Any) -> str:
    """What says that some layer attends to a window only, or ""."""
    text = model_config.hf_text_config
    kinds = {kind for kind in getattr(text, "layer_types", None) or () if "sliding" in kind or "chunked" in kind}
    if kinds:
        return f"layer_types has {', '.join(sorted(kinds))}"
    if model_config.is_hybrid_swa:
        return "hybrid sliding-window architecture"
    if model_config.attention_chunk_size:
        return f"attention_chunk_size={model_config.attention_chunk_size}"
    window = model_config.sliding_window_size
    if window and window < model_config.context_len and getattr(text, "use_sliding_window", True):
        return f"sliding_window={window}"
    return ""
