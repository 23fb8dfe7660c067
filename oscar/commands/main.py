"""`oscar calibrate | convert | inspect | verify | plan | evaluate | needle | model-path`: files in, files out.

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

from oscar.commands.parser import BAD_INPUT, DEFAULT_CONTEXTS, build_parser
from oscar.embedded import embedded_model
from oscar.errors import OscarError

INTERRUPTED = 128 + signal.SIGINT


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: command line without the program's name; None: the process's own.
    Returns:
        0, BAD_INPUT (2) after one line on stderr, or INTERRUPTED (130).
    """
    options = build_parser().parse_args(arguments)
    try:
        COMMANDS[options.command](options)
    except KeyboardInterrupt:
        stats = getattr(options, "save_stats", None)
        left = f"; {stats} is whole, go on with --from-stats" if stats and Path(stats).is_file() else ""
        print(f"\noscar {options.command}: interrupted, no artifact was written{left}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `oscar inspect F | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OscarError as error:
        print(f"oscar {options.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _calibrate(options: argparse.Namespace) -> None:
    output = Path(options.output)
    _check_output(output)
    if options.save_stats:
        _check_output(Path(options.save_stats), "--save-stats")
    _check_picture(options.picture)

    from rich.console import Console

    from oscar.calibration.calibrate import CalibrationOptions, calibrate, check
    from oscar.calibration.report import artifact_bytes, describe, report, warnings
    from oscar.format import artifact as artifacts

    fields = (
        "model",
        "tokens",
        "method",
        "share_heads",
        "group_size",
        "seed",
        "max_length",
        "skip_layers",
        "sink_tokens",
        "recent_tokens",
        "clip",
        "backend",
        "tp",
        "save_stats",
        "from_stats",
    )
    settings = CalibrationOptions(
        **{name: getattr(options, name) for name in (*fields, "dtype", "device")},
        text=tuple(options.text),
        engine=tuple(options.engine_args.items()),
        progress=not options.quiet,
    )
    identity, _ = check(settings)
    free, need = shutil.disk_usage(_existing(output.parent)).free, artifact_bytes(identity)
    if free < need:
        raise OscarError(f"{output}: {need / 2**20:.1f} MiB are needed, {free / 2**20:.1f} MiB are free; choose another place")
    artifact = calibrate(settings)
    artifacts.save(artifact, output)
    _draw(artifact, options.picture)
    if options.json:
        print(json.dumps(describe(artifact) | {"file_bytes": output.stat().st_size}, indent=2, sort_keys=True))
    if options.quiet or options.json:
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

    from oscar.calibration.report import describe, report, warnings
    from oscar.format import artifact as artifacts

    _check_picture(options.picture)
    artifact = artifacts.load(options.file, native_layers=True)
    _draw(artifact, options.picture)
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
        "bits per element": f"{description['bits_per_element']:.3f} in groups of {artifact.group_size}",
        "bytes per token": f"{description['bytes_per_token']:,} ({description['bytes_per_token_16_bit']:,} in 16 bits)",
        "windows": f"first {artifact.sink_tokens} and newest {artifact.recent_tokens} tokens in 16 bits",
        "statistics": f"{artifact.num_tokens:,} tokens, longest sequence {provenance.get('longest_sequence', 0):,}",
        "text": "; ".join(f"{d['source']}: {d['tokens']:,} tokens" for d in provenance.get("data", [])) or "none needed",
        "seed, dtype": f"{provenance.get('seed')}, {provenance.get('dtype')} on {provenance.get('device')}",
        "made with": ", ".join(f"{k} {v}" for k, v in provenance.get("versions", {}).items()),
    }
    for side, source in provenance.get("converted_from", {}).items():
        rows[f"{side.upper()} from"] = f"{source['file']}, {source['objective']}, sha256 {source['sha256'][:16]}"
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    report(artifact, console)
    for line in warnings(artifact):
        console.print(f"Note: {line}", highlight=False, soft_wrap=True)


def _convert(options: argparse.Namespace) -> None:
    output = Path(options.output)
    _check_output(output)
    from oscar.calibration.convert import convert
    from oscar.calibration.report import describe, warnings
    from oscar.format import artifact as artifacts

    settings = ("k_clip", "v_clip", "group_size", "sink_tokens", "recent_tokens", "allow_native_layers")
    made = convert(options.k_file, options.v_file, options.model, **{name: getattr(options, name) for name in settings})
    artifacts.save(made, output)
    if options.json:
        print(json.dumps(describe(made) | {"file_bytes": output.stat().st_size}, indent=2, sort_keys=True))
    if options.quiet or options.json:
        return
    for line in warnings(made):
        print(f"Note: {line}")
    print(f"Wrote {output}: {len(made.layers)} layers for {made.model.architecture}; its error is not measured.")


def _verify(options: argparse.Namespace) -> None:
    from oscar.calibration.report import verify
    from oscar.format import artifact as artifacts

    model = None if options.model is None else artifacts.ModelIdentity.from_path(options.model)
    found = verify(artifacts.load(options.file, model, options.allow_native_layers), options.file)
    if options.json:
        print(json.dumps(found | {"fits_model": None if model is None else True}, indent=2, sort_keys=True))
        return
    print(
        f"{options.file}: whole and unchanged, {found['layers']} layers of method {found['method']} for "
        f"{found['architecture']}; all matrices invertible (largest condition number {found['condition']:.3g})"
    )
    if found["native_layers"]:
        print(f"{options.file}: layers {', '.join(map(str, found['native_layers']))} stay in 16 bits")
    if model is not None:
        print(f"{options.file}: made for {options.model}")


def _plan(options: argparse.Namespace) -> None:
    from oscar.calibration.report import plan
    from oscar.format import sizing

    contexts = options.context or DEFAULT_CONTEXTS
    windows = options.sink_tokens, options.recent_tokens
    numbers = plan(options.model, options.group_size, *windows, contexts, options.memory_gib, options.skip_layers)
    if options.json:
        print(json.dumps(numbers, indent=2, sort_keys=True))
        return
    rows = sizing.window_rows(options.sink_tokens, options.recent_tokens)
    print(
        f"bytes per token: {numbers['bytes_per_token']:,} in 2 bits, {numbers['bytes_per_token_16_bit']:,} in 16 bits "
        f"({numbers['ratio']:.2f} times fewer); {numbers['bits_per_element']:.3f} bits per element"
        + (f", layers {', '.join(map(str, options.skip_layers))} in 16" if options.skip_layers else "")
    )
    print(f"windows: {rows} rows in 16 bits, {numbers['window_bytes'] / 2**20:.2f} MiB a request slot")
    for row in numbers["contexts"]:
        line = (
            f"context {row['tokens']:,}: {row['bytes'] / 2**20:,.1f} MiB a request instead of "
            f"{row['bytes_16_bit'] / 2**20:,.1f} MiB ({row['ratio']:.2f} times fewer)"
        )
        if options.memory_gib:
            line += f"; {options.memory_gib:g} GiB hold {row['requests']:,} requests instead of {row['requests_16_bit']:,}"
        print(line)


def _evaluate(options: argparse.Namespace) -> None:
    for flag, ending in (("json", None), ("picture", ".png"), ("page", ".html")):
        path = getattr(options, flag)
        if path is None:
            continue
        if ending and Path(path).suffix.lower() != ending:
            raise OscarError(f"--{flag} {path}: expected a file that ends in {ending}")
        _check_output(Path(path), f"--{flag}")

    from oscar.commands.evaluate import run

    run(options)


def _needle(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from oscar.evaluation import needles

    folder = Path(options.model) if options.model else embedded_model()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise OscarError(f"{folder}: cannot load a tokenizer from this folder; check --model") from error
    try:
        needle = needles.make_needle(tokenizer, options.tokens, options.depth, options.seed)
    except ValueError as error:
        raise OscarError(str(error)) from error
    if options.json:
        fields = ("prompt", "messages", "key", "answer", "num_tokens", "depth")
        print(json.dumps({name: getattr(needle, name) for name in fields}))
    else:
        print(needle.prompt)
        print(f"{needle.num_tokens} tokens, fact at {needle.depth:.2f}, answer {needle.answer}", file=sys.stderr)


def _model_path(options: argparse.Namespace) -> None:
    print(embedded_model())


def _check_output(path: Path, flag: str = "--output") -> None:
    """Refuse a place that cannot be written before any work is done."""
    folder = _existing(path.parent)
    if path.is_dir():
        raise OscarError(f"{flag} {path}: expected a file name, got a folder")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OscarError(f"{flag} {path}: cannot write in {folder}; choose another place")


def _check_picture(path: str | None) -> None:
    """Refuse a picture that cannot be written before any work is done."""
    if path is None:
        return
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise OscarError(f"--picture {path}: expected a file that ends in .png, .svg or .pdf")
    _check_output(Path(path), "--picture")


def _draw(artifact, path: str | None) -> None:
    if path is not None:
        from oscar.calibration.picture import draw

        draw(artifact, path)


def _existing(folder: Path) -> Path:
    """The folder itself or the nearest one above it that exists; missing ones are made when the file is written."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


COMMANDS = {
    "calibrate": _calibrate,
    "convert": _convert,
    "inspect": _inspect,
    "verify": _verify,
    "plan": _plan,
    "evaluate": _evaluate,
    "needle": _needle,
    "model-path": _model_path,
}
