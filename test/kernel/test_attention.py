"""Store, decode and extend against a float64 oracle that looks at one token at a time."""

import sys

import pytest
import torch

from oscar.codec import LosslessFormat, RowFormat
from oscar_kernel import LayerCache, LayerCodec, decode_attention, extend_attention, plan_read, store_kv
from oscar_kernel.attend import attend, merge_states

SINK, RECENT = 4, 16


def codec_of(num_kv_heads, head_dim, v_head_dim, lossless=False, orthogonal=True, fold=False, mean=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def transform(dim):
        t = torch.randn(num_kv_heads, dim, dim, generator=g, dtype=torch.float64)
        return torch.linalg.qr(t).Q if orthogonal else torch.linalg.qr(t).Q * torch.linspace(0.5, 2, dim)

    k_transform, v_transform = transform(head_dim), transform(v_head_dim)
    return LayerCodec(
        k_format=LosslessFormat(head_dim) if lossless else RowFormat(head_dim),
        v_format=LosslessFormat(v_head_dim) if lossless else RowFormat(v_head_dim),
        k_transform=k_transform,
        q_transform=torch.linalg.inv(k_transform).transpose(1, 2).float(),
        v_transform=None if fold else v_transform,
        v_inverse=None if fold else torch.linalg.inv(v_transform).float(),
        k_clip=torch.full((num_kv_heads,), 0.96),
        v_clip=torch.full((num_kv_heads,), 0.92),
        k_mean=torch.randn(num_kv_heads, head_dim, generator=g, dtype=torch.float64) if mean else None,
        v_mean=torch.randn(num_kv_heads, v_head_dim, generator=g, dtype=torch.float64) if mean and not fold else None,
        window_dtype=torch.float32 if lossless else torch.bfloat16,
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
        if codec.v_mean is not None:
            o = o + codec.v_mean.unsqueeze(1)
        return o.flatten(0, 1)


LENS = [0, 1, SINK - 1, SINK, SINK + 1, SINK + RECENT - 1, SINK + RECENT, SINK + RECENT + 1, 97]
SHAPES = [(2, 2, 128, 128), (1, 7, 64, 64), (4, 1, 80, 80), (2, 3, 96, 128), (1, 4, 192, 128), (1, 2, 256, 256)]


@pytest.mark.parametrize("num_kv_heads, group, head_dim, v_head_dim", SHAPES)
@pytest.mark.parametrize("options", [{}, {"orthogonal": False, "mean": True}, {"fold": True}, {"lossless": True}])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_decode(num_kv_heads, group, head_dim, v_head_dim, options, cap):
    codec = codec_of(num_kv_heads, head_dim, v_head_dim, **options)
    batch = Batch(LENS, num_kv_heads, group, head_dim, v_head_dim, codec, lose_rows=True)
    q = torch.randn(len(LENS), num_kv_heads * group, head_dim, generator=torch.Generator().manual_seed(3))
    out = decode_attention(q, batch.cache, codec, batch.plan(LENS), head_dim**-0.5, cap)
    assert out.shape == (len(LENS), num_kv_heads * group, v_head_dim)
    for b, n in enumerate(LENS):
        if n:
            expected = batch.oracle(q[b], *batch.stored(b, n), head_dim**-0.5, cap)
            torch.testing.assert_close(out[b].double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("num_kv_heads, group, head_dim, v_head_dim", SHAPES[:4])
@pytest.mark.parametrize("options", [{}, {"mean": True}, {"lossless": True}])
def test_extend(num_kv_heads, group, head_dim, v_head_dim, options, monkeypatch):
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
    out = extend_attention(q, k_new, v_new, indptr, batch.cache, codec, batch.plan(prefix), head_dim**-0.5)
    for b, n in enumerate(prefix):
        k, v = batch.stored(b, n) if n else (k_new[:0].double(), v_new[:0].double())
        for i in range(indptr[b], indptr[b + 1]):
            fresh = slice(indptr[b], i + 1)
            keys, values = torch.cat((k, k_new[fresh].double())), torch.cat((v, v_new[fresh].double()))
            expected = batch.oracle(q[i], keys, values, head_dim**-0.5, 0.0)
            torch.testing.assert_close(out[i].double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192])
def test_lossless_path_equals_plain_attention(head_dim):
    """Rotate, window, page, un-rotate: with the lossless codec nothing may be left of it."""
    codec = codec_of(2, head_dim, head_dim, lossless=True, orthogonal=False, mean=True)
    batch = Batch([60], 2, 2, head_dim, head_dim, codec)
    q = torch.randn(1, 4, head_dim, generator=torch.Generator().manual_seed(5))
    out = decode_attention(q, batch.cache, codec, batch.plan([60]), 0.2)
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


@pytest.mark.parametrize("steps", [1, 7, 16, 64, 300])
def test_chunking_does_not_change_bytes(steps):
    """The same 300 tokens, however they arrive and whatever comes with them: the same rows."""
    codec = codec_of(2, 128, 128)
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
            )
            at += sizes
        return cache

    whole, parts = written(300, 0), written(steps, 3)
    for name in ("k_buffer", "v_buffer", "k_window", "v_window"):
        assert torch.equal(getattr(whole, name)[:300], getattr(parts, name)[:300])
    assert torch.equal(codec.encode_k(whole.k_window[:300]), whole.k_buffer[:300])


def test_a_poisoned_row_stays_its_own():
    codec = codec_of(1, 64, 64)
    batch = Batch([40, 40], 1, 2, 64, 64, codec)
    clean = decode_attention(torch.ones(2, 2, 64), batch.cache, codec, batch.plan([40, 40]), 0.1)
    bad = batch.k.clone()
    bad[20] = float("nan")
    batch.cache.k_buffer[batch.req_to_token[0, 20].long()] = codec.encode_k(codec.transform_k(bad[20:21]))
    out = decode_attention(torch.ones(2, 2, 64), batch.cache, codec, batch.plan([40, 40]), 0.1)
    assert torch.isfinite(out).all() and torch.equal(out[1], clean[1])


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
