"""Who can write the files of an authenticated log and has not its key invents no input: each try is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import DamagedCheckpointError, DamagedLogError, LogError
from immortal.coordinator.core.interfaces import AuditEntry, SpilledBatch, Transaction
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.authentication import ForgedLogError, LogKey, LogKeyError
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.backends.lmdb.journal import FILE_NAME as JOURNAL
from immortal.coordinator.log.backends.lmdb.journal import Place, decode_entry, encode_entry
from immortal.coordinator.log.cut import LogCutter
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from immortal.coordinator.log.verify import BackupError, back_up, verify_log
from immortal.log import RowLogStore, create_log, open_log, open_reader
from tests.faults.sample_log import CHUNKS, COMMITTER_ID, NAME, put_checkpoint, put_record, read_contents, write_log
from tests.security import log_forger as forger

KEY, OTHER_KEY = LogKey(bytes(range(32))), LogKey(bytes(range(1, 33)))
KEYS = (KEY,)
Forgery = Callable[[Path], None]


def opened(folder: Path, keys: Sequence[LogKey] = KEYS, *, adopt: bool = False, accept: bool = False) -> RowLogStore:
    return open_log(folder, NAME, map_size_bytes=1 << 26, keys=keys, adopt=adopt, accept=accept)


def recover(folder: Path, keys: Sequence[LogKey] = KEYS) -> None:
    """What a start does. Raises LogError."""
    store = opened(folder, keys)
    try:
        summary = store.summary()
        for header in summary.checkpoints:
            for index in range(CHUNKS + 1):
                store.read_checkpoint_chunk(header.checkpoint_id, index)
        first = summary.first_sequence_id
        while values := store.read(first, 1 << 16):
            first += len(values)
        assert first == summary.last_sequence_id + 1
    finally:
        store.close()


def replay(folder: Path, keys: Sequence[LogKey] = KEYS) -> None:
    """What a replay reads. Raises LogError."""
    with open_reader(folder, NAME, keys=keys) as reader:
        for header in reader.summary().checkpoints:
            for _ in reader.checkpoint_chunks(header.checkpoint_id):
                pass
        for _ in reader.values(reader.summary().first_sequence_id):
            pass


def findings(folder: Path, keys: Sequence[LogKey] = KEYS) -> list[str]:
    found = verify_log(folder, NAME, keys=keys).findings()
    return [finding.message for finding in found if finding.severity is not Severity.NOTE]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "log"
    write_log(folder, keys=KEYS)
    return folder


@pytest.fixture
def log(sample: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample, tmp_path / "log"))


# --- what nobody forged -----------------------------------------------------------------------------------------------


def test_a_log_that_nobody_touched_is_authentic(log: Path, tmp_path: Path) -> None:
    recover(log)
    replay(log)
    verification = verify_log(log, NAME, keys=KEYS)
    assert [finding.message for finding in verification.findings()] == []
    assert verification.authenticity == f"authenticated with key {KEY.id}"
    write_log(tmp_path / "plain")
    store = opened(log)
    authenticated = (store.summary().sources, store.read(0, 1 << 30))
    store.close()
    plain = read_contents(tmp_path / "plain")
    assert authenticated == (plain.tables["sources"], plain.records)


def test_a_log_without_a_key_is_as_it_always_was(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    with forger.written(tmp_path / "log") as (transaction, tables):
        assert not tables.keys() & {"record_seals", "checkpoint_seals"}
        keys = {bytes(key) for key, _ in transaction.cursor(tables["meta"])}
        assert not keys & {log_format.META_AUTHENTICATED, log_format.META_SEAL}
        value = bytes(transaction.get(log_format.META_FORMAT, db=tables["meta"]))
    assert log_format.unseal(b"meta", log_format.META_FORMAT, value, log_format.INT) == 5


def test_all_that_a_life_does_stays_authentic(log: Path) -> None:
    store = opened(log)
    for number in range(120, 160):
        put_record(store, number, 40_000 if number % 10 == 0 else 300)  # through the journal and past it
    put_checkpoint(store, 3, 130)
    store.commit(Transaction(epoch=7, peers={"bob": 6, "carol": 8}, acknowledged={"carol": 20}))
    store.commit(
        Transaction(spilled=[SpilledBatch(500, 2, b"\x02\0\0" * 2, "carol"), SpilledBatch(1, 1, b"x", "dave")])
    )
    store.commit(Transaction(audit=[AuditEntry(1, "me", "looked")]))
    while store.trim(keep_checkpoints=1):
        pass
    assert store.summary().first_sequence_id == 131
    put_record(store, 160)
    store.close()
    recover(log)
    assert findings(log) == []
    with forger.written(log) as (transaction, tables):
        kept = [SEQUENCE_KEY.unpack(key)[0] for key, _ in transaction.cursor(tables["record_seals"])]
        assert kept == list(range(130, 161))  # the one before the first record is what its MAC covers
        assert transaction.stat(tables["checkpoint_seals"])["entries"] == 1


def test_a_crash_leaves_an_authentic_log(log: Path, tmp_path: Path) -> None:
    store = opened(log)
    for number in range(120, 130):
        put_record(store, number)
    crashed = shutil.copytree(log, tmp_path / "crashed")
    store.close()
    assert (crashed / JOURNAL).exists()
    replay(crashed)
    assert findings(crashed) == []
    recover(crashed)
    assert findings(crashed) == []


def test_a_checkpoint_that_was_cut_off_and_begun_anew_is_authentic(log: Path) -> None:
    store = opened(log)
    for index in range(5):
        store.write_checkpoint_chunk(3, index, b"of an app that died" * 100)
    put_checkpoint(store, 3, 100)
    store.close()
    recover(log)
    assert findings(log) == []


# --- forgeries --------------------------------------------------------------------------------------------------------

RECORDS = [
    forger.change_a_record,
    forger.invent_a_record,
    forger.invent_a_record_and_a_mac,
    forger.put_a_record_under_another_number,
    forger.swap_two_records_with_their_macs,
    forger.drop_a_record,
    forger.drop_the_last_record,
]
TABLES = [
    forger.change_a_position,
    forger.add_a_position,
    forger.remove_a_position,
    forger.forge_a_checkpoint,
    forger.forge_a_verdict,
    forger.invent_an_impulse,
    forger.forge_an_output,
    forger.forge_an_audit_entry,
    forger.forge_a_version,
    forger.change_the_epoch,
]


@pytest.mark.parametrize("forgery", [*RECORDS, *TABLES, forger.change_a_blob], ids=lambda one: one.__name__)
def test_a_forger_cannot(log: Path, forgery: Forgery) -> None:
    forgery(log)
    assert any("authentic" in problem or "in the wrong place" in problem for problem in findings(log)), findings(log)
    with pytest.raises((LogError, DamagedCheckpointError), match=r"authentic|in the wrong place"):
        replay(log)
    with pytest.raises((LogError, DamagedCheckpointError), match=r"authentic|in the wrong place"):
        recover(log)


@pytest.mark.parametrize("forgery", [*RECORDS, *TABLES, forger.change_a_blob], ids=lambda one: one.__name__)
def test_each_of_these_is_a_sound_log_to_who_has_no_key(tmp_path: Path, log: Path, forgery: Forgery) -> None:
    """Else the tests above would show nothing: the CRCs are right."""
    if forgery is forger.swap_two_records_with_their_macs:
        pytest.skip("records say their own number")
    forgery(log)
    verification = verify_log(log, NAME)
    fatal = [finding.message for finding in verification.findings() if finding.severity is not Severity.NOTE]
    expected = {
        forger.drop_the_last_record: 2,  # the positions tell
        forger.drop_a_record: 2,
        forger.put_a_record_under_another_number: 0,
        forger.remove_a_position: 0,
    }
    assert len(fatal) <= expected.get(forgery, 0), fatal


def test_the_first_record_that_is_not_authentic_is_named_and_a_recovery_ends_there(log: Path) -> None:
    forger.change_a_record(log)
    [problem] = findings(log)
    assert problem.startswith("record 90 is not authentic")
    assert "recovery will stop there" in problem
    store = opened(log)
    assert len(store.read(80, 1 << 20)) == 10
    with pytest.raises(DamagedLogError, match=r"record 90 is not authentic.*immortal recover alice"):
        store.read(90, 1 << 20)
    store.close()


def test_the_table_that_was_changed_is_named(log: Path) -> None:
    forger.change_a_position(log)
    with pytest.raises(
        ForgedLogError, match=rf"table 'sources' is not what was written with its key {KEY.id}; .*--acc"
    ):
        opened(log)


def test_a_forger_cannot_bring_a_row_back_from_before(log: Path) -> None:
    """Authentic once is not enough: the position of a moment ago would have a message taken twice."""
    key = log_format.name_key("bob")
    before = forger.row(log, "sources", key)
    store = opened(log)
    put_record(store, 120)
    store.close()
    forger.put(log, "sources", key, before)
    with pytest.raises(ForgedLogError, match="'sources'"):
        opened(log)


def test_a_forger_cannot_bring_the_seal_back_with_it(log: Path) -> None:
    key, seal = log_format.name_key("bob"), log_format.META_SEAL
    before = forger.row(log, "sources", key), forger.row(log, "meta", seal)
    store = opened(log)
    put_record(store, 120)
    store.close()
    forger.put(log, "sources", key, before[0])
    forger.put(log, "meta", seal, before[1])
    with pytest.raises(ForgedLogError, match="not authentic"):
        opened(log)


def test_a_forger_cannot_put_in_a_record_of_another_log_of_the_same_key(log: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "other", keys=KEYS)
    for table in ("records", "record_seals"):
        forger.put(log, table, SEQUENCE_KEY.pack(90), forger.row(tmp_path / "other", table, SEQUENCE_KEY.pack(90)))
    with pytest.raises(ForgedLogError, match="record 90 is not authentic"):
        replay(log)


def test_a_forger_cannot_bring_back_records_that_were_cut_off(log: Path, tmp_path: Path) -> None:
    before = shutil.copytree(log, tmp_path / "before")
    with LogCutter(log, NAME, KEYS) as cutter:
        cutter.cut(cutter.plan(100, force=True))
    store = opened(log)
    for number in range(100, 120):
        store.commit(Transaction(records=[(number, forger.forged_record(number, b"after the cut"))]))
    store.close()
    assert not any("authentic" in problem for problem in findings(log))
    for number in range(100, 110):
        for table in ("records", "record_seals"):
            forger.put(log, table, SEQUENCE_KEY.pack(number), forger.row(before, table, SEQUENCE_KEY.pack(number)))
    assert any(problem.startswith("record 110 is not authentic") for problem in findings(log))
    with pytest.raises(ForgedLogError, match="record 110"):
        replay(log)


def test_a_forger_cannot_write_into_the_journal(log: Path, tmp_path: Path) -> None:
    store = opened(log)
    put_record(store, 120)
    crashed = shutil.copytree(log, tmp_path / "crashed")
    identity = store.identity
    store.close()
    path = crashed / JOURNAL
    data = path.read_bytes()
    transaction_id, number, nonce = (int.from_bytes(data[at : at + 8], "little") for at in (8, 16, 24))
    size_bytes = int.from_bytes(data[4:8], "little")

    assert decode_entry(data, identity.check, Place(transaction_id, number, nonce)) == data[40 : 40 + size_bytes]
    rows = [("records", SEQUENCE_KEY.pack(120), forger.forged_record(120))]
    forged = encode_entry(identity.check, transaction_id, number, nonce, log_format._encode(rows))
    path.write_bytes(forged + bytes(4096 - len(forged)) + data[4096:])
    (crashed / "high-water-mark").unlink()
    assert any("not authentic" in problem for problem in findings(crashed))
    with pytest.raises(ForgedLogError):
        replay(crashed)
    with pytest.raises(ForgedLogError):
        opened(crashed)


def test_a_forger_cannot_cut_the_end_off_unseen(log: Path, tmp_path: Path) -> None:
    """An entry of the journal is a commit: without the last one the log is whole, as of before it."""
    store = opened(log)
    put_record(store, 120)
    put_record(store, 121)
    crashed = shutil.copytree(log, tmp_path / "crashed")
    store.close()
    data = bytearray((crashed / JOURNAL).read_bytes())
    data[4096:8192] = bytes(4096)
    (crashed / JOURNAL).write_bytes(data)
    with pytest.raises(LogError, match="record 121 is missing"):
        opened(crashed)
    mark = crashed / "high-water-mark"
    forged = bytearray(mark.read_bytes())
    forged[8:16] = (120).to_bytes(8, "little")
    mark.write_bytes(forged)
    assert any("high-water-mark is not authentic" in problem for problem in findings(crashed))
    store = opened(crashed)
    assert any("high-water-mark is not authentic" in line for line in store.repairs)
    store.close()


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "have"), [((), "there is none"), ((OTHER_KEY,), f"there are {OTHER_KEY.id}")])
def test_without_the_key_nobody_goes_on(log: Path, keys: tuple[LogKey, ...], have: str) -> None:
    expected = rf"authenticated with the key {KEY.id}, and {have}: bring that key back.*immortal log key alice --accept"
    with pytest.raises(LogKeyError, match=expected):
        opened(log, keys)
    with pytest.raises(LogKeyError, match=expected):
        replay(log, keys)
    assert any(f"authenticated with the key {KEY.id}, and {have}" in problem for problem in findings(log, keys))


def test_who_only_reads_and_does_not_ask_needs_no_key(log: Path) -> None:
    with open_reader(log, NAME) as reader:
        assert len(list(reader.values(0))) == 120
        assert reader.authenticity == "authenticated, which was not checked"
    assert verify_log(log, NAME).is_sound


def test_a_log_that_is_there_gets_a_key(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write_log(log)
    with pytest.raises(LogKeyError, match="is not authenticated"):
        opened(log)
    opened(log, adopt=True).close()
    verification = verify_log(log, NAME, keys=KEYS)
    assert [finding.message for finding in verification.findings()] == []
    assert verification.authenticity == (
        f"authenticated with key {KEY.id}; records before 120 as they were when it got a key"
    )
    store = opened(log)
    put_record(store, 120)
    store.close()
    recover(log)
    forger.change_a_record(log)  # also one from before
    with pytest.raises(ForgedLogError, match="record 90"):
        replay(log)


def test_a_log_that_was_trimmed_gets_a_key(tmp_path: Path) -> None:
    """What the MAC of its first record covers is not there any more."""
    log = tmp_path / "log"
    store = create_log(log, NAME, committer_id=COMMITTER_ID)
    for sequence_id in range(3):
        put_record(store, sequence_id)
    put_checkpoint(store, 1, 0)
    while store.trim(keep_checkpoints=1):
        pass
    assert store.summary().first_sequence_id == 1
    store.close()
    opened(log, adopt=True).close()
    recover(log)
    assert findings(log) == []


def test_a_new_key_takes_the_place_of_another(log: Path, tmp_path: Path) -> None:
    before = shutil.copytree(log, tmp_path / "before")
    opened(log, (OTHER_KEY, KEY)).close()
    recover(log, (OTHER_KEY,))
    with pytest.raises(LogKeyError):
        opened(log)
    for table in ("records", "record_seals"):
        forger.put(log, table, SEQUENCE_KEY.pack(90), forger.row(before, table, SEQUENCE_KEY.pack(90)))
    with pytest.raises(ForgedLogError):
        replay(log, (OTHER_KEY, KEY))
    recover(before, (OTHER_KEY, KEY))


def test_a_forged_log_gets_no_new_key(log: Path) -> None:
    forger.change_a_position(log)
    with pytest.raises(ForgedLogError):
        opened(log, (OTHER_KEY, KEY))


@pytest.mark.parametrize("forgery", TABLES[:4], ids=lambda one: one.__name__)
def test_a_person_may_take_a_forged_log_as_it_is(log: Path, forgery: Forgery) -> None:
    forgery(log)
    opened(log, accept=True).close()
    assert findings(log) == []
    recover(log)


def test_a_key_can_be_taken_away(log: Path) -> None:
    store = opened(log, (), accept=True)
    store.remove_authentication()
    store.close()
    store = opened(log, ())
    put_record(store, 120)
    assert not set(store.backend.tables).intersection(log_format.TABLES_OF_SEALS)
    store.close()
    assert verify_log(log, NAME).is_sound
    assert findings(log) == []
    [finding] = verify_log(log, NAME, keys=KEYS, must_be_authentic=True).findings()
    assert "is not authenticated, but this instance had" in finding.message


# --- what people do to logs -------------------------------------------------------------------------------------------


def test_a_cut_needs_the_key_and_leaves_an_authentic_log(log: Path) -> None:
    forger.change_a_record(log)
    with LogCutter(log, NAME) as cutter:
        plan = cutter.plan(90, force=True)
        with pytest.raises(LogKeyError):
            cutter.cut(plan)
    with LogCutter(log, NAME, KEYS) as cutter:
        plan = cutter.plan(90)
        assert plan.first_damaged == 90
        kept = cutter.cut(plan)
    assert findings(log) == []
    recover(log)
    with open_reader(kept, NAME, keys=KEYS) as reader:
        assert reader.authenticity == "not authenticated"
        assert reader.summary().first_sequence_id == 90


def test_a_backup_is_authentic_with_the_same_key(log: Path, tmp_path: Path) -> None:
    back_up(log, NAME, tmp_path / "backup", KEYS)
    store = opened(log)
    for number in range(120, 130):
        put_record(store, number)
    put_checkpoint(store, 3, 125)
    while store.trim(keep_checkpoints=1):
        pass
    store.close()
    assert back_up(log, NAME, tmp_path / "backup", KEYS).records_copied == 4
    recover(tmp_path / "backup")
    assert findings(tmp_path / "backup") == []
    forger.change_a_position(log)
    with pytest.raises(BackupError, match="not authentic"):
        back_up(log, NAME, tmp_path / "backup", KEYS)


def test_a_backup_of_a_log_that_got_a_key_since(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    back_up(tmp_path / "log", NAME, tmp_path / "backup")
    opened(tmp_path / "log", adopt=True).close()
    back_up(tmp_path / "log", NAME, tmp_path / "backup", KEYS)
    recover(tmp_path / "backup")


def test_a_chunk_of_a_checkpoint_that_is_not_there_is_no_key_of_another(log: Path) -> None:
    key = CHUNK_KEY.pack(2, CHUNKS)
    forger.put(log, "chunks", key, log_format.seal_chunk(key, b"one more"))
    with pytest.raises(DamagedCheckpointError, match="chunk 3 of checkpoint 2 is not authentic"):
        recover(log)


def test_no_key_is_shown(log: Path) -> None:
    assert KEY.secret.hex() not in repr(KEY)
    assert repr(KEY.secret) not in repr(KEY)
    data = (log / "data.mdb").read_bytes()
    assert KEY.secret not in data


def test_what_an_older_program_says_of_it(log: Path) -> None:
    value = forger.row(log, "meta", log_format.META_FORMAT)
    assert log_format.unseal(b"meta", log_format.META_FORMAT, value, log_format.INT) == 6


def test_a_new_log_is_authentic_from_its_first_record(tmp_path: Path) -> None:
    store = create_log(tmp_path / "log", NAME, committer_id=COMMITTER_ID, map_size_bytes=1 << 24, keys=KEYS)
    assert store.macs is not None
    assert store.macs.marker.first_sequence_id == 0
    store.close()
    opened(tmp_path / "log").close()
