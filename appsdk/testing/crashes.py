"""Crashes at every point of a test: the same test again and again, each time with one crash more to the right."""

from __future__ import annotations

from typing import Literal, Protocol

from immortal.appsdk.calls.run_failures import PassesThrough

Victim = Literal["instance", "app"]
"""What crashes: the app and its coordinator together, with all that is not durable, or the app alone."""


class CrashNow(PassesThrough):
    """The process dies between two of its steps. Not an Exception: nothing on the way is to catch it."""


class Mortal(Protocol):
    """An instance, as who lets it die knows it. ``definition`` None: it never dies; ``app`` None: its app is gone."""

    name: str

    @property
    def definition(self) -> object | None: ...
    @property
    def app(self) -> object | None: ...
    def lose_app(self) -> None: ...


class CrashPlan:
    """Counts the points at which an instance could die, and lets it die at ``point`` (from 1; 0: never)."""

    def __init__(self, point: int = 0, victim: Victim = "instance") -> None:
        self.count = 0
        self.happened = ""  # which instance has crashed, and where
        self._point = point
        self._victim = victim

    def point(self, node: Mortal) -> None:
        """``node`` is between two steps. Raises CrashNow where it is to die."""
        if node.definition is None:
            return
        self.count += 1
        if self.count != self._point:
            return
        if self._victim == "instance":
            self.happened = f"with app and coordinator of {node.name!r} crashed at point {self._point}"
            raise CrashNow
        if node.app is not None:
            self.happened = f"with the app of {node.name!r} crashed at point {self._point}"
            node.lose_app()
