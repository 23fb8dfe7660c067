"""`oscar plan`: what a model's KV cache will take, before anything runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from oscar.capacity import PlanOptions, plan
from oscar.commands.files import print_json
from oscar.commands.from_dataclass import add_options, read_options
from oscar.options import PRINT_JSON, Options

HELP = "bytes per token and tokens per GiB of a model, 2-bit beside 16-bit; reads only its config.json"


@dataclass(frozen=True)
class Output(Options):
    """The form of the answer."""

    json: bool = field(default=False, metadata=PRINT_JSON)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser, PlanOptions)
    add_options(parser, Output)


def run(found: argparse.Namespace) -> None:
    """Count and print. Raises OscarError."""
    made = plan(read_options(PlanOptions, found))
    if read_options(Output, found).json:
        print_json(made.to_dict())
    else:
        print(made)
