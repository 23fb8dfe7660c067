"""Which tokens of each sequence are read from 2-bit rows and which from the windows; once a step, for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar.format.windows import WindowTable, window_entries


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

    Every position below a sequence's length is in exactly one of the two masks.
    """

    slots: Tensor
    packed_mask: Tensor
    window_rows: Tensor
    window_mask: Tensor
    window_positions: Tensor
    kv_lens: list[int]


def plan_read(req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Sequence[int], windows: WindowTable) -> ReadPlan:
    """Resolve windows and slots of a batch.

    A window row is read only where it holds its position (`WindowTable.held`) and the position lies in a window of the
    sequence: a row outside the windows would make a result depend on how much of the ring is still there.

    Args:
        req_to_token: [max_num_reqs, max_context_len] integer, slot of each position of each request.
        req_pool_indices: [bs] integer, row of each request.
        kv_lens: [bs] cached tokens to read, on the host; may be 0.
        windows: what the requests hold.
    """
    device, kv_lens = req_to_token.device, list(kv_lens)
    lens = torch.tensor(kv_lens, dtype=torch.int64, device=device)
    max_kv_len = max(kv_lens, default=0)
    inside = torch.arange(max_kv_len, device=device) < lens.unsqueeze(1)
    slots = torch.where(inside, req_to_token[req_pool_indices, :max_kv_len].long(), 0)

    positions, wanted = window_entries(lens, windows.sink_tokens, windows.recent_tokens)
    rows = torch.where(wanted, windows.held(req_pool_indices.long().unsqueeze(1), positions), windows.no_row)
    valid = rows != windows.no_row

    packed_mask = torch.cat((inside, inside.new_zeros(len(kv_lens), 1)), dim=1)
    packed_mask.scatter_(1, torch.where(valid, positions, max_kv_len), False)
    return ReadPlan(slots, packed_mask[:, :max_kv_len], rows, valid, positions, kv_lens)
