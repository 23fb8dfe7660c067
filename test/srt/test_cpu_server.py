"""Real servers on the CPU platform with a tiny random model: stock SGLang starts, quietly, and two ranks answer as one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

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


@contextlib.contextmanager
def server(log, *arguments, seconds=400):
    """Run `python -m sglang.launch_server`, yield its address when it answers, stop it by its process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environment["OMP_NUM_THREADS"] = "1"
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + seconds
        while "ready to roll" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def generate(address):
    """Greedy tokens of `PROMPTS`, sent as one batch."""
    body = {"text": PROMPTS, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}
    request = urllib.request.Request(
        f"{address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [item["output_ids"] for item in json.load(answer)]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the CPU platform is for machines without an accelerator")
def test_stock_serves_on_a_plain_cpu_and_two_ranks_answer_as_one(model, tmp_path):
    common = ("--model-path", model, "--dtype", "float32", "--kv-quant", "none")
    answers = []
    for name, arguments in {"one": (), "two": ("--tp-size", "2")}.items():
        log = tmp_path / f"{name}.log"
        with server(log, *common, *arguments) as address:
            answers.append(generate(address))
        text = log.read_text()
        for alarm in ("Traceback", "Warning:", "Ignore import error", "Cannot detect", "RLIMIT", "larger than numa"):
            assert alarm not in text, text
    assert answers[0] == answers[1]
    assert len({token for tokens in answers[0] for token in tokens}) > 8
