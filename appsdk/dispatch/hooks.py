"""When the `@on_primary` hooks may start: once the state covers each impulse that was logged before.

An impulse that is logged may still wait: behind an ordered multicast, or for its handler's turn. A hook goes on from
the state, so until such impulses are handled it would send them a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.ordering.machine import Ordering
from immortal.appsdk.ordering.plain import Plain
from immortal.protocol.messages import RpcKind, RpcType


class HookGate:
    """Of one life of an app. ``is_open``: its hooks may start; before :meth:`begin` they may not."""

    def __init__(self, context: Context) -> None:
        self.is_open = False
        self._context = context
        self._begun = False
        self._filed_count = 0  # of plain calls that had to wait, by the time at which the app became primary
        self._queued: frozenset[int] | None = None  # numbers of async handlers; None: others are waited for first
        self._since_ns = 0
        self._released: tuple[Ordering, int] | None = None  # ..., and how many of its releases must be executed

    def begin(self) -> None:
        """The app is primary: no impulse of an earlier life comes from here on."""
        context = self._context
        ordering = context.multicasts.ordering
        self._begun = True
        self._filed_count = 0 if ordering is None else ordering.state.filed_count
        self._since_ns = context.record_time_ns or 0
        self.look()

    def look(self) -> bool:
        """Whether they may start by now. After each record, until they may."""
        if self._begun and not self.is_open:
            self.is_open = not any(self._filed()) and self._is_executed() and not self._queued_count()
        return self.is_open

    def _filed(self) -> Iterator[bool]:
        """True for each call that stands behind a multicast and that nobody awaits: an impulse is such a fork there."""
        ordering: Ordering | None = self._context.multicasts.ordering
        for filed in () if ordering is None else ordering.plain_calls():
            if filed.number <= self._filed_count:
                plain = Plain(filed.calls[0], None)
                if plain.kind == RpcKind.CALL and plain.rpc_type == RpcType.FORK:
                    yield True

    def _queued_count(self) -> int:
        """Of calls of async handlers, as above, that wait for their turn."""
        queued = self._context.tasks.limits.queued
        if self._queued is None:
            self._queued = frozenset(number for number, one in queued.items() if one.caller is None)
        return sum(number in queued for number in self._queued)

    def _is_executed(self) -> bool:
        """What has left the queue comes back as a call of the instance to itself."""
        ordering: Ordering | None = self._context.multicasts.ordering
        if ordering is None:
            return True
        if self._released is None or self._released[0] is not ordering:  # a rewind has made it anew
            self._released = ordering, ordering.executed_count + ordering.state.released_count
        return ordering.executed_count >= self._released[1]

    def describe(self) -> list[dict[str, Any]]:
        """Whom the hooks wait for, as :meth:`Multicasts.describe` has it; nothing where they do not wait."""
        if not self._begun or self.is_open:
            return []
        what = "before its @on_primary hooks start: input that was logged before must be handled first, as it"
        context, count = self._context, sum(self._filed())
        if count:
            names = context.multicasts.waits_for()
            what += " stands behind a multicast"
        elif self._queued:
            names, count = [context.instance_name], self._queued_count()
            what += " waits for its turn"
        else:
            names, count = [context.instance_name], 1
            what += " is on its way back from the log"
        return [{"for": one, "what": what, "since_ns": self._since_ns, "count": count} for one in names]
