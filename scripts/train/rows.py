"""Training rows of the embedded model: running text, repeats, restated facts and chats."""

from __future__ import annotations

import math
import random
import re

import torch
from corpus import Corpus
from settings import DIGIT_WEIGHT, GAP_SHARE, IM_START, MAX_SPAN, MICRO_BATCH_TOKENS, SPECIALS, VOCAB_SIZE, Stage
from tokens import render_chat
from torch import Tensor

from oscar.evaluation import needles


class RowMaker:
    """Makes training rows: token ids, the loss weights of text and of answers, position ids."""

    def __init__(self, corpus: Corpus, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_of_text, self.im_start, self.im_end = (tokenizer.token_to_id(s) for s in SPECIALS)
        self.digits = {tokenizer.token_to_id(d) for d in "0123456789"}
        self.newline = tokenizer.encode("\n").ids[0]
        self.assistant = tokenizer.encode(IM_START + "assistant\n").ids
        vocab = tokenizer.get_vocab()
        self.pauses = {i for token, i in vocab.items() if token[0] in ".Ċ" or token.endswith("Ċ")}
        self.prose = self._stream(corpus.prose)
        self.code = self._stream(corpus.code)
        sentences = [s for document in corpus.prose for p in document.splitlines() for s in needles.split_sentences(p)]
        self.sentences = list(zip(sentences, (len(e.ids) for e in tokenizer.encode_batch(sentences)), strict=True))
        self.words = sorted({w for s in sentences for w in re.findall(r"\b[a-z]{3,9}\b", s)})

    def _stream(self, documents: list[str]) -> Tensor:
        ids: list[int] = []
        for encoding in self.tokenizer.encode_batch(documents):
            ids += [self.end_of_text, *encoding.ids]
        return torch.tensor(ids, dtype=torch.int32)

    def text_ids(self, rng: random.Random, length: int) -> list[int]:
        """A run of running text, three fifths of it code."""
        stream = self.code if rng.random() < 0.6 else self.prose
        start = rng.randrange(len(stream) - length)
        return stream[start : start + length].tolist()

    def names(self, rng: random.Random, count: int) -> list[str]:
        """Different training names: mostly from the shared lists, at times from any words; at times much alike."""
        kind = rng.random()
        if kind < 0.2:  # any words, so that the model copies names instead of knowing them
            draw = lambda: " ".join(rng.sample(self.words, rng.choice((1, 2, 2, 3))))  # noqa: E731
        elif kind < 0.5:  # a few adjectives and nouns: facts that differ in one word
            side = max(3, math.isqrt(2 * count) + 1)
            adjectives, nouns = rng.sample(needles.ADJECTIVES, side), rng.sample(needles.NOUNS, side)
            draw = lambda: f"{rng.choice(adjectives)} {rng.choice(nouns)}"  # noqa: E731
        else:
            return needles.draw_names(rng, count, held_out=False)
        found: dict[str, None] = {}
        for _ in range(20 * count):
            name = draw()
            if not needles.is_eval_name(name):
                found[name] = None
            if len(found) == count:
                return list(found)
        return needles.draw_names(rng, count, held_out=False)

    def make(self, rng: random.Random, kind: str, length: int) -> tuple[list, list, list, list]:
        """One row: ids, text weights and answer weights of `length` + 1 tokens, position ids of `length`."""
        ids, text, answer = getattr(self, "_" + kind)(rng, length + 1)
        if len(ids) <= length:  # fill the row with running text
            rest = [self.end_of_text, *self.text_ids(rng, length - len(ids))][: length + 1 - len(ids)]
            ids, text, answer = ids + rest, text + [1.0] * len(rest), answer + [0.0] * len(rest)
        ids, text, answer = ids[: length + 1], text[: length + 1], answer[: length + 1]
        positions = list(range(length))
        if kind in ("chat", "restate") and length <= 512 and rng.random() < GAP_SHARE:
            places = [i + 1 for i in range(length - 1) if ids[i] in self.pauses]
            if places:
                budget = int(MAX_SPAN ** rng.uniform(0.5, 1.0)) - length
                chosen = sorted(rng.choices(places, k=rng.randint(1, 4)))
                sizes = [rng.random() for _ in chosen]
                for place, size in zip(chosen, sizes, strict=True):
                    gap = max(0, int(budget * size / sum(sizes)))
                    positions[place:] = [p + gap for p in positions[place:]]
        return ids, text, answer, positions

    def _text(self, rng: random.Random, length: int):
        return self.text_ids(rng, length), [1.0] * length, [0.0] * length

    def _repeat(self, rng: random.Random, length: int):
        """A segment said again and again; only the repeats count."""
        size = rng.randint(max(8, length // 8), length // 2)
        if rng.random() < 0.5:
            segment = [rng.randrange(3, VOCAB_SIZE) for _ in range(size)]
        else:
            segment = self.text_ids(rng, size)
        ids = (segment * (length // size + 1))[:length]
        return ids, [0.0] * length, [0.0] * size + [1.0] * (length - size)

    def _restate(self, rng: random.Random, length: int):
        """Facts, then the same facts in another order; only what follows can be known counts fully."""
        count = max(1, length // 30)
        facts = [needles.fact(name, needles.draw_code(rng)) for name in self.names(rng, count)]
        again = rng.sample(facts, count)
        ids = self.tokenizer.encode(" ".join(facts + again)).ids
        answer, digits = [0.0] * len(ids), 0
        for i, token in enumerate(ids):
            if token in self.digits:
                digits += 1
                if digits > needles.CODE_DIGITS * count:
                    answer[i] = DIGIT_WEIGHT
        return ids, [0.02] * len(ids), answer

    def _chat(self, rng: random.Random, length: int):
        """A document with facts in filler, then questions; at times the document goes on between the questions."""
        num_questions = 1 + int(rng.random() * max(1, min(length // 80, 16)))
        budget = max(0, length - 6 - 36 * num_questions)
        most = max(1, min(budget // 15, 24))
        num_facts = round(math.exp(rng.uniform(0.0, math.log(most + 0.49))))
        codes = {name: needles.draw_code(rng) for name in self.names(rng, num_facts)}
        budget -= 15 * num_facts
        items: list[tuple[str, str | None]] = []
        start = rng.randrange(len(self.sentences))
        while True:
            sentence, size = self.sentences[(start + len(items)) % len(self.sentences)]
            budget -= size + 1
            if budget < 0:
                break
            items.append((sentence, None))
        places = sorted(((rng.randint(0, len(items)), name) for name in codes), reverse=True)
        for place, name in places:
            items.insert(place, (needles.fact(name, codes[name]), name))
        first = next(i for i, (_, name) in enumerate(items) if name) + 1
        if rng.random() < 0.5:
            cuts = [len(items)] * num_questions
        else:
            cuts = sorted(rng.randint(first, len(items)) for _ in range(num_questions))
        turns: list[tuple[str, str]] = []
        unasked: list[str] = []
        done = 0
        for cut in cuts:
            unasked += [name for _, name in items[done:cut] if name]
            name = unasked.pop(rng.randrange(len(unasked))) if unasked else rng.choice(list(codes))
            if name not in {n for _, n in items[:cut]}:
                continue
            part = " ".join(text for text, _ in items[done:cut])
            turns.append(("user", (part + "\n\n" if part else "") + needles.question(name)))
            turns.append(("assistant", needles.fact(name, codes[name])))
            done = cut
        ids = self.tokenizer.encode(render_chat(turns)).ids
        text, answer = [0.3] * len(ids), [0.0] * len(ids)
        in_reply = False
        for i, token in enumerate(ids):
            if in_reply:
                text[i], answer[i] = 0.0, DIGIT_WEIGHT if token in self.digits else 1.0
                in_reply = token != self.im_end
            elif token == self.newline and ids[i + 1 - len(self.assistant) : i + 1] == self.assistant:
                in_reply = True
        return ids, text, answer

    def micro_batch(self, rng: random.Random, stage: Stage) -> tuple[int, dict[str, Tensor]]:
        """Rows of one length: flat ids, targets, weights and position ids of `MICRO_BATCH_TOKENS` tokens."""
        length = rng.choices(list(stage.lengths), list(stage.lengths.values()))[0]
        kinds = rng.choices(("text", "repeat", "restate", "chat"), stage.kinds, k=MICRO_BATCH_TOKENS // length)
        rows = [self.make(rng, kind, length) for kind in kinds]
        return length, {
            "ids": torch.tensor([t for row in rows for t in row[0][:-1]]),
            "targets": torch.tensor([t for row in rows for t in row[0][1:]]),
            "text": torch.tensor([w for row in rows for w in row[1][1:]]),
            "answer": torch.tensor([w for row in rows for w in row[2][1:]]),
            "positions": torch.tensor([p for row in rows for p in row[3]]),
        }
