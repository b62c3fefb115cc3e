"""Extensions of the local protocol (types from 64). `docs/WIRE.md` specifies each.

An app that never sends Hello never sees one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, field

from immortal.protocol.errors import LocalProtocolError, RemoteProtocolError
from immortal.protocol.limits import EXTENSIONS_MAX
from immortal.protocol.messages import MessageType, decode_name, encode_message, encode_name, message_of, require_end
from immortal.protocol.varint import Readable, decode_zigzag_int, decode_zigzag_long, encode_zigzag

HELLO_VERSION = 1
SECRET_SIZE_BYTES_MAX = 1024

ALL_EXTENSIONS = frozenset(
    {
        MessageType.RECORD_TIME,
        MessageType.STREAM_BATCH,
        MessageType.IMPULSE_BATCH,
        MessageType.IMPULSES_ACCEPTED,
        MessageType.GOODBYE,
        MessageType.REFUSAL,
        MessageType.SNAPSHOT_BEGIN,
        MessageType.SNAPSHOT_CHUNK,
        MessageType.SNAPSHOT_END,
        MessageType.APP_DESCRIPTION,
        MessageType.UPGRADE_FAILED,
        MessageType.VERSION,
        MessageType.INSTANCE_NAME,
        MessageType.VERDICTS,
        MessageType.CAREFUL,
        MessageType.SOURCES,
        MessageType.APP_TIME,
        MessageType.HANDLERS_ASKED,
        MessageType.QUERY_ASKED,
        MessageType.CHECKPOINT_FAILED,
    }
)
"""Extensions between a coordinator and its app."""

REPORTS = frozenset(
    {
        MessageType.VERDICT,
        MessageType.HANDLING,
        MessageType.LEAVING,
        MessageType.RETRY_REFUSED,
        MessageType.BARRIER,
    }
)
"""Messages that an app may send after it was sent Verdicts (Barrier: at any time). No Hello asks for them."""

ANSWERS = frozenset({MessageType.HANDLERS, MessageType.QUERY_ANSWERED})
"""Messages that an app may send as answers. No Hello asks for them."""

TAKING_BACK = frozenset({MessageType.TAKEN_BACK, MessageType.TAKE_BACK})
"""Messages for an app that asks for CheckpointFailed. No Hello asks for these."""

TRACE_EXTENSIONS = frozenset({MessageType.ORIGINS, MessageType.HANDLER_FAILED, MessageType.NUMBERS})
"""Extensions only for replays that inspect a log."""

_TIME = struct.Struct("<q")
_APP_TIME = struct.Struct("<qqq")
RECORD_TIME_SIZE_BYTES = 10
_RECORD_TIME_FRONT = bytes((18, MessageType.RECORD_TIME))


class Hello(Struct, frozen=True):
    """First message of an app: the extensions that it wants, its secret if it needs one, and its own label."""

    extensions: frozenset[int]
    label: str = ""
    secret: bytes = b""


def encode_hello(hello: Hello) -> bytes:
    if len(hello.secret) > SECRET_SIZE_BYTES_MAX:
        raise LocalProtocolError(
            f"a Hello's secret of {len(hello.secret)} bytes, at most {SECRET_SIZE_BYTES_MAX} are allowed"
        )
    if len(hello.extensions) > EXTENSIONS_MAX:
        raise LocalProtocolError(
            f"a Hello asks for {len(hello.extensions)} extensions, at most {EXTENSIONS_MAX} are allowed"
        )
    return encode_message(
        MessageType.HELLO,
        bytes((HELLO_VERSION,))
        + encode_zigzag(len(hello.extensions))
        + b"".join(encode_zigzag(extension) for extension in sorted(hello.extensions))
        + encode_name(hello.label)
        + encode_zigzag(len(hello.secret))
        + hello.secret,
    )


def decode_hello(data: bytes) -> Hello:
    """Decode a Hello. Unknown extensions are kept; the caller refuses them. Raises RemoteProtocolError."""
    if not data or data[0] != HELLO_VERSION:
        raise RemoteProtocolError(f"a Hello of version {data[0] if data else 'none'}, expected {HELLO_VERSION}")
    count, offset = decode_zigzag_int(data, 1)
    if not 0 <= count <= EXTENSIONS_MAX:
        raise RemoteProtocolError(f"a Hello asks for {count} extensions, at most {EXTENSIONS_MAX} are allowed")
    extensions = set()
    for _ in range(count):
        extension, offset = decode_zigzag_int(data, offset)
        extensions.add(extension)
    label, offset = decode_name(data, offset)
    size_bytes, offset = decode_zigzag_int(data, offset)
    if not 0 <= size_bytes <= SECRET_SIZE_BYTES_MAX:
        raise RemoteProtocolError(
            f"a Hello gives its secret's size as {size_bytes} bytes, 0 to {SECRET_SIZE_BYTES_MAX} are allowed"
        )
    if offset + size_bytes != len(data):
        raise RemoteProtocolError(
            f"a Hello gives its secret's size as {size_bytes} bytes, {len(data) - offset} bytes are left of the message"
        )
    return Hello(frozenset(extensions), label, bytes(data[offset:]))


def encode_record_time(time_ns: int) -> bytes:
    """Encode the first message of a logged record: the record's time, ns since the Unix epoch, fixed width."""
    return _RECORD_TIME_FRONT + _TIME.pack(time_ns)


def decode_record_time(data: Readable, start: int, end: int) -> int:
    if end - start != 8:
        raise RemoteProtocolError(f"a RecordTime has {end - start} bytes, 8 were expected")
    (time_ns,) = _TIME.unpack_from(data, start)
    return int(time_ns)


class AppTime(Struct, frozen=True):
    """Time of the instance, ns since the Unix epoch, at ``steady_ns`` of the machine's steady clock.

    ``jumped_ns``: the step of the time since the app's last AppTime; 0 if there was none.
    """

    time_ns: int
    steady_ns: int
    jumped_ns: int = 0


def encode_app_time(time: AppTime) -> bytes:
    """Encode an AppTime message."""
    return encode_message(MessageType.APP_TIME, _APP_TIME.pack(time.time_ns, time.steady_ns, time.jumped_ns))


def decode_app_time(data: Readable) -> AppTime:
    """Decode an AppTime. Raises RemoteProtocolError."""
    if len(data) != _APP_TIME.size:
        raise RemoteProtocolError(f"an AppTime has {len(data)} bytes, {_APP_TIME.size} were expected")
    return AppTime(*_APP_TIME.unpack(data))


class AppBatch(Struct):
    """RPCs of an app to one destination ("" is oneself), already in incoming form."""

    destination: str
    count: int
    payload: bytes


def encode_app_batch(message_type: MessageType, destination: str, count: int, payload: bytes) -> bytes:
    """Encode a whole StreamBatch or ImpulseBatch message."""
    if count < 1:
        raise LocalProtocolError(f"a batch of {count} messages")
    return encode_message(message_type, encode_name(destination) + encode_zigzag(count) + payload)


def decode_app_batch(data: bytes) -> AppBatch:
    """Decode an AppBatch; its payload stays unchecked (:func:`immortal.protocol.batch.check_batch`).

    Raises RemoteProtocolError.
    """
    destination, offset = decode_name(data, 0)
    count, offset = decode_zigzag_int(data, offset)
    if count < 1:
        raise RemoteProtocolError(f"a batch gives its count as {count}, at least 1 was expected")
    return AppBatch(destination, count, data[offset:])


def encode_impulses_accepted(count: int) -> bytes:
    if count < 0:
        raise LocalProtocolError(f"an ImpulsesAccepted of {count}")
    return encode_message(MessageType.IMPULSES_ACCEPTED, encode_zigzag(count))


def decode_impulses_accepted(data: Readable) -> int:
    """Decode the number of this connection's impulses that are accepted so far."""
    count, end = decode_zigzag_long(data, 0)
    require_end("ImpulsesAccepted", data, end)
    if count < 0:
        raise RemoteProtocolError(f"an ImpulsesAccepted gives its count as {count}")
    return count


QUERIES = "@query"
"""Group of an app's methods that only read. In an AppDescription it stands for the destination (no instance has this
name), in the settings for the methods' names."""
GROUP_MARK = "@"
"""First character of a group's name. A role is a group too: ``@worker`` has the methods that a worker may call."""
OWNERS = "@owner"
"""Group of the methods that only the instance's owner may call, unless the settings name them."""
NO_ROLES = frozenset({OWNERS, QUERIES, "@rpc", "@impulse"})
"""Names that no role of an app can have: each is a group already, or could be mistaken for one."""
ANYBODYS = "@anybody"
"""Group of the methods that any permitted caller may call, with any role."""
INSTANCES = "@instance"
"""Group of the methods that every instance may call too; clients need this group in the settings."""


class AppDescription(Struct, frozen=True):
    """Description that an app sends: its version, and the names of the methods that it has and calls.

    ``methods``: (destination, method ID) to a name such as "Counter.count"; the destination "" is the app itself.
    Its methods that only read appear once more, with the destination QUERIES. Its restricted methods appear once more
    for each role that may call them ("@worker"), or with OWNERS.
    """

    version: int = 1
    methods: Mapping[tuple[str, int], str] = field(default_factory=dict)


def encode_app_description(description: AppDescription) -> bytes:
    """Encode an AppDescription message."""
    parts = [encode_zigzag(description.version), encode_zigzag(len(description.methods))]
    for (destination, method_id), name in sorted(description.methods.items()):
        parts += (encode_name(destination), encode_zigzag(method_id), encode_name(name))
    return encode_message(MessageType.APP_DESCRIPTION, b"".join(parts))


def decode_app_description(data: bytes) -> AppDescription:
    """Decode an AppDescription. Raises RemoteProtocolError."""
    version, offset = decode_zigzag_int(data, 0)
    if version < 1:
        raise RemoteProtocolError(f"an AppDescription gives the version {version}, at least 1 was expected")
    count, offset = decode_zigzag_int(data, offset)
    if not 0 <= count <= len(data):
        raise RemoteProtocolError(f"an AppDescription announces {count} methods in {len(data)} bytes")
    methods = {}
    for _ in range(count):
        destination, offset = decode_name(data, offset)
        method_id, offset = decode_zigzag_int(data, offset)
        methods[destination, method_id], offset = decode_name(data, offset)
    require_end("AppDescription", data, offset)
    return AppDescription(version, methods)


def encode_version(version: int) -> bytes:
    """Encode a Version message: the version of the state that follows, or that an upgrade must reach."""
    return encode_message(MessageType.VERSION, encode_zigzag(version))


def decode_version(data: Readable) -> int:
    version, end = decode_zigzag_int(data, 0)
    require_end("Version", data, end)
    if version < 1:
        raise RemoteProtocolError(f"a Version of {version}, at least 1 was expected")
    return version


SOURCES_MAX = 1 << 24  # limit for a record: more batches than fit into one


def encode_sources(runs: Sequence[tuple[int, str]]) -> bytes:
    """Encode a Sources message: runs of (number of consecutive batches in a record, the instance that sent them).

    "" is the instance's own side: itself, its impulses, its clients. No runs: all batches are from there.
    """
    parts = [encode_zigzag(len(runs))]
    for count, name in runs:
        parts += (encode_zigzag(count), encode_name(name))
    return encode_message(MessageType.SOURCES, b"".join(parts))


def decode_sources(data: bytes) -> list[str]:
    """Decode the sender of each batch; empty: all came from the instance's own side. Raises RemoteProtocolError."""
    runs, offset = decode_zigzag_int(data, 0)
    sources: list[str] = []
    for _ in range(runs):
        count, offset = decode_zigzag_int(data, offset)
        if not 0 <= count <= SOURCES_MAX - len(sources):
            raise RemoteProtocolError(f"a Sources gives the senders of more than {SOURCES_MAX} batches")
        name, offset = decode_name(data, offset)
        sources += [name] * count
    require_end("Sources", data, offset)
    return sources


class Origin(Struct, frozen=True):
    """Origin of ``count`` consecutive messages of a batch: the logged message whose handler sent them."""

    sequence_id: int
    message_index: int
    count: int


def encode_origins(origins: Sequence[Origin]) -> bytes:
    """Encode an Origins message, for the StreamBatch that follows it."""
    parts = [encode_zigzag(len(origins))]
    for origin in origins:
        parts += (encode_zigzag(origin.sequence_id), encode_zigzag(origin.message_index), encode_zigzag(origin.count))
    return encode_message(MessageType.ORIGINS, b"".join(parts))


def decode_origins(data: Readable) -> list[Origin]:
    """Decode an Origins message. Raises RemoteProtocolError."""
    count, offset = decode_zigzag_int(data, 0)
    if not 0 <= count <= len(data):
        raise RemoteProtocolError(f"an Origins announces {count} entries in {len(data)} bytes")
    origins = []
    for _ in range(count):
        sequence_id, offset = decode_zigzag_long(data, offset)
        message_index, offset = decode_zigzag_int(data, offset)
        made, offset = decode_zigzag_int(data, offset)
        origins.append(Origin(sequence_id, message_index, made))
    require_end("Origins", data, offset)
    return origins


class HandlerFailure(Struct, frozen=True):
    """Failure of the handler of one logged message; ``text`` is the report for people."""

    sequence_id: int
    message_index: int
    text: str


def encode_handler_failed(failure: HandlerFailure) -> bytes:
    """Encode a HandlerFailed message, the app's last message."""
    front = encode_zigzag(failure.sequence_id) + encode_zigzag(failure.message_index)
    return encode_message(MessageType.HANDLER_FAILED, front + failure.text.encode("utf-8", "replace"))


def decode_handler_failed(data: bytes) -> HandlerFailure:
    """Decode a HandlerFailed. Raises RemoteProtocolError."""
    sequence_id, offset = decode_zigzag_long(data, 0)
    message_index, offset = decode_zigzag_int(data, offset)
    return HandlerFailure(sequence_id, message_index, data[offset:].decode("utf-8", "replace"))


# Random numbers that a run draws for its handlers' waits. One run reports them, so that another run can draw the same.
#
# Only replays for inspection use them. `docs/WIRE.md`, part 7.


DRAWS_MAX = 10_000  # limit of one message; a record may have several


class RandomDraw(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Random number that the handler ``task`` drew for ``what`` with ``detail``, in a journal's terms.

    For a handler that starts: ``task`` 0, ``what`` "", and ``detail`` is the index of the message that starts it.
    """

    number: int
    task: int
    what: str
    detail: int


class Numbers(msgspec.Struct, array_like=True, frozen=True):
    """Numbers drawn in the record ``sequence_id``; an empty list: no more follow for it or for earlier records."""

    sequence_id: int
    draws: list[RandomDraw] = []


_encode_numbers, decode_numbers = message_of(MessageType.NUMBERS, Numbers, "a Numbers message")


def encode_numbers(sequence_id: int, draws: Sequence[RandomDraw] = ()) -> bytes:
    """Encode a Numbers message."""
    return _encode_numbers(Numbers(sequence_id, list(draws)))


def pack_numbers(sequence_id: int, draws: Sequence[RandomDraw] = ()) -> bytes:
    """Encode the data of a Numbers message."""
    return msgspec.msgpack.encode(Numbers(sequence_id, list(draws)))
