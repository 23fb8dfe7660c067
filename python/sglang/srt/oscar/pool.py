"""The KV pool: to SGLang a plain token-major pool of bytes, whose "head_dim" is the bytes of a row."""

from __future__ import annotations

import logging

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
from sglang.srt.oscar.runtime import Runtime
from sglang.srt.oscar.windows import Windows

from oscar.format import sizing
from oscar_kernel import LayerCache, LayerCodec, host_memory, store_kv

logger = logging.getLogger(__name__)


class OscarTokenToKVPool(MHATokenToKVPool):
    """2-bit rows `[num_slots, num_kv_heads, row_bytes]` uint8, metadata inside the row, and the windows beside them.

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
        self.impl = self.runtime.settings.kernels
        self.codecs: dict[int, LayerCodec] = {}
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
        if torch.device(self.device).type == "cpu":
            k_shape, v_shape = self._kv_buffer_shapes()
            self.k_buffer = [self._zeros(k_shape) for _ in range(self.layer_num)]
            self.v_buffer = [self._zeros(v_shape) for _ in range(self.layer_num)]
        else:
            super()._create_buffers_normal()
        for layer_id in self.runtime.native_layers:
            for buffers, fmt in zip((self.k_buffer, self.v_buffer), self.runtime.formats(layer_id), strict=True):
                i = layer_id - self.start_layer
                buffers[i] = self._zeros((buffers[i].shape[0], self.head_num, fmt.row_bytes))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        if torch.device(self.device).type == "cpu":
            return host_memory.zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _init_kv_copy_and_warmup(self):
        # SGLang's copy is a Triton kernel for speculation's slot moves; ours indexes, and needs no set-up.
        self._kv_copy_config = None

    def attach_windows(self, num_requests: int) -> None:
        """Make the windows. num_requests: rows of req_to_token, the reserved one included."""
        settings, model = self.runtime.settings, self.runtime.artifact.model
        self.windows = Windows(
            self.size + self.page_size, num_requests, settings.sink_tokens, settings.recent_tokens, self.device
        )

        def rows(head_dim):
            shape = (self.windows.num_rows + 1, self.head_num, head_dim)
            return self._zeros(shape, self.runtime.window_dtype)

        self.k_window = [rows(model.head_dim) for _ in range(self.layer_num)]
        self.v_window = [rows(model.v_head_dim) for _ in range(self.layer_num)]
        self._layer_caches = [None] * self.layer_num

    def window_bytes(self) -> int:
        """Bytes of the 16-bit rows and of the map from rows to slots."""
        return sum(t.nbytes for t in (*self.k_window, *self.v_window, self.windows.slot_of_row))

    def pool_bytes(self) -> int:
        """Bytes of the 2-bit rows and of the map from slots to rows."""
        return sum(t.nbytes for t in (*self.k_buffer, *self.v_buffer, self.windows.row_of_slot))

    def layer_cache(self, layer_id: int) -> LayerCache:
        """The layer's storage, one object for as long as SGLang keeps the same buffers: kernels keep pointers on it."""
        i = layer_id - self.start_layer
        made = self._layer_caches[i]
        if made is None or made.k_buffer is not self.k_buffer[i]:
            made = LayerCache(self.k_buffer[i], self.v_buffer[i], self.k_window[i], self.v_window[i])
            self._layer_caches[i] = made
        return made

    def write(self, layer_id: int, k, v, loc, window_rows):
        """`store_kv` into one layer of this pool; returns the transformed rows."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)
        return store_kv(k, v, loc, window_rows, self.layer_cache(layer_id), self.codecs[layer_id], self.impl)

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
        rows = self.windows.row_of_slot[loc].long()
        valid = (rows >= 0) & (self.windows.slot_of_row[rows.clamp(min=0)] == loc)
        rows = torch.where(valid, rows, self.windows.no_row)
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        self.write(layer_id, cache_k, cache_v, loc, rows)

    def move_kv_cache(self, tgt_loc, src_loc):
        """Move slots; their window rows go along."""
        tgt_loc, src_loc = tgt_loc.long(), src_loc.long()
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]
        self.windows.move_slots(tgt_loc, src_loc)


def pool_class(runtime: Runtime) -> type[OscarTokenToKVPool]:
    """The pool class SGLang's configurator is to construct, bound to this process's runtime."""
    return type("OscarTokenToKVPool", (OscarTokenToKVPool,), {"runtime": runtime})


def describe(pool: OscarTokenToKVPool) -> dict:
    """Figures of both stores on this rank, for the start line, /server_info and metrics; sizes in bytes and tokens."""
    runtime, windows = pool.runtime, pool.windows
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
        "pool_bytes": pool.pool_bytes(),
        "window_bytes": pool.window_bytes(),
        "sink_tokens": windows.sink_tokens,
        "recent_tokens": windows.recent_tokens,
        "sink_rows_reused": windows.counters.sink_rows_reused,
        "sink_rows_lost": windows.counters.sink_rows_lost,
    }
