"""The backend's way through the Triton kernels: what a step shares, and a layer's launches.

A decode step reads nothing back from the device and has fixed shapes. Out of a CUDA graph only the buffers of the batch size
are made, once. Which window rows are written, which are read and how the work is shared out is computed by launches inside the
graph, from the tensors that SGLang refreshes before a replay; so nothing is left to do at replay.

With error shaping the last layer of a decode step to run is followed by a launch that writes the codes of all layers
(`oscar_kernel.triton.step_codes`). It may wait so long because every new token is in a window: the recent one or, among a
sequence's first tokens, the sinks'.

Padding of a graph's batch has request 0 and slot 0. It takes no window row, its token is written nowhere (slot -1), it reads
nothing, and its output is 0.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from sglang.srt.oscar.windows import Windows
from torch import Tensor

from oscar_kernel import LayerCache, LayerCodec, write_windows
from oscar_kernel.triton import decode as triton_decode
from oscar_kernel.triton import extend as triton_extend
from oscar_kernel.triton import plan as triton_plan
from oscar_kernel.triton import store as triton_store
from oscar_kernel.triton.common import prepare
from oscar_kernel.triton.step_codes import StepCodes
from oscar_kernel.triton.tuning import architecture, choose

PADDING = 0
"""Row of req_to_token that SGLang gives to padding."""


@dataclass
class DecodeRoom:
    """Buffers of one batch size. scratch: by the width of a layer's prepared queries (native layers may have another)."""

    plan: triton_plan.PlanBuffers
    scratch: dict[int, triton_decode.DecodeBuffers]


@dataclass
class TritonStep:
    """What all layers of one forward share.

    Args:
        loc: [num_tokens] int64, slots being written; -1 for none. window_rows: [num_tokens] int64, window rows being written.
        plan: what to read: in decode the whole sequences, in extend the cached prefixes.
        room: in decode, the buffers.
        qo_indptr: in extend, ranges of new tokens: [bs + 1] int32 on the device. max_new: the longest of them.
    """

    loc: Tensor
    window_rows: Tensor
    plan: triton_plan.TritonPlan
    room: DecodeRoom | None = None
    qo_indptr: Tensor | None = None
    max_new: int = 0


class TritonPath:
    """Plans and launches for the layers of one pool.

    Args:
        windows: of the pool. layers: storage and codec of each of its layers, by layer_id, on the device; this rank's.
        req_to_token: SGLang's table, [max_num_reqs, max_context_len]. num_qo_heads: query heads on this rank.
    """

    def __init__(
        self, windows: Windows, layers: dict[int, tuple[LayerCache, LayerCodec]], req_to_token: Tensor, num_qo_heads: int
    ):
        self.windows, self.req_to_token, self.num_qo_heads = windows, req_to_token, num_qo_heads
        self.layers = layers
        self.maps = {
            "row_of_slot": windows.row_of_slot,
            "slot_of_row": windows.slot_of_row,
            "sink_tokens": windows.sink_tokens,
            "recent_tokens": windows.recent_tokens,
        }
        self.by_width = {prepare(codec).k.query_width: codec for _, codec in layers.values()}
        # Layers whose codes a decode step writes at its end, and those of them that the step has stored so far.
        self.coded_later = {i for i, (_, codec) in layers.items() if windows.recent_tokens > 0 and prepare(codec).shaped}
        self.stored: set[int] = set()
        self.step_codes = StepCodes([(layers[i][0], prepare(layers[i][1])) for i in sorted(self.coded_later)])
        self.graph_rooms: dict[int, DecodeRoom] = {}
        self.graph_scratch: dict[int, triton_decode.DecodeBuffers] = {}

    def budget(self, bs: int) -> int:
        """Splits that a decode step of `bs` rows may take, see `triton_plan.item_budget`."""
        device, codec = self.req_to_token.device, next(iter(self.by_width.values()))
        card, num_kv_heads, v = architecture(device), codec.q_transform.shape[0], prepare(codec).v
        ratio = self.num_qo_heads // num_kv_heads
        launch = choose(card.key, v.dim, ratio, bs, v.num_groups)
        blocks = num_kv_heads * triton_decode.head_block(ratio, card)[1]
        return triton_plan.item_budget(bs, blocks, triton_plan.num_sms(device), launch.waves)

    def _plan_buffers(self, bs: int) -> triton_plan.PlanBuffers:
        sizes = self.windows.sink_tokens, self.windows.recent_tokens
        return triton_plan.PlanBuffers(bs, self.budget(bs), *sizes, self.req_to_token.device)

    def _scratch(self, bs: int, num_items: int) -> dict[int, triton_decode.DecodeBuffers]:
        make = triton_decode.DecodeBuffers.make
        return {width: make(bs, num_items, self.num_qo_heads, codec) for width, codec in self.by_width.items()}

    def reserve_graphs(self, max_bs: int) -> None:
        """Make the scratch that the graphs of all batch sizes up to `max_bs` share."""
        sizes = self.windows.sink_tokens, self.windows.recent_tokens
        items = max(triton_plan.item_count(bs, self.budget(bs), *sizes) for bs in range(1, max_bs + 1))
        self.graph_scratch = self._scratch(max_bs, items)

    def graph_room(self, bs: int) -> DecodeRoom:
        """Buffers of the graph of a batch size; the same ones each time, since the graph holds their addresses."""
        if bs not in self.graph_rooms:
            self.graph_rooms[bs] = DecodeRoom(self._plan_buffers(bs), self.graph_scratch)
        return self.graph_rooms[bs]

    def eager_room(self, bs: int) -> DecodeRoom:
        """Buffers for one step outside graphs."""
        plan = self._plan_buffers(bs)
        return DecodeRoom(plan, self._scratch(bs, plan.num_items))

    def plan_decode(self, room: DecodeRoom, request: Tensor, seq_lens: Tensor, loc: Tensor) -> TritonStep:
        """What a decode step shares; launches only, so a graph can hold it.

        Args:
            room: of the batch size. request: [bs] rows of req_to_token, 0 for padding. seq_lens: [bs], new tokens included.
            loc: [bs] slots being written.
        """
        self._require_whole_step()
        request, seq_lens, loc = request.long(), seq_lens.long(), loc.long()
        rows = self.windows.assign_decode(request, seq_lens, loc)
        plan = triton_plan.plan_decode(
            room.plan, self.req_to_token, seq_lens, req_pool_indices=request, pad_request=PADDING, **self.maps
        )
        return TritonStep(torch.where(request == PADDING, -1, loc), rows, plan, room)

    def plan_prefixes(self, request: Tensor, prefix_lens: list[int]) -> triton_plan.TritonPlan:
        """Where the cached prefixes of an extend batch lie.

        Args:
            request: [bs] int64 rows of req_to_token. prefix_lens: [bs] on the host.
        """
        self._require_whole_step()
        lens = torch.tensor(prefix_lens, dtype=torch.int32, device=request.device)
        buffers = self._plan_buffers(len(prefix_lens))
        return triton_plan.plan_decode(buffers, self.req_to_token, lens, req_pool_indices=request, **self.maps)

    def extend_step(self, loc: Tensor, window_rows: Tensor, plan: triton_plan.TritonPlan, qo_indptr: list[int]) -> TritonStep:
        """What an extend step shares; qo_indptr: [bs + 1] on the host, the rest as in `TritonStep`."""
        longest = max((b - a for a, b in itertools.pairwise(qo_indptr)), default=0)
        indptr = torch.tensor(qo_indptr, dtype=torch.int32, device=loc.device)
        return TritonStep(loc, window_rows, plan, None, indptr, longest)

    def sink_rows(self, plan: triton_plan.TritonPlan) -> Tensor:
        """[bs, sink_tokens] int64, rows of the sinks that a plan reads; `no_row` for none."""
        rows = plan.window_rows[:, : self.windows.sink_tokens].long()
        return torch.where(rows < 0, self.windows.no_row, rows)

    def decode(self, step: TritonStep, layer_id: int, q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float) -> Tensor:
        """Store the new tokens of a layer and attend. Shapes as in `oscar_kernel`; returns q's type."""
        cache, codec = self.layers[layer_id]
        layer, later = prepare(codec), layer_id in self.coded_later
        scratch = step.room.scratch[layer.k.query_width]
        triton_store.store_kv(
            k, v, step.loc, step.window_rows, cache, codec,
            return_rows=False, codes_later=later, q=q, queries=(scratch.q, scratch.amax),
        )  # fmt: skip
        out = torch.empty(*q.shape[:2], layer.v.dim, dtype=q.dtype, device=q.device)
        triton_decode.decode_attention(q, cache, codec, step.plan, scale, cap, out=out, buffers=scratch, queries_ready=True)
        if later:
            self._code_when_all_are_stored(step, layer_id)
        return out

    def _code_when_all_are_stored(self, step: TritonStep, layer_id: int) -> None:
        if layer_id in self.stored:
            self._require_whole_step()
        self.stored.add(layer_id)
        if self.stored == self.coded_later:
            self.step_codes.write(step.loc, step.window_rows)
            self.stored.clear()

    def _require_whole_step(self) -> None:
        """Raise if the last decode step did not run every layer: its codes were rounded alone, not as calibration decided."""
        if self.stored:
            missing = ", ".join(map(str, sorted(self.coded_later - self.stored)))
            self.stored.clear()
            raise RuntimeError(
                f"--kv-quant oscar: expected every attention layer to run in a decode step, layers {missing} did not, so the "
                "2-bit codes of its tokens are not shaped; calibrate with --method oscar, or serve with --oscar-recent-tokens 0"
            )

    def extend(self, step: TritonStep, layer_id: int, q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float) -> Tensor:
        """Store the new tokens of a layer and attend; queries of padding, beyond the new tokens, give 0.

        The windows are written last: new tokens take ring rows that prefixes are still read from.
        """
        cache, codec = self.layers[layer_id]
        new = triton_store.store_kv(k, v, step.loc, torch.full_like(step.window_rows, -1), cache, codec)
        out = torch.zeros(*q.shape[:2], prepare(codec).v.dim, dtype=q.dtype, device=q.device)
        triton_extend.extend_attention(
            q, *new, step.qo_indptr, cache, codec, step.plan, scale, cap, max_new=step.max_new, out=out
        )
        write_windows(*new, step.window_rows, cache)
        return out
