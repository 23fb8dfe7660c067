"""`oscar evaluate`: what a 2-bit cache costs in quality."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

from oscar.commands.files import check_output
from oscar.commands.from_dataclass import add_options, read_options
from oscar.evaluation.options import EvaluationOptions
from oscar.options import Options, option

HELP = "what a 2-bit cache costs in quality: divergence, perplexity, retrieval, against 16 bits"
DESCRIPTION = (
    "Read prompts and text with a model whose cache is kept in several ways, through the kernels that serve, and report what "
    "each costs. Methods are calibrated here; artifacts and a running server can be measured too."
)


@dataclass(frozen=True)
class Output(Options):
    """What becomes of the report."""

    json: str | None = field(default=None, metadata=option("write the report here", metavar="FILE"))
    picture: str | None = field(default=None, metadata=option("draw the report, .png", metavar="FILE"))
    page: str | None = field(default=None, metadata=option("write report and picture as one .html page", metavar="FILE"))
    quiet: bool = field(default=False, metadata=option("no progress bars and no table"))


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser, EvaluationOptions)
    add_options(parser, Output)


def run(found: argparse.Namespace) -> None:
    """Evaluate, write the files asked for, print the tables. Raises OscarError."""
    wanted = read_options(Output, found)
    check_output(wanted.json, "--json")
    check_output(wanted.picture, "--picture", (".png",))
    check_output(wanted.page, "--page", (".html",))

    from rich.console import Console

    from oscar.evaluation.page import draw, show, write_page
    from oscar.evaluation.run import evaluate
    from oscar.format.sealed_file import write_whole

    report = evaluate(read_options(EvaluationOptions, found, progress=not wanted.quiet))
    if wanted.json is not None:
        write_whole(Path(wanted.json), (json.dumps(report, indent=1) + "\n").encode(), "report")
    if wanted.picture is not None:
        write_whole(Path(wanted.picture), draw(report), "picture")
    if wanted.page is not None:
        write_page(report, wanted.page)
    if not wanted.quiet:
        show(report, Console())
