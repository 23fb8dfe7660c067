"""Compile the CPU kernels to one shared library with a plain C ABI, beside the modules of `oscar_kernel`.

`setup.py` calls it through `CMDCLASS`; `python sgl-kernel/build_cpu.py` builds by hand. Each file gets the flags of its own
level and no more: what runs is chosen at run time, so the library works on every CPU of the architecture.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "csrc" / "cpu"
PACKAGE = HERE / "python" / "oscar_kernel" / "cpu"
LIBRARY = "liboscar_cpu.so"

FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-Wall"]
# gcc 12 warns about the undefined vectors in its own intrinsics, and about the ABI of vectors that never leave their file.
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-psabi"]
STORE_FLAGS = ["-ffp-contract=off"]
"""The format's operations are separate float32 operations; a fused one could give another byte."""
DRIVERS = ("decode.cpp", "extend.cpp", "store.cpp", "compact.cpp", "read.cpp", "dispatch.cpp")
ISA_FLAGS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"],
}
ISA_FLAGS["amx"] = [*ISA_FLAGS["avx512"], "-mamx-tile", "-mamx-bf16"]
ISA_FLAGS["amx_emulated"] = ISA_FLAGS["avx512"]


def compiler() -> list[str] | None:
    """The C++ compiler's command: CXX, else g++, c++ or clang++; None where there is none."""
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    return None


def sources() -> list[tuple[Path, list[str]]]:
    """Files to compile on this architecture, each with its flags."""
    files = [(SOURCE / name, []) for name in DRIVERS]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    for isa, flags in ISA_FLAGS.items():
        if isa == "portable" or x86:
            files.append((SOURCE / f"attend_{isa}.cpp", flags))
        if isa == "portable" or (x86 and not isa.startswith("amx")):  # which stores as avx512 does
            files.append((SOURCE / f"store_{isa}.cpp", [*flags, *STORE_FLAGS]))
    return files


def up_to_date(library: Path) -> bool:
    newest = max(path.stat().st_mtime for path in [*SOURCE.iterdir(), SOURCE.parent / "codec.h", Path(__file__)])
    return library.exists() and library.stat().st_mtime >= newest


def build(target: Path = PACKAGE, work: Path | None = None, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compile and link.

    Args:
        target: folder for the library.
        work: folder for object files; None: build/cpu of the checkout.
        extra_flags: for every file and the link, e.g. of a sanitizer.
    Returns:
        Path of the library.
    Raises:
        RuntimeError: no compiler, or it failed; the message says how.
    """
    library = target / LIBRARY
    if not extra_flags and up_to_date(library):
        return library
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler (set CXX, or install g++)")
    work = work or HERE.parent / "build" / "cpu"
    work.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)

    def run(arguments: list[str]) -> None:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join([*command, *arguments])} failed:\n{done.stderr[-4000:]}")

    def compile_one(item: tuple[Path, list[str]]) -> str:
        path, flags = item
        made = work / (path.stem + ".o")
        run([*FLAGS, *extra_flags, *flags, "-c", str(path), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, sources()))
    # Linked beside the target and renamed: a process that has the old library open keeps it whole.
    fresh = library.with_suffix(f".{os.getpid()}.tmp")
    run(["-shared", "-fopenmp", *extra_flags, *objects, "-o", str(fresh)])
    fresh.replace(library)
    return library


def try_build(target: Path = PACKAGE) -> Path | None:
    """`build`, or one line on stderr: an install without the library works, in PyTorch."""
    try:
        return build(target)
    except (RuntimeError, OSError) as error:
        print(f"oscar-kv: CPU kernels not built, the slower PyTorch reference will be used: {error}", file=sys.stderr)
        return None


class BuildPy(build_py):
    """Compile before modules and their data are collected, so that wheels and editable installs both have the library."""

    def run(self) -> None:
        try_build()
        super().run()


class BdistWheel(bdist_wheel):
    """A wheel with the library is for this platform, and for every Python: nothing in it links to one."""

    def get_tag(self) -> tuple[str, str, str]:
        if not (PACKAGE / LIBRARY).exists():
            return super().get_tag()
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


CMDCLASS = {"build_py": BuildPy, "bdist_wheel": BdistWheel}

if __name__ == "__main__":
    print(build())
