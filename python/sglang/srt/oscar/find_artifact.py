"""The artifact to serve with: the one given, the one beside the weights, the one in the cache, or one that is made now."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang.srt.oscar.refusal import OscarRefusal, refuse, unreadable

from oscar.errors import OscarError
from oscar.format import artifact as artifacts
from oscar.format.identity import OLD_ARTIFACT_NAME, ModelIdentity

logger = logging.getLogger(__name__)

FREE_SPACE = 256 * 2**20
"""Bytes that must be free where a calibrated artifact is written: the artifacts of the models tried take 1 to 80 MB."""
HELD_BY_ONE_CARD = 0.7
"""Part of a card's memory that the weights may take for a calibration in Transformers; activations and sums take the rest."""


def find_artifact(server_args: Any) -> tuple[Path, artifacts.Artifact]:
    """Find the artifact, or calibrate the model if there is none.

    Args:
        server_args: SGLang's `ServerArgs`, while it resolves.
    Returns:
        Its path and the loaded artifact, checked against the model as it will be served, overrides of its config included.
    Raises:
        OscarRefusal: unusable, where SGLang would load it as weights, missing with --oscar-calibrate never, or calibration
            failed.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    folder = local_model(cfg.model_path, cfg.revision, cfg.download_dir)
    try:
        identity = ModelIdentity.from_path(folder, json.loads(cfg.json_model_override_args or "{}"))
        if (old := Path(folder) / OLD_ARTIFACT_NAME).is_file():
            artifacts.check_place(old)
        path = Path(cfg.oscar_artifact) if cfg.oscar_artifact is not None else artifacts.find(folder, identity)
        if path is not None:
            if path.resolve().parent == Path(folder).resolve():
                artifacts.check_place(path)
            if cfg.oscar_calibrate_text is not None:
                logger.warning("oscar: --oscar-calibrate-text is not used: %s is there already", path)
        else:
            path = Path(artifacts.cache_path(identity))
            command = calibrate_command(folder, path, cfg)
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


def local_model(model_path: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """The folder of a model; a Hub name is looked up in the local cache, else downloaded as SGLang would a moment later.

    Args:
        model_path, revision, download_dir: as SGLang has them; the last is where it keeps models instead of the Hub's cache.
    """
    if os.path.exists(model_path):
        return model_path
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "*.kvq"]
    other_copies = ["original/*", "consolidated*"]  # of the same weights, which SGLang does not read
    try:
        return snapshot_download(
            model_path, revision=revision, cache_dir=download_dir, allow_patterns=patterns, ignore_patterns=other_copies
        )
    except Exception as error:
        raise unreadable(model_path, error) from None


def calibrate_command(model_folder: str, output: Path, cfg: Any) -> list[str]:
    """The command line that makes the artifact of a model as the server will run it.

    Args:
        model_folder: model folder.
        output: the artifact file to write.
        cfg: the server's options, while they resolve.
    """
    command = [sys.executable, "-m", "oscar", "calibrate", "--model", str(model_folder), "--output", str(output)]
    if cfg.oscar_calibrate_text:
        command += ["--text", cfg.oscar_calibrate_text]
    if (cfg.json_model_override_args or "{}") != "{}":
        command += ["--json-model-override-args", cfg.json_model_override_args]
    if cfg.trust_remote_code:
        command.append("--trust-remote-code")
    if not needs_sglang(model_folder, cfg):
        return [*command, "--device", f"cuda:{cfg.base_gpu_id}" if cfg.device == "cuda" else cfg.device]
    engine = {"base_gpu_id": cfg.base_gpu_id, "gpu_id_step": cfg.gpu_id_step, "device": cfg.device}
    if cfg.quantization is not None:
        engine["quantization"] = cfg.quantization
    if cfg.mem_fraction_static is not None:
        engine["mem_fraction_static"] = cfg.mem_fraction_static
    return [*command, "--backend", "sglang", "--tp", str(cfg.tp_size), "--engine-args", json.dumps(engine)]


def needs_sglang(model_folder: str, cfg: Any) -> bool:
    """Whether SGLang has to run the model for its calibration: the weights are quantized, for which Transformers needs packages
    of its own, or the server splits over several cards what one card cannot hold."""
    config = json.loads((Path(model_folder) / "config.json").read_text(encoding="utf-8"))
    if cfg.quantization is not None or config.get("quantization_config"):
        return True
    if cfg.device != "cuda" or cfg.tp_size == 1:
        return False
    weights = sum(file.stat().st_size for file in Path(model_folder).glob("*.safetensors"))
    return weights > HELD_BY_ONE_CARD * card_bytes(cfg.base_gpu_id)


def card_bytes(index: int) -> int:
    """Bytes of memory of one card."""
    import torch

    return torch.cuda.get_device_properties(index).total_memory


def calibrate(model_path: str, output: Path, command: list[str]) -> None:
    """Run the calibration in a process of its own, so that its memory is free again before the server takes its share.

    The progress bar and the messages of the calibration go to stderr. Of several servers that start at once, one calibrates
    and the others wait for its artifact.

    Args:
        model_path: as the user wrote it, for the sentences.
        output: the artifact file that the command writes.
        command: as `calibrate_command` made it.
    Raises:
        OscarRefusal: the folder cannot be written, has too little space, or the command failed.
    """
    _check_room(output)
    with _alone(model_path, output):
        if output.is_file():
            return
        logger.info("oscar: no artifact for %s yet; calibrating once, then kept as %s", model_path, output)
        try:
            # 2 is stderr, also in notebooks, whose sys.stderr is no file. Without PYTHONSAFEPATH a folder `oscar` in the
            # working directory would be taken for the package.
            environment = os.environ | {"PYTHONSAFEPATH": "1"}
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, env=environment, check=False).returncode
        except OSError as error:
            raise refuse(f"oscar: calibration of {model_path} did not start: {error}") from None
    if code != 0 or not output.is_file():
        happened = f"ended with exit code {code}" if code else f"wrote no {output}"
        raise refuse(
            f"oscar: calibration of {model_path} {happened} (its message is above); run it alone with "
            f"`{shlex.join(command)}`, or give --oscar-artifact"
        )


@contextmanager
def _alone(model_path: str, output: Path) -> Iterator[None]:
    """Hold the lock on an artifact that is being made; the system frees it however its holder ends."""
    with open(output.with_name(f"{output.name}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("oscar: another server calibrates %s; waiting until it has written %s", model_path, output)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            logger.warning("oscar: cannot lock %s (%s); another server may calibrate too", file.name, error.strerror)
        yield


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
