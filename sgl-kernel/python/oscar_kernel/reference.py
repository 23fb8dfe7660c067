"""Every op in plain PyTorch, slow and obvious: what the kernels are compared with, and what runs where none of them can.

Softmax attention over a part of the keys gives an output and a log-sum-exp; parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.read_plan import ReadPlan

TILE_ELEMENTS = 4 << 20
"""Decoded elements held at once (K and V each), 16 MiB of float32: no step unpacks a whole cache."""
Q_TILE = 256
K_TILE = 2048


def store_kv(
    k: Tensor, v: Tensor, loc: Tensor, window_rows: Tensor, cache: LayerCache, codec: LayerCodec
) -> tuple[Tensor, Tensor]:
    """Write one layer's keys and values of new tokens, in place.

    Every token gets its 2-bit row; those in a window also get a row in window_dtype. The codes are those of the row as the
    window keeps it, so re-encoding a window row gives its 2-bit row byte for byte.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], after RoPE, any float type.
        v: [num_tokens, num_kv_heads, v_head_dim].
        loc: [num_tokens] int64, slots to write.
        window_rows: [num_tokens] int64, rows of the windows to write; num_rows (the last) for none.
        cache: storage, written in place.
        codec: the layer's codec.
    Returns:
        k', v': the transformed rows in window_dtype, for attention among the new tokens.
    """
    stored = []
    for x, side, rows in ((k, codec.k, cache.k), (v, codec.v, cache.v)):
        x = side.store(x)
        rows.buffer[loc] = side.encode(x)
        rows.window[window_rows] = x
        stored.append(x)
    return stored[0], stored[1]


def write_windows(k: Tensor, v: Tensor, window_rows: Tensor, cache: LayerCache) -> None:
    """Write rows as `store_kv` returned them into the windows, in place.

    An extend has to do this after its attention: a prompt's new tokens take over ring rows that its own prefix, or another
    prefix in the batch, is still read from.

    Args:
        k: [num_tokens, num_kv_heads, head_dim] in window_dtype, transformed.
        v: [num_tokens, num_kv_heads, v_head_dim] in window_dtype, transformed.
        window_rows: [num_tokens] int64; the last row takes what belongs nowhere.
        cache: storage.
    """
    cache.k.window[window_rows] = k
    cache.v.window[window_rows] = v


def decode_attention(
    q: Tensor, cache: LayerCache, codec: LayerCodec, plan: ReadPlan, sm_scale: float, logit_cap: float = 0.0
) -> Tensor:
    """Attention of one new token a sequence; the token itself is already in the cache.

    Args:
        q: [bs, num_qo_heads, head_dim], after RoPE, not transformed.
        cache, codec: of the layer.
        plan: from `plan_read` with kv_lens that include the new token.
        sm_scale: factor on the logits. logit_cap: soft cap of the logits; 0 for none.
    Returns:
        [bs, num_qo_heads, v_head_dim] float32.
    """
    q = _grouped_queries(q, codec)
    parts = [
        attend(
            q,
            cache.k.window[plan.window_rows].float(),
            cache.v.window[plan.window_rows].float(),
            plan.window_mask[:, None, None],
            sm_scale,
            logit_cap,
        )
    ]
    bs, num_kv_heads, _, head_dim = q.shape
    tile = max(64, TILE_ELEMENTS // max(1, bs * num_kv_heads * head_dim))
    for start in range(0, plan.slots.shape[1], tile):
        part = slice(start, start + tile)
        parts.append(_attend_packed(q, cache, codec, plan.slots[:, part], plan.packed_mask[:, part], sm_scale, logit_cap))
    return codec.v.read(merge_states(parts)).flatten(1, 2)


def extend_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    qo_indptr: Sequence[int],
    cache: LayerCache,
    codec: LayerCodec,
    plan: ReadPlan,
    sm_scale: float,
    logit_cap: float = 0.0,
) -> Tensor:
    """Causal attention of new tokens. They see each other as `store_kv` returned them, not as 2 bits, and the cached prefix
    through the same reader as decode, tile by tile: temporaries do not grow with the prefix.

    Args:
        q: [num_tokens, num_qo_heads, head_dim], after RoPE, not transformed.
        k_new: [num_tokens, num_kv_heads, head_dim], transformed, in window_dtype.
        v_new: [num_tokens, num_kv_heads, v_head_dim], transformed, in window_dtype.
        qo_indptr: [bs + 1] on the host, ranges of new tokens; a range may be empty.
        cache, codec: of the layer.
        plan: from `plan_read` with the lengths of the cached prefixes.
        sm_scale: factor on the logits. logit_cap: soft cap of the logits; 0 for none.
    Returns:
        [num_tokens, num_qo_heads, v_head_dim] float32.
    """
    q = _grouped_queries(q, codec)
    num_tokens, num_kv_heads, kv_group_num, _ = q.shape
    out = q.new_zeros(num_tokens, num_kv_heads, kv_group_num, v_new.shape[-1])
    for b, prefix_len in enumerate(plan.kv_lens):
        first, last = qo_indptr[b], qo_indptr[b + 1]
        for start in range(first, last, Q_TILE):
            stop = min(start + Q_TILE, last)
            # Rows of one KV head: query tokens outermost, then the heads that share it.
            tile = q[start:stop].transpose(0, 1).flatten(1, 2).unsqueeze(0)
            parts = list(_prefix_parts(tile, b, prefix_len, cache, codec, plan, sm_scale, logit_cap))
            seen_by = torch.arange(start, stop, device=q.device).repeat_interleave(kv_group_num)
            for k_start in range(first, stop, K_TILE):
                k_stop = min(k_start + K_TILE, stop)
                causal = torch.arange(k_start, k_stop, device=q.device) <= seen_by.unsqueeze(1)
                k, v = k_new[k_start:k_stop].float().unsqueeze(0), v_new[k_start:k_stop].float().unsqueeze(0)
                parts.append(attend(tile, k, v, causal[None, None], sm_scale, logit_cap))
            merged = merge_states(parts)[0].unflatten(1, (stop - start, kv_group_num))
            out[start:stop] = merged.transpose(0, 1)
    return codec.v.read(out).flatten(1, 2)


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


def _grouped_queries(q: Tensor, codec: LayerCodec) -> Tensor:
    """[num_tokens, num_qo_heads, head_dim] -> [num_tokens, num_kv_heads, kv_group_num, head_dim] float32, transformed."""
    return codec.k.read(q.float().unflatten(1, (codec.num_kv_heads, -1)))


def _attend_packed(
    q: Tensor, cache: LayerCache, codec: LayerCodec, slots: Tensor, mask: Tensor, sm_scale: float, logit_cap: float
) -> tuple[Tensor, Tensor]:
    """One tile of 2-bit rows. q [bs, num_kv_heads, num_q, head_dim] transformed; slots, mask [bs, num_k]; returns (o, lse)."""
    k, v = codec.k.decode(cache.k.buffer[slots]), codec.v.decode(cache.v.buffer[slots])
    return attend(q, k, v, mask[:, None, None], sm_scale, logit_cap)


def _prefix_parts(
    q: Tensor,
    b: int,
    prefix_len: int,
    cache: LayerCache,
    codec: LayerCodec,
    plan: ReadPlan,
    sm_scale: float,
    logit_cap: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(o, lse) of one sequence's cached prefix: its windows, then its 2-bit rows tile by tile."""
    if prefix_len == 0:
        return
    rows = plan.window_rows[b : b + 1]
    k, v = cache.k.window[rows].float(), cache.v.window[rows].float()
    yield attend(q, k, v, plan.window_mask[b : b + 1, None, None], sm_scale, logit_cap)
    for start in range(0, prefix_len, K_TILE):
        part = slice(start, min(start + K_TILE, prefix_len))
        slots, mask = plan.slots[b : b + 1, part], plan.packed_mask[b : b + 1, part]
        yield _attend_packed(q, cache, codec, slots, mask, sm_scale, logit_cap)
