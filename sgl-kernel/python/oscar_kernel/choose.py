"""Which implementation of an op runs."""

from __future__ import annotations

import functools
import logging

from torch import Tensor

from oscar_kernel import cpu
from oscar_kernel.layer import LayerCache, LayerCodec

logger = logging.getLogger(__name__)
IMPLS = ("auto", "cpu", "reference")


def choose(op: str, impl: str, isa: str | None, cache: LayerCache, codec: LayerCodec, *tensors: Tensor) -> str:
    """Name the implementation to run: "cpu" for the C++ library, "reference" for PyTorch.

    Args:
        op: the caller's name, for the message.
        impl: "auto" takes the library where it can run; any other must be able to.
        isa: level of the library, None for its default; asking for one is asking for the library.
        cache, codec, tensors: what the op was given.
    Raises:
        ValueError: impl is unknown. RuntimeError: it cannot run.
    """
    if impl not in IMPLS:
        raise ValueError(f"{op}: impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    if impl == "reference":
        if isa is not None:
            raise ValueError(f"{op}: isa={isa!r} is a level of the C++ library, impl='reference' has none")
        return "reference"
    reason = cpu.obstacle(codec, cache, *tensors)
    if reason is None:
        return "cpu"
    if impl == "cpu" or isa is not None:
        raise RuntimeError(f"{op}: the C++ library cannot run here: {reason}")
    if cache.k_buffer.device.type == "cpu" and cpu.library() is not None:  # a library that is missing says so itself
        _say_slower(reason)
    return "reference"


@functools.lru_cache
def _say_slower(reason: str) -> None:
    """Log, once a reason, that `auto` took the slower path."""
    logger.warning("oscar_kernel: using the slower PyTorch reference, not the C++ library: %s", reason)
