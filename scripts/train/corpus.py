"""The text that the embedded model is trained and measured on: the standard library and the documentation."""

from __future__ import annotations

import ast
import random
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

HELD_OUT_SHARE = 16  # one file in sixteen is never trained on
HELD_OUT_PROSE_BYTES = 300_000
HELD_OUT_CODE_BYTES = 150_000
SKIPPED = re.compile(r"(^|/)(site-packages|tests?|idle_test|__pycache__|encodings|pydoc_data|lib2to3|__phello__)/")


@dataclass
class Corpus:
    """Text by use; a document is one file's prose or one file's source."""

    prose: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    held_out_prose: list[str] = field(default_factory=list)
    held_out_code: list[str] = field(default_factory=list)


def is_prose(paragraph: str) -> bool:
    """True for a paragraph of sentences, as opposed to code, tables and lists."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return (
        len(paragraph) >= 60
        and paragraph[0].isupper()
        and paragraph[-1] in ".!?"
        and letters >= 0.9 * len(paragraph)
        and ">>>" not in paragraph
    )


def plain_text(rst: str) -> str:
    """Take inline reStructuredText markup away: roles, literals, emphasis, links."""
    rst = re.sub(r":[\w:+.-]+:`[!~]?([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", rst)
    rst = re.sub(r"`([^`<]*?)\s*<[^`>]*>`_{1,2}", r"\1", rst)
    rst = re.sub(r"``([^`]*)``", r"\1", rst)
    return re.sub(r"[*`|]{1,2}([^*`|]+)[*`|]{1,2}_?", r"\1", rst)


def paragraphs_of(text: str) -> list[str]:
    """Prose paragraphs of a docstring or a documentation page, each on one line."""
    found = (" ".join(plain_text(part).split()) for part in re.split(r"\n\s*\n", text))
    return [p for p in found if p and is_prose(p)]


def prose_of_source(source: str) -> str:
    """The prose paragraphs of a module's docstrings."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(dict.fromkeys(paragraphs_of(ast.get_docstring(node) or "")))
    return "\n".join(found)


def load_corpus(stdlib: Path, docs: Path) -> Corpus:
    """Read the standard library and the documentation; a hash of a file's name keeps some of them out of training."""
    corpus = Corpus()
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if SKIPPED.search("/" + name):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            prose = prose_of_source(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        held_out = zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0
        (corpus.held_out_code if held_out else corpus.code).append(source)
        (corpus.held_out_prose if held_out else corpus.prose).append(prose)
    for path in sorted(docs.rglob("*.rst.txt")):
        name = path.relative_to(docs).as_posix()
        if name.endswith("changelog.rst.txt"):
            continue
        prose = "\n".join(dict.fromkeys(paragraphs_of(path.read_text(encoding="utf-8"))))
        held_out = zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0
        (corpus.held_out_prose if held_out else corpus.prose).append(prose)
    for documents in vars(corpus).values():
        documents[:] = [d for d in documents if len(d) >= 200]
    if len(corpus.prose) < 200 or len(corpus.code) < 200:
        raise ValueError(
            f"load_corpus: expected hundreds of files, found {len(corpus.prose)} with prose under {docs} and "
            f"{len(corpus.code)} with code under {stdlib}; check --docs and --stdlib"
        )
    random.Random(0).shuffle(corpus.held_out_prose)
    random.Random(0).shuffle(corpus.held_out_code)
    # A paragraph that also stands in a training file is no longer held out.
    trained = set("\n".join(corpus.prose).splitlines())
    prose = "\n\n".join("\n".join(p for p in document.splitlines() if p not in trained) for document in corpus.held_out_prose)
    corpus.held_out_prose = [prose[: prose.rindex("\n", 0, HELD_OUT_PROSE_BYTES)].strip() + "\n"]
    code = "\n\n".join(corpus.held_out_code)
    corpus.held_out_code = [code[: code.rindex("\n", 0, HELD_OUT_CODE_BYTES)].strip() + "\n"]
    return corpus
