"""The CPU library: loading it, and the levels of instructions that it holds.

ctypes, not an extension module or tvm-ffi: the library then needs neither PyTorch nor Python to compile, and one build serves
every version of both.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from ctypes import c_char_p, c_int64, c_void_p
from pathlib import Path

from torch import Tensor

from oscar_kernel.cpu import structures

logger = logging.getLogger(__name__)

LIBRARY = Path(os.environ.get("OSCAR_CPU_LIBRARY") or Path(__file__).with_name("liboscar_cpu.so"))
"""The environment names another build, e.g. an instrumented one (scripts/sanitize.sh)."""
EMULATED = "amx_emulated"
"""The level that tests run where a CPU has no AMX; never offered to a user."""


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The library, or None with one line in the log."""
    # PyTorch's OpenMP runtime is loaded by now, so the library binds to that one and shares its threads.
    try:
        lib = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        logger.warning("oscar_kernel: CPU kernels not loaded, using the slower PyTorch reference: %s", error)
        return None
    lib.oscar_cpu_default_isa.restype = c_char_p
    lib.oscar_cpu_status_text.restype = c_char_p
    lib.oscar_cpu_isa_supported.argtypes = [c_char_p]
    lib.oscar_cpu_isa_missing.argtypes = [c_char_p]
    lib.oscar_cpu_isa_missing.restype = c_char_p
    lib.oscar_cpu_isa_names.restype = ctypes.POINTER(c_char_p)
    lib.oscar_cpu_read.restype = ctypes.c_uint64
    lib.oscar_cpu_read.argtypes = [c_void_p, c_int64, ctypes.c_int, c_char_p]
    lib.oscar_cpu_compact.restype = None
    lib.oscar_cpu_compact.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]
    sizes = _numbers(lib.oscar_cpu_struct_sizes)
    if sizes != [ctypes.sizeof(s) for s in structures.ALL]:
        raise RuntimeError(f"{LIBRARY.name} was built from other sources than this package: structures {sizes}; build it again")
    isa = lib.oscar_cpu_default_isa().decode()
    if lib.oscar_cpu_isa_supported(isa.encode()) != 1:
        raise RuntimeError(_isa_sentence(lib, isa, "OSCAR_CPU_ISA"))
    missing = [f"not {name}: {_missing(lib, name)}" for name in isa_names(lib) if _missing(lib, name)]
    logger.info("oscar_kernel: CPU kernels at level %s", "; ".join([isa, *missing]))
    return lib


def loaded() -> ctypes.CDLL:
    """The library. Raises RuntimeError where it is not built, which `library` says in one line of the log."""
    lib = library()
    if lib is None:
        raise RuntimeError(f"oscar_kernel: expected {LIBRARY.name}, which is not built; build it, or give impl='reference'")
    return lib


def _missing(lib: ctypes.CDLL, isa: str) -> str | None:
    """What CPU or system lack for a level, or refuse; None where it runs."""
    reason = lib.oscar_cpu_isa_missing(isa.encode())
    return reason and reason.decode()


def _numbers(function) -> list[int]:
    out = (c_int64 * 16)()
    return list(out[: function(out, 16)])


def codec_constants() -> dict[str, int]:
    """The format's constants as the library was compiled."""
    names = ("FORMAT_VERSION", "BITS", "CODES_PER_BYTE", "META_BYTES", "ONE_THIRD_BITS")
    return dict(zip(names, _numbers(loaded().oscar_codec_constants), strict=True))


def isa_names(lib: ctypes.CDLL | None = None) -> list[str]:
    """Levels the library holds, the best last, and behind it EMULATED, which only tests ask for."""
    names = (lib or loaded()).oscar_cpu_isa_names()
    found: list[str] = []
    while names[len(found)]:
        found.append(names[len(found)].decode())
    return found


def default_isa() -> str:
    """The level that runs where none is asked for."""
    return loaded().oscar_cpu_default_isa().decode()


def supported_isas() -> list[str]:
    """Levels that this machine can run; empty without the library."""
    lib = library()
    return [] if lib is None else [name for name in isa_names(lib) if lib.oscar_cpu_isa_supported(name.encode()) == 1]


def _isa_sentence(lib: ctypes.CDLL, isa: str | None, source: str) -> str:
    names = isa_names(lib)
    if isa is None or isa not in names:
        return f"oscar_kernel: {source} must be one of {', '.join(names)}, got {isa!r}"
    usable = ", ".join(name for name in names if name != EMULATED and _missing(lib, name) is None)
    return f"oscar_kernel: {source}={isa}, but this machine lacks that level: {_missing(lib, isa)}; it can run {usable}"


def check(status: int, isa: str | None) -> None:
    """Raise what a status that a function returned stands for. isa: level that was asked for, None for the default."""
    if status:
        lib = loaded()
        if status in (1, 2):
            raise (ValueError if status == 1 else RuntimeError)(_isa_sentence(lib, isa, "isa"))
        raise RuntimeError(f"oscar_kernel: {lib.oscar_cpu_status_text(status).decode()}")


def read_bytes(data: Tensor, num_threads: int) -> int:
    """Read a tensor once; returns a checksum. For measuring bandwidth."""
    return loaded().oscar_cpu_read(data.data_ptr(), data.nbytes, num_threads, None)
