"""The CPU library as torch custom operators, so that `torch.compile` and export can trace through it.

The wrappers call the library directly: an operator's dispatch costs as much as a short decode, and the engine runs eagerly. A
graph that is traced calls these. A layer's codec travels as a number, since operators take tensors and numbers only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernel.cpu import library as cpu
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.plan_read import ReadPlan

_codecs: list[LayerCodec] = []


def handle_of(codec: LayerCodec) -> int:
    """Number of a codec; the codec then lives as long as the process, as a model's layers do."""
    handle = codec.__dict__.get("_handle")
    if handle is None:
        handle = codec._handle = len(_codecs)
        _codecs.append(codec)
    return handle


@torch.library.custom_op("oscar_kernel::store_kv", mutates_args=("k_buffer", "v_buffer", "k_window", "v_window"))
def store_kv(
    k: Tensor,
    v: Tensor,
    loc: Tensor,
    window_rows: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    codec: int,
) -> tuple[Tensor, Tensor]:
    """`oscar_kernel.store_kv`; codec from `handle_of`."""
    cache = LayerCache(k_buffer, v_buffer, k_window, v_window)
    return cpu.store_kv(k, v, loc, window_rows, cache, _codecs[codec], None)


@store_kv.register_fake
def _(k, v, loc, window_rows, k_buffer, v_buffer, k_window, v_window, codec):
    return k.new_empty(k.shape, dtype=k_window.dtype), v.new_empty(v.shape, dtype=v_window.dtype)


@torch.library.custom_op("oscar_kernel::decode_attention", mutates_args=())
def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    slots: Tensor,
    packed_mask: Tensor,
    window_rows: Tensor,
    window_mask: Tensor,
    codec: int,
    sm_scale: float,
    logit_cap: float,
) -> Tensor:
    """`oscar_kernel.decode_attention`; the plan's tensors as `plan_read` made them, codec from `handle_of`."""
    cache = LayerCache(k_buffer, v_buffer, k_window, v_window)
    plan = ReadPlan(slots, packed_mask, window_rows, window_mask, window_rows, [])
    return cpu.decode_attention(q, cache, _codecs[codec], plan, sm_scale, logit_cap, None)


@decode_attention.register_fake
def _(q, k_buffer, v_buffer, k_window, v_window, slots, packed_mask, window_rows, window_mask, codec, sm_scale, logit_cap):
    return q.new_empty(q.shape[0], q.shape[1], v_window.shape[-1], dtype=torch.float32)


@torch.library.custom_op("oscar_kernel::extend_attention", mutates_args=())
def extend_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    qo_indptr: list[int],
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    slots: Tensor,
    packed_mask: Tensor,
    window_rows: Tensor,
    window_mask: Tensor,
    codec: int,
    sm_scale: float,
    logit_cap: float,
) -> Tensor:
    """`oscar_kernel.extend_attention`; the plan's tensors as `plan_read` made them, codec from `handle_of`."""
    cache = LayerCache(k_buffer, v_buffer, k_window, v_window)
    plan = ReadPlan(slots, packed_mask, window_rows, window_mask, window_rows, [])
    return cpu.extend_attention(q, k_new, v_new, qo_indptr, cache, _codecs[codec], plan, sm_scale, logit_cap, None)


@extend_attention.register_fake
def _(
    q,
    k_new,
    v_new,
    qo_indptr,
    k_buffer,
    v_buffer,
    k_window,
    v_window,
    slots,
    packed_mask,
    window_rows,
    window_mask,
    codec,
    sm_scale,
    logit_cap,
):
    return q.new_empty(q.shape[0], q.shape[1], v_window.shape[-1], dtype=torch.float32)
