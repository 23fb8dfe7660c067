"""The table of what `--kv-quant oscar` works with: features of a model, options of the server, kinds of hardware.

Every refused row says why and what to do instead. The GPUs that the kernels know are in `oscar_kernel.architectures`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OFF = "serve with --kv-quant none"
ON_CPU = "serve on the CPU with --device cpu, or " + OFF


@dataclass(frozen=True)
class Feature:
    """A property of a model, or a kind of machine.

    Args:
        key: name in code; `oscar.support.detect` has one detector for each refused key of a model.
        title: name in sentences and tables.
        supported: whether `--kv-quant oscar` serves it.
        reason: why not; or, for a supported row, a remark for the table.
        alternative: what to do instead.
        offline: what works with it although serving refuses it: "calibration", "evaluation".
        where: the only circumstances in which it is refused, in words; "": it is refused everywhere.
    """

    key: str
    title: str
    supported: bool
    reason: str = ""
    alternative: str = OFF
    offline: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Option:
    """A server option.

    Args:
        field: name of the `ServerArgs` field.
        flag: how the user writes it.
        allowed: values that work; any other value is refused. Empty: every value works.
        reason: why the others do not.
        alternative: what to do instead; `{flag}` is replaced.
    """

    field: str
    flag: str
    allowed: tuple[Any, ...] = ()
    reason: str = ""
    alternative: str = "drop {flag}, or " + OFF


MODEL_FEATURES = (
    Feature(
        "mha",
        "multi-head and grouped-query attention",
        True,
        "head_dim must be a multiple of 4, on a GPU of 16",
    ),
    Feature("moe", "mixture of experts", True),
    Feature("partial_rotary", "partial rotary embeddings", True),
    Feature("quantized_weights", "quantized weights", True, "the V transform runs online where weights cannot be folded"),
    Feature("encoder_decoder", "an encoder-decoder architecture", False, "cross-attention keeps K and V of the encoder"),
    Feature(
        "not_generative",
        "embedding, reward or classification output",
        False,
        "it does not decode, so a smaller KV cache gains nothing",
    ),
    Feature(
        "multimodal",
        "image, audio or video input",
        False,
        "calibration has seen text only, so the error on other tokens is unknown",
    ),
    Feature("mla", "multi-head latent attention (MLA)", False, "its cache holds a latent vector, not K and V heads"),
    Feature("linear_attention", "linear-attention or Mamba layers", False, "their state is not a KV cache and is not covered"),
    Feature("attention_sinks", "learned attention sinks", False, "the attention kernels have no sink logits yet"),
    Feature(
        "sparse_attention",
        "sparse attention with its own index or compressed cache",
        False,
        "it reads the cache through kernels of its own",
    ),
    Feature(
        "sliding_window",
        "sliding-window attention",
        False,
        "its second KV pool is not in the 2-bit format yet",
        offline=("calibration",),
    ),
    Feature("chunked_attention", "chunked attention", False, "its second KV pool is not in the 2-bit format yet"),
    Feature("shared_kv_layers", "layers that share the K and V of another layer", False, "transforms belong to one layer each"),
    Feature("several_head_sizes", "several head sizes in one model", False, "all layers share one row format"),
    Feature("alibi", "ALiBi position biases", False, "the attention kernels add no position bias"),
    Feature(
        "logit_cap",
        "a soft cap on attention logits",
        False,
        "the kernels apply it and are tested with it, but serving has not been tried with it",
        offline=("calibration", "evaluation"),
    ),
    Feature(
        "unreadable_geometry",
        "an attention geometry that cannot be read",
        False,
        "the config must give the number of KV heads and the head_dim",
    ),
    Feature(
        "head_dim",
        "a head_dim that is not a multiple of 4",
        False,
        "four 2-bit codes share a byte, so head_dim must be a positive multiple of 4 (64, 80, 96, 112, 128, 192, 256, ...)",
    ),
    Feature(
        "head_dim_of_kernels",
        "a head_dim that is not a multiple of 16",
        False,
        "the Triton kernels and the C++ library work on 16 channels at a time",
        "give --oscar-kernels reference (plain PyTorch, slow), or " + ON_CPU,
        where="on a GPU, or with --oscar-kernels triton or cpu",
    ),
)
"""The features that a config can show, the most telling refusal first: a model is refused with the first one that it has."""

_ONE_FORMAT = "both decide the format of the KV cache"
_ONE_READER = "only the oscar backend reads the 2-bit KV cache"
_SPREAD = "the 2-bit pool is not split that way yet"
_TIER = "the other side does not know the 2-bit row format and would read wrong bytes"

SERVER_OPTIONS = (
    Option("tp_size", "--tp-size"),
    Option("dp_size", "--dp-size"),
    Option("page_size", "--page-size"),
    Option("chunked_prefill_size", "--chunked-prefill-size"),
    Option("enable_mixed_chunk", "--enable-mixed-chunk"),
    Option("disable_radix_cache", "--disable-radix-cache"),
    Option("quantization", "--quantization"),
    Option("kv_cache_dtype", "--kv-cache-dtype", ("auto",), _ONE_FORMAT),
    Option("attention_backend", "--attention-backend", (None, "oscar"), _ONE_READER),
    Option("prefill_attention_backend", "--prefill-attention-backend", (None, "oscar"), _ONE_READER),
    Option("decode_attention_backend", "--decode-attention-backend", (None, "oscar"), _ONE_READER),
    Option(
        "speculative_algorithm",
        "--speculative-algorithm",
        (None,),
        "draft tokens are written to the cache and rejected again, which the 16-bit windows do not follow yet (the kernels "
        "themselves take chains of drafts)",
    ),
    Option("disaggregation_mode", "--disaggregation-mode", ("null",), _TIER),
    Option("enable_hierarchical_cache", "--enable-hierarchical-cache", (False,), _TIER),
    Option("hicache_storage_backend", "--hicache-storage-backend", (None,), _TIER),
    Option("enable_unified_cache_external_linker", "--enable-unified-cache-external-linker", (False,), _TIER),
    Option("enable_lmcache", "--enable-lmcache", (False,), _TIER),
    Option("enable_flexkv", "--enable-flexkv", (False,), _TIER),
    Option("enable_hisparse", "--enable-hisparse", (False,), "it replaces the KV pool"),
    Option("enable_unified_memory", "--enable-unified-memory", (False,), "it replaces the KV pool"),
    Option("enable_page_major_kv_layout", "--enable-page-major-kv-layout", (False,), "it replaces the KV pool"),
    Option(
        "prefill_only_disable_kv_cache",
        "--prefill-only-disable-kv-cache",
        (False,),
        "without a KV cache there is nothing to store in 2 bits",
    ),
    Option(
        "model_impl",
        "--model-impl",
        ("auto", "sglang"),
        "only SGLang's own model classes have projections that the V transform can be folded into",
    ),
    Option("nnodes", "--nnodes", (1,), "several machines have not been tried"),
    Option("use_ray", "--use-ray", (False,), "Ray workers have not been tried"),
    Option("pp_size", "--pp-size", (1,), _SPREAD, "use --tp-size, or " + OFF),
    Option("dcp_size", "--dcp-size", (1,), _SPREAD, "use --tp-size, or " + OFF),
    Option("attn_cp_size", "--attn-cp-size", (1,), _SPREAD, "use --tp-size, or " + OFF),
    Option("attn_dp_size", "--attn-dp-size", (1,), _SPREAD, "use --dp-size or --tp-size, or " + OFF),
    Option("enable_dp_attention", "--enable-dp-attention", (False,), _SPREAD, "use --dp-size or --tp-size, or " + OFF),
    Option("enable_prefill_cp", "--enable-prefill-cp", (False,), _SPREAD),
    Option("enable_kv_cache_sharding", "--enable-kv-cache-sharding", (False,), _SPREAD),
    Option("dwdp_size", "--dwdp-size", (1,), _SPREAD),
    Option("enable_lora", "--enable-lora", (None, False), "an adapter on V or O would bypass the folded V transform"),
    Option("lora_paths", "--lora-paths", (None, [], ()), "an adapter on V or O would bypass the folded V transform"),
    Option("enable_two_batch_overlap", "--enable-two-batch-overlap", (False,), "it splits batches behind the backend"),
    Option("enable_pdmux", "--enable-pdmux", (False,), "it runs two attention backends at once"),
    Option("dllm_algorithm", "--dllm-algorithm", (None,), "diffusion decoding rewrites tokens that are already cached"),
    Option("enable_mis", "--enable-mis", (False,), "multi-item scoring needs attention masks of its own"),
    Option("kv_canary", "--kv-canary", ("none",), "it expects 16-bit or 8-bit rows"),
    Option(
        "enable_deterministic_inference",
        "--enable-deterministic-inference",
        (False,),
        "SGLang guarantees it for a fixed list of attention backends",
    ),
    Option("enable_torch_compile", "--enable-torch-compile", (False,), "the backend is not traceable"),
    Option("is_embedding", "--is-embedding", (False,), "an embedding model does not decode"),
)

HARDWARE = (
    Feature("cpu", "CPU (x86-64, plain PyTorch)", True),
    Feature(
        "cuda",
        "NVIDIA GPUs",
        True,
        "Triton kernels, decode in CUDA graphs, on the architectures below; they have not yet run on a card, so every start "
        "compares them with the reference first",
    ),
    Feature(
        "rocm",
        "AMD GPUs (ROCm)",
        False,
        "SGLang's fused RoPE writes 16-bit rows over the pool there without asking",
    ),
    Feature("xpu", "Intel GPUs", False, "it has not been tried there"),
    Feature("npu", "Ascend NPUs", False, "it has not been tried there"),
    Feature("mps", "Apple GPUs", False, "it has not been tried there"),
    Feature("musa", "Moore Threads GPUs", False, "it has not been tried there"),
    Feature("hpu", "Gaudi", False, "it has not been tried there"),
)
