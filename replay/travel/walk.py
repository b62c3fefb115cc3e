"""One replay that stops where it is told to, and goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from immortal.appsdk.calls.context import Context
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.handlers.proxy import all_method_names
from immortal.appsdk.running.inspection import describe_state
from immortal.appsdk.state.tree import Fields
from immortal.coordinator.core.errors import require
from immortal.coordinator.core.formatting import Methods, method_name
from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import IncomingRpc, MessageType, decode_incoming_rpc, decode_message
from immortal.replay.errors import ReplayError, never_was
from immortal.replay.local_run import LocalRun
from immortal.replay.plan import ReplayPlan, plan_route
from immortal.replay.session import Event, Outputs
from immortal.replay.verify import ProvingSink

Behind = Callable[[int, int, "IncomingRpc | None", Any], None]
"""Is told (record, index, call, instance) once a message was handled; of one that failed nothing is said.

After a failure those of its record come again.
"""


class Walk(LocalRun):
    """From a checkpoint on, record by record."""

    sink: ProvingSink

    def __init__(self, source: RecordSource, definition: Definition, checkpoint: CheckpointHeader) -> None:
        """The state is that of the checkpoint behind this. Raises ReplayError, AppError, LogError."""
        route = plan_route(ReplayPlan(checkpoint.checkpoint_id, follow=True), source, source.summary())
        later = [start for start in route.versions if start.version > definition.version]
        self._upgrade = later[0] if later else None  # it takes other code, which shows what comes then
        if later:
            route = replace(route, versions=route.versions[: route.versions.index(later[0])])
        self.behind: Behind | None = None
        self.made: list[Outputs] = []
        self._collects = False
        self._values: Iterator[bytes] | None = None

        def make_delivery(definition: Definition, context: Context) -> Delivery:
            return _WatchedDelivery(definition, context, self)

        super().__init__(source, route, definition, ProvingSink(source, route), make_delivery=make_delivery)
        self.restore()

    @property
    def reached(self) -> int:
        """The last record that was handled."""
        return self.session.fed_sequence_id

    @property
    def instance(self) -> Any:
        return self.app.instance

    def state(self, instance: object | None = None) -> Fields:
        """Return the state now, as a tree. Raises StateError."""
        dispatcher = self.app.dispatcher
        shown = dispatcher.instance if instance is None else instance
        return describe_state(dispatcher.definition, shown, dispatcher.tasks.save())

    def advance(self, last: int, behind: Behind | None = None, *, collects: bool = False) -> None:
        """Handle all records up to ``last``. ``behind``: is told each message. ``collects``: what they make goes to
        ``made``.

        Raises ReplayError for a record that is not there and where the app makes other calls than the log has, and what
        the app stops with.
        """
        self.behind, self._collects = behind, collects
        try:
            while self.reached < last:
                self._step()
        finally:
            self.behind, self._collects = None, False
        self._refuse_other_calls()

    def look_ahead(self) -> None:
        """Compare also with what the log's next record says of the calls made so far. Raises ReplayError."""
        self.sink.see_next(self.reached)
        self._refuse_other_calls()

    def _refuse_other_calls(self) -> None:
        name = self.source.identity.instance_name
        if problem := self.sink.difference(name, all_method_names(self.app.dispatcher.definition)):
            raise ReplayError(never_was(name, problem))

    def _step(self) -> None:
        upgrade = self._upgrade
        if upgrade is not None and self.reached >= upgrade.sequence_id:
            raise ReplayError(
                f"from record {self.reached + 1} on version {upgrade.version} handled the log, whose code shows these"
                " records alone: go there, and ask again"
            )
        if self._values is None:
            self._values = self.source.values(self.reached + 1)
        value = next(self._values, None)
        if value is None:
            self._values = None
            raise ReplayError(f"record {self.reached + 1} is not in the log yet")
        require(self.session.wants_records, f"a record in the phase {self.session.phase.value!r}")
        self.give(value)

    def listen(self) -> None:
        super().listen()
        if self.ended is not None and (failure := self.ended.failure) is not None:
            raise ReplayError(
                f"the app stops at record {failure.sequence_id}, message {failure.message_index}: {failure.text}"
            )

    def take(self, event: Event) -> None:
        super().take(event)
        if self._collects and isinstance(event, Outputs):
            self.made.append(event)


class _WatchedDelivery(Delivery):
    """Hands over messages one by one while somebody looks at each, which takes some µs."""

    def __init__(self, definition: Definition, context: Context, walk: Walk) -> None:
        super().__init__(definition, context)
        self._walk = walk

    def deliver(self, instance: Any, content: bytes, offset: int, end: int, slice_end: int) -> int:
        behind = self._walk.behind
        if behind is None:
            return super().deliver(instance, content, offset, end, slice_end)
        sequence_id, index = self._context.sequence_id, self._context.message_index
        next_offset = super().deliver(instance, content, offset, end, offset + 1)
        behind(sequence_id, index, _rpc_at(content, offset), instance)
        return next_offset


def _rpc_at(content: bytes, offset: int) -> IncomingRpc | None:
    try:
        message_type, start, end = decode_message(content, offset)
        return decode_incoming_rpc(content, start, end) if message_type == MessageType.RPC else None
    except ImmortalError:
        return None


def name_of(rpc: IncomingRpc | None, methods: Methods) -> str:
    """Return the name of the method that a message calls or answers."""
    if rpc is None:
        return "initial"
    return method_name(rpc.method_id, rpc.kind, "", methods) or f"method {rpc.method_id}"
