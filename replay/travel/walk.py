"""A replay that stops on request, and continues from there."""

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
from immortal.replay.host import LocalRun
from immortal.replay.plan import ReplayError, ReplayPlan, plan_route, unshowable_state_text
from immortal.replay.session import Event, Outputs
from immortal.replay.verify import ProvingSink

AfterMessage = Callable[[int, int, "IncomingRpc | None", Any], None]
"""Function that is called with (record, index, call, instance) after each message, except messages that failed.

After a failure the earlier messages of its record are reported again.
"""

BeforeMessage = Callable[[int, int, Any], None]
"""Function that is called with (record, index, instance) before each message."""


class Walk(LocalRun):
    """Replay from a checkpoint on, record by record."""

    sink: ProvingSink

    def __init__(self, source: RecordSource, definition: Definition, checkpoint: CheckpointHeader) -> None:
        """Begin with the state of ``checkpoint``. Raises ReplayError, AppError, LogError."""
        route = plan_route(ReplayPlan(checkpoint.checkpoint_id, follow=True), source, source.summary())
        later = [start for start in route.versions if start.version > definition.version]
        self._upgrade = later[0] if later else None  # later records need other code
        if later:
            route = replace(route, versions=route.versions[: route.versions.index(later[0])])
        self.after_message: AfterMessage | None = None
        self.before_message: BeforeMessage | None = None
        self.made: list[Outputs] = []
        self._collects = False
        self._values: Iterator[bytes] | None = None

        def make_delivery(definition: Definition, context: Context) -> Delivery:
            return _WatchedDelivery(definition, context, self)

        super().__init__(source, route, definition, ProvingSink(source, route), make_delivery=make_delivery)
        self.restore()

    @property
    def reached(self) -> int:
        """Last record that was handled."""
        return self.session.fed_sequence_id

    def state(self, instance: object | None = None) -> Fields:
        """Return the state now, as a tree. Raises StateError."""
        dispatcher = self.app.dispatcher
        shown = dispatcher.instance if instance is None else instance
        return describe_state(dispatcher.definition, shown, dispatcher.tasks.save())

    def advance(
        self,
        last: int,
        after_message: AfterMessage | None = None,
        *,
        before_message: BeforeMessage | None = None,
        collects: bool = False,
    ) -> None:
        """Handle all records up to ``last``. Call ``before_message`` and ``after_message`` around each message, the
        first only if there is the second. ``collects``: add outputs to ``made``.

        Raises ReplayError if a record is missing or the app's calls differ from the log's; raises the errors of
        the app.
        """
        self.after_message, self.before_message, self._collects = after_message, before_message, collects
        try:
            while self.reached < last:
                self._step()
        finally:
            self.after_message, self.before_message, self._collects = None, None, False
        self._refuse_other_calls()

    def check_next_record(self) -> None:
        """Compare the calls made so far with the log's next record too. Raises ReplayError."""
        self.sink.check_next_marks(self.reached)
        self._refuse_other_calls()

    def _refuse_other_calls(self) -> None:
        name = self.source.identity.instance_name
        if problem := self.sink.difference(name, all_method_names(self.app.dispatcher.definition)):
            raise ReplayError(unshowable_state_text(name, problem))

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

    def process_output(self) -> None:
        super().process_output()
        if self.ended is not None and (failure := self.ended.failure) is not None:
            raise ReplayError(
                f"the app stops at record {failure.sequence_id}, message {failure.message_index}: {failure.text}"
            )

    def handle_event(self, event: Event) -> None:
        super().handle_event(event)
        if self._collects and isinstance(event, Outputs):
            self.made.append(event)


class _WatchedDelivery(Delivery):
    """Delivery that hands over messages one by one while a callback observes them, which takes some µs each."""

    def __init__(self, definition: Definition, context: Context, walk: Walk) -> None:
        super().__init__(definition, context)
        self._walk = walk

    def deliver(self, instance: Any, content: bytes, offset: int, end: int, slice_end: int) -> int:
        after_message = self._walk.after_message
        if after_message is None:
            return super().deliver(instance, content, offset, end, slice_end)
        sequence_id, index = self._context.sequence_id, self._context.message_index
        if self._walk.before_message is not None:
            self._walk.before_message(sequence_id, index, instance)
        next_offset = super().deliver(instance, content, offset, end, offset + 1)
        after_message(sequence_id, index, _rpc_at(content, offset), instance)
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
