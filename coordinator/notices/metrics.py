"""What Prometheus is given: what `immortal status` shows, asked of the coordinator at each scrape; and, of notices, how
many there were and how long things took. A new metric is a row of STATUS or TIMES; docs/guide/notices.md lists them.

Only a coordinator that serves metrics imports this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from immortal.coordinator.core.notices import CheckpointBegan, CheckpointTaken, Notice, Recovered, Recovering
from immortal.coordinator.notices.timed import CommitTimed, SyncTimed, Timed
from immortal.protocol.errors import ImmortalError

Metric = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily
INSTANCE = "instance_name"  # a label of all

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, of which nobody makes anything


UP = "immortal_up", "1 if the coordinator answers"
PHASE = "immortal_phase", "What the instance does"
NOTICES = "immortal_notices", "What was told, also where it became no line"


# --- what a status says -----------------------------------------------------------------------------------------------


class StatusMetric(Struct, frozen=True):
    """``path``: where the value is in the status, as `immortal status NAME --json` gives it; ``*`` is each key of a
    mapping, which becomes ``label``. ``unit``: times this it is the metric's. ``absent``: the metric where
    there is no value; None: then it is left out."""

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
        """(labels behind the instance's, value)."""
        front, star, back = self.path.partition("*")
        if not star:
            value = _at(status, front)
            value = self.absent if value is None else value * self.unit
            if value is not None:
                yield [], float(value)
            return
        for key, one in (_at(status, front) or {}).items():
            value = _at(one, back)
            if value is not None:
                yield [key], float(value)


def _at(status: Any, path: str) -> Any:
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
)


class StatusCollector(Collector):
    """``ask``: gives the status of the instance; raises ImmortalError where it can't, which leaves ``up`` at 0."""

    def __init__(self, name: str, ask: Callable[[], Mapping[str, Any]]) -> None:
        self._name = name
        self._ask = ask

    def describe(self) -> Iterable[Metric]:
        """Nothing: a coordinator that has just begun to start can't be asked yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(*UP, labels=[INSTANCE])
        try:
            status = self._ask()
        except ImmortalError:
            up.add_metric([self._name], 0)
            return [up]
        up.add_metric([self._name], 1)
        return [up, *metrics_of(self._name, status)]


def metrics_of(name: str, status: Mapping[str, Any]) -> Iterator[Metric]:
    """The metrics of one status, as `immortal status NAME --json` gives it."""
    phase = InfoMetricFamily(*PHASE, labels=[INSTANCE])
    phase.add_metric([name], {"phase": str(status["phase"])})
    yield phase
    outputs, held_up = status.get("outputs", {}), status.get("held_up_for", ())
    said = {
        **status,
        "records": status.get("sequence_id", -1) + 1,
        "log_full": bool((status.get("log") or {}).get("full")),
        "held_up": {peer: peer in held_up for peer in outputs},
    }
    for metric in STATUS:
        family = metric.family()
        for labels, value in metric.values(said):
            family.add_metric([name, *labels], value)
        yield family


# --- what notices say -------------------------------------------------------------------------------------------------


class TimeMetric(Struct, frozen=True):
    """A histogram, in seconds. ``ended``: says that it is over. It has begun with ``began``; None: ``ended`` knows how
    long it took."""

    name: str
    text: str
    ended: type[Notice]
    began: type[Notice] | None
    most_s: float  # the largest bucket; each is twice the one before
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
    """A sink. ``clock_s``: monotonic. Threads may share it."""

    def __init__(self, name: str, registry: CollectorRegistry, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock_s = clock_s
        self._notices = Counter(*NOTICES, [INSTANCE, "notice", "level"], registry=registry)
        self._began_s: dict[type[Notice], float] = {}  # the last of these
        self._begins = frozenset(one.began for one in TIMES)
        self._times = {one.ended: (one.began, _histogram(one, registry).labels(name)) for one in TIMES}

    def take(self, notice: Notice) -> None:
        kind = type(notice)
        if notice.level != "trace":
            self._notices.labels(self._name, kind.__name__, notice.level).inc()
        if kind in self._begins:
            self._began_s[kind] = self._clock_s()
        if (ends := self._times.get(kind)) is None:
            return
        began, histogram = ends
        if isinstance(notice, Timed):
            histogram.observe(notice.seconds)
        elif began is not None and (began_s := self._began_s.pop(began, None)) is not None:
            histogram.observe(self._clock_s() - began_s)


def _histogram(one: TimeMetric, registry: CollectorRegistry) -> Histogram:
    buckets = [one.most_s / 2**power for power in reversed(range(one.buckets))]
    return Histogram(one.name, one.text, [INSTANCE], registry=registry, buckets=buckets)
