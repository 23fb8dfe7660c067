"""The format: literal bytes, nearest codes, odd shapes, special values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar.format.codec import LEVELS, LosslessFormat, RowFormat, clip_index, decode, encode, unpack

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


def rows(*shape, seed=0, shift=0.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2.0 + shift


def test_literal_bytes():
    """Input and bytes written out by hand, so that no two implementations can drift together."""
    fmt = RowFormat(head_dim=8)
    # min -3, max 3: centre 0, step 2; bounds -2, 0, 2. Channels 0,2,4,6 share byte 0; 1,3,5,7 share byte 1.
    x = torch.tensor([[-3.0, -1.0, 1.0, 3.0, 0.5, -2.5, 2.5, -0.5]])
    codes = [0, 1, 2, 3, 2, 0, 3, 1]
    byte0 = codes[0] | codes[2] << 2 | codes[4] << 4 | codes[6] << 6
    byte1 = codes[1] | codes[3] << 2 | codes[5] << 4 | codes[7] << 6
    out = encode(x, fmt, torch.ones(1))
    # float16: 0.0 = 0x0000, 2.0 = 0x4000, little endian
    assert out.tolist() == [[byte0, byte1, 0x00, 0x00, 0x00, 0x40]]
    assert (byte0, byte1) == (0b11_10_10_00, 0b01_00_11_01)
    assert decode(out, fmt).tolist() == [[-3.0, -1.0, 1.0, 3.0, 1.0, -3.0, 3.0, -1.0]]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("shift", [0.0, 10.0, -10.0])
def test_codes_are_nearest_under_the_stored_metadata(head_dim, shift):
    for group_size in {16, 32, 64, 128, head_dim}:
        if head_dim % group_size:
            continue
        fmt = RowFormat(head_dim, group_size)
        x = rows(5, 3, head_dim, shift=shift)
        packed = encode(x, fmt, torch.ones(3))
        assert packed.shape == (5, 3, fmt.row_bytes) and packed.dtype == torch.uint8
        code, centre, step = unpack(packed, fmt)
        levels = centre[..., None, None] + torch.tensor(LEVELS) * step[..., None, None]
        distance = (x.unflatten(-1, (fmt.num_groups, group_size)).unsqueeze(-1) - levels).abs()
        chosen = distance.gather(-1, code.unflatten(-1, (fmt.num_groups, group_size)).long().unsqueeze(-1))
        assert (chosen.squeeze(-1) <= distance.amin(-1) + 1e-6).all()
        # Half a step, plus what rounding centre and step to 16 bits can move an end point.
        slack = centre.abs() * 2.0**-8 + step * 2.0**-6
        error = (decode(packed, fmt) - x).unflatten(-1, (fmt.num_groups, group_size)).abs().amax(-1)
        assert (error <= step / 2 + slack).all()


def test_bits_per_element():
    assert RowFormat(128).row_bytes == 36 and RowFormat(128).bits_per_element == 2.25
    assert RowFormat(128, 64).bits_per_element == 2.5


@pytest.mark.parametrize("ratio, rank", [(0.96, 122), (0.92, 117), (1.0, 127)])
def test_clip_rank_is_the_papers(ratio, rank):
    assert clip_index(torch.tensor([ratio]), 128).item() == rank


def test_clip_is_exact_and_per_head():
    fmt = RowFormat(128)
    x = rows(7, 2, 128)
    out = decode(encode(x, fmt, torch.tensor([0.92, 1.0])), fmt)
    tau = x[:, 0].abs().sort(-1).values[:, 117]
    assert torch.allclose(out[:, 0].abs().amax(-1), tau, rtol=2e-3)
    assert torch.allclose(out[:, 1].amax(-1), x[:, 1].amax(-1), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-8, 1e-4, 1.0, -300.0, 6e4])
def test_constant_rows(value):
    fmt = RowFormat(64)
    for noise in (0.0, 1e-7):
        x = torch.full((2, 1, 64), value) + noise * rows(2, 1, 64)
        out = decode(encode(x, fmt, torch.ones(1)), fmt)
        half_ulp = 2.0**-11
        assert torch.isfinite(out).all()
        # float16 cannot hold a step below 6.1e-5: the floor of what it can tell apart.
        assert ((out - x).abs() <= abs(value) * half_ulp + 1e-4).all()


def test_huge_and_subnormal_rows_are_bounded():
    fmt = RowFormat(32)
    x = rows(4, 1, 32)
    x[1] *= 1e38
    x[2] *= 1e-42
    x[3] = 65504.0
    out = decode(encode(x, fmt, torch.ones(1)), fmt)
    assert torch.isfinite(out).all()
    assert (out[2].abs() <= 1e-4).all() and torch.allclose(out[3], x[3])


def test_bad_values_stay_in_their_row_and_group():
    fmt = RowFormat(64, 32)
    x = rows(4, 2, 64)
    clean = encode(x, fmt, torch.ones(2))
    bad = x.clone()
    bad[1, 0, 3], bad[2, 1, 40], bad[2, 1, 41] = float("nan"), float("inf"), float("-inf")
    out = encode(bad, fmt, torch.ones(2))
    assert torch.isfinite(decode(out, fmt)).all()
    touched = torch.zeros(4, 2, dtype=torch.bool)
    touched[1, 0] = touched[2, 1] = True
    assert torch.equal(out[~touched], clean[~touched])
    assert torch.equal(decode(out, fmt)[2, 1, :32], decode(clean, fmt)[2, 1, :32])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_rows_bytes_depend_on_that_row_alone(data):
    head_dim = data.draw(st.sampled_from(HEAD_DIMS))
    tokens, heads = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4))
    fmt = RowFormat(head_dim, data.draw(st.sampled_from([head_dim, head_dim // 2 if head_dim % 8 == 0 else head_dim])))
    x = rows(tokens, heads, head_dim, seed=data.draw(st.integers(0, 99)), shift=data.draw(st.sampled_from([0.0, 5.0])))
    ratio = torch.linspace(0.9, 1.0, heads)
    whole = encode(x, fmt, ratio)
    cut = data.draw(st.integers(0, tokens))
    assert torch.equal(whole, torch.cat([encode(x[:cut], fmt, ratio), encode(x[cut:], fmt, ratio)]))
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    assert torch.equal(whole[order], encode(x[order], fmt, ratio))
    assert torch.equal(whole, encode(x.unsqueeze(0), fmt, ratio)[0])


@pytest.mark.parametrize(
    "args, words",
    [((30,), "head_dim=30"), ((128, 48), "group_size=48"), ((128, 0), "group_size=0")],
)
def test_formats_that_do_not_exist_are_refused(args, words):
    with pytest.raises(ValueError, match=words):
        RowFormat(*args)


def test_wrong_width_is_refused():
    with pytest.raises(ValueError, match="head_dim=64"):
        encode(rows(2, 1, 32), RowFormat(64), torch.ones(1))


@pytest.mark.parametrize("group_size", [16, 8])
def test_shaping_is_the_loop_of_the_docstring(group_size):
    generator = torch.Generator().manual_seed(0)
    fmt, clip = RowFormat(16, group_size), torch.tensor([0.9, 1.0])
    x = torch.randn(5, 2, 16, generator=generator) * torch.tensor([1.0, 40.0]).view(2, 1) + 0.3
    shaping = torch.randn(2, 16, 16, generator=generator).triu(1) * 0.4
    rows = encode(x, fmt, clip, shaping=shaping)
    code, centre, step = unpack(rows, fmt)
    _, centre_alone, step_alone = unpack(encode(x, fmt, clip), fmt)
    assert torch.equal(centre, centre_alone) and torch.equal(step, step_alone)
    for n in range(5):
        for h in range(2):
            passed_on = [torch.tensor(0.0)] * 16
            for i in range(16):
                c, s = centre[n, h, i // group_size], step[n, h, i // group_size]
                wanted = x[n, h, i] - passed_on[i]
                expected = sum(bool(wanted > c + t * s) for t in (-1.0, 0.0, 1.0))
                assert code[n, h, i] == expected
                error = (c + (expected - 1.5) * s) - x[n, h, i]
                passed_on = [a + error * shaping[h, i, j] if j > i else a for j, a in enumerate(passed_on)]


def test_no_shaping_is_zero_shaping():
    x = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    x[0, 0, 3], x[1, 1, 5], x[2] = float("inf"), float("nan"), 0.25
    fmt, clip = RowFormat(64, 32), torch.tensor([0.9, 1.0])
    assert torch.equal(encode(x, fmt, clip), encode(x, fmt, clip, shaping=torch.zeros(2, 64, 64)))


def test_shaped_rows_stay_finite():
    """Whatever the row holds and however strong the shaping, errors do not run away."""
    x = torch.randn(50, 1, 64, generator=torch.Generator().manual_seed(0)) * 1e4
    x[0, 0, 0], x[1] = float("inf"), 65504.0
    shaping = torch.full((1, 64, 64), 0.9).triu(1)
    fmt = RowFormat(64)
    assert torch.isfinite(decode(encode(x, fmt, torch.tensor([0.96]), shaping=shaping), fmt)).all()


def test_rows_in_full():
    """float32 and bfloat16 rows are the numbers themselves, rounded to the row's type and no further."""
    x = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0))
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        fmt = LosslessFormat(16, name)
        stored = encode(x, fmt, torch.ones(2))
        assert stored.shape == (5, 2, fmt.row_bytes) and fmt.row_bytes == 16 * dtype.itemsize
        assert torch.equal(decode(stored, fmt), x.to(dtype).float())
    with pytest.raises(ValueError, match="dtype must be one of .*, got 'float16'"):
        LosslessFormat(16, "float16")
