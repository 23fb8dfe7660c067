"""Streaming statistics: each formula worked by hand, and any chunking gives the same sums."""

import pytest
import torch

from oscar.errors import OscarError
from oscar.methods.statistics import MomentSums, SurrogateSums, output_moment, pool_query_group

# Three tokens, four query heads over two KV heads, head_dim 4 (V too).
Q = torch.tensor(
    [
        [[1, 0, 0, 0], [0, 2, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]],
        [[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0]],
        [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 3], [1, 0, 0, 0]],
    ],
    dtype=torch.float64,
)
K = torch.tensor(
    [
        [[1, 0, 0, 0], [0, 0, 1, 0]],
        [[0, 1, 1, 0], [1, 1, 0, 0]],
        [[2, 0, 0, 1], [0, 0, 0, 2]],
    ],
    dtype=torch.float64,
)
V = torch.tensor(
    [
        [[1, 2, 0, 0], [0, 1, 0, 0]],
        [[0, 0, 1, 0], [1, 0, 0, 1]],
        [[1, 0, 0, 1], [0, 0, 3, 0]],
    ],
    dtype=torch.float64,
)
# By hand, KV head 0 has the six query rows (1000) (0200) (0100) (1010) (1001) (0000); head 1 the other six.
C_Q = (
    torch.tensor(
        [
            [[3, 0, 1, 1], [0, 5, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
            [[2, 1, 0, 0], [1, 2, 0, 0], [0, 0, 4, 0], [0, 0, 0, 10]],
        ],
        dtype=torch.float64,
    )
    / 6
)


def causal_output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(S V [num_tokens, num_qo_heads, dim], S [num_qo_heads, num_tokens, num_tokens]) by the definition."""
    group = q.shape[1] // k.shape[1]
    s = torch.zeros(q.shape[1], len(q), len(k), dtype=torch.float64)
    for h in range(q.shape[1]):
        for i in range(len(q)):
            weights = torch.stack([torch.exp(q[i, h] @ k[j, h // group] / 2) for j in range(i + 1)])
            s[h, i, : i + 1] = weights / weights.sum()
    output = torch.stack([s[h] @ v[:, h // group] for h in range(q.shape[1])], 1)
    return output, s


def moments(q, k, v, output, chunks=(3,)):
    sums = MomentSums(0)
    for parts in zip(*(x.split(chunks) for x in (q, k, v, output)), strict=True):
        sums.add(*parts)
    return sums.finish()


def test_by_hand():
    output, s = causal_output(Q, K, V)
    found = moments(Q, K, V, output)
    assert found.num_tokens == 3
    torch.testing.assert_close(found.q_moment, C_Q, atol=1e-10, rtol=0)

    k_moment = torch.zeros(2, 4, 4, dtype=torch.float64)
    k_moment[0] = torch.tensor([[5, 0, 0, 2], [0, 1, 1, 0], [0, 1, 1, 0], [2, 0, 0, 1]])
    k_moment[1] = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 4]])
    torch.testing.assert_close(found.k_moment, k_moment / 3, atol=1e-10, rtol=0)
    k_mean = torch.tensor([[3, 1, 1, 1], [1, 1, 1, 2]], dtype=torch.float64) / 3
    torch.testing.assert_close(found.k_mean, k_mean, atol=1e-10, rtol=0)

    v_moment = torch.zeros(2, 4, 4, dtype=torch.float64)
    v_moment[0] = torch.tensor([[2, 2, 0, 1], [2, 4, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]])
    v_moment[1] = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 9, 0], [1, 0, 0, 1]])
    torch.testing.assert_close(found.v_moment, v_moment / 3, atol=1e-10, rtol=0)
    v_mean = torch.tensor([[2, 2, 1, 1], [1, 1, 3, 1]], dtype=torch.float64) / 3
    torch.testing.assert_close(found.v_mean, v_mean, atol=1e-10, rtol=0)

    # The paper's target as the paper writes it, V^T S^T S V over a group of two query heads of three rows each.
    for head in range(2):
        expected = sum(V[:, head].T @ s[h].T @ s[h] @ V[:, head] for h in (2 * head, 2 * head + 1)) / 6
        torch.testing.assert_close(found.v_score_moment[head], expected, atol=1e-10, rtol=0)


def test_surrogate_by_hand():
    sums = SurrogateSums(0, C_Q)
    sums.add(K, V)
    # w_t = k C_q k^T, head 0: (1000) -> 3, (0110) -> 5 + 1, (2001) -> 12 + 4 + 1, all over 6; head 1: 4, 2 + 2 + 2, 40.
    w = torch.tensor([[3, 6, 17], [4, 6, 40]], dtype=torch.float64)
    for head in range(2):
        expected = sum(w[head, t] * torch.outer(V[t, head], V[t, head]) for t in range(3)) / w[head].sum()
        torch.testing.assert_close(sums.finish()[head], expected, atol=1e-10, rtol=0)
    assert (sums.finish()[0] - sums.finish()[0].T).abs().max() == 0


def test_another_weighting_is_noticed():
    sums = SurrogateSums(0, C_Q.flip(0))
    sums.add(K, V)
    right = SurrogateSums(0, C_Q)
    right.add(K, V)
    assert (sums.finish() - right.finish()).abs().max() > 1e-3


@pytest.mark.parametrize("chunks", [(1,) * 60, (7, 13, 40), (59, 1), (30, 30)])
def test_any_chunking(chunks):
    generator = torch.Generator().manual_seed(1)
    q, k, v, output = (torch.randn(60, heads, 8, generator=generator) for heads in (6, 2, 2, 6))
    whole, cut = moments(q, k, v, output, (60,)), moments(q, k, v, output, chunks)
    for name in ("q_moment", "k_moment", "k_mean", "v_moment", "v_mean", "v_score_moment"):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), atol=1e-12, rtol=1e-12)
    once, pieces = SurrogateSums(0, whole.q_moment), SurrogateSums(0, whole.q_moment)
    once.add(k, v)
    for parts in zip(k.split(chunks), v.split(chunks), strict=True):
        pieces.add(*parts)
    torch.testing.assert_close(pieces.finish(), once.finish(), atol=1e-12, rtol=1e-12)


def test_output_metric_by_hand():
    """Four query heads over two KV heads, two channels each, into a hidden size of three."""
    weight = torch.tensor(
        [
            [1, 0, 0, 2, 1, 1, 0, 0],
            [0, 1, 1, 0, 0, 0, 0, 3],
            [2, 0, 0, 0, 0, 1, 1, 0],
        ]
    )
    # W_0^T W_0 = [[5, 0], [0, 1]], W_1^T W_1 = [[1, 0], [0, 4]]; W_2^T W_2 = [[1, 1], [1, 2]], W_3^T W_3 = [[1, 0], [0, 9]].
    expected = torch.tensor([[[6, 0], [0, 5]], [[2, 1], [1, 11]]]).double() / 2
    assert torch.equal(output_moment(weight.float(), 2, 2), expected)
    # And by its meaning: a random error of both heads of a group costs that after the projection.
    error = torch.randn(2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for group in range(2):
        cost = sum((weight[:, 2 * h : 2 * h + 2].double() @ error).square().sum() for h in (2 * group, 2 * group + 1)) / 2
        torch.testing.assert_close(error @ expected[group] @ error, cost, atol=1e-10, rtol=0)


def test_query_heads_join_their_own_kv_head():
    x = torch.arange(2 * 6).view(2, 6, 1).float()  # head h of token t holds 6 t + h
    assert pool_query_group(x, 2).squeeze(-1).tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", ["query", "key", "value", "attention output"])
def test_nonfinite_names_layer_and_side(side, bad):
    tensors = {"query": Q, "key": K, "value": V, "attention output": Q}
    tensors[side] = tensors[side].clone()
    tensors[side][1, 0, 2] = bad
    with pytest.raises(OscarError, match=f"layer 7, {side}"):
        MomentSums(7).add(*tensors.values())


def test_no_token_is_an_error():
    with pytest.raises(ValueError, match="layer 3: expected at least one real token"):
        MomentSums(3).finish()
