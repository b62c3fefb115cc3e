"""Every kind of damage to a log's file is found, by reading and by verifying, and said in the right words."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import (
    DamagedCheckpointError,
    DamagedLogError,
    LogError,
    LogFormatError,
    LogUnavailableError,
)
from immortal.coordinator.core.interfaces import (
    IMPULSES,
    CheckpointHeader,
    ImpulseBatch,
    OutputBatch,
    OutputMark,
    SourcePosition,
    StreamStart,
    Transaction,
)
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.backends.lmdb.files import check_data_file, structure_problems
from immortal.coordinator.log.verify import verify_log
from immortal.log import RowLogStore, create_log, open_log, open_reader
from immortal.protocol.checksum import crc64
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, OutputMarkEntry, Trailer, encode_trailer
from tests.helpers.effort import effort

COMMITTER_ID = 77
REPOSITORY = Path(__file__).parents[2]
BLOB_CHUNKS = {1: [b"older blob " * 1000], 2: [b"newer blob, first chunk " * 500, b"newer blob, second chunk " * 500]}


def content(sequence_id: int) -> bytes:
    return f"<content of record {sequence_id}>".encode() * 30


def make_value(sequence_id: int, committer_id: int = COMMITTER_ID, first_position: int | None = None) -> bytes:
    record = encode_record(committer_id, sequence_id, content(sequence_id))
    position = sequence_id + 1 if first_position is None else first_position
    batches = [
        BatchSource(BatchKind.STREAM, f"sender-of-{sequence_id}-", 1, 1, 1),
        BatchSource(BatchKind.STREAM, "bob", position, 1, 0),
        BatchSource(BatchKind.IMPULSES, "", position, 1, 0),
    ]
    trailer = Trailer(5, batches, [OutputMarkEntry("carol", 1, 2)])
    return record + encode_trailer(trailer, int.from_bytes(record[8:16], "little"))


def put(store: RowLogStore, table: str, key: bytes, value: bytes | None) -> None:
    """Write past the store's checks."""
    handle = store.backend.tables[table]
    store.backend.flush()
    with store.backend.environment.begin(write=True) as transaction:
        if value is None:
            transaction.delete(key, db=handle)
        else:
            transaction.put(key, value, db=handle)


def open_small(folder: Path) -> RowLogStore:
    return open_log(folder, "alice", map_size_bytes=1 << 20)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """20 records; checkpoint 1 after record 4, checkpoint 2 after record 9."""
    store = create_log(tmp_path, "alice", committer_id=COMMITTER_ID, map_size_bytes=1 << 20)
    for number in range(20):
        sources = {
            "bob": SourcePosition(5, 1, number + 1),
            IMPULSES: SourcePosition(COMMITTER_ID, 1, number + 1),
            f"sender-of-{number}-": SourcePosition(6, 1, 1),
        }
        store.commit(Transaction(records=[(number, make_value(number))], sources=sources))
    for checkpoint_id, chunks in BLOB_CHUNKS.items():
        for index, chunk in enumerate(chunks):
            store.write_checkpoint_chunk(checkpoint_id, index, chunk)
        blob = b"".join(chunks)
        sequence_id = 4 if checkpoint_id == 1 else 9
        unacknowledged = {"carol": [OutputBatch(1, 1, f"output kept by {checkpoint_id};".encode() * 200)]}
        outputs = {"carol": OutputMark(1, 2)}
        header = CheckpointHeader(
            checkpoint_id,
            sequence_id,
            len(blob),
            crc64(blob),
            0x1122334455667700 + checkpoint_id,
            outputs,
            unacknowledged,
        )
        store.commit(Transaction(checkpoint=header))
    store.commit(
        Transaction(
            acknowledged={"carol-acknowledged": 3},
            peers={"peer-dave": 9},
            impulses=[ImpulseBatch(1, 1, b"an impulse's payload", "carol")],
            epoch=1,
        )
    )
    store.close()
    return tmp_path


def flip(folder: Path, needle: bytes, offset_bytes: int = 0) -> None:
    """Flip one bit of the file, ``offset_bytes`` behind the last byte sequence ``needle``.

    Older copies of a page stay in the file: all of them are changed.
    """
    path = folder / "data.mdb"
    data = bytearray(path.read_bytes())
    position = data.find(needle)
    assert position >= 0
    while position >= 0:
        data[position + offset_bytes] ^= 4
        position = data.find(needle, position + len(needle))
    path.write_bytes(data)


def findings(folder: Path) -> list[tuple[Severity, str, str]]:
    return [
        (finding.severity, finding.place, finding.message)
        for finding in verify_log(folder).findings()
        if finding.severity is not Severity.NOTE
    ]


def only_finding(folder: Path) -> tuple[Severity, str, str]:
    found = findings(folder)
    assert len(found) == 1, found
    return found[0]


def read_all(folder: Path) -> int:
    """Read every record as recovery does; how many came before the first damage."""
    store = open_small(folder)
    sequence_id = 0
    try:
        while values := store.read(sequence_id, 1 << 20):
            for value in values:
                assert value == make_value(sequence_id)
                sequence_id += 1
    finally:
        store.close()
    return sequence_id


def test_a_sound_log_has_no_findings(log: Path) -> None:
    verification = verify_log(log, "alice")
    assert list(verification.findings()) == []
    assert verification.is_sound
    assert (verification.records_checked, verification.checkpoints_checked) == (20, 2)
    assert (verification.recovery_checkpoint_id, verification.recovery_sequence_id) == (2, 9)
    assert read_all(log) == 20


@pytest.mark.parametrize("offset_bytes", [0, 10, -1, -20])  # content; header: check bytes, sequence ID
def test_a_damaged_record_that_recovery_needs(log: Path, offset_bytes: int) -> None:
    flip(log, content(12), offset_bytes)
    with pytest.raises(DamagedLogError, match="record 12 is damaged") as caught:
        read_all(log)
    assert caught.value.sequence_id == 12
    severity, place, message = only_finding(log)
    assert (severity, place) == (Severity.FATAL, "record 12")
    assert "record 12 is damaged" in message
    assert "recovery will stop there: the state after record 11 is the last" in message


def test_a_damaged_record_before_the_checkpoint(log: Path) -> None:
    flip(log, content(7))
    severity, _, message = only_finding(log)
    assert severity is Severity.DAMAGE
    assert message.startswith("record 7 is damaged")
    assert message.endswith("recovery starts from checkpoint 2 (after record 9) and does not need it")
    with open_reader(log) as reader:
        problems = {logged.sequence_id: logged.problem for logged in reader.records()}
    assert [number for number, problem in problems.items() if problem] == [7]
    assert len(problems) == 20  # damage stops no listing


@pytest.mark.parametrize("damaged", [12, 19])
def test_a_reader_gives_no_damaged_value(log: Path, damaged: int) -> None:
    flip(log, content(damaged))
    with open_reader(log) as reader:
        values = reader.values(3)
        assert [next(values) for _ in range(3, damaged)] == [make_value(number) for number in range(3, damaged)]
        with pytest.raises(DamagedLogError, match=f"record {damaged} is damaged") as caught:
            next(values)
        assert caught.value.sequence_id == damaged


@pytest.mark.parametrize("missing", [(11, 13), (0, 20), (18, 19)])
def test_a_reader_steps_over_no_gap(log: Path, missing: tuple[int, int]) -> None:
    store = open_small(log)
    for number in range(*missing):
        put(store, "records", struct.pack(">Q", number), None)
    put(store, "records", struct.pack(">Q", 30), make_value(30))
    store.close()
    with open_reader(log) as reader:
        values = reader.values(0, missing[1])
        for _ in range(missing[0]):
            next(values)
        with pytest.raises(DamagedLogError, match=f"record {missing[0]} is missing"):
            next(values)


def test_what_stops_a_recovery_names_the_command(log: Path) -> None:
    flip(log, content(12))
    store = open_small(log)
    with pytest.raises(DamagedLogError, match=r"'immortal recover alice' says what can be done$") as caught:
        store.read(12, 1)
    assert caught.value.sequence_id == 12
    store.close()


@pytest.mark.parametrize("needle", [b"\x11\x22\x33\x44\x55\x66\x77\x02", b"output kept by 2;"])
@pytest.mark.parametrize("blob", [b"", b"a new blob"])
def test_the_id_of_a_checkpoint_that_was_left_out_is_free_again(log: Path, needle: bytes, blob: bytes) -> None:
    """The core never hears of it, so it gives its next checkpoint that ID."""
    flip(log, needle)
    store = open_small(log)
    if blob:
        store.write_checkpoint_chunk(2, 0, blob)
    store.commit(Transaction(checkpoint=CheckpointHeader(2, 19, len(blob), crc64(blob), 1)))
    store.close()
    store = open_small(log)
    assert [header.sequence_id for header in store.summary().checkpoints] == [4, 19]
    assert store.read_checkpoint_chunk(2, 0) == blob
    assert store.read_checkpoint_chunk(2, 1) == b""
    store.close()
    assert findings(log) == []


def test_a_damaged_trailer(log: Path) -> None:
    path = log / "data.mdb"
    data = path.read_bytes()
    trailer = make_value(13)[24 + len(content(13)) :]
    assert trailer in data
    path.write_bytes(data.replace(trailer, trailer[:5] + bytes((trailer[5] ^ 1,)) + trailer[6:]))
    with pytest.raises(DamagedLogError, match="the trailer of record 13 is damaged"):
        read_all(log)
    assert only_finding(log)[2].startswith("the trailer of record 13 is damaged")


def test_a_trailer_of_a_newer_version(log: Path) -> None:
    store = open_small(log)
    value = make_value(13)
    record, trailer = value[: 24 + len(content(13))], bytearray(value[24 + len(content(13)) : -8])
    trailer[0] = 2
    put(store, "records", struct.pack(">Q", 13), record + trailer + struct.pack("<Q", crc64(record[8:16] + trailer)))
    store.close()
    with pytest.raises(DamagedLogError, match="record 13 cannot be read: it has trailer version 2"):
        read_all(log)


def test_a_swapped_and_a_foreign_record(log: Path) -> None:
    store = open_small(log)
    put(store, "records", struct.pack(">Q", 14), make_value(15))
    put(store, "records", struct.pack(">Q", 16), make_value(16, committer_id=78))
    store.close()
    with pytest.raises(DamagedLogError, match="record 14 is in the wrong place: the log holds record 15 there"):
        read_all(log)
    messages = [message for _, _, message in findings(log)]
    assert len(messages) == 2
    assert "written by committer 78, this log belongs to committer 77" in messages[1]


def test_a_missing_record(log: Path) -> None:
    store = open_small(log)
    for number in (11, 12):
        put(store, "records", struct.pack(">Q", number), None)
    assert len(store.read(0, 1 << 20)) == 11
    with pytest.raises(DamagedLogError, match="record 11 is missing: the next one in the log is record 13"):
        store.read(11, 1 << 20)
    store.close()
    assert only_finding(log)[2].startswith("records 11 to 12 are missing; recovery will stop there")


@pytest.mark.parametrize("first", [True, False])
def test_missing_records_at_an_end(log: Path, first: bool) -> None:
    store = open_small(log)
    for number in range(3) if first else range(8, 20):
        put(store, "records", struct.pack(">Q", number), None)
    store.close()
    found = [finding for finding in findings(log) if finding[1].startswith("record")]
    if first:
        assert [(severity, place) for severity, place, _ in found] == [(Severity.DAMAGE, "record 0")]
    else:
        assert found[0][0] is Severity.FATAL
        assert "the last record is 7, but recovery starts from checkpoint 2 (after record 9)" in found[0][2]


def test_a_damaged_chunk(log: Path) -> None:
    flip(log, b"newer blob, second chunk", 7)
    store = open_small(log)
    assert [header.checkpoint_id for header in store.summary().checkpoints] == [1, 2]
    assert store.read_checkpoint_chunk(2, 0) == BLOB_CHUNKS[2][0]
    with pytest.raises(DamagedCheckpointError, match="chunk 1 of checkpoint 2 is damaged") as caught:
        store.read_checkpoint_chunk(2, 1)
    assert caught.value.checkpoint_id == 2
    store.trim(keep_checkpoints=1)  # the damaged one does not count: the older one and its records stay
    assert store.read_checkpoint_chunk(1, 0) == BLOB_CHUNKS[1][0]
    assert store.summary().first_sequence_id == 5
    store.close()
    severity, place, message = only_finding(log)
    assert (severity, place) == (Severity.DAMAGE, "checkpoint 2")
    assert message.endswith("recovery starts from checkpoint 1 (after record 4)")


def test_a_missing_chunk(log: Path) -> None:
    store = open_small(log)
    put(store, "chunks", log_format.CHUNK_KEY.pack(2, 1), None)
    with pytest.raises(DamagedCheckpointError, match="chunk 1 of checkpoint 2 is missing; it has 2"):
        store.read_checkpoint_chunk(2, 1)
    store.close()
    assert only_finding(log)[1] == "checkpoint 2"


def test_a_chunk_in_the_wrong_place(log: Path) -> None:
    store = open_small(log)
    first, second = (log_format.CHUNK_KEY.pack(2, index) for index in range(2))
    put(store, "chunks", second, log_format.seal_chunk(first, BLOB_CHUNKS[2][0]))
    with pytest.raises(DamagedCheckpointError, match="chunk 1 of checkpoint 2 is damaged"):
        store.read_checkpoint_chunk(2, 1)
    store.close()


def test_all_checkpoints_damaged(log: Path) -> None:
    flip(log, b"newer blob, second chunk")
    flip(log, b"older blob")
    found = findings(log)
    assert [severity for severity, _, _ in found] == [Severity.FATAL] * 2
    assert "there is no whole one to recover from" in found[0][2]


@pytest.mark.parametrize("needle", [b"\x11\x22\x33\x44\x55\x66\x77\x02", b"output kept by 2;"])
def test_a_damaged_header_or_its_outputs(log: Path, needle: bytes) -> None:
    flip(log, needle)
    store = open_small(log)
    assert [header.checkpoint_id for header in store.summary().checkpoints] == [1]
    assert len(store.problems) == 1
    assert store.problems[0].startswith("checkpoint 2 is left out")
    store.close()
    assert only_finding(log)[:2] == (Severity.DAMAGE, "checkpoint 2")


@pytest.mark.parametrize(
    ("needle", "offset_bytes", "table"),
    [
        (b"carol-acknowledged\0", 20, "acknowledged"),
        (b"peer-dave\0", 12, "peers"),
        (b"epoch", 7, "meta"),
    ],
)
def test_damaged_small_values(log: Path, needle: bytes, offset_bytes: int, table: str) -> None:
    flip(log, needle, offset_bytes)
    store = open_small(log)
    with pytest.raises(DamagedLogError, match=f"table '{table}' is damaged at key"):
        store.summary()
    store.close()
    severity, place, message = only_finding(log)
    assert (severity, place) == (Severity.FATAL, table)
    assert "the log cannot be opened" in message


def damage_source(log: Path, name: str, *, key: bytes | None = None, value: bytes = b"not what was written") -> None:
    store = open_small(log)
    if key is not None:
        put(store, "sources", log_format.name_key(name), None)
    put(store, "sources", key or log_format.name_key(name), value)
    store.close()


@pytest.mark.parametrize("bit", range(0, 8 * 25, 7))
def test_a_flipped_bit_of_a_position_is_put_right(log: Path, bit: int) -> None:
    """Wherever it is: in the key, the check bytes or the payload."""
    with open_reader(log) as reader:
        before = reader.summary().sources
    key = log_format.name_key("sender-of-3-")
    row = bytearray(key + log_format.seal(b"sources", key, (6, 1, 1)))
    row[bit // 8] ^= 1 << bit % 8
    damage_source(log, "sender-of-3-", key=bytes(row[: len(key)]), value=bytes(row[len(key) :]))
    with open_reader(log) as reader, pytest.raises(DamagedLogError, match="table 'sources' is damaged at key"):
        reader.summary()
    severity, place, message = only_finding(log)
    assert (severity, place) == (Severity.DAMAGE, "sources")
    assert message.endswith("one flipped bit was corrected, at the next start")
    store = open_small(log)
    assert "one flipped bit was corrected" in store.repairs[0]
    assert store.summary().sources == before
    store.close()
    assert findings(log) == []
    store = open_small(log)
    assert store.repairs == []
    store.close()


@pytest.mark.parametrize("name", ["bob", IMPULSES])
def test_a_damaged_position_is_known_from_the_records(log: Path, name: str) -> None:
    store = open_small(log)
    store.commit(Transaction(peers={"bob": 5}))
    store.close()
    damage_source(log, name)
    severity, place, message = only_finding(log)
    assert (severity, place) == (Severity.DAMAGE, "sources")
    assert f"'sources' is damaged at key {name!r}" in message
    assert message.endswith("position 20 is taken from record 19, at the next start")
    store = open_small(log)
    assert store.repairs[0].endswith("position 20 is taken from record 19")
    assert store.summary().sources[name] == SourcePosition(5 if name == "bob" else COMMITTER_ID, 0, 20)
    assert len(store.summary().sources) == 22
    store.close()
    assert findings(log) == []


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (Transaction(), "nothing else in the log has the ID of the log of 'bob'"),
        (
            Transaction(peers={"bob": 5}, stream_starts={"bob": StreamStart(3)}),
            "nothing else in the log has the ID of the log of 'bob'",
        ),
        (Transaction(peers={"bob": 5, "erin": 8}), "no kept record has a position of that stream"),
    ],
    ids=["whose log", "a stream that began anew", "how far"],
)
def test_positions_that_cannot_be_known_again_stop_the_start(log: Path, before: Transaction, why: str) -> None:
    store = open_small(log)
    store.commit(before)
    store.close()
    damage_source(log, "erin" if "erin" in before.peers else "bob")
    with pytest.raises(DamagedLogError, match=f"{why}: 'immortal recover alice' says what can be done"):
        open_small(log)
    severity, place, message = only_finding(log)
    assert (severity, place) == (Severity.FATAL, "sources")
    assert message.endswith("the log cannot be opened")


def test_positions_from_before_a_cut_stop_the_start(log: Path) -> None:
    store = open_small(log)
    store.commit(Transaction(peers={"bob": 5}))
    put(store, "meta", log_format.META_CUTS, log_format.seal(b"meta", log_format.META_CUTS, [7, 20]))
    store.close()
    damage_source(log, "bob")
    with pytest.raises(DamagedLogError, match="no kept record has a position of that"):
        open_small(log)


def test_positions_that_a_damaged_record_may_hold_stop_the_start(log: Path) -> None:
    store = open_small(log)
    store.commit(Transaction(peers={"bob": 5}))
    store.close()
    damage_source(log, "bob")
    flip(log, content(19))
    with pytest.raises(DamagedLogError, match="record 19 is damaged"):
        open_small(log)


def test_damaged_identity(log: Path) -> None:
    flip(log, b"committer_id", 14)
    for opener in (open_small, open_reader):
        with pytest.raises(DamagedLogError, match="'meta' is damaged at key 'committer_id'"):
            opener(log)
    assert only_finding(log)[1] == "meta"


def test_damaged_impulses(log: Path) -> None:
    flip(log, b"an impulse's payload", 3)
    store = open_small(log)
    with pytest.raises(DamagedLogError, match="impulses to 'carol' at position 1 are damaged"):
        store.summary()
    store.commit(Transaction(acknowledged={"carol": 1}))
    assert store.summary().impulses[0].payload == b""  # nobody needs those bytes any more
    store.close()
    assert only_finding(log)[1] == "impulses"


def test_positions_that_do_not_fit(log: Path) -> None:
    store = open_small(log)
    store.commit(Transaction(sources={"bob": SourcePosition(5, 1, 19)}))
    store.close()
    assert "table 'sources' says 19, the trailers end at 20" in only_finding(log)[2]
    store = open_small(log)
    store.commit(
        Transaction(records=[(20, make_value(20, first_position=23))], sources={"bob": SourcePosition(5, 1, 23)})
    )
    store.close()
    messages = [message for _, _, message in findings(log)]
    assert "the stream from 'bob' continues at position 23, expected 21" in messages[0]
    assert "the impulses to oneself continues at position 23" in messages[1]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file(log: Path, share: float) -> None:
    store = open_small(log)
    store.write_checkpoint_chunk(3, 0, bytes(300_000))  # so that the pages at the end are in use
    store.close()
    path = log / "data.mdb"
    os.truncate(path, int(path.stat().st_size * share))
    for opener in (open_small, open_reader):
        with pytest.raises(LogFormatError, match=r"is truncated|not an LMDB file|no log in|no complete log"):
            opener(log)
    assert findings(log)[0][0] is Severity.FATAL


def test_a_file_that_is_short_by_free_pages_only(tmp_path: Path) -> None:
    """LMDB may count pages at the end that it freed without ever writing them."""
    store = create_log(tmp_path, "alice", committer_id=COMMITTER_ID, map_size_bytes=1 << 20)
    for number in range(20):
        store.commit(Transaction(records=[(number, make_value(number))]))
    for _ in range(3):  # so that the pages of the last records are free and no longer kept for a reader
        for number in range(10, 20):
            put(store, "records", struct.pack(">Q", number), None)
    size_bytes = (tmp_path / "data.mdb").stat().st_size
    store.close()
    (tmp_path / "high-water-mark").unlink()  # records were removed by hand
    if structure_problems(tmp_path / "data.mdb") is None:
        pytest.skip("this py-lmdb has no walk over the pages")
    cuts = 0
    for cut in range(size_bytes, 8192, -4096):
        os.truncate(tmp_path / "data.mdb", cut)
        try:
            check_data_file(tmp_path / "data.mdb")
        except LogFormatError:
            break
        cuts += cut < size_bytes
        store = open_small(tmp_path)
        assert len(store.read(0, 1 << 20)) == 10
        assert (tmp_path / "data.mdb").stat().st_size == size_bytes  # no page is beyond the end any more
        store.close()
    assert cuts


VERIFY = """
import sys
from immortal.coordinator.log.verify import verify_log
for folder in sys.argv[1:]:
    print(folder, flush=True)
    print(len(list(verify_log(folder).findings())), flush=True)
"""


def test_random_damage_is_never_passed_on(log: Path) -> None:
    """Whatever byte is damaged, verifying ends with findings or with the very same records; it never crashes."""
    whole, folders = (log / "data.mdb").read_bytes(), []
    for seed in range(effort(40)):
        choice = random.Random(seed)
        data = bytearray(whole)
        for _ in range(choice.choice([1, 1, 3, 50])):
            data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
        folders.append(folder := log / f"damaged-{seed}")
        shutil.copytree(log, folder, ignore=shutil.ignore_patterns("damaged-*"))
        (folder / "data.mdb").write_bytes(data)
    command = [sys.executable, "-c", VERIFY, *map(str, folders)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    said = result.stdout.splitlines()
    assert result.returncode == 0, (said[-1], result.stderr)
    assert said[::2] == list(map(str, folders))
    for folder, findings_count in zip(folders, said[1::2], strict=True):
        if findings_count == "0":
            assert read_all(folder) == 20, folder


def test_a_log_of_another_user_is_not_taken_for_damaged(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`recover` advised to restore it from a copy."""

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(LogUnavailableError, match="may not use the log in"):
        list(verify_log(log).findings())


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    assert only_finding(tmp_path) == (Severity.FATAL, "file", f"there is no log in {tmp_path}")
    (tmp_path / "data.mdb").write_bytes(b"garbage" * 5000)
    assert "not an LMDB file" in only_finding(tmp_path)[2]
    with pytest.raises(LogError):
        open_small(tmp_path)
