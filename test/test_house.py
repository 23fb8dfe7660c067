"""The house itself: which room may import which, no circles, no module that outgrows its subject, nothing large in the tree."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "oscar": ROOT / "oscar",
    "oscar_kernel": ROOT / "sgl-kernel" / "python" / "oscar_kernel",
    "sglang.srt.oscar": ROOT / "python" / "sglang" / "srt" / "oscar",
}
LONGEST = 400
"""Lines of a module. A longer one says why in its docstring, or first comment, with the words of REASON."""
REASON = "more than 400 lines"


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the three rooms."""
    found = {}
    for room, folder in ROOMS.items():
        for file in folder.rglob("*.py"):
            parts = [room, *file.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(name: str, only_at_load: bool) -> set[str]:
    """Dotted names that a module imports. only_at_load: not inside functions, and not under TYPE_CHECKING."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if only_at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if only_at_load and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            # `from package import module` imports the module; `from module import name` the module alone.
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def test_the_kernels_know_the_format_and_nothing_else_of_oscar():
    for name in MODULES:
        if name.startswith("oscar_kernel"):
            others = {i for i in imports(name, False) if i == "oscar" or i.startswith("oscar.")}
            assert all(i == "oscar.format" or i.startswith("oscar.format.") for i in others), (name, others)


def test_the_format_is_the_ground_floor():
    for name in MODULES:
        if name.startswith("oscar.format"):
            ours = {i for i in imports(name, False) if i.split(".")[0] in ("oscar", "oscar_kernel", "sglang")}
            assert all(i.startswith("oscar.format") or i == "oscar.errors" for i in ours), (name, ours)


def test_only_the_serving_room_knows_sglang():
    """What runs SGLang for calibration starts it as a process of its own."""
    for name in MODULES:
        if not name.startswith("sglang"):
            upstream = {i for i in imports(name, False) if i.split(".")[0] == "sglang"}
            assert not upstream, (name, upstream)


def test_no_circles():
    """At load. Imports inside functions may look back: they run when everything is there."""
    edges = {name: {i for i in imports(name, True) if i in MODULES and i != name} for name in MODULES}
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(edges[name]):
                walk(other, [*path, name])
            done.add(name)

    for name in sorted(edges):
        walk(name, [])


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_modules_have_one_subject():
    for file in tracked("*.py", "*.cpp", "*.h", "*.sh"):
        lines = file.read_text(encoding="utf-8").splitlines()
        if len(lines) > LONGEST:
            assert REASON in "\n".join(lines[:30]), f"{file.relative_to(ROOT)} has {len(lines)} lines: split it, or say why"


def test_nothing_large_is_in_the_tree():
    for file in tracked():
        assert file.stat().st_size < 40 << 20, file
