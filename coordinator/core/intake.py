"""What is asked as calls come in, of peers and of clients: whether they may be taken now, and which are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.core.group_commit import Group
from coordinator.core.permissions import Permissions
from protocol.extensions import QUERIES

if TYPE_CHECKING:  # it needs the streams, which need this
    from coordinator.core.failing import Failing


class Intake:
    """That of one instance."""

    def __init__(self, permissions: Permissions) -> None:
        self.permissions = permissions
        self.failing: Failing | None = None  # given once it is there

    def why_waiting(self, caller: str) -> str:
        """Why nothing of ``caller`` can be taken yet, in words; "" if it can."""
        return self.permissions.why_waiting(caller)

    def is_full(self, caller: str) -> bool:
        """No more is taken of ``caller`` now: it has made too many calls that it may not make."""
        return self.permissions.limits(caller) and self.failing is not None and self.failing.lacks_room()

    def must_wait(self, caller: str, now_ns: int) -> bool:
        """It has used up what it may call in a second: it is heard later."""
        return self.permissions.must_wait(caller, now_ns)

    def first_of(self, caller: str, calls: bytes, count: int, now_ns: int, open_count: int = 0) -> tuple[int, int]:
        """How many of these messages may be taken now, and where they end; see :meth:`Permissions.first_of`."""
        return self.permissions.first_of(caller, calls, count, open_count, now_ns)

    def taken(self, group: Group, calls: bytes, caller: str, who_waits: str) -> None:
        """These calls of ``caller`` were just added to ``group``: those that it may not make get their verdicts."""
        forbidden = self.permissions.forbidden(caller, calls)
        if forbidden and self.failing is not None:
            why = f"; its app marks no method as {QUERIES}" if self.permissions.lacks_queries(caller) else ""
            self.failing.refuse(group, forbidden, caller, who_waits, why)
