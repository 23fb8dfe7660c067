"""The 2-bit kernels behind FlashInfer's calling convention: plan once a step, run once a layer, pages in CSR form.

For engines that keep their cache as pages and know nothing of SGLang:

    attention = BatchDecodeWithPagedInt2KVCache(device, sink_tokens=64, recent_tokens=256)
    attention.plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size)
    for layer in layers:
        out = attention.run(q, caches[layer], codecs[layer])

Entry i of `indices` is a page of `page_size` slots; slot = page * page_size + offset is the first index of a cache's buffers.
Nothing here waits for the device. With use_cuda_graph the buffers are made once, for max_batch_size, and both `plan` and `run`
may be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.triton import decode as triton_decode
from oscar_kernel.triton import extend as triton_extend
from oscar_kernel.triton import plan as triton_plan
from oscar_kernel.triton.common import prepare
from oscar_kernel.triton.tuning import Launch, architecture


class _Paged:
    """Plan and buffers common to decode and prefill.

    Args:
        device: where everything lives.
        sink_tokens, recent_tokens: windows of 16-bit rows, in tokens; 0, 0 where the engine keeps none.
        row_of_slot: [num_slots] int32, slot_of_row: [num_rows + 1] int64, maps of the windows (see `oscar_kernel.plan_read`).
        use_cuda_graph: keep the same buffers for every plan. max_batch_size: rows that a plan may have then.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        sink_tokens: int = 0,
        recent_tokens: int = 0,
        row_of_slot: Tensor | None = None,
        slot_of_row: Tensor | None = None,
        use_cuda_graph: bool = False,
        max_batch_size: int | None = None,
    ):
        if use_cuda_graph and max_batch_size is None:
            raise ValueError("BatchDecodeWithPagedInt2KVCache: use_cuda_graph needs max_batch_size")
        self.device = torch.device(device)
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        self.row_of_slot, self.slot_of_row = row_of_slot, slot_of_row
        self.max_batch_size = max_batch_size if use_cuda_graph else None
        self.buffers: triton_plan.PlanBuffers | None = None
        self.step: triton_plan.TritonPlan | None = None

    def _plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, head_blocks: int, page_size: int) -> None:
        bs = last_page_len.shape[0]
        if self.max_batch_size is not None and bs != self.max_batch_size:
            raise ValueError(f"plan: expected a batch padded to {self.max_batch_size} rows, got {bs}")
        if self.buffers is None or self.max_batch_size is None:
            budget = triton_plan.item_budget(bs, head_blocks, triton_plan.num_sms(self.device), Launch().waves)
            self.buffers = triton_plan.PlanBuffers(bs, budget, self.sink_tokens, self.recent_tokens, self.device)
        pages = (indptr[1:] - indptr[:-1]).int()
        lens = torch.where(pages > 0, (pages - 1) * page_size + last_page_len.int(), 0)
        self.step = triton_plan.plan_decode(
            self.buffers, indices, lens, kv_indptr=indptr, row_of_slot=self.row_of_slot, slot_of_row=self.slot_of_row,
            sink_tokens=self.sink_tokens, recent_tokens=self.recent_tokens, page_size=page_size,
        )  # fmt: skip


class BatchDecodeWithPagedInt2KVCache(_Paged):
    """One query a sequence. Arguments as in `_Paged`."""

    scratch: triton_decode.DecodeBuffers | None = None

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
    ) -> None:
        """Resolve pages and windows, and share out the work.

        Args:
            indptr: [bs + 1] int32 or int64, pages of each sequence in `indices`.
            indices: [num_pages] int32 or int64. last_page_len: [bs] int32, tokens in a sequence's last page.
            num_qo_heads, num_kv_heads, head_dim: geometry on this rank. page_size: slots of a page.
            sm_scale: factor on the logits; None: head_dim^-0.5. logits_soft_cap: 0 for none.
        """
        card = architecture(self.device)
        head_blocks = num_kv_heads * triton_decode.head_block(num_qo_heads // num_kv_heads, card)[1]
        self._plan(indptr, indices, last_page_len, head_blocks, page_size)
        self.sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self.logits_soft_cap = logits_soft_cap
        if self.max_batch_size is None:
            self.scratch = None

    def run(self, q: Tensor, cache: LayerCache, codec: LayerCodec, out: Tensor | None = None) -> Tensor:
        """Attention of one layer.

        Args:
            q: [bs, num_qo_heads, head_dim], after RoPE. cache, codec: of the layer.
            out: [bs, num_qo_heads, v_head_dim]; None: new, in q's type.
        Returns:
            out.
        """
        layer = prepare(codec)
        if out is None:
            out = torch.empty(*q.shape[:2], layer.v.dim, dtype=q.dtype, device=q.device)
        if self.scratch is None:
            self.scratch = triton_decode.DecodeBuffers.make(q.shape[0], self.buffers.num_items, q.shape[1], codec)
        return triton_decode.decode_attention(
            q, cache, codec, self.step, self.sm_scale, self.logits_soft_cap, out=out, buffers=self.scratch
        )


class BatchPrefillWithPagedInt2KVCache(_Paged):
    """Several queries a sequence, causal among themselves, against a cached prefix. Arguments as in `_Paged`."""

    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        max_qo_len: int,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
    ) -> None:
        """As in decode; the pages hold the prefix alone, not the new tokens.

        Args:
            qo_indptr: [bs + 1] int32, ranges of new tokens. max_qo_len: longest of them.
        """
        self._plan(indptr, indices, last_page_len, num_kv_heads, page_size)
        self.qo_indptr, self.max_qo_len = qo_indptr, max_qo_len
        self.sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self.logits_soft_cap = logits_soft_cap

    def run(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, cache: LayerCache, codec: LayerCodec, out: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer.

        Args:
            q: [num_tokens, num_qo_heads, head_dim], after RoPE.
            k_new, v_new: [num_tokens, num_kv_heads, dim] bfloat16 as `triton_store.store_kv` returns them.
            cache, codec: of the layer. out: [num_tokens, num_qo_heads, v_head_dim]; None: new, in q's type.
        """
        if out is None:
            out = torch.empty(*q.shape[:2], prepare(codec).v.dim, dtype=q.dtype, device=q.device)
        return triton_extend.extend_attention(
            q, k_new, v_new, self.qo_indptr, cache, codec, self.step, self.sm_scale, self.logits_soft_cap,
            max_new=self.max_qo_len, out=out,
        )  # fmt: skip
