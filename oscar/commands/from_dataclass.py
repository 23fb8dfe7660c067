"""Command-line options made from the fields of a dataclass, and the dataclass made from a command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from oscar.options import KEY, Option, Options

Some = TypeVar("Some", bound=Options)


def add_options(parser: argparse.ArgumentParser, options: type[Options]) -> None:
    """Add an option for each field that has one. What is not given stays out of the namespace: defaults are the dataclass's."""
    hints = get_type_hints(options)
    for f in fields(options):  # type: ignore[arg-type]  # subclasses of Options are dataclasses
        about = f.metadata.get(KEY)
        if about is not None:
            _add(parser, f, about, hints[f.name])


def read_options(options: type[Some], found: argparse.Namespace, **more: Any) -> Some:
    """The dataclass of what was given on the command line. more: values of fields that have no option."""
    names = [f.name for f in fields(options) if KEY in f.metadata]  # type: ignore[arg-type]
    return options(**{name: getattr(found, name) for name in names if hasattr(found, name)} | more)


def _add(parser: argparse.ArgumentParser, f: Field, about: Option, hint: Any) -> None:
    """One option."""
    choices = about.choices() if callable(about.choices) else about.choices
    settings: dict[str, Any] = {"help": _help(f, about).replace("%", "%%")}
    if _leaf(hint) is bool:
        settings["action"] = "store_true"
    else:
        settings |= {"metavar": about.metavar, "choices": choices, "type": _parse(hint, about)}
    if about.many == "repeat":
        settings["action"] = "append"
    if about.positional:
        parser.add_argument(f.name, **settings)
        return
    settings |= {"required": True} if _is_required(f) else {"default": argparse.SUPPRESS}
    parser.add_argument(about.flag or f"--{f.name.replace('_', '-')}", dest=f.name, **settings)


def _is_required(f: Field) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _help(f: Field, about: Option) -> str:
    """The help with the default at its end, if there is one to speak of."""
    default = about.default_is
    if default is None and isinstance(f.default, (int, float, str)) and not isinstance(f.default, bool):
        default = str(f.default)
    return f"{about.text()} (default: {default})" if default else about.text()


def _parse(hint: Any, about: Option) -> Callable[[str], Any]:
    """What makes a value of a word of the command line."""
    leaf = _leaf(hint)
    if leaf is dict:
        return _json_object
    if about.many != "commas":
        return leaf
    return _numbers if leaf is int else _names


def _leaf(hint: Any) -> type:
    """The simple type at the bottom of a field's type: `int` of `int | Sequence[int] | None`, `dict` of a mapping."""
    if get_origin(hint) is Mapping:
        return dict
    parts = get_args(hint)
    if not parts:
        return hint
    leaves = {_leaf(part) for part in parts} - {NoneType, Path}
    assert len(leaves) == 1, f"a field of type {hint} is no option"
    return leaves.pop()


def _names(value: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name for name in value.split(",") if name)


def _numbers(value: str) -> tuple[int, ...]:
    """Numbers with commas between them, in order and once each. Raises ArgumentTypeError."""
    try:
        return tuple(sorted({int(number) for number in value.split(",")}))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, got {value!r}") from error


def _json_object(value: str) -> dict:
    """An object out of the command line. Raises ArgumentTypeError."""
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {value!r}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {value!r}")
    return found
