"""Attention over one part of a sequence, and the merge of parts by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sm_scale: float, logit_cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Softmax attention over a part of the keys.

    Args:
        q: [bs, num_kv_heads, num_q, head_dim] float32.
        k: [bs, num_k, num_kv_heads, head_dim] float32.
        v: [bs, num_k, num_kv_heads, v_head_dim] float32.
        mask: broadcastable to [bs, num_kv_heads, num_q, num_k] bool, True where a key is seen.
        sm_scale: factor on the logits.
        logit_cap: logits become cap * tanh(logits / cap); 0 for none.
    Returns:
        o [bs, num_kv_heads, num_q, v_head_dim] and lse [bs, num_kv_heads, num_q], natural logarithm; a query that sees nothing
        has o = 0 and lse = -inf.
    """
    logits = torch.einsum("bhqd,bkhd->bhqk", q, k) * sm_scale
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.masked_fill(~mask, float("-inf"))
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    # A masked key may hold anything, NaN included, and 0 * NaN is NaN.
    v = v.masked_fill(~mask.any(dim=2).transpose(1, 2).unsqueeze(-1), 0.0)
    return torch.einsum("bhqk,bkhd->bhqd", weights, v), lse


def merge_states(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Combine attention over disjoint parts of the keys.

    Args:
        parts: (o, lse) as `attend` returns them.
    Returns:
        o over all parts; 0 for a query that sees nothing.
    Source: the associative softmax state of FlashAttention, arXiv 2205.14135, section 3.1.
    """
    lse = torch.stack([part[1] for part in parts])
    weight = torch.exp(lse - lse.logsumexp(0).nan_to_num(neginf=0.0)).unsqueeze(-1)
    return (torch.stack([part[0] for part in parts]) * weight).sum(0)
