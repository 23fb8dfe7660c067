"""Every name of SGLang that we hook, subclass or call, with the parameters we rely on and why: one registry.

`check` compares it with what is installed. It runs in every start with --kv-quant oscar, before the port opens, so that a
new SGLang ends with one line that names the difference and never serves a 16-bit cache without a word: SGLang itself
logs and swallows a hook whose target is gone. To add an entry, append a `Symbol`; a test walks the whole list.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass

from oscar import SGLANG_VERSION


class UpstreamMismatch(RuntimeError):
    """The installed SGLang is not the one that this build hooks. The message is one line."""


@dataclass(frozen=True)
class Symbol:
    """One upstream name.

    Args:
        name: dotted path of a class, function, method, constant or field.
        why: what we do with it.
        parameters: for a callable, the parameter names we rely on, in order, without `self`; None: presence is enough.
        exact: whether these must be all of its parameters (we wrap it) or the first ones and any keywords (we call it).
    """

    name: str
    why: str
    parameters: tuple[str, ...] | None = None
    exact: bool = True


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_INTERNAL_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
_BACKEND = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"

SYMBOLS = [
    # Flags, resolution, platform (early.py, resolve.py, platform.py)
    Symbol("sglang.srt.arg_groups.fields.memory.Memory", "our flags are fields of a subclass"),
    Symbol("sglang.srt.arg_groups.arg_utils.Arg", "declares a flag"),
    Symbol("sglang.srt.arg_groups.choices.add_attention_backend_choices", "makes 'oscar' a backend name"),
    Symbol("sglang.srt.arg_groups.resolution_hooks.register_resolution_hook", "wraps a resolution step", ("name",)),
    Symbol("sglang.srt.arg_groups.overrides.declare_resolution", "declares settings", ("server_args", "source", "fields")),
    Symbol("sglang.srt.arg_groups.overrides.resolution_result", "reads settings", ("server_args", "field", "default")),
    Symbol("sglang.srt.arg_groups.overrides.resolving_view", "reads settings while they resolve", ("server_args",)),
    Symbol("sglang.srt.arg_groups.overrides.model_config_of", "reads the model's geometry", ("server_args",)),
    Symbol(
        "sglang.srt.utils.hf_transformers_utils.get_config",
        "refuses an unreadable model before SGLang tries",
        ("model", "trust_remote_code", "revision"),
        exact=False,
    ),
    Symbol("sglang.srt.configs.model_config.AttentionArch", "tells MHA from MLA"),
    Symbol("sglang.srt.configs.hybrid_arch.mambaish_config", "finds linear-attention models", ("model_config",)),
    Symbol("sglang.srt.model_executor.cuda_graph_config.with_phase", "turns graphs off", ("config", "phase", "changes")),
    Symbol("sglang.srt.model_executor.cuda_graph_config.Phase.PREFILL", "turns graphs off"),
    Symbol("sglang.srt.model_executor.cuda_graph_config.Phase.DECODE", "turns graphs off"),
    Symbol("sglang.srt.model_executor.cuda_graph_config.Backend.DISABLED", "turns graphs off"),
    Symbol("sglang.srt.model_executor.cuda_graph_config.Backend.BREAKABLE", "refused for decode"),
    Symbol("sglang.srt.arg_groups.arg_utils.A", "declares a flag"),
    Symbol("sglang.srt.platforms.current_platform", "tells whether the CPU platform is ours"),
    Symbol("sglang.srt.utils.common.get_free_cpu_memory", "memory default on the CPU", ()),
    Symbol("sglang.srt.utils.common.get_cpu_ids_by_node", "cores of the ranks", ()),
    Symbol("sglang.srt.platforms.interface.SRTPlatform.apply_server_args_defaults", "CPU defaults", ("server_args",)),
    Symbol("sglang.srt.platforms.cpu.CpuDeviceMixin", "base of the CPU platform"),
    Symbol("sglang.srt.platforms.interface.SRTPlatform", "base of the CPU platform"),
    Symbol("sglang.srt.platforms.interface.PlatformCapabilities", "capabilities of the CPU platform"),
    Symbol("sglang.srt.platforms.device_mixin.PlatformEnum.OOT", "marks the CPU platform as ours"),
    Symbol("sglang.srt.models.llama.LlamaForCausalLM", "imported at once on a CPU"),
    Symbol("sglang.srt.models.qwen2.Qwen2ForCausalLM", "imported at once on a CPU"),
    Symbol("sglang.srt.models.qwen3.Qwen3ForCausalLM", "imported at once on a CPU"),
    # Hooks (plugin.py, hooks.py)
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry.register", "installs hooks", ("target", "hook"), exact=False),
    Symbol("sglang.srt.plugins.hook_registry.HookType.AROUND", "kind of hook"),
    Symbol("sglang.srt.plugins.hook_registry.HookType.AFTER", "kind of hook"),
    Symbol("sglang.srt.layers.attention.attention_registry.register_attention_backend", "registers the backend", ("name",)),
    Symbol("sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS", "tells whether our plugin has run"),
    Symbol("sglang.srt.plugins.load_plugins", "runs our plugin where SGLang has not", ()),
    Symbol(f"{_CONFIGURATOR}._resolve_kv_pool_class", "wrapped: chooses our pool", ("kind", "default")),
    Symbol(
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        "wrapped: makes the windows, clears them on allocation",
        ("sizes", "token_to_kv_pool", "is_dsv4_model", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    Symbol(f"{_CONFIGURATOR}._profile_available_bytes", "wrapped: subtracts the side store", ("pre_model_load_memory",)),
    Symbol(f"{_CONFIGURATOR}.resolve_max_num_reqs", "wrapped: caps the rows of the side store", ("token_capacity",)),
    Symbol(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "wrapped: bytes of one token",
        ("kvc", "num_layers"),
    ),
    Symbol(f"{_INTERNAL_STATE}.get_internal_state", "wrapped: figures in /server_info", ("recv_req",)),
    *(
        Symbol(f"{_WEIGHT_UPDATER}.{name}", "wrapped: refuses new weights under an old artifact", ("recv_req",))
        for name in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
    Symbol("sglang.srt.managers.io_struct.UpdateWeightFromDiskReqOutput", "answers a refused weight update"),
    Symbol("sglang.srt.managers.io_struct.UpdateWeightsFromDistributedReqOutput", "answers a refused weight update"),
    Symbol("sglang.srt.managers.io_struct.UpdateWeightsFromTensorReqOutput", "answers a refused weight update"),
    Symbol("sglang.srt.managers.io_struct.UpdateWeightsFromIPCReqOutput", "answers a refused weight update"),
    Symbol("sglang.srt.runtime_context.get_parallel", "rank and size of tensor parallelism", ()),
    Symbol("sglang.srt.runtime_context.get_schedule", "max_running_requests", ()),
    Symbol("sglang.srt.runtime_context.get_serving", "name of the model in metrics", ()),
    # Pool (pool.py)
    Symbol(f"{_POOL}.__init__", "base of the pool", ("size", "page_size", "dtype", "head_num", "head_dim"), exact=False),
    Symbol(
        f"{_POOL}.set_kv_buffer",
        "overridden: encodes",
        ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override", "dcp_kv_mask"),
    ),
    Symbol(f"{_POOL}._create_buffers_normal", "overridden: memory that is mapped when it is first written", ()),
    Symbol(f"{_POOL}._kv_buffer_shapes", "shapes of the buffers", ()),
    Symbol(f"{_POOL}._init_kv_copy_and_warmup", "overridden: no Triton kernel to warm up", ()),
    Symbol(f"{_POOL}.move_kv_cache", "overridden: carries the overlay", ("tgt_loc", "src_loc")),
    Symbol("sglang.srt.mem_cache.memory_pool.ReqToTokenPool", "positions to slots"),
    Symbol("sglang.srt.mem_cache.memory_pool.unwrap_write_loc", "slots of a write"),
    # Backend (backend.py)
    Symbol(f"{_BACKEND}.init_forward_metadata", "overridden", ("forward_batch",)),
    Symbol(f"{_BACKEND}.forward_decode", "overridden", ("q", "k", "v", "layer", "forward_batch"), exact=False),
    Symbol(f"{_BACKEND}.forward_extend", "overridden", ("q", "k", "v", "layer", "forward_batch"), exact=False),
    Symbol(f"{_BACKEND}.support_triton", "overridden", ()),
    Symbol(f"{_BACKEND}.init_cuda_graph_state", "overridden: buffers of graphs", ("max_bs", "max_num_tokens")),
    Symbol(f"{_BACKEND}.init_forward_metadata_out_graph", "overridden", ("forward_batch", "in_capture")),
    Symbol(f"{_BACKEND}.init_forward_metadata_in_graph", "overridden: plans inside the graph", ("forward_batch",)),
    Symbol(f"{_BACKEND}.get_cuda_graph_seq_len_fill_value", "overridden", ()),
    Symbol(f"{_BACKEND}.shared_read_ends", "overridden: layers read the table of slots", ("fm",)),
    Symbol(f"{_BACKEND}.needs_cpu_seq_lens", "set: the kernels take lengths from the device"),
    Symbol("sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.POST_REPLAY", "where reads of a decode step end"),
    Symbol("sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.UNKNOWN", "where reads of a prefill end"),
    Symbol("sglang.srt.model_executor.forward_batch_info.ForwardMode.EXTEND", "a mode that is served"),
    Symbol("sglang.srt.model_executor.forward_batch_info.ForwardMode.MIXED", "a mode that is served"),
    Symbol("sglang.srt.layers.radix_attention.RadixAttention", "the attention layers of a model"),
    Symbol("sglang.srt.layers.radix_attention.AttentionType.DECODER", "the only kind that is served"),
    # Statistics inside the engine (capture.py)
    Symbol("sglang.srt.distributed.parallel_state.get_tensor_model_parallel_rank", "whose heads these are", ()),
    Symbol("sglang.srt.distributed.parallel_state.get_tensor_model_parallel_world_size", "how many ranks share them", ()),
]


def installed_version() -> str:
    """The version of the installed `sglang` distribution, or "none"."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def check(symbols: list[Symbol] | None = None) -> None:
    """Compare the installed SGLang with the registry.

    Raises:
        UpstreamMismatch: one line that names the version or every symbol that differs, with found and wanted.
    """
    found = installed_version()
    if found != SGLANG_VERSION:
        raise UpstreamMismatch(
            f"oscar: this build hooks sglang=={SGLANG_VERSION} and found sglang {found}; "
            f"run `pip install sglang=={SGLANG_VERSION}`, or serve with --kv-quant none"
        )
    differences = [difference for symbol in (symbols or SYMBOLS) if (difference := compare(symbol))]
    if differences:
        raise UpstreamMismatch(
            f"oscar: the installed sglang {found} differs from the sglang=={SGLANG_VERSION} that this build hooks: "
            f"{'; '.join(differences)}; run `pip install --force-reinstall --no-deps sglang=={SGLANG_VERSION}`, "
            "or serve with --kv-quant none"
        )


def compare(symbol: Symbol) -> str | None:
    """What is wrong with one symbol, in a few words, or None."""
    try:
        target = find(symbol.name)
    except (ImportError, AttributeError) as error:
        return f"{symbol.name} is missing ({error})"
    if symbol.parameters is None:
        return None
    if not callable(target):
        return f"{symbol.name} is not callable"
    names = parameter_names(target)
    wanted = symbol.parameters
    matches = names == wanted if symbol.exact else names[: len(wanted)] == wanted
    if matches:
        return None
    return f"{symbol.name} takes ({', '.join(names)}), expected ({', '.join(wanted)}{'' if symbol.exact else ', ...'})"


def find(name: str):
    """The object at a dotted path; the longest prefix that is a module is imported.

    Raises:
        ImportError: no prefix is a module.
        AttributeError: the module lacks the rest.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module_name = ".".join(parts[:length])
        try:
            target = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            continue
        for part in parts[length:]:
            target = getattr(target, part)
        return target
    raise ImportError(f"no module named {parts[0]!r}")


def parameter_names(target) -> tuple[str, ...]:
    """Names of the parameters of a callable, in order, without `self` and `cls`."""
    names = tuple(inspect.signature(inspect.unwrap(target)).parameters)
    return names[1:] if names[:1] in (("self",), ("cls",)) else names
