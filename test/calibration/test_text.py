"""Text of any size as sequences, and text that the model writes."""

import pytest
import torch
import transformers

from oscar.calibration import text


def test_model_text_has_its_length_and_is_seeded(make_model, make_tokenizer):
    model, tokenizer = make_model("Qwen3"), make_tokenizer(chat=True)
    texts = [text.from_model(model, tokenizer, 350, 100, seed) for seed in (3, 3, 4)]
    tokens = [torch.cat([s.tokens for s in sequences]) for sequences in texts]
    assert [(len(s.tokens), s.held_out) for s in texts[0]] == [(100, False)] * 3 + [(15, False), (35, True)]
    assert torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[0], tokens[2])
    assert int(tokens[0].max()) < len(tokenizer)  # never an entry that pads the model's vocabulary
    assert sum(len(s.tokens) for s in text.from_model(model, None, 20, 10, 0)) == 20


def test_model_text_is_what_plain_sampling_gives(make_model, make_tokenizer, monkeypatch):
    """The cache that grows by doubling changes nothing but the time."""
    for family in ("Qwen3", "Mistral"):  # Mistral has sliding windows
        model, tokenizer = make_model(family), make_tokenizer()
        ours = text.from_model(model, tokenizer, 200, 200, 0)
        with monkeypatch.context() as patch:
            patch.setattr(text, "_roomy_cache", lambda model: transformers.DynamicCache(config=model.config))
            plain = text.from_model(model, tokenizer, 200, 200, 0)
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(ours, plain, strict=True))


def test_share_keeps_sequences_long_and_holds_a_tenth_out():
    assert text.share(16384, 4096) == [(4096, False)] * 3 + [(2458, False), (1638, True)]
    assert text.share(100, 4096) == [(90, False), (10, True)]
    assert sum(n for n, _ in text.share(131072, 4096)) == 131072
    assert sum(n for n, held_out in text.share(131072, 4096) if held_out) == 13107


@pytest.mark.parametrize("repeats", [5, 100, 60000])
def test_text_files_of_any_size(repeats, tmp_path, make_tokenizer):
    """All of a small file in order; evenly spaced pieces of a large one, never cut inside a character."""
    file, tokenizer = tmp_path / "t.txt", make_tokenizer()
    file.write_text("aé漢😀" * repeats, encoding="utf-8")  # ten bytes, one token each
    taken = text.from_file(file, tokenizer, 1024, 128)
    total = min(1024, 10 * repeats)
    assert [(len(s.tokens), s.held_out) for s in taken] == text.share(total, 128)
    if 10 * repeats <= 1024:
        assert tokenizer.decode(torch.cat([s.tokens for s in taken])) == file.read_text(encoding="utf-8")


def test_text_is_read_in_parts(make_tokenizer, monkeypatch):
    """Cut before spaces, or where there is none; with a tokenizer of bytes nothing shows."""
    tokenizer, words = make_tokenizer(), "some words of a text and averyverylongword to end with"
    monkeypatch.setattr(text, "_PART_CHARS", 9)
    assert tokenizer.decode(text.token_ids(tokenizer, words)) == words
    assert tokenizer.decode(text.token_ids(tokenizer, words, limit=20)) == words[:20]
    assert len(text.token_ids(tokenizer, "")) == 0
