"""What the scripts of this folder share: a model ready for a comparison, an artifact, names, and how figures are written."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import stress
from transformers import AutoConfig, AutoTokenizer

from oscar import config
from oscar.calibration import sources, text
from oscar.calibration.calibrate import collect
from oscar.calibration.check import max_length
from oscar.calibration.load_model import load_model
from oscar.calibration.options import CalibrationOptions
from oscar.embedded import embedded_model
from oscar.evaluation.run import HELD_OUT
from oscar.evaluation.text_scores import read_documents
from oscar.format.identity import ModelIdentity
from oscar.methods.statistics import LayerStatistics
from oscar.progress import Steps


def add_model(parser: argparse.ArgumentParser, help: str = "model folder") -> None:
    """The option --model; the embedded model by default."""
    parser.add_argument("--model", type=Path, default=embedded_model(), metavar="DIR", help=f"{help} (default: embedded)")


def write_json(path: Path, record) -> None:
    """Write figures; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put a text between two marks of a page, in place of what stands there."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def run_calibrate(model: str | Path, output: Path, *flags: str) -> None:
    """`oscar calibrate` in a process of its own."""
    command = [sys.executable, "-m", "oscar", "calibrate", "--model", str(model), "--output", str(output), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def label(name: str, cache: dict | None) -> str:
    """How pages and pictures name a served cache: its method and its windows.

    Args:
        name: what it is called where it is no cache of ours.
        cache: what the server says of it, with `method`, `sink_tokens` and `recent_tokens`; None for SGLang's own.
    """
    if cache is None:
        return name
    sizes = cache["sink_tokens"], cache["recent_tokens"]
    method = "plain INT2" if cache["method"] == "identity" else cache["method"]
    return f"{method}, " + (f"windows {sizes[0]}/{sizes[1]}" if any(sizes) else "no windows")


def calibration_text(folder: Path, tokens: int, files: Collection[str] = ()) -> list[text.Sequence]:
    """Calibration text of so many tokens: out of files ("FILE" or "FILE:TOKENS" each), or else written by the model."""
    if not files:
        return written_text(folder, tokens)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    longest = max_length(CalibrationOptions(folder), AutoConfig.from_pretrained(folder))
    wanted = sources.parse(files, tokens)
    return [one for source in wanted for one in sources.sequences(source, tokenizer, longest, config.DEFAULT_SEED)]


def written_text(folder: Path, tokens: int) -> list[text.Sequence]:
    """Calibration text of so many tokens that the model writes itself; the same for the same model."""
    model = load_model(folder, AutoConfig.from_pretrained(folder), "float32", "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return text.from_model(model, tokenizer, tokens, config.LONGEST_SEQUENCE, config.DEFAULT_SEED)


@dataclass
class Subject:
    """A variant of a model and its statistics, ready to be read with several configurations.

    Args:
        folder: of the model. model, tokenizer: loaded, the model in float32 and made a variant.
        identity: of the model. options: of the calibration. layers: layer -> statistics.
    """

    folder: Path
    model: object
    tokenizer: object
    identity: ModelIdentity
    options: CalibrationOptions
    layers: dict[int, LayerStatistics]

    @classmethod
    def of(cls, variant: str, folder: Path, given: list[text.Sequence]) -> Subject:
        """Load a model, make it a variant (a name in `stress.VARIANTS`), and collect its statistics over the given text."""
        model_config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        model = load_model(folder, model_config, "float32", "cpu")
        stress.apply(variant, model, given[0].tokens[:1024])
        identity = ModelIdentity.from_path(folder)
        options = CalibrationOptions(folder, method="oscar-surrogate", dtype="float32", device="cpu")
        layers = collect(options, identity, model, model_config, Steps(False), given).layers
        return cls(folder, model, tokenizer, identity, options, layers)

    def documents(self, tokens: int, most: int) -> list:
        """At most so many documents of the embedded model's held-out prose and code, each of `tokens` tokens."""
        return read_documents([embedded_model() / file for file in HELD_OUT], self.tokenizer, tokens, most)
