"""The kernel benchmarks on tiny cases: what their records hold, and what they refuse."""

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from oscar_kernel.cpu import library as cpu

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "sgl-kernel" / "benchmark"
MODULES = ("common", "peers", "plot_decode")
KEYS = {"shape", "ctx", "batch", "int2_ms", "bf16_ms", "best16_ms", "best16_name", "ratio_best16", "read_gbps"}
KEYS |= {"bandwidth_gbps", "rel_err"}
needs_library = pytest.mark.skipif(not cpu.supported_isas(), reason="the C++ library is not built")


@pytest.fixture
def load(monkeypatch):
    """Import a script of the folder by its name; the modules that it imports are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    common = load("common")
    monkeypatch.setattr(common, "COLD_BYTES", 1 << 20)
    for name in MODULES[1:]:
        load(name)
    return load


@pytest.fixture
def small(load):
    return sys.modules["common"].Shape("small", 8, 2, 64)


@needs_library
def test_a_case_has_its_keys_and_a_small_error(load, small):
    args = Namespace(
        page_size=16, sink_tokens=4, recent_tokens=16, peers=["sdpa"], min_rounds=1, max_rounds=1, seconds=0, threads=1
    )
    case = load("bench_decode_attention").run_case(small, 200, 1, args, torch.ones(1 << 20, dtype=torch.uint8), None)
    assert KEYS <= case.keys()
    assert case["best16_name"].startswith("sdpa") and case["int2_ms"] > 0 and case["rel_err"] < 1e-3
    assert case["ratio_best16"] == case["best16_ms"] / case["int2_ms"]
    # 180 tokens in 2 bits, 20 in 16 bits.
    assert case["int2_bytes"] == 180 * 2 * 2 * 20 + 20 * 2 * 4 * 64


@needs_library
def test_the_16_bit_cache_computes_attention(load, small):
    """bfloat16 rows against SDPA over the same numbers."""
    bench, common = load("bench_decode_attention"), sys.modules["common"]
    slots = common.paged_slots(2, 100, 16)
    layers = common.random_layers(small, 1, int(slots.max()) + 1, 0, bits=16)
    decode = bench.decoder(layers, slots, bench.WindowTable.none())
    q = torch.randn(2, 8, 64).bfloat16()
    out = decode.run(0, q, sm_scale=0.125, out_dtype=torch.float32)
    cache, transform = layers.cache(0), layers.codec(0).k.read_transform
    k, v = (side.buffer[slots.long()].view(torch.bfloat16).float().transpose(1, 2) for side in (cache.k, cache.v))
    rows = torch.einsum("bhgd,hde->bhge", q.float().unflatten(1, (2, 4)), transform)
    expected = torch.nn.functional.scaled_dot_product_attention(rows, k, v).flatten(1, 2)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)


@needs_library
def test_the_overhead_of_a_call_is_measured_in_both_settings(load, small):
    found = (
        load("bench_decode_attention").call_overhead(small, calls=30),
        load("bench_extend_attention").call_overhead(small, 30),
    )
    for figures in found:
        assert set(figures) == {"back_to_back", "beside"}
        assert all(0 < f["min"] <= f["median"] <= f["max"] < 1e6 for f in figures.values())


@needs_library
def test_extend_and_store_have_their_figures(load, small):
    for prefix in (0, 70):
        case = load("bench_extend_attention").run_case(small, prefix, 8, rounds=1)
        assert case["oscar_ms"] > 0 and case["ratio"] == case["best16_ms"] / case["oscar_ms"]
    store, common = load("bench_store_kv"), sys.modules["common"]
    ours = common.random_layers(small, 2, store.NUM_SLOTS, store.NUM_ROWS)
    layers = {i: (ours.cache(i), ours.codec(i)) for i in range(2)}
    case = store.run_case(small, 3, {"cpu": ours, "reference": store.Layers(layers, 8, impl="reference")}, rounds=4)
    assert case["ratio"] == case["reference_ms"] / case["cpu_ms"]


def test_the_picture_is_drawn_from_the_record(load, tmp_path):
    load("plot_decode").draw(json.loads((ROOT / "docs" / "decode.json").read_text()), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_an_interpreter_without_vllm_ends_in_a_sentence(load, small):
    worker = load("peers").VllmWorker(sys.executable)
    with pytest.raises(RuntimeError, match="--vllm-python: the worker ended with code 1; run "):
        worker.configuration(small, 1, 64, 1)


@pytest.mark.parametrize("flags", [["--peers", "vllm"], ["--vllm-python", "python"], ["--peers", "llama"]])
def test_peers_that_cannot_run_are_refused(flags):
    command = [sys.executable, FOLDER / "bench_decode_attention.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and ("--vllm-python go together" in done.stderr or "expected some of" in done.stderr)
