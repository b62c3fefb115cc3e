"""The journal in front of LMDB: what is in it counts, for who writes and for who reads, and damage in it is found."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

from immortal.coordinator.core.errors import DamagedLogError, LogSyncError
from immortal.coordinator.core.interfaces import SourcePosition, Transaction
from immortal.coordinator.log.backend import Row, Severity
from immortal.coordinator.log.backends.lmdb.environment import open_environment
from immortal.coordinator.log.backends.lmdb.files import FILE_NAME as MARK_FILE_NAME
from immortal.coordinator.log.backends.lmdb.journal import (
    BLOCK_SIZE_BYTES,
    FILE_NAME,
    FILE_SIZE_BYTES,
    Journal,
    JournalReader,
)
from immortal.coordinator.log.backends.lmdb.tables import JournalRows, TableWriter
from immortal.coordinator.log.cut import LogCutter
from immortal.coordinator.log.format import FORMAT_VERSION
from immortal.coordinator.log.identity import LogIdentity
from immortal.coordinator.log.verify import verify_log
from immortal.log import RowLogStore, create_log, open_log, open_reader
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer
from tests.faults.sample_log import put_checkpoint

COMMITTER_ID = 77
MAP_SIZE_BYTES = 1 << 26


def commit(sequence_id: int, size_bytes: int = 20) -> Transaction:
    """One message of bob in a record, and what dave has acknowledged."""
    record = encode_record(COMMITTER_ID, sequence_id, bytes(size_bytes))
    batch = BatchSource(BatchKind.STREAM, "bob", sequence_id + 1, 1, 1)
    trailer = encode_trailer(Trailer(1, [batch], []), int.from_bytes(record[8:16], "little"))
    return Transaction(
        records=[(sequence_id, record + trailer)],
        sources={"bob": SourcePosition(5, 1, sequence_id + 1)},
        acknowledged={"dave": sequence_id},
    )


def new_log(folder: Path, commits: int = 0) -> RowLogStore:
    store = create_log(folder, "alice", committer_id=COMMITTER_ID, map_size_bytes=MAP_SIZE_BYTES)
    for sequence_id in range(commits):
        store.commit(commit(sequence_id))
    return store


def reopened(folder: Path) -> RowLogStore:
    return open_log(folder, "alice", map_size_bytes=MAP_SIZE_BYTES)


def as_after_a_crash(folder: Path, copy: Path) -> Path:
    copy.mkdir()
    for name in ("data.mdb", FILE_NAME):
        shutil.copy(folder / name, copy / name)
    return copy


def as_it_is(folder: Path, copy: Path) -> Path:
    """With its high-water mark."""
    as_after_a_crash(folder, copy)
    shutil.copy(folder / MARK_FILE_NAME, copy)
    return copy


def flip(folder: Path, *offsets_bytes: int) -> None:
    data = bytearray((folder / FILE_NAME).read_bytes())
    for offset_bytes in offsets_bytes:
        data[offset_bytes] ^= 1
    (folder / FILE_NAME).write_bytes(data)


def test_what_only_the_journal_has_is_read_and_goes_on_after_a_crash(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log", 7)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == [
        "data.mdb",
        MARK_FILE_NAME,
        "lock",
        "lock.mdb",
    ]
    with open_reader(copy) as reader:  # which changes nothing
        assert (reader.last_sequence_id(), len(list(reader.values(0)))) == (6, 7)
        assert [value.sequence_id for value in reader.records()] == list(range(7))
        assert reader.summary().sources == {"bob": SourcePosition(5, 1, 7)}
    for last in (6, 7):
        store = reopened(copy)
        summary = store.summary()
        assert (summary.last_sequence_id, summary.acknowledged) == (last, {"dave": last})
        assert len(store.read(0, 1 << 20)) == last + 1
        store.commit(commit(last + 1))
        store.commit(Transaction(epoch=last + 1))
        store.close()
    with open_reader(copy) as reader:
        assert (reader.last_sequence_id(), reader.summary().epoch) == (8, 8)


def test_a_reader_beside_the_writer_sees_each_commit(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log")
    commits = FILE_SIZE_BYTES // BLOCK_SIZE_BYTES + 20  # more than the journal holds at a time
    for sequence_id in range(commits):
        store.commit(commit(sequence_id))
        if sequence_id % 25 == 0 or sequence_id > commits - 30:
            assert len(store.read(sequence_id, 1)) == 1
            shown = as_after_a_crash(tmp_path / "log", tmp_path / f"copy-{sequence_id}")
            with open_reader(shown) as reader:
                assert reader.last_sequence_id() == sequence_id
                assert reader.summary().sources["bob"].position == sequence_id + 1
                assert len(list(reader.values(0))) == sequence_id + 1
    store.close()


def test_larger_commits_and_others_keep_their_order(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log")
    for sequence_id in range(60):
        store.commit(commit(sequence_id, (10, 5_000, 31_000, 60_000)[sequence_id % 4]))
        if sequence_id % 7 == 0:
            store.commit(Transaction(acknowledged={"erin": sequence_id}, epoch=sequence_id))
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    with open_reader(tmp_path / "log") as closed, open_reader(copy) as crashed:
        assert list(closed.values(0)) == list(crashed.values(0))
        assert closed.summary() == crashed.summary()


def test_one_flipped_bit_in_an_entry_is_put_right(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log", 3)
    for index, offset_bytes in enumerate((0, 9, 17, 26, 100)):
        copy = as_after_a_crash(tmp_path / "log", tmp_path / f"copy-{index}")
        flip(copy, 2 * BLOCK_SIZE_BYTES + offset_bytes, BLOCK_SIZE_BYTES + offset_bytes)
        with open_reader(copy) as reader:
            assert (reader.last_sequence_id(), len(list(reader.values(0)))) == (2, 3)
        mended = reopened(copy)
        assert mended.summary().last_sequence_id == 2, offset_bytes
        assert "one flipped bit was corrected" in mended.repairs[0]
        mended.close()
    store.close()


def test_an_entry_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log", 3)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    flip(copy, *range(2 * BLOCK_SIZE_BYTES + 60, 2 * BLOCK_SIZE_BYTES + 90))
    store = reopened(copy)
    assert store.summary().last_sequence_id == 1
    assert "a commit that was cut off is left out" in store.repairs[0]
    store.commit(commit(2))
    store.commit(commit(3))
    again = as_after_a_crash(copy, tmp_path / "again")
    store.close()
    store = reopened(again)
    assert (store.summary().last_sequence_id, store.repairs) == (3, [])
    store.close()


@pytest.mark.parametrize("entry", [0, 1])
def test_damage_with_commits_behind_it_stops_everybody(tmp_path: Path, entry: int) -> None:
    store = new_log(tmp_path / "log", 3)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    flip(copy, *range(entry * BLOCK_SIZE_BYTES + 60, entry * BLOCK_SIZE_BYTES + 90))
    with pytest.raises(DamagedLogError, match=f"entry {entry} of .* is damaged, with commits behind it"):
        reopened(copy)
    with open_reader(copy) as reader, pytest.raises(DamagedLogError, match=f"entry {entry} of .* is damaged"):
        reader.summary()


def test_what_a_live_writer_adds_while_the_end_is_looked_for_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = LogIdentity(FORMAT_VERSION, "alice", COMMITTER_ID, 0)
    journal, reader = Journal(tmp_path, identity), JournalReader(tmp_path, identity)
    journal.create()
    journal.restart(5)
    rows: list[Row] = [("meta", b"%d" % number, b"value") for number in range(3)]
    for row in rows:
        journal.append([row])
    real, offsets_bytes = os.pread, []

    def pread(descriptor: int, size_bytes: int, offset_bytes: int) -> bytes:
        """The entry 1 comes just after it was looked for."""
        data = real(descriptor, size_bytes, offset_bytes)
        offsets_bytes.append(offset_bytes)
        return bytes(len(data)) if offsets_bytes == [0, BLOCK_SIZE_BYTES] else data

    monkeypatch.setattr(os, "pread", pread)
    found = [dict(reader.rows(5, nonce=lambda: journal.nonce)) for _ in range(2)]
    journal.close()
    assert found == [{(table, key): value for table, key, value in rows[:count]} for count in (1, 3)]


def test_tables_that_are_older_than_the_journal_stop_everybody(tmp_path: Path) -> None:
    new_log(tmp_path / "log", 2).close()
    older = (tmp_path / "log" / "data.mdb").read_bytes()
    store = reopened(tmp_path / "log")
    for epoch in (5, 6):
        store.commit(Transaction(epoch=epoch))
    store.commit(commit(2))
    store.commit(commit(3))
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    (copy / "data.mdb").write_bytes(older)
    for cut_off in (False, True):
        if cut_off:  # what is behind it says the same
            flip(copy, *range(60, 90))
        with pytest.raises(DamagedLogError, match="are an older copy; restore both files from one copy"):
            reopened(copy)
        with open_reader(copy) as reader, pytest.raises(DamagedLogError, match="are an older copy"):
            reader.summary()
        assert [finding for finding in verify_log(copy).findings() if finding.severity is Severity.FATAL]
    (copy / FILE_NAME).unlink()  # as the message says
    store = reopened(copy)
    assert store.summary().last_sequence_id == 1
    store.close()


@pytest.mark.parametrize("size_bytes", [0, 2 * BLOCK_SIZE_BYTES, FILE_SIZE_BYTES - 1])
def test_a_truncated_journal_stops_everybody(tmp_path: Path, size_bytes: int) -> None:
    store = new_log(tmp_path / "log", 3)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    os.truncate(copy / FILE_NAME, size_bytes)
    with pytest.raises(DamagedLogError, match=f"is truncated: it has {size_bytes} bytes"):
        reopened(copy)
    with open_reader(copy) as reader, pytest.raises(DamagedLogError, match="is truncated"):
        reader.summary()


def two_bits_in_the_magic(entry: bytearray) -> None:
    entry[0] ^= 3


def two_bits_in_the_transaction_id(entry: bytearray) -> None:
    entry[8] ^= 3


def first_sector_zeroed(entry: bytearray) -> None:
    entry[:512] = bytes(512)


def all_zeroed(entry: bytearray) -> None:
    entry[:] = bytes(len(entry))


DAMAGES = [two_bits_in_the_magic, two_bits_in_the_transaction_id, first_sector_zeroed, all_zeroed]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("entries", [1, 2])
def test_the_last_commits_never_vanish_without_a_word(
    tmp_path: Path, damage: Callable[[bytearray], None], entries: int
) -> None:
    """All from one of the last entries on."""
    store = new_log(tmp_path / "log", 5)
    copy = as_it_is(tmp_path / "log", tmp_path / "copy")
    store.close()
    sound = (copy / FILE_NAME).read_bytes()
    data = bytearray(sound)
    for number in range(5 - entries, 5):
        place = slice(number * BLOCK_SIZE_BYTES, (number + 1) * BLOCK_SIZE_BYTES)
        entry = data[place]
        damage(entry)
        data[place] = entry
    (copy / FILE_NAME).write_bytes(data)
    missing = "record 4 is missing" if entries == 1 else "records 3 to 4 are missing"
    with pytest.raises(DamagedLogError, match=rf"{missing}: the log in .* ends with record {4 - entries}.*'rm .*'"):
        reopened(copy)
    assert (copy / FILE_NAME).read_bytes() == bytes(data)
    (found,) = [finding for finding in verify_log(copy).findings() if finding.severity is Severity.FATAL]
    assert missing in found.message
    (copy / FILE_NAME).write_bytes(sound)
    store = reopened(copy)
    assert store.summary().last_sequence_id == 4
    store.close()


def test_a_journal_that_is_older_by_one_entry_is_found(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log", 5)
    older = (tmp_path / "log" / FILE_NAME).read_bytes()
    store.commit(commit(5))
    copy = as_it_is(tmp_path / "log", tmp_path / "copy")
    store.close()
    (copy / FILE_NAME).write_bytes(older)
    with pytest.raises(DamagedLogError, match="record 5 is missing"):
        reopened(copy)
    (copy / MARK_FILE_NAME).unlink()  # as the message says
    store = reopened(copy)
    assert store.summary().last_sequence_id == 4
    store.commit(commit(5, 40))
    store.close()
    reopened(copy).close()


def test_tables_that_are_older_than_the_mark_are_found(tmp_path: Path) -> None:
    new_log(tmp_path / "log", 2).close()
    older = (tmp_path / "log" / "data.mdb").read_bytes()
    store = reopened(tmp_path / "log")
    store.commit(commit(2, 60_000))  # which no journal takes
    store.close()
    newer = (tmp_path / "log" / "data.mdb").read_bytes()
    (tmp_path / "log" / "data.mdb").write_bytes(older)
    with pytest.raises(DamagedLogError, match="record 2 is missing"):
        reopened(tmp_path / "log")
    (tmp_path / "log" / "data.mdb").write_bytes(newer)
    reopened(tmp_path / "log").close()


def test_another_record_than_the_one_that_was_committed_is_found(tmp_path: Path) -> None:
    first, _ = both_lives(tmp_path)
    shutil.copy(tmp_path / "second" / MARK_FILE_NAME, first)
    with pytest.raises(DamagedLogError, match="record 2 is not the one that was committed"):
        reopened(first)


def test_a_damaged_mark_says_nothing_of_the_log(tmp_path: Path) -> None:
    new_log(tmp_path / "log", 2).close()
    path = tmp_path / "log" / MARK_FILE_NAME
    sound = path.read_bytes()
    for data in (b"", sound[:-1], bytes(len(sound)), bytes([sound[0] ^ 1]) + sound[1:]):
        path.write_bytes(data)
        store = reopened(tmp_path / "log")
        assert any("high-water-mark is damaged" in line for line in store.repairs) == bool(data), data
        store.close()
    store = reopened(tmp_path / "log")
    store.commit(commit(2))
    store.close()
    assert path.read_bytes() != data


def test_the_journal_of_another_log_does_not_count(tmp_path: Path) -> None:
    for name in ("one", "other"):
        store = new_log(tmp_path / name, 2)
        copy = as_after_a_crash(tmp_path / name, tmp_path / f"{name}-copy")
        store.close()
    shutil.copy(copy / FILE_NAME, tmp_path / "one-copy" / FILE_NAME)
    store = reopened(tmp_path / "one-copy")
    assert store.summary().last_sequence_id == -1
    assert "is left out" in store.repairs[0]
    store.commit(commit(0))
    again = as_after_a_crash(tmp_path / "one-copy", tmp_path / "again")
    store.close()
    with open_reader(again) as reader:
        assert reader.last_sequence_id() == 0


def test_a_reader_begins_anew_where_the_writer_has_gone_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look at the tables and its look at the journal, which has begun anew by then."""
    store = new_log(tmp_path / "log", 3)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.backend.flush()
    store.commit(commit(3))
    files = {name: (tmp_path / "log" / name).read_bytes() for name in ("data.mdb", FILE_NAME, "lock.mdb")}
    store.close()
    look = JournalReader.rows

    def goes_on(self: JournalReader, transaction_id: int, **options: Any) -> JournalRows:
        monkeypatch.undo()
        for name, content in files.items():
            with (copy / name).open("r+b", buffering=0) as file:
                if name == "lock.mdb":  # of it only the ID of the last transaction
                    os.pwrite(file.fileno(), content[48:56], 48)
                else:
                    file.write(content)
        return look(self, transaction_id, **options)

    with open_reader(copy) as reader:
        monkeypatch.setattr(JournalReader, "rows", goes_on)
        assert reader.last_sequence_id() == 3
        assert len(list(reader.values(0))) == 4


def test_a_reader_goes_on_where_a_writer_died_before_it_told_of_its_commit(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log", 3)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.backend.flush()
    tables = (tmp_path / "log" / "data.mdb").read_bytes()
    store.close()
    with open_reader(copy) as reader:
        with (copy / "data.mdb").open("r+b") as file:
            file.write(tables)  # lock.mdb, in which LMDB's readers look, is as it was
        assert (reader.last_sequence_id(), len(list(reader.values(0)))) == (2, 3)


def test_what_verify_says_of_the_last_entry(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log", 3)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    assert not [finding for finding in verify_log(copy).findings() if finding.place == "journal"]
    flip(copy, 2 * BLOCK_SIZE_BYTES + 100)
    (found,) = [finding for finding in verify_log(copy).findings() if finding.place == "journal"]
    assert found.severity is Severity.DAMAGE
    assert "corrected; the next start makes that last" in found.message
    flip(copy, 2 * BLOCK_SIZE_BYTES + 110)
    (found,) = [finding for finding in verify_log(copy).findings() if finding.place == "journal"]
    assert found.severity is Severity.NOTE
    assert "a commit that was cut off is left out" in found.message


def test_tables_are_durable_before_an_entry_follows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a copy may be in memory alone, and so may be what a failed sync has left."""
    new_log(tmp_path / "log").close()
    done: list[str] = []

    class Watched:
        def __init__(self, environment: lmdb.Environment) -> None:
            self._environment = environment

        def sync(self, force: bool) -> None:
            done.append(f"sync {force}")
            self._environment.sync(force)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._environment, name)

    def watched(*arguments: Any, **options: Any) -> Watched:
        return Watched(open_environment(*arguments, **options))

    append = Journal.append

    def noted(self: Journal, rows: Sequence[Row]) -> bool:
        done.append("append")
        return append(self, rows)

    monkeypatch.setattr("immortal.coordinator.log.backends.lmdb.writer.open_environment", watched)
    monkeypatch.setattr(Journal, "append", noted)
    store = reopened(tmp_path / "log")
    store.commit(commit(0))
    store.close()
    assert done[:2] == ["sync True", "append"]


def test_what_is_read_back_is_durable_before_anything_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that failed may have left an entry in memory alone, and a second sync would say that all is well."""
    store = new_log(tmp_path / "log", 3)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    done: list[tuple[str, str]] = []
    write, sync = os.pwrite, os.fdatasync

    def watched_write(descriptor: int, data: bytes, offset: int) -> int:
        done.append(("write", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        return write(descriptor, data, offset)

    def watched_sync(descriptor: int) -> None:
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    before = (copy / FILE_NAME).read_bytes()
    monkeypatch.setattr(os, "pwrite", watched_write)
    monkeypatch.setattr(os, "fdatasync", watched_sync)
    store = reopened(copy)
    assert [one for one in done if one[1] == FILE_NAME] == [("write", FILE_NAME), ("sync", FILE_NAME)]
    assert (copy / FILE_NAME).read_bytes() == before
    store.close()


def test_what_was_read_back_and_cannot_be_made_durable_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_log(tmp_path / "log", 3)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(LogSyncError, match="what is on disk is unknown"):
        reopened(copy)
    monkeypatch.undo()
    store = reopened(copy)
    assert store.summary().last_sequence_id == 2
    store.close()


def both_lives(tmp_path: Path) -> tuple[Path, Path]:
    """A log and a copy of it, each of which went on: as many transactions, and other records."""
    store = new_log(tmp_path / "first")
    store.close()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    copies = []
    for name, size_bytes in (("first", 20), ("second", 40)):
        store = reopened(tmp_path / name)
        store.commit(Transaction(epoch=1))
        for sequence_id in range(3):
            store.commit(commit(sequence_id, size_bytes))
        copies.append(as_after_a_crash(tmp_path / name, tmp_path / f"{name}-copy"))
        store.close()
    return copies[0], copies[1]


def test_entries_of_another_life_of_the_same_log_never_count(tmp_path: Path) -> None:
    first, second = both_lives(tmp_path)
    shutil.copy(second / FILE_NAME, first / FILE_NAME)
    with pytest.raises(DamagedLogError, match=r"of another life of this log.*restore both files from one copy"):
        reopened(first)
    with open_reader(first) as reader, pytest.raises(DamagedLogError, match="of another life"):
        reader.summary()


def test_a_failed_write_is_never_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_log(tmp_path / "log", 1)

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("immortal.coordinator.log.backends.lmdb.journal.os.pwrite", failing)
    with pytest.raises(LogSyncError, match="what is on disk is unknown"):
        store.commit(commit(1))
    monkeypatch.undo()
    for call in (lambda: store.commit(commit(1)), store.summary, store.backend.flush):
        with pytest.raises(LogSyncError):
            call()
    store.close()
    store = reopened(tmp_path / "log")
    assert store.summary().last_sequence_id == 0
    store.close()


def test_a_file_system_that_takes_no_direct_write_gets_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    written = []

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        written.append((offset, len(data), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DSYNC)))
        return write(descriptor, data, offset)

    store = new_log(tmp_path / "log")
    monkeypatch.setattr("immortal.coordinator.log.backends.lmdb.journal.os.pwrite", pwrite)
    store.commit(commit(0))
    store.commit(commit(1))
    monkeypatch.undo()
    written = [one for one in written if one[1] == BLOCK_SIZE_BYTES]
    assert written[-2:] == [(0, BLOCK_SIZE_BYTES, True), (BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES, True)]
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    with open_reader(copy) as reader:
        assert reader.last_sequence_id() == 1


def test_a_log_that_was_not_stopped_is_not_whole_without_its_journal(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log", 3)
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    (copy / FILE_NAME).unlink()
    missing = "journal is missing: the log was not stopped, and its last commits are nowhere else"
    with pytest.raises(DamagedLogError, match=missing):
        reopened(copy)
    with open_reader(copy) as reader, pytest.raises(DamagedLogError, match=missing):
        reader.summary()
    (found,) = [finding for finding in verify_log(copy).findings() if finding.place == "journal"]
    assert (found.severity, missing in found.message) == (Severity.FATAL, True)
    (copy / FILE_NAME).write_bytes(bytes(FILE_SIZE_BYTES))  # what the message says for who has no copy
    store = reopened(copy)
    assert store.summary().last_sequence_id == -1
    store.commit(commit(0))
    store.close()
    assert not (copy / FILE_NAME).exists()
    reopened(copy).close()


def test_a_crash_before_the_tables_know_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_log(tmp_path / "log")
    monkeypatch.setattr(TableWriter, "put_rows", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.commit(commit(0))
    monkeypatch.undo()
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    (tmp_path / "copy" / FILE_NAME).unlink()  # nothing counted in it
    store.close()
    store = reopened(copy)
    store.commit(commit(0))
    again = as_after_a_crash(copy, tmp_path / "again")
    store.close()
    with open_reader(again) as reader:
        assert reader.last_sequence_id() == 0


def test_a_disk_with_no_room_for_all_of_the_journal_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    store = new_log(tmp_path / "log")
    monkeypatch.setattr(
        "immortal.coordinator.log.backends.lmdb.journal.os.pwrite",
        lambda *given: write(given[0], given[1][:20_000], given[2]),
    )
    for sequence_id in range(3):
        store.commit(commit(sequence_id))
    assert not (tmp_path / "log" / FILE_NAME).exists()
    store.close()
    with open_reader(tmp_path / "log") as reader:
        assert reader.last_sequence_id() == 2


def test_a_log_does_without_a_journal_where_there_can_be_none(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log")
    (tmp_path / "log" / FILE_NAME).mkdir()
    for sequence_id in range(3):
        store.commit(commit(sequence_id))
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "log" / "data.mdb", copy)
    with open_reader(copy) as reader:
        assert reader.last_sequence_id() == 2
    store.close()
    (tmp_path / "log" / FILE_NAME).rmdir()
    reopened(tmp_path / "log").close()


def test_a_cut_takes_the_journal_in(tmp_path: Path) -> None:
    store = new_log(tmp_path / "log", 3)
    put_checkpoint(store, 1, 2, 100)
    for sequence_id in range(3, 6):
        store.commit(commit(sequence_id))
    copy = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    store.close()
    with LogCutter(copy, "alice") as cutter:
        kept = cutter.cut(cutter.plan(4, force=True))
    with open_reader(kept) as reader:
        assert [value.sequence_id for value in reader.records()] == [4, 5]
    store = reopened(copy)
    summary = store.summary()
    assert (summary.last_sequence_id, summary.sources["bob"].position) == (3, 6)
    store.close()
