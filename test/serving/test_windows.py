"""The two maps under churn: no stale row is ever valid, no live request loses its sinks."""

import random

import pytest
import torch
from sglang.srt.oscar.windows import Windows

from oscar.format.sizing import window_rows
from oscar_kernel import plan_read

SINK, RECENT, REQUESTS, SLOTS = 4, 8, 6, 400


def assign(windows, request, position, seq_len, loc, num_sinks):
    """What an extend step does but for planning in between."""
    rows = windows.rows_for(request, position, seq_len, num_sinks)
    windows.record(loc, rows)
    return rows


def plan_of(windows, req_to_token, request, kv_lens):
    return plan_read(req_to_token, request, kv_lens, windows.maps)


class Engine:
    """Slots, requests and a prefix cache in miniature; `content[slot]` and `row_content[row]` stand for what is stored."""

    def __init__(self, seed, clear_on_alloc=True):
        self.random = random.Random(seed)
        self.windows = Windows(SLOTS + 1, REQUESTS + 1, SINK, RECENT, "cpu")
        self.req_to_token = torch.zeros(REQUESTS + 1, 200, dtype=torch.int32)
        self.free, self.free_rows = list(range(1, SLOTS + 1)), list(range(1, REQUESTS + 1))
        self.live, self.cached = {}, []  # request row -> slots; finished sequences whose slots are still held
        self.content, self.row_content = {}, {}
        self.clock, self.clear_on_alloc = 0, clear_on_alloc

    def alloc(self, n):
        while len(self.free) < n and self.cached:
            self.free.extend(self.cached.pop(0))
        if len(self.free) < n:
            return None
        self.random.shuffle(self.free)
        slots, self.free = self.free[:n], self.free[n:]
        if self.clear_on_alloc:
            self.windows.clear_slots(torch.tensor(slots))
        return slots

    def write(self, request, positions, seq_len, slots):
        loc = torch.tensor(slots)
        num_sinks = sum(p < SINK for p in positions)
        rows = assign(
            self.windows,
            torch.full_like(loc, request),
            torch.tensor(positions),
            torch.full_like(loc, seq_len),
            loc,
            num_sinks,
        )
        self.windows.reserve_sinks(torch.tensor([request]), [seq_len])
        self.note(slots, rows)

    def note(self, slots, rows):
        for slot, row in zip(slots, rows.tolist(), strict=True):
            self.clock += 1
            self.content[slot] = self.clock
            if row != self.windows.no_row:
                self.row_content[row] = self.clock

    def start(self):
        if not self.free_rows:
            return
        shared = self.random.choice(self.cached) if self.cached and self.random.random() < 0.6 else []
        hit = shared[: self.random.randint(0, len(shared))]
        if shared:
            self.cached.remove(shared)  # locked while it is read
        new = self.alloc(self.random.randint(1, 30))
        if shared and hit != shared:
            self.free.extend(shared[len(hit) :])
        if new is None:
            self.free.extend(hit)
            return
        request = self.free_rows.pop(self.random.randrange(len(self.free_rows)))
        slots = hit + new
        self.req_to_token[request, : len(slots)] = torch.tensor(slots)
        plan = plan_of(self.windows, self.req_to_token, torch.tensor([request]), [len(hit)])
        self.check(plan)
        self.windows.note_prefixes(self.req_to_token, torch.tensor([request]), [len(hit)], [0])
        self.write(request, list(range(len(hit), len(slots))), len(slots), new)
        self.live[request] = slots

    def step(self):
        """A decode step of all live requests, padded as a graph's batch is."""
        for request, slots in list(self.live.items()):
            new = self.alloc(1)
            if new is None:
                self.finish(request)
                continue
            slots += new
            self.req_to_token[request, len(slots) - 1] = new[0]
        if not self.live:
            return
        requests, new = list(self.live), [slots[-1] for slots in self.live.values()]
        lens = [len(slots) for slots in self.live.values()]
        pad = REQUESTS - len(requests)
        request, seq_len, loc = (torch.tensor(x + [y] * pad) for x, y in ((requests, 0), (lens, 1), (new, 0)))
        rows = self.windows.rows_for_decode(request, seq_len)
        self.windows.record(loc, rows)
        assert (rows[len(requests) :] == self.windows.no_row).all() and self.windows.maps.row_of_slot[0] == -1
        self.note(new, rows[: len(requests)])

    def finish(self, request):
        slots = self.live.pop(request)
        (self.cached.append if self.random.random() < 0.8 else self.free.extend)(slots)
        self.free_rows.append(request)

    def check(self, plan):
        """Every row that would be read holds what its slot holds."""
        positions, rows = plan.window_positions[plan.window_mask], plan.window_rows[plan.window_mask]
        if len(rows) == 0:
            return 0
        batch = plan.window_mask.nonzero()[:, 0]
        for slot, row in zip(plan.slots[batch, positions].tolist(), rows.tolist(), strict=True):
            assert self.content[slot] == self.row_content[row], "stale window row"
        return len(rows)

    def check_live(self, sinks_complete):
        if not self.live:
            return 0
        requests = list(self.live)
        lens = [len(self.live[r]) for r in requests]
        plan = plan_of(self.windows, self.req_to_token, torch.tensor(requests), lens)
        if sinks_complete:
            for b, n in enumerate(lens):
                held = plan.window_mask[b, :SINK].sum()
                assert held == min(SINK, n) or self.lost(requests[b]) > 0
        return self.check(plan)

    def lost(self, request):
        return self.windows.counters.sink_rows_lost


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("clear_on_alloc", [True, False])
def test_churn_never_reads_a_stale_row(seed, clear_on_alloc):
    """Also without the clearing at allocation, as long as every write goes through `record`."""
    engine, checked = Engine(seed, clear_on_alloc), 0
    for _ in range(400):
        action = engine.random.random()
        if action < 0.35:
            engine.start()
        elif action < 0.9:
            engine.step()
        elif engine.live:
            engine.finish(engine.random.choice(list(engine.live)))
        checked += engine.check_live(sinks_complete=False)
    assert checked > 5000 and engine.windows.counters.sink_rows_reused > 0
    assert engine.windows.maps.slot_of_row[engine.windows.no_row] == -1


def test_live_requests_keep_their_sinks_whatever_comes():
    """Two long requests run while thousands of short ones pass through the other request slots."""
    windows = Windows(3000, REQUESTS + 1, SINK, RECENT, "cpu")
    req_to_token = torch.zeros(REQUESTS + 1, 100, dtype=torch.int32)

    def run(request, first_slot, n):
        slots = torch.arange(first_slot, first_slot + n)
        windows.clear_slots(slots)
        req_to_token[request, :n] = slots.int()
        windows.note_prefixes(req_to_token, torch.tensor([request]), [0], [0])
        assign(windows, torch.full((n,), request), torch.arange(n), torch.full((n,), n), slots, SINK)

    run(1, 1, 60)
    run(2, 100, 60)
    for i in range(500):
        run(3 + i % 4, 200 + 20 * (i % 100), 20)
    plan = plan_of(windows, req_to_token, torch.tensor([1, 2]), [60, 60])
    assert plan.window_mask.all()


def test_short_prompts_get_their_sinks_in_decode():
    """A prompt of one token holds rows for the sinks that its decode steps will write, whatever else takes rows meanwhile."""
    engine = Engine(0)
    for request in range(1, REQUESTS + 1):
        engine.live[request] = engine.alloc(1)
        engine.req_to_token[request, 0] = engine.live[request][0]
        engine.write(request, [0], 1, engine.live[request])
    for n in range(2, SINK + RECENT + 6):
        engine.step()
        lens = [n] * REQUESTS
        plan = plan_of(engine.windows, engine.req_to_token, torch.arange(1, REQUESTS + 1), lens)
        assert plan.window_mask.sum(1).tolist() == [min(n, SINK + RECENT)] * REQUESTS
        engine.check(plan)


def test_short_sequences_are_exact_and_windows_have_the_right_edges():
    for n in (1, SINK - 1, SINK, SINK + 1, SINK + RECENT - 1, SINK + RECENT, SINK + RECENT + 1, 90):
        windows = Windows(200, 3, SINK, RECENT, "cpu")
        loc = torch.arange(1, n + 1)
        req_to_token = torch.zeros(3, 100, dtype=torch.int32)
        req_to_token[2, :n] = loc.int()
        rows = assign(windows, torch.full((n,), 2), torch.arange(n), torch.full((n,), n), loc, min(n, SINK))
        exact = {p for p in range(n) if rows[p] != windows.no_row}
        assert exact == {p for p in range(n) if p < SINK or p >= n - RECENT}
        assert len({int(r) for r in rows if r != windows.no_row}) == len(exact)
        plan = plan_of(windows, req_to_token, torch.tensor([2]), [n])
        assert int(plan.packed_mask.sum()) == n - len(exact)


@pytest.mark.parametrize("sink, recent", [(0, 0), (0, RECENT), (SINK, 0)])
def test_windows_may_be_off(sink, recent):
    windows = Windows(50, 3, sink, recent, "cpu")
    loc = torch.arange(1, 21)
    rows = assign(windows, torch.full((20,), 1), torch.arange(20), torch.full((20,), 20), loc, sink)
    assert int((rows != windows.no_row).sum()) == sink + recent
    assert windows.num_rows == 3 * window_rows(sink, recent)


def test_padded_rows_write_nowhere():
    windows = Windows(50, 3, SINK, RECENT, "cpu")
    loc = torch.tensor([5, 0, 0])
    rows = assign(windows, torch.tensor([1, 0, 0]), torch.tensor([30, 0, 0]), torch.tensor([31, 1, 1]), loc, 2)
    assert rows[1] == rows[2] == windows.no_row and windows.maps.row_of_slot[0] == -1
    assert windows.maps.slot_of_row[rows[0]] == 5


def test_moved_slots_take_their_rows_along():
    windows = Windows(50, 3, SINK, RECENT, "cpu")
    loc = torch.arange(1, 11)
    rows = assign(windows, torch.full((10,), 1), torch.arange(10), torch.full((10,), 10), loc, SINK)
    windows.maps.row_of_slot[40] = int(rows[9])  # a stale pair at a target
    windows.move_slots(torch.tensor([40, 41, 9]), torch.tensor([9, 1, 10]))
    assert windows.maps.row_of_slot[torch.tensor([40, 41, 9])].tolist() == [int(rows[8]), int(rows[0]), int(rows[9])]
    assert windows.maps.slot_of_row[rows[torch.tensor([8, 0, 9])]].tolist() == [40, 41, 9]
    assert windows.maps.row_of_slot[torch.tensor([1, 10])].tolist() == [-1, -1]


def test_reserved_sinks_are_not_found_by_others():
    """A short prompt reserves rows for sinks that decode will write: a prefix that had them has lost them at once."""
    windows = Windows(600, REQUESTS + 1, SINK, RECENT, "cpu")
    req_to_token = torch.zeros(REQUESTS + 1, 40, dtype=torch.int32)

    def start(request, slots, prefix_len):
        req_to_token[request, : len(slots)] = slots.int()
        windows.note_prefixes(req_to_token, torch.tensor([request]), [prefix_len], [0])
        new = slots[prefix_len:]
        windows.clear_slots(new)
        positions = torch.arange(prefix_len, len(slots))
        sinks = int((positions < SINK).sum())
        assign(windows, torch.full_like(new, request), positions, torch.full_like(new, len(slots)), new, sinks)
        windows.reserve_sinks(torch.tensor([request]), [len(slots)])

    prefix = torch.arange(1, 11)
    start(1, prefix, 0)
    for i in range(3 * REQUESTS):  # every other row is taken again and again, until the prefix has the oldest ones
        start(2 + i % 5, torch.arange(20 + 10 * i, 30 + 10 * i), 0)
    start(1, torch.tensor([500]), 0)  # the first request's row serves another, of one token
    start(2, torch.cat((prefix, torch.arange(510, 514))), len(prefix))
    held = windows._held[1:]
    taken = held[held < windows.num_sink_rows]
    assert len(taken) == len(taken.unique())
