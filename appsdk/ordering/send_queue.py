"""Send queue of an instance: runs of multicasts that are sent now, and output that waits behind them.

Pure, like :mod:`appsdk.ordering.machine`. All that waits is one list, in the order in which the handlers sent it:

- a *run* waits until fewer than RUNS_IN_FLIGHT_MAX runs are in flight; further calls join it meanwhile. It also waits
for held calls to one of its destinations: it must not overtake them.
- *held* output (calls to others, answers and effects) waits until all runs that were sent before it stand at all their
destinations. Otherwise a receiver could act there before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from immortal.appsdk.ordering.machine import Ordering
from immortal.appsdk.ordering.messages import Scope

RUNS_IN_FLIGHT_MAX = 8  # more are not faster, as waiting calls join into larger runs
RUN_SIZE_BYTES_MAX = 64 << 10


class Run(msgspec.Struct, array_like=True, tag=0):
    """Calls of one method to the same destinations, all forks or all awaited."""

    method_id: int
    destinations: list[str]
    calls: list[list[bytes]]  # one list for all, or one for each
    size_bytes: int
    since_ns: int
    scope: Scope | None = None


class Held(msgspec.Struct, array_like=True, tag=1):
    """Output held back. ``parts``: messages for ``destination``, in two parts each, or the number of an EFFECT.

    ``behind``: number of the run that all its destinations must have queued first.
    """

    destination: str
    behind: int
    parts: list[bytes]
    effect: int = 0


Waiting: TypeAlias = Run | Held
EFFECT = "\x00effect"  # no instance has this name


class SendQueue:
    """Send queue. ``release`` is called with held output that can leave, in order. ``waiting``: its state, part of
    checkpoints. ``own_name``: the instance's name as a destination of runs; "": runs can overtake what it sends to
    itself."""

    def __init__(
        self,
        ordering: Ordering,
        release: Callable[[Held], None],
        waiting: list[Waiting] | None = None,
        *,
        own_name: str = "",
    ) -> None:
        self._ordering = ordering
        self._own_name = own_name
        self._release = release
        self.waiting: list[Waiting] = waiting if waiting is not None else []
        self.place: Any = None  # the input that sent the last run

    @property
    def must_hold(self) -> bool:
        """True if output that is sent now must wait."""
        state = self._ordering.state
        return bool(self.waiting) or state.standing < state.sent_count

    def multicast(
        self,
        place: Any,
        method_id: int,
        destinations: list[str],
        calls: list[bytes],
        now_ns: int = 0,
        scope: Scope | None = None,
    ) -> None:
        """Queue calls. ``place``: the handled input. Runs end only between inputs, so they are the same in each replay.

        ``calls``: one for all, or one for each.
        """
        if place != self.place:
            self.advance()  # the output of an earlier input is complete
            self.place = place
        size_bytes = sum(map(len, calls))
        last = self.waiting[-1] if self.waiting else None
        if (
            isinstance(last, Run)
            and last.method_id == method_id
            and last.destinations == destinations
            and last.scope == scope
            and len(last.calls) == len(calls)
            and last.size_bytes + size_bytes <= RUN_SIZE_BYTES_MAX
        ):
            for theirs, call in zip(last.calls, calls, strict=True):
                theirs.append(call)
            last.size_bytes += size_bytes
        else:
            self.waiting.append(Run(method_id, destinations, [[call] for call in calls], size_bytes, now_ns, scope))

    def hold(self, destination: str, parts: list[bytes], effect: int = 0) -> None:
        """Hold messages until everything sent so far has left."""
        last = self.waiting[-1] if self.waiting else None
        if isinstance(last, Held) and last.destination == destination and not effect and self._is_latest(last):
            last.parts += parts
        else:
            self.waiting.append(Held(destination, self._ordering.state.sent_count, parts, effect))

    def _is_latest(self, last: Held) -> bool:
        """Return True if no run was sent since ``last`` was held: none was while a run waits."""
        return last.behind == self._ordering.state.sent_count or any(isinstance(one, Run) for one in self.waiting)

    def advance(self) -> None:
        """Send the runs and the output whose wait is over."""
        if not self.waiting:
            return
        ordering, state = self._ordering, self._ordering.state
        waiting, self.waiting = self.waiting, []
        held: set[str] = set()  # destinations of output that stays
        run_stays, last_number = False, 0
        for one in waiting:
            if isinstance(one, Held):
                one.behind = max(one.behind, last_number)
                if run_stays or state.standing < one.behind:
                    held.add(one.destination or self._own_name)
                    self.waiting.append(one)
                else:
                    self._release(one)
            elif ordering.fences.blocks(one.scope, one.destinations):
                continue  # like the cancelled ones that were in flight
            elif (
                run_stays
                or state.sent_count - state.standing >= RUNS_IN_FLIGHT_MAX
                or not held.isdisjoint(one.destinations)
            ):
                run_stays = True
                self.waiting.append(one)
            else:
                last_number = ordering.multicast(one.method_id, one.destinations, one.calls, one.since_ns, one.scope)
