"""What a log has that an archive has not: records, checkpoints and the rows of its other tables, through its reader.

A view of the log is never kept open while something is sent: what a writer frees meanwhile it could not use again.
"""

from __future__ import annotations

from collections.abc import Iterator

from blake3 import blake3
from msgspec import Struct

from immortal.coordinator.archive.packs import PackedRow, digest
from immortal.coordinator.core.errors import DamagedCheckpointError, DamagedLogError
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.authentication import are_authentic, forged_record, read_marker
from immortal.coordinator.log.backend import View
from immortal.coordinator.log.format import ALL_TABLES, CHUNK_KEY, META_EPOCH, META_JOURNAL, SEQUENCE_KEY, StoredHeader
from immortal.coordinator.log.meta import first_and_last_sequence_id, meta_value
from immortal.coordinator.log.reader import LogReader, TrimmedError
from immortal.coordinator.log.values import check_value, logged_time_ns

BY_THEMSELVES = ("records", "record_seals", "checkpoints", "chunks", "outputs")
STATE_TABLES = tuple(table for table in ALL_TABLES if table not in BY_THEMSELVES)
_DIGEST_SIZE_BYTES = 16

StateDigests = dict[tuple[str, bytes], bytes]


class Records(Struct, frozen=True):
    """As many as there was room for, from the one that was asked for on."""

    first_sequence_id: int
    last_sequence_id: int
    size_bytes: int
    rows: list[PackedRow]


class End(Struct, frozen=True):
    """How far a log is."""

    first_sequence_id: int
    last_sequence_id: int
    epoch: int
    nonce: str


def end_of(view: View) -> End:
    """Raises DamagedLogError."""
    marker = read_marker(view)
    epoch = meta_value(view, META_EPOCH, log_format.INT) or 0
    return End(*first_and_last_sequence_id(view), epoch, "" if marker is None else marker.nonce.hex())


def records_from(view: View, reader: LogReader, first_sequence_id: int, size_bytes_max: int | None) -> Records:
    """Each is checked: a damaged log never reaches its archive. Raises DamagedLogError, TrimmedError."""
    rows: list[PackedRow] = []
    values: list[tuple[int, bytes]] = []
    size_bytes, expected = 0, first_sequence_id
    for key_view, value_view in view.scan("records", SEQUENCE_KEY.pack(first_sequence_id)):
        key, value = bytes(key_view), bytes(value_view)
        (sequence_id,) = SEQUENCE_KEY.unpack(key)
        if sequence_id != expected:
            if expected < first_and_last_sequence_id(view)[0]:
                raise TrimmedError(f"record {expected} was trimmed away before it was archived")
            raise DamagedLogError(f"record {expected} is missing: the next one is record {sequence_id}", expected)
        check_value(value, sequence_id, reader.identity.committer_id)
        values.append((sequence_id, value))
        rows.append(("records", key, value))
        seal = view.get("record_seals", key)
        if seal is not None:
            rows.append(("record_seals", key, bytes(seal)))
        expected += 1
        size_bytes += len(value)
        if size_bytes_max is not None and size_bytes >= size_bytes_max:
            break
    for (sequence_id, _), is_authentic in zip(values, are_authentic(view, reader.macs, values), strict=True):
        if not is_authentic:
            raise forged_record(sequence_id)
    return Records(first_sequence_id, expected - 1, size_bytes, rows)


def record_digest(view: View, sequence_id: int) -> str:
    """ "" where it is not kept."""
    value = None if sequence_id < 0 else view.get("records", SEQUENCE_KEY.pack(sequence_id))
    return "" if value is None else digest(bytes(value))


def record_time_ns(view: View, sequence_id: int, committer_id: int) -> int:
    """0 where it is not kept."""
    value = None if sequence_id < 0 else view.get("records", SEQUENCE_KEY.pack(sequence_id))
    return 0 if value is None else logged_time_ns(bytes(value), sequence_id, committer_id)


def state_rows(view: View, known: StateDigests) -> tuple[list[PackedRow], StateDigests]:
    """The rows of all other tables that differ from ``known``, those that are gone as well; and what is known then."""
    changed: list[PackedRow] = []
    found: StateDigests = {}
    for table, key, value in _state(view):
        its_digest = blake3(value).digest(_DIGEST_SIZE_BYTES)
        found[table, key] = its_digest
        if known.get((table, key)) != its_digest:
            changed.append((table, key, value))
    changed += [(table, key, None) for table, key in known.keys() - found.keys()]
    return changed, found


def _state(view: View) -> Iterator[tuple[str, bytes, bytes]]:
    for table in STATE_TABLES:
        for key_view, value in view.scan(table):
            key = bytes(key_view)
            if table != "meta" or key != META_JOURNAL:  # what is in the journal is in the tables of an archive
                yield table, key, bytes(value)
    before = first_and_last_sequence_id(view)[0] - 1  # of a log with a key: the first record's MAC needs it
    seal = view.get("record_seals", SEQUENCE_KEY.pack(before)) if before >= 0 else None
    if seal is not None:
        yield "record_seals", SEQUENCE_KEY.pack(before), bytes(seal)


def checkpoint_headers(view: View) -> dict[int, tuple[bytes, StoredHeader]]:
    """(value, what it says) by ID, without those that are damaged."""
    headers = {}
    for key_view, value_view in view.scan("checkpoints"):
        key, value = bytes(key_view), bytes(value_view)
        try:
            headers[SEQUENCE_KEY.unpack(key)[0]] = value, log_format.decode_header(key, value)
        except DamagedLogError:
            continue
    return headers


def checkpoint_rows(reader: LogReader, value: bytes, stored: StoredHeader) -> Iterator[PackedRow]:
    """The header, the chunks, the outputs, each checked. Raises DamagedCheckpointError, also once it was trimmed."""
    checkpoint_id = stored.header.checkpoint_id
    yield "checkpoints", SEQUENCE_KEY.pack(checkpoint_id), value
    for index in range(stored.chunk_count):
        key = CHUNK_KEY.pack(checkpoint_id, index)
        yield "chunks", key, log_format.seal_chunk(key, reader.read_checkpoint_chunk(checkpoint_id, index))
    size_bytes = index = 0
    while size_bytes < stored.outputs_size_bytes:
        key = CHUNK_KEY.pack(checkpoint_id, index)
        with reader.view() as view:
            found = view.get("outputs", key)
            piece = None if found is None else bytes(found)
        data = None if piece is None else log_format.unseal_chunk(key, piece)
        if piece is None or data is None:
            raise DamagedCheckpointError(f"piece {index} of the outputs of checkpoint {checkpoint_id}", checkpoint_id)
        yield "outputs", key, piece
        size_bytes += len(data)
        index += 1
