# mypy: disable-error-code="assignment"
"""Codes of rows whose rounding errors are passed on from channel to channel (`oscar.format.codec`, "shaping"), in Triton.

A launch of its own after the store, which has written everything but the codes: head_dim dependent steps want another shape of
program than the transform does, and product and sum must be rounded apart, which is an option of a whole launch. A decode step
has one such launch for all layers (`step_codes`).

A row is cut into chunks of `lanes` neighbouring channels of one group, one channel a thread; 16 wherever quarters of rows and
groups are multiples of 16. In a step every thread codes its channel of the chunk, and the error of the channel whose turn it is
goes to all by one shuffle: subtract, compare, select, subtract, shuffle, multiply, add, and nothing waits for another warp.
What is passed on to a chunk stays in one register a row and thread, and chunks that are done are not touched again, so about
half of the square matrix is multiplied.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar.format.codec import META_DTYPE
from oscar_kernel.triton.common import LayerTensors, Rows, SideTensors, TritonLayer, centre_and_step
from oscar_kernel.triton.planes import next_power_of_2

MANY_FROM = 1024
"""Rows of a head, tokens times layers, from which on a card is full: then issue slots count, below it the time of one row."""
META_MAX = tl.constexpr(torch.finfo(META_DTYPE).max)


class Chunks(NamedTuple):
    """How the rows of one side are cut: one tuple of constants of the kernels.

    Args:
        dim: elements in a row. quarter: bytes of codes. group_size: elements that share a centre and a step.
        row_words: 32-bit words of a row of the pool. lanes: channels of a chunk.
        words, words_pad: 32-bit words of a row of the matrix, and the power of two that holds them.
        depth: rows of the matrix that are in flight at once.
    """

    dim: int
    quarter: int
    group_size: int
    row_words: int
    lanes: int
    words: int
    words_pad: int
    depth: int

    @classmethod
    def of(cls, side: SideTensors, warps: int) -> Chunks | None:
        """None where no errors are passed on."""
        if side.shaping is None:
            return None
        planes = side.planes
        words = planes.dim * side.shaping.element_size() // 4
        pad = next_power_of_2(words)
        return cls(
            dim=planes.dim,
            quarter=planes.quarter,
            group_size=planes.group_size,
            row_words=planes.row_bytes // 4,
            lanes=math.gcd(planes.piece, 16),
            words=words,
            words_pad=pad,
            # 64 registers a thread of matrix in flight; half where more of them hold rows.
            depth=min(planes.dim_pad, warps * 32 * (64 if planes.dim <= 128 else 32) // pad),
        )


class ShapeSide(NamedTuple):
    """K or V of tokens whose codes are written. x: their rows in stored space, bfloat16. pool: in 32-bit words, written in
    place. matrix: [num_kv_heads, dim, dim] float16 or float32, or None."""

    x: Rows
    pool: Rows
    matrix: Tensor | None


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
def _read_ahead(matrix, SIDE: tl.constexpr):
    """0.0, after the matrix has come to L1 in a few loads that wait together: step i would wait for row i alone."""
    word = tl.arange(0, SIDE.words_pad)
    total = tl.zeros((SIDE.depth, SIDE.words_pad), tl.int32)
    words_ptr = matrix.to(tl.pointer_type(tl.int32))
    for start in range(0, SIDE.dim, SIDE.depth):
        row = start + tl.arange(0, SIDE.depth)
        # Zero up to the diagonal, so about half of it; by blocks of 16 channels, which keeps loads wide.
        inside = (row < SIDE.dim)[:, None] & (word < SIDE.words)[None, :]
        inside = inside & (word // (16 * SIDE.words // SIDE.dim) >= row[:, None] // 16)
        total ^= tl.load(words_ptr + row[:, None] * SIDE.words + word[None, :], mask=inside, other=0)
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
            # What the matrix holds up to its diagonal is never looked at.
            a = more if c > CHUNK else tl.where((lane > i)[None, :], more, a)
        out = out + (a,)  # noqa: RUF005 - Triton has no star
    return out


@triton.jit
def _with_codes(packed, bits, AT: tl.constexpr, NUM: tl.constexpr):
    """packed, a tuple of NUM, with bits added to entry AT."""
    out = ()
    for c in tl.static_range(NUM):
        out = out + (packed[c] | bits if c == AT else packed[c],)  # noqa: RUF005
    return out


@triton.jit
def shape_rows(x, row, matrix, written, TILE: tl.constexpr, SIDE: tl.constexpr):
    """Rows of K or V of TILE tokens and one head: reads them in 16 bits and their metadata in the pool, writes the codes there.

    x: [TILE] pointers to rows of bfloat16 numbers. row: [TILE] pointers to rows of the pool, in 32-bit words. matrix: pointer
    to the head's. written: [TILE] bool, tokens that have both rows. SIDE: `Chunks`.
    """
    LANES: tl.constexpr = SIDE.lanes
    NUM: tl.constexpr = SIDE.dim // LANES
    BYTES: tl.constexpr = SIDE.quarter // LANES
    lane = tl.arange(0, LANES)

    start = tl.zeros((TILE, LANES), tl.float32) + _read_ahead(matrix, SIDE)
    passed_on, packed = (), ()
    for _ in tl.static_range(NUM):
        passed_on = passed_on + (start,)  # noqa: RUF005
    for _ in tl.static_range(BYTES):
        packed = packed + (tl.zeros((TILE, LANES), tl.int32),)  # noqa: RUF005
    for c in tl.static_range(NUM):
        channel = c * LANES + lane
        y = tl.load(x[:, None] + channel[None, :], mask=written[:, None], other=0.0).to(tl.float32)
        y = tl.where(y != y, 0.0, y)
        y = tl.where(y == float("inf"), META_MAX, tl.where(y == float("-inf"), -META_MAX, y))
        if c * LANES % SIDE.group_size == 0:
            word = tl.load(row + (SIDE.quarter // 4 + c * LANES // SIDE.group_size), mask=written, other=0)[:, None]
            centre, step = centre_and_step(word)
            # All as centre + factor * step: written shorter, the same numbers spill registers on sm_120.
            bound0, bound1, bound2 = centre + -1.0 * step, centre + 0.0 * step, centre + 1.0 * step
            value0, value1 = centre + -1.5 * step, centre + -0.5 * step
            value2, value3 = centre + 0.5 * step, centre + 1.5 * step
        for i in range(LANES):
            z = y - passed_on[c]
            low, high = tl.where(z > bound0, value1, value0), tl.where(z > bound2, value3, value2)
            error = tl.gather(tl.where(z > bound1, high, low) - y, tl.zeros((TILE, LANES), tl.int32) + i, 1)
            passed_on = _pass_on(passed_on, error, matrix + (c * LANES + i) * SIDE.dim + lane, i, c, NUM, LANES)
        z = y - passed_on[c]
        code = (z > bound0).to(tl.int32) + (z > bound1) + (z > bound2)
        packed = _with_codes(packed, code << (2 * (c // BYTES)), c % BYTES, BYTES)

    # Four bytes to a word.
    for b in tl.static_range(BYTES):
        words = tl.reshape(packed[b], (TILE, LANES // 4, 4)) << (8 * tl.arange(0, 4))[None, None, :]
        at = row[:, None] + (b * (LANES // 4) + tl.arange(0, LANES // 4))[None, :]
        tl.store(at, tl.sum(words, axis=2), mask=written[:, None])


@triton.jit
def _shape_side(side, token, loc, head, TILE: tl.constexpr, SIDE: tl.constexpr):
    """`shape_rows` of a layer's K or V; side: `ShapeSide`. token: [TILE] rows of x. loc: [TILE] slots, negative for none."""
    x = side.x.ptr + token.to(tl.int64) * side.x.stride + head * SIDE.dim
    row = side.pool.ptr + loc.to(tl.int64) * side.pool.stride + head * SIDE.row_words
    shape_rows(x, row, side.matrix + head * (SIDE.dim * SIDE.dim), loc >= 0, TILE, SIDE)


@triton.jit
def shaping_kernel(k, v, num_tokens, loc_ptr, TILE: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """One layer. Grid: (tiles of TILE tokens, num_kv_heads, 2: K, V). To be launched without fusion of products and sums.

    k, v: `ShapeSide`. K, V: `Chunks`, or None where no errors are passed on.
    """
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    loc = tl.load(loc_ptr + token, mask=token < num_tokens, other=-1)
    if tl.program_id(2) == 0:
        if K is not None:
            _shape_side(k, token, loc, head, TILE, K)
    else:
        if V is not None:
            _shape_side(v, token, loc, head, TILE, V)


def launch_constants(layer: LayerTensors, num_tokens: int, num_layers: int = 1) -> dict:
    """Compile-time arguments and options of a launch."""
    tile, warps = program_of(num_tokens, max(layer.k.planes.dim, layer.v.planes.dim) > 128, num_layers)
    sides = {"K": Chunks.of(layer.k, warps), "V": Chunks.of(layer.v, warps)}
    return {"TILE": tile, **sides, "num_warps": warps, "enable_fp_fusion": False}


def shape_codes(k_rows: Tensor, v_rows: Tensor, loc: Tensor, layer: TritonLayer) -> None:
    """Write the codes of rows whose metadata is in the pool already; capturable.

    Args:
        k_rows: [num_tokens, num_kv_heads, head_dim] bfloat16 in stored space, contiguous. v_rows: likewise.
        loc: [num_tokens] integer slots; a negative one is not written.
        layer: its pool is written in place; a side without a matrix is left as it is.
    """
    tensors, cache = layer.tensors, layer.cache
    num_tokens, num_kv_heads = k_rows.shape[:2]
    constants = launch_constants(tensors, num_tokens)
    shaping_kernel[(triton.cdiv(num_tokens, constants["TILE"]), num_kv_heads, 2)](
        k=ShapeSide(Rows.of(k_rows), Rows.of(cache.k.buffer.view(torch.int32)), tensors.k.shaping),
        v=ShapeSide(Rows.of(v_rows), Rows.of(cache.v.buffer.view(torch.int32)), tensors.v.shaping),
        num_tokens=num_tokens,
        loc_ptr=loc,
        **constants,
    )
