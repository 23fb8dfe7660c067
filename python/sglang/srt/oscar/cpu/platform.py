"""SGLang on a plain CPU: an out-of-tree platform that needs neither sgl_kernel nor Triton.

Used where there is no accelerator or where the user asks for `--device cpu` (`cpu/start.py` decides), for stock 16-bit serving
and for `--kv-quant oscar` alike. SGLang's own CPU platform needs an AMX build of sgl_kernel that is on no package registry.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang.srt.oscar.cpu import threads
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

logger = logging.getLogger(__name__)

MAX_RUNNING_REQUESTS = 64
"""Requests at once where the user says nothing. SGLang reserves rows for 2048 and more, which no CPU serves."""
POOL_SHARE = 0.4
"""Part of the memory left after the weights that the KV pools of all ranks may take."""
POOL_CAP = 2 * 2**30
"""Bytes that the pools take at most; a tenth of the machine or as much as the weights, where that is more. SGLang fills 16-bit
pools with zeros at start: 4.2 GB took 12.6 s on 2 busy cores, with no request to use them."""
WORKERS = 2 * 2**30
"""Bytes that the processes themselves take between argument resolution and the measurement in the worker."""


class OscarCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """PyTorch kernels on the CPU. Fused operators take their `forward_native`."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """The string that `ServerArgs.device` wants; the mixin returns a `torch.device`."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Defaults for a machine that is shared with other programs; what the user gave stays."""
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        if server_args.mem_fraction_static is None:
            fraction = memory_fraction(server_args)
            if fraction is not None:
                server_args.mem_fraction_static = fraction


def is_current() -> bool:
    """Whether this process runs on our platform."""
    from sglang.srt.platforms import current_platform

    return isinstance(current_platform, OscarCpuPlatform)


def declare_backend(server_args: Any) -> None:
    """Choose `torch_native` on our platform where the user chose no attention backend; SGLang would take `intel_amx`.

    Args:
        server_args: SGLang's `ServerArgs`, while it resolves.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if resolving_view(server_args).device == "cpu" and is_current() and server_args.attention_backend is None:
        declare_resolution(server_args, "oscar", attention_backend="torch_native")


def memory_fraction(server_args: Any) -> float | None:
    """`--mem-fraction-static` for a CPU: the weights plus a KV pool a rank, as a part of the memory that is free now.

    Returns:
        In (0, 1); None where the weights are not on disk or do not fit, which is left to SGLang.
    """
    import psutil
    from sglang.srt.utils.common import get_free_cpu_memory

    weights = weight_bytes(server_args.model_path, server_args.revision, server_args.download_dir)
    if not weights:
        return None
    if server_args.dtype in ("float", "float32"):
        weights *= 2
    nodes = threads.numa_nodes()
    ranks = server_args.dp_size * server_args.tp_size * server_args.pp_size
    weights *= server_args.dp_size
    free = get_free_cpu_memory() - WORKERS
    pools = min(POOL_SHARE * (free - weights), max(POOL_CAP, psutil.virtual_memory().total // 10, weights))
    if pools <= 0:
        return None
    # SGLang measures the whole machine divided by its NUMA nodes and takes the fraction of that once a rank; every rank
    # sees the weights of all ranks of its node as used.
    fraction = round(min(0.95, (weights / nodes + pools / ranks) / (free / nodes)), 3)
    logger.info(
        "oscar: on the CPU the KV cache may take %.1f of %.1f GiB free (--mem-fraction-static %.3f to change)",
        pools / 2**30,
        free / 2**30,
        fraction,
    )
    return fraction


def weight_bytes(model_path: str, revision: str | None = None, download_dir: str | None = None) -> int:
    """Size of the weight files in a model folder, or of a model of the Hub that was downloaded before; 0 where neither is."""
    folder = Path(model_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model_path, revision=revision, cache_dir=download_dir, local_files_only=True))
        except Exception:  # not there, or no name of a model: whatever the library raises, SGLang says it better
            return 0
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf"):
        sizes = [file.stat().st_size for file in folder.glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0
