"""Every program in examples/ runs as a stranger would run it, and stays short."""

import json
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from oscar.embedded import embedded_model
from oscar.format import artifact as artifacts

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
starts_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")


def run(name: str, *arguments, folder: Path | None = None) -> str:
    """Standard output of an example that must end well."""
    command = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """(what `calibrate.py` printed, the artifact it wrote)."""
    file = tmp_path_factory.mktemp("examples") / "oscar.kvq"
    text = f"{embedded_model() / 'heldout.txt'}:4096"
    return run("calibrate.py", "--text", text, "--tokens", 4096, "--output", file), file


def test_there_are_five():
    assert EXAMPLES == ["batch.py", "calibrate.py", "compare.py", "kernels.py", "serve_and_ask.py"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_short_and_says_what_it_is(name):
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60 and lines[0].startswith('"""')
    shown = " ".join(run(name, "--help").split())
    assert lines[0].strip('"')[:40] in shown


def test_calibrate(calibrated):
    printed, file = calibrated
    assert artifacts.load(file).num_tokens > 0
    assert re.findall(r"^layer (\d)", printed, re.M) == ["0", "1", "2", "3"]
    assert "2.250 bits per element" in printed and "\nVerdict: " in printed


def test_compare(tmp_path):
    file = tmp_path / "report.json"
    printed = run("compare.py", "--tokens", 1024, "--context", 256, "--documents", 2, "--json", file)
    methods = json.loads(file.read_text())["methods"]
    assert list(methods) == ["int2", "oscar", "oscar-shaped"]
    assert len({found["bits_per_element"] for found in methods.values()}) == 1
    for name, found in methods.items():
        assert re.search(rf"^{name} +{found['bits_per_element']:.2f} +{found['kl_mean']:.4f} ", printed, re.M)
    assert methods["int2"]["kl_mean"] > methods["oscar-shaped"]["kl_mean"]


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("tokens", [300, 70])
def test_kernels(impl, tokens):
    """Queries are 16-bit integers in the C++ library, hence 1e-3; with 70 tokens the windows hold them all."""
    printed = run("kernels.py", "--impl", impl, "--tokens", tokens)
    same, exact = map(float, re.search(r"relative error: (\S+) against PyTorch.*, (\S+) against exact", printed).groups())
    assert same < 1e-3 and (exact < 0.01) == (tokens == 70)


@starts_sglang
def test_serve_and_ask(calibrated, tmp_path):
    printed = run("serve_and_ask.py", "--artifact", calibrated[1], "--tokens", 1000, "--log", tmp_path / "server.log")
    assert "[right]" in printed and "ready after" in printed
    assert re.search(r"question +What is the access code of \w+ \w+\?", printed)
    # A token takes 4,096 bytes in BF16 and 581 in 2 bits.
    assert re.search(r"bytes a token\D+4,096\D+581\D+7\.05", printed) and "MiB of cache" in printed


@starts_sglang
def test_batch(calibrated, tmp_path):
    """One process, no server; lines in, lines out as they come. SIGTERM ends it at once, and the next run goes on there."""
    out = tmp_path / "out.jsonl"
    (tmp_path / "prompts.txt").write_text("The list of\n\nThis function returns\n" + "Once upon a time\n" * 400)
    files = "--prompts", tmp_path / "prompts.txt", "--output", out, "--at-once", 2
    limits = "--max-new-tokens", 8, "--max-total-tokens", 4096
    command = [sys.executable, FOLDER / "batch.py", *files, "--artifact", calibrated[1], *limits]
    running = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    while running.poll() is None and not (out.exists() and out.read_text()):
        time.sleep(0.1)
    running.terminate()
    told = running.communicate(timeout=180)[1]
    assert running.returncode == 128 + signal.SIGTERM, told
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in lines[:2]] == ["The list of", "This function returns"] and len(lines) < 402
    assert all(line["answer"] for line in lines)
    (tmp_path / "prompts.txt").write_text("".join(f"{line['prompt']}\n" for line in lines) + "The end of\n")
    run("batch.py", *files, "--artifact", calibrated[1], *limits)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert again[:-1] == lines and again[-1]["prompt"] == "The end of"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.txt", "\n", "expected at least one prompt, found none"),
        (
            "bad.jsonl",
            '{"prompt": "a"}\n\n{"prompt"\n',
            'bad.jsonl, line 3: expected a JSON object with "prompt", got {',
        ),
        ("no.jsonl", '{"text": "a"}\n', 'line 1: expected a JSON object with "prompt"'),
        ("other.txt", "b\n", "found others; move it away"),
    ],
)
def test_batch_refuses(name, content, told, tmp_path):
    (tmp_path / name).write_text(content)
    (tmp_path / "out.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    command = [sys.executable, str(FOLDER / "batch.py"), "--prompts", str(tmp_path / name)]
    done = subprocess.run([*command, "--output", str(tmp_path / "out.jsonl")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
