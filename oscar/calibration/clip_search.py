"""Clip quantiles chosen per layer, head and side: the ones that change attention's output least on text kept for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oscar.calibration.heldout import Positions, attend_mixed, output_cost, output_squares, reconstruct
from oscar.calibration.run_transformers import LayerCapture
from oscar.format.codec import RowFormat
from oscar.format.side import LayerTransforms

GRID = (0.84, 0.88, 0.90, 0.92, 0.94, 0.96, 0.98, 1.0)
"""Quantiles tried. Gaussian rows are met best near 0.87, the paper has 0.96 for keys and 0.92 for values."""


class ClipSearch:
    """Squared errors of attention's output (behind W_O where it is known) for every quantile of the grid: one layer, each side
    alone.

    Keys are tried with exact values and values with exact keys; the windows are exact, as the server reads them, unless a
    sequence is no longer than they are. Rows are clipped by `codec.clip`: exact order statistics, the server's own code.

    Args:
        transforms: the layer's transforms; its clip quantiles are not read.
        k_format, v_format: row formats of K and V.
        sink_tokens, recent_tokens: windows kept exact.
    """

    def __init__(
        self,
        transforms: LayerTransforms,
        k_format: RowFormat,
        v_format: RowFormat,
        sink_tokens: int,
        recent_tokens: int,
    ):
        self.transforms, self.k_format, self.v_format = transforms, k_format, v_format
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        heads = transforms.k.clip.shape[0]
        self.cost: Tensor | None = None
        self.errors = {side: torch.zeros(len(GRID), heads, dtype=torch.float64) for side in ("k", "v")}

    def add(self, capture: LayerCapture) -> None:
        """Count an attention call in, sequence by sequence, padding left out."""
        if self.cost is None:
            self.cost = output_cost(capture)
        for row in range(capture.q.shape[0]):
            keep = capture.real[row]
            q, k, v = (x[row][:, keep].float() for x in (capture.q, capture.k, capture.v))
            positions = Positions(q.shape[1], capture.sliding_window, self.sink_tokens, self.recent_tokens, q.device)
            exact = positions.none if bool((positions.exact | ~positions.visible).all()) else positions.exact
            rows = q[:, positions.at]

            def attend(k_hat: Tensor, v_hat: Tensor, rows=rows, k=k, v=v, exact=exact, positions=positions) -> Tensor:
                pair = (k, v), (k_hat, v_hat)
                return attend_mixed(rows, *pair, exact, positions.visible, capture.sm_scale, capture.logit_cap)

            output, t = attend(k, v), self.transforms
            for i, quantile in enumerate(GRID):
                clip = torch.full_like(t.k.clip, quantile)
                k_hat = reconstruct(k, self.k_format, replace(t.k, clip=clip))
                v_hat = reconstruct(v, self.v_format, replace(t.v, clip=clip))
                self.errors["k"][i] += output_squares(attend(k_hat, v) - output, self.cost, k.shape[0])
                self.errors["v"][i] += output_squares(attend(k, v_hat) - output, self.cost, k.shape[0])

    def best(self) -> LayerTransforms:
        """The layer with the quantiles of least error in it; of equals the largest, which clips least."""
        grid = torch.tensor(GRID)
        picked = {side: grid[len(GRID) - 1 - errors.flip(0).argmin(0)].contiguous() for side, errors in self.errors.items()}
        t = self.transforms
        return LayerTransforms(replace(t.k, clip=picked["k"]), replace(t.v, clip=picked["v"]))
