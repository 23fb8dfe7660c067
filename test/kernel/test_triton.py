"""The Triton kernels against the PyTorch reference: in Triton's interpreter where there is no card, on the card where there is.

Triton decides when it is imported whether kernels are interpreted. Without a card this file therefore runs itself once more, in
a process of its own with TRITON_INTERPRET=1; nothing else of the test run sees that setting. TRITON_INTERPRET=1 pytest on this
file shows the cases one by one. What needs the compiler, lowering for cards that are not there, is in the outer process. One
process means one file, hence more than 400 lines.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.windows import WindowTable, in_windows, window_entries
from oscar.support import architecture_refusal
from oscar_kernel import LayerCache, LayerCodec, Layers, plan_read, reference
from oscar_kernel.architectures import ARCHITECTURES, SPILLS
from oscar_kernel.testing import RandomBatch, random_codec

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy remarks on the NaN and infinities that are fed in

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
ON_CARD = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_CARD else "cpu"
runs_kernels = pytest.mark.skipif(not (INTERPRETED or ON_CARD), reason="runs in test_under_the_interpreter's process")
compiles = pytest.mark.skipif(INTERPRETED, reason="needs the compiler, not the interpreter")

ROOT = Path(__file__).parents[2]
SINK, RECENT = 4, 16
LENS = [0, 1, SINK + RECENT - 1, SINK + RECENT, SINK + RECENT + 1, 300]
DECODE_ERROR = 2e-3
"""Largest difference from the float32 reference on values near 3; measured 9e-4 (float16 queries and weights)."""
EXTEND_ERROR = 1.2e-2
"""The same for extend, whose queries and weights are bfloat16 against 16-bit rows; measured 6e-3."""

if INTERPRETED:
    import quick_interpreter

    quick_interpreter.install()

if INTERPRETED or ON_CARD:
    import triton.language as tl

    from oscar_kernel.triton import attention as triton_attention
    from oscar_kernel.triton import check as triton_check
    from oscar_kernel.triton import decode as triton_decode
    from oscar_kernel.triton import plan as triton_plan
    from oscar_kernel.triton import shaping as triton_shaping
    from oscar_kernel.triton.common import LayerTensors, TritonLayer
    from oscar_kernel.triton.extend import extend_attention
    from oscar_kernel.triton.planes import Planes
    from oscar_kernel.triton.query import Queries, prepare_queries
    from oscar_kernel.triton.step_codes import StepCodes
    from oscar_kernel.triton.store import store_kv, store_step
    from oscar_kernel.triton.tuning import Launch

    @triton.jit
    def windows_kernel(n_ptr, position_ptr, counts_ptr, entry_ptr, inside_ptr, SINK: tl.constexpr, RECENT: tl.constexpr):
        """Entries 0 .. 31 and positions 0 .. 31 of sequence b by the rule of `oscar_kernel.triton.plan`."""
        b, i = tl.program_id(0), tl.arange(0, 32)
        n = tl.load(n_ptr + b)
        position, counts = triton_plan.window_entry(i, n, SINK, RECENT)
        entry, inside = triton_plan.entry_of(i, n, SINK, RECENT)
        tl.store(position_ptr + b * 32 + i, position)
        tl.store(counts_ptr + b * 32 + i, counts.to(tl.int32))
        tl.store(entry_ptr + b * 32 + i, entry)
        tl.store(inside_ptr + b * 32 + i, inside.to(tl.int32))


def moved(x):
    """Tensors on DEVICE, also those of a cache, a codec or a table."""
    if isinstance(x, torch.Tensor):
        return x.to(DEVICE)
    if isinstance(x, LayerCodec | WindowTable):
        return x.to(DEVICE)
    sides = (type(side)(moved(side.buffer).clone(), moved(side.window).clone()) for side in (x.k, x.v))
    return LayerCache(*sides)


def codec_of(heads, dim, v_dim, groups=(None, None), clip=0.95, shaping="", **options):
    """shaping: sides whose errors are passed on, "kv" for both. options: of `random_codec`."""
    codec = random_codec(heads, dim, v_dim, orthogonal=False, clip=(clip, clip), shaping=bool(shaping), **options)
    for name, side, group in (("k", codec.k, groups[0]), ("v", codec.v, groups[1])):
        side.fmt = RowFormat(side.fmt.head_dim, group)
        side.shaping = side.shaping if name in shaping else None
    return codec


def empty_cache(codec, num_slots, num_rows):
    """Storage in which every byte of rows is 0xAB and every number of windows NaN."""
    cache = LayerCache.zeros(codec, num_slots, num_rows)
    for side in (cache.k, cache.v):
        side.buffer.fill_(0xAB)
        side.window.fill_(float("nan"))
    return cache


def sides(*caches):
    """(name, side of each cache) for K and V."""
    return [(name, *(getattr(cache, name) for cache in caches)) for name in ("k", "v")]


def batch_of(lens, codec, num_qo_heads, lose_rows=True):
    batch = RandomBatch.make(codec, lens, num_qo_heads, (SINK, RECENT), lose_rows=lose_rows, impl="reference")
    for side in (batch.cache.k, batch.cache.v):
        # A slot that belongs to nobody may hold anything: here NaN steps and centres, where masked tokens point.
        side.buffer[0] = 0xFF
    return batch


def layer_of(batch):
    """The batch's layer for the kernels, on DEVICE."""
    return TritonLayer(moved(batch.cache), moved(batch.codec))


def plan_of(batch, budget=3, lens=None):
    """The batch's plan for the kernels, with a budget as on a small card, so that sequences are split."""
    lens = batch.lens if lens is None else lens
    buffers = triton_plan.PlanBuffers(len(lens), budget, SINK, RECENT, DEVICE)
    tensors = moved(batch.req_to_token), torch.arange(len(lens), device=DEVICE), torch.tensor(lens, device=DEVICE)
    return triton_plan.plan_tokens(buffers, *tensors, moved(batch.windows))


def decoded(batch, q, scale, cap=0.0):
    """The reference's output for one new token a sequence."""
    return reference.decode_attention(q, batch.cache, batch.codec, batch.plan(batch.lens), scale, cap)


def extended(batch, new, new_lens, scale, cap=0.0):
    """The reference's output for new tokens (q, k', v'), and the kernels'."""
    qo_indptr = [0, *itertools.accumulate(new_lens)]
    expected = reference.extend_attention(*new, qo_indptr, batch.cache, batch.codec, batch.plan(batch.lens), scale, cap)
    on_device = (*map(moved, new), torch.tensor(qo_indptr, dtype=torch.int32, device=DEVICE), max(new_lens))
    return expected, extend_attention(*on_device, layer_of(batch), plan_of(batch), scale, cap).cpu()


def new_tokens(codec, num_tokens, num_qo_heads, seed):
    """q, k', v' of new tokens, as the store returns them."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(num_tokens, num_qo_heads, codec.k.fmt.head_dim, generator=g)
    k, v = (
        side.store(torch.randn(num_tokens, codec.num_kv_heads, side.fmt.head_dim, generator=g)) for side in (codec.k, codec.v)
    )
    return q, k, v


@pytest.mark.skipif(INTERPRETED or ON_CARD, reason="this is that process")
def test_under_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(not INTERPRETED, reason="asks the interpreter")
def test_the_quick_interpreter_computes_the_same():
    """A step of prompts and a decode step of two layers, in it and in Triton's own."""

    def outs_and_caches():
        model = Served("triton", {1: codec_of(1, 32, 32, fold=True, shaping="kv"), 4: codec_of(1, 32, 32, shaping="v")})
        model.extend([6, 1])
        model.decode()
        caches = [side for i in model.layers.by_id for side in (model.layers.cache(i).k, model.layers.cache(i).v)]
        return [*model.outs, *(x for side in caches for x in (side.buffer, side.window))]

    quick = outs_and_caches()
    quick_interpreter.remove()
    try:
        own = outs_and_caches()
    finally:
        quick_interpreter.install()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(quick, own, strict=True))


# heads, K and V width, groups, other options
STORED = [
    (2, 128, 128, (None, None), {"float32": True}),
    (1, 80, 64, (20, 32), {"mean": True}),
    (2, 96, 112, (32, 28), {"fold": True}),
    (1, 192, 256, (64, 32), {"clip": 0.5}),
    (3, 64, 128, (None, 32), {"clip": 1.0}),
    (2, 128, 128, (None, None), {"float32": True, "shaping": "kv"}),
    (2, 80, 112, (20, None), {"mean": True, "shaping": "kv"}),
    (1, 96, 64, (32, 16), {"fold": True, "shaping": "k"}),
    (1, 64, 256, (None, None), {"shaping": "v"}),
]


@runs_kernels
@pytest.mark.parametrize("heads, dim, v_dim, groups, options", STORED)
@pytest.mark.parametrize("num_tokens, dtype", [(3, torch.bfloat16), (19, torch.float32)])
def test_store_gives_the_reference_bytes(heads, dim, v_dim, groups, options, num_tokens, dtype):
    codec = codec_of(heads, dim, v_dim, groups, **options)
    g = torch.Generator().manual_seed(2)
    # Tokens as slices of a fused projection: strided.
    fused = torch.randn(num_tokens, heads, dim + v_dim, generator=g) * 3 + 1
    k, v = fused[..., :dim].contiguous(), fused[..., dim:].contiguous()
    k[0], v[0] = 0.0, 7.0  # constant
    k[1] = float("inf")
    v[1, :, 3] = float("nan")
    v[2, :, :5] = float("-inf")
    k[2] *= 1e4  # steps beyond float16
    k, v = k.to(dtype), v.to(dtype)
    loc = torch.randperm(60, generator=g)[:num_tokens]
    rows = torch.randperm(41, generator=g)[:num_tokens]  # 40 is the row of nobody
    expected, got = empty_cache(codec, 60, 40), moved(empty_cache(codec, 60, 40))
    new = reference.store_kv(k, v, loc, rows, expected, codec)
    strided = torch.cat((k, v), dim=-1).flatten(1)
    k, v = strided.unflatten(1, (heads, -1))[..., :dim], v
    out = store_kv(moved(k), moved(v), moved(loc), moved(rows), TritonLayer(got, moved(codec)))
    for name, a, b in sides(got, expected):
        assert torch.equal(a.buffer.cpu(), b.buffer), name
        assert torch.equal(a.window[:40].cpu().nan_to_num(1e4), b.window[:40].nan_to_num(1e4)), name
        assert a.window[40].isnan().all(), "the row of nobody was written"
    for a, b in zip(out, new, strict=True):
        assert torch.equal(a.cpu().nan_to_num(1e4), b.nan_to_num(1e4))


@runs_kernels
@pytest.mark.parametrize("shaping, n", [("", 17), ("kv", 9)])
def test_store_is_the_same_one_by_one_and_leaves_the_rest_alone(shaping, n):
    codec = codec_of(2, 64, 64, shaping=shaping)
    g = torch.Generator().manual_seed(3)
    k, v = torch.randn(n, 2, 64, generator=g), torch.randn(n, 2, 64, generator=g)
    loc, rows = torch.randperm(40, generator=g)[:n], torch.randperm(20, generator=g)[:n]
    loc[4], rows[5] = -1, -1  # not to be written
    whole, single = (TritonLayer(moved(empty_cache(codec, 40, 20)), moved(codec)) for _ in range(2))
    store_kv(moved(k), moved(v), moved(loc), moved(rows), whole)
    later = torch.tensor([i for i in range(1, n, 2) if 0 <= rows[i] < 20])
    for i in range(n):
        part = (moved(x[i : i + 1]) for x in (k, v, loc, rows))
        store_step(*part, single, codes_later=i in later)
    if shaping:
        StepCodes([single]).write(moved(loc[later]), moved(rows[later]))
    for name, a, b in sides(whole.cache, single.cache):
        assert torch.equal(a.buffer, b.buffer), name
        assert torch.equal(a.window.view(torch.uint8), b.window.view(torch.uint8)), name
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[loc[loc >= 0]] = False
    assert all((side.buffer.cpu()[untouched] == 0xAB).all() for _, side in sides(whole.cache))


@runs_kernels
def test_codes_of_a_step_are_those_of_its_layers(monkeypatch):
    """Layers of three kinds in a launch each; a token in no slot and one in no window row keep what they have."""
    monkeypatch.setattr(triton_shaping, "MANY_FROM", 10)  # two layers of five tokens
    codecs = [
        codec_of(2, 80, 112, (20, None), mean=True, shaping="kv"),
        codec_of(2, 80, 112, (20, None), mean=True, shaping="kv", seed=1),
        codec_of(1, 64, 256, shaping="v"),
        codec_of(1, 96, 64, (32, 16), fold=True, shaping="k"),
    ]
    for side in (side for codec in codecs[2:] for side in (codec.k, codec.v) if side.shaping is not None):
        side.shaping = side.shaping.half().float()  # kept in 16 bits, as what an artifact has
    g = torch.Generator().manual_seed(16)
    loc, rows = torch.tensor([7, -1, 0, 4, 9]), torch.tensor([2, 3, 7, 0, -1])  # 7 is the row of nobody
    shaped = [0, 3]
    layers, wanted = [], []
    for codec in codecs:
        k, v = (torch.randn(5, codec.num_kv_heads, side.fmt.head_dim, generator=g) * 3 for side in (codec.k, codec.v))
        expected, layer = empty_cache(codec, 10, 7), TritonLayer(moved(empty_cache(codec, 10, 7)), moved(codec))
        assert layer.tensors.shaped
        reference.store_kv(k[shaped], v[shaped], loc[shaped], rows[shaped], expected, codec)
        store_step(*(moved(x) for x in (k, v, loc, rows)), layer, codes_later=True)
        layers.append(layer)
        wanted.append((expected, layer.cache.k.buffer.clone()))
    step = StepCodes(layers)
    assert len(step.kinds) == 3
    step.write(moved(loc), moved(rows))
    for layer, (expected, before) in zip(layers, wanted, strict=True):
        for name, a, b in sides(layer.cache, expected):
            assert torch.equal(a.buffer[loc[shaped]].cpu(), b.buffer[loc[shaped]]), name
        others = [i for i in range(10) if i not in loc[shaped]]
        assert torch.equal(layer.cache.k.buffer[others], before[others])
        assert (layer.tensors.k.shaping is None) or not torch.equal(layer.cache.k.buffer, before)


@runs_kernels
def test_errors_are_passed_on_alike_in_large_tiles_and_in_extreme_rows(monkeypatch):
    """Infinities, NaN and numbers far beyond float16 in a row, beside a zero in the matrix."""
    monkeypatch.setattr(triton_shaping, "MANY_FROM", 1)
    codec = codec_of(1, 64, 64, fold=True, shaping="kv", clip=1.0)
    codec.v.shaping[:, 20, 40] = 0.0
    g = torch.Generator().manual_seed(15)
    v = torch.randn(70, 1, 64, generator=g)
    v[3, :, 10], v[3, :, 11] = float("inf"), float("-inf")
    v[4] *= 1e38
    v[5, :, 20] = 3e38
    v[6, :, 7] = float("nan")
    loc, rows = torch.randperm(80, generator=g)[:70], torch.full((70,), 3)
    loc[9] = -1
    expected, got = empty_cache(codec, 80, 3), moved(empty_cache(codec, 80, 3))
    kept = loc >= 0
    reference.store_kv(v[kept], v[kept], loc[kept], rows[kept], expected, codec)
    store_kv(moved(v), moved(v), moved(loc), moved(rows), TritonLayer(got, moved(codec)))
    assert all(torch.equal(a.buffer.cpu(), b.buffer) for _, a, b in sides(got, expected))


@runs_kernels
@pytest.mark.parametrize("clip", [1e-3, 0.25, 0.5, 0.9609375, 1.0])
def test_clip_is_the_exact_order_statistic(clip):
    """Ties, zeros and neighbouring bfloat16 numbers; values folded, so they reach the quantiser as they are."""
    codec = codec_of(1, 64, 64, fold=True, clip=clip)
    g = torch.Generator().manual_seed(4)
    v = torch.randint(-3, 4, (12, 1, 64), generator=g).float()
    v[6:] = (1.0 + torch.randint(0, 3, (6, 1, 64), generator=g) / 128) * v[6:].sign()
    expected, got = empty_cache(codec, 12, 1), moved(empty_cache(codec, 12, 1))
    loc, rows = torch.arange(12), torch.full((12,), 1)
    reference.store_kv(v, v, loc, rows, expected, codec)
    store_kv(moved(v), moved(v), moved(loc), moved(rows), TritonLayer(got, moved(codec)))
    assert all(torch.equal(a.buffer.cpu(), b.buffer) for _, a, b in sides(got, expected))


@runs_kernels
@pytest.mark.parametrize("sink, recent", [(0, 0), (0, 7), (5, 0), (3, 9), (8, 24)])
def test_the_rule_of_the_windows_is_that_of_the_format(sink, recent):
    """Entries, positions and rows by `oscar.format.windows`, on tables with pages missing and rows of other positions."""
    lens = torch.tensor([0, 1, 2, 5, 9, 12, 13, 31, 32])
    g = torch.Generator().manual_seed(17)
    positions, counts = window_entries(lens, sink, recent)
    out = [torch.zeros(len(lens), 32, dtype=torch.int32, device=DEVICE) for _ in range(4)]
    windows_kernel[(len(lens),)](moved(lens), *out, SINK=sink, RECENT=recent)
    got_position, got_counts, got_entry, got_inside = (x.cpu() for x in out)
    for b, n in enumerate(lens.tolist()):
        listed = counts[b]
        assert torch.equal(got_position[b, : sink + recent][listed].long(), positions[b][listed])
        assert torch.equal(got_counts[b, : sink + recent].bool(), listed)
        inside = torch.stack(in_windows(torch.arange(n), torch.tensor(n), sink, recent)).any(0)
        assert torch.equal(got_inside[b, :n].bool(), inside)
        assert torch.equal(positions[b][got_entry[b, :n][inside].long()], torch.arange(n)[inside])

    slots = torch.stack([torch.randperm(40, generator=g)[:32] for _ in lens])
    table = WindowTable.full(len(lens), (sink, recent), 4, ring_tokens=recent + (2 if recent > 8 else 0))
    for b, n in enumerate(lens.tolist()):
        position = torch.arange(n)
        table.record(table.rows(torch.tensor(b), position), position)
    table.position[:-1][torch.rand(table.no_row, generator=g) < 0.3] = 5
    table.first_row[torch.rand(table.first_row.shape, generator=g) < 0.2] = -1
    expected = plan_read(slots, torch.arange(len(lens)), lens.tolist(), table)
    buffers = triton_plan.PlanBuffers(len(lens), 9, sink, recent, DEVICE)
    plan = triton_plan.plan_tokens(buffers, moved(slots), torch.arange(len(lens), device=DEVICE), moved(lens), moved(table))
    rows = plan.tensors.window_rows.cpu()[:, : sink + recent].long()
    assert torch.equal(torch.where(rows < 0, table.no_row, rows), expected.window_rows)
    if sink + recent:
        assert 0 < int((rows >= 0).sum()) < int(counts.sum())


@runs_kernels
@pytest.mark.parametrize("budget", [1, 4, 200])
def test_plan_reads_each_token_once(budget):
    batch = batch_of(LENS, codec_of(1, 64, 64), 1)
    expected, plan = batch.plan(LENS), plan_of(batch, max(budget, len(LENS))).tensors
    rows = plan.window_rows.cpu()
    assert torch.equal(rows >= 0, expected.window_mask)
    assert torch.equal(rows[rows >= 0].long(), expected.window_rows[expected.window_mask])
    indptr, work = plan.work_indptr.tolist(), plan.work.tolist()
    assert indptr[0] == 0 and all(item[0] == -1 for item in work[indptr[-1] :])
    assert work[0][:3] == [0, 0, 0] and indptr[1] == 1  # a row without tokens: one empty item, to write its zeros
    for b, n in enumerate(LENS):
        positions, counts = window_entries(torch.tensor([n]), SINK, RECENT)
        seen = []
        for request, begin, end, is_window in work[indptr[b] : indptr[b + 1]]:
            assert request == b
            seen += positions[0, begin:end][counts[0, begin:end]].tolist() if is_window else range(begin, end)
        assert sorted(seen) == list(range(n))


# KV heads, query heads a KV head, K and V width, groups, other options, cap
ATTENDED = [
    (2, 4, 128, 128, (None, None), {}, 0.0),
    (1, 7, 64, 80, (32, 20), {"mean": True}, 5.0),
    (2, 3, 96, 112, (32, 28), {"fold": True}, 0.0),
    (1, 5, 80, 64, (None, None), {}, 0.0),
    (1, 6, 192, 128, (64, 32), {"fold": True}, 5.0),
    (1, 1, 256, 256, (128, None), {}, 0.0),
    (1, 12, 112, 96, (None, 32), {}, 0.0),
    (1, 72, 64, 64, (None, None), {"fold": True}, 0.0),
]


@runs_kernels
@pytest.mark.parametrize("heads, kv_group_num, dim, v_dim, groups, options, cap", ATTENDED)
def test_decode(heads, kv_group_num, dim, v_dim, groups, options, cap):
    lens = LENS if kv_group_num < 12 else [0, 1, 97]
    batch = batch_of(lens, codec_of(heads, dim, v_dim, groups, **options), heads * kv_group_num)
    q = torch.randn(len(lens), heads * kv_group_num, dim, generator=torch.Generator().manual_seed(5))
    out = triton_decode.decode_attention(moved(q), layer_of(batch), plan_of(batch), dim**-0.5, cap).cpu()
    assert torch.equal(out[0], torch.zeros_like(out[0]))  # an empty sequence
    assert (out - decoded(batch, q, dim**-0.5, cap))[1:].abs().max() < DECODE_ERROR


@runs_kernels
@pytest.mark.parametrize("kv_group_num", [2, 8, 16, 24, 32])
def test_decode_group_sizes(kv_group_num):
    batch = batch_of([41], codec_of(1, 64, 64, fold=True), kv_group_num)
    q = torch.randn(1, kv_group_num, 64, generator=torch.Generator().manual_seed(6))
    out = triton_decode.decode_attention(moved(q), layer_of(batch), plan_of(batch), 0.125)
    assert (out.cpu() - decoded(batch, q, 0.125)).abs().max() < DECODE_ERROR


@runs_kernels
def test_decode_merges_in_either_way(monkeypatch):
    """In the same launch by the programs that finish last, over groups of groups, or in a launch of its own; a second launch
    finds the counters at zero."""
    batch = batch_of([0, 300, 21], codec_of(2, 64, 64, fold=True), 6)
    layer = layer_of(batch)
    monkeypatch.setattr(triton_decode, "JOIN", 2)
    monkeypatch.setattr(triton_plan, "MIN_TILES", 1)
    plan = plan_of(batch, 8)
    indptr = plan.tensors.work_indptr
    assert indptr[2] - indptr[1] > 4  # more items than a group of groups takes at once
    scratch = triton_decode.DecodeBuffers.make(3, plan.num_items, 6, layer.tensors)
    q = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(0))
    expected = decoded(batch, q, 0.125)
    for join in (True, True, False):
        out = triton_decode.decode_attention(moved(q), layer, plan, 0.125, buffers=scratch, launch=Launch(join=join))
        assert (out.cpu() - expected).abs().max() < DECODE_ERROR
        assert not scratch.partial.done.any()


@runs_kernels
def test_a_layer_kept_in_16_bits():
    """Store, decode and extend of a native layer: rows are its bfloat16 numbers, read exactly."""
    codec, g = LayerCodec.native(2, 64, 64), torch.Generator().manual_seed(14)
    batch = batch_of([0, 130, 21], codec, 6, lose_rows=False)
    k, v = torch.randn(5, 2, 64, generator=g), torch.randn(5, 2, 64, generator=g)
    loc, rows = torch.tensor([3, -1, 1, 4, 2]), torch.tensor([0, 1, -1, 2, 3])
    layer = layer_of(batch)
    store_kv(moved(k), moved(v), moved(loc), moved(rows), layer)
    stored = layer.cache.k.buffer.cpu().view(torch.bfloat16)
    assert torch.equal(stored[loc[loc >= 0]], k.bfloat16()[loc >= 0]) and not (stored == k.bfloat16()[1]).all(-1).any()
    q = torch.randn(3, 6, 64, generator=g)
    out = triton_decode.decode_attention(moved(q), layer_of(batch), plan_of(batch), 0.125)
    assert (out.cpu() - decoded(batch, q, 0.125)).abs().max() < 5e-4  # float16 queries
    expected, out = extended(batch, new_tokens(codec, 9, 6, seed=18), [2, 6, 1], 0.125)
    assert (out - expected).abs().max() < EXTEND_ERROR


@runs_kernels
@pytest.mark.parametrize("num_tokens", [2, 9])
@pytest.mark.parametrize("kv_group_num", [3, 24])
def test_store_prepares_the_queries_of_a_decode_step(num_tokens, kv_group_num):
    """One launch for keys, values and queries gives what three would."""
    codec = codec_of(2, 96, 64, (32, None))
    g = torch.Generator().manual_seed(13)
    k, v = torch.randn(num_tokens, 2, 96, generator=g), torch.randn(num_tokens, 2, 64, generator=g)
    q, loc = torch.randn(num_tokens, 2 * kv_group_num, 96, generator=g), torch.arange(num_tokens)
    new = tuple(map(moved, (k, v, loc, torch.full((num_tokens,), 3))))
    alone, together = (TritonLayer(moved(empty_cache(codec, num_tokens, 3)), moved(codec)) for _ in range(2))
    queries = Queries.empty(num_tokens, 2 * kv_group_num, alone.tensors)
    store_kv(*new, alone)
    store_step(*new, together, q=moved(q), queries=queries)
    assert all(torch.equal(a.buffer, b.buffer) for _, a, b in sides(alone.cache, together.cache))
    for a, b in zip(prepare_queries(moved(q), alone.tensors), queries, strict=True):
        assert torch.equal(a, b)


@runs_kernels
def test_without_windows():
    """Nothing is kept in 16 bits: everything is read from 2-bit rows."""
    batch = batch_of([70], codec_of(1, 64, 64), 2)
    batch.windows = WindowTable.none()
    q = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(8))
    layers = Layers({0: (moved(batch.cache), moved(batch.codec))}, 2, "triton")
    decode = layers.batch_decode()
    decode.plan(moved(batch.req_to_token), torch.tensor([0], device=DEVICE), [70], WindowTable.none(DEVICE))
    out = decode.run(0, moved(q), sm_scale=0.125)
    assert out.dtype == q.dtype and (out.cpu() - decoded(batch, q, 0.125)).abs().max() < DECODE_ERROR


@runs_kernels
def test_padding_and_fixed_buffers():
    """What a CUDA graph does: the same buffers for every step, and rows of padding, which are 0 tokens long."""
    batch = batch_of([300, 21, 64], codec_of(1, 64, 64, fold=True), 2)
    state = triton_attention.TritonLayers({0: (moved(batch.cache), moved(batch.codec))}, 2)
    before = [x.clone() for _, side in sides(state.by_id[0].cache) for x in (side.buffer, side.window)]
    windows, table = moved(batch.windows), moved(batch.req_to_token)
    state.reserve(8, windows)
    decode, addresses = triton_attention.TritonDecode(state, 4, windows), set()
    q = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(9))
    for order in ([0, 1, 2], [1], [2, 0]):  # sequences of three steps, each fewer than the buffers hold
        padding = 4 - len(order)
        request = torch.tensor(order + [0] * padding)
        lens = torch.tensor([batch.lens[r] for r in order] + [0] * padding)
        decode.plan(table, moved(request), moved(lens), windows, moved(torch.full((4,), -1)), moved(torch.full((4,), -1)))
        out = decode.run(0, moved(q), moved(torch.randn(4, 1, 64)), moved(torch.randn(4, 1, 64)), sm_scale=0.125)
        addresses.add(
            (decode._plan.tensors.work.data_ptr(), decode._scratch[next(iter(decode._scratch))].partial.out.data_ptr())
        )
        plan = plan_read(batch.req_to_token, request[: len(order)], lens[: len(order)].tolist(), batch.windows)
        expected = reference.decode_attention(q[: len(order)], batch.cache, batch.codec, plan, 0.125)
        assert (out.cpu()[: len(order)] - expected).abs().max() < DECODE_ERROR
        assert (out[len(order) :] == 0).all()
    assert len(addresses) == 1
    after = [x for _, side in sides(state.by_id[0].cache) for x in (side.buffer, side.window)]
    for x, y in zip(after, before, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    with pytest.raises(ValueError, match="expected the 4 rows that the wrapper was made for, got 3"):
        decode.plan(table, torch.arange(3, device=DEVICE), batch.lens, windows)


@runs_kernels
@pytest.mark.parametrize("scale", [5e4, 1e-6])
def test_large_and_small_keys_stay_finite(scale):
    """Folding a scale into the query must not saturate half precision."""
    batch = batch_of([60], codec_of(1, 64, 64), 2)
    k = torch.randn(60, 1, 64, generator=torch.Generator().manual_seed(10)) * scale
    slots = batch.req_to_token[0, :60].long()
    reference.store_kv(k, k / scale, slots, batch.rows(), batch.cache, batch.codec)
    q = torch.full((1, 2, 64), 10.0 / scale if scale > 1 else 10.0)
    layer, plan = layer_of(batch), plan_of(batch)
    out = triton_decode.decode_attention(moved(q), layer, plan, 0.125).cpu()
    assert torch.isfinite(out).all() and (out - decoded(batch, q, 0.125)).abs().max() < 1e-2
    assert torch.isfinite(triton_decode.decode_attention(moved(q * 6e3), layer, plan, 0.125)).all()


PREFIXES = [0, 1, 97, SINK + RECENT + 1, SINK + RECENT - 1]
NEW_LENS = [9, 0, 21, 1, 5]


@runs_kernels
@pytest.mark.parametrize("heads, kv_group_num, dim, v_dim, groups, options, cap", ATTENDED[:6])
def test_extend(heads, kv_group_num, dim, v_dim, groups, options, cap):
    codec = codec_of(heads, dim, v_dim, groups, **options)
    batch = batch_of(PREFIXES, codec, heads * kv_group_num)
    new = new_tokens(codec, sum(NEW_LENS), heads * kv_group_num, seed=11)
    expected, out = extended(batch, new, NEW_LENS, dim**-0.5, cap)
    assert (out - expected).abs().max() < EXTEND_ERROR
    assert (out - expected).abs().mean() < EXTEND_ERROR / 10


@runs_kernels
def test_draft_chain():
    """Three draft tokens after a cached prefix: each as the reference sees it."""
    codec = codec_of(1, 64, 64)
    expected, out = extended(batch_of([50, 16], codec, 3), new_tokens(codec, 6, 3, seed=12), [3, 3], 0.125)
    assert (out - expected).abs().max() < EXTEND_ERROR


class Served:
    """A small model, two prompts in chunks and decode steps on one implementation; everything that it writes and returns."""

    SINK, RECENT = 2, 3

    def __init__(self, impl, codecs, graph_bs=None):
        self.device = DEVICE if impl == "triton" else "cpu"
        self.windows = WindowTable.full(2, (self.SINK, self.RECENT), 2, self.device)
        caches = {i: LayerCache.zeros(codec, 60, self.windows.no_row, self.device) for i, codec in codecs.items()}
        self.layers = Layers({i: (caches[i], codecs[i].to(self.device)) for i in codecs}, 2, impl)
        self.req_to_token = torch.randperm(50, generator=torch.Generator().manual_seed(20)).reshape(2, 25).int().to(self.device)
        self.lens, self.outs, self.graph_bs, self.g = [0, 0], [], graph_bs, torch.Generator().manual_seed(21)

    def take(self, b, n):
        """Slots, window rows and positions of n new tokens of sequence b."""
        length = self.lens[b] + n
        position = torch.arange(self.lens[b], length, device=self.device)
        request, total = (torch.tensor(x, device=self.device) for x in (b, length))
        self.lens[b] = length
        return self.req_to_token[b, position].long(), self.windows.rows_for(request, position, total), position

    def new(self, n):
        return [torch.randn(n, heads, 32, generator=self.g).to(self.device) for heads in (2, 1, 1)]

    def extend(self, new_lens):
        prefix, qo_indptr = list(self.lens), [0, *itertools.accumulate(new_lens)]
        loc, rows, position = map(torch.cat, zip(*(self.take(b, n) for b, n in enumerate(new_lens)), strict=True))
        step = self.layers.batch_extend()
        step.plan(self.req_to_token, torch.arange(2, device=self.device), prefix, qo_indptr, self.windows, loc, rows)
        self.windows.record(rows, position)
        for i in self.layers.by_id:
            q, k, v = self.new(len(loc))
            q = torch.cat((q, q[:1]))  # a row of padding
            out = step.run(i, q, k, v, sm_scale=0.2)
            assert (out[-1] == 0).all()
            self.outs.append(out)

    def decode(self, skip=()):
        """One step of both sequences, with two rows of padding where buffers are fixed."""
        loc, rows, position = map(torch.cat, zip(*(self.take(b, 1) for b in range(2)), strict=True))
        self.windows.record(rows, position)
        request, lens, padding = torch.arange(2), torch.tensor(self.lens), 0
        if self.graph_bs is not None:
            padding = self.graph_bs - 2
            request, lens = (torch.nn.functional.pad(x, (0, padding)) for x in (request, lens))
            loc, rows = (torch.nn.functional.pad(x, (0, padding), value=-1) for x in (loc, rows))
        fixed = self.graph_bs is not None
        step = self.layers.graph_decode(self.graph_bs, self.windows) if fixed else self.layers.batch_decode()
        step.plan(self.req_to_token, request.to(self.device), lens.to(self.device), self.windows, loc, rows)
        for i in self.layers.by_id:
            q, k, v = (torch.cat((x, x.new_ones(padding, *x.shape[1:]))) for x in self.new(2))
            if i not in skip:
                out = step.run(i, q, k, v, sm_scale=0.2)
                assert (out[2:] == 0).all()
                self.outs.append(out[:2])


@runs_kernels
@pytest.mark.parametrize("graph_bs", [None, 3])
def test_plan_and_run_serve_a_model(graph_bs):
    """Two layers with error shaping and one in 16 bits: chunked prompts, then decode steps, as on the reference."""
    codecs = {
        1: codec_of(1, 32, 32, fold=True, shaping="kv"),
        4: LayerCodec.native(1, 32, 32),
        7: codec_of(1, 32, 32, shaping="v"),
    }
    models = [Served("reference", codecs), Served("triton", codecs, graph_bs)]
    for model in models:
        model.extend([6, 1])
        model.extend([4, 0])
        model.decode()
        model.decode()
    for a, b in zip(models[0].outs, models[1].outs, strict=True):
        assert (a - b.cpu()).abs().max() < EXTEND_ERROR
    for i in codecs:
        for name, a, b in sides(*(model.layers.cache(i) for model in models)):
            assert torch.equal(a.buffer, b.buffer.cpu()), (i, name)
            assert torch.equal(a.window[:-1], b.window[:-1].cpu()), (i, name)


@runs_kernels
def test_a_decode_step_that_leaves_a_shaped_layer_out_is_an_error():
    """Its codes would stay rounded alone; and without a window of recent tokens each layer writes its own."""
    codecs = {i: codec_of(1, 32, 32, fold=True, shaping="k") for i in (1, 4)}
    model = Served("triton", codecs)
    model.decode(skip=(4,))
    with pytest.raises(RuntimeError, match="expected every attention layer to run in a decode step, layers 4 did not"):
        model.decode()
    model.windows = moved(WindowTable.full(2, (Served.SINK, 0), 2))
    model.decode(skip=(4,))
    model.decode()


@runs_kernels
def test_the_check_at_start_finds_nothing_and_something(monkeypatch):
    monkeypatch.setattr(triton_check, "LENS", (3, 40))
    codec = moved(codec_of(1, 32, 32, fold=True, shaping="k"))
    assert triton_check.fault(codec, 2) is None
    monkeypatch.setattr(triton_check, "DECODE_ERROR", 0.0)
    assert "decode: largest error" in triton_check.fault(codec, 2)


@compiles
@pytest.mark.skipif(ON_CARD, reason="asks for them on the CPU")
def test_the_kernels_are_refused_where_they_cannot_run():
    codec = codec_of(1, 64, 64)
    layer = {0: (LayerCache.zeros(codec, 5, 5), codec)}
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 only"):
        Layers(layer, 1, impl="triton")
    with pytest.raises(ValueError, match="level of the C"):
        Layers(layer, 1, impl="triton", isa="avx2")


@runs_kernels
def test_what_is_not_supported_is_refused():
    with pytest.raises(ValueError, match="lossless"):
        Planes.of(LosslessFormat(64))
    with pytest.raises(ValueError, match="multiple of 16"):
        Planes.of(RowFormat(100))
    codec = codec_of(1, 64, 64)
    codec.k.window_dtype = torch.float32
    with pytest.raises(ValueError, match="bfloat16"):
        LayerTensors.check(codec)
    codec = codec_of(1, 64, 64)
    codec.k.transform = codec.k.read_transform = None
    with pytest.raises(ValueError, match="keys must have a transform"):
        LayerTensors.of(codec)


SHAPED = ("step_shaping_kernel, 2 tokens a program", "shaping_kernel, 64 tokens a program")


@compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_kernels_lower_without_spills(arch):
    """Machine code for cards that are not here. docs/gpu_compile_report.md has every geometry, this one the main one's."""
    from compile_kernels import MAIN_CASE, SHAPED_CASE, distinct_launches, lower

    rows = {launch.label: lower(launch, arch) for launch in distinct_launches(MAIN_CASE, arch)}
    assert len(rows) == 6  # a decode step takes two of them a layer: store and decode
    rows |= {launch.label: lower(launch, arch) for launch in distinct_launches(SHAPED_CASE, arch) if launch.label in SHAPED}
    assert len(rows) == 8  # the codes of a decode step and of a long prompt
    for name, row in rows.items():
        assert row.spill_bytes == 0, f"{name} spills {row.spill_bytes} bytes a thread"
        assert row.shared_bytes <= ARCHITECTURES[arch].shared_kib * 1024
    for name in ("decode_kernel", "extend_kernel"):
        assert rows[name].mma["mma.m16n8k16.f16"] > 0 and rows[name].mma["mma.m16n8k16.bf16"] > 0
    # Codes and metadata come by 4 bytes, what the row's alignment allows, never by single bytes.
    assert min(rows["decode_kernel"].global_loads) >= 4
    assert 0 < rows["decode_kernel"].loop_instructions < 1400


@compiles
def test_products_and_sums_of_error_shaping_are_rounded_apart():
    """A fused multiply-add would round once, and give other bytes; the interpreter has none, so this asks the machine code."""
    from compile_kernels import SHAPED_CASE, _tool, compiled, distinct_launches

    launches = [launch for launch in distinct_launches(SHAPED_CASE, "sm_90") if launch.label in SHAPED]
    assert len(launches) == 2
    for launch in launches:
        code = _tool("nvdisasm", "-c", compiled(launch, "sm_90").asm["cubin"])
        assert "FMUL" in code and "FADD" in code and "FFMA" not in code


@compiles
def test_committed_report_has_no_spills():
    from compile_kernels import MAIN_CASE, REPORTED, cases

    rows = json.loads((ROOT / "docs" / "gpu_compile_report.json").read_text())
    assert {row["arch"] for row in rows if row["case"] == MAIN_CASE} == set(REPORTED)
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120"):
        assert {row["case"] for row in rows if row["arch"] == arch} == set(cases())
    assert not [row for row in rows if row["spill_bytes"] and ARCHITECTURES[row["arch"]].remark != SPILLS]
    assert all(row["shared_bytes"] <= ARCHITECTURES[row["arch"]].shared_kib * 1024 for row in rows)


@compiles
def test_bytes_of_a_step_are_near_the_least_that_the_format_allows():
    """One layer at 100K tokens, counted from the tensors that the kernels are given."""
    sys.path.insert(0, str(ROOT / "scripts" / "gpu"))
    try:
        import roofline
    finally:
        sys.path.pop(0)
    card = roofline.CARDS[0]
    loop = roofline.loop_of(card.arch, roofline.Shape().dim)
    for shaped in (False, True):
        cell = roofline.predict(card, roofline.Shape(shaped=shaped), 1, 102400, loop)
        assert 0 < cell["over_format_minimum"] < 0.05


def test_architectures_and_launch_table():
    from oscar_kernel.triton.tuning import TABLE, architecture, assuming, decode_launch

    assert all(entry.source for entry in TABLE.values()) and decode_launch("sm_90", 128, 4, 1).source == "estimated"
    assert decode_launch("sm_90", 256, 2, 1) == TABLE[("any", 256, 0, "any")]
    assert {key[0] for key in TABLE} <= {"any", *ARCHITECTURES}
    assert "data-centre" in ARCHITECTURES["sm_100"].name and "data-centre" in ARCHITECTURES["sm_103"].name
    assert "consumer" in ARCHITECTURES["sm_120"].name
    assert architecture_refusal("sm_100", "B200") is None
    for key, card in (("sm_70", "Tesla V100"), ("sm_110", "Thor"), ("gfx1201", "RX 9070")):
        sentence = architecture_refusal(key, card)
        assert key in sentence and card in sentence and "--oscar-kernels reference" in sentence and "\n" not in sentence
    with assuming("gfx942"):
        assert architecture(torch.device("cpu")).columns == 16
    assert ON_CARD or architecture(torch.device("cpu")).columns == 8
