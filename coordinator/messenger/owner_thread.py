"""Thread that owns a messenger, for programs without a loop of their own."""

from __future__ import annotations

import logging
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from immortal.coordinator.messenger.envelope import MessengerClosedError, MessengerError
from immortal.coordinator.messenger.sockets import WakeupEvent

if TYPE_CHECKING:
    from concurrent.futures import Future


logger = logging.getLogger("immortal.coordinator.messenger")
Result = TypeVar("Result")


class Processor(Protocol):
    """Interface of the messenger that an :class:`OwnerThread` drives."""

    def fileno(self) -> int: ...
    def process(self) -> None: ...
    def next_deadline_ns(self) -> int | None: ...


class OwnerThread:
    """Thread that drives ``messenger`` between start() and stop(). Without it, calls run in the caller's thread.

    ``on_end`` is called when the thread ends.
    """

    def __init__(
        self, messenger: Processor, wake: WakeupEvent, clock_ns: Callable[[], int], on_end: Callable[[], None]
    ) -> None:
        self._messenger = messenger
        self._wake = wake
        self._clock_ns = clock_ns
        self._on_end = on_end
        self._runs = False
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    @property
    def failed(self) -> bool:
        """True if an error ended the thread and stop() has not raised it yet."""
        return self._error is not None

    def can_be_awaited(self) -> bool:
        """Return True if the thread runs and is not the calling thread, so that the caller can wait for it."""
        return self._runs and self._thread is not threading.current_thread()

    def start(self) -> None:
        if self._thread is not None:
            raise MessengerError("the messenger's thread runs already")
        self._stopping = False
        self._error = None
        self._runs = True
        self._thread = threading.Thread(target=self._run, name="messenger", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; raise the error that ended it before, if any."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """End the thread, if there is one."""
        thread = self._thread
        if thread is None:
            return
        if thread is threading.current_thread():
            raise MessengerError("a callback can't stop the thread that it runs in: call stop() or close() outside")
        self._stopping = True
        self._wake.signal()
        thread.join()
        self._thread = None

    def forget_after_fork(self) -> None:
        """Clear the state of the thread in a forked child, in which the thread does not exist."""
        self._thread, self._runs = None, False

    def call(self, function: Callable[[], Result]) -> Result:
        """Run ``function`` in the thread that owns the sockets; return its result, or raise its error."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return function()
        from concurrent.futures import Future  # here: a coordinator, which asks no other thread, has no use for it

        future: Future[Result] = Future()
        self._calls.append((function, future))
        self._wake.signal()
        while True:
            thread.join(0)
            if not thread.is_alive():
                self._refuse_calls()
            try:
                return future.result(timeout=0.1)
            except TimeoutError:
                if future.done():
                    raise

    def _run(self) -> None:
        try:
            poller = select.poll()
            poller.register(self._messenger.fileno(), select.POLLIN)
            while not self._stopping:
                self._messenger.process()
                self._run_calls()
                deadline_ns = self._messenger.next_deadline_ns()
                timeout_ms = None
                if deadline_ns is not None:
                    timeout_ms = max(0, -((self._clock_ns() - deadline_ns) // 1_000_000))
                if not (self._stopping or self._calls):
                    poller.poll(timeout_ms)
        except BaseException as error:
            logger.exception(
                "a callback or server loop raised: the messenger's thread ends, nothing is sent or received"
            )
            self._error = error
        finally:
            self._runs = False
            self._on_end()
            self._refuse_calls()

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _refuse_calls(self) -> None:
        while self._calls:
            self._calls.popleft()[1].set_exception(MessengerClosedError("the messenger's thread has ended"))
