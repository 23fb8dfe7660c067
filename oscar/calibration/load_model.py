"""A Hugging Face model and its tokenizer for calibration, with one sentence for everything that can go wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from oscar.errors import OscarError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(folder: str | Path, model_config, dtype: str, device: str, trust_remote_code: bool = False):
    """Load a causal language model.

    Args:
        folder: model folder with *.safetensors files.
        model_config: its Hugging Face configuration.
        dtype: a name in DTYPES, or "auto": the checkpoint's own on an accelerator; on CPU float32 if the model then fits
            in half of the machine's memory.
        device: a torch device, or "auto": the accelerator if there is one.
        trust_remote_code: run code that lies beside the weights.
    Returns:
        The model in eval mode on the device.
    Raises:
        OscarError: no such device, or weight files that are damaged or incomplete.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    place = _device(device)
    kind = _dtype(folder, model_config, dtype, place)
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        # Any: with output_loading_info it returns a pair, which its annotation leaves out.
        pair: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=model_config, dtype=kind, output_loading_info=True, trust_remote_code=trust_remote_code
        )
        model, info = pair
    except Exception as error:  # every library below has errors of its own for a damaged file
        raise OscarError(f"{folder}: cannot load the model: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise OscarError(f"{folder}: the weight files lack {missing[0]} and {len(missing) - 1} more; check the download")
    return model.to(place).eval()


def override_config(model_config, overrides: Mapping[str, Any]) -> None:
    """Replace fields of a Hugging Face configuration in place, as SGLang does with --json-model-override-args.

    Args:
        model_config: the model's configuration.
        overrides: RoPE settings and parts of the configuration are merged with what is there, all else is set.
    """
    for name, value in overrides.items():
        current = getattr(model_config, name, None)
        if isinstance(value, Mapping) and hasattr(current, "to_dict"):
            override_config(current, value)
        elif name in ("rope_scaling", "rope_parameters") and isinstance(value, Mapping) and isinstance(current, dict):
            setattr(model_config, name, {**current, **value})
        else:
            setattr(model_config, name, value)


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False):
    """The tokenizer beside the weights, or None where there is none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception:  # whatever a damaged or foreign tokenizer file raises, calibration can do without
        return None


def first_line(error: BaseException) -> str:
    """The error's first line, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OscarError(f"device {name!r}: expected a device that torch can use here: {first_line(error)}") from error
    return device


def _dtype(folder: str | Path, model_config, name: str, device: torch.device) -> torch.dtype:
    own = model_config.get_text_config(decoder=True).dtype or model_config.dtype or torch.float32
    if name != "auto":
        return DTYPES[name]
    if device.type != "cpu" or own == torch.float32:
        return own
    weights = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.float32 if weights / own.itemsize * 4 <= memory / 2 else own
