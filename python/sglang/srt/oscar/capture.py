"""Capture inside SGLang: `python -m sglang.srt.oscar.capture FOLDER`, started by `oscar calibrate --backend sglang`.

The engine serves the sequences of FOLDER/request.safetensors, with its own cache and kernels, and a forward hook on every
attention layer (an upstream flag, --forward-hooks) adds what it sees to sums on the device: statistics, the surrogate's, or
errors under FOLDER/artifact.safetensors (`oscar.calibration.run_sglang` lists the tasks). Nothing else is counted:

    FOLDER/counting   while this file exists, prefill tokens are counted (it names their source); it does not while the engine
                      starts and warms up
    FOLDER/finish     the next forward pass makes every rank write FOLDER/rank-{rank}.safetensors
    FOLDER/served     tokens served so far, for the reader's progress bar

The radix cache and graphs are off: a cached prefix and a replayed graph would hide tokens from the hook. The reader compares
the number of tokens counted with the number sent, rank by rank and layer by layer.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from oscar.calibration.clip_search import ClipSearch
from oscar.calibration.heldout import LayerErrorSums
from oscar.calibration.run_transformers import LayerCapture, output_weight
from oscar.errors import OscarError
from oscar.format.artifact import load
from oscar.format.side import kv_heads_of_rank
from oscar.methods.statistics import MomentSums, SurrogateSums, output_moment

HOOKS = [
    {
        "name": "oscar-capture",
        "target_modules": ["*attn*"],
        "hook_factory": "sglang.srt.oscar.capture:factory",
    }
]


class Capture:
    """The forward hook of one process.

    Args:
        folder: where the request and the two switches are and the sums go.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        with safe_open(folder / "request.safetensors", "pt") as file:
            self.task = file.metadata()["task"]
            self.q_moments = {key: file.get_tensor(key) for key in file.keys() if key.startswith("layers.")}
        file = folder / "artifact.safetensors"
        self.artifact = load(file, native_layers=True) if file.exists() else None
        self.sums: dict[tuple[str, int], MomentSums | SurrogateSums | ClipSearch | LayerErrorSums] = {}
        self.output_weights: dict[int, torch.Tensor] = {}
        self.counts: dict[int, int] = {}
        self.written = False

    def __call__(self, module, arguments, output) -> None:
        """Count one attention call in, or write. Modules that neither are attention nor hold it are left alone."""
        from sglang.srt.layers.radix_attention import RadixAttention

        if isinstance(module, RadixAttention):
            if (self.folder / "finish").exists():
                self.write()
            elif (self.folder / "counting").exists():
                self.count(module, *arguments[:4], output)
        else:
            for child in module.children():
                if isinstance(child, RadixAttention) and child.layer_id not in self.output_weights:
                    weight = output_weight(module, child.tp_q_head_num * child.v_head_dim)
                    if weight is not None:
                        self.output_weights[child.layer_id] = weight

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
            sums = self.sums_of(i)
            if isinstance(sums, MomentSums):
                sums.add(q, k, v, output)
                sums.attend(q, k, v, output, **self.whole_sequence(module, q, k, v, output).how)
            elif isinstance(sums, SurrogateSums):
                sums.add(k, v)
            elif sums is not None:
                sums.add(self.whole_sequence(module, q, k, v, output))
        except OscarError as error:
            (self.folder / "error").write_text(str(error))
        self.counts[i] = self.counts.get(i, 0) + n

    def sums_of(self, layer_id: int):
        """What this layer's tokens are added to; None for a layer that the artifact leaves out."""
        source = (self.folder / "counting").read_text() if self.task == "errors" else ""
        if (source, layer_id) not in self.sums:
            if self.task == "statistics":
                made = MomentSums(layer_id)
            elif self.task == "surrogate":
                moment = self.q_moments[f"layers.{layer_id}"]
                made = SurrogateSums(layer_id, moment[self.heads(moment.shape[0])])
            else:
                made = self.compared(layer_id)
            self.sums[source, layer_id] = made
        return self.sums[source, layer_id]

    def compared(self, layer_id: int) -> ClipSearch | LayerErrorSums | None:
        """Sums of errors of this rank's heads under the artifact."""
        a = self.artifact
        if layer_id not in a.layers:
            return None
        kind = ClipSearch if self.task == "clip" else LayerErrorSums
        transforms = a.layers[layer_id].of_heads(self.heads(a.model.num_kv_heads))
        return kind(transforms, a.k_format, a.v_format, a.sink_tokens, a.recent_tokens)

    @staticmethod
    def heads(num_kv_heads: int) -> slice:
        """KV heads of this rank among the model's."""
        return kv_heads_of_rank(num_kv_heads, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())

    def whole_sequence(self, module, q, k, v, output) -> LayerCapture:
        """One sequence, [num_tokens, heads, dim] each, as the offline capture gives it."""
        window = module.sliding_window_size
        return LayerCapture(
            layer_id=module.layer_id,
            q=q.transpose(0, 1).unsqueeze(0),
            k=k.transpose(0, 1).unsqueeze(0),
            v=v.transpose(0, 1).unsqueeze(0),
            output=output.unsqueeze(0),
            real=torch.ones(1, q.shape[0], dtype=torch.bool, device=q.device),
            sm_scale=module.scaling,
            sliding_window=window + 1 if window >= 0 else None,  # SGLang counts the keys before a query
            logit_cap=module.logit_cap or None,
            output_weight=self.output_weights.get(module.layer_id),
        )

    def write(self) -> None:
        """Write this rank's sums, once."""
        if self.written:
            return
        self.written = True
        tensors = {}
        for (source, i), sums in self.sums.items():
            if isinstance(sums, MomentSums):
                tensors |= {f"layers.{i}.{name}": x.cpu() for name, x in sums.sums.items()}
                if i in self.output_weights:
                    heads, dim = sums.sums["v_mean"].shape
                    tensors[f"layers.{i}.output_moment"] = output_moment(self.output_weights[i], heads, dim)
            elif isinstance(sums, SurrogateSums):
                tensors[f"layers.{i}.v_surrogate_moment"] = sums.finish()
            elif isinstance(sums, ClipSearch):
                tensors |= {f"layers.{i}.{side}": errors for side, errors in sums.errors.items()}
            elif sums is not None:
                tensors |= {f"{source}.{i}.{n}": torch.tensor(p, dtype=torch.float64) for n, p in sums.sums.items()}
        path = self.folder / f"rank-{get_tensor_model_parallel_rank()}.safetensors"
        save_file(tensors, f"{path}.part", {"counts": json.dumps(self.counts)})
        Path(f"{path}.part").rename(path)


def factory(config: dict) -> Capture:
    """What --forward-hooks calls in every model process."""
    return Capture(Path(config["folder"]))


def write(folder: Path, settings: dict, openings: list[list[int]], num_parts: int, length: int) -> int:
    """Let the model write `num_parts` texts of `length` tokens from these openings. Returns the exit code."""
    import sglang

    engine = sglang.Engine(**{"skip_tokenizer_init": True, "log_level": "error"} | settings)
    following = itertools.cycle(openings)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    try:
        while short := [part for part in parts if len(part) < length]:
            for part in short:
                part += next(following)
            asked = [part for part in short if len(part) < length]
            sampling = [{"temperature": 1.0, "max_new_tokens": length - len(part)} for part in asked]
            answers = engine.generate(input_ids=[list(part) for part in asked], sampling_params=sampling) if asked else []
            for part, answer in zip(asked, answers, strict=True):
                part += answer["output_ids"]
            (folder / "served").write_text(str(sum(min(length, len(part)) for part in parts)))
    finally:
        engine.shutdown()
    save_file({"text": torch.tensor([part[:length] for part in parts])}, folder / "text.safetensors")
    return 0


def main(folder: Path) -> int:
    """Serve the request of this folder. Returns the exit code."""
    import sglang

    with safe_open(folder / "request.safetensors", "pt") as file:
        settings, sources = (json.loads(file.metadata()[name]) for name in ("engine", "sources"))
        sequences = [file.get_tensor(f"sequence.{j}").tolist() for j in range(len(sources))]
        about = file.metadata()
    if about["task"] == "write":
        return write(folder, settings, sequences, int(about["parts"]), int(about["length"]))
    # Errors are measured on whole sequences, and so are moments weighted by attention: a call with a later part lacks the keys
    # before it, and those of first parts alone would be of too few positions.
    settings["chunked_prefill_size"] = -1
    hooks = [hook | {"config": {"folder": str(folder)}} for hook in HOOKS]
    engine = sglang.Engine(
        **{"skip_tokenizer_init": True, "log_level": "error"} | settings,
        forward_hooks=hooks,
        disable_radix_cache=True,
        disable_cuda_graph=True,
    )
    try:
        sampling, served = {"max_new_tokens": 1, "temperature": 0}, 0
        # Not counted: the module around an attention layer, which has W_O, is first seen after that layer's first call.
        engine.generate(input_ids=[sequences[0][:2]], sampling_params=sampling)
        for sequence, source in zip(sequences, sources, strict=True):
            (folder / "counting").write_text(source)
            engine.generate(input_ids=[sequence], sampling_params=sampling)
            served += len(sequence)
            (folder / "served").write_text(str(served))
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
