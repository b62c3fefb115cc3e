"""Cutting a log off by hand: nothing of what is cut is lost, a crash leaves the log whole or cut, the rest is sound."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from immortal.coordinator.core.errors import LogError, LogLockedError
from immortal.coordinator.core.interfaces import (
    IMPULSES,
    CheckpointHeader,
    OutputBatch,
    SourcePosition,
    Transaction,
    VersionStart,
)
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backend import Append, Severity, Span
from immortal.coordinator.log.backends.lmdb import copies
from immortal.coordinator.log.backends.lmdb.tables import TableWriter
from immortal.coordinator.log.backends.lmdb.writer import LmdbBackend
from immortal.coordinator.log.cut import CutPlan, CutRefusedError, LogCutter, LostMessages
from immortal.coordinator.log.verify import verify_log
from immortal.log import RowLogStore, create_log, open_log, open_reader
from immortal.protocol.checksum import crc64
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer

COMMITTER_ID = 77
REPOSITORY = Path(__file__).parents[2]


def value_of(sequence_id: int, *batches: BatchSource) -> bytes:
    record = encode_record(COMMITTER_ID, sequence_id, b"content of " + str(sequence_id).encode())
    return record + encode_trailer(Trailer(5, batches), int.from_bytes(record[8:16], "little"))


def make_value(sequence_id: int) -> bytes:
    """Two messages from bob in each record; one impulse in every other; one from carol in record 2 and record 16."""
    batches = [BatchSource(BatchKind.STREAM, "bob", 2 * sequence_id + 1, 2, 0)]
    if sequence_id % 2 == 0:
        batches.append(BatchSource(BatchKind.IMPULSES, "", sequence_id // 2 + 1, 1, 0))
    if sequence_id in (2, 16):
        batches.append(BatchSource(BatchKind.STREAM, "carol", 1 if sequence_id == 2 else 2, 1, 0))
    return value_of(sequence_id, *batches)


def put(folder: Path, table: str, key: bytes, value: bytes | None) -> None:
    """Write past the store's checks."""
    store = open_log(folder, "alice")
    handle = store.backend.tables[table]
    store.backend.flush()
    with store.backend.environment.begin(write=True) as transaction:
        if value is None:
            transaction.delete(key, db=handle)
        else:
            transaction.put(key, value, db=handle)
    store.close()


def damage(folder: Path, sequence_id: int) -> bytes:
    """Flip a bit in a record; the damaged value."""
    value = bytearray(make_value(sequence_id))
    value[30] ^= 1
    put(folder, "records", log_format.SEQUENCE_KEY.pack(sequence_id), bytes(value))
    return bytes(value)


def put_checkpoint(store: RowLogStore, checkpoint_id: int, sequence_id: int) -> None:
    chunks = [b"first chunk of %d, " % checkpoint_id, b"second chunk"]
    for index, chunk in enumerate(chunks):
        store.write_checkpoint_chunk(checkpoint_id, index, chunk)
    blob = b"".join(chunks)
    kept = {"dave": [OutputBatch(1, 1, b"unacknowledged")]}
    header = CheckpointHeader(checkpoint_id, sequence_id, len(blob), crc64(blob), 9, {}, kept)
    store.commit(Transaction(checkpoint=header))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """20 records; checkpoints after records 4 and 9."""
    store = create_log(tmp_path / "log", "alice", committer_id=COMMITTER_ID)
    store.commit(Transaction(records=[(number, make_value(number)) for number in range(20)]))
    sources = {
        "bob": SourcePosition(5, 1, 40),
        "carol": SourcePosition(6, 1, 2),
        "erin": SourcePosition(7, 1, 3),  # she said Hello, and nothing since what was trimmed
        IMPULSES: SourcePosition(COMMITTER_ID, 1, 10),
    }
    store.commit(Transaction(sources=sources, version=VersionStart(1, -1), epoch=3))
    put_checkpoint(store, 1, 4)
    put_checkpoint(store, 2, 9)
    store.close()
    return tmp_path / "log"


def plan(log: Path, sequence_id: int, *, force: bool = False) -> CutPlan:
    with LogCutter(log, "alice") as cutter:
        return cutter.plan(sequence_id, force=force)


def cut(log: Path, sequence_id: int, *, force: bool = False) -> Path:
    with LogCutter(log, "alice") as cutter:
        return cutter.cut(cutter.plan(sequence_id, force=force))


def findings(folder: Path) -> dict[Severity, list[str]]:
    found: dict[Severity, list[str]] = {}
    for finding in verify_log(folder).findings():
        found.setdefault(finding.severity, []).append(finding.message)
    return found


def last_sequence_id(log: Path) -> int:
    with open_reader(log, "alice") as reader:
        return reader.last_sequence_id()


def test_what_a_cut_means(log: Path) -> None:
    damage(log, 12)
    assert plan(log, 12) == CutPlan(
        sequence_id=12,
        last_sequence_id=19,
        recovery_checkpoint_id=2,
        recovery_sequence_id=9,
        checkpoint_ids=[],
        records_readable=7,
        records_damaged=1,
        first_damaged=12,
        lost=[
            LostMessages(IMPULSES, 7, 10),
            LostMessages("bob", 25, 40),
            LostMessages("carol", 2, 2),
            LostMessages("erin", None, 3),
        ],
    )
    assert last_sequence_id(log) == 19, "a plan changes nothing"


def test_a_plan_looks_at_the_structure_of_the_pages_too(log: Path) -> None:
    damage(log, 12)
    found: list[str] = []
    with LogCutter(log, "alice") as cutter:
        cutter.plan(12, on_finding=lambda finding: found.append(finding.message))
    assert any("record 12" in message for message in found)
    assert not any("is not checked" in message for message in found)


def test_what_is_cut_off_is_kept_byte_for_byte(log: Path) -> None:
    damaged = damage(log, 12)
    kept = cut(log, 12)
    assert kept == log / "cut-12-19-1"
    with open_reader(kept, "alice") as reader:
        rows = list(reader.records())
        assert [row.sequence_id for row in rows] == list(range(12, 20))
        assert rows[0].value == damaged
        assert [row.value for row in rows[1:]] == [make_value(number) for number in range(13, 20)]
        assert [row.sequence_id for row in rows if row.problem is not None] == [12]
        summary = reader.summary()
        assert (summary.committer_id, summary.first_sequence_id, summary.epoch) == (COMMITTER_ID, 12, 3)
        assert summary.sources["bob"].position == 40
        assert summary.cut_sequence_id is None
    store = open_log(log, "alice")
    assert store.read(0, 1 << 20) == [make_value(number) for number in range(12)]
    summary = store.summary()
    assert (summary.last_sequence_id, summary.cut_sequence_id) == (11, 12)
    assert [header.checkpoint_id for header in summary.checkpoints] == [1, 2]
    store.close()


def test_checkpoints_behind_the_cut_go_with_it(log: Path) -> None:
    store = open_log(log, "alice")
    store.commit(Transaction(version=VersionStart(2, 9)))
    store.close()
    for sequence_id, behind in ((5, [2]), (7, [2]), (9, [2]), (10, [])):
        assert plan(log, sequence_id, force=True).checkpoint_ids == behind
    kept = cut(log, 7, force=True)
    with open_reader(kept) as reader:
        (header,) = reader.summary().checkpoints
        assert (header.checkpoint_id, header.sequence_id) == (2, 9)
        assert header.unacknowledged == {"dave": [OutputBatch(1, 1, b"unacknowledged")]}
        assert b"".join(reader.checkpoint_chunks(2)) == b"first chunk of 2, second chunk"
        assert list(reader.summary().versions) == [VersionStart(1, -1), VersionStart(2, 9)]
    with open_reader(log) as reader:
        summary = reader.summary()
        assert [header.checkpoint_id for header in summary.checkpoints] == [1]
        assert list(summary.versions) == [VersionStart(1, -1)]
        assert b"".join(reader.checkpoint_chunks(1)) == b"first chunk of 1, second chunk"
    store = open_log(log, "alice")  # the ID of the one that is gone is given away again
    put_checkpoint(store, 2, 6)
    store.close()
    assert list(findings(log)) == [Severity.NOTE]


@pytest.mark.parametrize("damaged_header", [True, False])
def test_a_damaged_checkpoint_behind_the_cut(log: Path, damaged_header: bool) -> None:
    """With a readable header it is known where it is; without one it is taken for one behind the last that stays."""
    table, key = (
        ("checkpoints", log_format.SEQUENCE_KEY.pack(2))
        if damaged_header
        else (
            "chunks",
            log_format.CHUNK_KEY.pack(2, 1),
        )
    )
    put(log, table, key, b"damaged")
    damage(log, 7)
    kept = cut(log, 7)
    with open_reader(log) as reader:
        assert [header.checkpoint_id for header in reader.summary().checkpoints] == [1]
    assert list(findings(log)) == [Severity.NOTE]
    with open_reader(kept) as reader, reader.view() as view:
        value = bytes(view.get(table, key) or b"")
    assert value == b"damaged"


def refusal(log: Path, sequence_id: int, *, force: bool = False) -> str:
    with LogCutter(log, "alice") as cutter, pytest.raises(CutRefusedError) as caught:
        cutter.plan(sequence_id, force=force)
    assert last_sequence_id(log) >= 0
    return str(caught.value)


@pytest.mark.parametrize("sequence_id", [20, 1 << 62])
def test_refused_where_there_is_no_such_record(log: Path, sequence_id: int) -> None:
    message = f"record {sequence_id} is not in the log of 'alice': it holds records 0 to 19"
    assert refusal(log, sequence_id, force=True) == message


def test_refused_where_recovery_does_not_need_the_record(log: Path) -> None:
    damage(log, 7)
    assert refusal(log, 7).startswith("checkpoint 2 (after record 9) is whole, so recovery does not need record 7")
    assert plan(log, 7, force=True).recovery_checkpoint_id == 1


def test_refused_where_no_checkpoint_is_left(log: Path) -> None:
    assert refusal(log, 4, force=True).startswith("no whole checkpoint from before record 4 is kept")
    store = open_log(log, "alice")
    while store.trim(keep_checkpoints=1):
        pass
    store.close()
    damage(log, 10)
    assert plan(log, 10).recovery_checkpoint_id == 2, "no record need be left behind the checkpoint"
    put(log, "chunks", log_format.CHUNK_KEY.pack(2, 0), None)
    assert refusal(log, 10).startswith("no whole checkpoint from before record 10 is kept")


def test_refused_where_an_earlier_record_is_damaged(log: Path) -> None:
    damage(log, 12)
    damage(log, 15)
    assert "record 12 is damaged as well" in refusal(log, 15)
    assert "'immortal recover alice --truncate-at 12'" in refusal(log, 15, force=True)
    assert plan(log, 12).records_damaged == 2
    damage(log, 7)
    assert plan(log, 12).recovery_checkpoint_id == 2, "what recovery does not need does not matter"


@pytest.mark.parametrize("table", ["sources", "versions", "meta"])
def test_refused_where_the_log_can_not_be_opened(log: Path, table: str) -> None:
    key = {"sources": b"bob\0", "versions": log_format.SEQUENCE_KEY.pack(1), "meta": b"epoch"}[table]
    put(log, table, key, b"damaged value")
    assert "cutting records off does not help" in refusal(log, 12)


def test_refused_where_the_file_is_truncated(log: Path) -> None:
    os.truncate(log / "data.mdb", 20_000)
    with LogCutter(log, "alice") as cutter, pytest.raises(CutRefusedError, match=r"is truncated.* does not help"):
        cutter.plan(12)


def test_missing_records(log: Path) -> None:
    for number in (14, 15):
        put(log, "records", log_format.SEQUENCE_KEY.pack(number), None)
    assert "record 14 is damaged as well" in refusal(log, 16)
    found = plan(log, 14)
    assert (found.records_readable, found.records_damaged, found.first_damaged) == (4, 2, 14)
    with open_reader(cut(log, 14)) as reader:
        assert [row.sequence_id for row in reader.records()] == [16, 17, 18, 19]
    assert last_sequence_id(log) == 13


def test_records_that_only_a_checkpoint_has_seen(log: Path) -> None:
    for number in range(8, 20):
        put(log, "records", log_format.SEQUENCE_KEY.pack(number), None)
    found = plan(log, 8)
    assert (found.recovery_checkpoint_id, found.checkpoint_ids) == (1, [2])
    cut(log, 8)
    assert list(findings(log)) == [Severity.NOTE]
    assert refusal(log, 8) == "record 8 is not in the log of 'alice': it holds records 0 to 7"


def test_a_coordinator_keeps_the_cutter_out(log: Path) -> None:
    store = open_log(log, "alice")
    with pytest.raises(LogLockedError, match=f"in use by process {os.getpid()}"):
        LogCutter(log, "alice")
    store.close()
    with LogCutter(log, "alice"), pytest.raises(LogLockedError):
        open_log(log, "alice")
    open_log(log, "alice").close()
    with pytest.raises(LogError, match="there is no log in"):
        LogCutter(log / "nothing", "alice")


def test_streams_that_go_on_behind_a_cut_are_sound(log: Path) -> None:
    damage(log, 12)
    cut(log, 12)
    cut_off = "an operator cut off the records between"
    assert findings(log) == {
        Severity.NOTE: [
            f"the impulses to oneself: table 'sources' says 10, the trailers end at 6: {cut_off}",
            f"the stream from 'bob': table 'sources' says 40, the trailers end at 24: {cut_off}",
            f"the stream from 'carol': table 'sources' says 2, the trailers end at 1: {cut_off}",
        ]
    }
    store = open_log(log, "alice")
    new = [
        (12, value_of(12, BatchSource(BatchKind.STREAM, "bob", 41, 1, 0))),
        (
            13,
            value_of(13, BatchSource(BatchKind.STREAM, "bob", 42, 1, 0), BatchSource(BatchKind.IMPULSES, "", 11, 1, 0)),
        ),
    ]
    sources = {"bob": SourcePosition(5, 1, 42), IMPULSES: SourcePosition(COMMITTER_ID, 1, 11)}
    store.commit(Transaction(records=new, sources=sources, cut_healed=True))
    store.close()
    assert [len(messages) for messages in findings(log).values()] == [3]
    store = open_log(log, "alice")
    jump = (14, value_of(14, BatchSource(BatchKind.STREAM, "bob", 50, 1, 0)))
    store.commit(Transaction(records=[jump], sources={"bob": SourcePosition(5, 1, 50)}))
    store.close()
    assert findings(log)[Severity.FATAL] == [
        "record 14: the stream from 'bob' continues at position 50, expected 43: messages were lost or executed twice"
    ]


def test_a_source_that_lags_behind_a_cut_is_damage(log: Path) -> None:
    cut(log, 12)
    store = open_log(log, "alice")
    store.commit(Transaction(sources={"bob": SourcePosition(5, 1, 23)}))
    store.close()
    assert any("'bob': table 'sources' says 23" in message for message in findings(log)[Severity.FATAL])


def test_cutting_twice(log: Path) -> None:
    first, second = cut(log, 15), cut(log, 14)
    store = open_log(log, "alice")
    store.commit(Transaction(records=[(number, make_value(number)) for number in range(14, 20)]))
    store.close()
    third = cut(log, 14)
    assert [folder.name for folder in (first, second, third)] == ["cut-15-19-1", "cut-14-14-1", "cut-14-19-1"]
    store = open_log(log, "alice")
    store.commit(Transaction(records=[(number, make_value(number)) for number in range(14, 20)]))
    store.close()
    assert cut(log, 14).name == "cut-14-19-2"
    assert list(findings(log)) == [Severity.NOTE]


CRASH = """
import os, sys
import immortal.coordinator.log.backends.lmdb.copies as copying
import immortal.coordinator.log.backends.lmdb.writer as writing
from immortal.coordinator.log.cut import LogCutter
where, log = sys.argv[1:]
def crash_behind(function):
    def crashing(*arguments):
        function(*arguments)
        os._exit(9)
    return crashing
if where == "copying":
    copying.put_rows = crash_behind(copying.put_rows)
elif where == "renaming":
    copying.sync_folder = crash_behind(copying.sync_folder)
else:
    writing.TableWriter.delete = crash_behind(writing.TableWriter.delete)
with LogCutter(log, "alice") as cutter:
    cutter.cut(cutter.plan(12))
"""


def test_what_is_cut_off_and_its_name_are_synced_before_anything_is_removed(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, Path | None]] = []
    sync_folder, append = copies.sync_folder, LmdbBackend.append

    def synced(path: Path) -> None:
        done.append(("sync_folder", path))
        sync_folder(path)

    def removed(self: LmdbBackend, change: Append) -> None:
        done.append(("remove_from", None))
        append(self, change)

    monkeypatch.setattr(copies, "sync_folder", synced)
    monkeypatch.setattr(LmdbBackend, "append", removed)
    kept = cut(log, 12)
    assert done == [("sync_folder", log / f".{kept.name}"), ("sync_folder", log), ("remove_from", None)]


@pytest.mark.parametrize("where", ["copying", "renaming", "removing"])
def test_a_crash_leaves_the_log_whole(log: Path, where: str) -> None:
    damage(log, 12)
    ended = subprocess.run([sys.executable, "-c", CRASH, where, str(log)], cwd=REPOSITORY, check=False)
    assert ended.returncode == 9
    with open_reader(log) as reader:
        assert len(list(reader.records())) == 20
        assert reader.summary().cut_sequence_id is None
    number = 2 if where == "removing" else 1  # the copy of the first attempt is whole there: it stays
    assert cut(log, 12).name == f"cut-12-19-{number}"
    assert not list(log.glob(".cut-*")), "what the first attempt has left is removed"
    assert last_sequence_id(log) == 11


@pytest.mark.parametrize("error", [lmdb.DiskError("full"), OSError(28, "No space left on device")])
def test_nothing_is_cut_where_it_can_not_be_kept(log: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(copies, "put_rows", fail)
    with pytest.raises(LogError, match=r"cannot be kept in .*cut-12-19-1, so nothing was cut"):
        cut(log, 12)
    assert sorted(entry.name for entry in log.iterdir()) == ["data.mdb", "high-water-mark", "lock", "lock.mdb"]
    assert last_sequence_id(log) == 19
    open_log(log, "alice").close()


def test_nothing_is_cut_where_the_removal_fails(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TableWriter.delete

    def fail(self: TableWriter, span: Span) -> None:
        real(self, span)
        raise lmdb.DiskError("full")

    monkeypatch.setattr(TableWriter, "delete", fail)
    with pytest.raises(LogError, match="could not be cut, and is unchanged"):
        cut(log, 12)
    assert last_sequence_id(log) == 19


def test_a_large_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one transaction of the copy."""
    monkeypatch.setattr(copies, "COPIED_SIZE_BYTES_MAX", 10_000)
    store = create_log(tmp_path, "alice", committer_id=COMMITTER_ID, map_size_bytes=1 << 20)
    put_checkpoint(store, 1, -1)
    values = [value_of(number) for number in range(5_000)]
    store.commit(Transaction(records=list(enumerate(values))))
    store.close()
    kept = cut(tmp_path, 1)
    with open_reader(kept) as reader:
        assert list(reader.values(1)) == values[1:]
    with open_reader(tmp_path) as reader:
        assert list(reader.values(0)) == values[:1]
