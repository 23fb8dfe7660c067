"""Every option of the installed SGLang has a row, and every row is an option, is on the page and holds what it says."""

import argparse
import ast
import re
from pathlib import Path

import pytest
import sglang  # noqa: F401  runs the platform plugin before ServerArgs exists
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.oscar.flags import FLAGS
from sglang.srt.server_args import ServerArgs

from oscar.support import server_options
from oscar.support.server_options import ONLY_FIELDS, REFUSED, WORKS, flag_of
from oscar.support.unrelated_options import UNRELATED

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def flags():
    """Field of `ServerArgs` -> how its command line spells it."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    spelled = {}
    for action in parser._actions:
        spelled.setdefault(action.dest, set()).update(action.option_strings)
    return spelled


def test_every_option_of_sglang_has_one_row():
    options = {field.name for field in record_fields(ServerArgs)} - {flag.name for flag in FLAGS}
    rows = server_options.verdicts()
    assert options - set(rows) == set(), "options of SGLang without a row"
    assert set(rows) - options == set(), "rows without an option of SGLang"


def test_an_option_in_two_rows_is_found(monkeypatch):
    monkeypatch.setitem(WORKS, "kv_cache_dtype", "a test")
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        server_options.verdicts()


def test_flags_are_spelled_as_sglang_spells_them(flags):
    for field in server_options.verdicts():
        if field in ONLY_FIELDS:
            assert field not in flags
        else:
            assert flag_of(field) in flags[field], field


def test_a_refusal_says_why_and_what_to_do():
    for option in REFUSED:
        assert option.allowed and option.reason and option.alternative, option


def test_what_works_is_in_the_test_that_its_row_names():
    """The test exists, and its file writes the option as a flag or as a field."""
    for field, node in WORKS.items():
        file, name = node.split("::")
        source = (TESTS / file).read_text(encoding="utf-8")
        assert any(isinstance(part, ast.FunctionDef) and part.name == name for part in ast.walk(ast.parse(source))), node
        short = {"tp_size": "--tp"}.get(field, flag_of(field))
        assert re.search(rf"{re.escape(short)}\b|\b{field}\b", source), f"{file} does not try {field}"


def test_a_part_of_an_option_is_part_of_one_that_is_refused():
    refused = {option.flag for option in REFUSED}
    named = [re.fullmatch("part of `(--[a-z-]+)`, which is refused", group.reason) for group in UNRELATED]
    assert sum(map(bool, named)) > 10
    assert {match[1] for match in named if match} <= refused


def test_the_page_is_the_table():
    page = TESTS.parent / "docs" / "server-options.md"
    assert page.read_text(encoding="utf-8") == server_options.markdown()
