"""`oscar verify`: is an artifact whole, are its matrices invertible, and does it fit a model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from oscar.commands.files import print_json
from oscar.commands.from_dataclass import add_options, read_options
from oscar.options import ALLOW_NATIVE_LAYERS, PRINT_JSON, Options, option

HELP = "check every byte of an artifact, its matrices, and that it fits a model; exit code 0 or 2"


@dataclass(frozen=True)
class VerifyOptions(Options):
    """What is checked."""

    file: str = field(metadata=option("artifact made by `oscar calibrate` or `oscar convert`", metavar="FILE", positional=True))
    model: str | None = field(default=None, metadata=option("model folder it has to fit", metavar="DIR"))
    allow_native_layers: bool = field(default=False, metadata=ALLOW_NATIVE_LAYERS)
    json: bool = field(default=False, metadata=PRINT_JSON)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser, VerifyOptions)


def run(found: argparse.Namespace) -> None:
    """Check and print what was found. Raises OscarError."""
    options = read_options(VerifyOptions, found)

    from oscar.calibration.report import verify
    from oscar.format import artifact as artifacts
    from oscar.format.identity import ModelIdentity

    model = None if options.model is None else ModelIdentity.from_path(options.model)
    seen = verify(artifacts.load(options.file, model, options.allow_native_layers), options.file)
    if options.json:
        print_json(seen | {"fits_model": None if model is None else True})
        return
    print(
        f"{options.file}: whole and unchanged, {seen['layers']} layers of method {seen['method']} for "
        f"{seen['architecture']}; all matrices invertible (largest condition number {seen['condition']:.3g})"
    )
    if seen["native_layers"]:
        print(f"{options.file}: layers {', '.join(map(str, seen['native_layers']))} stay in 16 bits")
    if model is not None:
        print(f"{options.file}: made for {options.model}")
