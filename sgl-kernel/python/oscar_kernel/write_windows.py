"""Put transformed rows into the windows."""

from __future__ import annotations

from torch import Tensor

from oscar_kernel.layer import LayerCache


def write_windows(k: Tensor, v: Tensor, window_rows: Tensor, cache: LayerCache) -> None:
    """Write rows as `store_kv` returned them into the windows, in place.

    An extend has to do this after its attention: a prompt's new tokens take over ring rows that its own prefix, or another
    prefix in the batch, is still read from.

    Args:
        k: [num_tokens, num_kv_heads, head_dim] in window_dtype, transformed.
        v: [num_tokens, num_kv_heads, v_head_dim] in window_dtype, transformed.
        window_rows: [num_tokens] int64; the last row takes what belongs nowhere.
        cache: storage.
    """
    cache.k_window[window_rows] = k
    cache.v_window[window_rows] = v
