"""Looking at each message of some records as a real app handles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from immortal.appsdk.calls.context import Context
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.handlers.definition import Definition
from immortal.coordinator.core.words import Methods, method_name
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import IncomingRpc, MessageType, decode_incoming_rpc, decode_message


class Watcher(Protocol):
    """Who looks on."""

    def wants(self, sequence_id: int) -> bool:
        """Whether each message of this record is looked at, which takes some µs each."""

    def behind(self, sequence_id: int, index: int, rpc: IncomingRpc | None, instance: Any) -> None:
        """A message was handled; of one that failed nothing is said. After a failure those of its record come again."""


class NoWatcher:
    def wants(self, sequence_id: int) -> bool:
        return False

    def behind(self, sequence_id: int, index: int, rpc: IncomingRpc | None, instance: Any) -> None:
        """Nobody looks."""


class Eyes:
    """Where the watcher of the moment is found: an app keeps its delivery for life."""

    def __init__(self) -> None:
        self.watcher: Watcher = NoWatcher()

    def make_delivery(self, definition: Definition, context: Context) -> Delivery:
        return _WatchedDelivery(definition, context, self)


class _WatchedDelivery(Delivery):
    def __init__(self, definition: Definition, context: Context, eyes: Eyes) -> None:
        super().__init__(definition, context)
        self._eyes = eyes

    def deliver(self, instance: Any, content: bytes, offset: int, end: int, slice_end: int) -> int:
        sequence_id, watcher = self._context.sequence_id, self._eyes.watcher
        if not watcher.wants(sequence_id):
            return super().deliver(instance, content, offset, end, slice_end)
        index = self._context.message_index
        behind = super().deliver(instance, content, offset, end, offset + 1)
        watcher.behind(sequence_id, index, _rpc_at(content, offset), instance)
        return behind


def _rpc_at(content: bytes, offset: int) -> IncomingRpc | None:
    try:
        message_type, start, end = decode_message(content, offset)
        return decode_incoming_rpc(content, start, end) if message_type == MessageType.RPC else None
    except ImmortalError:
        return None


def name_of(rpc: IncomingRpc | None, methods: Methods) -> str:
    """Of the method that a message calls, or whose answer it is."""
    if rpc is None:
        return "initial"
    return method_name(rpc.method_id, rpc.kind, "", methods) or f"method {rpc.method_id}"


Behind = Callable[[int, int, "IncomingRpc | None", Any], None]


class Each:
    """A watcher of a range of records, both ends included, that calls a function."""

    def __init__(self, first: int, last: int, behind: Behind) -> None:
        self._first, self._last = first, last
        self._behind = behind

    def wants(self, sequence_id: int) -> bool:
        return self._first <= sequence_id <= self._last

    def behind(self, sequence_id: int, index: int, rpc: IncomingRpc | None, instance: Any) -> None:
        self._behind(sequence_id, index, rpc, instance)
