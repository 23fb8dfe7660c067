"""Extend: new tokens of a ragged batch against their cached prefix and among themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernel.attend import attend, merge_states
from oscar_kernel.choose import choose
from oscar_kernel.cpu import library as cpu
from oscar_kernel.decode_attention import attend_packed
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.plan_read import ReadPlan

Q_TILE = 256
K_TILE = 2048


def extend_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    qo_indptr: list[int],
    cache: LayerCache,
    codec: LayerCodec,
    plan: ReadPlan,
    sm_scale: float,
    logit_cap: float = 0.0,
    impl: str = "auto",
    isa: str | None = None,
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
        sm_scale: factor on the logits.
        logit_cap: soft cap of the logits; 0 for none.
        impl, isa: see `oscar_kernel.choose`.
    Returns:
        [num_tokens, num_qo_heads, v_head_dim] float32.
    """
    chosen = choose("extend_attention", impl, isa, cache, codec, q)
    if chosen == "triton":
        from oscar_kernel.triton import extend as triton_extend
        from oscar_kernel.triton import plan as triton_plan

        made = triton_plan.from_read_plan(plan, cache.k_buffer.shape[1])
        return triton_extend.extend_attention(q, k_new, v_new, qo_indptr, cache, codec, made, sm_scale, logit_cap)
    if chosen == "cpu":
        return cpu.extend_attention(q, k_new, v_new, qo_indptr, cache, codec, plan, sm_scale, logit_cap, isa)
    return extend_attention_ref(q, k_new, v_new, qo_indptr, cache, codec, plan, sm_scale, logit_cap)


def extend_attention_ref(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    qo_indptr: list[int],
    cache: LayerCache,
    codec: LayerCodec,
    plan: ReadPlan,
    sm_scale: float,
    logit_cap: float = 0.0,
) -> Tensor:
    """`extend_attention` in PyTorch."""
    q = codec.transform_q(q)
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
    return codec.restore_o(out)


def _prefix_parts(q, b, prefix_len, cache, codec, plan, sm_scale, logit_cap):
    """(o, lse) of one sequence's cached prefix: its windows, then its 2-bit rows tile by tile."""
    if prefix_len == 0:
        return
    rows = plan.window_rows[b : b + 1]
    k, v = cache.k_window[rows].float(), cache.v_window[rows].float()
    yield attend(q, k, v, plan.window_mask[b : b + 1, None, None], sm_scale, logit_cap)
    for start in range(0, prefix_len, K_TILE):
        part = slice(start, min(start + K_TILE, prefix_len))
        slots, mask = plan.slots[b : b + 1, part], plan.packed_mask[b : b + 1, part]
        yield attend_packed(q, cache, codec, slots, mask, sm_scale, logit_cap)
