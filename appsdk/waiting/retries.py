"""Effects between two attempts, which an operator wants to be tried at once.

No log knows of attempts, only of results: when one is made changes nothing that a replay does.
"""

from __future__ import annotations

from typing import Any

from immortal.appsdk.waiting.effects import Effect
from immortal.appsdk.waiting.tasks import Tasks


def retry_effects(tasks: Tasks, number: int) -> dict[str, Any]:
    """Those that the handler ``number`` waits for. ``retried``: how many were between two attempts; in words, what
    came of it."""
    task = tasks.waiting(number)
    if task is None:
        return {"retried": 0, "text": f"no handler {number} waits: it has ended, or there never was one"}
    effects = [one for one in task.pending.values() if isinstance(one, Effect)]
    if not effects:
        return {"retried": 0, "text": f"{task.name} waits for no effect"}
    hastened = [one for one in effects if tasks.effects.try_now(one.number)]
    if not hastened:
        return {"retried": 0, "text": f"no effect of {task.name} waits for its next attempt: they run, or wait to"}
    names = ", ".join(one.function.name for one in hastened)
    return {"retried": len(hastened), "text": f"{names}, for {task.name}: the next attempt is made now"}
