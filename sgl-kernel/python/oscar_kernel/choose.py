"""Which implementation of an op runs."""

from __future__ import annotations

import functools
import logging

from torch import Tensor

from oscar_kernel.cpu import library as cpu
from oscar_kernel.layer import LayerCache, LayerCodec

logger = logging.getLogger(__name__)
IMPLS = ("auto", "cpu", "triton", "reference")


def choose(op: str, impl: str, isa: str | None, cache: LayerCache, codec: LayerCodec, *tensors: Tensor) -> str:
    """Name the implementation to run: "cpu" for the C++ library, "triton" for the GPU kernels, "reference" for PyTorch.

    Args:
        op: the caller's name, for the message.
        impl: "auto" takes the library or the kernels, by the device, where they can run; any other must be able to.
        isa: level of the library, None for its default; asking for one is asking for the library.
        cache, codec, tensors: what the op was given.
    Raises:
        ValueError: impl is unknown. RuntimeError: it cannot run.
    """
    if impl not in IMPLS:
        raise ValueError(f"{op}: impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    if isa is not None and impl in ("reference", "triton"):
        raise ValueError(f"{op}: isa={isa!r} is a level of the C++ library, impl={impl!r} has none")
    if impl == "reference":
        return "reference"
    on_cpu = cache.k_buffer.device.type == "cpu"
    if impl == "triton" or (impl == "auto" and isa is None and not on_cpu):
        reason = triton_obstacle(codec, cache)
        if reason is None:
            return "triton"
        if impl == "triton":
            raise RuntimeError(f"{op}: the Triton kernels cannot run here: {reason}")
        _say_slower("the Triton kernels", reason)
        return "reference"
    reason = cpu.obstacle(codec, cache, *tensors)
    if reason is None:
        return "cpu"
    if impl == "cpu" or isa is not None:
        raise RuntimeError(f"{op}: the C++ library cannot run here: {reason}")
    if on_cpu and cpu.library() is not None:  # a library that is missing says so itself
        _say_slower("the C++ library", reason)
    return "reference"


def triton_obstacle(codec: LayerCodec, cache: LayerCache) -> str | None:
    """Why the Triton kernels cannot serve a layer, in a few words, or None. A layer is looked at once."""
    try:
        from oscar_kernel.triton.common import interpreted, prepare
        from oscar_kernel.triton.tuning import architecture
    except ImportError as error:
        return f"Triton is not installed ({error})"
    device = cache.k_buffer.device
    if device.type == "cpu" and not interpreted():
        return "the tensors are on the CPU, where Triton runs with TRITON_INTERPRET=1 only"
    try:
        prepare(codec)
        architecture(device)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


@functools.lru_cache
def _say_slower(what: str, reason: str) -> None:
    """Log, once a reason, that `auto` took the slower path."""
    logger.warning("oscar_kernel: using the slower PyTorch reference, not %s: %s", what, reason)
