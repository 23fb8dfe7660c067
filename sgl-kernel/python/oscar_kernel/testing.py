"""Random layers and batches, for tests, benchmarks and checks: one place that makes them.

Everything is made on the CPU from a seed. Data are ragged, shifted and in shuffled slots, since equal lengths, zero means and
slots in order hide most faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.side import LayerTransforms, Side
from oscar.format.windows import WindowTable
from oscar_kernel import host_memory
from oscar_kernel.attention import Layers
from oscar_kernel.layer import LayerCache, LayerCodec, SideCache, SideCodec
from oscar_kernel.read_plan import ReadPlan, plan_read


def random_codec(
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    lossless: bool = False,
    native: bool = False,
    orthogonal: bool = True,
    fold: bool = False,
    mean: bool = False,
    shaping: bool = False,
    group_size: int | None = None,
    float32: bool = False,
    clip: tuple[float, float] = (0.96, 0.92),
    seed: int = 0,
) -> LayerCodec:
    """A layer's codec with random matrices.

    Args:
        num_kv_heads, head_dim, v_head_dim: geometry; v_head_dim is head_dim where it is not given.
        lossless: rows are float32 numbers. native: rows are bfloat16 numbers, as of a layer kept in 16 bits; transforms stay.
        orthogonal: transforms are; else their columns are stretched from 0.5 to 2.
        fold: the value transform is in the model's weights. mean: keys have one.
        shaping: rounding errors are passed on. group_size: None for whole rows.
        float32: transforms are exact in float32, as an artifact's are. clip: quantiles of K and V.
    """
    g = torch.Generator().manual_seed(seed)

    def side(dim: int, quantile: float, has_mean: bool) -> Side:
        t = torch.linalg.qr(torch.randn(num_kv_heads, dim, dim, generator=g, dtype=torch.float64)).Q
        t = t if orthogonal else t * torch.linspace(0.5, 2, dim)
        triangle = (torch.randn(num_kv_heads, dim, dim, generator=g) * (1.5 / dim**0.5)).triu(1) if shaping else None
        offset = torch.randn(num_kv_heads, dim, generator=g, dtype=torch.float64) if has_mean else None
        return Side(t.float() if float32 else t, torch.full((num_kv_heads,), quantile), offset, triangle)

    def row_format(dim: int) -> RowFormat | LosslessFormat:
        if lossless or native:
            return LosslessFormat(dim, "bfloat16" if native else "float32")
        return RowFormat(dim, group_size)

    dims = head_dim, v_head_dim or head_dim
    layer = LayerTransforms(side(dims[0], clip[0], mean), side(dims[1], clip[1], False))
    return LayerCodec.of(layer, row_format(dims[0]), row_format(dims[1]), fold_v=fold)


def random_cache(codec: LayerCodec, num_slots: int, num_rows: int, *, seed: int = 0) -> LayerCache:
    """Storage full of random rows, in memory as a server's pool has it. Nothing is encoded, so it may be as large as a pool.

    Packed rows get codes of any value, centres around 0 and steps of 0.6 to 1; wide rows and window rows are N(0, 1).

    Args:
        codec: of the layer.
        num_slots, num_rows: as in `LayerCache.zeros`.
    """
    g = torch.Generator().manual_seed(seed)

    def in_pool(x: Tensor) -> Tensor:
        return host_memory.zeros(tuple(x.shape), x.dtype).copy_(x)

    def make(side: SideCodec) -> SideCache:
        fmt, heads = side.fmt, side.clip.shape[0]
        window = torch.randn(num_rows + 1, heads, fmt.head_dim, generator=g).to(side.window_dtype)
        if isinstance(fmt, LosslessFormat):
            wide = torch.randn(num_slots, heads, fmt.head_dim, generator=g).to(side.window_dtype)
            return SideCache(in_pool(wide.view(torch.uint8)), in_pool(window))
        rows = torch.randint(0, 256, (num_slots, heads, fmt.row_bytes), dtype=torch.uint8, generator=g)
        centre = torch.randn(num_slots, heads, fmt.num_groups, generator=g) * 0.1
        step = 0.6 + 0.4 * torch.rand(num_slots, heads, fmt.num_groups, generator=g)
        rows[..., fmt.code_bytes :] = torch.stack((centre, step), -1).half().flatten(-2).view(torch.uint8)
        return SideCache(in_pool(rows), in_pool(window))

    return LayerCache(make(codec.k), make(codec.v))


def _shuffled_table(num_requests: int, windows: tuple[int, int], g: torch.Generator, rows_per_page: int = 4) -> WindowTable:
    """A table in which every request holds all its pages, in no order."""
    table = WindowTable.full(num_requests, windows, rows_per_page)
    if table.num_pages:
        flat = table.first_row.flatten()
        table.first_row.copy_(flat[torch.randperm(len(flat), generator=g)].view_as(table.first_row))
    return table


@dataclass
class RandomBatch:
    """Ragged sequences in shuffled slots, with windows written as a server would.

    Attributes:
        lens: tokens of each sequence. codec, cache: of the one layer. num_qo_heads: query heads.
        req_to_token: [bs, max_len + 3] int32. windows: what the sequences hold.
        k, v: [sum(lens), num_kv_heads, dim] float32, the model's own, sequences one after another.
        start: [bs + 1], where each sequence begins in them.
    """

    lens: list[int]
    codec: LayerCodec
    num_qo_heads: int
    cache: LayerCache
    req_to_token: Tensor
    windows: WindowTable
    k: Tensor
    v: Tensor
    start: list[int]

    @classmethod
    def make(
        cls,
        codec: LayerCodec,
        lens: Sequence[int],
        num_qo_heads: int,
        windows: tuple[int, int] = (4, 16),
        *,
        seed: int = 1,
        lose_rows: bool = False,
        impl: str = "auto",
    ) -> RandomBatch:
        """Make and store a batch.

        Args:
            codec: of the layer. lens: tokens of each sequence, may be 0. num_qo_heads: query heads.
            windows: (sink_tokens, recent_tokens).
            lose_rows: every third window row is taken by somebody else, so that its slot falls back to 2 bits.
            impl: what stores the tokens.
        """
        g = torch.Generator().manual_seed(seed)
        heads, total = codec.num_kv_heads, sum(lens)
        num_slots = total + 5
        order = torch.randperm(num_slots - 1, generator=g)[:total] + 1
        k = torch.randn(total, heads, codec.k.fmt.head_dim, generator=g) + 1.5
        v = torch.randn(total, heads, codec.v.fmt.head_dim, generator=g) - 0.7
        req_to_token = torch.zeros(len(lens), max([*lens, 1]) + 3, dtype=torch.int32)
        table = _shuffled_table(len(lens), windows, g)
        start, rows = [0], []
        for b, n in enumerate(lens):
            position = torch.arange(n)
            row = table.rows_for(torch.tensor(b), position, torch.tensor(n))
            table.record(row, position)
            req_to_token[b, :n] = order[start[-1] : start[-1] + n].int()
            rows.append(row)
            start.append(start[-1] + n)
        if lose_rows:
            table.position[::3] = -1
        cache = LayerCache.zeros(codec, num_slots, table.no_row)
        for side in (cache.k, cache.v):
            side.window.fill_(float("nan"))
        batch = cls(list(lens), codec, num_qo_heads, cache, req_to_token, table, k, v, start)
        if total:
            batch.layers(impl).store(0, k, v, order, torch.cat(rows))
        return batch

    def rows(self) -> Tensor:
        """[sum(lens)] int64 window rows of all tokens, the last row for none."""
        held = [self.windows.held(torch.tensor(b), torch.arange(n)) for b, n in enumerate(self.lens)]
        return torch.cat(held) if held else torch.zeros(0, dtype=torch.int64)

    def layers(self, impl: str = "auto", isa: str | None = None) -> Layers:
        """The batch's layer, as layer 0 of a model."""
        return Layers({0: (self.cache, self.codec)}, self.num_qo_heads, impl, isa)

    def plan(self, lens: Sequence[int]) -> ReadPlan:
        """The reference's plan of the first tokens of each sequence."""
        return plan_read(self.req_to_token, torch.arange(len(lens)), lens, self.windows)

    def decode(
        self, q: Tensor, lens: Sequence[int], scale: float, cap: float = 0.0, *, impl: str = "auto", isa: str | None = None
    ) -> Tensor:
        """Attention of q [bs, num_qo_heads, head_dim] over what is stored; float32."""
        decode = self.layers(impl, isa).batch_decode()
        decode.plan(self.req_to_token, torch.arange(len(lens)), lens, self.windows)
        return decode.run(0, q, sm_scale=scale, logit_cap=cap, out_dtype=torch.float32)

    def extend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        qo_indptr: Sequence[int],
        prefix_lens: Sequence[int],
        scale: float,
        cap: float = 0.0,
        *,
        impl: str = "auto",
        isa: str | None = None,
    ) -> Tensor:
        """Attention of new tokens, as `store` returns them, over stored prefixes; writes nothing. C++ and PyTorch; float32."""
        layer = self.layers(impl, isa).by_id[0]
        return layer.extend(q, k_new, v_new, qo_indptr, layer.plan(self.plan(prefix_lens)), scale, cap)

    def stored(self, b: int, n: int) -> tuple[Tensor, Tensor]:
        """[n, num_kv_heads, dim] float64 K and V of a sequence of n tokens as a reader must see them, found token by token."""
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        sinks, recent = self.windows.sink_tokens, self.windows.recent_tokens
        for position in range(n):
            slot = int(self.req_to_token[b, position])
            row = int(self.windows.held(torch.tensor(b), torch.tensor(position)))
            exact = (position < sinks or position >= n - recent) and row != self.windows.no_row
            for rows, side, codec in zip(found, (self.cache.k, self.cache.v), (self.codec.k, self.codec.v), strict=True):
                rows.append((side.window[row] if exact else codec.decode(side.buffer[slot])).double())
        return torch.stack(found[0]), torch.stack(found[1])

    def oracle(self, q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float = 0.0) -> Tensor:
        """Attention of one query token [num_qo_heads, head_dim] over k, v [n, num_kv_heads, dim] in stored space, float64."""
        q = q.double().unflatten(0, (k.shape[1], -1))
        if self.codec.k.read_transform is not None:
            q = torch.einsum("hgd,hde->hge", q, self.codec.k.read_transform.double())
        logits = torch.einsum("hgd,nhd->hgn", q, k) * scale
        logits = cap * torch.tanh(logits / cap) if cap else logits
        o = torch.einsum("hgn,nhd->hgd", logits.softmax(-1), v)
        if self.codec.v.read_transform is not None:
            o = torch.einsum("hgd,hde->hge", o, self.codec.v.read_transform.double())
        return o.flatten(0, 1)
