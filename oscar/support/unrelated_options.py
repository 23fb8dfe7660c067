"""The options of SGLang's server that have no bearing on the 2-bit cache, by the one reason that they share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unrelated:
    """Options of one reason.

    Args:
        reason: why they do with the 2-bit cache what they do with any other.
        fields: of `ServerArgs`.
    """

    reason: str
    fields: tuple[str, ...]


def _group(reason: str, fields: str) -> Unrelated:
    return Unrelated(reason, tuple(fields.split()))


def _part_of(option: str, fields: str) -> Unrelated:
    return _group(f"part of `{option}`, which is refused", fields)


UNRELATED = (
    _group(
        "text becomes token ids, and token ids text, outside the model",
        """tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num skip_tokenizer_init
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode""",
    ),
    _group(
        "the HTTP or gRPC server in front of the model",
        """host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads grpc_response_timeout_secs sidecar
        sidecar_args smg_http_sidecar_port enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size
        ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
        enable_http_worker_reuseport file_storage_path enable_response_store tool_server batch_notify_size
        skip_server_warmup warmups weight_version uvicorn_access_log_exclude_prefixes""",
    ),
    _group(
        "what a request says and how its answer is written",
        """chat_template trust_request_chat_template hf_chat_template_name completion_template return_input_ids
        return_output_ids reasoning_parser default_chat_template_kwargs enable_strict_thinking tool_call_parser
        stream_response_default_include_usage incremental_streaming_output""",
    ),
    _group(
        "the next token is drawn from logits, after attention",
        """sampling_backend sampling_defaults preferred_sampling_params grammar_backend constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt disable_outlines_disk_cache
        sampling_mask_max_tokens enable_fp32_lm_head enable_watermark watermark_config watermark_key watermark_key_b
        watermark_context_window watermark_mixing_probability watermark_max_probability watermark_default_enabled
        watermark_enforce_all""",
    ),
    _group(
        "which request runs when; every request keeps its own windows whatever runs beside it",
        """max_queued_requests prefill_decode_interval prefill_decode_interval_min_bs prefill_max_requests
        disable_priority_preemption default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy scheduler_recv_interval min_free_slots_delay
        allow_auto_truncate load_balance_method num_reserved_decode_tokens""",
    ),
    _group(
        "which finished prefix leaves the radix cache, or is not put there",
        """radix_eviction_policy_config _radix_eviction_policy_explicitly_set enable_session_radix_cache
        strip_thinking_cache""",
    ),
    _group(
        "messages, figures and dumps; what is dumped of values is in the basis of the 2-bit cache",
        """log_level_http log_requests log_requests_level log_requests_format log_requests_target crash_dump_folder
        show_time_cost enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
        bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
        kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
        export_metrics_to_file export_metrics_to_file_dir stat_loggers enable_layerwise_nvtx_marker
        enable_profile_cuda_graph debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
        msprobe_dump_config return_hidden_states_mode""",
    ),
    _group(
        "processes: their ports, timeouts, signals and cores",
        """nccl_port dist_timeout dist_init_addr node_rank watchdog_timeout soft_watchdog_timeout sleep_on_idle
        custom_sigquit_handler numa_node gc_threshold engine_info_bootstrap_port pre_warm_nccl""",
    ),
    _group(
        "workers wait before they take memory; an artifact that is missing is made before that, so make it beforehand",
        "gated_launch_port",
    ),
    _group(
        "sums between ranks, after attention",
        """enable_p2p_check enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
        boundary_reduction enable_quant_communications enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend disable_attn_tp_gather""",
    ),
    _group(
        "products of activations and weights; K and V are encoded after them",
        """enable_tf32_matmul fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend
        disable_flashinfer_autotune flashinfer_autotune_skip_ops enable_fused_qk_norm_rope""",
    ),
    _group(
        "weights in another format, as with `--quantization`: where they cannot be folded, the V transform runs online",
        """modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
        quantize_and_serve""",
    ),
    _group(
        "how weight files are read; the transform is folded when they are in place",
        """model_loader_extra_config weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load model_checksum delete_ckpt_after_loading""",
    ),
    _group(
        "experts and dense layers, which come after attention",
        """ep_size moe_dp_size moe_a2a_backend enable_w4a4_mxfp4_megamoe deepep_v2_mode moe_runner_backend
        flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode deepep_dispatcher_output_dtype ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config moe_dense_tp_size
        enable_elastic_expert_backup enable_waterfill disable_flashinfer_cutlass_moe_fp4_allgather
        disable_shared_experts_fusion enforce_shared_experts_fusion enable_shared_experts_attn_tp shared_experts_tp_size
        enable_single_batch_overlap enable_fused_moe_sum_all_reduce enable_return_routed_experts
        flashinfer_a2a_dispatch_type enable_paged_experts paged_experts_num_resident kt_weight_path kt_method kt_cpuinfer
        kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token mooncake_ib_device""",
    ),
    _group(
        "CUDA graphs of decode: which sizes there are, and whether there are any",
        """cuda_graph_max_bs_decode cuda_graph_bs_decode disable_decode_cuda_graph disable_cuda_graph
        disable_cuda_graph_padding enable_cudagraph_gc""",
    ),
    _group(
        "CUDA graphs of prefill, which are off",
        """cuda_graph_max_bs_prefill cuda_graph_bs_prefill cuda_graph_prefill_max_context cuda_graph_max_seq_len_prefill""",
    ),
    _group(
        "attention kernels other than ours, which are refused",
        """enable_lean_attention triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size flashinfer_mla_disable_ragged prefill_kv_cache_dequant_dtype""",
    ),
    _group(
        "images, audio and video, which no served model takes",
        """mm_attention_backend enable_precise_embedding_interpolation enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num
        allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes
        limit_mm_data_per_request enable_mm_global_cache image_processor_backend mm_global_cache_backend
        disable_fast_image_processor mm_feature_transport asr_max_buffer_seconds asr_max_concurrent_sessions""",
    ),
    _group("whether a model that also sees counts as one; SGLang is asked before it is refused", "language_model_only"),
    _group(
        "models with latent or sparse attention, which are refused",
        """c128_page_size disable_chunked_prefix_cache enable_dsa_cache_layer_split enable_attn_tp_input_scattered
        dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
        enable_deepseek_v4_fp4_indexer dsv4_attn_backend enable_return_indexer_topk dsa_triton_union enable_dsa_fused_indexer
        qsa_indexer_dtype enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay swa_prefix_tails
        ple_offload_embedding ple_offload_backend ple_offload_dir""",
    ),
    _group(
        "models with a second KV pool for sliding windows, which are refused",
        "swa_full_tokens_ratio disable_hybrid_swa_memory _swa_full_tokens_ratio_explicitly_set",
    ),
    _group(
        "models with linear-attention or Mamba layers, which are refused",
        """mamba_backend max_mamba_cache_size mamba_ssm_dtype mamba_max_states_per_path enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds mamba_full_memory_ratio mamba_radix_cache_strategy uses_mamba_radix_cache
        mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend linear_attn_decode_backend
        linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm linear_replayssm_cache_len
        enable_linear_replayssm_spec""",
    ),
    _group(
        "AMD and Apple GPUs, which are refused",
        """enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode
        mlx_enable_sampling""",
    ),
    _part_of(
        "--speculative-algorithm",
        """uno_lora_path speculative_draft_model_path speculative_draft_model_revision speculative_draft_load_format
        speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size
        speculative_dspark_block_size speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_token_map speculative_attention_mode
        speculative_draft_attention_backend speculative_dsa_topk_backend speculative_draft_kv_cache_dtype
        speculative_draft_window_size speculative_moe_runner_backend speculative_moe_a2a_backend
        speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization
        _speculative_draft_quantization_explicitly_set enable_multi_layer_eagle speculative_adaptive
        speculative_adaptive_config speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
        speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size speculative_boundary_reduction
        speculative_use_block_verification speculative_draft_sink_size decrypted_draft_config_file
        enable_draft_weights_cpu_backup enable_return_aux_hidden_states aux_hidden_state_capture
        return_aux_hidden_state_layer_ids""",
    ),
    _part_of(
        "--decoupled-spec-role",
        "decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank spec_trace_dir",
    ),
    _part_of(
        "--enable-hierarchical-cache",
        """hicache_host_memory_mode hicache_host_memory_fraction hicache_ratio hicache_size hicache_write_policy
        hicache_io_backend hicache_mem_layout hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts""",
    ),
    _part_of(
        "--enable-unified-cache-external-linker",
        "unified_cache_external_linker_backend unified_cache_external_linker_config enable_linker_mla_dedup",
    ),
    _part_of("--enable-hisparse", "hisparse_config"),
    _part_of("--enable-lmcache", "lmcache_config_file"),
    _part_of("--enable-flexkv", "flexkv_config_file"),
    _part_of(
        "--disaggregation-mode",
        """disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup disaggregation_decode_extra_slots disaggregation_decode_polling_interval
        optimistic_prefill_attempts disaggregation_enable_kv_checksum disaggregation_decode_host_receive_threshold
        disaggregation_decode_allocation_policy""",
    ),
    _part_of(
        "--language-only",
        """encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder""",
    ),
    _part_of(
        "--enable-lora",
        """enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch
        lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras lora_use_virtual_experts
        lora_strict_loading lora_drain_wait_threshold""",
    ),
    _part_of("--pp-size", "enable_dynamic_chunking pp_async_batch_depth pp_max_micro_batch_size"),
    _part_of("--dcp-size", "dcp_comm_backend dcp_replicate_q_proj"),
    _part_of("--enable-prefill-cp", "cp_strategy enable_cp_decode_attn_tp enable_cp_tp_group_sharing"),
    _part_of(
        "--attn-dp-size",
        """enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all enable_dense_mlp_attn_tp
        enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms""",
    ),
    _part_of("--enable-layernorm-sp", "enable_megamoe_for_layernorm_sp"),
    _part_of("--elastic-ep-backend", "ep_join_rank_offset elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout"),
    _part_of("--enable-two-batch-overlap", "tbo_token_distribution_threshold"),
    _part_of("--enable-pdmux", "pdmux_config_path sm_group_num"),
    _part_of("--dllm-algorithm", "dllm_algorithm_config dllm_fdfo"),
    _part_of("--enable-torch-compile", "enable_torch_compile_debug_mode torch_compile_max_bs"),
    _part_of("--offload-group-size", "offload_num_in_group offload_prefetch_step offload_mode"),
    _part_of("--kv-canary", "kv_canary_real_data kv_canary_sweep_interval"),
    _part_of("--weight-cache-mode", "weight_cache_socket weight_cache_timeout"),
    _part_of(
        "--load-format",
        """rl_quant_profile remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend modelexpress_config""",
    ),
)
"""Groups of options, no option twice."""
