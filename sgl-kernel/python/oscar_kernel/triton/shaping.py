"""Codes of rows whose rounding errors are passed on from channel to channel (`oscar.format.codec`, "shaping"), in Triton.

A launch of its own after the store, which has written everything but the codes: head_dim dependent steps want another shape of
program than the transform does, and product and sum must be rounded apart, which is an option of a whole launch. A decode step
has one such launch for all layers (`triton_step_codes`).

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

from oscar.format.codec import META_DTYPES
from oscar_kernel.triton.common import LayerTensors, Planes, high_half, low_half, next_power_of_2

MANY_FROM = 1024
"""Rows of a head, tokens times layers, from which on a card is full: then issue slots count, below it the time of one row."""


def program_of(num_tokens: int, wide: bool, num_layers: int = 1) -> tuple[int, int]:
    """Tokens and warps of a program. wide: rows have more than 128 elements.

    A warp has two tokens, the fewest that leave no thread without a channel, or with many rows eight, which share what is
    loaded of the matrix (not where rows are wide: too few registers). A program has no more warps than its tokens need.
    """
    many = not wide and num_tokens * num_layers >= MANY_FROM
    a_warp, most = (8, 8) if many else (2, 4)
    warps = min(most, next_power_of_2(triton.cdiv(num_tokens, a_warp)))
    return a_warp * warps, warps


@triton.jit
def _read_ahead(s_ptr, DIM: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, DEPTH: tl.constexpr):
    """0.0, after the matrix has come to L1 in a few loads that wait together: step i would wait for row i alone.

    WORDS: 32-bit words of a row of the matrix.
    """
    word = tl.arange(0, WORDS_PAD)
    total = tl.zeros((DEPTH, WORDS_PAD), tl.int32)
    words_ptr = s_ptr.to(tl.pointer_type(tl.int32))
    for start in range(0, DIM, DEPTH):
        row = start + tl.arange(0, DEPTH)
        # Zero up to the diagonal, so about half of it; by blocks of 16 channels, which keeps loads wide.
        inside = (row < DIM)[:, None] & (word < WORDS)[None, :] & (word // (16 * WORDS // DIM) >= row[:, None] // 16)
        total ^= tl.load(words_ptr + row[:, None] * WORDS + word[None, :], mask=inside, other=0)
    # A product that no compiler may leave out: it could be -0.0.
    return tl.max(tl.max(total, axis=1), axis=0).to(tl.float32) * 0.0


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
            more = a + error * tl.load(s_row + c * LANES).to(tl.float32)[None, :]
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
def shape_side(
    x_ptr, x_stride, x_row, loc, written, head, buffer_ptr, slot_words, s_ptr, cuts_ptr, levels_ptr,
    DIM: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, ROW_WORDS: tl.constexpr, META_BF16: tl.constexpr,
    META_MAX: tl.constexpr, LANES: tl.constexpr, S_WORDS: tl.constexpr, S_PAD: tl.constexpr, DEPTH: tl.constexpr,
    TILE: tl.constexpr, HAS_LEVELS: tl.constexpr,
):  # fmt: skip
    """K or V of TILE tokens and one head: reads their 16-bit rows and the metadata in the buffer, writes the codes there.

    x_row, loc: [TILE], rows of x and slots. written: [TILE] bool, tokens that have both.
    """
    NUM: tl.constexpr = DIM // LANES
    BYTES: tl.constexpr = QUARTER // LANES
    lane = tl.arange(0, LANES)
    row = buffer_ptr + loc.to(tl.int64) * slot_words + head * ROW_WORDS
    x_row = x_ptr + x_row.to(tl.int64) * x_stride + head * DIM
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

    start = tl.zeros((TILE, LANES), tl.float32) + _read_ahead(s_ptr, DIM, S_WORDS, S_PAD, DEPTH)
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
    K_DIM: tl.constexpr, K_QUARTER: tl.constexpr, K_GROUP: tl.constexpr, K_WORDS: tl.constexpr, K_BF16: tl.constexpr,
    K_MAX: tl.constexpr, K_LANES: tl.constexpr, K_S: tl.constexpr, K_S_PAD: tl.constexpr, K_DEPTH: tl.constexpr,
    V_DIM: tl.constexpr, V_QUARTER: tl.constexpr, V_GROUP: tl.constexpr, V_WORDS: tl.constexpr, V_BF16: tl.constexpr,
    V_MAX: tl.constexpr, V_LANES: tl.constexpr, V_S: tl.constexpr, V_S_PAD: tl.constexpr, V_DEPTH: tl.constexpr,
    TILE: tl.constexpr, K_HAS_LEVELS: tl.constexpr, V_HAS_LEVELS: tl.constexpr,
):  # fmt: skip
    """One layer. Grid: (tiles of TILE tokens, num_kv_heads, 2: K, V). To be launched without fusion of products and sums."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    loc = tl.load(loc_ptr + token, mask=token < num_tokens, other=-1)
    if tl.program_id(2) == 0:
        if K_S > 0:
            shape_side(
                k_ptr, k_stride, token, loc, loc >= 0, head, k_buffer, k_slot_words, k_shaping, k_cuts, k_levels,
                K_DIM, K_QUARTER, K_GROUP, K_WORDS, K_BF16, K_MAX, K_LANES, K_S, K_S_PAD, K_DEPTH, TILE, K_HAS_LEVELS,
            )  # fmt: skip
    else:
        if V_S > 0:
            shape_side(
                v_ptr, v_stride, token, loc, loc >= 0, head, v_buffer, v_slot_words, v_shaping, v_cuts, v_levels,
                V_DIM, V_QUARTER, V_GROUP, V_WORDS, V_BF16, V_MAX, V_LANES, V_S, V_S_PAD, V_DEPTH, TILE, V_HAS_LEVELS,
            )  # fmt: skip


def _side_constants(side: Planes, matrix: Tensor | None, warps: int) -> tuple:
    """DIM ... DEPTH of the kernels for one side; its S is 0 without a matrix."""
    limit = torch.finfo(META_DTYPES["bfloat16" if side.meta_bf16 else "float16"]).max
    words = 0 if matrix is None else side.dim * matrix.element_size() // 4
    pad = next_power_of_2(max(1, words))
    # 64 registers a thread of matrix in flight; half where more of them hold rows.
    depth = min(next_power_of_2(side.dim), warps * 32 * (64 if side.dim <= 128 else 32) // pad)
    lanes = math.gcd(side.piece, 16)
    return side.dim, side.quarter, side.group, side.row_bytes // 4, side.meta_bf16, limit, lanes, words, pad, depth


def launch_constants(layer: LayerTensors, num_tokens: int, num_layers: int = 1) -> tuple[int, tuple, dict]:
    """Tokens of a program, and compile-time arguments and options of a launch."""
    tile, warps = program_of(num_tokens, max(layer.k.dim, layer.v.dim) > 128, num_layers)
    sides = _side_constants(layer.k, layer.k_shaping, warps), _side_constants(layer.v, layer.v_shaping, warps)
    levels = layer.k_levels is not None, layer.v_levels is not None
    return tile, (*sides[0], *sides[1], tile, *levels), {"num_warps": warps, "enable_fp_fusion": False}


def shape_codes(k_rows: Tensor, v_rows: Tensor, loc: Tensor, k_words: Tensor, v_words: Tensor, layer: LayerTensors) -> None:
    """Write the codes of rows whose metadata is in the buffers already; capturable.

    Args:
        k_rows: [num_tokens, num_kv_heads, head_dim] bfloat16 in stored space, contiguous. v_rows: likewise.
        loc: [num_tokens] integer slots; a negative one is not written.
        k_words, v_words: [num_slots, num_kv_heads, row_bytes / 4] int32, written in place.
        layer: of the layer; a side without a matrix is left as it is.
    """
    num_tokens, num_kv_heads = k_rows.shape[:2]
    tile, constants, options = launch_constants(layer, num_tokens)
    shaping_kernel[(triton.cdiv(num_tokens, tile), num_kv_heads, 2)](
        k_rows, v_rows, k_rows.stride(0), v_rows.stride(0), num_tokens, loc,
        k_words, v_words, k_words.stride(0), v_words.stride(0),
        layer.k_shaping, layer.v_shaping, layer.k_cuts, layer.v_cuts, layer.k_levels, layer.v_levels,
        *constants, **options,
    )  # fmt: skip
