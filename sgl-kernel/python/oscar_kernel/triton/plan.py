"""What all layers of one step share, made on the device in one launch: window rows, and the work list of decode.

    work list   one item is a run of one sequence's tokens that one program per KV head reads:
                (request, begin, end, kind)   kind 0: positions begin .. end-1 of the 2-bit middle
                                              kind 1: entries begin .. end-1 of the windows' list below
                items of a request are neighbours, windows first; a request without tokens has one empty item;
                request -1 marks an unused item
    windows     entry i < sink_tokens is position i; entry sink_tokens + i is position kv_len - recent_tokens + i, and counts
                only if it is not a sink. window_rows[request, i] is its row, or -1: read the 2-bit row of its slot instead.

Everything has a fixed shape, nothing is read back by the host, and the work of a program is bounded by the windows and the
number of items, never by the context: a CUDA graph captures the launch once and replays it for any lengths. Long sequences
take items from a budget that all share, so one long request among short ones still fills the card.

Every program adds up the lengths of all requests on its own (a few hundred integers), which spares a second launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar_kernel.plan_read import ReadPlan
from oscar_kernel.triton.common import interpreted, next_power_of_2
from oscar_kernel.triton.tuning import Launch

WINDOW_ITEM = 128
"""Window entries of one item: about the bytes of 900 packed tokens, which is what a split of the middle holds."""
BLOCK_N = 64
"""Splits are multiples of this many tokens; a kernel's tile may be smaller or larger."""
MIN_TILES = 4
"""A split of fewer tiles costs more in merging than it gains."""


@dataclass
class TritonPlan:
    """Where the cached tokens of a ragged batch lie, on the device.

    Args:
        slots: flat int32 or int64 table of slots (or of pages, with page_size > 1).
        starts: [bs] int64, index in `slots` of each sequence's first entry.
        kv_lens: [bs] int32, tokens to read; 0 for a padded row.
        window_rows: [bs, sink_tokens + recent_tokens] int32, see the module's docstring.
        work: [num_items, 4] int32. work_indptr: [bs + 1] int32, items of each request.
        sink_tokens, recent_tokens: sizes of the windows. page_size: tokens of a page.
    """

    slots: Tensor
    starts: Tensor
    kv_lens: Tensor
    window_rows: Tensor
    work: Tensor
    work_indptr: Tensor
    sink_tokens: int
    recent_tokens: int
    page_size: int = 1


@triton.jit
def slot_of(slots_ptr, start, position, mask, PAGE: tl.constexpr):
    """int64 slots of positions of one sequence; 0 where masked."""
    if PAGE == 1:
        return tl.load(slots_ptr + start + position, mask=mask, other=0).to(tl.int64)
    page = tl.load(slots_ptr + start + position // PAGE, mask=mask, other=0).to(tl.int64)
    return tl.where(mask, page * PAGE + position % PAGE, 0)


@triton.jit
def plan_kernel(
    request_ptr, len_ptr, indptr_ptr, slots_ptr, slots_stride, row_of_slot_ptr, slot_of_row_ptr,
    starts_ptr, kv_lens_ptr, rows_ptr, work_ptr, work_indptr_ptr, bs, num_items, budget, pad_request,
    SINK: tl.constexpr, RECENT: tl.constexpr, ITEM: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr,
    PAGE: tl.constexpr, BS_PAD: tl.constexpr, ENTRIES: tl.constexpr, HAS_REQUEST: tl.constexpr, HAS_MAPS: tl.constexpr,
):  # fmt: skip
    """Grid: (bs,). Arguments as in `plan_decode`; ENTRIES is the tile in which lists are written."""
    b = tl.program_id(0)
    every = tl.arange(0, BS_PAD)
    lens = tl.load(len_ptr + every, mask=every < bs, other=0).to(tl.int32)
    if HAS_REQUEST:
        requests = tl.load(request_ptr + every, mask=every < bs, other=pad_request)
        lens = tl.where(requests == pad_request, 0, lens)
    n = tl.sum(tl.where(every == b, lens, 0), axis=0)
    if HAS_REQUEST:
        start = tl.load(request_ptr + b).to(tl.int64) * slots_stride
    else:
        start = tl.load(indptr_ptr + b).to(tl.int64)
    tl.store(starts_ptr + b, start)
    tl.store(kv_lens_ptr + b, n)

    # Which items are this request's.
    tiles = (tl.maximum(lens - (SINK + RECENT), 0) + (BLOCK_N - 1)) // BLOCK_N
    per_split = tl.maximum((tl.sum(tiles, axis=0) + budget - 1) // budget, MIN_TILES)
    window_items = (SINK + RECENT + ITEM - 1) // ITEM
    # An empty row has one empty item: somebody must write its zeros.
    items = tl.where(lens > 0, (tiles + per_split - 1) // per_split + window_items, 1)
    items = tl.where(every < bs, items, 0)
    first = tl.sum(tl.where(every < b, items, 0), axis=0)
    mine = tl.sum(tl.where(every == b, items, 0), axis=0)
    tl.store(work_indptr_ptr + b, first)
    middle_end = tl.maximum(n - RECENT, SINK)
    for at in range(0, mine, ENTRIES):
        i = at + tl.arange(0, ENTRIES)
        is_window = i < window_items
        begin = tl.where(is_window, i * ITEM, SINK + (i - window_items) * per_split * BLOCK_N)
        end = tl.where(
            is_window, tl.minimum(i * ITEM + ITEM, SINK + RECENT), tl.minimum(begin + per_split * BLOCK_N, middle_end)
        )
        end = tl.where(n > 0, end, begin)
        to = work_ptr + (first + i) * 4
        tl.store(to, tl.zeros((ENTRIES,), tl.int32) + b, mask=i < mine)
        tl.store(to + 1, begin, mask=i < mine)
        tl.store(to + 2, end, mask=i < mine)
        tl.store(to + 3, is_window.to(tl.int32), mask=i < mine)
    if b == bs - 1:
        tl.store(work_indptr_ptr + bs, first + mine)
        for at in range(first + mine, num_items, ENTRIES):
            i = at + tl.arange(0, ENTRIES)
            tl.store(work_ptr + i * 4, tl.full((ENTRIES,), -1, tl.int32), mask=i < num_items)

    # Window rows: only where both maps agree and the position lies in a window of this sequence.
    for at in range(0, SINK + RECENT, ENTRIES):
        i = at + tl.arange(0, ENTRIES)
        position = tl.where(i < SINK, i, n - RECENT + i - SINK)
        wanted = (i < SINK + RECENT) & tl.where(i < SINK, position < n, position >= SINK)
        row = tl.full((ENTRIES,), -1, tl.int32)
        if HAS_MAPS:
            slot = slot_of(slots_ptr, start, position, wanted, PAGE)
            known = tl.load(row_of_slot_ptr + slot, mask=wanted, other=-1).to(tl.int32)
            owner = tl.load(slot_of_row_ptr + known, mask=known >= 0, other=-1).to(tl.int64)
            row = tl.where(wanted & (known >= 0) & (owner == slot), known, -1)
        tl.store(rows_ptr + b * (SINK + RECENT) + i, row, mask=i < SINK + RECENT)


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
    """Fixed buffers of a plan, for a CUDA graph: allocate once for a batch size, fill with `plan_decode` each step.

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
        self.window_rows = ints(bs, max(1, sink_tokens + recent_tokens))
        self.work = ints(self.num_items, 4)
        self.work_indptr = ints(bs + 1)


def plan_decode(
    buffers: PlanBuffers,
    slots: Tensor,
    kv_lens: Tensor,
    *,
    req_pool_indices: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    row_of_slot: Tensor | None = None,
    slot_of_row: Tensor | None = None,
    sink_tokens: int = 0,
    recent_tokens: int = 0,
    page_size: int = 1,
    pad_request: int = -1,
) -> TritonPlan:
    """Resolve windows and share out the work of a step; one launch, no host synchronisation.

    Args:
        buffers: written in place.
        slots: req_to_token [max_num_reqs, max_context_len] with req_pool_indices, or kv_indices [num_entries] with kv_indptr.
        kv_lens: [bs] integer on the device, cached tokens to read.
        req_pool_indices: [bs] integer rows of req_to_token.
        kv_indptr: [bs + 1] integer, entries of each sequence in kv_indices (pages, with page_size > 1).
        row_of_slot, slot_of_row: maps of the windows, as in `oscar_kernel.plan_read`; None: no window row is valid.
        sink_tokens, recent_tokens: sizes of the windows, in tokens.
        page_size: tokens of an entry of kv_indices; 1 with req_to_token.
        pad_request: the row of req_to_token that marks padding (0 in SGLang's graphs); -1: none does.
    Raises:
        ValueError: not exactly one of req_pool_indices and kv_indptr.
    """
    if (req_pool_indices is None) == (kv_indptr is None):
        raise ValueError("plan_decode: give req_pool_indices (with req_to_token) or kv_indptr (with kv_indices), not both")
    bs = kv_lens.shape[0]
    plan = TritonPlan(
        slots, buffers.starts, buffers.kv_lens, buffers.window_rows, buffers.work, buffers.work_indptr,
        sink_tokens, recent_tokens, page_size,
    )  # fmt: skip
    if bs == 0:
        return plan
    plan_kernel[(bs,)](
        req_pool_indices, kv_lens, kv_indptr, slots, slots.stride(0) if req_pool_indices is not None else 0,
        row_of_slot, slot_of_row, plan.starts, plan.kv_lens, plan.window_rows, plan.work, plan.work_indptr,
        bs, buffers.num_items, buffers.budget, pad_request,
        sink_tokens, recent_tokens, WINDOW_ITEM, BLOCK_N, MIN_TILES, page_size, max(16, next_power_of_2(bs)), 256,
        req_pool_indices is not None, row_of_slot is not None,
        num_warps=4,
    )  # fmt: skip
    return plan


def plan_read(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: list[int] | Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    sink_tokens: int,
    recent_tokens: int,
    head_blocks: int = 8,
) -> TritonPlan:
    """`oscar_kernel.plan_read` for these kernels: the same arguments, a plan that they read. Allocates; not for capture.

    Args:
        kv_lens: [bs] on the host, or a tensor on the device.
        head_blocks: programs an item is read by, normally num_kv_heads.
    """
    device = req_to_token.device
    lens = kv_lens if isinstance(kv_lens, Tensor) else torch.tensor(kv_lens, dtype=torch.int32, device=device)
    budget = item_budget(lens.shape[0], head_blocks, num_sms(device), Launch().waves)
    buffers = PlanBuffers(lens.shape[0], budget, sink_tokens, recent_tokens, device)
    return plan_decode(
        buffers, req_to_token, lens, req_pool_indices=req_pool_indices, row_of_slot=row_of_slot, slot_of_row=slot_of_row,
        sink_tokens=sink_tokens, recent_tokens=recent_tokens,
    )  # fmt: skip


def from_read_plan(plan: ReadPlan, head_blocks: int = 8) -> TritonPlan:
    """The same plan in the form that these kernels read. Allocates; not for capture.

    Args:
        plan: from `oscar_kernel.plan_read`. head_blocks: see `item_budget`.
    """
    device, bs, windows = plan.slots.device, len(plan.kv_lens), plan.window_rows.shape[1]
    sizes = plan.sink_tokens, windows - plan.sink_tokens
    lens = torch.tensor(plan.kv_lens, dtype=torch.int32, device=device)
    buffers = PlanBuffers(bs, item_budget(bs, head_blocks, num_sms(device), Launch().waves), *sizes, device)
    request = torch.arange(bs, device=device)
    made = plan_decode(buffers, plan.slots, lens, req_pool_indices=request, sink_tokens=sizes[0], recent_tokens=sizes[1])
    made.window_rows[:, :windows] = torch.where(plan.window_mask, plan.window_rows, -1).int()
    return made


def num_sms(device: torch.device | str) -> int:
    """Multiprocessors of the card; a small number in the interpreter, which runs programs one by one."""
    if interpreted() or torch.device(device).type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
