"""The KV pool: to SGLang a plain token-major pool of bytes, whose "head_dim" is the bytes of a row."""

from __future__ import annotations

import logging

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
from sglang.srt.oscar.debug import WindowReads
from sglang.srt.oscar.runtime import Runtime
from sglang.srt.oscar.window_pages import WindowPages, longest_request
from sglang.srt.oscar.windows import Windows

from oscar.format import sizing
from oscar_kernel import LayerCache, LayerCodec, Layers, SideCache, host_memory

logger = logging.getLogger(__name__)


class OscarTokenToKVPool(MHATokenToKVPool):
    """2-bit rows `[num_slots, num_kv_heads, row_bytes]` uint8, metadata inside the row; some slots are memory of the windows.

    Whatever moves a slot's bytes (host copies, slot moves, transfers) moves its metadata too, since it is the same row. The
    dtype stays uint8: some models write BF16 pools directly from a fused kernel, and must not take this one for such a pool.
    """

    runtime: Runtime = None  # set on the subclass that `pool_class` makes

    def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver, **kwargs):
        fmt_k, fmt_v = self.runtime.k_format, self.runtime.v_format
        v_head_dim = kwargs.pop("v_head_dim", None) or head_dim
        if (head_dim, v_head_dim) != (fmt_k.head_dim, fmt_v.head_dim):
            raise ValueError(
                f"--kv-quant oscar: the artifact is for head_dim={fmt_k.head_dim}, v_head_dim={fmt_v.head_dim}, the model has "
                f"head_dim={head_dim}, v_head_dim={v_head_dim}; run `oscar calibrate` for this model"
            )
        self.windows: Windows | None = None
        self.window_pages: WindowPages | None = None
        self.reads: WindowReads | None = None  # with --oscar-debug-checks
        self.layers: Layers | None = None
        super().__init__(
            size,
            page_size,
            torch.uint8,
            head_num,
            fmt_k.row_bytes,
            layer_num,
            device,
            enable_memory_saver,
            v_head_dim=fmt_v.row_bytes,
            **kwargs,
        )

    def _create_buffers_normal(self):
        (k_slots, heads, _), (v_slots, _, _) = self._kv_buffer_shapes()
        layers = [self.runtime.formats(self.start_layer + i) for i in range(self.layer_num)]
        # One row of the windows more than the slots hold: it takes writes that go nowhere.
        self._storage = [
            (
                self._zeros((k_slots + sizing.SLOTS_PER_ROW, heads, k_format.row_bytes)),
                self._zeros((v_slots + sizing.SLOTS_PER_ROW, heads, v_format.row_bytes)),
            )
            for k_format, v_format in layers
        ]
        self.k_buffer = [k[:k_slots] for k, _ in self._storage]
        self.v_buffer = [v[:v_slots] for _, v in self._storage]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        if torch.device(self.device).type == "cpu":
            return host_memory.zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _init_kv_copy_and_warmup(self):
        # SGLang's copy is a Triton kernel for speculation's slot moves; ours indexes, and needs no set-up.
        self._kv_copy_config = None

    def make_windows(self, num_requests: int) -> Windows:
        """Make the maps of the windows. num_requests: rows of req_to_token, the reserved one included."""
        settings = self.runtime.settings
        self.windows = Windows(
            self.size + self.page_size,
            num_requests,
            settings.sink_tokens,
            settings.recent_tokens,
            self.page_size,
            self.device,
        )
        return self.windows

    def attach(self, codecs: dict[int, LayerCodec], num_qo_heads: int, impl: str) -> Layers:
        """Make the layers with their codecs, which SGLang's constructor could not know.

        Args:
            codecs: layer_id -> codec, all layers. num_qo_heads: query heads on this rank. impl: see `oscar_kernel.Layers`.
        Raises:
            RuntimeError: the implementation cannot run here.
        """

        dtype, caches = self.runtime.window_dtype, {}
        for layer_id, codec in codecs.items():
            i = layer_id - self.start_layer
            (k, v), k_dim, v_dim = self._storage[i], codec.k.fmt.head_dim, codec.v.fmt.head_dim
            caches[layer_id] = LayerCache(
                SideCache(self.k_buffer[i], window_view(k, k_dim, dtype)),
                SideCache(self.v_buffer[i], window_view(v, v_dim, dtype)),
            )
        self.layers = Layers({i: (caches[i], codec) for i, codec in codecs.items()}, num_qo_heads, impl)
        return self.layers

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows of the windows in all layers. source, target: [n] int64; both the last row for nothing."""
        for layer_id in self.layers.by_id:
            cache = self.layers.cache(layer_id)
            for side in (cache.k, cache.v):
                side.window[target] = side.window[source]

    def pool_bytes(self) -> int:
        """Bytes of the rows, which are the windows' too, and of the maps."""
        return sum(t.nbytes for t in (*self.k_buffer, *self.v_buffer)) + self.windows.nbytes()

    def set_kv_buffer(
        self,
        layer,
        loc_info,
        cache_k,
        cache_v,
        k_scale=None,
        v_scale=None,
        layer_id_override=None,
        dcp_kv_mask=None,
    ):
        """SGLang's way to write keys and values; rows of the windows follow the maps as they stand."""
        if k_scale is not None or v_scale is not None or dcp_kv_mask is not None:
            raise NotImplementedError("--kv-quant oscar: the 2-bit pool takes no KV scales and no context-parallel mask")
        loc = unwrap_write_loc(loc_info)[0].long()
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        self.layers.store(layer_id, cache_k, cache_v, loc, self.windows.find(loc))

    def move_kv_cache(self, tgt_loc, src_loc):
        """Move slots; their window rows go along."""
        tgt_loc, src_loc = tgt_loc.long(), src_loc.long()
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]
        self.windows.move_slots(tgt_loc, src_loc)


def window_view(buffer: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a pool's slots as rows of the windows.

    Args:
        buffer: [num_slots, num_kv_heads, row_bytes] uint8, contiguous.
        head_dim: of a row. dtype: of its numbers.
    Returns:
        [num_slots / SLOTS_PER_ROW, num_kv_heads, head_dim], row i in slots i * SLOTS_PER_ROW and the following ones.
    """
    num_slots, heads, row_bytes = buffer.shape
    stride = sizing.SLOTS_PER_ROW * heads * row_bytes // dtype.itemsize
    return buffer.view(-1).view(dtype).as_strided((num_slots // sizing.SLOTS_PER_ROW, heads, head_dim), (stride, head_dim, 1))


def pool_class(runtime: Runtime) -> type[OscarTokenToKVPool]:
    """The pool class SGLang's configurator is to construct, bound to this process's runtime."""
    return type("OscarTokenToKVPool", (OscarTokenToKVPool,), {"runtime": runtime})


def describe(pool: OscarTokenToKVPool) -> dict:
    """Figures of both stores on this rank, for the start line, /server_info and metrics; sizes in bytes and tokens."""
    runtime, windows, pages = pool.runtime, pool.windows, pool.window_pages
    head_dims = runtime.artifact.model.head_dim, runtime.artifact.model.v_head_dim
    return {
        "mode": runtime.settings.codec,
        "method": runtime.artifact.method,
        "artifact": runtime.settings.artifact_path,
        "bits_per_element": runtime.bits_per_element(),
        "native_layers": runtime.native_layers,
        "bytes_per_token": runtime.bytes_per_token(pool.layer_num, pool.head_num),
        "bytes_per_token_bf16": sizing.bytes_per_token_16_bit(pool.layer_num, pool.head_num, *head_dims),
        "tokens": pool.size,
        "page_size": pool.page_size,
        "pool_bytes": pool.pool_bytes(),
        "window_slots": pages.held_slots,
        "retained_window_slots": pages.retained_slots,
        "sink_tokens": windows.table.sink_tokens,
        "recent_tokens": windows.table.recent_tokens,
        "sink_rows_reused": windows.counters.sink_rows_reused,
        "sink_rows_lost": windows.counters.sink_rows_lost,
        **({} if pool.reads is None else {"window_tokens_read": pool.reads.tokens, "in_16_bits": pool.reads.in_16_bits}),
    }


def start_line(pool: OscarTokenToKVPool, context: int, max_requests: int) -> str:
    """One sentence that explains the capacity. context: the model's length in tokens. max_requests: that run at once."""
    info, table = describe(pool), pool.windows.table
    ratio = info["bytes_per_token_bf16"] / info["bytes_per_token"]
    native = f", layers {', '.join(map(str, info['native_layers']))} in 16 bits" if info["native_layers"] else ""
    longest = min(context - 1, longest_request(info["tokens"], pool.windows))
    windows = sizing.window_slots(longest, table.sink_tokens, table.recent_tokens, pool.page_size)
    fit = min(max_requests, info["tokens"] // (longest + windows)) if longest else 0
    return (
        f"OSCAR KV cache ({info['mode']}, {info['bits_per_element']:.2f} bits an element{native}): {info['tokens']} slots of "
        f"{info['bytes_per_token']} bytes, one a token (BF16: {info['bytes_per_token_bf16']}, {ratio:.2f}x), "
        f"{info['pool_bytes'] / 2**20:.1f} MiB; a running request takes up to {windows} slots more for its 16-bit windows "
        f"(first {info['sink_tokens']} and newest {info['recent_tokens']} tokens); longest request {longest} tokens, "
        f"{fit} of those at once"
    )
