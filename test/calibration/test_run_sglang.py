"""The side of capture-inside-SGLang that knows no SGLang: ranks put together, tokens counted, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from oscar.calibration import run_sglang as sglang_capture
from oscar.calibration.calibrate import CalibrationOptions, check
from oscar.calibration.run_sglang import Engine, merge
from oscar.calibration.text import Sequence
from oscar.errors import OscarError
from oscar.format.identity import ModelIdentity
from oscar.methods.statistics import MomentSums, output_moment

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 64}

WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
"""W_O: hidden size, query heads x head_dim."""


def tensors(num_tokens: int = 30) -> list[torch.Tensor]:
    """q, k, v, output of one layer, [num_tokens, heads, 8]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(num_tokens, heads, 8, generator=generator) for heads in (8, 4, 4, 8)]


def write_ranks(folder, tp_size: int, num_tokens: int = 30, missing_layer: bool = False) -> list:
    """What each rank would write: query heads cut evenly, KV heads cut or copied."""
    files = []
    for rank in range(tp_size):
        sums = MomentSums(0)
        q, k, v, output = tensors(num_tokens)
        mine = slice(rank * 8 // tp_size, (rank + 1) * 8 // tp_size)
        kv = slice(rank * 4 // tp_size, (rank + 1) * 4 // tp_size) if tp_size <= 4 else slice(rank // 2, rank // 2 + 1)
        parts = q[:, mine], k[:, kv], v[:, kv], output[:, mine]
        sums.add(*parts)
        sums.attend(*parts, sm_scale=0.3, output_weight=WEIGHT[:, 8 * mine.start : 8 * mine.stop])
        layers = (0,) if missing_layer else (0, 1)
        found = {f"layers.{i}.{name}": x.clone() for i in layers for name, x in sums.sums.items()}
        found |= {
            f"layers.{i}.output_moment": output_moment(WEIGHT[:, 8 * mine.start : 8 * mine.stop], kv.stop - kv.start, 8)
            for i in layers
        }
        files.append(folder / f"rank-{rank}.safetensors")
        save_file(found, files[-1], {"counts": json.dumps(dict.fromkeys(layers, num_tokens))})
    return files


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_ranks_make_the_whole(tp_size, tmp_path):
    """With 8 ranks and 4 KV heads two ranks hold the same keys and half of their queries each."""
    whole = MomentSums(0)
    whole.add(*tensors())
    whole.attend(*tensors(), sm_scale=0.3, output_weight=WEIGHT)
    found = merge(ModelIdentity.from_config(CONFIG), write_ranks(tmp_path, tp_size), [Sequence(torch.arange(30), "s", False)])
    expected = whole.finish()
    for layer in found.values():
        finished = layer.finish()
        assert finished.num_tokens == 30
        torch.testing.assert_close(finished.output_moment, output_moment(WEIGHT, 4, 8), atol=1e-12, rtol=1e-12)
        for name, x in vars(expected).items():
            if isinstance(x, torch.Tensor):  # attended moments: scores are float32
                tolerance = 1e-5 if name.startswith("attended") else 1e-12
                torch.testing.assert_close(getattr(finished, name), x, atol=tolerance * float(x.abs().max()), rtol=tolerance)


def test_other_tokens_than_were_sent(tmp_path):
    """A warm-up that was counted, or a prefix that came out of a cache."""
    identity, sequences = ModelIdentity.from_config(CONFIG), [Sequence(torch.arange(30), "s", False)]
    for counted in (31, 29):
        with pytest.raises(OscarError, match=f"rank 0, layer 0: expected 30 real tokens, counted {counted}"):
            merge(identity, write_ranks(tmp_path, 2, counted), sequences)
    with pytest.raises(OscarError, match="rank 0, layer 1: expected 30 real tokens, counted 0"):
        merge(identity, write_ranks(tmp_path, 2, missing_layer=True), sequences)
    files = write_ranks(tmp_path, 2)
    files[1].unlink()
    with pytest.raises(OscarError, match="rank 1: expected its sums in rank-1.safetensors, found none"):
        merge(identity, files, sequences)


def test_an_engine_that_fails(monkeypatch):
    identity = ModelIdentity.from_config(CONFIG)
    monkeypatch.setattr(sglang_capture, "MODULE", "oscar.no_such_module")
    with pytest.raises(OscarError, match="m: SGLang ended with exit code 1"):
        sglang_capture.capture(identity, Engine("m"), [])
    with pytest.raises(OscarError, match="--tp 3 must divide the model's 4 KV heads"):
        sglang_capture.capture(identity, Engine("m", tp_size=3), [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "vllm"}, "backend must be one of hf, sglang"),
        ({"tp": 2}, "--tp and --engine-args are for --backend sglang"),
        ({"backend": "sglang", "text": ("t",), "tp": 0}, "tp must be positive"),
        ({"backend": "sglang", "text": ("t",), "device": "cpu"}, "does not support --device"),
    ],
)
def test_what_is_refused(changes, message, tiny_models, tmp_path, monkeypatch):
    (tmp_path / "t").write_text("words " * 100)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(match=message):
        check(CalibrationOptions(tiny_models(), **changes))
