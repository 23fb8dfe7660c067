"""Second moments weighted by what attention makes of an error, so that rows and directions that are never read count little.

Let query i give key j the weight p_ij, and let o_i be its output. An error e_j of the key moves the logit by q_i e_j^T and
the output behind W_O by p_ij (q_i e_j^T) (v_j - o_i) W_O; an error of the value moves it by p_ij e_j W_O. Errors of different
tokens have nothing to do with each other, so their squares add up:

    keys     sum_ij c_ij (q_i e_j^T)^2,  c_ij = p_ij^2 |(v_j - o_i) W_O|^2      cost of a key: sum_ij c_ij q_i^T q_i
    values   sum_ij p_ij^2 |e_j W_O|^2                                          cost of a value: sum_h (sum_ij p_ij^2) W_h^T W_h

The same weights, summed over queries (times |q_i|^2 for keys), say which keys and values matter: the covariance of each side
is taken with them. A query
whose weight lies on the first token, as most do in many layers, has next to no say, and so has a query that reads many tokens
alike, since there errors average out.

Pairs that the windows of any server hold exactly are left out: SINK_TOKENS and RECENT_TOKENS. Some queries of each sequence are
looked at, evenly spaced; scores are formed in blocks, so memory does not grow with the square of the length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar.format.windows import in_windows

SINK_TOKENS = 4
"""First tokens that are left out. Not more: rows behind a larger sink window are alike, and the first tokens are not."""
RECENT_TOKENS = 16
"""Newest tokens that are left out."""
MAX_QUERIES = 512
"""Query positions looked at in each sequence, up to twice as many."""
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Scores formed at once: they stay in a core's cache, or fill a GPU."""
PREFIX = "attended_"
SUMS = tuple(PREFIX + name for name in ("q_moment", "k_moment", "k_mean", "k_weight", "v_moment", "v_weight", "output_moment"))
"""Names of what `attended` returns; all of them add up over sequences, and over ranks that hold query heads of one KV head."""


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sm_scale: float,
    output_weight: Tensor | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
) -> dict[str, Tensor]:
    """The sums of one sequence.

    Args:
        q: [num_tokens, num_qo_heads, head_dim], after norm and RoPE, any float dtype; a whole sequence without padding.
        k: [num_tokens, num_kv_heads, head_dim], likewise.
        v: [num_tokens, num_kv_heads, v_head_dim].
        output: [num_tokens, num_qo_heads, v_head_dim], before W_O.
        sm_scale, sliding_window, logit_cap: as in `LayerCapture`.
        output_weight: [hidden_size, num_qo_heads * v_head_dim], W_O; None: errors count as they leave attention.
    Returns:
        SUMS: moments [num_kv_heads, dim, dim], the mean [num_kv_heads, head_dim], weights [num_kv_heads]; float64, on q's
        device, not divided by anything. Empty where the sequence is too short to have pairs.
    """
    num_tokens, num_kv_heads = k.shape[0], k.shape[1]
    if num_tokens <= SINK_TOKENS + RECENT_TOKENS:
        return {}
    per_head = [x.float().transpose(0, 1) for x in (q, output)]
    q, output = (x.unflatten(0, (num_kv_heads, -1)) for x in per_head)  # [num_kv_heads, kv_group_num, num_tokens, dim]
    k, v = k.float().transpose(0, 1), v.float().transpose(0, 1)
    metric = _metric(output_weight, output)
    at = torch.arange(SINK_TOKENS + RECENT_TOKENS, num_tokens, max(1, num_tokens // MAX_QUERIES), device=q.device)
    rows = max(1, _BLOCK["cpu" if q.device.type == "cpu" else "cuda"] // (q.shape[1] * num_tokens))
    sums = []
    for head in range(num_kv_heads):
        weights = _Weights(len(at), v[head], metric[head])
        for start in range(0, len(at), rows):
            block = slice(start, min(start + rows, len(at)))
            seen = int(at[block][-1]) + 1
            scores = q[head][:, at[block]] @ k[head, :seen].mT * sm_scale
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            size = q[head][:, at[block]].square().sum(-1)
            weights.add(block, at[block], scores, size, output[head][:, at[block]], sliding_window)
        sums.append(weights.sums(q[head][:, at], k[head]))
    return {name: torch.stack([one[name] for one in sums]) for name in SUMS}


class _Weights:
    """Weights of the queries, keys and values of one KV head and one sequence.

    Args:
        num_queries: that will be counted.
        v: [num_tokens, v_head_dim] float32.
        metric: [kv_group_num, v_head_dim, v_head_dim] float32.
    """

    def __init__(self, num_queries: int, v: Tensor, metric: Tensor):
        self.v, self.metric = v, metric
        self.square_of_v = ((v @ metric) * v).sum(-1).unsqueeze(1)
        self.of_query = v.new_zeros(len(metric), num_queries)
        self.of_key, self.of_value = torch.zeros(2, len(v), dtype=torch.float64, device=v.device)
        self.of_head = torch.zeros(len(metric), dtype=torch.float64, device=v.device)

    def add(self, block: slice, at: Tensor, scores: Tensor, size: Tensor, output: Tensor, sliding_window: int | None) -> None:
        """Count in some queries at positions `at`, with all keys up to the last of them.

        scores [group, queries, keys], size |q|^2 [group, queries], output [group, queries, dim].
        """
        seen = scores.shape[-1]
        query, key = at[:, None], torch.arange(seen, device=at.device)[None, :]
        visible = key <= query
        if sliding_window:
            visible &= query - key < sliding_window
        is_sink, is_recent = in_windows(key, query + 1, SINK_TOKENS, RECENT_TOKENS)
        square = scores.masked_fill_(~visible, float("-inf")).softmax(-1).masked_fill_(is_sink | is_recent, 0.0).square_()
        by_key = square.sum(1)
        self.of_head += by_key.sum(1)
        self.of_value[:seen] += self.metric.diagonal(dim1=1, dim2=2).sum(-1) @ by_key
        # |(v_j - o_i) W|^2 of all pairs, from its three terms.
        read = output @ self.metric
        apart = (read @ self.v[:seen].mT).mul_(-2.0).add_(self.square_of_v[..., :seen])
        apart += (read * output).sum(-1, keepdim=True)
        cost = square.mul_(apart.clamp_(min=0))
        self.of_query[:, block] = cost.sum(-1)
        self.of_key[:seen] += (size.unsqueeze(1) @ cost).sum((0, 1))

    def sums(self, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        """What `attended` returns, of this head. q [group, queries, head_dim], k [num_tokens, head_dim]."""
        q, k, v = q.flatten(0, 1).double(), k.double(), self.v.double()
        key, value = self.of_key.unsqueeze(1), self.of_value.unsqueeze(1)
        return {
            "attended_q_moment": (q * self.of_query.flatten().double().unsqueeze(1)).mT @ q,
            "attended_k_moment": (k * key).mT @ k,
            "attended_k_mean": (k * key).sum(0),
            "attended_k_weight": key.sum(),
            "attended_v_moment": (v * value).mT @ v,
            "attended_v_weight": value.sum(),
            "attended_output_moment": torch.einsum("g,gde->de", self.of_head, self.metric.double()),
        }


def finish(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fields of `LayerStatistics` out of the sums: keys and values divided by their weights; costs have no unit."""
    if not set(SUMS) <= set(sums):
        return {}
    tiny = torch.finfo(torch.float64).tiny
    result = {name: sums[PREFIX + name] for name in ("q_moment", "output_moment")}
    for name in ("k_moment", "k_mean", "v_moment"):
        weight = sums[f"{PREFIX}{name[0]}_weight"].clamp(min=tiny)
        result[name] = sums[PREFIX + name] / weight.view(-1, *[1] * (sums[PREFIX + name].dim() - 1))
    return {PREFIX + name: value.cpu() for name, value in result.items()}


def _metric(output_weight: Tensor | None, output: Tensor) -> Tensor:
    """W_h^T W_h of every query head, [num_kv_heads, kv_group_num, v_head_dim, v_head_dim] float32; the identity without W_O."""
    heads, group, _, dim = output.shape
    if output_weight is None:
        return torch.eye(dim, device=output.device).expand(heads, group, dim, dim)
    columns = output_weight.detach().to(output.device, torch.float32).unflatten(1, (heads, group, dim)).permute(1, 2, 0, 3)
    return columns.mT @ columns
