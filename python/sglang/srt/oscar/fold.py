"""Fold the value transform into W_V and W_O, so that it costs nothing at run time.

With v' = v T the attention output is o' = o T, and o W_O^T = o' T^-1 W_O^T: rows of W_V become T^T W_V, columns of W_O become
W_O T^-T, per KV head. It is exact as long as nothing stands between the projections and attention.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from oscar.format.linalg import inverses

logger = logging.getLogger(__name__)

FOLDABLE = frozenset({"LlamaAttention", "Qwen2Attention", "Qwen3Attention", "Qwen2MoeAttention", "Qwen3MoeAttention"})
"""Attention modules of SGLang read and known to pass v from qkv_proj to attention, and its output to o_proj, untouched. Others
(gated outputs, normalised values) transform values online."""


def fold_value_transform(module: torch.nn.Module, v_transform: Tensor) -> bool:
    """Fold into one attention module, in place; False where that would not be exact, and nothing was changed.

    Args:
        module: SGLang attention module with qkv_proj and o_proj.
        v_transform: [num_kv_heads, v_head_dim, v_head_dim] float64, of this rank's heads.
    """
    if type(module).__name__ not in FOLDABLE:
        return False
    qkv, out = getattr(module, "qkv_proj", None), getattr(module, "o_proj", None)
    if not (_is_plain(qkv) and _is_plain(out)):
        return False
    num_kv_heads, v_head_dim, _ = v_transform.shape
    v_size = num_kv_heads * v_head_dim
    group_num = out.weight.shape[1] // v_size
    if out.weight.shape[1] != group_num * v_size or qkv.weight.shape[0] <= v_size:
        return False
    transform = v_transform.to(qkv.weight.device)
    inverse = inverses(transform)
    with torch.no_grad():
        w_v = qkv.weight[-v_size:]
        w_v.copy_(torch.einsum("hdn,hde->hen", w_v.double().view(num_kv_heads, v_head_dim, -1), transform).flatten(0, 1))
        if getattr(qkv, "bias", None) is not None:
            b_v = qkv.bias[-v_size:]
            b_v.copy_(torch.einsum("hd,hde->he", b_v.double().view(num_kv_heads, v_head_dim), transform).flatten())
        w_o = out.weight.double().view(-1, num_kv_heads, group_num, v_head_dim)
        out.weight.copy_(torch.einsum("nhgd,hed->nhge", w_o, inverse).flatten(1))
    return True


def _is_plain(linear) -> bool:
    """Whether a linear layer keeps its weight as an ordinary floating-point matrix."""
    method = type(getattr(linear, "quant_method", None)).__name__
    weight = getattr(linear, "weight", None)
    floats = (torch.float32, torch.float16, torch.bfloat16)
    return method == "UnquantizedLinearMethod" and weight is not None and weight.ndim == 2 and weight.dtype in floats
