"""Quantiles searched on held-out text."""

import torch

from oscar.calibration import text
from oscar.calibration.calibrate import halves
from oscar.calibration.clip_search import GRID, ClipSearch
from oscar.calibration.run_transformers import capturing
from oscar.format.codec import RowFormat
from oscar.format.side import LayerTransforms, Side


def captures(model, ids, mask=None) -> list:
    seen = []
    with capturing(model, seen.append) as run:
        run(ids, mask)
    return seen


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def test_halves():
    held_out = [text.Sequence(torch.arange(n), "s", True) for n in (5, 1, 8)]
    first, second = halves(held_out)
    assert [len(s.tokens) for s in first] == [2, 4] and [len(s.tokens) for s in second] == [3, 1, 4]
    joined = torch.cat([second[0].tokens, first[0].tokens])
    assert sorted(joined.tolist()) == [0, 1, 2, 3, 4]


def test_searched_clip_is_no_worse_where_it_was_searched(make_model):
    """The chosen quantiles beat the paper's on the text they were chosen on, head by head, and are on the grid."""
    model, ids, fmt = make_model("Qwen3"), random_ids(1, 200), RowFormat(32)
    (capture, _) = captures(model, ids)
    eye = torch.eye(32).expand(2, 32, 32)
    search = ClipSearch(LayerTransforms(Side(eye, torch.ones(2)), Side(eye, torch.ones(2))), fmt, fmt, 4, 16)
    search.add(capture)
    best = search.best()
    for side, paper in (("k", 0.96), ("v", 0.92)):
        errors, clip = search.errors[side], getattr(best, side).clip
        assert errors.shape == (len(GRID), 2) and (errors > 0).all()
        at = [GRID.index(round(x, 2)) for x in clip.tolist()]
        for head in range(2):
            assert errors[at[head], head] == errors[:, head].min() <= errors[GRID.index(paper), head]


def test_search_looks_at_the_windows_only_if_tokens_lie_outside(make_model):
    model, fmt, eye = make_model("Qwen3"), RowFormat(32), torch.eye(32).expand(2, 32, 32)
    (capture, _) = captures(model, random_ids(1, 60))
    for recent, other in ((500, 0), (500, 600)):  # as long as the sequence or longer: no window counts
        found = []
        for window in (recent, other):
            search = ClipSearch(LayerTransforms(Side(eye, torch.ones(2)), Side(eye, torch.ones(2))), fmt, fmt, 0, window)
            search.add(capture)
            found.append(search.errors["k"])
        assert (found[0] > 0).all()
        assert torch.equal(*found)
