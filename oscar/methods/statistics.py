"""Streaming second moments of what attention consumes, per layer and KV head, in float64, in one pass over the text.

Activations pass through and are gone: memory is one set of [num_kv_heads, head_dim, head_dim] sums a layer, however
many tokens are read. Sums of float64 outer products do not care how tokens were cut into chunks (equal to about 1e-15).

    C_q    = mean over a KV head's query rows of q^T q                              MomentSums
    C_k    = mean of k^T k, C_v = mean of v^T v, and the means of k and v           MomentSums
    C_s    = mean over query rows of (S V)^T (S V) = V^T S^T S V / rows             MomentSums
    W_o    = mean over a KV head's query heads of W_h^T W_h, out of the weights     output_moment
    attended moments: the same, weighted by what attention makes of an error        attended.py
    C_sst  = sum_t w_t v_t^T v_t / sum_t w_t,  w_t = k_t C_q k_t^T                  SurrogateSums, a second pass

C_s is the paper's value target with the true causal softmax S. `V^T S^T S V` is the second moment of attention's own
output, so S is never formed: the output that the model computes anyway is summed, and one pass gives everything.

C_sst is the public implementation's surrogate for it. Its weights need the finished C_q, and summing them symbolically
in one pass would take a [d, d, d, d] moment, so for this one method the tokens are run through the model twice. They can
be: calibration sequences are token ids, kept in memory, and the forward pass is deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oscar.errors import OscarError
from oscar.methods import attended


@dataclass(frozen=True)
class LayerStatistics:
    """Finished statistics of one layer, all float64 on the CPU.

    Attributes:
        num_tokens: real tokens behind them (rows of k and v).
        q_moment: [num_kv_heads, head_dim, head_dim], C_q over the head's query group, without 1/sqrt(head_dim).
        k_moment, k_mean: [num_kv_heads, head_dim, head_dim] uncentred, and [num_kv_heads, head_dim].
        v_moment, v_mean: [num_kv_heads, v_head_dim, v_head_dim] uncentred, and [num_kv_heads, v_head_dim].
        v_score_moment: [num_kv_heads, v_head_dim, v_head_dim], C_s, the paper's softmax-weighted V.
        v_surrogate_moment: [num_kv_heads, v_head_dim, v_head_dim], C_sst; None without the second pass.
        output_moment: [num_kv_heads, v_head_dim, v_head_dim], W_o: an error x of a head's output costs x W_o x^T after the
            output projection; None where the model's projection was not found or is quantised.
        attended_q_moment, attended_k_moment, attended_k_mean, attended_v_moment, attended_output_moment: the same weighted by
            what attention makes of an error (`oscar.methods.attended`), costs in no particular unit; None where they were not
            taken, or no sequence was long enough.
    """

    num_tokens: int
    q_moment: Tensor
    k_moment: Tensor
    k_mean: Tensor
    v_moment: Tensor
    v_mean: Tensor
    v_score_moment: Tensor
    v_surrogate_moment: Tensor | None = None
    output_moment: Tensor | None = None
    attended_q_moment: Tensor | None = None
    attended_k_moment: Tensor | None = None
    attended_k_mean: Tensor | None = None
    attended_v_moment: Tensor | None = None
    attended_output_moment: Tensor | None = None

    def with_surrogate(self, moment: Tensor) -> LayerStatistics:
        """These statistics with the second pass's result in them."""
        return replace(self, v_surrogate_moment=moment)


_SIDES = {
    "q_moment": "query",
    "k_moment": "key",
    "k_mean": "key",
    "v_moment": "value",
    "v_mean": "value",
    "v_score_moment": "attention output",
}
"""Sums of `MomentSums` and what each is a sum of, for errors."""


class MomentSums:
    """One layer: the sums of the one pass that gives everything except the surrogate.

    Args:
        layer_id: named in errors.
    """

    def __init__(self, layer_id: int):
        self.layer_id = layer_id
        self.num_tokens = 0
        self.num_query_rows = 0
        self.output_moment: Tensor | None = None
        self.sums: dict[str, Tensor] = {}

    def add(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
        """Count tokens in.

        Args:
            q: [num_tokens, num_qo_heads, head_dim], after norm and RoPE, any float dtype; no padding.
            k: [num_tokens, num_kv_heads, head_dim], likewise.
            v: [num_tokens, num_kv_heads, v_head_dim].
            output: [num_tokens, num_qo_heads, v_head_dim], attention's output S V for these queries, before W_O.
        Raises:
            OscarError: a tensor holds NaN or infinity.
        """
        num_kv_heads = k.shape[1]
        q, output = (pool_query_group(x.double(), num_kv_heads) for x in (q, output))
        k, v = k.double().transpose(0, 1), v.double().transpose(0, 1)
        added = {
            "q_moment": q.mT @ q,
            "k_moment": k.mT @ k,
            "k_mean": k.sum(1),
            "v_moment": v.mT @ v,
            "v_mean": v.sum(1),
            "v_score_moment": output.mT @ output,
        }
        for name, value in added.items():  # NaN and infinity survive summing, and the sums are the smaller tensors
            check_finite(value, self.layer_id, _SIDES[name])
        self.merge(added, k.shape[1], q.shape[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, **how) -> None:
        """Count one whole sequence into the attended moments; arguments as in `attended.attended`. Call `add` for it too."""
        self.merge(attended.attended(q, k, v, output, **how), 0, 0)

    def merge(self, sums: dict[str, Tensor], num_tokens: int, num_query_rows: int) -> None:
        """Add sums made elsewhere, for the same heads: names and shapes of `sums`, float64, not divided by anything."""
        self.num_tokens += num_tokens
        self.num_query_rows += num_query_rows
        for name, value in sums.items():
            self.sums[name] = self.sums[name].add_(value) if name in self.sums else value

    def finish(self) -> LayerStatistics:
        """Divide by the counts.

        Raises:
            ValueError: no token was counted.
        """
        if not self.num_tokens:
            raise ValueError(f"layer {self.layer_id}: expected at least one real token, got none")
        per_query = ("q_moment", "v_score_moment")
        rows = {name: self.num_query_rows if name in per_query else self.num_tokens for name in _SIDES}
        means = {name: (self.sums[name] / count).cpu() for name, count in rows.items()} | attended.finish(self.sums)
        means |= {name: symmetrise(value) for name, value in means.items() if name.endswith("moment")}
        return LayerStatistics(num_tokens=self.num_tokens, output_moment=self.output_moment, **means)


class SurrogateSums:
    """Second pass over one layer: V weighted by w_t = k_t C_q k_t^T, weights normalised to mean 1 per KV head.

    Args:
        layer_id: named in errors.
        q_moment: [num_kv_heads, head_dim, head_dim] float64, the finished C_q of the first pass.
    Source: the public OSCAR implementation's `sst` target; no softmax and no causal mask.
    """

    def __init__(self, layer_id: int, q_moment: Tensor):
        self.layer_id = layer_id
        self.q_moment = q_moment
        self._sum: Tensor | None = None
        self._weight: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> None:
        """Count tokens in. k: [num_tokens, num_kv_heads, head_dim]; v: [num_tokens, num_kv_heads, v_head_dim]."""
        check_finite(k, self.layer_id, "key")
        check_finite(v, self.layer_id, "value")
        k, v = k.double().transpose(0, 1), v.double().transpose(0, 1)
        weight = ((k @ self.q_moment.to(k.device)) * k).sum(-1)  # [num_kv_heads, num_tokens], never negative
        weighted = v.mT @ (weight.unsqueeze(-1) * v)
        self._sum = weighted if self._sum is None else self._sum.add_(weighted)
        self._weight = weight.sum(-1) if self._weight is None else self._weight.add_(weight.sum(-1))

    def finish(self) -> Tensor:
        """[num_kv_heads, v_head_dim, v_head_dim] float64 on the CPU. A head whose weights are all zero gives zero."""
        if self._sum is None or self._weight is None:
            raise ValueError(f"layer {self.layer_id}: expected at least one real token, got none")
        weight = self._weight.clamp(min=torch.finfo(torch.float64).tiny)
        return symmetrise(self._sum / weight.view(-1, 1, 1)).cpu()


def output_moment(weight: Tensor, num_kv_heads: int, v_head_dim: int) -> Tensor:
    """Metric of errors in attention's output after the output projection, per KV head.

    Args:
        weight: [hidden_size, num_qo_heads * v_head_dim], W of y = concat(heads) W^T; any float dtype.
        num_kv_heads, v_head_dim: geometry.
    Returns:
        [num_kv_heads, v_head_dim, v_head_dim] float64 on the CPU: mean of W_h^T W_h over the head's query group, W_h the
        columns of query head h.
    """
    columns = weight.detach().double().cpu().unflatten(1, (num_kv_heads, -1, v_head_dim)).permute(1, 2, 0, 3)
    return symmetrise((columns.mT @ columns).mean(1))


def pool_query_group(x: Tensor, num_kv_heads: int) -> Tensor:
    """Rows of the query heads that share a KV head, together.

    [num_tokens, num_qo_heads, d] -> [num_kv_heads, num_tokens * kv_group_num, d]; query head h reads KV head
    h // kv_group_num, as in every grouped-query model.
    """
    grouped = x.unflatten(1, (num_kv_heads, -1))  # [num_tokens, num_kv_heads, kv_group_num, d]
    return grouped.transpose(0, 1).flatten(1, 2)


def symmetrise(x: Tensor) -> Tensor:
    """Mean of a [..., d, d] matrix and its transpose: rounding may leave a product unsymmetric in the last bit."""
    return (x + x.mT) / 2


def check_finite(x: Tensor, layer_id: int, side: str) -> None:
    """Raise OscarError, naming layer and side, if x holds NaN or infinity."""
    if not torch.isfinite(x).all():
        raise OscarError(
            f"layer {layer_id}, {side}: expected finite numbers, got NaN or infinity; check the weights, or try --dtype float32"
        )


def difficulty(statistics: LayerStatistics) -> dict:
    """What is hard about a layer's rows, as JSON-able numbers with six digits.

    Returns:
        "k_outlier", "v_outlier": largest channel's root mean square over the median channel's, the worst head's; 1 is flat.
        "k_spectrum", "v_spectrum": share of tr(C) in the 1, 2, 4, ... largest eigenvalues, mean over heads; C is the target
        that `oscar` diagonalises, C_q for K and V^T S^T S V for V.
    """
    result: dict[str, float | list[float]] = {}
    for side, rows, target in (
        ("k", statistics.k_moment, statistics.q_moment),
        ("v", statistics.v_moment, statistics.v_score_moment),
    ):
        rms = torch.diagonal(rows, dim1=-2, dim2=-1).clamp(min=0).sqrt()
        ratio = rms.amax(-1) / rms.median(-1).values.clamp(min=torch.finfo(torch.float64).tiny)
        result[f"{side}_outlier"] = float(f"{min(float(ratio.max()), 1e9):.6g}")
        values = torch.linalg.eigvalsh(target).flip(-1).clamp(min=0)
        share = values.cumsum(-1) / values.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        counts = [1 << i for i in range(share.shape[-1].bit_length()) if 1 << i <= share.shape[-1]]
        result[f"{side}_spectrum"] = [float(f"{x:.6g}") for x in share.mean(0)[torch.tensor(counts) - 1]]
    return result
