"""Which features of the table a model has, read from its Hugging Face config."""

from __future__ import annotations

import re
from typing import Any

from oscar.support.table import MODEL_FEATURES

_FULL = {"full_attention", "attention"}
_LINEAR_FIELDS = (
    "attn_layer_period",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_key_heads",
    "mamba_d_ssm",
    "mamba_d_state",
    "ssm_cfg",
    "ssm_state_size",
)
_SPARSE_FIELDS = ("index_topk", "compress_ratios", "sparse_attention_config", "sparse_config", "dsa_config")
_SINK_FIELDS = ("learnable_sink", "add_swa_attention_sink_bias", "add_full_attention_sink_bias")
_WINDOW_FIELDS = ("sliding_window_size", "sliding_window", "window_size")
_NOT_GENERATIVE = re.compile(r"For\w*Classification|ForMaskedLM|(?<!LMHead)(?<!Chat)(?<!ChatGLM)Model$")


def refused(
    config: Any, task: str = "serving", context_len: int | None = None, compiled: bool = False
) -> list[tuple[str, str]]:
    """The features for which a model is refused.

    Args:
        config: the model's Hugging Face configuration, a `PretrainedConfig` or the dictionary of a config.json. A dictionary
            shows only what the file says; the library's classes also know the defaults of the model type.
        task: "serving", "calibration" or "evaluation".
        context_len: longest sequence in tokens; a window that is at least as long has no effect. None: the config's own.
        compiled: whether Triton kernels or the C++ library have to take the model, not the PyTorch reference.
    Returns:
        (key of `MODEL_FEATURES`, what was found) pairs, the most telling first; empty if the model is taken.
    """
    model = _Model(config, context_len)
    found = []
    for feature in MODEL_FEATURES:
        if feature.supported or task in feature.offline or (feature.where and not compiled):
            continue
        detail = DETECTORS[feature.key](model)
        if detail is not None:
            found.append((feature.key, detail))
    return found


class _Model:
    """A config as the detectors see it.

    Attributes:
        whole, text: the configuration, and the part of it that describes the language model.
        kinds: kinds of attention layers that it names.
        context_len: longest sequence in tokens, or None.
    """

    def __init__(self, config: Any, context_len: int | None):
        self.whole, self.text = config, _text(config)
        self.kinds = set(self["layer_types"] or ())
        self.context_len = context_len or self["max_position_embeddings"]

    def __getitem__(self, name: str) -> Any:
        """A field of the language model; None where there is none."""
        return _get(self.text, name)

    def named(self, fields: tuple[str, ...]) -> str | None:
        """Those of the fields that are set, for a sentence, or None."""
        return ", ".join(name for name in fields if self[name]) or None

    def of_kind(self, *words: str) -> str | None:
        """The kinds of layers whose name has one of the words, for a sentence, or None."""
        kinds = sorted(kind for kind in self.kinds if any(word in kind for word in words))
        return f"layer_types has {', '.join(kinds)}" if kinds else None

    @property
    def heads(self) -> int | None:
        """KV heads of a layer."""
        return self["num_key_value_heads"] or self["num_attention_heads"]

    @property
    def head_dim(self) -> int | None:
        """Channels of a K head."""
        if self["head_dim"]:
            return self["head_dim"]
        hidden_size, heads = self["hidden_size"], self["num_attention_heads"]
        return hidden_size // heads if hidden_size and heads else None


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _text(config: Any) -> Any:
    """The part of a config that describes the language model; the config itself where it has no parts."""
    for name in ("text_config", "llm_config", "language_config"):
        if part := _get(config, name):
            return part
    thinker = _get(config, "thinker_config")
    return _text(thinker) if thinker else config


# One detector a refused feature: what was found, "" where there is nothing to add to the feature's title, None where the
# model does not have it.


def _flag(present: Any) -> str | None:
    return "" if present else None


def _not_generative(model: _Model) -> str | None:
    if model["use_bidirectional_attention"] is True:
        return "use_bidirectional_attention=True"
    return next((name for name in _get(model.whole, "architectures") or () if _NOT_GENERATIVE.search(name)), None)


def _multimodal(model: _Model) -> str | None:
    parts = [name for name in ("vision_config", "audio_config", "thinker_config") if _get(model.whole, name)]
    return ", ".join(parts) if parts else _flag(model.text is not model.whole)


def _latent(model: _Model) -> str | None:
    rank = model["kv_lora_rank"]
    return f"kv_lora_rank={rank}" if rank else None


def _linear(model: _Model) -> str | None:
    attention = ("sliding_attention", "window_attention", "chunked", "sparse", "compressed", "indexed")
    others = sorted(kind for kind in model.kinds - _FULL if not any(word in kind for word in attention))
    if others:
        return f"layer_types has {', '.join(others)}"
    if model.kinds:  # every layer is named, and each has attention
        return None
    kind = model["model_type"] or ""
    return f"model_type {kind}" if re.search("mamba|rwkv|recurrent", kind) else model.named(_LINEAR_FIELDS)


def _sinks(model: _Model) -> str | None:
    kind = model["model_type"] or ""
    return f"model_type {kind}" if "gpt_oss" in kind else model.named(_SINK_FIELDS)


def _sparse(model: _Model) -> str | None:
    return model.named(_SPARSE_FIELDS) or model.of_kind("sparse", "compressed", "indexed")


def _sliding(model: _Model) -> str | None:
    if kinds := model.of_kind("sliding", "window"):
        return kinds
    if model["use_sliding_window"] is False:
        return None
    window = next((model[name] for name in _WINDOW_FIELDS if model[name] is not None), None)
    acts = window and (model.context_len is None or window < model.context_len)
    return f"sliding_window={window}" if acts else None


def _chunked(model: _Model) -> str | None:
    size = model["attention_chunk_size"]
    return model.of_kind("chunked") or (f"attention_chunk_size={size}" if size else None)


def _shared(model: _Model) -> str | None:
    layers = model["num_kv_shared_layers"]
    return f"num_kv_shared_layers={layers}" if layers else None


def _head_sizes(model: _Model) -> str | None:
    sizes = sorted({size for size in (model.head_dim, model["swa_head_dim"], model["global_head_dim"]) if size})
    return f"head_dim {' and '.join(map(str, sizes))}" if len(sizes) > 1 else None


def _alibi(model: _Model) -> str | None:
    if model["position_embedding_type"] == "alibi" or model["model_type"] == "bloom":
        return ""
    return _flag(model["alibi"] or model["use_alibi"] or _get(model["attn_config"] or {}, "alibi"))


def _logit_cap(model: _Model) -> str | None:
    cap = model["attn_logit_softcapping"]
    return f"attn_logit_softcapping={cap}" if cap else None


def _geometry(model: _Model) -> str | None:
    if model.heads and model.head_dim:
        return None
    return f"KV heads {model.heads}, head_dim {model.head_dim}"


def _not_multiple_of(divisor: int):
    def detector(model: _Model) -> str | None:
        sizes = {"head_dim": model.head_dim, "v_head_dim": model["v_head_dim"]}
        return next((f"{name}={size}" for name, size in sizes.items() if size and size % divisor), None)

    return detector


DETECTORS = {
    "encoder_decoder": lambda model: _flag(_get(model.whole, "is_encoder_decoder")),
    "not_generative": _not_generative,
    "multimodal": _multimodal,
    "mla": _latent,
    "linear_attention": _linear,
    "attention_sinks": _sinks,
    "sparse_attention": _sparse,
    "sliding_window": _sliding,
    "chunked_attention": _chunked,
    "shared_kv_layers": _shared,
    "several_head_sizes": _head_sizes,
    "alibi": _alibi,
    "logit_cap": _logit_cap,
    "unreadable_geometry": _geometry,
    "head_dim": _not_multiple_of(4),
    "head_dim_of_kernels": _not_multiple_of(16),
}
"""Key of a refused row of `MODEL_FEATURES` -> its detector."""
