"""`oscar` and `oscar_kernel` are typed, and the types hold."""

import subprocess
import sys
from pathlib import Path


def test_mypy_is_clean():
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
