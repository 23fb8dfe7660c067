"""SGLang's own server tests, from the installed wheel, against a 2-bit and a lossless server with strict accounting.

The kits expect answers of a language model of some size; what is run here is what a small model can pass: the contract of the
API, sessions under load, log-probabilities of cached and uncached runs, aborts, pauses and constrained output.
"""

import json
import os
import random
import unittest

import pytest
from forking import forking
from transformers import AutoTokenizer

from oscar.calibration.calibrate import CalibrationOptions, calibrate
from oscar.embedded import embedded_model
from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import held_out_sentences
from oscar.format.artifact import save

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "OMP_NUM_THREADS": "1"}
FLAGS = ("--dtype", "float32", "--kv-quant", "oscar", "--oscar-sink-tokens", 8, "--oscar-recent-tokens", 24)
FLAGS += ("--enable-streaming-session", "--chunked-prefill-size", 256, "--max-running-requests", 16)

# Of the kit's tests two ask for more tokens than the model's context, and two under load take minutes: soak.py loads too.
SESSIONS = ("test_kv_cache_inheritance", "test_preabort_recovery")


@pytest.fixture(scope="module")
def model():
    return str(embedded_model())


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("kits") / "oscar.kvq"
    save(calibrate(CalibrationOptions(model=model, tokens=2048, max_length=512, progress=False)), path)
    return path


def serve(model, artifact, *flags):
    return forking(LocalServer(model, *FLAGS, "--oscar-artifact", artifact, *flags, env=STRICT))


def run(kit, server, model, names=(), **settings):
    """Run tests of a mixin of SGLang's against a server. names: of its tests; none for all. Raises AssertionError."""

    class Process:
        pid = server.process.pid
        poll = staticmethod(server.process.poll)

    values = {"base_url": server.url, "model": model, "process": Process(), "tokenizer": AutoTokenizer.from_pretrained(model)}
    case = type(kit.__name__, (kit, unittest.TestCase), values | settings)
    names = names or unittest.defaultTestLoader.getTestCaseNames(case)
    result = unittest.TestResult()
    unittest.TestSuite(case(name) for name in names).run(result)
    problems = [text for _, text in result.errors + result.failures]
    assert not problems, "\n".join(problems) + server.log_tail()
    assert result.testsRun == len(names) and server.process.poll() is None


@pytest.fixture(scope="module")
def prompts_of_the_kl_kit(model):
    """The kit downloads its prompts unless a file of its own is there: one with pieces of our held-out text."""
    import sglang.test.kl_test_utils as kl

    samples, longest, draw = 48, 3000, random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(" ".join(held_out_sentences()[:300]), add_special_tokens=False)["input_ids"]
    starts = [draw.randrange(0, len(ids) - 400) for _ in range(samples)]
    os.makedirs(kl.CACHE_DIR, exist_ok=True)
    name = f"input_ids_{model.replace('/', '_')}_{longest}_{samples}.json"
    with open(os.path.join(kl.CACHE_DIR, name), "w") as file:
        json.dump([ids[a : a + draw.randrange(150, 350)] for a in starts], file)


def test_on_a_lossless_server(model, artifact, prompts_of_the_kl_kit):
    """Cached and uncached runs give the same log-probabilities."""
    from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin

    with serve(model, artifact, "--oscar-codec", "lossless", "--max-total-tokens", 8192) as server:
        settings = {"kl_div_prefill_max_new_tokens": 16, "kl_div_decode_max_new_tokens": 96}  # more than a page
        run(KLDivergenceMixin, server, model, kl_div_thres=1e-6, kl_div_max_samples=8, **settings)


def test_on_a_2_bit_server(model, artifact):
    """With debug checks: the server would stop at a row that is not its token's, or an own token read in 2 bits."""
    from sglang.test.kits.abort_timeout_kit import AbortAllMixin
    from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
    from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
    from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
    from sglang.test.kits.streaming_session_kit import StreamingSessionKitMixin

    with serve(model, artifact, "--oscar-debug-checks", "--max-total-tokens", 8192) as server:
        run(BasicAPIContractMixin, server, model, served_model_name=model)
        run(AbortAllMixin, server, model, abort_all_num_requests=6, abort_all_max_new_tokens=2000, abort_all_sleep=1)
        run(PauseResumeInPlaceMixin, server, model, pause_num_requests=4, pause_max_new_tokens=64, pause_duration=1)
        run(StreamingSessionKitMixin, server, model, SESSIONS)
        # Not the kit's long JSON: the small model spends its tokens on blanks.
        run(RegexConstrainedMixin, server, model, ("test_regex_generate_email", "test_regex_generate_greeting"))
