"""How a step runs on the host: the C++ library or plain PyTorch, with a plan made from lengths that the host knows."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sglang.srt.oscar.windows import Windows
from torch import Tensor

from oscar_kernel import BatchDecode, BatchExtend, Layers, ReadPlan, plan_read


class AttentionPath(ABC):
    """What the backend asks of either path: plan a step once, then run it layer by layer.

    Args:
        layers: the attention layers of this rank, and the implementation that was chosen for them.
        windows: of the pool. req_to_token: SGLang's table, [max_num_reqs, max_context_len].
    """

    needs_cpu_seq_lens = True
    """Whether decode is planned from lengths on the host: then SGLang keeps them there, and no CUDA graph can hold a step."""

    def __init__(self, layers: Layers, windows: Windows, req_to_token: Tensor):
        self.layers, self.windows, self.req_to_token = layers, windows, req_to_token
        self.extend: BatchExtend = layers.batch_extend()
        self.decode: BatchDecode

    @abstractmethod
    def plan_decode(self, batch) -> None:
        """Give the new tokens of a decode batch their window rows and plan the step; `self.decode` runs it."""

    def plan_extend(self, request: Tensor, prefix_lens: list[int], qo_indptr: list[int], loc: Tensor, rows: Tensor) -> None:
        """Plan an extend step; `self.extend` runs it.

        Args:
            request: [bs] int64 rows of req_to_token. prefix_lens: [bs] on the host. qo_indptr: [bs + 1] on the host.
            loc, rows: [num_tokens] int64, slots and window rows of the new tokens.
        """
        self.extend.plan(self.req_to_token, request, prefix_lens, qo_indptr, self.windows.table, loc, rows)

    def decode_rows(self, request: Tensor, seq_lens: Tensor, loc: Tensor) -> Tensor:
        """Window rows of one new token a sequence, noted as written, since a decode step reads its own tokens.

        Shapes are fixed and the host reads nothing, so that a CUDA graph can hold it.

        Args:
            request: [bs] int64 rows of req_to_token; 0 marks padding. seq_lens: [bs] int64, the new token included.
            loc: [bs] int64 slots of the new tokens.
        """
        position = seq_lens - 1
        rows = self.windows.table.rows_for(request, position, seq_lens)
        self.windows.record(loc, rows, position)
        return rows

    def read_plan(self, request: Tensor, kv_lens: list[int]) -> ReadPlan:
        """What a step reads, in the reference's form, for debug checks. Waits for the device."""
        return plan_read(self.req_to_token, request, kv_lens, self.windows.table)


class HostPath(AttentionPath):
    """The path of the C++ library and the PyTorch reference, wherever the tensors are."""

    def __init__(self, layers: Layers, windows: Windows, req_to_token: Tensor):
        super().__init__(layers, windows, req_to_token)
        self.decode = layers.batch_decode()

    def plan_decode(self, batch) -> None:
        seq_lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.seq_lens.cpu()
        request, loc = batch.req_pool_indices.long(), batch.out_cache_loc.long()
        rows = self.decode_rows(request, batch.seq_lens.long(), loc)
        self.decode.plan(self.req_to_token, request, seq_lens.tolist(), self.windows.table, loc, rows)
