# ruff: noqa: E741 (l is the usual name of a softmax's sum; Triton has no starred tuples)
"""Decode in Triton: one query a sequence against 2-bit rows and windows, split over the card, and one merge.

Launches a layer: `store_kv` with the step's queries, `decode_kernel` over the work list of triton_plan, `merge_kernel`.
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

from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.triton_common import LayerTensors, Planes, interpreted, next_power_of_2, prepare
from oscar_kernel.triton_plan import TritonPlan, slot_of
from oscar_kernel.triton_query import prepare_queries, query_buffers
from oscar_kernel.triton_tiles import (
    attend_packed,
    attend_window,
    first_state,
    load_query,
    plane_channel,
    plane_output,
    settle,
    sum_query,
)
from oscar_kernel.triton_tuning import Launch, architecture, choose

MERGE_TILE = 16
"""Partial states that a merge reads at once."""


@triton.jit
def decode_kernel(
    q_ptr, amax_ptr, k_ptr, v_ptr, k_slot_bytes, v_slot_bytes, k_window, v_window, k_window_stride, v_window_stride,
    slots_ptr, starts_ptr, kv_lens_ptr, rows_ptr, work_ptr, k_levels, v_levels, out_ptr, lse_ptr, sm_scale, logit_cap,
    HEADS: tl.constexpr, RATIO: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW_TILE: tl.constexpr,
    K_DIM: tl.constexpr, K_QUARTER: tl.constexpr, K_PIECE: tl.constexpr, K_WIDTH: tl.constexpr, K_CUTS: tl.constexpr,
    K_GROUP: tl.constexpr, K_BYTES: tl.constexpr, K_BF16: tl.constexpr, K_LEVELS: tl.constexpr,
    V_DIM: tl.constexpr, V_QUARTER: tl.constexpr, V_PIECE: tl.constexpr, V_WIDTH: tl.constexpr, V_CUTS: tl.constexpr,
    V_GROUP: tl.constexpr, V_BYTES: tl.constexpr, V_BF16: tl.constexpr, V_LEVELS: tl.constexpr, HAS_CAP: tl.constexpr,
    A_TOKEN: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (num_kv_heads * HEAD_BLOCKS, num_items). Writes one partial state an item and query head.

    out_ptr: [num_items, num_qo_heads, v_head_dim] float32, normalised. lse_ptr: [num_items, num_qo_heads], in log 2.
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

    if is_window == 0:
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
        l, rank1, ones = settle(l, rank1, ones, V_DIM // V_GROUP)
    else:
        m, l, scale, rank1, ones, acc = first_state(WINDOW_TILE, BLOCK_H, V_WIDTH, V_CUTS, V_DIM // V_GROUP, False)
        for first in tl.range(begin, end, WINDOW_TILE, num_stages=1):
            i = first + tl.arange(0, WINDOW_TILE)
            position = tl.where(i < SINK, i, kv_len - RECENT + i - SINK)
            wanted = (i < end) & tl.where(i < SINK, position < kv_len, position >= SINK)
            row = tl.load(rows_ptr + b * (SINK + RECENT) + i, mask=wanted, other=-1)
            kept = row >= 0
            m, l, scale, rank1, ones, acc = attend_window(
                q, column_scale, logit_cap, k_window, v_window, k_window_stride, v_window_stride, head,
                tl.where(kept, row, 0).to(tl.int64), kept, kept[:, None], m, l, scale, rank1, ones, acc,
                K_DIM, K_QUARTER, K_PIECE, K_WIDTH, K_CUTS, K_LEVELS,
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
        tl.store(out_ptr + at, o * norm[None, :], mask=live[None, :] & (2 * e < V_PIECE)[:, None])


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
    d = tl.arange(0, DIM_PAD)
    m = -1.0e30
    total = 0.0
    acc = tl.zeros((DIM_PAD,), tl.float32)
    for at in range(first, last, TILE):
        i = (at + tl.arange(0, TILE)).to(tl.int64)
        lse = tl.load(lse_ptr + i * HEADS + q_head, mask=i < last, other=float("-inf"))
        o = tl.load(
            part_ptr + (i * HEADS + q_head)[:, None] * DIM + d[None, :],
            mask=(i < last)[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lse, axis=0))
        w = tl.exp2(lse - m_new)
        alpha = tl.exp2(m - m_new)
        acc = acc * alpha + tl.sum(o * w[:, None], axis=0)
        total = total * alpha + tl.sum(w, axis=0)
        m = m_new
    acc = acc / tl.where(total > 0.0, total, 1.0)
    row = out_ptr + b.to(tl.int64) * out_stride + q_head * DIM
    head = q_head // RATIO
    if HAS_INVERSE:
        for start in range(0, DIM, COLUMNS):
            e = start + tl.arange(0, COLUMNS)
            at = (head * DIM + d)[:, None] * DIM + e[None, :]
            t = tl.load(inverse_ptr + at, mask=(d < DIM)[:, None] & (e < DIM)[None, :], other=0.0)
            o = tl.sum(acc[:, None] * t, axis=0)
            if HAS_MEAN:
                o += tl.load(mean_ptr + head * DIM + e, mask=e < DIM, other=0.0)
            o = tl.where(last > first, o, 0.0)
            tl.store(row + e, o.to(out_ptr.dtype.element_ty), mask=e < DIM)
    else:
        if HAS_MEAN:
            acc += tl.load(mean_ptr + head * DIM + d, mask=d < DIM, other=0.0)
            acc = tl.where(last > first, acc, 0.0)
        tl.store(row + d, acc.to(out_ptr.dtype.element_ty), mask=d < DIM)


def fast_unpack() -> bool:
    """Whether unpacking may use PTX: on NVIDIA cards, not in the interpreter and not on ROCm."""
    return not interpreted() and torch.version.hip is None


@dataclass
class DecodeBuffers:
    """Scratch of a decode step, shared by all layers (they run one after another); fixed addresses, for CUDA graphs.

    Args:
        q: [bs, num_qo_heads, query_width] float16, see triton_query; 0 in the padding. amax: [bs, num_qo_heads] float32.
        part: [num_items, num_qo_heads, v_head_dim] float32. lse: [num_items, num_qo_heads] float32.
    """

    q: Tensor
    amax: Tensor
    part: Tensor
    lse: Tensor

    @classmethod
    def make(cls, bs: int, num_items: int, num_qo_heads: int, codec: LayerCodec) -> DecodeBuffers:
        """Buffers for `bs` rows and a plan of `num_items`, of layers like the codec's."""
        layer = prepare(codec)
        device = layer.q_transform.device
        return cls(
            *query_buffers(bs, num_qo_heads, layer),
            torch.empty(num_items, num_qo_heads, layer.v.dim, dtype=torch.float32, device=device),
            torch.empty(num_items, num_qo_heads, dtype=torch.float32, device=device),
        )


def head_block(ratio: int) -> tuple[int, int]:
    """Query heads a program takes, padded to the width of a matrix instruction, and programs a KV head."""
    block = min(64, max(8, next_power_of_2(ratio)))
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
    block, head_blocks = head_block(ratio)
    if launch is None:
        levels = layer.k_levels is not None or layer.v_levels is not None
        launch = choose(architecture(q.device), v.dim, ratio, bs, v.num_groups, levels)
    decode_kernel[(num_kv_heads * head_blocks, num_items)](
        buffers.q, buffers.amax, cache.k_buffer, cache.v_buffer, cache.k_buffer.stride(0), cache.v_buffer.stride(0),
        cache.k_window, cache.v_window, cache.k_window.stride(0), cache.v_window.stride(0),
        plan.slots, plan.starts, plan.kv_lens, plan.window_rows, plan.work, layer.k_levels, layer.v_levels,
        buffers.part, buffers.lse, sm_scale, logit_cap,
        heads, ratio, block, head_blocks, plan.sink_tokens, plan.recent_tokens, plan.page_size,
        launch.block_n, launch.window_tile,
        k.dim, *side_shape(k), layer.k_levels is not None, v.dim, *side_shape(v), layer.v_levels is not None, logit_cap > 0,
        launch.a_token, fast_unpack(), launch.num_stages,
        num_warps=launch.num_warps,
    )  # fmt: skip
    merge_kernel[(heads, bs)](
        buffers.part, buffers.lse, plan.work_indptr, out, out.stride(0), layer.v_inverse, layer.v_mean_out,
        heads, ratio, v.dim, next_power_of_2(v.dim), MERGE_TILE, 32, layer.v_inverse is not None, layer.v_mean_out is not None,
        num_warps=4,
    )  # fmt: skip
    return out
