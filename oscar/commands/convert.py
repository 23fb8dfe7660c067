"""`oscar convert`: the public implementation's rotation files in, an artifact out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from oscar import config
from oscar.commands.files import check_output, print_json
from oscar.commands.from_dataclass import add_options, read_options
from oscar.options import ALLOW_NATIVE_LAYERS, GROUP_SIZE, MODEL, Options, option, recent_tokens, sink_tokens

HELP = "make an artifact of the public implementation's rotation files"
DESCRIPTION = (
    "Read a pair of rotation files (RotationZoo; one matrix a layer or one a KV head), check them, and write an artifact. "
    "Files that would run code when read are refused."
)
_CLIP = "quantile of |x| in a {} row beyond which it is clipped, in (0, 1]"


@dataclass(frozen=True)
class ConvertOptions(Options):
    """What is converted, and what becomes of it."""

    k_file: str = field(metadata=option("rotation file of the keys", metavar="K.pt", positional=True))
    v_file: str = field(metadata=option("rotation file of the values", metavar="V.pt", positional=True))
    model: str = field(metadata=MODEL)
    output: str = field(metadata=option("artifact to write, .kvq", metavar="FILE"))
    k_clip: float = field(default=config.DEFAULT_K_CLIP, metadata=option(_CLIP.format("K"), metavar="Q"))
    v_clip: float = field(default=config.DEFAULT_V_CLIP, metadata=option(_CLIP.format("V"), metavar="Q"))
    group_size: int | None = field(default=None, metadata=GROUP_SIZE)
    allow_native_layers: bool = field(default=False, metadata=ALLOW_NATIVE_LAYERS)
    sink_tokens: int = field(default=config.DEFAULT_SINK_TOKENS, metadata=sink_tokens("recorded"))
    recent_tokens: int = field(default=config.DEFAULT_RECENT_TOKENS, metadata=recent_tokens("recorded"))
    json: bool = field(default=False, metadata=option("print one JSON object instead, as `oscar inspect --json`"))
    quiet: bool = field(default=False, metadata=option("print nothing"))


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser, ConvertOptions)


def run(found: argparse.Namespace) -> None:
    """Convert and write the artifact. Raises OscarError."""
    options = read_options(ConvertOptions, found)
    output = Path(options.output)
    check_output(output)

    from oscar.calibration.convert import convert
    from oscar.calibration.report import describe, warnings
    from oscar.format import artifact as artifacts

    made = convert(
        options.k_file,
        options.v_file,
        options.model,
        k_clip=options.k_clip,
        v_clip=options.v_clip,
        group_size=options.group_size,
        sink_tokens=options.sink_tokens,
        recent_tokens=options.recent_tokens,
        allow_native_layers=options.allow_native_layers,
    )
    artifacts.save(made, output)
    if options.json:
        print_json(describe(made) | {"file_bytes": output.stat().st_size})
    if options.quiet or options.json:
        return
    for line in warnings(made):
        print(f"Note: {line}")
    print(f"Wrote {output}: {len(made.layers)} layers for {made.model.architecture}; its error is not measured.")
