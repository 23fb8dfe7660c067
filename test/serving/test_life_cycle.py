"""Two servers on a tiny model: every request besides answers works or gets a sentence, and options leave the answers alone."""

import concurrent.futures

import pytest
import requests
import torch

from oscar.calibration.calibrate import calibrate
from oscar.calibration.options import CalibrationOptions
from oscar.evaluation.local_server import LocalServer
from oscar.format import artifact

NEW_TOKENS = 12
LENGTHS = (1, 5, 40, 70, 150, 200)
COMMON = ("--dtype", "float32", "--kv-quant", "oscar", "--oscar-codec", "lossless", "--oscar-debug-checks")
COMMON += ("--oscar-sink-tokens", "4", "--oscar-recent-tokens", "16", "--max-total-tokens", "2048")
OPTIONS = {
    "--chunked-prefill-size": "64",
    "--context-length": "400",
    "--disable-overlap-schedule": None,
    "--enable-cache-report": None,
    "--enable-custom-logit-processor": None,
    "--enable-mixed-chunk": None,
    "--enable-priority-scheduling": None,
    "--enable-return-hidden-states": None,
    "--enable-streaming-session": None,
    "--max-prefill-tokens": "256",
    "--num-continuous-decode-steps": "2",
    "--page-size": "16",
    "--radix-eviction-policy": "lfu",
    "--schedule-policy": "lof",
    "--served-model-name": "tiny",
    "--stream-interval": "3",
}


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("Qwen3")


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "oscar.kvq"
    artifact.save(calibrate(CalibrationOptions(model=model, tokens=512, max_length=128, progress=False)), path)
    return path


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Greedy tokens of the model alone, in Transformers."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                ids = torch.cat([ids, network(ids).logits[:, -1:].argmax(-1)], dim=1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def ask(server, prompt, **more):
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return server.post("/generate", input_ids=prompt, sampling_params=sampling, **more)["output_ids"]


def ask_together(server, prompts):
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), prompts))


@pytest.fixture(scope="module")
def server(model, file, tmp_path_factory):
    options = [word for pair in OPTIONS.items() for word in pair if word is not None]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with LocalServer(model, *COMMON, "--oscar-artifact", file, *options, log=log) as running:
        yield running


def test_many_options_answer_as_the_model_alone(server, prompts, expected):
    assert [ask(server, prompt, priority=1) for prompt in prompts] == expected
    assert ask_together(server, prompts) == expected
    assert server.info()["context_length"] == 400
    body = {"model": "tiny", "prompt": "abc " * 30, "max_tokens": 3, "temperature": 0}
    server.post("/v1/completions", **body)
    assert server.post("/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


# Path -> body of a request that is refused with status 400, and a part of the sentence.
TENSORS = {"serialized_named_tensors": ["AAAA"], "flush_cache": True}
DISTRIBUTED = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[48]], "group_name": "g"}
GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}
SEND = {"master_address": "127.0.0.1", "ports": "1", "group_name": "g"}
REFUSED = [
    ("/update_weights_from_disk", {"model_path": "MODEL"}, "restart the server"),
    ("/update_weights_from_tensor", TENSORS, "restart the server"),
    ("/update_weights_from_distributed", DISTRIBUTED, "restart the server"),
    ("/update_weights_from_ipc", {"zmq_handles": {}}, "restart the server"),
    ("/init_weights_update_group", GROUP, "restart the server"),
    ("/destroy_weights_update_group", {"group_name": "g"}, "restart the server"),
    ("/begin_weight_update", {}, "restart the server"),
    ("/end_weight_update", {}, "restart the server"),
    ("/get_weights_by_name", {"name": "model.layers.0.self_attn.v_proj.weight"}, "cannot be read out"),
    ("/init_weights_send_group_for_remote_instance", SEND | {"group_rank": 0, "world_size": 2}, "cannot be read out"),
    ("/send_weights_to_remote_instance", SEND, "cannot be read out"),
    ("/release_memory_occupation", {}, "cannot release its memory"),
    ("/release_memory_occupation", {"tags": ["weights"]}, "cannot release its memory"),
    ("/resume_memory_occupation", {}, "cannot release its memory"),
    ("/weights_checker", {"action": "reset_tensors"}, "overwrites the weights"),
    ("/generate", {"text": "", "sampling_params": {"max_new_tokens": 1}}, "at least one"),
    ("/generate", {"input_ids": [], "sampling_params": {"max_new_tokens": 1}}, "cannot be empty"),
    ("/generate", {"input_ids": [3, 260], "sampling_params": {"max_new_tokens": 1}}, "from 0 to 259, got 260"),
    ("/generate", {"input_ids": [-1], "sampling_params": {"max_new_tokens": 1}}, "got -1"),
]


def test_every_request_works_or_gets_a_sentence_and_the_server_goes_on(server, model, prompts, expected):
    for path, body, told in REFUSED:
        body = {name: str(model) if value == "MODEL" else value for name, value in body.items()}
        answer = requests.post(server.url + path, json=body, timeout=60)
        assert answer.status_code == 400 and told in answer.text, (path, answer.status_code, answer.text)
        assert server.process.poll() is None, path
    assert ask(server, prompts[3]) == expected[3]


def test_pause_flush_and_what_else_changes_no_weight_work(server, prompts, expected):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, server, prompt) for prompt in prompts[2:]]
        server.post("/pause_generation", mode="in_place")
        server.post("/continue_generation")
        assert [answer.result(60) for answer in running] == expected[2:]
    assert server.post("/update_weight_version", new_version="1", abort_all_requests=False)["success"]
    first = server.post("/weights_checker", action="checksum")
    server.flush_cache()
    session = server.post("/open_session", capacity_of_str_len=1000)
    assert requests.post(server.url + "/close_session", json={"session_id": session}, timeout=60).status_code == 200
    assert server.post("/weights_checker", action="checksum") == first
    assert ask_together(server, prompts) == expected


def test_two_replicas_answer_as_the_model_alone(model, file, prompts, expected, tmp_path):
    flags = (*COMMON, "--oscar-artifact", file, "--dp-size", "2")
    with LocalServer(model, *flags, log=tmp_path / "log", env={"OMP_NUM_THREADS": "1"}) as running:
        assert ask_together(running, prompts) == expected
        assert ask_together(running, prompts) == expected
        answer = requests.post(running.url + "/release_memory_occupation", json={}, timeout=60)
        assert answer.status_code == 400 and "cannot release its memory" in answer.text
        answer = requests.post(running.url + "/update_weights_from_tensor", json=TENSORS, timeout=60)
        assert answer.status_code == 400 and "restart the server" in answer.text
        assert len(running.info()["internal_states"]) == 2
        assert ask(running, prompts[4]) == expected[4]
