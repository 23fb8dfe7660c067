"""What an option is, once: the command line and the Python API are both made from the fields of a dataclass.

    tokens: int = field(default=16384, metadata=option("tokens to read in all", metavar="N"))

gives `oscar calibrate --tokens N` and `oscar.calibrate(tokens=...)`, with the same default and the same help. Type, default and
whether the option may be left out are the field's own. Standard library only, so that `--help` answers without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

KEY = "option"
"""Where a field's metadata holds its `Option`. A field without one has no flag: only Python sets it."""


@dataclass(frozen=True)
class Option:
    """What a field does not say itself.

    Attributes:
        help: what it is, with units, without the default; a function where the text is made of what takes long to import.
        flag: on the command line; None: the field's name with dashes.
        metavar: what stands for its value in the help.
        choices: values that the command line accepts; None for any. A function, as for `help`.
        default_is: what the help says of the default; None: the default itself, if it is a number or a string.
        many: "repeat": the flag may come several times; "commas": one value has commas between items; None: a single value.
        positional: it has no flag; its place on the command line says what it is.
    """

    help: str | Callable[[], str]
    flag: str | None = None
    metavar: str | None = None
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None
    default_is: str | None = None
    many: str | None = None
    positional: bool = False

    def text(self) -> str:
        """The help."""
        return self.help if isinstance(self.help, str) else self.help()


def option(help: str | Callable[[], str], **more: Any) -> Mapping[str, Option]:
    """Metadata of a field; arguments as in `Option`."""
    return {KEY: Option(help, **more)}


class Options:
    """Base of all dataclasses of options. Fields with many items take any sequence, or one item alone, and hold tuples."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, f.name)
            if f.metadata.get(KEY) is not None and f.metadata[KEY].many and value is not None:
                items = (value,) if isinstance(value, (str, Path, int)) else tuple(value)
                object.__setattr__(self, f.name, items)  # frozen


# Options that several commands share

MODEL = option("model folder in Hugging Face layout", metavar="DIR")
GROUP_SIZE = option(
    "elements that share a centre and a step, a multiple of 4 that divides head_dim", metavar="N", default_is="head_dim"
)
DTYPE = option(
    "dtype of the forward pass; auto: the checkpoint's own, on CPU float32 where that fits in half the memory",
    choices=("auto", "float32", "bfloat16", "float16"),
)
DEVICE = option("torch device; auto: the accelerator if any")
ALLOW_NATIVE_LAYERS = option("let layers be missing; the server keeps those in 16 bits")
PRINT_JSON = option("print one JSON object instead of text")
PICTURE = option("draw errors per layer before and after, spectra and outlier channels; .png, .svg or .pdf", metavar="FILE")


def sink_tokens(what: str) -> Mapping[str, Option]:
    """The sink window of a command. what: becomes of it there."""
    return option(f"first tokens of a request kept in 16 bits too; {what}", metavar="N")


def recent_tokens(what: str) -> Mapping[str, Option]:
    """The recent window of a command. what: becomes of it there."""
    return option(f"newest tokens of a request kept in 16 bits too; {what}", metavar="N")


def skip_layers(what: str) -> Mapping[str, Option]:
    """Layers that a command leaves in 16 bits. what: becomes of them there."""
    help = f"layers, from 0, that stay in 16 bits; {what}"
    return option(help, metavar="N,N", many="commas", default_is="none")
