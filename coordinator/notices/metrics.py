"""Prometheus metrics of an instance: status, counts of notices, durations, execution wait.

A new metric is a row of STATUS or TIMES; docs/reference/notices.md lists them.

Only a coordinator that serves metrics imports this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from immortal.coordinator.core.notices import CheckpointBegan, CheckpointTaken, Notice, Recovered, Recovering
from immortal.coordinator.notices.sinks import CommitTimed, SyncTimed, TimedNotice, notice_types
from immortal.protocol.errors import ImmortalError
from immortal.protocol.system_methods import OTHER_MESSAGES, TIMES_TASK

Metric = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily
INSTANCE = "instance_name"  # label of every metric

disable_created_metrics()  # type: ignore[no-untyped-call]  # it would be a second series for each metric


UP = "immortal_up", "1 if the coordinator answers"
PHASE = "immortal_phase", "What the instance does"
NOTICES = "immortal_notices", "What was told, also where it became no line"


class StatusMetric(Struct, frozen=True):
    """Metric with a value of the status. ``path``: of the value in `immortal status NAME --json`; ``*`` stands for each
    key of a mapping, which becomes ``label``. ``counts``: it is a counter. ``unit``: factor from the status's unit to
    the metric's. ``absent``: the metric's value if the status has none; None: no metric then."""

    name: str
    text: str
    path: str
    label: str = ""
    counts: bool = False
    unit: float = 1
    absent: float | None = None

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        family = CounterMetricFamily if self.counts else GaugeMetricFamily
        return family(self.name, self.text, labels=[INSTANCE, self.label] if self.label else [INSTANCE])

    def values(self, status: Mapping[str, Any]) -> Iterator[tuple[list[str], float]]:
        """Yield the metric's values in a status, each as (labels after the instance's, value)."""
        front, star, back = self.path.partition("*")
        if not star:
            value = _value_at(status, front)
            value = self.absent if value is None else value * self.unit
            if value is not None:
                yield [], float(value)
            return
        for key, one in (_value_at(status, front) or {}).items():
            value = _value_at(one, back)
            if value is not None:
                yield [key], float(value)


def _value_at(status: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        status = (status or {}).get(name)
    return status


STATUS = (
    StatusMetric("immortal_app_connected", "1 if an app is connected", "app_connected", absent=0),
    StatusMetric("immortal_version", "Version of the app", "version"),
    StatusMetric("immortal_epoch", "Starts of the instance and its apps", "epoch"),
    StatusMetric("immortal_log_records", "Records logged since the first start", "records"),
    StatusMetric("immortal_backlog_records", "Logged and not yet given to the app", "backlog_records"),
    StatusMetric("immortal_app_unsent_bytes", "Given to the app's socket and not taken", "unsent_bytes"),
    StatusMetric("immortal_app_silent_seconds", "For how long the app has taken nothing of what waits", "app_silent_s"),
    StatusMetric("immortal_commit_seconds", "What a commit to the log takes, of late", "commit_ms", unit=1e-3),
    StatusMetric("immortal_clients", "Clients of which the instance knows", "clients.known"),
    StatusMetric("immortal_clients_open_requests", "Requests of clients not answered", "clients.open_requests"),
    StatusMetric("immortal_clients_open_queries", "Queries of clients not answered", "clients.open_queries"),
    StatusMetric("immortal_clients_replies", "Replies kept for clients", "clients.replies"),
    StatusMetric("immortal_clients_replies_bytes", "Size of the replies kept for clients", "clients.replies_bytes"),
    StatusMetric(
        "immortal_clock_ahead_seconds", "How much of a jump of the clock is held back; behind: < 0", "clock.ahead_s"
    ),
    StatusMetric("immortal_clock_jumps", "Jumps of the clock since the start", "clock.jumps"),
    StatusMetric("immortal_app_paused", "1 if the app is not read: disk or peers are behind", "app_paused", absent=0),
    StatusMetric("immortal_log_used_bytes", "What the log needs of its file", "log.used_bytes"),
    StatusMetric("immortal_log_limit_bytes", "Above this it takes no input from peers", "log.limit_bytes"),
    StatusMetric("immortal_log_disk_free_bytes", "Left on the log's disk", "log.free_bytes"),
    StatusMetric("immortal_log_full", "1 if input from peers is refused for want of room", "log_full", absent=0),
    StatusMetric("immortal_checkpoint_age_seconds", "Age of the last checkpoint", "checkpoint.age_s"),
    StatusMetric("immortal_checkpoint_size_bytes", "Size of the last checkpoint", "checkpoint.size_bytes"),
    StatusMetric(
        "immortal_checkpoints_failed",
        "Checkpoints in a row that the state could not be saved for",
        "unsaved.failures",
        absent=0,
    ),
    StatusMetric("immortal_unsaved_seconds", "For how long the state could not be saved", "unsaved.for_s", absent=0),
    StatusMetric("immortal_dead_letters", "Dead letters that are kept", "letters.count"),
    StatusMetric("immortal_dead_letters_bytes", "Size of the dead letters that are kept", "letters.bytes"),
    StatusMetric(
        "immortal_dead_letters_lost", "Dead letters that there was no room for", "letters.lost", counts=True, absent=0
    ),
    StatusMetric("immortal_suspect_runs", "Runs in a row that one message may have ended", "suspect.runs", absent=0),
    StatusMetric(
        "immortal_handling_seconds", "What the handler that takes long has taken so far", "handling.for_s", absent=0
    ),
    StatusMetric(
        "immortal_verdicts", "Messages that failed alone, since the start", "verdicts.*", label="kind", counts=True
    ),
    StatusMetric(
        "immortal_received_messages", "Messages of a peer in the log", "inputs.*.position", label="peer", counts=True
    ),
    StatusMetric(
        "immortal_granted_window_bytes", "What a peer may have on its way here", "inputs.*.window_bytes", label="peer"
    ),
    StatusMetric("immortal_held_up", "1 if the app is held up for the peer", "held_up.*", label="peer"),
    StatusMetric(
        "immortal_refused_calls", "Calls that the caller may not make", "forbidden.*", label="caller", counts=True
    ),
    StatusMetric("immortal_held_back", "Times that the caller had to wait", "held_back.*", label="caller", counts=True),
    StatusMetric("immortal_open_calls", "Calls of a limited peer not answered", "open_calls.*", label="caller"),
    StatusMetric("immortal_sent_messages", "Messages made for a peer", "outputs.*.position", label="peer", counts=True),
    StatusMetric(
        "immortal_acknowledged_messages",
        "Messages durable at a peer",
        "outputs.*.acknowledged",
        label="peer",
        counts=True,
    ),
    StatusMetric("immortal_waiting_bytes", "Not acknowledged by a peer", "outputs.*.waiting_bytes", label="peer"),
    StatusMetric("immortal_memory_bytes", "... and in memory", "outputs.*.memory_bytes", label="peer"),
    StatusMetric("immortal_spilled_bytes", "... and on disk alone", "outputs.*.spilled_bytes", label="peer"),
    StatusMetric("immortal_window_bytes", "What may be on its way to a peer", "outputs.*.window_bytes", label="peer"),
    StatusMetric("immortal_peer_connected", "1 if the peer is connected", "outputs.*.connected", label="peer"),
    StatusMetric("immortal_stream_stopped", "1 if calls to the peer stand still", "stopped.*", label="peer"),
)


class StatusCollector(Collector):
    """Collector of the status metrics at each scrape. ``read_status``: returns the status; if it raises ImmortalError,
    ``up`` is 0."""

    def __init__(self, name: str, read_status: Callable[[], Mapping[str, Any]]) -> None:
        self._name = name
        self._read_status = read_status

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a coordinator that is still starting can't be asked yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(*UP, labels=[INSTANCE])
        try:
            status = self._read_status()
        except ImmortalError:
            up.add_metric([self._name], 0)
            return [up]
        up.add_metric([self._name], 1)
        return [up, *metrics_of(self._name, status)]


def metrics_of(name: str, status: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of a status, which has the form of `immortal status NAME --json`."""
    phase = InfoMetricFamily(*PHASE, labels=[INSTANCE])
    phase.add_metric([name], {"phase": str(status["phase"])})
    yield phase
    outputs, held_up = status.get("outputs", {}), status.get("held_up_for", ())
    said = {
        **status,
        "records": status.get("sequence_id", -1) + 1,
        "log_full": bool((status.get("log") or {}).get("full")),
        "held_up": {peer: peer in held_up for peer in outputs},
        "stopped": {peer: bool(one.get("error")) for peer, one in outputs.items()},
    }
    for metric in STATUS:
        family = metric.family()
        for labels, value in metric.values(said):
            family.add_metric([name, *labels], value)
        yield family


class TimeMetric(Struct, frozen=True):
    """Histogram of a duration, in seconds: from the notice ``begin`` to ``end``; with ``begin`` None, ``end`` holds
    the duration."""

    name: str
    text: str
    end: type[Notice]
    begin: type[Notice] | None
    largest_s: float  # the largest bucket; each is twice the one before
    buckets: int


TIMES = (
    TimeMetric("immortal_commit_duration_seconds", "Commits to the log", CommitTimed, None, 3.2768, 17),
    TimeMetric(
        "immortal_sync_duration_seconds", "Writes of the log, until the disk had them", SyncTimed, None, 3.2768, 17
    ),
    TimeMetric(
        "immortal_checkpoint_duration_seconds",
        "Checkpoints, from their first byte until they are durable",
        CheckpointTaken,
        CheckpointBegan,
        327.68,
        16,
    ),
    TimeMetric(
        "immortal_recovery_duration_seconds",
        "Recoveries, from the app's checkpoint until it is primary",
        Recovered,
        Recovering,
        327.68,
        16,
    ),
)


class NoticeMetrics:
    """Sink that counts notices and measures durations between them. ``clock_s``: monotonic. Threads may share it."""

    def __init__(self, name: str, registry: CollectorRegistry, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock_s = clock_s
        self._notices = Counter(*NOTICES, [INSTANCE, "notice", "level"], registry=registry)
        for kind in notice_types():  # each is 0 at first: a series that begins at 1 has no increase
            if kind.level != "trace":
                self._notices.labels(name, kind.__name__, kind.level)
        self._began_s: dict[type[Notice], float] = {}  # the last of these
        self._begin_notices = frozenset(one.begin for one in TIMES)
        self._times = {}
        for one in TIMES:
            buckets = [one.largest_s / 2**power for power in reversed(range(one.buckets))]
            histogram = Histogram(one.name, one.text, [INSTANCE], registry=registry, buckets=buckets)
            self._times[one.end] = one.begin, histogram.labels(name)

    def emit(self, notice: Notice) -> None:
        kind = type(notice)
        if notice.level != "trace":
            self._notices.labels(self._name, kind.__name__, notice.level).inc()
        if kind in self._begin_notices:
            self._began_s[kind] = self._clock_s()
        if (ends := self._times.get(kind)) is None:
            return
        began, histogram = ends
        if isinstance(notice, TimedNotice):
            histogram.observe(notice.seconds)
        elif began is not None and (began_s := self._began_s.pop(began, None)) is not None:
            histogram.observe(self._clock_s() - began_s)


INTERVAL_S = 1.0
PAUSE_FACTOR = 200  # pause between samples, as a multiple of the time that asking took: a status may be large
FEED_POLL_S = 0.05  # while durable records were not sent to the app yet
WAIT_S_MAX = 60.0  # lifetime of a control connection; a longer wait counts as this
METHODS_MAX = 200  # methods with a histogram of their own; all others share one
METHOD_CHARACTERS_MAX = 200
EXECUTION_WAIT = (
    "immortal_execution_wait_seconds",
    "From when a message is durable until the app has executed all before it, sampled",
)
HANDLER = "immortal_handler_seconds", "What a handler takes for a message, until it returns or waits; sampled"

Query = Callable[[str, object, float], Mapping[str, Any]]
"""Callback that asks the coordinator, with (verb, argument, timeout in seconds); raises ImmortalError."""


class ExecutionWait:
    """Measures each second how long a durable message waits until the app has executed all messages before it.

    To time each message would slow the app down. Instead the app gets a question, which it answers after all messages
    that it got earlier: when the answer arrives, all messages that were durable at the time of the question are
    executed. The question asks for handler times, and the answer has the times of some messages
    (:mod:`immortal.appsdk.dispatch.events`).

    ``query``: asks the coordinator. ``wait(seconds)``: sleeps, and returns True when sampling must end.
    """

    def __init__(
        self,
        name: str,
        registry: CollectorRegistry,
        query: Query,
        wait: Callable[[float], bool] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._query = query
        self._wait = wait or threading.Event().wait
        self._clock_s = clock_s
        buckets = [65.536 / 2**power for power in reversed(range(18))]  # from 0.5 ms
        self._histogram = Histogram(*EXECUTION_WAIT, ["instance_name"], registry=registry, buckets=buckets).labels(name)
        buckets = [1e-6 * 4**power for power in range(14)]  # to 67 s
        self._handlers = Histogram(*HANDLER, ["instance_name", "method"], registry=registry, buckets=buckets)
        self._methods: set[str] = set()

    def start(self) -> None:
        threading.Thread(target=self.run, name="execution wait", daemon=True).start()

    def run(self) -> None:
        pause_s = INTERVAL_S
        while not self._wait(pause_s):
            pause_s = self.sample()

    def sample(self) -> float:
        """Take one sample; return the pause before the next, in seconds."""
        began_s = self._clock_s()
        try:
            status = self._status()
        except ImmortalError:
            return INTERVAL_S
        asked_s = self._clock_s()
        pause_s = max(INTERVAL_S, PAUSE_FACTOR * (asked_s - began_s))
        if not status.get("app_connected") or status.get("handling"):
            return pause_s  # while a long handler runs, the questions would only pile up
        durable = status["fed_sequence_id"] + status["backlog_records"]
        try:
            while status["fed_sequence_id"] < durable:
                if self._clock_s() - began_s >= WAIT_S_MAX:
                    self._histogram.observe(WAIT_S_MAX)
                    return WAIT_S_MAX
                if self._wait(FEED_POLL_S):
                    return pause_s
                status = self._status()
            asked_s = self._clock_s()
            answer = self._query("handlers", {"task": TIMES_TASK}, WAIT_S_MAX)
        except ImmortalError:  # the app has ended or recovers; or it has not answered in time
            if self._clock_s() - asked_s < WAIT_S_MAX:
                return pause_s
            self._histogram.observe(WAIT_S_MAX)
            return WAIT_S_MAX
        self._histogram.observe(self._clock_s() - began_s)
        for method, duration_ns in answer.get("times", ()):
            self._handlers.labels(self._name, self._method(str(method))).observe(max(0, duration_ns) / 1e9)
        return pause_s

    def _method(self, name: str) -> str:
        """Return the label for a method. The number of labels is limited, whatever names an app sends."""
        name = name[:METHOD_CHARACTERS_MAX]
        if name not in self._methods and len(self._methods) >= METHODS_MAX:
            return OTHER_MESSAGES
        self._methods.add(name)
        return name

    def _status(self) -> Mapping[str, Any]:
        return self._query("status", None, WAIT_S_MAX)
