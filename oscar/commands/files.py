"""Files that a command writes: places that cannot be written are refused before any work is done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from oscar.errors import OscarError


def check_output(path: str | Path | None, flag: str = "--output", endings: tuple[str, ...] = ()) -> None:
    """Refuse a place that cannot be written.

    Args:
        path: the file; None: nothing is written, and nothing refused.
        flag: that it came from.
        endings: of the file's name, one of which it must have; () for any.
    Raises:
        OscarError: another ending, a folder, or a place that cannot be written.
    """
    if path is None:
        return
    path = Path(path)
    if endings and path.suffix.lower() not in endings:
        expected = " or ".join(filter(None, (", ".join(endings[:-1]), endings[-1])))
        raise OscarError(f"{flag} {path}: expected a file that ends in {expected}")
    folder = existing(path.parent)
    if path.is_dir():
        raise OscarError(f"{flag} {path}: expected a file name, got a folder")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OscarError(f"{flag} {path}: cannot write in {folder}; choose another place")


def check_picture(path: str | Path | None) -> None:
    """Refuse a picture of an artifact that cannot be written. Raises OscarError."""
    check_output(path, "--picture", (".png", ".svg", ".pdf"))


def existing(folder: Path) -> Path:
    """The folder itself or the nearest one above it that exists; missing ones are made when the file is written."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def print_json(found: dict[str, Any]) -> None:
    """One JSON object on standard output, keys in order."""
    print(json.dumps(found, indent=2, sort_keys=True))
