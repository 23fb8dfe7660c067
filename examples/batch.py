"""Batch inference in one process over the 2-bit cache: prompts in (one a line, or JSON lines with "prompt"), answers out."""

import argparse
import json
import signal
import sys
from pathlib import Path

PROMPTS = ["The history of mathematics begins", "def merge_sort(items):", "Once upon a time, in a small town by the sea,"]


def read_prompts(path: str, fail) -> list[str]:
    """Prompts of a text or .jsonl file; '-' is standard input. fail: called with a sentence on a bad line."""
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    prompts = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    for i, (number, line) in enumerate(prompts if path.endswith(".jsonl") else ()):
        try:
            prompts[i] = number, json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            fail(f'{path}, line {number}: expected a JSON object with "prompt", got {line[:60]}')
    return [prompt for _, prompt in prompts] or fail(f"--prompts {path}: expected at least one prompt, found none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model folder (default: the embedded model)")
    parser.add_argument("--prompts", help="text file, .jsonl file, or - for standard input (default: three openings)")
    parser.add_argument("--output", help="JSON lines, written as answers come; a file that is there is gone on with")
    parser.add_argument("--at-once", type=int, default=64, help="prompts handed over together (default: %(default)s)")
    parser.add_argument("--kv-quant", default="oscar", choices=("oscar", "none"), help="KV cache (default: %(default)s)")
    parser.add_argument("--artifact", help="calibration artifact (default: found or made at start)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--max-total-tokens", type=int, help="size of the cache in tokens (default: by memory)")
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, parser.error) if args.prompts else PROMPTS
    there = Path(args.output).read_text(encoding="utf-8") if args.output and Path(args.output).exists() else ""
    done = [json.loads(line)["prompt"] for line in there.splitlines()]
    if done != prompts[: len(done)]:
        parser.error(f"--output {args.output}: expected answers to the first of these prompts, found others; move it away")

    import sglang

    from oscar.embedded import embedded_model

    cache = {"kv_quant": args.kv_quant, "oscar_artifact": args.artifact, "max_total_tokens": args.max_total_tokens}
    engine = sglang.Engine(model_path=args.model or str(embedded_model()), log_level="error", **cache)
    engine.loop.add_signal_handler = lambda *_: None  # SGLang would wait for the answers under way
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with engine, open(args.output, "a", encoding="utf-8") if args.output else sys.stdout as out:
        for i in range(len(done), len(prompts), args.at_once):
            part = prompts[i : i + args.at_once]
            answers = engine.generate(part, {"temperature": 0, "max_new_tokens": args.max_new_tokens})
            for prompt, answer in zip(part, answers, strict=True):
                print(json.dumps({"prompt": prompt, "answer": answer["text"]}, ensure_ascii=False), file=out, flush=True)


if __name__ == "__main__":
    main()
