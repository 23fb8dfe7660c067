"""Graded tasks over HTTP, from any server that speaks the OpenAI protocol."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence

import requests

from oscar.errors import OscarError
from oscar.evaluation.task_scores import TaskScores
from oscar.evaluation.tasks import Task
from oscar.format import sizing
from oscar.format.identity import ModelIdentity

AT_ONCE = 4
"""Requests under way."""
PATIENCE = 600
"""Seconds to wait for an answer."""
TOLERANCE = 0.9
"""Share of a prompt's tokens, as counted here, that a server has to count: a chat template and another way of cutting words may
differ by less."""


class Endpoint:
    """A running server.

    Args:
        url: its base address, "http://127.0.0.1:30000".
    Raises:
        OscarError: nobody answers there.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.model = self._call("GET", "/v1/models")["data"][0]["id"]
        self.prompt_tokens: list[int] = []
        self.shortened = 0

    def score(self, tasks: Sequence[Task], advance: Callable[[int], None] = lambda tokens: None) -> TaskScores:
        """Ask tasks of one kind, AT_ONCE at a time, and grade the answers. advance: told the prompt tokens that are done."""
        scores = TaskScores()
        seen = self.prompt_tokens
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            for task, (reply, tokens) in zip(tasks, pool.map(self.ask, tasks), strict=True):
                scores.add(task, reply)
                if tokens is not None:
                    seen.append(tokens)
                    self.shortened += tokens < TOLERANCE * task.num_tokens
                advance(task.num_tokens)
        return scores

    def ask(self, task: Task) -> tuple[str, int | None]:
        """The greedy answer to one task, and the tokens of its prompt that the server counted, if it says so."""
        body = {"model": self.model, "max_tokens": task.max_new_tokens, "temperature": 0}
        if task.messages is None:
            answer = self._call("POST", "/v1/completions", body | {"prompt": task.prompt})
            reply = answer["choices"][0]["text"]
        else:
            answer = self._call("POST", "/v1/chat/completions", body | {"messages": task.messages})
            reply = answer["choices"][0]["message"]["content"] or ""
        return reply, (answer.get("usage") or {}).get("prompt_tokens")

    def lengths(self) -> dict:
        """What the server counted of the prompts: shortest and longest, and how many it read less of than was sent.

        `prompt_tokens` is None where the server says nothing of them."""
        if not self.prompt_tokens:
            return {"prompt_tokens": None, "shortened": 0}
        return {"prompt_tokens": [min(self.prompt_tokens), max(self.prompt_tokens)], "shortened": self.shortened}

    def cache(self, model: ModelIdentity, context: int) -> dict:
        """What the server says of its KV cache: method and bits per element of a request of this length, windows included."""
        try:
            state = self._call("GET", "/server_info")["internal_states"][0].get("oscar")
        except (OscarError, KeyError, IndexError, AttributeError):  # not an SGLang server
            return {}
        if not state:
            return {"method": "none", "bits_per_element": 16.0}
        slots = sizing.request_slots(context, state["sink_tokens"], state["recent_tokens"], state["page_size"])
        elements = context * model.num_layers * model.num_kv_heads * (model.head_dim + model.v_head_dim)
        return {
            "method": state["method"],
            "windows": [state["sink_tokens"], state["recent_tokens"]],
            "bits_per_element": 8 * slots * state["bytes_per_token"] / elements,
        }

    def _call(self, verb: str, path: str, body: dict | None = None) -> dict:
        try:
            answer = requests.request(verb, self.url + path, json=body, timeout=PATIENCE)
            answer.raise_for_status()
            return answer.json()
        except (requests.RequestException, ValueError) as error:
            what = str(error).splitlines()[0]
            raise OscarError(f"--endpoint {self.url}: expected an OpenAI-style server at {path}: {what}") from error
