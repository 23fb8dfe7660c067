"""One distribution beside an unmodified sglang: the pin, the registry of upstream symbols, upstream's own files."""

import ast
import base64
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import sglang  # noqa: F401  runs the platform plugin before ServerArgs exists
from sglang.srt.oscar import check_upstream, entry, upstream

import oscar


def distribution():
    return importlib.metadata.distribution("oscar-kv")


def test_the_pin_is_one_truth():
    assert distribution().version == oscar.__version__
    assert f"sglang=={oscar.SGLANG_VERSION}" in distribution().requires
    assert importlib.metadata.version("sglang") == oscar.SGLANG_VERSION


def test_importing_oscar_imports_nothing_heavy():
    script = "import oscar, oscar.config, oscar.support, sys; print({'torch', 'sglang', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_no_file_of_ours_is_upstreams():
    files = {str(file) for file in distribution().files or ()}
    upstream_files = {str(file) for file in importlib.metadata.distribution("sglang").files or ()}
    assert not files & upstream_files
    assert not {"sglang/__init__.py", "sglang/srt/__init__.py"} & files


def test_upstream_files_are_as_the_wheel_brought_them():
    wrong, seen = [], 0
    for file in importlib.metadata.distribution("sglang").files:
        if file.hash is None or file.suffix == ".pyc":
            continue
        seen += 1
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            wrong.append(str(file))
    assert seen > 1000 and not wrong


# The registry


def test_every_upstream_symbol_is_there_with_its_parameters():
    check_upstream.check()
    for symbol in upstream.SYMBOLS:
        assert symbol.why
        assert check_upstream.compare(symbol) is None


def test_every_name_we_import_is_listed():
    """What is imported from SGLang anywhere in our serving code is in the registry, itself or through a member."""
    known = {symbol.name for symbol in upstream.SYMBOLS}
    missing = []
    for file in Path(upstream.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            if module is None or not module.startswith("sglang.") or module.startswith("sglang.srt.oscar"):
                continue
            for alias in node.names:
                name = f"{module}.{alias.name}"
                if not any(listed == name or listed.startswith(f"{name}.") for listed in known):
                    missing.append(f"{file.name}: {name}")
    assert not missing


def test_every_hook_target_is_listed(monkeypatch):
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = []
    monkeypatch.setattr(attention_registry, "register_attention_backend", lambda name: lambda factory: factory)
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind=None, **_: targets.append(target))
    entry.register()
    assert targets and set(targets) <= {symbol.name for symbol in upstream.SYMBOLS}


def test_names_are_listed_once():
    names = [symbol.name for symbol in upstream.SYMBOLS]
    assert len(names) == len(set(names))


def test_every_resolution_step_we_wrap_is_overridable():
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    for step in entry.RESOLUTION_STEPS:
        register_resolution_hook(step)  # raises for an unknown step; registers nothing until it is applied


@pytest.fixture
def stub(monkeypatch):
    """A module that stands for upstream, with one class that has one method."""
    module = types.ModuleType("stub_upstream")
    source = (
        "class Pool:\n    size: int\n    def __init__(self): self.rows = self.spare\n    def write(self, loc, value): ...\n"
    )
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    ("symbol", "told"),
    [
        (upstream.Symbol("stub_upstream.Pool.move", "why"), "stub_upstream.Pool.move is missing"),
        (upstream.Symbol("stub_upstream.Pool.spare", "why"), "stub_upstream.Pool.spare is missing"),
        (upstream.Symbol("stub_upstream.gone.Pool", "why"), "stub_upstream.gone.Pool is missing"),
        (upstream.Symbol("no_such_package.Pool", "why"), "no_such_package.Pool is missing"),
        (upstream.Symbol("stub_upstream.Pool.write", "why", ("loc",)), "takes (loc, value), expected (loc)"),
        (upstream.Symbol("stub_upstream.Pool.write", "why", ("value",), exact=False), "expected (value, ...)"),
    ],
)
def test_a_difference_is_one_line_that_names_it(stub, symbol, told):
    with pytest.raises(check_upstream.UpstreamMismatch) as caught:
        check_upstream.check([upstream.Symbol("stub_upstream.Pool.write", "why", ("loc", "value")), symbol])
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_field_of_instances_is_found(stub):
    """Annotated, or set by a method; one that a method only reads is not there."""
    check_upstream.check([upstream.Symbol(f"stub_upstream.Pool.{name}", "why") for name in ("size", "rows", "write")])


def test_renamed_symbol_stops_the_start(monkeypatch, tmp_path):
    import transformers
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.oscar.refusal import OscarRefusal
    from sglang.srt.server_args import ServerArgs

    config = transformers.Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    monkeypatch.delattr(KVCacheConfigurator, "_resolve_kv_pool_class")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(OscarRefusal, match="KVCacheConfigurator._resolve_kv_pool_class is missing"):
        ServerArgs(model_path=str(tmp_path), kv_quant="oscar").resolve_once()


@pytest.mark.parametrize("found", ["0.5.22", "0.5.24", "none"])
def test_another_version_stops_with_found_and_wanted(monkeypatch, found):
    monkeypatch.setattr(check_upstream, "installed_version", lambda: found)
    with pytest.raises(check_upstream.UpstreamMismatch) as caught:
        check_upstream.check()
    assert f"sglang {found}" in str(caught.value) and f"sglang=={oscar.SGLANG_VERSION}" in str(caught.value)


def test_attach_failure_ends_a_start_that_asks_for_us_and_no_other(monkeypatch):
    def fails():
        raise ImportError("no module named sglang.srt.arg_groups")

    monkeypatch.setattr(entry, "_attach", fails)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--kv-quant", "oscar"])
    with pytest.raises(SystemExit, match=f"could not attach to sglang .*sglang=={oscar.SGLANG_VERSION}"):
        entry.activate()
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    assert entry.activate() is None


def test_platform_only_where_it_is_meant(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("torch.accelerator.is_available", lambda *_: True)
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    assert entry.activate() is None
    monkeypatch.setattr(sys, "argv", ["launch_server", "--device", "cpu"])
    assert entry.activate() == entry.CPU_PLATFORM
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert entry.activate() is None


def test_wheel_holds_every_package_and_no_file_of_upstream(tmp_path):
    """A regular install: what the wheel brings, built from a copy so that the checkout stays clean."""
    root = Path(oscar.__file__).parents[1]
    if not (root / "setup.py").is_file():
        pytest.skip("needs the checkout: oscar is installed from a wheel")
    source = tmp_path / "source"
    for name in ("oscar", "python", "sgl-kernel"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(root / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("oscar_kv-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (
        ("oscar", "oscar"),
        ("sgl-kernel/python/oscar_kernel", "oscar_kernel"),
        ("python/sglang/srt/oscar", "sglang/srt/oscar"),
    ):
        for file in (root / folder).rglob("*.py"):
            assert f"{inside}/{file.relative_to(root / folder)}" in names
    for file in (root / "oscar" / "embedded").glob("*"):
        assert not file.is_file() or f"oscar/embedded/{file.name}" in names
    assert not {str(file) for file in importlib.metadata.distribution("sglang").files} & names
