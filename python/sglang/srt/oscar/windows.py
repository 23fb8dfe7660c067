"""The 16-bit windows beside the 2-bit pool: which slots own a row, shared by all layers.

Every token is in the pool in 2 bits. The first `sink_tokens` and the newest `recent_tokens` of a sequence also own a row here:

    row_of_slot[slot] -> row or -1          slot_of_row[row] -> slot or -1

A row counts for a slot only where both maps say so. Allocation of a slot clears the first map, taking a row overwrites the
second, so a stale pair can never agree: losing a row costs one token its precision, nothing else.

Rows   0 .. num_requests * recent_tokens - 1    a ring for each request slot: row = request * recent_tokens + position % recent
       then num_sink_rows                       handed out least recently used first, never one that a request still holds
       then one                                 takes writes that belong nowhere; no slot ever owns it
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar.format.sizing import SINK_SHARE
from oscar_kernel import ReadPlan, plan_read


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
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        self.first_sink_row = num_requests * recent_tokens
        self.num_sink_rows = SINK_SHARE * num_requests * sink_tokens
        self.num_rows = self.first_sink_row + self.num_sink_rows
        self.no_row = self.num_rows
        self.row_of_slot = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.slot_of_row = torch.full((self.num_rows + 1,), -1, dtype=torch.int64, device=device)
        self.counters = WindowCounters(device)
        # Of each sink row: the step at which a request last took or found it; one more entry takes writes that belong nowhere.
        # Of each request slot: the sink rows it holds, by position; num_sink_rows for none.
        self._last_use = torch.zeros(self.num_sink_rows + 1, dtype=torch.int64, device=device)
        self._held = torch.full((num_requests, sink_tokens), self.num_sink_rows, dtype=torch.int64, device=device)
        self._step = 0

    def clear_slots(self, slots: Tensor) -> None:
        """Forget the rows of slots that were just allocated. slots [n] integer."""
        self.row_of_slot[slots.long()] = -1

    def move_slots(self, target: Tensor, source: Tensor) -> None:
        """Let rows follow slots that the engine moves. target, source [n] int64."""
        rows = self.row_of_slot[source].long()
        valid = (rows >= 0) & (self.slot_of_row[rows.clamp(min=0)] == source)
        self.row_of_slot[source] = -1
        self.row_of_slot[target] = torch.where(valid, rows, -1).int()
        self.slot_of_row[torch.where(valid, rows, self.no_row)] = target
        self.slot_of_row[self.no_row] = -1

    def assign(self, request: Tensor, position: Tensor, seq_len: Tensor, loc: Tensor, num_sinks: int) -> Tensor:
        """Give the tokens about to be written their rows and record both maps.

        Args:
            request: [num_tokens] int64, req_to_token row of each token; 0 marks padding.
            position: [num_tokens] int64.
            seq_len: [num_tokens] int64, length of the token's sequence after this step.
            loc: [num_tokens] int64, slots being written.
            num_sinks: how many of the positions are below sink_tokens, known on the host; padding may count or not.
        Returns:
            [num_tokens] int64 row of each token; `no_row` for none.
        """
        if num_sinks > 0:
            self._take_sink_rows(request, position, (position < self.sink_tokens) & (request > 0), num_sinks)
        return self._record(request, position, seq_len, loc)

    def assign_decode(self, request: Tensor, seq_len: Tensor, loc: Tensor) -> Tensor:
        """`assign` for one new token a sequence, with fixed shapes and nothing read by the host, so that a CUDA graph can hold
        it: sink rows are those that `reserve_sinks` took for the request when its prompt came.

        Args:
            request: [bs] int64, req_to_token rows; 0 marks padding. seq_len: [bs] int64, the new token included.
            loc: [bs] int64, slots being written.
        Returns:
            [bs] int64 row of each token; `no_row` for none.
        """
        return self._record(request, seq_len - 1, seq_len, loc)

    def reserve_sinks(self, request: Tensor, seq_lens: list[int]) -> None:
        """Take the sink rows that decode steps will write, for sequences that are still shorter than the sink window.

        request: [bs] int64, req_to_token rows. seq_lens: tokens written so far, on the host.
        """
        short = [(b, p) for b, n in enumerate(seq_lens) for p in range(n, self.sink_tokens)]
        if short:
            index, position = torch.tensor(short, device=self.row_of_slot.device).unbind(1)
            self._take_sink_rows(request[index], position, torch.ones_like(index, dtype=torch.bool), len(short))

    def _record(self, request: Tensor, position: Tensor, seq_len: Tensor, loc: Tensor) -> Tensor:
        """Rows of tokens, sinks from those that their request holds; both maps are set."""
        is_sink = (position < self.sink_tokens) & (request > 0)
        is_recent = (position >= seq_len - self.recent_tokens) & ~is_sink & (request > 0)
        ring = request * self.recent_tokens + position % max(self.recent_tokens, 1)
        rows = torch.where(is_recent, ring, self.no_row)
        if self.sink_tokens > 0:
            held = self._held[request, position.clamp(0, self.sink_tokens - 1)]
            rows = torch.where(is_sink, self.first_sink_row + held, rows)
        self.row_of_slot[loc] = torch.where(rows == self.no_row, -1, rows).int()
        self.slot_of_row[rows] = loc
        self.slot_of_row[self.no_row] = -1
        return rows

    def plan(self, req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: list[int]) -> ReadPlan:
        """`plan_read` over these maps."""
        return plan_read(
            req_to_token,
            req_pool_indices,
            kv_lens,
            self.row_of_slot,
            self.slot_of_row,
            self.sink_tokens,
            self.recent_tokens,
        )

    def note_prefixes(self, rows: Tensor, prefix_lens: list[int], req_pool_indices: Tensor, started: list[int]) -> None:
        """Record which sink rows the requests of an extend batch found, so that they keep them; count what they lost.

        Args:
            rows: [bs, sink_tokens] int64, rows of the sinks of the cached prefixes; `no_row` for none.
            prefix_lens: [bs] on the host, tokens of the cached prefixes.
            req_pool_indices: [bs] int64.
            started: indices into the batch of requests that run their first chunk now; only these count in the metrics.
        """
        if self.sink_tokens == 0:
            return
        self._step += 1
        index = rows - self.first_sink_row
        self._held[req_pool_indices] = index
        self._last_use[index] = self._step
        wanted = sum(min(prefix_lens[b], self.sink_tokens) for b in started)
        if wanted:
            self.counters.add(wanted, (rows[started] != self.no_row).sum())

    def _take_sink_rows(self, request: Tensor, position: Tensor, is_sink: Tensor, num_sinks: int) -> None:
        """Let requests hold rows for their sink tokens: the least recently used ones that no request holds."""
        self._step += 1
        # Requests hold at most half of the rows (SINK_SHARE), so the other half always has enough for every request slot.
        age = self._last_use.clone()
        age[self._held.flatten()] = torch.iinfo(torch.int64).max
        free = torch.topk(age[:-1], min(num_sinks, self.num_sink_rows), largest=False, sorted=False).indices
        rank = (is_sink.cumsum(0) - 1).clamp(0, free.shape[0] - 1)
        taken = torch.where(is_sink, free[rank], self.num_sink_rows)
        self._last_use[taken] = self._step
        # What is no sink is written to the row of padding, which holds nothing.
        self._held[torch.where(is_sink, request, 0), position.clamp(0, self.sink_tokens - 1)] = taken
