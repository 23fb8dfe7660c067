"""The codes of a decode step's new tokens with error shaping: one launch for all layers, at the end of the step.

head_dim dependent steps make a layer's launch take some 7 us however few tokens it has, and nothing waits for the codes: in the
step that writes a token it is read from its window. So the stores of the step (`store.store_step` with codes_later) write codes
rounded alone, and this launch replaces them, layers side by side. A token without a row in the windows would keep codes rounded
alone: a row that decodes, but not the reference's bytes. Where there is no window of recent tokens each layer needs its own
launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar_kernel.layer import LayerCache, SideCache
from oscar_kernel.triton.common import SideTensors, TritonLayer
from oscar_kernel.triton.shaping import launch_constants, shape_rows

ENTRY = tl.constexpr(3)
"""Addresses of a side in a table: window, pool, matrix."""


class Strides(NamedTuple):
    """Elements of a window row, and 32-bit words of a slot, all heads."""

    window: int
    pool: int

    @classmethod
    def of(cls, cache: SideCache) -> Strides:
        return cls(cache.window.stride(0), cache.buffer.stride(0) // 4)


@triton.jit
def _shape_entry(entry, strides, window_row, loc, written, head, TILE: tl.constexpr, SIDE: tl.constexpr):
    """`shape_rows` of the tensors whose addresses stand at entry."""
    window = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.bfloat16)), 16)
    pool = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int32)), 16)
    if 2 * SIDE.words == SIDE.dim:
        matrix = tl.load(entry + 2).to(tl.pointer_type(tl.float16))
    else:
        matrix = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    x = window + window_row.to(tl.int64) * strides.window + head * SIDE.dim
    row = pool + loc.to(tl.int64) * strides.pool + head * SIDE.row_words
    shape_rows(x, row, tl.multiple_of(matrix, 16) + head * (SIDE.dim * SIDE.dim), written, TILE, SIDE)


@triton.jit(do_not_specialize=["num_tokens"])
def step_shaping_kernel(
    table_ptr, loc_ptr, row_ptr, num_tokens, no_row, k, v, TILE: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """Many layers. Grid: (tiles of TILE tokens, num_kv_heads, 2 a layer: K, V). Without fusion of products and sums, too.

    k, v: `Strides`. K, V: `Chunks`, or None where no errors are passed on.
    """
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    loc = tl.load(loc_ptr + token, mask=token < num_tokens, other=-1)
    row = tl.load(row_ptr + token, mask=token < num_tokens, other=no_row)
    written = (loc >= 0) & (row >= 0) & (row < no_row)
    entry = table_ptr + tl.program_id(2) * ENTRY
    if tl.program_id(2) % 2 == 0:
        if K is not None:
            _shape_entry(entry, k, row, loc, written, head, TILE, K)
    else:
        if V is not None:
            _shape_entry(entry, v, row, loc, written, head, TILE, V)


class StepCodes:
    """Launches for layers with error shaping, one for all layers of a kind: of the same geometry, types and strides.

    Addresses come from a table that is made once, so a CUDA graph can hold a launch.

    Args:
        layers: all on one device, each with a matrix for K or V; kept.
    """

    def __init__(self, layers: Sequence[TritonLayer]):
        kinds: dict[tuple, list[TritonLayer]] = {}
        for layer in layers:
            constants = tuple(launch_constants(layer.tensors, 1).items())
            kinds.setdefault((constants, _strides(layer.cache)), []).append(layer)
        self.kinds = [
            (torch.tensor([_addresses(layer) for layer in kind], device=kind[0].tensors.device), kind)
            for kind in kinds.values()
        ]

    def write(self, loc: Tensor, window_rows: Tensor) -> None:
        """Replace the codes of a step's tokens in every layer; capturable.

        Args:
            loc: [num_tokens] integer slots; a negative one is not written.
            window_rows: [num_tokens] integer rows of the windows, which hold the tokens in 16 bits.
        """
        num_tokens = loc.shape[0]
        for table, kind in self.kinds:
            layer = kind[0]
            k, v = _strides(layer.cache)
            constants = launch_constants(layer.tensors, num_tokens, len(kind))
            step_shaping_kernel[(triton.cdiv(num_tokens, constants["TILE"]), layer.tensors.num_kv_heads, 2 * len(kind))](
                table_ptr=table,
                loc_ptr=loc,
                row_ptr=window_rows,
                num_tokens=num_tokens,
                no_row=layer.cache.k.window.shape[0] - 1,
                k=k,
                v=v,
                **constants,
            )


def _strides(cache: LayerCache) -> tuple[Strides, Strides]:
    return Strides.of(cache.k), Strides.of(cache.v)


def _addresses(layer: TritonLayer) -> list[int]:
    """A layer's part of a table: ENTRY addresses of K and of V; 0 for a matrix that it lacks."""

    def of(cache: SideCache, side: SideTensors) -> list[int]:
        return [0 if x is None else x.data_ptr() for x in (cache.window, cache.buffer, side.shaping)]

    return of(layer.cache.k, layer.tensors.k) + of(layer.cache.v, layer.tensors.v)
