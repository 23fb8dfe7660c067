"""Refuse what the flags and the environment alone rule out, before SGLang looks at the model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from sglang.srt.oscar.flags import FLAGS, OPTIONS
from sglang.srt.oscar.refusal import refuse, unreadable

from oscar import support


def check_flags(server_args: Any) -> None:
    """Refuse what the flags and the environment alone rule out.

    Args:
        server_args: SGLang's `ServerArgs` as it was given: nothing is resolved yet.
    Raises:
        OscarRefusal: the first flag that does not go with --kv-quant oscar, or needs it.
    """
    if server_args.kv_quant == "none":
        _check_unused(server_args)
        return
    for flag in FLAGS:
        value = getattr(server_args, flag.name)
        if flag.choices and value is not None and value not in flag.choices:
            raise refuse(f"oscar: {flag.option} must be one of {', '.join(flag.choices)}, got {value!r}")
    for option in support.REFUSED:
        value = getattr(server_args, option.field)
        if value not in option.allowed:
            raise refuse(support.option_refusal(option, value))
    if os.environ.get("SGLANG_USE_HND_KVCACHE", "").lower() in ("1", "true", "yes", "y"):
        raise refuse(
            "oscar: --kv-quant oscar does not go with SGLANG_USE_HND_KVCACHE=1: 2-bit rows are laid out slot by slot; "
            "unset SGLANG_USE_HND_KVCACHE, or serve with --kv-quant none"
        )
    for name in ("oscar_sink_tokens", "oscar_recent_tokens"):
        value = getattr(server_args, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise refuse(f"oscar: {OPTIONS[name]} must be a number of tokens, 0 or more, got {value!r}")
    for name in ("oscar_artifact", "oscar_calibrate_text"):
        path = getattr(server_args, name)
        if path is not None and not Path(path).is_file():
            found = "is a folder" if Path(path).is_dir() else "does not exist"
            raise refuse(f"oscar: {OPTIONS[name]} must be a file, but {path} {found}")
    if server_args.oscar_calibrate_text is not None:
        _check_text(server_args.oscar_calibrate_text)
    _check_model_path(server_args)


def _check_unused(server_args: Any) -> None:
    """Refuse an option of ours that was given without --kv-quant oscar: it would have no effect, and the backend no pool."""
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if getattr(server_args, name) == "oscar":
            option = support.flag_of(name)
            raise refuse(f"oscar: {option} oscar reads the 2-bit KV cache only; add --kv-quant oscar, or drop {option}")
    for flag in FLAGS[1:]:
        if getattr(server_args, flag.name) != flag.default:
            raise refuse(
                f"oscar: {flag.option} has no effect without --kv-quant oscar; add --kv-quant oscar, or drop {flag.option}"
            )


def _check_text(path: str) -> None:
    """Refuse a calibration text that is empty or not text; reads its first 64 KiB."""
    with open(path, "rb") as file:
        start = file.read(1 << 16)
    if not start.strip():
        raise refuse(f"oscar: --oscar-calibrate-text {path} is empty; give a UTF-8 text file, or drop the flag")
    try:
        # The read may end inside a character; that is no error.
        text = start.decode("utf-8", errors="strict" if len(start) < 1 << 16 else "ignore")
        binary = "\0" in text or len(text.encode()) < len(start) - 3
    except UnicodeDecodeError:
        binary = True
    if binary:
        raise refuse(f"oscar: --oscar-calibrate-text {path} is not UTF-8 text; convert it, or drop the flag")


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
        raise unreadable(model_path, error) from None
