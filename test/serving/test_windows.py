"""Windows under everything that SGLang does to a request: a state machine drives the real classes against a plain model."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.oscar.windows import Windows
from window_engine import CONTEXT, PAGE, PAGES, RECENT, REQUESTS, SINK, Engine, Sequence

from oscar.format.sizing import SLOTS_PER_ROW, window_slots


class Machine(RuleBasedStateMachine):
    @initialize(retains=st.booleans(), pages=st.sampled_from([40, 70, PAGES]))
    def begin(self, retains, pages):
        self.engine, self.total, self.waiting = Engine(pages, retains), pages * PAGE, []

    @rule(
        shape=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 90), st.booleans(), st.booleans()), min_size=1, max_size=3),
        same=st.booleans(),
    )
    def start(self, shape, same):
        """Prompts with shared beginnings, some cold although cached, some of a batch equal."""
        if same:
            shape = [shape[0]] * len(shape)
        sequences = [Sequence([kind] * min(n, 50) + [7] * max(0, n - 50), caches) for kind, n, _, caches in shape]
        begun = self.engine.start(sequences, [hit for _, _, hit, _ in shape])
        self.engine.extend([(s, prefix, len(s.tokens)) for s, prefix in begun])

    @rule(n=st.integers(20, 100), chunk=st.sampled_from([16, 32, 48]), hit=st.booleans(), kind=st.integers(0, 1))
    def start_in_chunks(self, n, chunk, hit, kind):
        for sequence, prefix in self.engine.start([Sequence([kind] * n)], [hit]):
            while prefix < n:
                end = min(prefix + chunk, n)
                self.engine.extend([(sequence, prefix, end)])
                prefix = end

    @precondition(lambda self: self.engine.running)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=REQUESTS, max_size=REQUESTS), steps=st.integers(1, 12))
    def decode(self, tokens, steps):
        for _ in range(steps):
            able = [s for s in self.engine.running if s.kv.kv_committed_len < CONTEXT - 1]
            self.engine.decode(able, tokens)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def next_turn(self, data, tokens):
        """A session goes on: its row stays, more tokens come."""
        sequence = data.draw(st.sampled_from(self.engine.running))
        n = sequence.kv.kv_committed_len
        if n + tokens < CONTEXT and self.engine.room(sequence, tokens + PAGE):
            sequence.tokens += [3] * tokens
            self.engine.extend([(sequence, n, n + tokens)])

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data, keep):
        self.engine.finish(data.draw(st.sampled_from(self.engine.running)), keep)

    @rule(num_tokens=st.integers(1, 400))
    def evict(self, num_tokens):
        self.engine.evict(num_tokens)

    @precondition(lambda self: not self.engine.running)
    @rule()
    def flush(self):
        self.engine.tree.clear()
        self.engine.locked.clear()
        self.engine.allocator.clear()
        assert self.engine.allocator.available_size() == self.total

    @invariant()
    def no_page_is_lost(self):
        if hasattr(self, "engine"):
            assert self.engine.account() == self.total
            table = self.engine.windows.table
            assert int(table.position[table.no_row]) == -1 == int(self.engine.windows.slot_of_row[table.no_row])


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestMachine = Machine.TestCase


def test_rows_are_taken_as_a_request_grows_and_given_back():
    engine = Engine()
    sequence = Sequence([1] * 3)
    engine.extend([(s, p, 3) for s, p in engine.start([sequence], [False])])
    for n in range(3, 60):
        assert engine.pages.held_slots == window_slots(n, SINK, RECENT, PAGE)
        engine.decode([sequence], [1])
    engine.finish(sequence, keep=False)
    assert engine.pages.held_slots == engine.pages.retained_slots == 0
    assert engine.allocator.available_size() == PAGES * PAGE


def test_prefixes_keep_their_sinks_while_others_come_and_go():
    """A finished prompt is found in 16 bits after many short requests, by rows of one copy, until memory is needed."""
    engine = Engine()

    def run(tokens):
        begun = engine.start([Sequence(tokens)], [True])
        for sequence, prefix in begun:
            engine.extend([(sequence, prefix, len(tokens))])
            engine.finish(sequence, keep=True)

    counters, prompt = engine.windows.counters, [1] * 60
    run(prompt)
    for i in range(30):
        run([2, i])  # a health probe
    for _ in range(3):
        run(prompt)
    assert (counters.sink_rows_reused, counters.sink_rows_lost) == (3 * SINK, 0)
    held = engine.pages._num_retained
    run(prompt)
    assert engine.pages._num_retained <= held + 2, "one copy of the sinks"
    assert engine.pages.retained_slots <= PAGES * PAGE // 8


def test_equal_prompts_of_one_batch_keep_windows_of_their_own():
    """The second is rebound to the slots of the first, which ends; others come; it still reads all in 16 bits."""
    engine = Engine()
    twins = [Sequence([1] * 64), Sequence([1] * 64)]
    engine.extend([(s, p, 64) for s, p in engine.start(twins, [False, False])])
    slots = engine.rows.req_to_token[[s.row for s in twins], :64]
    assert torch.equal(slots[0], slots[1])
    engine.finish(twins[0], keep=False)
    for i in range(6):
        other = Sequence([i + 2] * 70)
        engine.extend([(s, p, 70) for s, p in engine.start([other], [False])])
        engine.decode([twins[1]], [5])  # checks that sinks and recents are all found
        engine.finish(other, keep=False)


def test_a_prompt_computed_again_keeps_its_windows():
    """As with logprob_start_len=0: the prefix is cached, all is recomputed, and the row is rebound to the cached slots."""
    engine = Engine()
    first = Sequence([1] * 80)
    engine.extend([(s, p, 80) for s, p in engine.start([first], [False])])
    engine.finish(first, keep=True)
    again = Sequence([1] * 80)
    engine.extend([(s, p, 80) for s, p in engine.start([again], [False])])
    engine.decode([again], [1])


@pytest.mark.parametrize("sink, recent", [(0, 0), (0, 9), (5, 0), (17, 33)])
def test_windows_of_any_size(sink, recent):
    engine = Engine(sink=sink, recent=recent)
    sequences = [Sequence([k] * n) for k, n in ((1, 1), (2, 60), (3, 33))]
    engine.extend([(s, p, len(s.tokens)) for s, p in engine.start(sequences, [True] * 3)])
    for _ in range(40):
        engine.decode(list(sequences), [1, 1, 1])
    for sequence in sequences:
        engine.finish(sequence, keep=True)
    assert engine.account() == PAGES * PAGE


def test_a_session_that_closes_gives_its_pages_back():
    """SGLang frees the row of its own record then, which is no request and has no tokens."""
    engine = Engine()
    sequence = Sequence([1] * 40)
    engine.extend([(s, p, 40) for s, p in engine.start([sequence], [False])])
    engine.rows.free(SimpleNamespace(kv=SimpleNamespace(req_pool_idx=sequence.row, holds_kv=True)))
    assert engine.pages.held_slots == engine.pages.retained_slots == 0


def test_moved_slots_take_their_rows_along():
    windows = Windows(160, 3, 4, 8, 16, "cpu")
    slots, rows = torch.tensor([1, 9, 10]), torch.tensor([5, 6, windows.no_row])
    windows.bind(slots, rows)
    windows.row_of_slot[40] = 6  # a stale entry at a target
    windows.move_slots(torch.tensor([40, 41, 9]), torch.tensor([9, 1, 10]))
    assert windows.find(torch.tensor([40, 41, 9, 1, 10])).tolist() == [6, 5, *[windows.no_row] * 3]


def test_a_broken_machine_is_noticed():
    """The model sees a row whose memory was given away, and a lost window."""
    engine = Engine()
    sequence = Sequence([1] * 40)
    engine.extend([(s, p, 40) for s, p in engine.start([sequence], [False])])
    worse = copy.deepcopy(engine.memory)
    row = int(engine.windows.table.rows(torch.tensor(sequence.row), torch.tensor(3)))
    engine.memory[row * SLOTS_PER_ROW + 2] = ("2 bits", "somebody else's")
    with pytest.raises(AssertionError):
        engine.decode([sequence], [1])
    engine.memory = worse
    engine.windows.table.position[row] = -1
    with pytest.raises(AssertionError):
        engine.decode([sequence], [1])
