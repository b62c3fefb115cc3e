"""Sinks for notices: text and JSON lines, rate limit, readiness; set up once at the start."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol, TextIO

from msgspec.structs import replace

from immortal.coordinator.core.notices import CheckpointTaken, Level, Notice, Recovered
from immortal.protocol.safe_output import BURST, RateLimit, printable, printable_json


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


# What takes how long around the core: for sinks that measure. Said only where one does.


class TimedNotice(Notice):
    level = "trace"
    template = "{seconds} s"
    seconds: float


class CommitTimed(TimedNotice):
    """A transaction is durable, with those that were joined to it."""


class SyncTimed(TimedNotice):
    """An entry of the journal, or a transaction of LMDB's, is on the disk: a part of a commit, or of a trim."""


# When the supervisor hears that its coordinator is ready: an app, or the next one, is recovered and takes input.


class Readiness:
    """A sink: ``tell`` is called at each recovery, and at the first checkpoint of an app that is begun."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._was_ready = False

    def take(self, notice: Notice) -> None:
        if isinstance(notice, Recovered) or (isinstance(notice, CheckpointTaken) and not self._was_ready):
            self._was_ready = True
            self._tell()


# What both forms of lines share: which notices are lines, and that a line that can't be written stops nobody.


LOG_LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")


class Lines:
    """A sink: one line of ``stream`` for each notice of ``level`` or above. Threads may share it."""

    def __init__(self, instance: str, stream: TextIO, level: Level) -> None:
        self.instance = instance
        self._stream = stream
        self._levels = frozenset(LOG_LEVELS[LOG_LEVELS.index(level) :])
        self._lock = threading.Lock()

    def take(self, notice: Notice) -> None:
        if notice.level in self._levels:
            line = self.line(notice)
            with self._lock, contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                self._stream.write(f"{line}\n")
                self._stream.flush()

    def line(self, notice: Notice) -> str:
        """``notice`` as one line, without its end; what is printable is in one."""
        raise NotImplementedError


# Lines for people.
#
# 12:00:01.250 info    counter  recovered  epoch=4 sequence_id=41


class TextLineSink(Lines):
    def line(self, notice: Notice) -> str:
        now_s = time.time()
        clock = f"{time.strftime('%H:%M:%S', time.localtime(now_s))}.{int(now_s % 1 * 1000):03d}"
        line = printable(f"{clock} {notice.level:<7} {self.instance}  {notice.text}")
        values = " ".join(f"{key}={_shown(value)}" for key, value in notice.values().items() if value is not None)
        return f"{line}  {values}" if values else line


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    if text and text.isprintable() and not any(one in ' "=' for one in text):
        return text
    return printable_json(text)


# Lines for machines: a JSON object each.
#
# {"time": "2026-01-31T12:00:01.250102Z", "level": "info", "instance": "counter", "message": "recovered",
#  "notice": "Recovered", "epoch": 4, "sequence_id": 41}


class JsonLineSink(Lines):
    """All fields of a notice, also those in its text, and what it is called: for who looks for more than words."""

    def line(self, notice: Notice) -> str:
        time_text = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        front = {"time": time_text, "level": notice.level, "instance": self.instance, "message": notice.text}
        if not isinstance(notice, Line):
            front["notice"] = type(notice).__name__
        return printable_json({**front, **notice.fields(), **front}, default=str)  # what a reader looks for comes first


# Notices that a stranger, a peer, a client or an app can cause at any rate: a few of each kind, and counts.


LINES_MAX = BURST  # of one kind at once


class Limited:
    """A sink that gives ``sink`` a few notices of each kind; the last one that was left out is given later."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._limit = RateLimit()
        self._left_out: dict[Hashable, Notice] = {}  # the last one of its kind

    def take(self, notice: Notice) -> None:
        kind = notice.kind()
        if kind is None:
            self._sink.take(notice)
            return
        left_out = self._limit.admit(kind, time.monotonic_ns())
        kind = self._limit.counted_as(kind)
        if left_out is None:
            self._left_out[kind] = notice
        else:
            self._left_out.pop(kind, None)
            self._give(notice, left_out)

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called, on the monotonic clock."""
        return min(map(self._limit.next_ns, self._left_out)) if self._left_out else None

    def process(self) -> None:
        """Give what was left out and is due."""
        if not self._left_out:
            return
        now_ns = time.monotonic_ns()
        for kind, notice in list(self._left_out.items()):
            if self._limit.next_ns(kind) <= now_ns:
                del self._left_out[kind]
                left_out = self._limit.admit(kind, now_ns) or 1
                self._give(notice, left_out - 1)  # it was counted as well

    def _give(self, notice: Notice, left_out: int) -> None:
        self._sink.take(replace(notice, left_out=left_out) if left_out else notice)


# A process's lines, set up once at its start.


LOG_FORMATS = ("human", "json")


def configure(
    instance: str, *, level: Level = "info", log_format: str = "human", stream: TextIO | None = None
) -> Notices:
    """One line on ``stream`` (stderr) for each notice, also for what modules log that know of no instance."""
    lines: Lines
    if log_format == "json":
        lines = JsonLineSink(instance, stream or sys.stderr, level)
    else:
        lines = TextLineSink(instance, stream or sys.stderr, level)
    logger = logging.getLogger("immortal.coordinator")
    logger.handlers[:] = [_FromLogging(lines)]
    logger.propagate = False
    logger.setLevel(level.upper())
    return Notices(instance, lines)


def warnings_on_stderr(instance: str) -> Notices:
    """For a command that makes use of parts of a coordinator, and has lines of its own."""
    return Notices(instance, Limited(TextLineSink(instance, sys.stderr, "warning")))


class _FromLogging(logging.Handler):
    """What is said with the logging module, by the messenger above all."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        kind = ErrorLine if record.levelno >= logging.ERROR else WarningLine
        traceback = {"traceback": logging.Formatter().formatException(record.exc_info)} if record.exc_info else {}
        self._sink.take((kind if record.levelno >= logging.WARNING else Line)(record.getMessage(), traceback))
