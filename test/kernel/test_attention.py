"""Store, decode and extend against a float64 oracle that looks at one token at a time.

One file runs every implementation, hence more than 400 lines: what one of them must do is asked of all.
"""

import itertools
import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oscar.format import codec as codec_module
from oscar.format.windows import WindowTable
from oscar_kernel import LayerCache, Layers, attention, reference
from oscar_kernel.cpu import library as cpu
from oscar_kernel.reference import attend, merge_states
from oscar_kernel.testing import RandomBatch, random_codec

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


def batch_of(lens, num_kv_heads, kv_group_num, head_dim, v_head_dim, codec, **options):
    assert (codec.num_kv_heads, codec.k.fmt.head_dim, codec.v.fmt.head_dim) == (num_kv_heads, head_dim, v_head_dim)
    return RandomBatch.make(codec, lens, num_kv_heads * kv_group_num, (SINK, RECENT), **options)


LENS = [0, 1, SINK - 1, SINK, SINK + 1, SINK + RECENT - 1, SINK + RECENT, SINK + RECENT + 1, 97]
SHAPES = [(2, 2, 128, 128), (1, 7, 64, 64), (4, 1, 80, 80), (2, 3, 96, 128), (1, 4, 192, 128), (1, 2, 256, 256)]


@pytest.mark.parametrize("num_kv_heads, group, head_dim, v_head_dim", SHAPES)
@pytest.mark.parametrize("options", [{}, {"orthogonal": False, "mean": True}, {"fold": True}, {"lossless": True}])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_decode(num_kv_heads, group, head_dim, v_head_dim, options, cap, backend):
    codec = random_codec(num_kv_heads, head_dim, v_head_dim, **options)
    batch = batch_of(LENS, num_kv_heads, group, head_dim, v_head_dim, codec, lose_rows=True)
    q = torch.randn(len(LENS), num_kv_heads * group, head_dim, generator=torch.Generator().manual_seed(3))
    out = batch.decode(q, LENS, head_dim**-0.5, cap, **backend)
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
    codec = random_codec(2, head_dim, head_dim, **options)
    lens = [5, 64, 130, 300]
    batch = batch_of(lens, 2, group, head_dim, head_dim, codec)
    q = torch.randn(len(lens), 2 * group, head_dim, generator=torch.Generator().manual_seed(8)).bfloat16()
    out = batch.decode(q, lens, 2 * head_dim**-0.5, **backend)
    for b, n in enumerate(lens):
        expected = batch.oracle(q[b], *batch.stored(b, n), 2 * head_dim**-0.5, 0.0)
        assert_heads_close(out[b], expected, backend)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_decode_keeps_precision_beside_outlying_steps(scale, backend):
    """A few V rows with a hundred times the step of others must not cost the others' weights their bits."""
    codec, lens = random_codec(2, 128, 128, fold=True), [300]
    batch = batch_of(lens, 2, 4, 128, 128, codec)
    meta = batch.cache.v.buffer[..., codec.v.fmt.code_bytes :].clone().view(torch.float16)
    meta[::50, :, 1] *= 100
    batch.cache.v.buffer[..., codec.v.fmt.code_bytes :] = meta.view(torch.uint8)
    q = scale * torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(12))
    out = batch.decode(q, lens, 128**-0.5, **backend)
    assert_heads_close(out[0], batch.oracle(q[0], *batch.stored(0, 300), 128**-0.5, 0.0), backend)


@pytest.mark.parametrize("head_dim, options", [*FORMATS, *SHAPED, (80, {}), (128, {"lossless": True}), (128, {"mean": True})])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fold", [False, True])
def test_store_bytes(head_dim, options, dtype, fold, backend):
    """Every implementation writes the bytes of the reference, and nothing else."""
    codec = random_codec(3, head_dim, head_dim, **options, fold=fold, float32=fold)
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
        cache = LayerCache.zeros(codec, num_slots=50, num_rows=40)
        for side in (cache.k, cache.v):
            side.buffer.fill_(7)
            side.window.fill_(7.0)
        return Layers({0: (cache, codec)}, 3, **kwargs).store(0, k, v, loc, rows), cache

    (k_ref, v_ref), ref = written({"impl": "reference"})
    (k_new, v_new), cache = written(backend)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(k_new, k_ref, **same)
    torch.testing.assert_close(v_new, v_ref, **same)
    torch.testing.assert_close(cache.k.window[:40], ref.k.window[:40], **same)
    torch.testing.assert_close(cache.v.window[:40], ref.v.window[:40], **same)
    if not options.get("lossless"):
        assert torch.equal(cache.k.buffer, ref.k.buffer)
        assert torch.equal(cache.v.buffer, ref.v.buffer)


def test_library_has_the_format_of_the_codec():
    if cpu.library() is None:
        pytest.skip("the C++ library is not built")
    constants = cpu.codec_constants()
    bits = torch.tensor(1 / 3, dtype=torch.float32).view(torch.int32).item()
    names = ("FORMAT_VERSION", "CODES_PER_BYTE", "META_BYTES")
    assert constants == {**{name: getattr(codec_module, name) for name in names}, "BITS": 2, "ONE_THIRD_BITS": bits}
    assert torch.tensor(codec_module._ONE_THIRD).view(torch.int32).item() == bits


def test_a_level_that_is_missing_is_refused():
    if cpu.library() is None:
        pytest.skip("the C++ library is not built")
    codec = random_codec(1, 64, 64)
    batch = batch_of([3], 1, 1, 64, 64, codec)
    q = torch.zeros(1, 1, 64)
    with pytest.raises(ValueError, match="isa must be one of portable"):
        batch.decode(q, [3], 1.0, isa="mmx")
    for isa in set(cpu.isa_names()) - set(cpu.supported_isas()):
        with pytest.raises(RuntimeError, match="lacks that level: (the|Linux|its) .*; it can run portable"):
            batch.decode(q, [3], 1.0, isa=isa)
    with pytest.raises(ValueError, match="impl must be one of"):
        batch.decode(q, [3], 1.0, impl="best")
    with pytest.raises(TypeError, match="float64"):
        batch.decode(q.double(), [3], 1.0, impl="cpu")


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
    codec = random_codec(heads, head_dim, v_head_dim, **options)
    batch = batch_of(lens, heads, group, head_dim, v_head_dim, codec, lose_rows=data.draw(st.booleans()))
    g = torch.Generator().manual_seed(10)
    scale = head_dim**-0.5

    q = torch.randn(len(lens), heads * group, head_dim, generator=g)
    out = batch.decode(q, lens, scale, cap, **backend)
    indptr = [0, *itertools.accumulate(new_lens)]
    q_new = torch.randn(indptr[-1], heads * group, head_dim, generator=g)
    k_new = codec.k.store(torch.randn(indptr[-1], heads, head_dim, generator=g))
    v_new = codec.v.store(torch.randn(indptr[-1], heads, v_head_dim, generator=g))
    extended = batch.extend(q_new, k_new, v_new, indptr, lens, scale, cap, **backend)
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
    codec = random_codec(2, 64, 64)
    lens = [700, 1, 0, 33]
    batch = batch_of(lens, 2, 3, 64, 64, codec)
    q = torch.randn(len(lens), 6, 64, generator=torch.Generator().manual_seed(11))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        out = batch.decode(q, lens, 0.125, **backend)
    finally:
        torch.set_num_threads(before)
    for b in (0, 1, 3):
        assert_heads_close(out[b], batch.oracle(q[b], *batch.stored(b, lens[b]), 0.125, 0.0), backend)
    assert torch.equal(out[2], torch.zeros(6, 64))


@pytest.mark.parametrize("num_kv_heads, group, head_dim, v_head_dim", SHAPES[:4])
@pytest.mark.parametrize("options", [{}, {"mean": True}, {"lossless": True}])
@pytest.mark.parametrize("backend", EXTEND_IMPLS, indirect=True)
def test_extend(num_kv_heads, group, head_dim, v_head_dim, options, backend, monkeypatch):
    monkeypatch.setattr(reference, "Q_TILE", 7)
    monkeypatch.setattr(reference, "K_TILE", 11)
    codec = random_codec(num_kv_heads, head_dim, v_head_dim, **options)
    prefix = LENS
    batch = batch_of(prefix, num_kv_heads, group, head_dim, v_head_dim, codec)
    new_lens = [9, 0, 1, 5, 13, 2, 1, 17, 6]
    g = torch.Generator().manual_seed(4)
    total = sum(new_lens)
    q = torch.randn(total, num_kv_heads * group, head_dim, generator=g)
    k_new = codec.k.store(torch.randn(total, num_kv_heads, head_dim, generator=g))
    v_new = codec.v.store(torch.randn(total, num_kv_heads, v_head_dim, generator=g))
    indptr = [0]
    for n in new_lens:
        indptr.append(indptr[-1] + n)
    out = batch.extend(q, k_new, v_new, indptr, prefix, head_dim**-0.5, **backend)
    for b, n in enumerate(prefix):
        k, v = batch.stored(b, n) if n else (k_new[:0].double(), v_new[:0].double())
        for i in range(indptr[b], indptr[b + 1]):
            fresh = slice(indptr[b], i + 1)
            keys, values = torch.cat((k, k_new[fresh].double())), torch.cat((v, v_new[fresh].double()))
            expected = batch.oracle(q[i], keys, values, head_dim**-0.5, 0.0)
            assert_heads_close(out[i], expected, backend)


BFLOAT16 = {"native": True}  # a layer that stays in 16 bits


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
    codec, prefix, new_lens = random_codec(2, head_dim, v_head_dim, **options), [0, 1, 150, 300], [90, 65, 33, 70]
    batch = batch_of(prefix, 2, group, head_dim, v_head_dim, codec)
    indptr, g = [0, *itertools.accumulate(new_lens)], torch.Generator().manual_seed(13)
    q = torch.randn(indptr[-1], 2 * group, head_dim, generator=g).bfloat16()
    k_new = codec.k.store(torch.randn(indptr[-1], 2, head_dim, generator=g))
    v_new = codec.v.store(torch.randn(indptr[-1], 2, v_head_dim, generator=g))
    scale = head_dim**-0.5
    out = batch.extend(q, k_new, v_new, indptr, prefix, scale, cap, **backend)
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
    codec = random_codec(2, head_dim, head_dim, lossless=True, orthogonal=False, mean=True)
    batch = batch_of([60], 2, 2, head_dim, head_dim, codec)
    q = torch.randn(1, 4, head_dim, generator=torch.Generator().manual_seed(5))
    out = batch.decode(q, [60], 0.2, **backend)
    k, v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (batch.k, batch.v))
    plain = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, scale=0.2).transpose(0, 1)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-4)


def test_each_position_is_read_once():
    codec = random_codec(1, 64, 64)
    batch = batch_of(LENS, 1, 1, 64, 64, codec, lose_rows=True)
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
    codec = random_codec(2, 128, 128, shaping=shaping)
    g = torch.Generator().manual_seed(6)
    k, v = torch.randn(300, 2, 128, generator=g) + 0.5, torch.randn(300, 2, 128, generator=g)
    k, v = k.bfloat16(), v.bfloat16()

    def written(sizes, noise):
        cache = LayerCache.zeros(codec, num_slots=400, num_rows=300)
        layers = Layers({0: (cache, codec)}, 2, **backend)
        at = 0
        while at < 300:
            part = slice(at, min(at + sizes, 300))
            loc = torch.arange(part.start, part.stop)
            other = torch.randn(noise, 2, 128, generator=g).bfloat16() * 1000
            layers.store(
                0,
                torch.cat((other, k[part])),
                torch.cat((other, v[part])),
                torch.cat((torch.full((noise,), 399), loc)),
                torch.cat((torch.full((noise,), 300), loc)),
            )
            at += sizes
        return cache

    whole, parts = written(300, 0), written(steps, 3)
    for one, other in ((whole.k, parts.k), (whole.v, parts.v)):
        assert torch.equal(one.buffer[:300], other.buffer[:300])
        assert torch.equal(one.window[:300], other.window[:300])
    assert torch.equal(codec.k.encode(whole.k.window[:300]), whole.k.buffer[:300])


def test_a_poisoned_row_stays_its_own(backend):
    codec = random_codec(1, 64, 64)
    batch = batch_of([40, 40], 1, 2, 64, 64, codec)
    clean = batch.decode(torch.ones(2, 2, 64), [40, 40], 0.1, **backend)
    bad = batch.k.clone()
    bad[20] = float("nan")
    batch.cache.k.buffer[batch.req_to_token[0, 20].long()] = codec.k.encode(codec.k.store(bad[20:21]))
    out = batch.decode(torch.ones(2, 2, 64), [40, 40], 0.1, **backend)
    assert torch.isfinite(out).all() and torch.equal(out[1], clean[1])


@pytest.mark.parametrize("lens", [[3, 12], [90, 200]], ids=["windows", "windows_and_pool"])
@pytest.mark.parametrize("backend", EXTEND_IMPLS, indirect=True)
def test_nan_logits_give_nan(lens, backend):
    """As in the reference: a query row whose logits are all NaN from its first tile on, and one with a single NaN key."""
    codec = random_codec(2, 64, 64)
    batch = batch_of(lens, 2, 2, 64, 64, codec)
    batch.cache.k.window[int(batch.windows.rows(torch.tensor(1), torch.tensor(2))), 1] = float("nan")
    q = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(14))
    q[0, 1] = float("nan")
    expected = batch.decode(q, lens, 0.125, impl="reference").isnan()
    assert expected.any(-1).tolist() == [[False, True, False, False], [False, False, True, True]]
    assert torch.equal(batch.decode(q, lens, 0.125, **backend).isnan(), expected)

    many = q.repeat_interleave(40, 0)  # enough query rows for AMX tiles
    new = codec.k.store(torch.zeros(80, 2, 64)), codec.v.store(torch.zeros(80, 2, 64))
    out = batch.extend(many, *new, [0, 40, 80], lens, 0.125, **backend)
    assert torch.equal(out.isnan(), expected.repeat_interleave(40, 0))


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
    if cpu.library() is None:
        pytest.skip("no C++ library")
    attention._say_slower.cache_clear()
    codec = random_codec(1, 72, 72)
    for _ in range(2):
        batch_of([5], 1, 2, 72, 72, codec)
    said = [record for record in caplog.records if "slower PyTorch reference" in record.message]
    assert len(said) == 1 and "head_dim" in said[0].message


@pytest.mark.parametrize("lossless", [False, True])
def test_extend_in_chunks_then_decode_steps(lossless, backend):
    """A served request through the wrappers: chunks, then steps; each reads what the reference reads of the same calls."""
    codec = random_codec(2, 64, 80, lossless=lossless, mean=True)
    num_slots, lens = 120, [37, 50]
    g = torch.Generator().manual_seed(21)
    req_to_token = (torch.randperm(num_slots - 1, generator=g) + 1)[: 2 * 59].view(2, 59).int()
    requests = torch.arange(2)

    def serve(kwargs):
        windows = WindowTable.full(2, (SINK, RECENT), 4)
        layers = Layers({0: (LayerCache.zeros(codec, num_slots, windows.no_row), codec)}, 6, **kwargs)
        extend, decode, outputs = layers.batch_extend(), layers.batch_decode(), []
        r = torch.Generator().manual_seed(22)

        def rows_of(b, first, last, total):
            """Slots, window rows and positions of new tokens."""
            position = torch.arange(first, last)
            rows = windows.rows_for(torch.tensor(b), position, torch.tensor(total))
            return req_to_token[b, first:last].long(), rows, position

        def tokens(n):
            dims = ((6, 64), (2, 64), (2, 80))
            return [torch.randn(n, heads, dim, generator=r).bfloat16() for heads, dim in dims]

        done = [0, 0]
        while done != lens:
            new = [min(20, n - d) for n, d in zip(lens, done, strict=True)]
            indptr, total = [0, *itertools.accumulate(new)], [d + n for d, n in zip(done, new, strict=True)]
            new_rows = (rows_of(b, done[b], total[b], total[b]) for b in range(2))
            loc, rows, position = map(torch.cat, zip(*new_rows, strict=True))
            extend.plan(req_to_token, requests, done, indptr, windows, loc, rows)
            windows.record(rows, position)
            q, k, v = tokens(indptr[-1])
            padded = torch.cat((q, q[:3]))
            out = extend.run(0, padded, k, v, sm_scale=0.125)
            assert out.dtype == q.dtype and torch.equal(out[indptr[-1] :], torch.zeros(3, 6, 80, dtype=q.dtype))
            outputs.append(out)
            done = total
        for _ in range(8):
            done = [d + 1 for d in done]
            new_rows = (rows_of(b, done[b] - 1, done[b], done[b]) for b in range(2))
            loc, rows, position = map(torch.cat, zip(*new_rows, strict=True))
            windows.record(rows, position)
            decode.plan(req_to_token, requests, done, windows, loc, rows)
            outputs.append(decode.run(0, *tokens(2), sm_scale=0.125, out_dtype=torch.float32))
        return outputs, layers.cache(0)

    (expected, ref), (found, cache) = serve({"impl": "reference"}), serve(backend)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=1e-2)
    for a, b in ((cache.k, ref.k), (cache.v, ref.v)):
        assert torch.equal(a.buffer, b.buffer)
        assert torch.equal(a.window[:-1], b.window[:-1])


def test_a_token_passes_few_functions_of_ours():
    """A layer of a decode step in the C++ library: the wrapper, store, decode, what they share; the backend adds one more."""
    if cpu.library() is None:
        pytest.skip("no C++ library")
    codec = random_codec(2, 64, 64)
    batch = batch_of([40, 9], 2, 2, 64, 64, codec)
    decode = batch.layers("cpu").batch_decode()
    loc = batch.req_to_token[torch.arange(2), torch.tensor([39, 8])].long()
    rows = batch.rows()[torch.tensor([39, 48])]
    decode.plan(batch.req_to_token, torch.arange(2), [40, 9], batch.windows, loc, rows)
    q, k, v = torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64)
    decode.run(0, q, k, v, sm_scale=0.125)
    passed = []

    def note(frame, event, _):
        if event == "call" and "oscar" in frame.f_code.co_filename and "test_attention" not in frame.f_code.co_filename:
            passed.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        decode.run(0, q, k, v, sm_scale=0.125)
    finally:
        sys.setprofile(None)
    assert len(passed) <= 7, passed
