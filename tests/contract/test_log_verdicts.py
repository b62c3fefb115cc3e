"""What a log keeps of messages that fail alone: the same in both stores; and what the one on disk shows of damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.core.interfaces import (
    NO_SUSPECT,
    AuditEntry,
    CheckpointHeader,
    LogStore,
    Suspect,
    Transaction,
    VersionStart,
)
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.cut import LogCutter
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.log.verdicts import verdict_rows
from immortal.coordinator.log.verify import verify_log
from immortal.log import RowLogStore, create_log, open_log, open_reader
from immortal.protocol.checksum import crc64
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import Trailer, encode_trailer
from immortal.protocol.verdicts import Cause, Verdict, VerdictKind
from immortal.replay.plan import RecordedLog

COMMITTER_ID = 77
MAP_SIZE_BYTES = 1 << 20

LETTER = Verdict(
    3, 1, VerdictKind.UNDONE, "ValueError", "no", method="Counter.add", message=b"\x0amessage", trace="Traceback ..."
)
ANSWERED = Verdict(3, 2, VerdictKind.REFUSED, text="add takes n", cause=Cause.ARGUMENTS, caller="shop")
STEP = Verdict(4, 0, VerdictKind.KEPT, "KeyError", "'x'", task=17, step=2)
LATER = Verdict(12, 0, VerdictKind.SKIPPED, text="it hangs", caller=None, message=b"\x0amessage")
AUDIT = [AuditEntry(5, "ann (uid 7)", "dropped 3:1"), AuditEntry(6, "bob", "skipped 4:0: it hangs")]


def value(sequence_id: int) -> bytes:
    record = encode_record(COMMITTER_ID, sequence_id, b"content")
    return record + encode_trailer(Trailer(1, []), int.from_bytes(record[8:16], "little"))


def records(first: int, end: int) -> Transaction:
    return Transaction(records=[(number, value(number)) for number in range(first, end)])


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogStore]:
    if request.param == "memory":
        yield MemoryLogStore(COMMITTER_ID)
        return
    made = create_log(tmp_path / "log", "alice", committer_id=COMMITTER_ID, map_size_bytes=MAP_SIZE_BYTES)
    yield made
    made.close()


def reopened(store: LogStore, folder: Path) -> LogStore:
    if isinstance(store, MemoryLogStore):
        return store.crash()
    store.close()
    return open_log(folder / "log", "alice", map_size_bytes=MAP_SIZE_BYTES)


def put_checkpoint(store: LogStore, checkpoint_id: int, sequence_id: int) -> None:
    store.write_checkpoint_chunk(checkpoint_id, 0, b"state")
    store.commit(
        Transaction(checkpoint=CheckpointHeader(checkpoint_id, sequence_id, 5, crc64(b"state"), 100 * checkpoint_id))
    )


def trim(store: LogStore, keep_checkpoints: int) -> None:
    while store.trim(keep_checkpoints=keep_checkpoints):
        pass


def audit(store: LogStore, folder: Path) -> list[AuditEntry]:
    """Closes the store."""
    store.close()
    if isinstance(store, MemoryLogStore):
        return store.audit()
    with open_reader(folder / "log", "alice") as reader:
        return reader.audit()


def test_a_new_log_has_none(store: LogStore, tmp_path: Path) -> None:
    summary = store.summary()
    assert (list(summary.verdicts), dict(summary.letters), summary.suspect) == ([], {}, NO_SUSPECT)
    assert store.letter((0, 0, 0, 0)) is None
    assert store.letter((1 << 70, -1, 0, 0)) is None
    assert audit(store, tmp_path) == []


def test_what_is_committed_is_there_again(store: LogStore, tmp_path: Path) -> None:
    store.commit(records(0, 5))
    store.commit(Transaction(verdicts=[STEP, ANSWERED], audit=AUDIT[:1]))
    store.commit(Transaction(verdicts=[LETTER], suspect=Suspect(4, 1, 2, 4, 12), audit=AUDIT[1:]))
    store = reopened(store, tmp_path)
    summary = store.summary()
    assert list(summary.verdicts) == [LETTER.without_dead_letter(), ANSWERED, STEP]
    assert list(summary.letters) == [LETTER.key]
    assert len(LETTER.message) < summary.letters[LETTER.key] < 200
    assert summary.suspect == Suspect(4, 1, 2, 4, 12)
    letter = store.letter(LETTER.key)
    assert letter is not None
    assert letter.verdict == LETTER
    assert letter.time_ns > 1_500_000_000_000_000_000
    assert store.letter(ANSWERED.key) is None
    store.commit(Transaction(letters_removed=[LETTER.key], suspect=NO_SUSPECT))
    store = reopened(store, tmp_path)
    summary = store.summary()
    assert list(summary.verdicts) == [LETTER.without_dead_letter(), ANSWERED, STEP]  # a replay still needs it
    assert (dict(summary.letters), summary.suspect) == ({}, NO_SUSPECT)
    assert store.letter(LETTER.key) is None
    assert audit(store, tmp_path) == AUDIT


def test_a_letter_that_there_is_no_room_for_is_none(store: LogStore) -> None:
    joined = Transaction(verdicts=[LETTER])
    joined.absorb(Transaction(verdicts=[ANSWERED], letters_removed=[LETTER.key]))
    store.commit(joined)
    assert (len(store.summary().verdicts), dict(store.summary().letters)) == (2, {})


def test_the_largest_verdict_there_can_be(store: LogStore, tmp_path: Path) -> None:
    largest = Verdict((1 << 64) - 1, (1 << 64) - 1, VerdictKind.UNDONE, "E" * 300, "t" * 4096, message=bytes(1 << 17))
    store.commit(Transaction(verdicts=[largest]))
    store = reopened(store, tmp_path)
    letter = store.letter(largest.key)
    assert letter is not None
    assert letter.verdict == largest
    store.close()


def test_trimming_takes_the_verdicts_on_what_it_takes_and_no_letter(store: LogStore, tmp_path: Path) -> None:
    store.commit(records(0, 14))
    store.commit(Transaction(verdicts=[LETTER, ANSWERED, STEP, LATER]))
    put_checkpoint(store, 1, 2)
    put_checkpoint(store, 2, 3)
    trim(store, 2)
    assert [one.key for one in store.summary().verdicts] == [one.key for one in (LETTER, ANSWERED, STEP, LATER)]
    trim(store, 1)
    store = reopened(store, tmp_path)
    summary = store.summary()
    assert summary.first_sequence_id == 4
    assert [one.key for one in summary.verdicts] == [STEP.key, LATER.key]
    assert list(summary.letters) == [LETTER.key, LATER.key]
    assert isinstance(store, RowLogStore)
    with store.backend.view() as view:
        assert view.size("verdicts").rows_count == 2  # the others are gone, not passed over
    store.close()


def test_a_cut_in_memory_takes_what_is_said_of_the_cut_records() -> None:
    store = MemoryLogStore(COMMITTER_ID)
    store.commit(records(0, 14))
    store.commit(Transaction(verdicts=[LETTER, STEP, LATER], suspect=Suspect(13, 0, 1)))
    store.cut(4)
    summary = store.summary()
    assert [one.key for one in summary.verdicts] == [LETTER.key]
    assert list(summary.letters) == [LETTER.key]
    assert summary.suspect == NO_SUSPECT


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """14 records; a checkpoint behind the first and one behind the last."""
    store = create_log(tmp_path / "log", "alice", committer_id=COMMITTER_ID, map_size_bytes=MAP_SIZE_BYTES)
    store.commit(Transaction(records=[(0, value(0))], extensions=frozenset({65})))
    store.write_checkpoint_chunk(1, 0, b"state")
    store.commit(
        Transaction(checkpoint=CheckpointHeader(1, 0, 5, crc64(b"state"), 100), version=VersionStart(1, -1, "a:A"))
    )
    store.commit(records(1, 14))
    store.commit(Transaction(verdicts=[LETTER, ANSWERED, STEP, LATER], audit=AUDIT))
    store.close()
    return tmp_path / "log"


def raw(log: Path) -> lmdb.Environment:
    return lmdb.open(str(log), max_dbs=32, map_size=MAP_SIZE_BYTES, lib_version=0)


def flip(log: Path, table: str, key: bytes) -> None:
    environment = raw(log)
    database = environment.open_db(table.encode(), create=False)
    with environment.begin(write=True) as transaction:
        data = bytearray(transaction.get(key, db=database))
        data[-1] ^= 1
        transaction.put(key, bytes(data), db=database)
    environment.close()


def row_key(verdict: Verdict) -> bytes:
    return log_format.MESSAGE_KEY.pack(*verdict.key)


def severe(log: Path) -> list[tuple[Severity, str, str]]:
    found = [(each.severity, each.place, each.message) for each in verify_log(log, "alice").findings()]
    return [each for each in found if each[0] is not Severity.NOTE]


def test_a_sound_log_and_what_its_reader_finds(log: Path) -> None:
    assert severe(log) == []
    with open_reader(log, "alice") as reader:
        assert reader.verdicts() == [LETTER.without_dead_letter(), ANSWERED, STEP, LATER.without_dead_letter()]
        assert reader.last_verdicts(2) == [LATER.without_dead_letter(), STEP]
        assert [letter.verdict for letter in reader.letters()] == [LETTER, LATER]
        assert reader.letter(LETTER.key) == next(reader.letters())
        assert (reader.audit(), reader.problems) == (AUDIT, [])


def test_a_damaged_verdict_stops_the_start(log: Path) -> None:
    flip(log, "verdicts", row_key(ANSWERED))
    ((severity, place, _),) = severe(log)
    assert (severity, place) == (Severity.FATAL, "verdicts")
    store = open_log(log, "alice", map_size_bytes=MAP_SIZE_BYTES)
    with pytest.raises(DamagedLogError, match="'verdicts' is damaged"):
        store.summary()
    store.close()


def test_a_damaged_letter_is_reported_and_left_out_and_can_be_dropped(log: Path) -> None:
    flip(log, "letters", row_key(LETTER))
    ((severity, place, message),) = severe(log)
    assert (severity, place) == (Severity.DAMAGE, "letters")
    assert "the dead letter 3:1 is damaged" in message
    with open_reader(log, "alice") as reader:
        assert [letter.verdict for letter in reader.letters()] == [LATER]
        assert len(reader.problems) == 1
    store = open_log(log, "alice", map_size_bytes=MAP_SIZE_BYTES)
    assert list(store.summary().letters) == [LETTER.key, LATER.key]
    with pytest.raises(DamagedLogError, match="the dead letter 3:1 is damaged"):
        store.letter(LETTER.key)
    store.commit(Transaction(letters_removed=[LETTER.key]))
    store.close()
    assert severe(log) == []


def test_a_letter_under_another_key_is_found(log: Path) -> None:
    rows = {(table, key): value for table, key, value in verdict_rows([LETTER], 5)}
    environment = raw(log)
    with environment.begin(write=True) as transaction:
        database = environment.open_db(b"letters", txn=transaction, create=False)
        transaction.put(row_key(LATER), rows["letters", row_key(LETTER)], db=database)
    environment.close()
    assert [place for _, place, _ in severe(log)] == ["letters"]


def test_a_damaged_audit_entry_is_reported_and_left_out(log: Path) -> None:
    flip(log, "audit", log_format.SEQUENCE_KEY.pack(1))
    assert [(severity, place) for severity, place, _ in severe(log)] == [(Severity.DAMAGE, "audit")]
    with open_reader(log, "alice") as reader:
        assert reader.audit() == AUDIT[1:]
        assert len(reader.problems) == 1


def test_what_only_the_journal_has_is_read(tmp_path: Path) -> None:
    store = create_log(tmp_path / "log", "alice", committer_id=COMMITTER_ID, map_size_bytes=MAP_SIZE_BYTES)
    store.commit(records(0, 5))
    store.commit(Transaction(verdicts=[LETTER], suspect=Suspect(4, -1, 1, 4)))
    assert ("letters", row_key(LETTER)) in store.backend.journaled[1]
    summary = store.summary()
    assert ([one.key for one in summary.verdicts], list(summary.letters)) == ([LETTER.key], [LETTER.key])
    assert summary.suspect == Suspect(4, -1, 1, 4)
    letter = store.letter(LETTER.key)
    assert letter is not None
    store.backend.close_uncleanly()  # as a crash leaves it
    with open_reader(tmp_path / "log", "alice") as reader:
        assert (list(reader.letters()), reader.summary().suspect) == ([letter], Suspect(4, -1, 1, 4))
    again = open_log(tmp_path / "log", "alice", map_size_bytes=MAP_SIZE_BYTES)
    assert again.letter(LETTER.key) == letter
    again.close()


def test_a_cut_takes_what_is_said_of_the_cut_records_and_keeps_it(log: Path) -> None:
    store = open_log(log, "alice", map_size_bytes=MAP_SIZE_BYTES)
    store.commit(Transaction(suspect=Suspect(13, 0, 1), verdicts=[]))
    store.close()
    with LogCutter(log, "alice") as cutter:
        kept = cutter.cut(cutter.plan(4, force=True))
    with open_reader(kept) as reader:
        assert [one.key for one in reader.verdicts()] == [STEP.key, LATER.key]
        assert [letter.verdict for letter in reader.letters()] == [LATER]
    with open_reader(log, "alice") as reader:
        assert [one.key for one in reader.verdicts()] == [LETTER.key, ANSWERED.key]
        assert [letter.verdict for letter in reader.letters()] == [LETTER]
        assert reader.summary().suspect == NO_SUSPECT
        assert reader.audit() == AUDIT
    assert severe(log) == []


def test_a_log_in_one_file_has_the_verdicts(log: Path, tmp_path: Path) -> None:
    with open_reader(log, "alice") as reader:
        RecordedLog.of(reader).write(tmp_path / "file")
    summary = RecordedLog.read(tmp_path / "file").summary()
    assert list(summary.verdicts) == [LETTER.without_dead_letter(), ANSWERED, STEP, LATER.without_dead_letter()]
