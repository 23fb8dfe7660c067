"""The options of `--kv-quant oscar`: name, type, default, choices and help of each, and what they resolve to.

Standard library only at import: `entry.py` reads `FLAGS` while `import sglang` runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oscar.config import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS


@dataclass(frozen=True)
class Flag:
    """One option that we add to SGLang's.

    Args:
        name: field of `ServerArgs`.
        type: of the value.
        default: None means "not given", so that an option without --kv-quant oscar can be refused.
        help: what `--help` says.
        choices: values that are allowed; empty: any.
        hidden: no user gives it; it only carries what was resolved to the workers.
    """

    name: str
    type: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    hidden: bool = False

    @property
    def option(self) -> str:
        """How a user writes it, e.g. "--kv-quant"."""
        return "--" + self.name.replace("_", "-")


FLAGS = (
    Flag(
        "kv_quant",
        str,
        "none",
        "How the KV cache is stored. 'none' (default) leaves SGLang as it is; 'oscar' keeps it in 2 bits an element "
        "(2.25 with metadata at head_dim 128), about 7 times the tokens in the same memory.",
        ("none", "oscar"),
    ),
    Flag(
        "oscar_artifact",
        str,
        None,
        "Path of a calibration artifact (.kvq) from `oscar calibrate`. Default: the one beside the model's "
        "weights, else the one in the cache folder, else calibrate before the port opens.",
    ),
    Flag(
        "oscar_sink_tokens",
        int,
        None,
        "Number of first tokens of every sequence that are also kept in 16 bits (default: the number that the artifact "
        f"records, {DEFAULT_SINK_TOKENS} where it records none).",
    ),
    Flag(
        "oscar_recent_tokens",
        int,
        None,
        "Number of newest tokens of every sequence that are also kept in 16 bits (default: the number that the artifact "
        f"records, {DEFAULT_RECENT_TOKENS} where it records none).",
    ),
    Flag(
        "oscar_calibrate",
        str,
        None,
        "What to do when no artifact is found: 'auto' (default) calibrates before the port opens and caches the "
        "result, 'never' stops and prints the command to run.",
        ("auto", "never"),
    ),
    Flag(
        "oscar_calibrate_text",
        str,
        None,
        "Path of a UTF-8 text file to calibrate on. Default: text that the model writes itself.",
    ),
    Flag(
        "oscar_allow_native_layers",
        bool,
        False,
        "Accept an artifact without transforms of some layers (`oscar calibrate --skip-layers`); those layers stay in 16 bits, "
        "and the capacity counts them so.",
    ),
    Flag(
        "oscar_codec",
        str,
        None,
        "For debugging: 'lossless' stores float32 through the same transforms, windows and pages, to tell faults of the path "
        "from quantization loss. It takes twice the memory of a 16-bit cache. Default 'int2'.",
        ("int2", "lossless"),
    ),
    Flag(
        "oscar_kernels",
        str,
        None,
        "For debugging: 'reference' runs plain PyTorch, slowly; 'auto' (default) Triton on a GPU and the C++ library on a CPU; "
        "'triton' and 'cpu' insist on theirs.",
        ("auto", "cpu", "triton", "reference"),
    ),
    Flag(
        "oscar_debug_checks",
        bool,
        False,
        "For debugging: re-encode every 16-bit row that is read and stop on a mismatch with its 2-bit row. Slow.",
    ),
    Flag("oscar_artifact_digest", str, None, "SHA-256 of the artifact that was checked before the port opened.", hidden=True),
)
OPTIONS = {flag.name: flag.option for flag in FLAGS}
"""Field of `ServerArgs` -> how a user writes it."""


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
        kernels: implementation of the operations of `oscar_kernel`: "auto", "cpu", "triton" or "reference".
        artifact_digest: SHA-256 of the file as the launcher checked it; None: it is not compared.
    """

    artifact_path: str
    sink_tokens: int
    recent_tokens: int
    codec: str
    debug_checks: bool
    allow_native_layers: bool
    kernels: str = "auto"
    artifact_digest: str | None = None


def settings_of(server_args: Any) -> OscarSettings | None:
    """The resolved settings, in the launcher or in a worker; None with --kv-quant none.

    Args:
        server_args: SGLang's `ServerArgs`, resolved; the declared values travel inside it.
    """
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
        artifact_digest=resolution_result(server_args, "oscar_artifact_digest"),
    )
