"""Every byte count of the product, once: what a token takes in the pool and what a request takes in the 16-bit windows.

    pool     each slot   num_layers * num_kv_heads * (K row + V row) bytes of codes and metadata + MAP_BYTES;
                         a native layer's K and V rows are head_dim and v_head_dim 16-bit numbers
    windows  each row    num_layers * num_kv_heads * (head_dim + v_head_dim) * 2 bytes           + ROW_MAP_BYTES
             a request slot adds `window_rows` of them, whether a request runs in it or not

The server, `oscar plan` and the reports all count with these functions. On a tensor-parallel rank, num_kv_heads is the
rank's own number of heads and num_layers its own number of layers.
"""

from __future__ import annotations

from oscar.format.codec import LosslessFormat, RowFormat

Format = RowFormat | LosslessFormat
MAP_BYTES = 4
"""Bytes of a slot's entry in `row_of_slot`, int32."""
ROW_MAP_BYTES = 8
"""Bytes of a window row's entry in `slot_of_row`, int64."""
SINK_SHARE = 2
"""Sink rows per request slot, in units of sink_tokens: one for the request that runs, one for a finished prefix that is still
in the radix cache."""
WINDOW_ITEM_BYTES = 2
"""Bytes of one number in the windows, bfloat16."""


def bytes_per_token(num_layers: int, num_kv_heads: int, k_format: Format, v_format: Format, native_layers: int = 0) -> int:
    """Bytes of one token in the pool, its slot's map entry included.

    Args:
        num_layers, num_kv_heads: geometry, of one rank where there are several.
        k_format, v_format: rows of a layer that is quantized; all layers' rows with the lossless codec.
        native_layers: how many of the layers stay in 16 bits.
    """
    coded = (num_layers - native_layers) * num_kv_heads * (k_format.row_bytes + v_format.row_bytes)
    native = bytes_per_token_16_bit(native_layers, num_kv_heads, k_format.head_dim, v_format.head_dim)
    return coded + native + MAP_BYTES


def bytes_per_token_16_bit(num_layers: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> int:
    """Bytes of one token in a 16-bit cache."""
    return num_layers * num_kv_heads * (head_dim + v_head_dim) * WINDOW_ITEM_BYTES


def bits_per_element(k_format: Format, v_format: Format, native_share: float = 0.0) -> float:
    """Bits of one number of K or V in the pool, mean over layers: codes and metadata, without the slot map.

    native_share: part of the layers that stay in 16 bits, 0 to 1.
    """
    coded = 8 * (k_format.row_bytes + v_format.row_bytes) / (k_format.head_dim + v_format.head_dim)
    return (1 - native_share) * coded + native_share * 8 * WINDOW_ITEM_BYTES


def window_rows(sink_tokens: int, recent_tokens: int) -> int:
    """16-bit rows that one request slot adds to the windows."""
    return recent_tokens + SINK_SHARE * sink_tokens


def bytes_per_request(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    sink_tokens: int,
    recent_tokens: int,
    item_bytes: int = WINDOW_ITEM_BYTES,
) -> int:
    """Bytes that one request slot adds to the windows, their map entries included.

    Args:
        num_layers, num_kv_heads, head_dim, v_head_dim: geometry, of one rank where there are several.
        sink_tokens, recent_tokens: sizes of the windows, in tokens.
        item_bytes: bytes of one number in a window row: 2, or 4 with the lossless codec.
    """
    row = num_layers * num_kv_heads * (head_dim + v_head_dim) * item_bytes
    return window_rows(sink_tokens, recent_tokens) * (row + ROW_MAP_BYTES)
