"""The Triton kernels against the PyTorch reference: in Triton's interpreter where there is no card, on the card where there is.

Triton decides when it is imported whether kernels are interpreted. Without a card this file therefore runs itself once more, in
a process of its own with TRITON_INTERPRET=1; nothing else of the test run sees that setting. TRITON_INTERPRET=1 pytest on this
file shows the cases one by one. What needs the compiler, lowering for cards that are not there, is in the outer process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import oscar_kernel
from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.linalg import inverses
from oscar.support import architecture_refusal
from oscar_kernel import LayerCache, LayerCodec, plan_read
from oscar_kernel.architectures import ARCHITECTURES, SPILLS
from oscar_kernel.decode_attention import decode_attention_ref as decode_attention
from oscar_kernel.extend_attention import extend_attention_ref as extend_attention
from oscar_kernel.store_kv import store_kv_ref as store_kv

pytest.importorskip("triton")
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

if INTERPRETED or ON_CARD:
    from oscar_kernel.flashinfer_api import BatchDecodeWithPagedInt2KVCache, BatchPrefillWithPagedInt2KVCache
    from oscar_kernel.triton import common as triton_common
    from oscar_kernel.triton import decode as triton_decode
    from oscar_kernel.triton import extend as triton_extend
    from oscar_kernel.triton import plan as triton_plan
    from oscar_kernel.triton import query as triton_query
    from oscar_kernel.triton import shaping as triton_shaping
    from oscar_kernel.triton import step_codes as triton_step_codes
    from oscar_kernel.triton import store as triton_store
    from oscar_kernel.triton.tuning import Launch


def moved(x):
    """A tensor, or the tensors of a dataclass, on DEVICE."""
    if isinstance(x, torch.Tensor):
        return x.to(DEVICE)
    values = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in vars(x).items()}
    return type(x)(**{name: value for name, value in values.items() if not name.startswith("_")})


def codec_of(
    heads, dim, v_dim, groups=(None, None), meta="float16", fold=False, mean=False, levels=False, clip=0.95, seed=0,
    exact=False, shaping="",
):  # fmt: skip
    """exact: transforms are float32 numbers, as an artifact's are. shaping: sides whose errors are passed on, "kv" for both."""
    g = torch.Generator().manual_seed(seed)

    def transform(d):
        t = torch.linalg.qr(torch.randn(heads, d, d, generator=g, dtype=torch.float64)).Q
        t = t * torch.linspace(0.8, 1.3, d, dtype=torch.float64)
        return t.float().double() if exact else t

    def triangle(d):
        return (torch.randn(heads, d, d, generator=g) * (1.5 / d**0.5)).triu(1)

    k_transform, v_transform = transform(dim), transform(v_dim)
    table = torch.tensor([-1.75, -0.4375, 0.51171875, 1.5]).repeat(heads, 1)
    return LayerCodec(
        k_format=RowFormat(dim, groups[0], meta),
        v_format=RowFormat(v_dim, groups[1], meta),
        k_transform=k_transform,
        q_transform=inverses(k_transform).transpose(1, 2).float(),
        v_transform=None if fold else v_transform,
        v_inverse=None if fold else inverses(v_transform).float(),
        k_clip=torch.full((heads,), clip),
        v_clip=torch.full((heads,), clip),
        k_mean=torch.randn(heads, dim, generator=g, dtype=torch.float64) if mean else None,
        v_mean=torch.randn(heads, v_dim, generator=g, dtype=torch.float64) if mean and not fold else None,
        k_levels=table if levels else None,
        v_levels=-table.flip(1) if levels else None,
        k_shaping=triangle(dim) if "k" in shaping else None,
        v_shaping=triangle(v_dim) if "v" in shaping else None,
    )


def native_codec(heads, dim):
    """A layer that stays in 16 bits."""
    fmt, eye, ones = LosslessFormat(dim, "bfloat16"), torch.eye(dim).expand(heads, dim, dim).contiguous(), torch.ones(heads)
    return LayerCodec(fmt, fmt, eye.double(), eye, None, None, ones, ones)


def empty_cache(codec, num_slots, num_rows, heads):
    k, v = codec.k_format, codec.v_format
    return LayerCache(
        torch.full((num_slots, heads, k.row_bytes), 0xAB, dtype=torch.uint8),
        torch.full((num_slots, heads, v.row_bytes), 0xAB, dtype=torch.uint8),
        torch.full((num_rows + 1, heads, k.head_dim), float("nan"), dtype=torch.bfloat16),
        torch.full((num_rows + 1, heads, v.head_dim), float("nan"), dtype=torch.bfloat16),
    )


class Batch:
    """Ragged sequences in shuffled pages, windows as a server writes them, some of their rows lost. Tensors on the CPU."""

    def __init__(self, lens, codec, heads, page=1, lose_rows=True, seed=1):
        g = torch.Generator().manual_seed(seed)
        self.lens, self.codec, self.page = lens, codec, page
        pages = [-(-n // page) for n in lens]
        order = torch.randperm(sum(pages) + 2, generator=g)[: sum(pages)] + 1
        self.indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
        self.indices = order.int()
        self.req_to_token = torch.zeros(len(lens) + 1, max([*lens, 1]) + 3, dtype=torch.int32)
        self.request = torch.arange(len(lens)) + 1  # row 0 is the reserved one
        num_rows = len(lens) * (SINK + RECENT)
        num_slots = (sum(pages) + 3) * page
        self.row_of_slot = torch.full((num_slots,), -1, dtype=torch.int32)
        self.slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64)
        slots, rows = [], []
        for b, n in enumerate(lens):
            mine = order[self.indptr[b] : self.indptr[b + 1]]
            of_pages = (mine.unsqueeze(1) * page + torch.arange(page)).flatten()[:n]
            self.req_to_token[b + 1, :n] = of_pages.int()
            for pos in range(n):
                row = num_rows
                if pos < SINK or pos >= n - RECENT:
                    row = b * (SINK + RECENT) + (pos if pos < SINK else SINK + pos % RECENT)
                    self.row_of_slot[of_pages[pos]] = row
                    self.slot_of_row[row] = of_pages[pos]
                rows.append(row)
            slots.append(of_pages)
        if lose_rows:
            self.slot_of_row[::3] = 0
        self.cache = empty_cache(codec, num_slots, num_rows, heads)
        slots = torch.cat(slots)
        k = torch.randn(len(slots), heads, codec.k_format.head_dim, generator=g) + 0.5
        v = torch.randn(len(slots), heads, codec.v_format.head_dim, generator=g) - 0.5
        store_kv(k, v, slots, torch.tensor(rows, dtype=torch.int64), self.cache, codec)
        # Rows that belong to nobody may hold anything: here NaN steps and centres, where masked tokens point.
        self.cache.k_buffer[0] = 0xFF
        self.cache.v_buffer[0] = 0xFF

    def reference_plan(self):
        return plan_read(self.req_to_token, self.request, self.lens, self.row_of_slot, self.slot_of_row, SINK, RECENT)

    def triton_plan(self, budget=3):
        """With a budget as on a small card, so that sequences are split."""
        buffers = triton_plan.PlanBuffers(len(self.lens), budget, SINK, RECENT, DEVICE)
        lens = torch.tensor(self.lens, device=DEVICE)
        maps = {"row_of_slot": moved(self.row_of_slot), "slot_of_row": moved(self.slot_of_row)}
        windows = {"sink_tokens": SINK, "recent_tokens": RECENT}
        if self.page == 1:
            source = {"req_pool_indices": moved(self.request)}
            return triton_plan.plan_decode(buffers, moved(self.req_to_token), lens, **source, **maps, **windows)
        source = {"kv_indptr": moved(self.indptr), "page_size": self.page}
        return triton_plan.plan_decode(buffers, moved(self.indices), lens, **source, **maps, **windows)


@pytest.mark.skipif(INTERPRETED or ON_CARD, reason="this is that process")
def test_under_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# heads, K and V width, groups, meta, other options
STORED = [
    (2, 128, 128, (None, None), "float16", {"exact": True}),
    (1, 80, 64, (20, 32), "bfloat16", {"mean": True}),
    (2, 96, 112, (32, 28), "float16", {"fold": True, "levels": True}),
    (1, 192, 256, (64, 32), "float16", {"clip": 0.5}),
    (3, 64, 128, (None, 32), "bfloat16", {"clip": 1.0}),
    (2, 128, 128, (None, None), "float16", {"exact": True, "shaping": "kv"}),
    (2, 80, 112, (20, None), "bfloat16", {"mean": True, "shaping": "kv"}),
    (1, 96, 64, (32, 16), "float16", {"fold": True, "shaping": "k"}),
    (1, 64, 256, (None, None), "bfloat16", {"levels": True, "shaping": "v"}),
]


@runs_kernels
@pytest.mark.parametrize("heads, dim, v_dim, groups, meta, options", STORED)
@pytest.mark.parametrize("num_tokens, dtype", [(3, torch.bfloat16), (19, torch.float32)])
def test_store_gives_the_reference_bytes(heads, dim, v_dim, groups, meta, options, num_tokens, dtype):
    codec = codec_of(heads, dim, v_dim, groups, meta, **options)
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
    expected, got = empty_cache(codec, 60, 40, heads), moved(empty_cache(codec, 60, 40, heads))
    k_ref, v_ref = store_kv(k, v, loc, rows, expected, codec)
    strided = torch.cat((k, v), dim=-1).flatten(1)
    k, v = strided.unflatten(1, (heads, -1))[..., :dim], v
    k_out, v_out = triton_store.store_kv(moved(k), moved(v), moved(loc), moved(rows), got, moved(codec))
    for name in ("k_buffer", "v_buffer"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name
    for name in ("k_window", "v_window"):
        assert torch.equal(getattr(got, name)[:40].cpu().nan_to_num(1e4), getattr(expected, name)[:40].nan_to_num(1e4)), name
        assert getattr(got, name)[40].isnan().all(), "the row of nobody was written"
    assert torch.equal(k_out.cpu().nan_to_num(1e4), k_ref.nan_to_num(1e4))
    assert torch.equal(v_out.cpu().nan_to_num(1e4), v_ref.nan_to_num(1e4))


@runs_kernels
@pytest.mark.parametrize("shaping", ["", "kv"])
def test_store_is_the_same_one_by_one_and_leaves_the_rest_alone(shaping):
    codec = codec_of(2, 64, 64, shaping=shaping)
    g = torch.Generator().manual_seed(3)
    k, v = torch.randn(17, 2, 64, generator=g), torch.randn(17, 2, 64, generator=g)
    loc, rows = torch.randperm(40, generator=g)[:17], torch.randperm(20, generator=g)[:17]
    loc[4], rows[5] = -1, -1  # not to be written
    whole, single = (moved(empty_cache(codec, 40, 20, 2)) for _ in range(2))
    on_device = moved(codec)
    triton_store.store_kv(moved(k), moved(v), moved(loc), moved(rows), whole, on_device)
    later = torch.tensor([i for i in range(1, 17, 2) if 0 <= rows[i] < 20])
    for i in range(17):
        part = (moved(x[i : i + 1]) for x in (k, v, loc, rows))
        assert triton_store.store_kv(*part, single, on_device, return_rows=False, codes_later=i in later) is None
    if shaping:
        step = triton_step_codes.StepCodes([(single, triton_common.prepare(on_device))])
        step.write(moved(loc[later]), moved(rows[later]))
    for name in ("k_buffer", "v_buffer", "k_window", "v_window"):
        a, b = getattr(whole, name), getattr(single, name)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[loc[loc >= 0]] = False
    assert (whole.k_buffer.cpu()[untouched] == 0xAB).all() and (whole.v_buffer.cpu()[untouched] == 0xAB).all()


@runs_kernels
def test_codes_of_a_step_are_those_of_its_layers(monkeypatch):
    """Layers of three kinds in a launch each; a token in no slot and one in no window row keep what they have."""
    monkeypatch.setattr(triton_shaping, "MANY_FROM", 10)  # two layers of five tokens
    codecs = [
        codec_of(2, 80, 112, (20, None), "bfloat16", mean=True, shaping="kv"),
        codec_of(2, 80, 112, (20, None), "bfloat16", mean=True, shaping="kv", seed=1),
        codec_of(1, 64, 256, levels=True, shaping="v"),
        codec_of(1, 96, 64, (32, 16), fold=True, shaping="k"),
    ]
    for codec in codecs[2:]:  # kept in 16 bits, as what an artifact has
        codec.k_shaping, codec.v_shaping = (None if x is None else x.half().float() for x in (codec.k_shaping, codec.v_shaping))
    g = torch.Generator().manual_seed(16)
    loc, rows = torch.tensor([7, -1, 0, 4, 9]), torch.tensor([2, 3, 7, 0, -1])  # 7 is the row of nobody
    shaped = [0, 3]
    layers, wanted = [], []
    for codec in codecs:
        heads = codec.k_clip.shape[0]
        k, v = (torch.randn(5, heads, fmt.head_dim, generator=g) * 3 for fmt in (codec.k_format, codec.v_format))
        expected, got, on_device = empty_cache(codec, 10, 7, heads), moved(empty_cache(codec, 10, 7, heads)), moved(codec)
        assert triton_common.prepare(on_device).shaped
        store_kv(k[shaped], v[shaped], loc[shaped], rows[shaped], expected, codec)
        args = (moved(x) for x in (k, v, loc, rows))
        triton_store.store_kv(*args, got, on_device, return_rows=False, codes_later=True)
        layers.append((got, triton_common.prepare(on_device)))
        wanted.append((expected, got.k_buffer.clone()))
    step = triton_step_codes.StepCodes(layers)
    assert len(step.kinds) == 3
    step.write(moved(loc), moved(rows))
    for (got, layer), (expected, before) in zip(layers, wanted, strict=True):
        for name in ("k_buffer", "v_buffer"):
            assert torch.equal(getattr(got, name)[loc[shaped]].cpu(), getattr(expected, name)[loc[shaped]]), name
        others = [i for i in range(10) if i not in loc[shaped]]
        assert torch.equal(got.k_buffer[others], before[others])
        assert (layer.k_shaping is None) or not torch.equal(got.k_buffer, before)


@runs_kernels
def test_errors_are_passed_on_alike_in_large_tiles_and_in_rows_that_overflow(monkeypatch):
    """A range beyond bfloat16 has infinite levels and errors; with a zero in the matrix they make a NaN, which ends the row."""
    monkeypatch.setattr(triton_shaping, "MANY_FROM", 1)
    codec = codec_of(1, 64, 64, meta="bfloat16", fold=True, shaping="kv", clip=1.0)
    codec.v_shaping[:, 20, 40] = 0.0
    g = torch.Generator().manual_seed(15)
    v = torch.randn(70, 1, 64, generator=g)
    v[3, :, 10], v[3, :, 11] = float("inf"), float("-inf")
    v[4] *= 1e38
    v[5, :, 20] = 3e38
    v[6, :, 7] = float("nan")
    loc, rows = torch.randperm(80, generator=g)[:70], torch.full((70,), 3)
    loc[9] = -1
    expected, got = empty_cache(codec, 80, 3, 1), moved(empty_cache(codec, 80, 3, 1))
    kept = loc >= 0
    store_kv(v[kept], v[kept], loc[kept], rows[kept], expected, codec)
    triton_store.store_kv(moved(v), moved(v), moved(loc), moved(rows), got, moved(codec))
    assert torch.equal(got.v_buffer.cpu(), expected.v_buffer) and torch.equal(got.k_buffer.cpu(), expected.k_buffer)


@runs_kernels
@pytest.mark.parametrize("clip", [1e-3, 0.25, 0.5, 0.9609375, 1.0])
def test_clip_is_the_exact_order_statistic(clip):
    """Ties, zeros and neighbouring bfloat16 numbers; values folded, so they reach the quantiser as they are."""
    codec = codec_of(1, 64, 64, fold=True, clip=clip)
    g = torch.Generator().manual_seed(4)
    v = torch.randint(-3, 4, (12, 1, 64), generator=g).float()
    v[6:] = (1.0 + torch.randint(0, 3, (6, 1, 64), generator=g) / 128) * v[6:].sign()
    expected, got = empty_cache(codec, 12, 1, 1), moved(empty_cache(codec, 12, 1, 1))
    loc, rows = torch.arange(12), torch.full((12,), 1)
    store_kv(v, v, loc, rows, expected, codec)
    triton_store.store_kv(moved(v), moved(v), moved(loc), moved(rows), got, moved(codec))
    assert torch.equal(got.v_buffer.cpu(), expected.v_buffer) and torch.equal(got.k_buffer.cpu(), expected.k_buffer)


@runs_kernels
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("budget", [1, 4, 200])
def test_plan_reads_each_token_once(page, budget):
    codec = codec_of(1, 64, 64)
    batch = Batch(LENS, codec, 1, page)
    reference, plan = batch.reference_plan(), batch.triton_plan(max(budget, len(LENS)))
    rows = plan.window_rows.cpu()
    assert torch.equal(rows >= 0, reference.window_mask)
    assert torch.equal(rows[rows >= 0].long(), reference.window_rows[reference.window_mask])
    indptr, work = plan.work_indptr.tolist(), plan.work.tolist()
    assert indptr[0] == 0 and all(item[0] == -1 for item in work[indptr[-1] :])
    assert work[0][:3] == [0, 0, 0] and indptr[1] == 1  # a row without tokens: one empty item, to write its zeros
    for b, n in enumerate(LENS):
        seen = []
        for request, begin, end, is_window in work[indptr[b] : indptr[b + 1]]:
            assert request == b
            if not is_window:
                seen += range(begin, end)
                continue
            for i in range(begin, end):
                position = i if i < SINK else n - RECENT + i - SINK
                if position < n if i < SINK else position >= SINK:
                    seen.append(position)
        assert sorted(seen) == list(range(n))


# KV heads, ratio, K and V width, groups, meta, other options, cap
ATTENDED = [
    (2, 4, 128, 128, (None, None), "float16", {}, 0.0),
    (1, 7, 64, 80, (32, 20), "bfloat16", {"mean": True}, 5.0),
    (2, 3, 96, 112, (32, 28), "float16", {"fold": True}, 0.0),
    (1, 5, 80, 64, (None, None), "float16", {"levels": True}, 0.0),
    (1, 6, 192, 128, (64, 32), "float16", {"levels": True, "fold": True}, 5.0),
    (1, 1, 256, 256, (128, None), "bfloat16", {}, 0.0),
    (1, 12, 112, 96, (None, 32), "float16", {}, 0.0),
    (1, 72, 64, 64, (None, None), "float16", {"fold": True}, 0.0),
]


@runs_kernels
@pytest.mark.parametrize("heads, ratio, dim, v_dim, groups, meta, options, cap", ATTENDED)
def test_decode(heads, ratio, dim, v_dim, groups, meta, options, cap):
    codec = codec_of(heads, dim, v_dim, groups, meta, **options)
    lens = LENS if ratio < 12 else [0, 1, 97]
    batch = Batch(lens, codec, heads)
    q = torch.randn(len(lens), heads * ratio, dim, generator=torch.Generator().manual_seed(5))
    expected = decode_attention(q, batch.cache, codec, batch.reference_plan(), dim**-0.5, cap)
    out = triton_decode.decode_attention(moved(q), moved(batch.cache), moved(codec), batch.triton_plan(), dim**-0.5, cap).cpu()
    assert torch.equal(out[0], torch.zeros_like(out[0]))  # an empty sequence
    assert (out - expected)[1:].abs().max() < DECODE_ERROR


@runs_kernels
@pytest.mark.parametrize("ratio", [2, 8, 16, 24, 32])
def test_decode_ratios(ratio):
    codec = codec_of(1, 64, 64, fold=True)
    batch = Batch([41], codec, 1)
    q = torch.randn(1, ratio, 64, generator=torch.Generator().manual_seed(6))
    expected = decode_attention(q, batch.cache, codec, batch.reference_plan(), 0.125)
    for plan in (batch.triton_plan(), triton_plan.from_read_plan(moved(batch.reference_plan()))):
        out = triton_decode.decode_attention(moved(q), moved(batch.cache), moved(codec), plan, 0.125)
        assert (out.cpu() - expected).abs().max() < DECODE_ERROR


@runs_kernels
def test_decode_merges_in_either_way(monkeypatch):
    """In the same launch by the programs that finish last, over groups of groups, or in a launch of its own; a second launch
    finds the counters at zero."""
    codec = codec_of(2, 64, 64, fold=True)
    batch = Batch([0, 300, 21], codec, 2)
    cache, on_device = moved(batch.cache), moved(codec)
    monkeypatch.setattr(triton_decode, "JOIN", 2)
    monkeypatch.setattr(triton_plan, "MIN_TILES", 1)
    plan = batch.triton_plan(8)
    assert plan.work_indptr[2] - plan.work_indptr[1] > 4  # more items than a group of groups takes at once
    scratch = triton_decode.DecodeBuffers.make(3, plan.work.shape[0], 6, on_device)
    for seed in range(2):
        q = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(seed))
        expected = decode_attention(q, batch.cache, codec, batch.reference_plan(), 0.125)
        for join in (True, False):
            out = triton_decode.decode_attention(
                moved(q), cache, on_device, plan, 0.125, buffers=scratch, launch=Launch(join=join)
            )
            assert (out.cpu() - expected).abs().max() < DECODE_ERROR
            assert not scratch.count.any()


@runs_kernels
def test_a_layer_kept_in_16_bits():
    """Store, decode and extend of a native layer: rows are its bfloat16 numbers, read exactly."""
    codec, g = native_codec(2, 64), torch.Generator().manual_seed(14)
    batch = Batch([0, 130, 21], codec, 2, lose_rows=False)
    k, v = torch.randn(5, 2, 64, generator=g), torch.randn(5, 2, 64, generator=g)
    loc, rows = torch.tensor([3, -1, 1, 4, 2]), torch.tensor([0, 1, -1, 2, 3])
    cache = moved(batch.cache)
    triton_store.store_kv(moved(k), moved(v), moved(loc), moved(rows), cache, moved(codec))
    stored = cache.k_buffer.cpu().view(torch.bfloat16)
    assert torch.equal(stored[loc[loc >= 0]], k.bfloat16()[loc >= 0]) and not (stored == k.bfloat16()[1]).all(-1).any()
    cache, on_device = moved(batch.cache), moved(codec)
    q = torch.randn(3, 6, 64, generator=g)
    expected = decode_attention(q, batch.cache, codec, batch.reference_plan(), 0.125)
    out = triton_decode.decode_attention(moved(q), cache, on_device, batch.triton_plan(), 0.125)
    assert (out.cpu() - expected).abs().max() < 5e-4  # float16 queries
    q, k, v = torch.randn(9, 6, 64, generator=g), *(torch.randn(9, 2, 64, generator=g).bfloat16() for _ in range(2))
    expected = extend_attention(q, k, v, [0, 2, 8, 9], batch.cache, codec, batch.reference_plan(), 0.125)
    new = moved(q), moved(k), moved(v), [0, 2, 8, 9]
    out = triton_extend.extend_attention(*new, cache, on_device, batch.triton_plan(), 0.125)
    assert (out.cpu() - expected).abs().max() < EXTEND_ERROR


@runs_kernels
@pytest.mark.parametrize("num_tokens", [2, 9])
@pytest.mark.parametrize("ratio, levels", [(3, False), (24, True)])
def test_store_prepares_the_queries_of_a_decode_step(num_tokens, ratio, levels):
    """One launch for keys, values and queries gives what three would."""
    codec = moved(codec_of(2, 96, 64, (32, None), levels=levels))
    g = torch.Generator().manual_seed(13)
    k, v = torch.randn(num_tokens, 2, 96, generator=g), torch.randn(num_tokens, 2, 64, generator=g)
    q, loc = torch.randn(num_tokens, 2 * ratio, 96, generator=g), torch.arange(num_tokens)
    rows = torch.full((num_tokens,), 3)
    caches = [moved(empty_cache(codec, num_tokens, 3, 2)) for _ in range(2)]
    layer = triton_common.prepare(codec)
    queries = triton_query.query_buffers(num_tokens, 2 * ratio, layer)
    triton_store.store_kv(moved(k), moved(v), moved(loc), moved(rows), caches[0], codec)
    triton_store.store_kv(
        moved(k), moved(v), moved(loc), moved(rows), caches[1], codec, return_rows=False, q=moved(q), queries=queries
    )
    assert torch.equal(caches[0].k_buffer, caches[1].k_buffer) and torch.equal(caches[0].v_buffer, caches[1].v_buffer)
    for a, b in zip(triton_query.prepare_queries(moved(q), layer), queries, strict=True):
        assert torch.equal(a, b)


@runs_kernels
@pytest.mark.parametrize("page", [16, 64])
def test_flashinfer_shaped_decode(page):
    codec = codec_of(2, 64, 64)
    batch = Batch([1, 33, 200], codec, 2, page)
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(7))
    expected = decode_attention(q, batch.cache, codec, batch.reference_plan(), 0.125)
    maps = {"row_of_slot": moved(batch.row_of_slot), "slot_of_row": moved(batch.slot_of_row)}
    attention = BatchDecodeWithPagedInt2KVCache(DEVICE, sink_tokens=SINK, recent_tokens=RECENT, **maps)
    last = torch.tensor([(n - 1) % page + 1 for n in batch.lens], dtype=torch.int32, device=DEVICE)
    attention.plan(moved(batch.indptr), moved(batch.indices), last, 4, 2, 64, page)
    out = attention.run(moved(q), moved(batch.cache), moved(codec))
    assert out.dtype == q.dtype and (out.cpu() - expected).abs().max() < DECODE_ERROR


@runs_kernels
def test_without_windows():
    """An engine that keeps no 16-bit rows: everything from 2 bits."""
    codec = codec_of(1, 64, 64)
    batch = Batch([70], codec, 1, page=16)
    batch.row_of_slot.fill_(-1)
    q = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(8))
    expected = decode_attention(q, batch.cache, codec, batch.reference_plan(), 0.125)
    attention = BatchDecodeWithPagedInt2KVCache(DEVICE)
    last = torch.tensor([(70 - 1) % 16 + 1], dtype=torch.int32, device=DEVICE)
    attention.plan(moved(batch.indptr), moved(batch.indices), last, 2, 1, 64, 16)
    assert (attention.run(moved(q), moved(batch.cache), moved(codec)).cpu() - expected).abs().max() < DECODE_ERROR


@runs_kernels
def test_padding_and_fixed_buffers():
    """What a CUDA graph does: the same buffers for every step, and rows of padding that carry request 0."""
    codec = codec_of(1, 64, 64, fold=True)
    batch = Batch([300, 21, 64], codec, 1)
    cache, on_device = moved(batch.cache), moved(codec)
    before = [x.clone() for x in vars(cache).values()]
    plan_buffers = triton_plan.PlanBuffers(4, 4, SINK, RECENT, DEVICE)
    scratch = triton_decode.DecodeBuffers.make(4, plan_buffers.num_items, 2, on_device)
    out = torch.full((4, 2, 64), 9.0, device=DEVICE)
    q = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(9))
    for order in ([1, 2, 3], [2], [3, 1]):  # requests of three steps, each fewer than the buffers hold or as many
        request = torch.tensor(order + [0] * (4 - len(order)))
        lens = torch.tensor([batch.lens[r - 1] for r in order] + [1] * (4 - len(order)))
        plan = triton_plan.plan_decode(
            plan_buffers, moved(batch.req_to_token), moved(lens), req_pool_indices=moved(request),
            row_of_slot=moved(batch.row_of_slot), slot_of_row=moved(batch.slot_of_row),
            sink_tokens=SINK, recent_tokens=RECENT, pad_request=0,
        )  # fmt: skip
        triton_decode.decode_attention(moved(q), cache, on_device, plan, 0.125, out=out, buffers=scratch)
        reference = plan_read(
            batch.req_to_token, request[: len(order)], lens[: len(order)].tolist(), batch.row_of_slot, batch.slot_of_row,
            SINK, RECENT,
        )  # fmt: skip
        expected = decode_attention(q[: len(order)], batch.cache, codec, reference, 0.125)
        assert (out.cpu()[: len(order)] - expected).abs().max() < DECODE_ERROR
        assert (out[len(order) :] == 0).all()
    for x, y in zip(vars(cache).values(), before, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@runs_kernels
@pytest.mark.parametrize("scale", [5e4, 1e-6])
def test_large_and_small_keys_stay_finite(scale):
    """Folding a scale into the query must not saturate half precision (FIELD_REPORTS H5)."""
    codec = codec_of(1, 64, 64, meta="bfloat16")
    batch = Batch([60], codec, 1)
    k = torch.randn(60, 1, 64, generator=torch.Generator().manual_seed(10)) * scale
    rows = batch.row_of_slot[batch.req_to_token[1, :60].long()].long()
    rows = torch.where(rows < 0, batch.slot_of_row.shape[0] - 1, rows)
    store_kv(k, k / scale, batch.req_to_token[1, :60].long(), rows, batch.cache, codec)
    q = torch.full((1, 2, 64), 10.0 / scale if scale > 1 else 10.0)
    expected = decode_attention(q, batch.cache, codec, batch.reference_plan(), 0.125)
    out = triton_decode.decode_attention(moved(q), moved(batch.cache), moved(codec), batch.triton_plan(), 0.125).cpu()
    assert torch.isfinite(out).all() and (out - expected).abs().max() < 1e-2
    huge = triton_decode.decode_attention(moved(q * 6e3), moved(batch.cache), moved(codec), batch.triton_plan(), 0.125)
    assert torch.isfinite(huge).all()


PREFIXES = [0, 1, 97, SINK + RECENT + 1, SINK + RECENT - 1]
NEW_LENS = [9, 0, 21, 1, 5]


@runs_kernels
@pytest.mark.parametrize("heads, ratio, dim, v_dim, groups, meta, options, cap", ATTENDED[:6])
def test_extend(heads, ratio, dim, v_dim, groups, meta, options, cap):
    codec = codec_of(heads, dim, v_dim, groups, meta, **options)
    batch = Batch(PREFIXES, codec, heads)
    g = torch.Generator().manual_seed(11)
    total = sum(NEW_LENS)
    q = torch.randn(total, heads * ratio, dim, generator=g)
    k_new = codec.transform_k(torch.randn(total, heads, dim, generator=g))
    v_new = codec.transform_v(torch.randn(total, heads, v_dim, generator=g))
    indptr = [0, *torch.tensor(NEW_LENS).cumsum(0).tolist()]
    expected = extend_attention(q, k_new, v_new, indptr, batch.cache, codec, batch.reference_plan(), dim**-0.5, cap)
    out = triton_extend.extend_attention(
        moved(q), moved(k_new), moved(v_new), indptr, moved(batch.cache), moved(codec), batch.triton_plan(), dim**-0.5, cap
    ).cpu()
    assert (out - expected).abs().max() < EXTEND_ERROR
    assert (out - expected).abs().mean() < EXTEND_ERROR / 10


@runs_kernels
def test_flashinfer_shaped_prefill_and_draft_chain():
    """Three draft tokens after a paged prefix: each as the reference sees it."""
    codec = codec_of(1, 64, 64)
    batch = Batch([50, 16], codec, 1, page=16)
    g = torch.Generator().manual_seed(12)
    q = torch.randn(6, 3, 64, generator=g)
    k_new = codec.transform_k(torch.randn(6, 1, 64, generator=g))
    v_new = codec.transform_v(torch.randn(6, 1, 64, generator=g))
    expected = extend_attention(q, k_new, v_new, [0, 3, 6], batch.cache, codec, batch.reference_plan(), 0.125)
    maps = {"row_of_slot": moved(batch.row_of_slot), "slot_of_row": moved(batch.slot_of_row)}
    attention = BatchPrefillWithPagedInt2KVCache(DEVICE, sink_tokens=SINK, recent_tokens=RECENT, **maps)
    last = torch.tensor([2, 16], dtype=torch.int32, device=DEVICE)
    qo_indptr = torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE)
    attention.plan(qo_indptr, moved(batch.indptr), moved(batch.indices), last, 3, 1, 64, 16, 3)
    out = attention.run(moved(q), moved(k_new), moved(v_new), moved(batch.cache), moved(codec))
    assert (out.cpu() - expected).abs().max() < EXTEND_ERROR


@runs_kernels
def test_the_ops_take_the_kernels_when_asked():
    """`impl="triton"`, with the reference's own plan."""
    codec, g = codec_of(2, 64, 64), torch.Generator().manual_seed(15)
    batch = Batch([33, 5], codec, 2)
    q = torch.randn(2, 4, 64, generator=g)
    k, v = torch.randn(2, 2, 64, generator=g), torch.randn(2, 2, 64, generator=g)
    loc, rows = batch.req_to_token[1, [7, 9]].long(), torch.full((2,), batch.slot_of_row.shape[0] - 1)
    results = {}
    for impl in ("triton", "reference"):
        cache, on_device, plan = moved(batch.cache), moved(codec), moved(batch.reference_plan())
        new = oscar_kernel.store_kv(moved(k), moved(v), moved(loc), moved(rows), cache, on_device, impl)
        args = cache, on_device, plan, 0.125, 0.0, impl
        results[impl] = (
            oscar_kernel.decode_attention(moved(q), *args),
            oscar_kernel.extend_attention(moved(q), *new, [0, 1, 2], *args),
            cache.k_buffer,
        )
    for a, b, error in zip(*results.values(), (DECODE_ERROR, EXTEND_ERROR, 0.5), strict=True):
        assert (a.float() - b.float()).abs().max() < error


@compiles
@pytest.mark.skipif(ON_CARD, reason="asks for them on the CPU")
def test_the_ops_refuse_the_kernels_where_they_cannot_run():
    codec = codec_of(1, 64, 64)
    batch = Batch([5], codec, 1)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 only"):
        oscar_kernel.decode_attention(torch.zeros(1, 1, 64), batch.cache, codec, batch.reference_plan(), 0.1, impl="triton")
    with pytest.raises(ValueError, match="level of the C"):
        oscar_kernel.decode_attention(
            torch.zeros(1, 1, 64), batch.cache, codec, batch.reference_plan(), 0.1, impl="triton", isa="avx2"
        )


@runs_kernels
def test_what_is_not_supported_is_refused():
    from oscar.format.codec import LosslessFormat
    from oscar_kernel.triton.common import Planes, prepare

    with pytest.raises(ValueError, match="lossless"):
        Planes.of(LosslessFormat(64))
    with pytest.raises(ValueError, match="multiple of 16"):
        Planes.of(RowFormat(100))
    codec = codec_of(1, 64, 64)
    codec.window_dtype = torch.float32
    with pytest.raises(ValueError, match="bfloat16"):
        prepare(codec)


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
    import triton
    from compile_kernels import SHAPED_CASE, GPUTarget, _tool, distinct_launches, source_of

    launches = [launch for launch in distinct_launches(SHAPED_CASE, "sm_90") if launch.label in SHAPED]
    assert len(launches) == 2
    for launch in launches:
        compiled = triton.compile(source_of(launch), target=GPUTarget("cuda", 90, 32), options=launch.options)
        code = _tool("nvdisasm", "-c", compiled.asm["cubin"])
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
    from oscar_kernel.triton.tuning import TABLE, architecture, assuming, choose

    assert all(entry.source for entry in TABLE.values()) and choose("sm_90", 128, 4, 1).source == "estimated"
    assert choose("sm_90", 256, 2, 1) == TABLE[("any", 256, 0, "any")]
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
