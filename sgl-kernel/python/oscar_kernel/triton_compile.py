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

from oscar.codec import RowFormat
from oscar_kernel import triton_decode, triton_extend, triton_plan, triton_query, triton_store
from oscar_kernel.layer import LayerCache, LayerCodec

ARCHITECTURES = (80, 90, 100, 120)
KERNELS = {
    "store_kernel": (triton_store,),
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
        """Name, and for the store kernel whether tokens share a program."""
        if self.name != "store_kernel":
            return self.name
        tile = dict(zip((param.name for param in self.kernel.params), self.args, strict=True))["TILE"]
        return f"store_kernel, {tile} token{'s' if tile > 1 else ''} a program"


@dataclass
class Lowered:
    """What the machine code of one launch uses.

    Args:
        registers: of a thread. spill_bytes: local memory of a thread. shared_bytes: of a program. warps: of a program.
        global_loads: bytes of one load of one thread -> how many such instructions, asynchronous copies included.
        mma: matrix instruction -> how many. instructions: of the whole kernel.
        loop_instructions: of decode's loop over 2-bit rows, all warps of a program together, for 64 tokens; 0 elsewhere.
    """

    kernel: str
    case: str
    arch: int
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


def lower(launch: Launch, arch: int, case: str = "") -> Lowered:
    """Compile a recorded launch for one architecture and read what it uses."""
    compiled = triton.compile(source_of(launch), target=GPUTarget("cuda", arch, 32), options=launch.options)
    ptx = compiled.asm["ptx"]
    usage = _tool("cuobjdump", "-res-usage", compiled.asm["cubin"])
    # One function; its stack is where spilled registers go, but a stack that no instruction stores to holds none.
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, _, local = map(int, found.groups())
    sass = _instructions(_tool("nvdisasm", "-c", compiled.asm["cubin"]))
    warps = compiled.metadata.num_warps
    spilled = max(stack, local) if any("STL" in line for _, body in sass for line in body) else 0
    loop = 0
    if launch.name == "decode_kernel":
        block_n = dict(zip((p.name for p in launch.kernel.params), launch.args, strict=True))["BLOCK_N"]
        loop = _packed_loop(sass) * warps * 64 // block_n
    mma = Counter(name.split(".row")[0].replace("sync.aligned.", "") + _types(name) for name in MMA.findall(ptx))
    return Lowered(
        launch.label, case, arch, registers, spilled, compiled.metadata.shared, warps, _load_widths(ptx), dict(mma),
        sum(len(body) for _, body in sass), loop,
    )  # fmt: skip


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


def launches_of(run: Callable[[], object]) -> list[Launch]:
    """Launches that a call of a wrapper would make."""
    with recorded() as launches:
        run()
    return launches


MAIN_CASE = "head_dim 128, 4 query heads a KV head, V folded"


def distinct_launches(case: str) -> list[Launch]:
    """Launches of a case, each kernel once for every set of compile-time values; small kernels in the main case alone."""
    found, seen = [], set()
    for launch in launches_of(cases()[case]):
        params = zip(launch.kernel.params, launch.args, strict=True)
        key = (launch.name, *(value for param, value in params if param.is_constexpr))
        if key in seen or (case != MAIN_CASE and launch.name in ("plan_kernel", "query_kernel", "merge_kernel")):
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
        "head_dim 64, 7 query heads a KV head": {"heads": 2, "ratio": 7, "dim": 64},
        "head_dim 96, 3 query heads a KV head": {"heads": 8, "ratio": 3, "dim": 96},
        "head_dim 256, 2 query heads a KV head": {"heads": 4, "ratio": 2, "dim": 256},
    }  # fmt: skip
    return {name: partial(_run_all, **shape) for name, shape in named.items()}


def _run_all(heads, ratio, dim, group=None, fold=True, levels=False, cap=0.0) -> None:
    fmt = RowFormat(dim, group)
    eye = torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim).contiguous()
    table = torch.tensor([-1.75, -0.5, 0.5, 1.75]).repeat(heads, 1) if levels else None
    clip = torch.full((heads,), 0.96)
    codec = LayerCodec(
        fmt, fmt, eye, eye.float(), None if fold else eye, None if fold else eye.float(), clip, clip,
        k_levels=table, v_levels=table,
    )  # fmt: skip

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
    triton_store.store_kv(k, k, index, index, cache, codec, return_rows=False, q=q, queries=(buffers.q, buffers.amax))
    triton_decode.decode_attention(q, cache, codec, plan, 0.1, cap, out=torch.zeros_like(q), buffers=buffers)
    q, k = rows(64, heads * ratio, dim), rows(64, heads, dim)
    index = torch.zeros(64, dtype=torch.int64)
    k, v = triton_store.store_kv(k, k, index, index, cache, codec)
    triton_extend.extend_attention(q, k, v, [0, 32, 64], cache, codec, plan, 0.1, cap, out=torch.zeros_like(q))
