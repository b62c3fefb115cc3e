"""Callers whose calls have ended the app's process, and queries that did: who is held off, and what is asked no more.

A logged message that ends the process has a verdict (`careful.py`), a query has none in the log: it is known here, as
long as the coordinator runs. A caller with many such calls would stop the app with each of them anew, so it is held off
for a time that doubles with each further death.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from immortal.coordinator.core.limits import Limits

KNOWN_MAX = 10_000  # callers, and queries; beyond it the oldest are forgotten
FREE_DEATHS = 2  # that a caller may cause before it is held off
FORGET_NS = 600 * 1_000_000_000  # after the last death a caller begins anew


class _Caller:
    def __init__(self) -> None:
        self.deaths = 0
        self.holds = 0
        self.last_ns = 0
        self.held_until_ns = 0


class Culprits:
    """Callers and queries of one instance. ``limits.kills_max``: deaths by which a query is asked no more."""

    def __init__(self, limits: Limits) -> None:
        self._kills_max = limits.kills_max
        self._hold_ns_min, self._hold_ns_max = limits.hold_off_ns_min, limits.hold_off_ns_max
        self._callers: OrderedDict[str, _Caller] = OrderedDict()
        self._queries: OrderedDict[bytes, int] = OrderedDict()  # deaths by digest
        self._held_until_ns = 0  # of all callers the latest

    # --- callers -----------------------------------------------------------------------------------------------------

    def died_of(self, caller: str, now_ns: int, deaths: int = 1) -> tuple[int, int]:
        """The app's process has ended so often at one call of ``caller``: how many deaths that makes, and how long it
        is held off now, in ns."""
        known = self._callers.pop(caller, None)
        if known is None or now_ns - known.last_ns > FORGET_NS:
            known = _Caller()
        self._callers[caller] = known
        if len(self._callers) > KNOWN_MAX:
            self._callers.popitem(last=False)
        known.deaths += deaths
        known.last_ns = now_ns
        if known.deaths <= FREE_DEATHS:
            return known.deaths, 0
        hold_ns = min(self._hold_ns_min << min(known.holds, 32), self._hold_ns_max)
        known.holds += 1
        known.held_until_ns = now_ns + hold_ns
        self._held_until_ns = max(self._held_until_ns, known.held_until_ns)
        return known.deaths, hold_ns

    @property
    def has_held(self) -> bool:
        """A caller is held off, or was."""
        return self._held_until_ns > 0

    def held_ns(self, caller: str, now_ns: int) -> int:
        """For how long nothing more is taken of ``caller``; 0: it may call."""
        if now_ns >= self._held_until_ns:
            return 0
        known = self._callers.get(caller)
        return 0 if known is None else max(0, min(known.held_until_ns - now_ns, self._hold_ns_max))

    def why_held(self, caller: str, now_ns: int) -> str:
        """In words; "" if it may call."""
        held_ns = self.held_ns(caller, now_ns)
        if not held_ns:
            return ""
        deaths = self._callers[caller].deaths
        return (
            f"calls of {caller!r} have ended the app's process {deaths} times: nothing more of it is taken for "
            f"{held_ns / 1e9:.1f} s"
        )

    @property
    def deaths(self) -> dict[str, int]:
        """How many each caller has caused, of those that are remembered."""
        return {caller: known.deaths for caller, known in self._callers.items()}

    # --- queries -----------------------------------------------------------------------------------------------------

    def query_died(self, query: bytes) -> None:
        """The app's process has ended at that query, given by :func:`digest_of`."""
        self._queries[query] = self._queries.pop(query, 0) + 1
        if len(self._queries) > KNOWN_MAX:
            self._queries.popitem(last=False)

    def query_answered(self, query: bytes) -> None:
        """It did not end the process."""
        self._queries.pop(query, None)

    @property
    def suspects_any(self) -> bool:
        return bool(self._queries)

    def is_suspected(self, query: bytes) -> bool:
        """The process has ended at it: it is asked alone, so that it is known for certain."""
        return query in self._queries

    def why_not_asked(self, query: bytes) -> str:
        """In words; "" if it may be asked."""
        deaths = self._queries.get(query, 0)
        if self._kills_max is None or deaths < self._kills_max:
            return ""
        times = "once" if deaths == 1 else f"{deaths} times"
        return f"this query has ended the app's process {times}: it is asked no more until the coordinator is restarted"


def digest_of(asker: str, method_id: int, arguments: bytes) -> bytes:
    """What a query of ``asker`` is known by."""
    digest = hashlib.blake2b(f"{asker}\0{method_id}\0".encode(), digest_size=16)
    digest.update(arguments)
    return digest.digest()
