"""What every op needs of one layer: its codec (transforms, clipping, formats) and its storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oscar.format.codec import ROW_DTYPES, LosslessFormat, RowFormat, decode, encode
from oscar.format.linalg import inverses

if TYPE_CHECKING:
    from oscar.format.artifact import LayerTransforms


@dataclass
class LayerCodec:
    """Transforms and formats of one layer, for the KV heads of this rank, on one device.

    Args:
        k_format, v_format: row formats.
        k_transform: [num_kv_heads, head_dim, head_dim] float64, k' = (k - k_mean) @ T.
        q_transform: [num_kv_heads, head_dim, head_dim] float32, T^-T, so that q' . k' = q . (k - k_mean).
        v_transform: [num_kv_heads, v_head_dim, v_head_dim] float64, or None where it is folded into W_V and W_O.
        v_inverse: [num_kv_heads, v_head_dim, v_head_dim] float32, T^-1; None exactly where v_transform is.
        k_clip, v_clip: [num_kv_heads] float32, see `oscar.format.codec.clip`.
        k_mean, v_mean: [num_kv_heads, head_dim] float64 or None. A constant taken from every key of a head shifts all logits
            of a query alike, and one taken from every value comes back whole since weights sum to one: both are exact.
        k_levels, v_levels: [num_kv_heads, 4] float32 or None.
        k_shaping, v_shaping: [num_kv_heads, head_dim, head_dim] float32 or None, see `oscar.format.codec`.
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
    k_shaping: Tensor | None = None
    v_shaping: Tensor | None = None
    window_dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(
        cls,
        layer: LayerTransforms,
        k_format: RowFormat | LosslessFormat,
        v_format: RowFormat | LosslessFormat,
        device: str | torch.device = "cpu",
        fold_v: bool = False,
    ) -> LayerCodec:
        """The codec of a calibrated layer; the server and the evaluation both make theirs here.

        Args:
            layer: transforms of the KV heads of this rank (`LayerTransforms.of_heads`).
            k_format, v_format: row formats, both packed or both lossless.
            device: where the tensors go.
            fold_v: the value transform is already in W_V and W_O, so none is applied to values and outputs.
        """

        def place(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            return None if tensor is None else tensor.to(device, dtype).contiguous()

        k_transform, v_transform = layer.k_transform.double(), layer.v_transform.double()
        return cls(
            k_format=k_format,
            v_format=v_format,
            k_transform=k_transform.to(device),
            # Of an orthogonal transform this is the transform itself, to rounding.
            q_transform=place(inverses(k_transform).transpose(1, 2), torch.float32),
            v_transform=None if fold_v else v_transform.to(device),
            v_inverse=None if fold_v else place(inverses(v_transform), torch.float32),
            k_clip=place(layer.k_clip, torch.float32),
            v_clip=place(layer.v_clip, torch.float32),
            k_mean=place(layer.k_mean, torch.float64),
            v_mean=place(layer.v_mean, torch.float64),
            k_levels=place(layer.k_levels, torch.float32),
            v_levels=place(layer.v_levels, torch.float32),
            k_shaping=place(layer.k_shaping, torch.float32),
            v_shaping=place(layer.v_shaping, torch.float32),
            window_dtype=ROW_DTYPES[k_format.dtype] if isinstance(k_format, LosslessFormat) else torch.bfloat16,
        )

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
        return encode(k, self.k_format, self.k_clip, self.k_levels, self.k_shaping)

    def encode_v(self, v: Tensor) -> Tensor:
        return encode(v, self.v_format, self.v_clip, self.v_levels, self.v_shaping)

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
