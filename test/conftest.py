"""Tiny random models with a byte-level tokenizer, saved as Hugging Face folders. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

LONGEST_FIRST = (
    "serving/test_serving.py",
    "serving/test_life_cycle.py",
    "kernel/test_triton.py",
    "serving/test_path_gpu.py",
    "test_types.py",
    "serving/test_capture.py",
    "serving/test_cpu_server.py",
    "kernel/test_attention.py",
    "serving/test_startup.py",
    "examples/test_examples.py",
    "evaluation/test_against_server.py",
)
"""Files that take minutes: begun last, one of them would keep a single worker busy at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        names = (i for i, name in enumerate(LONGEST_FIRST) if item.path.as_posix().endswith(f"test/{name}"))
        return next(names, len(LONGEST_FIRST))

    items.sort(key=place)


END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = 260
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
FAMILIES = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Llama": {},
    "Mistral": {"head_dim": 20, "sliding_window": 24},
    "Gemma": {"head_dim": 32},
    "Gemma2": {"head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {"head_dim": 32, "sliding_window": 24},
    "Glm4": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "Glm4Moe": {"head_dim": 32, "partial_rotary_factor": 0.5, "use_qk_norm": True} | _EXPERTS,
    "Phi": {"partial_rotary_factor": 0.5},
    "Phi3": {},
}


def _make_model(family: str, **changes):
    """A random model of this family in eval mode, weights large enough for attention that is not flat."""
    import transformers

    name = "Gemma3" if family == "Gemma3Text" else family
    config = getattr(transformers, f"{family}Config")(**(COMMON | FAMILIES[family] | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def _make_tokenizer(chat: bool = False):
    """One token a byte, 256 of them, and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {END: 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    if chat:
        result.chat_template = CHAT_TEMPLATE
    return result


@pytest.fixture(params=sorted(FAMILIES))
def family(request) -> str:
    """Each model family in turn."""
    return request.param


@pytest.fixture(scope="session")
def make_model():
    """make_model(family, **config changes): a random model in memory."""
    return _make_model


@pytest.fixture(scope="session")
def make_tokenizer():
    """make_tokenizer(chat=False): a byte-level tokenizer."""
    return _make_tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of a real model, which scripts/test.sh makes; a skip where its package cannot be had."""
    folder = Path(__file__).parents[1] / "build" / "models" / "smollm2"
    if not folder.is_dir():
        pytest.skip("no build/models/smollm2; python scripts/real_model.py smollm2 makes it")
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Returns folder(family="Qwen3", chat=False, **config changes): a saved model, made once a session."""
    made: dict[tuple, Path] = {}

    def folder(family: str = "Qwen3", chat: bool = False, **changes) -> Path:
        key = (family, chat, *sorted(changes.items()))
        if key not in made:
            path = tmp_path_factory.mktemp(family)
            _make_model(family, **changes).save_pretrained(path)
            _make_tokenizer(chat).save_pretrained(path)
            made[key] = path
        return made[key]

    return folder
