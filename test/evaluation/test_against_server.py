"""What is measured in this process is what a running server does. Starts one."""

import os

import pytest
import torch
from forking import forking

from oscar.calibration.load_model import load_model
from oscar.evaluation import configurations as making
from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import make_needle
from oscar.evaluation.options import EvaluationOptions
from oscar.evaluation.reader import Reader
from oscar.evaluation.run import evaluate
from oscar.format import artifact

WINDOWS = (4, 16)


@pytest.fixture(scope="module")
def server(outliers):
    """SGLang with --kv-quant oscar on the model with outliers."""
    folder, file = outliers
    flags = ["--dtype", "float32", "--max-total-tokens", "16384", "--disable-radix-cache", "--kv-quant", "oscar"]
    flags += ["--oscar-artifact", file, "--oscar-sink-tokens", WINDOWS[0], "--oscar-recent-tokens", WINDOWS[1]]
    with forking(LocalServer(folder, *flags, env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")})) as running:
        yield running


def test_reader_is_the_server(outliers, server):
    """Prompts of one chunk, greedy answers: the same tokens and log-probabilities from `prefill` and `decode`."""
    folder, file = outliers
    from transformers import AutoConfig, AutoTokenizer

    reader = Reader(load_model(folder, AutoConfig.from_pretrained(folder), "float32", "cpu"))
    codecs = making.from_artifact(artifact.load(file), file).codecs
    tokenizer, differences, wrong = AutoTokenizer.from_pretrained(folder), [], 0
    for seed in range(4):
        prompt = tokenizer(make_needle(tokenizer, 300, seed=seed).prompt, add_special_tokens=False)["input_ids"]
        sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
        answer = server.post("/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True)["meta_info"]
        said = [(logprob, token) for logprob, token, _ in answer["output_token_logprobs"]]
        tokens = torch.tensor([token for _, token in said])
        cache, first = reader.prefill(torch.tensor(prompt), codecs, 32)
        logits = torch.cat((first.unsqueeze(0), reader.decode(cache, tokens[:-1].unsqueeze(0), WINDOWS)[0]))
        found = logits.double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        differences += (found - torch.tensor([logprob for logprob, _ in said])).abs().tolist()
        wrong += int((logits.argmax(-1) != tokens).sum())
    assert sorted(differences)[len(differences) // 2] < 0.01 and wrong <= 4, (sorted(differences)[::8], wrong)


def test_http_and_in_process_agree(outliers, server):
    """The served cache loses many needles on this model; both ways of asking lose as many, within the interval."""
    folder, file = outliers
    report = evaluate(
        EvaluationOptions(
            folder,
            (),
            (file,),
            ("retrieval",),
            context=384,
            n=40,
            sink_tokens=WINDOWS[0],
            recent_tokens=WINDOWS[1],
            endpoint=server.url,
            served_context=True,
            dtype="float32",
            progress=False,
        )
    )
    here, there = report["methods"]["served"], report["methods"]["endpoint"]
    assert there["windows"] == list(WINDOWS) and there["method"] == "oscar"
    assert there["bits_per_element"] == pytest.approx(here["bits_per_element"])
    assert here["retrieval_ci"][0] <= there["retrieval_exact"] <= here["retrieval_ci"][1], (here, there)
    assert 0 < here["retrieval_exact"] < 1
