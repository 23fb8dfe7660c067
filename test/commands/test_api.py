"""The public functions of `oscar`: lazy, typed by the options, and the same as the commands."""

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from dataclasses import fields

import pytest

import oscar
from oscar.calibration.options import CalibrationOptions
from oscar.capacity import PlanOptions
from oscar.commands.main import build_parser, main
from oscar.embedded import embedded_model
from oscar.evaluation.options import EvaluationOptions
from oscar.options import KEY

FUNCTIONS = ("calibrate", "evaluate", "load", "plan", "save")
TAKES = {"calibrate": CalibrationOptions, "evaluate": EvaluationOptions, "plan": PlanOptions}


def test_importing_oscar_imports_nothing_heavy():
    code = (
        "import sys, oscar; oscar.OscarError, oscar.__version__; sys.exit('torch' in sys.modules or 'oscar.api' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_module_hides_a_function():
    for module in pkgutil.walk_packages(oscar.__path__, "oscar."):
        importlib.import_module(module.name) if module.name != "oscar.__main__" else None
        assert module.name.removeprefix("oscar.") not in (*FUNCTIONS, "OscarError")
    for name in FUNCTIONS:
        assert callable(getattr(oscar, name)) and name in dir(oscar) and name in oscar.__all__
    with pytest.raises(AttributeError, match="module 'oscar' has no attribute 'calibrat'"):
        _ = oscar.calibrat


@pytest.mark.parametrize("name", TAKES)
def test_arguments_are_the_options_of_the_command(name):
    """Every option of the command has a keyword of the same field, with the same default, and is described."""
    function, options = getattr(oscar, name), TAKES[name]
    assert list(inspect.signature(function).parameters) == [f.name for f in fields(options)]
    command = build_parser((name,))._subparsers._group_actions[0].choices[name]
    flags = {action.dest for action in command._actions}
    for f in fields(options):
        assert (f.name in flags) == (KEY in f.metadata)
        assert f"{f.name}: " in function.__doc__ or f.name in ("k_clip", "v_clip")
    assert "{options}" not in function.__doc__ and "OscarError" in function.__doc__


def test_one_item_is_enough_where_several_may_be():
    assert CalibrationOptions("m", text="a.txt").text == ("a.txt",)
    assert CalibrationOptions("m", text=["a", "b"], skip_layers=[1]).skip_layers == (1,)
    assert EvaluationOptions("m", methods="int2").chosen_methods == ("int2",)
    assert PlanOptions("m", context=100).contexts == (100,) and PlanOptions("m", context=[1, 2]).contexts == (1, 2)


def test_what_is_compared_where_nothing_is_said():
    methods = {
        name: EvaluationOptions("m", **given).chosen_methods
        for name, given in {
            "nothing": {},
            "artifact": {"artifacts": "a"},
            "endpoint": {"endpoint": "u"},
            "both": {"artifacts": "a", "endpoint": "u"},
            "none": {"methods": ()},
        }.items()
    }
    assert len(methods.pop("nothing")) == 5
    assert methods == {"artifact": ("bf16",), "endpoint": (), "both": (), "none": ()}
    assert EvaluationOptions("m", endpoint="u").chosen_tasks == ("retrieval", "recall-hard")
    assert len(EvaluationOptions("m", endpoint="u", artifacts="a").chosen_tasks) == 4


def test_calibrate_save_load(tiny_models, tmp_path):
    """The ready object, the keywords and the command give the same bytes."""
    model, files = tiny_models(), [tmp_path / name for name in "abc"]
    made = oscar.calibrate(model=model, tokens=512, method="oscar", progress=False)
    oscar.save(made, files[0])
    oscar.save(oscar.calibrate(CalibrationOptions(model, tokens=512, method="oscar", progress=False)), files[1])
    words = ["calibrate", "--model", model, "--output", files[2], "--tokens", 512, "--method", "oscar", "--quiet"]
    assert main(list(map(str, words))) == 0
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    assert oscar.load(files[0], model=model).method == "oscar"
    with pytest.raises(oscar.OscarError, match="made for another model"):
        oscar.load(files[0], model=embedded_model())
    oscar.save(oscar.calibrate(model=model, tokens=512, skip_layers=[0], progress=False), files[0])
    with pytest.raises(oscar.OscarError, match="found none of layer 0"):
        oscar.load(files[0])
    assert oscar.load(files[0], allow_native_layers=True).native_layers == [0]


def test_evaluate_an_artifact(tmp_path):
    """The lines of the README: an artifact called as a method is, beside 16 bits."""
    file = tmp_path / "oscar.kvq"
    oscar.save(oscar.calibrate(model=embedded_model(), method="hadamard", tokens=512, progress=False), file)
    sizes = {"context": 128, "continuation": 16, "documents": 2, "sink_tokens": 4, "recent_tokens": 16}
    report = oscar.evaluate(model=embedded_model(), artifacts=[file], tasks=["divergence"], **sizes, progress=False)
    assert list(report["methods"]) == ["bf16", "oscar"] and report["windows"] == [4, 16]
    assert report["methods"]["bf16"]["kl_mean"] < report["methods"]["oscar"]["kl_mean"]
    words = ["evaluate", "--model", embedded_model(), "--artifact", file, "--tasks", "divergence", "--quiet"]
    words += [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert main([*map(str, words), "--json", str(tmp_path / "r.json")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert report.pop("seconds") > 0 and found.pop("seconds") > 0 and found == report


def test_plan(capsys):
    made = oscar.plan(model=embedded_model(), memory_gib=1, context=[1000, 2000], skip_layers=[3, 1])
    words = ["plan", "--model", str(embedded_model()), "--memory-gib", "1", "--context", "1000", "--context", "2000"]
    assert main([*words, "--skip-layers", "1,3"]) == 0
    assert capsys.readouterr().out == f"{made}\n" and "layers 1, 3 in 16" in str(made)
    assert main([*words, "--skip-layers", "1,3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == made.to_dict()
    assert made.contexts[1].requests == 2**30 // made.contexts[1].bytes
    assert oscar.plan(model=embedded_model(), context=5).contexts[0].requests is None


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("calibrate", {"method": "magic"}, "method must be one of oscar-shaped, .* got 'magic'"),
        ("calibrate", {"tokens": 3}, "too few tokens"),
        ("calibrate", {"group_size": 7}, "group size does not fit this model"),
        ("calibrate", {"text": "/nowhere.txt"}, "expected a readable text file"),
        ("evaluate", {"methods": ["int5"]}, "expected names out of .* got 'int5'"),
        ("evaluate", {"methods": ["bf16"], "tasks": ["retrieval"], "context": 40}, "the facts and the question alone take"),
        ("evaluate", {"artifacts": "/nowhere"}, "expected an artifact file, found none"),
        ("plan", {"memory_gib": 0}, "memory must be positive"),
        ("plan", {"context": 0}, "context must be positive"),
    ],
)
def test_refusals_are_oscar_errors(name, arguments, sentence):
    progress = {} if name == "plan" else {"progress": False}
    with pytest.raises(oscar.OscarError, match=sentence):
        getattr(oscar, name)(model=embedded_model(), **arguments, **progress)


def test_a_keyword_that_is_no_option():
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokns'"):
        oscar.calibrate(model="m", tokns=5)
