"""Flags, refusals and resolution: what happens between the command line and the first worker.

Every refusal of a start has its case here, hence more than 400 lines.
"""

import concurrent.futures
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import sglang  # noqa: F401  runs the platform plugin before ServerArgs exists
import torch
import transformers
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.oscar import check_flags, check_model, declare, find_artifact
from sglang.srt.oscar.cpu import platform, start, threads
from sglang.srt.oscar.flags import FLAGS, OscarSettings, settings_of
from sglang.srt.oscar.refusal import OscarRefusal
from sglang.srt.server_args import ServerArgs, prepare_server_args

from oscar import support
from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS
from oscar.errors import OscarError
from oscar.format import artifact
from oscar.format.identity import ModelIdentity, rope_settings
from oscar.format.sealed_file import file_digest
from oscar.format.side import LayerTransforms, Side

GEOMETRY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}


def config_folder(folder, config, architecture):
    """A model folder with a config and no weights: enough for argument resolution."""
    config.architectures = [architecture]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return str(folder)


def qwen3_config(**changes):
    return transformers.Qwen3Config(**{**GEOMETRY, "head_dim": 128, "max_position_embeddings": 2048, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return config_folder(tmp_path_factory.mktemp("model"), qwen3_config(), "Qwen3ForCausalLM")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    """Resolution sets variables and reads the cache folder of the user."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(artifact, "cache_path", lambda identity, suffix=".kvq": tmp_path / f"{identity.fingerprint}{suffix}")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.fixture
def found_artifact(monkeypatch, tmp_path):
    """Stands for an artifact that lies in the cache; what is in the file is test_artifact.py's subject."""

    class Found:
        sink_tokens, recent_tokens, method, group_size = DEFAULT_SINK_TOKENS, DEFAULT_RECENT_TOKENS, "oscar", 128

    path = tmp_path / "found.kvq"
    path.write_bytes(b"x")
    monkeypatch.setattr(artifact, "find", lambda folder, identity: path)
    monkeypatch.setattr(artifact, "load", lambda path, model=None, native_layers=False: Found)
    return path


def resolved(*argv):
    server_args = prepare_server_args(list(argv))
    server_args.resolve_once()
    return server_args


def refusal(*argv):
    with pytest.raises(OscarRefusal) as caught:
        resolved(*argv)
    sentence = str(caught.value)
    assert sentence.startswith("oscar: ") and "\n" not in sentence
    return sentence


# The table


def test_every_option_is_a_field_whose_default_works():
    fields = ServerArgs(model_path="m")
    for option in support.REFUSED:
        value = getattr(fields, option.field)
        assert value in option.allowed, option


def test_every_row_of_the_table_is_in_the_page_and_says_why():
    page = support.markdown()
    for row in (*support.MODEL_FEATURES, *support.HARDWARE):
        assert row.title in page
        assert row.supported or row.reason


@pytest.mark.parametrize("kind", [row.key for row in support.HARDWARE] + ["abacus"])
def test_hardware_gate_answers_for_every_kind(kind):
    sentence = support.hardware_refusal(kind)
    assert sentence is None if kind in ("cpu", "cuda") else "--device cpu" in sentence


# Options that do not go with it

REFUSED_VALUES = {
    "kv_cache_dtype": "fp8_e4m3",
    "attention_backend": "triton",
    "prefill_attention_backend": "flashinfer",
    "decode_attention_backend": "torch_native",
    "speculative_algorithm": "NGRAM",
    "disaggregation_mode": "prefill",
    "hicache_storage_backend": "file",
    "lora_paths": ["name=path"],
    "dllm_algorithm": "LowConfidence",
    "kv_canary": "log",
    "model_impl": "transformers",
    "quantization_param_path": "scales.json",
    "radix_cache_backend": "flexkv",
    "elastic_ep_backend": "mooncake",
    "ep_join_mode": "recover",
    "decoupled_spec_role": "verifier",
    "rl_on_policy_target": "fsdp",
    "cuda_graph_backend_prefill": "breakable",
    "cuda_graph_backend_decode": "breakable",
    "forward_hooks": [{"target_modules": ["model.layers.0"]}],
    "load_format": "flash_rl",
    "model_config_parser": "mistral",
    "decrypted_config_file": "config.json",
    "startup_weight_load_mode": "overlap",
    "weight_cache_mode": "client",
    "custom_weight_loader": ["package.load"],
}


@pytest.mark.parametrize("option", support.REFUSED, ids=lambda option: option.flag)
def test_option_is_refused(option, model):
    default = getattr(ServerArgs(model_path="m"), option.field)
    other = REFUSED_VALUES.get(option.field, 2 if isinstance(default, int) and not isinstance(default, bool) else True)
    with pytest.raises(OscarRefusal) as caught:
        ServerArgs(model_path=model, kv_quant="oscar", **{option.field: other}).resolve_once()
    sentence = str(caught.value)
    # Both causes and a way out.
    assert "--kv-quant oscar" in sentence and option.flag in sentence and option.reason in sentence
    assert "--kv-quant none" in sentence


def test_every_other_attention_backend_is_refused(model):
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    for name in ATTENTION_BACKEND_CHOICES:
        if name != "oscar":
            assert name in refusal("--model-path", model, "--kv-quant", "oscar", "--attention-backend", name)


def test_prefill_graphs_are_off_before_memory_is_divided(model, found_artifact, monkeypatch):
    """SGLang sets memory aside for the graphs that are on when it divides the memory."""
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.arg_groups.overrides import resolving_view

    seen = []
    divide = memory_hook.handle_gpu_memory_settings

    def look(server_args):
        seen.append(resolving_view(server_args).cuda_graph_config.prefill.backend)
        divide(server_args)

    look.__name__ = divide.__name__
    monkeypatch.setattr(memory_hook, "handle_gpu_memory_settings", look)
    resolved("--model-path", model, "--kv-quant", "oscar")
    resolved("--model-path", model, "--kv-quant", "oscar", "--disable-prefill-cuda-graph")
    assert seen == ["disabled", "disabled"]


def test_graphs_of_a_card():
    """--cuda-graph-config on a GPU: whole graphs of decode, and nothing else."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

    def view(decode):
        graphs = CudaGraphConfig()
        graphs.decode.backend = decode
        return types.SimpleNamespace(device="cuda", oscar_debug_checks=False, cuda_graph_config=graphs)

    def backends(graphs):
        return graphs.decode.backend, graphs.prefill.backend

    assert backends(declare._graphs(view("full"), "int2", "auto")) == ("full", "disabled")
    assert backends(declare._graphs(view("full"), "lossless", "auto")) == ("disabled", "disabled")
    with pytest.raises(OscarRefusal, match="breakable CUDA graphs in decode"):
        declare._graphs(view("breakable"), "int2", "auto")


def test_graphs_of_prefill_are_refused(model):
    graphs = {"prefill": {"backend": "breakable"}}
    with pytest.raises(OscarRefusal, match="breakable graphs of prefill"):
        ServerArgs(model_path=model, kv_quant="oscar", cuda_graph_config=graphs).resolve_once()


def test_quantized_weights_resolve(model, found_artifact):
    """--quantization: the V transform then runs online."""
    assert settings_of(resolved("--model-path", model, "--kv-quant", "oscar", "--quantization", "w8a8_int8")) is not None


def test_hnd_layout_is_refused(model, monkeypatch):
    monkeypatch.setitem(os.environ, "SGLANG_USE_HND_KVCACHE", "1")
    assert "SGLANG_USE_HND_KVCACHE" in refusal("--model-path", model, "--kv-quant", "oscar")


def test_flag_without_kv_quant_is_refused(model):
    for flag in FLAGS[1:]:
        if flag.hidden:
            continue
        value = [] if flag.type is bool else [flag.choices[0] if flag.choices else "3"]
        sentence = refusal("--model-path", model, flag.option, *value)
        assert flag.option in sentence and "--kv-quant oscar" in sentence


@pytest.mark.parametrize("flag", ["--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"])
def test_backend_without_its_cache_is_refused(model, flag):
    """Before the weights are read, and with the right reason."""
    assert f"{flag} oscar reads the 2-bit KV cache only" in refusal("--model-path", model, flag, "oscar")


def test_backend_that_sglang_chose_late_is_refused(model, monkeypatch):
    """As for HRM-Text, whose attention backend is forced after ours was declared."""
    from sglang.srt.arg_groups import overrides

    view = types.SimpleNamespace(kv_quant="oscar", model_path=model, prefill_attention_backend=None)
    view.attention_backend, view.decode_attention_backend = "oscar", None
    monkeypatch.setattr(overrides, "resolving_view", lambda _: view)
    declare.check_backends(None)
    view.attention_backend = "triton"
    with pytest.raises(OscarRefusal, match="sglang sets --attention-backend triton for it"):
        declare.check_backends(None)


@pytest.mark.parametrize(
    ("variable", "value", "told"), [("ISA", "avx1024", "OSCAR_CPU_ISA must be one of"), ("LIBRARY", "/nowhere.so", "None")]
)
def test_library_knows_bad_settings_when_it_is_loaded(variable, value, told):
    """In a process of its own, since the library reads its environment once."""
    script = "from oscar_kernel.cpu.library import library\ntry: print(library())\nexcept RuntimeError as error: print(error)"
    environment = os.environ | {f"OSCAR_CPU_{variable}": value}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert told in run.stdout, run.stderr


def test_settings_of_the_library_end_the_start(model, monkeypatch):
    from oscar_kernel.cpu import library

    def fails():
        raise RuntimeError("oscar_kernel: OSCAR_CPU_ISA=amx, but this machine lacks that level")

    monkeypatch.setattr(library, "library", fails)
    start = ("--model-path", model, "--kv-quant", "oscar")
    assert "oscar: OSCAR_CPU_ISA=amx, but this machine lacks that level; change or unset it" == refusal(*start)
    monkeypatch.setattr(library, "library", lambda: None)
    assert "--oscar-kernels cpu needs the C++ library" in refusal(*start, "--oscar-kernels", "cpu")
    monkeypatch.setitem(os.environ, "OSCAR_CPU_LIBRARY", "/nowhere.so")
    assert "is no library that can be loaded" in refusal(*start)


def test_more_ranks_than_heads_on_a_cpu(tmp_path):
    folder = config_folder(tmp_path, qwen3_config(num_key_value_heads=1), "Qwen3ForCausalLM")
    sentence = refusal("--model-path", folder, "--kv-quant", "oscar", "--tp-size", "2")
    assert "cannot give the 1 KV heads" in sentence and "--tp-size 1" in sentence


def test_artifact_that_is_replaced_during_the_start_is_not_served(model, tmp_path):
    from sglang.srt.oscar.runtime import get_runtime

    path = saved_artifact(tmp_path / "a.kvq", ModelIdentity.from_path(model))
    server_args = resolved("--model-path", model, "--kv-quant", "oscar", "--oscar-artifact", str(path))
    before = path.read_bytes()
    saved_artifact(path, ModelIdentity.from_path(model), scale=2.0)
    with pytest.raises(OscarError, match="a.kvq was replaced while the server started"):
        get_runtime(server_args)
    path.write_bytes(before)
    assert get_runtime(server_args) is not None


@pytest.mark.parametrize(
    ("given", "page_size"),
    [((), 64), (("--chunked-prefill-size", "96"), 32), (("--chunked-prefill-size", "-1"), 64), (("--page-size", "24"), 24)],
)
def test_pages_hold_whole_rows_of_the_windows(model, found_artifact, given, page_size):
    """By default the largest usual page of which a chunk of a prefill is made."""
    chunk = () if "--chunked-prefill-size" in given else ("--chunked-prefill-size", "-1")
    server_args = resolved("--model-path", model, "--kv-quant", "oscar", *given, *chunk)
    assert resolution_result(server_args, "page_size") == page_size


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [("--page-size", "1", "a multiple of 8, got 1"), ("--chunked-prefill-size", "100", "of 8, better of 64")],
)
def test_pages_that_hold_no_row_are_refused(model, found_artifact, flag, value, told):
    assert told in refusal("--model-path", model, "--kv-quant", "oscar", flag, value)


@pytest.mark.parametrize("flag", ["--oscar-sink-tokens", "--oscar-recent-tokens"])
@pytest.mark.parametrize(("value", "told"), [("-1", "0 or more"), ("2049", "2048")])
def test_window_out_of_range(model, flag, value, told):
    sentence = refusal("--model-path", model, "--kv-quant", "oscar", flag, value)
    assert flag in sentence and value in sentence and told in sentence


def test_bad_choice_exits_with_argparse_sentence(model, capsys):
    with pytest.raises(SystemExit) as caught:
        prepare_server_args(["--model-path", model, "--kv-quant", "int3"])
    assert caught.value.code == 2
    assert "'none', 'oscar'" in capsys.readouterr().err.replace("none, oscar", "'none', 'oscar'")
    with pytest.raises(OscarRefusal, match="--kv-quant must be one of none, oscar, got 'int3'"):
        ServerArgs(model_path=model, kv_quant="int3").resolve_once()


def test_ranks_that_cannot_share_the_heads(model):
    assert "2 KV heads" in refusal("--model-path", model, "--kv-quant", "oscar", "--tp-size", "3")


# Files


def test_missing_model(tmp_path):
    for path in (str(tmp_path / "gone"), "gone", "./a/b"):
        assert path in refusal("--model-path", path, "--kv-quant", "oscar")


def test_folder_without_config(tmp_path):
    assert "has no config.json" in refusal("--model-path", str(tmp_path), "--kv-quant", "oscar")
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refusal("--model-path", str(tmp_path), "--kv-quant", "oscar")
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    assert "cannot read the model" in refusal("--model-path", str(tmp_path), "--kv-quant", "oscar")


def test_artifact_that_is_not_there_or_no_artifact(model, tmp_path):
    start = ("--model-path", model, "--kv-quant", "oscar", "--oscar-artifact")
    assert "does not exist" in refusal(*start, str(tmp_path / "gone"))
    assert "is a folder" in refusal(*start, str(tmp_path))
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not an artifact")
    assert "broken.safetensors" in refusal(*start, str(broken))


def saved_artifact(path, identity, layer_ids=(0, 1), scale=1.0):
    """An artifact of plain rounding for a model with two KV heads; returns its path."""
    one = torch.ones(2)
    dim = identity.head_dim
    eye = torch.eye(dim).expand(2, dim, dim) * scale
    layers = {i: LayerTransforms(Side(eye, one), Side(eye, one)) for i in layer_ids}
    artifact.save(artifact.Artifact(identity, "identity", dim, 4, 16, 0, layers), path)
    return path


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}
YARN |= {"max_position_embeddings": 8192}


def test_overrides_of_the_config_are_part_of_the_identity(model, tmp_path):
    """--json-model-override-args: the plain model's artifact is refused, that of a copy with such a config is taken."""
    copy = config_folder(tmp_path / "copy", qwen3_config(), "Qwen3ForCausalLM")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    config["rope_parameters"] |= YARN["rope_scaling"]
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    plain = saved_artifact(tmp_path / "plain.kvq", ModelIdentity.from_path(model))
    theirs = saved_artifact(tmp_path / "copy.kvq", ModelIdentity.from_path(copy))
    start = ("--model-path", model, "--kv-quant", "oscar", "--json-model-override-args", json.dumps(YARN), "--oscar-artifact")
    assert "made for another model: rope is" in refusal(*start, str(plain))
    assert settings_of(resolved(*start, str(theirs))).artifact_path == str(theirs)
    assert "made for another model: rope is" in refusal(*start[:4], "--oscar-artifact", str(theirs))


def test_config_that_is_calibrated_is_the_one_that_is_served(tiny_models):
    from oscar.calibration.check import check
    from oscar.calibration.options import CalibrationOptions

    folder = tiny_models("Qwen3")
    calibrated = check(CalibrationOptions(model=folder, json_model_override_args=YARN))[1]
    served = ModelConfig(str(folder), model_override_args=json.dumps(YARN)).hf_config
    assert served.rope_parameters["rope_type"] == "yarn" and "rope_theta" in served.rope_parameters
    assert rope_settings(calibrated.rope_parameters) == rope_settings(served.rope_parameters)
    assert calibrated.max_position_embeddings == served.max_position_embeddings == 8192


def test_calibration_has_the_overrides(model):
    start = ("--model-path", model, "--kv-quant", "oscar", "--oscar-calibrate", "never")
    sentence = refusal(*start, "--json-model-override-args", json.dumps(YARN))
    assert "--json-model-override-args" in sentence and "yarn" in sentence


@pytest.mark.parametrize("given", [True, False])
def test_artifact_under_the_name_of_weights_is_refused(given, tmp_path):
    """SGLang reads every *.safetensors beside single-file weights as weights, whatever the cache."""
    folder = config_folder(tmp_path, qwen3_config(), "Qwen3ForCausalLM")
    saved_artifact(tmp_path / "a.kvq", ModelIdentity.from_path(folder)).rename(tmp_path / "oscar.safetensors")
    more = ("--oscar-artifact", str(tmp_path / "oscar.safetensors")) if given else ()
    sentence = refusal("--model-path", folder, "--kv-quant", "oscar", *more)
    assert "is loaded as weights; name it" in sentence and str(tmp_path / "oscar.kvq") in sentence


def test_weight_loader_does_not_see_the_artifact(tiny_models, tmp_path):
    """SGLang's list of the weight files of a model without an index, beside which an artifact lies."""
    import shutil

    from sglang.srt.model_loader.weight_utils import filter_duplicate_safetensors_files

    def weights():
        files = filter_duplicate_safetensors_files(
            [str(file) for file in folder.glob("*.safetensors")], str(folder), "model.safetensors.index.json"
        )
        return sorted(Path(file).name for file in files)

    folder = shutil.copytree(tiny_models("Qwen3"), tmp_path / "model")
    saved_artifact(folder / "oscar.kvq", ModelIdentity.from_path(folder))
    assert weights() == ["model.safetensors"]
    shutil.copy(folder / "oscar.kvq", folder / "oscar.safetensors")
    assert weights() == ["model.safetensors", "oscar.safetensors"], "the reason why that name is refused is gone"


def test_singular_transform_is_refused(model, tmp_path, monkeypatch):
    from oscar.format import linalg

    with monkeypatch.context() as patch:
        patch.setattr(linalg, "singular", lambda _: None)
        path = saved_artifact(tmp_path / "a.kvq", ModelIdentity.from_path(model), scale=0.0)
    sentence = refusal("--model-path", model, "--kv-quant", "oscar", "--oscar-artifact", str(path))
    assert "layers.0.k_transform, head 0: expected a matrix that can be inverted" in sentence


def test_missing_layers_need_the_flag(model, tmp_path):
    path = saved_artifact(tmp_path / "part.kvq", ModelIdentity.from_path(model), (1,))
    start = ("--model-path", model, "--kv-quant", "oscar", "--oscar-artifact", str(path))
    sentence = refusal(*start)
    assert "found none of layer 0; give --oscar-allow-native-layers" in sentence and str(path) in sentence
    assert settings_of(resolved(*start, "--oscar-allow-native-layers")).allow_native_layers


@pytest.mark.parametrize(("content", "told"), [(b"", "empty"), (b" \n", "empty"), (b"\x00\x01\xff\xfe" * 99, "not UTF-8")])
def test_calibration_text_that_is_not_text(model, tmp_path, content, told):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    sentence = refusal("--model-path", model, "--kv-quant", "oscar", "--oscar-calibrate-text", str(file))
    assert told in sentence and str(file) in sentence


def test_calibration_text_cut_inside_a_character_is_text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a" + "é" * 70000, encoding="utf-8")
    check_flags._check_text(str(file))


def test_calibrate_never_prints_the_command(model):
    sentence = refusal("--model-path", model, "--kv-quant", "oscar", "--oscar-calibrate", "never")
    assert f"{sys.executable} -m oscar calibrate --model {model} --output" in sentence


def test_plugin_that_did_not_load_ends_the_start(model, monkeypatch, found_artifact):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    resolved("--model-path", model, "--kv-quant", "oscar")
    monkeypatch.delitem(ATTENTION_BACKENDS, "oscar")
    assert "plugin of oscar-kv did not load" in refusal("--model-path", model, "--kv-quant", "oscar")


def test_a_hook_that_was_not_taken_ends_the_start(model, monkeypatch, found_artifact):
    """SGLang logs a hook that fails and goes on: with the cell size of 16 bits it would serve a seventh of the tokens."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    resolved("--model-path", model, "--kv-quant", "oscar")
    target = next(name for name in HookRegistry._patched if name.endswith("_compute_cell_size"))
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    assert "did not take the hook of oscar-kv on" in refusal("--model-path", model, "--kv-quant", "oscar")


def test_failed_calibration_ends_the_start(model, monkeypatch, capfd):
    monkeypatch.setattr(
        find_artifact, "calibrate_command", lambda *_: [sys.executable, "-c", "print('why'); raise SystemExit(3)"]
    )
    sentence = refusal("--model-path", model, "--kv-quant", "oscar")
    assert "exit code 3" in sentence and "--oscar-artifact" in sentence
    assert "why" in capfd.readouterr().err


def test_calibration_that_works_is_used(model, monkeypatch, found_artifact, tmp_path):
    output = tmp_path / "made.safetensors"
    monkeypatch.setattr(artifact, "find", lambda *_: None)
    monkeypatch.setattr(artifact, "cache_path", lambda *_: output)
    script = "import sys; open(sys.argv[1], 'w').write('x')"
    monkeypatch.setattr(find_artifact, "calibrate_command", lambda *_: [sys.executable, "-c", script, str(output)])
    assert settings_of(resolved("--model-path", model, "--kv-quant", "oscar")).artifact_path == str(output)


def start_options(**changes):
    """The options of a start on a card that `calibrate_command` looks at."""
    plain = {"oscar_calibrate_text": None, "json_model_override_args": "{}", "trust_remote_code": False, "device": "cuda"}
    plain |= {"base_gpu_id": 0, "gpu_id_step": 1, "tp_size": 1, "quantization": None, "mem_fraction_static": None}
    return types.SimpleNamespace(**plain | changes)


def test_calibration_runs_where_the_server_will(tmp_path, monkeypatch):
    """--base-gpu-id, --gpu-id-step, --tp-size, --quantization, --trust-remote-code, --device."""
    folder = config_folder(tmp_path, qwen3_config(), "Qwen3ForCausalLM")
    (tmp_path / "model.safetensors").write_bytes(bytes(900))
    monkeypatch.setattr(find_artifact, "card_bytes", lambda index: 1000 if index == 3 else 2000)

    def words(**changes):
        command = find_artifact.calibrate_command(folder, tmp_path / "a.kvq", start_options(**changes))
        return command[command.index("--output") + 2 :]

    assert words(base_gpu_id=3) == ["--device", "cuda:3"]
    assert words(device="cpu", tp_size=2) == ["--device", "cpu"]
    assert words(tp_size=2) == ["--device", "cuda:0"]
    assert words(trust_remote_code=True) == ["--trust-remote-code", "--device", "cuda:0"]
    # Two cards for what one does not hold, and quantized weights.
    inside = words(base_gpu_id=3, tp_size=2, gpu_id_step=2)
    assert inside[:4] == ["--backend", "sglang", "--tp", "2"]
    assert json.loads(inside[5]) == {"base_gpu_id": 3, "gpu_id_step": 2, "device": "cuda"}
    assert json.loads(words(quantization="fp8", mem_fraction_static=0.8)[5])["quantization"] == "fp8"
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert words()[:2] == ["--backend", "sglang"]


def test_a_model_of_the_hub_is_found_where_the_server_keeps_it(monkeypatch):
    """--download-dir and --revision; copies of the weights that SGLang does not read are left there."""
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **more: asked.update(more) or "/folder")
    assert find_artifact.local_model("owner/name", "main", "/models") == "/folder"
    assert asked["cache_dir"] == "/models" and asked["revision"] == "main"
    assert asked["ignore_patterns"] == ["original/*", "consolidated*"]
    assert platform.weight_bytes("owner/name", "main", "/models") == 0
    assert asked["local_files_only"] and asked["cache_dir"] == "/models"


def test_of_two_starts_one_calibrates(tmp_path, caplog):
    output, runs = tmp_path / "a.kvq", tmp_path / "runs"
    script = (
        "import sys, time; open(sys.argv[2], 'a').write('x'); time.sleep(0.5); open(sys.argv[1], 'w').write('x');"
        "assert sys.flags.safe_path, 'a folder oscar in the working directory would be taken for the package'"
    )
    command = [sys.executable, "-c", script, str(output), str(runs)]
    with caplog.at_level("INFO"), concurrent.futures.ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(find_artifact.calibrate, "m", output, command) for _ in range(3)]:
            done.result(60)
    assert runs.read_text() == "x"
    assert f"another server calibrates m; waiting until it has written {output}" in caplog.text


def test_a_start_that_waited_in_vain_calibrates_itself(tmp_path):
    """The lock of a process that was killed is free again."""
    output = tmp_path / "a.kvq"
    lock = f"import fcntl, os; f = open('{output}.lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", lock]).returncode == -9
    find_artifact.calibrate("m", output, [sys.executable, "-c", "import sys; open(sys.argv[1], 'w')", str(output)])
    assert output.is_file()


def test_no_room_for_the_cache_file(model, monkeypatch, tmp_path):
    monkeypatch.setattr(find_artifact.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    sentence = refusal("--model-path", model, "--kv-quant", "oscar")
    assert "1 MiB are free" in sentence and "--oscar-artifact FILE" in sentence
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(artifact, "cache_path", lambda *_: file / "a.kvq")
    assert "cache folder" in refusal("--model-path", model, "--kv-quant", "oscar")


# Models

MODELS = {
    "mla": (
        transformers.DeepseekV3Config,
        {**LATENT, "q_lora_rank": None, "n_routed_experts": 4, "first_k_dense_replace": 1},
        "DeepseekV3ForCausalLM",
        "kv_lora_rank=32",
    ),
    "attention_sinks": (transformers.GptOssConfig, {"head_dim": 64, "num_local_experts": 4}, "GptOssForCausalLM", "sinks"),
    "sliding_window": (
        transformers.Gemma3TextConfig,
        {"head_dim": 64, "sliding_window": 16},
        "Gemma3ForCausalLM",
        "sliding_attention",
    ),
    "mistral_window": (transformers.MistralConfig, {"sliding_window": 16}, "MistralForCausalLM", "sliding_window=16"),
    "linear_attention": (transformers.Qwen3NextConfig, {"head_dim": 64}, "Qwen3NextForCausalLM", "linear-attention"),
    "not_generative": (transformers.Qwen2Config, {}, "Qwen2ForRewardModel", "reward"),
    "head_dim": (transformers.Qwen3Config, {"head_dim": 90}, "Qwen3ForCausalLM", "head_dim=90"),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_feature_is_refused(name, tmp_path):
    kind, changes, architecture, told = MODELS[name]
    folder = config_folder(tmp_path, kind(**{**GEOMETRY, **changes}), architecture)
    sentence = refusal("--model-path", folder, "--kv-quant", "oscar")
    assert told in sentence and folder in sentence and "--kv-quant none" in sentence


@pytest.mark.parametrize("flags", [("--oscar-kernels", "triton"), ("--oscar-kernels", "cpu")])
def test_head_dim_that_compiled_kernels_do_not_take(flags, tmp_path, found_artifact):
    folder = config_folder(tmp_path, qwen3_config(head_dim=72), "Qwen3ForCausalLM")
    sentence = refusal("--model-path", folder, "--kv-quant", "oscar", *flags)
    assert "head_dim=72" in sentence and "--oscar-kernels reference" in sentence
    resolved("--model-path", folder, "--kv-quant", "oscar")  # PyTorch steps in on a CPU
    resolved("--model-path", folder, "--kv-quant", "oscar", "--oscar-kernels", "reference")


@pytest.mark.parametrize(
    ("kernels", "codec", "refused"),
    [(None, None, True), ("auto", None, True), ("triton", None, True), ("reference", None, False), (None, "lossless", False)],
)
def test_head_dim_on_a_gpu(kernels, codec, refused, tmp_path, monkeypatch):
    """As on a card: only what asks the card itself is left out."""
    from sglang.srt.arg_groups import overrides

    folder = config_folder(tmp_path, qwen3_config(head_dim=72), "Qwen3ForCausalLM")
    server_args = ServerArgs(model_path=folder, kv_quant="oscar", oscar_kernels=kernels, oscar_codec=codec)
    view = types.SimpleNamespace(
        kv_quant="oscar", device="cuda", oscar_kernels=kernels, oscar_codec=codec, model_path=folder, tp_size=1
    )
    monkeypatch.setattr(overrides, "resolving_view", lambda _: view)
    monkeypatch.setattr(overrides, "model_config_of", lambda _: ModelConfig(folder))
    monkeypatch.setattr(check_model, "_check_machine", lambda *_: None)
    if refused:
        with pytest.raises(OscarRefusal, match="head_dim=72.*--oscar-kernels reference"):
            check_model.check_model(server_args)
    else:
        check_model.check_model(server_args)


def test_what_only_sglang_knows_is_refused_too(tmp_path):
    """One config of plain attention under architectures and settings that SGLang knows more about."""

    def found(architecture, **settings):
        model_config = ModelConfig(config_folder(tmp_path / architecture, qwen3_config(), architecture))
        for name, value in settings.items():
            setattr(model_config, name, value)
        return check_model.refused_features(model_config)

    assert found("Qwen3ForCausalLM") == []
    assert found("GraniteSWAForCausalLM") == [("attention_sinks", ""), ("sliding_window", "")]
    for key, settings in (
        ("encoder_decoder", {"is_encoder_decoder": True}),
        ("not_generative", {"is_generation": False}),
        ("multimodal", {"is_multimodal": True}),
        ("mla", {"attention_arch": AttentionArch.MLA}),
        ("linear_attention", {"attention_arch": AttentionArch.SSM}),
        ("sliding_window", {"is_hybrid_swa": True}),
        ("alibi", {"use_alibi": True}),
        ("unreadable_geometry", {"head_dim": 0}),
    ):
        assert found("Qwen3ForCausalLM", **settings) == [(key, "")]


@pytest.mark.parametrize("multimodal", [True, False])
def test_text_alone_of_a_model_that_also_sees_is_served(multimodal, tmp_path):
    text = qwen3_config().to_dict()
    config = transformers.LlavaConfig(text_config=text, vision_config={"model_type": "clip_vision_model"})
    folder = config_folder(tmp_path, config, "LlavaForConditionalGeneration")
    found = check_model.refused_features(ModelConfig(folder, enable_multimodal=multimodal))
    assert [key for key, _ in found] == (["multimodal"] if multimodal else [])


@pytest.mark.parametrize(
    ("kind", "architecture", "told"),
    [
        (transformers.WhisperConfig, "WhisperForConditionalGeneration", "encoder-decoder"),
        (transformers.Qwen2VLConfig, "Qwen2VLForConditionalGeneration", "image"),
    ],
)
def test_model_with_other_inputs_is_refused(kind, architecture, told, tmp_path):
    assert told in refusal("--model-path", config_folder(tmp_path, kind(), architecture), "--kv-quant", "oscar")


@pytest.mark.parametrize(
    ("kind", "changes", "architecture"),
    [
        (transformers.LlamaConfig, {}, "LlamaForCausalLM"),
        (transformers.Qwen2Config, {"sliding_window": 4096, "use_sliding_window": False}, "Qwen2ForCausalLM"),
        (transformers.Qwen3MoeConfig, {"head_dim": 80, "num_experts": 4}, "Qwen3MoeForCausalLM"),
        (transformers.Glm4Config, {"head_dim": 96}, "Glm4ForCausalLM"),
    ],
)
def test_model_that_is_claimed_resolves(kind, changes, architecture, tmp_path, found_artifact):
    folder = config_folder(tmp_path, kind(**{**GEOMETRY, **changes}), architecture)
    settings = settings_of(resolved("--model-path", folder, "--kv-quant", "oscar"))
    assert settings.artifact_path == str(found_artifact)


# The same settings by every way of starting


def expected(path, **changes):
    return OscarSettings(
        **{
            "artifact_path": str(path),
            "sink_tokens": DEFAULT_SINK_TOKENS,
            "recent_tokens": 16,
            "codec": "int2",
            "debug_checks": False,
            "allow_native_layers": False,
            "artifact_digest": file_digest(path),
            **changes,
        }
    )


def engine(model, _):
    return ServerArgs(model_path=model, kv_quant="oscar", oscar_recent_tokens=16)


def command_line(model, _):
    return prepare_server_args(["--model-path", model, "--kv-quant", "oscar", "--oscar-recent-tokens", "16"])


def yaml(model, folder):
    file = folder / "server.yaml"
    file.write_text(f"model-path: {model}\nkv-quant: oscar\noscar-recent-tokens: 16\n")
    return prepare_server_args(["--config", str(file)])


def bench(model, _):
    import argparse

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(
        parser.parse_args(["--model-path", model, "--kv-quant", "oscar", "--oscar-recent-tokens", "16"])
    )


@pytest.mark.parametrize("way", [engine, command_line, yaml, bench], ids=lambda way: way.__name__)
def test_same_settings_by_every_way(way, model, tmp_path, found_artifact):
    server_args = way(model, tmp_path)
    server_args.resolve_once()
    assert settings_of(server_args) == expected(found_artifact)
    told = server_args.resolved_dict()
    assert told["attention_backend"] == "oscar" and told["kv_quant"] == "oscar"
    graphs = told["cuda_graph_config"]
    assert {graphs["prefill"]["backend"], graphs["decode"]["backend"]} == {"disabled"}


def test_spawned_worker_sees_the_settings(model, found_artifact):
    server_args = resolved("--model-path", model, "--kv-quant", "oscar", "--oscar-codec", "lossless", "--oscar-debug-checks")
    script = (
        "import pickle, sys, sglang; from sglang.srt.oscar.flags import settings_of; "
        "print(repr(settings_of(pickle.loads(sys.stdin.buffer.read()))))"
    )
    run = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(server_args), capture_output=True, check=True)
    wanted = expected(found_artifact, codec="lossless", debug_checks=True, recent_tokens=DEFAULT_RECENT_TOKENS)
    assert run.stdout.decode().strip().splitlines()[-1] == repr(wanted)


def test_none_is_stock(model):
    server_args = resolved("--model-path", model)
    assert settings_of(server_args) is None
    assert server_args.resolved_dict()["attention_backend"] == "torch_native"


# Command lines: what a user sees


WAYS = {
    "launch_server": [sys.executable, "-m", "sglang.launch_server"],
    "serve": [str(Path(sys.executable).with_name("sglang")), "serve"],
}


@pytest.mark.parametrize("way", WAYS)
def test_refusal_on_the_command_line_is_one_sentence(way, model):
    command = [*WAYS[way], "--model-path", model, "--kv-quant", "oscar", "--kv-cache-dtype", "fp8_e4m3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    line = run.stderr.strip().splitlines()[-1]
    assert line.startswith("oscar: --kv-quant oscar does not go with --kv-cache-dtype fp8_e4m3")


# CPU


def test_device_argument():
    assert start.device_argument(["x", "--device", "cuda", "--device=cpu:0"]) == "cpu"
    assert start.device_argument(["x", "--device-id", "cpu"]) is None


def test_cores_are_split_evenly_and_what_the_user_set_stays(model, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5, 7})
    assert threads.cores_by_rank(2) == "0,1,2|5,7"
    assert threads.cores_by_rank(7) == "0|1|2|5|7|0|1"
    monkeypatch.setattr(threads, "numa_nodes", lambda: 1)
    os.environ.pop(threads.BIND, None)
    resolved("--model-path", model, "--tp-size", "2")
    assert os.environ[threads.BIND] == "0,1,2|5,7"
    assert threads.bound_by_us()
    os.environ[threads.BIND] = "0|7"
    assert not threads.bound_by_us()
    resolved("--model-path", model, "--tp-size", "2")
    assert os.environ[threads.BIND] == "0|7"


def test_memory_default_leaves_room(tmp_path, monkeypatch):
    from sglang.srt.utils import common

    folder = config_folder(tmp_path, qwen3_config(), "Qwen3ForCausalLM")
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(3 << 30)
    monkeypatch.setattr(threads, "numa_nodes", lambda: 1)
    monkeypatch.setattr(common, "get_free_cpu_memory", lambda: 10 << 30)
    server_args = ServerArgs(model_path=folder)
    share = platform.memory_fraction(server_args)
    # 8 GiB besides the processes; 3 of weights and 0.4 of the other 5 for the pool.
    assert share == 5 / 8
    assert platform.memory_fraction(ServerArgs(model_path=folder, tp_size=2)) < share
    monkeypatch.setattr(common, "get_free_cpu_memory", lambda: 4 << 30)
    assert platform.memory_fraction(server_args) is None
    resolved_args = resolved("--model-path", folder, "--mem-fraction-static", "0.5", "--max-running-requests", "3")
    told = resolved_args.resolved_dict()
    assert told["mem_fraction_static"] == 0.5 and told["max_running_requests"] == 3


def test_json_table_is_plain_data():
    json.dumps([[row.key, row.supported, row.reason] for row in support.MODEL_FEATURES])
    assert torch.accelerator.is_available() or start.is_meant()
