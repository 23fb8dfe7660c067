"""Capture inside SGLang: `python -m sglang.srt.oscar.capture FOLDER`, started by `oscar calibrate --backend sglang`.

The engine serves the sequences of FOLDER/request.safetensors, with its own cache and kernels, and a forward hook on every
attention layer (an upstream flag, --forward-hooks) adds what it sees to sums on the device: statistics, or the errors of
FOLDER/artifact.safetensors if there is one. Nothing else is counted:

    FOLDER/counting   while this file exists, prefill tokens are counted (it names their source); it does not while the engine
                      starts and warms up
    FOLDER/finish     the next forward pass makes every rank write FOLDER/rank-{rank}.safetensors

The radix cache and graphs are off: a cached prefix and a replayed graph would hide tokens from the hook. The reader compares
the number of tokens counted with the number sent, rank by rank and layer by layer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from oscar.artifact import kv_heads_of_rank, load
from oscar.capture import LayerCapture
from oscar.heldout import LayerErrorSums
from oscar.statistics import MomentSums, NonFiniteError

HOOKS = [
    {
        "name": "oscar-capture",
        "target_modules": ["*attn*"],
        "hook_factory": "sglang.srt.oscar.capture:factory",
    }
]


class Capture:
    """The forward hook of one process: statistics, or errors where the folder holds an artifact.

    Args:
        folder: where the two switches are and the sums go.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        file = folder / "artifact.safetensors"
        self.artifact = load(file) if file.exists() else None
        self.layers: dict[int, MomentSums] = {}
        self.errors: dict[str, dict[int, LayerErrorSums]] = {}
        self.counts: dict[int, int] = {}
        self.written = False

    def __call__(self, module, arguments, output) -> None:
        """Count one attention call in, or write. Modules that are not attention layers are left alone."""
        from sglang.srt.layers.radix_attention import RadixAttention

        if not isinstance(module, RadixAttention):
            return
        if (self.folder / "finish").exists():
            self.write()
        elif (self.folder / "counting").exists():
            self.count(module, *arguments[:4], output)

    def count(self, module, q, k, v, forward_batch, output) -> None:
        """Take the real prefill tokens of one call; padding lies behind them."""
        if not forward_batch.forward_mode.is_extend() or k is None:
            return
        n, i = forward_batch.extend_num_tokens, module.layer_id
        q = q.reshape(-1, module.tp_q_head_num, module.qk_head_dim)[:n]
        k = k.reshape(-1, module.tp_k_head_num, module.qk_head_dim)[:n]
        v = v.reshape(-1, module.tp_v_head_num, module.v_head_dim)[:n]
        output = output.reshape(-1, module.tp_q_head_num, module.v_head_dim)[:n]
        try:
            if self.artifact is None:
                self.layers.setdefault(i, MomentSums(i)).add(q, k, v, output)
            else:
                self.measure(module, q, k, v, output)
        except NonFiniteError as error:
            (self.folder / "error").write_text(str(error))
        self.counts[i] = self.counts.get(i, 0) + n

    def measure(self, module, q, k, v, output) -> None:
        """Compare one whole sequence, [num_tokens, heads, dim] each, with what the artifact makes of it."""
        layers = self.errors.setdefault((self.folder / "counting").read_text(), {})
        if (sums := layers.get(module.layer_id)) is None:
            a, ranks = self.artifact, get_tensor_model_parallel_world_size()
            heads = kv_heads_of_rank(a.model.num_kv_heads, get_tensor_model_parallel_rank(), ranks)
            transforms = a.layers[module.layer_id].of_heads(heads)
            sums = LayerErrorSums(transforms, a.k_format, a.v_format, a.sink_tokens, a.recent_tokens)
            layers[module.layer_id] = sums
        window = module.sliding_window_size
        capture = LayerCapture(
            layer_id=module.layer_id,
            q=q.transpose(0, 1).unsqueeze(0),
            k=k.transpose(0, 1).unsqueeze(0),
            v=v.transpose(0, 1).unsqueeze(0),
            output=output.unsqueeze(0),
            real=torch.ones(1, q.shape[0], dtype=torch.bool, device=q.device),
            sm_scale=module.scaling,
            sliding_window=window + 1 if window >= 0 else None,  # SGLang counts the keys before a query
            logit_cap=module.logit_cap or None,
        )
        sums.add(capture)

    def write(self) -> None:
        """Write this rank's sums, once."""
        if self.written:
            return
        self.written = True
        tensors = {f"layers.{i}.{name}": x.cpu() for i, layer in self.layers.items() for name, x in layer.sums.items()}
        for source, layers in self.errors.items():
            for i, sums in layers.items():
                tensors |= {f"{source}.{i}.{n}": torch.tensor(p, dtype=torch.float64) for n, p in sums.sums.items()}
        path = self.folder / f"rank-{get_tensor_model_parallel_rank()}.safetensors"
        save_file(tensors, f"{path}.part", {"counts": json.dumps(self.counts)})
        Path(f"{path}.part").rename(path)


def factory(config: dict) -> Capture:
    """What --forward-hooks calls in every model process."""
    return Capture(Path(config["folder"]))


def main(folder: Path) -> int:
    """Serve the request of this folder. Returns the exit code."""
    import sglang

    with safe_open(folder / "request.safetensors", "pt") as file:
        settings, sources = (json.loads(file.metadata()[name]) for name in ("engine", "sources"))
        sequences = [file.get_tensor(f"sequence.{j}").tolist() for j in range(len(file.keys()))]
    if (folder / "artifact.safetensors").exists():
        settings["chunked_prefill_size"] = -1  # errors are measured on whole sequences
    hooks = [hook | {"config": {"folder": str(folder)}} for hook in HOOKS]
    engine = sglang.Engine(
        **{"skip_tokenizer_init": True, "log_level": "error"} | settings,
        forward_hooks=hooks,
        disable_radix_cache=True,
        disable_cuda_graph=True,
    )
    try:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        for sequence, source in zip(sequences, sources, strict=True):
            (folder / "counting").write_text(source)
            engine.generate(input_ids=[sequence], sampling_params=sampling)
        (folder / "counting").unlink()
        (folder / "finish").touch()
        engine.generate(input_ids=[sequences[0][:2]], sampling_params=sampling)
    finally:
        engine.shutdown()
    if (folder / "error").exists():
        print((folder / "error").read_text(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(Path(sys.argv[1])))
