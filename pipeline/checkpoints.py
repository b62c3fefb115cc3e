"""The table of checkpoints: each header, and whether the blob behind it is what it says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from immortal.coordinator.core.errors import DamagedCheckpointError, DamagedLogError
from immortal.coordinator.log import LogReader
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import reading as log_reading
from immortal.coordinator.log.format import StoredHeader
from immortal.pipeline.reading import LogRange
from immortal.pipeline.tables import signed
from immortal.protocol.checksum import crc64


def read(log: LogReader, wanted: LogRange, check: bool, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A row for each checkpoint, oldest first. Raises DamagedLogError where their table cannot be read."""
    with log.view() as view:
        headers = list(log_reading.stored_headers(view))
    for checkpoint_id, stored in headers:
        row: dict[str, Any] = {"instance": wanted.instance, "checkpoint_id": checkpoint_id}
        if isinstance(stored, DamagedLogError):
            row |= {"ok": False, "reason": str(stored)}
        else:
            header = stored.header
            reason = _problem(log, stored) if check else None
            if reason is not None and not _is_there(log, checkpoint_id):
                continue  # its live writer trimmed it meanwhile
            row |= {
                "sequence_id": header.sequence_id,
                "time_ns": header.time_ns,
                "size_bytes": header.size_bytes,
                "check": signed(header.check),
                "ok": reason is None,
                "reason": reason,
            }
        yield pa.RecordBatch.from_pylist([{name: row.get(name) for name in columns.names}], schema=columns)


def _problem(log: LogReader, stored: StoredHeader) -> str | None:
    header = stored.header
    size_bytes = check = 0
    try:
        for index in itertools.count():
            with log.view() as view:
                chunk = log_reading.read_chunk(view, header.checkpoint_id, index)
            if not chunk:
                break
            log.have_touched(len(chunk))
            size_bytes += len(chunk)
            check = crc64(chunk, check)
        with log.view() as view:
            log_reading.check_outputs(view, stored)
    except (DamagedCheckpointError, DamagedLogError) as error:
        return str(error)
    if (size_bytes, check) != (header.size_bytes, header.check):
        return (
            f"its blob has {size_bytes} bytes with CRC {check:016x},"
            f" its header says {header.size_bytes} with {header.check:016x}"
        )
    return None


def _is_there(log: LogReader, checkpoint_id: int) -> bool:
    key = log_format.SEQUENCE_KEY.pack(checkpoint_id)
    with log.view() as view:
        return view.get("checkpoints", key) is not None
