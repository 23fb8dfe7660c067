"""The paper's method, and the variant that its public implementation ships.

The transform is T = U H P:

    U  eigenvectors of the target second moment as columns, ascending eigenvalues
    H  an orthogonal matrix with entries of equal magnitude, so that every channel of x U H has the same diagonal in
       the metric (the paper's Lemma 1): no channel matters more than another, and four levels fit all alike
    P  output channel r(i) is channel d-1-i of x U H, r the bit reversal: it spreads neighbours over groups

The target of K is C_q, the target of V the score-weighted V.
"""

from __future__ import annotations

from oscar.format.side import LayerTransforms
from oscar.methods.matrices import rotate
from oscar.methods.registry import method, side
from oscar.methods.statistics import LayerStatistics


@method("oscar", "the paper's U.H.P")
def oscar(statistics: LayerStatistics, share_heads: bool = False) -> LayerTransforms:
    """U H P with the paper's targets: C_q for K, V^T S^T S V with the true causal softmax S for V.

    Source: arXiv 2605.17757. Its public implementation shares a matrix over the heads of a layer, which can be fatal where
    heads differ (docs/method.md); here a KV head has its own unless share_heads is set.
    """
    return LayerTransforms(
        side(rotate(statistics.q_moment, share_heads)),
        side(rotate(statistics.v_score_moment, share_heads)),
    )


@method("oscar-surrogate", "the paper's U.H.P with the V target of its public implementation", needs_surrogate=True)
def oscar_surrogate(statistics: LayerStatistics, share_heads: bool = False) -> LayerTransforms:
    """U H P with the V target of the paper's public implementation, `sst`: tokens weighted by k C_q k^T, no softmax.

    Source: the public OSCAR implementation; shared over heads it is what the published files hold.
    """
    target = statistics.v_surrogate_moment
    assert target is not None  # needs_surrogate: a caller has made the second pass
    return LayerTransforms(
        side(rotate(statistics.q_moment, share_heads)),
        side(rotate(target, share_heads)),
    )
