"""Sink that keeps notices, and a server of metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from immortal.coordinator.core.notices import Notice
from immortal.coordinator.notices import Notices
from immortal.coordinator.notices.metrics import StatusCollector
from immortal.coordinator.notices.metrics_server import Access, serve_metrics


class Told:
    """Sink that keeps its notices."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []

    def emit(self, notice: Notice) -> None:
        self.notices.append(notice)

    @property
    def lines(self) -> list[tuple[str, str, dict[str, object]]]:
        return [(notice.level, notice.text, notice.values()) for notice in self.notices]


def serve_status(
    address: str, ask: Callable[[], Mapping[str, Any]], access: Access | None = None, told: Told | None = None
) -> str:
    """Serve the metrics of "counter", whose status ``ask`` returns; return their URL."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector("counter", ask))
    return serve_metrics(Notices("counter", told or Told()), address, registry, access)
