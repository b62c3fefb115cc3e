"""App port of a coordinator that runs in the same thread: no socket, no second process.

The coordinator's loop calls :meth:`EmbeddedApp.process` at intervals. This handles some of the core's messages for the
app, and returns the app's output. So handlers and core take turns: while a handler runs, or stands at a breakpoint, the
coordinator waits, and input waits in its sockets.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from immortal.appsdk.dispatch.events import Flush, Goodbye
from immortal.appsdk.errors import AppError, RecoveryNeeded
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.life import AppLife
from immortal.appsdk.running.options import RunOptions
from immortal.appsdk.running.transport import Waker
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.protocol.errors import ImmortalError

TURN_NS = 2_000_000  # then it is the coordinator's turn, even if there is more to handle
INPUT_BUFFERED_BYTES_MAX = 1 << 20  # given to the dispatcher and not handled


class EmbeddedApp:
    """App port to an app in the same thread. ``on_end``: called when the app has ended by an error, see ``error``.

    It can't be started again."""

    def __init__(
        self, definition: Definition, options: RunOptions, epoll: select.epoll, on_end: Callable[[], None]
    ) -> None:
        self._definition = definition
        self._options = options
        self._epoll = epoll
        self._on_end = on_end
        self._waker = Waker()
        self._life: AppLife | None = None
        self._to_app: list[bytes | memoryview] = []
        self._must_start = False  # the app must be created at the next turn
        self._has_work = False  # there is something to do at once
        self._paused = self._closing = False
        self._sent_bytes = 0
        self._snapshot_fileno = -1  # that is registered with epoll
        self.error: ImmortalError | None = None
        self.last_traffic_ns = time.monotonic_ns()

    def listen(self) -> None:
        self._epoll.register(self._waker.fileno(), select.EPOLLIN)
        self._must_start = True

    def become_instance(self, settings: InstanceSettings) -> None:
        """Do nothing: a service in one process is no follower, and no other app connects."""

    @property
    def addresses(self) -> Mapping[str, str | None]:
        return {"app": "in this process"}

    @property
    def is_handling(self) -> bool:
        """True if a handler runs. Signal handlers read this, too."""
        life = self._life
        return life is not None and life.dispatcher.records.current_handling is not None

    # --- the driver's port -------------------------------------------------------------------------------------------

    def send(self, effect: ef.SendToApp) -> None:
        if self._life is not None and not self._closing:
            self._to_app.append(effect.data)

    def close_app(self, effect: ef.CloseApp) -> None:
        self._closing = True

    def pause(self, effect: ef.PauseApp) -> None:
        self._paused = True

    def resume(self, effect: ef.ResumeApp) -> None:
        self._paused, self._has_work = False, True

    def flush(self) -> list[ev.Event]:
        return []

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    def pop_sent_events(self) -> list[ev.Event]:
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return [ev.AppSent(sent_bytes)] if sent_bytes else []

    # --- for the loop ------------------------------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        now_ns = time.monotonic_ns()
        life = self._life
        if self._must_start or self._closing:
            return now_ns
        if life is None or self._paused:
            return None
        if self._to_app or self._has_work or life.loop.pending:
            return now_ns
        due_ns = life.dispatcher.next_due_ns
        deadline_ns = None if due_ns is None else now_ns + max(0, due_ns - life.loop.now_ns())
        if life.loop.snapshot is not None:
            silent_ns = now_ns + int(1e9 * max(0.0, life.loop.snapshot.time_left_s()))
            deadline_ns = silent_ns if deadline_ns is None else min(silent_ns, deadline_ns)
        return deadline_ns

    def is_due(self, now_ns: int) -> bool:
        due_ns = self.next_deadline_ns()
        return due_ns is not None and now_ns >= due_ns

    def process(self, ready: Mapping[int, int]) -> list[ev.Event]:
        if self._waker.fileno() in ready:
            self._waker.clear()
        life = self._life
        if life is None:
            return self._start_app() if self._must_start else []
        if self._closing:
            self._handle_last(life, TURN_NS)
            return [self._close_app(life)]
        if self._paused:
            return []
        now_ns = time.monotonic_ns()
        try:
            self._handle(life, now_ns + TURN_NS)
        except ImmortalError as error:
            return self._end_app(life, error)
        return self._collect_output(life)

    def drain(self, timeout_s: float) -> None:
        if self._life is not None and self._to_app:
            self._handle_last(self._life, int(1e9 * timeout_s))

    def close(self) -> None:
        if self._life is not None:
            self._close_app(self._life)
        self._waker.close()

    def _start_app(self) -> list[ev.Event]:
        self._must_start = False
        life = self._life = AppLife(self._definition, self._options, self._waker.wake)
        life.start()
        self._paused = self._closing = False
        life.loop.take_output()
        return [ev.AppConnected(), *self._collect_output(life)]

    def _handle(self, life: AppLife, until_ns: int) -> None:
        """Handle queued messages until ``until_ns``. Raises ImmortalError."""
        loop, dispatcher = life.loop, life.dispatcher
        self._has_work = False
        if self._to_app and dispatcher.buffered_bytes < INPUT_BUFFERED_BYTES_MAX:
            data = b"".join(self._to_app)
            self._to_app.clear()
            self._sent_bytes += len(data)
            dispatcher.receive_data(data)
        while True:
            event = loop.step()
            if event is None or isinstance(event, Goodbye):
                break
            if isinstance(event, Flush) or time.monotonic_ns() >= until_ns:
                self._has_work = True
                break
        self._watch_snapshot(life)

    def _handle_last(self, life: AppLife, for_ns: int) -> None:
        """Handle the coordinator's last messages, which can say why it ends."""
        try:
            self._handle(life, time.monotonic_ns() + for_ns)
        except ImmortalError as error:
            self._stop(error)

    def _collect_output(self, life: AppLife) -> list[ev.Event]:
        loop = life.loop
        with loop.lock:
            if not loop.pending:
                return []
            data = b"".join(loop.pending)
            loop.remove_sent(len(data))
        self.last_traffic_ns = time.monotonic_ns()
        return [ev.AppData(data)]

    def _end_app(self, life: AppLife, error: ImmortalError) -> list[ev.Event]:
        """End the app and report it: with ``error``, or for a recovery from the log."""
        if isinstance(error, AppError):
            life.dispatcher.announce_leaving(str(error).partition("\n")[0])
        life.loop.take_output()
        events = [*self._collect_output(life), self._close_app(life)]
        if isinstance(error, RecoveryNeeded):
            self._options = replace(self._options, rewound=True)
            self._must_start = True
        else:
            self._stop(error)
        return events

    def _stop(self, error: ImmortalError) -> None:
        self.error = self.error or error
        self._on_end()

    def _close_app(self, life: AppLife) -> ev.Event:
        self._watch_snapshot(life, ended=True)
        life.close("the instance has stopped")
        life.dispatcher.tasks.discard_all()
        self._life = None
        self._to_app.clear()
        self._closing = self._has_work = False
        self._sent_bytes = 0
        return ev.AppClosed()

    def _watch_snapshot(self, life: AppLife, *, ended: bool = False) -> None:
        """Watch the pipe of the child that encodes a checkpoint."""
        snapshot = None if ended else life.loop.snapshot
        wanted = -1 if snapshot is None else snapshot.fileno()
        if wanted == self._snapshot_fileno:
            return
        if wanted >= 0:
            self._epoll.register(wanted, select.EPOLLIN)  # a closed one was removed automatically
        self._snapshot_fileno = wanted
