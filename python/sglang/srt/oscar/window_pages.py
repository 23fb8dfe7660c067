"""Who holds which pages of the windows: taken from SGLang's allocator of slots as requests grow, given back as they end.

A page of the windows is a page of the pool, so requests, their windows and the prefix cache share all memory, and SGLang's own
admission, eviction and retraction decide who waits when it runs out (`hooks.py` tells them what windows need). All of this is
decided on the host from lengths that it knows; the device is told, never asked.

When a request ends, its pages are kept for requests that will begin with the same tokens: up to RETAINED_SHARE of the pool.
Rings go before sinks, and the oldest first. Whoever needs memory that the prefix cache cannot give takes them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.oscar.windows import Windows, on_device
from torch import Tensor

from oscar.format.windows import pages_of

RETAINED_SHARE = 8
"""One part in so many of the pool's pages may be kept for prefixes of requests that have ended."""


@dataclass
class Held:
    """Pages of one request: numbers of the allocator's pages, on the device, in the order of the request's own.

    computed_sinks: the request began without a cached prefix, so that it wrote all of its sinks itself.
    """

    computed_sinks: bool = False
    sinks: list[Tensor] = field(default_factory=list)
    ring: list[Tensor] = field(default_factory=list)
    num_sinks: int = 0
    num_ring: int = 0


class WindowPages:
    """Pages of all requests.

    Args:
        windows: what rows hold. allocator: of the pool's slots, with pages of `windows.page_size`.
        req_to_token: SGLang's table, [max_num_reqs, max_context_len].
        retains: whether prefixes are cached, so that pages of ended requests are worth keeping.
    """

    def __init__(self, windows: Windows, allocator: OscarAllocator, req_to_token: Tensor, retains: bool):
        self.windows, self.allocator, self.req_to_token, self.retains = windows, allocator, req_to_token, retains
        self.page_size = windows.page_size
        self._held: dict[int, Held] = {}
        self._begun: set[int] = set()
        self._num_held = 0
        self._sinks: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._rings: deque[Tensor] = deque()
        self._num_retained = 0

    @property
    def held_slots(self) -> int:
        """Slots of pages that requests hold."""
        return self._num_held * self.page_size

    @property
    def retained_slots(self) -> int:
        """Slots of pages kept for prefixes."""
        return self._num_retained * self.page_size

    def missing(self, row: int | None, seq_len: int) -> int:
        """Slots of the pages that a request needs to reach so many tokens. row: of req_to_token, None before it has one."""
        held = Held() if row is None else self._held.get(row, Held())
        sinks, ring = self.windows.table.pages_for(seq_len)
        return (max(0, sinks - held.num_sinks) + max(0, ring - held.num_ring)) * self.page_size

    def grow(
        self, rows: Sequence[int], seq_lens: Sequence[int], tree_cache: Any, prefix_lens: Sequence[int] | None = None
    ) -> None:
        """Take the pages that requests need to reach these lengths.

        Args:
            rows: of req_to_token. seq_lens: tokens of each after the coming step. tree_cache: gives memory if there is none.
            prefix_lens: tokens of each before the step, in an extend; what a request has in its first one is a cached prefix.
        Raises:
            RuntimeError: no memory; admission and retraction should have seen to it.
        """
        owners: list[int] = []
        pages: list[int] = []
        wanted: list[tuple[Held, list[Tensor]]] = []
        for i, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
            held = self._held.get(row)
            if held is None:
                self._begun.add(row)
                held = self._held[row] = Held(computed_sinks=prefix_lens is not None and prefix_lens[i] == 0)
            sinks, ring = self.windows.table.pages_for(seq_len)
            first_ring = self.windows.table.sink_pages
            while held.num_sinks < sinks:
                owners.append(row)
                pages.append(held.num_sinks)
                wanted.append((held, held.sinks))
                held.num_sinks += 1
            while held.num_ring < ring:
                owners.append(row)
                pages.append(first_ring + held.num_ring)
                wanted.append((held, held.ring))
                held.num_ring += 1
        if not owners:
            return
        need = len(owners) * self.page_size
        self.allocator.evict_to_free_tokens(tree_cache, need)
        slots = self.allocator.alloc(need)
        if slots is None:
            raise RuntimeError(
                f"--kv-quant oscar: no memory for {len(owners)} pages of the 16-bit windows; lower --max-running-requests"
            )
        self._num_held += len(owners)
        for (_, kept), page in zip(wanted, (slots[:: self.page_size] // self.page_size).split(1), strict=True):
            kept.append(page)
        where = on_device([owners, pages], slots.device)
        self.windows.give(where[0], where[1], slots)

    def begins(self, row: int) -> bool:
        """Whether a request has taken its first pages since this was last asked: what it has then is a prefix of others'
        making, or of its own from before its session was idle."""
        begun = row in self._begun
        self._begun.discard(row)
        return begun

    def rest(self, row: int, num_tokens: int) -> None:
        """Take back the pages of a session that is idle, and keep them for its next turn as those of a prefix are kept.

        num_tokens: of the session, all in the pool.
        """
        self._release(row, num_tokens, object())

    def release(self, row: int, num_tokens: int = 0, prefix: Hashable = None) -> None:
        """Take back the pages of a request that ends, and keep them for requests that will begin with its tokens.

        Args:
            row: of req_to_token; the table still has the request's slots.
            num_tokens: of the request that the prefix cache may have, but for those beyond its last whole page; 0: nothing is
                kept.
            prefix: what tells its first `sink_tokens` tokens from others'.
        """
        self._release(row, num_tokens // self.page_size * self.page_size, prefix)

    def _release(self, row: int, num_tokens: int, prefix: Hashable) -> None:
        held = self._held.pop(row, None)
        if held is None:
            return
        self._num_held -= held.num_sinks + held.num_ring
        sinks, ring = _joined(held.sinks), _joined(held.ring)
        if not self.retains or num_tokens == 0:
            self._free(sinks, ring)
            self.windows.take_back(row)
            return
        table = self.windows.table
        num_sinks = min(num_tokens, table.sink_tokens)
        first_recent = max(num_sinks, num_tokens - table.recent_tokens)
        position = torch.cat((self._range(0, num_sinks), self._range(first_recent, num_tokens)))
        rows = table.held(torch.full_like(position, row), position)
        kept, other = sinks, self._sinks.pop(prefix, None)
        if other is not None:
            self._num_retained -= len(other)
            if not held.computed_sinks:
                # The same tokens once more, copied from a prefix that may have lost some: the older copy is as good or better.
                kept, other = other, sinks
                first = kept * table.rows_per_page
                theirs = (first.unsqueeze(1) + self._range(0, table.rows_per_page)).flatten()[:num_sinks]
                rows[:num_sinks] = torch.where(table.position[theirs] == position[:num_sinks], theirs, table.no_row)
        self._free(other)
        self.windows.bind(self.req_to_token[row, position].long(), rows)  # to the slots that the prefix cache has now
        self.windows.take_back(row)
        if kept is not None:
            self._sinks[prefix] = kept
            self._num_retained += len(kept)
        if ring is not None:
            self._rings.append(ring)
            self._num_retained += len(ring)
        self.reclaim(self._num_retained - self.allocator.num_pages // RETAINED_SHARE)

    def reclaim(self, num_pages: int) -> int:
        """Give back so many pages that are kept for prefixes, or all that there are. Returns how many."""
        given = 0
        while given < num_pages and self._num_retained > 0:
            pages = self._rings.popleft() if self._rings else self._sinks.popitem(last=False)[1]
            given += len(pages)
            self._num_retained -= len(pages)
            self._free(pages)
        return given

    def forget(self) -> None:
        """Hold nothing any more: the allocator was cleared."""
        self._held.clear()
        self._begun.clear()
        self._sinks.clear()
        self._rings.clear()
        self._num_held = self._num_retained = 0
        self.windows.table.first_row.fill_(-1)

    def _free(self, *pages: Tensor | None) -> None:
        for some in pages:
            if some is not None:
                self.allocator.free_page_ids(some)

    def _range(self, begin: int, end: int) -> Tensor:
        return torch.arange(begin, max(begin, end), device=self.req_to_token.device)


class OscarAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's allocator of pages, which also serves the windows.

    Slots that it hands out are cleared in the maps. Pages kept for prefixes are memory that it can still give.
    """

    window_pages: WindowPages
    windows: Windows

    def serve(self, windows: Windows, req_to_token: Tensor, retains: bool) -> None:
        """Begin to serve windows. Arguments as in `WindowPages`."""
        self.windows = windows
        self.window_pages = WindowPages(windows, self, req_to_token, retains)

    def alloc(self, need_size):
        return self._cleared(super().alloc(need_size))

    def alloc_extend(self, *args, **kwargs):
        return self._cleared(super().alloc_extend(*args, **kwargs))

    def alloc_decode(self, *args, **kwargs):
        return self._cleared(super().alloc_decode(*args, **kwargs))

    def _cleared(self, slots: Tensor | None) -> Tensor | None:
        if slots is not None:
            self.windows.clear_slots(slots)
        return slots

    def clear(self):
        super().clear()
        if hasattr(self, "window_pages"):  # SGLang's constructor clears too
            self.window_pages.forget()

    def evict_to_free_tokens(self, tree_cache, num_tokens):
        result = super().evict_to_free_tokens(tree_cache, num_tokens)
        self.window_pages.reclaim(pages_of(num_tokens - self.available_size(), self.page_size))
        return result

    def create_prefill_budget(self, tree_cache, *, num_mixed_decode_tokens=0):
        return _Budget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def max_new_tokens_for_memory(self, input_tokens, max_new_tokens, *, token_capacity, **kwargs):
        """As SGLang's, with the windows of the whole request taken from the capacity; None: the prompt cannot fit."""
        prompt = self.window_pages.missing(None, input_tokens + 1)
        if pages_of(input_tokens + 1, self.page_size) * self.page_size + prompt + self.page_size > token_capacity:
            return None
        windows = self.window_pages.missing(None, input_tokens + max_new_tokens)
        return super().max_new_tokens_for_memory(
            input_tokens, max_new_tokens, token_capacity=token_capacity - windows, **kwargs
        )


class _Budget(PrefillBudget):
    """What a prefill may take: pages kept for prefixes count as memory, as the prefix cache's own do."""

    def _available_and_evictable(self):
        return super()._available_and_evictable() + self.allocator.window_pages.retained_slots


def longest_request(capacity: int, windows: Windows) -> int:
    """Tokens of the longest request that a pool of so many slots holds."""
    return max(0, capacity - windows.table.num_pages * windows.page_size - windows.page_size - 1)


def _joined(pages: list[Tensor]) -> Tensor | None:
    return torch.cat(pages) if pages else None
