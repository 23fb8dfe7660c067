"""The two entry points through which SGLang loads us.

`activate` belongs to the group `sglang.srt.platforms`. SGLang calls it in every process while `import sglang` runs, before
`ServerArgs` is assembled, which is the one moment at which a field can still be added; the command line, YAML,
`Engine(...)`, pickling to workers and `/server_info` all follow from the field. It adds our flags, wraps steps of argument
resolution and chooses the platform.

`register` belongs to the group `sglang.srt.plugins`. SGLang calls it once in every process, later. It registers the attention
backend and the hooks.

Nothing heavy may be imported here: each function imports its work when it is called.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from sglang.srt.oscar.flags import FLAGS

from oscar import SGLANG_VERSION

CPU_PLATFORM = "sglang.srt.oscar.cpu.platform.OscarCpuPlatform"


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
    from sglang.srt.oscar.cpu import start

    if not start.is_meant():
        return None
    start.prepare()
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
    for flag in FLAGS:
        annotation = flag.type if flag.default is not None else flag.type | None
        argument = Arg(help=flag.help, choices=list(flag.choices) or None, resolvable=True, no_cli=flag.hidden)
        fields.append((flag.name, A[annotation, argument], flag.default))
    return msgspec.defstruct(base.__name__, fields, bases=(base,), namespace={"_NS_PATH": base._NS_PATH, "_OSCAR": True})


# The steps of SGLang's argument resolution that we wrap. They run once a server, in the process that was started, before any
# worker exists and before the port opens. Each wrapper imports its work when it is called: at registration
# `sglang.srt.arg_groups.overrides` cannot be imported yet.


def _before_model(server_args, previous) -> None:
    from sglang.srt.oscar.check_flags import check_flags

    check_flags(server_args)
    previous(server_args)


def _model_known(server_args, previous) -> None:
    from sglang.srt.oscar.check_model import check_model
    from sglang.srt.oscar.declare import declare_eager_prefill

    previous(server_args)
    check_model(server_args)
    declare_eager_prefill(server_args)


def _resolved(server_args, previous) -> None:
    from sglang.srt.oscar.declare import check_backends

    previous(server_args)
    check_backends(server_args)


def _cpu_backends(server_args, previous) -> None:
    from sglang.srt.oscar.cpu import platform

    previous(server_args)
    platform.declare_backend(server_args)


def _attention_backend(server_args, previous) -> None:
    from sglang.srt.oscar.cpu import platform, threads
    from sglang.srt.oscar.declare import declare_settings

    if platform.is_current():
        threads.bind_threads(server_args)
    declare_settings(server_args)
    previous(server_args)


RESOLUTION_STEPS = {
    # The last step before SGLang looks at the model path.
    "handle_hardware_runtime_validation": _before_model,
    # The last step that can replace the model path; device and tokenizer path are known.
    "handle_expert_pack": _model_known,
    "handle_cpu_backends": _cpu_backends,
    "handle_attention_backend_compatibility": _attention_backend,
    # Behind every step that looks at a model again.
    "handle_model_capability_adjustments": _resolved,
}
"""In the order in which SGLang runs them."""


def register() -> None:
    """Register the backend and the hooks; called once in every SGLang process.

    SGLang logs and swallows what is raised here, so nothing is checked here: argument resolution checks before the port
    opens, and the backend's constructor refuses a pool that is not ours.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    @register_attention_backend("oscar")
    def make_backend(model_runner):
        from sglang.srt.oscar.backend import OscarAttnBackend

        return OscarAttnBackend(model_runner)

    for target, hook, kind in _hooks():
        HookRegistry.register(target, hook, HookType[kind])


def _hooks() -> list[tuple[str, Callable, str]]:
    """(dotted path in SGLang, our function, kind of hook) of every hook."""
    from sglang.srt.oscar import hooks, life_cycle

    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    sizes = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
    state = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    adder, batch = "sglang.srt.managers.schedule_policy.PrefillAdder", "sglang.srt.managers.schedule_batch.ScheduleBatch"
    tree = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    return [
        (f"{configurator}._resolve_kv_pool_class", hooks.resolve_kv_pool_class, "AROUND"),
        (f"{configurator}._build_token_to_kv_pool_allocator", hooks.build_token_to_kv_pool_allocator, "AFTER"),
        (f"{sizes}._compute_cell_size", hooks.compute_cell_size, "AROUND"),
        (f"{state}.get_internal_state", hooks.get_internal_state, "AFTER"),
        (f"{adder}._request_slot_reserve_for_req", hooks.request_slot_reserve, "AFTER"),
        (f"{adder}._get_running_request_total_token_offset", hooks.running_request_offset, "AFTER"),
        (f"{batch}.new_tokens_required_next_decode", hooks.new_tokens_required_next_decode, "AFTER"),
        (f"{batch}.prepare_for_extend", hooks.prepare_for_extend, "AFTER"),
        (f"{batch}.prepare_for_decode", hooks.prepare_for_decode, "AFTER"),
        (f"{tree}.protected_size", hooks.protected_size, "AFTER"),
        *((target, hook, "AROUND") for target, hook in life_cycle.hooks().items()),
    ]


def missing_hooks() -> list[str]:
    """Targets of our hooks that SGLang has not patched in this process: it logs and swallows a hook that fails."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(target for target, _, _ in _hooks() if target not in HookRegistry._patched)
