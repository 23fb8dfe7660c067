# ruff: noqa: E741 (l is the usual name of a softmax's sum; Triton has no starred tuples)
"""Decode in Triton: one query a sequence against 2-bit rows and windows, split over the card, and one merge.

Launches a layer: `store_kv` with the step's queries, then `decode_kernel` over the work list of triton_plan. Partial states of
a sequence are merged in the same launch, by the programs that finish last: the last of JOIN neighbouring items merges those,
the last of such groups merges the groups (`_join`). One program alone would read all of a long sequence's states in turn, which
takes longer than the attention itself. Where values have to be un-transformed, or the launch table says so, `merge_kernel`
does it in a launch of its own, a program a query head.

2-bit splits and window splits are items of one list and run in the same launch. Programs of one item for all KV heads are
neighbours in the grid: a token's rows of all heads are one run of bytes (288 for 8 heads of 128), so the sectors that two
heads share come from L2, and memory moves each byte once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar_kernel.architectures import Architecture
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.triton.common import LayerTensors, Planes, interpreted, next_power_of_2, prepare
from oscar_kernel.triton.plan import TritonPlan, slot_of
from oscar_kernel.triton.query import prepare_queries, query_buffers
from oscar_kernel.triton.tiles import (
    attend_packed,
    attend_window,
    first_state,
    load_query,
    load_query_16_bit,
    plane_channel,
    plane_output,
    settle,
    sum_query,
)
from oscar_kernel.triton.tuning import Launch, architecture, choose

JOIN = 16
"""Partial states that a merge reads at once, and items whose last program merges them."""


@triton.jit
def _merged(part_ptr, lse_ptr, first, last, stride, q_head, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    """Merge the partial states of a query head in items first, first + stride, ... below last.

    Returns the output [DIM_PAD] and its log-sum-exp in log 2; 0 and -inf where no item has seen a token. Reads through L2:
    other programs wrote the states.
    """
    d = tl.arange(0, DIM_PAD)
    m = -1.0e30
    total = 0.0
    acc = tl.zeros((DIM_PAD,), tl.float32)
    for at in range(first, last, TILE * stride):
        i = (at + tl.arange(0, TILE) * stride).to(tl.int64)
        lse = tl.load(lse_ptr + i * HEADS + q_head, mask=i < last, other=float("-inf"), cache_modifier=".cg")
        o = tl.load(
            part_ptr + (i * HEADS + q_head)[:, None] * DIM + d[None, :],
            mask=(i < last)[:, None] & (d < DIM)[None, :], other=0.0, cache_modifier=".cg",
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
def _write_output(o, lse, out_row, mean_ptr, head, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HAS_MEAN: tl.constexpr):
    """Write one query head's output; what has seen no token is 0."""
    d = tl.arange(0, DIM_PAD)
    if HAS_MEAN:
        o += tl.where(lse > float("-inf"), tl.load(mean_ptr + head * DIM + d, mask=d < DIM, other=0.0), 0.0)
    tl.store(out_row + d, o.to(out_row.dtype.element_ty), mask=d < DIM)


@triton.jit
def _join(
    part_ptr, lse_ptr, count_ptr, num_items, b, item, first, last, block, head, first_head, num_heads,
    out_ptr, out_stride, mean_ptr,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, JOIN: tl.constexpr,
    HAS_MEAN: tl.constexpr,
):  # fmt: skip
    """Merge what can be merged now that this program's partial state is written; the last program writes the output.

    count_ptr: [num_items + bs, BLOCKS] int32, programs done: of each group of JOIN items (at its first), and of a request's
    groups. Whoever completes a count sets it back to 0, so the next launch, a graph's replay too, finds zeros.
    first, last: items of request b. block: of count_ptr. first_head, num_heads: query heads of this program.
    """
    start = first + (item - first) // JOIN * JOIN
    stop = tl.minimum(start + JOIN, last)
    # All lanes' states must be out before the count says so.
    tl.debug_barrier()
    done = tl.atomic_add(count_ptr + start * BLOCKS + block, 1, sem="acq_rel")
    if done == stop - start - 1:
        tl.store(count_ptr + start * BLOCKS + block, 0)
        if last - first <= JOIN:
            for h in range(first_head, first_head + num_heads):
                o, lse = _merged(part_ptr, lse_ptr, start, stop, 1, h, HEADS, DIM, DIM_PAD, JOIN)
                _write_output(o, lse, out_ptr + b.to(tl.int64) * out_stride + h * DIM, mean_ptr, head, DIM, DIM_PAD, HAS_MEAN)
        else:
            for h in range(first_head, first_head + num_heads):
                o, lse = _merged(part_ptr, lse_ptr, start, stop, 1, h, HEADS, DIM, DIM_PAD, JOIN)
                tl.debug_barrier()  # the group's state takes the place of its first item's, which has now been read
                d = tl.arange(0, DIM_PAD)
                tl.store(part_ptr + (start.to(tl.int64) * HEADS + h) * DIM + d, o, mask=d < DIM)
                tl.store(lse_ptr + start.to(tl.int64) * HEADS + h, lse)
            groups = (last - first + JOIN - 1) // JOIN
            tl.debug_barrier()
            done = tl.atomic_add(count_ptr + (num_items + b) * BLOCKS + block, 1, sem="acq_rel")
            if done == groups - 1:
                tl.store(count_ptr + (num_items + b) * BLOCKS + block, 0)
                for h in range(first_head, first_head + num_heads):
                    o, lse = _merged(part_ptr, lse_ptr, first, last, JOIN, h, HEADS, DIM, DIM_PAD, JOIN)
                    _write_output(
                        o, lse, out_ptr + b.to(tl.int64) * out_stride + h * DIM, mean_ptr, head, DIM, DIM_PAD, HAS_MEAN
                    )


@triton.jit
def decode_kernel(
    q_ptr, amax_ptr, k_ptr, v_ptr, k_slot_bytes, v_slot_bytes, k_window, v_window, k_window_stride, v_window_stride,
    slots_ptr, starts_ptr, kv_lens_ptr, rows_ptr, work_ptr, indptr_ptr, k_levels, v_levels, part_ptr, lse_ptr, count_ptr,
    out_ptr, out_stride, mean_ptr, num_items, sm_scale, logit_cap,
    HEADS: tl.constexpr, RATIO: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW_TILE: tl.constexpr,
    K_DIM: tl.constexpr, K_QUARTER: tl.constexpr, K_PIECE: tl.constexpr, K_WIDTH: tl.constexpr, K_CUTS: tl.constexpr,
    K_GROUP: tl.constexpr, K_BYTES: tl.constexpr, K_BF16: tl.constexpr, K_LEVELS: tl.constexpr,
    V_DIM: tl.constexpr, V_QUARTER: tl.constexpr, V_PIECE: tl.constexpr, V_WIDTH: tl.constexpr, V_CUTS: tl.constexpr,
    V_GROUP: tl.constexpr, V_BYTES: tl.constexpr, V_BF16: tl.constexpr, V_LEVELS: tl.constexpr, HAS_CAP: tl.constexpr,
    A_TOKEN: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr, JOINS: tl.constexpr, JOIN: tl.constexpr,
    V_PAD: tl.constexpr, HAS_MEAN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Grid: (num_kv_heads * HEAD_BLOCKS, num_items). Writes one partial state an item and query head; JOINS: and merges them.

    part_ptr: [num_items, num_qo_heads, v_head_dim] float32, normalised. lse_ptr: [num_items, num_qo_heads], in log 2.
    """
    item = tl.program_id(1)
    b = tl.load(work_ptr + item * 4)
    if b < 0:
        return
    begin = tl.load(work_ptr + item * 4 + 1)
    end = tl.load(work_ptr + item * 4 + 2)
    is_window = tl.load(work_ptr + item * 4 + 3)
    start = tl.load(starts_ptr + b)
    kv_len = tl.load(kv_lens_ptr + b)

    head = tl.program_id(0) // HEAD_BLOCKS
    h = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = h < RATIO
    q_row = b.to(tl.int64) * HEADS + head * RATIO + h
    q = load_query(q_ptr, q_row, live, K_WIDTH, K_CUTS)
    column_scale = tl.load(amax_ptr + q_row, mask=live, other=0.0) * sm_scale
    q_sum, q_offset = sum_query(q, K_QUARTER, K_PIECE, K_CUTS, K_GROUP, K_LEVELS)

    if NATIVE:
        # Every token is in the pool in 16 bits, those of the windows too.
        q_high, q_low = load_query_16_bit(q_ptr, q_row, live, K_WIDTH, K_CUTS, K_LEVELS, True)
        m, l, scale, rank1, ones, acc = first_state(WINDOW_TILE, BLOCK_H, V_WIDTH, V_CUTS, V_DIM // V_GROUP, False)
        for first in tl.range(begin, end, WINDOW_TILE, num_stages=STAGES):
            i = first + tl.arange(0, WINDOW_TILE)
            position = tl.where((is_window == 0) | (i < SINK), i, kv_len - RECENT + i - SINK)
            inside = (i < end) & (position < kv_len) & ((is_window == 0) | (i < SINK) | (position >= SINK))
            slot = slot_of(slots_ptr, start, position, inside, PAGE)
            m, l, scale, rank1, ones, acc = attend_window(
                q_high, q_low, column_scale, logit_cap,
                k_ptr.to(tl.pointer_type(tl.bfloat16)), v_ptr.to(tl.pointer_type(tl.bfloat16)),
                k_slot_bytes // 2, v_slot_bytes // 2, head, slot, inside, inside[:, None],
                m, l, scale, rank1, ones, acc,
                K_DIM, K_QUARTER, K_PIECE, K_WIDTH, K_CUTS,
                V_DIM, V_QUARTER, V_PIECE, V_WIDTH, V_CUTS, V_GROUP, V_LEVELS, HAS_CAP, False, True,
            )  # fmt: skip
    elif is_window == 0:
        m, l, scale, rank1, ones, acc = first_state(BLOCK_N, BLOCK_H, V_WIDTH, V_CUTS, V_DIM // V_GROUP, A_TOKEN)
        for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            position = first + tl.arange(0, BLOCK_N)
            inside = position < end
            slot = slot_of(slots_ptr, start, position, inside, PAGE)
            m, l, scale, rank1, ones, acc = attend_packed(
                q, q_sum, q_offset, column_scale, logit_cap, k_ptr, v_ptr, k_slot_bytes, v_slot_bytes, head, slot, inside,
                k_levels, v_levels, m, l, scale, rank1, ones, acc,
                K_QUARTER, K_PIECE, K_WIDTH, K_CUTS, K_GROUP, K_BYTES, K_BF16, K_LEVELS,
                V_QUARTER, V_PIECE, V_WIDTH, V_CUTS, V_GROUP, V_BYTES, V_BF16, V_LEVELS, HAS_CAP, A_TOKEN, FAST,
            )  # fmt: skip
        l, rank1 = settle(l, rank1, V_DIM // V_GROUP)
    else:
        q_high, q_low = load_query_16_bit(q_ptr, q_row, live, K_WIDTH, K_CUTS, K_LEVELS, True)
        m, l, scale, rank1, ones, acc = first_state(WINDOW_TILE, BLOCK_H, V_WIDTH, V_CUTS, V_DIM // V_GROUP, False)
        for first in tl.range(begin, end, WINDOW_TILE, num_stages=1):
            i = first + tl.arange(0, WINDOW_TILE)
            position = tl.where(i < SINK, i, kv_len - RECENT + i - SINK)
            wanted = (i < end) & tl.where(i < SINK, position < kv_len, position >= SINK)
            row = tl.load(rows_ptr + b * (SINK + RECENT) + i, mask=wanted, other=-1)
            kept = row >= 0
            m, l, scale, rank1, ones, acc = attend_window(
                q_high, q_low, column_scale, logit_cap, k_window, v_window, k_window_stride, v_window_stride, head,
                tl.where(kept, row, 0).to(tl.int64), kept, kept[:, None], m, l, scale, rank1, ones, acc,
                K_DIM, K_QUARTER, K_PIECE, K_WIDTH, K_CUTS,
                V_DIM, V_QUARTER, V_PIECE, V_WIDTH, V_CUTS, V_GROUP, V_LEVELS, HAS_CAP, False, True,
            )  # fmt: skip
            # Tokens whose 16-bit row is gone, seldom any, are read in 2 bits here, not in the splits of the middle.
            lost = wanted & (row < 0)
            if tl.max(lost.to(tl.int32), axis=0) > 0:
                slot = slot_of(slots_ptr, start, position, lost, PAGE)
                m, l, scale, rank1, ones, acc = attend_packed(
                    q, q_sum, q_offset, column_scale, logit_cap, k_ptr, v_ptr, k_slot_bytes, v_slot_bytes, head, slot, lost,
                    k_levels, v_levels, m, l, scale, rank1, ones, acc,
                    K_QUARTER, K_PIECE, K_WIDTH, K_CUTS, K_GROUP, K_BYTES, K_BF16, K_LEVELS,
                    V_QUARTER, V_PIECE, V_WIDTH, V_CUTS, V_GROUP, V_BYTES, V_BF16, V_LEVELS, HAS_CAP, False, FAST,
                )  # fmt: skip

    total = tl.sum(l, axis=0)
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    out_row = item.to(tl.int64) * HEADS + head * RATIO + h
    tl.store(lse_ptr + out_row, tl.where(seen, m + tl.log2(total), float("-inf")), mask=live)
    norm = tl.where(seen, 1.0 / total, 0.0)
    e = tl.arange(0, V_WIDTH)
    for i in tl.static_range(8 * V_CUTS):
        o = plane_output(i, scale, rank1, ones, acc, V_QUARTER, V_PIECE, V_CUTS, V_GROUP, V_LEVELS)
        at = out_row[None, :] * V_DIM + (plane_channel(i, V_QUARTER, V_PIECE, V_CUTS) + 2 * e)[:, None]
        tl.store(part_ptr + at, o * norm[None, :], mask=live[None, :] & (2 * e < V_PIECE)[:, None])
    if JOINS:
        block = tl.program_id(0)
        offset = block % HEAD_BLOCKS * BLOCK_H
        _join(
            part_ptr, lse_ptr, count_ptr, num_items, b, item, tl.load(indptr_ptr + b), tl.load(indptr_ptr + b + 1),
            block, head, head * RATIO + offset, tl.minimum(RATIO - offset, BLOCK_H), out_ptr, out_stride, mean_ptr,
            HEADS, HEADS // RATIO * HEAD_BLOCKS, V_DIM, V_PAD, JOIN, HAS_MEAN,
        )  # fmt: skip


@triton.jit
def merge_kernel(
    part_ptr, lse_ptr, indptr_ptr, out_ptr, out_stride, inverse_ptr, mean_ptr,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_INVERSE: tl.constexpr, HAS_MEAN: tl.constexpr,
):  # fmt: skip
    """Grid: (num_qo_heads, bs). Merges a row's partial states, un-transforms, writes the output; 0 where nothing is seen."""
    q_head = tl.program_id(0)
    b = tl.program_id(1)
    first = tl.load(indptr_ptr + b)
    last = tl.load(indptr_ptr + b + 1)
    acc, lse = _merged(part_ptr, lse_ptr, first, last, 1, q_head, HEADS, DIM, DIM_PAD, TILE)
    row = out_ptr + b.to(tl.int64) * out_stride + q_head * DIM
    head = q_head // RATIO
    if HAS_INVERSE:
        d = tl.arange(0, DIM_PAD)
        for start in range(0, DIM, COLUMNS):
            e = start + tl.arange(0, COLUMNS)
            at = (head * DIM + d)[:, None] * DIM + e[None, :]
            t = tl.load(inverse_ptr + at, mask=(d < DIM)[:, None] & (e < DIM)[None, :], other=0.0)
            o = tl.sum(acc[:, None] * t, axis=0)
            if HAS_MEAN:
                o += tl.where(lse > float("-inf"), tl.load(mean_ptr + head * DIM + e, mask=e < DIM, other=0.0), 0.0)
            tl.store(row + e, o.to(out_ptr.dtype.element_ty), mask=e < DIM)
    else:
        _write_output(acc, lse, row, mean_ptr, head, DIM, DIM_PAD, HAS_MEAN)


def fast_unpack(card: Architecture) -> bool:
    """Whether unpacking may use PTX: on NVIDIA cards, not in the interpreter and not on ROCm."""
    return not interpreted() and card.key.startswith("sm_")


@dataclass
class DecodeBuffers:
    """Scratch of a decode step, shared by all layers (they run one after another); fixed addresses, for CUDA graphs.

    Args:
        q: [bs, num_qo_heads, query_width] float16, see triton_query; 0 in the padding. amax: [bs, num_qo_heads] float32.
        part: [num_items, num_qo_heads, v_head_dim] float32. lse: [num_items, num_qo_heads] float32.
        count: [num_items + bs, programs an item] int32, zeros between launches, see `_join`.
    """

    q: Tensor
    amax: Tensor
    part: Tensor
    lse: Tensor
    count: Tensor

    @classmethod
    def make(cls, bs: int, num_items: int, num_qo_heads: int, codec: LayerCodec) -> DecodeBuffers:
        """Buffers for `bs` rows and a plan of `num_items`, of layers like the codec's."""
        layer = prepare(codec)
        device, num_kv_heads = layer.q_transform.device, layer.q_transform.shape[0]
        blocks = num_kv_heads * head_block(num_qo_heads // num_kv_heads, architecture(device))[1]
        return cls(
            *query_buffers(bs, num_qo_heads, layer),
            torch.empty(num_items, num_qo_heads, layer.v.dim, dtype=torch.float32, device=device),
            torch.empty(num_items, num_qo_heads, dtype=torch.float32, device=device),
            torch.zeros(num_items + bs, blocks, dtype=torch.int32, device=device),
        )


def head_block(ratio: int, card: Architecture) -> tuple[int, int]:
    """Query heads a program takes, padded to the width of a matrix instruction, and programs a KV head."""
    block = min(64, max(card.columns, next_power_of_2(ratio)))
    return block, -(-ratio // block)


def side_shape(side: Planes) -> tuple:
    """QUARTER, PIECE, WIDTH, CUTS, GROUP, BYTES, BF16 of one side."""
    return side.quarter, side.piece, side.width, side.cuts, side.group, side.row_bytes, side.meta_bf16


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    codec: LayerCodec,
    plan: TritonPlan,
    sm_scale: float,
    logit_cap: float = 0.0,
    *,
    out: Tensor | None = None,
    buffers: DecodeBuffers | None = None,
    queries_ready: bool = False,
    launch: Launch | None = None,
) -> Tensor:
    """`oscar_kernel.decode_attention` in Triton; capturable when out and buffers are given.

    Args:
        q: [bs, num_qo_heads, head_dim], after RoPE, not transformed.
        cache, codec: of the layer. plan: from triton_plan, with kv_lens that include the new token.
        sm_scale: factor on the logits. logit_cap: soft cap of the logits; 0 for none.
        out: [bs, num_qo_heads, v_head_dim], any float type, heads contiguous; None: a new float32 tensor.
        buffers: scratch; None: new.
        launch: shape of the launch; None: from the table in triton_tuning.
        queries_ready: buffers already hold the prepared queries, from `triton_store.store_kv`; q gives the shape alone.
    Returns:
        out; rows of padding are 0.
    """
    layer: LayerTensors = prepare(codec)
    bs, heads = q.shape[:2]
    k, v = layer.k, layer.v
    num_kv_heads = layer.q_transform.shape[0]
    ratio = heads // num_kv_heads
    if out is None:
        out = torch.empty(bs, heads, v.dim, dtype=torch.float32, device=q.device)
    if bs == 0:
        return out
    num_items = plan.work.shape[0]
    if buffers is None:
        buffers = DecodeBuffers.make(bs, num_items, heads, codec)
    if not queries_ready:
        prepare_queries(q, layer, (buffers.q, buffers.amax))
    card = architecture(q.device)
    block, head_blocks = head_block(ratio, card)
    if launch is None:
        levels = layer.k_levels is not None or layer.v_levels is not None
        launch = choose(card.key, v.dim, ratio, bs, v.num_groups, levels)
    joins = launch.join and layer.v_inverse is None
    has_mean = layer.v_mean_out is not None
    decode_kernel[(num_kv_heads * head_blocks, num_items)](
        buffers.q, buffers.amax, cache.k_buffer, cache.v_buffer, cache.k_buffer.stride(0), cache.v_buffer.stride(0),
        cache.k_window, cache.v_window, cache.k_window.stride(0), cache.v_window.stride(0),
        plan.slots, plan.starts, plan.kv_lens, plan.window_rows, plan.work, plan.work_indptr, layer.k_levels, layer.v_levels,
        buffers.part, buffers.lse, buffers.count, out, out.stride(0), layer.v_mean_out, num_items, sm_scale, logit_cap,
        heads, ratio, block, head_blocks, plan.sink_tokens, plan.recent_tokens, plan.page_size,
        launch.block_n, launch.window_tile,
        k.dim, *side_shape(k), layer.k_levels is not None, v.dim, *side_shape(v), layer.v_levels is not None, logit_cap > 0,
        launch.a_token, fast_unpack(card), launch.num_stages, joins, JOIN, next_power_of_2(v.dim), has_mean, k.native,
        num_warps=launch.num_warps,
    )  # fmt: skip
    if not joins:
        merge_kernel[(heads, bs)](
            buffers.part, buffers.lse, plan.work_indptr, out, out.stride(0), layer.v_inverse, layer.v_mean_out,
            heads, ratio, v.dim, next_power_of_2(v.dim), JOIN, 32, layer.v_inverse is not None, has_mean,
            num_warps=4,
        )  # fmt: skip
    return out
