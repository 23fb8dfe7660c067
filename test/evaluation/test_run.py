"""Reports hold what was measured, of every configuration, and mistakes are one sentence."""

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from oscar.calibration.calibrate import collect
from oscar.calibration.options import CalibrationOptions
from oscar.commands.main import main
from oscar.embedded import embedded_model
from oscar.errors import OscarError
from oscar.evaluation import configurations as making
from oscar.evaluation import tasks
from oscar.evaluation.endpoint import Endpoint
from oscar.evaluation.options import EvaluationOptions
from oscar.evaluation.page import draw, hard_table, notes, table
from oscar.evaluation.run import evaluate
from oscar.format import sizing
from oscar.format.identity import ModelIdentity
from oscar.progress import Steps

WINDOWS = (4, 16)


def test_bits_count_windows_and_maps():
    identity = ModelIdentity.from_path(embedded_model())
    options = CalibrationOptions(embedded_model(), method="identity")
    shapes = collect(options, identity, None, None, Steps(False), given=[]).layers
    made = making.from_method("int2", options, identity, shapes)
    elements = 1000 * 4 * 2 * 256
    assert made.bits_per_element(identity, 1000, (0, 0)) == pytest.approx(2.25 + 8 * sizing.MAP_BYTES * 1000 / elements)
    assert made.bits_per_element(identity, 1000, WINDOWS) == pytest.approx(8 * (1000 + 3 * 64) * 581 / elements)
    assert making.from_method("bf16", options, identity, {}).bits_per_element(identity, 1000, WINDOWS) == 16
    assert making.from_method("lossless", options, identity, {}).bits_per_element(identity, 1000, (0, 0)) > 32


def test_names_are_checked():
    making.check_names(["bf16", "lossless", "int2", "oscar-shared", "hadamard"])
    with pytest.raises(ValueError, match="--methods: expected names out of bf16, lossless, int2, .* got 'int3'"):
        making.check_names(["int3"])


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


def test_stress_table(tmp_path):
    """The script end to end on one small cell; what it writes between the marks is a table of every method."""
    script = Path(__file__).parents[2] / "scripts" / "bench" / "stress_table.py"
    page, figures = tmp_path / "page.md", tmp_path / "stress.json"
    page.write_text(
        "before\n<!-- table: begin, written by scripts/bench/stress_table.py -->\nold\n<!-- table: end -->\nafter\n",
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


@pytest.fixture
def answering():
    """start(prompt_tokens): the address of a server that says it read so many tokens of every prompt; None: it says nothing."""
    servers = []

    def start(prompt_tokens):
        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                said = {"data": [{"id": "m"}], "choices": [{"text": "x", "message": {"content": "x"}}]}
                if prompt_tokens is not None:
                    said["usage"] = {"prompt_tokens": prompt_tokens}
                body = json.dumps(said).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer

            def log_message(self, *_):
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("prompt_tokens", "told"),
    [
        (150, "counted 150 to 150 tokens in a prompt, and of 3 it read less than was sent."),
        (320, "counted 320 to 320 tokens in a prompt."),
        (None, "did not say how many tokens of a prompt it read."),
    ],
)
def test_report_says_what_the_server_read(answering, prompt_tokens, told):
    """A server that truncates prompts says so in `usage`."""
    endpoint = Endpoint(answering(prompt_tokens))
    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    endpoint.score([tasks.make("retrieval", tokenizer, 300, seed) for seed in range(3)])
    report = {"windows": (4, 16), "context": 300, "n": 3, "at_chance": [], "methods": {"endpoint": endpoint.lengths()}}
    assert any(line.endswith(told) for line in notes(report)), notes(report)
