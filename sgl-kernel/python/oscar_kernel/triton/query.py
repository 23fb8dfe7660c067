"""Queries into stored space, in Triton: q' = q @ T^-T of the KV head, scaled into float16.

One small launch a layer instead of a prologue of the attention kernel. A head's matrix is 64 KB at head_dim 128; a decode step
at 100K tokens splits a head into dozens of programs, and each would load and apply it again before it can read its first key:
17 MB from L2 against 58 MB of cache from memory, and a latency in front of every split. Here each matrix is read once for 16
query rows. In a decode step the store's launch does this too.

A prepared row lies as the attention kernels multiply it: plane by plane (see `planes`), zero in the padding, each plane times
the 1/w of the codes it meets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscar_kernel.triton.common import LayerTensors, Rows, with_adjacent_heads

ROWS = 16
"""Query rows of a program."""
DEPTH = 16
"""Rows of the matrix that are in flight at once."""


class Queries(NamedTuple):
    """Prepared queries.

    Args:
        planes: [num_tokens, num_qo_heads, query_width] float16, q' / amax in planes; 0 in the padding, which nobody writes.
        amax: [num_tokens, num_qo_heads] float32, the largest magnitude of each q'.
    """

    planes: Tensor
    amax: Tensor

    @classmethod
    def empty(cls, num_tokens: int, num_qo_heads: int, layer: LayerTensors) -> Queries:
        """Buffers for the queries of layers like this one."""
        return cls(
            torch.zeros(num_tokens, num_qo_heads, layer.k.planes.query_width, dtype=torch.float16, device=layer.device),
            torch.empty(num_tokens, num_qo_heads, dtype=torch.float32, device=layer.device),
        )


class QueryTensors(NamedTuple):
    """Queries to prepare: q, rows of the model. transform: [num_kv_heads, head_dim, head_dim] float32. out:
    written."""

    q: Rows
    transform: Tensor | None
    out: Queries


@triton.jit
def transform_queries(
    block, head, query, num_tokens,
    HEADS: tl.constexpr, KV_GROUP_NUM: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Rows block * ROWS ... of one KV head; query: `QueryTensors`. A row is a (token, query head of the KV head)."""
    r = block * ROWS + tl.arange(0, ROWS)
    live = r < num_tokens * KV_GROUP_NUM
    token = r // KV_GROUP_NUM
    q_head = head * KV_GROUP_NUM + r % KV_GROUP_NUM
    channel = tl.arange(0, K.dim_pad)
    total = tl.zeros((ROWS, K.dim_pad), tl.float32)
    base = token.to(tl.int64) * query.q.stride + q_head * K.dim
    for start in range(0, K.dim, DEPTH):
        d = start + tl.arange(0, DEPTH)
        q = tl.load(query.q.ptr + base[:, None] + d[None, :], mask=live[:, None] & (d < K.dim)[None, :], other=0.0)
        at = (head * K.dim + d)[:, None] * K.dim + channel[None, :]
        t = tl.load(query.transform + at, mask=(d < K.dim)[:, None] & (channel < K.dim)[None, :], other=0.0)
        total = tl.dot(q.to(tl.float32), t, total, input_precision="ieee")
    amax = tl.max(tl.abs(total), axis=1)
    amax = tl.where(amax > 0.0, amax, 1.0)
    row = token.to(tl.int64) * HEADS + q_head
    # Channel -> plane ((s cuts + cut) 2 + odd), element; and the plane's 1/w, which repeats 16, 4, 64.
    s, rest = channel // K.quarter, channel % K.quarter
    at = (((s * K.cuts + rest // K.piece) * 2 + rest % 2) * K.width) + rest % K.piece // 2
    scaled = (total / amax[:, None]).to(tl.float16).to(tl.float32)
    turn = (rest % 2 * 4 + s) % 3
    scaled = scaled * tl.where(turn == 0, 16.0, tl.where(turn == 1, 4.0, 64.0))[None, :]
    at = row[:, None] * (8 * K.cuts * K.width) + at[None, :]
    tl.store(query.out.planes + at, scaled.to(tl.float16), mask=live[:, None] & (channel < K.dim)[None, :])
    tl.store(query.out.amax + row, amax, mask=live)


@triton.jit
def query_kernel(
    query, num_tokens,
    HEADS: tl.constexpr, KV_GROUP_NUM: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of ROWS query rows of one KV head, num_kv_heads)."""
    transform_queries(tl.program_id(0), tl.program_id(1), query, num_tokens, HEADS, KV_GROUP_NUM, ROWS, DEPTH, K)


def query_tensors(q: Tensor, layer: LayerTensors, out: Queries) -> QueryTensors:
    """What the kernels take for q. Raises ValueError for a shape that does not go with the layer."""
    if q.shape[1] % layer.num_kv_heads or q.shape[2] != layer.k.planes.dim:
        raise ValueError(
            f"prepare_queries: expected a multiple of {layer.num_kv_heads} heads of {layer.k.planes.dim}, got q of shape "
            f"{tuple(q.shape)}"
        )
    transform = layer.k.read_transform
    assert transform is not None  # `LayerTensors.check` has refused keys without one
    return QueryTensors(Rows.of(with_adjacent_heads(q)), transform, out)


def query_constants(num_qo_heads: int, layer: LayerTensors) -> dict:
    """Compile-time arguments of `transform_queries`."""
    return {"HEADS": num_qo_heads, "KV_GROUP_NUM": num_qo_heads // layer.num_kv_heads, "ROWS": ROWS}


def row_tiles(q: Tensor, layer: LayerTensors) -> int:
    """Programs that the queries of one KV head take."""
    return triton.cdiv(q.shape[0] * q.shape[1] // layer.num_kv_heads, ROWS)


def prepare_queries(q: Tensor, layer: LayerTensors, out: Queries | None = None) -> Queries:
    """Transform queries and scale each row into [-1, 1].

    Args:
        q: [num_tokens, num_qo_heads, head_dim] any float type, after RoPE.
        layer: of the layer. out: buffers to fill; None: new ones.
    """
    out = Queries.empty(q.shape[0], q.shape[1], layer) if out is None else out
    query_kernel[(row_tiles(q, layer), layer.num_kv_heads)](
        query=query_tensors(q, layer, out),
        num_tokens=q.shape[0],
        **query_constants(q.shape[1], layer),
        DEPTH=DEPTH,
        K=layer.k.planes,
        num_warps=4,
    )
    return out
