"""The rule of the 16-bit windows, once: which positions lie in one, where their rows are, and when a row counts.

Every token is stored in 2 bits. The first `sink_tokens` positions of a sequence and its newest `recent_tokens` are also kept in
16 bits, as rows of the windows. A position that is in both windows is a sink.

A request finds its rows by itself, never by the slots of its tokens: a prefix cache may give it other slots for the same
tokens at any time. It holds pages of rows. Its first pages are for the sinks, in order of their positions; the others are a
ring for the recent tokens:

    entry of position p    p                                                     if p < sink_tokens
                           sink_pages * rows_per_page + (p - sink_tokens) % ring_tokens         else
    row of an entry        first_row[request, entry // rows_per_page] + entry % rows_per_page

A row counts for a position only where `position` says that it holds that position's numbers: a ring holds the newest tokens
alone, and a page that was just taken holds nothing. `oscar_kernel/triton/plan.py` says the same for the GPU, and a test
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


def pages_of(tokens: int, rows_per_page: int) -> int:
    """Pages that hold a row for each of so many tokens."""
    return -(-tokens // rows_per_page)


@dataclass(frozen=True)
class WindowTable:
    """Which rows each request holds, and what is in them. Written in place as requests come and go.

    Args:
        first_row: [num_requests, num_pages] int32, first row of each page that a request holds, or -1.
        position: [num_rows + 1] int32, position whose numbers a row holds, or -1. The last row takes writes that go nowhere
            and always has -1.
        sink_tokens, recent_tokens: sizes of the windows, in tokens.
        ring_tokens: positions that the ring holds at once, at least recent_tokens.
        rows_per_page: rows of a page, one after another.
    """

    first_row: Tensor
    position: Tensor
    sink_tokens: int
    recent_tokens: int
    ring_tokens: int
    rows_per_page: int

    @property
    def no_row(self) -> int:
        """The row that stands for none: the last one."""
        return self.position.shape[0] - 1

    @property
    def sink_pages(self) -> int:
        """Pages of the sinks; a request's other pages are its ring."""
        return pages_of(self.sink_tokens, self.rows_per_page)

    @classmethod
    def empty(
        cls,
        num_requests: int,
        num_rows: int,
        windows: tuple[int, int],
        rows_per_page: int = 1,
        device: str | torch.device = "cpu",
        ring_tokens: int | None = None,
    ) -> WindowTable:
        """A table in which nobody holds a row.

        Args:
            num_requests: rows of req_to_token. num_rows: of the windows, without the one that takes writes that go nowhere.
            windows: (sink_tokens, recent_tokens).
            ring_tokens: None for recent_tokens.
        """
        sinks, recent = windows
        ring = recent if ring_tokens is None else ring_tokens
        pages = pages_of(sinks, rows_per_page) + pages_of(ring, rows_per_page)
        first_row = torch.full((num_requests, max(1, pages)), -1, dtype=torch.int32, device=device)
        position = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device)
        return cls(first_row, position, sinks, recent, ring, rows_per_page)

    @classmethod
    def none(cls, device: str | torch.device = "cpu") -> WindowTable:
        """No windows at all: every token is read in 2 bits."""
        return cls.empty(1, 0, (0, 0), device=device)

    @classmethod
    def full(
        cls,
        num_requests: int,
        windows: tuple[int, int],
        rows_per_page: int = 1,
        device: str | torch.device = "cpu",
        ring_tokens: int | None = None,
    ) -> WindowTable:
        """A table in which every request holds all the rows that it can use, one request after another, still empty.

        Arguments as in `empty`.
        """
        table = cls.empty(num_requests, 0, windows, rows_per_page, device, ring_tokens)
        num_pages = table.num_pages
        position = torch.full((num_requests * num_pages * rows_per_page + 1,), -1, dtype=torch.int32, device=device)
        if num_pages:
            order = torch.arange(num_requests * num_pages, dtype=torch.int32, device=device)
            table.first_row.copy_((order * rows_per_page).view(num_requests, num_pages))
        return replace(table, position=position)

    @property
    def num_pages(self) -> int:
        """Pages of a request whose windows are full."""
        return self.sink_pages + pages_of(self.ring_tokens, self.rows_per_page)

    def pages_for(self, seq_len: int) -> tuple[int, int]:
        """Pages that a sequence of so many tokens needs: (for its sinks, for its ring)."""
        sinks, ring = min(seq_len, self.sink_tokens), min(max(seq_len - self.sink_tokens, 0), self.ring_tokens)
        return pages_of(sinks, self.rows_per_page), pages_of(ring, self.rows_per_page)

    def to(self, device: str | torch.device) -> WindowTable:
        """The table with its tensors elsewhere."""
        return replace(self, first_row=self.first_row.to(device), position=self.position.to(device))

    def rows(self, request: Tensor, position: Tensor) -> Tensor:
        """Rows that requests have for positions, whatever they hold now; `no_row` where a page is missing.

        Args:
            request, position: int64, shapes that broadcast. Positions may be negative; these have no row.
        Returns:
            The broadcast shape, int64.
        """
        sinks, per_page = self.sink_tokens, self.rows_per_page
        ring = self.sink_pages * per_page + (position - sinks) % max(1, self.ring_tokens)
        entry = torch.where(position < sinks, position.clamp(min=0), ring)
        first = self.first_row[request, (entry // per_page).clamp(max=self.first_row.shape[1] - 1)].long()
        exists = (first >= 0) & (position >= 0)
        if self.ring_tokens == 0:
            exists &= position < sinks
        return torch.where(exists, first + entry % per_page, self.no_row)

    def rows_for(self, request: Tensor, position: Tensor, seq_len: Tensor) -> Tensor:
        """`rows` of tokens that are about to be written: `no_row` too for those in no window of their sequence.

        seq_len: int64, length of the token's sequence after the step.
        """
        is_sink, is_recent = in_windows(position, seq_len, self.sink_tokens, self.recent_tokens)
        return torch.where(is_sink | is_recent, self.rows(request, position), self.no_row)

    def held(self, request: Tensor, position: Tensor) -> Tensor:
        """`rows`, but only those that hold the numbers of their positions; `no_row` for the others."""
        rows = self.rows(request, position)
        return torch.where(self.position[rows] == position, rows, self.no_row)

    def record(self, rows: Tensor, position: Tensor) -> None:
        """Note what rows hold from now on. rows, position: [n] int64, rows as `rows` gave them."""
        self.position[rows] = position.int()
        self.position[self.no_row :].fill_(-1)


def in_windows(position: Tensor, seq_len: Tensor, sink_tokens: int, recent_tokens: int) -> tuple[Tensor, Tensor]:
    """Which positions lie in a window of their own sequence.

    Args:
        position, seq_len: int64, shapes that broadcast; positions are below seq_len.
        sink_tokens, recent_tokens: sizes of the windows, in tokens.
    Returns:
        (is_sink, is_recent) bool; no position is both.
    """
    is_sink = position < sink_tokens
    return is_sink, (position >= seq_len - recent_tokens) & ~is_sink


def window_entries(seq_len: Tensor, sink_tokens: int, recent_tokens: int) -> tuple[Tensor, Tensor]:
    """The positions of both windows, as a list with one entry a window row.

    Entry i < sink_tokens is position i; entry sink_tokens + i is position seq_len - recent_tokens + i.

    Args:
        seq_len: [bs] int64. sink_tokens, recent_tokens: sizes of the windows, in tokens.
    Returns:
        positions [bs, sink_tokens + recent_tokens] int64, and which of them exist and are not listed twice, bool.
    """
    lens = seq_len.unsqueeze(1)
    sink = torch.arange(sink_tokens, device=lens.device).expand(len(lens), sink_tokens)
    recent = lens - recent_tokens + torch.arange(recent_tokens, device=lens.device)
    return torch.cat((sink, recent), dim=1), torch.cat((sink < lens, recent >= sink_tokens), dim=1)
