"""The command line of `oscar evaluate`. Standard library only, so that `--help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from oscar import config


def add_evaluate(commands, methods: Sequence[str]) -> None:
    """Add the command.

    Args:
        commands: of `ArgumentParser.add_subparsers`.
        methods: names of all methods, for the help.
    """
    p = commands.add_parser(
        "evaluate",
        help="what a 2-bit cache costs in quality: divergence, perplexity, retrieval, against 16 bits",
        description="Read prompts and text with a model whose cache is kept in several ways, through the kernels that serve, "
        "and report what each costs. Methods are calibrated here; artifacts and a running server can be measured too.",
    )
    p.add_argument("--model", required=True, metavar="DIR", help="model folder in Hugging Face layout")
    p.add_argument("--artifact", action="append", default=[], metavar="FILE", help="artifact to measure; repeatable")
    p.add_argument(
        "--methods",
        type=_names,
        metavar="NAME,NAME",
        help=f"bf16, lossless, int2 (plain 2-bit), {', '.join(methods)}; a method's name with -shared: one transform for all "
        f"heads of a layer (default: {','.join(config.DEFAULT_CONFIGURATIONS)}; none with --endpoint)",
    )
    p.add_argument(
        "--tasks",
        type=_names,
        metavar="NAME,NAME",
        help=f"out of {', '.join(config.TASKS)} (default: all; with --endpoint alone those with answers)",
    )
    for name, value, what in (
        ("context", config.DEFAULT_EVALUATION_CONTEXT, "tokens of a prompt, and of the text before a continuation"),
        ("continuation", config.DEFAULT_CONTINUATION, "tokens decoded after it, teacher-forced"),
        ("documents", config.DEFAULT_DOCUMENTS, "most documents of running text"),
        ("n", config.DEFAULT_PROMPTS, "prompts of retrieval; each hard task has a fifth of them"),
        ("seed", config.DEFAULT_SEED, "seed of the first task"),
    ):
        p.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{what} (default: %(default)s)")
    windows = f"{config.DEFAULT_SINK_TOKENS},{config.DEFAULT_RECENT_TOKENS}"
    p.add_argument(
        "--windows",
        type=_windows,
        default=windows,
        metavar="S,R",
        help="first and newest tokens kept in 16 bits (default: %(default)s)",
    )
    p.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8 text for perplexity and divergence; repeatable (default: held-out prose and code of the embedded model)",
    )
    p.add_argument(
        "--calibration-text",
        action="append",
        default=[],
        metavar="FILE[:TOKENS]",
        help="text that methods are calibrated on, as in `oscar calibrate --text` (default: the model writes its own)",
    )
    p.add_argument(
        "--calibration-tokens",
        type=int,
        default=config.DEFAULT_CALIBRATION_TOKENS,
        metavar="N",
        help="tokens of it (default: %(default)s)",
    )
    p.add_argument("--from-stats", metavar="FILE", help="statistics saved by `oscar calibrate --save-stats` instead")
    p.add_argument("--group-size", type=int, metavar="N", help="as in `oscar calibrate` (default: head_dim)")
    p.add_argument("--endpoint", metavar="URL", help="server that also answers retrieval and recall-hard, OpenAI protocol")
    p.add_argument(
        "--served-context",
        action="store_true",
        help="each method reads prompts and contexts its own way, rounded to 16 bits as in a server, instead of sharing one "
        "exact pass; slower",
    )
    p.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="as in `oscar calibrate`"
    )
    p.add_argument("--device", default="auto", help="as in `oscar calibrate`")
    p.add_argument("--json", metavar="FILE", help="write the report here")
    p.add_argument("--picture", metavar="FILE", help="draw the report, .png")
    p.add_argument("--page", metavar="FILE", help="write report and picture as one .html page")
    p.add_argument("--quiet", action="store_true", help="no progress bars and no table")


def _names(value: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name for name in value.split(",") if name)


def _windows(value: str) -> tuple[int, int]:
    """(sink_tokens, recent_tokens) out of "S,R". Raises ArgumentTypeError."""
    parts = value.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected two numbers of tokens with a comma between them, got {value!r}")
    return int(parts[0]), int(parts[1])
