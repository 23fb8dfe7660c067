"""Every name of SGLang that we hook, subclass, call or read, with the parameters we rely on and why: one registry.

`check_upstream.py` compares it with what is installed, in every start with --kv-quant oscar. To add an entry, append a
`Symbol`; a test walks the whole list.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symbol:
    """One upstream name.

    Args:
        name: dotted path of a class, function, method, constant, or field of a class's instances.
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
_ALLOCATOR = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_BATCH_OF_REQUESTS = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_FRONT = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
_BACKEND = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"

SYMBOLS = [
    # Flags (entry.py, flags.py)
    Symbol("sglang.srt.arg_groups.fields.memory.Memory", "our flags are fields of a subclass"),
    Symbol("sglang.srt.arg_groups.arg_utils.Arg", "declares a flag"),
    Symbol("sglang.srt.arg_groups.arg_utils.A", "declares a flag"),
    Symbol("sglang.srt.arg_groups.choices.add_attention_backend_choices", "makes 'oscar' a backend name"),
    Symbol("sglang.srt.arg_groups.resolution_hooks.register_resolution_hook", "wraps a resolution step", ("name",)),
    # Argument resolution (entry.py, check_flags.py, check_model.py, find_artifact.py, declare.py)
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
    Symbol("sglang.srt.configs.model_config.AttentionArch.MLA", "tells MHA from MLA, by its name"),
    Symbol("sglang.srt.configs.model_config.AttentionArch.SSM", "tells MHA from Mamba, by its name"),
    Symbol("sglang.srt.configs.model_config.ModelConfig.get_total_num_kv_heads", "KV heads of the whole model", ()),
    *(
        Symbol(f"sglang.srt.configs.model_config.ModelConfig.{name}", "read by check_model.py: what the model is")
        for name in (
            "attention_arch",
            "context_len",
            "has_attention_sinks",
            "head_dim",
            "hf_config",
            "is_encoder_decoder",
            "is_generation",
            "is_hybrid_swa",
            "is_multimodal",
        )
    ),
    Symbol("sglang.srt.configs.hybrid_arch.mambaish_config", "finds linear-attention models", ("model_config",)),
    Symbol("sglang.srt.model_executor.cuda_graph_config.with_phase", "turns graphs off", ("config", "phase", "changes")),
    Symbol("sglang.srt.model_executor.cuda_graph_config.Phase.PREFILL", "turns graphs off"),
    Symbol("sglang.srt.model_executor.cuda_graph_config.Phase.DECODE", "turns graphs off"),
    Symbol("sglang.srt.model_executor.cuda_graph_config.Backend.DISABLED", "turns graphs off"),
    Symbol("sglang.srt.model_executor.cuda_graph_config.Backend.BREAKABLE", "refused for decode"),
    # The CPU platform (cpu/platform.py, cpu/threads.py, cpu/models/dense.py)
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
    # Hooks (entry.py, hooks.py)
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry.register", "installs hooks", ("target", "hook"), exact=False),
    Symbol("sglang.srt.plugins.hook_registry.HookType.AROUND", "kind of hook"),
    Symbol("sglang.srt.plugins.hook_registry.HookType.AFTER", "kind of hook"),
    Symbol("sglang.srt.layers.attention.attention_registry.register_attention_backend", "registers the backend", ("name",)),
    Symbol("sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS", "tells whether our plugin has run"),
    Symbol("sglang.srt.plugins.load_plugins", "runs our plugin where SGLang has not", ()),
    Symbol(f"{_CONFIGURATOR}._resolve_kv_pool_class", "wrapped: chooses our pool", ("kind", "default")),
    Symbol(
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        "wrapped: makes the windows and an allocator that serves them",
        ("sizes", "token_to_kv_pool", "is_dsv4_model", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    Symbol(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "wrapped: bytes of one token",
        ("kvc", "num_layers"),
    ),
    *(Symbol(f"{_CONFIGURATOR}.{name}", "read by our hooks") for name in ("is_draft_worker", "model_config", "server_args")),
    # The windows' pages (hooks.py, window_pages.py)
    Symbol(f"{_ALLOCATOR}.__init__", "base of our allocator", ("size", "page_size", "dtype", "device", "kvcache", "need_sort")),
    *(
        Symbol(f"{_ALLOCATOR}.{name}", why, parameters, exact)
        for name, why, parameters, exact in (
            ("alloc", "overridden: the maps forget slots that are handed out", ("need_size",), True),
            ("alloc_extend", "overridden, as `alloc`", None, True),
            ("alloc_decode", "overridden, as `alloc`", None, True),
            ("clear", "overridden: nobody holds a page", (), True),
            ("free_page_ids", "gives pages back", ("page_ids",), True),
            ("available_size", "slots that are free", (), True),
            ("evict_to_free_tokens", "overridden: pages kept for prefixes go too", ("tree_cache", "num_tokens"), True),
            (
                "create_prefill_budget",
                "overridden: pages kept for prefixes count",
                ("tree_cache", "num_mixed_decode_tokens"),
                True,
            ),
            (
                "max_new_tokens_for_memory",
                "overridden: windows count",
                ("input_tokens", "max_new_tokens", "token_capacity", "sliding_window_size", "chunk_size"),
                True,
            ),
        )
    ),
    Symbol(
        "sglang.srt.mem_cache.prefill_budget.PrefillBudget._available_and_evictable", "overridden: retained pages count", ()
    ),
    Symbol("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free", "wrapped: a request's pages go with its row", ("req",)),
    Symbol("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows", "wrapped, as `free`", ("indices",)),
    Symbol(f"{_ADDER}._request_slot_reserve_for_req", "wrapped: windows of an admitted request", ("req", "extend_input_len")),
    Symbol(f"{_ADDER}._get_running_request_total_token_offset", "wrapped: windows of running requests", ("req",)),
    Symbol(f"{_BATCH_OF_REQUESTS}.new_tokens_required_next_decode", "wrapped: pages of the next step", ("selected_indices",)),
    Symbol(f"{_BATCH_OF_REQUESTS}.prepare_for_extend", "wrapped: takes pages", ()),
    Symbol(f"{_BATCH_OF_REQUESTS}.prepare_for_decode", "wrapped: takes pages", ()),
    Symbol(f"{_BATCH_OF_REQUESTS}.seq_lens_cpu", "lengths after the step, on the host"),
    Symbol(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.protected_size", "wrapped: the leak check counts pages", ()
    ),
    Symbol("sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS", "new tokens that admission counts at most"),
    *(
        Symbol(f"sglang.srt.managers.schedule_batch.ReqKvInfo.{name}", "row and length of a request")
        for name in ("holds_kv", "kv_committed_len", "req_pool_idx")
    ),
    *(
        Symbol(f"sglang.srt.managers.schedule_batch.Req.{name}", "tokens of a request, and what else its prefix must share")
        for name in (
            "cache_salt",
            "extra_key",
            "full_untruncated_fill_ids",
            "origin_input_ids",
            "output_ids",
            "sampling_params",
            "skip_radix_cache_insert",
        )
    ),
    Symbol(f"{_INTERNAL_STATE}.get_internal_state", "wrapped: figures in /server_info", ("recv_req",)),
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry._patched", "tells which hooks were taken"),
    # Life cycle (life_cycle.py)
    *(
        Symbol(f"{_WEIGHT_UPDATER}.{name}", "wrapped: refuses new weights under an old artifact", ("recv_req",))
        for name in (
            "begin_weight_update",
            "destroy_weights_update_group",
            "end_weight_update",
            "init_weights_update_group",
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        )
    ),
    *(
        Symbol(f"{_WEIGHT_UPDATER}.{name}", "wrapped: refuses to write folded weights out", ("params",))
        for name in ("save_remote_model", "save_sharded_model")
    ),
    *(
        Symbol(f"{_FRONT}.{name}", "wrapped: a refusal that the client sees", ("obj", "request"))
        for name in (
            "begin_weight_update",
            "check_weights",
            "destroy_weights_update_group",
            "end_weight_update",
            "get_weights_by_name",
            "init_weights_send_group_for_remote_instance",
            "init_weights_update_group",
            "release_memory_occupation",
            "resume_memory_occupation",
            "send_weights_to_remote_instance",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        )
    ),
    Symbol(f"{_TOKENIZER}.update_weights_from_disk", "wrapped: a refusal that the client sees", ("obj", "request")),
    Symbol(f"{_TOKENIZER}._validate_one_request", "wrapped: refuses prompts that end the scheduler", ("obj", "input_ids")),
    *(
        Symbol(f"sglang.srt.managers.io_struct.{name}ReqOutput", "answers a refused weight update")
        for name in (
            "BeginWeightUpdate",
            "DestroyWeightsUpdateGroup",
            "EndWeightUpdate",
            "InitWeightsUpdateGroup",
            "UpdateWeightFromDisk",
            "UpdateWeightsFromDistributed",
            "UpdateWeightsFromIPC",
            "UpdateWeightsFromTensor",
        )
    ),
    Symbol("sglang.srt.runtime_context.get_parallel", "rank and size of tensor parallelism", ()),
    Symbol("sglang.srt.runtime_context.get_memory", "whether prefixes are cached", ()),
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
    Symbol("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.req_to_token", "positions to slots"),
    Symbol("sglang.srt.mem_cache.memory_pool.unwrap_write_loc", "slots of a write"),
    # Backend (backend.py, model_layers.py, path_host.py, path_gpu.py)
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
    *(
        Symbol(f"{_BATCH}.{name}", why)
        for name, why in (
            ("forward_mode", "decode or extend"),
            ("batch_size", "which CUDA graph"),
            ("seq_lens", "lengths, the new tokens included, on the device"),
            ("seq_lens_cpu", "the same on the host; None: read from the device"),
            ("req_pool_indices", "rows of `req_to_token`, on the device"),
            ("req_pool_indices_cpu", "the same on the host; None: read from the device"),
            ("out_cache_loc", "slots of the new tokens"),
            ("extend_prefix_lens_cpu", "cached tokens of each request of an extend, on the host"),
            ("extend_seq_lens_cpu", "new tokens of each request of an extend, on the host"),
        )
    ),
    Symbol("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.req_generation", "tells a new request from one that goes on"),
    *(
        Symbol(f"sglang.srt.layers.radix_attention.RadixAttention.{name}", "an attention layer of a model")
        for name in (
            "attn_type",
            "is_cross_attention",
            "layer_id",
            "logit_cap",
            "qk_head_dim",
            "scaling",
            "sliding_window_size",
            "tp_k_head_num",
            "tp_q_head_num",
            "tp_v_head_num",
            "v_head_dim",
        )
    ),
    Symbol("sglang.srt.layers.radix_attention.AttentionType.DECODER", "the only kind that is served"),
    # Statistics inside the engine (capture.py)
    Symbol(f"{_BATCH}.extend_num_tokens", "how many of the rows are tokens and not padding"),
    Symbol("sglang.srt.distributed.parallel_state.get_tensor_model_parallel_rank", "whose heads these are", ()),
    Symbol("sglang.srt.distributed.parallel_state.get_tensor_model_parallel_world_size", "how many ranks share them", ()),
]
