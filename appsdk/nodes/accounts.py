"""Who holds which handles: what goes out and comes in with messages is entered here, and what follows is told.

The counting itself is :mod:`appsdk.nodes.counting`'s, without I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from appsdk.calls.context import Context
from appsdk.calls.outbox import Send
from appsdk.errors import UsageError
from appsdk.nodes.counting import Grant, Held, Holder, LastReleased, Owner, Stage, Tell
from appsdk.nodes.messages import Key, Stale
from appsdk.types.handles import MARK, handles_in, tag_of
from protocol.client import CLIENTS
from protocol.messages import RpcKind, RpcType
from protocol.nodes import HANDLES_METHOD_ID

WHAT = "a handle"


class Accounts:
    """Of one instance. ``released``: grants whose last holder has gone, whose owner is still to be told."""

    def __init__(self, context: Context) -> None:
        self.owner = Owner()
        self.holder = Holder()
        self.released: list[Grant] = []
        self.outsiders: frozenset[str] = frozenset()  # who may look at handles, and holds none: a test
        self._context = context
        self._senders: dict[tuple[str, int], Send] = {}

    def restore(self, grants: list[Grant], held: list[Held]) -> None:
        self.owner, self.holder = Owner(grants), Holder(held)
        self.released.clear()

    def act(self) -> None:
        """Do what the counting asks for."""
        own_name = self._context.instance_name
        for machine in (self.owner, self.holder):
            actions, machine.actions = machine.actions, []
            for action in actions:
                if isinstance(action, Tell):
                    to = "" if action.to == own_name else action.to
                    self.sender(to, HANDLES_METHOD_ID)((own_name, action.message))
                elif isinstance(action, LastReleased):
                    self.released.append(self.owner.grants[action.key])

    def sender(self, destination: str, method_id: int, name: str = WHAT) -> Send:
        key = destination, method_id
        if (send := self._senders.get(key)) is None:
            made: Send = self._context.outbox.make_sender(destination, name, method_id, RpcKind.CALL, (), RpcType.FORK)
            send = self._senders[key] = made
        return send

    # --- may it be used? ----------------------------------------------------------------------------------------------

    def require_usable(self, owner: str, key: Key, what: str) -> None:
        """Raises UsageError."""
        if owner != self._context.instance_name:
            if not self.holder.holds(owner, key):
                raise self._refused(f"{what}: {self._why_not(owner, key)}")
            return
        grant = self.owner.grants.get(key)
        if grant is None or grant.stage == Stage.ENDED:
            raise self._refused(f"{what}: it was destroyed or revoked")

    def _why_not(self, owner: str, key: Key) -> str:
        one = self.holder.held.get((owner, key))
        if one is not None and one.ended:
            return f"{owner!r} has {one.ended} it"
        return "this instance does not hold it: it was released or has ended, or was never passed to it"

    def _refused(self, text: str) -> BaseException:
        """An async handler ends, whatever it catches: a rebuild would not refuse it again."""
        error, task = UsageError(text), self._context.tasks.running
        return error if task is None else task.abandon(error)

    # --- handles in messages ------------------------------------------------------------------------------------------

    def passing(self, destination: str, data: bytes) -> None:
        """What was encoded last goes to ``destination`` now: its handles are passed on. Raises UsageError."""
        self._context.carries = False
        own_name = self._context.instance_name
        to = destination or own_name
        found = handles_in(data)
        for owner, key in found:
            self._require_passable(owner, key, to)
        for owner, key in found:
            if to == owner or to in self.outsiders:
                continue
            if owner == own_name:
                self.owner.passed(key, to)
            else:
                self.holder.pass_on(owner, key, to)
        self.act()

    def _require_passable(self, owner: str, key: Key, to: str) -> None:
        what = f"handle {tag_of(key)} of {owner!r} can't be passed on"
        if to.startswith(CLIENTS):
            raise self._refused(f"{what}: clients hold no handles, instances do")
        self.require_usable(owner, key, what)
        if owner == self._context.instance_name and to in self.owner.grants[key].banned:
            raise self._refused(f"{what}: it was revoked for {to!r}")

    def taking(self, decode: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
        """``decode`` of a handler that may be given handles: once they are read they are held."""

        def taken(data: Any) -> tuple[Any, ...]:
            arguments = decode(data)
            if MARK in (data if isinstance(data, bytes) else bytes(data)):
                self.arrived(bytes(data))
            return arguments

        return taken

    def arrived(self, data: bytes) -> None:
        """Of a message that is taken."""
        for owner, key in handles_in(data):
            if owner != self._context.instance_name and not self.holder.arrived(owner, key):
                stale = Stale(owner, key, self.holder.held[owner, key].ended)
                self.sender("", HANDLES_METHOD_ID)((self._context.instance_name, stale))
        self.act()

    def not_taken(self, data: bytes) -> None:
        """Of a message that nobody takes."""
        for owner, key in handles_in(data):
            if owner != self._context.instance_name:
                self.holder.not_taken(owner, key)
        self.act()
