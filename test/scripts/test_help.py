"""Every script of scripts/bench, scripts/train and sgl-kernel/benchmark says what it does and takes."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "scripts" / "bench", ROOT / "scripts" / "train", ROOT / "sgl-kernel" / "benchmark"]
SOURCES = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]
PARSING = [path for path in SOURCES if "parse_args" in path.read_text(encoding="utf-8")]


def names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_a_module_says_its_subject_and_is_short(path):
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)) and len(source.splitlines()) <= 400


@pytest.mark.parametrize("path", PARSING, ids=names)
def test_every_option_has_a_help(path):
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
            assert "help" in {keyword.arg for keyword in call.keywords}, f"line {call.lineno}: an option without help"
