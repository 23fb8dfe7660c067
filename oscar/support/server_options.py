"""Every option of SGLang's server, and what becomes of it with `--kv-quant oscar`.

An option is refused, or it works and a test serves with it, or it has no bearing on the 2-bit cache; `unrelated_options` has
the last kind. A test fails when the installed SGLang has an option that is in none of them, or lacks one that is. The page
docs/server-options.md is made from here (`python -m oscar.support`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oscar.support.table import OFF
from oscar.support.unrelated_options import UNRELATED

_SPELLED_OTHERWISE = {
    "ep_join_mode": "--elastic-ep-join-mode",
    "ep_join_rank_offset": "--elastic-ep-join-rank-offset",
    "fp4_gemm_runner_backend": "--fp4-gemm-backend",
    "fp8_gemm_runner_backend": "--fp8-gemm-backend",
}


def flag_of(field: str) -> str:
    """How a user writes a field of `ServerArgs` on the command line."""
    return _SPELLED_OTHERWISE.get(field, "--" + field.replace("_", "-"))


@dataclass(frozen=True)
class Option:
    """A server option of which some values are refused.

    Args:
        field: name of the `ServerArgs` field.
        allowed: values that work; any other value is refused.
        reason: why the others do not.
        alternative: what to do instead; `{flag}` is replaced.
    """

    field: str
    allowed: tuple[Any, ...]
    reason: str
    alternative: str = "drop {flag}, or " + OFF

    @property
    def flag(self) -> str:
        """How the user writes it."""
        return flag_of(self.field)


_OFF = (False,)
_UNSET = (None,)
_EMPTY: tuple[Any, ...] = (None, [], ())
_ONE_READER = "only the oscar backend reads the 2-bit KV cache"
_SPREAD = "the 2-bit pool is not split that way yet"
_TIER = "the other side does not know the 2-bit row format and would read wrong bytes"
_POOL = "it replaces the KV pool"
_ADAPTER = "an adapter on V or O would bypass the folded V transform"
_SHARED = "the V transform is folded into the weights, which another engine would then share"
_UPDATES = "it is for weights that change under a running server, which --kv-quant oscar refuses"
_OFFLOAD = "the V transform is folded into the weights on the device, and a copy elsewhere would undo it"
_JOIN = "ranks that leave and join have not been tried"
_ENCODER = "images and audio come to it from another server, and calibration has seen text only"
_SLEEP = "the 16-bit windows and native layers lie outside the memory that the saver releases and restores"
_RANKS = "use --tp-size, or " + OFF
_REPLICAS = "use --dp-size or --tp-size, or " + OFF

REFUSED = (
    # The format of the cache and who reads it
    Option("kv_cache_dtype", ("auto",), "both decide the format of the KV cache"),
    Option("quantization_param_path", _UNSET, "scaling factors belong to an FP8 KV cache"),
    Option("attention_backend", (None, "oscar"), _ONE_READER),
    Option("prefill_attention_backend", (None, "oscar"), _ONE_READER),
    Option("decode_attention_backend", (None, "oscar"), _ONE_READER),
    Option("enable_nvidia_megakernel", _OFF, _ONE_READER),
    Option("enable_amd_monokernel", _OFF, _ONE_READER),
    Option("enable_page_major_kv_layout", _OFF, _POOL),
    Option("enable_unified_memory", _OFF, _POOL),
    Option("enable_hisparse", _OFF, _POOL),
    Option("prefill_only_disable_kv_cache", _OFF, "without a KV cache there is nothing to store in 2 bits"),
    Option("kv_canary", ("none",), "it expects 16-bit or 8-bit rows"),
    # Other places for the cache
    Option("radix_cache_backend", _UNSET, _TIER),
    Option("disaggregation_mode", ("null",), _TIER),
    Option("enable_pd_role_switch", _OFF, _TIER),
    Option("enable_hierarchical_cache", _OFF, _TIER),
    Option("hicache_storage_backend", _UNSET, _TIER),
    Option("enable_unified_cache_external_linker", _OFF, _TIER),
    Option("enable_lmcache", _OFF, _TIER),
    Option("enable_flexkv", _OFF, _TIER),
    # How work is split
    Option("nnodes", (1,), "several machines have not been tried"),
    Option("use_ray", _OFF, "Ray workers have not been tried"),
    Option("pp_size", (1,), _SPREAD, _RANKS),
    Option("dcp_size", (1,), _SPREAD, _RANKS),
    Option("attn_cp_size", (1,), _SPREAD, _RANKS),
    Option("attn_dp_size", (1,), _SPREAD, _REPLICAS),
    Option("enable_dp_attention", _OFF, _SPREAD, _REPLICAS),
    Option("enable_prefill_cp", _OFF, _SPREAD),
    Option("enable_kv_cache_sharding", _OFF, _SPREAD),
    Option("dwdp_size", (1,), _SPREAD),
    Option("enable_layernorm_sp", _OFF, "tokens that are split between ranks around attention have not been tried"),
    Option("enable_scattered_sconv", _OFF, "tokens that are split between ranks around attention have not been tried"),
    Option("elastic_ep_backend", _UNSET, _JOIN),
    Option("ep_join_mode", _UNSET, _JOIN),
    Option("enable_two_batch_overlap", _OFF, "it splits batches behind the backend"),
    Option("enable_pdmux", _OFF, "it runs two attention backends at once"),
    # How tokens come about
    Option(
        "speculative_algorithm",
        _UNSET,
        "draft tokens are written to the cache and rejected again, which the 16-bit windows do not follow yet (the kernels "
        "themselves take chains of drafts)",
    ),
    Option("decoupled_spec_role", ("null",), "draft tokens are written to the cache and rejected again"),
    Option("dllm_algorithm", _UNSET, "diffusion decoding rewrites tokens that are already cached"),
    Option("enable_mis", _OFF, "multi-item scoring needs attention masks of its own"),
    Option("is_embedding", _OFF, "an embedding model does not decode"),
    Option("encoder_only", _OFF, "an encoder has no KV cache"),
    Option("language_only", _OFF, _ENCODER),
    # How a step is run
    Option("enable_deterministic_inference", _OFF, "SGLang guarantees it for a fixed list of attention backends"),
    Option("rl_on_policy_target", _UNSET, "SGLang guarantees it for a fixed list of attention backends"),
    Option("enable_torch_compile", _OFF, "the backend is not traceable"),
    Option(
        "cuda_graph_backend_prefill",
        (None, "disabled"),
        "prefill runs without CUDA graphs, whose plan depends on every length",
    ),
    Option("cuda_graph_backend_decode", (None, "full", "disabled"), "the plan of a decode step is part of the whole graph"),
    Option("debug_cuda_graph", _OFF, "the plan of a decode step is part of the whole graph"),
    Option("forward_hooks", _EMPTY, "a hook would see values in the basis of the 2-bit cache"),
    # Weights
    Option(
        "model_impl",
        ("auto", "sglang"),
        "only SGLang's own model classes have projections that the V transform can be folded into",
    ),
    Option(
        "load_format",
        ("auto", "safetensors", "pt", "dummy"),
        "the V transform is folded once the weights are loaded, which has been tried with plain weight files only",
        "convert the weights to safetensors, or " + OFF,
    ),
    Option("model_config_parser", ("auto", "hf"), "the artifact is compared with config.json"),
    Option("decrypted_config_file", _UNSET, "the artifact is compared with config.json"),
    Option(
        "startup_weight_load_mode",
        ("serial",),
        "the V transform is folded into the weights before that mode loads the real ones, which would overwrite it",
    ),
    Option("weight_cache_mode", ("off",), _SHARED),
    Option("remote_instance_weight_loader_start_seed_via_transfer_engine", _OFF, _SHARED),
    Option("checkpoint_engine_wait_weights_before_ready", _OFF, _UPDATES),
    Option("custom_weight_loader", _EMPTY, _UPDATES),
    Option("cpu_offload_gb", (0,), _OFFLOAD),
    Option("offload_group_size", (-1,), _OFFLOAD),
    Option("enable_lora", (None, False), _ADAPTER),
    Option("lora_paths", _EMPTY, _ADAPTER),
    Option("enable_memory_saver", _OFF, _SLEEP),
    Option("enable_weights_cpu_backup", _OFF, _SLEEP),
)
"""Options of which some values are refused, before a worker starts."""

_SERVING = "serving/test_serving.py::"
_STARTUP = "serving/test_startup.py::"
_LIFE = "serving/test_life_cycle.py::"
_PAGES = _SERVING + "test_lossless_equals_stock_in_pages_and_chunks"
_SMALL = _SERVING + "test_lossless_equals_stock_through_retraction"
_MANY = _LIFE + "test_many_options_answer_as_the_model_alone"

WORKS = {
    "model_path": _STARTUP + "test_same_settings_by_every_way",
    "device": _STARTUP + "test_hardware_gate_answers_for_every_kind",
    "dtype": _SERVING + "test_lossless_equals_stock",
    "random_seed": _SERVING + "test_lossless_equals_stock",
    "log_level": _SERVING + "test_lossless_equals_stock",
    "max_total_tokens": _SMALL,
    "schedule_conservativeness": _SMALL,
    "page_size": _PAGES,
    "chunked_prefill_size": _PAGES,
    "max_running_requests": _SERVING + "test_churn_reads_no_stale_row_and_leaks_nothing",
    "enable_metrics": _SERVING + "test_metrics_say_what_the_stores_hold",
    "disable_radix_cache": "evaluation/test_against_server.py::test_reader_is_the_server",
    "tp_size": _SERVING + "test_lossless_equals_stock_on_two_ranks",
    "dp_size": _LIFE + "test_two_replicas_answer_as_the_model_alone",
    "mem_fraction_static": _STARTUP + "test_memory_default_leaves_room",
    "context_length": _MANY,
    "disable_overlap_schedule": _MANY,
    "enable_cache_report": _MANY,
    "enable_custom_logit_processor": _MANY,
    "enable_mixed_chunk": _MANY,
    "enable_priority_scheduling": _MANY,
    "enable_return_hidden_states": _MANY,
    "enable_streaming_session": _MANY,
    "max_prefill_tokens": _MANY,
    "num_continuous_decode_steps": _MANY,
    "radix_eviction_policy": _MANY,
    "schedule_policy": _MANY,
    "served_model_name": _MANY,
    "stream_interval": _MANY,
    "quantization": _STARTUP + "test_quantized_weights_resolve",
    "json_model_override_args": _STARTUP + "test_overrides_of_the_config_are_part_of_the_identity",
    "base_gpu_id": _STARTUP + "test_calibration_runs_where_the_server_will",
    "gpu_id_step": _STARTUP + "test_calibration_runs_where_the_server_will",
    "trust_remote_code": _STARTUP + "test_calibration_runs_where_the_server_will",
    "download_dir": _STARTUP + "test_a_model_of_the_hub_is_found_where_the_server_keeps_it",
    "revision": _STARTUP + "test_a_model_of_the_hub_is_found_where_the_server_keeps_it",
    "enable_multimodal": _STARTUP + "test_text_alone_of_a_model_that_also_sees_is_served",
    "disable_prefill_cuda_graph": _STARTUP + "test_prefill_graphs_are_off_before_memory_is_divided",
    "cuda_graph_config": _STARTUP + "test_graphs_of_a_card",
}
"""Field of an option that may have any value that SGLang takes -> the test that starts with it."""


def verdicts() -> dict[str, str]:
    """Field of every option -> "refused", "works" or "no bearing". Raises ValueError where one is listed twice."""
    rows = [(option.field, "refused") for option in REFUSED]
    rows += [(field, "works") for field in WORKS]
    rows += [(field, "no bearing") for group in UNRELATED for field in group.fields]
    found = dict(rows)
    if len(found) != len(rows):
        names = [field for field, _ in rows]
        raise ValueError(f"listed twice: {sorted({name for name in names if names.count(name) > 1})}")
    return found


def markdown() -> str:
    """The page docs/server-options.md."""
    known = verdicts().values()
    counts = {verdict: list(known).count(verdict) for verdict in ("refused", "works", "no bearing")}
    lines = [
        "# Every option of SGLang's server with `--kv-quant oscar`",
        "",
        "Generated from `oscar/support/server_options.py` by `python -m oscar.support`; a test keeps it equal, and fails when "
        "SGLang has an option that is not here.",
        "",
        f"{counts['refused']} options have values that are refused, {counts['works']} work and a test starts with them, "
        f"{counts['no bearing']} have no bearing on the 2-bit cache.",
        "",
        "## Refused",
        "",
        "One sentence and a non-zero exit before the port opens.",
        "",
        "| option | values that work | why not the others, and what to do |",
        "|---|---|---|",
    ]
    for option in REFUSED:
        alternative = option.alternative.format(flag=option.flag)
        lines.append(f"| `{option.flag}` | {_values(option)} | {option.reason}; {alternative} |")
    lines += ["", "## Works", "", "Any value that SGLang takes.", "", "| option | test |", "|---|---|"]
    lines += [f"| `{flag_of(field)}` | `{test}` |" for field, test in WORKS.items()]
    lines += ["", "## No bearing", "", "These do with the 2-bit cache what they do with any other.", ""]
    lines += ["| options | why |", "|---|---|"]
    for group in UNRELATED:
        lines.append(f"| {', '.join(f'`{_shown(field)}`' for field in group.fields)} | {group.reason} |")
    return "\n".join(lines) + "\n"


def _values(option: Option) -> str:
    """The values that work, for the table; "none" where the option has to be left out."""
    named = [str(value) for value in option.allowed if value not in (None, False, [], ())]
    return ", ".join(named) or "none"


def _shown(field: str) -> str:
    """A flag, or the field's own name where no flag sets it."""
    return field if field in ONLY_FIELDS else flag_of(field)


ONLY_FIELDS = frozenset(
    "_radix_eviction_policy_explicitly_set _speculative_draft_quantization_explicitly_set "
    "_swa_full_tokens_ratio_explicitly_set aux_hidden_state_capture custom_sigquit_handler enable_cp_tp_group_sharing "
    "grpc_worker_threads speculative_boundary_reduction stat_loggers uses_mamba_radix_cache watermark_key "
    "watermark_key_b watermark_context_window watermark_mixing_probability watermark_max_probability "
    "watermark_default_enabled watermark_enforce_all".split()
)
"""Fields that have no flag: SGLang or a Python program sets them."""
