"""The list of methods. A method is one function in this folder, registered with its name, help, needs and clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from oscar import config
from oscar.format.side import LayerTransforms, Side
from oscar.methods.statistics import LayerStatistics

Make = Callable[[LayerStatistics, bool], LayerTransforms]


@dataclass(frozen=True)
class Method:
    """A way to decide the transforms of a layer.

    Args:
        name: on the command line and in artifacts.
        help: what it is, one clause for `--help`.
        make: (statistics, share_heads) -> both sides, float64 on the CPU. share_heads: one transform for all KV heads.
        needs_text: whether it reads more of the statistics than their shapes; if not, calibration reads no text for it.
        needs_surrogate: whether it reads `v_surrogate_moment`, which takes a second pass over the text.
        clip: quantiles of |x| at which rows of K and V are clipped where the user gives none.
    """

    name: str
    help: str
    make: Make
    needs_text: bool = True
    needs_surrogate: bool = False
    clip: tuple[float, float] = (config.DEFAULT_K_CLIP, config.DEFAULT_V_CLIP)

    def __call__(
        self, statistics: LayerStatistics, share_heads: bool = False, clip: tuple[float | None, float | None] = (None, None)
    ) -> LayerTransforms:
        """Both sides of a layer, with the clip quantiles given or else the method's own."""
        made = self.make(statistics, share_heads)
        k_clip, v_clip = (own if given is None else given for given, own in zip(clip, self.clip, strict=True))
        return LayerTransforms(_clipped(made.k, k_clip), _clipped(made.v, v_clip))


METHODS: dict[str, Method] = {}
"""Every method, the default first; filled when the package is imported."""


def method(name: str, help: str, **needs) -> Callable[[Make], Method]:
    """Register the function below as a method; arguments as in `Method`."""

    def register(make: Make) -> Method:
        METHODS[name] = Method(name, help, make, **needs)
        return METHODS[name]

    return register


def side(transform: Tensor, mean: Tensor | None = None, shaping: Tensor | None = None) -> Side:
    """A side with nothing clipped; `Method` puts the quantiles in. Shapes as in `Side`."""
    return Side(transform, transform.new_ones(transform.shape[0]), mean, shaping)


def _clipped(made: Side, quantile: float) -> Side:
    return Side(made.transform, made.clip.new_full(made.clip.shape, quantile), made.mean, made.shaping)
