"""What the Triton kernels share: geometry of a row in planes, numbers of the codec, and the tensors of a layer they need.

Import this module and its neighbours `triton_*` only where Triton is used: nothing else in the package imports them.

Planes. Byte b of a row holds channels b, b + Q, b + 2Q, b + 3Q (Q = head_dim / 4), so a plane s is the run of Q channels
sQ .. sQ + Q - 1. Where a quantization group is shorter than a plane, or does not divide it, planes are cut into pieces of
PIECE = gcd(Q, group_size) channels; then every piece lies in one group, and a tile is unpacked with shifts alone. Pieces are
numbered by ascending first channel: piece i is s = i // CUTS, j = i % CUTS, channels sQ + j PIECE ... The attention kernels
read bytes in pairs, so a piece has an even and an odd half; each is held in a power of two of elements, at least 16 (the depth
of a matrix instruction), zero beyond PIECE / 2.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar.format.codec import LosslessFormat, RowFormat, clip_index, thresholds
from oscar_kernel.layer import LayerCodec


def interpreted() -> bool:
    """Whether these kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Planes:
    """How one side's rows are cut, as numbers for `tl.constexpr`.

    Args:
        dim: elements in a row. quarter: Q. group: elements that share (centre, step). piece: channels of a piece.
        width: elements that hold half a piece. cuts: pieces in a plane. row_bytes: bytes of a row.
        meta_bf16: type of centre and step. native: a row is its bfloat16 numbers, of a layer that stays in 16 bits.
    """

    dim: int
    quarter: int
    group: int
    piece: int
    width: int
    cuts: int
    row_bytes: int
    meta_bf16: bool
    native: bool = False

    @classmethod
    def of(cls, fmt: RowFormat | LosslessFormat) -> Planes:
        """Raises ValueError for a row the kernels cannot read."""
        native = isinstance(fmt, LosslessFormat)
        if native and fmt.dtype != "bfloat16":
            raise ValueError("oscar_kernel (Triton): the lossless debug format runs on the PyTorch reference only")
        if fmt.head_dim % 16:
            raise ValueError(f"oscar_kernel (Triton): head_dim must be a multiple of 16, got head_dim={fmt.head_dim}")
        quarter, group = fmt.head_dim // 4, fmt.head_dim if native else fmt.group_size
        piece = math.gcd(quarter, group)
        return cls(
            dim=fmt.head_dim,
            quarter=quarter,
            group=group,
            piece=piece,
            width=max(16, next_power_of_2(piece // 2)),
            cuts=quarter // piece,
            row_bytes=fmt.row_bytes,
            meta_bf16=not native and fmt.meta_dtype == "bfloat16",
            native=native,
        )

    @property
    def num_groups(self) -> int:
        return self.dim // self.group

    @property
    def query_width(self) -> int:
        """Elements of a prepared query row: 8 planes (4 of even channels, 4 of odd ones) a cut, padding included."""
        return 8 * self.cuts * self.width


@dataclass
class LayerTensors:
    """A layer's codec in the types that the kernels read; made once by `prepare`.

    Args:
        k, v: geometry of both sides.
        k_index, v_index: [num_kv_heads] int32, rank of the clip threshold among a row's |x|.
        k_cuts, v_cuts: [num_kv_heads, 3] float32 thresholds in units of step, or None for the uniform grid.
        k_levels, v_levels: [num_kv_heads, 4] float16 levels in units of step (multiples of 1/256 below 4 are exact), or None.
        k_transform, v_transform: [num_kv_heads, dim, dim], contiguous, or None (V folded). float32 where that is exact, as an
        artifact's are: a decode step reads half the bytes; else float64.
        q_transform: [num_kv_heads, head_dim, head_dim] float32.
        v_inverse: [num_kv_heads, v_head_dim, v_head_dim] float32, or None (V folded).
        k_mean, v_mean: [num_kv_heads, dim] float64 or None. v_mean_out: v_mean in float32, or None.
        k_shaping, v_shaping: [num_kv_heads, dim, dim], contiguous, or None (every channel is rounded alone). float16 where that
        is exact, as for matrices of `oscar calibrate`: a decode step reads half the bytes; else float32.
    """

    k: Planes
    v: Planes
    k_index: Tensor
    v_index: Tensor
    k_cuts: Tensor | None
    v_cuts: Tensor | None
    k_levels: Tensor | None
    v_levels: Tensor | None
    k_transform: Tensor | None
    v_transform: Tensor | None
    q_transform: Tensor
    v_inverse: Tensor | None
    k_mean: Tensor | None
    v_mean: Tensor | None
    v_mean_out: Tensor | None
    k_shaping: Tensor | None
    v_shaping: Tensor | None

    @property
    def shaped(self) -> bool:
        """Whether errors are passed on in K or V."""
        return self.k_shaping is not None or self.v_shaping is not None


def prepare(codec: LayerCodec) -> LayerTensors:
    """The codec's tensors in the kernels' types; kept on the codec, so that a layer is prepared once.

    Raises:
        ValueError: a format, or a window_dtype, that these kernels do not read.
    """
    known = codec.__dict__.get("_triton")
    if known is not None:
        return known
    if codec.window_dtype != torch.bfloat16:
        raise ValueError(f"oscar_kernel (Triton): window_dtype must be bfloat16, got {codec.window_dtype}")
    k, v = Planes.of(codec.k_format), Planes.of(codec.v_format)
    if k.native != v.native:
        raise ValueError("oscar_kernel (Triton): K and V of a layer must both be in 2 bits or both in 16")
    device = codec.q_transform.device

    def rank(clip_ratio: Tensor, dim: int) -> Tensor:
        return clip_index(clip_ratio, dim).to(device, torch.int32).contiguous()

    def cuts(levels: Tensor | None) -> Tensor | None:
        return None if levels is None else thresholds(levels.float()).to(device).contiguous()

    def as_type(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if x is None else x.to(device, dtype).contiguous()

    def transform(x: Tensor | None) -> Tensor | None:
        exact = x is not None and torch.equal(x.float().double(), x.double())
        return as_type(x, torch.float32 if exact else torch.float64)

    def shaping(x: Tensor | None) -> Tensor | None:
        if x is None or k.native:
            return None
        exact = torch.equal(x.half().float(), x.float())
        return as_type(x, torch.float16 if exact else torch.float32)

    tensors = LayerTensors(
        k=k,
        v=v,
        k_index=rank(codec.k_clip, k.dim),
        v_index=rank(codec.v_clip, v.dim),
        k_cuts=cuts(codec.k_levels),
        v_cuts=cuts(codec.v_levels),
        k_levels=as_type(codec.k_levels, torch.float16),
        v_levels=as_type(codec.v_levels, torch.float16),
        k_transform=transform(codec.k_transform),
        v_transform=transform(codec.v_transform),
        q_transform=as_type(codec.q_transform, torch.float32),
        v_inverse=as_type(codec.v_inverse, torch.float32),
        k_mean=as_type(codec.k_mean, torch.float64),
        # The reference takes a mean from values only where it transforms them, and adds it to every output.
        v_mean=None if codec.v_transform is None else as_type(codec.v_mean, torch.float64),
        v_mean_out=as_type(codec.v_mean, torch.float32),
        k_shaping=shaping(codec.k_shaping),
        v_shaping=shaping(codec.v_shaping),
    )
    codec.__dict__["_triton"] = tensors
    return tensors


def with_adjacent_heads(x: Tensor) -> Tensor:
    """x [num_tokens, num_heads, dim] with the heads of a token side by side; copied only if they are not."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@triton.constexpr_function
def piece_channel(i, quarter, piece, cuts):
    """First channel of piece i."""
    return (i // cuts) * quarter + (i % cuts) * piece


@triton.constexpr_function
def piece_group(i, quarter, piece, cuts, group):
    """Quantization group of piece i."""
    return piece_channel(i, quarter, piece, cuts) // group


@triton.constexpr_function
def opens_group(i, quarter, piece, cuts, group):
    """Whether piece i is the first of its group."""
    return piece_channel(i, quarter, piece, cuts) % group == 0


@triton.constexpr_function
def closes_group(i, quarter, piece, cuts, group):
    """Whether piece i is the last of its group."""
    return (piece_channel(i, quarter, piece, cuts) + piece) % group == 0


@triton.jit
def bfloat16_bits(x):
    """float32 -> its bfloat16 bits in the upper half of an int32, to nearest even; NaN becomes a quiet NaN.

    In integers because the interpreter truncates its own conversion, and bytes must not depend on who runs the kernel.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x != x, 0x7FC00000, rounded)


@triton.jit
def to_bfloat16(x):
    """float32 -> bfloat16, to nearest even, the same everywhere."""
    return (bfloat16_bits(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def low_half(word, BF16: tl.constexpr):
    """The 16-bit float in bits 0-15 of an int32, as float32."""
    if BF16:
        return (word << 16).to(tl.float32, bitcast=True)
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word, BF16: tl.constexpr):
    """The 16-bit float in bits 16-31 of an int32, as float32."""
    if BF16:
        return (word & -65536).to(tl.float32, bitcast=True)
    return ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
