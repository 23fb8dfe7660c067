"""What a calibration can be asked: each option once, for `oscar calibrate` and for `oscar.calibrate`.

Standard library only; `oscar.calibration.check` refuses what cannot work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oscar import config
from oscar.options import DEVICE, DTYPE, GROUP_SIZE, MODEL, Options, option, recent_tokens, sink_tokens, skip_layers

CLIPS = ("paper", "search")
BACKENDS = ("hf", "sglang")
_MEASURED = "the error is measured with them"


def method_names() -> tuple[str, ...]:
    """Names of all methods, the default first. Imports torch."""
    from oscar.methods import METHODS

    return tuple(METHODS)


def _method_help() -> str:
    from oscar.methods import METHODS

    return "; ".join(f"{name}: {method.help.replace('; ', ', ')}" for name, method in METHODS.items())


@dataclass(frozen=True)
class CalibrationOptions(Options):
    """Everything that decides an artifact's bytes. Three more are for Python only:

    k_clip, v_clip: fixed quantile of |x| in (0, 1] for one side; None: the method's own.
    progress: draw a progress bar on stderr.
    """

    model: str | Path = field(metadata=MODEL)
    text: Sequence[str | Path] = field(
        default=(),
        metadata=option(
            'text to calibrate on: plain UTF-8, or .jsonl with "text", "prompt" or chat "messages" in each line; repeat for a '
            "mix; a file without TOKENS shares evenly what the others leave of the tokens in all; without any text, the model "
            "writes its own",
            metavar="FILE[:TOKENS]",
            many="repeat",
        ),
    )
    tokens: int = field(
        default=config.DEFAULT_CALIBRATION_TOKENS,
        metadata=option("tokens to read in all, a tenth of them held out to measure the error", metavar="N"),
    )
    method: str = field(default=config.DEFAULT_METHOD, metadata=option(_method_help, choices=method_names))
    share_heads: bool = field(
        default=False,
        metadata=option(
            "one transform for all KV heads of a layer, as the public implementation; often much worse",
        ),
    )
    group_size: int | None = field(default=None, metadata=GROUP_SIZE)
    clip: str = field(
        default="paper",
        metadata=option(
            f"paper: rows are clipped at the quantiles {config.DEFAULT_K_CLIP} (K) and {config.DEFAULT_V_CLIP} (V) of their "
            "own |x|; search: quantiles per layer, head and side, chosen on half of the held-out text",
            choices=CLIPS,
        ),
    )
    k_clip: float | None = None
    v_clip: float | None = None
    sink_tokens: int = field(default=config.DEFAULT_SINK_TOKENS, metadata=sink_tokens(_MEASURED))
    recent_tokens: int = field(default=config.DEFAULT_RECENT_TOKENS, metadata=recent_tokens(_MEASURED))
    max_length: int | None = field(
        default=None,
        metadata=option(
            "longest sequence in tokens, capped by the model's context length",
            metavar="N",
            default_is=f"that length, at most {config.LONGEST_SEQUENCE}",
        ),
    )
    skip_layers: Sequence[int] = field(
        default=(),
        metadata=skip_layers("the artifact leaves them out, and the server asks for --oscar-allow-native-layers"),
    )
    seed: int = field(
        default=config.DEFAULT_SEED,
        metadata=option("seed of the text that the model writes and of the order of .jsonl lines", metavar="S"),
    )
    dtype: str = field(default="auto", metadata=DTYPE)
    device: str = field(default="auto", metadata=DEVICE)
    backend: str = field(
        default="hf",
        metadata=option(
            "who runs the model: Transformers, or SGLang for what only it can hold",
            choices=BACKENDS,
        ),
    )
    tp: int = field(default=1, metadata=option("tensor-parallel ranks of SGLang", metavar="N"))
    engine_args: Mapping[str, object] = field(
        default_factory=dict, metadata=option("further arguments of SGLang's engine, as an object", metavar="JSON")
    )
    json_model_override_args: Mapping[str, object] = field(
        default_factory=dict,
        metadata=option(
            "fields of the model's config to replace, as an object; those of the server that the artifact is for (YaRN)",
            metavar="JSON",
        ),
    )
    trust_remote_code: bool = field(default=False, metadata=option("run code that lies beside the weights"))
    save_stats: str | Path | None = field(
        default=None, metadata=option("also write the statistics to this file, to go on from later", metavar="FILE")
    )
    from_stats: str | Path | None = field(
        default=None,
        metadata=option(
            "statistics and held-out text of an earlier run, instead of text, tokens, longest sequence and seed",
            metavar="FILE",
        ),
    )
    progress: bool = True
