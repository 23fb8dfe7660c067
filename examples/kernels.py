"""The kernels alone, without a model: store tokens in 2 bits, decode one step, compare with plain PyTorch attention."""

import argparse

import torch
from torch.nn.functional import scaled_dot_product_attention

from oscar.format.codec import RowFormat
from oscar.format.side import LayerTransforms, Side
from oscar.format.windows import WindowTable
from oscar_kernel import LayerCache, LayerCodec, Layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each of two sequences (default: %(default)s)")
    parser.add_argument("--impl", default="auto", choices=("auto", "cpu", "triton", "reference"), help="(default: auto)")
    args = parser.parse_args()
    bs, heads, kv_group_num, dim, n, sinks, recent = 2, 2, 4, 128, args.tokens, 16, 64
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

    # What calibration decides for a layer, here random rotations: transform [num_kv_heads, dim, dim], clip [num_kv_heads].
    rotations = torch.linalg.qr(torch.randn(2, heads, dim, dim)).Q
    sides = LayerTransforms(*(Side(t, torch.full((heads,), clip)) for t, clip in zip(rotations, (0.96, 0.92), strict=True)))
    codec = LayerCodec.of(sides, RowFormat(dim), RowFormat(dim), rotations.device)

    # Storage: a slot for every token, and a window row for every token that lies in a window, which its sequence finds.
    slots = torch.randperm(bs * n).view(bs, n)  # [max_num_reqs, max_context_len], the req_to_token of a server
    windows = WindowTable.full(bs, (sinks, recent), device=rotations.device)
    position = torch.arange(n).expand(bs, n)
    rows = windows.rows_for(torch.arange(bs).unsqueeze(1), position, torch.tensor(n))
    windows.record(rows.flatten(), position.flatten())
    cache = LayerCache.zeros(codec, bs * n, windows.no_row, rotations.device)
    layers = Layers({0: (cache, codec)}, num_qo_heads=heads * kv_group_num, impl=args.impl)

    k, v = torch.randn(2, bs, n, heads, dim)
    q = torch.randn(bs, heads * kv_group_num, dim)
    old, new = slots[:, :-1].flatten(), slots[:, -1]
    layers.store(0, k[:, :-1].flatten(0, 1), v[:, :-1].flatten(0, 1), old, rows[:, :-1].flatten())
    decode = layers.batch_decode()  # one step: the last token of each sequence is written and attends to all
    decode.plan(slots, torch.arange(bs), torch.full((bs,), n, dtype=torch.int32), windows, new, rows[:, -1])
    out = decode.run(0, q, k[:, -1], v[:, -1], sm_scale=dim**-0.5)

    def error(*exact: torch.Tensor) -> float:
        keys, values = (x.transpose(1, 2).repeat_interleave(kv_group_num, 1) for x in exact)
        expected = scaled_dot_product_attention(q.unsqueeze(2), keys, values).squeeze(2)
        return float((out - expected).norm() / expected.norm())

    stored = []
    for storage, one, t in zip((cache.k, cache.v), (codec.k, codec.v), rotations, strict=True):
        two_bit, in_window = one.decode(storage.buffer[slots]), (rows != windows.no_row)[..., None, None]
        stored.append(torch.einsum("bnhd,hed->bnhe", torch.where(in_window, storage.window[rows].float(), two_bit), t))
    print(f"{layers.impl}: {bs} sequences of {n} tokens, rows of {dim} numbers in {cache.k.buffer.shape[-1]} bytes")
    print(f"relative error: {error(*stored):.1e} against PyTorch on the same rows, {error(k, v):.2f} against exact ones")


if __name__ == "__main__":
    main()
