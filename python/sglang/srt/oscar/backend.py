"""Attention over the 2-bit pool, in vectorised PyTorch on any device."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.oscar.fold import fold_value_transform
from sglang.srt.oscar.metrics import CacheMetrics
from sglang.srt.oscar.pool import OscarTokenToKVPool, describe
from sglang.srt.oscar.runtime import get_runtime
from sglang.srt.runtime_context import get_parallel, get_serving

from oscar.artifact import kv_heads_of_rank
from oscar_kernel import ReadPlan, decode_attention, extend_attention, write_windows

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
    """SGLang attention backend of the 2-bit pool."""

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
        self._prepare_layers(model_runner.model)
        self._check_sizes()
        self.metrics = None
        if model_runner.server_args.enable_metrics and get_parallel().attn_tp_rank == 0:
            self.metrics = CacheMetrics(pool, describe(pool), get_serving().served_model_name)

    def _prepare_layers(self, model: torch.nn.Module) -> None:
        """Fold value transforms, and put each layer's codec on the pool's device."""
        pool, parallel = self.token_to_kv_pool, get_parallel()
        heads = kv_heads_of_rank(self.runtime.artifact.model.num_kv_heads, parallel.attn_tp_rank, parallel.attn_tp_size)
        folded = 0
        for parent in model.modules():
            for attn in parent.children():
                if not isinstance(attn, RadixAttention) or attn.layer_id in pool.codecs:
                    continue
                if attn.attn_type != AttentionType.DECODER or attn.is_cross_attention or attn.sliding_window_size > -1:
                    raise RuntimeError(f"--kv-quant oscar: layer {attn.layer_id} is not plain causal attention; not supported")
                layer = self.runtime.artifact.layers[attn.layer_id]
                fold = layer.v_mean is None and fold_value_transform(parent, layer.v_transform[heads].double())
                pool.codecs[attn.layer_id] = self.runtime.layer_codec(attn.layer_id, heads, pool.device, fold)
                folded += fold
        if len(pool.codecs) != pool.layer_num:
            raise RuntimeError(
                f"--kv-quant oscar: found {len(pool.codecs)} attention layers, the pool has {pool.layer_num}; the others would "
                "bypass the 2-bit cache"
            )
        logger.info("OSCAR: value transforms folded into the weights of %d of %d layers", folded, pool.layer_num)

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
        if mode.is_decode():
            self.forward_metadata = self._plan_decode(forward_batch)
        elif mode.is_extend():
            self.forward_metadata = self._plan_extend(forward_batch)
        else:
            raise NotImplementedError(f"--kv-quant oscar: forward mode {mode.name} is not supported")

    def _plan_decode(self, batch) -> StepMetadata:
        windows = self.token_to_kv_pool.windows
        seq_lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.seq_lens.cpu()
        kv_lens = seq_lens.tolist()
        request, loc, on_device = batch.req_pool_indices.long(), batch.out_cache_loc.long(), batch.seq_lens.long()
        num_sinks = sum(n <= windows.sink_tokens for n in kv_lens)
        rows = windows.assign(request, on_device - 1, on_device, loc, num_sinks)
        return StepMetadata(loc, rows, windows.plan(self.req_to_token, request, kv_lens), None)

    def _plan_extend(self, batch) -> StepMetadata:
        windows, device = self.token_to_kv_pool.windows, self.req_to_token.device
        prefix_lens, new_lens = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu)
        request, loc = batch.req_pool_indices.long(), batch.out_cache_loc.long()
        plan = windows.plan(self.req_to_token, request, prefix_lens)
        windows.note_prefixes(plan, request, self._first_chunks(batch))
        if self.metrics is not None:
            self.metrics.update()

        qo_indptr = [0]
        for new in new_lens:
            qo_indptr.append(qo_indptr[-1] + new)
        num_tokens = qo_indptr[-1]
        lens = torch.tensor(new_lens, device=device)
        start = torch.tensor([p - q for p, q in zip(prefix_lens, qo_indptr, strict=False)], device=device)
        position = torch.arange(num_tokens, device=device) + start.repeat_interleave(lens)
        seq_len = (torch.tensor(prefix_lens, device=device) + lens).repeat_interleave(lens)
        sink = windows.sink_tokens
        num_sinks = sum(max(0, min(sink, p + n) - p) for p, n in zip(prefix_lens, new_lens, strict=True))
        rows = windows.assign(request.repeat_interleave(lens), position, seq_len, loc[:num_tokens], num_sinks)
        return StepMetadata(loc[:num_tokens], rows, plan, qo_indptr)

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
        pool.write(layer.layer_id, k, v, step.loc, step.window_rows)
        cache, codec = self._layer(layer)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = decode_attention(q, cache, codec, step.plan, layer.scaling, layer.logit_cap)
        return out.flatten(1).to(q.dtype)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        step, pool = self.forward_metadata, self.token_to_kv_pool
        k, v = self._new_tokens(k, v, layer, save_kv_cache, kwargs)
        # New tokens take ring rows that prefixes are still read from: windows are written when attention has read them.
        new = pool.write(layer.layer_id, k, v, step.loc, torch.full_like(step.window_rows, pool.windows.no_row))
        cache, codec = self._layer(layer)
        num_tokens = step.qo_indptr[-1]
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        scale, cap = layer.scaling, layer.logit_cap
        out = extend_attention(q[:num_tokens], *new, step.qo_indptr, cache, codec, step.plan, scale, cap)
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

    def _layer(self, layer):
        """Storage and codec of a layer; with debug checks, once the rows about to be read are found to be their slots'."""
        cache, codec = self.token_to_kv_pool.layer_cache(layer.layer_id), self.token_to_kv_pool.codecs[layer.layer_id]
        if self.runtime.settings.debug_checks:
            self._check_window_rows(self.forward_metadata.plan, cache, codec, layer.layer_id)
        return cache, codec

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
