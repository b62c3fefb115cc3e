"""Write lease: the right to write the log, and the unanswered requests to it. One coordinator at a time has the lease.

    STARTING --WriteLeaseGranted---------------------------------------> LOADING --LogLoaded--> WRITING
        '----WriteLeaseHeld, and it must follow---> FOLLOWING --WriteLeaseGranted--^

The holder keeps the lease until another process gets it. Then the log refuses this one's writes, and it stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import Commit, Read, ReadTail, Write
from immortal.coordinator.core.errors import require
from immortal.coordinator.core.events import LogFailed, TailRead

if TYPE_CHECKING:
    from immortal.coordinator.core.state import CoreState


class LeaseRole(Enum):
    """Relation of this coordinator to the write lease."""

    STARTING = "waiting for the right to write the log"
    FOLLOWING = "following"
    LOADING = "loading the log"
    WRITING = "writing"


@dataclass(slots=True, eq=False, repr=False)
class WriteLease:
    """Write lease as this coordinator sees it. ``follows`` and ``writes`` repeat the role as plain values, since each
    turn reads them."""

    role: LeaseRole = LeaseRole.STARTING
    follows: bool = False
    writes: bool = False
    fence: int = 0  # the term of the lease, once it is granted
    is_granted: bool = False  # to this process, which has not loaded the log yet
    is_loaded: bool = False  # all parts of the machine have the log's state, as of some moment
    holder: str = ""  # the holder while this process follows it, as a text

    @property
    def may_read(self) -> bool:
        """True if the app can get records: this coordinator writes the log, or follows a loaded one."""
        return self.writes or (self.follows and self.is_loaded)

    def become(self, role: LeaseRole) -> None:
        self.role = role
        self.follows = role is LeaseRole.FOLLOWING
        self.writes = role is LeaseRole.WRITING


# Requests to the log without an answer yet, and their repetition after the log did not answer for a while.
#
#     ANSWERS --a failure that may pass--> WAITING --its pause is over: where does the log end?--> ASKING
#        ^                                    ^ '-- reads alone have failed: they are asked again --.    |
#        |                                    '------- a failure again: twice the pause ------------+----+
#        '--- what is there is durable, the rest is written again, the same bytes ------------------'----'
#
# It is unknown whether a failed write was done. It is never repeated before that is known. Meanwhile nothing more is
# written, so input waits, which slows down the app and the peers.


class LogRequests:
    """Requests to the log without an answer yet. ``silent_since_ns``: when the log last failed to answer; None while it
    answers."""

    __slots__ = ("_pause_ns", "_state", "_to_repeat", "_unknown", "_writes", "due_ns", "silent_since_ns")

    def __init__(self, state: CoreState) -> None:
        self.silent_since_ns: int | None = None
        self.due_ns: int | None = None  # when the requests are repeated
        self._state = state
        self._writes: deque[Write] = deque()  # unanswered, in order
        self._unknown = False  # it is unknown whether the first of them was done
        self._to_repeat: list[Read] = []  # reads to repeat
        self._pause_ns = state.limits.log_retry_ns_min

    def write(self, write: Write) -> None:
        """Send the write to the log, after all writes before it."""
        self._writes.append(write)
        if not self._unknown:
            self._state.effects.append(write)

    def write_done(self) -> None:
        """Note that the oldest unanswered write is durable."""
        self._writes.popleft()
        if self.silent_since_ns is not None:
            self._log_answered(self.silent_since_ns)

    def read_done(self) -> None:
        """Note that a read was answered; it may end the log's silence."""
        if self.silent_since_ns is not None and not self._unknown and not self._to_repeat:
            self._log_answered(self.silent_since_ns)

    def request_failed(self, event: LogFailed) -> None:
        """Note a temporary failure: ask again after a pause, which doubles each time."""
        state, now_ns, request = self._state, self._state.now_ns, event.request
        if isinstance(request, Write):
            require(bool(self._writes) and request is self._writes[0], "a write is answered out of its turn")
            self._unknown = state.log.is_held = True
        elif request is not None and not isinstance(request, ReadTail):
            self._to_repeat.append(request)
        if self.silent_since_ns is None:
            self.silent_since_ns = now_ns
            state.report(notices.LogSilent(problem=str(event.error)))
        if self.due_ns is None:
            self.due_ns = now_ns + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, state.limits.log_retry_ns_max)

    def tick(self) -> None:
        """Repeat the failed requests if the pause is over."""
        if self.due_ns is None or self._state.now_ns < self.due_ns:
            return
        self.due_ns = None
        if self._unknown:
            self._state.effects.append(ReadTail())
        again, self._to_repeat = self._to_repeat, []
        self._state.effects.extend(again)

    def resolve_writes(self, event: TailRead) -> Sequence[Write]:
        """Return the writes that are durable, now that the log has said where it ends. Write the others again."""
        if not self._unknown:
            return ()
        self._unknown = self._state.log.is_held = False
        last = max([n for n, write in enumerate(self._writes) if _has_write(write, event)], default=-1)
        durable = [self._writes[index] for index in range(last + 1)]
        for write in list(self._writes)[last + 1 :]:
            self._state.effects.append(write)
        return durable

    def _log_answered(self, since_ns: int) -> None:
        self.silent_since_ns = None
        self._pause_ns = self._state.limits.log_retry_ns_min
        silent_s = round((self._state.now_ns - since_ns) / 1e9, 3)
        self._state.report(notices.LogAnswers(silent_s=silent_s))


def _has_write(write: Write, tail: TailRead) -> bool:
    """Return True if the log has this append. Raises InvariantError if its records contradict that."""
    if not isinstance(write, Commit):
        return False  # a chunk is in the log if an append after it is
    is_there = write.ticket <= tail.ticket
    last = write.transaction.records[-1][0] if write.transaction.records else write.expected_last_sequence_id
    require(
        not is_there or last <= tail.last_sequence_id,
        f"the log has append {write.ticket}, up to record {last}, but ends with record {tail.last_sequence_id}",
    )
    return is_there
