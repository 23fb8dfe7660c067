"""Store, in Triton: transform, clip, quantise, pack, write the 2-bit row and the 16-bit window row, in one launch a layer.
With error shaping the codes come from another launch (see triton_shaping), of the layer or of a whole decode step.

In a decode step the launch prepares the step's queries too (see triton_query), since both need one small matrix a head.

Bytes equal the reference's. What that takes, step by step:

    transform   summed in float64, rounded to float32 and then to bfloat16, as the reference does. Sums in another order differ
                by 2^-50 or so of the result, bfloat16 has 8 bits: a tie that such a difference turns is not seen in practice
                (about 1 in 10^12 elements), and no sum in float32 could promise even 1 in 10^5.
    clip        the order statistic, exactly: bits of |x| in descending order, one count over the row a bit. A float's magnitude
                orders like its bits; what follows a bfloat16 rounding has no bits below 13 (65504, which stands for infinity,
                is the longest), so 18 counts decide. No bisection over values, hence no drift.
    quantise    the float32 operations of oscar.format.codec in their order. level * step is exact there, so a fused
                multiply-add is the same number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar.format.codec import META_DTYPES
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.triton.common import LayerTensors, Planes, bfloat16_bits, next_power_of_2, prepare, with_adjacent_heads
from oscar_kernel.triton.query import ROWS, check_queries, query_constants, transform_queries
from oscar_kernel.triton.shaping import shape_codes

TOKENS_PER_TILE = 16
"""From this many tokens on, tokens share a load of the transform; below, each has a program of its own."""
DEPTH = 32
"""Rows of the transform that are in flight at once."""


@triton.jit
def _model_rows(x_ptr, base, start, live_token, mean_ptr, head, DIM: tl.constexpr, DEPTH: tl.constexpr, HAS_MEAN: tl.constexpr):
    """Channels start .. start + DEPTH - 1 of the model's rows less their mean, in float64; 0 beyond DIM. [tokens, DEPTH]."""
    d = start + tl.arange(0, DEPTH)
    x = tl.load(x_ptr + base[:, None] + d[None, :], mask=live_token[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float64)
    if HAS_MEAN:
        x = x - tl.load(mean_ptr + head * DIM + d, mask=d < DIM, other=0.0)[None, :]
    return x


@triton.jit
def _stored_rows(
    x_ptr, x_stride, token, live_token, head, channel, live, t_ptr, mean_ptr,
    DIM: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr, HAS_T: tl.constexpr, HAS_MEAN: tl.constexpr,
):  # fmt: skip
    """Rows in stored space as float32 numbers that are exact in bfloat16. Returns [TILE, columns] int32 bits.

    channel, live: [columns], which channel a column holds, and whether it holds one.
    """
    base = token.to(tl.int64) * x_stride + head * DIM
    if HAS_T:
        total = tl.zeros((TILE, channel.shape[0]), tl.float64)
        x = _model_rows(x_ptr, base, 0, live_token, mean_ptr, head, DIM, DEPTH, HAS_MEAN)
        for start in range(0, DIM, DEPTH):
            d = start + tl.arange(0, DEPTH)
            t_at = (head * DIM + d)[:, None] * DIM + channel[None, :]
            t = tl.load(t_ptr + t_at, mask=(d < DIM)[:, None] & live[None, :], other=0.0).to(tl.float64)
            if TILE == 1:
                total += tl.sum(tl.trans(x) * t, axis=0)[None, :]
            else:
                total = tl.dot(x, t, total, out_dtype=tl.float64)
            # The next rows are loaded here, not at the top: Triton 3.8 cannot lower a float64 product whose operand it can
            # see to come from 16-bit numbers, and across an iteration it does not see.
            x = _model_rows(x_ptr, base, start + DEPTH, live_token, mean_ptr, head, DIM, DEPTH, HAS_MEAN)
        y = total.to(tl.float32)
    else:
        y = tl.load(x_ptr + base[:, None] + channel[None, :], mask=live_token[:, None] & live[None, :], other=0.0)
        y = y.to(tl.float32)
    return bfloat16_bits(y)


@triton.jit
def _store_side(
    x_ptr, x_stride, token, num_tokens, head, loc_ptr, row_ptr, no_row, buffer_ptr, slot_words, window_ptr, window_stride,
    out_ptr, out_stride, t_ptr, mean_ptr, index_ptr, cuts_ptr,
    DIM: tl.constexpr, QUARTER: tl.constexpr, QUARTER_PAD: tl.constexpr, GROUP: tl.constexpr, ROW_WORDS: tl.constexpr,
    META_BF16: tl.constexpr, META_MAX: tl.constexpr, META_TINY: tl.constexpr,
    DEPTH: tl.constexpr, TILE: tl.constexpr, HAS_T: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_CUTS: tl.constexpr,
    HAS_OUT: tl.constexpr, NATIVE: tl.constexpr, SHAPED: tl.constexpr,
):  # fmt: skip
    """K or V of TILE tokens and one head, from the model's row to everything that is written.

    buffer_ptr counts in 32-bit words; in a layer that stays in 16 bits (NATIVE) a row is what the window gets.
    """
    column = tl.arange(0, 4 * QUARTER_PAD)
    channel = (column // QUARTER_PAD) * QUARTER + column % QUARTER_PAD
    live = column % QUARTER_PAD < QUARTER
    live_token = token < num_tokens
    bits = _stored_rows(
        x_ptr, x_stride, token, live_token, head, channel, live, t_ptr, mean_ptr, DIM, DEPTH, TILE, HAS_T, HAS_MEAN
    )

    # The 16-bit copies.
    row16 = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    window_row = tl.load(row_ptr + token, mask=live_token, other=no_row)
    at = window_row.to(tl.int64)[:, None] * window_stride + head * DIM + channel[None, :]
    tl.store(window_ptr + at, row16, mask=(live_token & (window_row < no_row) & (window_row >= 0))[:, None] & live[None, :])
    if HAS_OUT:
        at = token.to(tl.int64)[:, None] * out_stride + head * DIM + channel[None, :]
        tl.store(out_ptr + at, row16, mask=live_token[:, None] & live[None, :])
    loc = tl.load(loc_ptr + token, mask=live_token, other=-1).to(tl.int64)
    written = live_token & (loc >= 0)
    if NATIVE:
        at = buffer_ptr.to(tl.pointer_type(tl.bfloat16)) + (loc * (2 * slot_words) + head * DIM)[:, None] + channel[None, :]
        tl.store(at, row16, mask=written[:, None] & live[None, :])
    else:
        _write_codes(
            bits, written, loc * slot_words + head * ROW_WORDS, head, channel, live, buffer_ptr, index_ptr, cuts_ptr,
            DIM, QUARTER, QUARTER_PAD, GROUP, META_BF16, META_MAX, META_TINY, TILE, HAS_CUTS, SHAPED,
        )  # fmt: skip


@triton.jit
def _write_codes(
    bits, written, row_word, head, channel, live, buffer_ptr, index_ptr, cuts_ptr,
    DIM: tl.constexpr, QUARTER: tl.constexpr, QUARTER_PAD: tl.constexpr, GROUP: tl.constexpr, META_BF16: tl.constexpr,
    META_MAX: tl.constexpr, META_TINY: tl.constexpr, TILE: tl.constexpr, HAS_CUTS: tl.constexpr, SHAPED: tl.constexpr,
):  # fmt: skip
    """Clip, quantise and pack rows, given as float32 bits [TILE, columns]; row_word: [TILE] int64, where each begins.

    SHAPED: the codes are left to `triton_shaping`.
    """
    x = bits.to(tl.float32, bitcast=True)
    x = tl.where(x != x, 0.0, x)
    x = tl.where(x == float("inf"), META_MAX, tl.where(x == float("-inf"), -META_MAX, x))

    # Clip threshold: the largest t with at most `rank` numbers below it is the rank-th smallest.
    magnitude = tl.where(live[None, :], x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFF)
    rank = tl.load(index_ptr + head)
    tau_bits = tl.zeros((TILE,), tl.int32)
    for i in range(18):
        trial = tau_bits | (1 << (30 - i))
        below = tl.sum((magnitude < trial[:, None]).to(tl.int32), axis=1)
        tau_bits = tl.where(below <= rank, trial, tau_bits)
    tau = tau_bits.to(tl.float32, bitcast=True)[:, None]
    x = tl.minimum(tl.maximum(x, -tau), tau)

    centre = tl.zeros((TILE, 4 * QUARTER_PAD), tl.float32)
    step = tl.zeros((TILE, 4 * QUARTER_PAD), tl.float32)
    for g in tl.static_range(DIM // GROUP):
        inside = (live & (channel // GROUP == g))[None, :]
        high = tl.max(tl.where(inside, x, float("-inf")), axis=1)
        low = tl.min(tl.where(inside, x, float("inf")), axis=1)
        c = tl.minimum(tl.maximum((high + low) * 0.5, -META_MAX), META_MAX)
        s = tl.minimum((high - low) * 0.3333333432674408, META_MAX)
        s = tl.where(s < META_TINY, tl.where(s < 0.5 * META_TINY, 0.0, META_TINY), s)
        if META_BF16:
            c_bits, s_bits = bfloat16_bits(c), bfloat16_bits(s)
            c, s = c_bits.to(tl.float32, bitcast=True), s_bits.to(tl.float32, bitcast=True)
            word = ((c_bits >> 16) & 0xFFFF) | s_bits
        else:
            c16, s16 = c.to(tl.float16), s.to(tl.float16)
            c, s = c16.to(tl.float32), s16.to(tl.float32)
            word = (c16.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (s16.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        tl.store(buffer_ptr + row_word + (QUARTER // 4 + g), word, mask=written)
        centre = tl.where(inside, c[:, None], centre)
        step = tl.where(inside, s[:, None], step)

    if not SHAPED:
        if HAS_CUTS:
            cut0 = tl.load(cuts_ptr + head * 3)
            cut1 = tl.load(cuts_ptr + head * 3 + 1)
            cut2 = tl.load(cuts_ptr + head * 3 + 2)
            code = (x > centre + cut0 * step).to(tl.int32) + (x > centre + cut1 * step) + (x > centre + cut2 * step)
        else:
            code = (x > centre - step).to(tl.int32) + (x > centre) + (x > centre + step)

        # Four planes to a byte, four bytes to a word.
        shift = 2 * tl.arange(0, 4)
        packed = tl.sum(tl.reshape(code, (TILE, 4, QUARTER_PAD)) << shift[None, :, None], axis=1)
        packed = tl.sum(tl.reshape(packed, (TILE, QUARTER_PAD // 4, 4)) << (8 * tl.arange(0, 4))[None, None, :], axis=2)
        word_index = tl.arange(0, QUARTER_PAD // 4)
        mask = written[:, None] & (word_index < QUARTER // 4)[None, :]
        tl.store(buffer_ptr + row_word[:, None] + word_index[None, :], packed, mask=mask)


@triton.jit
def store_kernel(
    k_ptr, v_ptr, k_stride, v_stride, num_tokens, loc_ptr, row_ptr, no_row,
    k_buffer, v_buffer, k_slot_words, v_slot_words, k_window, v_window, k_window_stride, v_window_stride,
    k_out, v_out, k_out_stride, v_out_stride,
    k_transform, v_transform, k_mean, v_mean, k_index, v_index, k_cuts, v_cuts,
    q_ptr, q_stride, q_transform, q_out, amax_out,
    K_DIM: tl.constexpr, K_QUARTER: tl.constexpr, K_PAD: tl.constexpr, K_GROUP: tl.constexpr, K_WORDS: tl.constexpr,
    K_BF16: tl.constexpr, K_MAX: tl.constexpr, K_TINY: tl.constexpr,
    V_DIM: tl.constexpr, V_QUARTER: tl.constexpr, V_PAD: tl.constexpr, V_GROUP: tl.constexpr, V_WORDS: tl.constexpr,
    V_BF16: tl.constexpr, V_MAX: tl.constexpr, V_TINY: tl.constexpr,
    DEPTH: tl.constexpr, TILE: tl.constexpr, K_HAS_T: tl.constexpr, V_HAS_T: tl.constexpr,
    K_HAS_MEAN: tl.constexpr, V_HAS_MEAN: tl.constexpr, K_HAS_CUTS: tl.constexpr, V_HAS_CUTS: tl.constexpr,
    HAS_OUT: tl.constexpr, NATIVE: tl.constexpr, K_SHAPED: tl.constexpr, V_SHAPED: tl.constexpr, HAS_Q: tl.constexpr,
    HEADS: tl.constexpr, RATIO: tl.constexpr, Q_DIM: tl.constexpr, Q_DIM_PAD: tl.constexpr, Q_DEPTH: tl.constexpr,
    Q_ROWS: tl.constexpr, QUARTER: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr, CUTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of TILE tokens, num_kv_heads, 2: K, V; or 3: and queries, then with as many tiles as the most needs).

    Arguments as in `store_kv`; strides in elements or 32-bit words.
    """
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    side = tl.program_id(2)
    if side == 0:
        _store_side(
            k_ptr, k_stride, token, num_tokens, head, loc_ptr, row_ptr, no_row, k_buffer, k_slot_words,
            k_window, k_window_stride, k_out, k_out_stride, k_transform, k_mean, k_index, k_cuts,
            K_DIM, K_QUARTER, K_PAD, K_GROUP, K_WORDS, K_BF16, K_MAX, K_TINY,
            DEPTH, TILE, K_HAS_T, K_HAS_MEAN, K_HAS_CUTS, HAS_OUT, NATIVE, K_SHAPED,
        )  # fmt: skip
    elif side == 1:
        _store_side(
            v_ptr, v_stride, token, num_tokens, head, loc_ptr, row_ptr, no_row, v_buffer, v_slot_words,
            v_window, v_window_stride, v_out, v_out_stride, v_transform, v_mean, v_index, v_cuts,
            V_DIM, V_QUARTER, V_PAD, V_GROUP, V_WORDS, V_BF16, V_MAX, V_TINY,
            DEPTH, TILE, V_HAS_T, V_HAS_MEAN, V_HAS_CUTS, HAS_OUT, NATIVE, V_SHAPED,
        )  # fmt: skip
    else:
        if HAS_Q:
            transform_queries(
                tl.program_id(0), head, q_ptr, q_stride, num_tokens, q_transform, q_out, amax_out,
                HEADS, RATIO, Q_DIM, Q_DIM_PAD, Q_DEPTH, Q_ROWS, QUARTER, PIECE, WIDTH, CUTS, LEVELS,
            )  # fmt: skip


def side_constants(side: Planes) -> tuple:
    """DIM, QUARTER, PAD, GROUP, WORDS, BF16, MAX, TINY of `store_kernel` for one side."""
    info = torch.finfo(META_DTYPES["bfloat16" if side.meta_bf16 else "float16"])
    pad = max(16, next_power_of_2(side.quarter))
    return side.dim, side.quarter, pad, side.group, side.row_bytes // 4, side.meta_bf16, info.max, info.tiny


def store_kv(
    k: Tensor,
    v: Tensor,
    loc: Tensor,
    window_rows: Tensor,
    cache: LayerCache,
    codec: LayerCodec,
    *,
    return_rows: bool = True,
    codes_later: bool = False,
    q: Tensor | None = None,
    queries: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """`oscar_kernel.store_kv` in one launch, or two with error shaping; capturable.

    Args:
        k: [num_tokens, num_kv_heads, head_dim] any float type, after RoPE; tokens may be strided.
        v: [num_tokens, num_kv_heads, v_head_dim], likewise.
        loc: [num_tokens] integer slots; a negative one is not written.
        window_rows: [num_tokens] integer rows of the windows; the last row, or a negative one, is not written.
        cache: storage, written in place. codec: the layer's.
        return_rows: whether attention among the new tokens follows; decode needs none.
        codes_later: with error shaping, store codes rounded alone for now: `triton_step_codes.StepCodes` follows.
        q: [num_tokens, num_qo_heads, head_dim] queries to prepare in the same launch. queries: where to, see `query_buffers`.
    Returns:
        k', v' in bfloat16, or None without return_rows.
    """
    layer: LayerTensors = prepare(codec)
    num_tokens, num_kv_heads = k.shape[:2]
    k, v = with_adjacent_heads(k), with_adjacent_heads(v)
    k_out = v_out = None
    shaped = layer.shaped and not codes_later
    if return_rows or shaped:
        k_out = torch.empty(k.shape, dtype=torch.bfloat16, device=k.device)
        v_out = torch.empty(v.shape, dtype=torch.bfloat16, device=v.device)
    if num_tokens == 0:
        return (k_out, v_out) if return_rows else None
    k_words, v_words = cache.k_buffer.view(torch.int32), cache.v_buffer.view(torch.int32)
    tile = TOKENS_PER_TILE if num_tokens >= TOKENS_PER_TILE // 2 else 1
    blocks, constants = triton.cdiv(num_tokens, tile), query_constants(layer, num_kv_heads)
    q_stride, q_out, amax_out = 0, None, None
    if q is not None:
        q = check_queries(q, layer)
        q_stride, (q_out, amax_out) = q.stride(0), queries
        constants = query_constants(layer, q.shape[1])
        blocks = max(blocks, triton.cdiv(num_tokens * q.shape[1] // num_kv_heads, ROWS))
    store_kernel[(blocks, num_kv_heads, 2 if q is None else 3)](
        k, v, k.stride(0), v.stride(0), num_tokens, loc, window_rows, cache.k_window.shape[0] - 1,
        k_words, v_words, k_words.stride(0), v_words.stride(0),
        cache.k_window, cache.v_window, cache.k_window.stride(0), cache.v_window.stride(0),
        k_out, v_out, 0 if k_out is None else k_out.stride(0), 0 if v_out is None else v_out.stride(0),
        layer.k_transform, layer.v_transform, layer.k_mean, layer.v_mean,
        layer.k_index, layer.v_index, layer.k_cuts, layer.v_cuts,
        q, q_stride, layer.q_transform, q_out, amax_out,
        *side_constants(layer.k), *side_constants(layer.v),
        DEPTH if tile == 1 else DEPTH // 2, tile, layer.k_transform is not None, layer.v_transform is not None,
        layer.k_mean is not None, layer.v_mean is not None, layer.k_cuts is not None, layer.v_cuts is not None,
        k_out is not None, layer.k.native, shaped and layer.k_shaping is not None, shaped and layer.v_shaping is not None,
        q is not None, *constants,
        num_warps=8,
    )  # fmt: skip
    if shaped:
        shape_codes(k_out, v_out, loc, k_words, v_words, layer)
    return (k_out, v_out) if return_rows else None
