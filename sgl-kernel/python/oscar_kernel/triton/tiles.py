# ruff: noqa: E741, RUF005 (l is the usual name of a softmax's sum; Triton has no starred tuples)
"""One tile of attention in Triton: over 2-bit rows, and over 16-bit rows. Decode and extend are loops around these two.

Tokens are the rows of a tile and queries its columns: the matrix instruction takes 16 rows and 8 columns, so a KV head shared
by 4 query heads fills half of it, not a quarter.

The 2-bit tile never forms a dequantised row. With a group's (centre, step) and its codes c,

    q . k_hat   = step * (q . c - 1.5 sum(q)) + centre * sum(q)
    sum p v_hat = sum (p step) c - 1.5 sum (p step) + sum (p centre)

A card's integer units are what unpacking costs, so it is one masked or for two codes: rows are read as 16-bit words (channels
2e and 2e + 1 of four planes), and a code becomes the mantissa of a float16 in [1, 2):

    word    15 14|13 12|11 10| 9  8| 7  6| 5  4| 3  2| 1  0        x = 1 + w * code, exact, with
    odd e:   s=3   s=2   s=1   s=0                                 w = 1/4 for bits 8-9, 1/16 for 6-7, 1/64 for 4-5
    even e:                         s=3   s=2   s=1   s=0

(bits 0-3 and 10-15 come there by a shift of 6). 1/w is folded into the query's planes beforehand and into the output's
afterwards, the sum of the ones is subtracted, all in float32. Level tables take a lookup instead, with w = 1 and no ones.

q is scaled by its row's largest magnitude and rounded to float16 once, so no key, query or scale can overflow; sum(q) is taken
over the rounded numbers. p * step is divided by the largest step so far and multiplied by 2^14 before it is rounded to float16:
11 bits for weights down to 2^-28.

State of a running softmax, a column a query head (or query token and head):
    m      largest logit so far, in units of log 2
    l      sums of 2^(logit - m)
    scale  the largest step so far; acc and ones are in units of scale / 2^14
    rank1  for each value group, sums of p * centre
    ones   for each value group, sums of p * step: WIDTH equal rows, a plane of ones in the place of codes
    acc    for each plane, (p * step) times x
l and rank1 are kept a token (added up once at the end) or, where that takes too many registers, a column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernel.triton.common import closes_group, high_half, interpreted, low_half, opens_group, piece_group, to_bfloat16

INTERPRETED = tl.constexpr(interpreted())
NEVER = tl.constexpr(-1.0e30)
"""First m: below any logit, and finite, so that no difference of two infinities arises."""
SCALE0 = tl.constexpr(2.0**-64)
"""First scale: below any step that matters."""
P_SCALE = tl.constexpr(16384.0)
LOG2E = tl.constexpr(1.4426950408889634)
WORD_PLANES = tl.constexpr(8)


@triton.constexpr_function
def plane_weight(half, s, levels):
    """w of plane s of the even (half 0) or odd channels."""
    if levels:
        return 1.0
    return (0.0625, 0.25, 0.015625)[(half * 4 + s) % 3]


@triton.constexpr_function
def plane_ones(levels):
    """What a plane's x holds beside w * code, in units of x."""
    return 0.0 if levels else 1.0


@triton.constexpr_function
def plane_middle(levels):
    """What is taken from a code to centre it; a level needs nothing."""
    return 0.0 if levels else 1.5


@triton.constexpr_function
def piece_of(i, cuts):
    """Planes are numbered i = piece * 2 + half, pieces by ascending first channel (see triton_common)."""
    return i // 2


@triton.constexpr_function
def half_of(i):
    return i % 2


@triton.constexpr_function
def shift_of(i, cuts):
    """s of plane i."""
    return i // 2 // cuts


@triton.constexpr_function
def word_plane(i, cuts):
    """Where plane i lies in the tuple of unpacked planes: cut * 8 + half * 4 + s."""
    return (i // 2 % cuts) * 8 + (i % 2) * 4 + i // 2 // cuts


@triton.constexpr_function
def plane_channel(i, quarter, piece, cuts):
    """First channel of plane i; its channels are 2 apart."""
    return (i // 2 // cuts) * quarter + (i // 2 % cuts) * piece + i % 2


@triton.jit
def shift_words(word, LEFT: tl.constexpr, FAST: tl.constexpr):
    """16-bit words shifted by 6 bits. FAST: two at a time, so bits stray between neighbours; the masks drop them."""
    if FAST:
        if LEFT:
            out = tl.inline_asm_elementwise("shl.b32 $0, $1, 6;", "=r,r", [word], dtype=tl.uint16, is_pure=True, pack=2)
        else:
            out = tl.inline_asm_elementwise("shr.u32 $0, $1, 6;", "=r,r", [word], dtype=tl.uint16, is_pure=True, pack=2)
    else:
        if LEFT:
            out = word << 6
        else:
            out = word >> 6
    return out


@triton.jit
def one_plus(word, MASK: tl.constexpr, FAST: tl.constexpr):
    """float16 1 + (word & MASK) / 1024. FAST: one PTX instruction for two words; Triton's own code takes them one by one.

    An instruction with eight results would do too, but Triton 3.8 moves only the first of them to before its shared memory.
    """
    if FAST:
        if MASK == 0x0030:
            out = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x00300030, 0x3C003C00, 0xEA;", "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2
            )
        elif MASK == 0x00C0:
            out = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x00C000C0, 0x3C003C00, 0xEA;", "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            out = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x03000300, 0x3C003C00, 0xEA;", "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2
            )
    else:
        out = ((word & MASK) | 0x3C00).to(tl.float16, bitcast=True)
    return out


@triton.jit
def unpack(word, levels_ptr, head, HAS_LEVELS: tl.constexpr, FAST: tl.constexpr):
    """Eight planes of 16-bit words, float16: even channels s = 0..3, then odd ones. word: uint16, any shape."""
    if HAS_LEVELS:
        planes = ()
        l0, l1 = tl.load(levels_ptr + head * 4), tl.load(levels_ptr + head * 4 + 1)
        l2, l3 = tl.load(levels_ptr + head * 4 + 2), tl.load(levels_ptr + head * 4 + 3)
        for at in tl.static_range(8):
            code = (word >> (2 * at)) & 3
            planes = planes + (tl.where(code < 2, tl.where(code == 0, l0, l1), tl.where(code == 2, l2, l3)),)
    else:
        up = shift_words(word, True, FAST)
        down = shift_words(word, False, FAST)
        planes = (
            one_plus(up, 0x00C0, FAST),
            one_plus(up, 0x0300, FAST),
            one_plus(word, 0x0030, FAST),
            one_plus(word, 0x00C0, FAST),
            one_plus(word, 0x0300, FAST),
            one_plus(down, 0x0030, FAST),
            one_plus(down, 0x00C0, FAST),
            one_plus(down, 0x0300, FAST),
        )
    return planes


@triton.jit
def load_query(q_ptr, row, live, WIDTH: tl.constexpr, CUTS: tl.constexpr):
    """Planes of prepared query rows, over w: 8 CUTS tensors [WIDTH, columns] float16. row: [columns] int64 rows of q_ptr."""
    e = tl.arange(0, WIDTH)
    q = ()
    for i in tl.static_range(8 * CUTS):
        at = row[None, :] * (8 * CUTS * WIDTH) + (i * WIDTH + e)[:, None]
        q = q + (tl.load(q_ptr + at, mask=live[None, :], other=0.0),)
    return q


@triton.jit
def load_query_16_bit(q_ptr, row, live, WIDTH: tl.constexpr, CUTS: tl.constexpr, LEVELS: tl.constexpr, PRECISE: tl.constexpr):
    """The same planes times w, in bfloat16, as products with 16-bit rows take them; and what that rounded away, if PRECISE.

    Loaded again, under another cache hint so that the compiler does not take it for the first load: held through a kernel
    beside the float16 planes, they would not leave enough registers for heads of 256.
    """
    e = tl.arange(0, WIDTH)
    high = ()
    low = ()
    for i in tl.static_range(8 * CUTS):
        at = row[None, :] * (8 * CUTS * WIDTH) + (i * WIDTH + e)[:, None]
        x = tl.load(q_ptr + at, mask=live[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = x * plane_weight(half_of(i), shift_of(i, CUTS), LEVELS)
        near = to_bfloat16(x)
        high = high + (near,)
        if PRECISE:
            low = low + (to_bfloat16(x - near.to(tl.float32)),)
    return high, low


@triton.jit
def sum_query(q, QUARTER: tl.constexpr, PIECE: tl.constexpr, CUTS: tl.constexpr, GROUP: tl.constexpr, LEVELS: tl.constexpr):
    """For each key group: the sum of a query over the group, and what its products with planes hold beside q . (c - 1.5).

    Returns two tuples of [columns] float32.
    """
    sums = ()
    offsets = ()
    total = tl.sum(q[0].to(tl.float32), axis=0) * 0.0
    offset = total
    for i in tl.static_range(8 * CUTS):
        part = tl.sum(q[i].to(tl.float32), axis=0)
        total += part * plane_weight(half_of(i), shift_of(i, CUTS), LEVELS)
        offset += part * (plane_ones(LEVELS) + plane_middle(LEVELS) * plane_weight(half_of(i), shift_of(i, CUTS), LEVELS))
        if half_of(i) == 1:
            if closes_group(i // 2, QUARTER, PIECE, CUTS, GROUP):
                sums = sums + (total,)
                offsets = offsets + (offset,)
                total = total * 0.0
                offset = offset * 0.0
    return sums, offsets


@triton.jit
def first_state(
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CUTS: tl.constexpr, GROUPS: tl.constexpr,
    A_TOKEN: tl.constexpr,
):  # fmt: skip
    """The state before the first tile. A_TOKEN: keep sums a token."""
    if A_TOKEN:
        l = tl.zeros((TOKENS, COLUMNS), tl.float32)
    else:
        l = tl.zeros((1, COLUMNS), tl.float32)
    rank1 = ()
    ones = ()
    for _ in tl.static_range(GROUPS):
        rank1 = rank1 + (l,)
        ones = ones + (tl.zeros((WIDTH, COLUMNS), tl.float32),)
    acc = ()
    for _ in tl.static_range(8 * CUTS):
        acc = acc + (tl.zeros((WIDTH, COLUMNS), tl.float32),)
    m = tl.full((COLUMNS,), NEVER, tl.float32)
    return m, l, tl.sum(tl.zeros((16,), tl.float32), axis=0) + SCALE0, rank1, ones, acc


@triton.jit
def over_tokens(x, A_TOKEN: tl.constexpr):
    """A tile's terms [tokens, columns] in the shape that sums are kept in."""
    if A_TOKEN:
        terms = x
    else:
        terms = tl.sum(x, axis=0)[None, :]
    return terms


@triton.jit
def settle(l, rank1, GROUPS: tl.constexpr):
    """Add up sums that were kept a token: all become [1, columns]."""
    rank1_sum = ()
    for g in tl.static_range(GROUPS):
        rank1_sum = rank1_sum + (tl.sum(rank1[g], axis=0)[None, :],)
    return tl.sum(l, axis=0)[None, :], rank1_sum


@triton.jit
def logits_of(dots, column_scale, logit_cap, HAS_CAP: tl.constexpr):
    """Products -> logits in units of log 2. column_scale: [columns], what the query was divided by times sm_scale."""
    if HAS_CAP:
        # tanh from one exponential; an infinite one gives 1.
        x = dots * column_scale[None, :]
        x = logit_cap * (1.0 - 2.0 / (1.0 + tl.exp2(x / logit_cap * (2.0 * LOG2E)))) * LOG2E
    else:
        x = dots * (column_scale * LOG2E)[None, :]
    return x


@triton.jit
def centre_and_step(row, inside, AT: tl.constexpr, BF16: tl.constexpr):
    """A group's pair from byte AT of rows, one 32-bit load a token; zeros outside. row: [tokens] pointers to bytes."""
    word = tl.load((row + AT).to(tl.pointer_type(tl.int32)), mask=inside, other=0)
    return low_half(word, BF16), high_half(word, BF16)


@triton.jit
def attend_packed(
    q, q_sum, q_offset, column_scale, logit_cap, k_ptr, v_ptr, k_slot_bytes, v_slot_bytes, head, slot, inside,
    k_levels, v_levels, m, l, scale, rank1, ones, acc,
    K_QUARTER: tl.constexpr, K_PIECE: tl.constexpr, K_WIDTH: tl.constexpr, K_CUTS: tl.constexpr, K_GROUP: tl.constexpr,
    K_BYTES: tl.constexpr, K_BF16: tl.constexpr, K_LEVELS: tl.constexpr,
    V_QUARTER: tl.constexpr, V_PIECE: tl.constexpr, V_WIDTH: tl.constexpr, V_CUTS: tl.constexpr, V_GROUP: tl.constexpr,
    V_BYTES: tl.constexpr, V_BF16: tl.constexpr, V_LEVELS: tl.constexpr,
    HAS_CAP: tl.constexpr, A_TOKEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of 2-bit rows; returns the new state.

    slot: [tokens] int64. inside: [tokens] bool, tokens to see; codes of others are read and weigh nothing, their (centre, step)
    are not read, since only those could hold a NaN.
    """
    k_row = k_ptr + slot * k_slot_bytes + head * K_BYTES
    v_row = v_ptr + slot * v_slot_bytes + head * V_BYTES

    e = tl.arange(0, K_WIDTH)
    x = ()
    for j in tl.static_range(K_CUTS):
        at = k_row.to(tl.pointer_type(tl.uint16))[:, None] + (j * (K_PIECE // 2) + e)[None, :]
        if K_PIECE == 2 * K_WIDTH:
            word = tl.load(at)
        else:
            word = tl.load(at, mask=(e < K_PIECE // 2)[None, :], other=0)
        x = x + unpack(word, k_levels, head, K_LEVELS, FAST)
    logits = tl.zeros((slot.shape[0], m.shape[0]), tl.float32)
    part = logits
    for i in tl.static_range(8 * K_CUTS):
        if half_of(i) == 0 and opens_group(i // 2, K_QUARTER, K_PIECE, K_CUTS, K_GROUP):
            part = tl.zeros((slot.shape[0], m.shape[0]), tl.float32)
            if not K_LEVELS:
                # Here, not after the products: the first one takes it from registers that all tiles share.
                part -= q_offset[piece_group(i // 2, K_QUARTER, K_PIECE, K_CUTS, K_GROUP)][None, :]
        part = tl.dot(x[word_plane(i, K_CUTS)], q[i], part)
        if half_of(i) == 1 and closes_group(i // 2, K_QUARTER, K_PIECE, K_CUTS, K_GROUP):
            centre, step = centre_and_step(
                k_row, inside, K_QUARTER + 4 * piece_group(i // 2, K_QUARTER, K_PIECE, K_CUTS, K_GROUP), K_BF16
            )
            total = q_sum[piece_group(i // 2, K_QUARTER, K_PIECE, K_CUTS, K_GROUP)]
            logits += part * step[:, None] + total[None, :] * centre[:, None]
    logits = logits_of(logits, column_scale, logit_cap, HAS_CAP)
    logits = tl.where(inside[:, None], logits, float("-inf"))

    m_new = tl.maximum(m, tl.max(logits, axis=0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(logits - m_new[None, :])
    l_new = l * alpha[None, :] + over_tokens(p, A_TOKEN)

    # The largest step of the tile, over all groups, sets the unit of acc and ones.
    centres = ()
    steps = ()
    largest = tl.zeros((slot.shape[0],), tl.float32)
    for g in tl.static_range(4 * V_QUARTER // V_GROUP):
        centre, step = centre_and_step(v_row, inside, V_QUARTER + 4 * g, V_BF16)
        centres = centres + (centre,)
        steps = steps + (step,)
        largest = tl.maximum(largest, step)
    scale_new = tl.maximum(scale, tl.max(largest, axis=0))
    rescale = alpha * (scale / scale_new)
    unit = 1.0 / scale_new * P_SCALE
    rank1_new = ()
    ones_new = ()
    weights = ()
    for g in tl.static_range(4 * V_QUARTER // V_GROUP):
        weight = (p * (steps[g] * unit)[:, None]).to(tl.float16)
        weights = weights + (weight,)
        rank1_new = rank1_new + (rank1[g] * alpha[None, :] + over_tokens(p * centres[g][:, None], A_TOKEN),)
        if V_LEVELS:
            ones_new = ones_new + (ones[g],)  # a level holds nothing to take off
        else:
            # The sum as one more row of matrix instructions: fewer than to convert, add and shuffle.
            one = tl.full((V_WIDTH, slot.shape[0]), 1.0, tl.float16)
            ones_new = ones_new + (tl.dot(one, weight, ones[g] * rescale[None, :]),)

    e = tl.arange(0, V_WIDTH)
    x = ()
    for j in tl.static_range(V_CUTS):
        at = v_row.to(tl.pointer_type(tl.uint16))[None, :] + (j * (V_PIECE // 2) + e)[:, None]
        if V_PIECE == 2 * V_WIDTH:
            word = tl.load(at)
        else:
            word = tl.load(at, mask=(e < V_PIECE // 2)[:, None], other=0)
        x = x + unpack(word, v_levels, head, V_LEVELS, FAST)
    acc_new = ()
    for i in tl.static_range(8 * V_CUTS):
        weight = weights[piece_group(i // 2, V_QUARTER, V_PIECE, V_CUTS, V_GROUP)]
        acc_new = acc_new + (tl.dot(x[word_plane(i, V_CUTS)], weight, acc[i] * rescale[None, :]),)
    return m_new, l_new, scale_new, rank1_new, ones_new, acc_new


@triton.jit
def dot_bfloat16(a, b, acc):
    """acc + a @ b. The interpreter multiplies the bits of bfloat16 numbers as integers; there the product is in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@triton.jit
def bfloat16_pair(word):
    """The two bfloat16 numbers of an int32: bits 0-15, bits 16-31."""
    return (
        word.to(tl.int16).to(tl.bfloat16, bitcast=True),
        (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),
    )


@triton.jit
def attend_window(
    q_high, q_low, column_scale, logit_cap, k_ptr, v_ptr, k_stride, v_stride, head, row, inside, seen,
    m, l, scale, rank1, ones, acc,
    K_DIM: tl.constexpr, K_QUARTER: tl.constexpr, K_PIECE: tl.constexpr, K_WIDTH: tl.constexpr, K_CUTS: tl.constexpr,
    V_DIM: tl.constexpr, V_QUARTER: tl.constexpr, V_PIECE: tl.constexpr, V_WIDTH: tl.constexpr, V_CUTS: tl.constexpr,
    V_GROUP: tl.constexpr, V_LEVELS: tl.constexpr, HAS_CAP: tl.constexpr, A_TOKEN: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of bfloat16 rows; returns the new state. Channels are read two at a time, as the planes need them.

    q_high, q_low: from `load_query_16_bit`. row: [tokens] int64 rows of k_ptr and v_ptr. inside: [tokens] bool, rows that may
    be read. seen: [tokens, columns] or [tokens, 1] bool. PRECISE: queries and weights as sums of two bfloat16 numbers, for
    decode, where these tiles are few.
    """
    e = tl.arange(0, K_WIDTH)
    logits = tl.zeros((row.shape[0], m.shape[0]), tl.float32)
    k_pairs = (k_ptr + row * k_stride + head * K_DIM).to(tl.pointer_type(tl.int32))
    for piece in tl.static_range(4 * K_CUTS):
        at = k_pairs[:, None] + (plane_channel(2 * piece, K_QUARTER, K_PIECE, K_CUTS) // 2 + e)[None, :]
        pair = bfloat16_pair(tl.load(at, mask=inside[:, None] & (e < K_PIECE // 2)[None, :], other=0))
        for half in tl.static_range(2):
            if PRECISE:
                logits = dot_bfloat16(pair[half], q_low[2 * piece + half], logits)
            logits = dot_bfloat16(pair[half], q_high[2 * piece + half], logits)
    logits = logits_of(logits, column_scale, logit_cap, HAS_CAP)
    logits = tl.where(seen & inside[:, None], logits, float("-inf"))

    m_new = tl.maximum(m, tl.max(logits, axis=0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(logits - m_new[None, :])
    l_new = l * alpha[None, :] + over_tokens(p, A_TOKEN)
    rank1_new = ()
    ones_new = ()
    for g in tl.static_range(4 * V_QUARTER // V_GROUP):
        rank1_new = rank1_new + (rank1[g] * alpha[None, :],)
        ones_new = ones_new + (ones[g] if V_LEVELS else ones[g] * alpha[None, :],)

    e = tl.arange(0, V_WIDTH)
    weight = p * P_SCALE / scale
    high = to_bfloat16(weight)
    low = to_bfloat16(weight - high.to(tl.float32))
    v_pairs = (v_ptr + row * v_stride + head * V_DIM).to(tl.pointer_type(tl.int32))
    acc_new = ()
    for piece in tl.static_range(4 * V_CUTS):
        at = v_pairs[None, :] + (plane_channel(2 * piece, V_QUARTER, V_PIECE, V_CUTS) // 2 + e)[:, None]
        pair = bfloat16_pair(tl.load(at, mask=inside[None, :] & (e < V_PIECE // 2)[:, None], other=0))
        for half in tl.static_range(2):
            part = tl.zeros((V_WIDTH, m.shape[0]), tl.float32)
            if PRECISE:
                part = dot_bfloat16(pair[half], low, part)
            part = dot_bfloat16(pair[half], high, part)
            part = part * plane_weight(half, shift_of(2 * piece, V_CUTS), V_LEVELS)
            acc_new = acc_new + (acc[2 * piece + half] * alpha[None, :] + part,)
    return m_new, l_new, scale, rank1_new, ones_new, acc_new


@triton.jit
def plane_output(
    i: tl.constexpr, scale, rank1, ones, acc,
    QUARTER: tl.constexpr, PIECE: tl.constexpr, CUTS: tl.constexpr, GROUP: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Plane i of the weighted sum of values, not yet divided by the sum of weights. [WIDTH, columns] float32."""
    weight: tl.constexpr = plane_weight(half_of(i), shift_of(i, CUTS), LEVELS)
    total = acc[i] * (1.0 / weight)
    if not LEVELS:
        total -= ones[piece_group(i // 2, QUARTER, PIECE, CUTS, GROUP)] * (1.0 / weight + plane_middle(LEVELS))
    centre = tl.sum(rank1[piece_group(i // 2, QUARTER, PIECE, CUTS, GROUP)], axis=0)
    return total * (scale / P_SCALE) + centre[None, :]
