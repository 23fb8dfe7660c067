"""Which tokens of each sequence are read from 2-bit rows and which from the windows; once a step, for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ReadPlan:
    """Where the cached tokens of a ragged batch lie.

    Args:
        slots: [bs, max_kv_len] int64, slot of each position; 0 beyond a sequence's end.
        packed_mask: [bs, max_kv_len] bool, positions to read from 2-bit rows.
        window_rows: [bs, sink_tokens + recent_tokens] int64, rows of the windows; the last row where there is none.
        window_mask: [bs, sink_tokens + recent_tokens] bool, window rows to read.
        window_positions: [bs, sink_tokens + recent_tokens] int64, positions they stand for.
        kv_lens: per sequence, on the host.
        sink_tokens: how many of the window entries are sinks.

    Every position below a sequence's length is in exactly one of the two masks.
    """

    slots: Tensor
    packed_mask: Tensor
    window_rows: Tensor
    window_mask: Tensor
    window_positions: Tensor
    kv_lens: list[int]
    sink_tokens: int = 0


def plan_read(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: list[int],
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    sink_tokens: int,
    recent_tokens: int,
) -> ReadPlan:
    """Resolve windows and slots of a batch.

    A window row is read only where the two maps agree on the pair (slot, row) and the position lies in a window of its own
    sequence: position alone reads stale rows under load, and a row outside the windows would make a result depend on what
    other requests left behind.

    Args:
        req_to_token: [max_num_reqs, max_context_len] integer, slot of each position of each request.
        req_pool_indices: [bs] integer, row of each request.
        kv_lens: [bs] cached tokens to read, on the host; may be 0.
        row_of_slot: [num_slots] int32, window row of a slot or -1.
        slot_of_row: [num_rows + 1] int64, slot that owns a row or -1.
        sink_tokens, recent_tokens: sizes of the windows, in tokens.
    """
    device = req_to_token.device
    lens = torch.tensor(kv_lens, dtype=torch.int64, device=device).unsqueeze(1)
    max_kv_len = max(kv_lens, default=0)
    positions = torch.arange(max_kv_len, device=device).unsqueeze(0)
    inside = positions < lens
    slots = torch.where(inside, req_to_token[req_pool_indices, :max_kv_len].long(), 0)

    sink = torch.arange(sink_tokens, device=device).expand(len(kv_lens), sink_tokens)
    recent = lens - recent_tokens + torch.arange(recent_tokens, device=device)
    window = torch.cat((sink, recent), dim=1)
    # Where the windows overlap, or a sequence is shorter than they are, a position counts once: as a sink.
    wanted = torch.cat((sink < lens, recent >= sink_tokens), dim=1)
    if max_kv_len == 0:
        window_slots = torch.zeros_like(window)
    else:
        window_slots = slots.gather(1, window.clamp(0, max_kv_len - 1))
    rows = row_of_slot[window_slots].long()
    no_row = slot_of_row.shape[0] - 1
    valid = wanted & (rows >= 0)
    rows = torch.where(valid, rows, no_row)
    valid &= slot_of_row[rows] == window_slots

    packed_mask = torch.cat((inside, inside.new_zeros(len(kv_lens), 1)), dim=1)
    packed_mask.scatter_(1, torch.where(valid, window, max_kv_len), False)
    rows = torch.where(valid, rows, no_row)
    return ReadPlan(slots, packed_mask[:, :max_kv_len], rows, valid, window, list(kv_lens), sink_tokens)
