"""Write a model with random weights and the geometry of Qwen3-0.6B, for measuring speed where no weights can be fetched.

    python scripts/bench/make_random_model.py --output /tmp/random --layers 28

Attention and layers are those of Qwen3-0.6B (hidden 1024, 16 query and 8 KV heads, head_dim 128, MLP 3072, tied embeddings);
the vocabulary is the shipped model's, whose tokenizer it brings along. Its text is noise.
"""

import argparse
import shutil
from pathlib import Path

import torch
import transformers

from oscar.embedded import embedded_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def make(folder: Path, layers: int, seed: int) -> int:
    """Write config, bfloat16 weights and tokenizer; returns the bytes of the folder. The same seed gives the same weights."""
    source = embedded_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(seed)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(source / name, folder / name)
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--layers", type=int, default=28, help="layers; fewer keep the cost of a layer (default: 28)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    args = parser.parse_args()
    size = make(args.output, args.layers, args.seed)
    print(f"{args.output}: {args.layers} layers, {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
