"""`oscar inspect`: what an artifact is made of, and how good it is."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from oscar.commands.files import check_picture, print_json
from oscar.commands.from_dataclass import add_options, read_options
from oscar.options import PICTURE, PRINT_JSON, Options, option

HELP = "check an artifact and say what is in it"


@dataclass(frozen=True)
class InspectOptions(Options):
    """What is looked at, and in which form."""

    file: str = field(metadata=option("artifact made by `oscar calibrate`", metavar="FILE", positional=True))
    picture: str | None = field(default=None, metadata=PICTURE)
    json: bool = field(default=False, metadata=PRINT_JSON)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser, InspectOptions)


def run(found: argparse.Namespace) -> None:
    """Print, and draw if asked. Raises OscarError."""
    options = read_options(InspectOptions, found)
    check_picture(options.picture)

    from rich.console import Console

    from oscar.calibration.picture import draw
    from oscar.calibration.report import describe, say_warnings, show, summary
    from oscar.format import artifact as artifacts

    artifact = artifacts.load(options.file, native_layers=True)
    if options.picture is not None:
        draw(artifact, options.picture)
    if options.json:
        print_json(describe(artifact) | {"file_bytes": Path(options.file).stat().st_size})
        return
    console = Console()
    console.print(summary(artifact, Path(options.file).name))
    show(artifact, console)
    say_warnings(artifact, console)
