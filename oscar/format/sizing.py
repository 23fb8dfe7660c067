"""Every byte count of the product, once: what a token takes in the pool, and what the 16-bit windows of a request take.

    pool     each slot   num_layers * num_kv_heads * (K row + V row) bytes of codes and metadata + MAP_BYTES;
                         a native layer's K and V rows are head_dim and v_head_dim 16-bit numbers
    windows  each row    SLOTS_PER_ROW slots of the pool, in pages of the pool; a request takes them as it grows, and gives
                         them back when it ends

So memory has one currency, the slot: requests, their windows and cached prefixes share all of it. The server, `oscar plan` and
the reports all count with these functions. On a tensor-parallel rank, num_kv_heads is the rank's own number of heads and
num_layers its own number of layers.
"""

from __future__ import annotations

from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.windows import pages_of

Format = RowFormat | LosslessFormat
SLOTS_PER_ROW = 8
"""Slots whose memory holds one row of the windows: a slot has at least head_dim / 4 bytes for a head, a row 2 * head_dim."""
PAGE_SIZE = 64
"""Slots of a page of the pool, unless the user chooses: a multiple of SLOTS_PER_ROW."""
MAP_BYTES = 5
"""Bytes of a slot's entries in the maps: the row of a slot, int32, and for each row its slot and its position, int32 each."""
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


def window_slots(tokens: int, sink_tokens: int, recent_tokens: int, page_size: int = PAGE_SIZE) -> int:
    """Slots that the windows of a request of so many tokens take.

    Args:
        tokens: of the request. sink_tokens, recent_tokens: sizes of the windows, in tokens.
        page_size: slots of a page of the pool, a multiple of SLOTS_PER_ROW.
    """
    rows_per_page = page_size // SLOTS_PER_ROW
    sinks = min(tokens, sink_tokens)
    recent = min(tokens - sinks, recent_tokens)
    return (pages_of(sinks, rows_per_page) + pages_of(recent, rows_per_page)) * page_size


def request_slots(tokens: int, sink_tokens: int, recent_tokens: int, page_size: int = PAGE_SIZE) -> int:
    """Slots that a request of so many tokens takes, its windows included. Arguments as in `window_slots`."""
    return pages_of(tokens, page_size) * page_size + window_slots(tokens, sink_tokens, recent_tokens, page_size)
