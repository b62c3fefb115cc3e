"""Queries on a view: turn rows back into the core's types, for a writer or a reader, which passes its view.

The first functions are about the table ``spilled``: outputs that did not fit into their sender's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from msgspec.structs import replace

from immortal.coordinator.core.errors import DamagedCheckpointError, DamagedLogError
from immortal.coordinator.core.interfaces import (
    CheckpointHeader,
    ClientPosition,
    ImpulseBatch,
    LogSummary,
    OutputBatch,
    SourcePosition,
    SpilledBatch,
    SpilledExtent,
    StoredClients,
    StreamStart,
    VersionStart,
)
from immortal.coordinator.core.output.send_buffer import cut
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import verdicts
from immortal.coordinator.log.backend import RemovalBudget, Span, View
from immortal.coordinator.log.format import CHUNK_KEY, IMPULSES_TABLE, SEQUENCE_KEY, SPILLED_TABLE, StoredHeader
from immortal.coordinator.log.identity import first_and_last_sequence_id, logged_time_ns, meta_value
from immortal.protocol import decoding
from immortal.protocol.checksum import crc64
from immortal.protocol.client_frames import ReplyKind

EXTENT_SIZE_BYTES = 1 << 20  # rows are joined into one extent up to this size, since there can be very many


def extents(view: View, acknowledged: Mapping[str, int]) -> dict[str, list[SpilledExtent]]:
    """Return the unacknowledged extents, by destination, in order.

    Only the heads of rows are read. Raises DamagedLogError.
    """
    found: dict[str, list[SpilledExtent]] = {}
    for key, value in Span("spilled").rows(view):
        destination, first_position = log_format.batch_of_key(SPILLED_TABLE, key)
        last_position = first_position + log_format.decode_batch_count(SPILLED_TABLE, key, value) - 1
        if last_position > acknowledged.get(destination, 0):
            extent = SpilledExtent(first_position, last_position, log_format.batch_payload_size(value))
            add_extent(found.setdefault(destination, []), extent)
    return found


def add_extent(found: list[SpilledExtent], extent: SpilledExtent) -> None:
    """Append ``extent`` to ``found``; merge it with the last one if both are small and adjacent."""
    last = found[-1] if found else None
    if (
        last is not None
        and last.last_position + 1 == extent.first_position
        and last.size_bytes + extent.size_bytes <= EXTENT_SIZE_BYTES
    ):
        found[-1] = SpilledExtent(last.first_position, extent.last_position, last.size_bytes + extent.size_bytes)
    else:
        found.append(extent)


def read(
    view: View,
    destination: str,
    first_position: int,
    last_position: int,
    size_bytes_max: int,
) -> list[OutputBatch]:
    """Read spilled batches, as :meth:`LogStore.read_spilled` specifies."""
    batches: list[OutputBatch] = []
    size_bytes, position = 0, first_position
    while position <= last_position:
        batch = _covering(view, "spilled", destination, position)
        if batch is None:
            batch = _covering(view, "impulses", destination, position)
        if batch is None:
            if not batches:
                what = f"the message {position} to {destination!r} waits to be sent and is not in the log"
                raise DamagedLogError(what, -1)
            break
        size_bytes += len(batch.payload)
        if batches and size_bytes > size_bytes_max:
            break
        batches.append(batch)
        position = batch.last_position + 1
    return batches


def _covering(view: View, table: str, destination: str, position: int) -> OutputBatch | None:
    """Return the row that has the message at ``position``."""
    for key_view, value in view.scan_back(table, log_format.batch_key(destination, position)):
        key, name = bytes(key_view), table.encode()
        row_destination, first_position = log_format.batch_of_key(name, key)
        if row_destination != destination:
            return None
        count = log_format.decode_batch_count(name, key, value)
        if first_position + count - 1 < position:
            return None
        return OutputBatch(first_position, count, log_format.decode_batch_payload(name, key, value))
    return None


def end_at(view: View, destination: str, position: int) -> tuple[list[SpilledBatch], Span]:
    """Plan the removal of spilled messages to ``destination`` after ``position``. Return the remaining part of the row
    that contains it, and the span to delete.
    """
    last = _covering(view, "spilled", destination, position) if position > 0 else None
    left = []
    if last is not None and last.last_position > position:
        rest, _ = cut(last, position - last.first_position + 1)
        left.append(SpilledBatch(rest.first_position, rest.count, rest.payload, destination))
    end = log_format.name_key(destination)[:-1] + b"\1"  # a name ends with a zero byte
    return left, Span("spilled", log_format.batch_key(destination, position + 1), end)


def trim(view: View, table: str, destination: str, position: int, budget: RemovalBudget) -> list[Span]:
    """Return the spans of one removal step: rows of ``table`` to ``destination`` that end at or before ``position``."""
    name, first = table.encode(), log_format.batch_key(destination, 0)
    last_key = None
    for key, value in Span(table, first).rows(view):
        row_destination, first_position = log_format.batch_of_key(name, key)
        if budget.exhausted or row_destination != destination or first_position > position:
            break
        if first_position + log_format.decode_batch_count(name, key, value) - 1 > position:
            break
        budget.spend(len(value))
        last_key = key
    return [] if last_key is None else [Span(table, first, last_key + b"\0")]


def check(view: View) -> None:
    """Check every row with its payload, and that no two have the same positions. Raises DamagedLogError."""
    before = ("", 0)
    for key, value in Span("spilled").rows(view):
        destination, first_position = log_format.batch_of_key(SPILLED_TABLE, key)
        count = log_format.decode_batch_count(SPILLED_TABLE, key, value)
        log_format.decode_batch_payload(SPILLED_TABLE, key, value)
        if destination == before[0] and first_position <= before[1]:
            raise DamagedLogError(f"two rows hold the message {first_position} spilled to {destination!r}", -1)
        before = (destination, first_position + count - 1)


IMPULSES_LOADED_SIZE_BYTES_MAX = 16 << 20  # for each destination; fits into memory
OpenView = Callable[[], AbstractContextManager[View]]


class StoredOutputs(Mapping[str, Sequence[OutputBatch]]):
    """Unacknowledged outputs of a checkpoint, read from the log on first use.

    They can have tens of MiB, and only the checkpoint that a recovery starts from needs its outputs. Their CRC was
    checked when the log's summary was made. Reading can raise DamagedCheckpointError.
    """

    def __init__(self, stored: StoredHeader, open_view: OpenView) -> None:
        self._stored = stored
        self._open_view = open_view

    @cached_property
    def _outputs(self) -> dict[str, list[OutputBatch]]:
        with self._open_view() as view:
            return load_outputs(view, self._stored)

    def __getitem__(self, destination: str) -> Sequence[OutputBatch]:
        return self._outputs[destination]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"<unacknowledged outputs of {self._stored.outputs_size_bytes} bytes>"


def named_rows(view: View, table: str, decoder: decoding.Decoder[log_format.Decoded]) -> dict[str, log_format.Decoded]:
    """Read all rows of a table of small values, by name. Raises DamagedLogError."""
    rows = {}
    for key, value in Span(table).rows(view):
        rows[log_format.name_of_key(key)] = log_format.unseal(table.encode(), key, bytes(value), decoder)
    return rows


def stored_headers(view: View) -> Iterator[tuple[int, StoredHeader | DamagedLogError]]:
    """Iterate over checkpoints, oldest first: (ID, header or its damage)."""
    for key, value in Span("checkpoints").rows(view):
        checkpoint_id = SEQUENCE_KEY.unpack(key)[0]
        try:
            yield checkpoint_id, log_format.decode_header(key, bytes(value))
        except DamagedLogError as error:
            yield checkpoint_id, error


def has_readable_header(view: View, checkpoint_id: int) -> bool:
    """Return True if a checkpoint has an undamaged header and undamaged outputs, so that a summary includes it."""
    key = SEQUENCE_KEY.pack(checkpoint_id)
    value = view.get("checkpoints", key)
    if value is None:
        return False
    try:
        check_outputs(view, log_format.decode_header(key, bytes(value)))
    except (DamagedLogError, DamagedCheckpointError):
        return False
    return True


def outputs_pieces(view: View, checkpoint_id: int) -> Iterator[bytes]:
    """Yield the pieces of a checkpoint's unacknowledged outputs. Raises DamagedCheckpointError."""
    index = 0
    while (value := view.get("outputs", key := CHUNK_KEY.pack(checkpoint_id, index))) is not None:
        data = log_format.unseal_chunk(key, value)
        if data is None:
            raise DamagedCheckpointError(
                f"piece {index} of the unacknowledged outputs of checkpoint {checkpoint_id} is damaged", checkpoint_id
            )
        yield data
        index += 1


def check_outputs(view: View, stored: StoredHeader) -> None:
    """Check a checkpoint's unacknowledged outputs without keeping them. Raises DamagedCheckpointError."""
    size_bytes = check = 0
    for data in outputs_pieces(view, stored.header.checkpoint_id):
        size_bytes += len(data)
        check = crc64(data, check)
    _require_outputs(stored, size_bytes, check)


def load_outputs(view: View, stored: StoredHeader) -> dict[str, list[OutputBatch]]:
    """Return a checkpoint's unacknowledged outputs. Raises DamagedCheckpointError."""
    data = b"".join(outputs_pieces(view, stored.header.checkpoint_id))
    _require_outputs(stored, len(data), crc64(data))
    try:
        return log_format.decode_outputs(data)
    except decoding.DecodeError as error:
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
    view: View,
    committer_id: int,
    open_view: OpenView,
    problems: list[str],
    impulses_size_bytes_max: int = IMPULSES_LOADED_SIZE_BYTES_MAX,
) -> LogSummary:
    """Load the log's summary. A damaged checkpoint is left out and described in ``problems``.

    ``open_view``: opens a later view, for the outputs of a checkpoint. Raises DamagedLogError.
    """
    first, last = first_and_last_sequence_id(view)
    checkpoints: list[CheckpointHeader] = []
    for checkpoint_id, stored in stored_headers(view):
        if isinstance(stored, DamagedLogError):
            problems.append(f"checkpoint {checkpoint_id} is left out: its header is damaged ({stored})")
            continue
        try:
            check_outputs(view, stored)
        except DamagedCheckpointError as error:
            problems.append(f"checkpoint {checkpoint_id} is left out: {error}")
            continue
        header = stored.header
        if stored.outputs_size_bytes:
            header = replace(header, unacknowledged=StoredOutputs(stored, open_view))
        checkpoints.append(header)
    acknowledged = acknowledged_positions(view)
    sources = named_rows(view, "sources", log_format.SOURCE)
    extensions = meta_value(view, log_format.META_EXTENSIONS, log_format.INTS)
    cut = meta_value(view, log_format.META_CUT, log_format.INT)
    return LogSummary(
        committer_id=committer_id,
        epoch=meta_value(view, log_format.META_EPOCH, log_format.INT) or 0,
        first_sequence_id=first,
        last_sequence_id=last,
        checkpoints=checkpoints,
        sources={name: SourcePosition(*row) for name, row in sources.items()},
        acknowledged=acknowledged,
        peers=named_rows(view, "peers", log_format.INT),
        impulses=load_impulses(
            view, acknowledged, None if cut is not None else impulses_size_bytes_max
        ),  # after a cut all are loaded, as they can get other positions
        extensions=None if extensions is None else frozenset(extensions),
        last_time_ns=record_time_ns(view, last, committer_id),
        versions=version_starts(view),
        cut_sequence_id=cut,
        stream_starts=stream_starts(view),
        spilled=extents(view, acknowledged),
        verdicts=verdicts.load_verdicts(view, first),
        letters=verdicts.dead_letter_sizes(view),
        suspect=verdicts.load_suspect(view),
    )


def acknowledged_positions(view: View) -> dict[str, int]:
    """Return the last position that is durable at each destination. Raises DamagedLogError."""
    return named_rows(view, "acknowledged", log_format.INT)


def stream_starts(view: View) -> dict[str, StreamStart]:
    """Return the starts of the output streams that were reset. Raises DamagedLogError."""
    rows = meta_value(view, log_format.META_STREAM_STARTS, log_format.STREAM_STARTS)
    return {name: StreamStart(*row) for name, row in (rows or {}).items()}


def record_time_ns(view: View, sequence_id: int, committer_id: int) -> int:
    """Return the time of a record in ns; 0 if the log does not keep it."""
    value = view.get("records", SEQUENCE_KEY.pack(sequence_id)) if sequence_id >= 0 else None
    return 0 if value is None else logged_time_ns(value, sequence_id, committer_id)


def version_starts(view: View) -> list[VersionStart]:
    """Return the versions in the order in which they began. Raises DamagedLogError."""
    return [log_format.decode_version_start(key, bytes(value)) for key, value in Span("versions").rows(view)]


def load_impulses(view: View, acknowledged: Mapping[str, int], size_bytes_max: int | None) -> list[ImpulseBatch]:
    """Load all impulses, by destination and position. Acknowledged batches have an empty payload.

    Their positions still count, but their bytes do not: the table can be far larger than its unacknowledged part. Of
    the unacknowledged ones only a part is loaded for each destination; the rest is read when it is sent.
    ``size_bytes_max``: of that part; None: all is loaded.
    """
    batches = []
    loaded: dict[str, int] = {}
    for key, value in Span("impulses").rows(view):
        destination, first_position = log_format.batch_of_key(IMPULSES_TABLE, key)
        count = log_format.decode_batch_count(IMPULSES_TABLE, key, value)
        payload, left_bytes = b"", 0
        if first_position + count - 1 > acknowledged.get(destination, 0):
            size_bytes = log_format.batch_payload_size(value)
            loaded[destination] = loaded.get(destination, 0) + size_bytes
            if size_bytes_max is None or loaded[destination] <= size_bytes_max:
                payload = log_format.decode_batch_payload(IMPULSES_TABLE, key, value)
            else:
                left_bytes = size_bytes
        batches.append(ImpulseBatch(first_position, count, payload, destination, left_bytes))
    return batches


def client_positions(view: View) -> dict[str, ClientPosition]:
    """Read clients' positions by client ID. Raises DamagedLogError."""
    rows = Span("clients").rows(view)
    return {log_format.name_of_key(key): log_format.decode_client(key, bytes(value)) for key, value in rows}


def load_clients(view: View, problems: list[str]) -> StoredClients:
    """Load clients' positions and replies. Describe damaged replies in ``problems``. Raises DamagedLogError."""
    replies = {}
    for key, value in Span("replies").rows(view):
        client_id, number = log_format.batch_of_key(b"replies", key)
        data = log_format.unseal_chunk(key, value)
        if data is None:
            problems.append(f"the reply to request {number} of client {client_id!r} is damaged: it is left out")
        replies[client_id, number] = data or bytes((ReplyKind.GONE,))
    forgotten_ns = meta_value(view, log_format.META_CLIENTS_FORGOTTEN, log_format.INT)
    return StoredClients(client_positions(view), replies, forgotten_ns or 0)


def collect_values(
    view: View, first_sequence_id: int, size_bytes_max: int
) -> tuple[list[bytes], DamagedLogError | None]:
    """Return unchecked copies of the values from ``first_sequence_id`` on, and the gap that ended them, if any."""
    values: list[bytes] = []
    rest_bytes = size_bytes_max
    expected = first_sequence_id
    for key, value in view.scan("records", SEQUENCE_KEY.pack(max(first_sequence_id, 0))):
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


def read_chunk(view: View, checkpoint_id: int, index: int) -> bytes:
    """Read chunk ``index`` of a blob; b"" after the last. Raises DamagedCheckpointError."""
    key = CHUNK_KEY.pack(checkpoint_id, index)
    value = view.get("chunks", key)
    if value is not None:
        data = log_format.unseal_chunk(key, value)
        if data is None:
            raise DamagedCheckpointError(
                f"chunk {index} of checkpoint {checkpoint_id} is damaged: its CRC does not match", checkpoint_id
            )
        return data
    header_key = SEQUENCE_KEY.pack(checkpoint_id)
    header = view.get("checkpoints", header_key)
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


def check_impulses(view: View) -> None:
    """Check every row of impulses with its payload. Raises DamagedLogError."""
    for key, value in Span("impulses").rows(view):
        log_format.decode_batch_count(IMPULSES_TABLE, key, value)
        log_format.decode_batch_payload(IMPULSES_TABLE, key, value)
