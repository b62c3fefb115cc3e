"""What can go wrong with a task.

QueueError
  QueueFull        too much waits; nothing was submitted
  DedupConflict    the deduplication key is that of another task
  UnknownTask      there is no such task, or it has ended and is not kept any more
  Superseded       of a worker: another process has said ready under its ID
  NotPossible      it can't be retried or dropped as it is
  TaskFailed       it is a dead letter, or was dropped; ``reason``, ``tries``
  NotDone          no result yet, within the time given
"""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError
from immortal.protocol.identity import IdentityConflict


class QueueError(ImmortalError):
    """The root of a queue's errors."""


class QueueFull(QueueError):  # noqa: N818 (what happened, not what is wrong)
    """Too many tasks wait, or too large ones. Nothing was submitted: try again later."""


class DedupConflict(IdentityConflict, QueueError):  # noqa: N818
    """The key ``dedup`` is that of a task of another function, or with other arguments. See ``known``, ``given``."""


class UnknownTask(QueueError):  # noqa: N818
    """There is no such task; or it has ended, and is not kept any more."""


class Superseded(QueueError):  # noqa: N818
    """Another process has said ready under this worker's ID since."""


class NotPossible(QueueError):  # noqa: N818
    """A task can't be retried, or dropped, in the state that it is in."""


class TaskFailed(QueueError):  # noqa: N818
    """The task has no result: it is a dead letter, or was dropped. ``tries``: how often it was begun."""

    def __init__(self, task: int, reason: str, tries: int) -> None:
        super().__init__(f"task {task} failed: {reason}")
        self.task = task
        self.reason = reason
        self.tries = tries


class NotDone(QueueError, TimeoutError):  # noqa: N818
    """The task has not ended within the time given. It goes on."""


class Reject(Exception):  # noqa: N818
    """Raised by a worker's function: the task is a dead letter at once, since trying again would not help."""
