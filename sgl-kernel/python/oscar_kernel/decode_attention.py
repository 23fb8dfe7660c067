"""Decode: one query a sequence against its cached tokens."""

from __future__ import annotations

from torch import Tensor

from oscar_kernel.attend import attend, merge_states
from oscar_kernel.choose import choose
from oscar_kernel.cpu import library as cpu
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.plan_read import ReadPlan

TILE_ELEMENTS = 4 << 20
"""Decoded elements held at once (K and V each), 16 MiB of float32: no step unpacks a whole cache."""


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    codec: LayerCodec,
    plan: ReadPlan,
    sm_scale: float,
    logit_cap: float = 0.0,
    impl: str = "auto",
    isa: str | None = None,
) -> Tensor:
    """Attention of one new token a sequence; the token itself is already in the cache.

    Args:
        q: [bs, num_qo_heads, head_dim], after RoPE, not transformed.
        cache, codec: of the layer.
        plan: from `plan_read` with kv_lens that include the new token.
        sm_scale: factor on the logits.
        logit_cap: soft cap of the logits; 0 for none.
        impl, isa: see `oscar_kernel.choose`.
    Returns:
        [bs, num_qo_heads, v_head_dim] float32.
    """
    chosen = choose("decode_attention", impl, isa, cache, codec, q)
    if chosen == "triton":
        from oscar_kernel.triton import decode as triton_decode
        from oscar_kernel.triton import plan as triton_plan

        made = triton_plan.from_read_plan(plan, cache.k_buffer.shape[1])
        return triton_decode.decode_attention(q, cache, codec, made, sm_scale, logit_cap)
    if chosen == "cpu":
        return cpu.decode_attention(q, cache, codec, plan, sm_scale, logit_cap, isa)
    return decode_attention_ref(q, cache, codec, plan, sm_scale, logit_cap)


def decode_attention_ref(
    q: Tensor, cache: LayerCache, codec: LayerCodec, plan: ReadPlan, sm_scale: float, logit_cap: float = 0.0
) -> Tensor:
    """`decode_attention` in PyTorch."""
    q = codec.transform_q(q)
    parts = [
        attend(
            q,
            cache.k_window[plan.window_rows].float(),
            cache.v_window[plan.window_rows].float(),
            plan.window_mask[:, None, None],
            sm_scale,
            logit_cap,
        )
    ]
    bs, num_kv_heads, _, head_dim = q.shape
    tile = max(64, TILE_ELEMENTS // max(1, bs * num_kv_heads * head_dim))
    for start in range(0, plan.slots.shape[1], tile):
        part = slice(start, start + tile)
        parts.append(attend_packed(q, cache, codec, plan.slots[:, part], plan.packed_mask[:, part], sm_scale, logit_cap))
    return codec.restore_o(merge_states(parts))


def attend_packed(
    q: Tensor, cache: LayerCache, codec: LayerCodec, slots: Tensor, mask: Tensor, sm_scale: float, logit_cap: float
) -> tuple[Tensor, Tensor]:
    """One tile of 2-bit rows. q [bs, num_kv_heads, num_q, head_dim] transformed; slots, mask [bs, num_k]; returns (o, lse)."""
    k = codec.decode_k(cache.k_buffer[slots])
    v = codec.decode_v(cache.v_buffer[slots])
    return attend(q, k, v, mask[:, None, None], sm_scale, logit_cap)
