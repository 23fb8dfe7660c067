"""A start that cannot go on: one sentence for the user, without a traceback, and exit status 1."""

from __future__ import annotations

import sys

from oscar.errors import OscarError


class OscarRefusal(OscarError):
    """The start cannot go on. The message is one sentence that begins with "oscar: "."""


def refuse(sentence: str) -> OscarRefusal:
    """The exception for `sentence`; if nothing catches it, the process prints the sentence alone and exits with 1."""
    if sys.excepthook is not _sentence_only:
        _sentence_only.previous = sys.excepthook
        sys.excepthook = _sentence_only
    return OscarRefusal(sentence)


def unreadable(model_path: str, error: Exception) -> OscarRefusal:
    """The exception for a model that a library cannot read, with the first line of the library's message."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return refuse(f"oscar: cannot read the model {model_path}: {first}")


def _sentence_only(kind, error, trace) -> None:
    if isinstance(error, OscarRefusal):
        print(error, file=sys.stderr, flush=True)
    else:
        _sentence_only.previous(kind, error, trace)
