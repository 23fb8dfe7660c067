"""Lower the Triton kernels to machine code for a card that is not there, and read off what the code uses.

The wrappers run as they are, on CPU tensors; their launches are recorded, not made, and each recorded launch is compiled for
the architectures asked for, with the types and alignments that Triton itself reads off the arguments. So what is checked is
what would be launched.
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
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from oscar.format.codec import RowFormat
from oscar.format.side import LayerTransforms, Side
from oscar.format.windows import WindowTable
from oscar_kernel.architectures import ARCHITECTURES
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.triton import decode, extend, plan, query, shaping, step_codes, store
from oscar_kernel.triton.common import TritonLayer
from oscar_kernel.triton.decode import DecodeBuffers, decode_attention
from oscar_kernel.triton.extend import extend_attention
from oscar_kernel.triton.plan import PlanBuffers, plan_tokens
from oscar_kernel.triton.step_codes import StepCodes
from oscar_kernel.triton.store import store_kv, store_step
from oscar_kernel.triton.tuning import assuming

REPORTED = tuple(key for key, row in ARCHITECTURES.items() if row.in_report)
"""Architectures of the report."""
EVERY_CASE = ("sm_80", "sm_90", "sm_100", "sm_120")
"""Those for which every case is lowered; the others get the main case."""

KERNELS = {
    "store_kernel": store,
    "shaping_kernel": shaping,
    "step_shaping_kernel": step_codes,
    "query_kernel": query,
    "plan_kernel": plan,
    "decode_kernel": decode,
    "merge_kernel": decode,
    "extend_kernel": extend,
}
"""Kernels, and the modules that launch them."""


@dataclass
class Recorded:
    """A recorded launch: kernel, and its arguments and options such as num_warps by name."""

    name: str
    kernel: triton.JITFunction
    args: dict

    @property
    def constants(self) -> dict:
        """The compile-time arguments."""
        return {param.name: self.args[param.name] for param in self.kernel.params if param.is_constexpr}

    @property
    def options(self) -> dict:
        """What is not an argument of the kernel."""
        return {name: value for name, value in self.args.items() if name not in self.kernel.arg_names}

    @property
    def label(self) -> str:
        """Name, and for the store's kernels how many tokens share a program."""
        if self.name not in ("store_kernel", "shaping_kernel", "step_shaping_kernel"):
            return self.name
        tile = self.args["TILE"]
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
def recorded() -> Iterator[list[Recorded]]:
    """Collects launches of the kernels in KERNELS instead of making them."""
    launches: list[Recorded] = []

    class Recorder:
        def __init__(self, name: str, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            return lambda **args: launches.append(Recorded(self.name, self.kernel, args))

    kept = [(module, name, getattr(module, name)) for name, module in KERNELS.items()]
    try:
        for module, name, kernel in kept:
            setattr(module, name, Recorder(name, kernel))
        yield launches
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


def source_of(launch: Recorded, target: GPUTarget) -> ASTSource:
    """The launch as Triton's compiler takes it: types of run-time arguments, values of the others, known alignments."""
    kernel, backend = launch.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**launch.args)
    _, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    # Alignments alone: the tensors here are small, those of a pool may be beyond the reach of 32-bit offsets.
    aligned = {path: [pair for pair in pairs if pair[0] == "tt.divisibility"] for path, pairs in attributes.items()}
    return ASTSource(kernel, signature, constants, aligned)


def compiled(launch: Recorded, arch: str):
    """What Triton's compiler makes of a launch that was recorded for an architecture."""
    target = GPUTarget(*ARCHITECTURES[arch].backend)
    return triton.compile(source_of(launch, target), target=target, options=launch.options)


def lower(launch: Recorded, arch: str, case: str = "") -> Lowered:
    """Compile a launch that was recorded for an architecture, and read what it uses."""
    code = compiled(launch, arch)
    read = _read_amd if ARCHITECTURES[arch].backend[0] == "hip" else _read_nvidia
    return Lowered(launch.label, case, arch, **read(launch, code), shared_bytes=code.metadata.shared)


def _read_nvidia(launch: Recorded, compiled) -> dict:
    ptx, warps = compiled.asm["ptx"], compiled.metadata.num_warps
    usage = _tool("cuobjdump", "-res-usage", compiled.asm["cubin"])
    # One function; its stack is where spilled registers go, but a stack that no instruction stores to holds none.
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, _, local = map(int, found.groups())
    sass = _instructions(_tool("nvdisasm", "-c", compiled.asm["cubin"]))
    loop = 0
    if launch.name == "decode_kernel":
        loop = _packed_loop(sass) * warps * 64 // launch.args["BLOCK_N"]
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


def _read_amd(launch: Recorded, compiled) -> dict:
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


def distinct_launches(case: str, arch: str) -> list[Recorded]:
    """Launches of a case on an architecture, each kernel once for every set of compile-time values; small kernels in the main
    case alone, and with error shaping what it changes."""
    found, seen = [], set()
    left_out = () if case == MAIN_CASE else ("plan_kernel", "query_kernel")
    if SHAPED in case:
        left_out += ("decode_kernel", "merge_kernel", "extend_kernel")
    with assuming(arch), recorded() as launches:
        cases()[case]()
    for launch in launches:
        key = (launch.name, *launch.constants.values())
        if key in seen or launch.name in left_out:
            continue
        seen.add(key)
        found.append(launch)
    return found


def cases() -> dict[str, Callable[[], object]]:
    """What is lowered: geometries by name, each a call of every wrapper on small CPU tensors."""
    named = {
        MAIN_CASE: {"heads": 8, "kv_group_num": 4, "dim": 128},
        "the same, groups of 32": {"heads": 8, "kv_group_num": 4, "dim": 128, "group_size": 32},
        "the same, V not folded, logit cap": {"heads": 8, "kv_group_num": 4, "dim": 128, "fold": False, "cap": 50.0},
        SHAPED_CASE: {"heads": 8, "kv_group_num": 4, "dim": 128, "shaped": True},
        "the same, a layer kept in 16 bits": {"heads": 8, "kv_group_num": 4, "dim": 128, "native": True},
        "head_dim 64, 7 query heads a KV head": {"heads": 2, "kv_group_num": 7, "dim": 64},
        "head_dim 96, 3 query heads a KV head": {"heads": 8, "kv_group_num": 3, "dim": 96},
        "head_dim 256, 2 query heads a KV head": {"heads": 4, "kv_group_num": 2, "dim": 256},
        f"the same, {SHAPED}, V not folded": {"heads": 4, "kv_group_num": 2, "dim": 256, "fold": False, "shaped": True},
    }
    return {name: partial(_run_all, **shape) for name, shape in named.items()}


def _run_all(heads, kv_group_num, dim, group_size=None, fold=True, cap=0.0, native=False, shaped=False) -> None:
    codec = _codec(heads, dim, group_size, fold, native, shaped)
    layer = TritonLayer(LayerCache.zeros(codec, num_slots=64, num_rows=64), codec)
    bs, num_qo_heads, windows = 2, heads * kv_group_num, WindowTable.full(2, (64, 256), 8)
    plan_buffers = PlanBuffers(bs, bs, windows.sink_tokens, windows.recent_tokens, "cpu")
    made = plan_tokens(plan_buffers, torch.zeros(4, 4096).int(), torch.arange(bs), torch.tensor([100, 2000]), windows)

    def rows(n: int, num_heads: int) -> Tensor:
        return torch.zeros(n, num_heads, dim, dtype=torch.bfloat16)

    q, k, index = rows(bs, num_qo_heads), rows(bs, heads), torch.zeros(bs, dtype=torch.int64)
    buffers = DecodeBuffers.make(bs, made.num_items, num_qo_heads, layer.tensors)
    store_step(k, k, index, index, layer, q=q, queries=buffers.queries, codes_later=True)
    decode_attention(q, layer, made, 0.1, cap, out=torch.zeros_like(q), buffers=buffers, queries_ready=True)
    q, k, index = rows(64, num_qo_heads), rows(64, heads), torch.zeros(64, dtype=torch.int64)
    k, v = store_kv(k, k, index, index, layer)
    if shaped:
        step = StepCodes([layer] * 16)
        for n in (1, 8, 64):
            step.write(index[:n], index[:n])
        store_kv(*(x.repeat(32, 1, 1) for x in (k, v)), index.repeat(32), index.repeat(32), layer)
    qo_indptr = torch.tensor([0, 32, 64], dtype=torch.int32)
    extend_attention(q, k, v, qo_indptr, 32, layer, made, 0.1, cap, out=torch.zeros_like(q))


def _codec(heads: int, dim: int, group_size: int | None, fold: bool, native: bool, shaped: bool) -> LayerCodec:
    if native:
        return LayerCodec.native(heads, dim, dim)
    eye = torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim)
    if not fold:
        eye = eye / 3  # not exact in float32, so that the float64 transform is lowered too
    side = Side(eye, torch.full((heads,), 0.96), shaping=torch.zeros(heads, dim, dim) if shaped else None)
    fmt = RowFormat(dim, group_size)
    return LayerCodec.of(LayerTransforms(side, side), fmt, fmt, fold_v=fold)
