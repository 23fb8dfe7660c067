"""`oscar needle`: a prompt that hides a fact, for trying a server by hand."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from oscar.commands.from_dataclass import add_options, read_options
from oscar.embedded import embedded_model
from oscar.errors import OscarError
from oscar.options import Options, option

HELP = "print a prompt that hides a fact in filler and asks for it"


@dataclass(frozen=True)
class NeedleOptions(Options):
    """Which prompt."""

    tokens: int = field(metadata=option("longest prompt in tokens", metavar="N"))
    seed: int = field(default=0, metadata=option("another seed, another task", metavar="S"))
    depth: float | None = field(
        default=None, metadata=option("place of the fact, 0 (start) to 1 (end)", metavar="F", default_is="drawn")
    )
    model: str | None = field(
        default=None,
        metadata=option("folder whose tokenizer and chat template to use", metavar="DIR", default_is="the embedded model"),
    )
    json: bool = field(default=False, metadata=option("print prompt, messages and answer as one JSON object instead"))


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser, NeedleOptions)


def run(found: argparse.Namespace) -> None:
    """Print the prompt. Raises OscarError."""
    options = read_options(NeedleOptions, found)

    from transformers import AutoTokenizer

    from oscar.evaluation import needles

    folder = Path(options.model) if options.model else embedded_model()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise OscarError(f"{folder}: cannot load a tokenizer from this folder; check --model") from error
    needle = needles.make_needle(tokenizer, options.tokens, options.depth, options.seed)
    if options.json:
        fields = ("prompt", "messages", "key", "answer", "num_tokens", "depth")
        print(json.dumps({name: getattr(needle, name) for name in fields}))
    else:
        print(needle.prompt)
        print(f"{needle.num_tokens} tokens, fact at {needle.depth:.2f}, answer {needle.answer}", file=sys.stderr)
