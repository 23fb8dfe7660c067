"""The C structures of the CPU library as ctypes. `csrc/cpu/oscar_cpu.h` says what the fields mean."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = 0, 1, 2, 3


class _Dtypes(dict):
    def __missing__(self, dtype: torch.dtype) -> int:
        raise TypeError(f"oscar_kernel: the C++ library takes float32, bfloat16 and float16, got {dtype}")


DTYPES = _Dtypes({torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16})
"""Types of queries, keys and values that the library takes; looking up another raises TypeError."""
PACKED, WIDE = 0, 1


def _structure(name: str, **fields) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Side = _structure(
    "Side",
    head_dim=c_int32,
    group_size=c_int32,
    row_kind=c_int32,
    transform_dtype=c_int32,
    transform=c_void_p,
    mean=c_void_p,
    clip_ratio=c_void_p,
    shaping=c_void_p,
    read_transform=c_void_p,
    buffer=c_void_p,
    slot_stride=c_int64,
    head_stride=c_int64,
    window=c_void_p,
    window_row_stride=c_int64,
    window_head_stride=c_int64,
)
Layer = _structure(
    "Layer",
    num_kv_heads=c_int32,
    kv_group_num=c_int32,
    window_dtype=c_int32,
    reserved=c_int32,
    k=Side,
    v=Side,
)
Plan = _structure(
    "Plan",
    bs=c_int32,
    reserved=c_int32,
    kv_indptr=c_void_p,
    kv_indices=c_void_p,
    window_indptr=c_void_p,
    window_indices=c_void_p,
)
Rows = _structure(
    "Rows",
    data=c_void_p,
    dtype=c_int32,
    reserved=c_int32,
    token_stride=c_int64,
    head_stride=c_int64,
)
Attend = _structure(
    "Attend",
    q=Rows,
    k_new=Rows,
    v_new=Rows,
    qo_indptr=c_void_p,
    out=c_void_p,
    sm_scale=c_float,
    logit_cap=c_float,
    num_threads=c_int32,
    reserved=c_int32,
)
Store = _structure(
    "Store",
    k=Rows,
    v=Rows,
    num_tokens=c_int64,
    loc=c_void_p,
    window_rows=c_void_p,
    no_row=c_int64,
    k_out=c_void_p,
    v_out=c_void_p,
    num_threads=c_int32,
    reserved=c_int32,
)
ALL = (Side, Layer, Plan, Rows, Attend, Store)
"""In the order in which the library states their sizes."""
