"""Admission control: which calls of peers and clients are accepted now, which must wait, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import structs

from immortal.coordinator.core.failures.call_failure import CallFailures
from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.core.output.replay_check import stream_batches
from immortal.coordinator.core.permissions import Permission, Permissions
from immortal.coordinator.core.state import CoreState
from immortal.protocol.batch import encode_batch
from immortal.protocol.client_frames import Reply, ReplyKind, decode_answered_number, decode_caller
from immortal.protocol.extensions import OWNERS, QUERIES
from immortal.protocol.messages import RpcKind, decode_messages
from immortal.protocol.nesting import is_nested_beyond, messages_nested_too_deep
from immortal.protocol.trailer import BatchSource
from immortal.protocol.varint import decode_zigzag_int
from immortal.protocol.verdicts import FAILED_CALL, Cause


class Admission:
    """Admission control of one instance."""

    def __init__(self, state: CoreState, call_failures: CallFailures, by_caller: Mapping[str, Permission]) -> None:
        self.permissions = Permissions(state.name, by_caller)
        self.open_calls = OpenCalls(by_caller, is_known=True)  # of peers
        self.call_failures = call_failures
        self._state = state

    def change(self, by_caller: Mapping[str, Permission], *, has_keys: bool) -> None:
        """Apply new settings, or note that callers have keys now."""
        self.permissions.change(by_caller, has_keys=has_keys)
        self.open_calls.change(by_caller)

    def peer_wait_reason(self, caller: str) -> str:
        """Return why no call of a peer can be accepted yet; "" if it can."""
        why = self.permissions.wait_reason(caller, is_instance=True)
        limit = self.open_calls.limit(caller)
        if why or limit is None or (self.open_calls.is_known and self.permissions.accepts_verdicts):
            return why
        return (
            f"{self._state.name!r} lets {caller!r} have {limit} calls open at once, and how many are is not known "
            f"before its app has gone over the log (one of the base protocol can't leave a call out at all)"
        )

    def is_full(self, caller: str) -> bool:
        """Return True if ``caller`` has made so many refused calls that a checkpoint must come first."""
        call_failures = self.call_failures
        is_limited = self.permissions.limits(caller) or self.open_calls.limit(caller) is not None
        return (is_limited or caller in call_failures.nested) and call_failures.needs_checkpoint()

    def must_wait(self, caller: str) -> bool:
        """Return True if ``caller`` must wait: it has used up its rate, or is held off."""
        return bool(self.hold_off_reason(caller)) or self.permissions.must_wait(caller, self._state.now_ns)

    def hold_off_reason(self, caller: str) -> str:
        """Return why ``caller`` is held off, because its calls ended the app's process; "" if it is not."""
        return self.call_failures.penalties.hold_off_reason(caller, self._state.now_ns)

    @property
    def can_hold_back(self) -> bool:
        """True if some caller may have to wait for its rate or its hold-off."""
        return self.permissions.has_rates or self.call_failures.penalties.has_held_off

    def admit(self, caller: str, calls: bytes, count: int, open_count: int | None = None) -> tuple[int, int]:
        """Return how many of these messages are accepted now, and where they end; see :meth:`Permissions.admit`."""
        if self.hold_off_reason(caller):
            return 0, 0
        return self.permissions.admit(caller, calls, count, open_count, self._state.now_ns)

    def refuse_forbidden(
        self, group: Group, calls: bytes, count: int, caller: str, waiting_caller: str, reserved: Sequence[int] = ()
    ) -> None:
        """Give verdicts on the calls of ``caller``, just added to ``group``, that it is not allowed to send.

        ``reserved``: indices of calls of methods that only the app itself can call.
        """
        call_failures = self.call_failures
        self.refuse_nested(group, calls, count, caller, waiting_caller)
        refused: dict[int, tuple[str, str]] = {}  # index -> (method, why)
        for index, method in self.permissions.methods_of(calls, reserved):
            refused[index] = (
                method,
                f"{caller!r} called {method} of {self._state.name!r}: only an app itself may call negative ones",
            )
        for index, method in self.permissions.find_forbidden(caller, calls, is_instance=waiting_caller == caller):
            refused.setdefault(index, (method, self.format_permission_refusal(caller, method)))
        if waiting_caller == caller:  # a peer
            limit = self.open_calls.limit(caller)
            beyond = self.open_calls.add_calls(caller, calls, self._state.log.open_sequence_id)
            for index, method in self.permissions.methods_of(calls, beyond):
                why = f"{caller!r} has {limit} calls of {self._state.name!r} open, and may have no more"
                refused.setdefault(index, (method, why))
        if refused:
            found = [(index, *refused[index]) for index in sorted(refused)]
            call_failures.refuse(group, found, caller, waiting_caller, Cause.FORBIDDEN)

    def refuse_nested(self, group: Group, calls: bytes, count: int, caller: str, waiting_caller: str) -> None:
        """Give verdicts on messages, just added to ``group``, that are nested too deeply.

        An app of the base protocol defines its own arguments, which need not be MessagePack: these are not checked.
        """
        if not self._state.app_knows_extensions:
            return
        refused = [
            (index, *self._describe_nested(calls, start, caller or waiting_caller))
            for index, start in messages_nested_too_deep(calls, count, self._state.limits.nesting_max)
        ]
        if refused:
            self.call_failures.refuse(group, refused, caller, waiting_caller, Cause.UNUSABLE)

    def _describe_nested(self, calls: bytes, start: int, caller: str) -> tuple[str, str]:
        """Return the method of the RPC whose data begins at ``start``, and why it is refused."""
        method = self.permissions.name_of(decode_zigzag_int(calls, start + 1)[0])
        subject = f"a call of {method}" if calls[start] == RpcKind.CALL else "an answer"
        return method, f"{self.format_nesting_refusal(subject)} (from {caller or self._state.name!r})"

    def format_nesting_refusal(self, subject: str) -> str:
        return f"{subject} is nested more than {self._state.limits.nesting_max} levels deep (nesting_max)"

    def is_nested(self, arguments: bytes) -> bool:
        """Return True if the arguments of a query are nested too deeply."""
        return is_nested_beyond(arguments, 0, len(arguments), self._state.limits.nesting_max + 1)

    def checked_reply(self, reply: Reply) -> Reply:
        """Return the app's reply, or an error instead if the reply is nested too deeply for a client."""
        value = b"\x91" + reply.value if reply.kind == ReplyKind.VALUE else b"\x93" + reply.value
        if not is_nested_beyond(value, 0, len(value), self._state.limits.nesting_max + 1):
            return reply
        text = self.format_nesting_refusal(f"the answer of {self._state.name!r}")
        failed = msgspec.msgpack.encode((FAILED_CALL, ("NestedTooDeeply", text, ""), {}))
        return Reply(reply.number, ReplyKind.RAISED, failed[1:])

    def format_permission_refusal(self, caller: str, method: str) -> str:
        """Return the text of a refusal: who called, what permission is missing, and how to give it."""
        text = f"{caller!r} may not call {method!r} of {self._state.name!r}"
        if self.permissions.lacks_queries(caller):
            return f"{text}; its app marks no method as {QUERIES}"
        roles = self.permissions.roles_of(method)
        if not roles:
            return text
        names = [role for role in roles if role != OWNERS]
        gives = f'{caller} = ["{names[0] if names else method}"] under [allow] in its settings lets {caller!r} in'
        return f"{text}: that is for {' or '.join(names) or 'its owner alone'}; {gives}"

    def replayed(self, sequence_id: int, record: memoryview, batches: Sequence[BatchSource]) -> None:
        """Count the open calls of a replayed ``record``, whose trailer has ``batches``."""
        for sender, calls in stream_batches(record, batches, self.open_calls.counts):
            self.open_calls.replayed(sender.name, calls, sequence_id)


# Open calls of peers, counted for callers with a limit of concurrent calls.
#
# A call beyond the limit takes its place in the log with a verdict, and its caller is told, as for a method that it is
# not allowed to call. It is not delayed, as calls beyond a rate are: the next message of the same stream may be the
# answer that earlier calls wait for, and then none of them would ever end.
#
# Each call counts until it is answered, a refused one too: the caller chooses the numbers, and can give two calls the
# same one. The counts follow from the log: a checkpoint has the calls open after its record; a recovery adds those of
# the records that it replays, and removes those that it answers again. Between the end of an app and its successor's
# recovery no call of these callers is accepted.


class _Open:
    """Open calls of one caller. It chooses their numbers, so two can have the same one."""

    def __init__(self) -> None:
        self.count = 0
        self._records: dict[int, list[int]] = {}  # by number, the older call first

    def add(self, number: int, sequence_id: int) -> None:
        self._records.setdefault(number, []).append(sequence_id)
        self.count += 1

    def remove(self, number: int) -> None:
        """Remove an answered call, if it is counted here."""
        records = self._records.get(number)
        if records is not None:
            self.count -= 1
            del records[0]
            if not records:
                del self._records[number]

    def up_to(self, sequence_id: int) -> list[int]:
        """Return the numbers of the calls in records up to ``sequence_id``, ascending."""
        return sorted(
            number for number, records in self._records.items() for record in records if record <= sequence_id
        )


class OpenCalls:
    """Open calls of peers with a limit. ``is_known``: the counts are right, because a recovery has made all answers
    again."""

    def __init__(self, by_caller: Mapping[str, Permission], *, is_known: bool) -> None:
        self.is_known = is_known
        self._limits: dict[str, int] = {}  # by caller
        self._open: dict[str, _Open] = {}
        self.change(by_caller)

    def change(self, by_caller: Mapping[str, Permission]) -> None:
        """Apply new limits. Calls accepted before a caller had a limit do not count."""
        self._limits = {
            caller: limited.concurrent for caller, limited in by_caller.items() if limited.concurrent is not None
        }
        self._open = {caller: self._open.get(caller) or _Open() for caller in self._limits}

    def limit(self, caller: str) -> int | None:
        """Return how many open calls ``caller`` can have; None: any number."""
        return self._limits.get(caller)

    @property
    def counts(self) -> dict[str, int]:
        """Number of open calls, by caller with a limit."""
        return {caller: calls.count for caller, calls in self._open.items()}

    def add_calls(self, caller: str, calls: bytes, sequence_id: int) -> list[int]:
        """Count the checked calls of the record ``sequence_id``; return the indices of those beyond the limit."""
        limit = self._limits.get(caller)
        if limit is None:
            return []
        calls_open, beyond = self._open[caller], []
        for index, number in _numbers(calls):
            if calls_open.count >= limit:
                beyond.append(index)
            calls_open.add(number, sequence_id)
        return beyond

    def answered(self, caller: str, payload: bytes) -> None:
        """Remove the calls that the app's next messages to ``caller`` answer."""
        calls_open = self._open.get(caller)
        if calls_open is None or not calls_open.count:
            return
        for _, start, end in decode_messages(payload):
            number = decode_answered_number(payload, start, end)
            if number is not None:
                calls_open.remove(number)

    def forget(self, caller: str) -> None:
        """Forget the calls of ``caller``: its log was replaced, so its call numbers are others."""
        if caller in self._open:
            self._open[caller] = _Open()

    def open_at(self, sequence_id: int) -> dict[str, list[int]]:
        """Return the numbers of open calls, by caller, for a checkpoint after the record ``sequence_id``."""
        found = {caller: calls.up_to(sequence_id) for caller, calls in self._open.items()}
        return {caller: numbers for caller, numbers in found.items() if numbers}

    def restore(self, at_checkpoint: Mapping[str, Sequence[int]], sequence_id: int) -> None:
        """Start from a checkpoint after the record ``sequence_id``."""
        self._open = {caller: _Open() for caller in self._limits}
        for caller, calls in self._open.items():
            for number in at_checkpoint.get(caller, ()):
                calls.add(number, sequence_id)

    def replayed(self, caller: str, calls: bytes, sequence_id: int) -> None:
        """Count the calls of ``caller``, which has a limit, in a replayed record."""
        for _, number in _numbers(calls):
            self._open[caller].add(number, sequence_id)


def _numbers(calls: bytes) -> Iterator[tuple[int, int]]:
    """Yield (index, call number) of the calls that wait for an answer."""
    for index, (_, start, end) in enumerate(decode_messages(calls)):
        waits = decode_caller(calls, start, end)
        if waits is not None:
            yield index, waits.number


# Delivery policy: all input from peers, clients and the own app passes here before it is logged.
#
# Today's policy is "in order, at once": input goes into the log as it arrives. A forbidden call takes its place there
# with a verdict. A call beyond its caller's rate is left out with everything after it, and its sender sends it again.
# A policy that orders the calls of several senders would keep them here and release them in its order. The policy
# handles calls and callers only; frames, duplicates and gaps are handled before.


@dataclass(slots=True, eq=False, repr=False)
class Delivered:
    """Logged part of a batch of calls: the first ``count`` of them."""

    group: Group  # its commit makes them durable
    count: int
    calls: bytes
    record_size_bytes: int  # their size in the record


class Delivery:
    """Delivery policy: logs the input of one instance. ``admission``: decides which calls are accepted or refused."""

    def __init__(self, state: CoreState, admission: Admission) -> None:
        self.admission = admission
        self._state = state

    def deliver(
        self,
        source: BatchSource,
        calls: bytes,
        caller: str,
        open_count: int | None = None,
        reserved: Sequence[int] = (),
    ) -> Delivered | None:
        """Log those of the packed, checked ``calls`` that are accepted from ``caller`` now; None: none of them.

        The sender must send the others again. ``open_count``: as in :meth:`Admission.admit`. ``reserved``: indices
        of calls of methods that only the app itself can call: these are refused.
        """
        count, end = self.admission.admit(caller or source.name, calls, source.count, open_count)
        if not count:
            return None
        if count < source.count:
            calls = calls[:end]
            source = structs.replace(source, count=count)
        delivered = self._append(source, calls, from_app=False)
        kept = [one for one in reserved if one < count]
        self.admission.refuse_forbidden(delivered.group, calls, count, caller, source.name, kept)
        return delivered

    def deliver_own(self, source: BatchSource, calls: bytes) -> Delivered:
        """Log calls of the own app to itself: it can call all its methods."""
        delivered = self._append(source, calls, from_app=True)
        self.admission.refuse_nested(delivered.group, calls, source.count, "", ONESELF)
        return delivered

    def _append(self, source: BatchSource, calls: bytes, *, from_app: bool) -> Delivered:
        front = encode_batch(calls, source.count)
        size_bytes = len(front) + len(calls)
        group = self._state.log.append((front, calls) if front else (calls,), size_bytes, source, from_app=from_app)
        return Delivered(group, source.count, calls, size_bytes)
