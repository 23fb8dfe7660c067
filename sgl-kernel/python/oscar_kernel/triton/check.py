"""Are the Triton kernels right on this card? One small store, decode and extend against the PyTorch reference on the CPU.

A server runs it once at start, with a layer of its own model: the kernels are compiled then anyway, what is added takes
milliseconds. `scripts/gpu_check.sh` asks the same at real sizes, and how fast they are.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from oscar_kernel.decode_attention import decode_attention_ref
from oscar_kernel.extend_attention import extend_attention_ref
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.plan_read import plan_read
from oscar_kernel.store_kv import store_kv_ref
from oscar_kernel.triton import decode as triton_decode
from oscar_kernel.triton import extend as triton_extend
from oscar_kernel.triton import plan as triton_plan
from oscar_kernel.triton import query as triton_query
from oscar_kernel.triton import step_codes as triton_step_codes
from oscar_kernel.triton import store as triton_store
from oscar_kernel.triton.common import prepare

SINK, RECENT = 4, 12
LENS = (3, 200)
NEW = (5, 18)
"""New tokens of the extend: with few and with many, either side of the width of a tile."""
DECODE_ERROR = 5e-3
"""Largest difference allowed, relative to the largest output; float16 queries and weights make about 3e-4."""
EXTEND_ERROR = 3e-2
"""The same for extend, which rounds queries and weights to bfloat16."""


def on_device(codec: LayerCodec, device: str | torch.device) -> LayerCodec:
    """The codec with its tensors elsewhere."""
    tensors = {f.name: getattr(codec, f.name) for f in fields(codec) if isinstance(getattr(codec, f.name), Tensor)}
    return replace(codec, **{name: tensor.to(device) for name, tensor in tensors.items()})


def fault(codec: LayerCodec, num_qo_heads: int, logit_cap: float = 0.0) -> str | None:
    """What is wrong with the kernels on the codec's device, in a few words; None if nothing is.

    Args:
        codec: of a layer, as it is served. num_qo_heads: query heads on this rank. logit_cap: of the layer.
    """
    device, reference = codec.q_transform.device, on_device(codec, "cpu")
    heads, dim, v_dim = codec.q_transform.shape[0], codec.k_format.head_dim, codec.v_format.head_dim
    g = torch.Generator().manual_seed(0)
    total, scale = sum(LENS), dim**-0.5
    num_rows = len(LENS) * (SINK + RECENT)

    def random(tokens: int, num_heads: int, width: int) -> Tensor:
        return torch.randn(tokens, num_heads, width, generator=g).bfloat16()

    k, v, q = random(total, heads, dim), random(total, heads, v_dim), random(len(LENS), num_qo_heads, dim)
    slots = torch.randperm(total, generator=g) + 1
    req_to_token = torch.zeros(len(LENS) + 1, max(LENS), dtype=torch.int32)
    rows, at = [], 0
    for b, n in enumerate(LENS):
        req_to_token[b + 1, :n] = slots[at : at + n].int()
        at += n
        for p in range(n):
            kept = p < SINK or p >= n - RECENT
            rows.append(b * (SINK + RECENT) + (p if p < SINK else SINK + p % RECENT) if kept else num_rows)
    rows = torch.tensor(rows)
    row_of_slot = torch.full((total + 1,), -1, dtype=torch.int32)
    row_of_slot[slots] = torch.where(rows < num_rows, rows, -1).int()
    slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64)
    slot_of_row[rows] = slots
    slot_of_row[num_rows] = -1

    def empty(where: str | torch.device) -> LayerCache:
        shapes = ((total + 1, codec.k_format.row_bytes, torch.uint8), (total + 1, codec.v_format.row_bytes, torch.uint8),
                  (num_rows + 1, dim, torch.bfloat16), (num_rows + 1, v_dim, torch.bfloat16))  # fmt: skip
        return LayerCache(*(torch.zeros(n, heads, width, dtype=dtype, device=where) for n, width, dtype in shapes))

    expected, got = empty("cpu"), empty(device)
    store_kv_ref(k, v, slots, rows, expected, reference)
    # All but the last token as a prompt is stored, that one as a decode step does it, with the step's queries.
    step = triton_query.query_buffers(1, num_qo_heads, prepare(codec))
    triton_store.store_kv(*(x[:-1].to(device) for x in (k, v, slots, rows)), got, codec)
    last = tuple(x[-1:].to(device) for x in (k, v, slots, rows))
    triton_store.store_kv(*last, got, codec, return_rows=False, codes_later=True, q=q[-1:].to(device), queries=step)
    if prepare(codec).shaped:
        triton_step_codes.StepCodes([(got, prepare(codec))]).write(*last[2:])
    for name in vars(expected):
        mine, theirs = (getattr(cache, name)[: -1 if "window" in name else None] for cache in (got, expected))
        different = int((mine.cpu().view(torch.uint8) != theirs.view(torch.uint8)).sum())
        if different:
            return f"store: {different} bytes of {name} differ"
    prepared = triton_query.prepare_queries(q[-1:].to(device), prepare(codec))
    if not all(torch.equal(a, b) for a, b in zip(step, prepared, strict=True)):
        return "store: the queries of a decode step differ from those prepared alone"

    maps = req_to_token, torch.arange(1, len(LENS) + 1), list(LENS), row_of_slot, slot_of_row
    plan = plan_read(*maps, SINK, RECENT)
    moved = (x.to(device) if isinstance(x, Tensor) else x for x in maps)
    on_card = triton_plan.plan_read(*moved, SINK, RECENT, heads)
    wanted = decode_attention_ref(q, expected, reference, plan, scale, logit_cap)
    out = triton_decode.decode_attention(q.to(device), got, codec, on_card, scale, logit_cap)
    if (sentence := _compare("decode", out, wanted, DECODE_ERROR)) is not None:
        return sentence
    for new in NEW:
        indptr = [0, 1, 1 + new]
        q, k, v = random(1 + new, num_qo_heads, dim), random(1 + new, heads, dim), random(1 + new, heads, v_dim)
        wanted = extend_attention_ref(q, k, v, indptr, expected, reference, plan, scale, logit_cap)
        moved = (x.to(device) for x in (q, k, v))
        out = triton_extend.extend_attention(*moved, indptr, got, codec, on_card, scale, logit_cap)
        if (sentence := _compare(f"extend by {new} tokens", out, wanted, EXTEND_ERROR)) is not None:
            return sentence
    return None


def _compare(what: str, out: Tensor, wanted: Tensor, allowed: float) -> str | None:
    error = float((out.cpu() - wanted).abs().max() / wanted.abs().max())
    # Written so that NaN is a fault too.
    return None if error < allowed else f"{what}: largest error {error:.1e} of the largest output, allowed {allowed:.0e}"
