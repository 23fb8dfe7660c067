"""What the 2-bit cache costs on held-out sequences: errors of K, V and of attention's output, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from oscar.calibration.run_transformers import LayerCapture
from oscar.format.codec import RowFormat, decode, encode
from oscar.format.linalg import inverses
from oscar.format.side import LayerTransforms, Side
from oscar.format.windows import in_windows
from oscar.methods.statistics import output_moment

MAX_QUERIES = 256
"""Query positions looked at in each sequence, evenly spaced: the cost stays far below that of the forward pass."""


class Positions:
    """Which queries of a sequence are looked at, and which keys each sees and finds exact.

    Attributes:
        at: [num_queries] int64, evenly spaced, MAX_QUERIES or up to twice that.
        visible: [num_queries, num_tokens] bool, causal and within the sliding window.
        exact: [num_queries, num_tokens] bool, keys in the sink and recent windows.
        none: the same shape, all False.
    """

    def __init__(self, num_tokens: int, sliding_window: int | None, sink_tokens: int, recent_tokens: int, device: torch.device):
        first = 0 if num_tokens <= MAX_QUERIES else num_tokens // MAX_QUERIES - 1
        self.at = torch.arange(first, num_tokens, max(1, num_tokens // MAX_QUERIES), device=device)
        query, key = self.at[:, None], torch.arange(num_tokens, device=device)[None, :]
        self.visible = key <= query
        if sliding_window:
            self.visible &= query - key < sliding_window
        is_sink, is_recent = in_windows(key, query + 1, sink_tokens, recent_tokens)
        self.exact = is_sink | is_recent
        self.none = torch.zeros_like(self.exact)


@dataclass
class LayerError:
    """Relative errors of one layer, |x - x_hat| / |x| over all tokens and heads (Frobenius), 0 for exact.

    Attributes:
        k, v: keys and values after encode and decode, back in the model's own space.
        attention: attention's output with every key and value from 2 bits; behind the output projection where its weights
            are known, since that is what the model goes on with, head by head.
        served: the same with the sink and recent windows exact, as the server reads them.
        plain_k, plain_v, plain_attention: the first three for plain 2-bit: no transform, nothing clipped.
    """

    k: float
    v: float
    attention: float
    served: float
    plain_k: float
    plain_v: float
    plain_attention: float


class LayerErrorSums:
    """Sums of squared errors and squares of one layer.

    Args:
        transforms: the layer's transforms.
        k_format, v_format: row formats of K and V.
        sink_tokens, recent_tokens: windows kept exact for `served`.
    """

    def __init__(
        self,
        transforms: LayerTransforms,
        k_format: RowFormat,
        v_format: RowFormat,
        sink_tokens: int,
        recent_tokens: int,
    ):
        self.transforms, self.k_format, self.v_format = transforms, k_format, v_format
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        self.sums = {f.name: [0.0, 0.0] for f in fields(LayerError)}
        self.cost: Tensor | None = None

    def add(self, capture: LayerCapture) -> None:
        """Count an attention call in, one sequence at a time; padding is left out."""
        if self.cost is None:
            self.cost = output_cost(capture)
        for row in range(capture.q.shape[0]):
            keep = capture.real[row]
            self._add_sequence(capture, *(x[row][:, keep].float() for x in (capture.q, capture.k, capture.v)))

    def _add_sequence(self, capture: LayerCapture, q: Tensor, k: Tensor, v: Tensor) -> None:
        t = self.transforms
        k_hat, v_hat = reconstruct(k, self.k_format, t.k), reconstruct(v, self.v_format, t.v)
        k_plain, v_plain = reconstruct(k, self.k_format, plain(t.k)), reconstruct(v, self.v_format, plain(t.v))
        for name, x, x_hat in (("k", k, k_hat), ("v", v, v_hat), ("plain_k", k, k_plain), ("plain_v", v, v_plain)):
            self._count(name, x, x_hat)

        positions = Positions(q.shape[1], capture.sliding_window, self.sink_tokens, self.recent_tokens, q.device)
        rows = q[:, positions.at]

        def attend(k_hat: Tensor, v_hat: Tensor, exact: Tensor) -> Tensor:
            return attend_mixed(rows, (k, v), (k_hat, v_hat), exact, positions.visible, capture.sm_scale, capture.logit_cap)

        output = attend(k, v, positions.none)
        square = output_squares(output, self.cost, k.shape[0]).sum().item()
        for name, found in (
            ("attention", attend(k_hat, v_hat, positions.none)),
            ("served", attend(k_hat, v_hat, positions.exact)),
            ("plain_attention", attend(k_plain, v_plain, positions.none)),
        ):
            self.sums[name][0] += output_squares(output - found, self.cost, k.shape[0]).sum().item()
            self.sums[name][1] += square

    def _count(self, name: str, x: Tensor, x_hat: Tensor) -> None:
        self.sums[name][0] += (x - x_hat).double().square().sum().item()
        self.sums[name][1] += x.double().square().sum().item()


def output_cost(capture: LayerCapture) -> Tensor | None:
    """`statistics.output_moment` of the layer, float64 on the capture's device; None where W_O is not known."""
    if capture.output_weight is None:
        return None
    return output_moment(capture.output_weight, capture.k.shape[1], capture.v.shape[-1]).to(capture.q.device)


def output_squares(x: Tensor, cost: Tensor | None, num_kv_heads: int) -> Tensor:
    """Squares of attention outputs, summed over queries and the query heads that share a KV head.

    Args:
        x: [num_qo_heads, num_queries, v_head_dim].
        cost: from `output_cost`; None: the identity.
    Returns:
        [num_kv_heads] float64 on the CPU.
    """
    x = x.double().unflatten(0, (num_kv_heads, -1)).flatten(1, 2)
    return (x * (x if cost is None else x @ cost)).sum((1, 2)).cpu()


def total(sums: Iterable[LayerErrorSums]) -> LayerError:
    """The relative errors over all that these sums counted; 0 where there was nothing to compare."""
    sums = list(sums)
    result = {}
    for f in fields(LayerError):
        error, square = (sum(s.sums[f.name][i] for s in sums) for i in (0, 1))
        result[f.name] = (error / square) ** 0.5 if square else 0.0
    return LayerError(**result)


def plain(side: Side) -> Side:
    """Plain 2-bit in place of a side: no transform, nothing clipped."""
    eye = torch.eye(side.transform.shape[-1], device=side.transform.device)
    return Side(eye.expand_as(side.transform), torch.ones_like(side.clip))


def reconstruct(x: Tensor, fmt: RowFormat, side: Side) -> Tensor:
    """Encode, decode and transform back.

    Args:
        x: [num_kv_heads, num_tokens, d] float32, in the model's own space.
        fmt: row format.
        side: how the rows are written, float32.
    Returns:
        [num_kv_heads, num_tokens, d] float32.
    """
    side = side.map(lambda tensor: tensor.to(x.device))
    offset = 0.0 if side.mean is None else side.mean.unsqueeze(1)
    rows = ((x - offset) @ side.transform).transpose(0, 1).contiguous()  # [num_tokens, num_kv_heads, d]
    decoded = decode(encode(rows, fmt, side.clip, side.shaping), fmt).transpose(0, 1)
    back = inverses(side.transform.double()).float()
    return decoded @ back + offset


def attend_mixed(
    q: Tensor,
    exact: tuple[Tensor, Tensor],
    coded: tuple[Tensor, Tensor],
    is_exact: Tensor,
    visible: Tensor,
    sm_scale: float,
    logit_cap: float | None,
) -> Tensor:
    """Attention over keys and values of which some are exact and some decoded, per query.

    Args:
        q: [num_qo_heads, num_queries, head_dim] float32.
        exact, coded: (k, v) pairs, [num_kv_heads, num_tokens, dim] float32.
        is_exact: [num_queries, num_tokens] bool, which pair a query reads a token from.
        visible: [num_queries, num_tokens] bool.
        sm_scale, logit_cap: as in LayerCapture.
    Returns:
        [num_qo_heads, num_queries, v_head_dim] float32.
    """
    kv_group_num = q.shape[0] // exact[0].shape[0]

    def scores(k: Tensor) -> Tensor:
        return (q.unflatten(0, (-1, kv_group_num)) @ k.mT.unsqueeze(1)).flatten(0, 1) * sm_scale

    logits = torch.where(is_exact, scores(exact[0]), scores(coded[0]))
    if logit_cap:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    weights = logits.masked_fill(~visible, float("-inf")).softmax(-1).unflatten(0, (-1, kv_group_num))
    from_exact = weights.masked_fill(~is_exact, 0.0) @ exact[1].unsqueeze(1)
    from_coded = weights.masked_fill(is_exact, 0.0) @ coded[1].unsqueeze(1)
    return (from_exact + from_coded).flatten(0, 1)
