"""The artifact to serve with: the one given, the one beside the weights, the one in the cache, or one that is made now."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from sglang.srt.oscar.refusal import OscarRefusal, refuse, unreadable

from oscar.errors import OscarError
from oscar.format import artifact as artifacts
from oscar.format.identity import ModelIdentity

logger = logging.getLogger(__name__)

FREE_SPACE = 256 * 2**20
"""Bytes that must be free where a calibrated artifact is written: the artifacts of the models tried take 1 to 80 MB."""


def find_artifact(server_args: Any) -> tuple[Path, artifacts.Artifact]:
    """Find the artifact, or calibrate the model if there is none.

    Args:
        server_args: SGLang's `ServerArgs`, while it resolves.
    Returns:
        Its path and the loaded artifact, checked against the model.
    Raises:
        OscarRefusal: unusable, missing with --oscar-calibrate never, or calibration failed.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    folder = local_model(cfg.model_path, cfg.revision)
    try:
        identity = ModelIdentity.from_path(folder)
        path = Path(cfg.oscar_artifact) if cfg.oscar_artifact is not None else artifacts.find(folder, identity)
        if path is not None and cfg.oscar_calibrate_text is not None:
            logger.warning("oscar: --oscar-calibrate-text is not used: %s is there already", path)
        if path is None:
            path = Path(artifacts.cache_path(identity))
            command = calibrate_command(folder, path, cfg.oscar_calibrate_text)
            if cfg.oscar_calibrate == "never":
                raise refuse(
                    f"oscar: no artifact for {cfg.model_path}: none was given, none lies beside the weights and {path} does "
                    f"not exist; run `{shlex.join(command)}`, or drop --oscar-calibrate never"
                )
            calibrate(cfg.model_path, path, command)
        return path, artifacts.load(path, identity, native_layers=cfg.oscar_allow_native_layers)
    except OscarRefusal:
        raise
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
        raise unreadable(model_path, error) from None


def calibrate_command(model_folder: str, output: Path, text: str | None) -> list[str]:
    """The command line that makes the artifact.

    Args:
        model_folder: model folder.
        output: the artifact file to write.
        text: text file to calibrate on; None: the model writes its own.
    """
    command = [sys.executable, "-m", "oscar", "calibrate", "--model", str(model_folder), "--output", str(output)]
    return [*command, "--text", text] if text else command


def calibrate(model_path: str, output: Path, command: list[str]) -> None:
    """Run the calibration in a process of its own, so that its memory is free again before the server takes its share.

    The progress bar and the messages of the calibration go to stderr.

    Args:
        model_path: as the user wrote it, for the sentences.
        output: the artifact file that the command writes.
        command: as `calibrate_command` made it.
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
    """Refuse a cache folder that cannot be made, cannot be written or is nearly full."""
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
