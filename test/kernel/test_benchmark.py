"""The decode benchmark on a tiny case: what its record holds, and what it refuses."""

import importlib.util
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from oscar_kernel.cpu import library as cpu

FOLDER = Path(__file__).parents[2] / "sgl-kernel" / "benchmark"
SCRIPT = FOLDER / "bench_decode_attention.py"
KEYS = {"shape", "ctx", "batch", "int2_ms", "bf16_ms", "best16_ms", "best16_name", "ratio_best16", "read_gbps"}
KEYS |= {"bandwidth_gbps", "rel_err"}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("bench_decode_attention", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "COLD_BYTES", 1 << 20)
    return module


@pytest.mark.skipif(not cpu.supported_isas(), reason="the C++ library is not built")
def test_a_case_has_its_keys_and_a_small_error(bench):
    args = Namespace(
        page_size=16, sink_tokens=4, recent_tokens=16, peers=["sdpa"], min_rounds=1, max_rounds=1, seconds=0, threads=1
    )
    shape = bench.Shape("small", 8, 2, 64)
    case = bench.run_case(shape, 200, 1, args, torch.ones(1 << 20, dtype=torch.uint8), None)
    assert KEYS <= case.keys()
    assert case["best16_name"].startswith("sdpa") and case["int2_ms"] > 0 and case["rel_err"] < 1e-3
    assert case["ratio_best16"] == case["best16_ms"] / case["int2_ms"]
    # 180 tokens in 2 bits, 20 in 16 bits.
    assert case["int2_bytes"] == 180 * 2 * 2 * 20 + 20 * 2 * 4 * 64


def test_an_interpreter_without_vllm_ends_in_a_sentence(bench):
    worker = bench.VllmWorker(sys.executable)
    with pytest.raises(RuntimeError, match="--vllm-python: the worker ended with code 1; run "):
        worker.arm(bench.Shape("small", 8, 2, 64), 1, 64, 1)


@pytest.mark.parametrize("flags", [["--peers", "vllm"], ["--vllm-python", "python"], ["--peers", "llama"]])
def test_peers_that_cannot_run_are_refused(flags):
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and ("--vllm-python go together" in done.stderr or "expected some of" in done.stderr)
