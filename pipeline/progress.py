"""Progress of Spark's jobs on stderr; nothing if stderr is no terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.status import Status

_UPDATE_INTERVAL_S = 0.5


class Progress:
    """``say`` names the step that begins; the tasks of Spark that are done are counted beside it."""

    def __init__(self, status: Status | None) -> None:
        self._status = status
        self._step = "starting Spark"
        self._spark: SparkSession | None = None

    def say(self, step: str) -> None:
        self._step = step
        self.update()

    def watch(self, spark: SparkSession) -> None:
        self._spark = spark

    def update(self) -> None:
        if self._status is not None:
            self._status.update(f"{self._step}{self._tasks()}")

    def _tasks(self) -> str:
        if self._spark is None:
            return ""
        try:
            tracker = self._spark.sparkContext.statusTracker()
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:  # Spark is about to stop, or runs elsewhere: it is only decoration
            return ""
        known = [stage for stage in stages if stage is not None]
        done, total = sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known)
        return f": {done} of {total} tasks" if total else ""


@contextmanager
def progress() -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield Progress(None)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting Spark") as status:
        shown = Progress(status)
        done = threading.Event()

        def tick() -> None:
            while not done.wait(_UPDATE_INTERVAL_S):
                shown.update()

        thread = threading.Thread(target=tick, name="progress", daemon=True)
        thread.start()
        try:
            yield shown
        finally:
            done.set()
            thread.join()
