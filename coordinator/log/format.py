# cython: annotation_typing=False
"""Encodes keys and small values of the log's tables, as docs/LOG_FORMAT.md specifies. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from immortal.coordinator.core.errors import DamagedLogError, fail
from immortal.coordinator.core.interfaces import CheckpointHeader, ClientPosition, OutputBatch, OutputMark, VersionStart
from immortal.protocol import decoding
from immortal.protocol.checksum import crc64
from immortal.protocol.limits import NAME_SIZE_BYTES_MAX
from immortal.protocol.varint import Readable

FORMAT_VERSION = 5
AUTHENTICATED_VERSION = 6  # of a log with a key: an older program would write without MACs
ENCRYPTED_VERSION = 7  # of an encrypted log, authenticated or not
FORMAT_VERSIONS_READ = (FORMAT_VERSION, AUTHENTICATED_VERSION, ENCRYPTED_VERSION)
CRC_SIZE_BYTES = 8
MAC_SIZE_BYTES = 16
OUTPUTS_PIECE_SIZE_BYTES = 1 << 20  # one LMDB value of 64 MiB would need 64 MiB of contiguous free pages
COMMITTER_ID_MAX = (1 << 31) - 1

SEQUENCE_KEY = struct.Struct(">Q")  # records: sequence ID; checkpoints: checkpoint ID; versions: a running number
CHUNK_KEY = struct.Struct(">QI")  # checkpoint ID, index
MESSAGE_KEY = struct.Struct(">QQQQ")  # sequence ID, message index, task, step
_POSITION = struct.Struct(">Q")
CRC = struct.Struct("<Q")
_BATCH_HEAD = struct.Struct("<QIQ")  # CRC of the head, count, CRC of the payload
_BATCH_COUNTED = struct.Struct("<IQ")

TABLES = (
    *("records", "checkpoints", "chunks", "outputs", "sources", "acknowledged", "peers", "impulses", "clients"),
    *("replies", "spilled", "versions", "meta", "verdicts", "letters", "audit"),
)
TABLES_OF_SEALS = ("record_seals", "checkpoint_seals")  # of authenticated logs
ALL_TABLES = (*TABLES, *TABLES_OF_SEALS)

IMPULSES_TABLE = b"impulses"
SPILLED_TABLE = b"spilled"
META_FORMAT = b"format"
META_INSTANCE = b"instance"
META_COMMITTER_ID = b"committer_id"
META_CREATED = b"created_ns"
META_EPOCH = b"epoch"
META_EXTENSIONS = b"extensions"
META_TRIMMED = b"trimmed_sequence_id"
META_CUT = b"cut_sequence_id"
META_CUTS = b"cuts"
META_STREAM_STARTS = b"stream_starts"
META_CLIENTS_FORGOTTEN = b"clients_forgotten_ns"
META_SUSPECT = b"suspect"
META_AUTHENTICATED = b"authenticated"
META_SEAL = b"seal"
META_DATA_KEY = b"data_key/"  # and the key's number: 8 hex digits
META_JOURNAL = b"journal"  # the nonce of the journal that the log needs to be whole

_encode = msgspec.msgpack.Encoder().encode
INT = decoding.Decoder(int)
INTS = decoding.Decoder(list[int])
TEXT = decoding.Decoder(str)
SOURCE = decoding.Decoder(tuple[int, int, int])
STREAM_STARTS = decoding.Decoder(dict[str, tuple[int, bool, bool]])
_VERSION_START = decoding.Decoder(tuple[int, int, str])
_OUTPUTS = decoding.Decoder(dict[str, list[tuple[int, int, bytes]]])

Decoded = TypeVar("Decoded")


class _HeaderPayload(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Fields of a checkpoint's header, in their stored order."""

    checkpoint_id: int
    sequence_id: int
    size_bytes: int
    check: int
    time_ns: int
    chunk_count: int
    outputs: dict[str, tuple[int, int]]
    outputs_size_bytes: int
    outputs_check: int
    version: int
    open_calls: dict[str, list[int]] = {}  # left out if it is empty: older versions do not know it


_HEADER = decoding.Decoder(_HeaderPayload)


class _ClientPayload(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    number: int
    released: int
    time_ns: int
    owner: str = ""


_CLIENT = decoding.Decoder(_ClientPayload)


class StoredHeader(Struct, frozen=True):
    """Stored header of a checkpoint: ``unacknowledged`` of ``header`` is empty, as it is stored beside it."""

    header: CheckpointHeader
    chunk_count: int
    outputs_size_bytes: int
    outputs_check: int


def name_key(name: str) -> bytes:
    """Return the key of an instance's name: UTF-8, then a zero byte."""
    raw = name.encode()
    if len(raw) > NAME_SIZE_BYTES_MAX or "\0" in name:
        fail(f"{name!r} is no instance name: at most {NAME_SIZE_BYTES_MAX} bytes, no zero byte")
    return raw + b"\0"


def name_of_key(key: bytes) -> str:
    return key[:-1].decode(errors="replace")


def batch_key(destination: str, first_position: int) -> bytes:
    """Return the key of a row of ``impulses`` or ``spilled``; or of ``replies``, by client ID and number."""
    return name_key(destination) + _POSITION.pack(first_position)


def batch_of_key(table: bytes, key: bytes) -> tuple[str, int]:
    """Decode what :func:`batch_key` returns. Raises DamagedLogError."""
    if len(key) <= _POSITION.size or key[-_POSITION.size - 1] != 0:
        raise DamagedLogError(f"the log's table {table.decode()!r} has a damaged key {key.hex()}", -1)
    return name_of_key(key[: -_POSITION.size]), _POSITION.unpack(key[-_POSITION.size :])[0]


def record_key(sequence_id: int) -> bytes:
    """Return the first possible key of this record in ``verdicts`` and ``letters``."""
    return MESSAGE_KEY.pack(sequence_id, 0, 0, 0)


def encode_client(key: bytes, position: ClientPosition) -> bytes:
    fixed = position.number, position.released, position.time_ns
    return seal(b"clients", key, (*fixed, position.owner) if position.owner else fixed)


def decode_client(key: bytes, value: bytes) -> ClientPosition:
    """Decode a client's row. Raises DamagedLogError."""
    known = unseal(b"clients", key, value, _CLIENT)
    return ClientPosition(known.number, known.released, known.time_ns, known.owner)


def seal(table: bytes, key: bytes, payload: object) -> bytes:
    """Encode a small value: CRC over table, key and payload, then the payload in MessagePack."""
    packed = _encode(payload)
    return CRC.pack(crc64(packed, crc64(table + b"\0" + key))) + packed


def unseal(table: bytes, key: bytes, value: bytes, decoder: decoding.Decoder[Decoded]) -> Decoded:
    """Check and decode a small value. Raises DamagedLogError that names table and key."""
    packed = value[CRC_SIZE_BYTES:]
    if len(value) <= CRC_SIZE_BYTES or CRC.unpack_from(value)[0] != crc64(packed, crc64(table + b"\0" + key)):
        raise DamagedLogError(
            f"the log's table {table.decode()!r} is damaged at key {_shown(key)}: its CRC does not match", -1
        )
    try:
        return decoder.decode(packed)
    except decoding.DecodeError as error:
        raise DamagedLogError(
            f"the log's table {table.decode()!r} has a strange value at key {_shown(key)}: {error}", -1
        ) from None


def _shown(key: bytes) -> str:
    text = key.rstrip(b"\0")
    return repr(text.decode()) if text.isascii() and text.decode().isprintable() else key.hex()


def seal_chunk(key: bytes, data: Readable) -> bytes:
    """Return the CRC over key and data, then the data."""
    return b"".join((CRC.pack(crc64(data, crc64(key))), data))


def unseal_chunk(key: bytes, value: Readable) -> bytes | None:
    """Return a copy of a chunk's data, or None if it is damaged. The copy is checked, so exactly it is passed on."""
    data = bytes(value[CRC_SIZE_BYTES:])
    if not data or CRC.unpack_from(value)[0] != crc64(data, crc64(key)):
        return None
    return data


def encode_header(header: CheckpointHeader, chunk_count: int, outputs: bytes) -> bytes:
    """Encode a checkpoint's sealed header; ``outputs``: the result of :func:`encode_outputs`."""
    payload = _HeaderPayload(
        checkpoint_id=header.checkpoint_id,
        sequence_id=header.sequence_id,
        size_bytes=header.size_bytes,
        check=header.check,
        time_ns=header.time_ns,
        chunk_count=chunk_count,
        outputs={name: (mark.position, mark.checksum) for name, mark in header.outputs.items()},
        outputs_size_bytes=len(outputs),
        outputs_check=crc64(outputs),
        version=header.version,
        open_calls={caller: list(numbers) for caller, numbers in header.open_calls.items()},
    )
    fields = msgspec.structs.astuple(payload)
    return seal(b"checkpoints", SEQUENCE_KEY.pack(header.checkpoint_id), fields if payload.open_calls else fields[:-1])


def decode_header(key: bytes, value: bytes) -> StoredHeader:
    """Decode a checkpoint's header. Raises DamagedLogError."""
    payload = unseal(b"checkpoints", key, value, _HEADER)
    header = CheckpointHeader(
        payload.checkpoint_id,
        payload.sequence_id,
        payload.size_bytes,
        payload.check,
        payload.time_ns,
        {name: OutputMark(*mark) for name, mark in payload.outputs.items()},
        version=payload.version,
        open_calls=payload.open_calls,
    )
    return StoredHeader(header, payload.chunk_count, payload.outputs_size_bytes, payload.outputs_check)


def encode_version_start(key: bytes, start: VersionStart) -> bytes:
    return seal(b"versions", key, (start.version, start.sequence_id, start.app))


def decode_version_start(key: bytes, value: bytes) -> VersionStart:
    """Decode the start of a version. Raises DamagedLogError."""
    return VersionStart(*unseal(b"versions", key, value, _VERSION_START))


def encode_outputs(unacknowledged: Mapping[str, Sequence[OutputBatch]]) -> bytes:
    """Encode all unacknowledged outputs as one value; b"" if there are none."""
    rows: dict[str, Any] = {
        name: [(batch.first_position, batch.count, batch.payload) for batch in batches]
        for name, batches in unacknowledged.items()
    }
    return _encode(rows) if rows else b""


def decode_outputs(data: bytes) -> dict[str, list[OutputBatch]]:
    """Decode unacknowledged outputs. Raises msgspec.MsgspecError."""
    return {name: [OutputBatch(*row) for row in rows] for name, rows in _OUTPUTS.decode(data).items()}


def encode_batch(table: bytes, key: bytes, count: int, payload: bytes) -> bytes:
    """Encode a row of ``impulses`` or ``spilled``."""
    counted = _BATCH_COUNTED.pack(count, crc64(payload))
    return b"".join((CRC.pack(crc64(counted, crc64(table + b"\0" + key))), counted, payload))


def decode_batch_count(table: bytes, key: bytes, value: Readable) -> int:
    """Decode the count of a row, without reading its payload. Raises DamagedLogError."""
    if len(value) >= _BATCH_HEAD.size:
        check, count, payload_check = _BATCH_HEAD.unpack_from(value)
        if check == crc64(_BATCH_COUNTED.pack(count, payload_check), crc64(table + b"\0" + key)):
            return int(count)
    raise DamagedLogError(
        f"the log's table {table.decode()!r} is damaged at key {_shown(key)}: its CRC does not match", -1
    )


def batch_payload_size(value: Readable) -> int:
    return len(value) - _BATCH_HEAD.size


def decode_batch_payload(table: bytes, key: bytes, value: Readable) -> bytes:
    """Decode the payload of a row whose head was decoded before. Raises DamagedLogError."""
    payload = bytes(value[_BATCH_HEAD.size :])
    if crc64(payload) != _BATCH_HEAD.unpack_from(value)[2]:
        destination, position = batch_of_key(table, key)
        what = "impulses" if table == IMPULSES_TABLE else "spilled messages"
        raise DamagedLogError(
            f"the {what} to {destination!r} at position {position} are damaged: the CRC does not match", -1
        )
    return payload
