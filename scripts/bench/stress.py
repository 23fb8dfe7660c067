"""Variants of a model that compute the same and whose keys and values are as hard on two bits as those of large models.

A small model has mild keys and values, so every method looks good on it. What makes large ones hard can be built in without
changing an output, by moving factors between weights that cancel:

    keys     k_norm * f, q_norm / f on both channels of a RoPE pair: RoPE turns a pair within its plane, so the factor passes
    values   v_proj of a KV head times M, o_proj of its query heads times M^-1, M any invertible matrix
    signs    minus on both channels of a pair, in k_proj of one KV head and q_proj of its query heads: a half turn of the plane,
             which commutes with RoPE, norms and their weights

A constant added to every key would also cancel, in the softmax, but these models cannot hold one: QK-norm divides by the
row's length after any bias, and RoPE turns what comes before it with the position. `k-offset` therefore makes large what
offset the keys have: the pairs whose mean after RoPE is largest against their spread (the slowly turning ones).

    import stress
    stress.write("outliers", "path/to/model", "path/to/variant")      # a folder that Transformers and SGLang load
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from oscar.calibration.run_transformers import LayerCapture, capturing
from oscar.format.linalg import inverses

FACTOR = 16.0
"""Of outlier pairs and channels. A power of two: the factors cancel to the last bit."""
PAIRS = 4
"""RoPE pairs of the keys made large, in every layer."""
V_CHANNELS = 4
"""Channels of the values made large, in every KV head."""
CONDITION = 16.0
"""Condition number of the value maps of `unrelated-heads`."""
TOLERANCE = 1e-3
"""Largest change of a float32 logit that passes for rounding."""


def k_outliers(model, passage: Tensor) -> None:
    """Large keys in PAIRS random RoPE pairs of each layer."""
    generator = torch.Generator().manual_seed(0)
    for attention in _attentions(model):
        _scale_pairs(attention, torch.randperm(attention.head_dim // 2, generator=generator)[:PAIRS])


def v_outliers(model, passage: Tensor) -> None:
    """Large values in V_CHANNELS random channels of each KV head."""
    generator = torch.Generator().manual_seed(1)
    for attention in _attentions(model):
        factors = torch.ones(_num_kv_heads(attention), attention.head_dim, dtype=torch.float64)
        for head in factors:
            head[torch.randperm(attention.head_dim, generator=generator)[:V_CHANNELS]] = FACTOR
        _map_values(attention, torch.diag_embed(factors))


def outliers(model, passage: Tensor) -> None:
    """Large keys and large values."""
    k_outliers(model, passage)
    v_outliers(model, passage)


def k_offset(model, passage: Tensor) -> None:
    """Large keys in the PAIRS pairs of each layer whose mean over the passage is largest against their spread."""
    chosen: dict[int, Tensor] = {}

    def observe(capture: LayerCapture) -> None:
        k = capture.k[0].double()  # [num_kv_heads, num_tokens, head_dim]
        mean, spread = (x.square().unflatten(-1, (2, -1)).sum(-2) for x in (k.mean(1), k.std(1)))
        chosen[capture.layer_id] = (mean / spread).amax(0).topk(PAIRS).indices

    with capturing(model, observe) as run:
        run(passage.unsqueeze(0))
    for layer_id, attention in enumerate(_attentions(model)):
        _scale_pairs(attention, chosen[layer_id])


def unrelated_heads(model, passage: Tensor) -> None:
    """KV heads of a layer with nothing in common: values of each in an oblique random basis, keys with random signs."""
    generator = torch.Generator().manual_seed(2)
    for attention in _attentions(model):
        d, num_kv_heads = attention.head_dim, _num_kv_heads(attention)
        turns = torch.linalg.qr(torch.randn(2, num_kv_heads, d, d, generator=generator, dtype=torch.float64)).Q
        stretch = torch.logspace(-0.5, 0.5, d, base=CONDITION, dtype=torch.float64)
        _map_values(attention, turns[0] * stretch @ turns[1])
        sign = torch.randint(0, 2, (num_kv_heads, d // 2), generator=generator) * 2 - 1
        sign = torch.cat((sign, sign), dim=1).to(attention.k_proj.weight.dtype)
        group = attention.q_proj.out_features // attention.k_proj.out_features
        attention.k_proj.weight *= sign.flatten().unsqueeze(1)
        attention.q_proj.weight *= sign.repeat_interleave(group, 0).flatten().unsqueeze(1)


def plain(model, passage: Tensor) -> None:
    """The model as it is."""


VARIANTS: dict[str, Callable[[object, Tensor], None]] = {
    "plain": plain,
    "k-outliers": k_outliers,
    "v-outliers": v_outliers,
    "outliers": outliers,
    "k-offset": k_offset,
    "unrelated-heads": unrelated_heads,
}


def apply(name: str, model, passage: Tensor) -> float:
    """Turn a model into a variant, in place.

    Args:
        name: in VARIANTS.
        model: a Qwen3 model of the library in float32; any model for "plain".
        passage: [num_tokens] int64 of running text, to find offsets in and to compare logits on.
    Returns:
        The largest change of a logit over the passage.
    Raises:
        ValueError: no such variant; or, for any but "plain", not a float32 Qwen3 model without projection biases.
        RuntimeError: the outputs changed by more than TOLERANCE.
    """
    if name not in VARIANTS:
        raise ValueError(f"stress: variant must be one of {', '.join(VARIANTS)}, got {name!r}")
    if name == "plain":
        return 0.0
    kind, dtype = getattr(model.config, "model_type", None), model.dtype
    if kind != "qwen3" or dtype != torch.float32 or model.config.attention_bias:
        raise ValueError(f"stress: expected a Qwen3 model in float32 without projection biases, got {kind} in {dtype}")
    with torch.inference_mode():
        before = model(input_ids=passage.unsqueeze(0), use_cache=False).logits
    with torch.no_grad():
        VARIANTS[name](model, passage)
    with torch.inference_mode():
        change = float((model(input_ids=passage.unsqueeze(0), use_cache=False).logits - before).abs().max())
    if not change <= TOLERANCE:
        raise RuntimeError(f"stress: {name} was to change no output, a logit moved by {change:g}")
    return change


def write(name: str, source: str | Path, folder: str | Path) -> float:
    """Write a variant as a model folder, weights in float32, everything else as in the source.

    Args:
        name: in VARIANTS.
        source: folder of a Qwen3 model with a tokenizer.
        folder: made if missing.
    Returns, Raises: as `apply`.
    """
    from transformers import AutoConfig, AutoTokenizer

    from oscar.calibration.load_model import load_model
    from oscar.evaluation.needles import held_out_sentences

    source, folder = Path(source), Path(folder)
    model = load_model(source, AutoConfig.from_pretrained(source), "float32", "cpu")
    text = " ".join(held_out_sentences()[:120])
    passage = torch.tensor(AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False)["input_ids"][:1024])
    change = apply(name, model, passage)
    model.save_pretrained(folder)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model") and file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    # The source's own config: the library writes RoPE settings under names that other loaders may not know.
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"dtype": "float32"} | ({"torch_dtype": "float32"} if "torch_dtype" in config else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return change


def _attentions(model) -> list:
    return [layer.self_attn for layer in model.model.layers]


def _num_kv_heads(attention) -> int:
    return attention.k_proj.out_features // attention.head_dim


def _scale_pairs(attention, pairs: Tensor) -> None:
    """Keys FACTOR times as large in these RoPE pairs, queries as much smaller."""
    channels = torch.cat((pairs, pairs + attention.head_dim // 2))
    attention.k_norm.weight[channels] *= FACTOR
    attention.q_norm.weight[channels] /= FACTOR


def _map_values(attention, maps: Tensor) -> None:
    """Values of KV head h become v @ maps[h]; the output projection undoes it. maps [num_kv_heads, d, d] float64."""
    num_kv_heads, d = maps.shape[:2]
    v, o = attention.v_proj.weight, attention.o_proj.weight
    v.copy_(torch.einsum("hdn,hde->hen", v.double().view(num_kv_heads, d, -1), maps).flatten(0, 1))
    per_head = o.double().view(o.shape[0], num_kv_heads, -1, d)
    o.copy_(torch.einsum("nhgd,hed->nhge", per_head, inverses(maps)).flatten(1))
