"""Layers and batches of made-up numbers at real sizes, on the device: what the checks and the timings of this folder run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.side import LayerTransforms, Side
from oscar.format.windows import WindowTable
from oscar_kernel import LayerCache, LayerCodec, ReadPlan, plan_read
from oscar_kernel.layer import SideCache, SideCodec
from oscar_kernel.triton.common import TritonLayer
from oscar_kernel.triton.plan import PlanBuffers, TritonPlan, item_budget, num_sms, plan_tokens
from oscar_kernel.triton.tuning import Launch

SINK, RECENT = 64, 256


@dataclass
class Sizes:
    """What is checked and timed; `miniature` keeps the interpreter busy for a minute, not a day.

    heads: KV heads. kv_group_num: query heads for each. dim: of a head. The rest: tokens, sequences, layers and bytes.
    """

    heads: int = 8
    kv_group_num: int = 4
    dim: int = 128
    store_tokens: tuple = (1, 7, 33, 4096)
    decode_lens: tuple = (1, 63, 64, 320, 321, 1500, 8192, 20000)
    extend: tuple = ((0, 700), (5000, 300), (100, 1), (320, 129))
    bench_batches: tuple = (1, 8, 32)
    bench_contexts: tuple = (8192, 32768, 102400)
    bench_stores: tuple = (1, 32, 8192)
    bench_layers: int = 36
    l2_bytes: int = 256 << 20
    copy_bytes: int = 1 << 30

    @classmethod
    def miniature(cls) -> Sizes:
        return cls(
            heads=2, kv_group_num=2, dim=64, store_tokens=(1, 17), decode_lens=(1, 330), extend=((0, 20), (330, 5)),
            bench_batches=(1, 2), bench_contexts=(400,), bench_stores=(2,), bench_layers=3, l2_bytes=1, copy_bytes=1 << 20,
        )  # fmt: skip

    @property
    def num_qo_heads(self) -> int:
        return self.heads * self.kv_group_num

    @property
    def sm_scale(self) -> float:
        return self.dim**-0.5


@dataclass
class Variant:
    """Properties of a layer that choose other code. shaped: errors are passed on in the store. native: it stays in 16 bits."""

    fold: bool = True
    group_size: int | None = None
    shaped: bool = False
    native: bool = False


VARIANTS = {
    "V folded": Variant(),
    "V folded, error shaping": Variant(shaped=True),
    "V not folded, groups of 32": Variant(fold=False, group_size=32),
    "kept in 16 bits": Variant(native=True),
}


def codec_of(sizes: Sizes, device: str, variant: Variant | None = None) -> LayerCodec:
    """A layer's codec with random rotations, rounded to float32 as an artifact's are."""
    variant = variant or Variant()
    heads, dim = sizes.heads, sizes.dim
    if variant.native:
        return LayerCodec.native(heads, dim, dim, device=device)
    g = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(heads, dim, dim, generator=g, dtype=torch.float64)).Q.float()

    def side() -> Side:
        # A matrix that is exact in float16, as those of an artifact are.
        matrix = (torch.randn(heads, dim, dim, generator=g) / dim**0.5).triu(1).half() if variant.shaped else None
        return Side(rotation, torch.full((heads,), 0.96), shaping=matrix)

    fmt = RowFormat(dim, variant.group_size)
    return LayerCodec.of(LayerTransforms(side(), side()), fmt, fmt, device, fold_v=variant.fold)


def plausible_rows(fmt: RowFormat | LosslessFormat, num_slots: int, heads: int, device: str) -> Tensor:
    """Random codes, centres near 0 and steps near 1; or random numbers. [num_slots, heads, row_bytes] uint8."""
    if isinstance(fmt, LosslessFormat):
        return torch.randn(num_slots, heads, fmt.head_dim, device=device).bfloat16().view(torch.uint8)
    rows = torch.randint(0, 256, (num_slots, heads, fmt.row_bytes), dtype=torch.uint8, device=device)
    meta = rows.view(torch.float16)[..., fmt.code_bytes // 2 :]
    pair = torch.tensor([0.05, 0.75], dtype=torch.float16, device=device).repeat(fmt.num_groups)
    meta.copy_(pair * (1 + 0.2 * torch.rand(num_slots, heads, 1, device=device)).half())
    return rows


def random_side(side: SideCodec, num_slots: int, num_rows: int, device: str) -> SideCache:
    heads = side.clip.shape[0]
    window = torch.randn(num_rows + 1, heads, side.fmt.head_dim, device=device).bfloat16()
    return SideCache(plausible_rows(side.fmt, num_slots, heads, device), window)


class Batch:
    """Sequences in shuffled slots of a synthetic pool, with full windows; `layers` pools that share slots."""

    def __init__(self, lens: Sequence[int], codec: LayerCodec, device: str, layers: int = 1):
        bs = len(lens)
        self.lens, self.device, self.codec = list(lens), device, codec
        total, num_rows = sum(lens), bs * (SINK + RECENT)
        order, at = torch.randperm(total, device=device).int() + 1, 0
        self.req_to_token = torch.zeros(bs, max(lens), dtype=torch.int32, device=device)
        self.requests = torch.arange(bs, device=device)
        self.windows = WindowTable.full(bs, (SINK, RECENT), device=device)
        for b, n in enumerate(lens):
            self.req_to_token[b, :n] = order[at : at + n]
            position = torch.arange(n, device=device)
            position = position[(position < SINK) | (position >= n - RECENT)]
            self.windows.record(self.windows.rows(self.requests[b], position), position)
            at += n
        if isinstance(codec.k.fmt, LosslessFormat):
            # Windows and pool are random apart, and the kernels read such a layer from the pool.
            self.windows.position.fill_(-1)
        self.layers = [
            TritonLayer(LayerCache(*(random_side(side, total + 1, num_rows, device) for side in (codec.k, codec.v))), codec)
            for _ in range(layers)
        ]

    def plan(self, launch: Launch, head_blocks: int) -> TritonPlan:
        """The kernels' plan of all tokens, split for a launch. head_blocks: programs that an item is read by."""
        budget = item_budget(len(self.lens), head_blocks, num_sms(self.device), launch.waves)
        buffers = PlanBuffers(len(self.lens), budget, SINK, RECENT, self.device)
        lens = torch.tensor(self.lens, device=self.device)
        return plan_tokens(buffers, self.req_to_token, self.requests, lens, self.windows)

    def reference_plan(self) -> ReadPlan:
        return plan_read(self.req_to_token, self.requests, self.lens, self.windows)

    def oracle(self, q: Tensor, b: int, sm_scale: float) -> Tensor:
        """Output of sequence b in float64. q: [num_qo_heads, head_dim]."""
        plan, cache, codec = self.reference_plan(), self.layers[0].cache, self.codec
        slots, kept = plan.slots[b, : self.lens[b]], plan.window_mask[b]
        rows = []
        for side, stored in ((codec.k, cache.k), (codec.v, cache.v)):
            x = side.decode(stored.buffer[slots]).double()
            x[plan.window_positions[b][kept]] = stored.window[plan.window_rows[b][kept]].double()
            rows.append(x)
        k, v = rows
        q = torch.einsum("hgd,hde->hge", q.double().unflatten(0, (k.shape[1], -1)), codec.k.read_transform.double())
        o = torch.einsum("hgn,nhd->hgd", (torch.einsum("hgd,nhd->hgn", q, k) * sm_scale).softmax(-1), v)
        if codec.v.read_transform is not None:
            o = torch.einsum("hgd,hde->hge", o, codec.v.read_transform.double())
        return o.flatten(0, 1)


def empty_layer(codec: LayerCodec, n: int, device: str) -> TritonLayer:
    """With more slots than n tokens need, and as many window rows."""
    return TritonLayer(LayerCache.zeros(codec, n + 8, n, device), codec)


def new_tokens(sizes: Sizes, n: int, device: str) -> tuple[Tensor, ...]:
    """k, v, loc and window_rows of `store_kv` for n tokens."""
    k = torch.randn(n, sizes.heads, sizes.dim, device=device).bfloat16() * 2 + 0.5
    v = torch.randn(n, sizes.heads, sizes.dim, device=device).bfloat16()
    return k, v, torch.randperm(n + 8, device=device)[:n], torch.randperm(n, device=device)
