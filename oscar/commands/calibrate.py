"""`oscar calibrate`: a model and text in, the artifact that serving needs out."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from oscar.calibration.options import CalibrationOptions
from oscar.commands.files import check_output, check_picture, existing, print_json
from oscar.commands.from_dataclass import add_options, read_options
from oscar.errors import OscarError
from oscar.options import PICTURE, Options, option

HELP = "make the artifact that serving needs, from a model and text"
DESCRIPTION = (
    "Run a model over text, accumulate what attention consumes, and write the transforms of its 2-bit cache to one "
    ".kvq file. Without --text the model writes the text itself. The same inputs give the same bytes."
)


@dataclass(frozen=True)
class Output(Options):
    """What becomes of the artifact."""

    output: str = field(metadata=option("artifact to write, .kvq", metavar="FILE"))
    picture: str | None = field(default=None, metadata=PICTURE)
    json: bool = field(default=False, metadata=option("print one JSON object instead of the table, as `oscar inspect --json`"))
    quiet: bool = field(default=False, metadata=option("no progress bar and no table"))


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser, CalibrationOptions)
    add_options(parser, Output)


def run(found: argparse.Namespace) -> None:
    """Calibrate and write the artifact. Raises OscarError."""
    wanted = read_options(Output, found)
    options = read_options(CalibrationOptions, found, progress=not wanted.quiet)
    output = Path(wanted.output)

    from oscar.format import artifact as artifacts

    check_output(output)
    artifacts.check_place(output)
    check_output(options.save_stats, "--save-stats")
    check_picture(wanted.picture)

    from rich.console import Console

    from oscar.calibration.calibrate import calibrate
    from oscar.calibration.check import check
    from oscar.calibration.picture import draw
    from oscar.calibration.report import artifact_bytes, describe, say_warnings, show

    identity, _ = check(options)
    free, need = shutil.disk_usage(existing(output.parent)).free, artifact_bytes(identity)
    if free < need:
        raise OscarError(f"{output}: {need / 2**20:.1f} MiB are needed, {free / 2**20:.1f} MiB are free; choose another place")
    artifact = calibrate(options)
    artifacts.save(artifact, output)
    if wanted.picture is not None:
        draw(artifact, wanted.picture)
    if wanted.json:
        print_json(describe(artifact) | {"file_bytes": output.stat().st_size})
    if wanted.quiet or wanted.json:
        return
    console = Console()
    show(artifact, console)
    say_warnings(artifact, console)
    size = output.stat().st_size / 2**20
    console.print(f"Wrote {output}: {size:.2f} MiB, {artifact.num_tokens:,} tokens.", highlight=False, soft_wrap=True)
