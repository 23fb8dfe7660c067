"""What `oscar evaluate` does with its command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from oscar import config
from oscar.evaluation.page import draw, show, write_page
from oscar.evaluation.run import EvaluationOptions, evaluate
from oscar.format.sealed_file import write_whole


def run(options: argparse.Namespace) -> None:
    """Evaluate, write the files asked for, print the tables. Raises as `evaluate` does."""
    same = ("model", "context", "continuation", "documents", "n", "seed", "calibration_tokens", "from_stats", "group_size")
    given = {name: getattr(options, name) for name in (*same, "endpoint", "served_context", "dtype", "device")}
    alone = options.endpoint is not None and not options.artifact and not options.methods
    if options.methods is not None or options.endpoint is not None:
        given["methods"] = options.methods or ()
    if options.tasks is not None or alone:
        given["tasks"] = options.tasks or ("retrieval", config.RECALL_HARD)
    report = evaluate(
        EvaluationOptions(
            **given,
            artifacts=tuple(options.artifact),
            text=tuple(options.text),
            calibration_text=tuple(options.calibration_text),
            sink_tokens=options.windows[0],
            recent_tokens=options.windows[1],
            progress=not options.quiet,
        )
    )
    if options.json:
        write_whole(Path(options.json), (json.dumps(report, indent=1) + "\n").encode(), "report")
    if options.picture:
        write_whole(Path(options.picture), draw(report), "picture")
    if options.page:
        write_page(report, options.page)
    if not options.quiet:
        show(report, Console())
