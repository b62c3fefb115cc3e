"""Finds the line of user code that changes something, while one message is handled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from immortal.appsdk.running.debugger import is_of_user
from immortal.appsdk.state.tree import Tree
from immortal.appsdk.waiting.tasks import describe_place
from immortal.replay.travel.values import same


class LineWatch:
    """Trace function that notes the last line of user code after which ``look()`` returned another value.

    ``package``: that of the app's class. ``running()``: the async handler that runs, or None. ``is_late()``: True if
    the search must stop.
    """

    def __init__(
        self, look: Callable[[], Tree], package: str, running: Callable[[], Any], is_late: Callable[[], bool]
    ) -> None:
        self._look = look
        self._package = package
        self._running = running
        self._is_late = is_late
        self._before = sys.gettrace()
        self._outside = set(_frames(sys._getframe()))  # they ran before
        self._at: tuple[FrameType, int, Any] | None = None  # the line that runs
        self.found: tuple[FrameType, int, Any] | None = None  # the last one that changed it, and who ran it
        self.changed = self.is_cut = self._is_over = False
        self._value = look()
        sys.settrace(self)

    def __call__(self, frame: FrameType, event: str, argument: object) -> LineWatch | None:
        if not is_of_user(frame, self._package):
            return None
        self._compare()
        if self._is_late():
            self.is_cut = self._is_over = True
            sys.settrace(self._before)
            return None
        at = self._outer(frame) if event == "return" else frame
        self._at = at, at.f_lineno, self._running()
        return self

    def _outer(self, frame: FrameType) -> FrameType:
        """Return the user's frame that continues when this one returns; this one if there is none."""
        for outer in _frames(frame.f_back):
            if outer in self._outside:
                break
            if is_of_user(outer, self._package):
                return outer
        return frame

    def _compare(self) -> None:
        try:
            value = self._look()
        except Exception:  # of an object that is incomplete
            return
        if not same(value, self._value):
            self._value, self.found, self.changed = value, self._at, True

    def stop(self) -> None:
        """Compare for the last time. Only the first call does so."""
        if not self._is_over:
            self._is_over = True
            sys.settrace(self._before)
            self._compare()

    def place(self) -> dict[str, Any] | None:
        return None if self.found is None else describe_place(*self.found[:2])


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
