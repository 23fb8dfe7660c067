"""A start on a plain CPU: when it is meant, and without the imports and the messages that mean nothing there.

CPU seconds of the imports of the scheduler process, the largest of three (2 cores, sglang 0.5.23): as upstream 11.1, without
FlashInfer 10.4, without the sweep over all model modules 9.2, without both 7.7; resident 1155 -> 944 MB.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from sglang.srt.oscar.cpu import threads

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


def is_meant() -> bool:
    """Whether this process should run on our CPU platform: there is no accelerator, or the command line says `--device cpu`.

    `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU platform and `SGLANG_USE_MLX=1` for another; both are left alone.
    With `--device cpu` the accelerators of the machine are hidden from this process and its workers.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or os.environ.get("SGLANG_USE_MLX", "0") == "1":
        return False
    if device_argument(sys.argv) == "cpu":
        # SGLang asks torch, not the flag, what the machine has; hidden cards make both agree, here and in the workers.
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            os.environ[name] = ""
        return True
    import torch

    return not torch.accelerator.is_available()


def device_argument(argv: list[str]) -> str | None:
    """The value of `--device` in a command line, as argparse would take it (the last one counts)."""
    value = None
    for index, argument in enumerate(argv):
        if argument == "--device" and index + 1 < len(argv):
            value = argv[index + 1]
        elif argument.startswith("--device="):
            value = argument.removeprefix("--device=")
    return value.split(":")[0] if value else None


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
    if record.name == "sglang.srt.utils.numa_utils" and not threads.bound_by_us():
        return True
    return not message.startswith(LOG_MESSAGES[record.name])
