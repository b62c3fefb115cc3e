"""The delivery policy: all input passes here before it is logged, be it of peers, of clients, or of the own app.

Today's is "in order, at once": what may be taken goes into the log as it comes. A call that its caller may not make
takes its place there with a verdict; one that comes too early for its caller's rate is left, with all behind it, for
its sender to send again. A policy that orders the calls of several senders would keep them here, and let them go in its
order. It sees calls and their caller; what came as which frame, is known twice, or lacks something before it, is
settled before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from immortal.coordinator.core.group_commit import Group, GroupCommit
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.core.streams.intake import Intake
from immortal.protocol.batch import encode_batch
from immortal.protocol.trailer import BatchSource


@dataclass(slots=True, eq=False, repr=False)
class Delivered:
    """The first ``count`` of the calls that came."""

    group: Group  # with which they become durable
    count: int
    calls: bytes
    record_size_bytes: int  # what they take in their record


class Delivery:
    """To the log of one instance. ``intake``: whether calls may be taken now, and which are refused."""

    def __init__(self, log: GroupCommit, intake: Intake) -> None:
        self.intake = intake
        self._log = log

    def deliver(
        self,
        source: BatchSource,
        calls: bytes,
        caller: str,
        now_ns: int,
        open_count: int | None = None,
        reserved: Sequence[int] = (),
    ) -> Delivered | None:
        """Log those of the packed ``calls``, checked before, that ``caller`` may have taken now; None: of none.

        The others are to be sent again later. ``open_count``: as in :meth:`Intake.first_of`. ``reserved``: indices of
        calls of methods that only the app itself may call: these are refused.
        """
        count, end = self.intake.first_of(caller or source.name, calls, source.count, now_ns, open_count)
        if not count:
            return None
        if count < source.count:
            calls = calls[:end]
            source = structs.replace(source, count=count)
        delivered = self._append(source, calls, from_app=False)
        kept = [one for one in reserved if one < count]
        self.intake.taken(delivered.group, calls, count, caller, source.name, kept)
        return delivered

    def deliver_own(self, source: BatchSource, calls: bytes) -> Delivered:
        """Log what the own app sends to itself: it may call all that it has."""
        delivered = self._append(source, calls, from_app=True)
        self.intake.refuse_nested(delivered.group, calls, source.count, "", ONESELF)
        return delivered

    def _append(self, source: BatchSource, calls: bytes, *, from_app: bool) -> Delivered:
        front = encode_batch(calls, source.count)
        size_bytes = len(front) + len(calls)
        group = self._log.append((front, calls) if front else (calls,), size_bytes, source, from_app=from_app)
        return Delivered(group, source.count, calls, size_bytes)
