"""The tokenizer of the embedded model and its chat template."""

from __future__ import annotations

import random

from corpus import Corpus
from settings import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START, MAX_SPAN, SPECIALS, SPLIT_PATTERN, VOCAB_SIZE

from oscar.evaluation import needles


def render_chat(turns: list[tuple[str, str]]) -> str:
    """What `CHAT_TEMPLATE` makes of these (role, content) turns."""
    return "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in turns)


def train_tokenizer(corpus: Corpus):
    """Train the byte-level BPE on the training text and on some needle documents, so that its names are short."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(1)
    facts = [
        needles.fact(name, needles.draw_code(rng)) + " " + needles.question(name)
        for name in needles.draw_names(rng, 2000, held_out=False)
        for _ in range(4)
    ]
    text = [*corpus.prose, *(source[:20_000] for source in corpus.code), "user\nassistant\n", *facts]
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def wrap_tokenizer(tokenizer):
    """The tokenizer as transformers knows it, with the chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_SPAN,
    )
