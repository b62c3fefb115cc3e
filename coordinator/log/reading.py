"""What the writer and the reader both read, each within a read transaction of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import lmdb
import msgspec

from coordinator.core.errors import DamagedCheckpointError, DamagedLogError
from coordinator.core.interfaces import (
    CheckpointHeader,
    ClientPosition,
    ImpulseBatch,
    LogSummary,
    OutputBatch,
    SourcePosition,
    StoredClients,
    StreamStart,
    VersionStart,
)
from coordinator.log import format as log_format
from coordinator.log import spilled, verdicts
from coordinator.log.environment import Tables
from coordinator.log.format import CHUNK_KEY, IMPULSES_TABLE, SEQUENCE_KEY, StoredHeader
from coordinator.log.values import logged_time_ns
from protocol.checksum import crc64
from protocol.client import ReplyKind

ReadTransaction: TypeAlias = "lmdb.Transaction[memoryview]"
IMPULSES_LOADED_SIZE_BYTES_MAX = 16 << 20  # for each destination; memory has room for that
LoadOutputs = Callable[[StoredHeader], dict[str, list[OutputBatch]]]


class StoredOutputs(Mapping[str, Sequence[OutputBatch]]):
    """The unacknowledged outputs of a checkpoint, read from the log when they are first looked at.

    They may be tens of MiB, and only the one checkpoint that recovery starts from is ever asked for its own.
    Their CRC was checked when the log's summary was made. Reading may raise DamagedCheckpointError.
    """

    def __init__(self, stored: StoredHeader, load: LoadOutputs) -> None:
        self._stored = stored
        self._load = load
        self._loaded: dict[str, list[OutputBatch]] | None = None

    def _outputs(self) -> dict[str, list[OutputBatch]]:
        if self._loaded is None:
            self._loaded = self._load(self._stored)
        return self._loaded

    def __getitem__(self, destination: str) -> Sequence[OutputBatch]:
        return self._outputs()[destination]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs())

    def __len__(self) -> int:
        return len(self._outputs())

    def __repr__(self) -> str:
        return f"<unacknowledged outputs of {self._stored.outputs_size_bytes} bytes>"


def first_and_last_sequence_id(transaction: ReadTransaction, tables: Tables) -> tuple[int, int]:
    """The first and last kept record; first is last + 1 when there is none."""
    with transaction.cursor(tables.records) as cursor:
        if cursor.first():
            first = SEQUENCE_KEY.unpack(cursor.key())[0]
            cursor.last()
            return first, SEQUENCE_KEY.unpack(cursor.key())[0]
    trimmed = meta_value(transaction, tables, log_format.META_TRIMMED, log_format.INT)
    last = -1 if trimmed is None else trimmed
    return last + 1, last


def meta_value(
    transaction: ReadTransaction, tables: Tables, key: bytes, decoder: msgspec.msgpack.Decoder[log_format.Decoded]
) -> log_format.Decoded | None:
    """A value of the meta table, None when absent. Raises DamagedLogError."""
    value = transaction.get(key, db=tables.meta)
    return None if value is None else log_format.unseal(b"meta", key, bytes(value), decoder)


def journal_nonce(transaction: ReadTransaction, tables: Tables) -> int | None:
    """Of the journal without which the log is not whole; None where it is. Raises DamagedLogError."""
    return meta_value(transaction, tables, log_format.META_JOURNAL, log_format.INT)


def named_rows(
    transaction: ReadTransaction,
    table: lmdb._Database,
    table_name: bytes,
    decoder: msgspec.msgpack.Decoder[log_format.Decoded],
) -> dict[str, log_format.Decoded]:
    """All rows of a table of small values by name. Raises DamagedLogError."""
    rows = {}
    with transaction.cursor(table) as cursor:
        for key_view, value in cursor:
            key = bytes(key_view)
            rows[log_format.name_of_key(key)] = log_format.unseal(table_name, key, bytes(value), decoder)
    return rows


def stored_headers(
    transaction: ReadTransaction, tables: Tables
) -> Iterator[tuple[int, StoredHeader | DamagedLogError]]:
    """(checkpoint ID, header or what is wrong with it), oldest first."""
    with transaction.cursor(tables.checkpoints) as cursor:
        for key_view, value in cursor:
            key = bytes(key_view)
            checkpoint_id = SEQUENCE_KEY.unpack(key)[0]
            try:
                yield checkpoint_id, log_format.decode_header(key, bytes(value))
            except DamagedLogError as error:
                yield checkpoint_id, error


def has_readable_header(transaction: ReadTransaction, tables: Tables, checkpoint_id: int) -> bool:
    """Whether there is a checkpoint of that ID with an undamaged header and undamaged outputs: one for a summary."""
    key = SEQUENCE_KEY.pack(checkpoint_id)
    value = transaction.get(key, db=tables.checkpoints)
    if value is None:
        return False
    try:
        check_outputs(transaction, tables, log_format.decode_header(key, bytes(value)))
    except (DamagedLogError, DamagedCheckpointError):
        return False
    return True


def outputs_pieces(transaction: ReadTransaction, tables: Tables, checkpoint_id: int) -> Iterator[bytes]:
    """The pieces of a checkpoint's unacknowledged outputs. Raises DamagedCheckpointError."""
    index = 0
    while (value := transaction.get(key := CHUNK_KEY.pack(checkpoint_id, index), db=tables.outputs)) is not None:
        data = log_format.unseal_chunk(key, value)
        if data is None:
            raise DamagedCheckpointError(
                f"piece {index} of the unacknowledged outputs of checkpoint {checkpoint_id} is damaged", checkpoint_id
            )
        yield data
        index += 1


def check_outputs(transaction: ReadTransaction, tables: Tables, stored: StoredHeader) -> None:
    """Check a checkpoint's unacknowledged outputs without keeping them. Raises DamagedCheckpointError."""
    size_bytes = check = 0
    for data in outputs_pieces(transaction, tables, stored.header.checkpoint_id):
        size_bytes += len(data)
        check = crc64(data, check)
    _require_outputs(stored, size_bytes, check)


def load_outputs(transaction: ReadTransaction, tables: Tables, stored: StoredHeader) -> dict[str, list[OutputBatch]]:
    """A checkpoint's unacknowledged outputs. Raises DamagedCheckpointError."""
    data = b"".join(outputs_pieces(transaction, tables, stored.header.checkpoint_id))
    _require_outputs(stored, len(data), crc64(data))
    try:
        return log_format.decode_outputs(data)
    except msgspec.MsgspecError as error:
        checkpoint_id = stored.header.checkpoint_id
        raise DamagedCheckpointError(f"the outputs of checkpoint {checkpoint_id}: {error}", checkpoint_id) from None


def _require_outputs(stored: StoredHeader, size_bytes: int, check: int) -> None:
    if (size_bytes, check) != (stored.outputs_size_bytes, stored.outputs_check):
        checkpoint_id = stored.header.checkpoint_id
        raise DamagedCheckpointError(
            f"the unacknowledged outputs of checkpoint {checkpoint_id} are not what was written:"
            f" {size_bytes} bytes with CRC {check:016x}, its header says {stored.outputs_size_bytes} with"
            f" {stored.outputs_check:016x}",
            checkpoint_id,
        )


def load_summary(
    transaction: ReadTransaction, tables: Tables, committer_id: int, load: LoadOutputs, problems: list[str]
) -> LogSummary:
    """The log's summary; a damaged checkpoint is left out and told in ``problems``. Raises DamagedLogError."""
    first, last = first_and_last_sequence_id(transaction, tables)
    checkpoints: list[CheckpointHeader] = []
    for checkpoint_id, stored in stored_headers(transaction, tables):
        if isinstance(stored, DamagedLogError):
            problems.append(f"checkpoint {checkpoint_id} is left out: its header is damaged ({stored})")
            continue
        try:
            check_outputs(transaction, tables, stored)
        except DamagedCheckpointError as error:
            problems.append(f"checkpoint {checkpoint_id} is left out: {error}")
            continue
        checkpoints.append(with_outputs(stored, load))
    acknowledged = acknowledged_positions(transaction, tables)
    sources = named_rows(transaction, tables.sources, b"sources", log_format.SOURCE)
    extensions = meta_value(transaction, tables, log_format.META_EXTENSIONS, log_format.INTS)
    cut = meta_value(transaction, tables, log_format.META_CUT, log_format.INT)
    return LogSummary(
        committer_id=committer_id,
        epoch=meta_value(transaction, tables, log_format.META_EPOCH, log_format.INT) or 0,
        first_sequence_id=first,
        last_sequence_id=last,
        checkpoints=checkpoints,
        sources={name: SourcePosition(*row) for name, row in sources.items()},
        acknowledged=acknowledged,
        peers=named_rows(transaction, tables.peers, b"peers", log_format.INT),
        impulses=load_impulses(transaction, tables, acknowledged, all_of_them=cut is not None),  # they may move then
        extensions=None if extensions is None else frozenset(extensions),
        last_time_ns=_record_time_ns(transaction, tables, last, committer_id),
        versions=version_starts(transaction, tables),
        cut_sequence_id=cut,
        stream_starts=stream_starts(transaction, tables),
        spilled=spilled.extents(transaction, tables, acknowledged),
        verdicts=verdicts.load_verdicts(transaction, tables, first),
        letters=verdicts.letter_sizes(transaction, tables),
        suspect=verdicts.load_suspect(transaction, tables),
    )


def acknowledged_positions(transaction: ReadTransaction, tables: Tables) -> dict[str, int]:
    """By destination: the last position that is durable there. Raises DamagedLogError."""
    return named_rows(transaction, tables.acknowledged, b"acknowledged", log_format.INT)


def used_bytes(transaction: ReadTransaction, tables: Tables) -> int:
    """The size of the pages that hold something; those that are free again, or LMDB's own list of them, don't count."""
    total_bytes = 0
    for table in (getattr(tables, name) for name in Tables.__dataclass_fields__):
        if table is None:
            continue
        state = transaction.stat(table)
        pages = state["branch_pages"] + state["leaf_pages"] + state["overflow_pages"]
        total_bytes += pages * state["psize"]
    return total_bytes


def stream_starts(transaction: ReadTransaction, tables: Tables) -> dict[str, StreamStart]:
    """Of the output streams that were reset. Raises DamagedLogError."""
    rows = meta_value(transaction, tables, log_format.META_STREAM_STARTS, log_format.STREAM_STARTS)
    return {name: StreamStart(*row) for name, row in (rows or {}).items()}


def _record_time_ns(transaction: ReadTransaction, tables: Tables, sequence_id: int, committer_id: int) -> int:
    value = transaction.get(SEQUENCE_KEY.pack(sequence_id), db=tables.records) if sequence_id >= 0 else None
    return 0 if value is None else logged_time_ns(value, sequence_id, committer_id)


def version_starts(transaction: ReadTransaction, tables: Tables) -> list[VersionStart]:
    """In the order in which they began. Raises DamagedLogError."""
    with transaction.cursor(tables.versions) as cursor:
        return [log_format.decode_version_start(bytes(key), bytes(value)) for key, value in cursor]


def with_outputs(stored: StoredHeader, load: LoadOutputs) -> CheckpointHeader:
    """The header as the core knows it."""
    if not stored.outputs_size_bytes:
        return stored.header
    return replace(stored.header, unacknowledged=StoredOutputs(stored, load))


def load_impulses(
    transaction: ReadTransaction, tables: Tables, acknowledged: Mapping[str, int], *, all_of_them: bool = False
) -> list[ImpulseBatch]:
    """All impulses by destination and position; the payload of those that are acknowledged whole is b"".

    Their positions still count, but nobody needs their bytes: the table may be far larger than what is unacknowledged.
    Of what is not acknowledged, only so much is loaded for each destination; the rest is read when it is sent.
    ``all_of_them``: load all of that.
    """
    batches = []
    loaded: dict[str, int] = {}
    with transaction.cursor(tables.impulses) as cursor:
        for key_view, value in cursor:
            key = bytes(key_view)
            destination, first_position = log_format.batch_of_key(IMPULSES_TABLE, key)
            count = log_format.decode_batch_count(IMPULSES_TABLE, key, value)
            payload, left_bytes = b"", 0
            if first_position + count - 1 > acknowledged.get(destination, 0):
                size_bytes = log_format.batch_payload_size(value)
                loaded[destination] = loaded.get(destination, 0) + size_bytes
                if all_of_them or loaded[destination] <= IMPULSES_LOADED_SIZE_BYTES_MAX:
                    payload = log_format.decode_batch_payload(IMPULSES_TABLE, key, value)
                else:
                    left_bytes = size_bytes
            batches.append(ImpulseBatch(destination, first_position, count, payload, left_bytes))
    return batches


def client_positions(transaction: ReadTransaction, tables: Tables) -> dict[str, ClientPosition]:
    """Raises DamagedLogError."""
    with transaction.cursor(tables.clients) as cursor:
        return {
            log_format.name_of_key(key): log_format.decode_client(key, bytes(value))
            for key, value in ((bytes(key_view), value) for key_view, value in cursor)
        }


def load_clients(transaction: ReadTransaction, tables: Tables, problems: list[str]) -> StoredClients:
    """What is known of clients; a damaged reply is told in ``problems``. Raises DamagedLogError."""
    replies = {}
    with transaction.cursor(tables.replies) as cursor:
        for key_view, value in cursor:
            key = bytes(key_view)
            client_id, number = log_format.reply_of_key(key)
            data = log_format.unseal_chunk(key, value)
            if data is None:
                problems.append(f"the reply to request {number} of client {client_id!r} is damaged: it is left out")
            replies[client_id, number] = data or bytes((ReplyKind.GONE,))
    forgotten_ns = meta_value(transaction, tables, log_format.META_CLIENTS_FORGOTTEN, log_format.INT)
    return StoredClients(client_positions(transaction, tables), replies, forgotten_ns or 0)


def collect_values(
    transaction: ReadTransaction, tables: Tables, first_sequence_id: int, size_bytes_max: int
) -> tuple[list[bytes], DamagedLogError | None]:
    """Copies of the values from ``first_sequence_id`` on, unchecked, and the gap that ended them, if one did."""
    values: list[bytes] = []
    rest_bytes = size_bytes_max
    expected = first_sequence_id
    with transaction.cursor(tables.records) as cursor:
        if not cursor.set_range(SEQUENCE_KEY.pack(max(first_sequence_id, 0))):
            return values, None
        for key, value in cursor:
            (sequence_id,) = SEQUENCE_KEY.unpack(key)
            if sequence_id != expected:
                return values, DamagedLogError(
                    f"record {expected} is missing: the next one in the log is record {sequence_id}", expected
                )
            rest_bytes -= len(value)
            if values and rest_bytes < 0:
                break
            values.append(bytes(value))
            expected += 1
    return values, None


def read_chunk(transaction: ReadTransaction, tables: Tables, checkpoint_id: int, index: int) -> bytes:
    """Chunk ``index`` of a blob; b"" behind the last. Raises DamagedCheckpointError."""
    key = CHUNK_KEY.pack(checkpoint_id, index)
    value = transaction.get(key, db=tables.chunks)
    if value is not None:
        data = log_format.unseal_chunk(key, value)
        if data is None:
            raise DamagedCheckpointError(
                f"chunk {index} of checkpoint {checkpoint_id} is damaged: its CRC does not match", checkpoint_id
            )
        return data
    header_key = SEQUENCE_KEY.pack(checkpoint_id)
    header = transaction.get(header_key, db=tables.checkpoints)
    if header is None:
        raise DamagedCheckpointError(f"checkpoint {checkpoint_id} is not in the log", checkpoint_id)
    try:
        stored = log_format.decode_header(header_key, bytes(header))
    except DamagedLogError as error:
        raise DamagedCheckpointError(f"checkpoint {checkpoint_id}: {error}", checkpoint_id) from None
    if index < stored.chunk_count:
        raise DamagedCheckpointError(
            f"chunk {index} of checkpoint {checkpoint_id} is missing; it has {stored.chunk_count}", checkpoint_id
        )
    return b""


def check_impulses(transaction: ReadTransaction, tables: Tables) -> None:
    """Check every impulse row, its payload too. Raises DamagedLogError."""
    with transaction.cursor(tables.impulses) as cursor:
        for key_view, value in cursor:
            key = bytes(key_view)
            log_format.decode_batch_count(IMPULSES_TABLE, key, value)
            log_format.decode_batch_payload(IMPULSES_TABLE, key, value)
