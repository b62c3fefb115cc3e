"""App's process beside its coordinator, and their connection: bytes arrive late and in any pieces."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from tests.simulation.apps import App
from tests.simulation.clock import US
from tests.simulation.failing import Death

if TYPE_CHECKING:
    from tests.simulation.node import Node


class AppInterface:
    """Driver's port for an app, while one process of the coordinator lives."""

    def __init__(self, node: Node, rng: random.Random) -> None:
        self._node = node
        self._world = node.world
        self._rng = rng
        self._clock = node.world.clock
        self.app: App | None = None
        self._life = 0  # of the app
        self._to_app: deque[bytes] = deque()
        self._to_core = bytearray()
        self._taken_bytes = 0  # by the app; the core does not know of them yet
        self._reading = self._writing = self._acting = self._closing = self._paused = False
        self._slow = 1  # times as slow as usual
        self._time_due_ns: int | None = None

    @property
    def is_quiet(self) -> bool:
        """Return True if nothing is on its way, and the app has done all its work."""
        return self.app is not None and self.app.is_done and not (self._to_app or self._to_core or self.app.out)

    # --- life --------------------------------------------------------------------------------------------------------

    def begin(self, app: App) -> None:
        self.app = app
        self._life += 1
        self._to_app.clear()
        self._to_core.clear()
        self._taken_bytes = 0
        self._closing = self._paused = self._reading = self._writing = self._acting = False
        self._slow = 15 if self._rng.random() < 0.2 else 1
        self._time_due_ns = None
        self._node.post(ev.AppConnected())
        self._has_run()

    def crash(self) -> None:
        """End the app's connection; bytes that it had sent can still be read, or not."""
        if self.app is None:
            return
        if self._to_core and not self._paused and self._rng.random() < 0.5:
            self._node.post(ev.AppData(bytes(self._to_core)))
        self._is_gone()

    def outlive_coordinator(self) -> None:
        """Let the app work on until it sees that its coordinator is gone."""
        if self.app is not None:
            try:
                for data in self._to_app:
                    self.app.receive(data)
            except Death:
                pass

    def end(self) -> None:
        """End the app: nothing more of it happens."""
        self.app = None
        self._life += 1

    def _is_gone(self) -> None:
        self.end()
        self._to_app.clear()
        self._to_core.clear()
        self._taken_bytes = 0
        self._node.post(ev.AppClosed())

    def _dies(self, app: App) -> None:
        """End the app's process, which a message killed. All its output is on its way."""
        self._world.marks[f"app died while {self._node.phase.value}"] += 1
        self._node.note("the app dies")
        data = bytes(self._to_core + app.out)
        if data and not self._paused:
            self._node.post(ev.AppData(data))
        self._is_gone()

    # --- the driver's port -------------------------------------------------------------------------------------------

    def send(self, effect: ef.SendToApp) -> None:
        self._node.checker.given_to_app(effect.data)
        if self.app is None or self._closing:
            return
        self._to_app.append(bytes(effect.data))
        self._read_later()

    def close_app(self, effect: ef.CloseApp) -> None:
        if self.app is None:
            return
        self._closing = True
        if not self._reading:
            self._reading = True
            self._clock.after(20 * US, self._reads, self._life)

    def pause(self, effect: ef.PauseApp) -> None:
        self._world.marks["app paused"] += 1
        self._paused = True

    def resume(self, effect: ef.ResumeApp) -> None:
        self._paused = False
        self._write_later()

    def flush(self) -> Sequence[ev.Event]:
        return ()

    def pop_sent_events(self) -> Sequence[ev.Event]:
        taken_bytes, self._taken_bytes = self._taken_bytes, 0
        return [ev.AppSent(taken_bytes)] if taken_bytes else ()

    # --- acts of the app ---------------------------------------------------------------------------------------------

    def _read_later(self) -> None:
        if not self._reading:
            self._reading = True
            self._clock.after(self._rng.random() * 60 * US * self._slow, self._reads, self._life)

    def _reads(self, life: int) -> None:
        if life != self._life or self.app is None:
            return
        self._reading = False
        pending = self._to_app
        if pending:
            spread = self._rng.random()
            if spread < 0.6:
                data = b"".join(pending)
                pending.clear()
            else:
                data = pending.popleft()
                if spread > 0.9 and len(data) > 1:
                    cut = 1 + int(self._rng.random() * (len(data) - 1))
                    pending.appendleft(data[cut:])
                    data = data[:cut]
            try:
                self.app.receive(data)
            except Death:
                self._dies(self.app)
                return
            self._taken_bytes += len(data)
            if self._node.waits_for_app:
                self._node.post(*self.pop_sent_events())
            self._has_run()
        if pending:
            self._read_later()
        elif self._closing:
            self._is_gone()

    def _has_run(self) -> None:
        app = self.app
        assert app is not None
        if app.out:
            self._to_core += app.out
            app.out.clear()
            self._write_later()
        if app.is_restless and not self._acting:
            self._acting = True
            self._clock.after(self._rng.random() * 150 * US, self._acts, self._life)
        due_ns = app.next_due_ns
        if due_ns is not None and (self._time_due_ns is None or due_ns < self._time_due_ns):
            self._time_due_ns = due_ns
            self._clock.after(max(0, due_ns - app.time_ns(self._clock.now_ns)), self.look_at_clock, self._life)

    def look_at_clock(self, life: int | None = None) -> None:
        """Tell the app the time, if due. ``life``: which one set the timer; None: the clock has moved."""
        if self.app is None or life not in (None, self._life):
            return
        self._time_due_ns = None
        due_ns = self.app.next_due_ns
        if due_ns is not None and due_ns <= (time_ns := self.app.time_ns(self._clock.now_ns)):
            self._world.marks["time told to the app's clock"] += 1
            self.app.log_time(time_ns)
        self._has_run()

    def _acts(self, life: int) -> None:
        if life != self._life or self.app is None:
            return
        more = self.app.act()
        self._has_run()
        self._acting = more
        if more:
            self._clock.after(20 * US + self._rng.random() * 250 * US, self._acts, life)

    def _write_later(self) -> None:
        if self._to_core and not self._writing and not self._paused and not self._closing:
            self._writing = True
            self._clock.after(self._rng.random() * 40 * US, self._writes, self._life)

    def _writes(self, life: int) -> None:
        if life != self._life:
            return
        self._writing = False
        if self._paused or self._closing:
            return
        size_bytes = len(self._to_core)
        if self._rng.random() < 0.3:
            size_bytes = 1 + int(self._rng.random() * size_bytes)
        data = bytes(self._to_core[:size_bytes])
        del self._to_core[:size_bytes]
        self._node.post(ev.AppData(data))
        self._write_later()
