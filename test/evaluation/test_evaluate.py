"""The reader is the server's decode, the measures measure what they say, and the reports hold what was measured."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import stress
import torch

from oscar.calibration.calibrate import calibrate, collect
from oscar.calibration.load_model import load_model
from oscar.calibration.options import CalibrationOptions
from oscar.commands.main import main
from oscar.embedded import embedded_model
from oscar.errors import OscarError
from oscar.evaluation import configurations as making
from oscar.evaluation import tasks
from oscar.evaluation.endpoint import Endpoint
from oscar.evaluation.generate import generate
from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import make_needle
from oscar.evaluation.options import EvaluationOptions
from oscar.evaluation.page import draw, hard_table, notes, table
from oscar.evaluation.reader import Reader
from oscar.evaluation.run import evaluate
from oscar.evaluation.task_scores import TaskScores, wilson
from oscar.evaluation.text_scores import TextScores, read_documents, score_text
from oscar.format import artifact, sizing
from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms, Side
from oscar.progress import Steps
from oscar_kernel import LayerCodec

WINDOWS = (4, 16)


def _layers(rank: int = 0) -> dict[int, LayerTransforms]:
    """Transforms for the tiny Qwen3: random rotations of keys, oblique maps of values, a mean taken from each."""
    generator = torch.Generator().manual_seed(rank)

    def turn() -> torch.Tensor:
        return torch.linalg.qr(torch.randn(2, 32, 32, generator=generator, dtype=torch.float64)).Q

    oblique = torch.diag(torch.logspace(-0.3, 0.3, 32, dtype=torch.float64))
    return {
        i: LayerTransforms(
            Side(turn().float(), torch.full((2,), 0.96), mean=torch.randn(2, 32, generator=generator)),
            Side((turn() @ oblique @ turn()).float(), torch.full((2,), 0.92)),
        )
        for i in range(2)
    }


def _codecs(fmt=RowFormat(32), **changes) -> dict[int, LayerCodec]:  # noqa: B008 - frozen
    return {i: LayerCodec.of(replace(layer, **changes), fmt, fmt) for i, layer in _layers().items()}


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def _divergence(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean KL(a || b) in nats from logits."""
    a, b = _log_probs(a), _log_probs(b)
    return float((a.exp() * (a - b)).sum(-1).mean())


@pytest.fixture
def tiny(make_model):
    """(reader, tokens): a random Qwen3 and 120 tokens, of which tests take 80 as context."""
    torch.manual_seed(1)
    return Reader(make_model("Qwen3")), torch.randint(0, 256, (120,))


# --- the reader -------------------------------------------------------------------------------------------------------


def test_exact_reading_is_the_model(tiny):
    reader, ids = tiny
    reading = reader.read(ids, 80)
    with torch.inference_mode():
        expected = reader.model(ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(reading.logits, expected[79:], atol=1e-4, rtol=1e-5)
    assert reading.k[0].shape == (120, 2, 32) and reading.q[1].shape == (40, 4, 32) and len(reading.output) == 2


@pytest.mark.parametrize("windows", [(0, 0), (4, 16), (64, 256)])
def test_lossless_rows_give_the_exact_logits(tiny, windows):
    reader, ids = tiny
    reading = reader.read(ids, 80)
    codecs = _codecs(LosslessFormat(32))
    found = reader.decode(reader.cache([reading], codecs, 40), ids[80:].unsqueeze(0), windows)[0]
    assert 0 <= _divergence(reading.logits[1:], found) < 1e-9


def test_all_positions_at_once_are_step_by_step_decoding(tiny):
    reader, ids = tiny
    reading, codecs = reader.read(ids, 80), _codecs()
    at_once = reader.decode(reader.cache([reading], codecs, 40), ids[80:].unsqueeze(0), WINDOWS)[0]
    cache, steps = reader.cache([reading], codecs, 40), []
    for token in ids[80:]:
        steps.append(reader.decode(cache, token.view(1, 1), WINDOWS)[0, 0])
        cache.lens = [n + 1 for n in cache.lens]
    steps = torch.stack(steps)
    # The sums of a matrix product depend on its size in the last bit, which may move a code: that is all there is between them.
    assert _divergence(steps, at_once) < 0.01 * _divergence(reading.logits[1:], at_once)
    torch.testing.assert_close(steps[:8], at_once[:8], atol=1e-3, rtol=1e-3)


def test_positions_read_only_what_comes_before_them(tiny):
    reader, ids = tiny
    reading, codecs = reader.read(ids, 80), _codecs()
    whole = reader.decode(reader.cache([reading], codecs, 40), ids[80:].unsqueeze(0), WINDOWS)[0]
    part = reader.decode(reader.cache([reading], codecs, 40), ids[80:100].unsqueeze(0), WINDOWS)[0]
    assert _divergence(whole[:20], part) < 0.01 * _divergence(reading.logits[1:21], part)


def test_documents_together_are_documents_alone(tiny):
    reader, ids = tiny
    readings = [reader.read(ids[:60], 60), reader.read(ids[20:100], 80)]
    new = torch.stack((ids[60:80], ids[100:120]))
    cache = reader.cache(readings, _codecs(), 20)
    together = reader.decode(cache, new, WINDOWS)
    for i, reading in enumerate(readings):
        alone = reader.decode(reader.cache([reading], _codecs(), 20), new[i : i + 1], WINDOWS)[0]
        torch.testing.assert_close(together[i, :8], alone[:8], atol=2e-2, rtol=1e-2)


def test_windows_are_read_in_16_bits(tiny):
    reader, ids = tiny
    reading, codecs = reader.read(ids, 80), _codecs()
    cache = reader.cache([reading], codecs, 40)
    losses = [
        _divergence(reading.logits[1:], reader.decode(cache, ids[80:].unsqueeze(0), w)[0]) for w in ((0, 0), (8, 32), (0, 120))
    ]
    assert losses[0] > 1.3 * losses[1] > 0 and losses[2] < 0.02 * losses[0]


def test_a_folded_value_transform_is_the_unfolded_one(tiny):
    """The server puts the value transform into W_V and W_O; the reader applies it to values and outputs."""
    reader, ids = tiny
    reading = reader.read(ids, 80)
    unfolded = reader.decode(reader.cache([reading], _codecs(), 40), ids[80:].unsqueeze(0), WINDOWS)[0]
    exact = reading.logits[1:]
    layers = _layers()
    with torch.no_grad():
        for i, layer in enumerate(reader.model.model.layers):
            stress._map_values(layer.self_attn, layers[i].v.transform.double())
    codecs = {i: LayerCodec.of(layer, RowFormat(32), RowFormat(32), fold_v=True) for i, layer in layers.items()}
    folded = reader.decode(reader.cache([reader.read(ids, 80)], codecs, 40), ids[80:].unsqueeze(0), WINDOWS)[0]
    assert _divergence(unfolded, folded) < 0.02 * _divergence(exact, unfolded)


def test_attention_error_is_that_of_the_layer_alone(tiny):
    reader, ids = tiny
    reading = reader.read(ids, 80)
    for fmt, bound in ((RowFormat(32), (0.01, 1.0)), (LosslessFormat(32), (0.0, 1e-5))):
        sums = reader.attention_error(reader.cache([reading], _codecs(fmt), 40), reading, WINDOWS)
        assert len(sums) == 2
        for error, square in sums:
            assert bound[0] <= (error / square) ** 0.5 <= bound[1]


def test_sliding_windows_are_refused(make_model):
    with pytest.raises(OscarError, match="expected full attention in every layer, got sliding_attention"):
        Reader(make_model("Gemma3Text"))


@pytest.mark.parametrize("family", ["Llama", "Glm4", "Qwen3Moe"])
def test_other_families(family, make_model):
    model = make_model(family)
    reader, ids = Reader(model), torch.randint(0, 256, (60,))
    reading = reader.read(ids, 40)
    heads, dim = reading.k[0].shape[1:]
    eye, ones = torch.eye(dim).expand(heads, dim, dim), torch.ones(heads)
    fmt = LosslessFormat(dim)
    codecs = {i: LayerCodec.of(LayerTransforms(Side(eye, ones), Side(eye, ones)), fmt, fmt) for i in range(2)}
    found = reader.decode(reader.cache([reading], codecs, 20), ids[40:].unsqueeze(0), WINDOWS)[0]
    assert _divergence(reading.logits[1:], found) < 1e-9


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "right", "wrong", "half wrong", "too long"])
def test_a_guess_changes_nothing(tiny, kind):
    reader, ids = tiny
    reading, codecs = reader.read(ids[:80], 80), _codecs(LosslessFormat(32))
    plain = generate(reader, reading.logits[-1], reader.cache([reading], codecs, 20), WINDOWS, {256}, 20)
    with torch.inference_mode():
        exact, prompt = [], ids[:80].tolist()
        while len(exact) < 20 and 256 not in exact:
            exact.append(int(reader.model(torch.tensor([prompt + exact])).logits[0, -1].argmax()))
    assert plain == exact
    wrong = [(token + 1) % 256 for token in plain]
    guess = {
        "none": [],
        "right": plain,
        "wrong": wrong,
        "half wrong": [wrong[i] if i % 3 == 2 else token for i, token in enumerate(plain)],
        "too long": plain + wrong * 3,
    }[kind]
    cache = reader.cache([reading], codecs, 20)
    assert generate(reader, reading.logits[-1], cache, WINDOWS, {256}, 20, guess) == plain and cache.lens == [80]


def test_generation_stops(tiny):
    reader, ids = tiny
    reading, codecs = reader.read(ids[:80], 80), _codecs(LosslessFormat(32))
    plain = generate(reader, reading.logits[-1], reader.cache([reading], codecs, 20), WINDOWS, set(), 20)
    assert len(plain) == 20
    stop = plain[7]
    expected = plain[: plain.index(stop) + 1]
    assert generate(reader, reading.logits[-1], reader.cache([reading], codecs, 20), WINDOWS, {stop}, 20, plain) == expected


# --- measures ---------------------------------------------------------------------------------------------------------


def test_text_scores_by_hand():
    class Reading:
        context, tokens = 2, torch.tensor([0, 0, 1, 0, 1])
        logits = torch.tensor([[9.0, 9.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])

    scores = TextScores()
    found = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    scores.add(Reading, found, [(0.04, 1.0), (0.0, 4.0)])
    summary = scores.summary()
    p = 1 / (1 + math.exp(-1))
    kl = p * math.log(p / (1 - p)) + (1 - p) * math.log((1 - p) / p)
    assert summary["kl_mean"] == pytest.approx(kl / 3) and summary["kl_max"] == pytest.approx(kl)
    assert summary["top1_agreement"] == pytest.approx(2 / 3)
    assert summary["attn_rel_err"] == pytest.approx([0.2, 0.0])
    # After token 1 comes 0 (probability 1/2 in both), after 0 comes 1 (found p, exact 1 - p).
    assert summary["perplexity"] == pytest.approx(math.exp((math.log(2) - math.log(p)) / 2))
    assert summary["perplexity_ratio"] == pytest.approx(math.sqrt((1 - p) / p))
    assert set(scores.summary(divergence=False)) == {"perplexity", "perplexity_ratio", "perplexity_ratio_ci"}


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(100, 100, 0.9630, 1.0), (0, 10, 0.0, 0.2775), (50, 100, 0.4038, 0.5962)]
)
def test_wilson(right, n, low, high):
    assert wilson(right, n) == pytest.approx((low, high), abs=1e-4)


def test_documents_are_exact_in_length_and_do_not_overlap(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_text("".join(chr(97 + i % 26) for i in range(1000)))
    files[1].write_text("0123456789" * 12)
    documents = read_documents(files, tokenizer, 100, 6)
    assert [len(d) for d in documents] == [100] * 4  # three of the long file, one of the short
    assert tokenizer.decode(documents[0]).startswith("abc") and tokenizer.decode(documents[3]).startswith("0123")
    with pytest.raises(OscarError, match="expected at least 5000 tokens in a row"):
        read_documents(files, tokenizer, 5000, 6)


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tasks.MAKERS)
def test_tasks_fill_the_prompt_and_know_their_answer(kind, make_tokenizer):
    tokenizer = make_tokenizer(chat=True)
    task = tasks.make(kind, tokenizer, 4000, 3)
    assert 3600 < task.num_tokens <= 4000
    assert task == tasks.make(kind, tokenizer, 4000, 3) and task != tasks.make(kind, tokenizer, 4000, 4)
    assert task.score(task.reply) == 1 and task.score("") == 0
    assert all(code in task.prompt for code in task.expected)
    assert task.score(task.reply.replace(task.expected[-1], "00000")) == pytest.approx(1 - 1 / len(task.expected))
    with pytest.raises(ValueError, match=r"takes? at least|take "):
        tasks.make(kind, tokenizer, 60, 3)


def test_twins_share_their_fields(make_tokenizer):
    task = tasks.make("twins", make_tokenizer(chat=True), 4000, 0)
    adjective, noun = task.reply.removeprefix("The access code of ").split(" is ")[0].split()
    assert task.prompt.count(f"of {adjective} ") == 5 and task.prompt.count(f" {noun} is") == 4


def test_chain_leads_to_its_code(make_tokenizer):
    task = tasks.make("chain", make_tokenizer(chat=True), 4000, 0)
    name = task.reply.removeprefix("The access code of ").split(" is ")[0]
    for _ in range(4):
        (name,) = _sources(task.prompt, name)
    assert f"The access code of {name} is {task.expected[0]}." in task.prompt


def _sources(prompt: str, name: str) -> list[str]:
    marker = f"The access code of {name} is the access code of "
    return [part.split(".")[0] for part in prompt.split(marker)[1:]]


def test_task_scores():
    scores = TaskScores()
    task = tasks.Task("retrieval", None, "", ("12345", "67890"), "", 8, 0.9, 10)
    for reply in ("12345 67890", "12345 00000", "no idea"):
        scores.add(task, reply, 0.5)
    summary = scores.summary()
    assert (summary["exact"], summary["score"], summary["unreadable"], summary["forced"]) == (
        pytest.approx(1 / 3),
        pytest.approx(0.5),
        pytest.approx(1 / 3),
        0.5,
    )
    assert scores.by_depth() == [[0, 0], [0, 0], [0, 0], [1, 3]]


# --- configurations ---------------------------------------------------------------------------------------------------


def test_bits_count_windows_and_maps():
    identity = ModelIdentity.from_path(embedded_model())
    options = CalibrationOptions(embedded_model(), method="identity")
    shapes = collect(options, identity, None, None, Steps(False), given=[]).layers
    made = making.from_method("int2", options, identity, shapes)
    elements = 1000 * 4 * 2 * 256
    window = (16 + 2 * 4) * (4 * 2 * 256 * 2 + 8)
    assert made.bits_per_element(identity, 1000, (0, 0)) == pytest.approx(2.25 + 8 * sizing.MAP_BYTES * 1000 / elements)
    assert made.bits_per_element(identity, 1000, WINDOWS) == pytest.approx(8 * (1000 * 580 + window) / elements)
    assert making.from_method("bf16", options, identity, {}).bits_per_element(identity, 1000, WINDOWS) == 16
    assert making.from_method("lossless", options, identity, {}).bits_per_element(identity, 1000, (0, 0)) > 32


def test_names_are_checked():
    making.check_names(["bf16", "lossless", "int2", "oscar-shared", "hadamard"])
    with pytest.raises(ValueError, match="--methods: expected names out of bf16, lossless, int2, .* got 'int3'"):
        making.check_names(["int3"])


# --- on the embedded model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outliers(tmp_path_factory):
    """(folder, artifact file): the embedded model with outliers, and the paper's method calibrated on it."""
    folder = tmp_path_factory.mktemp("outliers")
    stress.write("outliers", embedded_model(), folder)
    text = tuple(f"{folder / name}:2048" for name in ("heldout.txt", "heldout_code.txt"))
    options = CalibrationOptions(folder, text=text, method="oscar", dtype="float32", device="cpu", progress=False)
    made = calibrate(options)
    file = tmp_path_factory.mktemp("artifact") / "served.safetensors"
    artifact.save(made, file)
    return folder, file


def test_report_and_its_forms(outliers, tmp_path, capsys):
    folder, file = outliers
    paths = [tmp_path / name for name in ("r.json", "r.png", "r.html")]
    arguments = ["evaluate", "--model", folder, "--artifact", file, "--methods", "bf16,lossless,int2"]
    arguments += ["--context", 512, "--continuation", 32, "--documents", 3, "--n", 5, "--sink-tokens", 4]
    arguments += ["--recent-tokens", 16]
    arguments += ["--json", paths[0], "--picture", paths[1], "--page", paths[2]]
    assert main([str(a) for a in arguments]) == 0
    report = json.loads(paths[0].read_text())
    assert (report["context"], report["n"], report["windows"]) == (512, 5, [4, 16])
    keys = {"bits_per_element", "retrieval_exact", "retrieval_ci", "perplexity", "kl_mean", "kl_p99", "top1_agreement"}
    for name in ("bf16", "lossless", "int2", "served"):
        assert keys | {"attn_rel_err", "recall_hard"} <= set(report["methods"][name])
    lossless, int2, served = (report["methods"][name] for name in ("lossless", "int2", "served"))
    # The harness itself adds nothing, and the control fails.
    assert lossless["kl_max"] < 1e-9 and lossless["top1_agreement"] == 1 and max(lossless["attn_rel_err"]) < 1e-5
    assert report["methods"]["bf16"]["kl_mean"] < 1e-4
    assert int2["kl_mean"] > 1 and int2["retrieval_exact"] <= 0.2 and int2["kl_mean"] > 2 * served["kl_mean"]
    assert set(served["recall_hard"]) == set(tasks.HARD) and "recite" in report["at_chance"]
    assert paths[1].read_bytes().startswith(b"\x89PNG") and b"data:image/png" in paths[2].read_bytes()
    assert "served" in capsys.readouterr().out
    assert str(folder.parent) not in paths[0].read_text()
    assert len(table(report)) == 5 and len(hard_table(report)[0]) == 6 and any("At chance" in line for line in notes(report))


def test_a_served_context_differs_by_rounding(tiny):
    reader, ids = tiny
    coded = making.Configuration("a", _codecs(), RowFormat(32), RowFormat(32))
    lossless = making.Configuration("b", _codecs(LosslessFormat(32)), LosslessFormat(32), LosslessFormat(32))
    found = [score_text(reader, [ids], 80, [coded, lossless], [WINDOWS], served_context=served) for served in (False, True)]
    shared, served = ({name: scores.summary() for (name, _), scores in each.items()} for each in found)
    assert served["b"]["kl_max"] < 1e-9 and shared["b"]["kl_max"] < 1e-9
    assert served["a"]["kl_mean"] == pytest.approx(shared["a"]["kl_mean"], rel=0.5) and served["a"] != shared["a"]


def test_the_same_run_gives_the_same_numbers(outliers):
    folder, file = outliers
    options = EvaluationOptions(
        folder, ("bf16",), (file,), ("retrieval", "divergence"), 256, 16, 2, 2, 4, 16, dtype="float32", progress=False
    )
    first, second = evaluate(options), evaluate(options)
    first.pop("seconds"), second.pop("seconds")
    assert first == second
    assert draw(first).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tasks": ("recall",)}, "--tasks: expected names out of retrieval, .* got 'recall'"),
        ({"methods": ("int5",)}, "--methods: expected names out of .* got 'int5'"),
        ({"methods": ("bf16", "bf16")}, "expected a name of its own for every method and artifact, got 'bf16' twice"),
        ({"methods": ()}, "expected at least one of --methods, --artifact and --endpoint"),
        ({"continuation": 1}, "--continuation: expected a positive number, at least 2"),
        ({"context": 40, "methods": ("bf16",)}, "the facts and the question alone take"),
    ],
)
def test_refusals(changes, sentence):
    with pytest.raises(OscarError, match=sentence):
        evaluate(EvaluationOptions(embedded_model(), **changes, progress=False))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sink-tokens", "4,16"], "argument --sink-tokens: invalid int value: '4,16'"),
        (["--sink-tokens", "-1"], "sink_tokens must not be negative, got -1"),
        (["--picture", "r.jpg"], "--picture r.jpg: expected a file that ends in .png"),
        (["--json", "/tmp"], "--json /tmp: expected a file name, got a folder"),
        (["--methods", "int5"], "--methods: expected names out of"),
        (["--endpoint", "http://127.0.0.1:9"], "--endpoint http://127.0.0.1:9: expected an OpenAI-style server"),
        (["--text", "/nothing/here.txt", "--methods", "bf16", "--n", "1"], "--text /nothing/here.txt: expected a readable"),
    ],
)
def test_command_line_mistakes_are_one_line(arguments, sentence, capsys):
    try:
        code = main(["evaluate", "--model", str(embedded_model()), "--context", "512", "--quiet", *arguments])
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code == 2 and sentence in said and said.count("\n") == 1


def test_no_server():
    with pytest.raises(OscarError, match=r"--endpoint http://127.0.0.1:9: expected an OpenAI-style server at /v1/models"):
        Endpoint("http://127.0.0.1:9")


def test_quality_table(tmp_path):
    """The script end to end on one small cell; what it writes between the marks is a table of every method."""
    script = Path(__file__).parents[2] / "scripts" / "bench" / "quality_table.py"
    page, figures = tmp_path / "page.md", tmp_path / "quality.json"
    page.write_text(
        "before\n<!-- table: begin, written by scripts/bench/quality_table.py -->\nold\n<!-- table: end -->\nafter\n",
        encoding="utf-8",
    )
    sizes = ["--variants", "outliers", "--contexts", "1024", "--scale", "0.01", "--tokens", "2048", "--jobs", "1"]
    command = [sys.executable, str(script), *sizes, "--json", str(figures), "--page", str(page)]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- table: begin") and text.endswith("<!-- table: end -->\nafter\n") and "old" not in text
    cells = json.loads(figures.read_text())["variants"]["outliers"]["1024"]["cells"]
    assert set(cells) == {"0,0", "4,16", "64,256"}
    for w, found in cells.items():
        assert found["int2"]["kl_mean"] > 1 > found["bf16"]["kl_mean"] * 1e3 and f"windows {w}" in text
    assert text.count("| `int2` |") == 3


# --- against a running server -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(outliers):
    """SGLang with --kv-quant oscar on the model with outliers."""
    folder, file = outliers
    flags = ["--dtype", "float32", "--max-total-tokens", "16384", "--disable-radix-cache", "--kv-quant", "oscar"]
    flags += ["--oscar-artifact", file, "--oscar-sink-tokens", WINDOWS[0], "--oscar-recent-tokens", WINDOWS[1]]
    with LocalServer(folder, *flags, env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}) as running:
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
        found = _log_probs(logits).gather(1, tokens.unsqueeze(1)).squeeze(1)
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
