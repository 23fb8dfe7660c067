"""Moments weighted by attention: the formula pair by pair, and what the default method makes of them."""

from dataclasses import replace

import pytest
import torch

from oscar import methods
from oscar.methods import attended
from oscar.methods.attended import RECENT_TOKENS, SINK_TOKENS
from oscar.methods.shaped import PLAIN, moments
from oscar.methods.statistics import LayerStatistics, MomentSums

NUM_TOKENS, HEADS, KV_HEADS, DIM, V_DIM, HIDDEN = 61, 4, 2, 8, 12, 20


@pytest.fixture(scope="module")
def case():
    """(q, k, v, exact outputs, W_O, weights [heads, queries, keys]) of one sequence, scale 0.3."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = random(NUM_TOKENS, HEADS, DIM), random(NUM_TOKENS, KV_HEADS, DIM), random(NUM_TOKENS, KV_HEADS, V_DIM)
    p = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.3
    p = p.masked_fill(torch.ones(NUM_TOKENS, NUM_TOKENS).triu(1).bool(), float("-inf")).softmax(-1)
    output = torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(2, 1))
    return q, k, v, output, random(HIDDEN, HEADS * V_DIM), p


def by_hand(case):
    """The sums of `attended` by their definition, one pair of query and key after another."""
    q, k, v, output, w, p = case
    sums = {name: [0.0] * KV_HEADS for name in attended.SUMS}
    for h in range(HEADS):
        w_h, g = w[:, h * V_DIM : (h + 1) * V_DIM], h // 2
        for i in range(SINK_TOKENS + RECENT_TOKENS, NUM_TOKENS):
            for j in range(SINK_TOKENS, i + 1 - RECENT_TOKENS):
                square = p[h, i, j] ** 2
                cost = square * ((v[j, g] - output[i, h]) @ w_h.T).square().sum()
                key, value = cost * q[i, h].square().sum(), square * w_h.square().sum()
                for name, added in (
                    ("q_moment", cost * torch.outer(q[i, h], q[i, h])),
                    ("k_moment", key * torch.outer(k[j, g], k[j, g])),
                    ("k_mean", key * k[j, g]),
                    ("k_weight", key),
                    ("v_moment", value * torch.outer(v[j, g], v[j, g])),
                    ("v_weight", value),
                    ("output_moment", square * w_h.T @ w_h),
                ):
                    sums[f"attended_{name}"][g] += added
    return {name: torch.stack(parts) for name, parts in sums.items()}


@pytest.mark.parametrize("block", [1, 300, 1 << 20])
def test_by_hand(case, monkeypatch, block):
    monkeypatch.setitem(attended._BLOCK, "cpu", block)
    found = attended.attended(*case[:4], 0.3, case[4])
    for name, expected in by_hand(case).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_sliding_window_leaves_far_keys_out(case):
    """A window as wide as the tokens that are left out anyway leaves nothing, one that reaches further does."""
    nothing = attended.attended(*case[:4], 0.3, case[4], sliding_window=RECENT_TOKENS)
    assert not any(x.any() for x in nothing.values())
    one = attended.attended(*case[:4], 0.3, case[4], sliding_window=RECENT_TOKENS + 1)
    assert all(x.any() for x in one.values())


def test_a_short_sequence_has_no_pairs(case):
    assert attended.attended(*(x[: SINK_TOKENS + RECENT_TOKENS] for x in case[:4]), 0.3, case[4]) == {}


def test_sums_add_up_over_sequences(case):
    q, k, v, output, w, _ = case
    once, twice = MomentSums(0), MomentSums(0)
    for sums, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            sums.add(q, k, v, output)
            sums.attend(q, k, v, output, sm_scale=0.3, output_weight=w)
    a, b = once.finish(), twice.finish()
    assert a.num_tokens == NUM_TOKENS and b.num_tokens == 2 * NUM_TOKENS
    for name in ("attended_k_moment", "attended_k_mean", "attended_v_moment", "k_moment", "q_moment"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-12, rtol=1e-9)


def statistics(case) -> LayerStatistics:
    q, k, v, output, w, _ = case
    sums = MomentSums(0)
    sums.output_moment = torch.eye(V_DIM, dtype=torch.float64).expand(KV_HEADS, V_DIM, V_DIM)
    sums.add(q, k, v, output)
    sums.attend(q, k, v, output, sm_scale=0.3, output_weight=w)
    return sums.finish()


def test_the_default_method_takes_them(case):
    s = statistics(case)
    (cost, covariance, mean), (_, v_covariance, _) = moments(s)
    torch.testing.assert_close(mean, (1 - PLAIN) * s.attended_k_mean + PLAIN * s.k_mean)
    torch.testing.assert_close(v_covariance, (1 - PLAIN) * s.attended_v_moment + PLAIN * s.v_moment)
    torch.testing.assert_close(torch.einsum("hii->h", cost), torch.ones(KV_HEADS).double())
    assert (torch.linalg.eigvalsh(covariance) > 0).all()
    plain = replace(s, **{name: None for name in vars(s) if name.startswith("attended_")})
    assert torch.equal(moments(plain)[0][0], s.q_moment) and torch.equal(moments(plain)[1][1], s.v_moment)
    assert not torch.equal(methods.oscar_shaped(s).k.transform, methods.oscar_shaped(plain).k.transform)
    for other in (methods.oscar, methods.raw):
        assert torch.equal(other(s).k.transform, other(plain).k.transform)


def test_a_head_that_never_looks_far_keeps_the_plain_moments(case):
    s = statistics(case)
    zero = {name: value.clone() for name, value in vars(s).items() if name.startswith("attended_")}
    for value in zero.values():
        value[1] = 0
    (cost, _, mean), (_, v_covariance, _) = moments(replace(s, **zero))
    assert torch.equal(mean[1], s.k_mean[1]) and torch.equal(v_covariance[1], s.v_moment[1])
    torch.testing.assert_close(cost[1], s.q_moment[1] / s.q_moment[1].trace())
    assert not torch.equal(mean[0], s.k_mean[0])
    assert all(torch.isfinite(x).all() for _, _, x in methods.oscar_shaped(replace(s, **zero)).tensors())
