"""The app's side of the protocol without I/O: bytes in, events and bytes out, the handlers called in between.

    nothing --11--> __init__, initial message, checkpoint --the initial message comes back--> primary     first start
    nothing --blob--> restored --records--> ... --11--> checkpoint --> primary                            recovery
                                               --15--> primary

One thread: the one that made the :class:`Dispatcher` calls it, and the handlers run in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from appsdk.context import Context
from appsdk.definition import Definition
from appsdk.delivery import Delivery
from appsdk.errors import StateError
from appsdk.handlers import INITIAL_METHOD_ID
from appsdk.immortal import Immortal, attach
from appsdk.outbox import Chunk, Outbox, make_writer
from appsdk.report import call_user_code
from appsdk.state import Envelope, decode_envelope, encode_envelope
from protocol.batch import decode_batch, decode_replayable_batch
from protocol.errors import RemoteProtocolError
from protocol.extensions import (
    ALL_EXTENSIONS,
    Hello,
    decode_impulses_accepted,
    decode_record_time,
    encode_hello,
)
from protocol.messages import (
    MessageType,
    RpcType,
    decode_messages,
    encode_checkpoint,
    encode_message,
)
from protocol.readers import BlobData, BlobStart, Record, RecordReader
from protocol.record import CONTROL_SEQUENCE_ID
from protocol.varint import encode_zigzag

SLICE_SIZE_BYTES = 64 << 10  # of input, handled before the transport may send: keeps both ends at work


@dataclass(frozen=True, slots=True)
class BecamePrimary:
    """All that was logged is handled: the hooks may start."""


@dataclass(frozen=True, slots=True)
class OutputReady:
    """There is a batch or more to send, before more input is handled."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The coordinator stops cleanly; so does the app."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The coordinator closes the connection and says why."""

    reason: str


Event = BecamePrimary | OutputReady | Goodbye | Refusal


class Dispatcher:
    """One connection's life of one class.

    ``draw_seed`` gives SEED_SIZE_BYTES bytes at a first start; ``wake`` is called by other threads when they have
    put impulses where :meth:`data_to_send` finds them. An error that is raised ends the connection: stop the app.
    """

    def __init__(
        self,
        definition: Definition,
        draw_seed: Callable[[], bytes],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        definition.resolve(names_may_be_missing=False)
        self.definition = definition
        self.instance: Any = None
        self.context = Context(b"")
        self.outbox = self.context.outbox = Outbox(self.context, wake)
        self._draw_seed = draw_seed
        self._reader = RecordReader()
        self._primary = False
        self._awaiting_initial = False
        self._blob: list[bytes] = []
        self._next_sequence_id = 0
        self._delivery = Delivery(definition, self.context)
        self._work = self._run()
        self.outbox.send(encode_hello(Hello(ALL_EXTENSIONS, definition.label)))

    # --- what the transport calls -----------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Bytes from the coordinator, in any pieces."""
        self._reader.receive_data(data)

    def next_event(self) -> Event | None:
        """Handle input up to the next event; None when there is no more input.

        Raises HandlerError, StateError, RemoteProtocolError: each ends the connection.
        """
        return next(self._work)

    def data_to_send(self) -> list[Chunk]:
        """All bytes that are to be sent now, in order. They are the caller's."""
        return self.outbox.take()

    @property
    def buffered_bytes(self) -> int:
        """Bytes that came in and belong to a record that is not whole yet, or that is still to be handled."""
        return self._reader.buffered_bytes

    # --- records ----------------------------------------------------------------------------------------------------

    def _run(self) -> Iterator[Event | None]:
        while True:
            event = self._reader.next_event()
            if event is None:
                yield None
            elif isinstance(event, Record):
                if event.header.sequence_id == CONTROL_SEQUENCE_ID:
                    yield from self._control(event)
                else:
                    yield from self._logged(event)
            elif isinstance(event, BlobStart):
                if self.instance is not None:
                    raise RemoteProtocolError("a second checkpoint came in: an app is restored once, as it connects")
                self._blob.clear()
            elif isinstance(event, BlobData):
                self._blob.append(event.data)
                if event.last:
                    self._restore()

    def _control(self, record: Record) -> Iterator[Event]:
        content = record.content
        self.context.committer_id = record.header.committer_id
        for message_type, start, end in decode_messages(content):
            data = content[start:end]
            if message_type == MessageType.TAKE_CHECKPOINT:
                self._checkpoint()
                yield OutputReady()
            elif message_type == MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT:
                if self.instance is None:
                    self._start_first()
                    yield OutputReady()
                else:
                    self._checkpoint()
                    yield from self._become_primary()
            elif message_type == MessageType.BECOMING_PRIMARY:
                yield from self._become_primary()
            elif message_type == MessageType.IMPULSES_ACCEPTED:
                self.outbox.impulses.accept(decode_impulses_accepted(data))
            elif message_type == MessageType.GOODBYE:
                yield Goodbye(data.decode("utf-8", "replace"))
            elif message_type == MessageType.REFUSAL:
                yield Refusal(data.decode("utf-8", "replace"))
            else:
                raise RemoteProtocolError(
                    f"a control record holds a message of type {message_type}, which this SDK does not know"
                )

    def _logged(self, record: Record) -> Iterator[Event]:
        sequence_id, content = record.header.sequence_id, record.content
        if self.instance is None:
            raise RemoteProtocolError(f"record {sequence_id} came before a checkpoint or a first start")
        if sequence_id != self._next_sequence_id:
            raise RemoteProtocolError(f"record {sequence_id} came, {self._next_sequence_id} was expected")
        context = self.context
        context.committer_id = record.header.committer_id
        context.sequence_id = sequence_id
        context.record_time_ns = None
        context.message_index = 0
        for message_type, start, end in decode_messages(content):
            if message_type == MessageType.RECORD_TIME:
                context.record_time_ns = decode_record_time(content, start, end)
            elif message_type == MessageType.RPC_BATCH:
                count, skipped = decode_batch(content[start : start + 16])
                yield from self._batch(content, start + skipped, end, count)
            elif message_type == MessageType.RPC:
                size_of_size = len(encode_zigzag(end - start + 1))
                yield from self._batch(content, start - 1 - size_of_size, end, 1)
            elif message_type == MessageType.COUNT_REPLAYABLE_RPC_BATCH:
                count, _, skipped = decode_replayable_batch(content[start : start + 16])
                yield from self._batch(content, start + skipped, end, count)
            elif message_type == MessageType.INITIAL_MESSAGE:
                yield from self._batch(content, start, end, 1)
            else:
                raise RemoteProtocolError(
                    f"record {sequence_id} holds a message of type {message_type}, which is never logged"
                )
        self._next_sequence_id = sequence_id + 1
        if self._awaiting_initial:
            self._awaiting_initial = False
            yield from self._become_primary()

    def _batch(self, content: bytes, offset: int, end: int, count: int) -> Iterator[Event]:
        """Handle the ``count`` RPC messages of ``content[offset:end]``, with a pause wherever there is much to send."""
        first_index = self.context.message_index
        while offset < end:
            offset = self._delivery.deliver(self.instance, content, offset, end, min(offset + SLICE_SIZE_BYTES, end))
            if self.outbox.ready_size_bytes:
                yield OutputReady()
        if self.context.message_index - first_index != count:
            raise RemoteProtocolError(
                f"record {self.context.sequence_id}: a batch of {self.context.message_index - first_index} messages "
                f"gives its count as {count}"
            )

    # --- life -------------------------------------------------------------------------------------------------------

    def _new_instance(self) -> Any:
        instance: Immortal = Immortal.__new__(self.definition.cls)
        attach(instance, self.context)
        return instance

    def _start_first(self) -> None:
        definition = self.definition
        self.context.seed = self._draw_seed()
        instance = self._new_instance()
        call_user_code(f"{definition.name}.__init__", lambda: instance.__init__(), StateError)
        self._prepare(instance)
        self.instance = instance
        message = bytearray()
        make_writer("initial", INITIAL_METHOD_ID, RpcType.FORK)(message, ())
        self.outbox.send(encode_message(MessageType.INITIAL_MESSAGE, bytes(message)))
        self._checkpoint()
        self._awaiting_initial = True

    def _restore(self) -> None:
        blob = b"".join(self._blob)
        self._blob.clear()
        envelope, state = decode_envelope(blob)
        self.context.seed = envelope.seed
        self._next_sequence_id = envelope.sequence_id + 1
        self.context.sequence_id = envelope.sequence_id
        instance = self._new_instance()
        schema = self.definition.state()
        call_user_code(
            f"{self.definition.name}.restore", partial(schema.restore, instance, envelope, state), StateError
        )
        self._prepare(instance)
        self.instance = instance

    def _prepare(self, instance: Any) -> None:
        if hasattr(instance, "prepare"):
            call_user_code(f"{self.definition.name}.prepare", instance.prepare, StateError)

    def _checkpoint(self) -> None:
        """Put a checkpoint behind all outputs of the records so far."""
        if self.instance is None:
            raise RemoteProtocolError("a checkpoint was asked for before the first start or a recovery")
        self.outbox.close_batches()
        schema = self.definition.state()
        state = call_user_code(f"{self.definition.name}.checkpoint", partial(schema.encode, self.instance), StateError)
        front = encode_envelope(
            Envelope(
                class_name=self.definition.name,
                serializer=schema.serializer,
                seed=self.context.seed,
                sequence_id=self._next_sequence_id - 1,
            )
        )
        self.outbox.send(encode_checkpoint(len(front) + len(state)))
        self.outbox.send(front)
        self.outbox.send(state)

    def _become_primary(self) -> Iterator[Event]:
        if self.instance is None:
            raise RemoteProtocolError("the app was told that it is primary before it had a state")
        if not self._primary:
            self._primary = True
            yield BecamePrimary()
