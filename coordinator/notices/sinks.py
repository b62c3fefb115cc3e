"""Sinks for notices: text and JSON lines, rate limit, readiness; set up once at the start."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol, TextIO

from msgspec.structs import replace

from immortal.coordinator.core.notices import CheckpointTaken, Level, Notice, Recovered
from immortal.protocol.safe_output import RateLimit, logfmt_value, printable, printable_json


class Sink(Protocol):
    """Receiver of notices. It raises nothing: a notice must not stop the part that emits it."""

    def emit(self, notice: Notice) -> None: ...


class Line(Notice):
    """Notice for people, without a type of its own. ``about``: its kind for the rate limit, if others can cause it."""

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
    """Sink that passes notices on to all of ``sinks``. ``instance``: the name of the instance that they are about.

    ``kind`` of a line: the rate of each kind is limited, see :class:`RateLimitedSink`. It must not contain what a
    stranger makes up.
    """

    def __init__(self, instance: str, *sinks: Sink) -> None:
        self.instance = instance
        self._sinks: Sequence[Sink] = sinks

    def emit(self, notice: Notice) -> None:
        for sink in self._sinks:
            sink.emit(notice)

    def info(self, message: str, *, kind: Hashable | None = None, **values: object) -> None:
        self.emit(Line(message, values, kind))

    def warning(self, message: str, *, kind: Hashable | None = None, **values: object) -> None:
        self.emit(WarningLine(message, values, kind))

    def error(self, message: str, *, kind: Hashable | None = None, **values: object) -> None:
        self.emit(ErrorLine(message, values, kind))


# Durations outside the core, given only if a sink measures them.


class TimedNotice(Notice):
    level = "trace"
    template = "{seconds} s"
    seconds: float


class CommitTimed(TimedNotice):
    """A transaction is durable, with those that were joined to it."""


class SyncTimed(TimedNotice):
    """An entry of the journal, or a transaction of LMDB's, is on the disk: a part of a commit, or of a trim."""


def notice_types(base: type[Notice] = Notice) -> Iterator[type[Notice]]:
    """Yield all types of notices that are emitted, except lines, which have no type of their own."""
    for one in base.__subclasses__():
        if not issubclass(one, Line):
            if not one.__name__.startswith("_") and one is not TimedNotice:
                yield one
            yield from notice_types(one)


class ReadinessSink:
    """Sink that calls ``on_ready`` when the instance is ready: at each recovery, and at the first checkpoint of a new
    app."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        self._was_ready = False

    def emit(self, notice: Notice) -> None:
        if isinstance(notice, Recovered) or (isinstance(notice, CheckpointTaken) and not self._was_ready):
            self._was_ready = True
            self._on_ready()


LOG_LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")


class LineSink:
    """Sink that writes a line to ``stream`` for each notice of ``level`` or above; write errors are ignored. Threads
    may share it."""

    def __init__(self, instance: str, stream: TextIO, level: Level) -> None:
        self.instance = instance
        self._stream = stream
        self._levels = frozenset(LOG_LEVELS[LOG_LEVELS.index(level) :])
        self._lock = threading.Lock()

    def emit(self, notice: Notice) -> None:
        if notice.level in self._levels:
            line = self.line(notice)
            with self._lock, contextlib.suppress(OSError, ValueError):  # the reader of the stream is gone
                self._stream.write(f"{line}\n")
                self._stream.flush()

    def line(self, notice: Notice) -> str:
        """Return ``notice`` as one printable line, without its end."""
        raise NotImplementedError


class TextLineSink(LineSink):
    """Sink that writes lines for people: ``12:00:01.250 info    counter  recovered  epoch=4 sequence_id=41``."""

    def line(self, notice: Notice) -> str:
        now_s = time.time()
        clock = f"{time.strftime('%H:%M:%S', time.localtime(now_s))}.{int(now_s % 1 * 1000):03d}"
        line = printable(f"{clock} {notice.level:<7} {self.instance}  {notice.text}")
        values = " ".join(f"{key}={logfmt_value(value)}" for key, value in notice.values().items() if value is not None)
        return f"{line}  {values}" if values else line


class JsonLineSink(LineSink):
    """Sink that writes lines for machines: a JSON object each, with all fields of the notice and its type.

    {"time": "2026-01-31T12:00:01.250102Z", "level": "info", "instance": "counter", "message": "recovered",
     "notice": "Recovered", "epoch": 4, "sequence_id": 41}
    """

    def line(self, notice: Notice) -> str:
        time_text = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        front = {"time": time_text, "level": notice.level, "instance": self.instance, "message": notice.text}
        if not isinstance(notice, Line):
            front["notice"] = type(notice).__name__
        return printable_json(
            {**front, **notice.fields(), **front}, default=str
        )  # the common fields are at the front, and have priority


class RateLimitedSink:
    """Sink that passes a few notices of each kind on to ``sink``, since strangers, peers, clients and apps can cause
    notices at any rate. The last one left out is passed on later, with the number of those left out."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._limit = RateLimit()
        self._left_out: dict[Hashable, Notice] = {}  # by kind, the last one left out

    def emit(self, notice: Notice) -> None:
        kind = notice.kind()
        if kind is None:
            self._sink.emit(notice)
            return
        left_out = self._limit.admit(kind, time.monotonic_ns())
        kind = self._limit.counted_as(kind)
        if left_out is None:
            self._left_out[kind] = notice
        else:
            self._left_out.pop(kind, None)
            self._emit_with_count(notice, left_out)

    def next_deadline_ns(self) -> int | None:
        """Return the time (monotonic clock, ns) at which :meth:`process` must run; None for never."""
        return min(map(self._limit.next_ns, self._left_out)) if self._left_out else None

    def process(self) -> None:
        """Pass on the left-out notices that are due."""
        if not self._left_out:
            return
        now_ns = time.monotonic_ns()
        for kind, notice in list(self._left_out.items()):
            if self._limit.next_ns(kind) <= now_ns:
                del self._left_out[kind]
                left_out = self._limit.admit(kind, now_ns) or 1
                self._emit_with_count(notice, left_out - 1)  # the one passed on does not count

    def _emit_with_count(self, notice: Notice, left_out: int) -> None:
        self._sink.emit(replace(notice, left_out=left_out) if left_out else notice)


LOG_FORMATS = ("human", "json")


def configure(
    instance: str, *, level: Level = "info", log_format: str = "human", stream: TextIO | None = None
) -> Notices:
    """Return :class:`Notices` that write lines to ``stream`` (default stderr); the logging module writes there, too."""
    kind = JsonLineSink if log_format == "json" else TextLineSink
    sink = kind(instance, stream or sys.stderr, level)
    logger = logging.getLogger("immortal.coordinator")
    logger.handlers[:] = [_LoggingHandler(sink)]
    logger.propagate = False
    logger.setLevel(level.upper())
    return Notices(instance, sink)


def warnings_on_stderr(instance: str) -> Notices:
    """Return :class:`Notices` that write warnings to stderr, for a command that uses parts of a coordinator."""
    return Notices(instance, RateLimitedSink(TextLineSink(instance, sys.stderr, "warning")))


class _LoggingHandler(logging.Handler):
    """Handler that passes records of the logging module, which the messenger uses, on to a sink."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        kind = ErrorLine if record.levelno >= logging.ERROR else WarningLine
        traceback = {"traceback": logging.Formatter().formatException(record.exc_info)} if record.exc_info else {}
        self._sink.emit((kind if record.levelno >= logging.WARNING else Line)(record.getMessage(), traceback))
