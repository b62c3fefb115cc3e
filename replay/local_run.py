"""A replay with its app in this process: what the session has for the app goes to it, and what it makes to a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from immortal.appsdk.calls.context import SEED_SIZE_BYTES, Context
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.local_app import LocalApp
from immortal.coordinator.instances.own_logs import refuse_pickle
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer
from immortal.protocol.verdicts import Verdict
from immortal.replay.errors import ReplayError
from immortal.replay.plan import Route
from immortal.replay.result import Sink
from immortal.replay.session import BlobPiece, Ended, Event, ReplaySession, Tells, VerdictGiven


class LocalRun:
    """One replay of ``route`` through the class ``definition``. ``blob``: the state at the end, once it has ``ended``.

    ``now_ns``, ``make_delivery``, ``outsiders``: as :class:`LocalApp` has them. ``tells``: as :class:`ReplaySession`.
    """

    def __init__(
        self,
        source: RecordSource,
        route: Route,
        definition: Definition,
        sink: Sink,
        *,
        now_ns: int = 0,
        tells: Tells = lambda verdict: True,
        make_delivery: Callable[[Definition, Context], Delivery] = Delivery,
        outsiders: frozenset[str] = frozenset(),
    ) -> None:
        refuse_pickle(source, [route.checkpoint.checkpoint_id])
        self.source = source
        self.route = route
        self.definition = definition
        self.sink = sink
        self.blob = b""
        self.verdicts: list[Verdict] = []
        self.ended: Ended | None = None
        self.app = LocalApp(
            definition,
            bytes(SEED_SIZE_BYTES),
            now_ns,
            trace=True,
            make_delivery=make_delivery,
            outsiders=outsiders,
        )
        self.session = ReplaySession(source.identity.instance_name, source.summary(), route, tells)

    def restore(self) -> None:
        """Give the app the state of the checkpoint. Raises what it stops with, ReplayError where it just ends."""
        self.take_all(self.session.begin())
        self.listen()
        for chunk in self.source.checkpoint_chunks(self.route.checkpoint.checkpoint_id):
            self.session.give_blob(chunk)
            self.pass_on()
        if not self.session.wants_blob:
            name, why = self.source.identity.instance_name, self.app.error or "it has ended"
            raise ReplayError(f"{name}: {self.definition.name} does not take the state: {why}")
        self.session.blob_is_complete()
        self.pass_on()

    def give(self, value: bytes) -> None:
        """Give the app the next record, as the log holds it. Raises what the app stops with."""
        header = decode_header(value)
        trailer = decode_trailer(value[header.size_bytes :], header.check)
        self.sink.record(header.sequence_id, value, trailer)
        self.session.give_record(value, trailer)
        self.pass_on()

    def pass_on(self) -> None:
        """Pass the session's data to the app, and what this makes back, until neither has more."""
        while self.ended is None and (data := b"".join(self.session.data_to_send())):
            self.app.receive(data)
            self.listen()

    def listen(self) -> None:
        """Take what the app has said. Raises its error, unless that is one of a handler, which ends the replay."""
        data = bytes(self.app.output)
        self.app.output.clear()
        self.take_all(self.session.receive(data))
        if self.app.error is not None and self.ended is None:
            raise self.app.error

    def take_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        self.sink.handle(event)
        if isinstance(event, BlobPiece):
            self.blob += event.data
        elif isinstance(event, VerdictGiven):
            self.verdicts.append(event.verdict)
        elif isinstance(event, Ended):
            self.ended = event
