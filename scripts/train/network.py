"""The embedded model as it is trained: the maths of Qwen3 over flat tokens, on a CPU."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from settings import (
    HEAD_DIM,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    MAX_SPAN,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_QO_HEADS,
    RMS_EPS,
    ROPE_THETA,
    VOCAB_SIZE,
)
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm over the last axis, in float32 inside."""
    scaled = x.float()
    scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + RMS_EPS)
    return weight * scaled.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [num_tokens, num_heads, head_dim], halves paired; cos and sin are [num_tokens, head_dim / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def before_attention(x, norm, q_w, k_w, v_w, q_norm, k_norm, cos, sin):
    """Norm, projections, QK-norm and RoPE of all tokens, [num_tokens, hidden] -> q, k, v [num_tokens, heads, 128]."""
    h = rms_norm(x, norm)
    q = rotate(rms_norm(F.linear(h, q_w).view(-1, NUM_QO_HEADS, HEAD_DIM), q_norm), cos, sin)
    k = rotate(rms_norm(F.linear(h, k_w).view(-1, NUM_KV_HEADS, HEAD_DIM), k_norm), cos, sin)
    return q, k, F.linear(h, v_w).view(-1, NUM_KV_HEADS, HEAD_DIM)


def after_attention(x, attended, o_w, norm, gate_w, up_w, down_w):
    """Output projection and MLP, with their residuals."""
    x = x + F.linear(attended, o_w)
    h = rms_norm(x, norm)
    return x + F.linear(F.silu(F.linear(h, gate_w)) * F.linear(h, up_w), down_w)


def attend_written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Causal attention as two batched products; twice as fast as SDPA's CPU kernel for rows of at most 512 tokens."""
    length = mask.shape[0]
    group = NUM_QO_HEADS // NUM_KV_HEADS
    num_rows = q.shape[0] // length
    q = q.view(num_rows, length, NUM_KV_HEADS, group, HEAD_DIM).permute(0, 2, 3, 1, 4)
    q = q.reshape(-1, group * length, HEAD_DIM)
    k = k.view(num_rows, length, NUM_KV_HEADS, HEAD_DIM).permute(0, 2, 3, 1).reshape(-1, HEAD_DIM, length)
    v = v.view(num_rows, length, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2).reshape(-1, length, HEAD_DIM)
    scores = torch.bmm(q, k).view(-1, group, length, length).float() * HEAD_DIM**-0.5 + mask
    weights = scores.softmax(-1).to(v.dtype).view(-1, group * length, length)
    out = torch.bmm(weights, v).view(num_rows, NUM_KV_HEADS, group, length, HEAD_DIM)
    return out.permute(0, 3, 1, 2, 4).reshape(-1, NUM_QO_HEADS * HEAD_DIM)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Causal attention through SDPA, for the longer rows."""
    q, k, v = (t.view(-1, length, t.shape[1], HEAD_DIM).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(-1, NUM_QO_HEADS * HEAD_DIM)


def token_losses(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each token, [num_tokens] float32, through the tied head."""
    return F.cross_entropy(F.linear(rms_norm(x, norm), embedding).float(), targets, reduction="none")


class TrainingModel:
    """The Qwen3 maths over flat tokens: float32 master weights, a bfloat16 copy that computes, HF's parameter names."""

    LAYER_NAMES = (
        "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.q_norm self_attn.k_norm "
        "self_attn.o_proj post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj"
    ).split()

    def __init__(self, seed: int, compiled: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        q_size, kv_size = NUM_QO_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
        shapes = {
            "self_attn.q_proj": (q_size, HIDDEN_SIZE),
            "self_attn.k_proj": (kv_size, HIDDEN_SIZE),
            "self_attn.v_proj": (kv_size, HIDDEN_SIZE),
            "self_attn.o_proj": (HIDDEN_SIZE, q_size),
            "mlp.gate_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            "mlp.up_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            "mlp.down_proj": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
        self.master: dict[str, Tensor] = {
            "model.embed_tokens.weight": torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) * 0.02
        }
        for layer in range(NUM_LAYERS):
            for name in self.LAYER_NAMES:
                if name in shapes:
                    std = 0.02 / math.sqrt(2 * NUM_LAYERS) if name.endswith(("o_proj", "down_proj")) else 0.02
                    weight = torch.randn(shapes[name], generator=generator) * std
                else:
                    weight = torch.ones(HEAD_DIM if name.endswith(("q_norm", "k_norm")) else HIDDEN_SIZE)
                self.master[f"model.layers.{layer}.{name}.weight"] = weight
        self.master["model.norm.weight"] = torch.ones(HIDDEN_SIZE)
        self.weights = {name: w.bfloat16().requires_grad_() for name, w in self.master.items()}
        inverse = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angles = torch.arange(MAX_SPAN).float()[:, None] * inverse
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.masks: dict[int, Tensor] = {}
        self.eager = (before_attention, attend_written_out, after_attention, token_losses)
        self.parts = tuple(torch.compile(part, dynamic=False) for part in self.eager) if compiled else self.eager

    def num_params(self) -> int:
        """Parameters, the tied head counted once."""
        return sum(w.numel() for w in self.master.values())

    def copy_master(self) -> None:
        """Round the master weights into the computing copy."""
        with torch.no_grad():
            for name, weight in self.master.items():
                self.weights[name].copy_(weight)

    def losses(self, ids: Tensor, targets: Tensor, positions: Tensor, length: int, *, eager: bool = False) -> Tensor:
        """Cross-entropy of every token, [num_tokens] float32; rows of `length` tokens lie one after the other."""
        before, written_out, after, head = self.eager if eager else self.parts
        hidden = self._hidden(ids, positions, length, before, written_out, after)
        return head(hidden, self.weights["model.norm.weight"], self.weights["model.embed_tokens.weight"], targets)

    def logits(self, ids: Tensor, length: int) -> Tensor:
        """Logits of every token, eagerly, [num_tokens, vocab] bfloat16."""
        positions = torch.arange(length).repeat(len(ids) // length)
        hidden = self._hidden(ids, positions, length, *self.eager[:3])
        return F.linear(rms_norm(hidden, self.weights["model.norm.weight"]), self.weights["model.embed_tokens.weight"])

    def _hidden(self, ids: Tensor, positions: Tensor, length: int, before, written_out, after) -> Tensor:
        if length not in self.masks:
            above = torch.full((length, length), float("-inf")).triu(1) if length <= 512 else torch.empty(0)
            self.masks[length] = above  # SDPA needs none
        cos, sin = self.cos[positions], self.sin[positions]
        x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        for layer in range(NUM_LAYERS):
            w = [self.weights[f"model.layers.{layer}.{name}.weight"] for name in self.LAYER_NAMES]
            q, k, v = before(x, *w[:6], cos, sin)
            attended = written_out(q, k, v, self.masks[length]) if length <= 512 else attend_sdpa(q, k, v, length)
            x = after(x, attended, *w[6:])
        return x
