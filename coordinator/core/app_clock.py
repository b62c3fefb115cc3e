"""What the app is told of its instance's clock: it has none of its own, so there is one time for both processes.

It is told before its first record, and whenever the clock has moved otherwise than the steady clock of the machine.
Steps go with it: the app logs each once, since what is to last a while must last no less for it.
"""

from __future__ import annotations

from collections.abc import Callable

from immortal.coordinator.core.clock import STEPS_MAX
from immortal.coordinator.core.events import ClockMoved
from immortal.coordinator.core.session import AppSession
from immortal.protocol.extensions import AppTime, encode_app_time
from immortal.protocol.messages import MessageType


class AppClock:
    """``send``: gives the app a control record."""

    def __init__(self, session: AppSession, send: Callable[[MessageType, bytes], None]) -> None:
        self._session = session
        self._send = send
        self._steps: list[ClockMoved] = []
        self._last: ClockMoved | None = None
        self._introduced = False  # the app may be sent control records

    def connected(self) -> None:
        self._introduced = False

    def introduce(self) -> None:
        """All steps are told again: the app knows which of them its log has."""
        if not self._introduced:
            self._introduced = True
            for event in self._steps:
                self._tell(event)
            if self._last is not None:
                self._tell(ClockMoved(self._last.time_ns, self._last.steady_ns))

    def moved(self, event: ClockMoved) -> None:
        self._last = event
        if event.jumped_ns:
            self._steps = [*self._steps, event][-STEPS_MAX:]
        if self._introduced:
            self._tell(event)

    def _tell(self, event: ClockMoved) -> None:
        if MessageType.APP_TIME in self._session.extensions:
            time = AppTime(event.time_ns, event.steady_ns, event.jumped_ns)
            self._send(MessageType.APP_TIME, encode_app_time(time))
