"""How many ``async def`` handlers run at once: of the class, of one handler, of one handler for each key.

A call that may not begin yet waits here for its turn, in the order of the log. It begins where another one ends, which
the log decides as well.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

from immortal.appsdk.calls.codec import encode_value
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.state.journal import SavedTask

Group: TypeAlias = tuple[int, bytes]  # a method ID, and the key among its calls
_ALL: Group = (0, b"")


class Limits:
    """Those of one instance. ``queued``: what waits for its turn, by number, the oldest first."""

    _definition: Definition

    def __init__(self) -> None:
        self.queued: dict[int, SavedTask] = {}
        self._running: Counter[Group] = Counter()
        self._groups_of: dict[int, list[tuple[Group, int]]] = {}

    def use(self, definition: Definition) -> None:
        """From here on this class's limits hold. Nothing runs and nothing waits that was told of before."""
        self._definition = definition
        self._running.clear()
        self._groups_of.clear()
        self.queued.clear()

    def has_room(self, handler: Handler[Any, Any], arguments: bytes) -> bool:
        return all(self._running[group] < limit for group, limit in self._groups(handler, arguments))

    def began(self, number: int, handler: Handler[Any, Any], arguments: bytes) -> None:
        groups = self._groups(handler, arguments)
        if groups:
            self._groups_of[number] = groups
            self._running.update(group for group, _ in groups)

    def ended(self, number: int) -> None:
        for group, _ in self._groups_of.pop(number, ()):
            self._running[group] -= 1
            if not self._running[group]:
                del self._running[group]

    def take_next(self) -> SavedTask | None:
        """The oldest that may begin now, which does not wait any more."""
        definition = self._definition
        whole = definition.concurrent_handlers
        if whole is not None and self._running[_ALL] >= whole:
            return None
        for number, saved in self.queued.items():
            if self.has_room(definition.by_method_id[saved.method_id], saved.arguments):
                return self.queued.pop(number)
        return None

    def describe(self, saved: SavedTask) -> str:
        """What it waits for, for people."""
        handler = self._definition.by_method_id[saved.method_id]
        full = [limit for group, limit in self._groups(handler, saved.arguments) if self._running[group] >= limit]
        return f"its turn: {full[0]} run at once" if full else "its turn"

    def _groups(self, handler: Handler[Any, Any], arguments: bytes) -> list[tuple[Group, int]]:
        definition = self._definition
        groups: list[tuple[Group, int]] = []
        if definition.concurrent_handlers is not None:
            groups.append((_ALL, definition.concurrent_handlers))
        if handler.limit is not None:
            groups.append(((handler.method_id, self._key(definition, handler, arguments)), handler.limit))
        return groups

    @staticmethod
    def _key(definition: Definition, handler: Handler[Any, Any], arguments: bytes) -> bytes:
        if handler.limit_by is None:
            return b""
        names = list(handler.signature.parameters)
        values = definition.codec(handler).decode(arguments)
        at = names.index(handler.limit_by)
        value = values[at] if at < len(values) else handler.signature.parameters[handler.limit_by].default
        return encode_value(value)
