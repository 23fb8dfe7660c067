"""Kernels of the 2-bit KV cache: tensors and the codec, nothing of any engine.

Every op is a module with its wrapper and a plain PyTorch reference; the reference is what tests compare against.
"""

from oscar_kernel.decode_attention import decode_attention
from oscar_kernel.extend_attention import extend_attention
from oscar_kernel.layer import LayerCache, LayerCodec
from oscar_kernel.plan_read import ReadPlan, plan_read
from oscar_kernel.store_kv import store_kv
from oscar_kernel.write_windows import write_windows

__all__ = [
    "LayerCache",
    "LayerCodec",
    "ReadPlan",
    "decode_attention",
    "extend_attention",
    "plan_read",
    "store_kv",
    "write_windows",
]
