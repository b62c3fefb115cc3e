"""``@on_primary`` hooks in the test's own thread: what they send is sent, and to flush is to run the environment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from appsdk.context import Context
from appsdk.outbox import IMPULSES_OUTSTANDING_MAX, ImpulseQueue, Write

NO_THREAD = 0


class HookQueue(ImpulseQueue):
    """Stands before an app's own. Nothing waits in it: where a hook's thread would wait, the environment runs."""

    def __init__(self, context: Context, queue: ImpulseQueue, run: Callable[[], None]) -> None:
        super().__init__(context, lambda: None)
        self._hook_context = context
        self._queue = queue
        self._run = run
        self._unflushed_count = 0

    def append(self, destination: str, name: str, write: Write, arguments: tuple[Any, ...]) -> None:
        if self._unflushed_count >= IMPULSES_OUTSTANDING_MAX // 2:
            self.flush(None)
        self._unflushed_count += 1
        self._queue.append(destination, name, write, arguments)

    def flush(self, timeout_s: float | None) -> None:
        with self.thread(threading.get_ident()):
            self._run()
        self._unflushed_count = 0
        self._queue.flush(0)

    def ask_for_checkpoint(self) -> None:
        self._queue.ask_for_checkpoint()

    @contextmanager
    def thread(self, thread_id: int = NO_THREAD) -> Iterator[None]:
        """Meanwhile the handlers' thread is ``thread_id``; NO_THREAD: what only handlers may do is refused here."""
        context, before = self._hook_context, self._hook_context.thread_id
        context.thread_id = thread_id
        try:
            yield
        finally:
            context.thread_id = before
