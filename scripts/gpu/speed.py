"""How fast are store and decode on this card, beside a copy and the 16-bit kernels that are installed?"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict

import torch
from synthetic import Batch, Sizes, Variant, codec_of, empty_layer, new_tokens

from oscar_kernel.triton.decode import DecodeBuffers, decode_attention
from oscar_kernel.triton.step_codes import StepCodes
from oscar_kernel.triton.store import store_kv
from oscar_kernel.triton.tuning import CANDIDATES, Launch, architecture, decode_launch


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


def bench(sizes: Sizes, device: str, bs: int, n: int, bandwidth: float, launch: Launch | None = None) -> dict:
    """One cell: microseconds of one layer's decode attention, ours and the best 16-bit peer's.

    Args:
        bs, n: sequences, and tokens of each. bandwidth: of a copy, bytes/s. launch: to try; None: the table's, and the peers.
    """
    codec = codec_of(sizes, device)
    per_layer = bs * n * sizes.heads * (codec.k.fmt.row_bytes + codec.v.fmt.row_bytes)
    # Layers in turn, so that no run finds the last one's rows in the cache.
    layers = max(1, min(16, sizes.l2_bytes // per_layer + 1))
    batch = Batch([n] * bs, codec, device, layers)
    tensors = batch.layers[0].tensors
    card = architecture(torch.device(device))
    chosen = launch or decode_launch(card.key, sizes.dim, sizes.kv_group_num, bs, tensors.v.planes.num_groups)
    plan = batch.plan(chosen, sizes.heads)
    scratch = DecodeBuffers.make(bs, plan.num_items, sizes.num_qo_heads, tensors)
    q = torch.randn(bs, sizes.num_qo_heads, sizes.dim, device=device).bfloat16()
    out = torch.empty_like(q)

    def run() -> None:
        for layer in batch.layers:
            decode_attention(q, layer, plan, sizes.sm_scale, out=out, buffers=scratch, launch=chosen)

    seconds = timed(run) / layers
    cell = {
        "bs": bs, "context": n, "us": seconds * 1e6, "gb_per_s": per_layer / seconds / 1e9,
        "of_copy": per_layer / seconds / bandwidth, "launch": asdict(chosen),
    }  # fmt: skip
    if launch is not None:
        return cell
    batch.layers.clear()
    times = bench_peers(sizes, device, q, n)
    if times:
        peer = min(times, key=times.get)
        cell |= times | {"peer": peer, "speedup": times[peer] / cell["us"]}
    return cell


def bench_peers(sizes: Sizes, device: str, q: torch.Tensor, n: int) -> dict[str, float]:
    """Microseconds of one layer's decode attention in 16 bits, by peer. q: [bs, num_qo_heads, head_dim]. n: tokens of each."""
    shape = q.shape[0], n, sizes.heads, sizes.dim
    per_layer = q.shape[0] * n * sizes.heads * 4 * sizes.dim
    layers = max(1, min(8, sizes.l2_bytes // per_layer + 1))
    free = torch.cuda.mem_get_info()[0] if device != "cpu" else 1 << 40
    layers = min(layers, int(free * 0.8 / 1.1) // per_layer)
    times = {}
    for name, make in peers().items() if layers else ():
        try:
            kv = [[torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)] for _ in range(layers)]
            calls = [make(q, k, v, sizes.sm_scale) for k, v in kv]
            times[name] = timed(lambda calls=calls: [call() for call in calls]) / layers * 1e6
        except Exception as error:  # a peer that cannot run here is no fault of ours
            print(f"  {name}: {type(error).__name__}: {str(error)[:100]}")
    return times


def bench_store(sizes: Sizes, device: str) -> list[dict]:
    """Microseconds of one layer's store with every channel rounded alone, with errors passed on in a launch of its own, and of
    its part of a step's launch for all layers; matrices are in L2 but in the last."""
    cells = []
    for n in sizes.bench_stores:
        tokens, cell = new_tokens(sizes, n, device), {"tokens": n}
        for name, shaped in (("us", False), ("shaped_us", True)):
            layer = empty_layer(codec_of(sizes, device, Variant(shaped=shaped)), n, device)
            cell[name] = timed(lambda t=tokens, layer=layer: store_kv(*t, layer)) * 1e6
        # Each layer has matrices of its own, as in a model.
        codes = StepCodes([empty_layer(layer.codec, n, device) for _ in range(sizes.bench_layers)])
        cell["step_codes_us"] = timed(lambda t=tokens, codes=codes: codes.write(*t[2:])) * 1e6 / sizes.bench_layers
        print(
            f"store of {n} tokens: {cell['us']:.1f} us, with error shaping {cell['shaped_us']:.1f} us, or "
            f"{cell['step_codes_us']:.2f} us more where {sizes.bench_layers} layers share the launch",
            flush=True,
        )
        cells.append(cell)
    return cells


def bench_decode(sizes: Sizes, device: str, bandwidth: float, until: float) -> list[dict]:
    """Cells of `bench` for all contexts and batches, printed as a table. until: `time.perf_counter` after which none begins."""
    print(f"{'bs':>4}{'context':>9}{'us':>9}{'GB/s':>8}{'of copy':>9}{'best 16-bit':>24}{'speed-up':>10}")
    cells = []
    for n in sizes.bench_contexts:
        for bs in sizes.bench_batches:
            if time.perf_counter() > until:
                print("  (out of time, the rest is left out)")
                return cells
            try:
                cell = bench(sizes, device, bs, n, bandwidth)
            except torch.cuda.OutOfMemoryError:
                print(f"{bs:4}{n:9}  does not fit this card")
                continue
            finally:
                if device != "cpu":
                    torch.cuda.empty_cache()
            cells.append(cell)
            peer = f"{cell['peer']} {cell[cell['peer']]:.1f} us" if "peer" in cell else "-"
            print(
                f"{bs:4}{n:9}{cell['us']:9.1f}{cell['gb_per_s']:8.0f}{cell['of_copy']:9.0%}{peer:>24}"
                f"{cell.get('speedup', 0):9.1f}x",
                flush=True,
            )
    return cells


def tune(sizes: Sizes, device: str, bandwidth: float) -> list[dict]:
    """The best launch of the candidates for a small and a large batch, as entries for the table in `tuning`."""
    entries = []
    for bs, n in ((sizes.bench_batches[0], sizes.bench_contexts[-1]), (sizes.bench_batches[-1], sizes.bench_contexts[0])):
        cells = []
        for launch in CANDIDATES if device != "cpu" else CANDIDATES[:2]:
            try:
                cells.append(bench(sizes, device, bs, n, bandwidth, launch))
            except Exception as error:
                print(f"  {launch}: {type(error).__name__}: {str(error)[:100]}")
        best = min(cells, key=lambda cell: cell["us"])
        print(f"  best at bs {bs}, {n} tokens: {best['us']:.1f} us, {best['of_copy']:.0%} of copy: {best['launch']}")
        entries.append(best)
    return entries
