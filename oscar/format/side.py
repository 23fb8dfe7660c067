"""What calibration decides for one layer: a `Side` for its keys and one for its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from torch import Tensor

SIDES = ("k", "v")


@dataclass(frozen=True)
class Side:
    """How keys, or values, of one layer are written. A row x of the model is stored as codes of (x - mean) @ transform.

    The reader needs the inverse of the transform, which follows from it: see `oscar_kernel.layer.SideCodec`.

    Args:
        transform: [num_kv_heads, dim, dim], rows are vectors; dim is head_dim for keys and v_head_dim for values.
        clip: [num_kv_heads], quantile of a row's own |x| beyond which it is clipped, in (0, 1]; see `codec.clip`.
        mean: [num_kv_heads, dim] or None. Keys only: a constant taken from every key of a head shifts all logits of a query
            alike, which softmax does not see.
        shaping: [num_kv_heads, dim, dim] strictly upper triangular, or None: each channel is rounded alone. See `codec`.
    """

    transform: Tensor
    clip: Tensor
    mean: Tensor | None = None
    shaping: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Side:
        """The side with `change` applied to every tensor that it has."""
        present = {name: x for name, x in vars(self).items() if x is not None}
        return replace(self, **{name: change(x) for name, x in present.items()})

    def of_heads(self, heads: slice) -> Side:
        """The part of these KV heads, as views; every tensor has the heads first."""
        return self.map(lambda x: x[heads])


@dataclass(frozen=True)
class LayerTransforms:
    """Both sides of one layer."""

    k: Side
    v: Side

    def map(self, change: Callable[[Tensor], Tensor]) -> LayerTransforms:
        """The layer with `change` applied to every tensor that it has."""
        return LayerTransforms(self.k.map(change), self.v.map(change))

    def of_heads(self, heads: slice) -> LayerTransforms:
        """The part of these KV heads, as views."""
        return LayerTransforms(self.k.of_heads(heads), self.v.of_heads(heads))

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(side, name, tensor) of every tensor that is there, e.g. ("k", "transform", ...)."""
        for side in SIDES:
            for f in fields(Side):
                if (tensor := getattr(getattr(self, side), f.name)) is not None:
                    yield side, f.name, tensor


def kv_heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> slice:
    """KV heads of one tensor-parallel rank; with more ranks than heads each head lives on several ranks.

    Args:
        num_kv_heads: KV heads of the whole model.
        tp_rank, tp_size: 0 <= tp_rank < tp_size.
    Raises:
        ValueError: neither number divides the other, or there is no such rank.
    """
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"kv_heads_of_rank: expected a rank from 0 to {tp_size - 1}, got {tp_rank}")
    if num_kv_heads % tp_size == 0:
        per_rank = num_kv_heads // tp_size
        return slice(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    if tp_size % num_kv_heads == 0:
        head = tp_rank // (tp_size // num_kv_heads)
        return slice(head, head + 1)
    raise ValueError(f"--tp {tp_size} must divide the model's {num_kv_heads} KV heads or be a multiple of them")
