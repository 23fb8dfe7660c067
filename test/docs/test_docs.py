"""Pages name only what exists: links, files, command lines, Python, flags, environment variables and figures."""

import argparse
import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
from pathlib import Path

import pytest
import sglang  # noqa: F401  runs the platform plugin before ServerArgs exists
from sglang.srt.server_args import ServerArgs

from oscar import support
from oscar.commands.main import build_parser
from oscar.format import sizing
from oscar.format.codec import RowFormat

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = ("support.md", "server-options.md", "gpu_compile_report.md")
SHELL = ("", "bash", "sh", "console")
"""Languages of fenced blocks that hold command lines."""
OURS = ("oscar", "python", "bash", "sglang")
"""Programs whose command lines are checked."""
FOREIGN = ("git", "lm_eval", "mypy", "pip", "pre-commit", "ruff", "source")
"""Programs that are not ours to check."""
FOREIGN_MODULES = ("lcb_runner.runner.main",)
FOREIGN_FILES = ("lcb_runner/lm_styles.py",)
FOLDERS = r"(?:oscar|scripts|examples|docs|test|python/sglang|sgl-kernel)/"
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def server_parser() -> argparse.ArgumentParser:
    """SGLang's own parser of a server's command line; our flags are in it."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.fixture(scope="module")
def tree() -> list[str]:
    """Every file of the checkout, as "/path/from/root"."""
    found = []
    for folder, names, files in os.walk(ROOT):
        names[:] = [n for n in names if not n.startswith(".") and n not in ("build", "dist", "__pycache__")]
        found += ["/" + (Path(folder) / name).relative_to(ROOT).as_posix() for name in files]
    return found


# What is in a page


def fenced_and_indented(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every code block; indented ones have the language ""."""
    text = page.read_text(encoding="utf-8")
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
    blocks = [(match[1], match[2]) for match in fence.finditer(text)]
    indented = re.findall(r"(?:^|\n)\n((?: {4}.*(?:\n|\Z)|\n(?= {4}))+)", fence.sub("", text))
    return blocks + [("", re.sub(r"^ {4}", "", block, flags=re.M)) for block in indented]


def inline(page: Path) -> list[str]:
    """Text between single backticks, outside code blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^ {4}.*$", "", text, flags=re.M))


def command_lines(page: Path) -> list[list[str]]:
    """Words of every command line, in blocks and between backticks, assignments of variables left out."""
    lines = []
    for language, block in fenced_and_indented(page):
        if language in SHELL:
            lines += re.sub(r"\\\n\s*", "", block).splitlines()
    lines += [text.replace("\n", " ") for text in inline(page) if re.match(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(OURS)}) ", text)]
    found = []
    for line in lines:
        # A line that is no command is a drawing, a formula or a message: it has no known program, and no option.
        if not re.search(rf"(?:^|\s|=)(?:{'|'.join(OURS + FOREIGN)})\s", line) and " --" not in line:
            continue
        for part in re.split(r"\s&&\s", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # an apostrophe: prose
                continue
            while words and re.fullmatch(r"\w+=\S*", words[0]):
                words.pop(0)
            if words and (words[0] in OURS + FOREIGN or any(word.startswith("--") for word in words)):
                found.append(words)
    return found


def python_sources(page: Path) -> list[str]:
    """Python in fenced blocks and behind `python -c`."""
    blocks = [block for language, block in fenced_and_indented(page) if language == "python"]
    return blocks + [words[words.index("-c") + 1] for words in command_lines(page) if words[0] == "python" and "-c" in words]


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-")


# Checks of one command line


def check_command(words: list[str], server_parser: argparse.ArgumentParser) -> None:
    """Raise AssertionError unless the command line could be run."""
    program, rest = words[0], words[1:]
    if program in FOREIGN:
        return
    if program == "bash":
        return check_script(rest)
    if program == "sglang":
        assert rest[0] == "serve", f"a command of sglang that no test knows: {rest[0]}"
        return check_server(rest[1:], server_parser) if rest[1:] else None
    if program == "oscar":
        return check_oscar(rest)
    assert program == "python", f"no test knows the program {program}"
    if rest[0] == "-c":
        return None  # see test_python_compiles_and_its_imports_resolve
    if rest[0] != "-m":
        return check_script(rest)
    module, rest = rest[1], rest[2:]
    if module == "oscar":
        return check_oscar(rest)
    if module == "sglang.launch_server":
        return check_server(rest, server_parser)
    if module == "pytest":
        missing = [word for word in rest if "/" in word and not (ROOT / word).exists()]
        assert not missing, f"pytest is pointed at {missing}"
        return None
    if module in FOREIGN_MODULES:
        return None
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    # Old names of SGLang's benchmarks forward to this package.
    sources = [Path(spec.origin), *(Path(spec.origin).parent / "benchmark").rglob("*.py")]
    check_options(rest, "".join(path.read_text(encoding="utf-8") for path in sources), module)


def check_oscar(words: list[str]) -> None:
    """Through the real parser. Brackets mark what may be left out, "..." what is not said."""
    words = [word.strip("[]") for word in words if word != "..."]
    if len(words) < 2 and words != ["model-path"]:
        assert words[0] in build_parser()._subparsers._group_actions[0].choices, f"no command {words[0]}"
        return
    try:
        build_parser().parse_args(words)
    except SystemExit as error:
        raise AssertionError(f"oscar {shlex.join(words)} does not parse") from error


def check_server(words: list[str], server_parser: argparse.ArgumentParser) -> None:
    """Through SGLang's parser."""
    try:
        _, unknown = server_parser.parse_known_args([word for word in words if word != "..."])
    except (argparse.ArgumentError, SystemExit) as error:
        raise AssertionError(f"launch_server {shlex.join(words)} does not parse: {error}") from error
    assert not unknown, f"launch_server does not know {unknown}"


def check_script(words: list[str]) -> None:
    """The file is there, and it, or a file of Python that a shell script runs, has the options."""
    path = ROOT / words[0]
    assert path.is_file(), f"there is no {words[0]}"
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        for name in re.findall(r"[\w/.-]+\.py", source):
            for candidate in (ROOT / name.lstrip("/"), ROOT / "scripts" / name.lstrip("/")):
                source += candidate.read_text(encoding="utf-8") if candidate.is_file() else ""
    check_options(words[1:], source, words[0])


def check_options(words: list[str], source: str, name: str) -> None:
    """Options of words stand in the source."""
    for word in words:
        if re.match(r"--?[a-z]", word):
            option = word.split("=")[0]
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", source), f"{name} has no option {option}"


# Tests


@EACH_PAGE
def test_links_and_anchors_exist(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
            assert anchor in map(slug, headings), f"{page.name} links to {target}#{anchor}"


@EACH_PAGE
def test_files_exist(page, tree):
    """A path from the root is there, and so is, somewhere in the tree, every source file that is named without its folder."""
    if page.name == "CHANGELOG.md":
        pytest.skip("a changelog may name what is gone")
    missing = set()
    for text in inline(page) + [block for _, block in fenced_and_indented(page)]:
        for name in re.findall(rf"(?<![\w/.-]){FOLDERS}[\w./-]*\w/?", text):
            if re.search(r"\.\w+$|/$", name) and not (ROOT / name).exists():
                missing.add(name)
        for name in re.findall(r"(?<![\w/.-])[\w/-][\w./-]*\.(?:py|cpp|h|sh|md|toml)(?![\w/])", text):
            if name not in FOREIGN_FILES and "NAME" not in name and not any(path.endswith("/" + name) for path in tree):
                missing.add(name)
    assert not missing, f"{page.name} names files that are not there: {sorted(missing)}"


@EACH_PAGE
def test_command_lines_can_be_run(page, server_parser):
    faults = []
    for words in command_lines(page):
        try:
            check_command(words, server_parser)
        except AssertionError as error:
            faults.append(f"{shlex.join(words)}: {error}")
    assert not faults, f"{page.name}: " + "; ".join(faults)


@EACH_PAGE
def test_python_compiles_and_its_imports_resolve(page):
    for source in python_sources(page):
        module_of = {}
        for node in ast.walk(ast.parse(source, page.name)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
                    bound = alias.asname or alias.name.split(".")[0]
                    module_of[bound] = importlib.import_module(alias.name if alias.asname else bound)
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}: {node.module} has no {alias.name}"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in module_of:
                assert hasattr(module_of[node.value.id], node.attr), f"{page.name}: {node.value.id} has no {node.attr}"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id in module_of:
                    check_keywords(getattr(module_of[owner.id], node.func.attr), node)


def check_keywords(function, call: ast.Call) -> None:
    """The function takes the keywords that the call gives."""
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        unknown = {keyword.arg for keyword in call.keywords} - {p.name for p in parameters}
        assert not unknown, f"{function.__name__} takes no {sorted(unknown)}"


def test_the_pages_have_command_lines_and_python():
    """What finds them has not gone blind."""
    words = [words for page in PAGES for words in command_lines(page)]
    programs = {word[0] for word in words}
    assert {"oscar", "python", "bash", "pip"} <= programs and len(words) > 60
    assert sum(len(python_sources(page)) for page in PAGES) >= 5


@pytest.mark.parametrize(
    "line",
    [
        "oscar calibrate --model M --output F --no-such-option",
        "oscar no-such-command",
        "python -m sglang.launch_server --model-path M --no-such-option",
        "python scripts/bench/no_such_file.py",
        "python scripts/bench/serving.py --no-such-option",
        "bash scripts/gpu_check.sh --no-such-option",
        "python -m sglang.bench_serving --no-such-option",
        "no-such-program --help",
    ],
)
def test_a_wrong_command_line_is_found(line, server_parser):
    with pytest.raises(AssertionError):
        check_command(shlex.split(line), server_parser)


def test_support_table_is_the_code():
    assert support.markdown() in (ROOT / "docs" / "support.md").read_text(encoding="utf-8")


def test_tests_that_hold_something_exist():
    """Rows of docs/reliability.md name a file and a test in it."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test/[\w/]+\.py)`: `(test_\w+)`", page)
    assert len(named) > 15
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


def test_flags_in_the_serving_page_are_the_flags(server_parser):
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(--[a-z-]+)(?: \{([\w,]+)\})?", page, re.M)
    options = {
        name: action for name, action in server_parser._option_string_actions.items() if re.match(r"--(kv-quant|oscar-)", name)
    }
    assert [name for name, _ in documented] == list(options)
    for name, choices in documented:
        assert (choices.split(",") if choices else None) == options[name].choices, name


def test_environment_variables_are_documented():
    """Ours start with OSCAR_; the page on the CPU kernels has a line for each that the code reads."""
    read = set()
    for folder in ("oscar", "sgl-kernel", "python", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h", ".sh"):
                source = path.read_text(encoding="utf-8")
                read |= set(re.findall(r"(?:getenv\(|environ(?:\.get\(|\[))\"(OSCAR_\w+)", source))
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(OSCAR_\w+)`", page, re.M)) == read


def test_bits_in_the_readme_are_what_is_counted():
    """For the embedded model: 4 layers, 2 KV heads of 128, windows of 64 and 256."""
    geometry, fmt = (4, 2), RowFormat(128)
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    contexts, bits = (
        [float(x.replace(",", "")) for x in next(line for line in lines if line.startswith(start)).split("|")[2:-1]]
        for start in ("| tokens of a request", "| bits an element")
    )
    token_bytes = sizing.bytes_per_token(*geometry, fmt, fmt)
    for context, shown in zip(contexts, bits, strict=True):
        assert shown == round(8 * sizing.request_slots(int(context), 64, 256) * token_bytes / (context * 4 * 2 * 256), 2)


def test_no_reference_to_a_document_outside_the_tree():
    """Formulas once came from a working paper that was cited as METHOD and a number."""
    for folder in ("oscar", "sgl-kernel", "python", "scripts", "docs", "test"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h", ".md") and path != Path(__file__):
                assert not re.search(r"\(METHOD[: ]|\bMETHOD \d", path.read_text(encoding="utf-8")), path
