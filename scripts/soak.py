"""Ordinary life, fast: many clients, lengths, prefixes, aborts, disconnects and sessions against one 2-bit server.

    python scripts/soak.py --minutes 30
    python scripts/soak.py --requests 300 --json soak.json

Every so often the same question is asked: its answer must stay what it was on the empty server. At the end all pools must be
full again, memory must not have grown, and the server must still live. Exit status 1 says which of these failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from oscar.embedded import embedded_model
from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import held_out_sentences

PROBE_TOKENS = 24
SETTLE_SECONDS = 4
"""SGLang checks its pools for leaks when it has been idle for a moment."""
ALLOWED_GROWTH = 1.25
"""Memory at the end over memory after the first fifth of the requests."""


class Life:
    """What the clients share.

    Args:
        server: to ask. ids: tokens of some text. seed: of all choices. longest: tokens of a prompt.
    """

    def __init__(self, server: LocalServer, ids: list[int], seed: int, longest: int):
        self.server, self.ids, self.longest = server, ids, longest
        self.draw, self.lock = random.Random(seed), threading.Lock()
        self.done: dict[str, int] = {}
        self.failed: list[str] = []
        self.answer: list[int] | None = None

    def choose(self):
        with self.lock:
            kind = self.draw.choices(
                ("short", "long", "prefix", "again", "abort", "leave", "session", "probe"), (8, 3, 6, 2, 2, 2, 2, 1)
            )[0]
            start = self.draw.choice((0, 0, 700, 1900, 3100))
            n = self.draw.randrange(4, self.longest if kind == "long" else self.longest // 4)
            return kind, self.ids[start : start + n], self.draw.randrange(1, 40), self.draw.random()

    def one(self, forced: str | None = None) -> None:
        """One client's doing, by default whatever it is; what fails is noted."""
        kind, ids, new, chance = self.choose()
        kind = forced or kind
        try:
            getattr(self, f"do_{kind}", self.do_short)(ids, new, chance)
        except (requests.RequestException, KeyError, AssertionError) as error:
            with self.lock:
                self.failed.append(f"{kind}: {type(error).__name__}: {str(error)[:200]}")
        with self.lock:
            self.done[kind] = self.done.get(kind, 0) + 1

    def generate(self, ids, new, **more):
        body = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        return self.server.post("/generate", input_ids=ids, sampling_params=body, **more)

    def do_short(self, ids, new, chance):
        assert self.generate(ids, new)["meta_info"]["completion_tokens"] == new

    def do_again(self, ids, new, chance):
        """All of a prompt computed again although it is cached, with the log-probabilities of its own tokens."""
        self.generate(ids, new, return_logprob=True, logprob_start_len=0)

    def do_abort(self, ids, new, chance):
        rid = f"soak-{id(ids)}-{chance}"
        timer = threading.Timer(
            chance, lambda: requests.post(self.server.url + "/abort_request", json={"rid": rid}, timeout=60)
        )
        timer.start()
        answer = requests.post(
            self.server.url + "/generate",
            json={"input_ids": ids, "rid": rid, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}},
            timeout=600,
        )
        timer.join()
        assert answer.status_code in (200, 400, 499, 503), answer.status_code

    def do_leave(self, ids, new, chance):
        """A client that goes away in the middle of a stream."""
        body = {"input_ids": ids, "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with requests.post(self.server.url + "/generate", json=body, stream=True, timeout=600) as answer:
            for i, _ in enumerate(answer.iter_lines()):
                if i > 10 * chance:
                    break

    def do_session(self, ids, new, chance):
        session, rid = self.server.post("/open_session", capacity_of_str_len=1000, streaming=True), None
        for turn in range(3):
            part = ids[turn * len(ids) // 3 : (turn + 1) * len(ids) // 3] or [5]
            rid = self.generate(part, new, session_params={"id": session, "rid": rid})["meta_info"]["id"]
        requests.post(self.server.url + "/close_session", json={"session_id": session}, timeout=60).raise_for_status()

    def do_probe(self, ids, new, chance):
        """The question whose answer must not change; its prompt has no beginning in common with the others."""
        tokens = self.generate(self.ids[-200:], PROBE_TOKENS)["output_ids"]
        with self.lock:
            if self.answer is None:
                self.answer = tokens
        assert tokens == self.answer, "the probe's answer changed"


def memory_mib(server: LocalServer) -> float:
    """Resident memory of the server and its workers."""
    import psutil

    process = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True))) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(embedded_model()), help="model folder (default: the embedded model)")
    parser.add_argument("--requests", type=int, default=3000, help="requests at most (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes at most (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=12, help="clients at once (default: %(default)s)")
    parser.add_argument(
        "--slots", type=int, default=12288, help="slots of the pool, small so that it runs out (default: %(default)s)"
    )
    parser.add_argument("--longest", type=int, default=1200, help="tokens of the longest prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all choices (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(" ".join(held_out_sentences()[:600]), add_special_tokens=False)["input_ids"]
    flags = ("--kv-quant", "oscar", "--oscar-debug-checks", "--max-total-tokens", args.slots, "--enable-streaming-session")
    flags += ("--chunked-prefill-size", 512, "--random-seed", 1)
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with LocalServer(args.model, *flags, env=env) as server:
        life, began, early = Life(server, ids, args.seed, args.longest), time.monotonic(), None
        life.one("probe")
        with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(args.clients) as pool:
            bar = progress.add_task("requests", total=args.requests)
            for first in range(0, args.requests, args.clients * 4):
                list(pool.map(life.one, [None] * min(args.clients * 4, args.requests - first)))
                done = sum(life.done.values())
                progress.update(bar, completed=done)
                if early is None and done >= args.requests / 5:
                    early = memory_mib(server)
                if server.process.poll() is not None or time.monotonic() - began > 60 * args.minutes:
                    break
        problems, figures = list(life.failed), {"requests": life.done, "seconds": time.monotonic() - began}
        if server.process.poll() is not None:
            problems.append(f"the server ended with code {server.process.returncode}:\n{server.log_tail()}")
        else:
            time.sleep(SETTLE_SECONDS)
            server.flush_cache()
            time.sleep(SETTLE_SECONDS)
            life.one("probe")
            late, log = memory_mib(server), server.log.read_text(errors="replace")
            state = server.info()["internal_states"][0]["oscar"]
            figures |= {
                "memory_mib": {"after_a_fifth": early, "at_the_end": late},
                "retractions": log.lower().count("retracted"),
            }
            figures |= {
                name: state[name] for name in ("window_tokens_read", "in_16_bits", "sink_rows_reused", "sink_rows_lost")
            }
            if early is not None and late > ALLOWED_GROWTH * early:
                problems.append(f"memory grew from {early:.0f} to {late:.0f} MiB")
            if "leak" in log.lower():
                problems.append(
                    "SGLang found a leak: " + next(line for line in log.splitlines() if "leak" in line.lower())[:300]
                )
            if state["window_slots"] > 0:
                problems.append(f"{state['window_slots']} slots of windows are still held")
    figures["problems"] = problems
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
