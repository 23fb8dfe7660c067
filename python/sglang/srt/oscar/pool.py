"""The KV pool: to SGLang a plain token-major pool of bytes, whose "head_dim" is the bytes of a row."""

from __future__ import annotations

import logging

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
from sglang.srt.oscar.runtime import Runtime
from sglang.srt.oscar.windows import Windows

from oscar.format import sizing
from oscar_kernel import LayerCache, LayerCodec, Layers, SideCache, host_memory

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

    def attach(self, codecs: dict[int, LayerCodec], num_qo_heads: int, num_requests: int, impl: str) -> Layers:
        """Make what SGLang's constructor could not know: the windows, and the layers with their codecs.

        Args:
            codecs: layer_id -> codec, all layers. num_qo_heads: query heads on this rank.
            num_requests: rows of req_to_token, the reserved one included. impl: see `oscar_kernel.Layers`.
        Raises:
            RuntimeError: the implementation cannot run here.
        """
        settings = self.runtime.settings
        self.windows = Windows(
            self.size + self.page_size, num_requests, settings.sink_tokens, settings.recent_tokens, self.device
        )

        def side(buffer: torch.Tensor, head_dim: int) -> SideCache:
            shape = (self.windows.num_rows + 1, self.head_num, head_dim)
            return SideCache(buffer, self._zeros(shape, self.runtime.window_dtype))

        caches = {}
        for layer_id, codec in codecs.items():
            i = layer_id - self.start_layer
            k, v = side(self.k_buffer[i], codec.k.fmt.head_dim), side(self.v_buffer[i], codec.v.fmt.head_dim)
            caches[layer_id] = LayerCache(k, v)
        self.layers = Layers({i: (caches[i], codec) for i, codec in codecs.items()}, num_qo_heads, impl)
        return self.layers

    def clear_slots(self, slots: torch.Tensor) -> None:
        """Forget the window rows of slots that were just allocated. slots [n] integer."""
        if self.windows is not None:  # before that nothing was ever written
            self.windows.clear_slots(slots)

    def window_bytes(self) -> int:
        """Bytes of the 16-bit rows and of the map from rows to slots."""
        sides = (side for i in self.layers.by_id for side in vars(self.layers.cache(i)).values())
        return sum(side.window.nbytes for side in sides) + self.windows.maps.slot_of_row.nbytes

    def pool_bytes(self) -> int:
        """Bytes of the 2-bit rows and of the map from slots to rows."""
        return sum(t.nbytes for t in (*self.k_buffer, *self.v_buffer, self.windows.maps.row_of_slot))

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
        self.layers.store(layer_id, cache_k, cache_v, loc, self.windows.maps.rows_of(loc))

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
        "sink_tokens": windows.maps.sink_tokens,
        "recent_tokens": windows.maps.recent_tokens,
        "sink_rows_reused": windows.counters.sink_rows_reused,
        "sink_rows_lost": windows.counters.sink_rows_lost,
    }


def start_line(pool: OscarTokenToKVPool, context: int) -> str:
    """One sentence that explains the capacity. context: the model's length in tokens."""
    info, requests = describe(pool), pool.windows.num_requests - 1
    ratio = info["bytes_per_token_bf16"] / info["bytes_per_token"]
    native = f", layers {', '.join(map(str, info['native_layers']))} in 16 bits" if info["native_layers"] else ""
    return (
        f"OSCAR KV cache ({info['mode']}, {info['bits_per_element']:.2f} bits an element{native}): {info['tokens']} tokens at "
        f"{info['bytes_per_token']} bytes a token (BF16: {info['bytes_per_token_bf16']}, {ratio:.2f}x); pool "
        f"{info['pool_bytes'] / 2**20:.1f} MiB, 16-bit windows {info['window_bytes'] / 2**20:.1f} MiB (first "
        f"{info['sink_tokens']} and newest {info['recent_tokens']} tokens of up to {requests} running requests); longest "
        f"request {min(context, info['tokens'])} tokens; {min(requests, info['tokens'] // context)} requests fit at the full "
        f"context of {context}"
    )
