"""Ledger of handles: counts handles in sent and received messages, and informs their owners and holders.

:mod:`immortal.appsdk.nodes.reference_counts` does the counting, without I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import method_of
from immortal.appsdk.calls.outbox import Send, make_writer
from immortal.appsdk.errors import UsageError
from immortal.appsdk.nodes.reference_counts import (
    Ended,
    Ending,
    Grant,
    Held,
    Holder,
    Key,
    NoHoldersLeft,
    Owner,
    Passed,
    SendMessage,
    Stage,
    Stale,
    decode_handle_message,
)
from immortal.appsdk.ordering.messages import arguments_of
from immortal.appsdk.types.handles import MARK, handle_label, handles_in
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.system_methods import HANDLES_METHOD_ID

WHAT = "a handle"

_write_message = make_writer(WHAT, HANDLES_METHOD_ID, RpcType.FORK)


class Accounts:
    """Ledger of one instance. ``released``: handles without holders, of which their owner is not told yet."""

    def __init__(self, context: Context) -> None:
        self.owner = Owner()
        self.holder = Holder()
        self.released: list[Grant] = []
        self.outsiders: frozenset[str] = frozenset()  # names that can see handles and hold none: a test
        self._context = context
        self._senders: dict[tuple[str, int], Send] = {}

    def restore(self, grants: list[Grant], held: list[Held]) -> None:
        self.owner, self.holder = Owner(grants), Holder(held)
        self.released.clear()

    def send_actions(self) -> None:
        """Send the messages that the counting of handles has made."""
        own_name = self._context.instance_name
        for machine in (self.owner, self.holder):
            actions, machine.actions = machine.actions, []
            for action in actions:
                if isinstance(action, SendMessage):
                    to = "" if action.to == own_name else action.to
                    self.sender(to, HANDLES_METHOD_ID)((own_name, action.message))
                elif isinstance(action, NoHoldersLeft):
                    self.released.append(self.owner.grants[action.key])

    def sender(self, destination: str, method_id: int, name: str = WHAT) -> Send:
        key = destination, method_id
        if (send := self._senders.get(key)) is None:
            made: Send = self._context.outbox.make_sender(destination, name, method_id, RpcKind.CALL, (), RpcType.FORK)
            send = self._senders[key] = made
        return send

    # --- checks before use --------------------------------------------------------------------------------------------

    def require_usable(self, owner: str, key: Key, subject: str) -> None:
        """Check that a handle can be used. Raises UsageError."""
        if owner != self._context.instance_name:
            if not self.holder.holds(owner, key):
                raise self._refused(f"{subject}: {self._why_not(owner, key)}")
            return
        grant = self.owner.grants.get(key)
        if grant is None or grant.stage == Stage.ENDED:
            raise self._refused(f"{subject}: it was destroyed or revoked")

    def _why_not(self, owner: str, key: Key) -> str:
        one = self.holder.held.get((owner, key))
        if one is not None and one.ended:
            return f"{owner!r} has {one.ended} it"
        return "this instance does not hold it: it was released or has ended, or was never passed to it"

    def _refused(self, text: str) -> BaseException:
        """Return a refusal's error. It ends async handlers, whatever they catch: a rebuild would not refuse again."""
        error, task = UsageError(text), self._context.tasks.running
        return error if task is None else task.abandon(error)

    # --- handles in messages ------------------------------------------------------------------------------------------

    def count_outgoing(self, destination: str, data: bytes) -> None:
        """Count the handles in data that is sent to ``destination`` now. Raises UsageError."""
        self._context.carries_handles = False
        own_name = self._context.instance_name
        to = destination or own_name
        found = handles_in(data)
        for owner, key in found:
            self._require_passable(owner, key, to)
        for owner, key in found:
            if to == owner or to in self.outsiders:
                continue
            if owner != own_name:
                self._announce_end(owner, key, to)
                self.holder.pass_on(owner, key, to)
            else:
                self.owner.note_passed(key, to)
                if not self._notify_in_order(key, to):
                    self._announce_end(owner, key, to)
        self.send_actions()

    def note_passed(self, key: Key, to: str) -> bool:
        """Count a copy that goes to ``to``, reported by its holder. Return False if there is no such key."""
        known = self.owner.note_passed(key, to)
        self._notify_in_order(key, to)
        return known

    # --- an end that is in flight through the queues ------------------------------------------------------------------

    def _find_end(self, owner: str, key: Key) -> tuple[list[bytes], Ended] | None:
        """Return the queued run that ends a handle, and the message in it that says so; None: there is none."""
        for calls in self._context.multicasts.calls_of(owner):
            for ended in _ended_in(calls):
                if ended.key == key:
                    return calls, ended
        return None

    def _announce_end(self, owner: str, key: Key, to: str) -> None:
        """Tell ``to``, before it gets a copy of a handle, that the handle ends: the multicast of the end skips it."""
        if (found := self._find_end(owner, key)) is not None:
            self.sender(to, HANDLES_METHOD_ID)((self._context.instance_name, Ending(owner, key, found[1].how)))

    def _notify_in_order(self, key: Key, to: str) -> bool:
        """Add ``to``, which gets a copy of an own handle, to a multicast of its end. Return False if it is too late."""
        grant = self.owner.grants.get(key)
        if grant is None or grant.stage != Stage.ENDING or to in grant.notified or to in grant.banned:
            return True
        found = self._find_end(self._context.instance_name, key)
        if found is None or not self._context.multicasts.extend(HANDLES_METHOD_ID, found[0], to):
            return False
        for ended in _ended_in(found[0]):
            self.owner.grants[ended.key].notified.append(to)
        return True

    def announce_proposed_end(self, owner: str, calls: list[bytes]) -> None:
        """Put notices of the ends in ``calls``, just queued, before copies of these handles that were not sent yet."""
        for ended in _ended_in(calls):
            parts: list[bytes] = []
            _write_message(parts, (self._context.instance_name, Ending(owner, ended.key, ended.how)))
            handle = owner, ended.key
            self._context.multicasts.warn(owner, lambda data, handle=handle: handle in handles_in(data), parts)

    @staticmethod
    def is_pass_message(arguments: bytes) -> bool:
        """Return True if the arguments are a Passed message, which counts a copy at once, before its turn."""
        try:
            return isinstance(decode_handle_message(arguments).message, Passed)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False

    def _require_passable(self, owner: str, key: Key, to: str) -> None:
        what = f"handle {handle_label(key)} of {owner!r} can't be passed on"
        if to.startswith(CLIENTS):
            raise self._refused(f"{what}: clients hold no handles, instances do")
        self.require_usable(owner, key, what)
        if owner == self._context.instance_name and to in self.owner.grants[key].banned:
            raise self._refused(f"{what}: it was revoked for {to!r}")

    def counting(self, decode: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
        """Wrap the decoder of arguments that can contain handles: the wrapper also counts the received handles."""

        def decode_and_count(data: Any) -> tuple[Any, ...]:
            arguments = decode(data)
            if MARK in (data if isinstance(data, bytes) else bytes(data)):
                self.count_incoming(bytes(data))
            return arguments

        return decode_and_count

    def count_incoming(self, data: bytes) -> None:
        """Count the handles of a message that is accepted."""
        for owner, key in handles_in(data):
            if owner != self._context.instance_name and not self.holder.note_arrived(owner, key):
                stale = Stale(owner, key, self.holder.held[owner, key].ended)
                self.sender("", HANDLES_METHOD_ID)((self._context.instance_name, stale))
        self.send_actions()

    def return_copies(self, data: bytes) -> None:
        """Give back the handles of a message that is not accepted."""
        for owner, key in handles_in(data):
            if owner != self._context.instance_name:
                self.holder.return_copy(owner, key)
        self.send_actions()


def _ended_in(calls: list[bytes]) -> Iterator[Ended]:
    """Yield the messages about ends of handles in a run. Only the SDK sends such runs."""
    for call in calls:
        if method_of(call) != HANDLES_METHOD_ID:
            return
        try:
            message = decode_handle_message(arguments_of(call)).message
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(message, Ended):
            yield message
