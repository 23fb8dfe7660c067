"""Attention over the 2-bit cache: plan once a step, run once a layer, in the manner of FlashInfer's wrappers.

    layers = Layers({0: (cache, codec), ...}, num_qo_heads=32)       # chooses the implementation, once
    decode = layers.batch_decode()
    for each step:
        decode.plan(req_to_token, req_pool_indices, kv_lens, windows, loc, window_rows)
        for each layer:
            out = decode.run(layer_id, q, k, v, sm_scale=head_dim**-0.5)

This is the one public interface of the kernels; the server and the evaluation use it. `examples/kernels.py` makes every tensor.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oscar.format.windows import WindowTable
from oscar_kernel import reference
from oscar_kernel.cpu import layer as cpu_layer
from oscar_kernel.cpu.library import library
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.read_plan import ReadPlan, plan_read

logger = logging.getLogger(__name__)
IMPLS = ("auto", "cpu", "triton", "reference")


class BatchDecode(ABC):
    """Attention of one new token a sequence. Make one with `Layers.batch_decode`."""

    @abstractmethod
    def plan(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        kv_lens: Sequence[int] | Tensor,
        windows: WindowTable,
        loc: Tensor | None = None,
        window_rows: Tensor | None = None,
    ) -> None:
        """Say what the step reads and writes; for all layers.

        Args:
            req_to_token: [max_num_reqs, max_context_len] integer, slot of each position of each request.
            req_pool_indices: [bs] integer, rows of req_to_token.
            kv_lens: [bs] tokens to read, the new one included: on the host, or (Triton) on the device.
            windows: what the requests hold.
            loc: [bs] integer, slots of the new tokens; None: `run` writes nothing. Triton: -1 is written nowhere.
            window_rows: [bs] integer, window rows of the new tokens, `windows.no_row` for none.
        """

    @abstractmethod
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
        """Write the new tokens' keys and values of one layer, if given, and attend.

        Args:
            layer_id: of the layer.
            q: [bs, num_qo_heads, head_dim] float32, bfloat16 or float16, after RoPE.
            k, v: [bs, num_kv_heads, head_dim] and [bs, num_kv_heads, v_head_dim], after RoPE; None: they are stored already.
            sm_scale: factor on the logits. logit_cap: soft cap of the logits; 0 for none.
            out_dtype: of the result; None: q's.
        Returns:
            [bs, num_qo_heads, v_head_dim].
        """


class BatchExtend(ABC):
    """Causal attention of several new tokens a sequence, over their cached prefix. Make one with `Layers.batch_extend`."""

    @abstractmethod
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
        """Say what the step reads and writes; for all layers.

        Args:
            req_to_token: [max_num_reqs, max_context_len] integer, slot of each position of each request.
            req_pool_indices: [bs] integer, rows of req_to_token.
            prefix_lens: [bs] on the host, tokens that are cached already; may be 0.
            qo_indptr: [bs + 1] on the host, ranges of new tokens; a range may be empty.
            windows: what the requests hold.
            loc: [num_tokens] integer, slots of the new tokens.
            window_rows: [num_tokens] integer, window rows of the new tokens, `windows.no_row` for none.
        """

    @abstractmethod
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
        """Write the new tokens' keys and values of one layer, attend, and then write the windows.

        New tokens see each other in 16 bits. The windows are written last: new tokens take rows that prefixes are still read
        from.

        Args:
            layer_id: of the layer.
            q: [num_rows, num_qo_heads, head_dim], after RoPE; rows beyond the new tokens are padding and give 0.
            k, v: [num_tokens, num_kv_heads, dim], after RoPE.
            sm_scale, logit_cap, out_dtype: as in `BatchDecode.run`.
        Returns:
            [num_rows, num_qo_heads, v_head_dim].
        """


class Layers:
    """The layers of a model and the implementation that runs them, decided once.

    Args:
        layers: layer_id -> storage and codec. Kernels keep the addresses of their tensors.
        num_qo_heads: query heads on this rank.
        impl: "auto" takes the C++ library on a CPU and Triton on a GPU where they can run, else plain PyTorch with one warning;
            "cpu", "triton" and "reference" insist.
        isa: level of the C++ library; asking for one is asking for the library.
    Raises:
        ValueError: impl is unknown, or has no levels. RuntimeError: it cannot run here; the sentence says why.
    """

    def __init__(
        self,
        layers: Mapping[int, tuple[LayerCache, LayerCodec]],
        num_qo_heads: int,
        impl: str = "auto",
        isa: str | None = None,
    ):
        self.num_qo_heads, self.isa = num_qo_heads, isa
        self.impl = choose(layers, impl, isa)
        self._state: Any = None
        if self.impl == "triton":
            from oscar_kernel.triton.attention import TritonLayers

            self._state = TritonLayers(layers, num_qo_heads)
            self.by_id = self._state.by_id
        else:
            self.by_id = {i: self._make(*layer) for i, layer in layers.items()}

    def _make(self, cache: LayerCache, codec: LayerCodec) -> Any:
        if self.impl == "cpu":
            return cpu_layer.CpuLayer(cache, codec, self.num_qo_heads, self.isa)
        return ReferenceLayer(cache, codec)

    def cache(self, layer_id: int) -> LayerCache:
        """Storage of a layer."""
        return self.by_id[layer_id].cache

    def codec(self, layer_id: int) -> LayerCodec:
        """Codec of a layer."""
        return self.by_id[layer_id].codec

    def store(self, layer_id: int, k: Tensor, v: Tensor, loc: Tensor, window_rows: Tensor) -> tuple[Tensor, Tensor]:
        """`reference.store_kv` of one layer: for writes that are no step of their own."""
        return self.by_id[layer_id].store(k, v, loc.long().contiguous(), window_rows.long().contiguous())

    def reserve(self, max_bs: int, windows: WindowTable) -> None:
        """Triton: make the scratch that wrappers of graphs share, for batches of up to this many rows."""
        if self._state is not None:
            self._state.reserve(max_bs, windows)

    def batch_decode(self) -> BatchDecode:
        """A wrapper for decode steps of any size; its buffers are made for each plan."""
        if self.impl == "triton":
            from oscar_kernel.triton.attention import TritonDecode

            return TritonDecode(self._state)
        return HostDecode(self.by_id)

    def graph_decode(self, bs: int, windows: WindowTable) -> BatchDecode:
        """A wrapper for decode steps of exactly `bs` rows, with its buffers: a CUDA graph can hold `plan` and `run`.

        windows: the ones that plans will be given.

        Raises:
            RuntimeError: the implementation plans on the host.
        """
        if self.impl != "triton":
            raise RuntimeError(f"oscar_kernel: impl={self.impl!r} plans on the host, which no CUDA graph can hold")
        from oscar_kernel.triton.attention import TritonDecode

        return TritonDecode(self._state, bs, windows)

    def batch_extend(self) -> BatchExtend:
        """A wrapper for extend steps."""
        if self.impl == "triton":
            from oscar_kernel.triton.attention import TritonExtend

            return TritonExtend(self._state)
        return HostExtend(self.by_id)


class ReferenceLayer:
    """Ops of one layer in plain PyTorch."""

    plan = staticmethod(lambda plan: plan)

    def __init__(self, cache: LayerCache, codec: LayerCodec):
        self.cache, self.codec = cache, codec

    def store(self, k: Tensor, v: Tensor, loc: Tensor, window_rows: Tensor) -> tuple[Tensor, Tensor]:
        return reference.store_kv(k, v, loc, window_rows, self.cache, self.codec)

    def write_windows(self, k: Tensor, v: Tensor, window_rows: Tensor) -> None:
        reference.write_windows(k, v, window_rows, self.cache)

    def decode(self, q: Tensor, plan: ReadPlan, sm_scale: float, logit_cap: float) -> Tensor:
        return reference.decode_attention(q, self.cache, self.codec, plan, sm_scale, logit_cap)

    def extend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        qo_indptr: Sequence[int],
        plan: ReadPlan,
        sm_scale: float,
        logit_cap: float,
    ) -> Tensor:
        return reference.extend_attention(q, k_new, v_new, qo_indptr, self.cache, self.codec, plan, sm_scale, logit_cap)


class HostDecode(BatchDecode):
    """Decode with a plan that is made on the host: the C++ library and the reference."""

    def __init__(self, layers: Mapping[int, Any]):
        self._layers = layers
        self._convert = next(iter(layers.values())).plan

    def plan(self, req_to_token, req_pool_indices, kv_lens, windows, loc=None, window_rows=None) -> None:
        lens = kv_lens.tolist() if isinstance(kv_lens, Tensor) else kv_lens
        self._made = self._convert(plan_read(req_to_token, req_pool_indices, lens, windows))
        self._loc, self._rows = _indices(loc), _indices(window_rows)

    def run(self, layer_id, q, k=None, v=None, *, sm_scale, logit_cap=0.0, out_dtype=None) -> Tensor:
        layer = self._layers[layer_id]
        if k is not None:
            layer.store(k, v, self._loc, self._rows)
        return layer.decode(q, self._made, sm_scale, logit_cap).to(q.dtype if out_dtype is None else out_dtype)


class HostExtend(BatchExtend):
    """Extend with a plan that is made on the host: the C++ library and the reference."""

    def __init__(self, layers: Mapping[int, Any]):
        self._layers = layers
        self._convert = next(iter(layers.values())).plan

    def plan(self, req_to_token, req_pool_indices, prefix_lens, qo_indptr, windows, loc, window_rows) -> None:
        self._made = self._convert(plan_read(req_to_token, req_pool_indices, prefix_lens, windows))
        self._qo_indptr = list(qo_indptr)
        self._loc, self._rows = loc.long().contiguous(), window_rows.long().contiguous()
        self._nowhere = torch.full_like(self._rows, windows.no_row)

    def run(self, layer_id, q, k, v, *, sm_scale, logit_cap=0.0, out_dtype=None) -> Tensor:
        layer, num_tokens = self._layers[layer_id], self._qo_indptr[-1]
        new = layer.store(k, v, self._loc, self._nowhere)
        out = layer.extend(q[:num_tokens], *new, self._qo_indptr, self._made, sm_scale, logit_cap)
        layer.write_windows(*new, self._rows)
        out = out.to(q.dtype if out_dtype is None else out_dtype)
        padding = q.shape[0] - num_tokens
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


def choose(layers: Mapping[int, tuple[LayerCache, LayerCodec]], impl: str = "auto", isa: str | None = None) -> str:
    """Name the implementation that runs these layers: "cpu", "triton" or "reference". Arguments and errors as in `Layers`."""
    if impl not in IMPLS:
        raise ValueError(f"oscar_kernel: impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    if isa is not None and impl in ("reference", "triton"):
        raise ValueError(f"oscar_kernel: isa={isa!r} is a level of the C++ library, impl={impl!r} has none")
    if impl == "reference":
        return impl
    on_cpu = all(cache.k.buffer.device.type == "cpu" for cache, _ in layers.values())
    triton = impl == "triton" or (impl == "auto" and isa is None and not on_cpu)
    name, what = ("triton", "the Triton kernels") if triton else ("cpu", "the C++ library")
    find = triton_obstacle if triton else cpu_layer.obstacle
    reason = next((reason for layer in layers.values() if (reason := find(*layer)) is not None), None)
    if reason is None:
        return name
    if impl == name or isa is not None:
        raise RuntimeError(f"oscar_kernel: {what} cannot run here: {reason}")
    if triton or library() is not None:  # a library that is missing says so itself
        _say_slower(what, reason)
    return "reference"


def triton_obstacle(cache: LayerCache, codec: LayerCodec) -> str | None:
    """Why the Triton kernels cannot serve a layer, in a few words, or None."""
    try:
        from oscar_kernel.triton.common import LayerTensors, interpreted
        from oscar_kernel.triton.tuning import architecture
    except ImportError as error:
        return f"Triton is not installed ({error})"
    device = cache.k.buffer.device
    if device.type == "cpu" and not interpreted():
        return "the tensors are on the CPU, where Triton runs with TRITON_INTERPRET=1 only"
    try:
        LayerTensors.check(codec)
        architecture(device)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def _indices(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.long().contiguous()


@functools.lru_cache
def _say_slower(what: str, reason: str) -> None:
    """Log, once a reason, that `auto` took the slower path."""
    logger.warning("oscar_kernel: using the slower PyTorch reference, not %s: %s", what, reason)
