"""What the benchmarks share: shapes, layers and batches of a size, the machine, and how a call is timed."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oscar.format.windows import WindowTable
from oscar_kernel import Layers
from oscar_kernel.cpu import library as cpu
from oscar_kernel.testing import random_cache, random_codec

COLD_BYTES = 256 << 20
"""Cache of all layers of a configuration together: eight times a large last-level cache."""
BESIDE_BYTES = 32 << 20
"""What other work touches between two calls: more than a core's own caches, as the rest of a layer's weights do."""
OVERHEAD_TOKENS = 64
OVERHEAD_WINDOWS = (16, 16)
"""Of the call whose overhead is measured: little work, and both kinds of rows are read."""


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


def layers_for(num_bytes: int) -> int:
    """How many layers of so many bytes keep a configuration's cache out of the last-level cache."""
    return max(2, -(-COLD_BYTES // max(1, num_bytes)))


def random_layers(shape: Shape, count: int, num_slots: int, num_rows: int, bits: int = 2) -> Layers:
    """Layers 0 to count - 1 with random rows, V folded, for the C++ library.

    Args:
        num_slots: slots of the pool.
        num_rows: window rows; one more is made for writes that go nowhere.
        bits: 2 for packed rows, 16 for bfloat16 rows read by the same kernels. Queries are transformed either way.
    """
    made = {}
    for i in range(count):
        codec = random_codec(shape.num_kv_heads, shape.head_dim, fold=True, float32=True, native=bits == 16, seed=i)
        made[i] = random_cache(codec, num_slots, num_rows, seed=i), codec
    return Layers(made, shape.num_qo_heads, impl="cpu")


def paged_slots(bs: int, ctx: int, page_size: int = 64) -> Tensor:
    """[bs, ctx] int32 slots of pages in shuffled order; slot 0 stays free."""
    pages = -(-ctx // page_size)
    order = torch.randperm(bs * pages).view(bs, pages, 1) * page_size + torch.arange(page_size) + 1
    return order.view(bs, -1)[:, :ctx].int().contiguous()


def full_windows(slots: Tensor, sink_tokens: int, recent_tokens: int) -> WindowTable:
    """A table in which both windows of every sequence are full. slots: [bs, ctx] as from `paged_slots`."""
    bs, ctx = slots.shape
    sinks = min(sink_tokens, ctx)
    recent = min(recent_tokens, ctx - sinks)
    table = WindowTable.full(bs, (sinks, recent))
    position = torch.cat((torch.arange(sinks), torch.arange(ctx - recent, ctx)))
    for b in range(bs):
        table.record(table.rows(torch.tensor(b), position), position)
    return table


def overhead(run: Callable[[], object], calls: int) -> dict[str, dict[str, float]]:
    """Microseconds of a call that has next to nothing to do: what a call costs beside its work.

    Args:
        run: the call.
        calls: how many are timed in each of the two settings; the two take turns, 20 calls each.
    Returns:
        "back_to_back": calls one after another. "beside": BESIDE_BYTES are read and written before each call, as the rest of a
        model does. Each as `summary` gives it.
    """
    other = torch.ones(BESIDE_BYTES, dtype=torch.uint8)
    times: dict[str, list[float]] = {"back_to_back": [], "beside": []}
    while len(times["beside"]) < calls:
        for name, values in times.items():
            for i in range(21):
                if name == "beside":
                    other.add_(1)
                begin = time.perf_counter()
                run()
                if i:  # the first call of a turn comes after the other setting's
                    values.append(1e6 * (time.perf_counter() - begin))
    return {name: summary(values) for name, values in times.items()}


def overhead_line(what: str, found: dict) -> str:
    """What `overhead` found, for a reader."""
    return (
        f"overhead, {what}: {found['beside']['median']:.0f} us beside other work "
        f"({found['beside']['p25']:.0f} to {found['beside']['p75']:.0f}), {found['back_to_back']['median']:.0f} us back to back"
    )


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


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=doc.split("\n")[0])
    made.add_argument("--shape", default="qwen3-8b", help=f"comma-separated: {', '.join(SHAPES)} (default: %(default)s)")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of a call (default: PyTorch's)")
    made.add_argument(
        "--overhead-calls", type=int, default=1000, help="calls to measure a call's overhead by; 0: none (default: %(default)s)"
    )
    made.add_argument("--json", type=Path, help="file to write")
    return made


def begin(args: argparse.Namespace) -> dict:
    """Set the threads and print the machine; the start of the record that `end` writes."""
    torch.set_num_threads(args.threads)
    about = machine()
    print(about["text"])
    return {"machine": about, "threads": args.threads, "isa": cpu.default_isa()}


def end(args: argparse.Namespace, record: dict) -> None:
    """Write the record where --json says."""
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
