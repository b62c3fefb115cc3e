"""Cache of a log as Parquet files beside it, so that queries read columns instead of records.

    HOME/NAME/columns/COMMITTER_ID-CREATED_NS/messages-FIRST-LAST.parquet      also records-..., outputs-...

The files of a range are created together, and never changed; a longer range replaces the last one while it is small.
Each file has the check bytes of its last record. If the log has another record there now (it was cut, and continued),
or a file is from another version of this module, that range and all later ones are created again. So each record that
is shown is in the log; records that were trimmed away are not shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from immortal.coordinator.instances.own_logs import COLUMNS_FOLDER_NAME
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.coordinator.log.reader import LogReader
from immortal.pipeline.reading import Gap, LogRange, read_open
from immortal.pipeline.tables import MESSAGES, OUTPUTS, RECORDS, TableReader
from immortal.protocol.files import acquire_lock, make_folder, open_lock
from immortal.protocol.record import decode_header
from immortal.replay.plan import LogViewError

RANGE_MESSAGES_MAX = 1_000_000
RANGE_MESSAGES_MIN = 100_000  # a last range with fewer is replaced once the log has more
LOCK_TIMEOUT_S = 300.0  # another query can be writing the files of a large log
SUPERSEDED_S = 3600.0  # a running query can read a replaced file for so long

_FORMAT = b"1"
_NAME = re.compile(r"messages-(\d+)-(\d+)\.parquet")
_COMPUTED = ("method", "arguments_json")  # by today's code, when a query uses them
TABLES = {
    "messages": pa.schema([field for field in MESSAGES if field.name not in _COMPUTED]),
    "records": RECORDS,
    "outputs": OUTPUTS,
}


class Range(Struct, frozen=True):
    folder: Path
    first: int
    last: int

    def path(self, table: str) -> Path:
        return self.folder / f"{table}-{self.first}-{self.last}.parquet"


def update(reader: LogReader, home_folder: Path) -> list[Range]:
    """Return the ranges of the whole log, after creating the missing ones. ``home_folder``: the instance's.

    Raises LogError, LogViewError, OSError.
    """
    folder = home_folder / COLUMNS_FOLDER_NAME / f"{reader.identity.committer_id}-{reader.identity.created_ns}"
    make_folder(folder)
    lock = open_lock(folder / "lock")
    try:
        acquire_lock(lock, LOCK_TIMEOUT_S)
        return _updated(reader, folder)
    except BlockingIOError:
        raise LogViewError(f"another process has been making {folder} for {LOCK_TIMEOUT_S:.0f} s: try again") from None
    finally:
        os.close(lock)


def _updated(reader: LogReader, folder: Path) -> list[Range]:
    first, last = reader.ends()
    ranges = _sound(reader, folder, first)
    if ranges and ranges[-1].last < last and _rows(ranges[-1]) < RANGE_MESSAGES_MIN:
        ranges.pop()
    begin = ranges[-1].last + 1 if ranges else first
    while begin <= last:
        ranges.append(_extract_range(reader, folder, begin, last + 1))
        begin = ranges[-1].last + 1
    _tidy(folder, ranges)
    return ranges


def _sound(reader: LogReader, folder: Path, first_kept: int) -> list[Range]:
    """Return the files that continue one another from the log's first record on and belong to the log."""
    last_by_first: dict[int, int] = {}  # the longest from each first record on
    for name in os.listdir(folder):
        if (found := _NAME.fullmatch(name)) is not None:
            last_by_first[int(found[1])] = max(int(found[2]), last_by_first.get(int(found[1]), -1))
    ranges: list[Range] = []
    for first, last in sorted(last_by_first.items()):
        if last < first_kept:
            continue  # all of it is trimmed
        found_range = Range(folder, first, last)
        follows = first == ranges[-1].last + 1 if ranges else first <= first_kept
        if not follows or _check_of(reader, last) != _stored_check(found_range):
            break
        ranges.append(found_range)
    return ranges


def _check_of(reader: LogReader, sequence_id: int) -> bytes | None:
    with reader.view() as view:
        value = view.get("records", SEQUENCE_KEY.pack(sequence_id))
        return None if value is None else _hex(bytes(value))


def _hex(value: bytes) -> bytes:
    return f"{decode_header(value).check:016x}".encode()


def _stored_check(one: Range) -> bytes | None:
    try:
        said = pq.read_metadata(one.path("messages")).metadata or {}
        complete = all(one.path(table).exists() for table in TABLES)
    except (OSError, pa.ArrowException):
        return None
    return said.get(b"immortal.check") if complete and said.get(b"immortal.format") == _FORMAT else None


def _rows(one: Range) -> int:
    return int(pq.read_metadata(one.path("messages")).num_rows)


def _extract_range(reader: LogReader, folder: Path, first: int, end: int) -> Range:
    """Write a range: the records from ``first`` to ``end`` - 1, or RANGE_MESSAGES_MAX messages."""
    identity = reader.identity
    tables = {
        name: TableReader(name, schema, identity.instance_name, identity.committer_id, True, None, plain=True)
        for name, schema in TABLES.items()
    }
    made = [folder / f"new-{os.getpid()}-{name}" for name in TABLES]
    rows, last, check = 0, end - 1, b""
    with contextlib.ExitStack() as stack:
        for path in made:
            stack.callback(path.unlink, missing_ok=True)
        with contextlib.ExitStack() as open_files:
            writers = {
                name: open_files.enter_context(pq.ParquetWriter(path, TABLES[name], compression="zstd"))
                for name, path in zip(TABLES, made, strict=True)
            }
            wanted = LogRange(reader.where, identity.instance_name, identity.committer_id, first, end)
            for values in read_open(reader, wanted):
                for name, table in tables.items():
                    if isinstance(values, Gap):
                        batches = table.damaged(values.first, values.reason)
                    else:
                        batches = table.batches(values)
                    for batch in batches:
                        writers[name].write_batch(batch)
                        rows += len(batch) if name == "messages" else 0
                if not isinstance(values, Gap):
                    last = int(values.sequence_ids[-1])
                    check = _hex(bytes(values.value(len(values.sequence_ids) - 1)))
                    if rows >= RANGE_MESSAGES_MAX:
                        break
            else:
                last = end - 1
            writers["messages"].add_key_value_metadata({"immortal.check": check, "immortal.format": _FORMAT})
        reader.release()
        done = Range(folder, first, last)
        for name, path in reversed([*zip(TABLES, made, strict=True)]):  # "messages" last: it counts
            path.rename(done.path(name))
    return done


def _tidy(folder: Path, ranges: list[Range]) -> None:
    """Remove files that no range uses, once no query can be reading them."""
    used = {one.path(table).name for one in ranges for table in TABLES}
    for name in os.listdir(folder):
        path = folder / name
        if path.suffix == ".parquet" and name not in used and time.time() - path.stat().st_mtime > SUPERSEDED_S:
            path.unlink(missing_ok=True)
