"""A server ends with the process that started it, however that ends. Stand-ins for SGLang, which takes long to start."""

import os
import signal
import subprocess
import sys
import time

import pytest

from oscar.evaluation.local_server import LocalServer, ServerError

# A server with a worker: both write their process ids, and would go on for ten minutes.
SERVER = """
import os, sys, time
child = os.fork()
with open(os.path.join(sys.argv[1], "child" if child == 0 else "server"), "w") as file:
    file.write(str(os.getpid()))
time.sleep(600)
"""
PARENT = """
import sys
from oscar.evaluation.local_server import LocalServer
server = LocalServer("model", log=sys.argv[1] + "/log")
server.command = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
server.__enter__()  # nobody ever answers
"""


def started(folder) -> list[int]:
    """Process ids of the server and its worker, once both run."""
    files = [folder / name for name in ("server", "child")]
    for _ in range(600):
        if all(file.exists() and file.read_text() for file in files):
            return [int(file.read_text()) for file in files]
        time.sleep(0.1)
    raise AssertionError("the stand-in did not start")


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids: list[int]) -> bool:
    """Whether none of them runs, within ten seconds."""
    for _ in range(100):
        if not any(map(lives, pids)):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_when_its_parent_is_killed(sig, tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), SERVER])
    pids = started(tmp_path)
    try:
        assert all(map(lives, pids))
        parent.send_signal(sig)
        parent.wait(10)
        assert all_gone(pids)
    finally:
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGKILL)
        parent.kill()


def test_a_server_that_never_answers_is_stopped_with_its_workers(tmp_path):
    server = LocalServer("model", log=tmp_path / "log", timeout=0)
    server.command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with pytest.raises(ServerError, match="no answer within 0 s"), server:
        pass
    assert server.process.poll() is not None and server._watch.poll() is not None
    assert all_gone([int(file.read_text() or 0) for file in tmp_path.glob("[sc]*")])


def test_a_server_that_ends_says_why(tmp_path):
    server = LocalServer("model", log=tmp_path / "log")
    server.command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(ServerError, match=r"(?s)ended with code 3.*no such model"), server:
        pass
