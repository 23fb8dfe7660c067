"""The CPU library: loading it, its C structures, and one function an op that passes pointers.

ctypes, not an extension module or tvm-ffi: the library then needs neither PyTorch nor Python to compile, and one build serves
every version of both. A call costs about 10 us in a loop; 75 us between other work, which has the processor's caches then.
`csrc/cpu/oscar_cpu.h` says what the fields mean; the library's own sizes of the structures are compared when it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import os
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oscar.format.codec import ROW_DTYPES, RowFormat
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.plan_read import ReadPlan

logger = logging.getLogger(__name__)

LIBRARY = Path(os.environ.get("OSCAR_CPU_LIBRARY") or Path(__file__).with_name("liboscar_cpu.so"))
"""The environment names another build, e.g. an instrumented one (scripts/sanitize.sh)."""
FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = 0, 1, 2, 3
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
PACKED, WIDE = 0, 1
MAX_HEAD_DIM = 256


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
Layer = _structure("Layer", num_kv_heads=c_int32, kv_group_num=c_int32, window_dtype=c_int32, reserved=c_int32, k=Side, v=Side)
Rows = _structure("Rows", data=c_void_p, dtype=c_int32, reserved=c_int32, token_stride=c_int64, head_stride=c_int64)
Plan = _structure(
    "Plan",
    bs=c_int32,
    reserved=c_int32,
    kv_indptr=c_void_p,
    kv_indices=c_void_p,
    window_indptr=c_void_p,
    window_indices=c_void_p,
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


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The library, or None with one line in the log."""
    # PyTorch's OpenMP runtime is loaded by now, so the library binds to that one and shares its threads.
    try:
        lib = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        logger.warning("oscar_kernel: CPU kernels not loaded, using the slower PyTorch reference: %s", error)
        return None
    lib.oscar_cpu_default_isa.restype = c_char_p
    lib.oscar_cpu_status_text.restype = c_char_p
    lib.oscar_cpu_isa_supported.argtypes = [c_char_p]
    lib.oscar_cpu_isa_missing.argtypes = [c_char_p]
    lib.oscar_cpu_isa_missing.restype = c_char_p
    lib.oscar_cpu_isa_names.restype = ctypes.POINTER(c_char_p)
    lib.oscar_cpu_read.restype = ctypes.c_uint64
    lib.oscar_cpu_read.argtypes = [c_void_p, c_int64, ctypes.c_int, c_char_p]
    lib.oscar_cpu_compact.restype = None
    lib.oscar_cpu_compact.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]
    sizes = _numbers(lib.oscar_cpu_struct_sizes)
    if sizes != [ctypes.sizeof(s) for s in (Side, Layer, Plan, Rows, Attend, Store)]:
        raise RuntimeError(f"{LIBRARY.name} was built from other sources than this package: structures {sizes}; build it again")
    isa = lib.oscar_cpu_default_isa().decode()
    if lib.oscar_cpu_isa_supported(isa.encode()) != 1:
        raise RuntimeError(_isa_sentence(lib, isa, "OSCAR_CPU_ISA"))
    missing = [f"not {name}: {_missing(lib, name)}" for name in isa_names(lib) if _missing(lib, name)]
    logger.info("oscar_kernel: CPU kernels at level %s", "; ".join([isa, *missing]))
    return lib


def _missing(lib: ctypes.CDLL, isa: str) -> str | None:
    """What CPU or system lack for a level, or refuse; None where it runs."""
    reason = lib.oscar_cpu_isa_missing(isa.encode())
    return reason and reason.decode()


def _numbers(function) -> list[int]:
    out = (c_int64 * 16)()
    return list(out[: function(out, 16)])


def codec_constants() -> dict[str, int]:
    """The format's constants as the library was compiled."""
    names = ("FORMAT_VERSION", "BITS", "CODES_PER_BYTE", "META_BYTES", "ONE_THIRD_BITS")
    return dict(zip(names, _numbers(library().oscar_codec_constants), strict=True))


def isa_names(lib: ctypes.CDLL | None = None) -> list[str]:
    """Levels the library holds, the best last, and behind it `amx_emulated`, which only tests ask for."""
    names = (lib or library()).oscar_cpu_isa_names()
    found = []
    while names[len(found)]:
        found.append(names[len(found)].decode())
    return found


def default_isa() -> str:
    """The level that runs where none is asked for."""
    return library().oscar_cpu_default_isa().decode()


def supported_isas() -> list[str]:
    """Levels that this machine can run; empty without the library."""
    lib = library()
    return [] if lib is None else [name for name in isa_names(lib) if lib.oscar_cpu_isa_supported(name.encode()) == 1]


def _isa_sentence(lib: ctypes.CDLL, isa: str, source: str) -> str:
    names = isa_names(lib)
    if isa not in names:
        return f"oscar_kernel: {source} must be one of {', '.join(names)}, got {isa!r}"
    usable = ", ".join(name for name in names if _missing(lib, name) is None)
    return f"oscar_kernel: {source}={isa}, but this machine lacks that level: {_missing(lib, isa)}; it can run {usable}"


def obstacle(codec: LayerCodec, cache: LayerCache, *tensors: Tensor) -> str | None:
    """Why the library cannot take a layer, in words; None if it can."""
    made = cache.__dict__.get("_cpu")
    if made is not None and made.holds(cache, codec) and all(t.is_cpu and t.dtype in DTYPES for t in tensors):
        return None  # this layer has passed before
    if any(t.device.type != "cpu" for t in (cache.k_buffer, *tensors)):
        return "it takes CPU tensors"
    if library() is None:
        return f"{LIBRARY.name} is not built"
    for fmt in (codec.k_format, codec.v_format):
        if fmt.head_dim % 16 or fmt.head_dim > MAX_HEAD_DIM:
            return f"head_dim must be a multiple of 16, at most {MAX_HEAD_DIM}, got {fmt.head_dim}"
    if type(codec.k_format) is not type(codec.v_format):
        return "K and V must have the same kind of row"
    if not isinstance(codec.k_format, RowFormat) and ROW_DTYPES[codec.k_format.dtype] != codec.window_dtype:
        return f"rows of plain numbers must have the windows' type {codec.window_dtype}, got {codec.k_format.dtype}"
    if codec.k_levels is not None or codec.v_levels is not None or codec.v_mean is not None:
        return "it takes neither level tables nor a mean of values"
    if any(isinstance(f, RowFormat) and f.meta_dtype != "float16" for f in (codec.k_format, codec.v_format)):
        return "centre and step must be float16"
    if any(t.dtype not in DTYPES for t in tensors):
        return f"it takes float32, bfloat16 and float16, got {', '.join(str(t.dtype) for t in tensors)}"
    if codec.window_dtype not in (torch.bfloat16, torch.float32):
        return f"window_dtype must be bfloat16 or float32, got {codec.window_dtype}"
    return None


@dataclass
class _Prepared:
    """A codec's C side and the tensors that its pointers belong to."""

    k: ctypes.Structure
    v: ctypes.Structure
    keep: list[Tensor]


def _prepared(codec: LayerCodec) -> _Prepared:
    """The C form of a codec, made once and kept on it."""
    made = codec.__dict__.get("_cpu")
    if made is not None:
        return made
    keep: list[Tensor] = []

    def pointer(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
        if tensor is None:
            return None
        keep.append(tensor.to(dtype).contiguous())
        return keep[-1].data_ptr()

    def side(fmt, transform, mean, clip, shaping, read_transform) -> ctypes.Structure:
        packed = isinstance(fmt, RowFormat)
        made = Side(
            head_dim=fmt.head_dim,
            group_size=fmt.group_size if packed else fmt.head_dim,
            row_kind=PACKED if packed else WIDE,
            mean=pointer(mean, torch.float64),
            clip_ratio=pointer(clip, torch.float32),
            shaping=pointer(shaping, torch.float32) if packed else None,
            read_transform=pointer(read_transform, torch.float32),
        )
        # An artifact keeps its transforms in float32. Where they are still exact in it, half the bytes are read per token.
        exact = transform is not None and torch.equal(transform.float().double(), transform.double())
        made.transform_dtype = FLOAT32 if exact else FLOAT64
        made.transform = pointer(transform, torch.float32 if exact else torch.float64)
        return made

    c = codec
    codec._cpu = _Prepared(
        side(c.k_format, c.k_transform, c.k_mean, c.k_clip, c.k_shaping, c.q_transform),
        side(c.v_format, c.v_transform, None, c.v_clip, c.v_shaping, c.v_inverse),
        keep,
    )
    return codec._cpu


@dataclass(eq=False)
class _Made:
    """The C form of a layer for one codec, and what it was made of. Kept: making it was a quarter of a call's cost."""

    codec: LayerCodec
    tensors: tuple[Tensor, ...]
    layers: dict[int, ctypes.Structure]  # by query heads a KV head: a store knows of none and says 1

    def holds(self, cache: LayerCache, codec: LayerCodec) -> bool:
        return self.codec is codec and all(map(operator.is_, self.tensors, _tensors(cache)))

    def __deepcopy__(self, memo) -> None:
        """A copy's tensors lie elsewhere; it makes its own."""


def _layer(cache: LayerCache, codec: LayerCodec, group: int) -> ctypes.Structure:
    """The layer's C form, kept on `cache` for as long as tensors and codec are the same objects."""
    made = cache.__dict__.get("_cpu")
    if made is None or not made.holds(cache, codec):
        made = cache._cpu = _Made(codec, _tensors(cache), {})
    if group not in made.layers:
        made.layers[group] = _new_layer(cache, codec, group)
    return made.layers[group]


def _tensors(cache: LayerCache) -> tuple[Tensor, ...]:
    return cache.k_buffer, cache.v_buffer, cache.k_window, cache.v_window


def _new_layer(cache: LayerCache, codec: LayerCodec, group: int) -> ctypes.Structure:
    prepared = _prepared(codec)
    k = _with_storage(prepared.k, cache.k_buffer, cache.k_window)
    v = _with_storage(prepared.v, cache.v_buffer, cache.v_window)
    return Layer(cache.k_buffer.shape[1], group, DTYPES[codec.window_dtype], 0, k, v)


def _with_storage(side: ctypes.Structure, buffer: Tensor, window: Tensor) -> ctypes.Structure:
    """A copy of a codec's side that points to a layer's storage, strides in bytes."""
    made = Side.from_buffer_copy(side)
    made.buffer, made.slot_stride, made.head_stride = buffer.data_ptr(), buffer.stride(0), buffer.stride(1)
    element = window.element_size()
    made.window = window.data_ptr()
    made.window_row_stride, made.window_head_stride = window.stride(0) * element, window.stride(1) * element
    return made


def _compact(indices: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Masked entries of each row in CSR form: [bs + 1] int64, [indptr[-1]] int32."""
    bs, n = indices.shape
    indptr = torch.empty(bs + 1, dtype=torch.int64)
    # One entry of slack: the compaction writes before it knows whether to keep.
    out = torch.empty(bs * n + 1, dtype=torch.int32)
    indices, mask = _unit_stride(indices), _unit_stride(mask)
    library().oscar_cpu_compact(
        indices.data_ptr(), indices.stride(0), mask.data_ptr(), mask.stride(0), bs, n, indptr.data_ptr(), out.data_ptr()
    )
    return indptr, out


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _plan(plan: ReadPlan) -> ctypes.Structure:
    """The plan in CSR form: masks are resolved once a step, for all layers."""
    made = plan.__dict__.get("_cpu")
    if made is None:
        kv = _compact(plan.slots, plan.packed_mask)
        window = _compact(plan.window_rows, plan.window_mask)
        bs = plan.slots.shape[0]
        made = Plan(bs, 0, kv[0].data_ptr(), kv[1].data_ptr(), window[0].data_ptr(), window[1].data_ptr()), kv, window
        plan._cpu = made
    return made[0]


def _check(status: int, isa: str | None) -> None:
    if status:
        lib = library()
        if status in (1, 2):
            raise (ValueError if status == 1 else RuntimeError)(_isa_sentence(lib, isa, "isa"))
        raise RuntimeError(f"oscar_kernel: {lib.oscar_cpu_status_text(status).decode()}")


def _isa(isa: str | None) -> bytes | None:
    return None if isa is None else isa.encode()


def store_kv(
    k: Tensor, v: Tensor, loc: Tensor, window_rows: Tensor, cache: LayerCache, codec: LayerCodec, isa: str | None
) -> tuple[Tensor, Tensor]:
    """`oscar_kernel.store_kv` in the library. Takes what `obstacle` lets through."""
    k, v, loc, window_rows = _unit_stride(k), _unit_stride(v), loc.contiguous(), window_rows.contiguous()
    k_out = torch.empty(k.shape, dtype=codec.window_dtype)
    v_out = torch.empty(v.shape, dtype=codec.window_dtype)
    layer = _layer(cache, codec, 1)
    args = Store(
        Rows(k.data_ptr(), DTYPES[k.dtype], 0, k.stride(0), k.stride(1)),
        Rows(v.data_ptr(), DTYPES[v.dtype], 0, v.stride(0), v.stride(1)),
        k.shape[0],
        loc.data_ptr(),
        window_rows.data_ptr(),
        cache.k_window.shape[0] - 1,
        k_out.data_ptr(),
        v_out.data_ptr(),
        torch.get_num_threads(),
    )
    _check(library().oscar_cpu_store(ctypes.byref(layer), ctypes.byref(args), _isa(isa)), isa)
    return k_out, v_out


def _attend(q: Tensor, cache: LayerCache, codec: LayerCodec, sm_scale: float, logit_cap: float):
    q = _unit_stride(q)
    num_kv_heads = cache.k_buffer.shape[1]
    out = torch.empty(q.shape[0], q.shape[1], codec.v_format.head_dim)
    args = Attend(
        q=Rows(q.data_ptr(), DTYPES[q.dtype], 0, q.stride(0), q.stride(1)),
        out=out.data_ptr(),
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        num_threads=torch.get_num_threads(),
    )
    return q, _layer(cache, codec, q.shape[1] // num_kv_heads), args, out


def decode_attention(
    q: Tensor, cache: LayerCache, codec: LayerCodec, plan: ReadPlan, sm_scale: float, logit_cap: float, isa: str | None
) -> Tensor:
    """`oscar_kernel.decode_attention` in the library."""
    q, layer, args, out = _attend(q, cache, codec, sm_scale, logit_cap)
    status = library().oscar_cpu_decode(ctypes.byref(layer), ctypes.byref(_plan(plan)), ctypes.byref(args), _isa(isa))
    _check(status, isa)
    return out


def extend_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    qo_indptr: list[int],
    cache: LayerCache,
    codec: LayerCodec,
    plan: ReadPlan,
    sm_scale: float,
    logit_cap: float,
    isa: str | None,
) -> Tensor:
    """`oscar_kernel.extend_attention` in the library."""
    q, layer, args, out = _attend(q, cache, codec, sm_scale, logit_cap)
    k_new, v_new = _unit_stride(k_new.to(codec.window_dtype)), _unit_stride(v_new.to(codec.window_dtype))
    indptr = (c_int64 * len(qo_indptr))(*qo_indptr)
    element = k_new.element_size()
    args.qo_indptr = ctypes.addressof(indptr)
    args.k_new, args.v_new = (
        Rows(x.data_ptr(), DTYPES[x.dtype], 0, x.stride(0) * element, x.stride(1) * element) for x in (k_new, v_new)
    )
    status = library().oscar_cpu_extend(ctypes.byref(layer), ctypes.byref(_plan(plan)), ctypes.byref(args), _isa(isa))
    _check(status, isa)
    return out


def read_bytes(data: Tensor, num_threads: int) -> int:
    """Read a tensor once; returns a checksum. For measuring bandwidth."""
    return library().oscar_cpu_read(data.data_ptr(), data.nbytes, num_threads, None)
