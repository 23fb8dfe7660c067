"""The 2-bit row format of OSCAR, defined once.

A row is one token's K (or V) of one KV head after its transform, `head_dim` numbers. With head_dim = 128 and one group:

    byte   0                          31 32      33 34    35
           +----------------------------+----------+--------+
           | codes: head_dim / 4 bytes  | centre   | step   |   36 bytes = 2.25 bits per element
           +----------------------------+----------+--------+

Codes: byte b holds channels b, b + q, b + 2q, b + 3q (q = head_dim / 4) in bits 0-1, 2-3, 4-5, 6-7, so that one load, three
shifts and a mask give four runs of neighbouring channels. Metadata: one (centre, step) pair of little-endian 16-bit floats a
group, groups in order. A group is `group_size` neighbouring channels.

    encode   tau    = the floor(clip_ratio * head_dim)-th smallest |x| of the whole row (0-based, at most the largest)
             x      = min(max(x, -tau), tau)
             centre = 16-bit((max + min) * 0.5)                  over the group
             step   = 16-bit((max - min) * float32(1/3))         zero, or at least the smallest normal number
             code   = #{i : x > centre + threshold[i] * step}    the nearest level under the metadata as stored
    decode   x_hat  = centre + level[code] * step                in float32

With a shaping matrix S (strictly upper triangular) the rounding error of a channel is passed on to the channels after it, so
that what is left is small where it is looked at; centre and step are those above, and nothing changes for the reader:

    for i = 0, 1, ... head_dim - 1        y the row before clipping, a = 0 at first
             code_i = #{k : y_i - a_i > centre + threshold[k] * step}
             e_i    = (centre + level[code_i] * step) - y_i
             a_j    = a_j + e_i * S[i, j]                           for j > i, product and sum rounded apart

Levels are -1.5, -0.5, 0.5 and 1.5, thresholds the midpoints -1, 0 and 1. All arithmetic is float32. A step has at most 11
significant bits and a level at most 2, so `level * step` and `threshold * step` are exact: a fused multiply-add gives the same
bits as two operations, and every backend can give the same bytes.

Special values: a constant row decodes to its 16-bit rounding; values beyond the metadata's range saturate at its largest finite
number; NaN counts as 0 and +-inf as the largest finite number, so one bad row stays finite and touches no other row.

Source: arXiv 2605.17757 for clip quantile and end-point grid; (centre, step) instead of (scale, zero) is ours because a
real-valued zero near 1.5 loses bits in 16-bit storage. Shaping: docs/method.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FORMAT_VERSION = 1
CODES_PER_BYTE = 4
META_BYTES = 4
"""Bytes of one (centre, step) pair."""
META_DTYPE = torch.float16
LEVELS = (-1.5, -0.5, 0.5, 1.5)
THRESHOLDS = (-1.0, 0.0, 1.0)
"""Decision points between neighbouring levels."""
ROW_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ONE_THIRD = 0.3333333432674408  # float32(1/3)


@dataclass(frozen=True, init=False)
class RowFormat:
    """Geometry of one row.

    Args:
        head_dim: elements in a row; a multiple of 4.
        group_size: elements that share a centre and a step; a multiple of 4 that divides head_dim. None: the whole row.
    Raises:
        ValueError: head_dim or group_size does not fit.
    """

    head_dim: int
    group_size: int

    def __init__(self, head_dim: int, group_size: int | None = None):
        object.__setattr__(self, "head_dim", head_dim)
        object.__setattr__(self, "group_size", head_dim if group_size is None else group_size)
        if self.head_dim <= 0 or self.head_dim % CODES_PER_BYTE:
            raise ValueError(f"RowFormat: head_dim must be a positive multiple of 4, got head_dim={self.head_dim}")
        if self.group_size <= 0 or self.group_size % CODES_PER_BYTE or self.head_dim % self.group_size:
            raise ValueError(
                "RowFormat: group_size must divide head_dim and be a multiple of 4, "
                f"got group_size={self.group_size}, head_dim={self.head_dim}"
            )

    @property
    def num_groups(self) -> int:
        return self.head_dim // self.group_size

    @property
    def code_bytes(self) -> int:
        return self.head_dim // CODES_PER_BYTE

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + self.num_groups * META_BYTES

    @property
    def bits_per_element(self) -> float:
        return 8 * self.row_bytes / self.head_dim


@dataclass(frozen=True)
class LosslessFormat:
    """A row is its head_dim numbers as they are, no metadata: float32 to tell faults of the path from loss of quantization,
    bfloat16 for layers that stay in 16 bits.

    Args:
        head_dim: elements in a row.
        dtype: "float32" or "bfloat16"; in serving always the dtype of the windows.
    Raises:
        ValueError: dtype is another.
    """

    head_dim: int
    dtype: str = "float32"

    def __post_init__(self):
        if self.dtype not in ROW_DTYPES:
            raise ValueError(f"LosslessFormat: dtype must be one of {sorted(ROW_DTYPES)}, got {self.dtype!r}")

    @property
    def row_bytes(self) -> int:
        return ROW_DTYPES[self.dtype].itemsize * self.head_dim

    @property
    def bits_per_element(self) -> float:
        return 8.0 * ROW_DTYPES[self.dtype].itemsize


def clip_index(clip_ratio: Tensor, head_dim: int) -> Tensor:
    """0-based rank of the clip threshold among the row's |x|. [...] float32 in (0, 1] -> [...] int64."""
    return (clip_ratio.double() * head_dim).floor().long().clamp_(max=head_dim - 1)


def clip(x: Tensor, clip_ratio: Tensor) -> Tensor:
    """Clip each row at a quantile of its own |x|, chosen exactly (by order statistic, not bisection).

    Args:
        x: [..., num_kv_heads, head_dim] float32.
        clip_ratio: [num_kv_heads] float32 in (0, 1]; 1 keeps everything.
    Returns:
        [..., num_kv_heads, head_dim] float32.
    Source: arXiv 2605.17757, the clipping step.
    """
    from_the_top = x.shape[-1] - 1 - clip_index(clip_ratio, x.shape[-1])
    largest = x.abs().topk(int(from_the_top.max()) + 1, dim=-1).values
    tau = largest.gather(-1, from_the_top.to(x.device).view(-1, 1).expand(*x.shape[:-1], 1))
    return torch.minimum(torch.maximum(x, -tau), tau)


def encode(
    x: Tensor,
    fmt: RowFormat | LosslessFormat,
    clip_ratio: Tensor,
    shaping: Tensor | None = None,
) -> Tensor:
    """Encode rows as two-bit codes followed by one (centre, step) pair a group.

    Args:
        x: [..., num_kv_heads, head_dim] float32, bfloat16 or float16, already transformed.
        fmt: geometry of the row.
        clip_ratio: [num_kv_heads] float32, quantile of |x| kept unclipped, in (0, 1].
        shaping: [num_kv_heads, head_dim, head_dim] float32, strictly upper triangular; None: every channel is rounded alone.
    Returns:
        [..., num_kv_heads, row_bytes] uint8, the row drawn at the top of this module.
    Raises:
        ValueError: the last dimension is not head_dim.
    Source: arXiv 2605.17757; see the module's docstring for the exact order of operations.
    """
    if x.shape[-1] != fmt.head_dim:
        raise ValueError(f"encode: last dimension must be head_dim={fmt.head_dim}, got shape {tuple(x.shape)}")
    if isinstance(fmt, LosslessFormat):
        return x.to(ROW_DTYPES[fmt.dtype]).contiguous().view(torch.uint8)
    info = torch.finfo(META_DTYPE)
    x = torch.nan_to_num(x.float(), nan=0.0, posinf=info.max, neginf=-info.max)

    groups = clip(x, clip_ratio).unflatten(-1, (fmt.num_groups, fmt.group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    centre = ((high + low) * 0.5).clamp(-info.max, info.max).to(META_DTYPE)
    step = ((high - low) * _ONE_THIRD).clamp(max=info.max)
    step = torch.where(step < info.tiny, torch.where(step < 0.5 * info.tiny, 0.0, info.tiny), step).to(META_DTYPE)

    bound, grid = (centre.float().unsqueeze(-1) + x.new_tensor(at) * step.float().unsqueeze(-1) for at in (THRESHOLDS, LEVELS))
    if shaping is None:
        code = _count_below(bound.unsqueeze(-2), groups).flatten(-2)
    else:
        code = _shaped_codes(x, grid, bound, shaping.to(x.device), fmt.group_size)

    quarter = code.unflatten(-1, (CODES_PER_BYTE, fmt.code_bytes))
    packed = quarter[..., 0, :] | quarter[..., 1, :] << 2 | quarter[..., 2, :] << 4 | quarter[..., 3, :] << 6
    meta = torch.stack((centre, step), dim=-1).flatten(-2).contiguous().view(torch.uint8)
    return torch.cat((packed, meta), dim=-1)


def _count_below(bound: Tensor, x: Tensor) -> Tensor:
    """Codes of x [...] uint8: how many of the three bounds [..., 3] lie below it."""
    return (x > bound[..., 0]).to(torch.uint8) + (x > bound[..., 1]) + (x > bound[..., 2])


def _shaped_codes(x: Tensor, grid: Tensor, bound: Tensor, shaping: Tensor, group_size: int) -> Tensor:
    """Codes of rows whose rounding errors are passed on from channel to channel; see the top of this module.

    Args:
        x: [..., num_kv_heads, head_dim] float32, not clipped.
        grid: [..., num_kv_heads, num_groups, 4] float32, the four values a group can decode to.
        bound: [..., num_kv_heads, num_groups, 3] float32.
        shaping: [num_kv_heads, head_dim, head_dim] float32.
        group_size: channels in a group.
    Returns:
        [..., num_kv_heads, head_dim] uint8.
    """
    passed_on = torch.zeros_like(x)
    code = torch.empty_like(x, dtype=torch.uint8)
    for i in range(x.shape[-1]):
        group = i // group_size
        code[..., i] = _count_below(bound[..., group, :], x[..., i] - passed_on[..., i])
        error = grid[..., group, :].gather(-1, code[..., i : i + 1].long()) - x[..., i : i + 1]
        passed_on[..., i + 1 :] += error * shaping[:, i, i + 1 :]
    return code


def unpack(rows: Tensor, fmt: RowFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows into codes, centres and steps.

    Args:
        rows: [..., row_bytes] uint8.
        fmt: geometry of the row.
    Returns:
        code [..., head_dim] uint8 in 0..3, centre [..., num_groups] float32, step [..., num_groups] float32.
    """
    packed, meta = rows.split((fmt.code_bytes, fmt.num_groups * META_BYTES), dim=-1)
    code = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    meta = meta.contiguous().view(META_DTYPE).float().unflatten(-1, (fmt.num_groups, 2))
    return code, meta[..., 0], meta[..., 1]


def decode(rows: Tensor, fmt: RowFormat | LosslessFormat) -> Tensor:
    """Decode rows to float32.

    Args:
        rows: [..., num_kv_heads, row_bytes] uint8 as `encode` returns them.
        fmt: geometry of the row.
    Returns:
        [..., num_kv_heads, head_dim] float32.
    """
    if isinstance(fmt, LosslessFormat):
        return rows.contiguous().view(ROW_DTYPES[fmt.dtype]).float()
    code, centre, step = unpack(rows, fmt)
    grouped = (code.float() - 1.5).unflatten(-1, (fmt.num_groups, fmt.group_size))
    return (centre.unsqueeze(-1) + grouped * step.unsqueeze(-1)).flatten(-2)
