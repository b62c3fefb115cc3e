"""What is asked as calls come in, of peers and of clients: whether they may be taken now, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coordinator.core.group_commit import Group
from coordinator.core.open_calls import OpenCalls
from coordinator.core.permissions import Permission, Permissions
from coordinator.core.replay_check import stream_batches
from protocol.extensions import QUERIES
from protocol.trailer import BatchSource

if TYPE_CHECKING:  # it needs the streams, which need this
    from coordinator.core.failing import Failing


class Intake:
    """That of one instance, ``name``."""

    def __init__(self, name: str, given: Mapping[str, Permission]) -> None:
        self.permissions = Permissions(name, given)
        self.open_calls = OpenCalls(given, is_known=True)  # of peers
        self.failing: Failing | None = None  # given once it is there
        self._name = name

    def change(self, given: Mapping[str, Permission]) -> None:
        """The settings are others."""
        self.permissions.change(given)
        self.open_calls.change(given)

    def why_waiting(self, caller: str) -> str:
        """Why nothing of ``caller`` can be taken yet, in words; "" if it can."""
        return self.permissions.why_waiting(caller)

    def why_peer_waits(self, caller: str) -> str:
        """As :meth:`why_waiting`, of a peer."""
        why = self.permissions.why_waiting(caller)
        limit = self.open_calls.limit(caller)
        if why or limit is None or (self.open_calls.is_known and self.permissions.takes_verdicts):
            return why
        return (
            f"{self._name!r} lets {caller!r} have {limit} calls open at once, and how many are is not known before its "
            f"app has gone over the log (one of the base protocol can't leave a call out at all)"
        )

    def is_full(self, caller: str) -> bool:
        """No more is taken of ``caller`` now: it has made too many calls that it may not make."""
        is_limited = self.permissions.limits(caller) or self.open_calls.limit(caller) is not None
        return is_limited and self.failing is not None and self.failing.lacks_room()

    def must_wait(self, caller: str, now_ns: int) -> bool:
        """It has used up what it may call in a second: it is heard later."""
        return self.permissions.must_wait(caller, now_ns)

    def first_of(
        self, caller: str, calls: bytes, count: int, now_ns: int, open_count: int | None = None
    ) -> tuple[int, int]:
        """How many of these messages may be taken now, and where they end; see :meth:`Permissions.first_of`."""
        return self.permissions.first_of(caller, calls, count, open_count, now_ns)

    def taken(self, group: Group, calls: bytes, caller: str, who_waits: str, reserved: Sequence[int] = ()) -> None:
        """These calls of ``caller`` were just added to ``group``: those that it may not make get their verdicts.

        ``reserved``: indices of calls of methods that only the app itself may call.
        """
        failing = self.failing
        if failing is None:
            return
        refused: dict[int, tuple[str, str]] = {}  # index -> (method, why)
        for index, method in self.permissions.methods_of(calls, reserved):
            refused[index] = (
                method,
                f"{caller!r} called {method} of {self._name!r}: only an app itself may call negative ones",
            )
        for index, method in self.permissions.forbidden(caller, calls):
            refused.setdefault(index, (method, self.why_forbidden(caller, method)))
        if who_waits == caller:  # a peer
            limit = self.open_calls.limit(caller)
            beyond = self.open_calls.taken(caller, calls, failing.log.open_sequence_id)
            for index, method in self.permissions.methods_of(calls, beyond):
                why = f"{caller!r} has {limit} calls of {self._name!r} open, and may have no more"
                refused.setdefault(index, (method, why))
        if refused:
            failing.refuse(group, [(index, *refused[index]) for index in sorted(refused)], caller, who_waits)

    def why_forbidden(self, caller: str, method: str) -> str:
        why = f"; its app marks no method as {QUERIES}" if self.permissions.lacks_queries(caller) else ""
        return f"{caller!r} may not call {method!r} of {self._name!r}{why}"

    def replayed(self, sequence_id: int, record: memoryview, batches: Sequence[BatchSource]) -> None:
        """A recovery replays a ``record``, whose trailer has ``batches``."""
        for sender, calls in stream_batches(record, batches, self.open_calls.counts):
            self.open_calls.replayed(sender.name, calls, sequence_id)
