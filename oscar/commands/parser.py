"""An argument parser whose errors are one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

BAD_INPUT = 2
"""Exit status after one sentence on stderr."""


class OneLineParser(argparse.ArgumentParser):
    """As `argparse.ArgumentParser`, but a mistake prints no usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")
