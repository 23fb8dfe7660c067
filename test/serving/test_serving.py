"""The served path, over HTTP, on the embedded model: equality with stock SGLang, churn, and every way of asking."""

import concurrent.futures
import json
import random
import re
import subprocess
import sys
import time

import pytest
import requests
from transformers import AutoTokenizer

from oscar.calibration.calibrate import CalibrationOptions, calibrate
from oscar.embedded import embedded_model
from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import held_out_sentences, make_needle
from oscar.format.artifact import save

NEW_TOKENS, LONG = 24, 60
COMMON = ("--dtype", "float32", "--random-seed", "1", "--log-level", "info")
# Windows far smaller than the prompts, so that sinks, 2-bit rows and recent rows are all read.
OSCAR = ("--kv-quant", "oscar", "--oscar-sink-tokens", "8", "--oscar-recent-tokens", "24", "--oscar-debug-checks")


@pytest.fixture(scope="module")
def model():
    return str(embedded_model())


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "oscar.safetensors"
    save(calibrate(CalibrationOptions(model=model, tokens=4096, max_length=1024, progress=False)), path)
    return str(path)


@pytest.fixture(scope="module")
def prompts(model):
    """24 token lists of 3 to 700 tokens: prose with shared beginnings, and needles."""
    tokenizer, draw = AutoTokenizer.from_pretrained(model), random.Random(7)
    text = tokenizer(" ".join(held_out_sentences()[:400]), add_special_tokens=False)["input_ids"]
    prompts = []
    for n in (3, 7, 8, 9, 31, 32, 33, 64, 100, 127, 128, 129, 250, 400, 511, 700):
        start = draw.choice((0, 0, 300, 1000))
        prompts.append(text[start : start + n])
    for seed in range(8):
        needle = make_needle(tokenizer, draw.randrange(150, 700), seed=seed)
        prompts.append(tokenizer(needle.prompt, add_special_tokens=False)["input_ids"])
    return prompts


def ask(server, ids, new_tokens=NEW_TOKENS, **sampling):
    """(tokens, their log-probabilities) of one greedy answer."""
    body = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True} | sampling
    answer = server.post("/generate", input_ids=ids, sampling_params=body, return_logprob=True)
    pairs = answer["meta_info"]["output_token_logprobs"]
    return [token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs]


def ask_together(server, prompts, workers=8, **kwargs):
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: ask(server, ids, **kwargs), prompts))


@pytest.fixture(scope="module")
def stock(model, prompts):
    """Answers of stock SGLang (torch_native, --kv-quant none) to every prompt, one at a time."""
    with LocalServer(model, *COMMON, "--max-total-tokens", "16384", "--disable-radix-cache") as server:
        assert server.info()["attention_backend"] == "torch_native"
        return {
            "plain": [ask(server, ids) for ids in prompts],
            "long": [ask(server, ids, new_tokens=LONG) for ids in prompts],
        }


def assert_equal(got, expected, what):
    """Tokens equal; log-probabilities within float32 rounding of another order of summation."""
    worst = 0.0
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(got, expected, strict=True):
        assert tokens == expected_tokens, what
        worst = max(worst, *(abs(a - b) for a, b in zip(logprobs, expected_logprobs, strict=True)))
    print(f"{what}: {len(got)} prompts token-identical, largest log-probability difference {worst:.1e}")
    assert worst < 2e-3, what


def test_lossless_equals_stock(model, artifact, prompts, stock):
    """Cold, prefix hit and 8 at a time: what the path adds is rounding."""
    flags = (*OSCAR, "--oscar-artifact", artifact, "--oscar-codec", "lossless", "--max-total-tokens", "16384")
    with LocalServer(model, *COMMON, *flags) as server:
        assert_equal([ask(server, ids) for ids in prompts], stock["plain"], "cold and shared beginnings")
        assert_equal([ask(server, ids) for ids in prompts], stock["plain"], "prefix hit")
        server.flush_cache()
        assert_equal(ask_together(server, prompts), stock["plain"], "8 concurrent")
        state = server.info()["internal_states"][0]["oscar"]
        assert state["mode"] == "lossless" and state["sink_rows_reused"] > 0


def test_lossless_equals_stock_in_pages_and_chunks(model, artifact, prompts, stock):
    flags = (*OSCAR, "--oscar-artifact", artifact, "--oscar-codec", "lossless", "--max-total-tokens", "16384")
    with LocalServer(model, *COMMON, *flags, "--page-size", "16", "--chunked-prefill-size", "64") as server:
        assert_equal(ask_together(server, prompts), stock["plain"], "pages of 16, chunks of 64")
        assert_equal([ask(server, ids) for ids in prompts], stock["plain"], "the same again: prefix hits")


def test_lossless_equals_stock_through_retraction(model, artifact, prompts, stock):
    """A pool too small for what runs: requests are retracted and start again."""
    flags = (*OSCAR, "--oscar-artifact", artifact, "--oscar-codec", "lossless", "--max-total-tokens", "2560")
    with LocalServer(model, *COMMON, *flags, "--schedule-conservativeness", "0.01") as server:
        got = ask_together(server, prompts, workers=12, new_tokens=LONG)
        assert_equal(got, stock["long"], "retractions")
        assert re.search("[Rr]etract", server.log.read_text()), "nothing was retracted: this test shows nothing"


def test_lossless_equals_stock_on_two_ranks(model, artifact, prompts, stock):
    """Each rank transforms and stores its own KV head."""
    flags = (*OSCAR, "--oscar-artifact", artifact, "--oscar-codec", "lossless", "--max-total-tokens", "16384", "--tp", "2")
    with LocalServer(model, *COMMON, *flags) as server:
        assert_equal(ask_together(server, prompts), stock["plain"], "tensor parallel 2")
        assert server.info()["internal_states"][0]["oscar"]["bytes_per_token"] == 4 * 1 * 2 * 512 + 5


@pytest.fixture(scope="module")
def int2(model, artifact):
    """A 2-bit server with a small pool and debug checks on."""
    flags = (*OSCAR, "--oscar-artifact", artifact, "--max-total-tokens", "3000", "--max-running-requests", "8")
    with LocalServer(model, *COMMON, *flags, "--enable-metrics", "--enable-streaming-session") as server:
        yield server


def test_churn_reads_no_stale_row_and_leaks_nothing(int2, prompts):
    """Hundreds of short requests with shared prefixes; the server stops itself on the first row that is not its slot's."""
    draw = random.Random(3)
    jobs = []
    for _ in range(240):
        ids = draw.choice(prompts[10:])
        cut = draw.randrange(1, len(ids))
        jobs.append(ids[:cut] + [draw.randrange(300, 1500) for _ in range(draw.randrange(0, 6))])
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda ids: ask(int2, ids, new_tokens=draw.randrange(1, 12)), jobs))
    assert len(answers) == 240
    state = int2.info()["internal_states"][0]["oscar"]
    assert state["sink_rows_reused"] > 200
    int2.flush_cache()
    time.sleep(2)  # SGLang checks its pools for leaks when idle, and stops on one
    assert int2.process.poll() is None and "leak" not in int2.log.read_text()
    assert ask(int2, jobs[0], new_tokens=4)[0]


def reads(server):
    """(tokens of windows that steps have read, how many of them in 16 bits), from the debug checks."""
    state = server.info()["internal_states"][0]["oscar"]
    return state["window_tokens_read"], state["in_16_bits"]


def test_what_the_cache_does_takes_no_window_away(int2, prompts):
    """A cached prompt that is computed again, equal prompts in one batch, a session: the debug checks stop the server at the
    first own token that is read in 2 bits, and nothing but prefixes of others may be."""
    int2.flush_cache()
    ids, body = prompts[13], {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    before = reads(int2)
    first = int2.post("/generate", input_ids=ids, sampling_params=body, return_logprob=True)
    again = int2.post("/generate", input_ids=ids, sampling_params=body, return_logprob=True, logprob_start_len=0)
    assert again["meta_info"]["cached_tokens"] < len(ids) // 2
    pairs = zip(*(a["meta_info"]["output_token_logprobs"] for a in (first, again)), strict=True)
    assert max(abs(a[0] - b[0]) for a, b in pairs) < 0.05
    int2.flush_cache()
    together = int2.post("/generate", input_ids=[ids] * 5, sampling_params=body, return_logprob=True)
    assert all(a["output_ids"] == first["output_ids"] for a in together)
    tokens, exact = (b - a for a, b in zip(before, reads(int2), strict=True))
    assert 1000 < 0.95 * tokens < exact <= tokens  # what is missing was written by others, whose rows are gone

    session = int2.post("/open_session", capacity_of_str_len=1000, streaming=True)
    rid = None
    for turn in range(4):
        params = {"id": session, "rid": rid}
        answer = int2.post("/generate", input_ids=prompts[9 + turn], sampling_params=body, session_params=params)
        rid = answer["meta_info"]["id"]
        assert turn == 0 or answer["meta_info"]["cached_tokens"] > 0
        for ids in prompts[2:6]:
            ask(int2, ids, new_tokens=2)
    requests.post(int2.url + "/close_session", json={"session_id": session}, timeout=60).raise_for_status()


def test_a_request_does_not_feel_its_neighbours(int2, prompts):
    """Alone and among others: what is stored, and so what is answered, is the same. The prompts have no common beginning and
    fit one chunk: what a prompt reads in 2 bits depends on chunks and prefix hits (docs/serving.md)."""
    int2.flush_cache()
    alone = [ask(int2, ids)[0] for ids in prompts[16:]]
    int2.flush_cache()
    together = [tokens for tokens, _ in ask_together(int2, prompts[16:], workers=4)]
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    assert same >= 7, f"{same} of 8 answers are equal"


def test_metrics_say_what_the_stores_hold(int2):
    """Prometheus text, against /server_info."""
    state = int2.info()["internal_states"][0]["oscar"]
    text = requests.get(int2.url + "/metrics", timeout=60).text
    values = dict(re.findall(r"^sglang:oscar_(\w+)\{[^}]*\} (\S+)", text, re.M))
    for name in ("bits_per_element", "bytes_per_token", "tokens", "pool_bytes"):
        assert float(values[name]) == state[name], name
    assert float(values["sink_rows_lost_total"]) == state["sink_rows_lost"]
    assert float(values["sink_rows_reused_total"]) == state["sink_rows_reused"]


def test_sizes_are_the_tensors_sizes(int2):
    """Layers x KV heads x (36 + 36) bytes and the slot's map entry."""
    state = int2.info()["internal_states"][0]["oscar"]
    config = json.loads((embedded_model() / "config.json").read_text())
    rows = config["num_hidden_layers"] * config["num_key_value_heads"]
    assert state["bits_per_element"] == 2.25 and state["bytes_per_token"] == rows * 72 + 5
    assert state["pool_bytes"] == (state["tokens"] + state["page_size"]) * state["bytes_per_token"]
    assert f"{state['tokens']} slots of {state['bytes_per_token']} bytes" in int2.log.read_text()


def test_chat_with_streaming(int2, model):
    needle = make_needle(AutoTokenizer.from_pretrained(model), 400, seed=11)
    body = {"model": "m", "messages": needle.messages, "max_tokens": 24, "temperature": 0}
    whole = int2.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    parts = []
    with requests.post(int2.url + "/v1/chat/completions", json=body | {"stream": True}, stream=True, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"]
                parts.append((delta[0]["delta"].get("content") or "") if delta else "")
    assert "".join(parts) == whole and len(parts) > 3


def test_generate_in_a_batch(int2, prompts):
    answers = int2.post("/generate", input_ids=prompts[4:8], sampling_params={"max_new_tokens": 5, "temperature": 0})
    assert len(answers) == 4 and all(answer["meta_info"]["completion_tokens"] <= 5 for answer in answers)


def test_weights_cannot_change_under_the_cache(int2, model):
    answer = requests.post(int2.url + "/update_weights_from_disk", json={"model_path": model}, timeout=120)
    assert answer.status_code != 200 and "restart the server" in answer.json()["message"]


def test_bench_serving_runs(int2, model, tmp_path):
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--dataset-name", "random-ids"]
    command += ["--base-url", int2.url, "--model", model, "--tokenizer", model, "--num-prompts", "6"]
    command += ["--random-input-len", "200", "--random-output-len", "8", "--output-file", str(tmp_path / "out.jsonl")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])["completed"] == 6
