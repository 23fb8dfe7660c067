"""The table of what `--kv-quant oscar` works with: features of a model, kinds of hardware. Options are in `server_options`.

Every refused row says why and what to do instead. The GPUs that the kernels know are in `oscar_kernel.architectures`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
