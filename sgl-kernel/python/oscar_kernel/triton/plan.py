"""What all layers of one step share, made on the device in one launch: window rows, and the work list of decode.

    windows     entry i is one position of a sequence, see `window_entry`. window_rows[request, i] is its row, or -1: read the
                2-bit row of its slot instead, if the entry counts.
    work list   one item is a run of one sequence's tokens that one program per KV head reads:
                (request, begin, end, kind)   kind 0: positions begin .. end-1 of the 2-bit middle
                                              kind 1: entries begin .. end-1 of the windows
                items of a request are neighbours, windows first; a request without tokens has one empty item;
                request -1 marks an unused item

The rule of the windows is that of `oscar.format.windows`; `window_entry`, `entry_of` and `row_of` say it here, once.

Everything has a fixed shape, nothing is read back by the host, and the work of a program is bounded by the windows and the
number of items, never by the context: a CUDA graph captures the launch once and replays it for any lengths. Long sequences
take items from a budget that all share, so one long request among short ones still fills the card.

Every program adds up the lengths of all requests on its own (a few hundred integers), which spares a second launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar.format.windows import WindowTable
from oscar_kernel.triton.common import interpreted
from oscar_kernel.triton.planes import next_power_of_2

WINDOW_ITEM = 128
"""Window entries of one item: about the bytes of 900 packed tokens, which is what a split of the middle holds."""
BLOCK_N = 64
"""Splits are multiples of this many tokens; a kernel's tile may be smaller or larger."""
MIN_TILES = 4
"""A split of fewer tiles costs more in merging than it gains."""
ENTRIES = 256
"""Entries of a list that a program writes at once."""


class PlanTensors(NamedTuple):
    """Where the cached tokens of a ragged batch lie: what the kernels read.

    Args:
        slots: req_to_token, [max_num_reqs, max_context_len] int32 or int64.
        starts: [bs] int64, index in the flat `slots` of each sequence's first slot.
        kv_lens: [bs] int32, tokens to read; may be 0.
        window_rows: [bs, sink_tokens + recent_tokens] int32, see the module's docstring.
        work: [num_items, 4] int32. work_indptr: [bs + 1] int32, items of each request.
    """

    slots: Tensor
    starts: Tensor
    kv_lens: Tensor
    window_rows: Tensor
    work: Tensor
    work_indptr: Tensor


class TritonPlan(NamedTuple):
    """A plan: its tensors, and the sizes of the windows in tokens."""

    tensors: PlanTensors
    sink_tokens: int
    recent_tokens: int

    @property
    def num_items(self) -> int:
        return self.tensors.work.shape[0]


@triton.jit
def slot_of(slots_ptr, start, position, mask):
    """int64 slots of positions of one sequence; 0 where masked."""
    return tl.load(slots_ptr + start + position, mask=mask, other=0).to(tl.int64)


@triton.jit
def window_entry(i, kv_len, SINK: tl.constexpr, RECENT: tl.constexpr):
    """Position of the windows' entry i < SINK + RECENT, and whether it counts: it exists and is not listed twice."""
    position = tl.where(i < SINK, i, kv_len - RECENT + i - SINK)
    return position, tl.where(i < SINK, position < kv_len, position >= SINK)


@triton.jit
def entry_of(position, kv_len, SINK: tl.constexpr, RECENT: tl.constexpr):
    """Entry of a position < kv_len in the windows, and whether it lies in one."""
    entry = tl.where(position < SINK, position, SINK + RECENT - kv_len + position)
    return entry, (position < SINK) | (position >= tl.maximum(kv_len - RECENT, SINK))


@triton.jit
def row_of(
    request, position, mask, first_row_ptr, position_ptr,
    SINK: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """int32 window rows that a request holds for positions: only where the row holds that position's numbers, else -1."""
    SINK_ENTRIES: tl.constexpr = (SINK + PAGE - 1) // PAGE * PAGE
    entry = tl.where(position < SINK, position, SINK_ENTRIES + (position - SINK) % RING)
    first = tl.load(first_row_ptr + request * PAGES + entry // PAGE, mask=mask, other=-1)
    row = first + entry % PAGE
    held = tl.load(position_ptr + row, mask=mask & (first >= 0), other=-1)
    return tl.where(mask & (first >= 0) & (held == position), row, -1)


@triton.jit
def plan_kernel(
    request_ptr, len_ptr, slots_stride, first_row_ptr, position_ptr, plan, bs, num_items, budget,
    SINK: tl.constexpr, RECENT: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, ITEM: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, BS_PAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Grid: (bs,). plan: `PlanTensors`, all but slots written. ENTRIES: tile in which lists are written."""
    b = tl.program_id(0)
    every = tl.arange(0, BS_PAD)
    lens = tl.load(len_ptr + every, mask=every < bs, other=0).to(tl.int32)
    n = tl.sum(tl.where(every == b, lens, 0), axis=0)
    request = tl.load(request_ptr + b).to(tl.int64)
    start = request * slots_stride
    tl.store(plan.starts + b, start)
    tl.store(plan.kv_lens + b, n)

    # Which items are this request's.
    tiles = (tl.maximum(lens - (SINK + RECENT), 0) + (BLOCK_N - 1)) // BLOCK_N
    per_split = tl.maximum((tl.sum(tiles, axis=0) + budget - 1) // budget, MIN_TILES)
    window_items = (SINK + RECENT + ITEM - 1) // ITEM
    # An empty row has one empty item: somebody must write its zeros.
    items = tl.where(lens > 0, (tiles + per_split - 1) // per_split + window_items, 1)
    items = tl.where(every < bs, items, 0)
    first = tl.sum(tl.where(every < b, items, 0), axis=0)
    mine = tl.sum(tl.where(every == b, items, 0), axis=0)
    tl.store(plan.work_indptr + b, first)
    middle_end = tl.maximum(n - RECENT, SINK)
    for at in range(0, mine, ENTRIES):
        i = at + tl.arange(0, ENTRIES)
        is_window = i < window_items
        begin = tl.where(is_window, i * ITEM, SINK + (i - window_items) * per_split * BLOCK_N)
        end = tl.where(
            is_window, tl.minimum(i * ITEM + ITEM, SINK + RECENT), tl.minimum(begin + per_split * BLOCK_N, middle_end)
        )
        end = tl.where(n > 0, end, begin)
        to = plan.work + (first + i) * 4
        tl.store(to, tl.zeros((ENTRIES,), tl.int32) + b, mask=i < mine)
        tl.store(to + 1, begin, mask=i < mine)
        tl.store(to + 2, end, mask=i < mine)
        tl.store(to + 3, is_window.to(tl.int32), mask=i < mine)
    if b == bs - 1:
        tl.store(plan.work_indptr + bs, first + mine)
        for at in range(first + mine, num_items, ENTRIES):
            i = at + tl.arange(0, ENTRIES)
            tl.store(plan.work + i * 4, tl.full((ENTRIES,), -1, tl.int32), mask=i < num_items)

    for at in range(0, SINK + RECENT, ENTRIES):
        i = at + tl.arange(0, ENTRIES)
        position, counts = window_entry(i, n, SINK, RECENT)
        counts = counts & (i < SINK + RECENT)
        row = row_of(request, position, counts, first_row_ptr, position_ptr, SINK, RING, PAGE, PAGES)
        tl.store(plan.window_rows + b * (SINK + RECENT) + i, row, mask=i < SINK + RECENT)


def window_items(sink_tokens: int, recent_tokens: int) -> int:
    """Items that the windows of one request take."""
    return -(-(sink_tokens + recent_tokens) // WINDOW_ITEM)


def item_budget(bs: int, head_blocks: int, num_sms: int, waves: int) -> int:
    """Splits that all requests together may take, so that a step fills the card `waves` programs deep on each SM.

    Args:
        bs: sequences. head_blocks: programs an item is read by (KV heads on this rank, times blocks of query heads).
        num_sms: multiprocessors of the card. waves: programs for each; several run at once and hide each other's latency.
    """
    return max(bs, -(-num_sms * waves // head_blocks))


def item_count(bs: int, budget: int, sink_tokens: int, recent_tokens: int) -> int:
    """Entries of a work list that `bs` requests can never exceed."""
    return bs * (1 + window_items(sink_tokens, recent_tokens)) + budget


class PlanBuffers:
    """Fixed buffers of a plan, for a CUDA graph: allocate once for a batch size, fill with `plan_tokens` each step.

    Args:
        bs: rows of the batch, padding included. budget: from `item_budget`.
        sink_tokens, recent_tokens: sizes of the windows. device: where.
    """

    def __init__(self, bs: int, budget: int, sink_tokens: int, recent_tokens: int, device: torch.device | str):
        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.budget = budget
        self.num_items = item_count(bs, budget, sink_tokens, recent_tokens)
        self.starts = ints(bs, dtype=torch.int64)
        self.kv_lens = ints(bs)
        self.window_rows = ints(bs, max(1, sink_tokens + recent_tokens))  # never without an address
        self.work = ints(self.num_items, 4)
        self.work_indptr = ints(bs + 1)


def plan_tokens(
    buffers: PlanBuffers, req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, windows: WindowTable
) -> TritonPlan:
    """Resolve windows and share out the work of a step; one launch, no host synchronisation.

    Args:
        buffers: written in place; made for the sizes of these windows.
        req_to_token: [max_num_reqs, max_context_len] int32 or int64, slot of each position of each request.
        req_pool_indices: [bs] integer, rows of req_to_token.
        kv_lens: [bs] integer on the device, cached tokens to read; a row of 0 reads nothing, and its output is 0.
        windows: what the requests hold, on the device.
    """
    bs = kv_lens.shape[0]
    tensors = PlanTensors(req_to_token, buffers.starts, buffers.kv_lens, buffers.window_rows, buffers.work, buffers.work_indptr)
    plan = TritonPlan(tensors, windows.sink_tokens, windows.recent_tokens)
    if bs == 0:
        return plan
    plan_kernel[(bs,)](
        request_ptr=req_pool_indices,
        len_ptr=kv_lens,
        slots_stride=req_to_token.stride(0),
        first_row_ptr=windows.first_row,
        position_ptr=windows.position,
        plan=tensors,
        bs=bs,
        num_items=buffers.num_items,
        budget=buffers.budget,
        RING=max(1, windows.ring_tokens),
        PAGE=windows.rows_per_page,
        PAGES=windows.first_row.shape[1],
        SINK=windows.sink_tokens,
        RECENT=windows.recent_tokens,
        ITEM=WINDOW_ITEM,
        BLOCK_N=BLOCK_N,
        MIN_TILES=MIN_TILES,
        BS_PAD=max(16, next_power_of_2(bs)),
        ENTRIES=ENTRIES,
        num_warps=4,
    )
    return plan


def num_sms(device: torch.device | str) -> int:
    """Multiprocessors of the card; a small number in the interpreter, which runs programs one by one."""
    if interpreted() or torch.device(device).type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
