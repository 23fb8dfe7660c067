"""Queries, keys and values as attention sees them, from any Hugging Face decoder, through its attention interface.

`capturing(model, observer)` registers an attention function under a name of its own, switches the model to it, and puts
everything back in `finally`. The function hands each layer's tensors (after QK-norm and RoPE, before KV heads are
repeated) to the observer and computes attention as the library's SDPA path does. The mask function is registered with
it: without one the library passes no mask, and padded batches and sliding windows would silently be wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar import support
from oscar.errors import OscarError

_NAMES = itertools.count()
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "wo")
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_QUERIES_AT_ONCE = 512  # where scores are formed: memory then grows with the length, not with its square


@dataclass(frozen=True)
class LayerCapture:
    """One attention call of one layer, tensors in the model's dtype and on its device.

    Attributes:
        layer_id: the layer's index in the model.
        q: [bs, num_qo_heads, num_tokens, head_dim], after norm and RoPE.
        k, v: [bs, num_kv_heads, num_tokens, head_dim] and [..., v_head_dim], of the same tokens as q: no cached past.
        output: [bs, num_tokens, num_qo_heads, v_head_dim], attention's output before W_O.
        real: [bs, num_tokens] bool, False where the batch was padded.
        sm_scale: factor on q k^T.
        sliding_window: number of newest keys a query sees, its own included; None for all.
        logit_cap: scores are logit_cap * tanh(score / logit_cap); None for no cap.
        output_weight: [hidden_size, num_qo_heads * v_head_dim], the layer's W_O; None where it was not found or is quantised.
    """

    layer_id: int
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    real: Tensor
    sm_scale: float
    sliding_window: int | None
    logit_cap: float | None
    output_weight: Tensor | None = None

    def tokens(self, sequence: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v, output), each [real tokens, heads, dim], padding left out; of all sequences in turn, or of one."""
        rows = slice(None) if sequence is None else slice(sequence, sequence + 1)
        real = self.real[rows]
        q, k, v = (x[rows].transpose(1, 2)[real] for x in (self.q, self.k, self.v))
        return q, k, v, self.output[rows][real]

    @property
    def how(self) -> dict:
        """How attention was computed, as the keyword arguments of `oscar.methods.attended.attended`."""
        names = ("sm_scale", "output_weight", "sliding_window", "logit_cap")
        return {name: getattr(self, name) for name in names}


def check_supported(config) -> None:
    """Refuse, before any weight is read, a model whose attention cannot be captured or quantised.

    Args:
        config: the model's Hugging Face configuration, an object or the dictionary of a config.json.
    Raises:
        OscarError: a feature for which `oscar.support` refuses calibration, with the table's sentence.
    """
    for key, detail in support.refused(config, "calibration"):
        raise OscarError(support.model_refusal(key, support.model_name(config), detail))


@contextmanager
def capturing(model, observer: Callable[[LayerCapture], None]) -> Iterator[Callable[..., None]]:
    """Capture the model's attention while the context is open.

    Args:
        model: a Hugging Face `PreTrainedModel` in eval mode.
        observer: called once a layer and forward pass, in layer order.
    Yields:
        `run(input_ids, attention_mask=None)`: one forward pass of the decoder without output head and cache; input_ids
        [bs, num_tokens] int64, attention_mask [bs, num_tokens], 0 where padded (the padding is not observed).
    Raises:
        OscarError: attention is not dispatched through the library's interface, or carries learned sinks, or
            a layer never called it.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = f"oscar_capture_{next(_NAMES)}"
    before = model.config._attn_implementation
    text_config = model.config.get_text_config(decoder=True)
    real: Tensor | None = None
    seen: set[int] = set()

    def attention(module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, **kwargs):
        if kwargs.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
            raise OscarError(f"{type(module).__name__} has learned attention sinks, which this build does not support")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        logit_cap = kwargs.get("softcap")
        output = _attend(module, query, key, value, attention_mask, scale, logit_cap, kwargs)
        num_tokens = query.shape[2]  # with a cache, keys hold the past too: only the newest rows are this pass's tokens
        seen.add(module.layer_idx)
        observer(
            LayerCapture(
                layer_id=module.layer_idx,
                q=query,
                k=key[:, :, -num_tokens:],
                v=value[:, :, -num_tokens:],
                output=output,
                real=query.new_ones(len(query), num_tokens, dtype=torch.bool) if real is None else real,
                sm_scale=float(scale),
                sliding_window=kwargs.get("sliding_window", getattr(module, "sliding_window", None)),
                logit_cap=logit_cap,
                output_weight=output_weight(module, query.shape[1] * value.shape[-1]),
            )
        )
        return output, None

    def run(input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        nonlocal real
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        seen.clear()
        with torch.inference_mode():
            model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        if missing := sorted(set(range(text_config.num_hidden_layers)) - seen):
            raise OscarError(
                f"{type(model).__name__}: expected every layer to call the library's attention interface, "
                f"{'no layer' if not seen else f'layers {missing}'} did{'' if not seen else ' not'}"
            )

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise OscarError(f"{type(model).__name__} does not use the library's attention interface")
        yield run
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def output_weight(attention, width: int) -> Tensor | None:
    """W_O of an attention module, [hidden_size, width] in a float dtype; None where there is no such plain matrix."""
    for name in _OUTPUT_NAMES:
        weight = getattr(getattr(attention, name, None), "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == width and weight.dtype in _PLAIN:
            return weight
    return None


def _attend(module, query, key, value, mask, scale, logit_cap, kwargs) -> Tensor:
    """Attention's output, [bs, num_tokens, num_qo_heads, v_head_dim]. SDPA ignores a cap on the scores."""
    if logit_cap is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, scaling=scale, dropout=0.0, **kwargs)[0]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    past = key.shape[2] - query.shape[2]
    positions, parts = torch.arange(key.shape[2], device=key.device), []
    for first in range(0, query.shape[2], _QUERIES_AT_ONCE):
        rows = slice(first, min(first + _QUERIES_AT_ONCE, query.shape[2]))
        scores = query[:, :, rows] @ key.mT * scale
        scores = logit_cap * torch.tanh(scores / logit_cap)
        visible = positions <= positions[past + rows.start : past + rows.stop, None] if mask is None else mask[..., rows, :]
        scores = scores.masked_fill(~visible, float("-inf")) if visible.dtype == torch.bool else scores + visible
        parts.append(scores.softmax(-1, dtype=torch.float32).nan_to_num(0.0).to(query.dtype) @ value)
    return torch.cat(parts, 2).transpose(1, 2)
