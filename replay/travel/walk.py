"""One replay that stops where it is told to, and goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from immortal.appsdk.calls.context import SEED_SIZE_BYTES, Context
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.handlers.proxy import all_method_names
from immortal.appsdk.running.inspection import describe_state
from immortal.appsdk.running.local_app import LocalApp
from immortal.appsdk.state.tree import Fields
from immortal.coordinator.core.errors import require
from immortal.coordinator.core.formatting import Methods, method_name
from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.instances.own_logs import refuse_pickle
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol.errors import ImmortalError
from immortal.protocol.extensions import Origin
from immortal.protocol.messages import IncomingRpc, MessageType, decode_incoming_rpc, decode_message
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer
from immortal.protocol.verdicts import Verdict
from immortal.replay.errors import ReplayError, never_was
from immortal.replay.plan import ReplayPlan, plan_route
from immortal.replay.positions import KeptImpulses, Outputs
from immortal.replay.session import Ended, Event, ReplaySession, VerdictGiven
from immortal.replay.verify import ProvingSink


class Made(Struct, frozen=True):
    """Messages that one logged message made, of the stream to ``destination`` from ``first_position`` on."""

    destination: str
    first_position: int
    count: int
    payload: bytes
    origins: tuple[Origin, ...]


class Walk:
    """From a checkpoint on, record by record. ``watcher`` sees each message of the records that it wants."""

    def __init__(self, source: RecordSource, definition: Definition, checkpoint: CheckpointHeader) -> None:
        """The state is that of the checkpoint behind this. Raises ReplayError, AppError, LogError."""
        summary = source.summary()
        plan = ReplayPlan(checkpoint.checkpoint_id, follow=True)
        refuse_pickle(source, [checkpoint.checkpoint_id])
        self._source = source
        self._eyes = WatcherHolder()
        self._app = LocalApp(definition, bytes(SEED_SIZE_BYTES), 0, trace=True, make_delivery=self._eyes.make_delivery)
        route = plan_route(plan, source, summary)
        later = [start for start in route.versions if start.version > definition.version]
        self._upgrade = later[0] if later else None  # it takes other code, which shows what comes then
        if later:
            route = replace(route, versions=route.versions[: route.versions.index(later[0])])
        self._session = ReplaySession(source.identity.instance_name, summary, route)
        self._proving = ProvingSink(source, route)
        self._values: Iterator[bytes] | None = None
        self._ended: Ended | None = None
        self._collects = False
        self.made: list[Made] = []
        self.verdicts: list[Verdict] = []
        self._take(self._session.begin())
        self._listen()
        for chunk in source.checkpoint_chunks(checkpoint.checkpoint_id):
            self._session.give_blob(chunk)
            self._pass_on()
        require(self._session.wants_blob, "the app does not take the state")
        self._session.blob_is_complete()
        self._pass_on()

    @property
    def reached(self) -> int:
        """The last record that was handled."""
        return self._session.fed_sequence_id

    @property
    def instance(self) -> Any:
        return self._app.instance

    def state(self, instance: object | None = None) -> Fields:
        """Return the state now, as a tree. Raises StateError."""
        dispatcher = self._app.dispatcher
        shown = dispatcher.instance if instance is None else instance
        return describe_state(dispatcher.definition, shown, dispatcher.tasks.save())

    def advance(self, last: int, watcher: Watcher | None = None, *, collects: bool = False) -> None:
        """Handle all records up to ``last``. ``collects``: what they make goes to ``made``.

        Raises ReplayError for a record that is not there and where the app makes other calls than the log has, and what
        the app stops with.
        """
        self._eyes.watcher = watcher or NullWatcher()
        self._collects = collects
        try:
            while self.reached < last:
                self._step()
        finally:
            self._eyes.watcher = NullWatcher()
            self._collects = False
        self._refuse_other_calls()

    def look_ahead(self) -> None:
        """Compare also with what the log's next record says of the calls made so far. Raises ReplayError."""
        self._proving.see_next(self.reached)
        self._refuse_other_calls()

    def _refuse_other_calls(self) -> None:
        name = self._source.identity.instance_name
        if problem := self._proving.difference(name, all_method_names(self._app.dispatcher.definition)):
            raise ReplayError(never_was(name, problem))

    def _step(self) -> None:
        upgrade = self._upgrade
        if upgrade is not None and self.reached >= upgrade.sequence_id:
            raise ReplayError(
                f"from record {self.reached + 1} on version {upgrade.version} handled the log, whose code shows these"
                " records alone: go there, and ask again"
            )
        if self._values is None:
            self._values = self._source.values(self.reached + 1)
        value = next(self._values, None)
        if value is None:
            self._values = None
            raise ReplayError(f"record {self.reached + 1} is not in the log yet")
        header = decode_header(value)
        require(self._session.wants_records, f"a record in the phase {self._session.phase.value!r}")
        trailer = decode_trailer(value[header.size_bytes :], header.check)
        self._proving.record(header.sequence_id, value, trailer)
        self._session.give_record(value, trailer)
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass the session's data to the app until neither has more."""
        while data := b"".join(self._session.data_to_send()):
            self._app.receive(data)
            self._listen()

    def _listen(self) -> None:
        app = self._app
        data = bytes(app.output)
        app.output.clear()
        self._take(self._session.receive(data))
        if self._ended is not None and self._ended.failure is not None:
            failure = self._ended.failure
            raise ReplayError(
                f"the app stops at record {failure.sequence_id}, message {failure.message_index}: {failure.text}"
            )
        if app.error is not None:
            raise app.error

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Outputs):
                self._proving.outputs(
                    event.destination, event.first_position, event.count, event.payload, event.origins
                )
            elif isinstance(event, KeptImpulses):
                self._proving.impulses(event.destination, event.first_position, event.count, event.payload)
            if isinstance(event, Outputs) and self._collects:
                origins = tuple(event.origins or ())
                self.made.append(Made(event.destination, event.first_position, event.count, event.payload, origins))
            elif isinstance(event, VerdictGiven):
                self.verdicts.append(event.verdict)
            elif isinstance(event, Ended):
                self._ended = event


# Looking at each message of some records as a real app handles it.


class Watcher(Protocol):
    """Observer of a walk through the log."""

    def wants(self, sequence_id: int) -> bool:
        """Tell whether each message of this record is observed, which takes some µs each."""

    def behind(self, sequence_id: int, index: int, rpc: IncomingRpc | None, instance: Any) -> None:
        """A message was handled; of one that failed nothing is said. After a failure those of its record come again."""


class NullWatcher:
    def wants(self, sequence_id: int) -> bool:
        return False

    def behind(self, sequence_id: int, index: int, rpc: IncomingRpc | None, instance: Any) -> None:
        """Do nothing: nobody observes."""


class WatcherHolder:
    """Holds the current watcher: an app keeps its delivery for life."""

    def __init__(self) -> None:
        self.watcher: Watcher = NullWatcher()

    def make_delivery(self, definition: Definition, context: Context) -> Delivery:
        return _WatchedDelivery(definition, context, self)


class _WatchedDelivery(Delivery):
    def __init__(self, definition: Definition, context: Context, eyes: WatcherHolder) -> None:
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
    """Return the name of the method that a message calls or answers."""
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
