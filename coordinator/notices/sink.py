"""Where notices go, and how the parts around the core say theirs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from immortal.coordinator.core.notices import Notice


class Sink(Protocol):
    """Does something with notices, and raises nothing: what is told must not stop who tells it."""

    def take(self, notice: Notice) -> None: ...


class Line(Notice):
    """A notice that only people read: it has no type of its own. ``about``: its kind, where others can cause it."""

    template = ""
    message: str
    named: Mapping[str, object] = {}
    about: Hashable | None = None

    @property
    def text(self) -> str:
        return self.message

    def fields(self) -> dict[str, object]:
        return {**self.named, "left_out": self.left_out} if self.left_out else dict(self.named)

    def values(self) -> dict[str, object]:
        return self.fields()

    def kind(self) -> Hashable | None:
        return self.about


class WarningLine(Line):
    level = "warning"


class ErrorLine(Line):
    level = "error"


class Notices:
    """A sink that gives what it is told to all of ``sinks``. ``instance``: whose notices they are.

    ``kind``: few lines of one are written at once, see :class:`coordinator.notices.limited.Limited`. It must not hold
    what a stranger makes up.
    """

    def __init__(self, instance: str, *sinks: Sink) -> None:
        self.instance = instance
        self._sinks: Sequence[Sink] = sinks

    def take(self, notice: Notice) -> None:
        for sink in self._sinks:
            sink.take(notice)

    def info(self, message: str, *, kind: Hashable | None = None, **values: object) -> None:
        self.take(Line(message, values, kind))

    def warning(self, message: str, *, kind: Hashable | None = None, **values: object) -> None:
        self.take(WarningLine(message, values, kind))

    def error(self, message: str, *, kind: Hashable | None = None, **values: object) -> None:
        self.take(ErrorLine(message, values, kind))
