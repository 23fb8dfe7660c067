"""The public functions: `oscar.calibrate`, `oscar.load`, `oscar.save`, `oscar.evaluate`, `oscar.plan`.

Keyword arguments are the fields of a dataclass of options, which the command line is made from too: `--group-size 64` there is
`group_size=64` here. A ready object of options is taken as well. Every refusal is an `OscarError`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from oscar.calibration.options import CalibrationOptions
from oscar.capacity import CachePlan, PlanOptions
from oscar.evaluation.options import EvaluationOptions
from oscar.format import artifact as artifacts
from oscar.format.artifact import Artifact
from oscar.format.identity import ModelIdentity
from oscar.options import KEY

Fields = ParamSpec("Fields")
Given = TypeVar("Given")
Taken = TypeVar("Taken", contravariant=True)
Result = TypeVar("Result")
Returned = TypeVar("Returned", covariant=True)


class _TakesOptions(Protocol[Taken, Fields, Returned]):
    """A function of one object of options, or of its fields as keywords."""

    @overload
    def __call__(self, options: Taken, /) -> Returned: ...
    @overload
    def __call__(self, *args: Fields.args, **kwargs: Fields.kwargs) -> Returned: ...


def _takes(
    options: Callable[Fields, Given],
) -> Callable[[Callable[[Given], Result]], _TakesOptions[Given, Fields, Result]]:
    """Let a function of an options object take its fields as keywords, which then stand in its signature and docstring."""

    def decorate(function: Callable[[Given], Result]) -> _TakesOptions[Given, Fields, Result]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            ready = len(args) == 1 and not kwargs and isinstance(args[0], options)  # type: ignore[arg-type]  # a class
            return function(args[0] if ready else options(*args, **kwargs))

        call.__signature__ = inspect.signature(options).replace(  # type: ignore[attr-defined]
            return_annotation=inspect.signature(function).return_annotation
        )
        call.__doc__ = (function.__doc__ or "").replace("{options}", _described(options).lstrip())
        return call

    return decorate


def _described(options: Any) -> str:
    """A line of a docstring for each field, out of its option."""
    lines = []
    for f in fields(options):
        about = f.metadata.get(KEY)
        if about is not None:
            default = f" (default: {about.default_is})" if about.default_is else ""
            lines.append(f"        {f.name}: {about.text()}{default}.")
    return "\n".join(lines)


@_takes(CalibrationOptions)
def calibrate(options: CalibrationOptions) -> Artifact:
    """Decide how the cache of a model is kept in 2 bits: `oscar calibrate`.

    The same arguments on the same machine and software give the same artifact, byte for byte.

    Args:
        {options}
        k_clip, v_clip: fixed quantile of |x| in (0, 1] for one side; None: the method's own.
        progress: draw progress bars on stderr.
    Returns:
        For each layer and side a transform [num_kv_heads, dim, dim] float32 with rows as vectors (`x @ transform` is stored),
        clip quantiles [num_kv_heads] and what else the method decides; held-out errors are in `provenance`. `oscar.save` writes
        it.
    Raises:
        OscarError: the input cannot work.
    Source: arXiv 2605.17757 for the method `oscar`, docs/method.md for the default.
    """
    from oscar.calibration.calibrate import calibrate

    return calibrate(options)


def load(path: str | Path, *, model: str | Path | None = None, allow_native_layers: bool = False) -> Artifact:
    """Read an artifact and check every byte of it.

    Args:
        path: file made by `oscar calibrate`, `oscar convert` or `oscar.save`.
        model: model folder; an artifact of another model is refused. None: not compared.
        allow_native_layers: let layers be missing, which a server then keeps in 16 bits.
    Returns:
        The artifact; its tensors are float32 on the CPU.
    Raises:
        OscarError: missing, cut or changed file, another format version, missing layers, or another model.
    """
    identity = None if model is None else ModelIdentity.from_path(model)
    return artifacts.load(path, identity, native_layers=allow_native_layers)


def save(artifact: Artifact, path: str | Path) -> None:
    """Write an artifact; the file appears whole or not at all. Equal artifacts give equal bytes.

    Args:
        artifact: as `oscar.calibrate` or `oscar.load` returned it.
        path: .kvq file; `oscar.kvq` beside the weights is where a server looks first.
    Raises:
        OscarError: the file cannot be written, or the artifact does not hold together.
    """
    artifacts.save(artifact, path)


@_takes(EvaluationOptions)
def evaluate(options: EvaluationOptions) -> dict[str, Any]:
    """Measure what ways to keep the cache cost in quality, through the kernels that serve: `oscar evaluate`.

    Args:
        {options}
        progress: draw progress bars on stderr.
    Returns:
        The report that `oscar evaluate --json` writes. Under "methods" it has an entry for each method and artifact, an
        artifact under the name of its file: bits an element with windows, divergence in nats, perplexity, shares of right
        answers. docs/quality.md says what each key means.
    Raises:
        OscarError: the input cannot work.
    Source: docs/quality.md, "How it is measured".
    """
    from oscar.evaluation.run import evaluate

    return evaluate(options)


@_takes(PlanOptions)
def plan(options: PlanOptions) -> CachePlan:
    """Count what the cache of a model takes in 2 and in 16 bits: `oscar plan`. Only config.json is read.

    Args:
        {options}
    Returns:
        Bytes a token, bytes a request and requests that the memory holds; as text, the table of `oscar plan`.
    Raises:
        OscarError: no such model, or a value that cannot be.
    Source: `oscar.format.sizing`, which the server counts with.
    """
    from oscar.capacity import plan

    return plan(options)
