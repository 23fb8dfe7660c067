"""Compare ways to keep the cache at the same number of bits: plain INT2, the paper's method, the default method."""

import argparse
import json
from pathlib import Path

import oscar
from oscar import config
from oscar.embedded import embedded_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(embedded_model()), help="model folder (default: the embedded model)")
    parser.add_argument("--tokens", type=int, default=2048, help="calibration tokens (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens before each continuation (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=4, help="documents of text (default: %(default)s)")
    parser.add_argument("--json", help="write the whole report here")
    args = parser.parse_args()

    report = oscar.evaluate(
        model=args.model,
        methods=["int2", "oscar", config.DEFAULT_METHOD],
        tasks=["divergence"],
        context=args.context,
        continuation=64,
        documents=args.documents,
        sink_tokens=4,  # small windows, so that nearly everything is read in 2 bits
        recent_tokens=16,
        calibration_tokens=args.tokens,
    )
    print(f"{report['model']}, context {report['context']}, divergence from the exact cache in nats")
    print(f"{'method':<16}{'bits':>8}{'mean':>10}{'95 %':>20}{'same token':>12}")
    for name, found in report["methods"].items():
        low, high = found["kl_ci"]
        interval = f"{low:.4f} to {high:.4f}"
        bits, mean, same = found["bits_per_element"], found["kl_mean"], found["top1_agreement"]
        print(f"{name:<16}{bits:>8.2f}{mean:>10.4f}{interval:>20}{same:>12.1%}")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
