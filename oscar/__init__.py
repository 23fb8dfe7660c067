"""OSCAR: a 2-bit KV cache for stock SGLang.

    artifact = oscar.calibrate(model="path/to/model")
    oscar.save(artifact, "oscar.kvq")

The functions below are the public interface of the offline half; `oscar.api` documents them. They are imported when they are
first used: importing `oscar` imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oscar.api import calibrate, evaluate, load, plan, save
    from oscar.errors import OscarError

__version__ = "0.1.0"

# The one SGLang release whose inner symbols this build hooks. setup.py pins it and every start compares against it.
SGLANG_VERSION = "0.5.23"

__all__ = ["SGLANG_VERSION", "OscarError", "__version__", "calibrate", "evaluate", "load", "plan", "save"]
_HOMES = dict.fromkeys(("calibrate", "evaluate", "load", "plan", "save"), "oscar.api") | {"OscarError": "oscar.errors"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oscar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
