"""Is the installed SGLang the one that we hook? The registry of `upstream.py` against what is there.

A new SGLang ends with one line that names the difference and never serves a 16-bit cache without a word: SGLang itself logs
and swallows a hook whose target is gone.
"""

from __future__ import annotations

import dis
import importlib
import inspect

from sglang.srt.oscar.upstream import SYMBOLS, Symbol

from oscar import SGLANG_VERSION


class UpstreamMismatch(RuntimeError):
    """The installed SGLang is not the one that this build hooks. The message is one line."""


def installed_version() -> str:
    """The version of the installed `sglang` distribution, or "none"."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def check(symbols: list[Symbol] | None = None) -> None:
    """Compare the installed SGLang with the registry.

    Raises:
        UpstreamMismatch: one line that names the version or every symbol that differs, with found and wanted.
    """
    found = installed_version()
    if found != SGLANG_VERSION:
        raise UpstreamMismatch(
            f"oscar: this build hooks sglang=={SGLANG_VERSION} and found sglang {found}; "
            f"run `pip install sglang=={SGLANG_VERSION}`, or serve with --kv-quant none"
        )
    differences = [difference for symbol in (symbols or SYMBOLS) if (difference := compare(symbol))]
    if differences:
        raise UpstreamMismatch(
            f"oscar: the installed sglang {found} differs from the sglang=={SGLANG_VERSION} that this build hooks: "
            f"{'; '.join(differences)}; run `pip install --force-reinstall --no-deps sglang=={SGLANG_VERSION}`, "
            "or serve with --kv-quant none"
        )


def compare(symbol: Symbol) -> str | None:
    """What is wrong with one symbol, in a few words, or None."""
    try:
        target = find(symbol.name)
    except (ImportError, AttributeError) as error:
        return f"{symbol.name} is missing ({error})"
    if symbol.parameters is None:
        return None
    if not callable(target):
        return f"{symbol.name} is not callable"
    names = parameter_names(target)
    wanted = symbol.parameters
    matches = names == wanted if symbol.exact else names[: len(wanted)] == wanted
    if matches:
        return None
    return f"{symbol.name} takes ({', '.join(names)}), expected ({', '.join(wanted)}{'' if symbol.exact else ', ...'})"


def find(name: str):
    """The object at a dotted path; the longest prefix that is a module is imported.

    Returns:
        The object; `FIELD` for a field that only the instances of a class have.
    Raises:
        ImportError: no prefix is a module.
        AttributeError: the module lacks the rest.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module_name = ".".join(parts[:length])
        try:
            target = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            continue
        for part in parts[length:]:
            if not hasattr(target, part) and inspect.isclass(target) and has_field(target, part):
                return FIELD
            target = getattr(target, part)
        return target
    raise ImportError(f"no module named {parts[0]!r}")


FIELD = object()
"""Stands for a field of instances, of which a class has no value."""


def has_field(kind: type, name: str) -> bool:
    """Whether instances of a class have a field: the class annotates it, or one of its methods sets it."""
    for base in kind.__mro__:
        if name in inspect.get_annotations(base):
            return True
        for method in filter(inspect.isfunction, vars(base).values()):
            if any(step.opname == "STORE_ATTR" and step.argval == name for step in dis.get_instructions(method)):
                return True
    return False


def parameter_names(target) -> tuple[str, ...]:
    """Names of the parameters of a callable, in order, without `self` and `cls`."""
    names = tuple(inspect.signature(inspect.unwrap(target)).parameters)
    return names[1:] if names[:1] in (("self",), ("cls",)) else names
