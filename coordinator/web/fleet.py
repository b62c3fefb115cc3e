"""All instances as of a second ago: asked once for all who look."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from coordinator.cli.status import NOT_STARTED, STOPPED, age_text, instance_status, problems
from coordinator.instances.registry import Registry
from coordinator.operator import control
from coordinator.web.logs import Logs
from protocol.command_line import size_text
from protocol.errors import ImmortalError

FRESH_S = 1.0
STOPPED_FRESH_S = 15.0  # what does not run is read from its log, and changes when it is started
ASKED_AT_ONCE_MAX = 8
RATE_SPAN_S = 5.0

RUNNING = ("normal", "taking a checkpoint")


@dataclass(frozen=True)
class Row:
    """One instance, as the page shows it. ``tone``: good, busy, off or bad. ``status``: as `immortal status --json`."""

    name: str
    phase: str
    tone: str
    role: str
    version: str
    records: int | None
    rate: str
    backlog: int | None
    waiting: str
    checkpoint: str
    disk: str
    problems: list[str]
    status: dict[str, Any] = field(repr=False)


class Fleet:
    def __init__(self, registry: Registry, logs: Logs) -> None:
        self._registry = registry
        self._logs = logs
        self._lock = threading.Lock()  # around _rows and _looked_s
        self._refreshing = threading.Lock()
        self._rows: list[Row] | None = None
        self._looked_s = 0.0
        self._stopped: dict[str, tuple[float, dict[str, Any]]] = {}
        self._counts: dict[str, list[tuple[float, int]]] = {}  # (when, records), the oldest first
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE_MAX, "fleet")
        self._background: threading.Thread | None = None

    def warm_up(self) -> None:
        self._refresh_soon()

    def rows(self, *, wait: bool = False) -> list[Row]:
        """In the order of names. Older ones than a second are asked again, in the background unless ``wait``."""
        with self._lock:
            rows, age_s = self._rows, time.monotonic() - self._looked_s
        if rows is None or (wait and age_s > FRESH_S):
            self._refresh()
        elif age_s > FRESH_S:
            self._refresh_soon()
        with self._lock:
            return list(self._rows or ())

    def row(self, name: str) -> Row:
        """One, asked now. Raises RegistryError where it is not registered."""
        self._registry.load(name)
        return self._row(name)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _refresh_soon(self) -> None:
        with self._lock:
            if self._background is None or not self._background.is_alive():
                self._background = threading.Thread(target=self._refresh, name="fleet", daemon=True)
                self._background.start()

    def _refresh(self) -> None:
        with self._refreshing:
            if self._rows is not None and time.monotonic() - self._looked_s < FRESH_S:
                return  # another thread has done it meanwhile
            try:
                names = self._registry.names()
                rows = list(self._pool.map(self._row, names))
            except (ImmortalError, RuntimeError):  # the folder can't be read now; the pool was closed
                names, rows = [], []
            with self._lock:
                self._rows, self._looked_s = rows, time.monotonic()
                self._counts = {name: self._counts[name] for name in names if name in self._counts}

    def _row(self, name: str) -> Row:
        status = self._status(name)
        said = [problem.removeprefix(f"{name}: ") for problem in problems(status)]
        log, checkpoint = status.get("log") or {}, status.get("checkpoint")
        waiting_bytes = sum(one.get("waiting_bytes") or 0 for one in status.get("outputs", {}).values())
        records = status.get("sequence_id")
        return Row(
            name,
            status["phase"],
            _tone(status),
            {"writing": "primary", "following": "standby"}.get(str(status.get("role")), str(status.get("role") or "")),
            str(status.get("version") or ""),
            None if records is None else records + 1,
            self._rate(name, records, status),
            status.get("backlog_records"),
            size_text(waiting_bytes) if waiting_bytes else "",
            f"{age_text(checkpoint['age_s'])} ago" if checkpoint else "",
            size_text(log["used_bytes"]) if log.get("used_bytes") else "",
            said,
            status,
        )

    def _status(self, name: str) -> dict[str, Any]:
        now_s = time.monotonic()
        try:
            settings = self._registry.load(name)
            if control.running(settings.folder) is not None:
                self._stopped.pop(name, None)
                return instance_status(self._registry, name)
            known = self._stopped.get(name)
            if known is not None and now_s - known[0] < STOPPED_FRESH_S:
                return known[1]
            with self._logs.locked(settings):
                status = instance_status(self._registry, name)
            self._stopped[name] = now_s, status
            return status
        except (ImmortalError, OSError) as error:
            return {"name": name, "phase": "unknown", "error": str(error)}

    def _rate(self, name: str, records: int | None, status: dict[str, Any]) -> str:
        if records is None or "pid" not in status:
            self._counts.pop(name, None)
            return ""
        now_s = time.monotonic()
        counts = self._counts.setdefault(name, [])
        counts.append((now_s, records))
        while len(counts) > 2 and now_s - counts[0][0] > RATE_SPAN_S:
            del counts[0]
        (first_s, first), (last_s, last) = counts[0], counts[-1]
        if last_s - first_s < 0.5:
            return ""
        rate = max(0.0, (last - first) / (last_s - first_s))
        return "0" if not rate else f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def _tone(status: dict[str, Any]) -> str:
    phase = status["phase"]
    if "error" in status or phase == "unknown":
        return "bad"
    if phase in (STOPPED, NOT_STARTED):
        return "off"
    return "good" if phase in RUNNING else "busy"
