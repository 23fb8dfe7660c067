"""Is every Triton kernel right at real sizes? Each check returns what is wrong in a few words, or None."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from synthetic import VARIANTS, Batch, Sizes, Variant, codec_of, empty_layer, new_tokens

from oscar_kernel import LayerCache, reference
from oscar_kernel.architectures import ARCHITECTURES, SPILLS
from oscar_kernel.triton.attention import TritonDecode, TritonLayers
from oscar_kernel.triton.check import fault
from oscar_kernel.triton.decode import decode_attention
from oscar_kernel.triton.extend import extend_attention
from oscar_kernel.triton.step_codes import StepCodes
from oscar_kernel.triton.store import store_kv, store_step
from oscar_kernel.triton.tuning import Launch, architecture, decode_launch

DECODE_ERROR = 5e-3
"""Largest difference from float64 on the same codes, relative to the largest output."""
EXTEND_ERROR = 2e-2


def checks(sizes: Sizes, device: str) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of all checks that can run on a device."""
    yield "a server's check at start", lambda: check_start(sizes, device)
    for name, check in (("store", check_store), ("decode", check_decode), ("extend", check_extend)):
        for title, variant in VARIANTS.items():
            if name == "store" or not variant.shaped:  # what is stored is read in the same way
                yield f"{name}, {title}", lambda check=check, variant=variant: check(sizes, device, variant)
    yield "codes of a decode step", lambda: check_step_codes(sizes, device)
    if device != "cpu":
        yield "CUDA graph", lambda: check_graph(sizes, device)
        yield "machine code", lambda: check_code(architecture(torch.device(device)).key)


def check_start(sizes: Sizes, device: str) -> str | None:
    """What a server asks at its start."""
    found = (fault(codec_of(sizes, device, variant), sizes.num_qo_heads) for variant in VARIANTS.values())
    return next((sentence for sentence in found if sentence is not None), None)


def _different(got: LayerCache, expected: LayerCache) -> str | None:
    """Where the bytes of two caches differ. Their last window row takes what belongs nowhere."""
    for name in ("k", "v"):
        a, b = getattr(got, name), getattr(expected, name)
        for what, x, y in (("pool", a.buffer, b.buffer), ("windows", a.window[:-1], b.window[:-1])):
            x, y = x.view(torch.uint8), y.view(torch.uint8)
            if not torch.equal(x, y):
                return f"{name}, {what}: {int((x != y).sum())} of {x.numel()} bytes differ"
    return None


def check_store(sizes: Sizes, device: str, variant: Variant) -> str | None:
    """Bytes of the store against the reference's."""
    codec = codec_of(sizes, device, variant)
    for n in sizes.store_tokens:
        tokens, expected, got = new_tokens(sizes, n, device), empty_layer(codec, n, device), empty_layer(codec, n, device)
        reference.store_kv(*tokens, expected.cache, codec)
        store_kv(*tokens, got)
        if (sentence := _different(got.cache, expected.cache)) is not None:
            return f"{n} tokens: {sentence}"
    return None


def check_step_codes(sizes: Sizes, device: str) -> str | None:
    """Codes of several layers that are written at the end of a decode step."""
    codec = codec_of(sizes, device, Variant(shaped=True))
    for n in sizes.store_tokens[:-1]:
        layers = [(new_tokens(sizes, n, device), *(empty_layer(codec, n, device) for _ in range(2))) for _ in range(3)]
        _, _, loc, rows = layers[0][0]
        for (k, v, _, _), expected, got in layers:
            reference.store_kv(k, v, loc, rows, expected.cache, codec)
            store_step(k, v, loc, rows, got, codes_later=True)
        StepCodes([got for _, _, got in layers]).write(loc, rows)
        for i, (_, expected, got) in enumerate(layers):
            if (sentence := _different(got.cache, expected.cache)) is not None:
                return f"{n} tokens, layer {i}: {sentence}"
    return None


def check_decode(sizes: Sizes, device: str, variant: Variant) -> str | None:
    """Decode against float64 on the same codes, merged in either way."""
    batch = Batch(sizes.decode_lens, codec_of(sizes, device, variant), device)
    batch.windows.position[::7] = -1  # some rows are lost
    bs, layer = len(batch.lens), batch.layers[0]
    q = torch.randn(bs, sizes.num_qo_heads, sizes.dim, device=device)
    groups = layer.tensors.v.planes.num_groups
    launch = decode_launch(architecture(torch.device(device)).key, sizes.dim, sizes.kv_group_num, bs, groups)
    plan, worst = batch.plan(launch, sizes.heads), 0.0
    for join in (True, False):
        out = decode_attention(q, layer, plan, sizes.sm_scale, launch=replace(launch, join=join))
        for b in range(bs):
            expected = batch.oracle(q[b], b, sizes.sm_scale)
            worst = max(worst, float((out[b].double() - expected).abs().max() / expected.abs().max()))
    return None if worst < DECODE_ERROR else f"error {worst:.1e} against float64"


def check_extend(sizes: Sizes, device: str, variant: Variant) -> str | None:
    """Extend against the reference on the same codes."""
    codec = codec_of(sizes, device, variant)
    batch, new = Batch([max(1, p) for p, _ in sizes.extend], codec, device), [n for _, n in sizes.extend]
    indptr, layer = [0, *itertools.accumulate(new)], batch.layers[0]
    q = torch.randn(indptr[-1], sizes.num_qo_heads, sizes.dim, device=device)
    k, v = (torch.randn(indptr[-1], sizes.heads, sizes.dim, device=device).bfloat16() for _ in range(2))
    on_device = torch.tensor(indptr, dtype=torch.int32, device=device)
    out = extend_attention(q, k, v, on_device, max(new), layer, batch.plan(Launch(), sizes.heads), sizes.sm_scale)
    expected = reference.extend_attention(q, k, v, indptr, layer.cache, codec, batch.reference_plan(), sizes.sm_scale)
    error = float((out - expected).abs().max() / expected.abs().max())
    return None if error < EXTEND_ERROR else f"error {error:.1e} against the reference"


def check_graph(sizes: Sizes, device: str) -> str | None:
    """A captured step replayed with other lengths and with rows of padding equals eager steps."""
    codec = codec_of(sizes, device)
    batch = Batch((5000, 900, 330), codec, device)
    state = TritonLayers({0: (batch.layers[0].cache, codec)}, sizes.num_qo_heads)
    state.reserve(4, batch.maps)
    decode = TritonDecode(state, 4, batch.maps)
    q = torch.randn(4, sizes.num_qo_heads, sizes.dim, device=device)
    requests, lens = torch.tensor([0, 1, 2, 0], device=device), torch.tensor([5000, 900, 330, 0], device=device)

    def step() -> torch.Tensor:
        decode.plan(batch.req_to_token, requests, lens, batch.maps)
        return decode.run(0, q, sm_scale=0.1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for new_requests, new_lens in (([1, 0, 0, 0], [700, 4000, 0, 0]), ([2, 1, 0, 0], [330, 900, 5000, 0])):
        requests.copy_(torch.tensor(new_requests))
        lens.copy_(torch.tensor(new_lens))
        graph.replay()
        replayed = captured.clone()
        if not torch.equal(replayed, step()) or replayed[-1].any():
            return "replay differs from eager, or a row of padding is not zero"
    return None


def check_code(arch: str) -> str | None:
    """Whether the machine code for this card spills registers, where the table of architectures does not say so."""
    from compile_kernels import MAIN_CASE, SHAPED_CASE, distinct_launches, lower

    if ARCHITECTURES[arch].remark == SPILLS:
        return None
    rows = [lower(launch, arch) for case in (MAIN_CASE, SHAPED_CASE) for launch in distinct_launches(case, arch)]
    spilling = [f"{row.kernel} {row.spill_bytes} bytes" for row in rows if row.spill_bytes]
    return f"registers are spilled: {', '.join(spilling)}" if spilling else None
