"""What the benchmarks share: shapes, random layers, the machine's name and its read bandwidth."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar.format.codec import RowFormat
from oscar.format.linalg import inverses
from oscar_kernel import LayerCache, LayerCodec, host_memory
from oscar_kernel.cpu import library as cpu


@dataclass(frozen=True)
class Shape:
    """Attention geometry of a model."""

    name: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    shape.name: shape
    for shape in (Shape("qwen3-8b", 32, 8, 128), Shape("qwen3-0.6b", 16, 8, 128), Shape("llama-3.2-1b", 32, 8, 64))
}


def as_in_pool(x: Tensor) -> Tensor:
    """x in memory as the server's pool has it."""
    return host_memory.zeros(tuple(x.shape), x.dtype).copy_(x)


def random_layer(shape: Shape, num_slots: int, num_rows: int, seed: int) -> tuple[LayerCodec, LayerCache]:
    """A layer with V folded and random rows: codes of any value, centres around 0, steps around 0.8.

    Args:
        num_slots: slots of the pool.
        num_rows: window rows; one more is made for writes that go nowhere.
    """
    g = torch.Generator().manual_seed(seed)
    heads, dim = shape.num_kv_heads, shape.head_dim
    fmt = RowFormat(dim)
    transform = torch.linalg.qr(torch.randn(heads, dim, dim, generator=g)).Q.float()
    codec = LayerCodec(
        k_format=fmt,
        v_format=fmt,
        k_transform=transform.double(),
        q_transform=inverses(transform.double()).transpose(1, 2).float().contiguous(),
        v_transform=None,
        v_inverse=None,
        k_clip=torch.full((heads,), 0.96),
        v_clip=torch.full((heads,), 0.92),
    )

    def rows() -> Tensor:
        out = torch.randint(0, 256, (num_slots, heads, fmt.row_bytes), dtype=torch.uint8, generator=g)
        centre = torch.randn(num_slots, heads, generator=g) * 0.1
        step = 0.6 + 0.4 * torch.rand(num_slots, heads, generator=g)
        out[..., fmt.code_bytes :] = torch.stack((centre, step), -1).half().view(torch.uint8)
        return as_in_pool(out)

    def window() -> Tensor:
        return as_in_pool(torch.randn(num_rows + 1, heads, dim, generator=g).bfloat16())

    return codec, LayerCache(rows(), rows(), window(), window())


def bandwidth_buffer() -> Tensor:
    """2 GiB, far beyond any cache; touched."""
    return torch.ones(2 << 30, dtype=torch.uint8)


def read_gbps(buffer: Tensor, i: int) -> float:
    """Read a quarter of the buffer, another one each time; GB/s."""
    part = buffer.chunk(4)[i % 4]
    begin = time.perf_counter()
    cpu.read_bytes(part, torch.get_num_threads())
    return part.nbytes / (time.perf_counter() - begin) / 1e9


def machine() -> dict:
    """What the figures were measured on."""
    fields = {}
    try:
        with open("/proc/cpuinfo") as file:
            for line in file.read().split("\n\n")[0].splitlines():
                key, _, value = line.partition(":")
                fields[key.strip()] = value.strip()
    except OSError:
        pass
    flags = set(fields.get("flags", "").split())
    has = {flag: flag in flags for flag in ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8")}
    text = (
        f"{fields.get('model name', 'unknown CPU')} family {fields.get('cpu family')} model {fields.get('model')}, "
        f"{torch.get_num_threads()} threads, level {cpu.default_isa()}, {'AMX' if has['amx_int8'] else 'no AMX'}, "
        f"torch {torch.__version__}"
    )
    return {"text": text, "flags": has}


def summary(values: list[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p25": ordered[len(ordered) // 4],
        "p75": ordered[3 * len(ordered) // 4],
        "min": ordered[0],
        "max": ordered[-1],
    }
