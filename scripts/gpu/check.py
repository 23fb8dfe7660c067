"""What scripts/gpu_check.sh runs: correctness of every Triton kernel at real sizes, then decode against the 16-bit peers."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton

from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.linalg import inverses
from oscar_kernel import LayerCache, LayerCodec
from oscar_kernel.extend_attention import extend_attention_ref as extend_reference
from oscar_kernel.plan_read import plan_read
from oscar_kernel.store_kv import store_kv_ref as store_reference
from oscar_kernel.triton import check as triton_check
from oscar_kernel.triton import decode as triton_decode
from oscar_kernel.triton import extend as triton_extend
from oscar_kernel.triton import plan as triton_plan
from oscar_kernel.triton import step_codes as triton_step_codes
from oscar_kernel.triton import store as triton_store
from oscar_kernel.triton import tuning as triton_tuning
from oscar_kernel.triton.common import prepare

SINK, RECENT = 64, 256
DECODE_ERROR = 5e-3
"""Largest difference from float64 on the same codes, relative to the largest output."""
EXTEND_ERROR = 2e-2


@dataclass
class Sizes:
    """What is checked and timed; `miniature` keeps the interpreter busy for a minute, not a day."""

    heads: int = 8
    ratio: int = 4
    dim: int = 128
    store_tokens: tuple = (1, 7, 33, 4096)
    decode_lens: tuple = (1, 63, 64, 320, 321, 1500, 8192, 20000)
    extend: tuple = ((0, 700), (5000, 300), (100, 1), (320, 129))
    bench_batches: tuple = (1, 8, 32)
    bench_contexts: tuple = (8192, 32768, 102400)
    bench_stores: tuple = (1, 32, 8192)
    bench_layers: int = 36
    l2_bytes: int = 256 << 20
    copy_bytes: int = 1 << 30

    @classmethod
    def miniature(cls) -> Sizes:
        return cls(
            heads=2, ratio=2, dim=64, store_tokens=(1, 17), decode_lens=(1, 330), extend=((0, 20), (330, 5)),
            bench_batches=(1, 2), bench_contexts=(400,), bench_stores=(2,), bench_layers=3, l2_bytes=1, copy_bytes=1 << 20,
        )  # fmt: skip


@dataclass
class Variant:
    """Properties of a layer that choose other code. shaped: errors are passed on in the store. native: it stays in 16 bits."""

    fold: bool = True
    group: int | None = None
    shaped: bool = False
    native: bool = False


VARIANTS = {
    "V folded": Variant(),
    "V folded, error shaping": Variant(shaped=True),
    "V not folded, groups of 32": Variant(fold=False, group=32),
    "kept in 16 bits": Variant(native=True),
}


def codec_of(heads: int, dim: int, device: str, variant: Variant | None = None) -> LayerCodec:
    """A layer's codec with random rotations, rounded to float32 as an artifact's are."""
    variant = variant or Variant()
    g = torch.Generator().manual_seed(0)
    transform = torch.linalg.qr(torch.randn(heads, dim, dim, generator=g, dtype=torch.float64)).Q
    if variant.native:
        transform = torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim).contiguous()
    transform = transform.float().double().to(device)
    clip = torch.full((heads,), 0.96, device=device)
    fmt = LosslessFormat(dim, "bfloat16") if variant.native else RowFormat(dim, variant.group)
    inverse = inverses(transform)
    query, fold = inverse.transpose(1, 2).float().contiguous(), variant.fold
    codec = LayerCodec(
        fmt, fmt, transform, query, None if fold else transform, None if fold else inverse.float().contiguous(), clip, clip
    )
    if variant.shaped:
        # Exact in float16, as those of an artifact are.
        codec.k_shaping, codec.v_shaping = (
            (torch.randn(heads, dim, dim, generator=g) / dim**0.5).triu(1).half().float().to(device) for _ in range(2)
        )
    return codec


def plausible_rows(fmt: RowFormat | LosslessFormat, num_slots: int, heads: int, device: str) -> torch.Tensor:
    """Random codes, centres near 0 and steps near 1; or random numbers. [num_slots, heads, row_bytes] uint8."""
    if isinstance(fmt, LosslessFormat):
        return torch.randn(num_slots, heads, fmt.head_dim, device=device).bfloat16().view(torch.uint8)
    rows = torch.randint(0, 256, (num_slots, heads, fmt.row_bytes), dtype=torch.uint8, device=device)
    meta = rows.view(torch.float16)[..., fmt.code_bytes // 2 :]
    pair = torch.tensor([0.05, 0.75], dtype=torch.float16, device=device).repeat(fmt.num_groups)
    meta.copy_(pair * (1 + 0.2 * torch.rand(num_slots, heads, 1, device=device)).half())
    return rows


class Batch:
    """Sequences in shuffled slots of a synthetic pool, with full windows; `layers` pools that share slots."""

    def __init__(self, lens, codec: LayerCodec, heads: int, device: str, layers: int = 1):
        dim, fmt, bs = codec.k_format.head_dim, codec.k_format, len(lens)
        self.lens, self.device, self.codec = list(lens), device, codec
        total, width = sum(lens), max(lens)
        order = torch.randperm(total, device=device).int() + 1
        self.req_to_token = torch.zeros(bs + 1, width, dtype=torch.int32, device=device)
        self.request = torch.arange(1, bs + 1, device=device)
        num_rows, at = bs * (SINK + RECENT), 0
        self.row_of_slot = torch.full((total + 1,), -1, dtype=torch.int32, device=device)
        self.slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=device)
        for b, n in enumerate(lens):
            slots = order[at : at + n]
            self.req_to_token[b + 1, :n] = slots
            position = torch.arange(n, device=device)
            position = position[(position < SINK) | (position >= n - RECENT)]
            row = b * (SINK + RECENT) + torch.where(position < SINK, position, SINK + position % RECENT)
            self.row_of_slot[slots[position].long()] = row.int()
            self.slot_of_row[row] = slots[position].long()
            at += n
        self.caches = [
            LayerCache(
                plausible_rows(fmt, total + 1, heads, device), plausible_rows(fmt, total + 1, heads, device),
                torch.randn(num_rows + 1, heads, dim, device=device).bfloat16(),
                torch.randn(num_rows + 1, heads, dim, device=device).bfloat16(),
            )
            for _ in range(layers)
        ]  # fmt: skip
        if isinstance(fmt, LosslessFormat):
            # Windows and pool are random apart, and the kernels read such a layer from the pool.
            self.row_of_slot.fill_(-1)

    def plan(self, launch: triton_tuning.Launch, heads: int) -> triton_plan.TritonPlan:
        budget = triton_plan.item_budget(len(self.lens), heads, triton_plan.num_sms(self.device), launch.waves)
        buffers = triton_plan.PlanBuffers(len(self.lens), budget, SINK, RECENT, self.device)
        return triton_plan.plan_decode(
            buffers, self.req_to_token, torch.tensor(self.lens, device=self.device), req_pool_indices=self.request,
            row_of_slot=self.row_of_slot, slot_of_row=self.slot_of_row, sink_tokens=SINK, recent_tokens=RECENT,
        )  # fmt: skip

    def reference_plan(self):
        return plan_read(self.req_to_token, self.request, self.lens, self.row_of_slot, self.slot_of_row, SINK, RECENT)

    def oracle(self, q: torch.Tensor, b: int, scale: float) -> torch.Tensor:
        """Output of sequence b in float64. q: [num_qo_heads, head_dim]."""
        plan, cache, codec = self.reference_plan(), self.caches[0], self.codec
        n = self.lens[b]
        slots = plan.slots[b, :n]
        k, v = codec.decode_k(cache.k_buffer[slots]).double(), codec.decode_v(cache.v_buffer[slots]).double()
        kept = plan.window_mask[b]
        k[plan.window_positions[b][kept]] = cache.k_window[plan.window_rows[b][kept]].double()
        v[plan.window_positions[b][kept]] = cache.v_window[plan.window_rows[b][kept]].double()
        q = torch.einsum("hgd,hde->hge", q.double().unflatten(0, (k.shape[1], -1)), codec.q_transform.double())
        o = torch.einsum("hgn,nhd->hgd", (torch.einsum("hgd,nhd->hgn", q, k) * scale).softmax(-1), v)
        if codec.v_inverse is not None:
            o = torch.einsum("hgd,hde->hge", o, codec.v_inverse.double())
        return o.flatten(0, 1)


def empty_cache(sizes: Sizes, codec: LayerCodec, n: int, device: str) -> LayerCache:
    """With more slots than n tokens need, and as many window rows."""
    row_bytes = codec.k_format.row_bytes
    return LayerCache(
        torch.zeros(n + 8, sizes.heads, row_bytes, dtype=torch.uint8, device=device),
        torch.zeros(n + 8, sizes.heads, row_bytes, dtype=torch.uint8, device=device),
        torch.zeros(n + 1, sizes.heads, sizes.dim, dtype=torch.bfloat16, device=device),
        torch.zeros(n + 1, sizes.heads, sizes.dim, dtype=torch.bfloat16, device=device),
    )


def new_tokens(sizes: Sizes, n: int, device: str) -> tuple[torch.Tensor, ...]:
    """k, v, loc and window_rows of `store_kv` for n tokens."""
    k = torch.randn(n, sizes.heads, sizes.dim, device=device).bfloat16() * 2 + 0.5
    v = torch.randn(n, sizes.heads, sizes.dim, device=device).bfloat16()
    return k, v, torch.randperm(n + 8, device=device)[:n], torch.randperm(n, device=device)


def check_store(sizes: Sizes, device: str, variant: Variant) -> str | None:
    codec = codec_of(sizes.heads, sizes.dim, device, variant)
    for n in sizes.store_tokens:
        tokens = new_tokens(sizes, n, device)
        expected, got = (empty_cache(sizes, codec, n, device) for _ in range(2))
        store_reference(*tokens, expected, codec)
        triton_store.store_kv(*tokens, got, codec)
        for name in vars(expected):
            a, b = (getattr(cache, name).view(torch.uint8) for cache in (expected, got))
            if not torch.equal(a, b):
                return f"{n} tokens: {name}: {int((a != b).sum())} of {a.numel()} bytes differ"
    return None


def check_step_codes(sizes: Sizes, device: str) -> str | None:
    """Codes of several layers that are written at the end of a decode step."""
    codec = codec_of(sizes.heads, sizes.dim, device, Variant(shaped=True))
    for n in sizes.store_tokens[:-1]:
        layers = [(new_tokens(sizes, n, device), *(empty_cache(sizes, codec, n, device) for _ in range(2))) for _ in range(3)]
        _, _, loc, rows = layers[0][0]
        for (k, v, _, _), expected, got in layers:
            store_reference(k, v, loc, rows, expected, codec)
            triton_store.store_kv(k, v, loc, rows, got, codec, return_rows=False, codes_later=True)
        triton_step_codes.StepCodes([(got, prepare(codec)) for _, _, got in layers]).write(loc, rows)
        for i, (_, expected, got) in enumerate(layers):
            for name in ("k_buffer", "v_buffer"):
                a, b = getattr(expected, name), getattr(got, name)
                if not torch.equal(a, b):
                    return f"{n} tokens, layer {i}: {name}: {int((a != b).sum())} of {a.numel()} bytes differ"
    return None


def check_decode(sizes: Sizes, device: str, variant: Variant) -> str | None:
    codec = codec_of(sizes.heads, sizes.dim, device, variant)
    batch = Batch(sizes.decode_lens, codec, sizes.heads, device)
    batch.slot_of_row[::7] = -1  # some rows lost
    q = torch.randn(len(batch.lens), sizes.heads * sizes.ratio, sizes.dim, device=device)
    launch = triton_tuning.choose(architecture(device).key, sizes.dim, sizes.ratio, len(batch.lens), codec_groups(codec))
    plan, worst = batch.plan(launch, sizes.heads), 0.0
    for join in (True, False):
        out = triton_decode.decode_attention(
            q, batch.caches[0], codec, plan, sizes.dim**-0.5, launch=replace(launch, join=join)
        )
        for b in range(len(batch.lens)):
            expected = batch.oracle(q[b], b, sizes.dim**-0.5)
            worst = max(worst, float((out[b].double() - expected).abs().max() / expected.abs().max()))
    return None if worst < DECODE_ERROR else f"error {worst:.1e} against float64"


def architecture(device: str):
    return triton_tuning.architecture(torch.device(device))


def codec_groups(codec: LayerCodec) -> int:
    return getattr(codec.v_format, "num_groups", 1)


def check_start(sizes: Sizes, device: str) -> str | None:
    """What a server asks at its start."""
    for variant in VARIANTS.values():
        fault = triton_check.fault(codec_of(sizes.heads, sizes.dim, device, variant), sizes.heads * sizes.ratio)
        if fault is not None:
            return fault
    return None


def check_code(arch: str) -> str | None:
    """Whether the machine code for this card spills registers, where the table of architectures does not say so."""
    from compile_kernels import MAIN_CASE, SHAPED_CASE, distinct_launches, lower

    from oscar_kernel.architectures import ARCHITECTURES, SPILLS

    if ARCHITECTURES[arch].remark == SPILLS:
        return None
    rows = [lower(launch, arch) for case in (MAIN_CASE, SHAPED_CASE) for launch in distinct_launches(case, arch)]
    spilling = [f"{row.kernel} {row.spill_bytes} bytes" for row in rows if row.spill_bytes]
    return f"registers are spilled: {', '.join(spilling)}" if spilling else None


def check_extend(sizes: Sizes, device: str, variant: Variant) -> str | None:
    codec = codec_of(sizes.heads, sizes.dim, device, variant)
    prefix, new = [max(1, p) for p, _ in sizes.extend], [n for _, n in sizes.extend]
    batch = Batch(prefix, codec, sizes.heads, device)
    indptr = [0, *itertools.accumulate(new)]
    q = torch.randn(indptr[-1], sizes.heads * sizes.ratio, sizes.dim, device=device)
    k, v = (torch.randn(indptr[-1], sizes.heads, sizes.dim, device=device).bfloat16() for _ in range(2))
    plan = batch.plan(triton_tuning.Launch(), sizes.heads)
    out = triton_extend.extend_attention(q, k, v, indptr, batch.caches[0], codec, plan, sizes.dim**-0.5)
    reference = extend_reference(q, k, v, indptr, batch.caches[0], codec, batch.reference_plan(), sizes.dim**-0.5)
    error = float((out - reference).abs().max() / reference.abs().max())
    return None if error < EXTEND_ERROR else f"error {error:.1e} against the reference"


def check_graph(sizes: Sizes, device: str) -> str | None:
    """A captured step replayed with other lengths and with padded rows equals eager steps."""
    codec = codec_of(sizes.heads, sizes.dim, device)
    batch = Batch((5000, 900, 330), codec, sizes.heads, device)
    heads = sizes.heads * sizes.ratio
    buffers = triton_plan.PlanBuffers(4, 64, SINK, RECENT, device)
    scratch = triton_decode.DecodeBuffers.make(4, buffers.num_items, heads, codec)
    q, out = torch.randn(4, heads, sizes.dim, device=device), torch.zeros(4, heads, sizes.dim, device=device)
    request, lens = torch.tensor([1, 2, 3, 0], device=device), torch.tensor([5000, 900, 330, 1], device=device)

    def step():
        plan = triton_plan.plan_decode(
            buffers, batch.req_to_token, lens, req_pool_indices=request, row_of_slot=batch.row_of_slot,
            slot_of_row=batch.slot_of_row, sink_tokens=SINK, recent_tokens=RECENT, pad_request=0,
        )  # fmt: skip
        triton_decode.decode_attention(q, batch.caches[0], codec, plan, 0.1, out=out, buffers=scratch)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new_request, new_lens in (([2, 1, 0, 0], [700, 4000, 1, 1]), ([3, 2, 1, 0], [330, 900, 5000, 1])):
        request.copy_(torch.tensor(new_request))
        lens.copy_(torch.tensor(new_lens))
        graph.replay()
        replayed = out.clone()
        step()
        if not torch.equal(replayed, out) or replayed[-1].any():
            return "replay differs from eager, or a padded row is not zero"
    return None


def timed(run, seconds: float = 0.4) -> float:
    """Median time of one call in seconds; captured in a CUDA graph where there is a card."""
    run()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times, until = [], time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < until and len(times) < 200):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return statistics.median(times)


def copy_bandwidth(size: int, device: str) -> float:
    """Bytes a second of a large device copy, read and write together."""
    a = torch.zeros(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / timed(lambda: b.copy_(a))


def peers() -> dict:
    """name -> (make(q, k, v, scale) -> callable), best first; 16-bit K and V [bs, n, heads, dim]."""
    found = {}
    try:
        from flash_attn import flash_attn_with_kvcache

        found["FlashAttention"] = lambda q, k, v, s: lambda: flash_attn_with_kvcache(q.unsqueeze(1), k, v, softmax_scale=s)
    except ImportError:
        pass
    try:
        import flashinfer

        def make(q, k, v, s):
            bs, n, heads, dim = k.shape
            page = 16
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                torch.empty(256 << 20, dtype=torch.uint8, device=q.device), "NHD", use_tensor_cores=True
            )
            pages = n // page
            indptr = torch.arange(bs + 1, dtype=torch.int32, device=q.device) * pages
            indices = torch.arange(bs * pages, dtype=torch.int32, device=q.device)
            last = torch.full((bs,), page, dtype=torch.int32, device=q.device)
            wrapper.plan(indptr, indices, last, q.shape[1], heads, dim, page, q_data_type=q.dtype, sm_scale=s)
            kv = tuple(x.reshape(bs * pages, page, heads, dim) for x in (k, v))
            return lambda: wrapper.run(q, kv)

        found["FlashInfer"] = make
    except ImportError:
        pass
    attention = torch.nn.functional.scaled_dot_product_attention
    found["torch SDPA"] = lambda q, k, v, s: (
        lambda: attention(q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), scale=s, enable_gqa=True)
    )
    return found


def bench(sizes: Sizes, device: str, bs: int, n: int, bandwidth: float, launch=None) -> dict:
    """One cell: microseconds of one layer's decode attention, ours and the best 16-bit peer's."""
    codec = codec_of(sizes.heads, sizes.dim, device)
    per_layer = bs * n * sizes.heads * 2 * codec.k_format.row_bytes
    # Layers in turn, so that no run finds the last one's rows in the cache.
    layers = max(1, min(16, sizes.l2_bytes // per_layer + 1))
    batch = Batch([n] * bs, codec, sizes.heads, device, layers)
    heads = sizes.heads * sizes.ratio
    chosen = launch or triton_tuning.choose(architecture(device).key, sizes.dim, sizes.ratio, bs, codec.v_format.num_groups)
    plan = batch.plan(chosen, sizes.heads)
    scratch = triton_decode.DecodeBuffers.make(bs, plan.work.shape[0], heads, codec)
    q = torch.randn(bs, heads, sizes.dim, device=device).bfloat16()
    out = torch.empty_like(q)

    def run():
        for cache in batch.caches:
            triton_decode.decode_attention(q, cache, codec, plan, sizes.dim**-0.5, out=out, buffers=scratch, launch=chosen)

    seconds = timed(run) / layers
    cell = {
        "bs": bs, "context": n, "us": seconds * 1e6, "gb_per_s": per_layer / seconds / 1e9,
        "of_copy": per_layer / seconds / bandwidth, "launch": asdict(chosen),
    }  # fmt: skip
    if launch is not None:
        return cell
    batch.caches.clear()
    per_layer = bs * n * sizes.heads * 4 * sizes.dim
    layers = max(1, min(8, sizes.l2_bytes // per_layer + 1))
    free = torch.cuda.mem_get_info()[0] if device != "cpu" else 1 << 40
    layers = min(layers, int(free * 0.8 / 1.1) // per_layer)
    for name, make in peers().items() if layers else ():
        try:
            kv = [
                [torch.randn(bs, n, sizes.heads, sizes.dim, device=device, dtype=torch.bfloat16) for _ in range(2)]
                for _ in range(layers)
            ]
            calls = [make(q, k, v, sizes.dim**-0.5) for k, v in kv]
            cell[name] = timed(lambda calls=calls: [call() for call in calls]) / layers * 1e6
        except Exception as error:  # a peer that cannot run here is no fault of ours
            print(f"  {name}: {type(error).__name__}: {str(error)[:100]}")
    times = {name: cell[name] for name in peers() if name in cell}
    if times:
        cell["peer"] = min(times, key=times.get)
        cell["speedup"] = times[cell["peer"]] / cell["us"]
    return cell


def bench_store(sizes: Sizes, device: str) -> list[dict]:
    """Microseconds of one layer's store with every channel rounded alone, with errors passed on in a launch of its own, and of
    its part of a step's launch for all layers; matrices are in L2 but in the last."""
    cells = []
    for n in sizes.bench_stores:
        tokens, cell = new_tokens(sizes, n, device), {"tokens": n}
        for name, shaped in (("us", False), ("shaped_us", True)):
            codec = codec_of(sizes.heads, sizes.dim, device, Variant(shaped=shaped))
            cache = empty_cache(sizes, codec, n, device)
            cell[name] = timed(lambda t=tokens, cache=cache, codec=codec: triton_store.store_kv(*t, cache, codec)) * 1e6
        step = [
            (
                empty_cache(sizes, codec, n, device),
                replace(prepare(codec), **{side: getattr(prepare(codec), side).clone() for side in ("k_shaping", "v_shaping")}),
            )
            for _ in range(sizes.bench_layers)
        ]
        codes = triton_step_codes.StepCodes(step)
        cell["step_codes_us"] = timed(lambda t=tokens, codes=codes: codes.write(*t[2:])) * 1e6 / sizes.bench_layers
        print(
            f"store of {n} tokens: {cell['us']:.1f} us, with error shaping {cell['shaped_us']:.1f} us, or "
            f"{cell['step_codes_us']:.2f} us more where {sizes.bench_layers} layers share the launch",
            flush=True,
        )
        cells.append(cell)
    return cells


def tune(sizes: Sizes, device: str, bandwidth: float) -> list[dict]:
    """The best launch of the candidates for a small and a large batch, as entries for triton_tuning."""
    entries = []
    for bs, n in ((sizes.bench_batches[0], sizes.bench_contexts[-1]), (sizes.bench_batches[-1], sizes.bench_contexts[0])):
        cells = []
        for launch in triton_tuning.CANDIDATES if device != "cpu" else triton_tuning.CANDIDATES[:2]:
            try:
                cells.append(bench(sizes, device, bs, n, bandwidth, launch))
            except Exception as error:
                print(f"  {launch}: {type(error).__name__}: {str(error)[:100]}")
        best = min(cells, key=lambda cell: cell["us"])
        print(f"  best at bs {bs}, {n} tokens: {best['us']:.1f} us, {best['of_copy']:.0%} of copy: {best['launch']}")
        entries.append(best)
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="miniature sizes in Triton's interpreter, no card needed")
    parser.add_argument("--tune", action="store_true", help="also try the launch shapes in triton_tuning (several minutes)")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the figures go")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        print("gpu_check: PyTorch finds no card here; --smoke runs the same steps in Triton's interpreter")
        return 2
    device = "cpu" if args.smoke else "cuda"
    sizes = Sizes.miniature() if args.smoke else Sizes()
    torch.manual_seed(0)
    began = time.perf_counter()
    card = "Triton's interpreter" if args.smoke else torch.cuda.get_device_name()
    arch = architecture(device).key
    print(f"{card} ({arch}), PyTorch {torch.__version__}, Triton {triton.__version__}")
    result = {"card": card, "arch": arch, "torch": torch.__version__, "triton": triton.__version__, "checks": {}}

    wrong = 0
    checks = {"a server's check at start": lambda: check_start(sizes, device)}
    checks |= {
        f"{name}, {title}": lambda f=f, variant=variant: f(sizes, device, variant)
        for name, f in (("store", check_store), ("decode", check_decode), ("extend", check_extend))
        for title, variant in VARIANTS.items()
        if name == "store" or not variant.shaped  # what is stored is read in the same way
    }
    checks["codes of a decode step"] = lambda: check_step_codes(sizes, device)
    if device != "cpu":
        checks["CUDA graph"] = lambda: check_graph(sizes, device)
        checks["machine code"] = lambda: check_code(arch)
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            fault = check()
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error)[:300]}"
        wrong += fault is not None
        result["checks"][name] = fault or "ok"
        print(f"  {name:40} {fault or 'ok'}  ({time.perf_counter() - start:.1f} s)", flush=True)

    bandwidth = copy_bandwidth(sizes.copy_bytes, device)
    result["copy_gb_per_s"] = bandwidth / 1e9
    print(
        f"copy: {bandwidth / 1e9:.0f} GB/s. One layer, {sizes.heads} KV heads of {sizes.dim}, {sizes.ratio} query heads each:"
    )
    result["store"] = bench_store(sizes, device)
    print(f"{'bs':>4}{'context':>9}{'us':>9}{'GB/s':>8}{'of copy':>9}{'best 16-bit':>24}{'speed-up':>10}")
    result["decode"] = []
    for n in sizes.bench_contexts:
        for bs in sizes.bench_batches:
            if time.perf_counter() - began > 240:
                print("  (out of time, the rest is left out)")
                break
            try:
                cell = bench(sizes, device, bs, n, bandwidth)
            except torch.cuda.OutOfMemoryError:
                print(f"{bs:4}{n:9}  does not fit this card")
                continue
            finally:
                if device != "cpu":
                    torch.cuda.empty_cache()
            result["decode"].append(cell)
            peer = f"{cell['peer']} {cell[cell['peer']]:.1f} us" if "peer" in cell else "-"
            print(
                f"{bs:4}{n:9}{cell['us']:9.1f}{cell['gb_per_s']:8.0f}{cell['of_copy']:9.0%}{peer:>24}"
                f"{cell.get('speedup', 0):9.1f}x",
                flush=True,
            )
    if args.tune:
        result["tune"] = tune(sizes, device, bandwidth)
    result["seconds"] = time.perf_counter() - began
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    verdict = f"FAILED: {wrong} of {len(checks)} checks" if wrong else f"ok: {len(checks)} checks"
    print(f"{verdict}, {result['seconds']:.0f} s, figures in {args.json}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
