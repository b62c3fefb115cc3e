"""Protocol between a replay and its app, as a state machine without I/O.

    GREETING --Hello--> RESTORING --the blob is given--> REPLAYING --the last record is given--> ENDING --> DONE
                                                         |      ^
                                                         +--10--+  UPGRADING: an upgrade of the log's past,
                                                                   until the app's checkpoint arrives

ENDING asks for a checkpoint (2): the app answers with all outputs that it still holds, then with its state. It never
hears that it is primary. An app without a Hello gets 11 instead, and its outputs after its checkpoint are ignored. In a
what-if of an upgrade it gets nothing, as in the base protocol, and its silence is the end. A message that can't fail
alone leads to DONE from any phase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import NoReturn

from msgspec import Struct

from immortal.coordinator.core.errors import AppProtocolError, require
from immortal.coordinator.core.input.app_inbox import CALLS, late_hello, read_calls
from immortal.coordinator.core.interfaces import ImpulseBatch, LogSummary, OutputMark
from immortal.coordinator.core.life_cycle import session as coordinator_session
from immortal.coordinator.log.record_contents import NoSuchMessageError, record_of, with_first_messages
from immortal.protocol.batch import offset_after
from immortal.protocol.extensions import (
    REPORTS,
    AppDescription,
    HandlerFailure,
    Origin,
    decode_app_description,
    decode_handler_failed,
    decode_numbers,
    decode_origins,
    encode_version,
)
from immortal.protocol.limits import ARGUMENTS_SIZE_MIB_DEFAULT, RPC_FRONT_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType, decode_attach_to, encode_checkpoint, encode_message
from immortal.protocol.readers import BlobData, BlobStart, Message, MessageReader
from immortal.protocol.record import CHECKPOINT_SEQUENCE_ID, CONTROL_SEQUENCE_ID, decode_header, encode_record
from immortal.protocol.trailer import BatchSource, Trailer
from immortal.protocol.verdicts import (
    Handling,
    MessageKey,
    Verdict,
    decode_handling,
    decode_unsaved,
    decode_verdict,
    encode_verdicts,
)
from immortal.replay.plan import OWN_VERSION, ReplayError, Route, StateUnsavedError, UpgradeFailedError

VerdictFilter = Callable[[Verdict], bool]
"""Function that returns True if the app gets a verdict of the log; without the verdict, the app handles the message."""

_OF_VERDICTS = REPORTS - {MessageType.VERDICT}


class Phase(Enum):
    GREETING = "waiting for the app's Hello"
    RESTORING = "restoring the checkpoint"
    REPLAYING = "replaying"
    UPGRADING = "upgrading"
    ENDING = "collecting the state"
    DONE = "done"


class Outputs(Struct, frozen=True):
    """Messages (incoming RPC form, packed) that the app sent to ``destination``; "" is the instance itself.

    ``origins``: the logged messages that caused them, ``count`` in all; None if the app does not report them.
    """

    destination: str
    first_position: int
    count: int
    payload: bytes
    origins: Sequence[Origin] | None


class KeptImpulses(Struct, frozen=True):
    """Impulses of the recorded run, at their positions; ``payload`` is empty if only the positions are known."""

    destination: str
    first_position: int
    count: int
    payload: bytes


class StreamPositions:
    """Positions of a replay's outputs in one stream, from ``mark`` (where the replay begins) on.

    Kept impulses, which no replay makes, take positions in between. Unlike in the output stream's own replay, nothing
    is kept for sending, and a mismatch is no error: outputs of other code have other positions.
    """

    def __init__(self, destination: str, mark: OutputMark | None, impulses: Iterable[ImpulseBatch]) -> None:
        self.destination = destination
        self.position = mark.position if mark else 0
        self._impulses = deque(batch for batch in impulses if batch.first_position > self.position)

    def append(self, count: int, payload: bytes, origins: Sequence[Origin] | None) -> Iterator[Outputs | KeptImpulses]:
        """Yield the app's next ``count`` messages, cut where impulses lie between them."""
        while count:
            yield from self.add_kept_impulses()
            taken = count
            if self._impulses:
                taken = min(count, max(1, self._impulses[0].first_position - self.position - 1))
            if taken == count:
                part, part_origins, payload = payload, origins, b""
            else:
                offset = offset_after(payload, taken, count)
                part, payload = payload[:offset], payload[offset:]
                part_origins, origins = (None, None) if origins is None else cut_origins(origins, taken)
            yield Outputs(self.destination, self.position + 1, taken, part, part_origins)
            self.position += taken
            count -= taken
        yield from self.add_kept_impulses()

    def add_kept_impulses(self) -> Iterator[KeptImpulses]:
        """Yield the kept impulses that come directly after the present position."""
        while self._impulses and self._impulses[0].first_position <= self.position + 1:
            batch = self._impulses.popleft()
            if batch.first_position == self.position + 1:  # else other code made another number of messages
                self.position = batch.last_position
                yield KeptImpulses(self.destination, batch.first_position, batch.count, batch.payload)


def cut_origins(origins: Sequence[Origin], count: int) -> tuple[list[Origin], list[Origin]]:
    """Split origins into those of the first ``count`` messages and the rest."""
    front: list[Origin] = []
    rest: list[Origin] = []
    for origin in origins:
        taken = min(count, origin.count)
        count -= taken
        if taken:
            front.append(Origin(origin.sequence_id, origin.message_index, taken))
        if taken < origin.count:
            rest.append(Origin(origin.sequence_id, origin.message_index, origin.count - taken))
    return front, rest


class BlobPiece(Struct, frozen=True):
    """Piece of the app's state at the end of the replay."""

    data: bytes


class NumbersDrawn(Struct, frozen=True):
    """Random numbers that the app drew.

    ``data``: of the Numbers message. ``complete``: it is the last one of the record and of earlier records.
    ``sequence_id`` None: the app never reports any.
    """

    sequence_id: int | None
    data: bytes = b""
    complete: bool = True


class VerdictGiven(Struct, frozen=True):
    """Verdict that the app gave on a message that failed in this replay and has no verdict in the log."""

    verdict: Verdict


class Ended(Struct, frozen=True):
    """End of the session: all outputs and the state have arrived, or (``failure``) a message could not be handled."""

    failure: HandlerFailure | None = None


Event = Outputs | KeptImpulses | BlobPiece | NumbersDrawn | VerdictGiven | Ended


class ReplaySession:
    """State machine of one replay of ``route`` with one app. ``name``: the instance. ``summary``: its log."""

    def __init__(
        self,
        name: str,
        summary: LogSummary,
        route: Route,
        sends_verdict: VerdictFilter = lambda verdict: True,
        *,
        rpc_limit_mib: int = ARGUMENTS_SIZE_MIB_DEFAULT,
    ) -> None:
        self.name = name
        self.phase = Phase.GREETING
        self.description: AppDescription | None = None
        self.fed_sequence_id = route.checkpoint.sequence_id
        self.records = 0
        self.messages = 0
        self._summary = summary
        self._route = route
        self._sends_verdict = sends_verdict
        self._sent_verdicts: set[MessageKey] = set()
        self._last_sequence_id = route.last_sequence_id
        self._versions = list(route.versions)
        self._upgrade_to = route.upgrade_to
        self._reader = MessageReader(rpc_size_bytes_max=(rpc_limit_mib << 20) + RPC_FRONT_SIZE_BYTES_MAX)
        # The app's messages are checked as a coordinator checks them during its replay.
        self._app = coordinator_session.AppSession()
        self._app.load(summary.committer_id, None)
        self._app.phase = coordinator_session.Phase.REPLAYING
        self._output: list[bytes | memoryview] = []
        self._origins: list[Origin] | None = None
        self._snapshot = False
        self._blob_is_final = False
        self.handling = Handling(-1)
        """What takes the app long."""
        self._upgraded_to: int | None = None  # None again after the next record
        self.reads_origins = True
        """False: outputs come without their origins."""
        self.app_leaves = False
        """True if the app got a goodbye: it closes the connection itself."""
        self._impulses = summary.impulses_by_destination()
        self._streams = {
            destination: self._stream(destination)
            for destination in sorted({*route.checkpoint.outputs, *self._impulses})
        }
        if not summary.extensions:  # the log of an app of the base protocol, which says no Hello
            self._start_restoring()
        self._handlers: dict[int, Callable[[Message], Iterable[Event]]] = {
            **dict.fromkeys(CALLS, self._calls),
            **dict.fromkeys(_OF_VERDICTS, self._report_of_app),
            MessageType.HELLO: late_hello,
            MessageType.ATTACH_TO: self._attach,
            MessageType.BARRIER: lambda message: (),  # about when calls can leave: in a replay none leaves
            MessageType.APP_DESCRIPTION: self._description,
            MessageType.TAKE_CHECKPOINT: lambda message: (),  # the replay asks for one at its end
            MessageType.SNAPSHOT_BEGIN: self._snapshot_message,
            MessageType.SNAPSHOT_CHUNK: self._snapshot_message,
            MessageType.SNAPSHOT_END: self._snapshot_message,
            MessageType.CHECKPOINT_FAILED: self._checkpoint_failed,
            MessageType.UPGRADE_FAILED: self._upgrade_failed,
            MessageType.ORIGINS: self._origins_of_calls,
            MessageType.NUMBERS: self._numbers,
            MessageType.VERDICT: self._verdict,
            MessageType.HANDLER_FAILED: lambda message: (self._end(decode_handler_failed(message.data)),),
        }

    @property
    def label(self) -> str:
        """Name that the app gave itself."""
        return self._app.label

    @property
    def _has_numbers(self) -> bool:
        """True if the app reports the random numbers that it draws, and can take others to draw."""
        return self._app.hello is not None and MessageType.NUMBERS in self._app.hello.extensions

    @property
    def _has_verdicts(self) -> bool:
        """True if the app can let one message fail and continue."""
        return MessageType.VERDICTS in self._app.extensions

    @property
    def app_flushes(self) -> bool:
        """True if the app sends all its outputs before its state."""
        return self._app.flushes

    @property
    def wants_blob(self) -> bool:
        return self.phase is Phase.RESTORING

    @property
    def wants_records(self) -> bool:
        return self.phase is Phase.REPLAYING

    @property
    def ends_by_silence(self) -> bool:
        """True if an app has received all, is not asked for its state, and does not report when it has handled all."""
        return self.phase is Phase.ENDING and self._app.hello is None and self._upgrade_to is not None

    def was_silent(self) -> Event:
        """End the replay because the app is silent."""
        require(self.ends_by_silence, f"silence in phase {self.phase.value!r}")
        return self._end(None)

    def data_to_send(self) -> list[bytes | memoryview]:
        """Return and clear the data to send to the app now, in order."""
        output, self._output = self._output, []
        return output

    def start(self) -> Iterator[Event]:
        """Begin; yield the impulses directly after the checkpoint, which the caller must handle first."""
        for stream in self._streams.values():
            yield from stream.add_kept_impulses()

    # --- the log's side ---------------------------------------------------------------------------------------------

    def give_blob(self, data: bytes) -> None:
        self._output.append(data)

    def blob_is_complete(self) -> None:
        require(self.phase is Phase.RESTORING, f"the end of the blob in phase {self.phase.value!r}")
        self.phase = Phase.REPLAYING
        if self._has_verdicts:
            self._send_verdicts(self._unsent_verdicts(self._summary.verdicts))
        if self._upgrade_to is not None:
            version = None if self._upgrade_to == OWN_VERSION else self._upgrade_to
            self._send_control(MessageType.UPGRADE_SERVICE, version)
        self._send_next_control()

    def give_verdicts(self, verdicts: Iterable[Verdict]) -> None:
        """Send the app new verdicts of the log before the next record."""
        if self._has_verdicts and (untold := self._unsent_verdicts(verdicts)):
            self._send_verdicts(untold)

    def _unsent_verdicts(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        return [
            verdict
            for verdict in verdicts
            if verdict.sequence_id > self.fed_sequence_id
            and verdict.key not in self._sent_verdicts
            and self._sends_verdict(verdict)
        ]

    def _send_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        self._sent_verdicts.update(verdict.key for verdict in verdicts)
        for content in encode_verdicts(verdicts):
            self._output.append(encode_record(self._summary.committer_id, CONTROL_SEQUENCE_ID, content))

    def give_numbers(self, numbers: Sequence[bytes]) -> None:
        """Give the app numbers that another run drew in the next record: the data of its Numbers messages.

        After the first one the app draws only these numbers, or numbers that no log has.
        """
        if self._has_numbers:
            for data in numbers:
                self._send_control(MessageType.NUMBERS, data=data)

    def give_record(self, value: bytes, trailer: Trailer) -> bool:
        """Give the app the next record, in the log's form; return False if the replay needs no more.

        Raises ReplayError if the record lacks the message at which the replay must end.
        """
        if self.phase is not Phase.REPLAYING:
            return False
        header = decode_header(value)
        require(header.sequence_id == self.fed_sequence_id + 1, f"record {header.sequence_id} out of turn")
        last_message = self._route.last_message
        if (sources := self._app.sources_record(trailer.batches)) is not None:
            self._output.append(sources)
        if header.sequence_id == self._last_sequence_id and last_message is not None:
            try:
                self._output.append(with_first_messages(record_of(value), last_message + 1))
            except NoSuchMessageError as error:
                raise ReplayError(str(error)) from None
            self.messages += last_message + 1
        else:
            self._output.append(memoryview(value)[: header.size_bytes])
            self.messages += sum([batch.count for batch in trailer.batches])
        self._upgraded_to = None
        self.records += 1
        self.fed_sequence_id = header.sequence_id
        self._send_next_control()
        return True

    def give_other_record(self, value: bytes, batches: Sequence[BatchSource]) -> None:
        """Give the app a record that the log does not have, between records of the log."""
        if (sources := self._app.sources_record(batches)) is not None:
            self._output.append(sources)
        self._output.append(value)

    def end_here(self) -> None:
        """End the replay after the last record given."""
        if self.phase in (Phase.REPLAYING, Phase.UPGRADING):
            self._last_sequence_id = self.fed_sequence_id
        if self.phase is Phase.REPLAYING:
            self._send_next_control()

    def _start_restoring(self) -> None:
        self.phase = Phase.RESTORING
        size = encode_checkpoint(self._route.checkpoint.size_bytes)
        self._output.append(encode_record(self._summary.committer_id, CHECKPOINT_SEQUENCE_ID, size))

    def _send_next_control(self) -> None:
        """Send the messages that follow the last record given."""
        at_end = self._last_sequence_id is not None and self.fed_sequence_id >= self._last_sequence_id
        if self._versions and self._versions[0].sequence_id <= self.fed_sequence_id:
            start = self._versions.pop(0)
            more = bool(self._versions) and self._versions[0].sequence_id <= self.fed_sequence_id
            self.phase = Phase.UPGRADING
            self._blob_is_final = at_end and not more
            self._upgraded_to = start.version
            self._send_control(MessageType.UPGRADE_TAKE_CHECKPOINT, start.version)
        elif at_end:
            self.phase = Phase.ENDING
            self._blob_is_final = True
            if self.ends_by_silence:
                return
            if self._app.hello is None:  # a client of the base protocol: end as a recovery does
                self._send_control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)
            elif self._upgraded_to is None:
                self._send_control(MessageType.TAKE_CHECKPOINT)
            else:  # directly after an upgrade a TakeCheckpoint would make the app primary
                self._send_control(MessageType.UPGRADE_TAKE_CHECKPOINT, self._upgraded_to)
        else:
            self.phase = Phase.REPLAYING

    def _send_control(self, message_type: MessageType, version: int | None = None, data: bytes = b"") -> None:
        content = encode_message(message_type, data)
        if version is not None and MessageType.VERSION in self._app.extensions:
            content = encode_version(version) + content
        self._output.append(encode_record(self._summary.committer_id, CONTROL_SEQUENCE_ID, content))

    # --- the app's side ---------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> Iterator[Event]:
        """Handle bytes from the app. Raises RemoteProtocolError, UpgradeFailedError, StateUnsavedError."""
        was_heard = self._app.has_sent
        self._reader.receive_data(data)
        while self.phase is not Phase.DONE and (event := self._reader.next_event()) is not None:
            if isinstance(event, Message):
                yield from self._message(event)
            elif isinstance(event, BlobStart):
                if not self._app.has_sent:
                    self._check_kind(None)
                self._require_asked()
            elif isinstance(event, BlobData):
                if event.data and self._blob_is_final:
                    yield BlobPiece(event.data)
                if event.last:
                    yield from self._checkpoint_came()
        if self._app.hello is not None and not was_heard and not self._has_numbers:
            yield NumbersDrawn(None)

    def _message(self, message: Message) -> Iterable[Event]:
        if not self._app.has_sent:
            self._check_kind(message)
            if message.message_type == MessageType.HELLO:
                return ()
        return self._handlers.get(message.message_type, self._out_of_place)(message)

    def _attach(self, message: Message) -> Iterable[Event]:
        self._app.attached.add(decode_attach_to(message.data))
        return ()

    def _description(self, message: Message) -> Iterable[Event]:
        self.description = decode_app_description(message.data)
        return ()

    def _origins_of_calls(self, message: Message) -> Iterable[Event]:
        if self.reads_origins:
            self._origins = decode_origins(message.data)
        return ()

    def _numbers(self, message: Message) -> Iterable[Event]:
        numbers = decode_numbers(message.data)
        return (NumbersDrawn(numbers.sequence_id, message.data, complete=not numbers.draws),)

    def _verdict(self, message: Message) -> Iterable[Event]:
        if not self._has_verdicts:
            self._out_of_place(message)
        return (VerdictGiven(decode_verdict(message.data)),)

    def _report_of_app(self, message: Message) -> Iterable[Event]:
        """Note what takes long. Other reports about the running app mean nothing in a replay."""
        if not self._has_verdicts:
            self._out_of_place(message)
        if message.message_type == MessageType.HANDLING:
            self.handling = decode_handling(message.data)
        return ()

    def _upgrade_failed(self, message: Message) -> NoReturn:
        raise UpgradeFailedError(f"the upgrade failed: {message.data.decode('utf-8', 'replace')}")

    def _checkpoint_failed(self, message: Message) -> NoReturn:
        self._require_asked()
        raise StateUnsavedError(decode_unsaved(message.data))

    def _out_of_place(self, message: Message) -> NoReturn:
        raise AppProtocolError(f"the app sent a message of type {message.message_type}, which has no place in a replay")

    def _check_kind(self, message: Message | None) -> None:
        """Check that the app is of the kind (SDK or not) that began the log. ``message``: its first; None: a blob."""
        self._app.note_first_message(message)
        time = MessageType.RECORD_TIME
        logged, asked = time in (self._summary.extensions or ()), time in self._app.extensions
        if logged != asked:
            kind = "the SDK's" if logged else "the base protocol's"
            raise AppProtocolError(
                f"the log of {self.name!r} was begun by an app of {kind} kind, whose records "
                f"{'have' if logged else 'have no'} times; this app is of the other kind"
            )
        if self.phase is Phase.GREETING:
            self._start_restoring()

    def _calls(self, message: Message) -> Iterator[Outputs | KeptImpulses]:
        origins, self._origins = self._origins, None
        for calls in read_calls(self._app, self.name, message):
            if calls.impulses:
                continue  # from an app that believes it is primary; impulses are input, and the log has its own
            if origins is not None and sum(origin.count for origin in origins) != calls.count:
                raise AppProtocolError(f"the app gives origins for another number of messages than {calls.count}")
            stream = self._streams.get(calls.destination)
            if stream is None:
                stream = self._streams[calls.destination] = self._stream(calls.destination)
            yield from stream.append(calls.count, calls.payload, origins)

    def _stream(self, destination: str) -> StreamPositions:
        outputs = self._route.checkpoint.outputs
        return StreamPositions(destination, outputs.get(destination), self._impulses.get(destination, ()))

    # --- checkpoints, in one piece or during the app's work -----------------------------------------------------------

    def _require_asked(self) -> None:
        if self.phase not in (Phase.UPGRADING, Phase.ENDING):
            raise AppProtocolError(f"the app sent a checkpoint in the phase {self.phase.value!r}: none was asked for")

    def _snapshot_message(self, message: Message) -> Iterator[Event]:
        begins = message.message_type == MessageType.SNAPSHOT_BEGIN
        self._require_asked()
        if begins == self._snapshot:
            raise AppProtocolError("the app sent a piece of a snapshot out of turn")
        self._snapshot = True
        if message.message_type == MessageType.SNAPSHOT_CHUNK and self._blob_is_final:
            yield BlobPiece(message.data)
        if message.message_type == MessageType.SNAPSHOT_END:
            self._snapshot = False
            if message.data:
                raise AppProtocolError(f"the app could not give its state: {message.data.decode('utf-8', 'replace')}")
            yield from self._checkpoint_came()

    def _checkpoint_came(self) -> Iterator[Event]:
        if self._blob_is_final:
            yield self._end(None)
        else:
            self._app.upgraded = True
            self._send_next_control()

    def _end(self, failure: HandlerFailure | None) -> Ended:
        self.phase = Phase.DONE
        if failure is None and MessageType.GOODBYE in self._app.extensions:
            self._send_control(MessageType.GOODBYE, data=b"the replay is complete")
            self.app_leaves = True
        return Ended(failure)
