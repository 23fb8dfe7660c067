"""The documentation names only what exists."""

import re
import shlex
from pathlib import Path

import pytest

from oscar import support
from oscar.commands.main import build_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VERBS = "calibrate|convert|inspect|verify|plan|evaluate|needle|model-path"
COMMAND = re.compile(rf"(?:python -m oscar|(?<![\w-])oscar) ((?:{VERBS})[^`\n#]*)")


def test_support_table_is_the_code():
    assert support.markdown() in (ROOT / "docs" / "support.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for name in re.findall(r"`((?:oscar|scripts|docs|test|python/sglang|sgl-kernel)/[\w./-]+\.\w+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page):
    for line in COMMAND.findall(page.read_text(encoding="utf-8")):
        words = [word for word in shlex.split(line.replace("[", "").replace("]", "")) if word != "..."]
        if len(words) > 1 or words == ["model-path"]:
            build_parser().parse_args(words)


def test_flags_in_the_serving_page_are_the_flags():
    from sglang.srt.oscar.flags import FLAGS

    documented = re.findall(r"^\| `(--[a-z-]+)", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.M)
    assert documented == [flag.option for flag in FLAGS]
