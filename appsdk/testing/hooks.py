"""``@on_primary`` hooks in the test's own thread: each impulse that they send is handled before they go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import ImpulseQueue, Write
from immortal.appsdk.errors import Disconnected

NO_THREAD = 0


class HookQueue(ImpulseQueue):
    """Stands before an app's own. Nothing waits in it: where a hook's thread would let others go on, ``run`` does."""

    def __init__(
        self, context: Context, queue: ImpulseQueue, run: Callable[[], None], is_alive: Callable[[], bool]
    ) -> None:
        super().__init__(context, lambda: None)
        self._hook_context = context
        self._queue = queue
        self._run = run
        self._is_alive = is_alive

    def append(self, destination: str, name: str, write: Write, arguments: tuple[Any, ...]) -> None:
        self._queue.append(destination, name, write, arguments)
        self._run_handlers()

    def flush(self, timeout_s: float | None) -> None:
        self._run_handlers()
        self._queue.flush(0)  # all is accepted, or says why not

    def ask_for_checkpoint(self) -> None:
        self._queue.ask_for_checkpoint()
        self._run_handlers()

    def _run_handlers(self) -> None:
        with self.thread(threading.get_ident()):
            self._run()
        if not self._is_alive():  # a hook's thread dies with its app: this one is to go no further
            raise Disconnected("the app has crashed")

    @contextmanager
    def thread(self, thread_id: int = NO_THREAD) -> Iterator[None]:
        """Meanwhile the handlers' thread is ``thread_id``; NO_THREAD: what only handlers may do is refused here."""
        context, before = self._hook_context, self._hook_context.thread_id
        context.thread_id = thread_id
        try:
            yield
        finally:
            context.thread_id = before
