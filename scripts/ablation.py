"""The paper's ablation on a small model: which factor of U H P, and which target, buys what.

    python scripts/ablation.py [--model DIR] [--output F.json]

Two models: the one given (default: the embedded one) and the same with outliers that change no output: in every layer four
RoPE pairs of the keys are 16 times as large and of the queries 16 times as small (through k_norm and q_norm), and four value
channels a head are 16 times as large with W_O's columns 16 times as small. All factors are powers of two, so the 16-bit model
is the same to the last bit; large key and value channels are what trained models have and what breaks plain 2-bit.

Each arm is measured on held-out text with every token in 2 bits: relative error of attention's output, and, with small
windows, divergence of the next-token distribution from the 16-bit model's (KL, nats) and perplexity.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oscar import transform
from oscar.artifact import LayerTransforms
from oscar.calibrate import CalibrationOptions, check, collect
from oscar.capture import capturing
from oscar.cli import embedded_model
from oscar.codec import RowFormat
from oscar.heldout import LayerErrorSums, attend_mixed, reconstruct, total
from oscar.load_model import load_model
from oscar.progress import Steps

PAPER = (0.96, 0.92)
# name: (factors, K target, V target, clip quantiles)
ARMS = {
    "none (plain INT2)": ("", "q_moment", "v_score_moment", (1.0, 1.0)),
    "none, clipped": ("", "q_moment", "v_score_moment", PAPER),
    "U": ("U", "q_moment", "v_score_moment", PAPER),
    "U·P": ("UP", "q_moment", "v_score_moment", PAPER),
    "H·P": ("HP", "q_moment", "v_score_moment", PAPER),
    "U·H": ("UH", "q_moment", "v_score_moment", PAPER),
    "U·H·P": ("UHP", "q_moment", "v_score_moment", PAPER),
    "U·H·P, public surrogate for V": ("UHP", "q_moment", "v_surrogate_moment", PAPER),
    "U·H·P, raw targets": ("UHP", "k_moment", "v_moment", PAPER),
}
FACTOR, PAIRS, V_CHANNELS = 16.0, 4, 4


def add_outliers(model) -> None:
    """Make large key and value channels in place; what the model computes stays the same. Qwen3 layers only."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            d = attention.head_dim
            pairs = torch.randperm(d // 2, generator=generator)[:PAIRS]
            channels = torch.cat((pairs, pairs + d // 2))
            attention.k_norm.weight[channels] *= FACTOR
            attention.q_norm.weight[channels] /= FACTOR
            group = attention.o_proj.in_features // attention.v_proj.out_features
            for head in range(attention.v_proj.out_features // d):
                chosen = torch.randperm(d, generator=generator)[:V_CHANNELS]
                attention.v_proj.weight[head * d + chosen] *= FACTOR
                for query_head in range(head * group, (head + 1) * group):
                    attention.o_proj.weight[:, query_head * d + chosen] /= FACTOR


@contextmanager
def quantised(model, layers: dict[int, LayerTransforms], fmt: RowFormat, sink_tokens: int, recent_tokens: int):
    """The model's attention reads keys and values from 2 bits, but for the windows. One sequence at a time."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    def attention(module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, **kwargs):
        t = layers[module.layer_idx]
        q, k, v = (x[0].float() for x in (query, key, value))
        hat = reconstruct(k, fmt, t.k_transform, t.k_clip), reconstruct(v, fmt, t.v_transform, t.v_clip)
        at = torch.arange(q.shape[1])
        distance = at[:, None] - at[None, :]
        exact = (distance < recent_tokens) | (at < sink_tokens)
        output = attend_mixed(q, (k, v), hat, exact, distance >= 0, scaling, None)
        return output.transpose(0, 1).unsqueeze(0).to(query.dtype), None

    before = model.config._attn_implementation
    AttentionInterface.register("oscar_ablation", attention)
    AttentionMaskInterface.register("oscar_ablation", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.set_attn_implementation("oscar_ablation")
        yield
    finally:
        model.set_attn_implementation(before)


def log_probabilities(model, documents: list[torch.Tensor]) -> torch.Tensor:
    """[all positions, vocabulary] float64 of the next token."""
    with torch.inference_mode():
        return torch.cat([model(d.unsqueeze(0), use_cache=False).logits[0, :-1].double().log_softmax(-1) for d in documents])


def measure(folder: Path, group_sizes: list[int | None], arguments) -> list[dict]:
    """All arms on one model; rows of the table."""
    texts = tuple(arguments.text)
    options = CalibrationOptions(
        folder, text=texts, tokens=arguments.tokens, method="oscar-surrogate", max_length=2048, dtype="float32", device="cpu"
    )
    identity, config = check(options)
    model = load_model(folder, config, options.dtype, options.device)
    with Steps(True) as steps:
        statistics = collect(options, identity, model, config, steps)
    documents = [d for s in statistics.held_out for d in s.tokens.split(arguments.length) if len(d) == arguments.length]
    documents = documents[: arguments.documents]
    exact = log_probabilities(model, documents)
    target = torch.cat([d[1:] for d in documents]).unsqueeze(1)
    perplexity = float((-exact.gather(1, target)).mean().exp())
    rows = [{"arm": "16 bits", "heads": "", "group": 0, "attention": 0.0, "served": 0.0, "kl": 0.0, "perplexity": perplexity}]
    for size, shared, (name, (factors, k_target, v_target, clip)) in itertools.product(
        group_sizes, (False, True), ARMS.items()
    ):
        if shared and "U" not in factors:
            continue  # nothing in it depends on the heads
        layers = {
            i: LayerTransforms(
                transform.rotate(getattr(s, k_target), shared, factors).float(),
                transform.rotate(getattr(s, v_target), shared, factors).float(),
                *(torch.full((identity.num_kv_heads,), q) for q in clip),
            )
            for i, s in statistics.layers.items()
        }
        fmt = RowFormat(identity.head_dim, size)
        sums = {i: LayerErrorSums(t, fmt, fmt, *arguments.windows) for i, t in layers.items()}
        with capturing(model, lambda c, sums=sums: sums[c.layer_id].add(c)) as run:
            for document in documents:
                run(document.unsqueeze(0))
        error = total(sums.values())
        with quantised(model, layers, fmt, *arguments.windows):
            found = log_probabilities(model, documents)
        rows.append(
            {
                "arm": name,
                "heads": "shared" if shared else "per head",
                "group": fmt.group_size,
                "attention": error.attention,
                "served": error.served,
                "kl": float((exact.exp() * (exact - found)).sum(-1).mean()),
                "perplexity": float((-found.gather(1, target)).mean().exp()),
            }
        )
        print(line(rows[-1]), file=sys.stderr)
    return rows


def line(row: dict) -> str:
    """One row of the printed table."""
    return (
        f"{row['arm']:<31}{row['heads']:<10}{row['group'] or '':>6}{row['attention']:>11.3f}{row['served']:>9.3f}"
        f"{row['kl']:>9.4f}{row['perplexity']:>12.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The paper's ablation on a small model, with and without outliers.")
    parser.add_argument("--model", type=Path, default=embedded_model(), help="Qwen3 folder (default: the embedded model)")
    parser.add_argument("--text", action="append", metavar="FILE[:TOKENS]", help="text (default: the embedded held-out texts)")
    parser.add_argument("--tokens", type=int, default=20480, help="tokens of text, a tenth held out (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a measured document (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=4, help="documents measured (default: %(default)s)")
    parser.add_argument("--windows", type=int, nargs=2, default=(4, 32), help="sink and recent tokens (default: 4 32)")
    parser.add_argument("--groups", type=int, nargs="+", help="group sizes (default: head_dim and half of it)")
    parser.add_argument("--output", type=Path, help="JSON file for the tables")
    arguments = parser.parse_args()
    arguments.text = arguments.text or [str(arguments.model / name) for name in ("heldout.txt", "heldout_code.txt")]
    torch.set_grad_enabled(False)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
        groups = arguments.groups or [model.config.head_dim, model.config.head_dim // 2]
        probe = torch.arange(2, 66).unsqueeze(0)
        before = model(probe).logits
        add_outliers(model)
        assert torch.allclose(model(probe).logits, before, atol=1e-3), "outliers were to change nothing"
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(arguments.model).save_pretrained(folder)
        for name, where in (("as trained", arguments.model), ("with outliers", Path(folder))):
            results[name] = measure(where, groups, arguments)
    for name, rows in results.items():
        print(f"\n{name}\n{'arm':<31}{'heads':<10}{'group':>6}{'attention':>11}{'served':>9}{'KL':>9}{'perplexity':>12}")
        print("\n".join(map(line, rows)))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
