"""Batch inference in one process over the 2-bit cache: prompts in (one a line, or JSON lines with "prompt"), answers out."""

import argparse
import json
import sys
import time
from pathlib import Path

PROMPTS = ["The history of mathematics begins", "def merge_sort(items):", "Once upon a time, in a small town by the sea,"]


def read_prompts(path: str) -> list[str]:
    """Prompts of a text or .jsonl file; '-' is standard input."""
    lines = (sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")).splitlines()
    lines = [line for line in lines if line.strip()]
    return [json.loads(line)["prompt"] for line in lines] if path.endswith(".jsonl") else lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model folder (default: the embedded model)")
    parser.add_argument("--prompts", help="text file, .jsonl file, or - for standard input (default: three openings)")
    parser.add_argument("--output", default="-", help="JSON lines with prompt and answer (default: standard output)")
    parser.add_argument("--kv-quant", default="oscar", choices=("oscar", "none"), help="KV cache (default: %(default)s)")
    parser.add_argument("--artifact", help="calibration artifact (default: found or made at start)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--max-total-tokens", type=int, help="size of the cache in tokens (default: by memory)")
    args = parser.parse_args()
    prompts = read_prompts(args.prompts) if args.prompts else PROMPTS
    if not prompts:
        parser.error(f"--prompts {args.prompts}: expected at least one prompt, found none")

    import sglang

    from oscar.embedded import embedded_model

    engine = sglang.Engine(
        model_path=args.model or str(embedded_model()),
        kv_quant=args.kv_quant,
        oscar_artifact=args.artifact,
        max_total_tokens=args.max_total_tokens,
        log_level="error",
    )
    began = time.monotonic()
    try:
        answers = engine.generate(prompts, {"temperature": 0, "max_new_tokens": args.max_new_tokens})
    finally:
        engine.shutdown()
    lines = [json.dumps({"prompt": p, "answer": a["text"]}, ensure_ascii=False) for p, a in zip(prompts, answers, strict=True)]
    if args.output == "-":
        print(*lines, sep="\n")
    else:
        Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokens = sum(a["meta_info"]["completion_tokens"] for a in answers)
    print(f"{len(prompts)} prompts, {tokens} tokens in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
