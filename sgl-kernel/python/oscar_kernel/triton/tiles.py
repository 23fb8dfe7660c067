# mypy: disable-error-code="assignment"
# ruff: noqa: E741, RUF005 (l is the usual name of a softmax's sum; Triton has no starred tuples)
"""One tile of attention in Triton: over 2-bit rows, and over 16-bit rows. Decode and extend are loops around these two.

Tokens are the rows of a tile and queries its columns: the matrix instruction takes 16 rows and 8 columns, so a KV head shared
by 4 query heads fills half of it, not a quarter.

The 2-bit tile never forms a dequantised row. With a group's (centre, step) and its codes c,

    q . k_hat   = step * (q . c - 1.5 sum(q)) + centre * sum(q)
    sum p v_hat = sum (p step) c - 1.5 sum (p step) + sum (p centre)

and codes come as 1 + w c, see `planes`.

q is scaled by its row's largest magnitude and rounded to float16 once, so no key, query or scale can overflow; sum(q) is taken
over the rounded numbers. p * step is divided by the largest step so far and multiplied by 2^14 before it is rounded to float16:
11 bits for weights down to 2^-28.

State of a running softmax, a tuple (m, l, scale, rank1, ones, acc) with a column a query head (or query token and head):
    m      largest logit so far, in units of log 2
    l      sums of 2^(logit - m)
    scale  the largest step so far; acc and ones are in units of scale / 2^14
    rank1  for each value group, sums of p * centre
    ones   for each value group, sums of p * step: `width` equal rows, a plane of ones in the place of codes
    acc    for each plane, (p * step) times 1 + w c
l and rank1 are kept a token (added up once at the end) or, where that takes too many registers, a column.

K and V are `planes.Planes`. Logits are cap * tanh(logit / cap) where logit_cap is not None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernel.triton.common import centre_and_step, interpreted, to_bfloat16
from oscar_kernel.triton.planes import (
    CODE_MIDDLE,
    closes_group,
    load_codes,
    opens_group,
    plane_channel,
    plane_group,
    plane_weight,
    unpacked_at,
)

INTERPRETED = tl.constexpr(interpreted())
NEVER = tl.constexpr(-1.0e30)
"""First m: below any logit, and finite, so that no difference of two infinities arises."""
SCALE0 = tl.constexpr(2.0**-64)
"""First scale: below any step that matters."""
P_SCALE = tl.constexpr(16384.0)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rows_at(rows, index, head, WIDTH: tl.constexpr):
    """Pointers to a head's part, WIDTH elements, of some `Rows`. index: [tokens] int64."""
    return rows.ptr + index * rows.stride + head * WIDTH


@triton.jit
def load_query(q_ptr, row, live, K: tl.constexpr):
    """Planes of prepared query rows, over w: tensors [width, columns] float16. row: [columns] int64 rows of q_ptr."""
    e = tl.arange(0, K.width)
    q = ()
    for i in tl.static_range(8 * K.cuts):
        at = row[None, :] * (8 * K.cuts * K.width) + (i * K.width + e)[:, None]
        q = q + (tl.load(q_ptr + at, mask=live[None, :], other=0.0),)
    return q


@triton.jit
def load_query_16_bit(q_ptr, row, live, K: tl.constexpr, PRECISE: tl.constexpr):
    """The same planes times w, in bfloat16, as products with 16-bit rows take them; and what that rounded away, if PRECISE.

    Loaded again, under another cache hint so that the compiler does not take it for the first load: held through a kernel
    beside the float16 planes, they would not leave enough registers for heads of 256.
    """
    e = tl.arange(0, K.width)
    high = ()
    low = ()
    for i in tl.static_range(8 * K.cuts):
        at = row[None, :] * (8 * K.cuts * K.width) + (i * K.width + e)[:, None]
        x = tl.load(q_ptr + at, mask=live[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = x * plane_weight(i, K)
        near = to_bfloat16(x)
        high = high + (near,)
        if PRECISE:
            low = low + (to_bfloat16(x - near.to(tl.float32)),)
    return high, low


@triton.jit
def sum_query(q, K: tl.constexpr):
    """For each key group: the sum of a query over the group, and what its products with planes hold beside q . (c - 1.5).

    Returns two tuples of [columns] float32.
    """
    sums = ()
    offsets = ()
    total = tl.sum(q[0].to(tl.float32), axis=0) * 0.0
    offset = total
    for i in tl.static_range(8 * K.cuts):
        part = tl.sum(q[i].to(tl.float32), axis=0)
        total += part * plane_weight(i, K)
        offset += part * (1.0 + CODE_MIDDLE * plane_weight(i, K))
        if closes_group(i, K):
            sums = sums + (total,)
            offsets = offsets + (offset,)
            total = total * 0.0
            offset = offset * 0.0
    return sums, offsets


@triton.jit
def first_state(TOKENS: tl.constexpr, COLUMNS: tl.constexpr, V: tl.constexpr, A_TOKEN: tl.constexpr):
    """The state before the first tile of TOKENS. A_TOKEN: keep sums a token."""
    if A_TOKEN:
        l = tl.zeros((TOKENS, COLUMNS), tl.float32)
    else:
        l = tl.zeros((1, COLUMNS), tl.float32)
    rank1 = ()
    ones = ()
    for _ in tl.static_range(V.num_groups):
        rank1 = rank1 + (l,)
        ones = ones + (tl.zeros((V.width, COLUMNS), tl.float32),)
    acc = ()
    for _ in tl.static_range(8 * V.cuts):
        acc = acc + (tl.zeros((V.width, COLUMNS), tl.float32),)
    m = tl.full((COLUMNS,), NEVER, tl.float32)
    return m, l, tl.sum(tl.zeros((16,), tl.float32), axis=0) + SCALE0, rank1, ones, acc


@triton.jit
def _over_tokens(x, A_TOKEN: tl.constexpr):
    """A tile's terms [tokens, columns] in the shape that sums are kept in."""
    if A_TOKEN:
        terms = x
    else:
        terms = tl.sum(x, axis=0)[None, :]
    return terms


@triton.jit
def settle(state, V: tl.constexpr):
    """The state with sums that were kept a token added up: all become [1, columns]."""
    m, l, scale, rank1, ones, acc = state
    rank1_sum = ()
    for g in tl.static_range(V.num_groups):
        rank1_sum = rank1_sum + (tl.sum(rank1[g], axis=0)[None, :],)
    return m, tl.sum(l, axis=0)[None, :], scale, rank1_sum, ones, acc


@triton.jit
def _logits_of(dots, column_scale, logit_cap):
    """Products -> logits in units of log 2. column_scale: [columns], what the query was divided by times sm_scale."""
    if logit_cap is not None:
        # tanh from one exponential; an infinite one gives 1.
        x = dots * column_scale[None, :]
        x = logit_cap * (1.0 - 2.0 / (1.0 + tl.exp2(x / logit_cap * (2.0 * LOG2E)))) * LOG2E
    else:
        x = dots * (column_scale * LOG2E)[None, :]
    return x


@triton.jit
def _load_pair(row, inside, GROUP: tl.constexpr, SIDE: tl.constexpr):
    """(centre, step) of a group of rows, one 32-bit load a token; zeros outside. row: [tokens] pointers to bytes."""
    return centre_and_step(tl.load((row + (SIDE.quarter + 4 * GROUP)).to(tl.pointer_type(tl.int32)), mask=inside, other=0))


@triton.jit
def attend_packed(
    q, sums, column_scale, logit_cap, k_row, v_row, inside, state,
    K: tl.constexpr, V: tl.constexpr, A_TOKEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of 2-bit rows; returns the new state.

    q, sums: from `load_query` and `sum_query`. k_row, v_row: [tokens] pointers to a head's bytes. inside: [tokens] bool, tokens
    to see; codes of others are read and weigh nothing, their (centre, step) are not read, since only those could hold a NaN.
    """
    m, l, scale, rank1, ones, acc = state
    q_sum, q_offset = sums
    x = load_codes(k_row, K, False, FAST)
    logits = tl.zeros((inside.shape[0], m.shape[0]), tl.float32)
    part = logits
    for i in tl.static_range(8 * K.cuts):
        if opens_group(i, K):
            # What is not q . (c - 1.5) is taken off here, not after the products: the first one takes it from registers that
            # all tiles share.
            part = tl.zeros((inside.shape[0], m.shape[0]), tl.float32) - q_offset[plane_group(i, K)][None, :]
        part = tl.dot(x[unpacked_at(i, K)], q[i], part)
        if closes_group(i, K):
            centre, step = _load_pair(k_row, inside, plane_group(i, K), K)
            logits += part * step[:, None] + q_sum[plane_group(i, K)][None, :] * centre[:, None]
    logits = _logits_of(logits, column_scale, logit_cap)
    logits = tl.where(inside[:, None], logits, float("-inf"))

    m_new = tl.maximum(m, tl.max(logits, axis=0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(logits - m_new[None, :])
    l_new = l * alpha[None, :] + _over_tokens(p, A_TOKEN)

    # The largest step of the tile, over all groups, sets the unit of acc and ones.
    centres = ()
    steps = ()
    largest = tl.zeros((inside.shape[0],), tl.float32)
    for g in tl.static_range(V.num_groups):
        centre, step = _load_pair(v_row, inside, g, V)
        centres = centres + (centre,)
        steps = steps + (step,)
        largest = tl.maximum(largest, step)
    scale_new = tl.maximum(scale, tl.max(largest, axis=0))
    rescale = alpha * (scale / scale_new)
    unit = 1.0 / scale_new * P_SCALE
    rank1_new = ()
    ones_new = ()
    weights = ()
    for g in tl.static_range(V.num_groups):
        weight = (p * (steps[g] * unit)[:, None]).to(tl.float16)
        weights = weights + (weight,)
        rank1_new = rank1_new + (rank1[g] * alpha[None, :] + _over_tokens(p * centres[g][:, None], A_TOKEN),)
        # The sum as one more row of matrix instructions: fewer than to convert, add and shuffle.
        one = tl.full((V.width, inside.shape[0]), 1.0, tl.float16)
        ones_new = ones_new + (tl.dot(one, weight, ones[g] * rescale[None, :]),)

    x = load_codes(v_row, V, True, FAST)
    acc_new = ()
    for i in tl.static_range(8 * V.cuts):
        weight = weights[plane_group(i, V)]
        acc_new = acc_new + (tl.dot(x[unpacked_at(i, V)], weight, acc[i] * rescale[None, :]),)
    return m_new, l_new, scale_new, rank1_new, ones_new, acc_new


@triton.jit
def _dot_bfloat16(a, b, acc):
    """acc + a @ b. The interpreter multiplies the bits of bfloat16 numbers as integers; there the product is in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@triton.jit
def _bfloat16_pair(word):
    """The two bfloat16 numbers of an int32: bits 0-15, bits 16-31."""
    return (
        word.to(tl.int16).to(tl.bfloat16, bitcast=True),
        (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),
    )


@triton.jit
def attend_window(
    q_high, q_low, column_scale, logit_cap, k_row, v_row, inside, seen, state,
    K: tl.constexpr, V: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of bfloat16 rows; returns the new state. Channels are read two at a time, as the planes need them.

    q_high, q_low: from `load_query_16_bit`. k_row, v_row: [tokens] pointers to a head's bfloat16 numbers. inside: [tokens]
    bool, rows that may be read. seen: [tokens, columns] or [tokens, 1] bool. state: with sums of columns. PRECISE: queries and
    weights as sums of two bfloat16 numbers, for decode, where these tiles are few.
    """
    m, l, scale, rank1, ones, acc = state
    e = tl.arange(0, K.width)
    logits = tl.zeros((inside.shape[0], m.shape[0]), tl.float32)
    k_pairs = k_row.to(tl.pointer_type(tl.int32))
    for piece in tl.static_range(4 * K.cuts):
        at = k_pairs[:, None] + (plane_channel(2 * piece, K) // 2 + e)[None, :]
        pair = _bfloat16_pair(tl.load(at, mask=inside[:, None] & (e < K.piece // 2)[None, :], other=0))
        for half in tl.static_range(2):
            if PRECISE:
                logits = _dot_bfloat16(pair[half], q_low[2 * piece + half], logits)
            logits = _dot_bfloat16(pair[half], q_high[2 * piece + half], logits)
    logits = _logits_of(logits, column_scale, logit_cap)
    logits = tl.where(seen & inside[:, None], logits, float("-inf"))

    m_new = tl.maximum(m, tl.max(logits, axis=0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(logits - m_new[None, :])
    l_new = l * alpha[None, :] + _over_tokens(p, False)
    rank1_new = ()
    ones_new = ()
    for g in tl.static_range(V.num_groups):
        rank1_new = rank1_new + (rank1[g] * alpha[None, :],)
        ones_new = ones_new + (ones[g] * alpha[None, :],)

    e = tl.arange(0, V.width)
    weight = p * P_SCALE / scale
    high = to_bfloat16(weight)
    low = to_bfloat16(weight - high.to(tl.float32))
    v_pairs = v_row.to(tl.pointer_type(tl.int32))
    acc_new = ()
    for piece in tl.static_range(4 * V.cuts):
        at = v_pairs[None, :] + (plane_channel(2 * piece, V) // 2 + e)[:, None]
        pair = _bfloat16_pair(tl.load(at, mask=inside[None, :] & (e < V.piece // 2)[:, None], other=0))
        for half in tl.static_range(2):
            part = tl.zeros((V.width, m.shape[0]), tl.float32)
            if PRECISE:
                part = _dot_bfloat16(pair[half], low, part)
            part = _dot_bfloat16(pair[half], high, part)
            part = part * plane_weight(2 * piece + half, V)
            acc_new = acc_new + (acc[2 * piece + half] * alpha[None, :] + part,)
    return m_new, l_new, scale, rank1_new, ones_new, acc_new


@triton.jit
def plane_output(i: tl.constexpr, state, V: tl.constexpr):
    """Plane i of the weighted sum of values, not yet divided by the sum of weights. [width, columns] float32."""
    _, _, scale, rank1, ones, acc = state
    weight: tl.constexpr = plane_weight(i, V)
    total = acc[i] * (1.0 / weight)
    total -= ones[plane_group(i, V)] * (1.0 / weight + CODE_MIDDLE)
    centre = tl.sum(rank1[plane_group(i, V)], axis=0)
    return total * (scale / P_SCALE) + centre[None, :]
