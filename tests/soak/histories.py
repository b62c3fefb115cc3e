"""Clients that count, what they saw and when, and whether that is linearizable.

The object is a counter: ``count`` adds one and returns the number of its own, ``count_so_far`` reads. Each number says
at which place of the one order its operation is. So whether an order exists that agrees with the times is decided, and
not searched for: it is the order of the numbers, with the operations of unknown outcome in the gaps.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from immortal.client import CallTimeout, OutcomeUnknown, connect

CALL_TIMEOUT_S = 120.0
IMPATIENT_S = 0.7  # of those whose outcomes get unknown in an outage
PAUSE_S_MAX = 0.1
READS_SHARE = 0.3


@dataclass(slots=True)
class Operation:
    """``number``: what it returned; None: nobody knows whether it was done. ``ended_ns``: of an unknown one, never."""

    adds: bool
    begun_ns: int
    ended_ns: int | None
    number: int | None


def problems_of(operations: Sequence[Operation], final: int) -> list[str]:
    """What is wrong with the history of one counter that was 0 and is ``final``; nothing: it is linearizable."""
    known = sorted(
        (one for one in operations if one.number is not None),
        key=lambda one: (one.number or 0, not one.adds, one.begun_ns),
    )
    found = []
    added = [one.number for one in known if one.adds and one.number is not None]
    if len(set(added)) != len(added):
        twice = sorted({number for number in added if added.count(number) > 1})
        found.append(f"numbers that two calls were given: {twice[:5]}")
    if (last := max((one.number or 0 for one in known), default=0)) > final:
        found.append(f"a call was answered with {last}, the counter ends with {final}: what was acknowledged is lost")
    begun_ns = 0
    for one in known:
        assert one.ended_ns is not None
        if begun_ns > one.ended_ns:
            what = "count" if one.adds else "count_so_far"
            late_ms = (begun_ns - one.ended_ns) / 1e6
            found.append(f"{what} returned {one.number}, {late_ms:.1f} ms before what is ahead of it was asked for")
        begun_ns = max(begun_ns, one.begun_ns)
    missing = sorted(set(range(1, final + 1)) - set(added))
    unknown_ns = sorted(one.begun_ns for one in operations if one.adds and one.number is None)
    if len(missing) > len(unknown_ns):
        found.append(f"{final} were counted, of which {len(missing)} by nobody who has no answer ({len(unknown_ns)})")
    # The one that fills a gap was asked for before anything behind the gap was answered: the earliest first.
    behind = len(known)
    earliest_ns: float = float("inf")
    limits_ns: list[float] = []
    for number in reversed(missing):
        while behind and (known[behind - 1].number or 0) >= number:
            behind -= 1
            earliest_ns = min(earliest_ns, known[behind].ended_ns or 0)
        limits_ns.append(earliest_ns)
    for number, limit_ns, at_ns in zip(missing, reversed(limits_ns), unknown_ns, strict=False):
        if at_ns > limit_ns:
            found.append(f"number {number} was counted before anybody asked for it who has no answer")
    return found


class Client:
    """Calls one bank, one call after the other, until :meth:`end`. Each process of a client has many of these."""

    def __init__(self, instance: str, home: str, identity: str, seed: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.instance = instance
        self.operations: list[Operation] = []
        self.error: Exception | None = None
        self._home, self._identity, self._timeout_s = home, identity, timeout_s
        self._rng = random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"client of {instance}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with connect(self.instance, home=self._home, identity=self._identity, timeout=self._timeout_s) as bank:
                while not self._ended.wait(self._rng.random() * PAUSE_S_MAX):
                    adds = self._rng.random() >= READS_SHARE
                    begun_ns = time.monotonic_ns()
                    try:
                        number = bank.count() if adds else bank.count_so_far()
                    except (CallTimeout, OutcomeUnknown):
                        self.operations.append(Operation(adds, begun_ns, None, None))
                    else:
                        self.operations.append(Operation(adds, begun_ns, time.monotonic_ns(), number))
        except Exception as error:
            self.error = error

    def first_answer_ns(self, since_ns: int, *, asked_since: bool = False) -> int | None:
        """When the first answer since then came; of a call that was made since then, too."""
        for one in self.operations[-2000:]:
            if one.ended_ns and (one.begun_ns if asked_since else one.ended_ns) >= since_ns:
                return one.ended_ns
        return None

    @property
    def is_patient(self) -> bool:
        return self._timeout_s >= CALL_TIMEOUT_S

    def tell_to_end(self) -> None:
        self._ended.set()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(CALL_TIMEOUT_S)
