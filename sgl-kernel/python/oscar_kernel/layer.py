"""What every op needs of one layer: how its rows are made (`LayerCodec`) and where they lie (`LayerCache`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from oscar.format.codec import ROW_DTYPES, LosslessFormat, RowFormat, decode, encode
from oscar.format.linalg import inverses
from oscar.format.side import LayerTransforms, Side

Format = RowFormat | LosslessFormat


@dataclass
class SideCodec:
    """How keys, or values, of one layer are written and read, for the KV heads of this rank, on one device.

    Args:
        fmt: row format.
        transform: [num_kv_heads, dim, dim] float64, what the writer applies: a row is stored as (x - mean) @ transform. None:
            the transform is folded into the model's weights, and nothing is done to rows.
        read_transform: [num_kv_heads, dim, dim] float32, what the reader applies. For keys T^-T, to queries, so that
            q' . k' = q . (k - mean). For values T^-1, to outputs; None exactly where transform is.
        clip: [num_kv_heads] float32, see `oscar.format.codec.clip`.
        mean: [num_kv_heads, head_dim] float64 or None; of keys only.
        shaping: [num_kv_heads, dim, dim] float32 or None, see `oscar.format.codec`.
        window_dtype: type of the rows kept beside the codes, and of what is encoded: bfloat16, or float32 if lossless.
    """

    fmt: Format
    transform: Tensor | None
    read_transform: Tensor | None
    clip: Tensor
    mean: Tensor | None = None
    shaping: Tensor | None = None
    window_dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, side: Side, fmt: Format, device: str | torch.device, is_key: bool, folded: bool = False) -> SideCodec:
        """The codec of a calibrated side; arguments as in `LayerCodec.of`."""

        def place(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            return None if tensor is None else tensor.to(device, dtype).contiguous()

        inverse = inverses(side.transform.double())
        return cls(
            fmt=fmt,
            transform=None if folded else place(side.transform, torch.float64),
            # Of an orthogonal transform, T^-T is the transform itself, to rounding.
            read_transform=None if folded else place(inverse.transpose(1, 2) if is_key else inverse, torch.float32),
            clip=side.clip.to(device, torch.float32).contiguous(),
            mean=place(side.mean, torch.float64),
            shaping=place(side.shaping, torch.float32),
            window_dtype=ROW_DTYPES[fmt.dtype] if isinstance(fmt, LosslessFormat) else torch.bfloat16,
        )

    def to(self, device: str | torch.device) -> SideCodec:
        """The codec with its tensors elsewhere."""
        moved: dict[str, Any] = {f.name: x.to(device) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        return replace(self, **moved)

    def store(self, x: Tensor) -> Tensor:
        """[num_tokens, num_kv_heads, dim] of the model -> the same shape in window_dtype, in the space that is stored.

        Products are summed in float64 and rounded once: float32 sums depend on how many rows a GEMM gets, and then the bytes
        of a token would depend on its batch. The reference buys that equality with float64; kernels must reach it too.
        """
        if self.transform is None:
            return x.to(self.window_dtype)
        x = x.double()
        if self.mean is not None:
            x = x - self.mean
        return torch.einsum("nhd,hde->nhe", x, self.transform).to(self.window_dtype)

    def read(self, x: Tensor) -> Tensor:
        """Queries into the space of stored keys, or outputs out of that of stored values.

        [num_tokens, num_kv_heads, kv_group_num, dim] float32 -> the same shape, float32.
        """
        return x if self.read_transform is None else torch.einsum("nhgd,hde->nhge", x, self.read_transform)

    def encode(self, x: Tensor) -> Tensor:
        """Rows as `store` returns them -> [num_tokens, num_kv_heads, row_bytes] uint8."""
        return encode(x, self.fmt, self.clip, self.shaping)

    def decode(self, rows: Tensor) -> Tensor:
        """[..., num_kv_heads, row_bytes] uint8 -> [..., num_kv_heads, dim] float32."""
        return decode(rows, self.fmt)


@dataclass
class LayerCodec:
    """Both sides of one layer. Raises ValueError where one is in 2 bits and the other is not."""

    k: SideCodec
    v: SideCodec

    def __post_init__(self):
        if type(self.k.fmt) is not type(self.v.fmt) or self.k.window_dtype != self.v.window_dtype:
            raise ValueError(f"LayerCodec: K and V must have the same kind of row, got {self.k.fmt} and {self.v.fmt}")

    @classmethod
    def of(
        cls,
        layer: LayerTransforms,
        k_format: Format,
        v_format: Format,
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
        k = SideCodec.of(layer.k, k_format, device, is_key=True)
        return cls(k, SideCodec.of(layer.v, v_format, device, is_key=False, folded=fold_v))

    @classmethod
    def native(
        cls, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: str = "bfloat16", device: str | torch.device = "cpu"
    ) -> LayerCodec:
        """The codec of a layer whose rows are its numbers as they are, in "bfloat16" (a layer kept in 16 bits) or "float32"."""

        def side(dim: int) -> Side:
            return Side(torch.eye(dim).expand(num_kv_heads, dim, dim), torch.ones(num_kv_heads))

        formats = LosslessFormat(head_dim, dtype), LosslessFormat(v_head_dim, dtype)
        return cls.of(LayerTransforms(side(head_dim), side(v_head_dim)), *formats, device, fold_v=True)

    @property
    def window_dtype(self) -> torch.dtype:
        return self.k.window_dtype

    @property
    def num_kv_heads(self) -> int:
        return self.k.clip.shape[0]

    def to(self, device: str | torch.device) -> LayerCodec:
        """The codec with its tensors elsewhere."""
        return LayerCodec(self.k.to(device), self.v.to(device))


@dataclass
class SideCache:
    """Storage of keys, or values, of one layer.

    Args:
        buffer: [num_slots, num_kv_heads, row_bytes] uint8, the pool's rows.
        window: [num_rows + 1, num_kv_heads, dim] in window_dtype, the windows' rows; the last one takes writes that go nowhere.
    """

    buffer: Tensor
    window: Tensor

    @classmethod
    def zeros(cls, side: SideCodec, num_slots: int, num_rows: int, device: str | torch.device = "cpu") -> SideCache:
        """Storage for so many slots and window rows. num_rows does not count the row that takes writes that go nowhere."""
        heads = side.clip.shape[0]
        return cls(
            torch.zeros(num_slots, heads, side.fmt.row_bytes, dtype=torch.uint8, device=device),
            torch.zeros(num_rows + 1, heads, side.fmt.head_dim, dtype=side.window_dtype, device=device),
        )


@dataclass
class LayerCache:
    """Storage of both sides of one layer."""

    k: SideCache
    v: SideCache

    @classmethod
    def zeros(cls, codec: LayerCodec, num_slots: int, num_rows: int, device: str | torch.device = "cpu") -> LayerCache:
        """Storage for so many slots and window rows, as in `SideCache.zeros`."""
        return cls(*(SideCache.zeros(side, num_slots, num_rows, device) for side in (codec.k, codec.v)))
