# ruff: noqa: E741 (l is the usual name of a softmax's sum)
"""Decode in Triton: one query a sequence against 2-bit rows and windows, split over the card, and one merge.

Launches a layer: `store_step` with the step's queries, then `decode_kernel` over the work list of `plan`. Partial states of a
sequence are merged in the same launch, by the programs that finish last: the last of JOIN neighbouring items merges those, the
last of such groups merges the groups (`_join`). One program alone would read all of a long sequence's states in turn, which
takes longer than the attention itself. Where values have to be un-transformed, or the launch table says so, `merge_kernel` does
it in a launch of its own, a program a query head.

2-bit splits and window splits are items of one list and run in the same launch. Programs of one item for all KV heads are
neighbours in the grid: a token's rows of all heads are one run of bytes (288 for 8 heads of 128), so the sectors that two
heads share come from L2, and memory moves each byte once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar_kernel.architectures import Architecture
from oscar_kernel.triton.common import LayerTensors, ReadSide, Rows, TritonLayer, interpreted
from oscar_kernel.triton.plan import TritonPlan, slot_of, window_entry
from oscar_kernel.triton.planes import next_power_of_2, plane_channel
from oscar_kernel.triton.query import Queries, prepare_queries
from oscar_kernel.triton.tiles import (
    attend_packed,
    attend_window,
    first_state,
    load_query,
    load_query_16_bit,
    plane_output,
    rows_at,
    settle,
    sum_query,
)
from oscar_kernel.triton.tuning import Launch, architecture, decode_launch

JOIN = 16
"""Partial states that a merge reads at once, and items whose last program merges them."""


class Partial(NamedTuple):
    """Partial states of a step.

    Args:
        out: [num_items, num_qo_heads, v_head_dim] float32, normalised. lse: [num_items, num_qo_heads] float32, in log 2.
        done: [num_items + bs, programs an item] int32, zeros between launches, see `_join`.
    """

    out: Tensor
    lse: Tensor
    done: Tensor


class DecodeBuffers(NamedTuple):
    """Scratch of a decode step, shared by all layers (they run one after another); fixed addresses, for CUDA graphs."""

    queries: Queries
    partial: Partial

    @classmethod
    def make(cls, bs: int, num_items: int, num_qo_heads: int, layer: LayerTensors) -> DecodeBuffers:
        """Buffers for `bs` rows and a plan of `num_items`, of layers like this one."""
        device, kv_group_num = layer.device, num_qo_heads // layer.num_kv_heads
        blocks = layer.num_kv_heads * head_block(kv_group_num, architecture(device))[1]
        partial = Partial(
            torch.empty(num_items, num_qo_heads, layer.v.planes.dim, dtype=torch.float32, device=device),
            torch.empty(num_items, num_qo_heads, dtype=torch.float32, device=device),
            torch.zeros(num_items + bs, blocks, dtype=torch.int32, device=device),
        )
        return cls(Queries.empty(bs, num_qo_heads, layer), partial)


@triton.jit
def _merged(partial, first, last, stride, q_head, HEADS: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr):
    """Merge the partial states of a query head in items first, first + stride, ... below last.

    Returns the output [dim_pad] and its log-sum-exp in log 2; 0 and -inf where no item has seen a token. Reads through L2:
    other programs wrote the states.
    """
    d = tl.arange(0, V.dim_pad)
    m = -1.0e30
    total = 0.0
    acc = tl.zeros((V.dim_pad,), tl.float32)
    for at in range(first, last, TILE * stride):
        i = (at + tl.arange(0, TILE) * stride).to(tl.int64)
        lse = tl.load(partial.lse + i * HEADS + q_head, mask=i < last, other=float("-inf"), cache_modifier=".cg")
        o = tl.load(
            partial.out + (i * HEADS + q_head)[:, None] * V.dim + d[None, :],
            mask=(i < last)[:, None] & (d < V.dim)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(lse, axis=0))
        w = tl.exp2(lse - m_new)
        alpha = tl.exp2(m - m_new)
        acc = acc * alpha + tl.sum(o * w[:, None], axis=0)
        total = total * alpha + tl.sum(w, axis=0)
        m = m_new
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    return acc / total, tl.where(seen, m + tl.log2(total), float("-inf"))


@triton.jit
def _write_output(o, row, V: tl.constexpr):
    """Write one query head's output, o [dim_pad], to where row points."""
    d = tl.arange(0, V.dim_pad)
    tl.store(row + d, o.to(row.dtype.element_ty), mask=d < V.dim)


@triton.jit
def _join(
    partial, indptr_ptr, num_items, b, item, block, first_head, num_heads, out,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, V: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """Merge what can be merged now that this program's partial state is written; the last program writes the output.

    partial.done: [num_items + bs, BLOCKS] int32, programs done: of each group of JOIN items (at its first), and of a request's
    groups. Whoever completes a count sets it back to 0, so the next launch, a graph's replay too, finds zeros.
    block: of done. first_head, num_heads: query heads of this program. out: `Rows`.
    """
    first = tl.load(indptr_ptr + b)
    last = tl.load(indptr_ptr + b + 1)
    to = out.ptr + b.to(tl.int64) * out.stride
    start = first + (item - first) // JOIN * JOIN
    stop = tl.minimum(start + JOIN, last)
    # All lanes' states must be out before the count says so.
    tl.debug_barrier()
    finished = tl.atomic_add(partial.done + start * BLOCKS + block, 1, sem="acq_rel")
    if finished == stop - start - 1:
        tl.store(partial.done + start * BLOCKS + block, 0)
        if last - first <= JOIN:
            for h in range(first_head, first_head + num_heads):
                o, _ = _merged(partial, start, stop, 1, h, HEADS, V, JOIN)
                _write_output(o, to + h * V.dim, V)
        else:
            for h in range(first_head, first_head + num_heads):
                o, lse = _merged(partial, start, stop, 1, h, HEADS, V, JOIN)
                tl.debug_barrier()  # the group's state takes the place of its first item's, which has now been read
                d = tl.arange(0, V.dim_pad)
                tl.store(partial.out + (start.to(tl.int64) * HEADS + h) * V.dim + d, o, mask=d < V.dim)
                tl.store(partial.lse + start.to(tl.int64) * HEADS + h, lse)
            groups = (last - first + JOIN - 1) // JOIN
            tl.debug_barrier()
            finished = tl.atomic_add(partial.done + (num_items + b) * BLOCKS + block, 1, sem="acq_rel")
            if finished == groups - 1:
                tl.store(partial.done + (num_items + b) * BLOCKS + block, 0)
                for h in range(first_head, first_head + num_heads):
                    o, _ = _merged(partial, first, last, JOIN, h, HEADS, V, JOIN)
                    _write_output(o, to + h * V.dim, V)


@triton.jit
def decode_kernel(
    queries, k, v, plan, partial, out, num_items, sm_scale, logit_cap,
    HEADS: tl.constexpr, KV_GROUP_NUM: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW_TILE: tl.constexpr, A_TOKEN: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr, JOINS: tl.constexpr,
    JOIN: tl.constexpr,
):  # fmt: skip
    """Grid: (num_kv_heads * HEAD_BLOCKS, num_items). Writes one partial state an item and query head; JOINS: and merges them.

    queries: `Queries`. k, v: `ReadSide`. plan: `PlanTensors`. partial: `Partial`. out: `Rows`. logit_cap: None for none.
    K, V: `Planes`.
    """
    item = tl.program_id(1)
    b = tl.load(plan.work + item * 4)
    if b < 0:
        return
    begin = tl.load(plan.work + item * 4 + 1)
    end = tl.load(plan.work + item * 4 + 2)
    is_window = tl.load(plan.work + item * 4 + 3)
    start = tl.load(plan.starts + b)
    kv_len = tl.load(plan.kv_lens + b)

    head = tl.program_id(0) // HEAD_BLOCKS
    h = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = h < KV_GROUP_NUM
    q_row = b.to(tl.int64) * HEADS + head * KV_GROUP_NUM + h
    q = load_query(queries.planes, q_row, live, K)
    column_scale = tl.load(queries.amax + q_row, mask=live, other=0.0) * sm_scale
    sums = sum_query(q, K)

    if K.native:
        # Every token is in the pool in 16 bits, those of the windows too.
        q_high, q_low = load_query_16_bit(queries.planes, q_row, live, K, True)
        state = first_state(WINDOW_TILE, BLOCK_H, V, False)
        for first in tl.range(begin, end, WINDOW_TILE, num_stages=STAGES):
            i = first + tl.arange(0, WINDOW_TILE)
            position, counts = window_entry(i, kv_len, SINK, RECENT)
            position = tl.where(is_window == 0, i, position)
            inside = (i < end) & ((is_window == 0) | counts)
            slot = slot_of(plan.slots, start, position, inside)
            k_row = rows_at(k.pool, slot, head, K.row_bytes).to(tl.pointer_type(tl.bfloat16))
            v_row = rows_at(v.pool, slot, head, V.row_bytes).to(tl.pointer_type(tl.bfloat16))
            state = attend_window(
                q_high, q_low, column_scale, logit_cap, k_row, v_row, inside, inside[:, None], state, K, V, True
            )
    elif is_window == 0:
        state = first_state(BLOCK_N, BLOCK_H, V, A_TOKEN)
        for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            position = first + tl.arange(0, BLOCK_N)
            inside = position < end
            slot = slot_of(plan.slots, start, position, inside)
            k_codes, v_codes = rows_at(k.pool, slot, head, K.row_bytes), rows_at(v.pool, slot, head, V.row_bytes)
            state = attend_packed(q, sums, column_scale, logit_cap, k_codes, v_codes, inside, state, K, V, A_TOKEN, FAST)
        state = settle(state, V)
    else:
        q_high, q_low = load_query_16_bit(queries.planes, q_row, live, K, True)
        state = first_state(WINDOW_TILE, BLOCK_H, V, False)
        for first in tl.range(begin, end, WINDOW_TILE, num_stages=1):
            i = first + tl.arange(0, WINDOW_TILE)
            position, counts = window_entry(i, kv_len, SINK, RECENT)
            counts = counts & (i < end)
            row = tl.load(plan.window_rows + b * (SINK + RECENT) + i, mask=counts, other=-1)
            kept = row >= 0
            at = tl.where(kept, row, 0).to(tl.int64)
            k_row, v_row = rows_at(k.window, at, head, K.dim), rows_at(v.window, at, head, V.dim)
            state = attend_window(q_high, q_low, column_scale, logit_cap, k_row, v_row, kept, kept[:, None], state, K, V, True)
            # Tokens whose 16-bit row is gone, seldom any, are read in 2 bits here, not in the splits of the middle.
            lost = counts & (row < 0)
            if tl.max(lost.to(tl.int32), axis=0) > 0:
                slot = slot_of(plan.slots, start, position, lost)
                k_codes, v_codes = rows_at(k.pool, slot, head, K.row_bytes), rows_at(v.pool, slot, head, V.row_bytes)
                state = attend_packed(q, sums, column_scale, logit_cap, k_codes, v_codes, lost, state, K, V, False, FAST)

    m, l = state[0], state[1]
    total = tl.sum(l, axis=0)
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    out_row = item.to(tl.int64) * HEADS + head * KV_GROUP_NUM + h
    tl.store(partial.lse + out_row, tl.where(seen, m + tl.log2(total), float("-inf")), mask=live)
    norm = tl.where(seen, 1.0 / total, 0.0)
    e = tl.arange(0, V.width)
    for i in tl.static_range(8 * V.cuts):
        o = plane_output(i, state, V)
        at = out_row[None, :] * V.dim + (plane_channel(i, V) + 2 * e)[:, None]
        tl.store(partial.out + at, o * norm[None, :], mask=live[None, :] & (2 * e < V.piece)[:, None])
    if JOINS:
        block = tl.program_id(0)
        offset = block % HEAD_BLOCKS * BLOCK_H
        _join(
            partial, plan.work_indptr, num_items, b, item, block, head * KV_GROUP_NUM + offset,
            tl.minimum(KV_GROUP_NUM - offset, BLOCK_H), out, HEADS, HEADS // KV_GROUP_NUM * HEAD_BLOCKS, V, JOIN,
        )  # fmt: skip


@triton.jit
def merge_kernel(
    partial, indptr_ptr, out, inverse_ptr,
    HEADS: tl.constexpr, KV_GROUP_NUM: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (num_qo_heads, bs). Merges a row's partial states, un-transforms, writes the output; 0 where nothing is seen."""
    q_head = tl.program_id(0)
    b = tl.program_id(1)
    acc, _ = _merged(partial, tl.load(indptr_ptr + b), tl.load(indptr_ptr + b + 1), 1, q_head, HEADS, V, TILE)
    row = out.ptr + b.to(tl.int64) * out.stride + q_head * V.dim
    head = q_head // KV_GROUP_NUM
    if inverse_ptr is not None:
        d = tl.arange(0, V.dim_pad)
        for start in range(0, V.dim, COLUMNS):
            e = start + tl.arange(0, COLUMNS)
            at = (head * V.dim + d)[:, None] * V.dim + e[None, :]
            t = tl.load(inverse_ptr + at, mask=(d < V.dim)[:, None] & (e < V.dim)[None, :], other=0.0)
            tl.store(row + e, tl.sum(acc[:, None] * t, axis=0).to(out.ptr.dtype.element_ty), mask=e < V.dim)
    else:
        _write_output(acc, row, V)


def fast_unpack(card: Architecture) -> bool:
    """Whether unpacking may use PTX: on NVIDIA cards, not in the interpreter and not on ROCm."""
    return not interpreted() and card.key.startswith("sm_")


def head_block(kv_group_num: int, card: Architecture) -> tuple[int, int]:
    """Query heads a program takes, padded to the width of a matrix instruction, and programs a KV head."""
    block = min(64, max(card.columns, next_power_of_2(kv_group_num)))
    return block, -(-kv_group_num // block)


def decode_attention(
    q: Tensor,
    layer: TritonLayer,
    plan: TritonPlan,
    sm_scale: float,
    logit_cap: float = 0.0,
    *,
    out: Tensor | None = None,
    buffers: DecodeBuffers | None = None,
    queries_ready: bool = False,
    launch: Launch | None = None,
) -> Tensor:
    """`oscar_kernel.reference.decode_attention` in Triton; capturable when out and buffers are given.

    Args:
        q: [bs, num_qo_heads, head_dim], after RoPE, not transformed.
        layer: to read. plan: with kv_lens that include the new token.
        sm_scale: factor on the logits. logit_cap: soft cap of the logits; 0 for none.
        out: [bs, num_qo_heads, v_head_dim], any float type, heads contiguous; None: a new float32 tensor.
        buffers: scratch; None: new.
        queries_ready: buffers already hold the prepared queries, from `store.store_step`; q gives the shape alone.
        launch: shape of the launch; None: from the table in `tuning`.
    Returns:
        out; rows of sequences without tokens are 0.
    """
    tensors = layer.tensors
    bs, heads = q.shape[:2]
    k, v = tensors.k.planes, tensors.v.planes
    kv_group_num = heads // tensors.num_kv_heads
    if out is None:
        out = torch.empty(bs, heads, v.dim, dtype=torch.float32, device=q.device)
    if bs == 0:
        return out
    if buffers is None:
        buffers = DecodeBuffers.make(bs, plan.num_items, heads, tensors)
    if not queries_ready:
        prepare_queries(q, tensors, buffers.queries)
    card = architecture(q.device)
    block, head_blocks = head_block(kv_group_num, card)
    if launch is None:
        launch = decode_launch(card.key, v.dim, kv_group_num, bs, v.num_groups)
    inverse = tensors.v.read_transform
    joins = launch.join and inverse is None
    decode_kernel[(tensors.num_kv_heads * head_blocks, plan.num_items)](
        queries=buffers.queries,
        k=ReadSide.of(layer.cache.k),
        v=ReadSide.of(layer.cache.v),
        plan=plan.tensors,
        partial=buffers.partial,
        out=Rows.of(out),
        num_items=plan.num_items,
        sm_scale=sm_scale,
        logit_cap=logit_cap if logit_cap > 0 else None,
        HEADS=heads,
        KV_GROUP_NUM=kv_group_num,
        BLOCK_H=block,
        HEAD_BLOCKS=head_blocks,
        SINK=plan.sink_tokens,
        RECENT=plan.recent_tokens,
        K=k,
        V=v,
        BLOCK_N=launch.block_n,
        WINDOW_TILE=launch.window_tile,
        A_TOKEN=launch.a_token,
        FAST=fast_unpack(card),
        STAGES=launch.num_stages,
        JOINS=joins,
        JOIN=JOIN,
        num_warps=launch.num_warps,
    )
    if not joins:
        merge_kernel[(heads, bs)](
            partial=buffers.partial,
            indptr_ptr=plan.tensors.work_indptr,
            out=Rows.of(out),
            inverse_ptr=inverse,
            HEADS=heads,
            KV_GROUP_NUM=kv_group_num,
            V=v,
            TILE=JOIN,
            COLUMNS=32,
            num_warps=4,
        )
    return out
