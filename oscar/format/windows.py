"""The rule of the 16-bit windows, once: which positions lie in one, and when a window row counts.

Every token is stored in 2 bits. The first `sink_tokens` positions of a sequence and its newest `recent_tokens` are also kept in
16 bits. A position that is in both windows is a sink. `oscar_kernel/triton/plan.py` says the same for the GPU, and a test
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WindowMaps:
    """Which slots own a window row, and how large the windows are. The maps are written in place as tokens come and go.

    Args:
        row_of_slot: [num_slots] int32, window row of a slot, or -1.
        slot_of_row: [num_rows + 1] int64, slot that owns a row, or -1. No slot owns the last row, which takes writes that go
            nowhere.
        sink_tokens, recent_tokens: sizes of the windows, in tokens.
    """

    row_of_slot: Tensor
    slot_of_row: Tensor
    sink_tokens: int
    recent_tokens: int

    @property
    def no_row(self) -> int:
        """The row that stands for none: the last one."""
        return self.slot_of_row.shape[0] - 1

    @classmethod
    def none(cls, device: str | torch.device = "cpu") -> WindowMaps:
        """No windows at all: every token is read in 2 bits."""
        no_slot = torch.full((1,), -1, dtype=torch.int64, device=device)
        return cls(no_slot.int(), no_slot, 0, 0)

    def rows_of(self, slots: Tensor) -> Tensor:
        """Window rows of slots, `no_row` where a slot has none.

        A row counts for a slot only where both maps agree on the pair: the row of a slot that was given away, and the row that
        another slot took over, would hold some other token.

        Args:
            slots: any shape, int64.
        Returns:
            The same shape, int64.
        """
        rows = self.row_of_slot[slots].long()
        agree = (rows >= 0) & (self.slot_of_row[rows.clamp(min=0)] == slots)
        return torch.where(agree, rows, self.no_row)


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
