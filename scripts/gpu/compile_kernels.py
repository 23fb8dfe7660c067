"""Lower the Triton kernels to machine code for a card that is not there, and read off what the code uses.

The wrappers run as they are, on CPU tensors; their launches are recorded, not made, and each recorded launch is compiled with
the arguments' own alignments for the architectures asked for. So what is checked is what would be launched.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oscar.format.codec import LosslessFormat, RowFormat
from oscar_kernel.architectures import ARCHITECTURES
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.triton import decode as triton_decode
from oscar_kernel.triton import extend as triton_extend
from oscar_kernel.triton import plan as triton_plan
from oscar_kernel.triton import query as triton_query
from oscar_kernel.triton import shaping as triton_shaping
from oscar_kernel.triton import step_codes as triton_step_codes
from oscar_kernel.triton import store as triton_store
from oscar_kernel.triton.common import prepare
from oscar_kernel.triton.tuning import assuming

REPORTED = tuple(key for key, row in ARCHITECTURES.items() if row.in_report)
"""Architectures of the report."""
EVERY_CASE = ("sm_80", "sm_90", "sm_100", "sm_120")
"""Those for which every case is lowered; the others get the main case."""

KERNELS = {
    "store_kernel": (triton_store,),
    "shaping_kernel": (triton_shaping,),
    "step_shaping_kernel": (triton_step_codes,),
    "query_kernel": (triton_query,),
    "plan_kernel": (triton_plan,),
    "decode_kernel": (triton_decode,),
    "merge_kernel": (triton_decode,),
    "extend_kernel": (triton_extend,),
}
TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


@dataclass
class Launch:
    """A recorded launch: kernel, positional arguments, options such as num_warps."""

    name: str
    kernel: object
    args: tuple
    options: dict

    @property
    def label(self) -> str:
        """Name, and for the store's kernels how many tokens share a program."""
        if self.name not in ("store_kernel", "shaping_kernel", "step_shaping_kernel"):
            return self.name
        tile = dict(zip((param.name for param in self.kernel.params), self.args, strict=True))["TILE"]
        return f"{self.name}, {tile} token{'s' if tile > 1 else ''} a program"


@dataclass
class Lowered:
    """What the machine code of one launch uses.

    Args:
        arch: key of ARCHITECTURES. registers: of a thread. spill_bytes: local memory of a thread. shared_bytes: of a program.
        warps: of a program.
        global_loads: bytes of one load of one thread -> how many such instructions, asynchronous copies included.
        mma: matrix instruction -> how many. instructions: of the whole kernel.
        loop_instructions: of decode's loop over 2-bit rows, all warps of a program together, for 64 tokens; 0 elsewhere.
    """

    kernel: str
    case: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    global_loads: dict
    mma: dict
    instructions: int
    loop_instructions: int

    def as_dict(self) -> dict:
        return asdict(self)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collects launches of the kernels in KERNELS instead of making them."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, name: str, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            return lambda *args, **options: launches.append(Launch(self.name, self.kernel, args, options))

    kept = [(module, name, getattr(module, name)) for name, modules in KERNELS.items() for module in modules]
    try:
        for module, name, kernel in kept:
            setattr(module, name, Recorder(name, kernel))
        yield launches
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


def source_of(launch: Launch) -> ASTSource:
    """The launch as Triton's compiler takes it: types of run-time arguments, values of the others, known alignments."""
    signature, constants, attributes = {}, {}, {}
    for i, (param, value) in enumerate(zip(launch.kernel.params, launch.args, strict=True)):
        if isinstance(value, Tensor) and not param.is_constexpr:
            signature[param.name] = "*" + TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[param.name] = "constexpr"
            constants[param.name] = value
            aligned = False
        elif isinstance(value, int):
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        else:
            signature[param.name] = "fp32"
            aligned = False
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def lower(launch: Launch, arch: str, case: str = "") -> Lowered:
    """Compile a launch that was recorded for an architecture, and read what it uses."""
    backend, name, threads = ARCHITECTURES[arch].backend
    compiled = triton.compile(source_of(launch), target=GPUTarget(backend, name, threads), options=launch.options)
    read = _read_amd if backend == "hip" else _read_nvidia
    return Lowered(launch.label, case, arch, **read(launch, compiled), shared_bytes=compiled.metadata.shared)


def _read_nvidia(launch: Launch, compiled) -> dict:
    ptx, warps = compiled.asm["ptx"], compiled.metadata.num_warps
    usage = _tool("cuobjdump", "-res-usage", compiled.asm["cubin"])
    # One function; its stack is where spilled registers go, but a stack that no instruction stores to holds none.
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, _, local = map(int, found.groups())
    sass = _instructions(_tool("nvdisasm", "-c", compiled.asm["cubin"]))
    loop = 0
    if launch.name == "decode_kernel":
        block_n = dict(zip((p.name for p in launch.kernel.params), launch.args, strict=True))["BLOCK_N"]
        loop = _packed_loop(sass) * warps * 64 // block_n
    return {
        "registers": registers,
        "spill_bytes": max(stack, local) if any("STL" in line for _, body in sass for line in body) else 0,
        "warps": warps,
        "global_loads": _load_widths(ptx),
        "mma": dict(Counter(name.split(".row")[0].replace("sync.aligned.", "") + _types(name) for name in MMA.findall(ptx))),
        "instructions": sum(len(body) for _, body in sass),
        "loop_instructions": loop,
    }


AMD_LOADS = {"ubyte": 1, "ushort": 2, "short_d16": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
             "u8": 1, "u16": 2, "d16_b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}  # fmt: skip
"""Bytes of a load, by the end of its name on gfx9 and on gfx11."""


def _read_amd(launch: Launch, compiled) -> dict:
    code = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", code).group(1))

    loads = Counter()
    for name in re.findall(r"^\s*(?:global|buffer|flat)_load_(\w+)", code, re.MULTILINE):
        found = [size for end, size in AMD_LOADS.items() if name == end or name.startswith(end + "_")]
        loads[max(found, default=0)] += 1
    return {
        "registers": figure("vgpr_count"),
        "spill_bytes": 4 * (figure("vgpr_spill_count") + figure("sgpr_spill_count")),
        "warps": compiled.metadata.num_warps,
        "global_loads": dict(sorted(loads.items())),
        "mma": dict(Counter(re.findall(r"^\s*v_((?:mfma|wmma)\w+)", code, re.MULTILINE))),
        "instructions": len(re.findall(r"^\s+[sv]_\w+|^\s+(?:global|buffer|flat|ds)_\w+", code, re.MULTILINE)),
        "loop_instructions": 0,
    }


MMA = re.compile(r"(?:mma\.sync|wgmma|tcgen05\.mma)[\w.:]*")


def _types(name: str) -> str:
    """Types of an instruction's factors, from its name."""
    found = re.search(r"\.(\w+)\.(\w+)\.\w+$", name)
    return f".{found.group(1)}" if found else ""


def _instructions(sass: str) -> list[tuple[str, list[str]]]:
    """(label, instructions up to the next label) of a disassembly."""
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in sass.splitlines():
        label = re.match(r"^\s*(\.L_\w+):", line)
        code = re.match(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if label:
            blocks.append((label.group(1), []))
        elif code:
            blocks[-1][1].append(code.group(1))
    return blocks


def _packed_loop(blocks: list[tuple[str, list[str]]]) -> int:
    """Instructions of the shortest loop that multiplies float16 matrices and no bfloat16 ones; 0 if there is none."""
    starts, code = {}, []
    for label, body in blocks:
        starts[label] = len(code)
        code += body
    found = []
    for i, line in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", line)
        if target and starts.get(target.group(1), len(code)) < i:
            body = code[starts[target.group(1)] : i + 1]
            products = [x for x in body if "HMMA" in x]
            if products and not any("BF16" in x for x in products):
                found.append(len(body))
    return min(found, default=0)


def _load_widths(ptx: str) -> dict[int, int]:
    widths: Counter = Counter()
    for count, bits in re.findall(r"ld\.global[\w.:]*?(?:\.(v[248]))?\.b(\d+)", ptx):
        widths[int(count[1:] or 1) * int(bits) // 8 if count else int(bits) // 8] += 1
    for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[\w.:]*\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)", ptx):
        widths[int(size, 0)] += 1
    return dict(sorted(widths.items()))


def _tool(name: str, flag: str, cubin: bytes) -> str:
    """Output of a tool of Triton's wheel on a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=True).stdout


MAIN_CASE = "head_dim 128, 4 query heads a KV head, V folded"
SHAPED = "error shaping"
SHAPED_CASE = f"the same, {SHAPED}"


def distinct_launches(case: str, arch: str) -> list[Launch]:
    """Launches of a case on an architecture, each kernel once for every set of compile-time values; small kernels in the main
    case alone, and with error shaping what it changes."""
    found, seen = [], set()
    left_out = () if case == MAIN_CASE else ("plan_kernel", "query_kernel")
    if SHAPED in case:
        left_out += ("decode_kernel", "merge_kernel", "extend_kernel")
    with assuming(arch), recorded() as launches:
        cases()[case]()
    for launch in launches:
        params = zip(launch.kernel.params, launch.args, strict=True)
        key = (launch.name, *(value for param, value in params if param.is_constexpr))
        if key in seen or launch.name in left_out:
            continue
        seen.add(key)
        found.append(launch)
    return found


def cases() -> dict[str, Callable[[], object]]:
    """What is lowered: geometries by name, each a call of every wrapper on small CPU tensors."""
    named = {
        MAIN_CASE: {"heads": 8, "ratio": 4, "dim": 128},
        "the same, groups of 32": {"heads": 8, "ratio": 4, "dim": 128, "group": 32},
        "the same, V not folded, level tables, logit cap": {
            "heads": 8, "ratio": 4, "dim": 128, "fold": False, "levels": True, "cap": 50.0,
        },
        SHAPED_CASE: {"heads": 8, "ratio": 4, "dim": 128, "shaped": True},
        "the same, a layer kept in 16 bits": {"heads": 8, "ratio": 4, "dim": 128, "native": True},
        "head_dim 64, 7 query heads a KV head": {"heads": 2, "ratio": 7, "dim": 64},
        "head_dim 96, 3 query heads a KV head": {"heads": 8, "ratio": 3, "dim": 96},
        "head_dim 256, 2 query heads a KV head": {"heads": 4, "ratio": 2, "dim": 256},
        f"the same, {SHAPED}, level tables": {"heads": 4, "ratio": 2, "dim": 256, "levels": True, "shaped": True},
    }  # fmt: skip
    return {name: partial(_run_all, **shape) for name, shape in named.items()}


def _run_all(heads, ratio, dim, group=None, fold=True, levels=False, cap=0.0, native=False, shaped=False) -> None:
    fmt = LosslessFormat(dim, "bfloat16") if native else RowFormat(dim, group)
    eye = torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim).contiguous()
    if not fold:
        eye = eye / 3  # not exact in float32, so that the float64 transform is lowered too
    table = torch.tensor([-1.75, -0.5, 0.5, 1.75]).repeat(heads, 1) if levels else None
    clip = torch.full((heads,), 0.96)
    codec = LayerCodec(
        fmt, fmt, eye, eye.float(), None if fold else eye, None if fold else eye.float(), clip, clip,
        k_levels=table, v_levels=table,
    )  # fmt: skip
    if shaped:
        codec.k_shaping = codec.v_shaping = torch.zeros(heads, dim, dim)

    def rows(n: int, num_heads: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(n, num_heads, width, dtype=dtype)

    cache = LayerCache(
        rows(64, heads, fmt.row_bytes, torch.uint8), rows(64, heads, fmt.row_bytes, torch.uint8),
        rows(65, heads, dim), rows(65, heads, dim),
    )  # fmt: skip
    bs, slots = 2, torch.zeros(4, 4096, dtype=torch.int32)
    plan = triton_plan.plan_read(
        slots, torch.arange(bs), [100, 2000], torch.zeros(64, dtype=torch.int32), torch.zeros(65, dtype=torch.int64), 64, 256
    )
    q, k, index = rows(bs, heads * ratio, dim), rows(bs, heads, dim), torch.zeros(bs, dtype=torch.int64)
    buffers = triton_decode.DecodeBuffers.make(bs, plan.work.shape[0], heads * ratio, codec)
    queries = {"q": q, "queries": (buffers.q, buffers.amax)}
    triton_store.store_kv(k, k, index, index, cache, codec, return_rows=False, codes_later=True, **queries)
    triton_decode.decode_attention(q, cache, codec, plan, 0.1, cap, out=torch.zeros_like(q), buffers=buffers)
    q, k = rows(64, heads * ratio, dim), rows(64, heads, dim)
    index = torch.zeros(64, dtype=torch.int64)
    k, v = triton_store.store_kv(k, k, index, index, cache, codec)
    if shaped:
        step = triton_step_codes.StepCodes([(cache, prepare(codec))] * 16)
        for n in (1, 8, 64):
            step.write(index[:n], index[:n])
        triton_store.store_kv(*(x.repeat(32, 1, 1) for x in (k, v)), index.repeat(32), index.repeat(32), cache, codec)
    triton_extend.extend_attention(q, k, v, [0, 32, 64], cache, codec, plan, 0.1, cap, out=torch.zeros_like(q))
