"""Progress bars on stderr, one a step of the work, with the time left; or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Steps:
    """A context that draws from the first step on.

    Args:
        show: False draws nothing.
    """

    def __init__(self, show: bool):
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True)) if show else None

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_) -> None:
        if self._progress is not None and self._progress.live.is_started:
            self._progress.stop()

    @contextmanager
    def step(self, description: str, total_tokens: int) -> Iterator[Callable[[float], None]]:
        """Open a bar over total_tokens; yields advance(tokens)."""
        progress = self._progress
        if progress is None:
            yield lambda tokens: None
            return
        progress.start()
        task = progress.add_task(description, total=total_tokens)
        yield lambda tokens: progress.advance(task, tokens)
