"""A start on a plain CPU without the imports it cannot use, and without the messages that alarm and mean nothing there.

CPU seconds of the imports of the scheduler process, the largest of three (2 cores, sglang 0.5.23): as upstream 11.1, without
FlashInfer 10.4, without the sweep over all model modules 9.2, without both 7.7; resident 1155 -> 944 MB.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

# (part of a regular expression for the start of the message, module that warns)
WARNINGS = (
    (r"'python -m sglang\.launch_server' is still supported", r".*"),
    (r"Only CUDA, HIP and XPU support AWQ currently", r"sglang\.srt\.layers\.quantization\.awq\..*"),
    (r"Only CUDA, MUSA and NPU support GGUF quantization currently", r"sglang\.srt\.layers\.quantization\.gguf"),
    (r"Triton is not supported on current platform, roll back to CPU", r"sglang\.kernels\.ops\.attention\.fla\.utils"),
)

# Start of the message, by the logger that says it.
LOG_MESSAGES = {
    # No card, so no architecture to detect.
    "sglang.kernels.jit.utils.arch": ("Cannot detect CUDA architecture",),
    # SGLang imports the modules of all models; these two need CUDA and are asked for by name when they are wanted.
    "sglang.srt.models.registry": (
        "Ignore import error when loading sglang.srt.models.falcon_mamba",
        "Ignore import error when loading sglang.srt.models.mamba",
    ),
    # A container's hard limit; it bounds the number of connections only.
    "sglang.srt.utils.common": ("Fail to set RLIMIT_NOFILE",),
    # There are no CUDA graphs on a CPU.
    "sglang.srt.arg_groups.attention_hook": ("Cuda graph is disabled because of using torch native attention backend",),
    "sglang.srt.distributed.bootstrap": ("init_cpu_threads_env and shared memory based AllReduce is disabled",),
    # Said of every model whose vocabulary is not Qwen3-Reranker's.
    "sglang.srt.entrypoints.openai.serving_rerank": ("Using fallback token IDs for yes/no",),
    # The cores were split by us, and so was the memory.
    "sglang.srt.utils.numa_utils": ("The total number of ranks (",),
}


MODELS = "sglang.srt.oscar.cpu.models"


def prepare() -> None:
    """Skip what a CPU cannot use and install the filters, in this process. Calling it again changes nothing."""
    # Python's way to make a module absent: SGLang asks for FlashInfer with `try: import`, and it runs on NVIDIA cards only.
    sys.modules.setdefault("flashinfer", None)
    # SGLang's way to import the other model modules only if the architecture is none of these. Workers inherit it.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODELS)
    for message, module in WARNINGS:
        warnings.filterwarnings("ignore", message=message, module=module)
    for name in LOG_MESSAGES:
        logger = logging.getLogger(name)
        if _wanted not in logger.filters:
            logger.addFilter(_wanted)


def _wanted(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if record.name == "sglang.srt.utils.numa_utils" and not _split_by_us():
        return True
    return not message.startswith(LOG_MESSAGES[record.name])


def _split_by_us() -> bool:
    """Whether the cores of the ranks are those that `resolve.bind_cpu_threads` chose, not the user."""
    from sglang.srt.oscar.cpu.platform import BIND, cores_by_rank

    bound = os.environ.get(BIND, "")
    return bool(bound) and bound == cores_by_rank(bound.count("|") + 1)
