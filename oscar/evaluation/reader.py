"""A Hugging Face model that reads a 2-bit cache as the server does, in this process.

A document is a context and a continuation. `Reader.read` runs the model's own attention over all of it, once, whatever the
number of methods and windows: it gives the exact logits, and the context's keys and values, which in the server too come from
exact attention among the tokens of one chunk. `Reader.cache` then stores the context with a method's codecs, and
`Reader.decode` runs new tokens against it:

    position   0 ..... sinks .......... context | continuation, teacher-forced
    query i    16 bits | 2 bits ... 2 bits      | 2 bits .. | recent: 16 bits | i

Every continuation position is one "request" of an `oscar_kernel.BatchDecode` with a length of its own, all in one batch,
layer by layer. That is what decoding step by step reads: a position's keys and values depend on earlier positions alone, and
the windows follow each request's own length. Every slot has a 16-bit row of its own here, so one stored
document serves all window sizes; the server keeps only rows that a window can still reach.

Values are transformed when stored and outputs transformed back, where the server folds both into the weights: the same
numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar import support
from oscar.calibration.run_transformers import LayerCapture, capturing
from oscar.errors import OscarError
from oscar.format.windows import WindowTable
from oscar_kernel import BatchDecode, LayerCache, LayerCodec, Layers

Windows = tuple[int, int]
"""(sink_tokens, recent_tokens)."""
_NAME = "oscar_evaluate"


@dataclass(frozen=True)
class Reading:
    """What exact attention gave for one document, per layer in layer order; tensors in the model's dtype.

    Attributes:
        tokens: [num_tokens] int64.
        context: tokens of the context; the rest is the continuation, which may be empty.
        logits: [num_tokens - context + 1, vocab_size] float32, after the context's last token and each one that follows.
        k, v: per layer [num_tokens, num_kv_heads, head_dim] and [..., v_head_dim], after norm and RoPE.
        q: per layer [num_tokens - context, num_qo_heads, head_dim], of the continuation.
        output: per layer [num_tokens - context, num_qo_heads, v_head_dim], attention's output there, before W_O.
        scaling: per layer (sm_scale, logit_cap), logit_cap 0 for none.
    """

    tokens: Tensor
    context: int
    logits: Tensor
    k: list[Tensor]
    v: list[Tensor]
    q: list[Tensor]
    output: list[Tensor]
    scaling: list[tuple[float, float]]


class DocumentCache:
    """2-bit rows of some documents, one range of slots each, and a 16-bit row for every slot.

    Args:
        codecs: layer -> codec, all layers.
        num_qo_heads: query heads of a layer.
        lens: tokens that each document will have stored before the first decode.
        capacity: slots of each document: context and continuation.
    """

    def __init__(self, codecs: dict[int, LayerCodec], num_qo_heads: int, lens: Sequence[int], capacity: int):
        self.lens, self.capacity = list(lens), capacity
        num_slots = len(lens) * capacity
        self.device = next(iter(codecs.values())).k.clip.device
        caches = {i: LayerCache.zeros(codec, num_slots, num_slots, self.device) for i, codec in codecs.items()}
        self.layers = Layers({i: (caches[i], codec) for i, codec in codecs.items()}, num_qo_heads)

    def table(self, windows: Windows) -> WindowTable:
        """Every document holds a row for each of its positions: that of the position's slot."""
        sinks, ring = min(windows[0], self.capacity), max(0, self.capacity - windows[0])
        table = WindowTable.full(len(self.lens), (sinks, windows[1]), device=self.device, ring_tokens=ring)
        table.position[:-1] = torch.arange(self.capacity, dtype=torch.int32, device=self.device).repeat(len(self.lens))
        return table

    def slots(self, num_tokens: int) -> Tensor:
        """[len(lens), num_tokens] int64: where the next tokens of each document go."""
        first = torch.arange(len(self.lens), device=self.device).unsqueeze(1) * self.capacity
        return first + self.positions(num_tokens)

    def positions(self, num_tokens: int) -> Tensor:
        """[len(lens), num_tokens] int64: positions of the next tokens of each document."""
        at = torch.tensor(self.lens, device=self.device).unsqueeze(1)
        return at + torch.arange(num_tokens, device=self.device)

    def step(self, num_tokens: int, windows: Windows) -> BatchDecode:
        """Planned attention of the next tokens of each document: one request a token, documents outermost."""
        decode, documents = self.layers.batch_decode(), torch.arange(len(self.lens), device=self.device)
        slots = torch.arange(len(self.lens) * self.capacity, device=self.device).view(len(self.lens), self.capacity)
        kv_lens = [n + i + 1 for n in self.lens for i in range(num_tokens)]
        decode.plan(slots, documents.repeat_interleave(num_tokens), kv_lens, self.table(windows))
        return decode


class Reader:
    """Reads documents with a model, exactly and through a 2-bit cache.

    Args:
        model: a Hugging Face causal language model in eval mode whose attention goes through the library's interface. Its
            dtype is that of the exact side; queries, keys and values reach the kernels in it, on its device.
    Raises:
        OscarError: a feature for which `oscar.support` refuses evaluation, e.g. sliding windows.
    """

    def __init__(self, model):
        for key, detail in support.refused(model.config, "evaluation"):
            raise OscarError(support.model_refusal(key, support.model_name(model.config), detail))
        self.model, self.device = model, model.device
        self.num_qo_heads = model.config.get_text_config(decoder=True).num_attention_heads

    def read(self, tokens: Tensor, context: int) -> Reading:
        """Exact attention over a whole document.

        Args:
            tokens: [num_tokens] int64.
            context: tokens of the context, 1 to num_tokens.
        """
        seen: list[LayerCapture] = []
        tokens = tokens.to(self.device)
        with torch.inference_mode(), capturing(self.model, seen.append):
            keep = torch.arange(context - 1, len(tokens), device=self.device)
            logits = self.model(input_ids=tokens.unsqueeze(0), use_cache=False, logits_to_keep=keep).logits[0].float()
        seen.sort(key=lambda capture: capture.layer_id)
        return Reading(
            tokens=tokens,
            context=context,
            logits=logits,
            k=[c.k[0].transpose(0, 1) for c in seen],
            v=[c.v[0].transpose(0, 1) for c in seen],
            q=[c.q[0, :, context:].transpose(0, 1) for c in seen],
            output=[c.output[0, context:] for c in seen],
            scaling=[(c.sm_scale, c.logit_cap or 0.0) for c in seen],
        )

    def cache(self, readings: Sequence[Reading], codecs: dict[int, LayerCodec], room: int) -> DocumentCache:
        """Store the contexts of some documents.

        Args:
            readings: as `read` returned them.
            codecs: layer -> codec.
            room: tokens that will be decoded after each context.
        """
        lens = [r.context for r in readings]
        cache = DocumentCache(codecs, self.num_qo_heads, lens, max(lens) + room)
        for i in codecs:
            k = torch.cat([r.k[i][: r.context] for r in readings])
            v = torch.cat([r.v[i][: r.context] for r in readings])
            loc = torch.cat([torch.arange(n, device=self.device) + d * cache.capacity for d, n in enumerate(lens)])
            cache.layers.store(i, k, v, loc, loc)
        return cache

    def prefill(self, tokens: Tensor, codecs: dict[int, LayerCodec], room: int) -> tuple[DocumentCache, Tensor]:
        """Store a context as the server's prefill of one chunk does: new tokens see each other as `store_kv` returned them.

        `cache` differs from it by the rounding of keys and values to 16 bits inside the context, and shares one pass over
        the text between all methods.

        Args:
            tokens: [num_tokens] int64, the context.
            codecs, room: as in `cache`.
        Returns:
            The cache of this one document, and the logits after its last token, [vocab_size] float32.
        """
        cache = DocumentCache(codecs, self.num_qo_heads, [0], len(tokens) + room)
        step, slots = cache.layers.batch_extend(), torch.arange(len(tokens), device=self.device)
        step.plan(slots.unsqueeze(0), slots[:1], [0], [0, len(tokens)], cache.table((0, 0)), slots, slots)

        def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor, sm_scale: float, logit_cap: float) -> Tensor:
            return step.run(layer_id, q, k, v, sm_scale=sm_scale, logit_cap=logit_cap, out_dtype=torch.float32)

        with torch.inference_mode(), _attending(self.model, attend):
            ids = tokens.to(self.device).unsqueeze(0)
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        cache.lens = [len(tokens)]
        return cache, logits

    def decode(self, cache: DocumentCache, tokens: Tensor, windows: Windows) -> Tensor:
        """Run new tokens through the model, each reading the cache as a decode step of the server would.

        The cache's lengths stay as they are: the next call writes the same slots again. `advance` moves on.

        Args:
            cache: written in place at the new tokens' slots.
            tokens: [num_documents, num_tokens] int64, the tokens after what is stored.
            windows: (sink_tokens, recent_tokens).
        Returns:
            [num_documents, num_tokens, vocab_size] float32, logits after each of the tokens.
        """
        step, loc = cache.step(tokens.shape[1], windows), cache.slots(tokens.shape[1]).flatten()
        positions = cache.positions(tokens.shape[1])

        def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor, sm_scale: float, logit_cap: float) -> Tensor:
            # Stored apart: these tokens read each other's 2-bit rows, which a step of the server writes at its end.
            cache.layers.store(layer_id, k, v, loc, loc)
            return step.run(layer_id, q, sm_scale=sm_scale, logit_cap=logit_cap, out_dtype=torch.float32)

        with torch.inference_mode(), _attending(self.model, attend):
            return self.model(input_ids=tokens.to(self.device), position_ids=positions, use_cache=False).logits.float()

    def attention_error(self, cache: DocumentCache, reading: Reading, windows: Windows) -> list[tuple[float, float]]:
        """Error of attention's output alone: exact queries, keys and values of the continuation against the stored context.

        Args:
            cache: of this one document; its slots after the context are written.
            reading: with a continuation.
            windows: (sink_tokens, recent_tokens).
        Returns:
            Per layer (squared error, squared norm) of the output, summed over continuation, heads and channels.
        """
        num_tokens = len(reading.tokens) - reading.context
        step, loc = cache.step(num_tokens, windows), cache.slots(num_tokens).flatten()
        sums = []
        for i in cache.layers.by_id:
            cache.layers.store(i, reading.k[i][reading.context :], reading.v[i][reading.context :], loc, loc)
            scale, cap = reading.scaling[i]
            found = step.run(i, reading.q[i], sm_scale=scale, logit_cap=cap, out_dtype=torch.float32)
            exact = reading.output[i].double()
            sums.append((float((found.double() - exact).square().sum()), float(exact.square().sum())))
        return sums


Attend = Callable[[int, Tensor, Tensor, Tensor, float, float], Tensor]
"""attend(layer_id, q, k, v, sm_scale, logit_cap): [num_tokens, heads, dim] each -> [num_tokens, num_qo_heads, v_head_dim]."""


@contextmanager
def _attending(model, attend: Attend) -> Iterator[None]:
    """The model's attention is `attend` while the context is open. Batches are flattened, documents outermost."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    def attention(module, query, key, value, attention_mask, *, scaling=None, **kwargs):
        bs, _, num_tokens, head_dim = query.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        scale = head_dim**-0.5 if scaling is None else scaling
        output = attend(module.layer_idx, q, k, v, float(scale), kwargs.get("softcap") or 0.0)
        return output.unflatten(0, (bs, num_tokens)).to(query.dtype), None

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)  # who sees what is the plan's business
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(_NAME, None)
        AttentionMaskInterface._global_mapping.pop(_NAME, None)
