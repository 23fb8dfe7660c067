"""The 16-bit windows beside the 2-bit pool: which slots own a row, shared by all layers.

Every token is in the pool in 2 bits. The first `sink_tokens` and the newest `recent_tokens` of a sequence also own a row here:

    row_of_slot[slot] -> row or -1          slot_of_row[row] -> slot or -1

A row counts for a slot only where both maps say so (`oscar.format.windows`). Allocation of a slot clears the first map, taking
a row overwrites the second, so a stale pair can never agree: losing a row costs one token its precision, nothing else.

A step first asks for rows (`rows_for`), then plans what it reads, then records its own rows (`record`), since new tokens take
over rows that its prefixes are still read from. A decode step reads its own token too, so it records first.

Numbers are written with `fill_` and `index_fill_`: on a GPU an assignment of a Python number would copy it there and wait.

Rows   0 .. num_requests * recent_tokens - 1    a ring for each request row: row = request * recent_tokens + position % recent
       then num_sink_rows                       handed out least recently used first, never one that a request still holds
       then one                                 takes writes that belong nowhere; no slot ever owns it
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar.format.sizing import SINK_SHARE
from oscar.format.windows import WindowMaps, in_windows


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
    """The two maps and who may take which row.

    Args:
        num_slots: slots of the pool, the reserved ones included.
        num_requests: rows of req_to_token, the reserved one included.
        sink_tokens, recent_tokens: sizes of the windows, in tokens.
        device: where the maps live.
    """

    def __init__(self, num_slots: int, num_requests: int, sink_tokens: int, recent_tokens: int, device: str):
        self.num_requests = num_requests
        self.first_sink_row = num_requests * recent_tokens
        self.num_sink_rows = SINK_SHARE * num_requests * sink_tokens
        self.num_rows = self.no_row = self.first_sink_row + self.num_sink_rows
        self.maps = WindowMaps(
            torch.full((num_slots,), -1, dtype=torch.int32, device=device),
            torch.full((self.num_rows + 1,), -1, dtype=torch.int64, device=device),
            sink_tokens,
            recent_tokens,
        )
        self.counters = WindowCounters(device)
        # Of each sink row: the step at which a request last took or found it; one more entry takes writes that belong nowhere.
        # Of each request row: the sink rows that it holds, by position; num_sink_rows for none.
        self._last_use = torch.zeros(self.num_sink_rows + 1, dtype=torch.int64, device=device)
        self._held = torch.full((num_requests, sink_tokens), self.num_sink_rows, dtype=torch.int64, device=device)
        self._step = 0

    def clear_slots(self, slots: Tensor) -> None:
        """Forget the rows of slots that were just allocated. slots [n] integer."""
        self.maps.row_of_slot.index_fill_(0, slots.long(), -1)

    def move_slots(self, target: Tensor, source: Tensor) -> None:
        """Let rows follow slots that the engine moves. target, source [n] int64."""
        rows = self.maps.rows_of(source)
        self.maps.row_of_slot.index_fill_(0, source, -1)
        self.record(target, rows)

    def rows_for(self, request: Tensor, position: Tensor, seq_len: Tensor, num_sinks: int) -> Tensor:
        """Rows for tokens that are about to be written. Their requests hold the sink rows from now on.

        Args:
            request: [num_tokens] int64, req_to_token row of each token; 0 marks padding.
            position: [num_tokens] int64.
            seq_len: [num_tokens] int64, length of the token's sequence after this step.
            num_sinks: how many of the positions are below sink_tokens, known on the host; padding may count or not.
        Returns:
            [num_tokens] int64 row of each token; `no_row` for none.
        """
        if num_sinks > 0:
            self._take_sink_rows(request, position, (position < self.maps.sink_tokens) & (request > 0), num_sinks)
        return self._rows(request, position, seq_len)

    def rows_for_decode(self, request: Tensor, seq_len: Tensor) -> Tensor:
        """`rows_for` for one new token a sequence: sink rows are those that `reserve_sinks` took when the prompt came.

        Shapes are fixed and the host reads nothing, so that a CUDA graph can hold it.

        Args:
            request: [bs] int64, req_to_token rows; 0 marks padding. seq_len: [bs] int64, the new token included.
        Returns:
            [bs] int64 row of each token; `no_row` for none.
        """
        return self._rows(request, seq_len - 1, seq_len)

    def record(self, loc: Tensor, rows: Tensor) -> None:
        """Set both maps for tokens being written.

        loc: [num_tokens] int64 slots. rows: [num_tokens] int64, as `rows_for` gave them.
        """
        maps = self.maps
        maps.row_of_slot[loc] = torch.where(rows == self.no_row, -1, rows).int()
        maps.slot_of_row[rows] = loc
        maps.slot_of_row[self.no_row :].fill_(-1)

    def reserve_sinks(self, request: Tensor, seq_lens: list[int]) -> None:
        """Take the sink rows that decode steps will write, for sequences that are still shorter than the sink window.

        request: [bs] int64, req_to_token rows. seq_lens: tokens written so far, on the host.
        """
        short = [(b, p) for b, n in enumerate(seq_lens) for p in range(n, self.maps.sink_tokens)]
        if short:
            index, position = torch.tensor(short, device=self.maps.row_of_slot.device).unbind(1)
            self._take_sink_rows(request[index], position, torch.ones_like(index, dtype=torch.bool), len(short))

    def note_prefixes(self, req_to_token: Tensor, request: Tensor, prefix_lens: list[int], started: list[int]) -> None:
        """Record which sink rows the requests of an extend batch find, so that they keep them; count what they lost.

        Args:
            req_to_token: [max_num_reqs, max_context_len] integer, slot of each position of each request.
            request: [bs] int64, req_to_token rows.
            prefix_lens: [bs] on the host, tokens of the cached prefixes.
            started: indices into the batch of requests that run their first chunk now; only these count in the metrics.
        """
        sinks = self.maps.sink_tokens
        if sinks == 0:
            return
        self._step += 1
        slots = req_to_token[request, :sinks].long()
        cached = torch.arange(slots.shape[1], device=slots.device) < torch.tensor(prefix_lens, device=slots.device).unsqueeze(1)
        rows = torch.where(cached, self.maps.rows_of(torch.where(cached, slots, 0)), self.no_row)
        index = torch.where(rows == self.no_row, self.num_sink_rows, rows - self.first_sink_row)
        self._held.index_fill_(0, request, self.num_sink_rows)
        self._held[request, : slots.shape[1]] = index
        self._last_use.index_fill_(0, index.flatten(), self._step)
        wanted = sum(min(prefix_lens[b], sinks) for b in started)
        if wanted:
            self.counters.add(wanted, (rows[started] != self.no_row).sum())

    def _rows(self, request: Tensor, position: Tensor, seq_len: Tensor) -> Tensor:
        """Rows of tokens, sinks from those that their request holds."""
        sinks, recent = self.maps.sink_tokens, self.maps.recent_tokens
        is_sink, is_recent = in_windows(position, seq_len, sinks, recent)
        ring = request * recent + position % max(recent, 1)
        rows = torch.where(is_recent & (request > 0), ring, self.no_row)
        if sinks > 0:
            held = self._held[request, position.clamp(0, sinks - 1)]
            rows = torch.where(is_sink & (request > 0), self.first_sink_row + held, rows)
        return rows

    def _take_sink_rows(self, request: Tensor, position: Tensor, is_sink: Tensor, num_sinks: int) -> None:
        """Let requests hold rows for their sink tokens: the least recently used ones that no request holds."""
        self._step += 1
        # Requests hold at most half of the rows (SINK_SHARE), so the other half always has enough for every request row.
        age = self._last_use.clone()
        age.index_fill_(0, self._held.flatten(), torch.iinfo(torch.int64).max)
        free = torch.topk(age[:-1], min(num_sinks, self.num_sink_rows), largest=False, sorted=False).indices
        rank = (is_sink.cumsum(0) - 1).clamp(0, free.shape[0] - 1)
        taken = torch.where(is_sink, free[rank], self.num_sink_rows)
        self._last_use.index_fill_(0, taken, self._step)
        # Whoever wrote these rows last has lost them now, not when they are written: else a prefix hit in between would find
        # a row valid that this request is going to write.
        self.maps.slot_of_row.index_fill_(0, self.first_sink_row + taken, -1)
        # What is no sink is written to the row of padding, which holds nothing.
        self._held[torch.where(is_sink, request, 0), position.clamp(0, self.maps.sink_tokens - 1)] = taken
