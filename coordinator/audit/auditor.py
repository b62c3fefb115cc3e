"""Writes news of a running coordinator to its audit log, once a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from immortal.coordinator.audit.audit_log import AuditLog
from immortal.coordinator.messenger import Counters, Role, Security

READ_ONLY = frozenset({"status", "peers", "clients", "clock", "handlers"})  # verbs that change nothing


class Auditor:
    """Auditor of one coordinator. Clocks are monotonic, in ns."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._has_started = False
        self._seen: Counter[tuple[str, str]] = Counter()  # (what, who): how often, as of the last look
        self._callers: dict[str, list[str]] = {}
        self._limited: list[str] = []

    def started(self, **fields: object) -> None:
        self._has_started = True
        self._log.write_through("started", **fields)

    def observe(
        self,
        counters: Counters,
        security: Security | None,
        limited: Mapping[str, object],
        refusals: Mapping[str, Mapping[str, int]],
        impostors: int,
        now_ns: int,
    ) -> None:
        """Write what is new.

        ``limited``: callers with limited permissions. ``refusals``: numbers of refusals by kind and caller.
        """
        self._changes(security, sorted(limited))
        if security is not None:
            for key, count in counters.let_in_by.items():
                name = security.callers.get(key, "")
                self._count("let in", f"{name} {key}".strip(), count, now_ns)
        for name, count in counters.refused_by.items():
            self._count("refused: its role does not send that", name, count, now_ns)
        for what, by_caller in refusals.items():
            for name, count in by_caller.items():
                self._count(what, name, count, now_ns)
        last = counters.last_refused
        self._count("refused: no key, or nobody's", "strangers", counters.strangers_refused, now_ns, last)
        self._count("dropped: a key that may not call any more", "strangers", counters.strangers_dropped, now_ns)
        self._count("dropped: another's name", "impostors", impostors, now_ns)
        self._log.settle(now_ns)

    def _count(self, what: str, who: str, count: int, now_ns: int, last: str = "") -> None:
        new = count - self._seen[what, who]
        if new > 0:
            self._seen[what, who] = count
            self._log.count(what, who, now_ns, new, **({"last": last} if last else {}))

    def _changes(self, security: Security | None, limited: list[str]) -> None:
        """Keys, roles and permissions, as they are from now on."""
        callers: dict[str, list[str]] = {}
        roles = {} if security is None else security.roles
        for key, name in () if security is None else security.callers.items():
            callers.setdefault(f"{name} ({roles.get(key, Role.INSTANCE)})", []).append(key)
        if (callers, limited) != (self._callers, self._limited):
            self._callers, self._limited = callers, limited
            self._log.write_through("may call from now on", callers=callers, limited=limited)

    def operator(self, who: str, verb: str, argument: str) -> None:
        """Write that an operator has asked for ``verb``, unless that only reads."""
        if verb not in READ_ONLY:
            self._log.write_through("operator", who=who, verb=verb, argument=argument)

    def close(self, **fields: object) -> None:
        if self._has_started:
            self._log.close(**fields)
