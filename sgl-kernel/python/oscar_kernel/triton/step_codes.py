"""The codes of a decode step's new tokens with error shaping: one launch for all layers, at the end of the step.

head_dim dependent steps make a layer's launch take some 7 us however few tokens it has, and nothing waits for the codes: in the
step that writes a token it is read from its window. So the stores of the step (`triton_store.store_kv` with codes_later) write
codes rounded alone, and this launch replaces them, layers side by side. A token without a row in the windows would keep codes
rounded alone: a row that decodes, but not the reference's bytes. Where there is no window of recent tokens each layer needs its
own launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar_kernel.layer import LayerCache
from oscar_kernel.triton.common import LayerTensors
from oscar_kernel.triton.shaping import launch_constants, shape_side

ENTRY = tl.constexpr(5)
"""Addresses of a side in a table."""


@triton.jit
def _shape_entry(
    entry, x_stride, x_row, loc, written, head, slot_words,
    DIM: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, ROW_WORDS: tl.constexpr, META_BF16: tl.constexpr,
    META_MAX: tl.constexpr, LANES: tl.constexpr, S_WORDS: tl.constexpr, S_PAD: tl.constexpr, DEPTH: tl.constexpr,
    TILE: tl.constexpr, HAS_LEVELS: tl.constexpr,
):  # fmt: skip
    """`shape_side` of the tensors whose addresses stand at entry: window, buffer, matrix, cuts, levels."""
    window = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.bfloat16)), 16)
    buffer = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int32)), 16)
    if 2 * S_WORDS == DIM:
        matrix = tl.load(entry + 2).to(tl.pointer_type(tl.float16))
    else:
        matrix = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    shape_side(
        window, x_stride, x_row, loc, written, head, buffer, slot_words, tl.multiple_of(matrix, 16),
        tl.load(entry + 3).to(tl.pointer_type(tl.float32)), tl.load(entry + 4).to(tl.pointer_type(tl.float16)),
        DIM, QUARTER, GROUP, ROW_WORDS, META_BF16, META_MAX, LANES, S_WORDS, S_PAD, DEPTH, TILE, HAS_LEVELS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def step_shaping_kernel(
    table_ptr, loc_ptr, row_ptr, num_tokens, no_row, k_stride, v_stride, k_slot_words, v_slot_words,
    K_DIM: tl.constexpr, K_QUARTER: tl.constexpr, K_GROUP: tl.constexpr, K_WORDS: tl.constexpr, K_BF16: tl.constexpr,
    K_MAX: tl.constexpr, K_LANES: tl.constexpr, K_S: tl.constexpr, K_S_PAD: tl.constexpr, K_DEPTH: tl.constexpr,
    V_DIM: tl.constexpr, V_QUARTER: tl.constexpr, V_GROUP: tl.constexpr, V_WORDS: tl.constexpr, V_BF16: tl.constexpr,
    V_MAX: tl.constexpr, V_LANES: tl.constexpr, V_S: tl.constexpr, V_S_PAD: tl.constexpr, V_DEPTH: tl.constexpr,
    TILE: tl.constexpr, K_HAS_LEVELS: tl.constexpr, V_HAS_LEVELS: tl.constexpr,
):  # fmt: skip
    """Many layers. Grid: (tiles of TILE tokens, num_kv_heads, 2 a layer: K, V). Without fusion of products and sums, too."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    loc = tl.load(loc_ptr + token, mask=token < num_tokens, other=-1)
    row = tl.load(row_ptr + token, mask=token < num_tokens, other=no_row)
    written = (loc >= 0) & (row >= 0) & (row < no_row)
    entry = table_ptr + tl.program_id(2) * ENTRY
    if tl.program_id(2) % 2 == 0:
        if K_S > 0:
            _shape_entry(
                entry, k_stride, row, loc, written, head, k_slot_words,
                K_DIM, K_QUARTER, K_GROUP, K_WORDS, K_BF16, K_MAX, K_LANES, K_S, K_S_PAD, K_DEPTH, TILE, K_HAS_LEVELS,
            )  # fmt: skip
    else:
        if V_S > 0:
            _shape_entry(
                entry, v_stride, row, loc, written, head, v_slot_words,
                V_DIM, V_QUARTER, V_GROUP, V_WORDS, V_BF16, V_MAX, V_LANES, V_S, V_S_PAD, V_DEPTH, TILE, V_HAS_LEVELS,
            )  # fmt: skip


class StepCodes:
    """Launches for layers with error shaping, one for all layers of a kind: of the same geometry, types and strides.

    Addresses come from a table that is made once, so a CUDA graph can hold a launch.

    Args:
        layers: storage and tensors of each layer, all on one device; kept.
    """

    def __init__(self, layers: list[tuple[LayerCache, LayerTensors]]):
        kinds: dict[tuple, list[tuple[LayerCache, LayerTensors]]] = {}
        for cache, layer in layers:
            kinds.setdefault((launch_constants(layer, 1)[1], _strides(cache)), []).append((cache, layer))
        self.kinds = [
            (torch.tensor([_addresses(*pair) for pair in kind], device=kind[0][0].k_buffer.device), kind)
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
            cache, layer = kind[0]
            tile, constants, options = launch_constants(layer, num_tokens, len(kind))
            grid = triton.cdiv(num_tokens, tile), cache.k_buffer.shape[1], 2 * len(kind)
            step_shaping_kernel[grid](
                table, loc, window_rows, num_tokens, cache.k_window.shape[0] - 1, *_strides(cache), *constants, **options
            )


def _strides(cache: LayerCache) -> tuple[int, ...]:
    """Elements of a window row of K and V, all heads, and 32-bit words of a slot of K and V."""
    words = (x.stride(0) // 4 for x in (cache.k_buffer, cache.v_buffer))
    return cache.k_window.stride(0), cache.v_window.stride(0), *words


def _addresses(cache: LayerCache, layer: LayerTensors) -> list[int]:
    """A layer's part of a table: ENTRY addresses of K and of V; 0 for what it lacks."""
    k = cache.k_window, cache.k_buffer, layer.k_shaping, layer.k_cuts, layer.k_levels
    v = cache.v_window, cache.v_buffer, layer.v_shaping, layer.v_cuts, layer.v_levels
    return [0 if x is None else x.data_ptr() for x in (*k, *v)]
