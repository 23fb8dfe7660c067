"""Tasks know their answers, and scores measure what they say."""

import math

import pytest
import torch

from oscar.errors import OscarError
from oscar.evaluation import tasks
from oscar.evaluation.task_scores import TaskScores, wilson
from oscar.evaluation.text_scores import TextScores, read_documents


def test_text_scores_by_hand():
    class Reading:
        context, tokens = 2, torch.tensor([0, 0, 1, 0, 1])
        logits = torch.tensor([[9.0, 9.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])

    scores = TextScores()
    found = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    scores.add(Reading, found, [(0.04, 1.0), (0.0, 4.0)])
    summary = scores.summary()
    p = 1 / (1 + math.exp(-1))
    kl = p * math.log(p / (1 - p)) + (1 - p) * math.log((1 - p) / p)
    assert summary["kl_mean"] == pytest.approx(kl / 3) and summary["kl_max"] == pytest.approx(kl)
    assert summary["top1_agreement"] == pytest.approx(2 / 3)
    assert summary["attn_rel_err"] == pytest.approx([0.2, 0.0])
    # After token 1 comes 0 (probability 1/2 in both), after 0 comes 1 (found p, exact 1 - p).
    assert summary["perplexity"] == pytest.approx(math.exp((math.log(2) - math.log(p)) / 2))
    assert summary["perplexity_ratio"] == pytest.approx(math.sqrt((1 - p) / p))
    assert set(scores.summary(divergence=False)) == {"perplexity", "perplexity_ratio", "perplexity_ratio_ci"}


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(100, 100, 0.9630, 1.0), (0, 10, 0.0, 0.2775), (50, 100, 0.4038, 0.5962)]
)
def test_wilson(right, n, low, high):
    assert wilson(right, n) == pytest.approx((low, high), abs=1e-4)


def test_documents_are_exact_in_length_and_do_not_overlap(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_text("".join(chr(97 + i % 26) for i in range(1000)))
    files[1].write_text("0123456789" * 12)
    documents = read_documents(files, tokenizer, 100, 6)
    assert [len(d) for d in documents] == [100] * 4  # three of the long file, one of the short
    assert tokenizer.decode(documents[0]).startswith("abc") and tokenizer.decode(documents[3]).startswith("0123")
    with pytest.raises(OscarError, match="expected at least 5000 tokens in a row"):
        read_documents(files, tokenizer, 5000, 6)
    # A budget of tokens for one file; the other takes what is left of the count.
    starts = [
        [tokenizer.decode(d)[0].isdigit() for d in read_documents([f"{files[0]}:{n}", files[1]], tokenizer, 20, 6)]
        for n in (99, 19, 200)
    ]
    assert starts == [[False] * 4 + [True] * 2, [True] * 6, [False] * 6]


@pytest.mark.parametrize("kind", tasks.MAKERS)
def test_tasks_fill_the_prompt_and_know_their_answer(kind, make_tokenizer):
    tokenizer = make_tokenizer(chat=True)
    task = tasks.make(kind, tokenizer, 4000, 3)
    assert 3600 < task.num_tokens <= 4000
    assert task == tasks.make(kind, tokenizer, 4000, 3) and task != tasks.make(kind, tokenizer, 4000, 4)
    assert task.score(task.reply) == 1 and task.score("") == 0
    assert all(code in task.prompt for code in task.expected)
    assert task.score(task.reply.replace(task.expected[-1], "00000")) == pytest.approx(1 - 1 / len(task.expected))
    with pytest.raises(ValueError, match=r"takes? at least|take "):
        tasks.make(kind, tokenizer, 60, 3)


def test_twins_share_their_fields(make_tokenizer):
    task = tasks.make("twins", make_tokenizer(chat=True), 4000, 0)
    adjective, noun = task.reply.removeprefix("The access code of ").split(" is ")[0].split()
    assert task.prompt.count(f"of {adjective} ") == 5 and task.prompt.count(f" {noun} is") == 4


def test_chain_leads_to_its_code(make_tokenizer):
    task = tasks.make("chain", make_tokenizer(chat=True), 4000, 0)
    name = task.reply.removeprefix("The access code of ").split(" is ")[0]
    for _ in range(4):
        (name,) = _sources(task.prompt, name)
    assert f"The access code of {name} is {task.expected[0]}." in task.prompt


def _sources(prompt: str, name: str) -> list[str]:
    marker = f"The access code of {name} is the access code of "
    return [part.split(".")[0] for part in prompt.split(marker)[1:]]


def test_task_scores():
    scores = TaskScores()
    task = tasks.Task("retrieval", None, "", ("12345", "67890"), "", 8, 0.9, 10)
    for reply in ("12345 67890", "12345 00000", "no idea"):
        scores.add(task, reply, 0.5)
    summary = scores.summary()
    assert (summary["exact"], summary["score"], summary["unreadable"], summary["forced"]) == (
        pytest.approx(1 / 3),
        pytest.approx(0.5),
        pytest.approx(1 / 3),
        0.5,
    )
    assert scores.by_depth() == [[0, 0], [0, 0], [0, 0], [1, 3]]
