"""Followers of growing logs: they send the spans of new records, round by round.

A file records the position of what was sent, so that the next run continues there. It is written after the endpoint
has the spans, so after a crash a span can be sent twice, with the same ID.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from immortal.coordinator.config import write_atomically
from immortal.protocol import decoding
from immortal.protocol.trailer import BatchKind
from immortal.replay.plan import LogViewError
from immortal.replay.trace.causes import ShadowReplay
from immortal.replay.trace.exporters import Send, send_all
from immortal.replay.trace.messages import Executed, Source, by_time
from immortal.replay.trace.spans import Span, Spans, Waits, handler_id

T = TypeVar("T")

POLL_S = 0.2
GRACE_S = 5.0
RETRY_S_MAX = 30.0  # between two attempts to reach an endpoint that takes nothing
ROUND_RECORDS_MAX = 1_000  # of each log; after them the positions are recorded


class Positions:
    """Next record of each log, kept in a file. ``path`` None: no file."""

    def __init__(self, path: Path | None) -> None:
        """Read the file. Raises LogViewError if it is another kind of file."""
        self._path = path
        self._next: dict[str, list[int]] = {}
        if path is None or not path.exists():
            return
        try:
            self._next = {
                str(name): [int(one), int(two)] for name, (one, two) in decoding.load_json(path.read_text()).items()
            }
        except (ValueError, AttributeError, TypeError):
            raise LogViewError(
                f"{path} is no file that 'immortal trace follow' has written: give another name, or remove it"
            ) from None

    def next_of(self, source: Source) -> int | None:
        """Return the next record of a source; None if the file does not know its log."""
        known = self._next.get(source.instance)
        return known[1] if known is not None and known[0] == source.reader.identity.committer_id else None

    def note(self, sources: Sequence[Source]) -> None:
        """Record ``first`` of each source as its next record. Raises OSError."""
        for source in sources:
            self._next[source.instance] = [source.reader.identity.committer_id, source.first or 0]
        if self._path is not None:
            write_atomically(self._path, json.dumps(self._next).encode())


@dataclass(eq=False)
class _SpanSender(Generic[T]):
    """Sender of spans of logs, round by round, to an endpoint that can be unreachable for a while.

    ``wait(seconds)``: returns True if the sender must end. ``say``: receives problems.
    """

    _logs: Sequence[T]
    _to: Send
    _positions: Positions
    _wait: Callable[[float], bool]
    _report: Callable[[str], None]
    _spans: Spans = field(init=False, default_factory=Spans)
    sent: int = field(init=False, default=0)

    def run(self) -> None:
        """Send spans until ``wait`` returns True. Raises LogError, OSError, the errors of a replay."""
        while not self._round():
            if self._wait(POLL_S):
                break
        with contextlib.suppress(LogViewError):  # handlers without an answer: sent once, without retry
            self.sent += send_all(self._spans.rest(), self._to)

    def _round(self) -> bool:
        """Send the spans that the logs have by now; return True if the sender must end."""
        raise NotImplementedError

    def _send(self, spans: Sequence[Span]) -> bool:
        """Send spans until the endpoint takes them; return True if the sender must end first."""
        delay_s = POLL_S
        while True:
            try:
                self.sent += send_all(spans, self._to)
                return False
            except LogViewError as error:
                self._report(f"{error}; it is tried again")
                if self._wait(delay_s):
                    return True
                delay_s = min(2 * delay_s, RETRY_S_MAX)


class Follower(_SpanSender[Source]):
    """Follower of logs, without replays: of sources, each with its ``first`` record."""

    def _round(self) -> bool:
        while self._choose():
            spans = [span for message in by_time(self._logs) for span in self._spans.spans_of(message)]
            if self._send(spans):
                return True
            for source in self._logs:
                for problem in source.problems:
                    self._report(f"left out: {problem}")
                source.problems.clear()
                source.first = (source.last or 0) + 1
            self._positions.note(self._logs)
        return False

    def _choose(self) -> bool:
        """Set the last record of each source for the next round; return False if no source has a new one."""
        any_new = False
        for source in self._logs:
            begin, (first_kept, end) = source.first or 0, source.reader.ends()
            if begin < first_kept:
                self._report(f"left out: {source.instance}: records {begin} to {first_kept - 1} were trimmed before")
                begin = source.first = first_kept
            source.last = min(end, begin + ROUND_RECORDS_MAX - 1)
            any_new = any_new or source.last >= begin
        return any_new


@dataclass(eq=False)
class ShadowFollower(_SpanSender[ShadowReplay]):
    """Follower of logs with replays: a message waits until its cause is known, GRACE_S at most."""

    clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._by_name = {log.instance: log for log in self._logs}
        self._spans = Spans(self)
        self._waiting: list[tuple[float, Executed]] = []  # (waiting since, message)

    def cause_of(self, caller: str, receiver: str, position: int) -> tuple[int, int, int] | None:
        """Return the cause of a call, like :class:`immortal.replay.trace.spans.Causes`."""
        log = self._by_name.get(caller)
        cause = None if log is None else log.cause(receiver, position)[1]
        return None if log is None or cause is None else (log.committer_id, *cause)

    def waits(self, instance: str) -> Waits | None:
        log = self._by_name.get(instance)
        return None if log is None else log.waits

    def run(self) -> None:
        for log in self._logs:
            log.start()
        try:
            super().run()
        finally:
            for log in self._logs:
                log.stop()

    def _round(self) -> bool:
        now_s = self.clock_s()
        for log in self._logs:
            self._waiting += [(now_s, message) for message in log.take()]
        self._waiting.sort(key=lambda one: one[1].time_ns)
        spans: list[Span] = []
        moved = True
        while moved:  # a message can wait for another one that has just become ready
            waiting, self._waiting = self._waiting, []
            for since_s, message in waiting:
                if now_s - since_s >= GRACE_S or self._is_ready(message):
                    spans += self._spans.spans_of(message)
                else:
                    self._waiting.append((since_s, message))
            moved = 0 < len(self._waiting) < len(waiting)
        if not spans:
            return False
        if self._send(spans):
            return True
        for log in self._logs:
            records = [one.sequence_id for _, one in self._waiting if one.instance == log.instance]
            log.source.first = min([log.taken + 1, *records])
        self._positions.note([log.source for log in self._logs])
        return False

    def _is_ready(self, message: Executed) -> bool:
        own = self._by_name[message.instance]
        is_wait = message.effect is not None or message.told_ns is not None
        if is_wait and not own.has_waits_before(message.sequence_id):
            return False
        log = self._by_name.get(message.caller)
        if log is None or message.kind != BatchKind.STREAM:
            return True
        is_known, cause = log.cause(message.instance, message.position)
        if not is_known or cause is None:
            return is_known
        return cause[0] < log.begins or self._spans.knows(handler_id(log.instance, log.committer_id, *cause))
