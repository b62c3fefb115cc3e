"""What `immortal status` shows, for Prometheus: asked of the coordinator at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from coordinator.config import split_tcp
from protocol.errors import ImmortalError

Metric = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily


class MetricsError(ImmortalError):
    """The metrics can't be served."""


class StatusCollector(Collector):
    """``ask``: gives the status of the instance; raises ImmortalError where it can't, which leaves ``up`` at 0."""

    def __init__(self, name: str, ask: Callable[[], Mapping[str, Any]]) -> None:
        self._name = name
        self._ask = ask

    def describe(self) -> Iterable[Metric]:
        """Nothing: a coordinator that has just begun to start can't be asked yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("immortal_up", "1 if the coordinator answers", labels=["instance_name"])
        try:
            status = self._ask()
        except ImmortalError:
            up.add_metric([self._name], 0)
            return [up]
        up.add_metric([self._name], 1)
        return [up, *metrics_of(self._name, status)]


def metrics_of(name: str, status: Mapping[str, Any]) -> list[Metric]:
    """The metrics of one status, as `immortal status NAME --json` gives it."""
    phase = InfoMetricFamily("immortal_phase", "What the instance does", labels=["instance_name"])
    phase.add_metric([name], {"phase": str(status["phase"])})
    metrics: list[Metric] = [phase]

    def gauge(metric: str, text: str, value: float | None) -> None:
        if value is not None:
            family = GaugeMetricFamily(f"immortal_{metric}", text, labels=["instance_name"])
            family.add_metric([name], value)
            metrics.append(family)

    checkpoint = status.get("checkpoint") or {}
    gauge("app_connected", "1 if an app is connected", float(status.get("app_connected", False)))
    gauge("version", "Version of the app", status.get("version"))
    gauge("epoch", "Starts of the instance and its apps", status.get("epoch"))
    gauge("log_records", "Records logged since the first start", status.get("sequence_id", -1) + 1)
    gauge("backlog_records", "Logged and not yet given to the app", status.get("backlog_records"))
    gauge("app_unsent_bytes", "Given to the app's socket and not taken", status.get("unsent_bytes"))
    gauge("app_silent_seconds", "For how long the app has taken nothing of what waits", status.get("app_silent_s"))
    commit_ms = status.get("commit_ms")
    gauge("commit_seconds", "What a commit to the log takes", None if commit_ms is None else commit_ms / 1000)
    clients = status.get("clients") or {}
    gauge("clients", "Clients of which the instance knows", clients.get("known"))
    gauge("clients_open_requests", "Requests of clients taken and not answered", clients.get("open_requests"))
    gauge("clients_replies", "Replies kept for clients", clients.get("replies"))
    gauge("clients_replies_bytes", "Size of the replies kept for clients", clients.get("replies_bytes"))
    clock = status.get("clock") or {}
    gauge("clock_ahead_seconds", "By how much a jump of the clock is held back; behind: negative", clock.get("ahead_s"))
    gauge("clock_jumps", "Jumps of the clock since the start", clock.get("jumps"))
    gauge("app_paused", "1 if the app is not read: disk or peers are behind", _flag(status.get("app_paused")))
    log = status.get("log") or {}
    gauge("log_used_bytes", "What the log needs of its file", log.get("used_bytes"))
    gauge("log_limit_bytes", "Above this it takes no input from peers", log.get("limit_bytes"))
    gauge("log_disk_free_bytes", "Left on the log's disk", log.get("free_bytes"))
    gauge("log_full", "1 if input from peers is refused for want of room", _flag(log.get("full")))
    gauge("checkpoint_age_seconds", "Age of the last checkpoint", checkpoint.get("age_s"))
    gauge("checkpoint_size_bytes", "Size of the last checkpoint", checkpoint.get("size_bytes"))

    letters = status.get("letters") or {}
    gauge("dead_letters", "Dead letters that are kept", letters.get("count"))
    gauge("dead_letters_bytes", "Size of the dead letters that are kept", letters.get("bytes"))
    suspect, handling = status.get("suspect") or {}, status.get("handling") or {}
    gauge("suspect_runs", "Runs in a row that one message may have ended", suspect.get("runs", 0))
    gauge("handling_seconds", "What the handler that takes long has taken so far", handling.get("for_s", 0))
    verdicts = CounterMetricFamily(
        "immortal_verdicts", "Messages that failed alone, since the start", labels=["instance_name", "kind"]
    )
    for kind, count in (status.get("verdicts") or {}).items():
        verdicts.add_metric([name, kind], count)
    lost = CounterMetricFamily(
        "immortal_dead_letters_lost", "Dead letters that there was no room for", labels=["instance_name"]
    )
    lost.add_metric([name], letters.get("lost", 0))
    received = CounterMetricFamily(
        "immortal_received_messages", "Messages of a peer in the log", labels=["instance_name", "peer"]
    )
    granted = GaugeMetricFamily(
        "immortal_granted_window_bytes", "What a peer may have on its way here", labels=["instance_name", "peer"]
    )
    for peer, one in status.get("inputs", {}).items():
        received.add_metric([name, peer], one["position"])
        if one.get("window_bytes") is not None:
            granted.add_metric([name, peer], one["window_bytes"])
    held_up = GaugeMetricFamily(
        "immortal_held_up", "1 if the app is held up for the peer", labels=["instance_name", "peer"]
    )
    for peer in status.get("outputs", {}):
        held_up.add_metric([name, peer], float(peer in status.get("held_up_for", ())))
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        "position": CounterMetricFamily(
            "immortal_sent_messages", "Messages made for a peer", labels=["instance_name", "peer"]
        ),
        "acknowledged": CounterMetricFamily(
            "immortal_acknowledged_messages", "Messages durable at a peer", labels=["instance_name", "peer"]
        ),
        "waiting_bytes": GaugeMetricFamily(
            "immortal_waiting_bytes", "Not acknowledged by a peer", labels=["instance_name", "peer"]
        ),
        "memory_bytes": GaugeMetricFamily(
            "immortal_memory_bytes", "... and in memory", labels=["instance_name", "peer"]
        ),
        "spilled_bytes": GaugeMetricFamily(
            "immortal_spilled_bytes", "... and on disk alone", labels=["instance_name", "peer"]
        ),
        "window_bytes": GaugeMetricFamily(
            "immortal_window_bytes", "What may be on its way to a peer", labels=["instance_name", "peer"]
        ),
        "connected": GaugeMetricFamily(
            "immortal_peer_connected", "1 if the peer is connected", labels=["instance_name", "peer"]
        ),
    }
    for peer, one in status.get("outputs", {}).items():
        for key, family in families.items():
            if one.get(key) is not None:
                family.add_metric([name, peer], float(one[key]))
    return [*metrics, verdicts, lost, received, granted, held_up, *families.values()]


def _flag(value: object) -> float:
    return float(bool(value))


def serve_metrics(name: str, address: str, ask: Callable[[], Mapping[str, Any]]) -> int:
    """Serve at ``address`` ("HOST:PORT"; HOST:* takes a free one), from a thread of its own; the port.

    Raises MetricsError.
    """
    found = split_tcp(f"tcp://{address}")
    if found is None:
        raise MetricsError(f'the address of the metrics is {address!r}, expected HOST:PORT such as "127.0.0.1:9400"')
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(name, ask))
    try:
        server, _ = start_http_server(found[1], found[0], registry)
    except OSError as error:
        raise MetricsError(
            f"can't serve the metrics of {name!r} at {address}: {error.strerror}; choose another address (--metrics)"
        ) from None
    return int(server.server_port)
