"""The Triton path of the backend on CPU tensors, in Triton's interpreter: what a CUDA graph would record, replayed on ragged,
padded and shrinking batches, gives the reference's results; and a server that runs on it answers as one on the reference."""

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.oscar.path_host import HostPath
from sglang.srt.oscar.pool import window_view
from sglang.srt.oscar.windows import Windows
from torch.utils._python_dispatch import TorchDispatchMode

from oscar.format.codec import RowFormat
from oscar.format.side import LayerTransforms, Side
from oscar.format.sizing import SLOTS_PER_ROW
from oscar_kernel import LayerCache, LayerCodec, Layers, SideCache

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in test_under_the_interpreter's process")
if INTERPRETED:
    import quick_interpreter

    quick_interpreter.install()
SINK, RECENT, REQUESTS, TOKENS, CONTEXT, PAGE = 4, 8, 6, 400, 120, 16
SLOTS = TOKENS + (REQUESTS + 1) * 6 * PAGE
"""Slots of tokens, and behind them the pages of full windows."""
HEADS, RATIO, DIM = 2, 2, 64
ERROR = 5e-3
"""Largest difference on outputs near 3; measured 9e-4 in decode."""


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def codec_of(native: bool, shaping: str = "", group: int = 32, seed: int = 0) -> LayerCodec:
    """shaping: sides whose errors are passed on, "kv" for both; those of V are not exact in 16 bits."""
    if native:
        return LayerCodec.native(HEADS, DIM, DIM)
    g = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=g, dtype=torch.float64)).Q
    k_shaping, v_shaping = ((torch.randn(HEADS, DIM, DIM, generator=g) / DIM**0.5).triu(1) for _ in range(2))
    clip, fmt = torch.full((HEADS,), 0.96), RowFormat(DIM, group)
    k = Side(basis, clip, shaping=k_shaping.half().float() if "k" in shaping else None)
    v = Side(torch.eye(DIM).expand(HEADS, DIM, DIM), clip, shaping=v_shaping if "v" in shaping else None)
    return LayerCodec.of(LayerTransforms(k, v), fmt, fmt, fold_v=True)


class HostReads(TorchDispatchMode):
    """Refuses operations that wait for the device or whose result has a size that depends on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "unique",
            "repeat_interleave",
        )
        indices = args[1] if func.overloadpacket.__name__ in ("index", "index_put", "index_put_") else ()
        assert not any(i is not None and i.dtype == torch.bool for i in indices), f"{func} by a mask"
        return func(*args, **(kwargs or {}))


class World:
    """Layers, by default one in 2 bits and one in 16, with their own windows; driven by either path of the server."""

    def __init__(self, triton: bool, codecs: dict[int, LayerCodec] | None = None, sink: int = SINK, recent: int = RECENT):
        self.codecs = codecs or {0: codec_of(False), 1: codec_of(True)}
        self.windows = Windows(SLOTS, REQUESTS + 1, sink, recent, PAGE, "cpu")
        self.held = [(0, 0)] * (REQUESTS + 1)
        self.next_page = TOKENS
        self.req_to_token = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32)
        self.caches = {i: LayerCache(pool_side(codec.k), pool_side(codec.v)) for i, codec in self.codecs.items()}
        layers = {i: (self.caches[i], codec) for i, codec in self.codecs.items()}
        if not triton:
            self.path = HostPath(Layers(layers, HEADS * RATIO, "reference"), self.windows, self.req_to_token)
            return
        from sglang.srt.oscar.path_gpu import GpuPath

        self.path = GpuPath(Layers(layers, HEADS * RATIO, "triton"), self.windows, self.req_to_token)
        self.path.reserve_graphs(REQUESTS)
        # What a graph reads: refreshed in place before a replay.
        self.static = {n: batch_of(*([0] * n for _ in range(3))) for n in (REQUESTS, 3)}

    def grow(self, requests, lens):
        """Let requests hold the pages that their windows need to reach these lengths."""
        for request, n in zip(requests, lens, strict=True):
            held, wanted = self.held[request], self.windows.table.pages_for(n)
            first = 0, self.windows.table.sink_pages
            for page in (first[i] + j for i in range(2) for j in range(held[i], wanted[i])):
                slots = torch.arange(self.next_page, self.next_page + PAGE)
                self.windows.give(torch.tensor([request]), torch.tensor([page]), slots)
                self.next_page += PAGE
            self.held[request] = wanted

    def extend(self, requests, prefixes, slots, qkv):
        """Prompts, or their next chunks: new tokens in `slots` (a list a request). Outputs by layer."""
        request, lens = torch.tensor(requests), [len(s) for s in slots]
        loc = torch.tensor([slot for s in slots for slot in s])
        for r, p, s in zip(requests, prefixes, slots, strict=True):
            self.windows.clear_slots(torch.tensor(s))
            self.req_to_token[r, p : p + len(s)] = torch.tensor(s, dtype=torch.int32)
        totals = [p + n for p, n in zip(prefixes, lens, strict=True)]
        position = torch.tensor([p + i for p, n in zip(prefixes, lens, strict=True) for i in range(n)])
        each = [torch.tensor(x).repeat_interleave(torch.tensor(lens)) for x in (requests, totals)]
        self.grow(requests, totals)
        rows = self.windows.table.rows_for(each[0], position, each[1])
        self.path.plan_extend(request, prefixes, [0, *itertools.accumulate(lens)], loc, rows)
        self.windows.record(loc, rows, position)
        return [self.path.extend.run(i, *x, sm_scale=0.125) for i, x in zip(self.codecs, qkv, strict=True)]

    def decode(self, requests, lens, slots, qkv, padded=None):
        """One token a request; padded: batch size of the graph, None for a step outside graphs. Outputs of the requests."""
        for r, n, s in zip(requests, lens, slots, strict=True):
            self.windows.clear_slots(torch.tensor([s]))
            self.req_to_token[r, n - 1] = s
        self.grow(requests, lens)
        bs = len(requests)
        if padded is None or self.path.needs_cpu_seq_lens:
            padded = bs
            self.path.plan_decode(batch_of(requests, lens, slots))
        else:
            batch = self.static[padded]
            for buffer, fill, values in (
                (batch.req_pool_indices, 0, requests),
                (batch.seq_lens, 1, lens),
                (batch.out_cache_loc, 0, slots),
            ):
                buffer.fill_(fill)
                buffer[:bs] = torch.tensor(values)
            self.path.prepare_graph(padded)
            self.path.plan_graph(batch)
        out = []
        for i, tensors in zip(self.codecs, qkv, strict=True):
            q, k, v = (torch.cat((x, torch.ones(padded - bs, *x.shape[1:]))) for x in tensors)
            o = self.path.decode.run(i, q, k, v, sm_scale=0.125)
            assert (o[bs:] == 0).all()
            out.append(o[:bs])
        return out


def pool_side(side):
    """Storage as in the pool: the windows' rows lie in slots."""
    storage = torch.full((SLOTS + SLOTS_PER_ROW, HEADS, side.fmt.row_bytes), 0xAB, dtype=torch.uint8)
    return SideCache(storage[:SLOTS], window_view(storage, side.fmt.head_dim, torch.bfloat16))


def batch_of(requests, lens, slots):
    """What a path reads of SGLang's batch."""
    request, seq_lens, loc = (torch.tensor(x, dtype=torch.int64) for x in (requests, lens, slots))
    return SimpleNamespace(
        req_pool_indices=request, seq_lens=seq_lens, seq_lens_cpu=seq_lens, out_cache_loc=loc, batch_size=len(requests)
    )


class Twins:
    """The same steps in two worlds, on the reference and on the Triton path; outputs, bytes and maps compared after each."""

    def __init__(self, seed: int, *world):
        self.g = torch.Generator().manual_seed(seed)
        self.worlds = World(False, *world), World(True, *world)
        self.free = (torch.randperm(TOKENS - 1, generator=self.g) + 1).tolist()
        self.lens = {}

    def _qkv(self, n):
        def rows(heads):
            return torch.randn(n, heads, DIM, generator=self.g)

        return [(rows(HEADS * RATIO), rows(HEADS), rows(HEADS)) for _ in self.worlds[0].codecs]

    def _take(self, n):
        return [self.free.pop() for _ in range(n)]

    def _same(self, results, error=ERROR):
        for a, b in zip(*results, strict=True):
            assert (a - b).abs().max() < error
        for i, cache in self.worlds[0].caches.items():
            got = self.worlds[1].caches[i]
            for mine, theirs in ((cache.k, got.k), (cache.v, got.v)):
                assert torch.equal(theirs.buffer, mine.buffer), i  # the windows' rows too
                assert (theirs.buffer[0] == 0xAB).all(), "padding wrote slot 0"
        a, b = (world.windows for world in self.worlds)
        assert torch.equal(a.row_of_slot, b.row_of_slot) and torch.equal(a.slot_of_row, b.slot_of_row)
        assert torch.equal(a.table.position, b.table.position) and torch.equal(a.table.first_row, b.table.first_row)

    def extend(self, chunks):
        """chunks: request -> new tokens."""
        tensors, slots = self._qkv(sum(chunks.values())), [self._take(n) for n in chunks.values()]
        prefixes = [self.lens.get(r, 0) for r in chunks]
        # bfloat16 queries and weights against bfloat16 rows
        self._same([world.extend(list(chunks), prefixes, slots, tensors) for world in self.worlds], error=3e-2)
        for r, n in chunks.items():
            self.lens[r] = self.lens.get(r, 0) + n

    def decode(self, requests, padded):
        tensors, slots = self._qkv(len(requests)), self._take(len(requests))
        for r in requests:
            self.lens[r] += 1
        lens = [self.lens[r] for r in requests]
        self._same([world.decode(requests, lens, slots, tensors, padded) for world in self.worlds])


@interpreted
def test_steps_of_graphs_give_the_reference():
    twins = Twins(1)
    twins.extend({1: 1, 2: 70, 4: SINK + RECENT})
    twins.decode([1, 2, 4], 3)
    twins.decode([1, 2, 4], REQUESTS)  # the same requests in a graph of another size
    twins.extend({2: 9, 3: 2, 5: 20})  # a later chunk among new prompts
    twins.decode([5, 3, 1, 2, 4], REQUESTS)
    twins.decode([3, 5], 3)
    twins.decode([3, 5], None)
    for _ in range(4):
        twins.decode([1], 3)
    assert len(twins.worlds[1].path._graphs) == 2


def shaped_layers() -> dict[int, LayerCodec]:
    """Two alike, one with other groups and K alone, and one in 16 bits; as on a rank that begins at layer 3."""
    return {3: codec_of(False, "kv"), 4: codec_of(True), 5: codec_of(False, "k", 16, 1), 6: codec_of(False, "kv", seed=2)}


@interpreted
@pytest.mark.parametrize("sink, recent", [(3, 2), (2, 0)])
def test_codes_of_a_step_are_shaped_at_its_end(sink, recent, monkeypatch):
    """Also the first tokens of a prompt, which are sinks when they are decoded, and without recent window: layer by layer."""
    from oscar_kernel.triton.step_codes import StepCodes

    counts, write = [], StepCodes.write
    monkeypatch.setattr(StepCodes, "write", lambda self, *args: (counts.append(len(self.kinds)), write(self, *args))[1])
    twins = Twins(2, shaped_layers(), sink, recent)
    path = twins.worlds[1].path
    kinds = path.layers._state._step_codes.kinds
    addresses = [table.data_ptr() for table, _ in kinds]
    twins.extend({1: 1, 2: 4})
    twins.decode([2, 1], 3)
    if recent > 0:
        twins.decode([1], None)
        twins.decode([1, 2], 3)
        twins.extend({2: 3, 3: 2})  # over rows of decode steps
        assert counts == [2, 2, 2], "one launch a kind and step"
    assert len(counts) == (3 if recent > 0 else 0)
    assert addresses == [table.data_ptr() for table, _ in kinds]


@interpreted
@pytest.mark.parametrize("left_out", [3, 6])
def test_a_step_that_skips_a_layer_is_not_passed_over(left_out):
    world = World(True, {3: codec_of(False, "kv"), 4: codec_of(True), 6: codec_of(False, "k")}, 1, 2)
    world.grow([1], [1])
    batch = batch_of([1], [1], [7])
    for following in ("decode", "extend"):
        world.path.plan_decode(batch)
        for layer_id in world.codecs:
            if layer_id != left_out:
                q, (k, v) = torch.ones(1, HEADS * RATIO, DIM), torch.ones(2, 1, HEADS, DIM)
                world.path.decode.run(layer_id, q, k, v, sm_scale=0.125)
        with pytest.raises(RuntimeError, match=f"layers {left_out} did not"):
            if following == "decode":
                world.path.plan_decode(batch)
            else:
                world.path.plan_extend(torch.tensor([1]), [0], [0, 0], *torch.zeros(2, 0, dtype=torch.int64))


@pytest.mark.skipif(INTERPRETED, reason="starts servers of its own")
def test_a_server_on_the_kernels_answers_like_one_on_the_reference(make_model, make_tokenizer, tmp_path):
    """Two starts with a shaped artifact: prefill, chunks, prefix hits and decode, log-probabilities close."""
    from forking import forking

    from oscar.calibration.calibrate import CalibrationOptions, calibrate
    from oscar.evaluation.local_server import LocalServer
    from oscar.format.artifact import save

    model, path, text = tmp_path / "model", tmp_path / "oscar.kvq", tmp_path / "text"
    network = make_model("Qwen3")
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.div_(6)  # one code that rounds the other way then leaves the next token as it is
    network.save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    text.write_text("".join(chr(c) for c in torch.randint(32, 127, (600,), generator=torch.Generator().manual_seed(4))))
    options = CalibrationOptions(model, text=(text,), method="oscar-shaped", tokens=600, max_length=120, progress=False)
    save(calibrate(options), path)
    flags = ("--kv-quant", "oscar", "--oscar-artifact", path, "--oscar-sink-tokens", 4, "--oscar-recent-tokens", 12)
    flags += ("--dtype", "float32", "--max-total-tokens", 1024, "--max-running-requests", 2, "--chunked-prefill-size", 32)
    flags += ("--oscar-debug-checks", "--skip-server-warmup")
    # Measured: differences up to 0.007. With other tokens in the first half of a prompt most answers are other tokens.
    tokens = torch.randint(32, 127, (60,), generator=torch.Generator().manual_seed(50)).tolist()
    prompts = [tokens[:50], tokens, tokens]  # the second finds a page of the first's, the third of the second's
    answers = {}
    for kernels in ("reference", "triton"):
        env = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        with forking(LocalServer(model, *flags, "--oscar-kernels", kernels, env=env)) as server:
            body = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
            asked = {"sampling_params": body, "return_logprob": True, "top_logprobs_num": 2}
            answers[kernels] = [server.post("/generate", input_ids=ids, **asked)["meta_info"] for ids in prompts]
            assert answers[kernels][1]["cached_tokens"] > 0
            log = server.log.read_text()
        assert ("found equal to the reference at start" in log) == (kernels == "triton")
    compared = 0
    for mine, theirs in zip(answers["triton"], answers["reference"], strict=True):
        steps = zip(mine["output_token_logprobs"], theirs["output_token_logprobs"], theirs["output_top_logprobs"], strict=True)
        for (logprob, token, _), (_, other, _), best in steps:
            expected = {candidate: value for value, candidate, _ in best}
            assert token in expected and abs(logprob - expected[token]) < 0.03, answers
            compared += 1
            if token != other:
                break  # the two most probable tokens nearly tie, and the answers go apart from here
    assert compared >= 8, answers


@interpreted
def test_a_decode_step_waits_for_nothing():
    """But for the launches themselves, which the interpreter runs on the host."""
    world = World(triton=True)
    request, lens, loc = torch.tensor([1, 2, 0]), torch.tensor([3, 90, 1]), torch.tensor([7, 8, 0])
    with HostReads():
        world.path.decode_rows(request, lens, loc)
        with pytest.raises(AssertionError):
            loc[request > 0]


@interpreted
def test_the_check_at_start_finds_a_wrong_kernel(monkeypatch):
    from oscar_kernel.triton import attention, check

    for native in (False, True):
        assert check.fault(codec_of(native), HEADS * RATIO) is None
    store, decode = attention.store_kv, attention.decode_attention
    monkeypatch.setattr(attention, "store_kv", lambda k, *args, **kwargs: store(k * 1.5, *args, **kwargs))
    assert "store" in check.fault(codec_of(False), HEADS * RATIO)
    monkeypatch.undo()
    monkeypatch.setattr(attention, "decode_attention", lambda *args, out, **more: decode(*args, out=out, **more).mul_(1.02))
    assert "decode" in check.fault(codec_of(False), HEADS * RATIO)
