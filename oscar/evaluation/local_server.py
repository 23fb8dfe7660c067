"""Start an SGLang server as a process of its own, wait until it answers, stop it with all its children.

For the examples, the tests and the benchmarks; it imports nothing of SGLang. A server does not outlive the process that started
it, even if that is killed: a second small process waits for its end and then kills the server's process group.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

_WATCH = """
import os, signal, sys, time
parent, group = map(int, sys.argv[1:])
while os.getppid() == parent:
    time.sleep(0.5)
try:
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
"""
"""Program of the second process; only it can still act when its parent was killed."""


class ServerError(RuntimeError):
    """The server ended before it answered; the message holds the end of its log."""


class LocalServer:
    """`python -m sglang.launch_server` on a free port of this machine, as a context manager.

    Args:
        model_path: model folder.
        flags: further command-line flags of the server.
        log: file for its output; a temporary one if None.
        timeout: seconds to wait for the first answer.
        env: variables added to this process's environment.

    Attributes:
        url: base address, without a trailing slash.
        log: path of the log.
        startup_seconds: from launch to the first answer.
    """

    def __init__(self, model_path, *flags: str, log: str | Path | None = None, timeout: float = 600, env: dict | None = None):
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *map(str, flags)]
        self.log = Path(log) if log else Path(tempfile.mkstemp(prefix="oscar-server-", suffix=".log")[1])
        self.timeout, self.env = timeout, env or {}
        self.startup_seconds = float("nan")

    def __enter__(self) -> LocalServer:
        began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | self.env
            )
        watch = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid()), str(self.process.pid)]
        none = subprocess.DEVNULL
        self._watch = subprocess.Popen(watch, stdin=none, stdout=none, stderr=none, start_new_session=True)
        try:
            while not self._answers():
                if self.process.poll() is not None:
                    raise ServerError(
                        f"server ended with code {self.process.returncode}; its log ends with:\n{self.log_tail()}"
                    )
                if time.monotonic() - began > self.timeout:
                    raise ServerError(f"no answer within {self.timeout:.0f} s; the log ends with:\n{self.log_tail()}")
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        self.startup_seconds = time.monotonic() - began
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self) -> None:
        """End the server and its workers."""
        for sig, wait in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            try:
                os.killpg(self.process.pid, sig)
                self.process.wait(wait)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._watch.kill()
        self._watch.wait()

    def post(self, path: str, **body):
        """POST JSON and return the JSON answer; raises requests.HTTPError on an error status."""
        answer = requests.post(self.url + path, json=body, timeout=600)
        answer.raise_for_status()
        return answer.json()

    def flush_cache(self) -> None:
        """Forget all cached prefixes; raises requests.HTTPError while requests run."""
        requests.post(self.url + "/flush_cache", timeout=60).raise_for_status()

    def info(self) -> dict:
        """/server_info."""
        return requests.get(self.url + "/server_info", timeout=60).json()

    def chat(self, messages: list[dict], max_tokens: int = 32) -> str:
        """Greedy answer of the OpenAI chat endpoint."""
        body = {"model": "default", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        return self.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _answers(self) -> bool:
        try:
            # /health only says that the process lives; this one runs a token through the model.
            return requests.get(self.url + "/health_generate", timeout=60).status_code == 200
        except requests.RequestException:
            return False


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
