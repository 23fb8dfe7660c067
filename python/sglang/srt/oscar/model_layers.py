"""The attention layers of a model: fold their value transforms into the weights, and make their codecs."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.oscar.fold import fold_value_transform
from sglang.srt.oscar.runtime import Runtime

from oscar_kernel import LayerCodec

logger = logging.getLogger(__name__)


@dataclass
class ModelLayer:
    """One attention layer: SGLang's module, and how its rows are made."""

    attention: RadixAttention
    codec: LayerCodec


def find_layers(model: torch.nn.Module, runtime: Runtime, heads: slice, device: str) -> dict[int, ModelLayer]:
    """The attention layers by layer_id. Value transforms are folded into the model's weights where that is exact.

    Args:
        model: SGLang's, weights loaded. heads: KV heads of this rank among the model's. device: of the pool.
    Raises:
        RuntimeError: a layer is not plain causal attention.
    """
    found: dict[int, ModelLayer] = {}
    folded = 0
    for parent in model.modules():
        for attention in parent.children():
            if not isinstance(attention, RadixAttention) or attention.layer_id in found:
                continue
            layer_id = attention.layer_id
            plain = attention.attn_type == AttentionType.DECODER and not attention.is_cross_attention
            if not plain or attention.sliding_window_size > -1:
                raise RuntimeError(f"--kv-quant oscar: layer {layer_id} is not plain causal attention; not supported")
            transforms = runtime.artifact.layers.get(layer_id)  # None: it stays in 16 bits
            fold = transforms is not None and fold_value_transform(parent, transforms.v.transform[heads].double())
            found[layer_id] = ModelLayer(attention, runtime.layer_codec(layer_id, heads, device, fold))
            folded += fold
    logger.info("OSCAR: value transforms folded into the weights of %d of %d layers", folded, len(found))
    return found
