"""OSCAR: a 2-bit KV cache for stock SGLang. The offline half of the package; importing it imports nothing else."""

__version__ = "0.1.0"

# The one SGLang release whose inner symbols this build hooks. setup.py pins it and every start compares against it.
SGLANG_VERSION = "0.5.23"
