# ruff: noqa: E741, RUF005 (l is the usual name of a softmax's sum; Triton has no starred tuples)
"""Extend in Triton: new tokens of a ragged batch against their cached prefix and among themselves, in one kernel.

A program takes COLUMNS queries (tokens times the query heads of one KV head) of one sequence and walks, tile by tile, the 2-bit
middle of the prefix, its windows, and the new tokens in bfloat16 up to its own last one. The reader of the prefix is decode's
(`triton_tiles`), so a chunk sees the same numbers as a decode step would, and nothing is ever unpacked to memory: what a
program holds beside its queries is one tile.

The same kernel serves chunked prefill, mixed batches and the verification of a chain of draft tokens.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.triton.common import LayerTensors, prepare, with_adjacent_heads
from oscar_kernel.triton.decode import fast_unpack, side_shape
from oscar_kernel.triton.plan import TritonPlan, slot_of
from oscar_kernel.triton.query import prepare_queries
from oscar_kernel.triton.tiles import (
    attend_packed,
    attend_window,
    first_state,
    load_query,
    load_query_16_bit,
    plane_channel,
    plane_output,
    sum_query,
)
from oscar_kernel.triton.tuning import architecture, extend_shape

TILE = 16
"""Keys of a tile: one matrix instruction high, so that every warp keeps its queries to itself."""
WIDE_TILE = 32
"""The same for rows of more than 256 elements of K and V, with whose 16 queries a program has too little to do otherwise."""


@triton.jit
def extend_kernel(
    q_ptr, amax_ptr, k_new, v_new, k_new_stride, v_new_stride, indptr_ptr,
    k_ptr, v_ptr, k_slot_bytes, v_slot_bytes, k_window, v_window, k_window_stride, v_window_stride,
    slots_ptr, starts_ptr, kv_lens_ptr, rows_ptr, k_levels, v_levels, out_ptr, out_stride, inverse_ptr, mean_ptr,
    sm_scale, logit_cap,
    HEADS: tl.constexpr, RATIO: tl.constexpr, COLUMNS: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr,
    K_DIM: tl.constexpr, K_QUARTER: tl.constexpr, K_PIECE: tl.constexpr, K_WIDTH: tl.constexpr, K_CUTS: tl.constexpr,
    K_GROUP: tl.constexpr, K_BYTES: tl.constexpr, K_BF16: tl.constexpr, K_LEVELS: tl.constexpr,
    V_DIM: tl.constexpr, V_QUARTER: tl.constexpr, V_PIECE: tl.constexpr, V_WIDTH: tl.constexpr, V_CUTS: tl.constexpr,
    V_GROUP: tl.constexpr, V_BYTES: tl.constexpr, V_BF16: tl.constexpr, V_LEVELS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_INVERSE: tl.constexpr, HAS_MEAN: tl.constexpr, FAST: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of COLUMNS queries of the longest sequence, num_kv_heads, bs). Arguments as in `extend_attention`."""
    b = tl.program_id(2)
    head = tl.program_id(1)
    first_row = tl.load(indptr_ptr + b)
    num_new = tl.load(indptr_ptr + b + 1) - first_row
    column0 = tl.program_id(0) * COLUMNS
    if column0 >= num_new * RATIO:
        return
    column = column0 + tl.arange(0, COLUMNS)
    token = column // RATIO
    live = token < num_new
    q_row = (first_row + token).to(tl.int64) * HEADS + head * RATIO + column % RATIO
    column_scale = tl.load(amax_ptr + q_row, mask=live, other=0.0) * sm_scale
    m, l, scale, rank1, ones, acc = first_state(TILE, COLUMNS, V_WIDTH, V_CUTS, V_DIM // V_GROUP, False)

    start = tl.load(starts_ptr + b)
    kv_len = tl.load(kv_lens_ptr + b)
    if NATIVE:
        # Every token is in the pool in 16 bits, those of the windows too.
        q_high, q_low = load_query_16_bit(q_ptr, q_row, live, K_WIDTH, K_CUTS, K_LEVELS, False)
        for first in tl.range(0, kv_len, TILE, num_stages=1):
            position = first + tl.arange(0, TILE)
            inside = position < kv_len
            slot = slot_of(slots_ptr, start, position, inside, PAGE)
            m, l, scale, rank1, ones, acc = attend_window(
                q_high, q_low, column_scale, logit_cap,
                k_ptr.to(tl.pointer_type(tl.bfloat16)), v_ptr.to(tl.pointer_type(tl.bfloat16)),
                k_slot_bytes // 2, v_slot_bytes // 2, head, slot, inside, inside[:, None],
                m, l, scale, rank1, ones, acc,
                K_DIM, K_QUARTER, K_PIECE, K_WIDTH, K_CUTS,
                V_DIM, V_QUARTER, V_PIECE, V_WIDTH, V_CUTS, V_GROUP, V_LEVELS, HAS_CAP, False, False,
            )  # fmt: skip
    else:
        q = load_query(q_ptr, q_row, live, K_WIDTH, K_CUTS)
        q_sum, q_offset = sum_query(q, K_QUARTER, K_PIECE, K_CUTS, K_GROUP, K_LEVELS)
        # The 2-bit rows: the middle, and tokens of the windows whose 16-bit row is gone.
        recent = tl.maximum(kv_len - RECENT, SINK)
        for first in range(0, kv_len, TILE):
            position = first + tl.arange(0, TILE)
            inside = position < kv_len
            entry = tl.where(position < SINK, position, SINK + RECENT - kv_len + position)
            in_window = inside & ((position < SINK) | (position >= recent))
            row = tl.load(rows_ptr + b * (SINK + RECENT) + entry, mask=in_window, other=-1)
            inside = inside & (row < 0)
            if tl.max(inside.to(tl.int32), axis=0) > 0:
                slot = slot_of(slots_ptr, start, position, inside, PAGE)
                m, l, scale, rank1, ones, acc = attend_packed(
                    q, q_sum, q_offset, column_scale, logit_cap, k_ptr, v_ptr, k_slot_bytes, v_slot_bytes, head, slot, inside,
                    k_levels, v_levels, m, l, scale, rank1, ones, acc,
                    K_QUARTER, K_PIECE, K_WIDTH, K_CUTS, K_GROUP, K_BYTES, K_BF16, K_LEVELS,
                    V_QUARTER, V_PIECE, V_WIDTH, V_CUTS, V_GROUP, V_BYTES, V_BF16, V_LEVELS, HAS_CAP, False, FAST,
                )  # fmt: skip

        q_high, q_low = load_query_16_bit(q_ptr, q_row, live, K_WIDTH, K_CUTS, K_LEVELS, False)
        for first in tl.range(0, tl.where(kv_len > 0, SINK + RECENT, 0), TILE, num_stages=1):
            i = first + tl.arange(0, TILE)
            row = tl.load(rows_ptr + b * (SINK + RECENT) + i, mask=i < SINK + RECENT, other=-1)
            kept = row >= 0
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                m, l, scale, rank1, ones, acc = attend_window(
                    q_high, q_low, column_scale, logit_cap, k_window, v_window, k_window_stride, v_window_stride, head,
                    tl.where(kept, row, 0).to(tl.int64), kept, kept[:, None], m, l, scale, rank1, ones, acc,
                    K_DIM, K_QUARTER, K_PIECE, K_WIDTH, K_CUTS,
                    V_DIM, V_QUARTER, V_PIECE, V_WIDTH, V_CUTS, V_GROUP, V_LEVELS, HAS_CAP, False, False,
                )  # fmt: skip

    last = tl.minimum((column0 + COLUMNS - 1) // RATIO + 1, num_new)
    for first in tl.range(0, last, TILE, num_stages=1):
        i = first + tl.arange(0, TILE)
        m, l, scale, rank1, ones, acc = attend_window(
            q_high, q_low, column_scale, logit_cap, k_new, v_new, k_new_stride, v_new_stride, head,
            (first_row + i).to(tl.int64), i < num_new, i[:, None] <= token[None, :], m, l, scale, rank1, ones, acc,
            K_DIM, K_QUARTER, K_PIECE, K_WIDTH, K_CUTS,
            V_DIM, V_QUARTER, V_PIECE, V_WIDTH, V_CUTS, V_GROUP, V_LEVELS, HAS_CAP, False, False,
        )  # fmt: skip

    norm = 1.0 / tl.sum(l, axis=0)
    e = tl.arange(0, V_WIDTH)
    o = ()
    for i in tl.static_range(8 * V_CUTS):
        o = o + (plane_output(i, scale, rank1, ones, acc, V_QUARTER, V_PIECE, V_CUTS, V_GROUP, V_LEVELS) * norm[None, :],)
    to = out_ptr + (first_row + token).to(tl.int64) * out_stride + (head * RATIO + column % RATIO) * V_DIM
    if HAS_INVERSE:
        for at in range(0, V_DIM, 32):
            d = at + tl.arange(0, 32)
            total = tl.zeros((32, COLUMNS), tl.float32)
            for i in tl.static_range(8 * V_CUTS):
                channel = plane_channel(i, V_QUARTER, V_PIECE, V_CUTS) + 2 * e
                t = tl.load(
                    inverse_ptr + (head * V_DIM + channel)[None, :] * V_DIM + d[:, None],
                    mask=(2 * e < V_PIECE)[None, :] & (d < V_DIM)[:, None], other=0.0,
                )  # fmt: skip
                total = tl.dot(t, o[i], total, input_precision="ieee")
            if HAS_MEAN:
                total += tl.load(mean_ptr + head * V_DIM + d, mask=d < V_DIM, other=0.0)[:, None]
            mask = live[None, :] & (d < V_DIM)[:, None]
            tl.store(to[None, :] + d[:, None], total.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        for i in tl.static_range(8 * V_CUTS):
            channel = plane_channel(i, V_QUARTER, V_PIECE, V_CUTS) + 2 * e
            x = o[i]
            if HAS_MEAN:
                x += tl.load(mean_ptr + head * V_DIM + channel, mask=2 * e < V_PIECE, other=0.0)[:, None]
            mask = live[None, :] & (2 * e < V_PIECE)[:, None]
            tl.store(to[None, :] + channel[:, None], x.to(out_ptr.dtype.element_ty), mask=mask)


def extend_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    qo_indptr: list[int] | Tensor,
    cache: LayerCache,
    codec: LayerCodec,
    plan: TritonPlan,
    sm_scale: float,
    logit_cap: float = 0.0,
    *,
    max_new: int | None = None,
    out: Tensor | None = None,
    queries: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`oscar_kernel.extend_attention` in Triton.

    Args:
        q: [num_tokens, num_qo_heads, head_dim], after RoPE, not transformed.
        k_new: [num_tokens, num_kv_heads, head_dim] bfloat16, as `store_kv` returns it. v_new: likewise, v_head_dim.
        qo_indptr: [bs + 1], ranges of new tokens; a list, or int32 on the device.
        cache, codec: of the layer. plan: from triton_plan, with the lengths of the cached prefixes.
        sm_scale: factor on the logits. logit_cap: soft cap of the logits; 0 for none.
        max_new: longest range of new tokens; must be given with a tensor qo_indptr (the host does not read it).
        out: [num_tokens, num_qo_heads, v_head_dim] any float type, heads contiguous; None: new, float32.
        queries: buffers for `prepare_queries`; None: new.
    Returns:
        out.
    """
    layer: LayerTensors = prepare(codec)
    num_tokens, heads = q.shape[:2]
    k, v = layer.k, layer.v
    num_kv_heads = layer.q_transform.shape[0]
    ratio = heads // num_kv_heads
    if isinstance(qo_indptr, Tensor):
        if max_new is None:
            raise ValueError("extend_attention: a qo_indptr on the device needs max_new")
    else:
        max_new = max((b - a for a, b in itertools.pairwise(qo_indptr)), default=0)
        qo_indptr = torch.tensor(qo_indptr, dtype=torch.int32, device=q.device)
    if out is None:
        out = torch.empty(num_tokens, heads, v.dim, dtype=torch.float32, device=q.device)
    if num_tokens == 0 or max_new == 0:
        return out
    k_new, v_new = with_adjacent_heads(k_new), with_adjacent_heads(v_new)
    queries = prepare_queries(q, layer, queries)
    levels = layer.k_levels is not None or layer.v_levels is not None
    card = architecture(q.device)
    columns, num_warps = extend_shape(card, max_new * ratio, k.dim, v.dim, v.num_groups, levels)
    extend_kernel[(triton.cdiv(max_new * ratio, columns), num_kv_heads, qo_indptr.shape[0] - 1)](
        *queries, k_new, v_new, k_new.stride(0), v_new.stride(0), qo_indptr,
        cache.k_buffer, cache.v_buffer, cache.k_buffer.stride(0), cache.v_buffer.stride(0),
        cache.k_window, cache.v_window, cache.k_window.stride(0), cache.v_window.stride(0),
        plan.slots, plan.starts, plan.kv_lens, plan.window_rows, layer.k_levels, layer.v_levels, out, out.stride(0),
        layer.v_inverse, layer.v_mean_out, sm_scale, logit_cap,
        heads, ratio, columns, plan.sink_tokens, plan.recent_tokens, plan.page_size,
        WIDE_TILE if k.dim + v.dim > 256 else TILE,
        k.dim, *side_shape(k), layer.k_levels is not None, v.dim, *side_shape(v), layer.v_levels is not None, logit_cap > 0,
        layer.v_inverse is not None, layer.v_mean_out is not None, fast_unpack(card), k.native,
        num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    return out
