"""Both readers: whole, byte by byte, at every split, with trailing bytes; what they refuse, and when."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest

from immortal.protocol.errors import DamagedRecordError, LimitExceededError, RemoteProtocolError
from immortal.protocol.messages import MessageType, encode_checkpoint, encode_incoming_rpc, encode_message
from immortal.protocol.readers import BlobData, BlobStart, Message, MessageReader, Record, RecordReader
from immortal.protocol.record import decode_header, encode_record
from immortal.protocol.varint import encode_zigzag

Reader = MessageReader | RecordReader
Event = Message | Record | BlobStart | BlobData

BLOB = bytes(range(200, 230))
BIG = encode_incoming_rpc(1, 1, b"x" * 300)

FROM_APP = (
    encode_message(MessageType.TAKE_CHECKPOINT)
    + BIG
    + encode_checkpoint(len(BLOB))
    + BLOB
    + encode_checkpoint(0)
    + encode_message(200, b"any type")
)
FROM_APP_EVENTS = [
    Message(2, b""),
    Message(0, BIG[3:]),
    BlobStart(30),
    BlobData(BLOB, last=True),
    BlobStart(0),
    BlobData(b"", last=True),
    Message(200, b"any type"),
]

RECORDS = [
    encode_record(7, -2, encode_checkpoint(len(BLOB))),
    encode_record(7, 0, BIG),
    encode_record(7, -1, encode_message(MessageType.TAKE_CHECKPOINT)),
    encode_record(7, 1, b""),
    encode_record(7, -2, encode_checkpoint(0)),
    encode_record(7, 2, b"not looked at"),
]
TO_APP = RECORDS[0] + BLOB + b"".join(RECORDS[1:])
TO_APP_EVENTS = [
    BlobStart(30),
    BlobData(BLOB, last=True),
    *(Record(decode_header(record), record[24:]) for record in RECORDS[1:4]),
    BlobStart(0),
    BlobData(b"", last=True),
    Record(decode_header(RECORDS[5]), b"not looked at"),
]

BOTH = pytest.mark.parametrize(
    ("kind", "stream", "expected"),
    [(MessageReader, FROM_APP, FROM_APP_EVENTS), (RecordReader, TO_APP, TO_APP_EVENTS)],
    ids=["from app", "to app"],
)


def drain(reader: Reader) -> list[Event]:
    events: list[Event] = []
    while (event := reader.next_event()) is not None:
        events.append(event)
    return events


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with each blob in one piece."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, BlobData) and result and isinstance(result[-1], BlobData) and not result[-1].last:
            event = BlobData(result[-1].data + event.data, event.last)
            result.pop()
        result.append(event)
    return result


@BOTH
def test_whole(kind: type[Reader], stream: bytes, expected: list[Event]) -> None:
    reader = kind()
    assert reader.next_event() is None
    reader.receive_data(stream)
    assert drain(reader) == expected
    assert (reader.buffered_bytes, reader.inside_blob) == (0, False)
    reader.receive_data(b"")
    assert reader.next_event() is None


@BOTH
def test_byte_by_byte(kind: type[Reader], stream: bytes, expected: list[Event]) -> None:
    reader = kind()
    events: list[Event] = []
    for byte in stream:
        reader.receive_data(bytes((byte,)))
        events += drain(reader)
    assert joined(events) == expected
    assert (reader.buffered_bytes, reader.inside_blob) == (0, False)


@BOTH
def test_byte_by_byte_and_then_read(kind: type[Reader], stream: bytes, expected: list[Event]) -> None:
    reader = kind()
    for byte in stream:
        reader.receive_data(bytes((byte,)))
    assert reader.buffered_bytes == len(stream)
    assert joined(drain(reader)) == expected


@BOTH
def test_every_split(kind: type[Reader], stream: bytes, expected: list[Event]) -> None:
    for cut in range(len(stream) + 1):
        reader = kind()
        reader.receive_data(stream[:cut])
        events = drain(reader)
        reader.receive_data(stream[cut:])
        events += drain(reader)
        assert joined(events) == expected, f"cut at {cut}"


@BOTH
def test_pieces_keep_their_order_whenever_they_come(kind: type[Reader], stream: bytes, expected: list[Event]) -> None:
    """A piece that comes while the one before it is unread, and the one before that was just used up, is the third."""
    for size_bytes in range(1, 80):
        reader = kind()
        events: list[Event] = []
        pieces = [stream[start : start + size_bytes] for start in range(0, len(stream), size_bytes)]
        for piece in pieces:
            reader.receive_data(piece)
            event = reader.next_event()  # one only: the reader falls behind
            if event is not None:
                events.append(event)
        assert joined(events + drain(reader)) == expected, f"pieces of {size_bytes} bytes"


def test_a_piece_behind_an_unread_one_is_not_put_before_it() -> None:
    """Found on the first day: the second and third piece changed places."""
    reader = MessageReader()
    reader.receive_data(bytes.fromhex("1001636f756e746572"))
    reader.receive_data(bytes.fromhex("020a"))
    assert reader.next_event() == Message(1, b"counter")
    reader.receive_data(bytes.fromhex("020b"))
    assert drain(reader) == [Message(10, b""), Message(11, b"")]


@BOTH
def test_trailing_bytes_stay(kind: type[Reader], stream: bytes, expected: list[Event]) -> None:
    for size_bytes in range(1, 9):
        reader = kind()
        trailing = stream[:1] if size_bytes == 1 else BIG[:size_bytes]  # the front of something larger
        reader.receive_data(stream + trailing)
        assert drain(reader) == expected
        assert (reader.buffered_bytes, reader.inside_blob) == (size_bytes, False)


@BOTH
def test_a_stream_that_is_cut_off_gives_a_prefix(kind: type[Reader], stream: bytes, expected: list[Event]) -> None:
    for cut in range(len(stream)):
        reader = kind()
        reader.receive_data(stream[:cut])
        events = drain(reader)
        whole = [event for event in events if not (isinstance(event, BlobData) and not event.last)]
        assert whole == expected[: len(whole)]
        assert reader.buffered_bytes or reader.inside_blob or whole != expected


@pytest.mark.parametrize("kind", [MessageReader, RecordReader])
def test_a_blob_comes_as_it_arrives(kind: type[Reader]) -> None:
    reader = kind()
    announcement = encode_checkpoint(6)
    reader.receive_data(announcement if kind is MessageReader else encode_record(7, -2, announcement))
    assert drain(reader) == [BlobStart(6)]
    assert (reader.inside_blob, reader.buffered_bytes) == (True, 0)
    reader.receive_data(b"abc")
    assert drain(reader) == [BlobData(b"abc", last=False)]
    reader.receive_data(b"def" + b"\x02")
    assert drain(reader) == [BlobData(b"def", last=True)]
    assert (reader.inside_blob, reader.buffered_bytes) == (False, 1)


def test_both_encodings_of_a_checkpoint_s_size() -> None:
    for size_bytes in (9, 128, 255):
        reader = MessageReader()
        reader.receive_data(encode_message(MessageType.CHECKPOINT, size_bytes.to_bytes(8, "little")))
        assert drain(reader) == [BlobStart(size_bytes)]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [MessageReader, RecordReader])
def test_reading_is_linear_in_the_bytes(kind: type[Reader]) -> None:
    """32 MiB in 32,768 pieces: were it joined with each piece, it would take minutes."""
    message = encode_message(MessageType.INITIAL_MESSAGE, bytes(32 << 20))
    stream = message if kind is MessageReader else encode_record(7, 0, message)
    reader = kind()
    for start in range(0, len(stream), 1024):
        assert reader.next_event() is None
        reader.receive_data(stream[start : start + 1024])
    event = reader.next_event()
    assert isinstance(event, Message | Record)
    assert reader.buffered_bytes == 0


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_size_above_the_limit_is_refused_before_its_message_comes() -> None:
    reader = MessageReader()
    reader.receive_data(encode_zigzag((64 << 20) + 1))
    with pytest.raises(LimitExceededError, match="67108865 bytes, at most 67108864"):
        reader.next_event()


def test_a_lower_limit() -> None:
    reader = MessageReader(message_size_bytes_max=10)
    reader.receive_data(encode_message(9, b"x" * 9) + encode_zigzag(11))
    assert reader.next_event() == Message(9, b"x" * 9)
    with pytest.raises(LimitExceededError, match="a message of 11 bytes, at most 10 are accepted"):
        reader.next_event()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("00", "gives its size as 0"),
        ("01", "gives its size as -1"),
        ("8080808080", "longer than 5 bytes"),
        ("040801", "gives its size as -1 bytes"),
        ("0208", "runs past the end"),
        ("06081200", "Checkpoint has 1 bytes too many"),
    ],
)
def test_malformed_messages(data: str, error: str) -> None:
    raw = bytes.fromhex(data)
    for cut in range(len(raw)):
        reader = MessageReader()
        reader.receive_data(raw[:cut])
        assert reader.next_event() is None
        reader.receive_data(raw[cut:])
        with pytest.raises(RemoteProtocolError, match=error):
            reader.next_event()


def test_a_size_field_that_is_not_whole_is_waited_for() -> None:
    reader = MessageReader()
    for byte in encode_zigzag(1 << 20):
        assert reader.next_event() is None
        reader.receive_data(bytes((byte,)))
    assert reader.next_event() is None
    reader.receive_data(b"\x09" + bytes((1 << 20) - 1))
    assert reader.next_event() == Message(9, bytes((1 << 20) - 1))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "runs past the end"),
        (encode_message(MessageType.TAKE_CHECKPOINT), r"sequence ID -2 must .* has 2 bytes, .* \(type 2\) takes 2"),
        (encode_checkpoint(9) + b"\x02\x02", r"sequence ID -2 must .* has 5 bytes, .* \(type 8\) takes 3"),
        (encode_checkpoint(9)[:-1], "only 1 bytes are left"),
    ],
)
def test_a_checkpoint_record_holds_one_checkpoint(content: bytes, error: str) -> None:
    reader = RecordReader()
    reader.receive_data(encode_record(7, -2, content))
    with pytest.raises(RemoteProtocolError, match=error):
        reader.next_event()


def test_a_record_s_size_is_refused_before_its_content_comes() -> None:
    for size_bytes, kind, error in (
        ((1 << 30) + 1, LimitExceededError, "record 5 of 1073741825 bytes, at most 1073741824"),
        (23, RemoteProtocolError, "record 5 gives its size as 23 bytes"),
    ):
        reader = RecordReader()
        header = struct.pack("<iiQq", 7, size_bytes, 0, 5)
        reader.receive_data(header[:23])
        assert reader.next_event() is None
        reader.receive_data(header[23:])
        with pytest.raises(kind, match=error):
            reader.next_event()


def test_damage_behind_a_good_record() -> None:
    reader = RecordReader()
    damaged = bytearray(RECORDS[1])
    damaged[-1] ^= 1
    reader.receive_data(RECORDS[2] + damaged)
    assert isinstance(reader.next_event(), Record)
    with pytest.raises(DamagedRecordError, match="record 0: the check bytes are"):
        reader.next_event()
