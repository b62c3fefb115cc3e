"""Which methods a caller may call: judged as its calls come in, before they are logged.

A call that is not allowed takes its place in the log like any other, with a verdict in the same transaction: so the
order is kept, nothing is called, and its caller is told. What methods are called, the app says; until it has, the calls
of who may not call all of them wait.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from protocol.extensions import AppDescription
from protocol.messages import RpcKind, decode_messages
from protocol.varint import decode_zigzag_int


class Permission(Struct, frozen=True):
    """What one caller may do. ``methods``: the names of those that it may call; None: all."""

    methods: frozenset[str] | None = None


ANYTHING = Permission()


class Permissions:
    """Those of one instance, ``name``. ``given``: by the caller's name; who is not in there may call everything."""

    def __init__(self, name: str, given: Mapping[str, Permission]) -> None:
        self._name = name
        self._given: dict[str, Permission] = {}
        self._names: Mapping[int, str] | None = None  # of the app's own methods; None: it has not said any
        self._takes_verdicts = False
        self._allowed: dict[str, frozenset[int]] = {}  # method IDs, of who may not call all of them
        self.change(given)

    def change(self, given: Mapping[str, Permission]) -> None:
        self._given = {name: permission for name, permission in given.items() if name != self._name}
        self._look_up()

    def app_came(self, *, takes_verdicts: bool) -> None:
        """An app has said its first word; one that takes no verdicts can't be kept from carrying out a call."""
        self._takes_verdicts = takes_verdicts

    def describe(self, description: AppDescription) -> None:
        """What the app says that its methods are called."""
        self._names = {
            method_id: name.rpartition(".")[2]
            for (destination, method_id), name in description.methods.items()
            if destination == ""
        }
        self._look_up()

    def _look_up(self) -> None:
        names = self._names or {}
        self._allowed = {
            caller: frozenset(method_id for method_id, name in names.items() if name in permission.methods)
            for caller, permission in self._given.items()
            if permission.methods is not None
        }

    def limits(self, caller: str) -> bool:
        """It may not call all methods."""
        return caller in self._allowed

    def why_waiting(self, caller: str) -> str:
        """Why the calls of ``caller`` can't be judged yet, in words; "" if they can."""
        if caller not in self._allowed or (self._names is not None and self._takes_verdicts):
            return ""
        return (
            f"{self._name!r} lets {caller!r} call some methods only, and its app has not said yet which those are (one "
            f"of the base protocol never does)"
        )

    def forbidden(self, caller: str, calls: bytes) -> list[tuple[int, str]]:
        """Of packed RPC messages those that ``caller`` may not make: (index, what its method is called).

        Answers are none. ``calls`` were checked before.
        """
        allowed = self._allowed.get(caller)
        if allowed is None:
            return []
        names = self._names or {}
        found = []
        for index, (_, start, _) in enumerate(decode_messages(calls)):
            method_id = decode_zigzag_int(calls, start + 1)[0]
            if method_id not in allowed and calls[start] == RpcKind.CALL:
                found.append((index, names.get(method_id) or f"method {method_id}"))
        return found
