"""What is asked as calls come in, of peers and of clients: whether they may be taken now, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.open_calls import OpenCalls
from immortal.coordinator.core.permissions import Permission, Permissions
from immortal.coordinator.core.replay_check import stream_batches
from immortal.protocol.client import Reply, ReplyKind
from immortal.protocol.extensions import OWNERS, QUERIES
from immortal.protocol.limits import NESTING_MAX_DEFAULT
from immortal.protocol.messages import RpcKind
from immortal.protocol.nesting import is_nested_beyond, too_deep
from immortal.protocol.trailer import BatchSource
from immortal.protocol.varint import decode_zigzag_int
from immortal.protocol.verdicts import FAILED_CALL, Cause

if TYPE_CHECKING:  # it needs the streams, which need this
    from immortal.coordinator.core.failing import Failing


class Intake:
    """That of one instance, ``name``."""

    def __init__(
        self,
        name: str,
        given: Mapping[str, Permission],
        nesting_max: int = NESTING_MAX_DEFAULT,
        *,
        has_keys: bool = False,
    ) -> None:
        self.permissions = Permissions(name, given, has_keys=has_keys)
        self.open_calls = OpenCalls(given, is_known=True)  # of peers
        self.failing: Failing | None = None  # given once it is there
        self._name = name
        self._nesting_max = nesting_max

    def change(self, given: Mapping[str, Permission], *, has_keys: bool) -> None:
        """The settings are others, or there are keys by now."""
        self.permissions.change(given, has_keys=has_keys)
        self.open_calls.change(given)

    def why_waiting(self, caller: str) -> str:
        """Why nothing of ``caller`` can be taken yet, in words; "" if it can."""
        return self.permissions.why_waiting(caller)

    def why_peer_waits(self, caller: str) -> str:
        """As :meth:`why_waiting`, of a peer."""
        why = self.permissions.why_waiting(caller, is_instance=True)
        limit = self.open_calls.limit(caller)
        if why or limit is None or (self.open_calls.is_known and self.permissions.takes_verdicts):
            return why
        return (
            f"{self._name!r} lets {caller!r} have {limit} calls open at once, and how many are is not known before its "
            f"app has gone over the log (one of the base protocol can't leave a call out at all)"
        )

    def is_full(self, caller: str) -> bool:
        """No more is taken of ``caller`` now: it has made too many calls that it may not make."""
        failing = self.failing
        if failing is None:
            return False
        is_limited = self.permissions.limits(caller) or self.open_calls.limit(caller) is not None
        return (is_limited or caller in failing.nested) and failing.lacks_room()

    def must_wait(self, caller: str, now_ns: int) -> bool:
        """It has used up what it may call in a second, or is held off: it is heard later."""
        return bool(self.why_held_off(caller, now_ns)) or self.permissions.must_wait(caller, now_ns)

    def why_held_off(self, caller: str, now_ns: int) -> str:
        """Why nothing of ``caller`` is taken for a while, as its calls ended the app's process; "" if it is."""
        return "" if self.failing is None else self.failing.culprits.why_held(caller, now_ns)

    @property
    def holds_back(self) -> bool:
        """Somebody may have to wait."""
        return self.permissions.has_rates or (self.failing is not None and self.failing.culprits.has_held)

    def first_of(
        self, caller: str, calls: bytes, count: int, now_ns: int, open_count: int | None = None
    ) -> tuple[int, int]:
        """How many of these messages may be taken now, and where they end; see :meth:`Permissions.first_of`."""
        if self.why_held_off(caller, now_ns):
            return 0, 0
        return self.permissions.first_of(caller, calls, count, open_count, now_ns)

    def taken(
        self, group: Group, calls: bytes, count: int, caller: str, who_waits: str, reserved: Sequence[int] = ()
    ) -> None:
        """These ``count`` calls of ``caller`` were just added to ``group``: what it may not send gets its verdict.

        ``reserved``: indices of calls of methods that only the app itself may call.
        """
        failing = self.failing
        if failing is None:
            return
        self.refuse_nested(group, calls, count, caller, who_waits)
        refused: dict[int, tuple[str, str]] = {}  # index -> (method, why)
        for index, method in self.permissions.methods_of(calls, reserved):
            refused[index] = (
                method,
                f"{caller!r} called {method} of {self._name!r}: only an app itself may call negative ones",
            )
        for index, method in self.permissions.forbidden(caller, calls, is_instance=who_waits == caller):
            refused.setdefault(index, (method, self.why_forbidden(caller, method)))
        if who_waits == caller:  # a peer
            limit = self.open_calls.limit(caller)
            beyond = self.open_calls.taken(caller, calls, failing.log.open_sequence_id)
            for index, method in self.permissions.methods_of(calls, beyond):
                why = f"{caller!r} has {limit} calls of {self._name!r} open, and may have no more"
                refused.setdefault(index, (method, why))
        if refused:
            found = [(index, *refused[index]) for index in sorted(refused)]
            failing.refuse(group, found, caller, who_waits, Cause.FORBIDDEN)

    def refuse_nested(self, group: Group, calls: bytes, count: int, caller: str, who_waits: str) -> None:
        """Of these messages, just added to ``group``, those that are nested too deeply get their verdicts.

        Arguments of an app of the base protocol are its own matter, and need be no MessagePack.
        """
        failing = self.failing
        if failing is None or not failing.peers.app_speaks:
            return
        refused = [
            (index, *self._nested_in_words(calls, start, caller or who_waits))
            for index, start in too_deep(calls, count, self._nesting_max)
        ]
        if refused:
            failing.refuse(group, refused, caller, who_waits, Cause.UNUSABLE)

    def _nested_in_words(self, calls: bytes, start: int, caller: str) -> tuple[str, str]:
        """The method of the RPC whose data begins there, and why it is refused."""
        method = self.permissions.name_of(decode_zigzag_int(calls, start + 1)[0])
        what = f"a call of {method}" if calls[start] == RpcKind.CALL else "an answer"
        return method, f"{self.nested_in_words(what)} (from {caller or self._name!r})"

    def nested_in_words(self, what: str) -> str:
        return f"{what} is nested more than {self._nesting_max} levels deep (nesting_max)"

    def is_nested(self, arguments: bytes) -> bool:
        """Whether the arguments of a query are nested too deeply."""
        return is_nested_beyond(arguments, 0, len(arguments), self._nesting_max + 1)

    def fit_to_tell(self, reply: Reply) -> Reply:
        """What a client is told: where the app's answer is nested too deeply, that it is."""
        value = b"\x91" + reply.value if reply.kind == ReplyKind.VALUE else b"\x93" + reply.value
        if not is_nested_beyond(value, 0, len(value), self._nesting_max + 1):
            return reply
        text = self.nested_in_words(f"the answer of {self._name!r}")
        failed = msgspec.msgpack.encode((FAILED_CALL, ("NestedTooDeeply", text, ""), {}))
        return Reply(reply.number, ReplyKind.RAISED, failed[1:])

    def why_forbidden(self, caller: str, method: str) -> str:
        """It names who asked, what it lacks, and how to give it that."""
        text = f"{caller!r} may not call {method!r} of {self._name!r}"
        if self.permissions.lacks_queries(caller):
            return f"{text}; its app marks no method as {QUERIES}"
        roles = self.permissions.roles_of(method)
        if not roles:
            return text
        names = [role for role in roles if role != OWNERS]
        gives = f'{caller} = ["{names[0] if names else method}"] under [allow] in its settings lets {caller!r} in'
        return f"{text}: that is for {' or '.join(names) or 'its owner alone'}; {gives}"

    def replayed(self, sequence_id: int, record: memoryview, batches: Sequence[BatchSource]) -> None:
        """A recovery replays a ``record``, whose trailer has ``batches``."""
        for sender, calls in stream_batches(record, batches, self.open_calls.counts):
            self.open_calls.replayed(sender.name, calls, sequence_id)
