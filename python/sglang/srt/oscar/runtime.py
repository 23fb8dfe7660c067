"""What one worker process knows about its 2-bit cache: settings, artifact, formats and sizes, read once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from sglang.srt.oscar.resolve import OscarSettings, settings_of

from oscar import sizing
from oscar.artifact import Artifact, load
from oscar.codec import LosslessFormat, RowFormat
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
    def k_format(self) -> RowFormat | LosslessFormat:
        return LosslessFormat(self.artifact.model.head_dim) if self.lossless else self.artifact.k_format

    @property
    def v_format(self) -> RowFormat | LosslessFormat:
        return LosslessFormat(self.artifact.model.v_head_dim) if self.lossless else self.artifact.v_format

    @property
    def window_dtype(self) -> torch.dtype:
        return torch.float32 if self.lossless else torch.bfloat16

    def bytes_per_token(self, num_layers: int, num_kv_heads: int) -> int:
        """Bytes of one token in the pool on one rank, the slot's map entry included."""
        return sizing.bytes_per_token(num_layers, num_kv_heads, self.k_format, self.v_format)

    def bytes_per_request(self, num_layers: int, num_kv_heads: int) -> int:
        """Bytes that one request slot adds to the windows on one rank."""
        head_dims = self.artifact.model.head_dim, self.artifact.model.v_head_dim
        windows = self.settings.sink_tokens, self.settings.recent_tokens
        return sizing.bytes_per_request(num_layers, num_kv_heads, *head_dims, *windows, self.window_dtype.itemsize)

    def layer_codec(self, layer_id: int, heads: slice, device: str, fold_v: bool) -> LayerCodec:
        """Transforms of one layer for the KV heads of this rank.

        Args:
            layer_id: global layer id.
            heads: KV heads of this rank among the model's.
            device: where the tensors go.
            fold_v: the value transform is already in W_V and W_O, so none is applied to values and outputs.
        """
        layer = self.artifact.layers[layer_id]
        k_transform = layer.k_transform[heads].double()

        def place(tensor, dtype):
            return None if tensor is None else tensor[heads].to(device, dtype).contiguous()

        v_transform = layer.v_transform[heads].double()
        return LayerCodec(
            k_format=self.k_format,
            v_format=self.v_format,
            k_transform=k_transform.to(device),
            # Of an orthogonal transform this is the transform itself, to rounding.
            q_transform=torch.linalg.inv(k_transform).transpose(1, 2).to(device, torch.float32).contiguous(),
            v_transform=None if fold_v else v_transform.to(device),
            v_inverse=None if fold_v else torch.linalg.inv(v_transform).to(device, torch.float32),
            k_clip=place(layer.k_clip, torch.float32),
            v_clip=place(layer.v_clip, torch.float32),
            k_mean=place(layer.k_mean, torch.float64),
            v_mean=place(layer.v_mean, torch.float64),
            k_levels=place(layer.k_levels, torch.float32),
            v_levels=place(layer.v_levels, torch.float32),
            window_dtype=self.window_dtype,
        )


def get_runtime(server_args) -> Runtime | None:
    """The runtime of this process, or None without --kv-quant oscar."""
    settings = settings_of(server_args)
    return None if settings is None else _load(settings)


@functools.lru_cache(maxsize=1)
def _load(settings: OscarSettings) -> Runtime:
    return Runtime(settings, load(settings.artifact_path))
