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

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar.sizing import SINK_SHARE
from oscar_kernel import ReadPlan, plan_read


@dataclass
class WindowCounters:
    """Running totals since start, for metrics."""

    sink_rows_lost: int = 0
    """Sink tokens of a reused prefix whose 16-bit row was gone: they are read in 2 bits."""
    sink_rows_reused: int = 0
    """Sink tokens of a reused prefix found in 16 bits."""


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
        self.counters = WindowCounters()
        # Of each sink row: the step at which a request last took or found it. Of each request slot: the sink rows it holds.
        self._last_use = torch.zeros(self.num_sink_rows, dtype=torch.int64, device=device)
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
        is_sink = (position < self.sink_tokens) & (request > 0)
        is_recent = (position >= seq_len - self.recent_tokens) & ~is_sink & (request > 0)
        ring = request * self.recent_tokens + position % max(self.recent_tokens, 1)
        rows = torch.where(is_recent, ring, self.no_row)
        if num_sinks > 0:
            rows = torch.where(is_sink, self._take_sink_rows(request, position, is_sink, num_sinks), rows)
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

    def note_prefixes(self, plan: ReadPlan, req_pool_indices: Tensor, started: list[int]) -> None:
        """Record which sink rows the requests of an extend batch found, so that they keep them; count what they lost.

        Args:
            plan: read plan over the cached prefixes.
            req_pool_indices: [bs] int64.
            started: indices into the batch of requests that run their first chunk now; only these count in the metrics.
        """
        if self.sink_tokens == 0:
            return
        self._step += 1
        found = plan.window_mask[:, : self.sink_tokens]
        index = torch.where(found, plan.window_rows[:, : self.sink_tokens] - self.first_sink_row, self.num_sink_rows)
        self._held[req_pool_indices] = index
        self._last_use[index[found]] = self._step
        reused = sum(min(plan.kv_lens[b], self.sink_tokens) for b in started)
        if reused:
            kept = int(found[started].sum())
            self.counters.sink_rows_reused += kept
            self.counters.sink_rows_lost += reused - kept

    def _take_sink_rows(self, request: Tensor, position: Tensor, is_sink: Tensor, num_sinks: int) -> Tensor:
        """Rows for sink tokens: the least recently used ones that no request holds. [num_tokens] int64."""
        self._step += 1
        # Requests hold at most half of the rows (SINK_SHARE), so the other half always has enough for every request slot.
        age = torch.cat((self._last_use, self._last_use.new_zeros(1)))
        age[self._held.flatten()] = torch.iinfo(torch.int64).max
        free = torch.topk(age[:-1], min(num_sinks, self.num_sink_rows), largest=False, sorted=False).indices
        rank = (is_sink.cumsum(0) - 1).clamp(0, free.shape[0] - 1)
        taken = free[rank]
        self._last_use[taken[is_sink]] = self._step
        self._held[request[is_sink], position[is_sink]] = taken[is_sink]
        return taken + self.first_sink_row
