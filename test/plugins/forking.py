"""A start of SGLang for tests that ask what it answers, not how it starts.

    with forking(LocalServer(model, *flags)) as server: ...

Workers are forked from the first process, which has imported SGLang, and need not import it anew: a server imports it once, not
three times, and takes 28 seconds of CPU to start instead of 66. With TRITON_INTERPRET=1 kernels run in `quick_interpreter`.
This file is also the program that does it: it runs the module named in FORKING_RUNS, by default SGLang's server.
"""

import multiprocessing
import os
import runpy

if os.environ.get("TRITON_INTERPRET") == "1":
    import quick_interpreter

    quick_interpreter.install()


def forking(server):
    """A `LocalServer` that is not started yet, to be started in this way."""
    assert server.command[1:3] == ["-m", "sglang.launch_server"]
    server.command[1:3] = [__file__]
    return server


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # SGLang asks for "spawn"
    runpy.run_module(os.environ.get("FORKING_RUNS", "sglang.launch_server"), run_name="__main__")
