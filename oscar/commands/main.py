"""`oscar calibrate | convert | inspect | verify | plan | evaluate | needle | model-path`: files in, files out.

A command is a module of this package with the command's name:

    HELP             one line for `oscar --help`
    DESCRIPTION      what `oscar NAME --help` begins with; optional
    add(parser)      adds its options
    run(found)       does it, with the parsed command line; raises OscarError for a mistake in the input

A mistake in the input is one line on stderr, `oscar NAME: <sentence>`, and exit status 2. Only the module of the command that
runs is imported, and what is heavy is imported by its `run`, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from types import ModuleType

from oscar.commands.parser import BAD_INPUT, OneLineParser
from oscar.errors import OscarError

COMMANDS = ("calibrate", "convert", "inspect", "verify", "plan", "evaluate", "needle", "model-path")
"""Every command, in the order of the help."""
INTERRUPTED = 128 + signal.SIGINT


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: command line without the program's name; None: the process's own.
    Returns:
        0, BAD_INPUT (2) after one line on stderr, or INTERRUPTED (130).
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(words[:1]) if words and words[0] in COMMANDS else build_parser(options=False)
    found = parser.parse_args(words)
    try:
        command(found.command).run(found)
    except KeyboardInterrupt:
        stats = getattr(found, "save_stats", None)
        left = f"; {stats} is whole, go on with --from-stats" if stats and Path(stats).is_file() else ""
        print(f"\noscar {found.command}: interrupted, no artifact was written{left}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `oscar inspect F | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OscarError as error:
        print(f"oscar {found.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def build_parser(names: Collection[str] = COMMANDS, options: bool = True) -> argparse.ArgumentParser:
    """The command line.

    Args:
        names: commands to know.
        options: add their options too. Those of `calibrate` and `evaluate` import torch, for the names of the methods.
    """
    parser = OneLineParser(prog="oscar", description="OSCAR: a 2-bit KV cache for SGLang. Calibrate, look, plan.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=OneLineParser)
    for name in names:
        module = command(name)
        one = commands.add_parser(name, help=module.HELP, description=getattr(module, "DESCRIPTION", None))
        if options:
            module.add(one)
    return parser


def command(name: str) -> ModuleType:
    """The module of a command."""
    return import_module(f"oscar.commands.{name.replace('-', '_')}")
