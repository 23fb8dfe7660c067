"""How a step runs on a GPU: Triton kernels, with a plan made on the device.

A decode step launches, in the order of the stream: the maps of the windows, one plan, and two kernels a layer (store with the
queries, attention). Nothing is read back by the host, so a CUDA graph can hold the whole step, and its replay needs no
preparation.

Padding of a graph's batch has request 0 and slot 0. It takes no window row, its token is written nowhere (slot -1), it reads
nothing (length 0), and its output is 0.
"""

from __future__ import annotations

import torch
from sglang.srt.oscar.path_host import AttentionPath
from sglang.srt.oscar.windows import Windows
from torch import Tensor

from oscar_kernel import BatchDecode, Layers

PADDING = 0
"""Row of req_to_token that SGLang gives to padding."""


class GpuPath(AttentionPath):
    """The path of the Triton kernels."""

    needs_cpu_seq_lens = False

    def __init__(self, layers: Layers, windows: Windows, req_to_token: Tensor):
        super().__init__(layers, windows, req_to_token)
        self._eager = layers.batch_decode()
        self.decode = self._eager
        self._graphs: dict[int, BatchDecode] = {}

    def plan_decode(self, batch) -> None:
        self.decode = self._eager
        self._plan(batch)

    def reserve_graphs(self, max_bs: int) -> None:
        """Make the scratch that the graphs of all batch sizes up to `max_bs` share."""
        self.layers.reserve(max_bs, self.windows.table)

    def prepare_graph(self, bs: int) -> None:
        """Make the buffers of a batch size before its graph is captured; the graph holds their addresses."""
        if bs not in self._graphs:
            self._graphs[bs] = self.layers.graph_decode(bs, self.windows.table)

    def plan_graph(self, batch) -> None:
        """`plan_decode` inside a graph."""
        self.decode = self._graphs[batch.batch_size]
        self._plan(batch)

    def _plan(self, batch) -> None:
        request, seq_lens, loc = batch.req_pool_indices.long(), batch.seq_lens.long(), batch.out_cache_loc.long()
        rows = self.decode_rows(request, seq_lens, loc)
        padding = request == PADDING
        kv_lens, loc = torch.where(padding, 0, seq_lens), torch.where(padding, -1, loc)
        self.decode.plan(self.req_to_token, request, kv_lens, self.windows.table, loc, rows)
