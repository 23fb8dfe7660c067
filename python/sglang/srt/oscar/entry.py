"""What must happen while `import sglang` runs, in every process: our flags, resolution hooks, and the choice of platform.

This is the entry point of the group `sglang.srt.platforms`. SGLang calls it before `ServerArgs` is assembled, which is the
one moment at which a field can still be added; the command line, YAML, `Engine(...)`, pickling to workers and
`/server_info` all follow from the field. Nothing heavy may be imported here: the work is in `resolve.py`.
"""

import logging
import os
import sys

from oscar import SGLANG_VERSION
from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS

CPU_PLATFORM = "sglang.srt.oscar.cpu.platform.OscarCpuPlatform"

# (field, type, default, choices, help). None means "not given", so that a flag without --kv-quant oscar can be refused.
FLAGS = (
    (
        "kv_quant",
        str,
        "none",
        ("none", "oscar"),
        "How the KV cache is stored. 'none' (default) leaves SGLang as it is; 'oscar' keeps it in 2 bits an element "
        "(2.25 with metadata at head_dim 128), about 7 times the tokens in the same memory.",
    ),
    (
        "oscar_artifact",
        str,
        None,
        None,
        "Path of a calibration artifact (.safetensors) from `oscar calibrate`. Default: the one beside the model's "
        "weights, else the one in the cache folder, else calibrate before the port opens.",
    ),
    (
        "oscar_sink_tokens",
        int,
        None,
        None,
        f"Number of first tokens of every sequence that are also kept in 16 bits (default {DEFAULT_SINK_TOKENS}).",
    ),
    (
        "oscar_recent_tokens",
        int,
        None,
        None,
        f"Number of newest tokens of every sequence that are also kept in 16 bits (default {DEFAULT_RECENT_TOKENS}).",
    ),
    (
        "oscar_calibrate",
        str,
        None,
        ("auto", "never"),
        "What to do when no artifact is found: 'auto' (default) calibrates before the port opens and caches the "
        "result, 'never' stops and prints the command to run.",
    ),
    (
        "oscar_calibrate_text",
        str,
        None,
        None,
        "Path of a UTF-8 text file to calibrate on. Default: text that the model writes itself.",
    ),
    (
        "oscar_allow_native_layers",
        bool,
        False,
        None,
        "Accept an artifact without transforms of some layers (`oscar calibrate --skip-layers`); those layers stay in 16 bits, "
        "and the capacity counts them so.",
    ),
    (
        "oscar_codec",
        str,
        None,
        ("int2", "lossless"),
        "For debugging: 'lossless' stores 16-bit values through the same transforms, windows and pages, to tell path "
        "faults from quantization loss. It saves no memory. Default 'int2'.",
    ),
    (
        "oscar_kernels",
        str,
        None,
        ("auto", "cpu", "triton", "reference"),
        "For debugging: 'reference' runs plain PyTorch, slowly; 'auto' (default) Triton on a GPU and the C++ library on a CPU; "
        "'triton' and 'cpu' insist on theirs.",
    ),
    (
        "oscar_debug_checks",
        bool,
        False,
        None,
        "For debugging: re-encode every 16-bit row that is read and stop on a mismatch with its 2-bit row. Slow.",
    ),
)
FLAG_NAMES = tuple(name for name, *_ in FLAGS)


def activate() -> str | None:
    """Attach to SGLang; return the CPU platform where there is no accelerator, else None (SGLang's own platform).

    SGLang logs and swallows an `Exception` raised here, which would end as "unrecognized arguments". A start that asks
    for --kv-quant ends with the reason instead; any other start goes on without us.
    """
    try:
        _attach()
    except Exception as error:
        reason = (
            f"oscar: could not attach to sglang ({type(error).__name__}: {error}); this build is made for "
            f"sglang=={SGLANG_VERSION}, {_version_found()} is installed"
        )
        if any(argument.startswith("--kv-quant") for argument in sys.argv):
            raise SystemExit(reason) from None
        logging.getLogger(__name__).warning("%s", reason)
        return None
    if not _cpu_is_meant():
        return None
    from sglang.srt.oscar.cpu import start as cpu_start

    cpu_start.prepare()
    return CPU_PLATFORM


def _version_found() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"sglang {version('sglang')}"
    except PackageNotFoundError:
        return "no sglang distribution"


def _attach() -> None:
    """Add the flags, the backend name and the resolution hooks. Once a process."""
    from sglang.srt.arg_groups import choices, resolution_hooks
    from sglang.srt.arg_groups.fields import memory

    if getattr(memory.Memory, "_OSCAR", False):
        return
    if "sglang.srt.server_args" in sys.modules:
        raise RuntimeError("sglang.srt.server_args was imported before the platform plugins ran")
    memory.Memory = with_flags(memory.Memory)
    choices.add_attention_backend_choices(["oscar"])
    for step, wrapper in RESOLUTION_STEPS.items():
        resolution_hooks.register_resolution_hook(step)(wrapper)


def with_flags(base: type) -> type:
    """A subclass of SGLang's `Memory` namespace that has our fields too."""
    import msgspec
    from sglang.srt.arg_groups.arg_utils import A, Arg

    fields = []
    for name, kind, default, choices, text in FLAGS:
        annotation = kind if default is not None else kind | None
        argument = Arg(help=text, choices=list(choices) if choices else None, resolvable=True)
        fields.append((name, A[annotation, argument], default))
    return msgspec.defstruct(base.__name__, fields, bases=(base,), namespace={"_NS_PATH": base._NS_PATH, "_OSCAR": True})


# The steps of SGLang's argument resolution that we wrap, in the order in which it runs them. Each wrapper imports its work
# when it is called: at registration `sglang.srt.arg_groups.overrides` cannot be imported yet.


def _before_model(server_args, previous) -> None:
    from sglang.srt.oscar import resolve

    resolve.check_options(server_args)
    previous(server_args)


def _model_known(server_args, previous) -> None:
    from sglang.srt.oscar import resolve

    previous(server_args)
    resolve.check_model(server_args)


def _cpu_backends(server_args, previous) -> None:
    from sglang.srt.oscar import resolve

    previous(server_args)
    resolve.declare_cpu_backend(server_args)


def _attention_backend(server_args, previous) -> None:
    from sglang.srt.oscar import resolve

    resolve.bind_cpu_threads(server_args)
    resolve.declare_settings(server_args)
    previous(server_args)


RESOLUTION_STEPS = {
    # The last step before SGLang looks at the model path.
    "handle_hardware_runtime_validation": _before_model,
    # The last step that can replace the model path; device and tokenizer path are known.
    "handle_expert_pack": _model_known,
    "handle_cpu_backends": _cpu_backends,
    "handle_attention_backend_compatibility": _attention_backend,
}


def _cpu_is_meant() -> bool:
    """Whether this process should run on our CPU platform: nothing else is there, or the command line says `--device cpu`.

    `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU platform, which needs its AMX build of sgl_kernel: left alone.
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
