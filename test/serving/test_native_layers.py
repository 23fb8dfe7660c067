"""Layers that an artifact leaves out: sized, stored and read in 16 bits, exactly, beside layers in 2 bits."""

import pytest
import torch
from sglang.srt.oscar.flags import OscarSettings
from sglang.srt.oscar.pool import pool_class
from sglang.srt.oscar.runtime import Runtime

from oscar.calibration.calibrate import CalibrationOptions, calibrate
from oscar.embedded import embedded_model
from oscar.errors import OscarError
from oscar.evaluation.local_server import LocalServer
from oscar.format.artifact import Artifact, load, save
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms, Side
from oscar_kernel.cpu import layer as cpu_layer
from oscar_kernel.cpu.library import library

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 64}
NATIVE, CODED = 0, 1
SINK, RECENT, TOKENS = 4, 8, 50
POOL, PAGE = 208, 16


@pytest.fixture
def runtime():
    """Of an artifact with random rotations for layer 1 and none for layer 0."""
    basis = torch.linalg.qr(torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(0))).Q
    layer = LayerTransforms(Side(basis[0], torch.full((2,), 0.96)), Side(basis[1], torch.full((2,), 0.92)))
    artifact = Artifact(ModelIdentity.from_config(CONFIG), "test", 64, SINK, RECENT, 1, {CODED: layer})
    return Runtime(OscarSettings("a", SINK, RECENT, "int2", False, True), artifact)


@pytest.fixture(params=["auto", "reference"])
def pool(request, runtime):
    made = pool_class(runtime)(POOL, PAGE, torch.bfloat16, 2, 64, 2, "cpu", False)
    codecs = {i: runtime.layer_codec(i, slice(0, 2), "cpu", fold_v=False) for i in (NATIVE, CODED)}
    windows = made.make_windows(num_requests=3)
    made.attach(codecs, num_qo_heads=4, impl=request.param)
    pages = range(windows.table.num_pages)
    slots = torch.arange(POOL - len(pages) * PAGE, POOL)
    windows.give(torch.ones(len(pages), dtype=torch.int64), torch.tensor(pages), slots)
    return made


def test_bytes_are_those_of_the_tensors(runtime, pool):
    assert pool.k_buffer[NATIVE].shape == (224, 2, 128) and pool.k_buffer[CODED].shape == (224, 2, 20)
    assert pool.pool_bytes() == 224 * runtime.bytes_per_token(2, 2) == 224 * (2 * (20 + 20) + 2 * (128 + 128) + 5)
    assert runtime.bits_per_element() == (2.5 + 16) / 2
    assert pool.get_kv_size_bytes() == (224 * 2 * 148, 224 * 2 * 148)


def test_a_native_layer_reads_what_was_written(pool):
    """Decode and extend equal attention over the bfloat16 keys and values; a 2-bit layer is far from it."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(TOKENS, heads, 64, generator=generator) for heads in (4, 2, 2))
    k, v = k.bfloat16(), v.bfloat16()
    slots = (torch.randperm(99, generator=generator)[:TOKENS] + 1).long()
    request, position = torch.ones(TOKENS, dtype=torch.int64), torch.arange(TOKENS)
    req_to_token = torch.zeros(3, TOKENS, dtype=torch.int32)
    req_to_token[1] = slots.int()
    windows = pool.windows
    rows = windows.table.rows_for(request[:30], position[:30], torch.tensor(30))
    windows.record(slots[:30], rows, position[:30])
    for layer_id in (NATIVE, CODED):
        pool.layers.store(layer_id, k[:30], v[:30], slots[:30], rows)
    extend, decode = pool.layers.batch_extend(), pool.layers.batch_decode()
    rows = windows.table.rows_for(request[30:], position[30:], torch.tensor(TOKENS))
    extend.plan(req_to_token, torch.tensor([1]), [30], [0, 20], windows.table, slots[30:], rows)
    windows.record(slots[30:], rows, position[30:])
    decode.plan(req_to_token, torch.tensor([1]), [TOKENS], windows.table)
    grouped = [x.float().repeat_interleave(2, 1).transpose(0, 1) for x in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *grouped, is_causal=True).transpose(0, 1)
    errors = {}
    for layer_id in (NATIVE, CODED):
        extended = extend.run(layer_id, q[30:], k[30:], v[30:], sm_scale=0.125)
        decoded = decode.run(layer_id, q[-1:], sm_scale=0.125)
        errors[layer_id] = [float((x - y).abs().max()) for x, y in ((decoded, expected[-1:]), (extended, expected[30:]))]
    assert max(errors[NATIVE]) < 1e-5 < 1e-2 < min(errors[CODED]), errors


def test_the_library_takes_native_rows(pool):
    """No fall back to the reference on a machine that has the library."""
    if library() is None:
        pytest.skip("the C++ library is not built here")
    assert cpu_layer.obstacle(pool.layers.cache(NATIVE), pool.layers.codec(NATIVE)) is None


def test_lossless_knows_no_native_layers(runtime):
    settings = OscarSettings("a", SINK, RECENT, "lossless", False, True)
    exact = Runtime(settings, runtime.artifact)
    assert exact.native_layers == [] and exact.bytes_per_token(2, 2) == 2 * 2 * 2 * 256 + 5
    assert exact.layer_codec(NATIVE, slice(0, 2), "cpu", False).window_dtype == torch.float32


def test_served(tmp_path):
    """A server with two of four layers in 16 bits: its capacity counts them, and it answers."""
    model, path = str(embedded_model()), tmp_path / "oscar.safetensors"
    made = calibrate(CalibrationOptions(model, tokens=2048, max_length=512, skip_layers=(0, 2), progress=False))
    save(made, path)
    with pytest.raises(OscarError, match="found none of layer 0, 2"):
        load(path)
    flags = ("--kv-quant", "oscar", "--oscar-artifact", path, "--oscar-sink-tokens", 8, "--oscar-recent-tokens", 16)
    flags += ("--oscar-allow-native-layers", "--oscar-debug-checks", "--max-total-tokens", 4096)
    with LocalServer(model, *flags, env={"OMP_NUM_THREADS": "1"}) as server:
        state = server.info()["internal_states"][0]["oscar"]
        assert state["native_layers"] == [0, 2] and state["bytes_per_token"] == 2 * 2 * 72 + 2 * 2 * 512 + 5
        assert state["pool_bytes"] == (state["tokens"] + state["page_size"]) * state["bytes_per_token"]
        ids = list(range(10, 300))
        answers = [server.post("/generate", input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 20})]
        answers.append(server.post("/generate", input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 20}))
        assert all(a["meta_info"]["completion_tokens"] > 0 for a in answers)
        assert answers[1]["meta_info"]["cached_tokens"] > 0
        log = server.log.read_text()
    assert "layers 0, 2 in 16 bits" in log and "slower PyTorch reference" not in log
