"""What one worker process knows about its 2-bit cache: settings, artifact, formats and sizes, read once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from sglang.srt.oscar.flags import OscarSettings, settings_of

from oscar.errors import OscarError
from oscar.format import sizing
from oscar.format.artifact import Artifact, load
from oscar.format.codec import LosslessFormat
from oscar.format.sealed_file import file_digest
from oscar.format.sizing import Format
from oscar_kernel import LayerCodec


@dataclass(frozen=True)
class Runtime:
    """Settings and artifact of this process, and every size that follows from them."""

    settings: OscarSettings
    artifact: Artifact

    @property
    def lossless(self) -> bool:
        return self.settings.codec == "lossless"

    @property
    def k_format(self) -> Format:
        """Rows of K in a layer that is not native."""
        return LosslessFormat(self.artifact.model.head_dim) if self.lossless else self.artifact.k_format

    @property
    def v_format(self) -> Format:
        """Rows of V in a layer that is not native."""
        return LosslessFormat(self.artifact.model.v_head_dim) if self.lossless else self.artifact.v_format

    @property
    def window_dtype(self) -> torch.dtype:
        return torch.float32 if self.lossless else torch.bfloat16

    @property
    def native_layers(self) -> list[int]:
        """Layers that stay in 16 bits; with the lossless codec no layer's rows differ from another's."""
        return [] if self.lossless else self.artifact.native_layers

    def formats(self, layer_id: int) -> tuple[Format, Format]:
        """Row formats of K and V of one layer."""
        if layer_id not in self.native_layers:
            return self.k_format, self.v_format
        model = self.artifact.model
        return LosslessFormat(model.head_dim, "bfloat16"), LosslessFormat(model.v_head_dim, "bfloat16")

    def bytes_per_token(self, num_layers: int, num_kv_heads: int) -> int:
        """Bytes of one token in the pool on one rank, the slot's map entry included."""
        return sizing.bytes_per_token(num_layers, num_kv_heads, self.k_format, self.v_format, len(self.native_layers))

    def bits_per_element(self) -> float:
        """Bits of one number of K or V in the pool, mean over layers."""
        share = len(self.native_layers) / self.artifact.model.num_layers
        return sizing.bits_per_element(self.k_format, self.v_format, share)

    def layer_codec(self, layer_id: int, heads: slice, device: str, fold_v: bool) -> LayerCodec:
        """Transforms of one layer for the KV heads of this rank.

        Args:
            layer_id: global layer id.
            heads: KV heads of this rank among the model's.
            device: where the tensors go.
            fold_v: the value transform is already in W_V and W_O, so none is applied to values and outputs.
        """
        layer, model = self.artifact.layers.get(layer_id), self.artifact.model
        if layer is None:  # nothing is done to a native layer's rows
            dtype = "float32" if self.lossless else "bfloat16"
            return LayerCodec.native(heads.stop - heads.start, model.head_dim, model.v_head_dim, dtype, device)
        return LayerCodec.of(layer.of_heads(heads), *self.formats(layer_id), device, fold_v)


def get_runtime(server_args) -> Runtime | None:
    """The runtime of this process, or None without --kv-quant oscar."""
    settings = settings_of(server_args)
    return None if settings is None else _load(settings)


@functools.lru_cache(maxsize=1)
def _load(settings: OscarSettings) -> Runtime:
    if settings.artifact_digest not in (None, file_digest(settings.artifact_path)):
        raise OscarError(
            f"oscar: {settings.artifact_path} was replaced while the server started; start it again, and it takes the new file"
        )
    return Runtime(settings, load(settings.artifact_path, native_layers=settings.allow_native_layers))
