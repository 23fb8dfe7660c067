"""One layer in the form that the C++ library reads, and its ops. Made once; a call then passes pointers.

A call costs little beside the work only because nothing is decided or converted in it: structures are built here, plans once a
step, and what is checked in a call is the dtype of what it is given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64

import torch
from torch import Tensor

from oscar.format.codec import ROW_DTYPES, LosslessFormat, RowFormat
from oscar_kernel import reference
from oscar_kernel.cpu import structures
from oscar_kernel.cpu.library import LIBRARY, check, library, loaded
from oscar_kernel.cpu.structures import DTYPES, Attend, Rows, Store
from oscar_kernel.layer import LayerCache, LayerCodec, SideCache, SideCodec
from oscar_kernel.read_plan import ReadPlan

MAX_HEAD_DIM = 256


def obstacle(cache: LayerCache, codec: LayerCodec) -> str | None:
    """Why the library cannot take a layer, in words; None if it can."""
    if any(side.buffer.device.type != "cpu" for side in (cache.k, cache.v)):
        return "it takes CPU tensors"
    if library() is None:
        return f"{LIBRARY.name} is not built"
    for side in (codec.k, codec.v):
        if side.fmt.head_dim % 16 or side.fmt.head_dim > MAX_HEAD_DIM:
            return f"head_dim must be a multiple of 16, at most {MAX_HEAD_DIM}, got {side.fmt.head_dim}"
        if isinstance(side.fmt, LosslessFormat) and ROW_DTYPES[side.fmt.dtype] != side.window_dtype:
            return f"rows of plain numbers must have the windows' type {side.window_dtype}, got {side.fmt.dtype}"
    if codec.window_dtype not in (torch.bfloat16, torch.float32):
        return f"window_dtype must be bfloat16 or float32, got {codec.window_dtype}"
    return None


class CpuPlan:
    """A plan in the form that the library reads: masks resolved once a step, for all layers."""

    def __init__(self, plan: ReadPlan):
        # Kept: the structure holds addresses.
        self.kv = _compact(plan.slots, plan.packed_mask)
        self.window = _compact(plan.window_rows, plan.window_mask)
        addresses = [x.data_ptr() for x in (*self.kv, *self.window)]
        self.made = byref(structures.Plan(plan.slots.shape[0], 0, *addresses))


class CpuLayer:
    """Ops of one layer in the library; signatures and meaning as in `oscar_kernel.reference`.

    Args:
        cache, codec: of the layer, as `obstacle` lets them pass. Their tensors are kept.
        num_qo_heads: query heads on this rank.
        isa: level of the library; None: the best one here.
    Raises:
        ValueError: isa is not a level. RuntimeError: this machine lacks it; raised by the first call.
    """

    plan = CpuPlan

    def __init__(self, cache: LayerCache, codec: LayerCodec, num_qo_heads: int, isa: str | None = None):
        self.cache, self.codec, self._isa = cache, codec, isa
        self._level = None if isa is None else isa.encode()
        self._library = loaded()
        self._keep: list[Tensor] = []
        self._no_row = cache.k.window.shape[0] - 1
        self._window_dtype, self._v_dim = codec.window_dtype, codec.v.fmt.head_dim
        self._layer = byref(
            structures.Layer(
                num_kv_heads=codec.num_kv_heads,
                kv_group_num=num_qo_heads // codec.num_kv_heads,
                window_dtype=DTYPES[codec.window_dtype],
                k=self._side(codec.k, cache.k),
                v=self._side(codec.v, cache.v),
            )
        )

    def _side(self, side: SideCodec, cache: SideCache) -> ctypes.Structure:
        """A side in C. Tensors made here are kept, since the structure holds their addresses."""
        packed = isinstance(side.fmt, RowFormat)

        def pointer(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
            if tensor is None:
                return None
            self._keep.append(tensor.to(dtype).contiguous())
            return self._keep[-1].data_ptr()

        # An artifact keeps its transforms in float32. Where they are still exact in it, half the bytes are read per token.
        exact = side.transform is not None and torch.equal(side.transform.float().double(), side.transform.double())
        return structures.Side(
            head_dim=side.fmt.head_dim,
            group_size=side.fmt.group_size if isinstance(side.fmt, RowFormat) else side.fmt.head_dim,
            row_kind=structures.PACKED if packed else structures.WIDE,
            transform_dtype=structures.FLOAT32 if exact else structures.FLOAT64,
            transform=pointer(side.transform, torch.float32 if exact else torch.float64),
            mean=pointer(side.mean, torch.float64),
            clip_ratio=pointer(side.clip, torch.float32),
            shaping=pointer(side.shaping, torch.float32) if packed else None,
            read_transform=pointer(side.read_transform, torch.float32),
            buffer=cache.buffer.data_ptr(),
            slot_stride=cache.buffer.stride(0),
            head_stride=cache.buffer.stride(1),
            window=cache.window.data_ptr(),
            window_row_stride=cache.window.stride(0) * cache.window.element_size(),
            window_head_stride=cache.window.stride(1) * cache.window.element_size(),
        )

    def store(self, k: Tensor, v: Tensor, loc: Tensor, window_rows: Tensor) -> tuple[Tensor, Tensor]:
        """`reference.store_kv`; loc and window_rows contiguous int64."""
        k, v = _unit_stride(k), _unit_stride(v)
        k_out = torch.empty(k.shape, dtype=self._window_dtype)
        v_out = torch.empty(v.shape, dtype=self._window_dtype)
        (k_token, k_head, _), (v_token, v_head, _) = k.stride(), v.stride()
        args = Store(
            Rows(k.data_ptr(), DTYPES[k.dtype], 0, k_token, k_head),
            Rows(v.data_ptr(), DTYPES[v.dtype], 0, v_token, v_head),
            k.shape[0],
            loc.data_ptr(),
            window_rows.data_ptr(),
            self._no_row,
            k_out.data_ptr(),
            v_out.data_ptr(),
            torch.get_num_threads(),
        )
        status = self._library.oscar_cpu_store(self._layer, byref(args), self._level)
        if status:
            check(status, self._isa)
        return k_out, v_out

    def write_windows(self, k: Tensor, v: Tensor, window_rows: Tensor) -> None:
        """`reference.write_windows`."""
        reference.write_windows(k, v, window_rows, self.cache)

    def decode(self, q: Tensor, plan: CpuPlan, sm_scale: float, logit_cap: float) -> Tensor:
        """`reference.decode_attention`."""
        q = _unit_stride(q)
        args, out = self._attend(q, sm_scale, logit_cap)
        status = self._library.oscar_cpu_decode(self._layer, plan.made, byref(args), self._level)
        if status:
            check(status, self._isa)
        return out

    def extend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        qo_indptr: Sequence[int],
        plan: CpuPlan,
        sm_scale: float,
        logit_cap: float,
    ) -> Tensor:
        """`reference.extend_attention`."""
        q = _unit_stride(q)
        args, out = self._attend(q, sm_scale, logit_cap)
        k_new, v_new = (_unit_stride(x.to(self._window_dtype)) for x in (k_new, v_new))
        indptr = (c_int64 * len(qo_indptr))(*qo_indptr)
        args.qo_indptr = ctypes.addressof(indptr)
        args.k_new, args.v_new = (
            Rows(x.data_ptr(), DTYPES[x.dtype], 0, x.stride(0) * x.element_size(), x.stride(1) * x.element_size())
            for x in (k_new, v_new)
        )
        check(self._library.oscar_cpu_extend(self._layer, plan.made, byref(args), self._level), self._isa)
        return out

    def _attend(self, q: Tensor, sm_scale: float, logit_cap: float) -> tuple[ctypes.Structure, Tensor]:
        """What decode and extend pass alike, and the output."""
        out = torch.empty(q.shape[0], q.shape[1], self._v_dim)
        token, head, _ = q.stride()
        args = Attend(Rows(q.data_ptr(), DTYPES[q.dtype], 0, token, head))
        args.out, args.sm_scale, args.logit_cap, args.num_threads = out.data_ptr(), sm_scale, logit_cap, torch.get_num_threads()
        return args, out


def _compact(indices: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Masked entries of each row in CSR form: [bs + 1] int64, [indptr[-1]] int32."""
    bs, n = indices.shape
    indptr = torch.empty(bs + 1, dtype=torch.int64)
    # One entry of slack: the compaction writes before it knows whether to keep.
    out = torch.empty(bs * n + 1, dtype=torch.int32)
    indices, mask = _unit_stride(indices), _unit_stride(mask)
    loaded().oscar_cpu_compact(
        indices.data_ptr(), indices.stride(0), mask.data_ptr(), mask.stride(0), bs, n, indptr.data_ptr(), out.data_ptr()
    )
    return indptr, out


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
