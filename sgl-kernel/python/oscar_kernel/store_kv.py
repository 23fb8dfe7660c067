"""Write new tokens: transform, clip, encode, and the copies kept in 16 bits."""

from __future__ import annotations

from torch import Tensor

from oscar_kernel.choose import choose
from oscar_kernel.cpu import library as cpu
from oscar_kernel.layer import LayerCache, LayerCodec


def store_kv(
    k: Tensor,
    v: Tensor,
    loc: Tensor,
    window_rows: Tensor,
    cache: LayerCache,
    codec: LayerCodec,
    impl: str = "auto",
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Write one layer's keys and values of new tokens, in place.

    Every token gets its 2-bit row; those in a window also get a row in window_dtype. The codes are those of the row as the
    window keeps it, so re-encoding a window row gives its 2-bit row byte for byte.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], after RoPE, any float type.
        v: [num_tokens, num_kv_heads, v_head_dim].
        loc: [num_tokens] int64, slots to write.
        window_rows: [num_tokens] int64, rows of the windows to write; num_rows (the last) for none.
        cache: storage, written in place.
        codec: the layer's codec.
        impl, isa: see `oscar_kernel.choose`.
    Returns:
        k', v': the transformed rows in window_dtype, for attention among the new tokens.
    """
    chosen = choose("store_kv", impl, isa, cache, codec, k, v)
    if chosen == "triton":
        from oscar_kernel.triton import store as triton_store

        return triton_store.store_kv(k, v, loc, window_rows, cache, codec)
    if chosen == "cpu":
        return cpu.store_kv(k, v, loc, window_rows, cache, codec, isa)
    return store_kv_ref(k, v, loc, window_rows, cache, codec)


def store_kv_ref(
    k: Tensor, v: Tensor, loc: Tensor, window_rows: Tensor, cache: LayerCache, codec: LayerCodec
) -> tuple[Tensor, Tensor]:
    """`store_kv` in PyTorch."""
    k, v = codec.transform_k(k), codec.transform_v(v)
    cache.k_buffer[loc] = codec.encode_k(k)
    cache.v_buffer[loc] = codec.encode_v(v)
    cache.k_window[window_rows] = k
    cache.v_window[window_rows] = v
    return k, v
