"""Codes of rows whose rounding errors are passed on from channel to channel (`oscar.codec`, "shaping"), in Triton.

A launch of its own after the store, which has written everything but the codes: head_dim dependent steps want another shape of
program than the transform does, and product and sum must be rounded apart, which is an option of a whole launch.

A row is cut into chunks of LANES neighbouring channels of one group, one channel a thread; 16 wherever quarters of rows and
groups are multiples of 16. In a step every thread codes its channel of the chunk, and the error of the channel whose turn it is
goes to all by one shuffle: subtract, compare, select, subtract, shuffle, multiply, add, and nothing waits for another warp.
What is passed on to a chunk stays in one register a row and thread, and chunks that are done are not touched again, so about
half of the square matrix is multiplied.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar.codec import META_DTYPES
from oscar_kernel.triton_common import LayerTensors, Planes, high_half, low_half, next_power_of_2

NUM_WARPS = 8
FEW = 16
"""Tokens of a program of a decode step: two a warp, the fewest that leave no thread without a channel."""
MANY = 64
"""Tokens of a program from `MANY_FROM` tokens on: a row of the matrix is loaded once for eight rows of codes of a warp."""
MANY_FROM = 1024


@triton.jit
def _read_ahead(s_ptr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, DEPTH: tl.constexpr):
    """0.0, after the matrix has come to L1 in a few loads that wait together: step i would wait for row i alone."""
    column = tl.arange(0, DIM_PAD)
    total = tl.zeros((DEPTH, DIM_PAD), tl.float32)
    for start in range(0, DIM, DEPTH):
        row = start + tl.arange(0, DEPTH)
        # Zero up to the diagonal, so about half of it; by blocks of 16, which keeps loads wide.
        inside = (row < DIM)[:, None] & (column < DIM)[None, :] & (column // 16 >= row[:, None] // 16)
        total += tl.load(s_ptr + row[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    return tl.sum(tl.sum(total, axis=1), axis=0) * 0.0


@triton.jit
def _pass_on(passed_on, error, s_row, i, CHUNK: tl.constexpr, NUM: tl.constexpr, LANES: tl.constexpr):
    """passed_on with an error of CHUNK's channel i added to the channels after it. NUM tensors [TILE, LANES].

    s_row: [LANES] pointers to the first chunk of the channel's row of the matrix.
    """
    lane = tl.arange(0, LANES)
    out = ()
    for c in tl.static_range(NUM):
        a = passed_on[c]
        if c >= CHUNK:
            more = a + error * tl.load(s_row + c * LANES)[None, :]
            # The matrix is zero up to its diagonal, but 0 times an infinite error is not.
            a = more if c > CHUNK else tl.where((lane > i)[None, :], more, a)
        out = out + (a,)  # noqa: RUF005 - Triton has no star
    return out


@triton.jit
def _with_plane(packed, bits, AT: tl.constexpr, NUM: tl.constexpr):
    """packed, a tuple of NUM, with bits added to entry AT."""
    out = ()
    for c in tl.static_range(NUM):
        out = out + (packed[c] | bits if c == AT else packed[c],)  # noqa: RUF005
    return out


@triton.jit
def _shape_side(
    x_ptr, x_stride, token, num_tokens, head, loc_ptr, buffer_ptr, slot_words, s_ptr, cuts_ptr, levels_ptr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, ROW_WORDS: tl.constexpr,
    META_BF16: tl.constexpr, META_MAX: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr,
    HAS_LEVELS: tl.constexpr,
):  # fmt: skip
    """K or V of TILE tokens and one head: reads their 16-bit rows and the metadata in the buffer, writes the codes there."""
    NUM: tl.constexpr = DIM // LANES
    BYTES: tl.constexpr = QUARTER // LANES
    lane = tl.arange(0, LANES)
    loc = tl.load(loc_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    written = loc >= 0
    row = buffer_ptr + loc * slot_words + head * ROW_WORDS
    x_row = x_ptr + token.to(tl.int64) * x_stride + head * DIM
    s_ptr += head * DIM * DIM
    if HAS_LEVELS:
        cut0 = tl.load(cuts_ptr + head * 3)
        cut1 = tl.load(cuts_ptr + head * 3 + 1)
        cut2 = tl.load(cuts_ptr + head * 3 + 2)
        level0 = tl.load(levels_ptr + head * 4).to(tl.float32)
        level1 = tl.load(levels_ptr + head * 4 + 1).to(tl.float32)
        level2 = tl.load(levels_ptr + head * 4 + 2).to(tl.float32)
        level3 = tl.load(levels_ptr + head * 4 + 3).to(tl.float32)
    else:
        cut0, cut1, cut2 = -1.0, 0.0, 1.0
        level0, level1, level2, level3 = -1.5, -0.5, 0.5, 1.5

    start = tl.zeros((TILE, LANES), tl.float32) + _read_ahead(s_ptr, DIM, DIM_PAD, DEPTH)
    passed_on, packed = (), ()
    for _ in tl.static_range(NUM):
        passed_on = passed_on + (start,)  # noqa: RUF005
    for _ in tl.static_range(BYTES):
        packed = packed + (tl.zeros((TILE, LANES), tl.int32),)  # noqa: RUF005
    for c in tl.static_range(NUM):
        channel = c * LANES + lane
        y = tl.load(x_row[:, None] + channel[None, :], mask=written[:, None], other=0.0).to(tl.float32)
        y = tl.where(y != y, 0.0, y)
        y = tl.where(y == float("inf"), META_MAX, tl.where(y == float("-inf"), -META_MAX, y))
        if c * LANES % GROUP == 0:
            word = tl.load(row + (QUARTER // 4 + c * LANES // GROUP), mask=written, other=0)[:, None]
            centre, step = low_half(word, META_BF16), high_half(word, META_BF16)
            bound0, bound1, bound2 = centre + cut0 * step, centre + cut1 * step, centre + cut2 * step
            value0, value1 = centre + level0 * step, centre + level1 * step
            value2, value3 = centre + level2 * step, centre + level3 * step
        for i in range(LANES):
            x = y - passed_on[c]
            low, high = tl.where(x > bound0, value1, value0), tl.where(x > bound2, value3, value2)
            error = tl.gather(tl.where(x > bound1, high, low) - y, tl.zeros((TILE, LANES), tl.int32) + i, 1)
            passed_on = _pass_on(passed_on, error, s_ptr + (c * LANES + i) * DIM + lane, i, c, NUM, LANES)
        x = y - passed_on[c]
        code = (x > bound0).to(tl.int32) + (x > bound1) + (x > bound2)
        packed = _with_plane(packed, code << (2 * (c // BYTES)), c % BYTES, BYTES)

    # Four bytes to a word.
    for b in tl.static_range(BYTES):
        words = tl.reshape(packed[b], (TILE, LANES // 4, 4)) << (8 * tl.arange(0, 4))[None, None, :]
        at = row[:, None] + (b * (LANES // 4) + tl.arange(0, LANES // 4))[None, :]
        tl.store(at, tl.sum(words, axis=2), mask=written[:, None])


@triton.jit
def shaping_kernel(
    k_ptr, v_ptr, k_stride, v_stride, num_tokens, loc_ptr, k_buffer, v_buffer, k_slot_words, v_slot_words,
    k_shaping, v_shaping, k_cuts, v_cuts, k_levels, v_levels,
    K_DIM: tl.constexpr, K_PAD: tl.constexpr, K_QUARTER: tl.constexpr, K_GROUP: tl.constexpr, K_WORDS: tl.constexpr,
    K_BF16: tl.constexpr, K_MAX: tl.constexpr, K_LANES: tl.constexpr, K_DEPTH: tl.constexpr,
    V_DIM: tl.constexpr, V_PAD: tl.constexpr, V_QUARTER: tl.constexpr, V_GROUP: tl.constexpr, V_WORDS: tl.constexpr,
    V_BF16: tl.constexpr, V_MAX: tl.constexpr, V_LANES: tl.constexpr, V_DEPTH: tl.constexpr,
    TILE: tl.constexpr, K_HAS_S: tl.constexpr, V_HAS_S: tl.constexpr, K_HAS_LEVELS: tl.constexpr, V_HAS_LEVELS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of TILE tokens, num_kv_heads, 2: K, V). To be launched without fusion of products and sums."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    if tl.program_id(2) == 0:
        if K_HAS_S:
            _shape_side(
                k_ptr, k_stride, token, num_tokens, head, loc_ptr, k_buffer, k_slot_words, k_shaping, k_cuts, k_levels,
                K_DIM, K_PAD, K_QUARTER, K_GROUP, K_WORDS, K_BF16, K_MAX, K_LANES, K_DEPTH, TILE, K_HAS_LEVELS,
            )  # fmt: skip
    else:
        if V_HAS_S:
            _shape_side(
                v_ptr, v_stride, token, num_tokens, head, loc_ptr, v_buffer, v_slot_words, v_shaping, v_cuts, v_levels,
                V_DIM, V_PAD, V_QUARTER, V_GROUP, V_WORDS, V_BF16, V_MAX, V_LANES, V_DEPTH, TILE, V_HAS_LEVELS,
            )  # fmt: skip


def _side_constants(side: Planes) -> tuple:
    """DIM ... DEPTH of `shaping_kernel` for one side."""
    limit = torch.finfo(META_DTYPES["bfloat16" if side.meta_bf16 else "float16"]).max
    pad = next_power_of_2(side.dim)
    lanes = math.gcd(side.piece, 16)
    # 64 registers a thread of matrix in flight; half where more of them hold rows.
    depth = min(pad, NUM_WARPS * 32 * (64 if pad <= 128 else 32) // pad)
    return side.dim, pad, side.quarter, side.group, side.row_bytes // 4, side.meta_bf16, limit, lanes, depth


def shape_codes(k_rows: Tensor, v_rows: Tensor, loc: Tensor, k_words: Tensor, v_words: Tensor, layer: LayerTensors) -> None:
    """Write the codes of rows whose metadata is in the buffers already; capturable.

    Args:
        k_rows: [num_tokens, num_kv_heads, head_dim] bfloat16 in stored space, contiguous. v_rows: likewise.
        loc: [num_tokens] integer slots; a negative one is not written.
        k_words, v_words: [num_slots, num_kv_heads, row_bytes / 4] int32, written in place.
        layer: of the layer; a side without a matrix is left as it is.
    """
    num_tokens, num_kv_heads = k_rows.shape[:2]
    wide = max(layer.k.dim, layer.v.dim) > 128
    tile = FEW if num_tokens < MANY_FROM else MANY // 2 if wide else MANY
    shaping_kernel[(triton.cdiv(num_tokens, tile), num_kv_heads, 2)](
        k_rows, v_rows, k_rows.stride(0), v_rows.stride(0), num_tokens, loc,
        k_words, v_words, k_words.stride(0), v_words.stride(0),
        layer.k_shaping, layer.v_shaping, layer.k_cuts, layer.v_cuts, layer.k_levels, layer.v_levels,
        *_side_constants(layer.k), *_side_constants(layer.v), tile,
        layer.k_shaping is not None, layer.v_shaping is not None, layer.k_levels is not None, layer.v_levels is not None,
        num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
