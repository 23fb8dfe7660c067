"""Byte counts: worked by hand, and the server counts the same."""

import pytest

from oscar.format import sizing
from oscar.format.codec import LosslessFormat, RowFormat


def test_by_hand():
    row = RowFormat(128)  # 32 bytes of codes, 4 of metadata
    assert sizing.bytes_per_token(4, 2, row, row) == 4 * 2 * 72 + 5 == 581
    assert sizing.bytes_per_token_16_bit(4, 2, 128, 128) == 4 * 2 * 256 * 2 == 4096
    assert sizing.bits_per_element(row, row) == 2.25


def test_windows_by_hand():
    """A page of 64 slots is 8 rows: sinks and ring have pages of their own, which a request takes as it grows."""
    slots = [sizing.window_slots(n, 64, 256) for n in (0, 1, 8, 9, 64, 65, 100, 320, 1 << 20)]
    assert slots == [64 * pages for pages in (0, 1, 1, 2, 8, 9, 8 + 5, 40, 40)]
    assert sizing.request_slots(1000, 64, 256) == 1024 + 2560
    assert sizing.window_slots(30, 4, 16, page_size=16) == 16 * (2 + 8)
    assert sizing.window_slots(30, 0, 0) == 0


def test_groups_unequal_heads_and_lossless():
    k, v = RowFormat(192, 64), RowFormat(128)
    assert sizing.bytes_per_token(3, 1, k, v) == 3 * (48 + 3 * 4 + 32 + 4) + 5
    assert sizing.bits_per_element(k, v) == 8 * 96 / 320
    exact = LosslessFormat(128)
    assert sizing.bytes_per_token(1, 1, exact, exact) == 1024 + 5 and sizing.bits_per_element(exact, exact) == 32


def test_native_layers_by_hand():
    """Layers of 2 KV heads, 128 wide: 144 bytes a token in 2 bits, 1,024 in 16."""
    row = RowFormat(128)
    assert sizing.bytes_per_token(4, 2, row, row, native_layers=1) == 3 * 144 + 1024 + 5
    assert sizing.bytes_per_token(4, 2, row, row, 4) == sizing.bytes_per_token_16_bit(4, 2, 128, 128) + 5
    assert sizing.bits_per_element(row, row, native_share=0.25) == 0.75 * 2.25 + 0.25 * 16
    assert LosslessFormat(128, "bfloat16").row_bytes == 256 and LosslessFormat(128, "bfloat16").bits_per_element == 16


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_ranks_add_up_to_the_whole_but_for_the_maps(heads):
    row = RowFormat(128)
    whole = sizing.bytes_per_token(36, 8, row, row)
    ranks = 8 // heads
    assert ranks * sizing.bytes_per_token(36, heads, row, row) == whole + (ranks - 1) * sizing.MAP_BYTES
