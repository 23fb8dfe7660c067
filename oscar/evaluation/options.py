"""What an evaluation can be asked: each option once, for `oscar evaluate` and for `oscar.evaluate`.

Standard library only; `oscar.evaluation.run` refuses what cannot work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oscar import config
from oscar.options import DEVICE, DTYPE, GROUP_SIZE, MODEL, Options, option, recent_tokens, sink_tokens


def _methods_help() -> str:
    from oscar.methods import METHODS

    return (
        f"bf16, lossless, int2 (plain 2-bit), {', '.join(METHODS)}; a method's name with -shared: one transform for all heads "
        "of a layer"
    )


@dataclass(frozen=True)
class EvaluationOptions(Options):
    """Everything that decides a report. One more is for Python only: progress draws bars on stderr."""

    model: str | Path = field(metadata=MODEL)
    methods: Sequence[str] | None = field(
        default=None,
        metadata=option(
            _methods_help,
            metavar="NAME,NAME",
            many="commas",
            default_is=f"{','.join(config.DEFAULT_CONFIGURATIONS)}; with an artifact bf16 alone; with an endpoint none",
        ),
    )
    artifacts: Sequence[str | Path] = field(
        default=(),
        metadata=option(
            "artifact to measure, under the name of its file; repeatable", flag="--artifact", metavar="FILE", many="repeat"
        ),
    )
    tasks: Sequence[str] | None = field(
        default=None,
        metadata=option(
            f"out of {', '.join(config.TASKS)}",
            metavar="NAME,NAME",
            many="commas",
            default_is="all; with an endpoint alone those with answers",
        ),
    )
    context: int = field(
        default=config.DEFAULT_EVALUATION_CONTEXT,
        metadata=option("tokens of a prompt, and of the text before a continuation", metavar="N"),
    )
    continuation: int = field(
        default=config.DEFAULT_CONTINUATION, metadata=option("tokens decoded after it, teacher-forced", metavar="N")
    )
    documents: int = field(default=config.DEFAULT_DOCUMENTS, metadata=option("most documents of running text", metavar="N"))
    n: int = field(
        default=config.DEFAULT_PROMPTS,
        metadata=option("prompts of retrieval; each hard task has a fifth of them", metavar="N"),
    )
    sink_tokens: int = field(default=config.DEFAULT_SINK_TOKENS, metadata=sink_tokens("all but bf16 are measured with them"))
    recent_tokens: int = field(
        default=config.DEFAULT_RECENT_TOKENS, metadata=recent_tokens("all but bf16 are measured with them")
    )
    text: Sequence[str | Path] = field(
        default=(),
        metadata=option(
            "UTF-8 text for perplexity and divergence, at most TOKENS of it; repeatable",
            metavar="FILE[:TOKENS]",
            many="repeat",
            default_is="held-out prose and code of the embedded model",
        ),
    )
    calibration_text: Sequence[str | Path] = field(
        default=(),
        metadata=option(
            "text that methods are calibrated on, as in `oscar calibrate --text`",
            metavar="FILE[:TOKENS]",
            many="repeat",
            default_is="the model writes its own",
        ),
    )
    calibration_tokens: int = field(default=config.DEFAULT_CALIBRATION_TOKENS, metadata=option("tokens of it", metavar="N"))
    from_stats: str | Path | None = field(
        default=None,
        metadata=option("statistics saved by `oscar calibrate --save-stats` instead", metavar="FILE"),
    )
    group_size: int | None = field(default=None, metadata=GROUP_SIZE)
    endpoint: str | None = field(
        default=None,
        metadata=option("server that also answers retrieval and recall-hard, OpenAI protocol", metavar="URL"),
    )
    served_context: bool = field(
        default=False,
        metadata=option(
            "each method reads prompts and contexts its own way, rounded to 16 bits as in a server, instead of sharing one "
            "exact pass; slower",
        ),
    )
    seed: int = field(
        default=config.DEFAULT_SEED,
        metadata=option("seed of the first task and of the text that the model writes", metavar="S"),
    )
    dtype: str = field(default="auto", metadata=DTYPE)
    device: str = field(default="auto", metadata=DEVICE)
    progress: bool = True

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """`methods`, or what stands for None: a comparison; beside an artifact 16 bits; beside an endpoint nothing."""
        if self.methods is not None:
            return tuple(self.methods)
        if self.endpoint is not None:
            return ()
        return ("bf16",) if self.artifacts else config.DEFAULT_CONFIGURATIONS

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        """`tasks`, or what stands for None: all, but without anything to measure in this process only those with answers."""
        if self.tasks is not None:
            return tuple(self.tasks)
        alone = self.endpoint is not None and not self.artifacts and not self.methods
        return ("retrieval", config.RECALL_HARD) if alone else config.TASKS
