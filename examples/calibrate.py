"""Calibrate a model, save the artifact, and say what it is good for."""

import argparse

import oscar
from oscar.calibration.report import by_layer, describe
from oscar.embedded import embedded_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(embedded_model()), help="model folder (default: the embedded model)")
    parser.add_argument("--text", action="append", default=[], help="FILE[:TOKENS], repeatable (default: self-written)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to read in all (default: %(default)s)")
    parser.add_argument("--output", default="oscar.kvq", help="artifact to write (default: %(default)s)")
    args = parser.parse_args()

    artifact = oscar.calibrate(model=args.model, text=args.text, tokens=args.tokens)
    oscar.save(artifact, args.output)

    artifact = oscar.load(args.output, model=args.model)  # refused if it were another model's
    found = describe(artifact)
    print(f"{args.output}: method {artifact.method}, {found['bits_per_element']:.3f} bits per element")
    for layer_id, errors in by_layer(artifact.provenance["held_out"]["layers"]).items():
        plain, ours = errors["plain_attention"], errors["attention"]
        print(f"layer {layer_id}: error of attention's output {plain:.1%} in plain 2 bits, {ours:.1%} with this artifact")
    print(f"Verdict: {found['verdict']['sentence']}")


if __name__ == "__main__":
    main()
