"""The 16-bit windows beside the 2-bit rows, on the device: what each row holds, shared by all layers.

Every token is in the pool in 2 bits. The first `sink_tokens` and the newest `recent_tokens` of a sequence also have a row
here. A row is the memory of SLOTS_PER_ROW slots of the pool that no token uses; `window_pages` takes and returns them, page by
page.

A running request finds its rows by itself (`oscar.format.windows`): nothing that happens to its slots can take them away. Two
maps serve others, who find a finished prefix by its slots:

    row_of_slot[slot] -> row or -1          slot_of_row[row] -> slot or -1

A pair counts only where both maps say so. Allocation of a slot clears its entry, and that of the row whose memory it now is, so
a stale pair can never agree. A request that begins with a cached prefix copies what it finds there into rows of its own, once
(`adopt`).

A step first asks for rows (`WindowTable.rows_for`), then plans what it reads, then records its own rows (`record`), since new
tokens take over rows that its prefix is still read from. A decode step reads its own token too, so it records first.

Numbers are written with `fill_` and `index_fill_`: on a GPU an assignment of a Python number would copy it there and wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar.format.sizing import SLOTS_PER_ROW
from oscar.format.windows import WindowTable, window_entries


def on_device(numbers: list, device: torch.device) -> Tensor:
    """Numbers of the host as an int64 tensor, copied so that the host does not wait for a GPU."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class WindowCounters:
    """Running totals since start, for metrics: sink tokens of reused prefixes. Reading one waits for the device."""

    def __init__(self, device: str):
        self._wanted = 0
        self._found = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, wanted: int, found: Tensor) -> None:
        """wanted: sink tokens of prefixes. found: how many of them have a row, a scalar on the device."""
        self._wanted += wanted
        self._found += found

    @property
    def sink_rows_reused(self) -> int:
        """Found in 16 bits."""
        return int(self._found)

    @property
    def sink_rows_lost(self) -> int:
        """Their 16-bit row was gone: they are read in 2 bits."""
        return self._wanted - int(self._found)


class Windows:
    """What the rows of the windows hold.

    Args:
        num_slots: slots of the pool, the reserved page included; a multiple of page_size.
        num_requests: rows of req_to_token, the reserved one included.
        sink_tokens, recent_tokens: sizes of the windows, in tokens.
        page_size: slots of a page, a multiple of SLOTS_PER_ROW.
        device: where the maps live.
    """

    def __init__(self, num_slots: int, num_requests: int, sink_tokens: int, recent_tokens: int, page_size: int, device: str):
        self.page_size = page_size
        num_rows = num_slots // SLOTS_PER_ROW
        windows = sink_tokens, recent_tokens
        self.table = WindowTable.empty(num_requests, num_rows, windows, page_size // SLOTS_PER_ROW, device)
        self.no_row = self.table.no_row
        self.counters = WindowCounters(device)
        self.row_of_slot = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device)

    def nbytes(self) -> int:
        """Bytes of the maps of slots and rows, but for the row that stands for none."""
        return self.row_of_slot.nbytes + self.slot_of_row[:-1].nbytes + self.table.position[:-1].nbytes

    def clear_slots(self, slots: Tensor) -> None:
        """Forget the rows of slots that were just allocated, and the rows that were their memory. slots [n] integer."""
        slots = slots.long()
        self.row_of_slot.index_fill_(0, slots, -1)
        self.slot_of_row.index_fill_(0, slots // SLOTS_PER_ROW, -1)

    def give(self, request: Tensor, page: Tensor, slots: Tensor) -> None:
        """Let requests hold pages that were just allocated (`clear_slots` has run).

        Args:
            request, page: [n] int64, who takes a page and as which of its pages.
            slots: [n * page_size] int64, slots of the pages, one page after another.
        """
        rows = slots[::SLOTS_PER_ROW] // SLOTS_PER_ROW
        self.table.position.index_fill_(0, rows, -1)
        self.table.first_row[request, page] = rows[:: self.table.rows_per_page].int()

    def take_back(self, request: int) -> None:
        """Let a request hold nothing."""
        self.table.first_row[request].fill_(-1)

    def find(self, slots: Tensor) -> Tensor:
        """Rows that hold the numbers of slots, `no_row` where there is none. slots: any shape, int64."""
        rows = self.row_of_slot[slots].long()
        agree = (rows >= 0) & (self.slot_of_row[rows.clamp(min=0)] == slots)
        return torch.where(agree, rows, self.no_row)

    def bind(self, slots: Tensor, rows: Tensor) -> None:
        """Let rows be found by slots. slots, rows: [n] int64; where the row is `no_row` nothing changes."""
        exists = rows != self.no_row
        self.row_of_slot[slots] = torch.where(exists, rows, self.row_of_slot[slots].long()).int()
        self.slot_of_row[rows] = slots.int()
        self.slot_of_row[self.no_row :].fill_(-1)

    def move_slots(self, target: Tensor, source: Tensor) -> None:
        """Let rows be found by other slots, to which the engine moves their tokens. target, source [n] int64."""
        rows = self.find(source)
        self.row_of_slot.index_fill_(0, source, -1)
        self.row_of_slot.index_fill_(0, target, -1)
        self.bind(target, rows)

    def record(self, loc: Tensor, rows: Tensor, position: Tensor) -> None:
        """Note what rows hold, for tokens being written.

        loc, position: [num_tokens] int64, slots and positions. rows: [num_tokens] int64, from `WindowTable.rows_for`.
        """
        self.table.record(rows, position)
        self.row_of_slot[loc] = torch.where(rows == self.no_row, -1, rows).int()
        self.slot_of_row[rows] = loc.int()
        self.slot_of_row[self.no_row :].fill_(-1)

    def adopt(self, req_to_token: Tensor, request: Tensor, prefix_lens: list[int]) -> tuple[Tensor, Tensor]:
        """What requests that begin with a cached prefix find of its windows: rows to copy into their own.

        The requests hold the pages already. Sink tokens found and not found are counted.

        Args:
            req_to_token: [max_num_reqs, max_context_len] integer, slot of each position of each request.
            request: [n] int64, rows of req_to_token. prefix_lens: [n] on the host, tokens of the cached prefixes, above 0.
        Returns:
            (source, target): [n * (sink_tokens + recent_tokens)] int64, rows of the windows; both `no_row` for nothing.
        """
        sinks, recent = self.table.sink_tokens, self.table.recent_tokens
        lens = on_device(prefix_lens, req_to_token.device)
        position, wanted = window_entries(lens, sinks, recent)
        rows = self.table.rows(request.unsqueeze(1), position)
        slots = req_to_token[request].gather(1, position.clamp(0, req_to_token.shape[1] - 1)).long()
        source = torch.where(wanted & (rows != self.no_row), self.find(slots), self.no_row)
        target = torch.where(source == self.no_row, self.no_row, rows)
        self.table.record(target.flatten(), position.flatten())
        self.counters.add(sum(min(n, sinks) for n in prefix_lens), (source[:, :sinks] != self.no_row).sum())
        return source.flatten(), target.flatten()
