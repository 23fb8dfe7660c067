"""Statistics and errors taken inside SGLang equal those taken through Transformers, on one rank and on two."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import forking
import pytest
import torch

pytest.importorskip("sglang")

from oscar.calibration import run_sglang
from oscar.calibration.clip_search import ClipSearch
from oscar.calibration.heldout import LayerErrorSums, total
from oscar.calibration.run_sglang import Engine, capture, measure, search_clip, surrogate
from oscar.calibration.run_transformers import capturing
from oscar.calibration.text import Sequence
from oscar.format.artifact import Artifact
from oscar.format.identity import ModelIdentity
from oscar.format.side import LayerTransforms, Side
from oscar.methods.statistics import MomentSums, SurrogateSums, output_moment

LENGTHS = (300, 1, 77)  # the first would be three of the chunks that are asked for below


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(model in memory, its folder, its identity): a random Qwen3 of two layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    made = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return made, folder, ModelIdentity.from_path(folder)


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(1)
    names = ("a.txt", "b.c.txt", "a.txt")
    return [
        Sequence(torch.randint(0, 256, (n,), generator=generator), name, False) for n, name in zip(LENGTHS, names, strict=True)
    ]


def test_text_that_the_model_writes_in_the_engine(tmp_path, monkeypatch):
    """Parts are as long as asked whenever the model ends a text; each goes on with the next opening."""
    import sglang
    from safetensors import safe_open
    from sglang.srt.oscar import capture as inside

    class Engine:
        """Ends every text after two tokens."""

        def __init__(self, **settings):
            assert settings["random_seed"] == 3

        def generate(self, input_ids, sampling_params):
            assert all(len(ids) + s["max_new_tokens"] == 12 for ids, s in zip(input_ids, sampling_params, strict=True))
            return [{"output_ids": [7, 8][: s["max_new_tokens"]]} for s in sampling_params]

        def shutdown(self):
            pass

    monkeypatch.setattr(sglang, "Engine", Engine)
    assert inside.write(tmp_path, {"random_seed": 3}, [[1], [2, 3]], 2, 12) == 0
    with safe_open(tmp_path / "text.safetensors", "pt") as file:
        text = file.get_tensor("text").tolist()
    assert text == [[1, 7, 8] * 4, [2, 3, 7, 8] * 3]
    assert (tmp_path / "served").read_text() == "24"


@pytest.mark.parametrize("task", ["statistics", "surrogate"])
def test_no_pass_cuts_a_prompt_into_chunks(task, tmp_path, monkeypatch):
    """Moments weighted by attention from first chunks alone would know the first positions only."""
    import sglang
    from safetensors.torch import save_file
    from sglang.srt.oscar import capture as inside

    class Started(Exception):
        pass

    def engine(**settings):
        raise Started(settings["chunked_prefill_size"], settings["tp_size"])

    monkeypatch.setattr(sglang, "Engine", engine)
    asked = json.dumps({"chunked_prefill_size": 128, "tp_size": 2})
    about = {"engine": asked, "sources": json.dumps(["a"]), "task": task}
    save_file({"sequence.0": torch.arange(300)}, tmp_path / "request.safetensors", about)
    with pytest.raises(Started) as started:
        inside.main(tmp_path)
    assert started.value.args == (-1, 2)


@pytest.fixture
def forked(monkeypatch):
    """Workers are forked, in a process that `forking` runs."""
    monkeypatch.setenv("PYTHONPATH", str(Path(forking.__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("FORKING_RUNS", run_sglang.MODULE)
    monkeypatch.setattr(run_sglang, "MODULE", "forking")


@pytest.mark.parametrize("tp_size", [1, 2])
def test_statistics_equal_the_other_capture(tp_size, model, sequences, request):
    if tp_size == 2:
        request.getfixturevalue("forked")
    made, folder, identity = model
    found = capture(identity, Engine(folder, tp_size, "float32", {"chunked_prefill_size": 128}), sequences)
    expected = {i: MomentSums(i) for i in range(2)}

    def add(c):
        expected[c.layer_id].add(*c.tokens())
        expected[c.layer_id].attend(*c.tokens(0), **c.how)

    with capturing(made, add) as run:
        for s in sequences:
            run(s.tokens.unsqueeze(0))
    for i in range(2):
        weight = made.model.layers[i].self_attn.o_proj.weight
        expected[i].output_moment = output_moment(weight, 2, 64)
        a, b = found[i].finish(), expected[i].finish()
        assert a.num_tokens == b.num_tokens == sum(LENGTHS)  # no warm-up, no decoded token
        torch.testing.assert_close(a.output_moment, b.output_moment, atol=1e-12, rtol=1e-12)
        for name in ("q_moment", "k_moment", "k_mean", "v_moment", "v_mean", "v_score_moment"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x - y).norm() < 1e-5 * y.norm(), (i, name)
        for name in ("q_moment", "k_moment", "k_mean", "v_moment", "output_moment"):
            x, y = getattr(a, f"attended_{name}"), getattr(b, f"attended_{name}")
            assert (x - y).norm() < 1e-4 * y.norm(), (i, f"attended_{name}")


@pytest.fixture(scope="module")
def artifact(model):
    """Random rotations."""
    generator = torch.Generator().manual_seed(2)
    layers = {
        i: LayerTransforms(
            *(
                Side(torch.linalg.qr(torch.randn(2, 64, 64, generator=generator)).Q, torch.tensor(clip))
                for clip in ([0.96, 0.9], [0.92, 0.94])
            )
        )
        for i in range(2)
    }
    return Artifact(model[2], "test", 64, 4, 16, 1, layers)


def test_surrogate_equals_the_other_capture(model, sequences, forked):
    made, folder, identity = model
    q = torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    q_moments = dict(enumerate(q @ q.mT))
    found = surrogate(identity, Engine(folder, 2, "float32", {"chunked_prefill_size": 128}), sequences, q_moments)
    expected = {i: SurrogateSums(i, moment) for i, moment in q_moments.items()}
    with capturing(made, lambda c: expected[c.layer_id].add(*c.tokens()[1:3])) as run:
        for s in sequences:
            run(s.tokens.unsqueeze(0))
    for i in range(2):
        assert (found[i] - expected[i].finish()).norm() < 1e-5 * found[i].norm()


def test_clip_search_equals_the_other_capture(model, sequences, artifact, forked):
    """One layer is left out: it is neither searched nor missed."""
    made, folder, _ = model
    part = replace(artifact, layers={1: artifact.layers[1]})
    found = search_clip(part, Engine(folder, 2, "float32"), sequences)
    expected = ClipSearch(part.layers[1], part.k_format, part.v_format, 4, 16)
    with capturing(made, lambda c: expected.add(c) if c.layer_id == 1 else None) as run:
        for s in sequences:
            run(s.tokens.unsqueeze(0))
    best = expected.best()
    assert list(found) == [1]
    assert torch.equal(found[1].k.clip, best.k.clip) and torch.equal(found[1].v.clip, best.v.clip)


def test_errors_equal_the_other_capture(model, sequences, artifact, forked):
    made, folder, _ = model
    layers = artifact.layers
    found = measure(artifact, Engine(folder, 2, "float32"), sequences)
    assert list(found) == ["a.txt", "b.c.txt"]
    for source, by_layer in found.items():
        expected = {i: LayerErrorSums(t, artifact.k_format, artifact.v_format, 4, 16) for i, t in layers.items()}
        with capturing(made, lambda c, sums=expected: sums[c.layer_id].add(c)) as run:
            for s in sequences:
                if s.source == source:
                    run(s.tokens.unsqueeze(0))
        for i in range(2):
            # A float32 difference between the captures can tip a code to its neighbour, hence not tighter.
            assert asdict(total([by_layer[i]])) == pytest.approx(asdict(total([expected[i]])), rel=1e-3, abs=1e-6)
