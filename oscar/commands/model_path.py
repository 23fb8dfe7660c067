"""`oscar model-path`: where the model that ships with the package lies."""

from __future__ import annotations

import argparse

from oscar.embedded import embedded_model

HELP = "print where the embedded model lies"


def add(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(found: argparse.Namespace) -> None:
    """Print the folder. Raises OscarError: this build carries none."""
    print(embedded_model())
