# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton has no starred tuples)
"""Extend in Triton: new tokens of a ragged batch against their cached prefix and among themselves, in one kernel.

A program takes COLUMNS queries (tokens times the query heads of one KV head) of one sequence and walks, tile by tile, the 2-bit
middle of the prefix, its windows, and the new tokens in bfloat16 up to its own last one. The reader of the prefix is decode's
(`tiles`), so a chunk sees the same numbers as a decode step would, and nothing is ever unpacked to memory: what a program holds
beside its queries is one tile.

The same kernel serves chunked prefill, mixed batches and the verification of a chain of draft tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar_kernel.triton.common import ReadSide, Rows, TritonLayer, with_adjacent_heads
from oscar_kernel.triton.decode import fast_unpack
from oscar_kernel.triton.plan import TritonPlan, entry_of, slot_of
from oscar_kernel.triton.planes import plane_channel
from oscar_kernel.triton.query import Queries, prepare_queries
from oscar_kernel.triton.tiles import (
    attend_packed,
    attend_window,
    first_state,
    load_query,
    load_query_16_bit,
    plane_output,
    rows_at,
    sum_query,
)
from oscar_kernel.triton.tuning import architecture, extend_launch

TILE = 16
"""Keys of a tile: one matrix instruction high, so that every warp keeps its queries to itself."""
WIDE_TILE = 32
"""The same for rows of more than 256 elements of K and V, with whose 16 queries a program has too little to do otherwise."""


@triton.jit
def extend_kernel(
    queries, k_new, v_new, indptr_ptr, k, v, plan, out, inverse_ptr, sm_scale, logit_cap,
    HEADS: tl.constexpr, KV_GROUP_NUM: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, SINK: tl.constexpr,
    RECENT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of COLUMNS queries of the longest sequence, num_kv_heads, bs).

    queries: `Queries`. k_new, v_new: `Rows` of the new tokens in stored space. k, v: `ReadSide`. plan: `PlanTensors`. out:
    `Rows`. logit_cap: None for none. K, V: `Planes`. The rest as in `extend_attention`.
    """
    b = tl.program_id(2)
    head = tl.program_id(1)
    first_row = tl.load(indptr_ptr + b)
    num_new = tl.load(indptr_ptr + b + 1) - first_row
    column0 = tl.program_id(0) * COLUMNS
    if column0 >= num_new * KV_GROUP_NUM:
        return
    column = column0 + tl.arange(0, COLUMNS)
    token = column // KV_GROUP_NUM
    live = token < num_new
    q_row = (first_row + token).to(tl.int64) * HEADS + head * KV_GROUP_NUM + column % KV_GROUP_NUM
    column_scale = tl.load(queries.amax + q_row, mask=live, other=0.0) * sm_scale
    state = first_state(TILE, COLUMNS, V, False)

    start = tl.load(plan.starts + b)
    kv_len = tl.load(plan.kv_lens + b)
    if K.native:
        # Every token is in the pool in 16 bits, those of the windows too.
        q_high, q_low = load_query_16_bit(queries.planes, q_row, live, K, False)
        for first in tl.range(0, kv_len, TILE, num_stages=1):
            position = first + tl.arange(0, TILE)
            inside = position < kv_len
            slot = slot_of(plan.slots, start, position, inside)
            k_row = rows_at(k.pool, slot, head, K.row_bytes).to(tl.pointer_type(tl.bfloat16))
            v_row = rows_at(v.pool, slot, head, V.row_bytes).to(tl.pointer_type(tl.bfloat16))
            state = attend_window(
                q_high, q_low, column_scale, logit_cap, k_row, v_row, inside, inside[:, None], state, K, V, False
            )
    else:
        q = load_query(queries.planes, q_row, live, K)
        sums = sum_query(q, K)
        # The 2-bit rows: the middle, and tokens of the windows whose 16-bit row is gone.
        for first in range(0, kv_len, TILE):
            position = first + tl.arange(0, TILE)
            inside = position < kv_len
            entry, in_window = entry_of(position, kv_len, SINK, RECENT)
            row = tl.load(plan.window_rows + b * (SINK + RECENT) + entry, mask=inside & in_window, other=-1)
            inside = inside & (row < 0)
            if tl.max(inside.to(tl.int32), axis=0) > 0:
                slot = slot_of(plan.slots, start, position, inside)
                k_codes, v_codes = rows_at(k.pool, slot, head, K.row_bytes), rows_at(v.pool, slot, head, V.row_bytes)
                state = attend_packed(q, sums, column_scale, logit_cap, k_codes, v_codes, inside, state, K, V, False, FAST)

        q_high, q_low = load_query_16_bit(queries.planes, q_row, live, K, False)
        for first in tl.range(0, tl.where(kv_len > 0, SINK + RECENT, 0), TILE, num_stages=1):
            i = first + tl.arange(0, TILE)
            row = tl.load(plan.window_rows + b * (SINK + RECENT) + i, mask=i < SINK + RECENT, other=-1)
            kept = row >= 0
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                at = tl.where(kept, row, 0).to(tl.int64)
                k_row, v_row = rows_at(k.window, at, head, K.dim), rows_at(v.window, at, head, V.dim)
                state = attend_window(
                    q_high, q_low, column_scale, logit_cap, k_row, v_row, kept, kept[:, None], state, K, V, False
                )

    last = tl.minimum((column0 + COLUMNS - 1) // KV_GROUP_NUM + 1, num_new)
    for first in tl.range(0, last, TILE, num_stages=1):
        i = first + tl.arange(0, TILE)
        row = (first_row + i).to(tl.int64)
        k_row, v_row = rows_at(k_new, row, head, K.dim), rows_at(v_new, row, head, V.dim)
        state = attend_window(
            q_high, q_low, column_scale, logit_cap, k_row, v_row, i < num_new, i[:, None] <= token[None, :], state, K, V, False
        )

    norm = 1.0 / tl.sum(state[1], axis=0)
    e = tl.arange(0, V.width)
    o = ()
    for i in tl.static_range(8 * V.cuts):
        o = o + (plane_output(i, state, V) * norm[None, :],)
    to = out.ptr + (first_row + token).to(tl.int64) * out.stride + (head * KV_GROUP_NUM + column % KV_GROUP_NUM) * V.dim
    if inverse_ptr is not None:
        for at in range(0, V.dim, 32):
            d = at + tl.arange(0, 32)
            total = tl.zeros((32, COLUMNS), tl.float32)
            for i in tl.static_range(8 * V.cuts):
                channel = plane_channel(i, V) + 2 * e
                t = tl.load(
                    inverse_ptr + (head * V.dim + channel)[None, :] * V.dim + d[:, None],
                    mask=(2 * e < V.piece)[None, :] & (d < V.dim)[:, None], other=0.0,
                )  # fmt: skip
                total = tl.dot(t, o[i], total, input_precision="ieee")
            mask = live[None, :] & (d < V.dim)[:, None]
            tl.store(to[None, :] + d[:, None], total.to(out.ptr.dtype.element_ty), mask=mask)
    else:
        for i in tl.static_range(8 * V.cuts):
            channel = plane_channel(i, V) + 2 * e
            mask = live[None, :] & (2 * e < V.piece)[:, None]
            tl.store(to[None, :] + channel[:, None], o[i].to(out.ptr.dtype.element_ty), mask=mask)


def extend_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    qo_indptr: Tensor,
    max_new: int,
    layer: TritonLayer,
    plan: TritonPlan,
    sm_scale: float,
    logit_cap: float = 0.0,
    *,
    out: Tensor | None = None,
    queries: Queries | None = None,
) -> Tensor:
    """`oscar_kernel.reference.extend_attention` in Triton.

    Args:
        q: [num_tokens, num_qo_heads, head_dim], after RoPE, not transformed.
        k_new: [num_tokens, num_kv_heads, head_dim] bfloat16, as `store_kv` returns it. v_new: likewise, v_head_dim.
        qo_indptr: [bs + 1] int32 on the device, ranges of new tokens. max_new: the longest of them.
        layer: to read. plan: with the lengths of the cached prefixes.
        sm_scale: factor on the logits. logit_cap: soft cap of the logits; 0 for none.
        out: [num_tokens, num_qo_heads, v_head_dim] any float type, heads contiguous; None: new, float32.
        queries: buffers for `prepare_queries`; None: new.
    Returns:
        out.
    """
    tensors = layer.tensors
    num_tokens, heads = q.shape[:2]
    k, v = tensors.k.planes, tensors.v.planes
    kv_group_num = heads // tensors.num_kv_heads
    if out is None:
        out = torch.empty(num_tokens, heads, v.dim, dtype=torch.float32, device=q.device)
    if num_tokens == 0 or max_new == 0:
        return out
    card = architecture(q.device)
    columns, num_warps = extend_launch(card, max_new * kv_group_num, k.dim, v.dim, v.num_groups)
    extend_kernel[(triton.cdiv(max_new * kv_group_num, columns), tensors.num_kv_heads, qo_indptr.shape[0] - 1)](
        queries=prepare_queries(q, tensors, queries),
        k_new=Rows.of(with_adjacent_heads(k_new)),
        v_new=Rows.of(with_adjacent_heads(v_new)),
        indptr_ptr=qo_indptr,
        k=ReadSide.of(layer.cache.k),
        v=ReadSide.of(layer.cache.v),
        plan=plan.tensors,
        out=Rows.of(out),
        inverse_ptr=tensors.v.read_transform,
        sm_scale=sm_scale,
        logit_cap=logit_cap if logit_cap > 0 else None,
        HEADS=heads,
        KV_GROUP_NUM=kv_group_num,
        COLUMNS=columns,
        TILE=WIDE_TILE if k.dim + v.dim > 256 else TILE,
        SINK=plan.sink_tokens,
        RECENT=plan.recent_tokens,
        K=k,
        V=v,
        FAST=fast_unpack(card),
        num_warps=num_warps,
        num_stages=2,
    )
    return out
