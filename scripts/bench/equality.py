"""How far apart are answers of the lossless codec and of stock SGLang, and of stock SGLang and itself in other batches?

Greedy answers to the same prompts from: stock, one at a time (the yardstick); stock, 8 at a time; lossless, one at a time,
again (prefix hits), and 8 at a time. In float32 all should be equal; in bfloat16 stock differs from itself, and a difference
counts as a near-tie when the two candidates were closer than --tie in log-probability.
"""

import argparse
import concurrent.futures
import sys
from pathlib import Path

import setups
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import held_out_sentences, make_needle


def make_prompts(model: str, n: int) -> list[list[int]]:
    """n token lists of 5 to 1500 tokens: half prose, half needles."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer(" ".join(held_out_sentences()[:800]), add_special_tokens=False)["input_ids"]
    prose = [text[997 * i : 997 * i + 5 + (i * 211) % 900] for i in range(n - n // 2)]
    needles = [make_needle(tokenizer, 200 + (seed * 173) % 1300, seed=seed).prompt for seed in range(n // 2)]
    return prose + [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in needles]


def ask(server: LocalServer, ids: list[int], new_tokens: int) -> list[tuple[int, float, dict[int, float]]]:
    """Per generated token: id, log-probability, and the five best candidates."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    meta = server.post("/generate", input_ids=ids, sampling_params=sampling, return_logprob=True, top_logprobs_num=5)[
        "meta_info"
    ]
    best = [{token: logprob for logprob, token, _ in step} for step in meta["output_top_logprobs"]]
    return [(token, logprob, top) for (logprob, token, _), top in zip(meta["output_token_logprobs"], best, strict=True)]


def together(server, prompts, new_tokens):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda ids: ask(server, ids, new_tokens), prompts))


def compare(got, reference, tie: float) -> dict:
    """Answers equal, first differences that were near-ties, and the largest log-probability difference before them."""
    equal = ties = 0
    worst = 0.0
    for answer, expected in zip(got, reference, strict=True):
        for (token, logprob, _), (expected_token, expected_logprob, top) in zip(answer, expected, strict=True):
            if token != expected_token:
                ties += expected_logprob - top.get(token, -1e9) < tie
                break
            worst = max(worst, abs(logprob - expected_logprob))
        else:
            equal += 1
    return {"n": len(got), "equal": equal, "near_ties": ties, "other": len(got) - equal - ties, "max_logprob_diff": worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    setups.add_model(parser)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="dtypes to run (default: both)")
    parser.add_argument("--n", type=int, default=24, help="prompts (default 24)")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens an answer (default 48)")
    parser.add_argument("--tie", type=float, default=0.1, help="near-tie: closer than this many nats (default 0.1)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()

    model = str(args.model)
    prompts = make_prompts(model, args.n)
    table = Table(title=f"{args.n} greedy answers of {args.new_tokens} tokens against stock SGLang, one at a time")
    for column in ("dtype", "configuration", "equal", "near-ties", "other", "max log-prob diff"):
        table.add_column(column, justify="left" if column in ("dtype", "configuration") else "right")
    results = {}
    for dtype in args.dtype:
        common = ("--dtype", dtype, "--max-total-tokens", "32768", "--random-seed", "1")
        found = {}
        with LocalServer(model, *common, "--disable-radix-cache") as server:
            reference = [ask(server, ids, args.new_tokens) for ids in prompts]
            found["stock, 8 at a time"] = together(server, prompts, args.new_tokens)
        with LocalServer(model, *common, "--kv-quant", "oscar", "--oscar-codec", "lossless") as server:
            found["lossless, one at a time"] = [ask(server, ids, args.new_tokens) for ids in prompts]
            found["lossless, prefix hits"] = [ask(server, ids, args.new_tokens) for ids in prompts]
            server.flush_cache()
            found["lossless, 8 at a time"] = together(server, prompts, args.new_tokens)
        for name, answers in found.items():
            row = compare(answers, reference, args.tie)
            results[f"{dtype}: {name}"] = row
            counts = (f"{row[key]}" for key in ("equal", "near_ties", "other"))
            table.add_row(dtype, name, *counts, f"{row['max_logprob_diff']:.1e}")
    Console(width=110).print(table)
    if args.json:
        setups.write_json(args.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
