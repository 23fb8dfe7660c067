"""What the Triton kernels share: the tensors of a layer in the types that they read, and 16-bit floats.

Import this module and its neighbours only where Triton is used: nothing else in the package imports them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar.format.codec import clip_index
from oscar_kernel.layer import LayerCache, LayerCodec, SideCache, SideCodec
from oscar_kernel.triton.planes import Planes


def interpreted() -> bool:
    """Whether these kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class Rows(NamedTuple):
    """A tensor of rows, as a kernel takes it.

    Args:
        ptr: [num_rows, num_heads, width], the heads of a row side by side.
        stride: elements from one row (a token, slot or window row) to the next.
    """

    ptr: Tensor
    stride: int

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        return cls(x, x.stride(0))


class ReadSide(NamedTuple):
    """Where keys, or values, of a layer are read. pool: rows of bytes. window: rows of bfloat16 numbers."""

    pool: Rows
    window: Rows

    @classmethod
    def of(cls, cache: SideCache) -> ReadSide:
        return cls(Rows.of(cache.buffer), Rows.of(cache.window))


@dataclass(frozen=True)
class SideTensors:
    """The codec of keys, or values, of a layer, in the types that the kernels read.

    Args:
        planes: geometry of a row.
        clip_rank: [num_kv_heads] int32, rank of the clip threshold among a row's |x|.
        transform: [num_kv_heads, dim, dim], contiguous, or None (folded into the model's weights). float32 where that is exact,
            as an artifact's are: a decode step reads half the bytes; else float64.
        read_transform: [num_kv_heads, dim, dim] float32: of keys for queries; of values for outputs, or None.
        mean: [num_kv_heads, dim] float64 or None.
        shaping: [num_kv_heads, dim, dim], contiguous, or None (every channel is rounded alone). float16 where that is exact, as
            for matrices of `oscar calibrate`: a decode step reads half the bytes; else float32.
    """

    planes: Planes
    clip_rank: Tensor
    transform: Tensor | None
    read_transform: Tensor | None
    mean: Tensor | None
    shaping: Tensor | None

    @classmethod
    def of(cls, side: SideCodec) -> SideTensors:
        """Raises ValueError for a row that the kernels cannot read."""
        planes = Planes.of(side.fmt)
        transform, shaping = side.transform, None if planes.native else side.shaping
        return cls(
            planes=planes,
            clip_rank=clip_index(side.clip, planes.dim).to(side.clip.device, torch.int32).contiguous(),
            transform=_smallest(transform, torch.float32, torch.float64),
            read_transform=_as_type(side.read_transform, torch.float32),
            mean=None if transform is None else _as_type(side.mean, torch.float64),
            shaping=_smallest(shaping, torch.float16, torch.float32),
        )


@dataclass(frozen=True)
class LayerTensors:
    """Both sides of a layer."""

    k: SideTensors
    v: SideTensors

    @staticmethod
    def check(codec: LayerCodec) -> None:
        """Raise ValueError, saying why, for a layer that these kernels do not read."""
        if codec.window_dtype != torch.bfloat16:
            raise ValueError(f"oscar_kernel (Triton): window_dtype must be bfloat16, got {codec.window_dtype}")
        if codec.k.read_transform is None:
            raise ValueError("oscar_kernel (Triton): keys must have a transform, this layer's have none")
        for side in (codec.k, codec.v):
            Planes.of(side.fmt)

    @classmethod
    def of(cls, codec: LayerCodec) -> LayerTensors:
        """Raises ValueError as `check` does."""
        cls.check(codec)
        return cls(SideTensors.of(codec.k), SideTensors.of(codec.v))

    @property
    def shaped(self) -> bool:
        """Whether errors are passed on in K or V."""
        return self.k.shaping is not None or self.v.shaping is not None

    @property
    def num_kv_heads(self) -> int:
        return self.k.clip_rank.shape[0]

    @property
    def device(self) -> torch.device:
        return self.k.clip_rank.device


class TritonLayer:
    """A layer as the kernels' wrappers take it: its storage, its codec, and the codec's tensors in the kernels' types.

    Args:
        cache, codec: of the layer, on one device.
    Raises:
        ValueError: these kernels do not read such a layer.
    """

    def __init__(self, cache: LayerCache, codec: LayerCodec):
        self.cache, self.codec, self.tensors = cache, codec, LayerTensors.of(codec)


def _as_type(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype).contiguous()


def _smallest(x: Tensor | None, small: torch.dtype, large: torch.dtype) -> Tensor | None:
    """x in the smaller type if all its numbers are exact there, else in the larger one."""
    if x is None:
        return None
    return _as_type(x, small if torch.equal(x.to(small).to(large), x.to(large)) else large)


def with_adjacent_heads(x: Tensor) -> Tensor:
    """x [num_tokens, num_heads, dim] with the heads of a token side by side; copied only if they are not."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


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
def centre_and_step(word):
    """A group's (centre, step), the float16 numbers of an int32's lower and upper half, as float32."""
    centre = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    step = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return centre, step
