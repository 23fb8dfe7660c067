"""Attention over the 2-bit pool. The way a step runs is decided once, at start: `path_gpu` or `path_host`."""

from __future__ import annotations

import itertools
import logging

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.oscar.debug import WindowReads, check_window_rows
from sglang.srt.oscar.metrics import CacheMetrics
from sglang.srt.oscar.model_layers import ModelLayer, find_layers
from sglang.srt.oscar.path_host import AttentionPath, HostPath
from sglang.srt.oscar.pool import OscarTokenToKVPool, describe, start_line
from sglang.srt.oscar.runtime import get_runtime
from sglang.srt.oscar.windows import on_device
from sglang.srt.runtime_context import get_parallel, get_serving
from torch import Tensor

from oscar.format.side import kv_heads_of_rank
from oscar_kernel import ReadPlan

logger = logging.getLogger(__name__)


class OscarAttnBackend(AttentionBackend):
    """SGLang attention backend of the 2-bit pool."""

    def __init__(self, model_runner):
        super().__init__()
        self.runtime = get_runtime(model_runner.server_args)
        pool = model_runner.token_to_kv_pool
        if self.runtime is None or not isinstance(pool, OscarTokenToKVPool):
            raise RuntimeError(
                f"--kv-quant oscar: expected a 2-bit KV pool, SGLang built a {type(pool).__name__}; the hooks of oscar-kv are "
                "not installed in this process, so this start would have served 16 bits"
            )
        # SGLang reads both off the active backend.
        self.token_to_kv_pool = pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self._debug = self.runtime.settings.debug_checks
        if self._debug:
            pool.reads = WindowReads(self.req_to_token.shape[0], pool.windows.table.sink_tokens)
        self._debug_plan: ReadPlan | None = None
        self._num_new_tokens = 0
        parallel = get_parallel()
        heads = kv_heads_of_rank(self.runtime.artifact.model.num_kv_heads, parallel.attn_tp_rank, parallel.attn_tp_size)
        layers = find_layers(model_runner.model, self.runtime, heads, pool.device)
        self.path = self._make_path(layers)
        self._last_layer = max(layers)
        self.needs_cpu_seq_lens = self.path.needs_cpu_seq_lens
        self._check_sizes()
        self.metrics = None
        if parallel.attn_tp_rank == 0:
            logger.info("%s", start_line(pool, model_runner.model_config.context_len, self.req_to_token.shape[0] - 1))
            if model_runner.server_args.enable_metrics:
                self.metrics = CacheMetrics(pool, describe(pool), get_serving().served_model_name)

    def _make_path(self, found: dict[int, ModelLayer]) -> AttentionPath:
        """Put windows and layers into the pool, and choose the kernels.

        Raises:
            RuntimeError: a layer is missing, or the kernels cannot run here or are wrong here.
        """
        pool = self.token_to_kv_pool
        if len(found) != pool.layer_num:
            raise RuntimeError(
                f"--kv-quant oscar: found {len(found)} attention layers, the pool has {pool.layer_num}; the others would "
                "bypass the 2-bit cache"
            )
        query_heads = {layer.attention.tp_q_head_num for layer in found.values()}
        if len(query_heads) > 1:
            raise RuntimeError(
                "--kv-quant oscar: expected the same number of query heads in every layer, got "
                f"{', '.join(map(str, sorted(query_heads)))}; serve with --kv-quant none"
            )
        codecs = {i: found[i].codec for i in sorted(found)}
        try:
            layers = pool.attach(codecs, query_heads.pop(), self._impl())
        except RuntimeError as error:
            raise RuntimeError(
                f"--kv-quant oscar: {error}; serve with --oscar-kernels reference (plain PyTorch, slow)"
            ) from None
        if layers.impl != "triton":
            return HostPath(layers, pool.windows, self.req_to_token)
        from sglang.srt.oscar.path_gpu import GpuPath

        from oscar_kernel.triton import check

        # One layer stands for all: quantised, if any is.
        layer_id = next((i for i in codecs if i not in self.runtime.native_layers), min(codecs))
        fault = check.fault(codecs[layer_id], layers.num_qo_heads, found[layer_id].attention.logit_cap)
        if fault is not None:
            raise RuntimeError(
                f"--kv-quant oscar: the Triton kernels differ from the reference on this machine ({fault}); run "
                "scripts/gpu_check.sh and report what it prints, and serve with --oscar-kernels reference (plain PyTorch, "
                "slow) until then"
            )
        logger.info("OSCAR: Triton kernels, found equal to the reference at start")
        return GpuPath(layers, pool.windows, self.req_to_token)

    def _impl(self) -> str:
        """The implementation to insist on. On a GPU `auto` means the Triton kernels: a server must not run plain PyTorch there
        without having been asked to."""
        kernels, device = self.runtime.settings.kernels, torch.device(self.token_to_kv_pool.device)
        if kernels == "auto" and self.runtime.lossless:
            return "auto" if device.type == "cpu" else "reference"
        return "triton" if kernels == "auto" and device.type == "cuda" else kernels

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

    # Once a step

    def init_forward_metadata(self, forward_batch):
        mode = forward_batch.forward_mode
        if mode.is_decode():
            self.path.plan_decode(forward_batch)
            if self._debug:
                self._debug_plan = self._checked_plan(forward_batch.req_pool_indices.long(), forward_batch.seq_lens.tolist())
        elif mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            self._plan_extend(forward_batch)
        else:
            raise NotImplementedError(
                f"--kv-quant oscar: forward mode {mode.name} is not supported; drop --speculative-algorithm or what else asks "
                "for it, or serve with --kv-quant none"
            )

    def _plan_extend(self, batch) -> None:
        windows, device = self.token_to_kv_pool.windows, self.req_to_token.device
        prefix_lens, new_lens = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu)
        seq_lens = [p + n for p, n in zip(prefix_lens, new_lens, strict=True)]
        qo_indptr = [0, *itertools.accumulate(new_lens)]
        num_tokens = qo_indptr[-1]
        self._num_new_tokens = num_tokens
        request, loc = batch.req_pool_indices.long(), batch.out_cache_loc.long()[:num_tokens]
        self._adopt_prefixes(request, prefix_lens, self._first_chunks(batch))
        if self.metrics is not None:
            self.metrics.update()

        # One copy to the device, and repeats whose size the host knows: nothing waits.
        starts = [p - q for p, q in zip(prefix_lens, qo_indptr, strict=False)]
        lens, start, seq_len = on_device([new_lens, starts, seq_lens], device)

        def each(x: Tensor) -> Tensor:
            return x.repeat_interleave(lens, output_size=num_tokens)

        position = torch.arange(num_tokens, device=device) + each(start)
        rows = windows.table.rows_for(each(request), position, each(seq_len))
        self.path.plan_extend(request, prefix_lens, qo_indptr, loc, rows)
        if self._debug:
            self._debug_plan = self._checked_plan(request, prefix_lens)
        windows.record(loc, rows, position)

    def _checked_plan(self, request: Tensor, kv_lens: list[int]) -> ReadPlan:
        """With debug checks: what a step reads, found to be all that its requests should read in 16 bits."""
        plan = self.path.read_plan(request, kv_lens)
        self.token_to_kv_pool.reads.count(plan, request.tolist())
        return plan

    def _adopt_prefixes(self, request: Tensor, prefix_lens: list[int], first_chunks: list[int]) -> None:
        """Give requests that begin with a cached prefix their own copy of what is left of its windows."""
        if self._debug:
            for b in first_chunks:
                self.token_to_kv_pool.reads.begin(int(request[b]), prefix_lens[b])
        begins = [b for b in first_chunks if prefix_lens[b] > 0]
        if begins:
            index = on_device(begins, request.device)
            pool = self.token_to_kv_pool
            pool.copy_rows(*pool.windows.adopt(self.req_to_token, request[index], [prefix_lens[b] for b in begins]))

    def _first_chunks(self, batch) -> list[int]:
        """Indices of the batch's requests that have just taken their first pages."""
        indices = batch.req_pool_indices_cpu
        rows = (indices if indices is not None else batch.req_pool_indices).tolist()
        return [b for b, row in enumerate(rows) if self.token_to_kv_pool.window_pages.begins(row)]

    # CUDA graphs of decode. Everything that changes from step to step is recorded, so a replay needs no preparation.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        if self.path.needs_cpu_seq_lens:
            raise RuntimeError("--kv-quant oscar: CUDA graphs need the Triton kernels; add --disable-cuda-graph")
        self.path.reserve_graphs(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        """Make the buffers of a batch size before its graph is captured; a replay finds them in the graph."""
        if not forward_batch.forward_mode.is_decode():
            raise NotImplementedError(f"--kv-quant oscar: no CUDA graph for forward mode {forward_batch.forward_mode.name}")
        self.path.prepare_graph(forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch):
        self.path.plan_graph(forward_batch)

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Layers read SGLang's table of slots as they run; nothing is copied beforehand."""
        return SharedReadEnds.POST_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

    # Once a layer

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if k is None or v is None or not save_kv_cache or kwargs:
            self._refuse(k, v, layer, save_kv_cache, kwargs)
        out = self.path.decode.run(
            layer.layer_id,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
        )
        if self._debug and layer.layer_id == self._last_layer:
            # Not layer by layer: the kernels may write a step's codes at its end.
            self._check_windows(*self.path.layers.by_id)
        return out.flatten(1)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if k is None or v is None or not save_kv_cache or kwargs:
            self._refuse(k, v, layer, save_kv_cache, kwargs)
        if self._debug:
            self._check_windows(layer.layer_id)
        num_tokens = self._num_new_tokens  # padding lies behind them
        out = self.path.extend.run(
            layer.layer_id,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)[:num_tokens],
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim)[:num_tokens],
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
        )
        return out.flatten(1)

    @staticmethod
    def _refuse(k, v, layer, save_kv_cache, kwargs) -> None:
        """Raise where a layer does not bring its own keys and values, or asks for something that the kernels do not do."""
        asked = sorted(name for name, value in kwargs.items() if value is not None)
        if k is None or v is None or not save_kv_cache or asked:
            raise NotImplementedError(
                f"--kv-quant oscar: layer {layer.layer_id} shares another layer's cache or asks for {asked}; not supported"
            )

    def _check_windows(self, *layer_ids: int) -> None:
        """With debug checks: find the window rows that this step reads to be their slots', in some layers."""
        for i in layer_ids:
            layers, windows = self.path.layers, self.token_to_kv_pool.windows
            check_window_rows(self._debug_plan, windows, layers.cache(i), layers.codec(i), i)

    def support_triton(self):
        return False
