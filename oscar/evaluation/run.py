"""The evaluation: a model and ways to keep its cache in, one report out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import oscar
from oscar import config
from oscar.calibration import saved
from oscar.calibration.calibrate import collect
from oscar.calibration.check import check
from oscar.calibration.load_model import load_model, load_tokenizer
from oscar.calibration.options import CalibrationOptions
from oscar.calibration.text import end_tokens
from oscar.errors import OscarError
from oscar.evaluation.configurations import (
    Configuration,
    check_names,
    from_artifact,
    from_method,
    needs_statistics,
    needs_surrogate,
)
from oscar.evaluation.endpoint import Endpoint
from oscar.evaluation.options import EvaluationOptions
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
    loaded = [artifacts.load(file, identity, native_layers=True) for file in options.artifacts]
    tokenizer = load_tokenizer(options.model)
    if tokenizer is None:
        raise OscarError(f"{options.model}: expected a tokenizer beside the weights, found none")
    server = None if options.endpoint is None else Endpoint(options.endpoint)
    tasks = _tasks(options, tokenizer)
    here = bool(options.chosen_methods or options.artifacts)
    documents = _documents(options, tokenizer) if here and {"perplexity", "divergence"} & set(options.chosen_tasks) else []
    windows = options.sink_tokens, options.recent_tokens
    with Steps(options.progress) as steps:
        configurations: list[Configuration] = []
        text: dict[tuple, TextScores] = {}
        graded: dict[str, dict[tuple, TaskScores]] = {kind: {} for kind in tasks}
        if here:
            model = load_model(options.model, model_config, options.dtype, options.device)
            configurations = _configurations(options, calibration, identity, model, model_config, loaded, steps)
            reader, served = Reader(model), options.served_context
            if documents:
                with steps.step("text", sum(map(len, documents))) as advance:
                    text = score_text(
                        reader, documents, options.context, configurations, [windows], advance, served_context=served
                    )
            stop = end_tokens(model, tokenizer)
            for kind, asked in tasks.items():
                with steps.step(kind, sum(task.num_tokens for task in asked)) as advance:
                    graded[kind] = score_tasks(
                        reader, tokenizer, stop, asked, configurations, [windows], advance, served_context=served
                    )
        methods = {}
        for one in configurations:
            bits = one.bits_per_element(identity, options.context, windows)
            found = {kind: scores[one.name, windows] for kind, scores in graded.items()}
            methods[one.name] = _entry(bits, text.get((one.name, windows)), found, options.chosen_tasks)
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
    if bad := [task for task in options.chosen_tasks if task not in config.TASKS]:
        raise OscarError(f"--tasks: expected names out of {', '.join(config.TASKS)}, got {bad[0]!r}")
    if not options.chosen_methods and not options.artifacts and options.endpoint is None:
        raise OscarError("expected at least one of --methods, --artifact and --endpoint, got none")
    if options.endpoint is not None and not {"retrieval", config.RECALL_HARD} & set(options.chosen_tasks):
        wanted = f"retrieval or {config.RECALL_HARD}"
        raise OscarError(f"--endpoint: expected a task with generated answers, {wanted}, got none")
    check_names(options.chosen_methods)
    names = [*options.chosen_methods, *(Path(file).stem for file in options.artifacts)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OscarError(f"expected a name of its own for every method and artifact, got {twice[0]!r} twice")
    data = needs_statistics(options.chosen_methods) and options.from_stats is None
    return CalibrationOptions(
        options.model,
        text=tuple(options.calibration_text) if data else (),
        tokens=options.calibration_tokens,
        method=needs_surrogate(options.chosen_methods) or ("oscar" if data else "identity"),
        group_size=options.group_size,
        sink_tokens=options.sink_tokens,
        recent_tokens=options.recent_tokens,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        from_stats=options.from_stats,
    )


def _configurations(
    options: EvaluationOptions, calibration: CalibrationOptions, identity, model, model_config, loaded: list, steps: Steps
) -> list[Configuration]:
    """Methods and artifacts in the order they were given; loaded: the artifacts."""
    if options.from_stats is not None:
        layers = saved.load(options.from_stats, identity).layers
    elif needs_statistics(options.chosen_methods):
        layers = collect(calibration, identity, model, model_config, steps).layers
    else:
        layers = collect(replace(calibration, tokens=1, text=()), identity, model, model_config, steps, given=[]).layers
    made = [from_method(name, calibration, identity, layers, model.device) for name in options.chosen_methods]
    return made + [from_artifact(one, file, model.device) for one, file in zip(loaded, options.artifacts, strict=True)]


def _documents(options: EvaluationOptions, tokenizer) -> list[torch.Tensor]:
    """Documents of context and continuation."""
    files: Sequence[str | Path] = options.text
    if not files:
        folder = Path(oscar.__file__).with_name("embedded")
        files = [folder / name for name in HELD_OUT]
        if missing := [name for name in HELD_OUT if not (folder / name).is_file()]:
            raise OscarError(f"this build carries no {missing[0]}; give --text")
    return read_documents(files, tokenizer, options.context + options.continuation, options.documents)


def _tasks(options: EvaluationOptions, tokenizer) -> dict[str, list[Task]]:
    """kind -> prompts."""
    wanted = {"retrieval": options.n} if "retrieval" in options.chosen_tasks else {}
    if config.RECALL_HARD in options.chosen_tasks:
        wanted |= dict.fromkeys(HARD, max(1, options.n // HARD_SHARE))
    assert set(wanted) <= set(MAKERS)
    return {
        kind: [make(kind, tokenizer, options.context, options.seed + i) for i in range(count)] for kind, count in wanted.items()
    }


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
    return _entry(None, None, graded, options.chosen_tasks) | said | server.lengths()


def _at_chance(methods: dict[str, dict]) -> list[str]:
    """Hard tasks whose generated answers tell nothing: the first configuration, 16 bits by default, has next to none right."""
    first = next(iter(methods.values()))
    return [kind for kind, summary in first.get("recall_hard", {}).items() if summary["exact"] <= CHANCE]


def _settings(options: EvaluationOptions) -> dict:
    """What another run needs to give the same numbers; names of files, not their places."""
    import transformers

    def digest(file: str | Path) -> str:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]

    return {
        "tasks": list(options.chosen_tasks),
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
