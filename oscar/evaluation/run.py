"""The evaluation: a model and ways to keep its cache in, one report out."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import oscar
from oscar import config
from oscar.calibration import saved as saved_statistics
from oscar.calibration.calibrate import collect
from oscar.calibration.load_model import load_model, load_tokenizer
from oscar.calibration.options import CalibrationOptions, check
from oscar.calibration.text import end_tokens
from oscar.errors import OscarError
from oscar.evaluation import configurations as making
from oscar.evaluation.endpoint import Endpoint
from oscar.evaluation.reader import Reader
from oscar.evaluation.task_scores import CHANCE, TaskScores, score_tasks
from oscar.evaluation.tasks import HARD, MAKERS, Task, make
from oscar.evaluation.text_scores import TextScores, read_documents, score_text
from oscar.format import artifact as artifacts
from oscar.progress import Steps

HARD_SHARE = 5
"""There are this many times fewer prompts of each hard task than of retrieval."""
HELD_OUT = ("heldout.txt", "heldout_code.txt")
"""Text beside the embedded model, never trained on: prose and code."""


"""What `evaluate` raises for input that cannot work."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Everything that decides a report.

    Attributes:
        model: model folder.
        methods: names out of bf16, lossless, int2 and `oscar.methods.METHODS`, the latter also with "-shared".
        artifacts: artifact files, each a configuration named after its file.
        tasks: names in config.TASKS.
        context: tokens of a prompt, and of what precedes a continuation.
        continuation: tokens that are decoded after it, teacher-forced.
        documents: most documents of running text.
        n: prompts of `retrieval`; each hard task has a fifth of them.
        sink_tokens, recent_tokens: windows in 16 bits.
        text: files for perplexity and divergence; none: those beside the embedded model.
        calibration_text: files that methods are calibrated on, "FILE" or "FILE:TOKENS"; none: the model writes its own text.
        calibration_tokens: tokens of it.
        from_stats: statistics saved by `oscar calibrate --save-stats` instead of calibration text.
        group_size: elements that share a centre and a step; None: head_dim.
        endpoint: address of a server that also answers the graded tasks; None for none.
        served_context: each method reads contexts its own way, as the server does, instead of sharing one exact reading.
        seed: the first task's; the others follow. Also of the text that the model writes.
        dtype, device: as in CalibrationOptions.
        progress: draw progress bars on stderr.
    """

    model: str | Path
    methods: tuple[str, ...] = config.DEFAULT_CONFIGURATIONS
    artifacts: tuple[str | Path, ...] = ()
    tasks: tuple[str, ...] = config.TASKS
    context: int = config.DEFAULT_EVALUATION_CONTEXT
    continuation: int = config.DEFAULT_CONTINUATION
    documents: int = config.DEFAULT_DOCUMENTS
    n: int = config.DEFAULT_PROMPTS
    sink_tokens: int = config.DEFAULT_SINK_TOKENS
    recent_tokens: int = config.DEFAULT_RECENT_TOKENS
    text: tuple[str | Path, ...] = ()
    calibration_text: tuple[str | Path, ...] = ()
    calibration_tokens: int = config.DEFAULT_CALIBRATION_TOKENS
    from_stats: str | Path | None = None
    group_size: int | None = None
    endpoint: str | None = None
    served_context: bool = False
    seed: int = config.DEFAULT_SEED
    dtype: str = "auto"
    device: str = "auto"
    progress: bool = True


def evaluate(options: EvaluationOptions) -> dict:
    """Measure every configuration on every task.

    Args:
        options: see EvaluationOptions.
    Returns:
        JSON-able report: model, context, n, windows, methods.<name>.{bits_per_element, retrieval_exact, retrieval_ci,
        perplexity, kl_mean, kl_p99, top1_agreement, attn_rel_err, ...}; docs/quality.md says what each means.
    Raises:
        OscarError: the input cannot work, as one sentence.
    """
    began = time.monotonic()
    calibration = _check(options)
    identity, model_config = check(calibration)
    tokenizer = load_tokenizer(options.model)
    if tokenizer is None:
        raise OscarError(f"{options.model}: expected a tokenizer beside the weights, found none")
    server = None if options.endpoint is None else Endpoint(options.endpoint)
    tasks = _tasks(options, tokenizer)
    local = bool(options.methods or options.artifacts)
    documents = _documents(options, tokenizer) if local and {"perplexity", "divergence"} & set(options.tasks) else []
    windows = options.sink_tokens, options.recent_tokens
    with Steps(options.progress) as steps:
        configurations: list[making.Configuration] = []
        text: dict[tuple, TextScores] = {}
        graded: dict[str, dict[tuple, TaskScores]] = {kind: {} for kind in tasks}
        if local:
            model = load_model(options.model, model_config, options.dtype, options.device)
            configurations = _configurations(options, calibration, identity, model, model_config, steps)
            reader = Reader(model)
            if documents:
                with steps.step("text", sum(map(len, documents))) as advance:
                    text = score_text(
                        reader,
                        documents,
                        options.context,
                        configurations,
                        [windows],
                        advance,
                        served_context=options.served_context,
                    )
            stop = end_tokens(model, tokenizer)
            for kind, asked in tasks.items():
                with steps.step(kind, sum(task.num_tokens for task in asked)) as advance:
                    graded[kind] = score_tasks(
                        reader,
                        tokenizer,
                        stop,
                        asked,
                        configurations,
                        [windows],
                        advance,
                        served_context=options.served_context,
                    )
        methods = {}
        for configuration in configurations:
            bits = configuration.bits_per_element(identity, options.context, windows)
            found = {kind: scores[configuration.name, windows] for kind, scores in graded.items()}
            methods[configuration.name] = _entry(bits, text.get((configuration.name, windows)), found, options.tasks)
        if server is not None:
            methods["endpoint"] = _ask(server, tasks, identity, options, steps)
    return {
        "model": Path(options.model).name,
        "fingerprint": identity.fingerprint,
        "context": options.context,
        "n": options.n,
        "windows": list(windows),
        "methods": methods,
        "at_chance": _at_chance(methods),
        "settings": _settings(options),
        "seconds": round(time.monotonic() - began, 1),
    }


def _check(options: EvaluationOptions) -> CalibrationOptions:
    """Refuse what cannot work before a weight is read; the options that methods are calibrated with."""
    for name in ("context", "continuation", "documents", "n"):
        if getattr(options, name) < (2 if name == "continuation" else 1):
            raise OscarError(
                f"--{name}: expected a positive number, at least 2 for --continuation, got {getattr(options, name)}"
            )
    if bad := [task for task in options.tasks if task not in config.TASKS]:
        raise OscarError(f"--tasks: expected names out of {', '.join(config.TASKS)}, got {bad[0]!r}")
    if not options.methods and not options.artifacts and options.endpoint is None:
        raise OscarError("expected at least one of --methods, --artifact and --endpoint, got none")
    if options.endpoint is not None and not {"retrieval", config.RECALL_HARD} & set(options.tasks):
        wanted = f"retrieval or {config.RECALL_HARD}"
        raise OscarError(f"--endpoint: expected a task with generated answers, {wanted}, got none")
    try:
        making.check_names(options.methods)
    except ValueError as error:
        raise OscarError(str(error)) from error
    names = [*options.methods, *(Path(file).stem for file in options.artifacts)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OscarError(f"expected a name of its own for every method and artifact, got {twice[0]!r} twice")
    data = making.needs_statistics(options.methods) and options.from_stats is None
    return CalibrationOptions(
        options.model,
        text=tuple(options.calibration_text) if data else (),
        tokens=options.calibration_tokens,
        method=making.needs_surrogate(options.methods) or ("oscar" if data else "identity"),
        group_size=options.group_size,
        sink_tokens=options.sink_tokens,
        recent_tokens=options.recent_tokens,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        from_stats=options.from_stats,
    )


def _configurations(
    options: EvaluationOptions, calibration: CalibrationOptions, identity, model, model_config, steps
) -> list[making.Configuration]:
    """Methods and artifacts in the order they were given."""
    if options.from_stats is not None:
        layers = saved_statistics.load(options.from_stats, identity).layers
    elif making.needs_statistics(options.methods):
        layers = collect(calibration, identity, model, model_config, steps).layers
    else:
        layers = collect(replace(calibration, tokens=1, text=()), identity, model, model_config, steps, given=[]).layers
    configurations = [making.from_method(name, calibration, identity, layers, model.device) for name in options.methods]
    for file in options.artifacts:
        made = artifacts.load(file, identity, native_layers=True)
        configurations.append(making.from_artifact(made, file, model.device))
    return configurations


def _documents(options: EvaluationOptions, tokenizer) -> list[torch.Tensor]:
    """Documents of context and continuation."""
    files = [Path(file) for file in options.text]
    if not files:
        folder = Path(oscar.__file__).with_name("embedded")
        files = [folder / name for name in HELD_OUT]
        if missing := [file.name for file in files if not file.is_file()]:
            raise OscarError(f"this build carries no {missing[0]}; give --text")
    return read_documents(files, tokenizer, options.context + options.continuation, options.documents)


def _tasks(options: EvaluationOptions, tokenizer) -> dict[str, list[Task]]:
    """kind -> prompts."""
    wanted = {"retrieval": options.n} if "retrieval" in options.tasks else {}
    if config.RECALL_HARD in options.tasks:
        wanted |= dict.fromkeys(HARD, max(1, options.n // HARD_SHARE))
    assert set(wanted) <= set(MAKERS)
    try:
        return {
            kind: [make(kind, tokenizer, options.context, options.seed + i) for i in range(count)]
            for kind, count in wanted.items()
        }
    except ValueError as error:
        raise OscarError(str(error)) from error


def _entry(bits: float | None, text: TextScores | None, graded: dict[str, TaskScores], tasks: tuple[str, ...]) -> dict:
    """The figures of one configuration."""
    result: dict = {"bits_per_element": bits}
    if text is not None:
        result |= text.summary("divergence" in tasks, "perplexity" in tasks)
    for kind, scores in graded.items():
        summary = scores.summary()
        if kind == "retrieval":
            result |= {"retrieval_exact": summary["exact"], "retrieval_ci": summary["ci"]}
            result |= {"retrieval_by_depth": scores.by_depth(), "retrieval_unreadable": summary["unreadable"]}
        else:
            result.setdefault("recall_hard", {})[kind] = summary
    return result


def _ask(server: Endpoint, tasks: dict[str, list[Task]], identity, options: EvaluationOptions, steps: Steps) -> dict:
    """The figures of the running server."""
    graded = {}
    for kind, asked in tasks.items():
        with steps.step(f"{kind}, HTTP", sum(task.num_tokens for task in asked)) as advance:
            graded[kind] = server.score(asked, advance)
    said = server.cache(identity, options.context)
    return _entry(None, None, graded, options.tasks) | said


def _at_chance(methods: dict[str, dict]) -> list[str]:
    """Hard tasks whose generated answers tell nothing: even the first configuration, 16 bits by default, has next to none right."""
    first = next(iter(methods.values()))
    return [kind for kind, summary in first.get("recall_hard", {}).items() if summary["exact"] <= CHANCE]


def _settings(options: EvaluationOptions) -> dict:
    """What another run needs to give the same numbers; names of files, not their places."""
    import transformers

    def digest(file: str | Path) -> str:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]

    return {
        "tasks": list(options.tasks),
        "continuation": options.continuation,
        "documents": options.documents,
        "text": [Path(file).name for file in options.text] or list(HELD_OUT),
        "calibration": "saved statistics" if options.from_stats else [Path(f).name for f in options.calibration_text] or "self",
        "calibration_tokens": options.calibration_tokens,
        "group_size": options.group_size,
        "served_context": options.served_context,
        "seed": options.seed,
        "dtype": options.dtype,
        "artifacts": {Path(file).stem: digest(file) for file in options.artifacts},
        "versions": {"oscar": oscar.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
