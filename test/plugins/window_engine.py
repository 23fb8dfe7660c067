"""SGLang's scheduler and prefix cache in miniature, around the real windows, their pages, allocator and backend.

Memory is a list with one cell a slot. A token's 2-bit row is a write to its slot's cell, a window row a write to the
SLOTS_PER_ROW cells that it lies in, so a row whose memory was given away is seen at once. What a cell holds is named by the
tokens up to a position, which is what keys and values depend on.
"""

from collections import OrderedDict
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.oscar import hooks
from sglang.srt.oscar.backend import OscarAttnBackend
from sglang.srt.oscar.path_host import HostPath
from sglang.srt.oscar.window_pages import OscarAllocator
from sglang.srt.oscar.windows import Windows

from oscar.format.sizing import SLOTS_PER_ROW
from oscar_kernel import plan_read

SINK, RECENT, PAGE, REQUESTS, CONTEXT = 20, 12, 16, 5, 128
PAGES = 110
FREE = "free"


class Sequence(Req):
    """A request as SGLang's scheduler keeps it; only what is asked of it is made."""

    def __init__(self, tokens, caches=True):
        self.tokens, self.caches = list(tokens), caches
        self.origin_input_ids, self.output_ids, self.extra_key, self.cache_salt = list(tokens), [], None, None
        self.skip_radix_cache_insert = not caches
        self.kv = SimpleNamespace(req_pool_idx=None, kv_committed_len=0)
        self.own_from = 0
        self.in_tree = 0  # tokens whose pages the tree holds

    @property
    def row(self):
        return self.kv.req_pool_idx

    def name(self, position):
        return tuple(self.tokens[: position + 1])


class Engine:
    """SGLang's part, in miniature and in its order of calls; the maps, pages, allocator and backend are the real ones."""

    def __init__(self, pages=PAGES, retains=True, sink=SINK, recent=RECENT, debug=False):
        num_slots = (pages + 1) * PAGE
        self.memory = [FREE] * (num_slots + SLOTS_PER_ROW)
        self.rows = ReqToTokenPool(REQUESTS, CONTEXT, "cpu", False)
        self.windows = Windows(num_slots, REQUESTS + 1, sink, recent, PAGE, "cpu")
        self.allocator = OscarAllocator(pages * PAGE, PAGE, torch.uint8, "cpu", None, False)
        self.allocator.serve(self.windows, self.rows.req_to_token, retains)
        self.pages = self.allocator.window_pages
        hooks._release_with_rows(self.rows, self.pages, sink)
        self.tree = OrderedDict()  # names of whole pages of tokens -> first slot; as a tree of pages, flat
        self.locked = {}
        self.tree_cache = SimpleNamespace(
            supports_prefix_sharing=lambda: True, evict_for_alloc=lambda params: self.evict(params.num_tokens)
        )
        self.running = []
        self.backend = OscarAttnBackend.__new__(OscarAttnBackend)
        pool = SimpleNamespace(windows=self.windows, copy_rows=self.copy_rows)
        layers = SimpleNamespace(
            batch_extend=lambda: SimpleNamespace(plan=self.note), batch_decode=lambda: SimpleNamespace(plan=self.note)
        )
        vars(self.backend).update(
            token_to_kv_pool=pool,
            req_to_token_pool=self.rows,
            req_to_token=self.rows.req_to_token,
            path=HostPath(layers, self.windows, self.rows.req_to_token),
            _generation=[0] * (REQUESTS + 1),
            _debug=False,
            metrics=None,
        )

    # Memory

    def copy_rows(self, source, target):
        content = [self.memory[r * SLOTS_PER_ROW : (r + 1) * SLOTS_PER_ROW] for r in source.tolist()]
        for cells, r in zip(content, target.tolist(), strict=True):
            self.memory[r * SLOTS_PER_ROW : (r + 1) * SLOTS_PER_ROW] = cells

    def write(self, names, loc, rows):
        for name, slot, row in zip(names, loc.tolist(), rows.tolist(), strict=True):
            self.memory[slot] = ("2 bits", name)
            if row != self.windows.no_row:
                for i in range(SLOTS_PER_ROW):
                    self.memory[row * SLOTS_PER_ROW + i] = ("16 bits", name)

    def note(self, req_to_token, request, kv_lens, *rest):
        self.planned = plan_read(req_to_token, request, kv_lens, self.windows.table)
        *_, self.loc, self.new_rows = rest

    def check(self, sequences, lens):
        """What a plan reads is what was stored, and all of a request's own tokens are read in 16 bits."""
        plan = self.planned
        for b, (sequence, n) in enumerate(zip(sequences, lens, strict=True)):
            exact = {}
            for position, row, read in zip(
                plan.window_positions[b].tolist(), plan.window_rows[b].tolist(), plan.window_mask[b].tolist(), strict=True
            ):
                if read:
                    exact[position] = row
            for position in range(n):
                name = sequence.name(position)
                if position in exact:
                    cells = self.memory[exact[position] * SLOTS_PER_ROW : (exact[position] + 1) * SLOTS_PER_ROW]
                    assert set(cells) == {("16 bits", name)}, (position, cells)
                    assert not plan.packed_mask[b, position]
                else:
                    assert plan.packed_mask[b, position]
                    assert self.memory[int(plan.slots[b, position])] == ("2 bits", name)
            table = self.windows.table
            wanted = {p for p in range(n) if p < table.sink_tokens or p >= n - table.recent_tokens}
            own = {p for p in wanted if p >= sequence.own_from}
            assert own <= exact.keys() <= wanted, (sequence.row, n, own - exact.keys())

    # The prefix cache

    def evict(self, num_tokens):
        goal = self.allocator.available_size() + num_tokens
        # Leaves first: the longest names of those that nobody locks.
        for name in sorted(self.tree, key=len, reverse=True):
            if self.allocator.available_size() >= goal:
                return
            if not self.locked.get(name):
                slot = self.tree.pop(name)
                self.allocator.free_page_ids(torch.tensor([slot // PAGE]))

    def match(self, tokens):
        slots = []
        while len(slots) + PAGE < len(tokens) and (first := self.tree.get(tuple(tokens[: len(slots) + PAGE]))) is not None:
            slots += range(first, first + PAGE)
        return slots

    def lock(self, sequence, upto, by):
        for end in range(PAGE, upto + 1, PAGE):
            name = sequence.name(end - 1)
            self.locked[name] = self.locked.get(name, 0) + by

    def checkpoint(self, sequence):
        """Insert whole pages; where the tree has the tokens already, the request is rebound to the tree's slots."""
        if not sequence.caches:
            return
        row, upto = self.rows.req_to_token[sequence.row], sequence.kv.kv_committed_len // PAGE * PAGE
        for begin in range(sequence.in_tree, upto, PAGE):
            name, first = sequence.name(begin + PAGE - 1), int(row[begin])
            known = self.tree.setdefault(name, first)
            if known != first:
                self.allocator.free_page_ids(torch.tensor([first // PAGE]))
                row[begin : begin + PAGE] = torch.arange(known, known + PAGE, dtype=torch.int32)
        self.lock(sequence, sequence.in_tree, -1)
        sequence.in_tree = max(sequence.in_tree, upto)
        self.lock(sequence, sequence.in_tree, 1)

    # Requests

    def batch_of(self, sequences, lens, locs, mode, prefixes=None):
        prefixes = prefixes or [n - 1 for n in lens]
        request = torch.tensor([s.row for s in sequences])
        seq_lens = torch.tensor(lens)
        return SimpleNamespace(
            forward_mode=mode,
            reqs=sequences,
            tree_cache=self.tree_cache,
            token_to_kv_pool_allocator=self.allocator,
            req_pool_indices=request,
            req_pool_indices_cpu=request,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            out_cache_loc=torch.cat(locs),
            prefix_lens=prefixes,
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens_cpu=[n - p for n, p in zip(lens, prefixes, strict=True)],
        )

    def room(self, sequence, new):
        """Whether admission would let a request in: its tokens, a page more, and its windows in the end."""
        budget = self.allocator.create_prefill_budget(
            SimpleNamespace(
                supports_mamba=lambda: False, evictable_size=lambda: sum(PAGE for n in self.tree if not self.locked.get(n))
            )
        )
        growth = sum(self.pages.missing(s.row, CONTEXT) + PAGE for s in self.running)
        need = -(-new // PAGE) * PAGE + PAGE + self.pages.missing(sequence.row, CONTEXT)
        return need + growth < budget._available_and_evictable()

    def start(self, sequences, hits):
        """Admit requests and run their prompts, or the first chunk of one. hits: whether each looks its prefix up."""
        begun = []
        for sequence, hit in zip(sequences, hits, strict=True):
            slots = self.match(sequence.tokens) if hit else []
            for name in (sequence.name(end - 1) for end in range(PAGE, len(slots) + 1, PAGE)):
                self.locked[name] = self.locked.get(name, 0) + 1
            sequence.in_tree = len(slots)
            if self.rows.available_size() == 0 or not self.room(sequence, len(sequence.tokens)):
                self.lock(sequence, len(slots), -1)
                continue
            sequence.kv.req_pool_idx = self.rows.alloc_rows(1)[0]
            self.rows.req_to_token[sequence.row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
            sequence.own_from = len(slots)
            self.running.append(sequence)
            begun.append((sequence, len(slots)))
        return begun

    def extend(self, parts):
        """parts: (sequence, prefix, end). One step for all, as a batch."""
        if not parts:
            return
        locs = []
        for sequence, prefix, end in parts:
            last = int(self.rows.req_to_token[sequence.row, prefix - 1]) if prefix else -1
            both = torch.tensor([prefix]), torch.tensor([end])
            need = -(-end // PAGE) * PAGE - -(-prefix // PAGE) * PAGE
            self.allocator.evict_to_free_tokens(self.tree_cache, need)
            loc = self.allocator.alloc_extend(both[0], both[0], both[1], both[1], torch.tensor([last]), end - prefix)
            assert loc is not None
            self.rows.req_to_token[sequence.row, prefix:end] = loc.int()
            locs.append(loc)
        sequences, prefixes, ends = (list(x) for x in zip(*parts, strict=True))
        batch = self.batch_of(sequences, ends, locs, ForwardMode.EXTEND, prefixes)
        hooks.prepare_for_extend(None, batch)
        self.backend.init_forward_metadata(batch)
        self.check(sequences, prefixes)
        names = [s.name(p) for s, a, b in parts for p in range(a, b)]
        self.write(names, self.loc, self.new_rows)
        for sequence, _, end in parts:
            sequence.kv.kv_committed_len = end
            self.checkpoint(sequence)

    def decode(self, sequences, tokens):
        """One token for each, if memory allows after retraction."""
        while sequences:
            need = sum(PAGE for s in sequences if s.kv.kv_committed_len % PAGE == 0)
            fake = SimpleNamespace(token_to_kv_pool_allocator=self.allocator, reqs=sequences)
            need = hooks.new_tokens_required_next_decode(need, fake)
            self.allocator.evict_to_free_tokens(self.tree_cache, need)
            if self.allocator.available_size() >= need:
                break
            self.finish(sequences.pop(), keep=True)  # retracted
        if not sequences:
            return
        locs = []
        for sequence, token in zip(sequences, tokens, strict=False):
            n = sequence.kv.kv_committed_len
            sequence.tokens.append(token)
            sequence.output_ids.append(token)
            last = self.rows.req_to_token[sequence.row, n - 1 : n].long()
            loc = self.allocator.alloc_decode(torch.tensor([n + 1]), torch.tensor([n + 1]), last)
            self.rows.req_to_token[sequence.row, n] = loc.int()
            sequence.kv.kv_committed_len = n + 1
            locs.append(loc)
        batch = self.batch_of(sequences, [s.kv.kv_committed_len for s in sequences], locs, ForwardMode.DECODE)
        hooks.prepare_for_decode(None, batch)
        self.backend.init_forward_metadata(batch)
        self.write([s.name(s.kv.kv_committed_len - 1) for s in sequences], self.loc, self.new_rows)
        self.check(sequences, [s.kv.kv_committed_len for s in sequences])

    def finish(self, sequence, keep):
        """End a request. keep: its tokens go into the prefix cache first."""
        if keep:
            self.checkpoint(sequence)
        row = self.rows.req_to_token[sequence.row]
        own = row[sequence.in_tree : sequence.kv.kv_committed_len : PAGE].long()
        if len(own):
            self.allocator.free_page_ids(own // PAGE)
        self.lock(sequence, sequence.in_tree, -1)
        sequence.skip_radix_cache_insert = not keep
        sequence.kv.holds_kv = True
        self.rows.free(sequence)
        self.running.remove(sequence)

    def account(self):
        """Every page is free, of a token, of a window, or kept for a prefix."""
        own = sum(-(-s.kv.kv_committed_len // PAGE) - s.in_tree // PAGE for s in self.running)
        held = self.pages.held_slots + self.pages.retained_slots
        return self.allocator.available_size() + held + (own + len(self.tree)) * PAGE
