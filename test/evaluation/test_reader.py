"""The reader is the server's decode: exact where nothing is rounded, step by step, window by window."""

from dataclasses import replace

import pytest
import stress
import torch

from oscar.errors import OscarError
from oscar.evaluation import configurations as making
from oscar.evaluation.generate import generate
from oscar.evaluation.reader import Reader
from oscar.evaluation.text_scores import score_text
from oscar.format.codec import LosslessFormat, RowFormat
from oscar.format.side import LayerTransforms, Side
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


def _divergence(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean KL(a || b) in nats from logits."""
    a, b = (logits.double().log_softmax(-1) for logits in (a, b))
    return float((a.exp() * (a - b)).sum(-1).mean())


@pytest.fixture
def tiny(make_model):
    """(reader, tokens): a random Qwen3 and 120 tokens, of which tests take 80 as context."""
    torch.manual_seed(1)
    return Reader(make_model("Qwen3")), torch.randint(0, 256, (120,))


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
    with pytest.raises(OscarError, match=r"sliding-window attention \(layer_types has sliding_attention\)"):
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


def test_a_served_context_differs_by_rounding(tiny):
    reader, ids = tiny
    coded = making.Configuration("a", _codecs(), RowFormat(32), RowFormat(32))
    lossless = making.Configuration("b", _codecs(LosslessFormat(32)), LosslessFormat(32), LosslessFormat(32))
    found = [score_text(reader, [ids], 80, [coded, lossless], [WINDOWS], served_context=served) for served in (False, True)]
    shared, served = ({name: scores.summary() for (name, _), scores in each.items()} for each in found)
    assert served["b"]["kl_max"] < 1e-9 and shared["b"]["kl_max"] < 1e-9
    assert served["a"]["kl_mean"] == pytest.approx(shared["a"]["kl_mean"], rel=0.5) and served["a"] != shared["a"]
