"""--oscar-debug-checks: every 16-bit row that is read is the right one, and no token of a request's own is read in 2 bits that
should be in 16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.oscar.windows import Windows

from oscar_kernel import LayerCache, LayerCodec, ReadPlan


class WindowReads:
    """What steps read of the windows, counted since start; wrong reads raise.

    Args:
        num_requests: rows of req_to_token. sink_tokens: size of that window.
    """

    def __init__(self, num_requests: int, sink_tokens: int):
        self._sinks = sink_tokens
        self._own_from = [0] * num_requests
        self.tokens = 0
        self.in_16_bits = 0

    def begin(self, row: int, prefix_len: int) -> None:
        """A request begins with a cached prefix of so many tokens, which others wrote."""
        self._own_from[row] = prefix_len

    def count(self, plan: ReadPlan, rows: Sequence[int]) -> None:
        """Count the reads of one step.

        Args:
            plan: of the step. rows: of req_to_token, one a sequence.
        Raises:
            RuntimeError: a token in a window that the request wrote itself is read in 2 bits, or two sequences read one row.
        """
        lens = torch.tensor(plan.kv_lens, device=plan.slots.device).unsqueeze(1)
        positions = plan.window_positions
        wanted = (positions >= 0) & (positions < lens)
        # A recent token that is a sink too is listed twice, and read once.
        wanted[:, self._sinks :] &= positions[:, self._sinks :] >= self._sinks
        own = torch.tensor([self._own_from[row] for row in rows], device=lens.device).unsqueeze(1)
        self.tokens += int(wanted.sum())
        self.in_16_bits += int(plan.window_mask.sum())
        if (lost := wanted & (positions >= own) & ~plan.window_mask).any():
            b, i = lost.nonzero()[0].tolist()
            raise RuntimeError(
                f"--oscar-debug-checks: {int(lost.sum())} tokens of the windows are read in 2 bits although their requests "
                f"wrote them, first position {int(positions[b, i])} of request row {rows[b]} with {plan.kv_lens[b]} tokens"
            )
        read = plan.window_rows[plan.window_mask]
        if len(read.unique()) != len(read):
            raise RuntimeError("--oscar-debug-checks: two tokens are read from one 16-bit row")


def check_window_rows(plan: ReadPlan, windows: Windows, cache: LayerCache, codec: LayerCodec, layer_id: int) -> None:
    """Every window row that is read must encode to the 2-bit row of the slot that it was written with; else it is another's.

    A request that was given other slots for its tokens keeps its rows, which the new slots' 2-bit rows equal but for rounding
    of another batch, so only pairs that both maps know are compared.

    Raises:
        RuntimeError: some do not.
    """
    if plan.slots.shape[1] == 0:
        return
    mask = plan.window_mask
    slots = plan.slots.gather(1, plan.window_positions.clamp(0, plan.slots.shape[1] - 1))[mask]
    rows = plan.window_rows[mask]
    together = windows.find(slots) == rows
    slots, rows = slots[together], rows[together]
    same_k, same_v = (
        (codec_side.encode(side.window[rows]) == side.buffer[slots]).flatten(1).all(1)
        for codec_side, side in ((codec.k, cache.k), (codec.v, cache.v))
    )
    stale = ~(same_k & same_v)
    if stale.any():
        raise RuntimeError(
            f"--oscar-debug-checks: layer {layer_id}: {int(stale.sum())} of {len(rows)} 16-bit rows belong to other tokens "
            f"than their slots, first slot {int(slots[stale][0])}"
        )
