"""What is fuzzed: functions of any bytes that return, or raise only if there is a defect.

Where a checksum stands before the code that is of interest it is made right first: a fuzzer would never get past it.
"""

from __future__ import annotations

import contextlib
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.messenger.envelope import (
    ENVELOPE_SIZE_BYTES,
    MESSAGES,
    EnvelopeError,
    Kind,
    as_conversation_message,
    decode_envelope,
    decode_missing,
    decode_parts,
    encode_message,
    encode_missing,
    encode_parts,
    encode_reply,
)
from immortal.coordinator.messenger.inbox import Arrival, Inbox
from immortal.coordinator.messenger.limits import CALLBACKS_MAX, SPAN_MAX
from immortal.protocol import app_handshake, extensions
from immortal.protocol.batch import check_batch, decode_batch, decode_replayable_batch, offset_after
from immortal.protocol.checksum import crc64
from immortal.protocol.client_frames import (
    CLIENTS,
    FRAME_MARK,
    ClientFrame,
    ClientFrameType,
    decode_caller,
    decode_client_frame,
    decode_methods,
    decode_replies,
    encode_client_frame,
    encode_numbers,
    encode_request,
    logged_calls,
)
from immortal.protocol.errors import DamagedRecordError, RemoteProtocolError
from immortal.protocol.messages import (
    MessageType,
    decode_attach_to,
    decode_incoming_rpc,
    decode_message,
    decode_messages,
    decode_outgoing_rpc,
    encode_attach_to,
    encode_incoming_rpc,
    encode_outgoing_rpc,
)
from immortal.protocol.peer_frames import FrameType, PeerFrame, decode_frame, encode_frame
from immortal.protocol.readers import BlobData, BlobStart, Message, MessageReader, Record, RecordReader
from immortal.protocol.record import HEADER_SIZE_BYTES
from tests.fuzz.fields import Fields
from tests.fuzz.sessions import session
from tests.helpers.core import HELLO, PEER_COMMITTER_ID, Driven, arguments, first_start

FRAME_CHECK = slice(36, 44)
RECORD_CHECK = slice(8, 16)
Target = Callable[[bytes], None]


# --- the messenger ---------------------------------------------------------------------------------------------------


def envelope(data: bytes) -> None:
    """The envelope: one documented error, or fields that give the same bytes again."""
    try:
        found = decode_envelope(data)
    except EnvelopeError:
        return
    if found.kind in MESSAGES:
        again = encode_message(
            found.link_id,
            found.incarnation,
            found.message_id,
            found.lowest_pending_id,
            found.source_callback_id,
            found.skipped_count,
            found.kind,
        )
        if found.kind == Kind.TURN:
            again = as_conversation_message(again, found.destination_callback_id)
    else:
        again = encode_reply(
            found.kind,
            found.link_id,
            found.incarnation,
            found.message_id,
            found.lowest_pending_id,
            found.destination_callback_id,
            found.source_callback_id,
        )
    assert again == data


def reply(data: bytes) -> None:
    """The parts of a reply: one documented error, or parts that give the same bytes again."""
    try:
        parts = decode_parts(data, 0)
    except EnvelopeError:
        return
    assert encode_parts(parts) == data


def inbox(data: bytes) -> None:
    """Any sequence of envelopes: nothing is given twice while it is remembered, or out of order where that is to be
    kept; memory is bounded."""
    for ordered in (True, False):
        _inbox(data, ordered)


def _inbox(data: bytes, ordered: bool) -> None:
    kept = Inbox(links_max=4, ordered=ordered)
    given: dict[int, set[int]] = defaultdict(set)  # by conversation: a forgotten one may begin anew
    conversations = []
    for offset in range(0, len(data), ENVELOPE_SIZE_BYTES):
        try:
            found = decode_envelope(data[offset : offset + ENVELOPE_SIZE_BYTES])
        except EnvelopeError:
            continue
        conversation = kept.link(found.incarnation, found.link_id)
        conversations.append(conversation)
        now_given: list[int] = []
        arrival = conversation.mark_received(found.message_id, found.lowest_pending_id, found.skipped_count)
        if arrival is Arrival.EARLY:
            assert ordered
            conversation.store_early(found.message_id, found.message_id, (b"early",))
        elif arrival is Arrival.FIRST and conversation.early:
            conversation.early[found.message_id] = found.message_id, 0
        elif arrival is Arrival.FIRST:
            now_given.append(found.message_id)
        before = given[id(conversation)]
        for message_id in now_given + (conversation.pop_early() if conversation.early else []):
            assert message_id not in before
            assert not ordered or message_id > max(before, default=0)
            before.add(message_id)
        window = conversation.window
        missing = decode_missing(encode_missing(window.lowest_pending_id, window.missing))
        assert len(missing) == window.missing.bit_count() < SPAN_MAX
        assert all(window.complete_id < message_id <= window.highest_seen for message_id in missing)
        if arrival is Arrival.FIRST:
            if found.kind == Kind.TURN:
                conversation.pop_callback(found.destination_callback_id)
                conversation.store_callback(found.source_callback_id, print)
            conversation.store_reply(found.message_id, 1, (b"reply",))
        assert len(conversation.callbacks) <= CALLBACKS_MAX
        assert len(conversation.early) < SPAN_MAX
        assert len(kept) <= 4
        assert len(conversation.replies) <= SPAN_MAX


# --- frames between coordinators -------------------------------------------------------------------------------------


def frame(data: bytes) -> None:
    """A frame in two parts, as it is and with a right check."""
    size_bytes = int.from_bytes(data[:2], "little")
    header, payload = data[2 : 2 + size_bytes], data[2 + size_bytes :]
    parts = [header, payload] if payload else [header]
    with contextlib.suppress(RemoteProtocolError):
        decode_frame(parts)
    if len(header) < FRAME_CHECK.stop:
        return
    checked = with_check(header, payload)
    try:
        found = decode_frame([checked, *parts[1:]])
    except DamagedRecordError:
        raise AssertionError("the check was made right") from None
    except RemoteProtocolError:
        return
    if found.frame_type is not FrameType.UNKNOWN:  # of which nothing is believed
        assert decode_frame(encode_frame(found)) == found


def with_check(header: bytes, payload: bytes) -> bytes:
    """The header of a frame, its check made right."""
    front, names = header[: FRAME_CHECK.start], header[FRAME_CHECK.stop :]
    check = crc64(payload, crc64(front + bytes(8) + names))
    return front + check.to_bytes(8, "little") + names


def peers(data: bytes) -> None:
    """Frames of peers at a running instance: what is refused leaves nothing, what is taken is whole calls in order."""
    fields = Fields(data)
    driven = Driven.started()
    taken: dict[str, int] = {}
    answered = 0
    while fields.left and answered < 64:
        received = _frame(fields)
        driven.handle(ev.PeerFrameReceived(answered, received))
        answered += 1
        assert not driven.of(ef.Stop)
    replies = driven.of(ef.ReplyToPeer)
    assert len(replies) <= answered
    for name, stream in driven.machine.view.status(0)["inputs"].items():  # type: ignore[attr-defined]
        taken[name] = stream["position"]
    assert len(arguments(bytes(driven.app_bytes))) == sum(taken.values())
    second = driven.crash()
    assert {name: at["position"] for name, at in second.machine.view.status(0)["inputs"].items()} == {  # type: ignore[attr-defined]
        name: position for name, position in taken.items() if position
    }


def _frame(fields: Fields) -> PeerFrame:
    count = fields.number() % 4
    small = fields.number()
    if small & 1:
        calls = [
            encode_incoming_rpc(fields.number(), fields.number() % 3, fields.piece(small >> 6)) for _ in range(count)
        ]
        payload = b"".join(calls)
    else:
        payload = fields.piece(fields.number())
    if small & 2:
        count = fields.number(4) & 0x7FFFFFFF
    known = FrameType(fields.one_of(*(FrameType.BATCH,) * 3, *FrameType))
    position = fields.number(8) & (1 << 63) - 1 if small & 4 else fields.number()
    if known is FrameType.BATCH:  # the codec lets no others through
        count, position, payload = max(count, 1), max(position, 1), payload or encode_incoming_rpc(1, 1, b"x")
    else:
        count, payload = 0, b""
    return PeerFrame(
        known,
        str(fields.one_of("b", "b", "b", "c", "a", "", "!impulses")) if small & 8 else "b",
        str(fields.one_of("a", "x")) if small & 16 else "a",
        PEER_COMMITTER_ID + (fields.number() if small & 32 else 0),
        fields.number(7) if small & 32 else 1,
        position,
        count,
        fields.number(7),
        payload,
    )


def client_frame(data: bytes) -> None:
    """A client's frame, as it is and with a right check; what is in it decodes or gives the documented error."""
    with contextlib.suppress(RemoteProtocolError):
        decode_client_frame(data)
    if len(data) < FRAME_CHECK.stop:
        return
    front = bytes((FRAME_MARK,)) + data[1 : FRAME_CHECK.start]
    check = crc64(data[FRAME_CHECK.stop :], crc64(front + bytes(8)))
    try:
        found = decode_client_frame(front + check.to_bytes(8, "little") + data[FRAME_CHECK.stop :])
    except DamagedRecordError:
        raise AssertionError("the check was made right") from None
    except RemoteProtocolError:
        return
    if found.frame_type is ClientFrameType.UNKNOWN:
        return
    assert decode_client_frame(encode_client_frame(found)) == found
    with contextlib.suppress(RemoteProtocolError):
        list(decode_replies(found.payload, found.count))
    with contextlib.suppress(RemoteProtocolError):
        decode_methods(found.payload)
    if found.frame_type is ClientFrameType.PING:
        sent = [int.from_bytes(found.payload[at : at + 8], "little") for at in range(0, len(found.payload), 8)]
        assert len(sent) == found.count
        assert found.requested_numbers() == sorted(set(sent), key=sent.index)
    with contextlib.suppress(RemoteProtocolError):
        check_batch(logged_calls(found.payload, found.count, "c", 1)[0], found.count)


def clients(data: bytes) -> None:
    """Frames of clients at a running instance, and whatever its app answers: what is taken is taken once, in order."""
    fields = Fields(data)
    driven = Driven.started()
    driven.data(encode_attach_to(CLIENTS))
    for token in range(64):
        if not fields.left:
            break
        if fields.number() & 3 == 3:
            answer = msgspec.msgpack.encode((f"~{fields.one_of('c', 'd')}", fields.number() & 7, fields.number()))
            arguments_of = answer if fields.number() & 1 else fields.piece(fields.number() & 31)
            driven.data(encode_outgoing_rpc(CLIENTS, 3, 0, arguments_of, fields.number() & 3))
        else:
            driven.handle(ev.ClientFrameReceived(token, _client_frame(fields)))
        assert not driven.of(ef.Stop)
        assert not driven.of(ef.CloseApp)
    numbers: dict[str, int] = {}
    for message in arguments(bytes(driven.app_bytes)):
        _, start, end = decode_message(message, 0)
        caller = decode_caller(message, start, end)
        assert caller is not None
        assert caller.name.startswith("~")
        assert caller.number == numbers.get(caller.name, 0) + 1
        numbers[caller.name] = caller.number
    found = {f"~{client_id}": known.number for client_id, known in driven.store.clients().positions.items()}
    assert {name: number for name, number in found.items() if number} == numbers


def _client_frame(fields: Fields) -> ClientFrame:
    known = ClientFrameType(fields.one_of(*(ClientFrameType.REQUEST,) * 3, *ClientFrameType))
    small = fields.number()
    count, number, acknowledged = small & 3, small >> 2 & 7, fields.number() & 7
    payload = b""
    if known is ClientFrameType.REQUEST:
        count, number = max(count, 1), max(number, 1)
        if fields.number() & 7:
            payload = b"".join(encode_request(3, b"\x91" + fields.piece(1)[:1].ljust(1, b"\1")) for _ in range(count))
        payload = payload or fields.piece(fields.number() & 31) or b"\0"
    elif known is ClientFrameType.PING:
        payload = encode_numbers(fields.number() for _ in range(count))
    instance = "x" if acknowledged == 7 else "a"
    client_id = str(fields.one_of("c", "c", "d"))
    return ClientFrame(known, client_id, instance, 0, number, acknowledged, count, fields.number(), payload)


# --- the local protocol ----------------------------------------------------------------------------------------------

_DECODERS: Mapping[int, Callable[[bytes], object]] = {
    MessageType.RPC: decode_outgoing_rpc,
    MessageType.ATTACH_TO: decode_attach_to,
    MessageType.RPC_BATCH: lambda data: check_batch(data[decode_batch(data)[1] :], decode_batch(data)[0]),
    MessageType.COUNT_REPLAYABLE_RPC_BATCH: decode_replayable_batch,
    MessageType.HELLO: extensions.decode_hello,
    MessageType.RECORD_TIME: lambda data: extensions.decode_record_time(data, 0, len(data)),
    MessageType.STREAM_BATCH: lambda data: _check_app_batch(data),
    MessageType.IMPULSE_BATCH: lambda data: _check_app_batch(data),
    MessageType.IMPULSES_ACCEPTED: extensions.decode_impulses_accepted,
    MessageType.APP_DESCRIPTION: extensions.decode_app_description,
    MessageType.VERSION: extensions.decode_version,
    MessageType.ORIGINS: extensions.decode_origins,
    MessageType.HANDLER_FAILED: extensions.decode_handler_failed,
    MessageType.CHALLENGE: app_handshake.decode_challenge,
    MessageType.PROOF: lambda data: (app_handshake.decode_proof if len(data) < 64 else app_handshake.decode_answer)(
        data
    ),
}


def _check_app_batch(data: bytes) -> None:
    batch = extensions.decode_app_batch(data)
    check_batch(batch.payload, batch.count)
    assert offset_after(batch.payload, batch.count, batch.count) == len(batch.payload)


def _decode(message_type: int, data: bytes) -> None:
    decoder = _DECODERS.get(message_type)
    if decoder is not None:
        with contextlib.suppress(RemoteProtocolError):
            decoder(data)


def read_all(reader: MessageReader | RecordReader, pieces: Iterator[bytes]) -> tuple[list[object], bool]:
    """All events, blobs joined, and whether the reader refused the rest."""
    events: list[object] = []
    try:
        for piece in pieces:
            reader.receive_data(piece)
            while (event := reader.next_event()) is not None:
                if isinstance(event, BlobData) and events and isinstance(events[-1], BlobData):
                    event = BlobData(events.pop().data + event.data, event.last)  # type: ignore[attr-defined]
                elif isinstance(event, BlobData) and not event.data and not event.last:
                    continue
                events.append(event)
    except RemoteProtocolError:
        return events, True
    return events, False


def _in_pieces(data: bytes, size_bytes: int) -> Iterator[bytes]:
    return (data[offset : offset + size_bytes] for offset in range(0, len(data), size_bytes))


def app_stream(data: bytes) -> None:
    """What an app sends: the same events in any pieces; every message decodes or gives the documented error."""
    size_bytes, data = (data[0] % 16 + 1, data[1:]) if data else (1, data)
    events, refused = read_all(MessageReader(), iter([data]))
    assert read_all(MessageReader(), _in_pieces(data, size_bytes)) == (events, refused)
    for event in events:
        if isinstance(event, Message):
            _decode(event.message_type, event.data)


def coordinator_stream(data: bytes) -> None:
    """What a coordinator sends, its checks made right."""
    size_bytes, data = (data[0] % 16 + 1, with_checks(data[1:])) if data else (1, data)
    events, refused = read_all(RecordReader(), iter([data]))
    assert read_all(RecordReader(), _in_pieces(data, size_bytes)) == (events, refused)
    for event in events:
        assert isinstance(event, Record | BlobStart | BlobData)
        if isinstance(event, Record):
            with contextlib.suppress(RemoteProtocolError):
                for message_type, start, end in decode_messages(event.content):
                    if message_type == MessageType.RPC:
                        decode_incoming_rpc(event.content, start, end)
                    else:
                        _decode(message_type, event.content[start:end])


def with_checks(stream: bytes) -> bytes:
    """A stream of records, each check made right as far as sizes lead from one to the next."""
    fixed = bytearray(stream)
    offset = 0
    while offset + HEADER_SIZE_BYTES <= len(fixed):
        (size_bytes,) = struct.unpack_from("<i", fixed, offset + 4)
        if not HEADER_SIZE_BYTES <= size_bytes <= len(fixed) - offset:
            break
        record = bytes(fixed[offset : offset + size_bytes])
        check = crc64(record[RECORD_CHECK.stop :], crc64(record[: RECORD_CHECK.start]))
        fixed[offset + RECORD_CHECK.start : offset + RECORD_CHECK.stop] = check.to_bytes(8, "little")
        offset += size_bytes
    return bytes(fixed)


def app(data: bytes) -> None:
    """An app that says anything, from its first byte on or once it is primary: the instance goes on, whole."""
    fields = Fields(data)
    primary = fields.number() & 1
    driven = Driven()
    driven.connect()
    if primary:
        driven.data(HELLO + first_start())
    driven.data(fields.piece(len(data)))
    assert not driven.of(ef.Stop) or driven.stop.error is not None
    arguments(bytes(driven.app_bytes))
    second = driven.crash()
    second.connect()
    arguments(bytes(second.app_bytes))


TARGETS: Mapping[str, Target] = {
    "envelope": envelope,
    "reply": reply,
    "inbox": inbox,
    "frame": frame,
    "peers": peers,
    "client_frame": client_frame,
    "clients": clients,
    "app_stream": app_stream,
    "coordinator_stream": coordinator_stream,
    "app": app,
    "session": session,
}
