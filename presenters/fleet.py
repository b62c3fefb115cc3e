"""Status of all instances and of the streams between them, about a second old, with rates.

All instances are asked once for all viewers, and no viewer waits for a slow one.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from msgspec import Struct

from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.identity import verify_value
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.log.record_contents import batches, rpcs
from immortal.coordinator.operator import control
from immortal.presenters.status import (
    FAILED,
    NOT_STARTED,
    READY,
    RUNNING,
    STOPPED,
    UNKNOWN,
    instance_status,
    problems,
    stopped_status,
)
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import RpcKind
from immortal.protocol.record import HEADER_SIZE_BYTES
from immortal.protocol.trailer import BatchKind

FRESH_S = 1.0
STOPPED_FRESH_S = 15.0  # a stopped instance is read from its log, and changes when it is started
TIMES_FRESH_S = 15.0
TIMED_RECORDS = 200  # the last ones of a log, whose times tell how long messages take to it
ASKED_AT_ONCE_MAX = 2  # more would keep the interpreter from pages; one without an answer delays half of the others
RATE_SPAN_S = 5.0
RATE_SPAN_S_MIN = 0.5
FIRST_WAIT_S = 0.1  # of a page, for instances that are not known yet: later results are sent to the page as events
RECORDS, RECEIVED, SENT = "records", "received", "sent"

Counter = tuple[str, str]
"""Counter of an instance: RECORDS, RECEIVED or SENT, and the other instance of the stream ("" for RECORDS)."""


class StreamTimes(NamedTuple):
    """Times of messages from sending to the receiver's log, and whether some of them were calls, not answers."""

    p50_ns: int
    p99_ns: int
    has_calls: bool


@dataclass(frozen=True, eq=False)
class Row:
    """Row of one instance. ``tone``: good, busy, off or bad. ``status``: as of `immortal status --json`.

    ``handlers``: how many wait; ``oldest``: the one that waits for longest ("task", "handler", "since_ns").
    ``rates``: {} until two samples of it are known. ``times``: by the sender's name.
    """

    name: str
    state: str
    tone: str
    role: str = ""
    version: int | None = None
    records: int | None = None
    backlog: int | None = None
    unacknowledged: int = 0
    waiting_bytes: int = 0
    handlers: int = 0
    oldest: dict[str, Any] = field(default_factory=dict)
    checkpoint_age_s: float | None = None
    log_bytes: int | None = None
    problems: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict, repr=False)
    rates: Mapping[Counter, float] = field(default_factory=dict)
    times: Mapping[str, StreamTimes] = field(default_factory=dict)

    @property
    def oldest_s(self) -> float | None:
        return max(0.0, time.time() - self.oldest["since_ns"] / 1e9) if self.oldest else None

    def rate(self, kind: str) -> float | None:
        """Return records, or messages of all other instances, per second; None if it is not known."""
        if not self.rates:
            return None
        return sum(rate for (one, peer), rate in self.rates.items() if one == kind and peer != self.name)


class Stream(Struct, frozen=True):
    """Stream of messages between two instances. ``has_calls``: None if it is not known, False for answers alone."""

    source: str
    to: str
    rate: float | None
    unacknowledged: int
    waiting_bytes: int
    times: StreamTimes | None
    has_calls: bool | None
    problem: str


def unacknowledged(output: Mapping[str, Any]) -> int:
    """Return how many messages of an output its receiver has not acknowledged."""
    made = output.get("position", output.get("position_at_checkpoint")) or 0
    return max(0, made - (output.get("acknowledged") or 0))


def streams(rows: Iterable[Row]) -> list[Stream]:
    """Return the streams between instances, the busiest first."""
    known = {row.name: row for row in rows}
    pairs = {(name, to) for name, row in known.items() for to in row.status.get("outputs", {})}
    pairs |= {(source, name) for name, row in known.items() for source in row.status.get("inputs", {})}
    found = [_stream(source, to, known) for source, to in pairs if source != to]
    return sorted(found, key=lambda one: (-(one.rate or 0.0), -one.unacknowledged, one.source, one.to))


def _stream(source: str, to: str, rows: Mapping[str, Row]) -> Stream:
    sender, receiver = rows.get(source), rows.get(to)
    output = sender.status.get("outputs", {}).get(to, {}) if sender else {}
    times = receiver.times.get(source) if receiver else None
    answered = sender.times.get(to) if sender else None
    has_calls = times.has_calls if times else False if answered and answered.has_calls else None
    rate = sender.rates.get((SENT, to)) if sender else None
    if rate is None and receiver:
        rate = receiver.rates.get((RECEIVED, source))
    waits = unacknowledged(output)
    problem = str(output.get("error") or "")
    if not problem and waits and output.get("connected") is False:
        problem = f"{to} is not connected"
    return Stream(source, to, rate, waits, output.get("waiting_bytes") or 0, times, has_calls, problem)


class Rates:
    """Rates of counters over the last RATE_SPAN_S, begun anew when an instance restarts."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[float, object, Mapping[Counter, int]]]] = {}

    def sample(self, name: str, now_s: float, run: object, counts: Mapping[Counter, int]) -> dict[Counter, float]:
        """Take a sample and return the rates. ``run``: changes with each start, after which counters may go back."""
        samples = [*self._samples.get(name, ()), (now_s, run, counts)]
        for _, before, counted in samples[-2:-1]:
            if run != before or any(counts.get(key, 0) < count for key, count in counted.items()):
                del samples[:-1]
        while len(samples) > 2 and now_s - samples[0][0] > RATE_SPAN_S:
            del samples[0]
        self._samples[name] = samples
        first_s, _, first = samples[0]
        if now_s - first_s < RATE_SPAN_S_MIN:
            return {}
        return {key: (count - first.get(key, 0)) / (now_s - first_s) for key, count in counts.items()}

    def forget(self, name: str) -> None:
        self._samples.pop(name, None)


class Fleet:
    """Last known rows of all instances. ``locked``: locks a log, which a process can't open twice. It takes the
    instance's settings and, if the usual time is too long, for how many seconds it may wait."""

    def __init__(
        self,
        registry: Registry,
        locked: Callable[..., AbstractContextManager[None]],
        fresh_s: float = FRESH_S,
    ) -> None:
        self._registry, self._locked, self._fresh_s = registry, locked, fresh_s
        self._refreshed = threading.Condition()  # around the next three; notified when a look is over
        self._rows: dict[str, Row] = {}  # the last known row of each
        self._refreshed_s = -fresh_s
        self._background: threading.Thread | None = None
        self._stopped: dict[str, tuple[float, dict[str, Any]]] = {}
        self._times: dict[str, tuple[float, int, dict[str, StreamTimes]]] = {}  # (when, last record, times)
        self._rates = Rates()
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE_MAX, "fleet")

    def refresh(self, wait_s: float) -> None:
        """Ask all instances again, in the background, if their rows are old; wait at most ``wait_s`` for the end."""
        with self._refreshed:
            if self._background is None and time.monotonic() - self._refreshed_s >= self._fresh_s:
                self._background = threading.Thread(target=self._refresh, name="fleet", daemon=True)
                self._background.start()
            if wait_s:
                self._refreshed.wait_for(lambda: self._background is None, wait_s)

    def rows(self) -> list[Row]:
        """Return the last known rows in the order of names, with a placeholder for an instance not known yet."""
        try:
            names = self._registry.names()
        except ImmortalError:  # the folder can't be read now
            return []
        with self._refreshed:
            is_first = not all(name in self._rows for name in names)
        self.refresh(FIRST_WAIT_S if is_first else 0.0)
        with self._refreshed:
            return [self._rows.get(name) or Row(name, "asked just now", "busy") for name in names]

    def row(self, name: str) -> Row:
        """Ask one instance now and return its row. Raises RegistryError if it is not registered."""
        self._registry.load(name)
        return self._row(name)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _refresh(self) -> None:
        try:
            names = self._registry.names()
            for done in [self._pool.submit(self._store_row, name) for name in names]:
                done.result()
        except (ImmortalError, RuntimeError, CancelledError):  # the folder can't be read now; the pool was closed
            names = []
        with self._refreshed:
            self._rows = {name: self._rows[name] for name in names if name in self._rows}
            self._refreshed_s, self._background = time.monotonic(), None
            self._refreshed.notify_all()

    def _store_row(self, name: str) -> None:
        row = self._row(name)
        with self._refreshed:
            self._rows[name] = row

    def _row(self, name: str) -> Row:
        status = self._status(name)
        outputs, waiting = status.get("outputs", {}).values(), status.get("waiting", {})
        records = status.get("sequence_id")
        return Row(
            name,
            status["state"],
            _tone(status),
            {"writing": "primary", "following": "standby"}.get(str(status.get("role")), str(status.get("role") or "")),
            status.get("version"),
            None if records is None else records + 1,
            status.get("backlog_records"),
            sum(map(unacknowledged, outputs)),
            sum(one.get("waiting_bytes") or 0 for one in outputs),
            waiting.get("count", 0),
            waiting.get("oldest", {}),
            (status.get("checkpoint") or {}).get("age_s"),
            (status.get("log") or {}).get("used_bytes"),
            [problem.removeprefix(f"{name}: ") for problem in problems(status)],
            status,
            self._current_rates(name, status),
            self._current_times(name, status),
        )

    def _status(self, name: str) -> dict[str, Any]:
        now_s = time.monotonic()
        try:
            settings = self._registry.load(name)
            if control.running(settings.folder) is not None:
                self._stopped.pop(name, None)
                return instance_status(self._registry, name)
            known = self._stopped.get(name)
            if known is None or now_s - known[0] >= STOPPED_FRESH_S:
                with self._locked(settings):
                    known = self._stopped[name] = now_s, stopped_status(settings)
            status = instance_status(self._registry, name, known[1])
            if status["state"] == STOPPED and control.path(settings.folder).exists():  # a clean stop removes the file
                died = f"its process has died: 'immortal run {name}' recovers it"
                status |= {"died": True, "problems": [*status.get("problems", ()), died]}
            return status
        except (ImmortalError, OSError) as error:
            return {"name": name, "phase": UNKNOWN, "state": UNKNOWN, "error": str(error)}

    def _current_rates(self, name: str, status: dict[str, Any]) -> dict[Counter, float]:
        if "pid" not in status or status["phase"] not in READY:  # a recovery makes again what was counted before
            self._rates.forget(name)
            return {}
        counts = {(RECORDS, ""): status.get("sequence_id", -1) + 1}
        counts |= {(RECEIVED, peer): one.get("position") or 0 for peer, one in status.get("inputs", {}).items()}
        counts |= {(SENT, peer): one.get("position") or 0 for peer, one in status.get("outputs", {}).items()}
        return self._rates.sample(name, time.monotonic(), (status["pid"], status.get("epoch")), counts)

    def _current_times(self, name: str, status: dict[str, Any]) -> dict[str, StreamTimes]:
        """Return the times of messages to an instance, by sender, as its log had them some seconds ago."""
        known_s, last, times = self._times.get(name, (-TIMES_FRESH_S, -1, {}))
        now_s, newest = time.monotonic(), status.get("sequence_id", -1)
        if newest not in (-1, last) and now_s - known_s >= TIMES_FRESH_S:
            try:
                settings = self._registry.load(name)
                with self._locked(settings, 0.0), own_logs.open_reader(settings, check=False) as reader:
                    times = times | stream_times(reader, [source for source, one in times.items() if one.has_calls])
            except (ImmortalError, OSError):
                pass  # a request reads it, or its status says what is wrong
            self._times[name] = now_s, newest, times
        return times


def stream_times(reader: LogReader, callers: Iterable[str] = ()) -> dict[str, StreamTimes]:
    """Read how long the messages of a log's last records took, by sender. ``callers``: those known to send calls."""
    first, last = reader.ends()
    took: defaultdict[str, list[int]] = defaultdict(list)
    calling = set(callers)
    for logged in reader.records(max(first, last - TIMED_RECORDS + 1), last):
        if logged.problem is not None:
            continue
        header, trailer = verify_value(logged.value, logged.sequence_id, reader.identity.committer_id)
        content = logged.value[HEADER_SIZE_BYTES : header.size_bytes]
        for batch, source in zip(batches(content), trailer.batches, strict=False):
            if source.kind != BatchKind.STREAM or not source.name or source.send_time_ns <= 0:
                continue
            took[source.name].append(max(0, trailer.time_ns - source.send_time_ns))
            for _, rpc in islice(rpcs(batch.payload), 1):  # the first message stands for its batch
                if rpc.kind == RpcKind.CALL:
                    calling.add(source.name)
    return {
        name: StreamTimes(times[len(times) // 2], times[len(times) * 99 // 100], name in calling)
        for name, times in ((name, sorted(times)) for name, times in took.items())
    }


def _tone(status: dict[str, Any]) -> str:
    state = status["state"]
    if "error" in status or state == UNKNOWN or state.startswith(FAILED):
        return "bad"
    if state in (STOPPED, NOT_STARTED):
        return "bad" if status.get("died") else "off"
    return "good" if state == RUNNING else "busy"
