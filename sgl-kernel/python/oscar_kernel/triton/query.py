"""Queries into stored space, in Triton: q' = q @ T^-T of the KV head, scaled into float16.

One small launch a layer instead of a prologue of the attention kernel. A head's matrix is 64 KB at head_dim 128; a decode step
at 100K tokens splits a head into dozens of programs, and each would load and apply it again before it can read its first key:
17 MB from L2 against 58 MB of cache from memory, and a latency in front of every split. Here each matrix is read once for 16
query rows.

A prepared row lies as the attention kernels multiply it: plane by plane (see triton_tiles), zero in the padding, each plane
times the 1/w of the codes it meets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar_kernel.triton.common import LayerTensors, next_power_of_2, with_adjacent_heads

ROWS = 16
DEPTH = 16


@triton.jit
def transform_queries(
    block, head, q_ptr, q_stride, num_tokens, t_ptr, out_ptr, amax_ptr,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr, CUTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Rows block * ROWS ... of one KV head. A row is a (token, query head of the KV head)."""
    r = block * ROWS + tl.arange(0, ROWS)
    live = r < num_tokens * RATIO
    token = r // RATIO
    q_head = head * RATIO + r % RATIO
    channel = tl.arange(0, DIM_PAD)
    total = tl.zeros((ROWS, DIM_PAD), tl.float32)
    base = token.to(tl.int64) * q_stride + q_head * DIM
    for start in range(0, DIM, DEPTH):
        d = start + tl.arange(0, DEPTH)
        q = tl.load(q_ptr + base[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
        at = (head * DIM + d)[:, None] * DIM + channel[None, :]
        t = tl.load(t_ptr + at, mask=(d < DIM)[:, None] & (channel < DIM)[None, :], other=0.0)
        total = tl.dot(q.to(tl.float32), t, total, input_precision="ieee")
    amax = tl.max(tl.abs(total), axis=1)
    amax = tl.where(amax > 0.0, amax, 1.0)
    row = token.to(tl.int64) * HEADS + q_head
    # Channel -> plane ((s CUTS + cut) 2 + odd), element; and the plane's 1/w, which repeats 16, 4, 64.
    s, rest = channel // QUARTER, channel % QUARTER
    at = (((s * CUTS + rest // PIECE) * 2 + rest % 2) * WIDTH) + rest % PIECE // 2
    scaled = (total / amax[:, None]).to(tl.float16).to(tl.float32)
    if not LEVELS:
        turn = (rest % 2 * 4 + s) % 3
        scaled = scaled * tl.where(turn == 0, 16.0, tl.where(turn == 1, 4.0, 64.0))[None, :]
    at = row[:, None] * (8 * CUTS * WIDTH) + at[None, :]
    tl.store(out_ptr + at, scaled.to(tl.float16), mask=live[:, None] & (channel < DIM)[None, :])
    tl.store(amax_ptr + row, amax, mask=live)


@triton.jit
def query_kernel(
    q_ptr, q_stride, num_tokens, t_ptr, out_ptr, amax_ptr,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr, CUTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of ROWS query rows of one KV head, num_kv_heads)."""
    transform_queries(
        tl.program_id(0), tl.program_id(1), q_ptr, q_stride, num_tokens, t_ptr, out_ptr, amax_ptr,
        HEADS, RATIO, DIM, DIM_PAD, DEPTH, ROWS, QUARTER, PIECE, WIDTH, CUTS, LEVELS,
    )  # fmt: skip


def query_constants(layer: LayerTensors, heads: int) -> tuple:
    """HEADS ... LEVELS of `query_kernel`."""
    k = layer.k
    ratio = heads // layer.q_transform.shape[0]
    shape = k.quarter, k.piece, k.width, k.cuts
    return heads, ratio, k.dim, next_power_of_2(k.dim), DEPTH, ROWS, *shape, layer.k_levels is not None


def query_buffers(num_tokens: int, heads: int, layer: LayerTensors) -> tuple[Tensor, Tensor]:
    """Where prepared queries go; zero in the padding of planes, which nobody writes."""
    device = layer.q_transform.device
    return (
        torch.zeros(num_tokens, heads, layer.k.query_width, dtype=torch.float16, device=device),
        torch.empty(num_tokens, heads, dtype=torch.float32, device=device),
    )


def check_queries(q: Tensor, layer: LayerTensors) -> Tensor:
    """q with adjacent heads. Raises ValueError for a shape that does not go with the layer."""
    num_kv_heads = layer.q_transform.shape[0]
    if q.shape[1] % num_kv_heads or q.shape[2] != layer.k.dim:
        raise ValueError(
            f"prepare_queries: expected a multiple of {num_kv_heads} heads of {layer.k.dim}, got q of shape {tuple(q.shape)}"
        )
    return with_adjacent_heads(q)


def prepare_queries(q: Tensor, layer: LayerTensors, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Transform queries and scale each row into [-1, 1].

    Args:
        q: [num_tokens, num_qo_heads, head_dim] any float type, after RoPE.
        layer: of the layer. out: buffers to fill, as returned; None: new ones.
    Returns:
        q' / amax in planes [num_tokens, num_qo_heads, query_width] float16, and amax [num_tokens, num_qo_heads] float32.
    """
    num_tokens, heads = q.shape[:2]
    q = check_queries(q, layer)
    out = query_buffers(num_tokens, heads, layer) if out is None else out
    num_kv_heads = layer.q_transform.shape[0]
    query_kernel[(triton.cdiv(num_tokens * heads // num_kv_heads, ROWS), num_kv_heads)](
        q, q.stride(0), num_tokens, layer.q_transform, *out, *query_constants(layer, heads), num_warps=4
    )
    return out
