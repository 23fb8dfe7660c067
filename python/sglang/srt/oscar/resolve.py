"""Argument resolution: refuse what cannot work, find or make the artifact, declare what the workers need.

The functions are called from wrappers around SGLang's own resolution steps (`early.RESOLUTION_STEPS`), once a server, in
the process that was started, before any worker exists and before the port opens:

    check_options          flags alone                         -> OscarRefusal
    check_model            machine and model geometry          -> OscarRefusal
    declare_cpu_backend    torch_native where nothing was chosen
    bind_cpu_threads       cores for the ranks of --tp-size
    declare_settings       upstream check, artifact, windows, backend

What is declared travels to the workers inside `ServerArgs`; there `settings_of` reads it back.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar import support as capability
from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS

logger = logging.getLogger(__name__)

SOURCE = "oscar"
"""Who declares, in SGLang's list of resolved overrides."""
FREE_SPACE = 256 * 2**20
"""Bytes that must be free where a calibrated artifact is written: the artifacts of the models tried take 1 to 80 MB."""


class OscarRefusal(ValueError):
    """The start cannot go on. The message is one sentence for the user."""


@dataclass(frozen=True)
class OscarSettings:
    """What --kv-quant oscar resolved to.

    Args:
        artifact_path: the artifact file.
        sink_tokens: first tokens of a sequence that are also kept in 16 bits, >= 0.
        recent_tokens: newest tokens of a sequence that are also kept in 16 bits, >= 0.
        codec: "int2", or "lossless" for debugging.
        debug_checks: compare every 16-bit row that is read with its 2-bit row.
        allow_native_layers: layers that the artifact lacks stay in 16 bits.
        kernels: implementation of the operations, see `oscar_kernel.choose`; "auto", "cpu", "triton" or "reference".
    """

    artifact_path: str
    sink_tokens: int
    recent_tokens: int
    codec: str
    debug_checks: bool
    allow_native_layers: bool
    kernels: str = "auto"


def settings_of(server_args: Any) -> OscarSettings | None:
    """The resolved settings, in the launcher or in a worker; None with --kv-quant none."""
    from sglang.srt.arg_groups.overrides import resolution_result

    if resolution_result(server_args, "kv_quant", "none") != "oscar":
        return None
    return OscarSettings(
        artifact_path=resolution_result(server_args, "oscar_artifact"),
        sink_tokens=resolution_result(server_args, "oscar_sink_tokens"),
        recent_tokens=resolution_result(server_args, "oscar_recent_tokens"),
        codec=resolution_result(server_args, "oscar_codec"),
        debug_checks=resolution_result(server_args, "oscar_debug_checks"),
        allow_native_layers=resolution_result(server_args, "oscar_allow_native_layers"),
        kernels=resolution_result(server_args, "oscar_kernels"),
    )


def refuse(sentence: str) -> OscarRefusal:
    """The exception for `sentence`; if nothing catches it, the process prints the sentence alone and exits with 1."""
    if sys.excepthook is not _sentence_only:
        _sentence_only.previous = sys.excepthook
        sys.excepthook = _sentence_only
    return OscarRefusal(sentence)


def _sentence_only(kind, error, trace) -> None:
    if isinstance(error, OscarRefusal):
        print(error, file=sys.stderr, flush=True)
    else:
        _sentence_only.previous(kind, error, trace)


# Flags


def check_options(server_args: Any) -> None:
    """Refuse what the flags alone rule out. Reads the values as given: nothing is resolved yet.

    Raises:
        OscarRefusal: the first flag that does not go with --kv-quant oscar, or needs it.
    """
    from sglang.srt.oscar.entry import FLAGS

    if server_args.kv_quant == "none":
        for name, _, default, _, _ in FLAGS[1:]:
            if getattr(server_args, name) != default:
                raise refuse(
                    f"oscar: {_flag(name)} has no effect without --kv-quant oscar; add --kv-quant oscar, or drop {_flag(name)}"
                )
        return
    for name, _, _, choices, _ in FLAGS:
        value = getattr(server_args, name)
        if choices and value is not None and value not in choices:
            raise refuse(f"oscar: {_flag(name)} must be one of {', '.join(choices)}, got {value!r}")
    for option in capability.SERVER_OPTIONS:
        value = getattr(server_args, option.field)
        if option.allowed and value not in option.allowed:
            raise refuse(capability.option_refusal(option, value))
    if os.environ.get("SGLANG_USE_HND_KVCACHE", "").lower() in ("1", "true", "yes", "y"):
        raise refuse(
            "oscar: --kv-quant oscar does not go with SGLANG_USE_HND_KVCACHE=1: 2-bit rows are laid out slot by slot; "
            "unset SGLANG_USE_HND_KVCACHE, or serve with --kv-quant none"
        )
    for name in ("oscar_sink_tokens", "oscar_recent_tokens"):
        value = getattr(server_args, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise refuse(f"oscar: {_flag(name)} must be a number of tokens, 0 or more, got {value!r}")
    for name in ("oscar_artifact", "oscar_calibrate_text"):
        path = getattr(server_args, name)
        if path is not None and not Path(path).is_file():
            found = "is a folder" if Path(path).is_dir() else "does not exist"
            raise refuse(f"oscar: {_flag(name)} must be a file, but {path} {found}")
    if server_args.oscar_calibrate_text is not None:
        _check_text(server_args.oscar_calibrate_text)
    _check_model_path(server_args)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_model_path(server_args: Any) -> None:
    """Refuse a model whose config cannot be read, before SGLang tries; a name of the form `owner/name` may be on the Hub."""
    model_path = server_args.model_path
    if model_path.lower() in ("none", "dummy"):
        raise refuse(f"oscar: --kv-quant oscar needs a model to read its geometry from, got --model-path {model_path}")
    path = Path(model_path)
    if path.is_file() or "://" in model_path:
        return  # GGUF, or object storage: SGLang makes a folder of it
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise refuse(f"oscar: --model-path {model_path} has no config.json; give a Hugging Face model folder")
        try:
            json.loads((path / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise refuse(f"oscar: --model-path {model_path}: config.json is not JSON ({error})") from None
    elif not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model_path):
        raise refuse(f"oscar: --model-path {model_path} does not exist; give a folder with config.json and weights")
    try:
        from sglang.srt.utils.hf_transformers_utils import get_config

        get_config(
            model_path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
            model_config_parser=server_args.model_config_parser,
        )
    except Exception as error:
        raise _unreadable(model_path, error) from None


def _unreadable(model_path: str, error: Exception) -> OscarRefusal:
    first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return refuse(f"oscar: cannot read the model {model_path}: {first}")


def _check_text(path: str) -> None:
    """Refuse a calibration text that is empty or not text; reads its first 64 KiB."""
    with open(path, "rb") as file:
        start = file.read(1 << 16)
    if not start.strip():
        raise refuse(f"oscar: --oscar-calibrate-text {path} is empty; give a UTF-8 text file, or drop the flag")
    try:
        # A cut character at the end is not an error.
        text = start.decode("utf-8", errors="strict" if len(start) < 1 << 16 else "ignore")
        binary = "\0" in text or len(text.encode()) < len(start) - 3
    except UnicodeDecodeError:
        binary = True
    if binary:
        raise refuse(f"oscar: --oscar-calibrate-text {path} is not UTF-8 text; convert it, or drop the flag")


# Machine and model


def check_model(server_args: Any) -> None:
    """Refuse a machine or a model that the table in `oscar.support` does not claim.

    Raises:
        OscarRefusal: the first feature found, or the reason why the model cannot be read.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    cfg = resolving_view(server_args)
    if cfg.kv_quant != "oscar":
        return
    _check_machine(cfg.device, cfg.oscar_kernels)
    try:
        model_config = model_config_of(server_args)
    except Exception as error:
        raise _unreadable(cfg.model_path, error) from None
    for key, detail in refused_features(model_config):
        raise refuse(capability.model_refusal(key, cfg.model_path, detail))
    heads, ranks = model_config.get_total_num_kv_heads(), cfg.tp_size
    if heads % ranks and ranks % heads:
        raise refuse(
            f"oscar: --kv-quant oscar needs a --tp-size that divides the {heads} KV heads of {cfg.model_path} or is a multiple "
            f"of them, got --tp-size {ranks}; change --tp-size, or serve with --kv-quant none"
        )
    for name in ("oscar_sink_tokens", "oscar_recent_tokens"):
        value = getattr(server_args, name)
        if value is not None and value > model_config.context_len:
            raise refuse(
                f"oscar: {_flag(name)} {value} is more than the context length of {model_config.context_len} tokens, so "
                "every token would stay in 16 bits; give a smaller window, or serve with --kv-quant none"
            )


def _check_machine(device: str, kernels: str | None) -> None:
    import torch

    kind = "rocm" if device == "cuda" and torch.version.hip else device
    if (sentence := capability.hardware_refusal(kind)) is not None:
        raise refuse(sentence)
    if kind != "cpu" and kernels == "cpu":
        raise refuse(f"oscar: --oscar-kernels cpu, the C++ library, does not run on {kind}; drop it, or {capability.ON_CPU}")
    if kind == "cuda" and kernels != "reference":
        major, minor = torch.cuda.get_device_capability()
        sentence = capability.architecture_refusal(f"sm_{major}{minor}", torch.cuda.get_device_name())
        if sentence is not None:
            raise refuse(sentence)
    if kind == "cpu" and not _on_our_platform():
        raise refuse(
            "oscar: --kv-quant oscar runs on the CPU only on its own platform, and another one was chosen when sglang was "
            "imported; unset SGLANG_USE_CPU_ENGINE, or give --device cpu on the command line (from Python, hide the GPUs "
            'with CUDA_VISIBLE_DEVICES="")'
        )


def _on_our_platform() -> bool:
    from sglang.srt.platforms import current_platform

    return type(current_platform).__name__ == "OscarCpuPlatform"


def refused_features(model_config: Any) -> list[tuple[str, str]]:
    """The features of a model that `oscar.support` refuses.

    Args:
        model_config: SGLang's `ModelConfig`.
    Returns:
        (key of `capability.MODEL_FEATURES`, what was found), the most telling first; empty if the model is served.
    """
    text = model_config.hf_text_config
    found: list[tuple[str, str]] = []

    def add(key: str, present: Any, detail: str = "") -> None:
        if present:
            found.append((key, detail))

    kind = model_config.attention_arch.name
    add("encoder_decoder", model_config.is_encoder_decoder)
    add("not_generative", not model_config.is_generation)
    add("multimodal", model_config.is_multimodal)
    add("mla", kind == "MLA", f"kv_lora_rank={getattr(text, 'kv_lora_rank', None)}")
    add("linear_attention", kind == "SSM" or _is_hybrid_linear(model_config))
    add("attention_sinks", model_config.has_attention_sinks)
    names = ("index_topk", "compress_ratios", "sparse_attention_config", "sparse_config", "dsa_config")
    sparse = [name for name in names if getattr(text, name, None)]
    add("sparse_attention", sparse, ", ".join(sparse))
    window = _sliding_window(model_config)
    add("sliding_window", window, window)
    shared = getattr(text, "num_kv_shared_layers", 0)
    add("shared_kv_layers", shared, f"num_kv_shared_layers={shared}")
    sizes = [model_config.head_dim, model_config.swa_head_dim, getattr(text, "global_head_dim", None)]
    sizes = sorted({size for size in sizes if size})
    add("several_head_sizes", len(sizes) > 1, f"head_dim {' and '.join(map(str, sizes))}")
    add("alibi", getattr(model_config, "use_alibi", False) or getattr(text, "alibi", False))
    add("logit_cap", getattr(text, "attn_logit_softcapping", None))
    try:
        heads = model_config.get_total_num_kv_heads()
    except Exception:
        heads = None
    add("unreadable_geometry", not heads or not model_config.head_dim, f"KV heads {heads}, head_dim {model_config.head_dim}")
    for name in ("head_dim", "v_head_dim"):
        size = getattr(model_config, name)
        add("head_dim", size and size % 4, f"{name}={size}")
    return found


def _is_hybrid_linear(model_config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def _sliding_window(model_config: Any) -> str:
    """What says that some layer attends to a window only, or ""."""
    text = model_config.hf_text_config
    kinds = {kind for kind in getattr(text, "layer_types", None) or () if "sliding" in kind or "chunked" in kind}
    if kinds:
        return f"layer_types has {', '.join(sorted(kinds))}"
    if model_config.is_hybrid_swa:
        return "hybrid sliding-window architecture"
    if model_config.attention_chunk_size:
        return f"attention_chunk_size={model_config.attention_chunk_size}"
    window = model_config.sliding_window_size
    if window and window < model_config.context_len and getattr(text, "use_sliding_window", True):
        return f"sliding_window={window}"
    return ""


# CPU


def declare_cpu_backend(server_args: Any) -> None:
    """Choose `torch_native` on our CPU platform where the user chose nothing; SGLang would take `intel_amx`."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if resolving_view(server_args).device != "cpu" or not _on_our_platform():
        return
    if server_args.attention_backend is None:
        declare_resolution(server_args, SOURCE, attention_backend="torch_native")


def bind_cpu_threads(server_args: Any) -> None:
    """Give every rank its own cores through SGLANG_CPU_OMP_THREADS_BIND where SGLang would stop: more ranks than NUMA nodes.

    What the user set is left alone. Workers inherit the variable.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.oscar.cpu import platform

    cfg = resolving_view(server_args)
    if cfg.device != "cpu" or not _on_our_platform() or os.environ.get(platform.BIND):
        return
    ranks = cfg.dp_size * cfg.tp_size * cfg.pp_size
    if ranks > platform.numa_nodes():
        os.environ[platform.BIND] = platform.cores_by_rank(ranks)
        # Without sgl_kernel SGLang binds nothing; ranks that each start a thread a core would fight for them.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))


# Settings


def declare_settings(server_args: Any) -> None:
    """Check upstream, find or make the artifact, and declare backend, windows and artifact for the workers.

    Raises:
        OscarRefusal: the artifact is unusable or cannot be made, or the model's own defaults rule OSCAR out.
        UpstreamMismatch: the installed SGLang is not the one we hook.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
    from sglang.srt.oscar import upstream

    cfg = resolving_view(server_args)
    if cfg.kv_quant != "oscar":
        return
    try:
        upstream.check()
    except upstream.UpstreamMismatch as error:
        raise refuse(str(error)) from None
    _check_plugin()
    for option in capability.SERVER_OPTIONS:
        value = getattr(cfg, option.field)
        if option.allowed and value not in option.allowed and not option.field.endswith("attention_backend"):
            raise refuse(f"{capability.option_refusal(option, value)} (set by SGLang for {cfg.model_path})")
    artifact_path, artifact = resolve_artifact(server_args)
    sinks = _first(cfg.oscar_sink_tokens, artifact.sink_tokens, DEFAULT_SINK_TOKENS)
    recent = _first(cfg.oscar_recent_tokens, artifact.recent_tokens, DEFAULT_RECENT_TOKENS)
    if sinks == 0 or recent == 0:
        logger.warning(
            "oscar: windows of %d first and %d newest tokens in 16 bits; quality at 2 bits depends on both "
            "(defaults %d and %d)",
            sinks,
            recent,
            DEFAULT_SINK_TOKENS,
            DEFAULT_RECENT_TOKENS,
        )
    codec = cfg.oscar_codec or "int2"
    if codec == "lossless":
        logger.warning("oscar: --oscar-codec lossless is for debugging: the KV cache takes as much memory as in 16 bits")
    kernels = cfg.oscar_kernels or "auto"
    graphs = with_phase(cfg.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
    if cfg.device != "cuda" or kernels == "reference" or codec == "lossless" or cfg.oscar_debug_checks:
        graphs = with_phase(graphs, Phase.DECODE, backend=Backend.DISABLED)
    elif graphs[Phase.DECODE].backend == Backend.BREAKABLE:
        raise refuse(
            "oscar: --kv-quant oscar does not go with breakable CUDA graphs in decode: the plan of a step is part of the "
            "graph; use full ones (the default) or --disable-cuda-graph, or " + capability.OFF
        )
    declare_resolution(
        server_args,
        SOURCE,
        attention_backend="oscar",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        cuda_graph_config=graphs,
        oscar_artifact=str(artifact_path),
        oscar_sink_tokens=sinks,
        oscar_recent_tokens=recent,
        oscar_calibrate=cfg.oscar_calibrate or "auto",
        oscar_codec=codec,
        oscar_kernels=kernels,
    )
    context = model_config_of(server_args).context_len
    logger.info(
        "oscar: 2-bit KV cache with artifact %s (method %s), %d sink and %d recent tokens of at most %d in 16 bits",
        artifact_path,
        artifact.method,
        sinks,
        recent,
        context,
    )


def _check_plugin() -> None:
    """Refuse if `plugin.register` failed: SGLang logs that and would go on to workers that do not know the backend."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins

    load_plugins()  # does nothing the second time; benchmarks resolve without it
    if "oscar" not in ATTENTION_BACKENDS:
        raise refuse(
            "oscar: the plugin of oscar-kv did not load in this process (if it failed, its error is above); reinstall it, "
            "and let SGLANG_PLUGINS, if set, name oscar too"
        )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def resolve_artifact(server_args: Any) -> tuple[Path, Any]:
    """The artifact to serve with: the one given, else beside the weights, else in the cache, else calibrated now.

    Returns:
        Its path and the loaded `oscar.format.artifact.Artifact`, checked against the model.
    Raises:
        OscarRefusal: unusable, missing with --oscar-calibrate never, or calibration failed.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    from oscar.errors import OscarError
    from oscar.format import artifact
    from oscar.format.identity import ModelIdentity

    cfg = resolving_view(server_args)
    folder = local_model(cfg.model_path, cfg.revision)
    try:
        identity = ModelIdentity.from_path(folder)
        path = Path(cfg.oscar_artifact) if cfg.oscar_artifact is not None else artifact.find(folder, identity)
        if path is not None and cfg.oscar_calibrate_text is not None:
            logger.warning("oscar: --oscar-calibrate-text is not used: %s is there already", path)
        if path is None:
            path = Path(artifact.cache_path(identity))
            command = calibrate_command(folder, path, cfg.oscar_calibrate_text)
            if cfg.oscar_calibrate == "never":
                raise refuse(
                    f"oscar: no artifact for {cfg.model_path}: none was given, none lies beside the weights and {path} does "
                    f"not exist; run `{shlex.join(command)}`, or drop --oscar-calibrate never"
                )
            calibrate(cfg.model_path, path, command)
        return path, artifact.load(path, identity, native_layers=cfg.oscar_allow_native_layers)
    except OscarError as error:
        sentence = str(error)
        raise refuse(sentence if sentence.startswith("oscar") else f"oscar: {sentence}") from None


def local_model(model_path: str, revision: str | None = None) -> str:
    """The folder of a model; a Hub name is looked up in the local cache, else downloaded as SGLang would a moment later."""
    if os.path.exists(model_path):
        return model_path
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return snapshot_download(model_path, revision=revision, allow_patterns=patterns)
    except Exception as error:
        raise _unreadable(model_path, error) from None


def calibrate_command(model_folder: str, output: Path, text: str | None) -> list[str]:
    """The command line that makes the artifact."""
    command = [sys.executable, "-m", "oscar", "calibrate", "--model", str(model_folder), "--output", str(output)]
    return [*command, "--text", text] if text else command


def calibrate(model_path: str, output: Path, command: list[str]) -> None:
    """Run the calibration in a process of its own, so that its memory is free again before the server takes its share.

    Its progress bar and messages go to stderr.

    Raises:
        OscarRefusal: the folder cannot be written, has too little space, or the command failed.
    """
    _check_room(output)
    logger.info("oscar: no artifact for %s yet; calibrating once, then kept as %s", model_path, output)
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False).returncode
    except OSError as error:
        raise refuse(f"oscar: calibration of {model_path} did not start: {error}") from None
    if code != 0 or not output.is_file():
        happened = f"ended with exit code {code}" if code else f"wrote no {output}"
        raise refuse(
            f"oscar: calibration of {model_path} {happened} (its message is above); run it alone with "
            f"`{shlex.join(command)}`, or give --oscar-artifact"
        )


def _check_room(output: Path) -> None:
    folder = output.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise refuse(
            f"oscar: cannot make the cache folder {folder} ({error.strerror}); calibrate to another place with "
            "`oscar calibrate --output FILE` and give --oscar-artifact FILE"
        ) from None
    if not writable or free < FREE_SPACE:
        found = f"{free // 2**20} MiB are free" if writable else "it is not writable"
        raise refuse(
            f"oscar: the cache folder {folder} needs {FREE_SPACE // 2**20} MiB for the artifact, but {found}; make room, or "
            "calibrate to another place with `oscar calibrate --output FILE` and give --oscar-artifact FILE"
        )
