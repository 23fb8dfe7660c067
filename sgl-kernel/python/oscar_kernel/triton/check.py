"""Are the Triton kernels right on this card? One small store, decode and extend against the PyTorch reference on the CPU.

A server runs it once at start, with a layer of its own model: the kernels are compiled then anyway, what is added takes
milliseconds. `scripts/gpu_check.sh` asks the same at real sizes, and how fast they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernel import reference
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.testing import RandomBatch
from oscar_kernel.triton.attention import TritonDecode, TritonExtend, TritonLayers

SINK, RECENT = 4, 12
LENS = (3, 200)
NEW = (5, 18)
"""New tokens of the extend: with few and with many, either side of the width of a tile."""
DECODE_ERROR = 5e-3
"""Largest difference allowed, relative to the largest output; float16 queries and weights make about 3e-4."""
EXTEND_ERROR = 3e-2
"""The same for extend, which rounds queries and weights to bfloat16."""


def fault(codec: LayerCodec, num_qo_heads: int, logit_cap: float = 0.0) -> str | None:
    """What is wrong with the kernels on the codec's device, in a few words; None if nothing is.

    Args:
        codec: of a layer, as it is served. num_qo_heads: query heads on this rank. logit_cap: of the layer.
    """
    device, on_cpu = codec.k.clip.device, codec.to("cpu")
    g = torch.Generator().manual_seed(0)
    scale = codec.k.fmt.head_dim**-0.5
    dims = (
        (num_qo_heads, codec.k.fmt.head_dim),
        (codec.num_kv_heads, codec.k.fmt.head_dim),
        (codec.num_kv_heads, codec.v.fmt.head_dim),
    )

    def random(tokens: int) -> tuple[Tensor, ...]:
        """q, k and v of new tokens, in the type that a model gives them."""
        return tuple(torch.randn(tokens, heads, dim, generator=g).bfloat16() for heads, dim in dims)

    # What the reference stores, of the same numbers as a model gives.
    batch = RandomBatch.make(on_cpu, LENS, num_qo_heads, (SINK, RECENT), impl="reference")
    loc = torch.cat([batch.req_to_token[b, :n] for b, n in enumerate(LENS)]).long()
    k, v, rows = batch.k.bfloat16(), batch.v.bfloat16(), batch.rows()
    reference.store_kv(k, v, loc, rows, batch.cache, on_cpu)
    plan = batch.plan(LENS)

    # The kernels store all but the last token of each sequence as a prompt, and that one in the decode step.
    num_slots, num_rows = batch.cache.k.buffer.shape[0], batch.cache.k.window.shape[0] - 1
    cache = LayerCache.zeros(codec, num_slots, num_rows, device)
    layers = TritonLayers({0: (cache, codec)}, num_qo_heads)
    last = torch.zeros(len(loc), dtype=torch.bool)
    last[torch.tensor(batch.start[1:]) - 1] = True
    layers.by_id[0].store(*(x[~last].to(device) for x in (k, v, loc, rows)))
    q = random(len(LENS))[0]
    windows = batch.windows.to(device)
    where = batch.req_to_token.to(device), torch.arange(len(LENS), device=device)
    decode = TritonDecode(layers)
    decode.plan(*where, LENS, windows, loc[last].to(device), rows[last].to(device))
    out = decode.run(
        0, *(x.to(device) for x in (q, k[last], v[last])), sm_scale=scale, logit_cap=logit_cap, out_dtype=torch.float32
    )
    for name in ("k", "v"):
        mine, theirs = getattr(cache, name), getattr(batch.cache, name)
        for what, a, b in (("buffer", mine.buffer, theirs.buffer), ("window", mine.window[:-1], theirs.window[:-1])):
            # Rows that nobody has written hold zeros here, NaN there.
            a, b = a.cpu().view(torch.uint8), b.nan_to_num(0.0).view(torch.uint8) if what == "window" else b
            if different := int((a != b).sum()):
                return f"store: {different} bytes of {name} {what} differ"
    wanted = reference.decode_attention(q, batch.cache, on_cpu, plan, scale, logit_cap)
    if (sentence := _compare("decode", out, wanted, DECODE_ERROR)) is not None:
        return sentence
    again = decode.run(0, q.to(device), sm_scale=scale, logit_cap=logit_cap, out_dtype=torch.float32)
    if not torch.equal(out, again):
        return "decode: queries prepared with the store give another output than those prepared alone"

    extend = TritonExtend(layers)
    for new in NEW:
        qo_indptr, (q, k, v) = [0, 1, 1 + new], random(1 + new)
        nowhere = torch.full((1 + new,), -1), torch.full((1 + new,), windows.no_row)
        extend.plan(*where, LENS, qo_indptr, windows, *(x.to(device) for x in nowhere))
        out = extend.run(0, *(x.to(device) for x in (q, k, v)), sm_scale=scale, logit_cap=logit_cap, out_dtype=torch.float32)
        stored = on_cpu.k.store(k), on_cpu.v.store(v)
        wanted = reference.extend_attention(q, *stored, qo_indptr, batch.cache, on_cpu, plan, scale, logit_cap)
        if (sentence := _compare(f"extend by {new} tokens", out, wanted, EXTEND_ERROR)) is not None:
            return sentence
    return None


def _compare(what: str, out: Tensor, wanted: Tensor, allowed: float) -> str | None:
    error = float((out.cpu() - wanted).abs().max() / wanted.abs().max())
    # Written so that NaN is a fault too.
    return None if error < allowed else f"{what}: largest error {error:.1e} of the largest output, allowed {allowed:.0e}"
