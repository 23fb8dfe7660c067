"""The one build: `oscar`, `oscar_kernel` and the `sglang.srt.oscar` overlay as the distribution `oscar-kv`.

What is the same for every build stands in pyproject.toml. Here is what has to be computed: the version and the pinned SGLang,
which `oscar/__init__.py` names, the packages, and the C++ library.

`sglang` and `sglang.srt` belong to the upstream wheel, so the overlay's packages are named outright: searching for packages
under python/ would find nothing (there is no `__init__.py` to find), and adding one would overwrite the one upstream.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "sgl-kernel"))
import build_cpu  # noqa: E402 - compiles the CPU kernels into `oscar_kernel.cpu`

# Read, not imported: a build must not need what the package needs.
SOURCE = HERE.joinpath("oscar", "__init__.py").read_text(encoding="utf-8")
CONSTANTS = dict(re.findall(r'^(\w+) = "([^"]*)"', SOURCE, re.M))

setup(
    version=CONSTANTS["__version__"],
    install_requires=[
        f"sglang=={CONSTANTS['SGLANG_VERSION']}",
        "matplotlib",
        "numpy",
        "prometheus_client",
        "requests",
        "rich",
        "safetensors",
        "torch",
        "transformers",
    ],
    packages=[
        *find_packages(include=["oscar", "oscar.*"]),
        "oscar_kernel",
        "oscar_kernel.cpu",
        "oscar_kernel.triton",
        "sglang.srt.oscar",
        "sglang.srt.oscar.cpu",
        "sglang.srt.oscar.cpu.models",
    ],
    package_dir={
        "oscar": "oscar",
        "oscar_kernel": "sgl-kernel/python/oscar_kernel",
        "sglang.srt.oscar": "python/sglang/srt/oscar",
    },
    package_data={
        "oscar": ["py.typed", "embedded/*", "**/*.jinja", "**/*.json", "**/*.md", "**/*.txt"],
        "oscar_kernel": ["py.typed"],
        "oscar_kernel.cpu": ["*.so"],
    },
    cmdclass=build_cpu.CMDCLASS,
)
