"""Store, decode and extend against a float64 oracle that looks at one token at a time."""

import copy
import itertools
import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oscar.format import codec as codec_module
from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.linalg import inverses
from oscar_kernel import LayerCache, LayerCodec, decode_attention, extend_attention, ops, plan_read, store_kv
from oscar_kernel.attend import attend, merge_states
from oscar_kernel.cpu import library as cpu

SINK, RECENT = 4, 16

IMPLS = ["reference", "portable", "avx2", "avx512", "amx"]
"""PyTorch, and the levels of the C++ library."""

EXTEND_IMPLS = [*IMPLS, "amx_emulated"]
"""The emulated level differs from avx512 where many query rows meet a tile of keys."""

TOLERANCE = {"reference": 1e-5, "portable": 1e-5, "avx2": 1e-5, "avx512": 5e-4, "amx": 5e-4, "amx_emulated": 5e-4}
"""Largest error of a query head's output against float64 on the same rows, relative to its norm. The integer kernels carry 16
bits of a query and 13 of a weight, AMX 16 of both; the others are float32 throughout."""


@pytest.fixture(params=IMPLS)
def backend(request):
    """Keyword arguments that make an op run one implementation."""
    return backend_of(request.param)


def backend_of(name):
    if name == "reference":
        return {"impl": "reference"}
    if name not in cpu.supported_isas():
        pytest.skip(f"level {name} is not built, or this CPU lacks it")
    return {"impl": "cpu", "isa": name}


def assert_heads_close(out, expected, backend, slack=1.0):
    """out, expected [num_qo_heads, v_head_dim]."""
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < slack * TOLERANCE[backend.get("isa", "reference")]


def codec_of(
    num_kv_heads,
    head_dim,
    v_head_dim,
    lossless=False,
    orthogonal=True,
    fold=False,
    mean=False,
    shaping=False,
    group_size=None,
    float32=False,
    clip=(0.96, 0.92),
    window_dtype=None,
    seed=0,
):
    g = torch.Generator().manual_seed(seed)
    window_dtype = window_dtype or (torch.float32 if lossless else torch.bfloat16)

    def transform(dim):
        t = torch.randn(num_kv_heads, dim, dim, generator=g, dtype=torch.float64)
        t = torch.linalg.qr(t).Q if orthogonal else torch.linalg.qr(t).Q * torch.linspace(0.5, 2, dim)
        return t.float().double() if float32 else t  # an artifact keeps float32

    def row_format(dim):
        if lossless:
            return LosslessFormat(dim, "bfloat16" if window_dtype == torch.bfloat16 else "float32")
        return RowFormat(dim, group_size)

    def triangle(dim):
        return (torch.randn(num_kv_heads, dim, dim, generator=g) * (1.5 / dim**0.5)).triu(1) if shaping else None

    k_transform, v_transform = transform(head_dim), transform(v_head_dim)
    return LayerCodec(
        k_format=row_format(head_dim),
        v_format=row_format(v_head_dim),
        k_transform=k_transform,
        q_transform=inverses(k_transform).transpose(1, 2).float(),
        v_transform=None if fold else v_transform,
        v_inverse=None if fold else inverses(v_transform).float(),
        k_clip=torch.full((num_kv_heads,), clip[0]),
        v_clip=torch.full((num_kv_heads,), clip[1]),
        k_mean=torch.randn(num_kv_heads, head_dim, generator=g, dtype=torch.float64) if mean else None,
        k_shaping=triangle(head_dim),
        v_shaping=triangle(v_head_dim),
        window_dtype=window_dtype,
    )


class Batch:
    """Ragged sequences in shuffled slots, with windows written as a server would."""

    def __init__(self, lens, num_kv_heads, group, head_dim, v_head_dim, codec, seed=1, lose_rows=False):
        g = torch.Generator().manual_seed(seed)
        self.lens, self.codec, self.group = lens, codec, group
        total = sum(lens)
        num_slots, num_rows = total + 5, len(lens) * (SINK + RECENT)
        order = torch.randperm(num_slots - 1, generator=g)[:total] + 1
        self.req_to_token = torch.zeros(len(lens), max([*lens, 1]) + 3, dtype=torch.int32)
        self.row_of_slot = torch.full((num_slots,), -1, dtype=torch.int32)
        self.slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64)
        self.k = torch.randn(total, num_kv_heads, head_dim, generator=g) + 1.5
        self.v = torch.randn(total, num_kv_heads, v_head_dim, generator=g) - 0.7
        self.start = [0]
        rows = torch.full((total,), num_rows)
        for b, n in enumerate(lens):
            slots = order[self.start[-1] : self.start[-1] + n]
            self.req_to_token[b, :n] = slots.int()
            for pos in range(n):
                if pos < SINK or pos >= n - RECENT:
                    row = b * (SINK + RECENT) + (pos if pos < SINK else SINK + pos % RECENT)
                    rows[self.start[-1] + pos] = row
                    self.row_of_slot[slots[pos]] = row
                    self.slot_of_row[row] = slots[pos]
            self.start.append(self.start[-1] + n)
        if lose_rows:  # rows taken by others: their slots must fall back to 2 bits
            self.slot_of_row[::3] = 0
        self.cache = LayerCache(
            torch.zeros(num_slots, num_kv_heads, codec.k_format.row_bytes, dtype=torch.uint8),
            torch.zeros(num_slots, num_kv_heads, codec.v_format.row_bytes, dtype=torch.uint8),
            torch.full((num_rows + 1, num_kv_heads, head_dim), float("nan"), dtype=codec.window_dtype),
            torch.full((num_rows + 1, num_kv_heads, v_head_dim), float("nan"), dtype=codec.window_dtype),
        )
        store_kv(self.k, self.v, order, rows, self.cache, codec)

    def plan(self, lens):
        index = torch.arange(len(lens))
        return plan_read(self.req_to_token, index, lens, self.row_of_slot, self.slot_of_row, SINK, RECENT)

    def stored(self, b, n):
        """[n, num_kv_heads, head_dim] float64 K and V of a sequence of n tokens as a reader must see them."""
        ks, vs = [], []
        for pos in range(n):
            slot = int(self.req_to_token[b, pos])
            row = int(self.row_of_slot[slot])
            in_window = pos < SINK or pos >= n - RECENT
            if in_window and row >= 0 and int(self.slot_of_row[row]) == slot:
                ks.append(self.cache.k_window[row].double())
                vs.append(self.cache.v_window[row].double())
            else:
                ks.append(self.codec.decode_k(self.cache.k_buffer[slot]).double())
                vs.append(self.codec.decode_v(self.cache.v_buffer[slot]).double())
        return torch.stack(ks), torch.stack(vs)

    def oracle(self, q, k, v, scale, cap):
        """One query token [num_qo_heads, head_dim] over k, v [n, num_kv_heads, ...], all stored space, float64."""
        codec = self.codec
        q = torch.einsum("hgd,hde->hge", q.double().unflatten(0, (k.shape[1], -1)), codec.q_transform.double())
        logits = torch.einsum("hgd,nhd->hgn", q, k) * scale
        logits = cap * torch.tanh(logits / cap) if cap else logits
        o = torch.einsum("hgn,nhd->hgd", logits.softmax(-1), v)
        if codec.v_inverse is not None:
            o = torch.einsum("hgd,hde->hge", o, codec.v_inverse.double())
        return o.flatten(0, 1)


LENS = [0, 1, SINK - 1, SINK, SINK + 1, SINK + RECENT - 1, SINK + RECENT, SINK + RECENT + 1, 97]
SHAPES = [(2, 2, 128, 128), (1, 7, 64, 64), (4, 1, 80, 80), (2, 3, 96, 128), (1, 4, 192, 128), (1, 2, 256, 256)]


@pytest.mark.parametrize("num_kv_heads, group, head_dim, v_head_dim", SHAPES)
@pytest.mark.parametrize("options", [{}, {"orthogonal": False, "mean": True}, {"fold": True}, {"lossless": True}])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_decode(num_kv_heads, group, head_dim, v_head_dim, options, cap, backend):
    codec = codec_of(num_kv_heads, head_dim, v_head_dim, **options)
    batch = Batch(LENS, num_kv_heads, group, head_dim, v_head_dim, codec, lose_rows=True)
    q = torch.randn(len(LENS), num_kv_heads * group, head_dim, generator=torch.Generator().manual_seed(3))
    out = decode_attention(q, batch.cache, codec, batch.plan(LENS), head_dim**-0.5, cap, **backend)
    assert out.shape == (len(LENS), num_kv_heads * group, v_head_dim)
    for b, n in enumerate(LENS):
        if n:
            expected = batch.oracle(q[b], *batch.stored(b, n), head_dim**-0.5, cap)
            assert_heads_close(out[b], expected, backend)


FORMATS = [
    (128, {"group_size": 32}),
    (128, {"group_size": 64}),
    (64, {"group_size": 32}),
    (192, {"group_size": 64}),
    (96, {"group_size": 32}),  # a group that straddles vectors
    (256, {"group_size": 128}),
    (128, {"group_size": 4}),  # more groups than the integer kernels take
    (112, {}),
    (64, {"clip": (1.0, 1.0)}),
]
SHAPED = [
    (128, {"shaping": True}),
    (80, {"shaping": True, "mean": True, "orthogonal": False}),
    (96, {"shaping": True, "group_size": 32}),
    (256, {"shaping": True}),
]


RATIOS = [1, 3, 5, 6, 7, 16]
CASES = [(*fmt, RATIOS[i % len(RATIOS)]) for i, fmt in enumerate(FORMATS)] + [(128, {}, ratio) for ratio in RATIOS]


@pytest.mark.parametrize("head_dim, options, group", CASES)
def test_decode_formats(head_dim, options, group, backend):
    codec = codec_of(2, head_dim, head_dim, **options)
    lens = [5, 64, 130, 300]
    batch = Batch(lens, 2, group, head_dim, head_dim, codec)
    q = torch.randn(len(lens), 2 * group, head_dim, generator=torch.Generator().manual_seed(8)).bfloat16()
    out = decode_attention(q, batch.cache, codec, batch.plan(lens), 2 * head_dim**-0.5, **backend)
    for b, n in enumerate(lens):
        expected = batch.oracle(q[b], *batch.stored(b, n), 2 * head_dim**-0.5, 0.0)
        assert_heads_close(out[b], expected, backend)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_decode_keeps_precision_beside_outlying_steps(scale, backend):
    """A few V rows with a hundred times the step of others must not cost the others' weights their bits."""
    codec, lens = codec_of(2, 128, 128, fold=True), [300]
    batch = Batch(lens, 2, 4, 128, 128, codec)
    meta = batch.cache.v_buffer[..., codec.v_format.code_bytes :].clone().view(torch.float16)
    meta[::50, :, 1] *= 100
    batch.cache.v_buffer[..., codec.v_format.code_bytes :] = meta.view(torch.uint8)
    q = scale * torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(12))
    out = decode_attention(q, batch.cache, codec, batch.plan(lens), 128**-0.5, **backend)
    assert_heads_close(out[0], batch.oracle(q[0], *batch.stored(0, 300), 128**-0.5, 0.0), backend)


@pytest.mark.parametrize("head_dim, options", [*FORMATS, *SHAPED, (80, {}), (128, {"lossless": True}), (128, {"mean": True})])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fold", [False, True])
def test_store_bytes(head_dim, options, dtype, fold, backend):
    """Every implementation writes the bytes of the reference, and nothing else."""
    codec = codec_of(3, head_dim, head_dim, **options, fold=fold, float32=fold)
    n, g = 37, torch.Generator().manual_seed(9)
    k = (torch.empty(n, 3, head_dim + 8).cauchy_(generator=g) * 3).to(dtype)[..., :head_dim]  # strided
    v = torch.randn(n, 3, head_dim, generator=g).to(dtype)
    v[0] = 0
    v[1] = 0.25
    v[2, :, 5] = float("inf")
    v[3, :, 6] = float("nan")
    v[4, :, 7] = float("-inf")
    v[5] = torch.randn(3, head_dim, generator=g).to(dtype) * 1e-6
    loc, rows = torch.randperm(50, generator=g)[:n], torch.randperm(40, generator=g)[:n]
    rows[::3] = 40

    def written(kwargs):
        cache = LayerCache(
            torch.full((50, 3, codec.k_format.row_bytes), 7, dtype=torch.uint8),
            torch.full((50, 3, codec.v_format.row_bytes), 7, dtype=torch.uint8),
            torch.full((41, 3, head_dim), 7.0, dtype=codec.window_dtype),
            torch.full((41, 3, head_dim), 7.0, dtype=codec.window_dtype),
        )
        return store_kv(k, v, loc, rows, cache, codec, **kwargs), cache

    (k_ref, v_ref), ref = written({"impl": "reference"})
    (k_new, v_new), cache = written(backend)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(k_new, k_ref, **same)
    torch.testing.assert_close(v_new, v_ref, **same)
    torch.testing.assert_close(cache.k_window[:40], ref.k_window[:40], **same)
    torch.testing.assert_close(cache.v_window[:40], ref.v_window[:40], **same)
    if not options.get("lossless"):
        assert torch.equal(cache.k_buffer, ref.k_buffer)
        assert torch.equal(cache.v_buffer, ref.v_buffer)


def test_library_has_the_format_of_the_codec():
    if cpu.library() is None:
        pytest.skip("the C++ library is not built")
    constants = cpu.codec_constants()
    bits = torch.tensor(1 / 3, dtype=torch.float32).view(torch.int32).item()
    names = ("FORMAT_VERSION", "BITS", "CODES_PER_BYTE", "META_BYTES")
    assert constants == {**{name: getattr(codec_module, name) for name in names}, "ONE_THIRD_BITS": bits}
    assert torch.tensor(codec_module._ONE_THIRD).view(torch.int32).item() == bits


def test_a_level_that_is_missing_is_refused():
    if cpu.library() is None:
        pytest.skip("the C++ library is not built")
    codec = codec_of(1, 64, 64)
    batch = Batch([3], 1, 1, 64, 64, codec)
    q = torch.zeros(1, 1, 64)
    with pytest.raises(ValueError, match="isa must be one of portable"):
        decode_attention(q, batch.cache, codec, batch.plan([3]), 1.0, isa="mmx")
    for isa in set(cpu.isa_names()) - set(cpu.supported_isas()):
        with pytest.raises(RuntimeError, match="lacks that level: (the|Linux|its) .*; it can run portable"):
            decode_attention(q, batch.cache, codec, batch.plan([3]), 1.0, isa=isa)
    with pytest.raises(ValueError, match="impl must be one of"):
        decode_attention(q, batch.cache, codec, batch.plan([3]), 1.0, impl="best")
    with pytest.raises(RuntimeError, match="float64"):
        decode_attention(q.double(), batch.cache, codec, batch.plan([3]), 1.0, impl="cpu")


@pytest.mark.skipif(bool(os.environ.get("OSCAR_CPU_ISA")), reason="OSCAR_CPU_ISA chooses")
def test_the_best_level_is_chosen_and_no_emulated_one():
    if cpu.library() is None:
        pytest.skip("the C++ library is not built")
    assert cpu.default_isa() == [isa for isa in cpu.supported_isas() if isa != "amx_emulated"][-1]


@pytest.mark.parametrize("backend", EXTEND_IMPLS, indirect=True)
@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_batches(data, backend):
    """Ragged batches of any shape: decode and extend against float64."""
    heads, group = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    head_dim, v_head_dim = (data.draw(st.sampled_from([16, 32, 48, 64, 80, 112, 128, 192, 256])) for _ in range(2))
    options = data.draw(st.sampled_from([{}, {"mean": True}, {"lossless": True}, {"group_size": 16}]))
    lens = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=5))
    new_lens = data.draw(st.lists(st.integers(0, 40), min_size=len(lens), max_size=len(lens)))
    cap = data.draw(st.sampled_from([0.0, 3.0]))
    codec = codec_of(heads, head_dim, v_head_dim, **options)
    batch = Batch(lens, heads, group, head_dim, v_head_dim, codec, lose_rows=data.draw(st.booleans()))
    g = torch.Generator().manual_seed(10)
    plan, scale = batch.plan(lens), head_dim**-0.5

    q = torch.randn(len(lens), heads * group, head_dim, generator=g)
    out = decode_attention(q, batch.cache, codec, plan, scale, cap, **backend)
    indptr = [0, *itertools.accumulate(new_lens)]
    q_new = torch.randn(indptr[-1], heads * group, head_dim, generator=g)
    k_new = codec.transform_k(torch.randn(indptr[-1], heads, head_dim, generator=g))
    v_new = codec.transform_v(torch.randn(indptr[-1], heads, v_head_dim, generator=g))
    extended = extend_attention(q_new, k_new, v_new, indptr, batch.cache, codec, plan, scale, cap, **backend)
    for b, n in enumerate(lens):
        k, v = batch.stored(b, n) if n else (k_new[:0].double(), v_new[:0].double())
        if n:
            assert_heads_close(out[b], batch.oracle(q[b], k, v, scale, cap), backend)
        for i in {indptr[b], indptr[b + 1] - 1} if new_lens[b] else ():
            fresh = slice(indptr[b], i + 1)
            keys, values = torch.cat((k, k_new[fresh].double())), torch.cat((v, v_new[fresh].double()))
            assert_heads_close(extended[i], batch.oracle(q_new[i], keys, values, scale, cap), backend)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads, backend):
    """More threads than tasks, heads or tokens; the split changes the order of float sums and nothing else."""
    codec = codec_of(2, 64, 64)
    lens = [700, 1, 0, 33]
    batch = Batch(lens, 2, 3, 64, 64, codec)
    q = torch.randn(len(lens), 6, 64, generator=torch.Generator().manual_seed(11))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        out = decode_attention(q, batch.cache, codec, batch.plan(lens), 0.125, **backend)
    finally:
        torch.set_num_threads(before)
    for b in (0, 1, 3):
        assert_heads_close(out[b], batch.oracle(q[b], *batch.stored(b, lens[b]), 0.125, 0.0), backend)
    assert torch.equal(out[2], torch.zeros(6, 64))


def test_custom_operators():
    """What tracing sees of the operators is what they do."""
    if cpu.library() is None:
        pytest.skip("the C++ library is not built")
    codec = codec_of(2, 64, 80)
    batch = Batch([30, 5], 2, 2, 64, 80, codec)
    plan, cache = batch.plan([30, 5]), batch.cache
    storage = (cache.k_buffer, cache.v_buffer, cache.k_window, cache.v_window)
    masks = (plan.slots, plan.packed_mask, plan.window_rows, plan.window_mask)
    q, handle = torch.randn(2, 4, 64), ops.handle_of(codec)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.decode_attention, (q, *storage, *masks, handle, 0.1, 0.0), test_utils=tests)
    new = (batch.k[:2].bfloat16(), codec.transform_v(batch.v[:2]))
    torch.library.opcheck(ops.extend_attention, (q, *new, [0, 1, 2], *storage, *masks, handle, 0.1, 0.0), test_utils=tests)
    rows = torch.tensor([0, 1])
    torch.library.opcheck(ops.store_kv, (batch.k[:2], batch.v[:2], rows, rows, *storage, handle), test_utils=tests)


@pytest.mark.parametrize("num_kv_heads, group, head_dim, v_head_dim", SHAPES[:4])
@pytest.mark.parametrize("options", [{}, {"mean": True}, {"lossless": True}])
@pytest.mark.parametrize("backend", EXTEND_IMPLS, indirect=True)
def test_extend(num_kv_heads, group, head_dim, v_head_dim, options, backend, monkeypatch):
    module = sys.modules[extend_attention.__module__]
    monkeypatch.setattr(module, "Q_TILE", 7)
    monkeypatch.setattr(module, "K_TILE", 11)
    codec = codec_of(num_kv_heads, head_dim, v_head_dim, **options)
    prefix = LENS
    batch = Batch(prefix, num_kv_heads, group, head_dim, v_head_dim, codec)
    new_lens = [9, 0, 1, 5, 13, 2, 1, 17, 6]
    g = torch.Generator().manual_seed(4)
    total = sum(new_lens)
    q = torch.randn(total, num_kv_heads * group, head_dim, generator=g)
    k_new = codec.transform_k(torch.randn(total, num_kv_heads, head_dim, generator=g))
    v_new = codec.transform_v(torch.randn(total, num_kv_heads, v_head_dim, generator=g))
    indptr = [0]
    for n in new_lens:
        indptr.append(indptr[-1] + n)
    out = extend_attention(q, k_new, v_new, indptr, batch.cache, codec, batch.plan(prefix), head_dim**-0.5, **backend)
    for b, n in enumerate(prefix):
        k, v = batch.stored(b, n) if n else (k_new[:0].double(), v_new[:0].double())
        for i in range(indptr[b], indptr[b + 1]):
            fresh = slice(indptr[b], i + 1)
            keys, values = torch.cat((k, k_new[fresh].double())), torch.cat((v, v_new[fresh].double()))
            expected = batch.oracle(q[i], keys, values, head_dim**-0.5, 0.0)
            assert_heads_close(out[i], expected, backend)


BFLOAT16 = {"lossless": True, "window_dtype": torch.bfloat16}  # a layer that stays in 16 bits


@pytest.mark.parametrize(
    "group, head_dim, v_head_dim, options, cap",
    [
        (4, 128, 128, {}, 0.0),
        (1, 16, 16, {}, 5.0),
        (2, 80, 112, {"mean": True}, 5.0),  # a last step of 16 channels
        (16, 192, 128, {}, 0.0),
        (3, 128, 128, {"group_size": 32}, 5.0),
        (7, 64, 128, {"group_size": 16}, 0.0),
        (5, 96, 48, {"group_size": 48}, 0.0),
        (2, 240, 240, {"group_size": 48}, 0.0),
        (1, 256, 256, {"group_size": 128}, 0.0),
        (4, 128, 128, {"group_size": 8}, 0.0),
        (4, 112, 112, {}, 0.0),
        (4, 128, 64, BFLOAT16, 5.0),
        (3, 80, 80, BFLOAT16, 0.0),
        (4, 64, 64, {"lossless": True}, 0.0),
    ],
)
@pytest.mark.parametrize("backend", EXTEND_IMPLS, indirect=True)
def test_extend_many_rows(group, head_dim, v_head_dim, options, cap, backend):
    """New tokens that fill units of 128 rows and tiles of 64 keys, and leave part of the last ones."""
    codec, prefix, new_lens = codec_of(2, head_dim, v_head_dim, **options), [0, 1, 150, 300], [90, 65, 33, 70]
    batch = Batch(prefix, 2, group, head_dim, v_head_dim, codec)
    indptr, g = [0, *itertools.accumulate(new_lens)], torch.Generator().manual_seed(13)
    q = torch.randn(indptr[-1], 2 * group, head_dim, generator=g).bfloat16()
    k_new = codec.transform_k(torch.randn(indptr[-1], 2, head_dim, generator=g))
    v_new = codec.transform_v(torch.randn(indptr[-1], 2, v_head_dim, generator=g))
    scale = head_dim**-0.5
    out = extend_attention(q, k_new, v_new, indptr, batch.cache, codec, batch.plan(prefix), scale, cap, **backend)
    for b, n in enumerate(prefix):
        k, v = batch.stored(b, n) if n else (k_new[:0].double(), v_new[:0].double())
        for i in {0, 31, min(64, new_lens[b] - 1), new_lens[b] - 1}:
            fresh = slice(indptr[b], indptr[b] + i + 1)
            keys, values = torch.cat((k, k_new[fresh].double())), torch.cat((v, v_new[fresh].double()))
            expected = batch.oracle(q[indptr[b] + i], keys, values, scale, cap)
            assert_heads_close(out[indptr[b] + i], expected, backend)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192])
def test_lossless_path_equals_plain_attention(head_dim, backend):
    """Rotate, window, page, un-rotate: with the lossless codec nothing may be left of it."""
    codec = codec_of(2, head_dim, head_dim, lossless=True, orthogonal=False, mean=True)
    batch = Batch([60], 2, 2, head_dim, head_dim, codec)
    q = torch.randn(1, 4, head_dim, generator=torch.Generator().manual_seed(5))
    out = decode_attention(q, batch.cache, codec, batch.plan([60]), 0.2, **backend)
    k, v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (batch.k, batch.v))
    plain = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, scale=0.2).transpose(0, 1)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-4)


def test_each_position_is_read_once():
    codec = codec_of(1, 64, 64)
    batch = Batch(LENS, 1, 1, 64, 64, codec, lose_rows=True)
    plan = batch.plan(LENS)
    for b, n in enumerate(LENS):
        packed = plan.packed_mask[b].nonzero().flatten().tolist()
        window = plan.window_positions[b][plan.window_mask[b]].tolist()
        assert sorted(packed + window) == list(range(n))
        assert set(window) <= set(range(SINK)) | set(range(n - RECENT, n))


@pytest.mark.parametrize("shaping", [False, True])
@pytest.mark.parametrize("steps", [1, 7, 16, 64, 300])
def test_chunking_does_not_change_bytes(steps, shaping, backend):
    """The same 300 tokens, however they arrive and whatever comes with them: the same rows."""
    codec = codec_of(2, 128, 128, shaping=shaping)
    g = torch.Generator().manual_seed(6)
    k, v = torch.randn(300, 2, 128, generator=g) + 0.5, torch.randn(300, 2, 128, generator=g)
    k, v = k.bfloat16(), v.bfloat16()

    def written(sizes, noise):
        cache = LayerCache(
            torch.zeros(400, 2, 36, dtype=torch.uint8),
            torch.zeros(400, 2, 36, dtype=torch.uint8),
            torch.zeros(301, 2, 128, dtype=torch.bfloat16),
            torch.zeros(301, 2, 128, dtype=torch.bfloat16),
        )
        at = 0
        while at < 300:
            part = slice(at, min(at + sizes, 300))
            loc = torch.arange(part.start, part.stop)
            other = torch.randn(noise, 2, 128, generator=g).bfloat16() * 1000
            store_kv(
                torch.cat((other, k[part])),
                torch.cat((other, v[part])),
                torch.cat((torch.full((noise,), 399), loc)),
                torch.cat((torch.full((noise,), 300), loc)),
                cache,
                codec,
                **backend,
            )
            at += sizes
        return cache

    whole, parts = written(300, 0), written(steps, 3)
    for name in ("k_buffer", "v_buffer", "k_window", "v_window"):
        assert torch.equal(getattr(whole, name)[:300], getattr(parts, name)[:300])
    assert torch.equal(codec.encode_k(whole.k_window[:300]), whole.k_buffer[:300])


def test_a_poisoned_row_stays_its_own(backend):
    codec = codec_of(1, 64, 64)
    batch = Batch([40, 40], 1, 2, 64, 64, codec)
    clean = decode_attention(torch.ones(2, 2, 64), batch.cache, codec, batch.plan([40, 40]), 0.1, **backend)
    bad = batch.k.clone()
    bad[20] = float("nan")
    batch.cache.k_buffer[batch.req_to_token[0, 20].long()] = codec.encode_k(codec.transform_k(bad[20:21]))
    out = decode_attention(torch.ones(2, 2, 64), batch.cache, codec, batch.plan([40, 40]), 0.1, **backend)
    assert torch.isfinite(out).all() and torch.equal(out[1], clean[1])


@pytest.mark.parametrize("lens", [[3, 12], [90, 200]], ids=["windows", "windows_and_pool"])
@pytest.mark.parametrize("backend", EXTEND_IMPLS, indirect=True)
def test_nan_logits_give_nan(lens, backend):
    """As in the reference: a query row whose logits are all NaN from its first tile on, and one with a single NaN key."""
    codec = codec_of(2, 64, 64)
    batch = Batch(lens, 2, 2, 64, 64, codec)
    batch.cache.k_window[int(batch.row_of_slot[batch.req_to_token[1, 2].long()]), 1] = float("nan")
    plan = batch.plan(lens)
    q = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(14))
    q[0, 1] = float("nan")
    expected = decode_attention(q, batch.cache, codec, plan, 0.125, impl="reference").isnan()
    assert expected.any(-1).tolist() == [[False, True, False, False], [False, False, True, True]]
    assert torch.equal(decode_attention(q, batch.cache, codec, plan, 0.125, **backend).isnan(), expected)

    many = q.repeat_interleave(40, 0)  # enough query rows for AMX tiles
    new = [codec.transform_k(torch.zeros(80, 2, 64)), codec.transform_v(torch.zeros(80, 2, 64)), [0, 40, 80]]
    out = extend_attention(many, *new, batch.cache, codec, plan, 0.125, **backend)
    assert torch.equal(out.isnan(), expected.repeat_interleave(40, 0))


def test_pointers_follow_the_buffers(backend):
    """A layer's C form is kept between calls, for as long as it holds the same buffers and no longer; copies make their own."""
    codec, lens = codec_of(2, 64, 64), [90]
    batch, other = Batch(lens, 2, 2, 64, 64, codec), Batch(lens, 2, 2, 64, 64, codec, seed=2)
    plan, q = batch.plan(lens), torch.ones(1, 4, 64)

    def answer(cache):
        return decode_attention(q, cache, codec, plan, 0.125, **backend)

    mine = answer(batch.cache)
    copied = copy.deepcopy(batch.cache)
    batch.cache.k_buffer.zero_()
    batch.cache.k_window.zero_()
    assert torch.equal(answer(copied), mine) and not torch.equal(answer(batch.cache), mine)
    for name in ("k_buffer", "v_buffer", "k_window", "v_window"):
        setattr(batch.cache, name, getattr(other.cache, name))
    assert torch.equal(answer(batch.cache), answer(other.cache))


def test_states_merge_to_the_whole():
    g = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(1, 2, 3, 16, generator=g),
        torch.randn(1, 50, 2, 16, generator=g),
        torch.randn(1, 50, 2, 8, generator=g),
    )
    mask = torch.rand(1, 1, 3, 50, generator=g) > 0.3
    mask[..., 2, :] = False  # a query that sees nothing
    whole, lse = attend(q, k, v, mask, 0.3)
    parts = [attend(q, k[:, a:b], v[:, a:b], mask[..., a:b], 0.3) for a, b in ((0, 1), (1, 30), (30, 50))]
    torch.testing.assert_close(merge_states(parts), whole)
    assert torch.equal(whole[:, :, 2], torch.zeros(1, 2, 8)) and torch.isinf(lse[:, :, 2]).all()


def test_a_shape_the_library_lacks_is_said_once(caplog):
    """head_dim 72 is no multiple of 16: `auto` runs the reference, and the log says why, one time."""
    from oscar_kernel import choose

    if cpu.library() is None:
        pytest.skip("no C++ library")
    choose._say_slower.cache_clear()
    codec = codec_of(1, 72, 72)
    for _ in range(2):
        Batch([5], 1, 2, 72, 72, codec)
    said = [record for record in caplog.records if "slower PyTorch reference" in record.message]
    assert len(said) == 1 and "head_dim" in said[0].message
