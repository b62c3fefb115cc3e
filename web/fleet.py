"""Status of all instances, about a second old: asked once for all viewers, who wait for no slow instance."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from markupsafe import Markup

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.presenters.status import (
    FAILED,
    NOT_STARTED,
    RUNNING,
    STOPPED,
    UNKNOWN,
    age_text,
    instance_status,
    problems,
    stopped_status,
)
from immortal.protocol.command_line import size_text
from immortal.protocol.errors import ImmortalError
from immortal.web.log_messages import Logs
from immortal.web.rendering import render

FRESH_S = 1.0
STOPPED_FRESH_S = 15.0  # a stopped instance is read from its log, and changes when it is started
ASKED_AT_ONCE_MAX = 2  # more would keep the interpreter from pages; one without an answer delays half of the others
RATE_SPAN_S = 5.0
FIRST_WAIT_S = 0.1  # of a page, for instances that are not known yet: later results are sent to the page as events


@dataclass(frozen=True)
class Row:
    """Row of one instance on the page. ``tone``: good, busy, off or bad. ``status``: as of `immortal status --json`."""

    name: str
    state: str
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

    @cached_property
    def cells(self) -> Markup:
        """Table cells of the row, rendered once for all viewers."""
        return Markup(render("_cells.html", row=self))  # noqa: S704 -- escaped by the template


class Fleet:
    def __init__(self, registry: Registry, logs: Logs) -> None:
        self._registry = registry
        self._logs = logs
        self._looking = threading.Condition()  # around the next three; notified when a look is over
        self._rows: dict[str, Row] = {}  # the last known row of each
        self._looked_s = -FRESH_S
        self._background: threading.Thread | None = None
        self._stopped: dict[str, tuple[float, dict[str, Any]]] = {}
        self._counts: dict[str, list[tuple[float, int]]] = {}  # (when, records), the oldest first
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE_MAX, "fleet")

    def look(self, wait_s: float) -> None:
        """Ask all instances again, in the background, if FRESH_S has passed; wait at most ``wait_s`` for the end."""
        with self._looking:
            if self._background is None and time.monotonic() - self._looked_s >= FRESH_S:
                self._background = threading.Thread(target=self._look, name="fleet", daemon=True)
                self._background.start()
            if wait_s:
                self._looking.wait_for(lambda: self._background is None, wait_s)

    def rows(self) -> list[Row]:
        """Return the last known rows in the order of names, with a placeholder for an instance not known yet."""
        try:
            names = self._registry.names()
        except ImmortalError:  # the folder can't be read now
            return []
        with self._looking:
            is_first = not all(name in self._rows for name in names)
        self.look(FIRST_WAIT_S if is_first else 0.0)
        with self._looking:
            return [self._rows.get(name) or _unknown(name) for name in names]

    def row(self, name: str) -> Row:
        """Ask one instance now and return its row. Raises RegistryError if it is not registered."""
        self._registry.load(name)
        return self._row(name)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        try:
            names = self._registry.names()
            for done in [self._pool.submit(self._note, name) for name in names]:
                done.result()
        except (ImmortalError, RuntimeError, CancelledError):  # the folder can't be read now; the pool was closed
            names = []
        with self._looking:
            self._rows = {name: self._rows[name] for name in names if name in self._rows}
            self._counts = {name: self._counts[name] for name in names if name in self._counts}
            self._looked_s, self._background = time.monotonic(), None
            self._looking.notify_all()

    def _note(self, name: str) -> None:
        row = self._row(name)
        _ = row.cells  # made here, not by the next page
        with self._looking:
            self._rows[name] = row

    def _row(self, name: str) -> Row:
        status = self._status(name)
        said = [problem.removeprefix(f"{name}: ") for problem in problems(status)]
        log, checkpoint = status.get("log") or {}, status.get("checkpoint")
        waiting_bytes = sum(one.get("waiting_bytes") or 0 for one in status.get("outputs", {}).values())
        records = status.get("sequence_id")
        return Row(
            name,
            status["state"],
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
            if known is None or now_s - known[0] >= STOPPED_FRESH_S:
                with self._logs.locked(settings):
                    known = self._stopped[name] = now_s, stopped_status(settings)
            return instance_status(self._registry, name, known[1])
        except (ImmortalError, OSError) as error:
            return {"name": name, "phase": UNKNOWN, "state": UNKNOWN, "error": str(error)}

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
    state = status["state"]
    if "error" in status or state == UNKNOWN or state.startswith(FAILED):
        return "bad"
    if state in (STOPPED, NOT_STARTED):
        return "off"
    return "good" if state == RUNNING else "busy"


def _unknown(name: str) -> Row:
    return Row(name, "asked just now", "busy", "", "", None, "", None, "", "", "", [], {})
