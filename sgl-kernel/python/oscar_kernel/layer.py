"""What every op needs of one layer: its codec (transforms, clipping, formats) and its storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar.codec import LosslessFormat, RowFormat, decode, encode


@dataclass
class LayerCodec:
    """Transforms and formats of one layer, for the KV heads of this rank, on one device.

    Args:
        k_format, v_format: row formats.
        k_transform: [num_kv_heads, head_dim, head_dim] float64, k' = (k - k_mean) @ T.
        q_transform: [num_kv_heads, head_dim, head_dim] float32, T^-T, so that q' . k' = q . (k - k_mean).
        v_transform: [num_kv_heads, v_head_dim, v_head_dim] float64, or None where it is folded into W_V and W_O.
        v_inverse: [num_kv_heads, v_head_dim, v_head_dim] float32, T^-1; None exactly where v_transform is.
        k_clip, v_clip: [num_kv_heads] float32, see `oscar.codec.clip`.
        k_mean, v_mean: [num_kv_heads, head_dim] float64 or None. A constant taken from every key of a head shifts all logits
            of a query alike, and one taken from every value comes back whole since weights sum to one: both are exact.
        k_levels, v_levels: [num_kv_heads, 4] float32 or None.
        window_dtype: type of the rows kept beside the codes, and of what is encoded: bfloat16, or float32 if lossless.
    """

    k_format: RowFormat | LosslessFormat
    v_format: RowFormat | LosslessFormat
    k_transform: Tensor
    q_transform: Tensor
    v_transform: Tensor | None
    v_inverse: Tensor | None
    k_clip: Tensor
    v_clip: Tensor
    k_mean: Tensor | None = None
    v_mean: Tensor | None = None
    k_levels: Tensor | None = None
    v_levels: Tensor | None = None
    window_dtype: torch.dtype = torch.bfloat16

    def transform_k(self, k: Tensor) -> Tensor:
        """[num_tokens, num_kv_heads, head_dim] -> the same shape in window_dtype, in the space that is stored.

        Products are summed in float64 and rounded once: float32 sums depend on how many rows a GEMM gets, and then the bytes
        of a token would depend on its batch. The reference buys that equality with float64; kernels must reach it too.
        """
        return _transform(k, self.k_transform, self.k_mean).to(self.window_dtype)

    def transform_v(self, v: Tensor) -> Tensor:
        """[num_tokens, num_kv_heads, v_head_dim] -> the same shape in window_dtype, in the space that is stored."""
        if self.v_transform is None:
            return v.to(self.window_dtype)
        return _transform(v, self.v_transform, self.v_mean).to(self.window_dtype)

    def transform_q(self, q: Tensor) -> Tensor:
        """[num_tokens, num_qo_heads, head_dim] -> [num_tokens, num_kv_heads, kv_group_num, head_dim] float32."""
        grouped = q.float().unflatten(1, (self.q_transform.shape[0], -1))
        return torch.einsum("nhgd,hde->nhge", grouped, self.q_transform)

    def restore_o(self, o: Tensor) -> Tensor:
        """[num_tokens, num_kv_heads, kv_group_num, v_head_dim] float32 -> [num_tokens, num_qo_heads, v_head_dim] float32."""
        if self.v_inverse is not None:
            o = torch.einsum("nhgd,hde->nhge", o, self.v_inverse)
        if self.v_mean is not None:
            o = o + self.v_mean.float().unsqueeze(1)
        return o.flatten(1, 2)

    def encode_k(self, k: Tensor) -> Tensor:
        return encode(k, self.k_format, self.k_clip, self.k_levels)

    def encode_v(self, v: Tensor) -> Tensor:
        return encode(v, self.v_format, self.v_clip, self.v_levels)

    def decode_k(self, rows: Tensor) -> Tensor:
        return decode(rows, self.k_format, self.k_levels)

    def decode_v(self, rows: Tensor) -> Tensor:
        return decode(rows, self.v_format, self.v_levels)


def _transform(x: Tensor, transform: Tensor, mean: Tensor | None) -> Tensor:
    x = x.double()
    if mean is not None:
        x = x - mean
    return torch.einsum("nhd,hde->nhe", x, transform)


@dataclass
class LayerCache:
    """Storage of one layer.

    Args:
        k_buffer, v_buffer: [num_slots, num_kv_heads, row_bytes] uint8.
        k_window, v_window: [num_rows + 1, num_kv_heads, head_dim] in window_dtype; the last row takes writes that go nowhere.
    """

    k_buffer: Tensor
    v_buffer: Tensor
    k_window: Tensor
    v_window: Tensor
