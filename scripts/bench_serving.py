"""Serve one model from equal KV memory in several ways, at batch 1 and at the largest batch each admits; one table.

    python scripts/make_random_model.py --output /tmp/random --layers 4
    python scripts/bench_serving.py --model /tmp/random --budget-mib 600 --json out.json

Arms: `oscar` (2 bits); `bf16`, the same backend and kernels over BF16 rows; `stock`, SGLang's torch_native (--kv-quant none).
The bf16 arm is an artifact that leaves out all layers but the last, since an artifact holds at least one: that layer stays in 2
bits, and the arm's tokens are counted at what it really costs. The client is `sglang.bench_serving` with random token ids.

"decode tokens/s" is the number of requests that ran at once over the median time between tokens: prefill is not in it.
"overall tokens/s" is the client's output throughput, prefill included.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oscar import sizing
from oscar.artifact import ModelIdentity, load, save
from oscar.cli import embedded_model
from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS
from oscar.local_server import LocalServer

PAGE = 64
"""Tokens a request may waste at its end, and that the server keeps for itself."""


@dataclass
class Arm:
    """A way to serve. Bytes: of a token in the pool, and of what a running request adds beside it."""

    name: str
    flags: list[str]
    bytes_per_token: int
    bytes_per_request: int

    def largest_batch(self, budget: int, tokens: int) -> int:
        """Requests of `tokens` tokens that `budget` bytes hold at once; one request slot is the server's."""
        per_request = self.bytes_per_request + (tokens + PAGE) * self.bytes_per_token
        return (budget - self.bytes_per_request) // per_request

    def tokens(self, budget: int, batch: int) -> int:
        """Slots that `budget` bytes pay for when `batch` requests have their windows."""
        return (budget - (batch + 1) * self.bytes_per_request) // self.bytes_per_token // PAGE * PAGE


def make_arms(model: Path, work: Path) -> list[Arm]:
    """All arms; calibrates on a little text, since speed does not depend on how well."""
    identity = ModelIdentity.from_path(model)
    layers, heads, dims = identity.num_layers, identity.num_kv_heads, (identity.head_dim, identity.v_head_dim)
    coded, native = work / "oscar.safetensors", work / "bf16.safetensors"
    command = [sys.executable, "-m", "oscar", "calibrate", "--model", str(model), "--output", str(coded), "--quiet"]
    text = embedded_model() / "heldout.txt"
    subprocess.run([*command, "--text", str(text), "--tokens", "4096", "--max-length", "1024"], check=True)
    artifact = load(coded)
    save(replace(artifact, layers={layers - 1: artifact.layers[layers - 1]}), native)
    formats = artifact.k_format, artifact.v_format
    window = sizing.bytes_per_request(layers, heads, *dims, DEFAULT_SINK_TOKENS, DEFAULT_RECENT_TOKENS)
    flags = ["--kv-quant", "oscar", "--oscar-artifact"]
    return [
        Arm("oscar", [*flags, str(coded)], sizing.bytes_per_token(layers, heads, *formats), window),
        Arm(
            "bf16",
            [*flags, str(native), "--oscar-allow-native-layers"],
            sizing.bytes_per_token(layers, heads, *formats, layers - 1),
            window,
        ),
        Arm("stock", ["--kv-quant", "none"], sizing.bytes_per_token_16_bit(layers, heads, *dims), 0),
    ]


def run_client(server: LocalServer, model: Path, batch: int, args, seed: int, work: Path) -> dict:
    """One run of the client; its own record."""
    out = work / f"client-{seed}.jsonl"
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url]
    command += ["--dataset-name", "random-ids", "--tokenize-prompt", "--model", str(model), "--random-range-ratio", "1"]
    command += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
    command += ["--num-prompts", str(batch), "--max-concurrency", str(batch), "--warmup-requests", "0", "--flush-cache"]
    command += ["--seed", str(seed), "--output-file", str(out), "--output-details", "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    if done.returncode or not out.exists():
        raise RuntimeError(f"bench_serving ended with code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(out.read_text().splitlines()[-1])


def measure(arm: Arm, largest: int, args, work: Path) -> list[dict]:
    """Serve with the arm's share of the budget; one row for batch 1 and one for the largest batch."""
    flags = [*arm.flags, "--max-total-tokens", str(arm.tokens(args.budget_mib << 20, largest))]
    flags += ["--max-running-requests", str(largest), "--chunked-prefill-size", str(args.chunk), "--decode-log-interval", "1"]
    rows = []
    with LocalServer(args.model, *flags, log=work / f"{arm.name}.log", timeout=args.timeout) as server:
        for batch in sorted({1, largest}):
            seen = len(running_requests(server))
            record = run_client(server, args.model, batch, args, seed=batch, work=work)
            if record["completed"] != batch:
                raise RuntimeError(f"{arm.name}, batch {batch}: {record['completed']} of {batch} requests ended well")
            together = max(running_requests(server)[seen:], default=0)
            median = statistics.median(1e3 * gap for gaps in record["itls"] for gap in gaps)
            rows.append(
                {
                    "arm": arm.name,
                    "batch": batch,
                    "admitted": together,
                    "pool_tokens": server.info().get("max_total_num_tokens"),
                    "bytes_per_token": arm.bytes_per_token,
                    "ms_per_token": median,
                    "decode_tokens_per_s": 1e3 * together / median,
                    "overall_tokens_per_s": record["output_throughput"],
                    "median_ttft_ms": record["median_ttft_ms"],
                    "duration_s": record["duration"],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def running_requests(server: LocalServer) -> list[int]:
    """How many requests ran in each decode step so far, from the server's log."""
    return [int(n) for n in re.findall(r"Decode batch.*?#running-req: (\d+)", server.log.read_text(errors="replace"))]


def show(rows: list[dict], title: str) -> None:
    table = Table(title=title)
    for name in (
        "arm",
        "batch",
        "admitted",
        "pool tokens",
        "ms a token",
        "decode tokens/s",
        "overall tokens/s",
        "first token, s",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["arm"],
            str(row["batch"]),
            str(row["admitted"]),
            str(row["pool_tokens"]),
            f"{row['ms_per_token']:.1f}",
            f"{row['decode_tokens_per_s']:.1f}",
            f"{row['overall_tokens_per_s']:.2f}",
            f"{row['median_ttft_ms'] / 1e3:.1f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder, such as scripts/make_random_model.py writes")
    parser.add_argument("--budget-mib", type=int, default=600, help="KV memory of each arm, MiB (default: 600)")
    parser.add_argument("--input-len", type=int, default=16384, help="tokens of a prompt (default: 16384)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of an answer (default: 32)")
    parser.add_argument("--max-batch", type=int, default=64, help="largest batch to run (default: 64)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill chunk (default: 2048)")
    parser.add_argument("--arms", default="oscar,bf16,stock", help="comma-separated (default: oscar,bf16,stock)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a server's start and for a client's run")
    parser.add_argument("--work", type=Path, help="folder for artifacts and logs (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="oscar-bench-serving-"))
    work.mkdir(parents=True, exist_ok=True)
    arms = make_arms(args.model, work)
    wanted = args.arms.split(",")
    unknown = set(wanted) - {arm.name for arm in arms}
    if unknown:
        parser.error(f"--arms: expected some of oscar, bf16, stock, got {', '.join(sorted(unknown))}")
    rows = []
    for arm in arms:
        largest = min(args.max_batch, arm.largest_batch(args.budget_mib << 20, args.input_len + args.output_len))
        if arm.name not in wanted:
            continue
        if largest < 1:
            parser.error(f"--budget-mib {args.budget_mib}: the arm {arm.name} does not hold one request; give more")
        rows += measure(arm, largest, args, work)
    layers = ModelIdentity.from_path(args.model).num_layers
    title = f"{layers} layers, {args.input_len} tokens in, {args.output_len} out, {args.budget_mib} MiB of KV memory an arm"
    show(rows, title)
    if args.json:
        about = {"layers": layers, "input_len": args.input_len, "output_len": args.output_len, "budget_mib": args.budget_mib}
        about |= {"chunk": args.chunk, "load_average": os.getloadavg()}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
