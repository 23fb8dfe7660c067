# mypy: disable-error-code="assignment"
"""How the Triton kernels cut a row into planes, and how they unpack the codes of one.

Byte b of a row holds channels b, b + Q, b + 2Q, b + 3Q (Q = head_dim / 4), so the codes at one place of all bytes are those of
Q neighbouring channels: s Q ... s Q + Q - 1 for place s. Where a quantisation group is shorter than Q, or does not divide it,
this run is cut into pieces of gcd(Q, group_size) channels; then every piece lies in one group, and codes are unpacked with
shifts alone. Kernels read bytes in pairs, so a piece has a half of even channels and a half of odd ones. A half is a plane.

Planes are numbered i = 2 * piece + half, pieces by their first channel. A plane is held in a power of two of elements, at least
16 (the depth of a matrix instruction), zero beyond piece / 2.

A card's integer units are what unpacking costs, so it is one masked or for two codes. Rows are read as 16-bit words (channels
2e and 2e + 1 of four runs), and a code becomes the mantissa of a float16 in [1, 2):

    word    15 14|13 12|11 10| 9  8| 7  6| 5  4| 3  2| 1  0        x = 1 + w * code, exact, with
    odd e:   s=3   s=2   s=1   s=0                                 w = 1/4 for bits 8-9, 1/16 for 6-7, 1/64 for 4-5
    even e:                         s=3   s=2   s=1   s=0

Bits 0-3 and 10-15 come there by a shift of 6. 1/w is folded into the query's planes beforehand and into the output's
afterwards, and the sum of the ones is subtracted, all in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from oscar.format.codec import LosslessFormat, RowFormat

CODE_MIDDLE = tl.constexpr(1.5)
"""What is taken from a code to centre it."""


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class Planes(NamedTuple):
    """How the rows of one side are cut: one tuple of constants of the kernels.

    Args:
        dim: elements in a row. dim_pad: the power of two that holds them.
        quarter: Q, bytes of codes. quarter_pad: the power of two that holds them, at least 16.
        group_size: elements that share a centre and a step. num_groups: of a row.
        piece: channels of a piece. width: elements that hold a plane, half a piece. cuts: pieces in a run of Q channels.
        row_bytes: bytes of a row.
        native: a row is its bfloat16 numbers, of a layer that stays in 16 bits.
    """

    dim: int
    dim_pad: int
    quarter: int
    quarter_pad: int
    group_size: int
    num_groups: int
    piece: int
    width: int
    cuts: int
    row_bytes: int
    native: bool

    @classmethod
    def of(cls, fmt: RowFormat | LosslessFormat) -> Planes:
        """Raises ValueError for a row that the kernels cannot read."""
        native, group_size = isinstance(fmt, LosslessFormat), fmt.head_dim
        if isinstance(fmt, LosslessFormat) and fmt.dtype != "bfloat16":
            raise ValueError("oscar_kernel (Triton): the lossless debug format runs on the PyTorch reference only")
        if isinstance(fmt, RowFormat) and fmt.group_size is not None:
            group_size = fmt.group_size
        if fmt.head_dim % 16:
            raise ValueError(f"oscar_kernel (Triton): head_dim must be a multiple of 16, got head_dim={fmt.head_dim}")
        quarter = fmt.head_dim // 4
        piece = math.gcd(quarter, group_size)
        return cls(
            dim=fmt.head_dim,
            dim_pad=next_power_of_2(fmt.head_dim),
            quarter=quarter,
            quarter_pad=max(16, next_power_of_2(quarter)),
            group_size=group_size,
            num_groups=fmt.head_dim // group_size,
            piece=piece,
            width=max(16, next_power_of_2(piece // 2)),
            cuts=quarter // piece,
            row_bytes=fmt.row_bytes,
            native=native,
        )

    @property
    def query_width(self) -> int:
        """Elements of a prepared query row: all planes, padding included."""
        return 8 * self.cuts * self.width


@triton.constexpr_function
def plane_weight(i, side):
    """w of plane i."""
    return (0.0625, 0.25, 0.015625)[(i % 2 * 4 + i // 2 // side.cuts) % 3]


@triton.constexpr_function
def plane_channel(i, side):
    """First channel of plane i; its channels are 2 apart."""
    return (i // 2 // side.cuts) * side.quarter + (i // 2 % side.cuts) * side.piece + i % 2


@triton.constexpr_function
def plane_group(i, side):
    """Quantisation group of plane i."""
    return ((i // 2 // side.cuts) * side.quarter + (i // 2 % side.cuts) * side.piece) // side.group_size


@triton.constexpr_function
def opens_group(i, side):
    """Whether plane i is the first of its group."""
    channel = (i // 2 // side.cuts) * side.quarter + (i // 2 % side.cuts) * side.piece
    return i % 2 == 0 and channel % side.group_size == 0


@triton.constexpr_function
def closes_group(i, side):
    """Whether plane i is the last of its group."""
    channel = (i // 2 // side.cuts) * side.quarter + (i // 2 % side.cuts) * side.piece
    return i % 2 == 1 and (channel + side.piece) % side.group_size == 0


@triton.constexpr_function
def unpacked_at(i, side):
    """Where plane i lies in what `load_codes` returns."""
    return (i // 2 % side.cuts) * 8 + (i % 2) * 4 + i // 2 // side.cuts


@triton.jit
def _shift_words(word, LEFT: tl.constexpr, FAST: tl.constexpr):
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
def _one_plus(word, MASK: tl.constexpr, FAST: tl.constexpr):
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
def _unpack(word, FAST: tl.constexpr):
    """1 + w * code of eight planes, float16: even channels of places s = 0..3, then odd ones. word: uint16, any shape."""
    up = _shift_words(word, True, FAST)
    down = _shift_words(word, False, FAST)
    return (
        _one_plus(up, 0x00C0, FAST),
        _one_plus(up, 0x0300, FAST),
        _one_plus(word, 0x0030, FAST),
        _one_plus(word, 0x00C0, FAST),
        _one_plus(word, 0x0300, FAST),
        _one_plus(down, 0x0030, FAST),
        _one_plus(down, 0x00C0, FAST),
        _one_plus(down, 0x0300, FAST),
    )


@triton.jit
def load_codes(row, SIDE: tl.constexpr, CHANNELS_FIRST: tl.constexpr, FAST: tl.constexpr):
    """1 + w * code of all planes of a tile's rows, in the order of `unpacked_at`.

    row: [tokens] pointers to bytes. Returns float16 tensors [tokens, width], or [width, tokens] if CHANNELS_FIRST.
    """
    e = tl.arange(0, SIDE.width)
    words = row.to(tl.pointer_type(tl.uint16))
    planes = ()
    for cut in tl.static_range(SIDE.cuts):
        if CHANNELS_FIRST:
            at = words[None, :] + (cut * (SIDE.piece // 2) + e)[:, None]
            live = (e < SIDE.piece // 2)[:, None]
        else:
            at = words[:, None] + (cut * (SIDE.piece // 2) + e)[None, :]
            live = (e < SIDE.piece // 2)[None, :]
        if SIDE.piece == 2 * SIDE.width:
            word = tl.load(at)
        else:
            word = tl.load(at, mask=live, other=0)
        planes = planes + _unpack(word, FAST)
    return planes
