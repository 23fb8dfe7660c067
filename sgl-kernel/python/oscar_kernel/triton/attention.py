"""Plans and launches of the Triton kernels for the layers of a model: `oscar_kernel.attention` on a GPU.

A decode step reads nothing back from the device. With fixed buffers (`Layers.graph_decode`) it has fixed shapes too: which
window rows are read and how the work is shared out is computed by a launch, so a CUDA graph can hold `plan` and `run`, and
nothing is left to do at a replay.

With error shaping the last layer of a decode step to run is followed by a launch that writes the codes of all layers
(`step_codes`). It may wait so long because every new token is in a window: the recent one or, among a sequence's first tokens,
the sinks'.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from oscar.format.windows import WindowTable
from oscar_kernel.attention import BatchDecode, BatchExtend
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.reference import write_windows
from oscar_kernel.triton.common import TritonLayer
from oscar_kernel.triton.decode import DecodeBuffers, decode_attention, head_block
from oscar_kernel.triton.extend import extend_attention
from oscar_kernel.triton.plan import PlanBuffers, TritonPlan, item_budget, item_count, num_sms, plan_tokens
from oscar_kernel.triton.step_codes import StepCodes
from oscar_kernel.triton.store import store_kv, store_step
from oscar_kernel.triton.tuning import architecture, decode_launch

Scratch = dict[int, DecodeBuffers]
"""Scratch of a step, by the width of a layer's prepared queries: layers that stay in 16 bits may have another."""


class StoringLayer(TritonLayer):
    """A layer with its store as a method."""

    def store(self, k: Tensor, v: Tensor, loc: Tensor, window_rows: Tensor) -> tuple[Tensor, Tensor]:
        """`oscar_kernel.reference.store_kv` of this layer."""
        return store_kv(k, v, loc, window_rows, self)


class TritonLayers:
    """The layers of a model, and what their steps share.

    Args:
        layers: layer_id -> storage and codec, on one device. num_qo_heads: query heads on this rank.
    """

    def __init__(self, layers: Mapping[int, tuple[LayerCache, LayerCodec]], num_qo_heads: int):
        self.by_id = {i: StoringLayer(*layer) for i, layer in layers.items()}
        self.num_qo_heads = num_qo_heads
        self.first = next(iter(self.by_id.values())).tensors
        self.device = self.first.device
        self._by_width = {layer.tensors.k.planes.query_width: layer.tensors for layer in self.by_id.values()}
        # Layers whose codes a decode step writes at its end, and those of them that the step has stored so far.
        self.shaped = {i for i, layer in self.by_id.items() if layer.tensors.shaped}
        self._step_codes = StepCodes([self.by_id[i] for i in sorted(self.shaped)])
        self._stored: set[int] = set()
        self.reserved: Scratch | None = None

    def budget(self, bs: int) -> int:
        """Splits that a decode step of `bs` rows may take, see `plan.item_budget`."""
        card, v = architecture(self.device), self.first.v.planes
        kv_group_num = self.num_qo_heads // self.first.num_kv_heads
        launch = decode_launch(card.key, v.dim, kv_group_num, bs, v.num_groups)
        blocks = self.first.num_kv_heads * head_block(kv_group_num, card)[1]
        return item_budget(bs, blocks, num_sms(self.device), launch.waves)

    def plan_buffers(self, bs: int, windows: WindowTable) -> PlanBuffers:
        """Buffers for plans of `bs` rows."""
        return PlanBuffers(bs, self.budget(bs), windows.sink_tokens, windows.recent_tokens, self.device)

    def scratch(self, bs: int, num_items: int) -> Scratch:
        """Scratch for a step of `bs` rows and `num_items`."""
        make = DecodeBuffers.make
        return {width: make(bs, num_items, self.num_qo_heads, layer) for width, layer in self._by_width.items()}

    def reserve(self, max_bs: int, windows: WindowTable) -> None:
        """Make the scratch that decode wrappers with fixed buffers of up to `max_bs` rows share.

        Their steps must not run side by side. windows: with the sizes of the windows that plans will have.
        """
        sizes = windows.sink_tokens, windows.recent_tokens
        self.reserved = self.scratch(max_bs, max(item_count(bs, self.budget(bs), *sizes) for bs in range(1, max_bs + 1)))

    def require_whole_step(self) -> None:
        """Raise RuntimeError if the last decode step did not run every layer: its codes were rounded alone, not as calibration
        decided."""
        if self._stored:
            missing = ", ".join(map(str, sorted(self.shaped - self._stored)))
            self._stored.clear()
            raise RuntimeError(
                f"--kv-quant oscar: expected every attention layer to run in a decode step, layers {missing} did not, so the "
                "2-bit codes of its tokens are not shaped; calibrate with --method oscar, or serve with --oscar-recent-tokens 0"
            )

    def stored(self, layer_id: int, loc: Tensor, window_rows: Tensor) -> None:
        """Note that a decode step has stored a layer with error shaping; after the last one, write the codes of all."""
        if layer_id in self._stored:
            self.require_whole_step()
        self._stored.add(layer_id)
        if self._stored == self.shaped:
            self._step_codes.write(loc, window_rows)
            self._stored.clear()


class TritonDecode(BatchDecode):
    """Decode steps.

    Args:
        layers: to run.
        bs: rows of every plan, whose buffers are made now (scratch is what `TritonLayers.reserve` made, if it did); None:
            plans of any size, whose buffers are made each time.
        windows: with bs, those of the plans.
    """

    def __init__(self, layers: TritonLayers, bs: int | None = None, windows: WindowTable | None = None):
        self._layers, self._bs = layers, bs
        self._buffers: PlanBuffers
        self._scratch: Scratch
        if bs is not None and windows is not None:
            self._make_buffers(bs, windows)
        self._plan: TritonPlan
        self._loc: Tensor | None
        self._rows: Tensor | None

    def plan(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        kv_lens: Sequence[int] | Tensor,
        windows: WindowTable,
        loc: Tensor | None = None,
        window_rows: Tensor | None = None,
    ) -> None:
        """`BatchDecode.plan`. Capturable where the wrapper has its buffers already and kv_lens is a tensor.

        For padding give kv_lens 0, which reads nothing and gives 0, and loc -1, which is written nowhere.

        Raises:
            ValueError: the wrapper is for another number of rows.
            RuntimeError: the last step did not run every layer with error shaping.
        """
        layers, bs = self._layers, req_pool_indices.shape[0]
        layers.require_whole_step()
        if self._bs not in (None, bs):
            raise ValueError(f"BatchDecode.plan: expected the {self._bs} rows that the wrapper was made for, got {bs}")
        if self._bs is None:
            self._make_buffers(bs, windows)
        lens = kv_lens if isinstance(kv_lens, Tensor) else torch.tensor(kv_lens, dtype=torch.int32, device=layers.device)
        self._plan = plan_tokens(self._buffers, req_to_token, req_pool_indices, lens, windows)
        self._loc, self._rows = _contiguous(loc), _contiguous(window_rows)

    def _make_buffers(self, bs: int, windows: WindowTable) -> None:
        self._buffers = self._layers.plan_buffers(bs, windows)
        shared = None if self._bs is None else self._layers.reserved
        self._scratch = self._layers.scratch(bs, self._buffers.num_items) if shared is None else shared

    def run(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        sm_scale: float,
        logit_cap: float = 0.0,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`BatchDecode.run`; the store's launch prepares the queries too."""
        layers, layer = self._layers, self._layers.by_id[layer_id]
        scratch = self._scratch[layer.tensors.k.planes.query_width]
        loc, rows, later = self._loc, self._rows, False
        if k is not None:
            if v is None or loc is None or rows is None:
                raise ValueError(
                    "BatchDecode.run: keys were given to write, expected values too and a plan with loc and window_rows"
                )
            later = layer_id in layers.shaped and self._plan.recent_tokens > 0
            store_step(k, v, loc, rows, layer, q=q, queries=scratch.queries, codes_later=later)
        out = torch.empty(
            *q.shape[:2], layer.tensors.v.planes.dim, dtype=q.dtype if out_dtype is None else out_dtype, device=q.device
        )
        decode_attention(q, layer, self._plan, sm_scale, logit_cap, out=out, buffers=scratch, queries_ready=k is not None)
        if later and loc is not None and rows is not None:
            layers.stored(layer_id, loc, rows)
        return out


class TritonExtend(BatchExtend):
    """Extend steps, with buffers that are made for each plan."""

    def __init__(self, layers: TritonLayers):
        self._layers = layers

    def plan(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        prefix_lens: Sequence[int],
        qo_indptr: Sequence[int],
        windows: WindowTable,
        loc: Tensor,
        window_rows: Tensor,
    ) -> None:
        """`BatchExtend.plan`. Raises RuntimeError: the last decode step did not run every layer with error shaping."""
        layers, device = self._layers, self._layers.device
        layers.require_whole_step()
        lens = torch.tensor(prefix_lens, dtype=torch.int32, device=device)
        self._plan = plan_tokens(layers.plan_buffers(len(prefix_lens), windows), req_to_token, req_pool_indices, lens, windows)
        self._max_new = max((b - a for a, b in itertools.pairwise(qo_indptr)), default=0)
        self._qo_indptr = torch.tensor(qo_indptr, dtype=torch.int32, device=device)
        self._loc, self._rows = loc.contiguous(), window_rows.long()
        self._nowhere = torch.full_like(self._rows, windows.no_row)

    def run(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sm_scale: float,
        logit_cap: float = 0.0,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`BatchExtend.run`."""
        layer = self._layers.by_id[layer_id]
        k_new, v_new = store_kv(k, v, self._loc, self._nowhere, layer)
        out = torch.zeros(
            *q.shape[:2], layer.tensors.v.planes.dim, dtype=q.dtype if out_dtype is None else out_dtype, device=q.device
        )
        extend_attention(q, k_new, v_new, self._qo_indptr, self._max_new, layer, self._plan, sm_scale, logit_cap, out=out)
        write_windows(k_new, v_new, self._rows, layer.cache)
        return out


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
