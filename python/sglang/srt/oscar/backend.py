"""Attention over the 2-bit pool: Triton kernels on a GPU (`triton_path`), the C++ library or PyTorch elsewhere."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.oscar.fold import fold_value_transform
from sglang.srt.oscar.metrics import CacheMetrics
from sglang.srt.oscar.pool import OscarTokenToKVPool, describe
from sglang.srt.oscar.runtime import get_runtime
from sglang.srt.oscar.windows import Windows
from sglang.srt.runtime_context import get_parallel, get_serving

from oscar.format.side import kv_heads_of_rank
from oscar_kernel import LayerCache, LayerCodec, ReadPlan, decode_attention, extend_attention, write_windows
from oscar_kernel.choose import triton_obstacle

if TYPE_CHECKING:
    from sglang.srt.oscar.path_gpu import TritonStep

logger = logging.getLogger(__name__)


@dataclass
class StepMetadata:
    """What all layers of one forward share.

    Args:
        loc: [num_tokens] int64, slots being written.
        window_rows: [num_tokens] int64, window rows being written.
        plan: what to read: in decode the whole sequences, in extend the cached prefixes.
        qo_indptr: in extend, ranges of new tokens on the host; None in decode.
    """

    loc: torch.Tensor
    window_rows: torch.Tensor
    plan: ReadPlan
    qo_indptr: list[int] | None


class OscarAttnBackend(AttentionBackend):
    """SGLang attention backend of the 2-bit pool.

    `self.kernels` is the Triton path, or None: then a step's plan is made on the host's lengths, which no CUDA graph can hold.
    """

    def __init__(self, model_runner):
        super().__init__()
        self.runtime = get_runtime(model_runner.server_args)
        pool = model_runner.token_to_kv_pool
        if self.runtime is None or not isinstance(pool, OscarTokenToKVPool) or pool.windows is None:
            raise RuntimeError(
                f"--kv-quant oscar: expected a 2-bit KV pool, SGLang built a {type(pool).__name__}; the hooks of oscar-kv are "
                "not installed in this process, so this start would have served 16 bits"
            )
        # SGLang reads both off the active backend.
        self.token_to_kv_pool = pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self._generation = [0] * self.req_to_token.shape[0]
        layers = self._prepare_layers(model_runner.model)
        self._check_sizes()
        self.kernels = None
        if self._uses_triton():
            self.kernels = self._triton_path(layers)
            self.needs_cpu_seq_lens = False
        self.metrics = None
        if model_runner.server_args.enable_metrics and get_parallel().attn_tp_rank == 0:
            self.metrics = CacheMetrics(pool, describe(pool), get_serving().served_model_name)

    def _uses_triton(self) -> bool:
        """On a GPU, unless the user asked for another implementation; elsewhere if asked for."""
        kernels = self.runtime.settings.kernels
        if kernels == "auto":
            return torch.device(self.token_to_kv_pool.device).type == "cuda" and not self.runtime.lossless
        return kernels == "triton"

    def _triton_path(self, layers: list[RadixAttention]):
        """The kernels for these layers, once they have given the reference's results on this card.

        Raises:
            RuntimeError: they cannot run here, or give other results.
        """
        pool = self.token_to_kv_pool
        instead = "serve with --oscar-kernels reference (plain PyTorch, slow)"
        layer = next((layer for layer in layers if layer.layer_id not in self.runtime.native_layers), layers[0])
        codec, heads = pool.codecs[layer.layer_id], {layer.tp_q_head_num for layer in layers}
        reason = triton_obstacle(codec, pool.layer_cache(layer.layer_id))
        if reason is None and len(heads) > 1:
            reason = f"layers have different numbers of query heads: {', '.join(map(str, sorted(heads)))}"
        if reason is not None:
            raise RuntimeError(f"--kv-quant oscar: the Triton kernels cannot serve this model here: {reason}; {instead}")
        from sglang.srt.oscar.path_gpu import TritonPath

        from oscar_kernel.triton import check as triton_check

        fault = triton_check.fault(codec, layer.tp_q_head_num, layer.logit_cap)
        if fault is not None:
            raise RuntimeError(
                f"--kv-quant oscar: the Triton kernels differ from the reference on this machine ({fault}); run "
                f"scripts/gpu_check.sh and report what it prints, and {instead} until then"
            )
        logger.info("OSCAR: Triton kernels, found equal to the reference at start")
        return TritonPath(
            pool.windows, {i: self._layer(i) for i in sorted(pool.codecs)}, self.req_to_token, layer.tp_q_head_num
        )

    def _prepare_layers(self, model: torch.nn.Module) -> list[RadixAttention]:
        """Fold value transforms, and put each layer's codec on the pool's device. Returns the attention layers."""
        pool, parallel = self.token_to_kv_pool, get_parallel()
        heads = kv_heads_of_rank(self.runtime.artifact.model.num_kv_heads, parallel.attn_tp_rank, parallel.attn_tp_size)
        folded, layers = 0, []
        for parent in model.modules():
            for attn in parent.children():
                if not isinstance(attn, RadixAttention) or attn.layer_id in pool.codecs:
                    continue
                if attn.attn_type != AttentionType.DECODER or attn.is_cross_attention or attn.sliding_window_size > -1:
                    raise RuntimeError(f"--kv-quant oscar: layer {attn.layer_id} is not plain causal attention; not supported")
                layer = self.runtime.artifact.layers.get(attn.layer_id)  # None: it stays in 16 bits
                plain = layer is not None and layer.v_mean is None
                fold = plain and fold_value_transform(parent, layer.v_transform[heads].double())
                pool.codecs[attn.layer_id] = self.runtime.layer_codec(attn.layer_id, heads, pool.device, fold)
                folded += fold
                layers.append(attn)
        if len(pool.codecs) != pool.layer_num:
            raise RuntimeError(
                f"--kv-quant oscar: found {len(pool.codecs)} attention layers, the pool has {pool.layer_num}; the others would "
                "bypass the 2-bit cache"
            )
        logger.info("OSCAR: value transforms folded into the weights of %d of %d layers", folded, pool.layer_num)
        return layers

    def _check_sizes(self) -> None:
        """The plan's bytes must be the tensors' bytes; a pool of another layout must not be served."""
        pool = self.token_to_kv_pool
        slots = pool.size + pool.page_size
        expected = slots * self.runtime.bytes_per_token(pool.layer_num, pool.head_num)
        if pool.dtype != torch.uint8 or pool.pool_bytes() != expected:
            raise RuntimeError(
                f"--kv-quant oscar: the pool should take {expected} bytes of uint8 for {slots} slots, it takes "
                f"{pool.pool_bytes()} of {pool.dtype}"
            )

    def init_forward_metadata(self, forward_batch):
        mode = forward_batch.forward_mode
        if mode.is_decode() and self.kernels is not None:
            batch = forward_batch
            room = self.kernels.eager_room(batch.seq_lens.shape[0])
            self.forward_metadata = self.kernels.plan_decode(room, batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc)
            if self.runtime.settings.debug_checks:
                lens = batch.seq_lens.tolist()
                self.debug_plan = self._windows.plan(self.req_to_token, batch.req_pool_indices.long(), lens)
        elif mode.is_decode():
            self.forward_metadata = self._plan_decode(forward_batch)
        elif mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            self.forward_metadata = self._plan_extend(forward_batch)
        else:
            raise NotImplementedError(
                f"--kv-quant oscar: forward mode {mode.name} is not supported; drop --speculative-algorithm or what else asks "
                "for it, or serve with --kv-quant none"
            )

    # CUDA graphs of decode. Everything that changes from step to step is recorded, so a replay needs no preparation.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        if self.kernels is None:
            raise RuntimeError("--kv-quant oscar: CUDA graphs need the Triton kernels; add --disable-cuda-graph")
        self.kernels.reserve_graphs(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        """Make the buffers of a batch size before its graph is captured; a replay finds them in the graph."""
        if not forward_batch.forward_mode.is_decode():
            raise NotImplementedError(f"--kv-quant oscar: no CUDA graph for forward mode {forward_batch.forward_mode.name}")
        self.kernels.graph_room(forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch):
        room, batch = self.kernels.graph_room(forward_batch.batch_size), forward_batch
        self.forward_metadata = self.kernels.plan_decode(room, batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc)

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Layers read SGLang's table of slots as they run; nothing is copied beforehand."""
        return SharedReadEnds.POST_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

    @property
    def _windows(self) -> Windows:
        return self.token_to_kv_pool.windows

    def _plan_decode(self, batch) -> StepMetadata:
        seq_lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.seq_lens.cpu()
        request, loc = batch.req_pool_indices.long(), batch.out_cache_loc.long()
        rows = self._windows.assign_decode(request, batch.seq_lens.long(), loc)
        self.debug_plan = plan = self._windows.plan(self.req_to_token, request, seq_lens.tolist())
        return StepMetadata(loc, rows, plan, None)

    def _plan_extend(self, batch) -> StepMetadata | TritonStep:
        windows, device = self._windows, self.req_to_token.device
        prefix_lens, new_lens = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu)
        seq_lens = [p + n for p, n in zip(prefix_lens, new_lens, strict=True)]
        request, loc = batch.req_pool_indices.long(), batch.out_cache_loc.long()
        if self.kernels is None or self.runtime.settings.debug_checks:
            self.debug_plan = windows.plan(self.req_to_token, request, prefix_lens)
        if self.kernels is None:
            plan = self.debug_plan
            found = plan.window_rows[:, : windows.sink_tokens]
        else:
            plan = self.kernels.plan_prefixes(request, prefix_lens)
            found = self.kernels.sink_rows(plan)
        windows.note_prefixes(found, prefix_lens, request, self._first_chunks(batch))
        if self.metrics is not None:
            self.metrics.update()

        qo_indptr = [0, *itertools.accumulate(new_lens)]
        num_tokens = qo_indptr[-1]
        # One copy to the device, and repeats whose size the host knows: nothing waits.
        starts = [p - q for p, q in zip(prefix_lens, qo_indptr, strict=False)]
        lens, start, seq_len = torch.tensor([new_lens, starts, seq_lens], device=device)

        def each(x):
            return x.repeat_interleave(lens, output_size=num_tokens)

        position = torch.arange(num_tokens, device=device) + each(start)
        sink = windows.sink_tokens
        num_sinks = sum(max(0, min(sink, p + n) - p) for p, n in zip(prefix_lens, new_lens, strict=True))
        rows = windows.assign(each(request), position, each(seq_len), loc[:num_tokens], num_sinks)
        windows.reserve_sinks(request, seq_lens)
        if self.kernels is None:
            return StepMetadata(loc[:num_tokens], rows, plan, qo_indptr)
        return self.kernels.extend_step(loc[:num_tokens], rows, plan, qo_indptr)

    def _first_chunks(self, batch) -> list[int]:
        """Indices of the batch's requests that have not run before: their row of req_to_token has a new generation."""
        indices = batch.req_pool_indices_cpu
        first = []
        for b, row in enumerate((indices if indices is not None else batch.req_pool_indices).tolist()):
            generation = int(self.req_to_token_pool.req_generation[row])
            if self._generation[row] != generation:
                self._generation[row] = generation
                first.append(b)
        return first

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        step, pool = self.forward_metadata, self.token_to_kv_pool
        k, v = self._new_tokens(k, v, layer, save_kv_cache, kwargs)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        scale, cap = layer.scaling, layer.logit_cap
        if self.kernels is not None:
            out = self.kernels.decode(step, layer.layer_id, q, k, v, scale, cap)
            if layer.layer_id == max(pool.codecs):
                # Not layer by layer: the kernels may write a step's codes at its end.
                self._check_windows(*sorted(pool.codecs))
            return out.flatten(1)
        pool.write(layer.layer_id, k, v, step.loc, step.window_rows)
        self._check_windows(layer.layer_id)
        cache, codec = self._layer(layer.layer_id)
        out = decode_attention(q, cache, codec, step.plan, scale, cap, impl=pool.impl)
        return out.flatten(1).to(q.dtype)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        step, pool = self.forward_metadata, self.token_to_kv_pool
        k, v = self._new_tokens(k, v, layer, save_kv_cache, kwargs)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        scale, cap = layer.scaling, layer.logit_cap
        self._check_windows(layer.layer_id)
        if self.kernels is not None:
            return self.kernels.extend(step, layer.layer_id, q, k, v, scale, cap).flatten(1)
        # New tokens take ring rows that prefixes are still read from: windows are written when attention has read them.
        new = pool.write(layer.layer_id, k, v, step.loc, torch.full_like(step.window_rows, pool.windows.no_row))
        num_tokens, (cache, codec) = step.qo_indptr[-1], self._layer(layer.layer_id)
        out = extend_attention(q[:num_tokens], *new, step.qo_indptr, cache, codec, step.plan, scale, cap, impl=pool.impl)
        write_windows(*new, step.window_rows, cache)
        out = out.flatten(1).to(q.dtype)
        return out if num_tokens == q.shape[0] else torch.nn.functional.pad(out, (0, 0, 0, q.shape[0] - num_tokens))

    def _new_tokens(self, k, v, layer, save_kv_cache, kwargs):
        """K and V of the tokens being written, one row a token and head; padding beyond them is cut off."""
        if k is None or v is None or not save_kv_cache or any(value is not None for value in kwargs.values()):
            raise NotImplementedError(
                f"--kv-quant oscar: layer {layer.layer_id} shares another layer's cache or asks for {sorted(kwargs)}; "
                "not supported"
            )
        num_tokens = self.forward_metadata.loc.shape[0]
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)[:num_tokens]
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)[:num_tokens]
        return k, v

    def _layer(self, layer_id: int) -> tuple[LayerCache, LayerCodec]:
        return self.token_to_kv_pool.layer_cache(layer_id), self.token_to_kv_pool.codecs[layer_id]

    def _check_windows(self, *layer_ids: int) -> None:
        """With debug checks: find the window rows that this step reads to be their slots', in some layers."""
        if self.runtime.settings.debug_checks:
            for layer_id in layer_ids:
                self._check_window_rows(self.debug_plan, *self._layer(layer_id), layer_id)

    @staticmethod
    def _check_window_rows(plan: ReadPlan, cache, codec, layer_id: int) -> None:
        """Every window row that is read must encode to the 2-bit row of its slot; else it is somebody else's."""
        if plan.slots.shape[1] == 0:
            return
        mask = plan.window_mask
        slots = plan.slots.gather(1, plan.window_positions.clamp(0, plan.slots.shape[1] - 1))[mask]
        rows = plan.window_rows[mask]
        same_k = (codec.encode_k(cache.k_window[rows]) == cache.k_buffer[slots]).flatten(1).all(1)
        same_v = (codec.encode_v(cache.v_window[rows]) == cache.v_buffer[slots]).flatten(1).all(1)
        stale = ~(same_k & same_v)
        if stale.any():
            raise RuntimeError(
                f"--oscar-debug-checks: layer {layer_id}: {int(stale.sum())} of {len(rows)} 16-bit rows belong to other tokens "
                f"than their slots, first slot {int(slots[stale][0])}"
            )

    def support_triton(self):
        return False
