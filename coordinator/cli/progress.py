"""A progress bar for what takes long: on stderr, and only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY_S = 1.0  # what is done sooner shows none

Advance = Callable[[int, int | None], None]
"""(done, total); total None: nobody knows."""


@contextmanager
def progress_bar(what: str) -> Iterator[Advance]:
    """To be called now and then, from one thread at a time. It leaves nothing behind on the screen."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=None)
    due_s = time.monotonic() + DELAY_S

    def advance(done: int, total: int | None) -> None:
        if not progress.live.is_started and time.monotonic() >= due_s:
            progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        progress.stop()
