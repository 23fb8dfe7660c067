"""Kernels of the 2-bit KV cache: tensors and the format, nothing of any engine. Imports nothing of `oscar` but `oscar.format`.

The names below are the public interface; `attention` says how they go together. They are imported when they are first used, so
that `oscar_kernel.architectures`, which is data, costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oscar.format.windows import WindowTable
    from oscar_kernel.attention import BatchDecode, BatchExtend, Layers
    from oscar_kernel.layer import LayerCache, LayerCodec, SideCache, SideCodec
    from oscar_kernel.read_plan import ReadPlan, plan_read

__all__ = [
    "BatchDecode",
    "BatchExtend",
    "LayerCache",
    "LayerCodec",
    "Layers",
    "ReadPlan",
    "SideCache",
    "SideCodec",
    "WindowTable",
    "plan_read",
]
_HOMES = {
    "BatchDecode": "oscar_kernel.attention",
    "BatchExtend": "oscar_kernel.attention",
    "Layers": "oscar_kernel.attention",
    "LayerCache": "oscar_kernel.layer",
    "LayerCodec": "oscar_kernel.layer",
    "SideCache": "oscar_kernel.layer",
    "SideCodec": "oscar_kernel.layer",
    "ReadPlan": "oscar_kernel.read_plan",
    "plan_read": "oscar_kernel.read_plan",
    "WindowTable": "oscar.format.windows",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'oscar_kernel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
