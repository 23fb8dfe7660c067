"""Real servers on the CPU platform with a tiny random model: stock SGLang starts, quietly, and two ranks answer as one."""

import pytest
import torch
from forking import forking

from oscar.evaluation.local_server import LocalServer

PROMPTS = ["hello", "The quick brown fox jumps over the lazy dog. " * 4, "1 2 3 4 5 6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random Qwen3 with a byte-level tokenizer; weights large enough that greedy text varies."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=1024,
        eos_token_id=256,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    network = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    network.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return str(folder)


def generate(server):
    """Greedy tokens of `PROMPTS`, sent as one batch."""
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    return [item["output_ids"] for item in server.post("/generate", text=PROMPTS, sampling_params=sampling)]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the CPU platform is for machines without an accelerator")
def test_stock_serves_on_a_plain_cpu_and_two_ranks_answer_as_one(model, tmp_path):
    answers = []
    for ranks in (1, 2):
        flags = ("--dtype", "float32", "--kv-quant", "none", "--tp-size", ranks)
        server = LocalServer(model, *flags, log=tmp_path / f"{ranks}.log", env={"OMP_NUM_THREADS": "1"})
        with forking(server) if ranks == 1 else server:
            answers.append(generate(server))
        text = server.log.read_text()
        for alarm in ("Traceback", "Warning:", "Ignore import error", "Cannot detect", "RLIMIT", "larger than numa"):
            assert alarm not in text, text
    assert answers[0] == answers[1]
    assert len({token for tokens in answers[0] for token in tokens}) > 8
