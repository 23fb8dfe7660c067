"""The whole command line of `oscar`: names, units and defaults. Standard library only, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import json

from oscar import config
from oscar.commands.evaluate_arguments import add_evaluate

BAD_INPUT = 2
"""Exit status after one sentence on stderr."""
DEFAULT_CONTEXTS = (4096, 32768, 131072)
METHODS = ("oscar-shaped", "oscar", "oscar-surrogate", "hadamard", "identity", "raw")  # of oscar.methods, which imports torch
CLIPS = ("paper", "search")  # of oscar.calibration.options


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str):
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; every default comes from `oscar.config`."""
    parser = _Parser(prog="oscar", description="OSCAR: a 2-bit KV cache for SGLang. Calibrate, look, plan.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_calibrate(commands)
    _add_convert(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_plan(commands)
    add_evaluate(commands, METHODS)
    _add_needle(commands)
    commands.add_parser("model-path", help="print where the embedded model lies")
    return parser


def _add_calibrate(commands) -> None:
    p = commands.add_parser(
        "calibrate",
        help="make the artifact that serving needs, from a model and text",
        description="Run a model over text, accumulate what attention consumes, and write the transforms of its 2-bit "
        "cache to one .safetensors file. Without --text the model writes the text itself. The same inputs give the "
        "same bytes.",
    )
    p.add_argument("--model", required=True, metavar="DIR", help="model folder in Hugging Face layout")
    p.add_argument("--output", required=True, metavar="FILE", help="artifact to write, .safetensors")
    p.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="FILE[:TOKENS]",
        help='text to calibrate on: plain UTF-8, or .jsonl with "text", "prompt" or chat "messages" in each line; '
        "repeat for a mix; a file without TOKENS shares evenly what the others leave of --tokens",
    )
    p.add_argument(
        "--tokens",
        type=int,
        default=config.DEFAULT_CALIBRATION_TOKENS,
        metavar="N",
        help="tokens to read in all, a tenth of them held out to measure the error (default: %(default)s)",
    )
    p.add_argument(
        "--method",
        default=config.DEFAULT_METHOD,
        choices=METHODS,
        help="oscar-shaped: balanced maps and shaped rounding; oscar: the paper's U.H.P; oscar-surrogate: the same with the "
        "public implementation's V target; hadamard, identity: no data needed; raw: the paper's failed ablation (default: "
        "%(default)s)",
    )
    p.add_argument(
        "--share-heads",
        action="store_true",
        help="one transform for all KV heads of a layer, as the public implementation; often much worse",
    )
    p.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="elements that share a centre and a step, a multiple of 4 that divides head_dim (default: head_dim)",
    )
    p.add_argument(
        "--seed",
        type=int,
        default=config.DEFAULT_SEED,
        metavar="S",
        help="seed of the text that the model writes and of the order of .jsonl lines (default: %(default)s)",
    )
    p.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="longest sequence in tokens, capped by the model's context length (default: that length, at most "
        f"{config.LONGEST_SEQUENCE})",
    )
    _add_skip_layers(p, "the artifact leaves them out, and the server asks for --oscar-allow-native-layers")
    p.add_argument(
        "--clip",
        default="paper",
        choices=CLIPS,
        help=f"paper: rows are clipped at the quantiles {config.DEFAULT_K_CLIP} (K) and {config.DEFAULT_V_CLIP} (V) of their "
        "own |x|; search: quantiles per layer, head and side, chosen on half of the held-out text (default: %(default)s)",
    )
    p.add_argument(
        "--backend",
        default="hf",
        choices=("hf", "sglang"),
        help="who runs the model: Transformers, or SGLang for what only it can hold; needs --text (default: %(default)s)",
    )
    p.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks of SGLang (default: %(default)s)")
    p.add_argument(
        "--engine-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="further arguments of SGLang's engine, as an object",
    )
    p.add_argument("--save-stats", metavar="FILE", help="also write the statistics, to go on from with --from-stats")
    p.add_argument(
        "--from-stats",
        metavar="FILE",
        help="statistics and held-out text of an earlier run instead of --text, --tokens, --max-length and --seed",
    )
    _add_windows(p, "the error is measured with them")
    p.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the forward pass; auto: the checkpoint's own, on CPU float32 where that fits "
        "in half the memory (default: %(default)s)",
    )
    p.add_argument("--device", default="auto", help="torch device; auto: the accelerator if any (default: %(default)s)")
    _add_picture(p)
    p.add_argument("--json", action="store_true", help="print one JSON object instead of the table, as `oscar inspect --json`")
    p.add_argument("--quiet", action="store_true", help="no progress bar and no table")


def _add_convert(commands) -> None:
    p = commands.add_parser(
        "convert",
        help="make an artifact of the public implementation's rotation files",
        description="Read a pair of rotation files (RotationZoo; one matrix a layer or one a KV head), check them, and write "
        "an artifact. Files that would run code when read are refused.",
    )
    p.add_argument("k_file", metavar="K.pt", help="rotation file of the keys")
    p.add_argument("v_file", metavar="V.pt", help="rotation file of the values")
    p.add_argument("--model", required=True, metavar="DIR", help="model folder the rotations were made for")
    p.add_argument("--output", required=True, metavar="FILE", help="artifact to write, .safetensors")
    for side, value in (("k", config.DEFAULT_K_CLIP), ("v", config.DEFAULT_V_CLIP)):
        p.add_argument(
            f"--{side}-clip",
            type=float,
            default=value,
            metavar="Q",
            help=f"quantile of |x| in a {side.upper()} row beyond which it is clipped, in (0, 1] (default: %(default)s)",
        )
    p.add_argument("--group-size", type=int, metavar="N", help="as in `oscar calibrate` (default: head_dim)")
    _add_native(p)
    _add_windows(p, "recorded")
    p.add_argument("--json", action="store_true", help="print one JSON object instead, as `oscar inspect --json`")
    p.add_argument("--quiet", action="store_true", help="print nothing")


def _add_skip_layers(p: argparse.ArgumentParser, what: str) -> None:
    p.add_argument(
        "--skip-layers",
        type=_numbers,
        default=(),
        metavar="N,N",
        help=f"layers, from 0, that stay in 16 bits; {what} (default: none)",
    )


def _add_windows(p: argparse.ArgumentParser, what: str) -> None:
    for name, which, value in (
        ("sink", "first", config.DEFAULT_SINK_TOKENS),
        ("recent", "newest", config.DEFAULT_RECENT_TOKENS),
    ):
        p.add_argument(
            f"--{name}-tokens",
            type=int,
            default=value,
            metavar="N",
            help=f"{which} tokens of a request kept in 16 bits too; {what} (default: %(default)s)",
        )


def _add_native(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--allow-native-layers", action="store_true", help="let layers be missing; the server keeps those in 16 bits"
    )


def _add_picture(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--picture",
        metavar="FILE",
        help="draw errors per layer before and after, spectra and outlier channels; .png, .svg or .pdf",
    )


def _add_verify(commands) -> None:
    p = commands.add_parser(
        "verify", help="check every byte of an artifact, its matrices, and that it fits a model; exit code 0 or 2"
    )
    p.add_argument("file", metavar="FILE", help="artifact made by `oscar calibrate` or `oscar convert`")
    p.add_argument("--model", metavar="DIR", help="model folder it has to fit")
    _add_native(p)
    p.add_argument("--json", action="store_true", help="print one JSON object instead")


def _add_inspect(commands) -> None:
    p = commands.add_parser("inspect", help="check an artifact and say what is in it")
    p.add_argument("file", metavar="FILE", help="artifact made by `oscar calibrate`")
    _add_picture(p)
    p.add_argument("--json", action="store_true", help="print one JSON object instead")


def _add_plan(commands) -> None:
    p = commands.add_parser(
        "plan", help="bytes per token and tokens per GiB of a model, 2-bit beside 16-bit; reads only its config.json"
    )
    p.add_argument("--model", required=True, metavar="DIR", help="model folder in Hugging Face layout")
    p.add_argument("--memory-gib", type=float, metavar="G", help="memory for the KV cache in GiB: prints what fits in it")
    p.add_argument(
        "--context",
        type=int,
        action="append",
        metavar="N",
        help=f"tokens of one request; repeatable (default: {', '.join(map(str, DEFAULT_CONTEXTS))})",
    )
    p.add_argument("--group-size", type=int, metavar="N", help="as in `oscar calibrate` (default: head_dim)")
    _add_skip_layers(p, "counted so")
    _add_windows(p, "counted with each request slot")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")


def _add_needle(commands) -> None:
    p = commands.add_parser("needle", help="print a prompt that hides a fact in filler and asks for it")
    p.add_argument("--tokens", type=int, required=True, metavar="N", help="longest prompt in tokens")
    p.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, another task (default: %(default)s)")
    p.add_argument("--depth", type=float, metavar="F", help="place of the fact, 0 (start) to 1 (end) (default: drawn)")
    p.add_argument(
        "--model", metavar="DIR", help="folder whose tokenizer and chat template to use (default: the embedded model)"
    )
    p.add_argument("--json", action="store_true", help="print prompt, messages and answer as one JSON object instead")


def _numbers(value: str) -> tuple[int, ...]:
    """Layer numbers out of the command line, in order and once each. Raises ArgumentTypeError."""
    try:
        return tuple(sorted({int(number) for number in value.split(",")}))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected layer numbers with commas between them, got {value!r}") from error


def _json_object(value: str) -> dict:
    """An object out of the command line. Raises ArgumentTypeError."""
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {value!r}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {value!r}")
    return found
