"""`oscar calibrate | inspect | plan | needle | model-path`: files in, files out.

A mistake in the input is one line on stderr, `oscar <command>: <sentence>`, and exit status 2. Heavy modules are
imported by the command that needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from oscar import config

EMBEDDED = Path(__file__).with_name("embedded")
BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT
DEFAULT_CONTEXTS = (4096, 32768, 131072)


class InputError(ValueError):
    """A command line that cannot work, as one sentence."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str):
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: command line without the program's name; None: the process's own.
    Returns:
        0, BAD_INPUT (2) after one line on stderr, or INTERRUPTED (130).
    """
    options = build_parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        print(f"\noscar {options.command}: interrupted, nothing was written", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `oscar inspect F | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        if not isinstance(error, _input_errors()):
            raise
        print(f"oscar {options.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; every default comes from `oscar.config`."""
    parser = _Parser(prog="oscar", description="OSCAR: a 2-bit KV cache for SGLang. Calibrate, look, plan.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_calibrate(commands)
    _add_inspect(commands)
    _add_plan(commands)
    _add_needle(commands)
    model_path = commands.add_parser("model-path", help="print where the embedded model lies")
    model_path.set_defaults(run=_model_path)
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
        metavar="FILE",
        help="plain UTF-8 text to calibrate on; repeat for several, which share the tokens evenly",
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
        choices=_METHODS,
        help="oscar: the paper's U.H.P; hadamard, identity: no data needed (default: %(default)s)",
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
        help="seed of the text that the model writes (default: %(default)s)",
    )
    p.add_argument(
        "--max-length",
        type=int,
        default=config.DEFAULT_MAX_LENGTH,
        metavar="N",
        help="longest sequence in tokens, capped by the model's context length (default: %(default)s)",
    )
    p.add_argument(
        "--sink-tokens",
        type=int,
        default=config.DEFAULT_SINK_TOKENS,
        metavar="N",
        help="first tokens kept in 16 bits when the error is measured (default: %(default)s)",
    )
    p.add_argument(
        "--recent-tokens",
        type=int,
        default=config.DEFAULT_RECENT_TOKENS,
        metavar="N",
        help="newest tokens kept in 16 bits when the error is measured (default: %(default)s)",
    )
    p.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the forward pass; auto: the checkpoint's own, on CPU float32 where that fits "
        "in half the memory (default: %(default)s)",
    )
    p.add_argument("--device", default="auto", help="torch device; auto: the accelerator if any (default: %(default)s)")
    p.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    p.set_defaults(run=_calibrate)


def _add_inspect(commands) -> None:
    p = commands.add_parser("inspect", help="check an artifact and say what is in it")
    p.add_argument("file", metavar="FILE", help="artifact made by `oscar calibrate`")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    p.set_defaults(run=_inspect)


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
    p.add_argument(
        "--sink-tokens",
        type=int,
        default=config.DEFAULT_SINK_TOKENS,
        metavar="N",
        help="first tokens of a request kept in 16 bits too (default: %(default)s)",
    )
    p.add_argument(
        "--recent-tokens",
        type=int,
        default=config.DEFAULT_RECENT_TOKENS,
        metavar="N",
        help="newest tokens of a request kept in 16 bits too (default: %(default)s)",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    p.set_defaults(run=_plan)


def _add_needle(commands) -> None:
    p = commands.add_parser("needle", help="print a prompt that hides a fact in filler and asks for it")
    p.add_argument("--tokens", type=int, required=True, metavar="N", help="longest prompt in tokens")
    p.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, another task (default: %(default)s)")
    p.add_argument("--depth", type=float, metavar="F", help="place of the fact, 0 (start) to 1 (end) (default: drawn)")
    p.add_argument(
        "--model", metavar="DIR", help="folder whose tokenizer and chat template to use (default: the embedded model)"
    )
    p.add_argument("--json", action="store_true", help="print prompt, messages and answer as one JSON object instead")
    p.set_defaults(run=_needle)


_METHODS = ("oscar", "hadamard", "identity", "oscar-softmax", "raw")  # of oscar.transform, which would import torch


def _calibrate(options: argparse.Namespace) -> None:
    output = Path(options.output)
    _check_output(output)

    from rich.console import Console

    from oscar import artifact as artifacts
    from oscar.calibrate import CalibrationOptions, calibrate, check
    from oscar.report import artifact_bytes, report, warnings

    fields = (
        "model",
        "tokens",
        "method",
        "share_heads",
        "group_size",
        "seed",
        "max_length",
        "sink_tokens",
        "recent_tokens",
    )
    settings = CalibrationOptions(
        **{name: getattr(options, name) for name in (*fields, "dtype", "device")},
        text=tuple(options.text),
        progress=not options.quiet,
    )
    identity, _ = check(settings)
    free, need = shutil.disk_usage(_existing(output.parent)).free, artifact_bytes(identity)
    if free < need:
        raise InputError(f"{output}: {need / 2**20:.1f} MiB are needed, {free / 2**20:.1f} MiB are free; choose another place")
    artifact = calibrate(settings)
    artifacts.save(artifact, output)
    if options.quiet:
        return
    console = Console()
    report(artifact, console)
    for line in warnings(artifact):
        console.print(f"Note: {line}", highlight=False, soft_wrap=True)
    size = output.stat().st_size / 2**20
    console.print(f"Wrote {output}: {size:.2f} MiB, {artifact.num_tokens:,} tokens.", highlight=False, soft_wrap=True)


def _inspect(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from oscar import artifact as artifacts
    from oscar.report import describe, report, warnings

    artifact = artifacts.load(options.file)
    description = describe(artifact)
    if options.json:
        print(json.dumps(description | {"file_bytes": Path(options.file).stat().st_size}, indent=2, sort_keys=True))
        return
    console = Console()
    provenance = artifact.provenance
    model = artifact.model
    clip = description["clip"]
    table = Table(title=f"OSCAR artifact {Path(options.file).name}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "model": f"{model.architecture}, {model.num_layers} layers, {model.num_qo_heads} query and {model.num_kv_heads} KV "
        f"heads of {model.head_dim}" + ("" if model.v_head_dim == model.head_dim else f" (V: {model.v_head_dim})"),
        "fingerprint": model.fingerprint,
        "method": artifact.method + (", heads share a transform" if provenance.get("share_heads") else ""),
        "clip quantile": f"K {clip['k']}, V {clip['v']}",
        "bits per element": f"{description['bits_per_element']:.3f} in groups of {artifact.group_size}, "
        f"metadata {artifact.meta_dtype}",
        "bytes per token": f"{description['bytes_per_token']:,} ({description['bytes_per_token_16_bit']:,} in 16 bits)",
        "windows": f"first {artifact.sink_tokens} and newest {artifact.recent_tokens} tokens in 16 bits",
        "statistics": f"{artifact.num_tokens:,} tokens, longest sequence {provenance.get('longest_sequence', 0):,}",
        "text": "; ".join(f"{d['source']}: {d['tokens']:,} tokens" for d in provenance.get("data", [])) or "none needed",
        "seed, dtype": f"{provenance.get('seed')}, {provenance.get('dtype')} on {provenance.get('device')}",
        "made with": ", ".join(f"{k} {v}" for k, v in provenance.get("versions", {}).items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    report(artifact, console)
    for line in warnings(artifact):
        console.print(f"Note: {line}", highlight=False, soft_wrap=True)


def _plan(options: argparse.Namespace) -> None:
    from oscar.report import plan

    contexts = options.context or DEFAULT_CONTEXTS
    numbers = plan(options.model, options.group_size, options.sink_tokens, options.recent_tokens, contexts, options.memory_gib)
    if options.json:
        print(json.dumps(numbers, indent=2, sort_keys=True))
        return
    windows = options.sink_tokens + options.recent_tokens
    print(
        f"bytes per token: {numbers['bytes_per_token']:,} in 2 bits, {numbers['bytes_per_token_16_bit']:,} in 16 bits "
        f"({numbers['ratio']:.2f} times fewer); {numbers['bits_per_element']:.3f} bits per element"
    )
    print(f"windows: {windows} tokens in 16 bits, {numbers['window_bytes'] / 2**20:.2f} MiB a running request")
    for row in numbers["contexts"]:
        line = (
            f"context {row['tokens']:,}: {row['bytes'] / 2**20:,.1f} MiB a request instead of "
            f"{row['bytes_16_bit'] / 2**20:,.1f} MiB ({row['ratio']:.2f} times fewer)"
        )
        if options.memory_gib:
            line += f"; {options.memory_gib:g} GiB hold {row['requests']:,} requests instead of {row['requests_16_bit']:,}"
        print(line)


def _needle(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from oscar import needles

    folder = Path(options.model) if options.model else embedded_model()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: cannot load a tokenizer from this folder; check --model") from error
    try:
        needle = needles.make_needle(tokenizer, options.tokens, options.depth, options.seed)
    except ValueError as error:
        raise InputError(str(error)) from error
    if options.json:
        fields = ("prompt", "messages", "key", "answer", "num_tokens", "depth")
        print(json.dumps({name: getattr(needle, name) for name in fields}))
    else:
        print(needle.prompt)
        print(f"{needle.num_tokens} tokens, fact at {needle.depth:.2f}, answer {needle.answer}", file=sys.stderr)


def _model_path(options: argparse.Namespace) -> None:
    print(embedded_model())


def embedded_model() -> Path:
    """Folder of the model shipped with the package.

    Raises:
        InputError: this build carries none.
    """
    if not (EMBEDDED / "config.json").is_file():
        raise InputError("this build carries no embedded model; install a released build or give a model of your own")
    return EMBEDDED


def _check_output(path: Path) -> None:
    """Refuse a place that cannot be written before any work is done."""
    folder = _existing(path.parent)
    if path.is_dir():
        raise InputError(f"--output {path}: expected a file name, got a folder")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--output {path}: cannot write in {folder}; choose another place")


def _existing(folder: Path) -> Path:
    """The folder itself or the nearest one above it that exists; missing ones are made when the file is written."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _input_errors() -> tuple[type[ValueError], ...]:
    """Errors that are one sentence for the user. Anything else is a fault of ours and shows its traceback."""
    calibrate = sys.modules.get("oscar.calibrate")
    return (InputError, *(calibrate.CALIBRATION_ERRORS if calibrate else ()))
