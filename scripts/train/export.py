"""Writing the embedded model as package data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from corpus import Corpus
from network import TrainingModel
from settings import (
    HEAD_DIM,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    MAX_SPAN,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_QO_HEADS,
    RMS_EPS,
    ROPE_THETA,
    SPECIALS,
    VOCAB_SIZE,
)
from tokens import wrap_tokenizer


def edit_json(path: Path, **changes) -> None:
    """Set keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export(model: TrainingModel, tokenizer, corpus: Corpus, licence: Path, folder: Path) -> None:
    """Write the package data but for the card; `folder` is new."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config

    folder.mkdir(parents=True)
    end_of_text, _, im_end = (tokenizer.token_to_id(s) for s in SPECIALS)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_QO_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_SPAN,
        rms_norm_eps=RMS_EPS,
        rope_theta=ROPE_THETA,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=end_of_text,  # starts every document in training, as Qwen3 names it
        eos_token_id=im_end,
        pad_token_id=end_of_text,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    edit_json(folder / "config.json", rope_theta=ROPE_THETA)  # for readers that do not know `rope_parameters`
    generation = GenerationConfig(do_sample=False, eos_token_id=[im_end, end_of_text], pad_token_id=end_of_text)
    generation.save_pretrained(folder)
    wrap_tokenizer(tokenizer).save_pretrained(folder)
    # The class name that transformers 4 and 5 both know.
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    weights = {name: w.detach().clone().contiguous() for name, w in model.weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "heldout.txt").write_text(corpus.held_out_prose[0], encoding="utf-8")
    (folder / "heldout_code.txt").write_text(corpus.held_out_code[0], encoding="utf-8")
    shutil.copyfile(licence, folder / "LICENSE.python.txt")


def publish(source: Path, target: Path) -> None:
    """Move finished files into place one by one, each by a rename, so that a reader never sees half a file."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        part = target / f".{path.name}.part"
        shutil.copyfile(path, part)
        part.replace(target / path.name)
