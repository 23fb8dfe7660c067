"""Store, in Triton: transform, clip, quantise, pack, write the 2-bit row and the 16-bit window row, in one launch a layer.
With error shaping the codes come from another launch (see `shaping`), of the layer or of a whole decode step.

In a decode step the launch prepares the step's queries too (see `query`), since both need one small matrix a head.

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

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar.format.codec import META_DTYPE
from oscar_kernel.layer import SideCache
from oscar_kernel.triton.common import Rows, SideTensors, TritonLayer, bfloat16_bits, with_adjacent_heads
from oscar_kernel.triton.query import DEPTH as QUERY_DEPTH
from oscar_kernel.triton.query import Queries, query_constants, query_tensors, row_tiles, transform_queries
from oscar_kernel.triton.shaping import shape_codes

TOKENS_PER_TILE = 16
"""From this many tokens on, tokens share a load of the transform; below, each has a program of its own."""
DEPTH = 32
"""Rows of the transform that are in flight at once."""
META_MAX = tl.constexpr(torch.finfo(META_DTYPE).max)
META_TINY = tl.constexpr(torch.finfo(META_DTYPE).tiny)


class StoreSide(NamedTuple):
    """K or V of the tokens being stored.

    Args:
        x: rows of the model. pool: in 32-bit words, written. window: written. out: for the stored rows in bfloat16, or None.
        transform, mean, clip_rank: see `SideTensors`.
    """

    x: Rows
    pool: Rows
    window: Rows
    out: Rows | None
    transform: Tensor | None
    mean: Tensor | None
    clip_rank: Tensor

    @classmethod
    def of(cls, x: Tensor, side: SideTensors, cache: SideCache, out: Tensor | None) -> StoreSide:
        pool, rows = Rows.of(cache.buffer.view(torch.int32)), None if out is None else Rows.of(out)
        return cls(Rows.of(x), pool, Rows.of(cache.window), rows, side.transform, side.mean, side.clip_rank)


@triton.jit
def _model_rows(side, base, start, live_token, head, DEPTH: tl.constexpr, SIDE: tl.constexpr):
    """Channels start .. start + DEPTH - 1 of the model's rows less their mean, float64; 0 beyond dim. [tokens, DEPTH]."""
    d = start + tl.arange(0, DEPTH)
    live = live_token[:, None] & (d < SIDE.dim)[None, :]
    x = tl.load(side.x.ptr + base[:, None] + d[None, :], mask=live, other=0.0).to(tl.float64)
    if side.mean is not None:
        x = x - tl.load(side.mean + head * SIDE.dim + d, mask=d < SIDE.dim, other=0.0)[None, :]
    return x


@triton.jit
def _stored_rows(
    side, token, live_token, head, channel, live, DEPTH: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """Rows in stored space as float32 numbers that are exact in bfloat16. Returns [TILE, columns] int32 bits.

    channel, live: [columns], which channel a column holds, and whether it holds one.
    """
    base = token.to(tl.int64) * side.x.stride + head * SIDE.dim
    if side.transform is not None:
        total = tl.zeros((TILE, channel.shape[0]), tl.float64)
        x = _model_rows(side, base, 0, live_token, head, DEPTH, SIDE)
        for start in range(0, SIDE.dim, DEPTH):
            d = start + tl.arange(0, DEPTH)
            t_at = (head * SIDE.dim + d)[:, None] * SIDE.dim + channel[None, :]
            t = tl.load(side.transform + t_at, mask=(d < SIDE.dim)[:, None] & live[None, :], other=0.0).to(tl.float64)
            if TILE == 1:
                total += tl.sum(tl.trans(x) * t, axis=0)[None, :]
            else:
                total = tl.dot(x, t, total, out_dtype=tl.float64)
            # The next rows are loaded here, not at the top: Triton 3.8 cannot lower a float64 product whose operand it can
            # see to come from 16-bit numbers, and across an iteration it does not see.
            x = _model_rows(side, base, start + DEPTH, live_token, head, DEPTH, SIDE)
        y = total.to(tl.float32)
    else:
        y = tl.load(side.x.ptr + base[:, None] + channel[None, :], mask=live_token[:, None] & live[None, :], other=0.0)
        y = y.to(tl.float32)
    return bfloat16_bits(y)


@triton.jit
def _store_side(
    side, token, num_tokens, head, loc_ptr, row_ptr, no_row,
    DEPTH: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """K or V of TILE tokens and one head, from the model's row to everything that is written. side: `StoreSide`.

    In a layer that stays in 16 bits (native) a row of the pool is what the window gets.
    """
    column = tl.arange(0, 4 * SIDE.quarter_pad)
    channel = (column // SIDE.quarter_pad) * SIDE.quarter + column % SIDE.quarter_pad
    live = column % SIDE.quarter_pad < SIDE.quarter
    live_token = token < num_tokens
    bits = _stored_rows(side, token, live_token, head, channel, live, DEPTH, TILE, SIDE)

    # The 16-bit copies.
    row16 = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    window_row = tl.load(row_ptr + token, mask=live_token, other=no_row)
    at = window_row.to(tl.int64)[:, None] * side.window.stride + head * SIDE.dim + channel[None, :]
    in_window = live_token & (window_row < no_row) & (window_row >= 0)
    tl.store(side.window.ptr + at, row16, mask=in_window[:, None] & live[None, :])
    if side.out is not None:
        at = token.to(tl.int64)[:, None] * side.out.stride + head * SIDE.dim + channel[None, :]
        tl.store(side.out.ptr + at, row16, mask=live_token[:, None] & live[None, :])
    loc = tl.load(loc_ptr + token, mask=live_token, other=-1).to(tl.int64)
    written = live_token & (loc >= 0)
    if SIDE.native:
        numbers = side.pool.ptr.to(tl.pointer_type(tl.bfloat16))
        at = numbers + (loc * (2 * side.pool.stride) + head * SIDE.dim)[:, None] + channel[None, :]
        tl.store(at, row16, mask=written[:, None] & live[None, :])
    else:
        row = side.pool.ptr + (loc * side.pool.stride + head * (SIDE.row_bytes // 4))
        _write_codes(bits, written, row, head, channel, live, side.clip_rank, TILE, SIDE, CODES)


@triton.jit
def _write_codes(
    bits, written, row, head, channel, live, rank_ptr, TILE: tl.constexpr, SIDE: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """Clip, quantise and pack rows, given as float32 bits [TILE, columns]; row: [TILE] pointers to where each begins.

    CODES: write codes; else only centres and steps, and the codes are left to `shaping`.
    """
    x = bits.to(tl.float32, bitcast=True)
    x = tl.where(x != x, 0.0, x)
    x = tl.where(x == float("inf"), META_MAX, tl.where(x == float("-inf"), -META_MAX, x))

    # Clip threshold: the largest t with at most `rank` numbers below it is the rank-th smallest.
    magnitude = tl.where(live[None, :], x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFF)
    rank = tl.load(rank_ptr + head)
    tau_bits = tl.zeros((TILE,), tl.int32)
    for i in range(18):
        trial = tau_bits | (1 << (30 - i))
        below = tl.sum((magnitude < trial[:, None]).to(tl.int32), axis=1)
        tau_bits = tl.where(below <= rank, trial, tau_bits)
    tau = tau_bits.to(tl.float32, bitcast=True)[:, None]
    x = tl.minimum(tl.maximum(x, -tau), tau)

    centre = tl.zeros((TILE, 4 * SIDE.quarter_pad), tl.float32)
    step = tl.zeros((TILE, 4 * SIDE.quarter_pad), tl.float32)
    for g in tl.static_range(SIDE.num_groups):
        inside = (live & (channel // SIDE.group_size == g))[None, :]
        high = tl.max(tl.where(inside, x, float("-inf")), axis=1)
        low = tl.min(tl.where(inside, x, float("inf")), axis=1)
        c = tl.minimum(tl.maximum((high + low) * 0.5, -META_MAX), META_MAX)
        s = tl.minimum((high - low) * 0.3333333432674408, META_MAX)
        s = tl.where(s < META_TINY, tl.where(s < 0.5 * META_TINY, 0.0, META_TINY), s)
        c16, s16 = c.to(tl.float16), s.to(tl.float16)
        c, s = c16.to(tl.float32), s16.to(tl.float32)
        word = (c16.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (s16.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        tl.store(row + (SIDE.quarter // 4 + g), word, mask=written)
        centre = tl.where(inside, c[:, None], centre)
        step = tl.where(inside, s[:, None], step)

    if CODES:
        code = (x > centre - step).to(tl.int32) + (x > centre) + (x > centre + step)
        # Four codes to a byte, four bytes to a word.
        shift = 2 * tl.arange(0, 4)
        packed = tl.sum(tl.reshape(code, (TILE, 4, SIDE.quarter_pad)) << shift[None, :, None], axis=1)
        words = tl.reshape(packed, (TILE, SIDE.quarter_pad // 4, 4)) << (8 * tl.arange(0, 4))[None, None, :]
        at = tl.arange(0, SIDE.quarter_pad // 4)
        mask = written[:, None] & (at < SIDE.quarter // 4)[None, :]
        tl.store(row[:, None] + at[None, :], tl.sum(words, axis=2), mask=mask)


@triton.jit
def store_kernel(
    k, v, query, num_tokens, loc_ptr, row_ptr, no_row,
    K: tl.constexpr, V: tl.constexpr, K_CODES: tl.constexpr, V_CODES: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    HEADS: tl.constexpr, KV_GROUP_NUM: tl.constexpr, ROWS: tl.constexpr, QUERY_DEPTH: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of TILE tokens, num_kv_heads, 2: K, V; or 3: and queries, then with as many tiles as the most needs).

    k, v: `StoreSide`. query: `QueryTensors` or None. K, V: `Planes`. The rest as in `store_kv`.
    """
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    side = tl.program_id(2)
    if side == 0:
        _store_side(k, token, num_tokens, head, loc_ptr, row_ptr, no_row, DEPTH, TILE, K, K_CODES)
    elif side == 1:
        _store_side(v, token, num_tokens, head, loc_ptr, row_ptr, no_row, DEPTH, TILE, V, V_CODES)
    else:
        if query is not None:
            transform_queries(tl.program_id(0), head, query, num_tokens, HEADS, KV_GROUP_NUM, ROWS, QUERY_DEPTH, K)


def store_kv(k: Tensor, v: Tensor, loc: Tensor, window_rows: Tensor, layer: TritonLayer) -> tuple[Tensor, Tensor]:
    """`oscar_kernel.reference.store_kv` in one launch, or two with error shaping; capturable.

    Args:
        k: [num_tokens, num_kv_heads, head_dim] any float type, after RoPE; tokens may be strided.
        v: [num_tokens, num_kv_heads, v_head_dim], likewise.
        loc: [num_tokens] integer slots; a negative one is not written.
        window_rows: [num_tokens] integer rows of the windows; the last row, or a negative one, is not written.
        layer: its storage is written in place.
    Returns:
        k', v' in bfloat16, for attention among the new tokens.
    """
    rows = _empty_rows(k), _empty_rows(v)
    _store(k, v, loc, window_rows, layer, rows, layer.tensors.shaped)
    return rows


def store_step(
    k: Tensor,
    v: Tensor,
    loc: Tensor,
    window_rows: Tensor,
    layer: TritonLayer,
    *,
    q: Tensor | None = None,
    queries: Queries | None = None,
    codes_later: bool = False,
) -> None:
    """The store of a decode step, whose attention reads the new tokens from their windows; capturable.

    Args:
        k, v, loc, window_rows, layer: as in `store_kv`.
        q: [num_tokens, num_qo_heads, head_dim] queries to prepare in the same launch, into `queries`.
        codes_later: with error shaping, store codes rounded alone for now: `step_codes.StepCodes` follows.
    """
    shaped = layer.tensors.shaped and not codes_later
    rows = (_empty_rows(k), _empty_rows(v)) if shaped else None
    _store(k, v, loc, window_rows, layer, rows, shaped, q, queries)


def _empty_rows(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)


def _store(
    k: Tensor,
    v: Tensor,
    loc: Tensor,
    window_rows: Tensor,
    layer: TritonLayer,
    rows: tuple[Tensor, Tensor] | None,
    shaped: bool,
    q: Tensor | None = None,
    queries: Queries | None = None,
) -> None:
    """Launch the store. rows: for k' and v'. shaped: codes of sides with a matrix come from a launch of their own."""
    tensors, cache = layer.tensors, layer.cache
    num_tokens, num_kv_heads = k.shape[:2]
    if num_tokens == 0:
        return
    k, v = with_adjacent_heads(k), with_adjacent_heads(v)
    k_out, v_out = (None, None) if rows is None else rows
    tile = TOKENS_PER_TILE if num_tokens >= TOKENS_PER_TILE // 2 else 1
    blocks, heads, query = triton.cdiv(num_tokens, tile), num_kv_heads, None
    if q is not None and queries is not None:
        query = query_tensors(q, tensors, queries)
        blocks, heads = max(blocks, row_tiles(q, tensors)), q.shape[1]
    store_kernel[(blocks, num_kv_heads, 2 if query is None else 3)](
        k=StoreSide.of(k, tensors.k, cache.k, k_out),
        v=StoreSide.of(v, tensors.v, cache.v, v_out),
        query=query,
        num_tokens=num_tokens,
        loc_ptr=loc,
        row_ptr=window_rows,
        no_row=cache.k.window.shape[0] - 1,
        K=tensors.k.planes,
        V=tensors.v.planes,
        K_CODES=not (shaped and tensors.k.shaping is not None),
        V_CODES=not (shaped and tensors.v.shaping is not None),
        TILE=tile,
        DEPTH=DEPTH if tile == 1 else DEPTH // 2,
        **query_constants(heads, tensors),
        QUERY_DEPTH=QUERY_DEPTH,
        num_warps=8,
    )
    if shaped and rows is not None:
        shape_codes(*rows, loc, layer)
