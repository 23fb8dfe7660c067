"""The one detector of model features: every refused row is seen, in a library config and in a dictionary; others pass."""

import json
import subprocess
import sys

import pytest
import transformers

from oscar import support
from oscar.support.detect import DETECTORS

GEOMETRY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}


def of(kind: str, **changes):
    return getattr(transformers, f"{kind}Config")(**(GEOMETRY | changes))


def qwen3(**changes):
    return of("Qwen3", **({"head_dim": 64} | changes))


# Key of a refused row -> configs that have the feature, each with a part of what is found.
HAVE = {
    "encoder_decoder": [(lambda: transformers.BartConfig(), ""), (lambda: transformers.WhisperConfig(), "")],
    "not_generative": [
        (lambda: of("Qwen2", architectures=["Qwen2ForRewardModel"]), "Qwen2ForRewardModel"),
        (lambda: qwen3(architectures=["Qwen3ForSequenceClassification"]), "Qwen3ForSequenceClassification"),
        (lambda: qwen3(architectures=["Qwen3Model"]), "Qwen3Model"),
        (lambda: of("Gemma3Text", use_bidirectional_attention=True), "use_bidirectional_attention=True"),
    ],
    "multimodal": [
        (lambda: transformers.Qwen2VLConfig(), "vision_config"),
        (lambda: {"text_config": GEOMETRY}, ""),
        (lambda: {"thinker_config": {"text_config": GEOMETRY}}, "thinker_config"),
    ],
    "mla": [(lambda: of("DeepseekV3", **LATENT), "kv_lora_rank=32")],
    "linear_attention": [
        (lambda: of("Qwen3Next", head_dim=64), "linear_attention"),
        (lambda: transformers.MambaConfig(), "linear_attention"),
        (lambda: GEOMETRY | {"layer_types": ["attention", "mamba"]}, "layer_types has mamba"),
        (lambda: {"model_type": "falcon_mamba"}, "model_type falcon_mamba"),
        (lambda: GEOMETRY | {"mamba_d_state": 16}, "mamba_d_state"),
        (lambda: GEOMETRY | {"layer_types": ["hybrid_sliding"]}, "hybrid_sliding"),
    ],
    "attention_sinks": [
        (lambda: of("GptOss", head_dim=64, num_local_experts=4), "gpt_oss"),
        (lambda: GEOMETRY | {"learnable_sink": True}, "learnable_sink"),
    ],
    "sparse_attention": [
        (lambda: GEOMETRY | {"index_topk": 2048}, "index_topk"),
        (lambda: GEOMETRY | {"layer_types": ["compressed_sparse_attention"]}, "compressed_sparse_attention"),
    ],
    "sliding_window": [
        (lambda: of("Gemma3Text", sliding_window=16), "layer_types has sliding_attention"),
        (lambda: of("Mistral", sliding_window=16), "sliding_window=16"),
        (lambda: GEOMETRY | {"sliding_window": 16}, "sliding_window=16"),
        (lambda: GEOMETRY | {"sliding_window": 16, "max_position_embeddings": None}, "sliding_window=16"),
    ],
    "chunked_attention": [
        (lambda: GEOMETRY | {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        (lambda: GEOMETRY | {"attention_chunk_size": 64}, "attention_chunk_size=64"),
    ],
    "shared_kv_layers": [(lambda: GEOMETRY | {"num_kv_shared_layers": 1}, "num_kv_shared_layers=1")],
    "several_head_sizes": [(lambda: qwen3().to_dict() | {"global_head_dim": 128}, "head_dim 64 and 128")],
    "alibi": [
        (lambda: transformers.FalconConfig(alibi=True), ""),
        (lambda: transformers.BloomConfig(), ""),
        (lambda: transformers.MptConfig(attn_config={"alibi": True}), ""),
    ],
    "logit_cap": [(lambda: of("Gemma2", attn_logit_softcapping=5.0), "attn_logit_softcapping=5.0")],
    "unreadable_geometry": [(lambda: {"model_type": "abacus", "hidden_size": 64}, "KV heads None")],
    "head_dim": [(lambda: qwen3(head_dim=90), "head_dim=90"), (lambda: GEOMETRY | {"v_head_dim": 6}, "v_head_dim=6")],
    "head_dim_of_kernels": [(lambda: qwen3(head_dim=72), "head_dim=72")],
}
REFUSED = [row for row in support.MODEL_FEATURES if not row.supported]


def test_every_refused_row_has_a_detector_and_a_case_here():
    keys = [row.key for row in REFUSED]
    assert sorted(DETECTORS) == sorted(HAVE) == sorted(keys) and len(set(keys)) == len(keys)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.key)
def test_feature_is_seen_and_the_sentence_says_it(row):
    for make, told in HAVE[row.key]:
        config = make()
        found = dict(support.refused(config, compiled=True))
        assert told in found[row.key]
        sentence = support.model_refusal(row.key, support.model_name(config), found[row.key])
        assert row.title in sentence and row.reason in sentence and row.alternative in sentence and told in sentence
        assert "\n" not in sentence


@pytest.mark.parametrize("key", ["sliding_window", "logit_cap", "mla", "linear_attention", "attention_sinks", "head_dim"])
def test_a_dictionary_says_what_the_object_says(key):
    for make, _ in HAVE[key]:
        config = make()
        if not isinstance(config, dict):
            found = [key for key, _ in support.refused(config)]
            as_written = json.loads(config.to_json_string(use_diff=False))
            assert found and [key for key, _ in support.refused(as_written)] == found


TAKEN = [
    lambda: qwen3(architectures=["Qwen3ForCausalLM"]),
    lambda: of("Llama"),
    lambda: of("Qwen2", sliding_window=4096, use_sliding_window=False),
    lambda: of("Mistral", sliding_window=None),
    lambda: of("Qwen3Moe", head_dim=80, num_experts=4),
    lambda: of("Glm4", head_dim=96, partial_rotary_factor=0.5),
    lambda: of("Phi3"),
    lambda: transformers.GPT2Config(architectures=["GPT2LMHeadModel"]),
    lambda: GEOMETRY | {"sliding_window": 1024, "use_sliding_window": False},
    lambda: GEOMETRY | {"layer_types": ["attention", "full_attention"], "mamba_d_state": 16},
]


@pytest.mark.parametrize("make", TAKEN)
def test_plain_attention_is_taken_by_all(make):
    for task in ("serving", "calibration", "evaluation"):
        assert support.refused(make(), task, compiled=True) == []


def test_a_window_as_long_as_the_context_has_no_effect():
    config = of("Mistral", sliding_window=512)
    assert support.refused(config) and support.refused(config, context_len=512) == []
    assert support.refused(config, context_len=513) == [("sliding_window", "sliding_window=512")]


def test_what_works_offline_only():
    both = of("Gemma2", head_dim=32, sliding_window=16, attn_logit_softcapping=5.0)
    assert [key for key, _ in support.refused(both)] == ["sliding_window", "logit_cap"]
    assert support.refused(both, "calibration") == []
    assert [key for key, _ in support.refused(both, "evaluation")] == ["sliding_window"]
    for row in REFUSED:
        assert set(row.offline) <= {"calibration", "evaluation"}


def test_limit_of_the_kernels_is_none_of_the_reference():
    assert support.refused(qwen3(head_dim=72)) == []
    assert support.refused(qwen3(head_dim=72), compiled=True) == [("head_dim_of_kernels", "head_dim=72")]


def test_not_served_is_one_sentence_on_what_is_still_refused():
    found = [["sliding_window", "sliding_window=16"], ["logit_cap", ""], ["mha", ""], ["a row that is gone", ""]]
    sentence = support.not_served(found)
    assert sentence.count("it has") == 2 and "sliding_window=16" in sentence and "soft cap" in sentence and "\n" not in sentence
    assert support.not_served(found[2:]) is None


def test_importing_it_imports_nothing_heavy():
    script = "import oscar.support, sys; print({'torch', 'sglang', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
