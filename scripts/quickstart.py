"""A model served in 16 and in 2 bits side by side: answers, perplexity and divergence, and the tokens that memory holds.

    python scripts/quickstart.py [--model DIR] [--tokens 2048]

Run by quickstart.sh after the install. The model is SmolLM2-135M-Instruct (scripts/real_model.py makes it), or the embedded one
where its package cannot be had. It is served with the default windows of 64 and 256 tokens, so short chats are read in 16 bits
whole, and a long one in 2 bits for the most part. What 2 bits cost is measured with windows of 4 and 16 tokens.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import pydoc_data.topics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import real_model
from rich.console import Console
from rich.table import Table

import oscar
from oscar.embedded import embedded_model
from oscar.errors import OscarError
from oscar.evaluation.local_server import LocalServer
from oscar.evaluation.needles import Needle, make_needle
from oscar.format.sizing import window_slots

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "quickstart"
MEASURED_WINDOWS = (4, 16)
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that adds two numbers.",
)
TOPIC, TOPIC_LETTERS = "strings", 4200
"""A help topic of Python, and how much of it is read before a question: about 1,200 tokens."""
ANSWER_TOKENS = 48
NEEDLE_TOKENS = 1000
PATIENCE = 1800
"""Seconds for the start of a server: a busy machine imports SGLang twenty times as slowly as an idle one."""


@dataclass(frozen=True)
class Question:
    """One question of the demonstration.

    Attributes:
        shown: what the table says was asked.
        messages: the chat.
        needle: its task, where a program can tell if the answer is right.
    """

    shown: str
    messages: list[dict]
    needle: Needle | None = None


def questions(model: Path, tokenizer) -> list[Question]:
    """What the model is asked: the embedded model knows nothing but how to find a code in a long chat."""
    if model != embedded_model():
        long = pydoc_data.topics.topics[TOPIC][:TOPIC_LETTERS]
        count = len(tokenizer(long)["input_ids"])
        about = "What is the text above about? Answer in one sentence."
        return [
            *(Question(text, [{"role": "user", "content": text}]) for text in QUESTIONS),
            Question(f"({count:,} tokens of Python's help) {about}", [{"role": "user", "content": f"{long}\n\n{about}"}]),
        ]
    needles = [make_needle(tokenizer, NEEDLE_TOKENS, seed=seed) for seed in (1, 2)]
    return [
        Question(
            f"({needle.num_tokens:,} tokens of chat) {needle.messages[0]['content'].splitlines()[-1]}", needle.messages, needle
        )
        for needle in needles
    ]


def ask(server: LocalServer, asked: list[Question]) -> list[str]:
    """The server's greedy answers."""
    return [server.chat(question.messages, ANSWER_TOKENS).strip() for question in asked]


def answers_table(asked: list[Question], in_16_bits: list[str], in_2_bits: list[str]) -> Table:
    """Question and both answers in a row; an answer that a program can judge is called right or wrong."""
    table = Table(title="The same questions", title_justify="left", show_lines=True)
    for name in ("question", "16 bits, stock SGLang", "2 bits"):
        table.add_column(name, ratio=1, overflow="fold")
    for question, *answers in zip(asked, in_16_bits, in_2_bits, strict=True):
        if question.needle is not None:
            answers = [f"{answer}  ({'right' if question.needle.is_right(answer) else 'wrong'})" for answer in answers]
        table.add_row(question.shown, *map(plain, answers))
    return table


def plain(text: str) -> str:
    """Square brackets of an answer are no markup."""
    return text.replace("[", "\\[")


def quality_table(report: dict) -> Table:
    """Perplexity and divergence of both."""
    title = f"What 2 bits cost: {report['settings']['documents']} held-out documents, context {report['context']:,}"
    table = Table(title=title, title_justify="left")
    for name in ("", "bits, windows included", "perplexity", "over 16 bits", "divergence (nats)", "same first choice"):
        table.add_column(name, justify="right" if name else "left")
    for name, entry in zip(("16 bits", "2 bits"), report["methods"].values(), strict=True):
        table.add_row(
            name,
            f"{entry['bits_per_element']:.2f}",
            f"{entry['perplexity']:.2f}",
            f"{entry['perplexity_ratio']:.3f}",
            f"{entry['kl_mean']:.2g}",
            f"{entry['top1_agreement']:.1%}",
        )
    return table


def memory_table(cache: dict) -> Table:
    """Bytes a token, and the tokens that the memory of this server's cache holds in 16 and in 2 bits.

    Args:
        cache: what the server says of its cache (`oscar` in /server_info).
    """
    memory = cache["pool_bytes"]
    in_16_bits, in_2_bits = cache["bytes_per_token_bf16"], cache["bytes_per_token"]
    tokens = memory // in_16_bits, cache["tokens"]
    table = Table(title=f"KV cache in the same {memory / 2**20:,.0f} MiB", title_justify="left")
    for name in ("", "16 bits", "2 bits", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("bytes a token", f"{in_16_bits:,}", f"{in_2_bits:,}", f"{in_16_bits / in_2_bits:.2f}")
    table.add_row("tokens", f"{tokens[0]:,}", f"{tokens[1]:,}", f"{tokens[1] / tokens[0]:.2f}")
    return table


def choose_model(console: Console) -> Path:
    """SmolLM2, or the embedded model with a sentence why."""
    try:
        return real_model.make("smollm2", console=console)
    except OscarError as error:
        console.print(f"{error}\nSo this runs with the embedded model instead.", highlight=False, markup=False, soft_wrap=True)
        return embedded_model()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2, made if it is not there)")
    parser.add_argument("--tokens", type=int, default=2048, help="calibration tokens (default: %(default)s)")
    args = parser.parse_args()
    console, began = Console(width=110), time.monotonic()

    def step(text: str) -> None:
        console.print(f"\n[bold]{text}[/bold]  ({time.monotonic() - began:.0f} s)", highlight=False)

    OUT.mkdir(parents=True, exist_ok=True)
    step("1. The model")
    model = args.model or choose_model(console)
    console.print(f"{model}", highlight=False, soft_wrap=True)
    from transformers import AutoTokenizer

    asked = questions(model, AutoTokenizer.from_pretrained(model))
    artifact, (sinks, recent) = OUT / "oscar.kvq", MEASURED_WINDOWS
    with ExitStack() as servers, concurrent.futures.ThreadPoolExecutor() as pool:
        # A server's start is mostly imports, on one core; the other one calibrates meanwhile.
        stock = LocalServer(model, "--kv-quant", "none", log=OUT / "stock.log", timeout=PATIENCE)
        started = pool.submit(servers.enter_context, stock)

        step("2. Calibrate")
        text = OUT / "topics.txt"  # help topics of this Python, for SmolLM2 and the embedded model as good as any
        text.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
        made = oscar.calibrate(model=model, text=[text], tokens=args.tokens)
        oscar.save(made, artifact)

        step("3. Serve it in 16 and in 2 bits")
        flags = ["--kv-quant", "oscar", "--oscar-artifact", str(artifact)]
        console.print(
            f"$ python -m sglang.launch_server --model-path {model} {' '.join(flags)}", highlight=False, soft_wrap=True
        )
        started.result()
        quantised = servers.enter_context(LocalServer(model, *flags, log=OUT / "oscar.log", timeout=PATIENCE))
        answers = list(pool.map(lambda server: ask(server, asked), (stock, quantised)))
        cache = quantised.info()["internal_states"][0]["oscar"]
    console.print(answers_table(asked, *answers))

    step("4. Measure both on held-out text")
    report = oscar.evaluate(
        model=model,
        artifacts=[artifact],
        tasks=["perplexity", "divergence"],
        context=1024,
        continuation=64,
        documents=2,
        sink_tokens=sinks,
        recent_tokens=recent,
    )
    served = cache["sink_tokens"], cache["recent_tokens"]
    own = window_slots(1 << 20, *served, cache["page_size"])
    console.print(quality_table(report))
    console.print(memory_table(cache))
    console.print(
        f"Measured with windows of {sinks} and {recent} tokens in 16 bits, so that nearly all is read in 2 bits. Served with "
        f"{served[0]} and {served[1]}, the default: a running request takes up to {own:,} tokens more for them.\n"
        f"{time.monotonic() - began:.0f} s in all. Logs of the servers: {OUT}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
