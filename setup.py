"""The one build: `oscar`, `oscar_kernel` and the `sglang.srt.oscar` overlay as the distribution `oscar-kv`.

`sglang` and `sglang.srt` belong to the upstream wheel, so the overlay package is named outright: searching for packages
under python/ would find nothing (there is no `__init__.py` to find) and adding one would overwrite upstream's.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "sgl-kernel"))
import build_cpu  # noqa: E402 - compiles the CPU kernels into `oscar_kernel`

# Read, not imported: a build must not need what the package needs.
SOURCE = HERE.joinpath("oscar", "__init__.py").read_text(encoding="utf-8")
CONSTANTS = dict(re.findall(r'^(\w+) = "([^"]*)"', SOURCE, re.M))

setup(
    name="oscar-kv",
    version=CONSTANTS["__version__"],
    description="A 2-bit KV cache for stock SGLang",
    long_description="See README.md.",
    python_requires=">=3.10",
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
    cmdclass=build_cpu.CMDCLASS,
    package_data={
        "oscar_kernel.cpu": ["*.so"],
        "oscar": ["py.typed", "embedded/*", "**/*.jinja", "**/*.json", "**/*.md", "**/*.txt"],
    },
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
    extras_require={"test": ["hypothesis", "pytest", "ruff"]},
    entry_points={
        "console_scripts": ["oscar = oscar.commands.main:main"],
        # Runs while `import sglang` runs, in every process: flags, resolution hooks and the CPU platform.
        "sglang.srt.platforms": ["oscar = sglang.srt.oscar.entry:activate"],
        # Runs in `load_plugins()`: attention backend and the hooks on the pool.
        "sglang.srt.plugins": ["oscar = sglang.srt.oscar.plugin:register"],
    },
)
