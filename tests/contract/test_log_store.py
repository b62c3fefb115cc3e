"""What every LogStore promises, on the one in memory and the one in LMDB; then what only the one on disk can show."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from immortal.coordinator.core.errors import (
    DamagedCheckpointError,
    DamagedLogError,
    InvariantError,
    LogError,
    LogFormatError,
    LogFullError,
    LogIdentityError,
    LogLockedError,
    LogSyncError,
)
from immortal.coordinator.core.interfaces import (
    CheckpointHeader,
    ImpulseBatch,
    LogStore,
    OutputBatch,
    OutputMark,
    SourcePosition,
    Transaction,
    VersionStart,
)
from immortal.coordinator.fault_points import FaultPoint
from immortal.coordinator.log import backend as budget_module
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import reader as reader_module
from immortal.coordinator.log.backend import Append, Options, Place, Severity
from immortal.coordinator.log.backends import lmdb as lmdb_backend
from immortal.coordinator.log.backends.lmdb.files import FILE_NAME as MARK_FILE_NAME
from immortal.coordinator.log.cut import LogCutter, cut_checkpoint_ids, rows_removed_by_cut
from immortal.coordinator.log.identity import first_and_last_sequence_id
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log.verify import back_up, verify_log
from immortal.log import RowLogStore, TrimmedError, create_log, open_log, open_reader, verify_value
from immortal.protocol.checksum import crc64
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchSource, Trailer, encode_trailer
from tests.helpers.memory_logs import damage_chunk, damage_record
from tests.helpers.toy_backend import ToyPlace

COMMITTER_ID = 77
MAP_SIZE_BYTES = 1 << 20
REPOSITORY = Path(__file__).parents[2]


def make_value(sequence_id: int, content: bytes = b"content", batches: list[BatchSource] | None = None) -> bytes:
    record = encode_record(COMMITTER_ID, sequence_id, content)
    return record + encode_trailer(Trailer(1, batches or []), int.from_bytes(record[8:16], "little"))


def records(first: int, end: int, content: bytes = b"content") -> Transaction:
    return Transaction(records=[(number, make_value(number, content)) for number in range(first, end)])


def write_checkpoint(
    store: LogStore,
    checkpoint_id: int,
    sequence_id: int,
    chunks: list[bytes],
    outputs: dict[str, OutputMark] | None = None,
    unacknowledged: dict[str, list[OutputBatch]] | None = None,
    *,
    time_ns: int = 123,
    version: int = 1,
) -> CheckpointHeader:
    for index, chunk in enumerate(chunks):
        store.write_checkpoint_chunk(checkpoint_id, index, chunk)
    blob = b"".join(chunks)
    header = CheckpointHeader(
        checkpoint_id, sequence_id, len(blob), crc64(blob), time_ns, outputs or {}, unacknowledged or {}, version
    )
    store.commit(Transaction(checkpoint=header))
    return header


def read_blob(store: LogStore, checkpoint_id: int) -> bytes:
    blob, index = b"", 0
    while chunk := store.read_checkpoint_chunk(checkpoint_id, index):
        blob, index = blob + chunk, index + 1
    return blob


def trim_all(store: LogStore, keep_checkpoints: int | None, keep_since_ns: int | None = None) -> int:
    steps = 1
    while store.trim(keep_checkpoints=keep_checkpoints, keep_since_ns=keep_since_ns):
        steps += 1
    return steps


class Bench:
    """A store, and the ways to close and open it again, and to cut it off by hand."""

    def __init__(
        self, store: LogStore, reopen: Callable[[LogStore], LogStore], cut: Callable[[LogStore, int], LogStore]
    ) -> None:
        self.store = store
        self._reopen = reopen
        self._cut = cut

    def cut(self, sequence_id: int) -> LogStore:
        self.store = self._cut(self.store, sequence_id)
        return self.store

    def reopen(self) -> LogStore:
        self.store = self._reopen(self.store)
        return self.store


def open_small(folder: Path) -> RowLogStore:
    return open_log(folder, "alice", map_size_bytes=MAP_SIZE_BYTES)


@pytest.fixture(params=["memory", "lmdb", "toy", "postgresql"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "memory":

        def crash(store: LogStore) -> LogStore:
            assert isinstance(store, MemoryLogStore)
            return store.crash()

        def cut_in_memory(store: LogStore, sequence_id: int) -> LogStore:
            assert isinstance(store, MemoryLogStore)
            store.cut(sequence_id)
            return store.crash()

        bench = Bench(MemoryLogStore(COMMITTER_ID), crash, cut_in_memory)
    elif request.param in ("toy", "postgresql"):
        place: Place = ToyPlace(str(tmp_path / "log"))
        if request.param == "postgresql":
            place = place_of(request.getfixturevalue("postgres").url(f"store-{request.node.name}"))

        def open_again(store: LogStore) -> LogStore:
            store.close()
            return open_log(place, "alice")

        def cut_rows(store: LogStore, sequence_id: int) -> LogStore:
            store.close()
            backend = place.open("alice", Options())
            with backend.view() as view:
                changes = rows_removed_by_cut(view, sequence_id, cut_checkpoint_ids(view, sequence_id))
                last = first_and_last_sequence_id(view)[1]
            backend.append(Append(last, backend.fence, puts=changes.puts, deletes=changes.deletes))
            backend.close()
            return open_log(place, "alice")

        bench = Bench(create_log(place, "alice", committer_id=COMMITTER_ID), open_again, cut_rows)
    else:

        def close_and_open(store: LogStore) -> LogStore:
            store.close()
            return open_small(tmp_path / "log")

        def cut_and_open(store: LogStore, sequence_id: int) -> LogStore:
            store.close()
            with LogCutter(tmp_path / "log", "alice") as cutter:
                cutter.cut(cutter.plan(sequence_id, force=True))
            return open_small(tmp_path / "log")

        store = create_log(tmp_path / "log", "alice", committer_id=COMMITTER_ID, map_size_bytes=MAP_SIZE_BYTES)
        bench = Bench(store, close_and_open, cut_and_open)
    yield bench
    bench.store.close()


# --- both stores ---


def test_a_new_log(bench: Bench) -> None:
    for _ in range(2):
        summary = bench.store.summary()
        assert (summary.committer_id, summary.epoch, summary.extensions) == (COMMITTER_ID, 0, None)
        assert (summary.first_sequence_id, summary.last_sequence_id) == (0, -1)
        assert not summary.checkpoints
        assert not summary.sources
        assert not summary.acknowledged
        assert not summary.peers
        assert not summary.impulses
        assert not summary.versions
        assert summary.cut_sequence_id is None
        assert bench.store.read(0, 1 << 20) == []
        assert not bench.store.trim(keep_checkpoints=1)
        bench.reopen()


def test_everything_committed_is_there_after_reopening(bench: Bench) -> None:
    bench.store.commit(records(0, 3))
    bench.store.commit(
        Transaction(
            records=[(3, make_value(3))],
            sources={"bob": SourcePosition(5, 2, 9), "": SourcePosition(COMMITTER_ID, 1, 4)},
            acknowledged={"bob": 3, "": 2},
            peers={"bob": 5},
            epoch=7,
            extensions=frozenset({64, 65}),
        )
    )
    bench.store.commit(Transaction(sources={"bob": SourcePosition(5, 3, 10)}))
    summary = bench.reopen().summary()
    assert (summary.first_sequence_id, summary.last_sequence_id, summary.epoch) == (0, 3, 7)
    assert summary.sources == {"bob": SourcePosition(5, 3, 10), "": SourcePosition(COMMITTER_ID, 1, 4)}
    assert summary.acknowledged == {"bob": 3, "": 2}
    assert summary.peers == {"bob": 5}
    assert summary.extensions == frozenset({64, 65})
    assert summary.last_time_ns == 1
    values = bench.store.read(0, 1 << 20)
    assert values == [make_value(number) for number in range(4)]
    header, trailer = verify_value(values[2], 2, COMMITTER_ID)
    assert (header.sequence_id, trailer.time_ns) == (2, 1)


def test_ranges_and_size_limits(bench: Bench) -> None:
    bench.store.commit(records(0, 10, b"x" * 100))
    size_bytes = len(make_value(0, b"x" * 100))
    assert bench.store.read(3, size_bytes * 2) == [make_value(3, b"x" * 100), make_value(4, b"x" * 100)]
    assert len(bench.store.read(3, size_bytes * 3 - 1)) == 2
    assert bench.store.read(9, 0) == [make_value(9, b"x" * 100)]
    assert len(bench.store.read(0, 1 << 20)) == 10
    assert bench.store.read(10, 1 << 20) == []


@pytest.mark.parametrize(
    "wrong",
    [
        [(1, make_value(1))],
        [(0, make_value(0)), (2, make_value(2))],
        [(0, make_value(1))],
        [(0, b"short")],
        [(0, struct.pack("<iiQq", COMMITTER_ID, 10, 0, 0))],  # a header alone
        [(0, encode_record(COMMITTER_ID, 0, b"no trailer"))],
        [(0, encode_record(COMMITTER_ID + 1, 0, b"") + bytes(20))],
    ],
)
def test_records_that_do_not_belong_there_are_a_bug(bench: Bench, wrong: list[tuple[int, bytes]]) -> None:
    with pytest.raises(InvariantError, match=r"record \d+ (is to be written|has only \d+ bytes|says it is)"):
        bench.store.commit(Transaction(records=wrong))
    bench.store.commit(records(0, 1))
    assert bench.reopen().summary().last_sequence_id == 0


def test_checkpoints_in_chunks(bench: Bench) -> None:
    bench.store.commit(records(0, 2))
    outputs = {"bob": OutputMark(5, (1 << 64) - 1)}
    unacknowledged = {"bob": [OutputBatch(4, 2, b"p" * 3_000_000)], "": [OutputBatch(1, 1, b"")]}
    empty = write_checkpoint(bench.store, 1, -1, [])
    several = write_checkpoint(bench.store, 2, 1, [b"a" * 5000, b"b" * 70000, b"c"], outputs, unacknowledged)
    for _ in range(2):
        summary = bench.store.summary()
        assert list(summary.checkpoints) == [empty, several]
        assert summary.checkpoints[1].unacknowledged["bob"] == unacknowledged["bob"]
        assert read_blob(bench.store, 1) == b""
        assert read_blob(bench.store, 2) == b"a" * 5000 + b"b" * 70000 + b"c"
        assert bench.store.read_checkpoint_chunk(2, 7) == b""
        with pytest.raises(DamagedCheckpointError, match="checkpoint 3 is not in the log"):
            bench.store.read_checkpoint_chunk(3, 0)
        bench.reopen()


def test_a_half_written_checkpoint_vanishes(bench: Bench) -> None:
    write_checkpoint(bench.store, 1, -1, [b"whole"])
    for index in range(3):
        bench.store.write_checkpoint_chunk(2, index, b"half" * 1000)
    summary = bench.reopen().summary()
    assert [header.checkpoint_id for header in summary.checkpoints] == [1]
    with pytest.raises(DamagedCheckpointError):
        bench.store.read_checkpoint_chunk(2, 0)
    write_checkpoint(bench.store, 2, -1, [b"again"])
    assert read_blob(bench.store, 2) == b"again"


def test_a_checkpoint_can_begin_anew(bench: Bench) -> None:
    for index in range(3):
        bench.store.write_checkpoint_chunk(1, index, b"first attempt")
    write_checkpoint(bench.store, 1, -1, [b"second"])
    assert read_blob(bench.reopen(), 1) == b"second"


def test_a_header_without_its_blob_is_a_bug(bench: Bench) -> None:
    bench.store.write_checkpoint_chunk(1, 0, b"blob")
    for header in (
        CheckpointHeader(1, -1, 5, crc64(b"blob"), 0),
        CheckpointHeader(1, -1, 4, crc64(b"blub"), 0),
        CheckpointHeader(2, -1, 4, crc64(b"blob"), 0),
    ):
        with pytest.raises(InvariantError):
            bench.store.commit(Transaction(checkpoint=header))
    with pytest.raises(InvariantError):
        bench.store.write_checkpoint_chunk(1, 2, b"after a gap")
    bench.store.commit(Transaction(checkpoint=CheckpointHeader(1, -1, 4, crc64(b"blob"), 0)))
    with pytest.raises(InvariantError):
        bench.store.write_checkpoint_chunk(1, 0, b"over a complete one")
    assert read_blob(bench.store, 1) == b"blob"


def test_impulses(bench: Bench) -> None:
    rows = [
        ImpulseBatch(1, 1, b"bo", "bo"),
        ImpulseBatch(2, 3, b"two to four", "bob"),
        ImpulseBatch(300, 2, b"300 and 301", "bob"),
        ImpulseBatch(1, 1, b"", "carol"),
    ]
    bench.store.commit(Transaction(impulses=list(reversed(rows))))
    assert list(bench.reopen().summary().impulses) == rows
    bench.store.commit(Transaction(acknowledged={"bob": 4, "carol": 1}))
    acknowledged = ImpulseBatch(2, 3, b"", "bob")  # its positions still count, its bytes do not
    assert list(bench.store.summary().impulses) == [rows[0], acknowledged, rows[2], rows[3]]
    write_checkpoint(bench.store, 1, -1, [], {"bob": OutputMark(300, 0), "carol": OutputMark(1, 0)})
    trim_all(bench.store, 1)
    assert list(bench.reopen().summary().impulses) == [rows[0], rows[2]]


def test_impulses_are_removed_before_new_ones_are_written(bench: Bench) -> None:
    kept = ImpulseBatch(1, 1, b"kept", "bob")
    bench.store.commit(Transaction(impulses=[kept, ImpulseBatch(2, 2, b"removed", "bob")]))
    moved = ImpulseBatch(2, 1, b"another in its place", "bob")
    bench.store.commit(Transaction(impulses=[moved], impulses_removed=[("bob", 2), ("carol", 7)]))
    assert list(bench.reopen().summary().impulses) == [kept, moved]
    bench.store.commit(Transaction(impulses_removed=[("bob", 1)]))
    assert list(bench.reopen().summary().impulses) == [moved]


def test_a_checkpoint_keeps_the_calls_that_were_open(bench: Bench) -> None:
    bench.store.write_checkpoint_chunk(1, 0, b"one")
    header = CheckpointHeader(1, -1, 3, crc64(b"one"), 1, open_calls={"bob": [3, 9]})
    bench.store.commit(Transaction(checkpoint=header))
    assert bench.store.summary().checkpoints[-1].open_calls == {"bob": [3, 9]}
    assert bench.reopen().summary().checkpoints[-1].open_calls == {"bob": [3, 9]}


def test_versions_in_the_order_in_which_they_began(bench: Bench) -> None:
    write_checkpoint(bench.store, 1, -1, [b"one"], version=1)
    starts = [
        VersionStart(1, -1, "shop:Cart"),
        VersionStart(2, 1, "shop:NewCart"),
        VersionStart(1, 3, "shop:Cart"),  # a downgrade
        VersionStart(2, 3),
    ]
    for number, start in enumerate(starts):
        bench.store.commit(Transaction(version=start, records=records(number, number + 1).records))
    write_checkpoint(bench.store, 2, 3, [b"two"], version=2)
    trim_all(bench.store, 1)
    for _ in range(2):
        summary = bench.store.summary()
        assert list(summary.versions) == starts
        assert [(header.checkpoint_id, header.version) for header in summary.checkpoints] == [(2, 2)]
        bench.reopen()


@pytest.mark.parametrize(
    ("keep_checkpoints", "keep_since_ns", "kept_ids"),
    [
        (1, 500, [5]),
        (1, 400, [4, 5]),
        (1, 399, [3, 4, 5]),
        (1, 99, [1, 2, 3, 4, 5]),  # none is that old: a replay from there needs all there is
        (4, 500, [2, 3, 4, 5]),  # what the number keeps, the time does not take away
        (None, 250, [2, 3, 4, 5]),
        (None, 10_000, [5]),  # the newest always stays
        (None, None, [1, 2, 3, 4, 5]),
    ],
)
def test_trim_by_time(
    bench: Bench, keep_checkpoints: int | None, keep_since_ns: int | None, kept_ids: list[int]
) -> None:
    bench.store.commit(records(0, 12))
    for number in range(1, 6):
        write_checkpoint(bench.store, number, 2 * number, [b"blob"], time_ns=number * 100)
    trim_all(bench.store, keep_checkpoints, keep_since_ns)
    summary = bench.reopen().summary()
    assert [header.checkpoint_id for header in summary.checkpoints] == kept_ids
    trimmed = keep_checkpoints is not None or keep_since_ns is not None
    assert summary.first_sequence_id == (2 * kept_ids[0] + 1 if trimmed else 0)
    assert summary.last_sequence_id == 11


def test_a_log_that_was_cut_off(bench: Bench) -> None:
    bench.store.commit(records(0, 10))
    impulse = ImpulseBatch(1, 1, b"impulse", "carol")
    bench.store.commit(
        Transaction(
            sources={"bob": SourcePosition(5, 1, 9)},
            acknowledged={"carol": 3},
            peers={"carol": 8},
            impulses=[impulse],
            epoch=4,
        )
    )
    bench.store.commit(Transaction(version=VersionStart(1, -1)))
    write_checkpoint(bench.store, 1, 2, [b"one"])
    write_checkpoint(bench.store, 2, 6, [b"two"], version=2)
    bench.store.commit(Transaction(version=VersionStart(2, 6)))
    bench.cut(6)
    for _ in range(2):
        summary = bench.reopen().summary()
        assert (summary.first_sequence_id, summary.last_sequence_id, summary.cut_sequence_id) == (0, 5, 6)
        assert [header.checkpoint_id for header in summary.checkpoints] == [1]
        assert list(summary.versions) == [VersionStart(1, -1)]
        # What was cut off counts as received, and as sent.
        assert summary.sources == {"bob": SourcePosition(5, 1, 9)}
        assert (summary.acknowledged, summary.peers, summary.epoch) == ({"carol": 3}, {"carol": 8}, 4)
        assert bench.store.read(6, 1 << 20) == []
        assert len(bench.store.read(0, 1 << 20)) == 6
    bench.store.commit(records(6, 9, b"new"))
    assert bench.cut(8).summary().cut_sequence_id == 6, "the first cut is not healed yet"
    write_checkpoint(bench.store, 2, 7, [b"another two"])
    bench.store.commit(Transaction(cut_healed=True))
    summary = bench.reopen().summary()
    assert (summary.last_sequence_id, summary.cut_sequence_id) == (7, None)
    assert read_blob(bench.store, 2) == b"another two"
    assert bench.cut(3).summary().cut_sequence_id == 3


def test_a_cut_at_the_first_record(bench: Bench) -> None:
    bench.store.commit(records(0, 2))
    write_checkpoint(bench.store, 1, -1, [b"one"])
    assert bench.cut(0).summary().cut_sequence_id == 0
    bench.store.commit(records(0, 1, b"new"))
    summary = bench.reopen().summary()
    assert (summary.first_sequence_id, summary.last_sequence_id, summary.cut_sequence_id) == (0, 0, 0)


def test_trim_keeps_what_is_needed(bench: Bench) -> None:
    bench.store.commit(records(0, 10))
    write_checkpoint(bench.store, 1, 1, [b"one"], {"bob": OutputMark(1, 1)})
    write_checkpoint(bench.store, 2, 4, [b"two"], {"bob": OutputMark(2, 1)}, {"bob": [OutputBatch(2, 1, b"p")]})
    write_checkpoint(bench.store, 3, 7, [b"three"])
    trim_all(bench.store, None)
    trim_all(bench.store, 4)
    assert len(bench.store.summary().checkpoints) == 3
    assert bench.store.summary().first_sequence_id == 2
    trim_all(bench.store, 2)
    for _ in range(2):
        summary = bench.store.summary()
        assert [header.checkpoint_id for header in summary.checkpoints] == [2, 3]
        assert summary.checkpoints[0].unacknowledged == {"bob": [OutputBatch(2, 1, b"p")]}
        assert (summary.first_sequence_id, summary.last_sequence_id) == (5, 9)
        assert bench.store.read(5, 1 << 20) == [make_value(number) for number in range(5, 10)]
        assert read_blob(bench.store, 2) == b"two"
        with pytest.raises(DamagedLogError, match="record 4 is missing"):
            bench.store.read(4, 1 << 20)
        with pytest.raises(DamagedCheckpointError):
            bench.store.read_checkpoint_chunk(1, 0)
        bench.reopen()
    with pytest.raises(InvariantError):
        bench.store.trim(keep_checkpoints=0)


def test_a_log_without_records_goes_on_where_it_was(bench: Bench) -> None:
    bench.store.commit(records(0, 3))
    write_checkpoint(bench.store, 1, 2, [b"all"])
    trim_all(bench.store, 1)
    summary = bench.reopen().summary()
    assert (summary.first_sequence_id, summary.last_sequence_id) == (3, 2)
    assert bench.store.read(3, 1 << 20) == []
    bench.store.commit(records(3, 4))
    assert bench.reopen().read(3, 1 << 20) == [make_value(3)]


def test_trim_goes_in_bounded_steps(bench: Bench) -> None:
    for first in range(0, 10_000, 2500):
        bench.store.commit(records(first, first + 2500, b""))
    write_checkpoint(bench.store, 1, 9_997, [b"x"])
    seen = []
    while bench.store.trim(keep_checkpoints=1):
        seen.append(bench.store.summary().first_sequence_id)
    assert seen == [budget_module.STEP_ROWS_MAX * steps for steps in range(1, 10)]
    assert bench.reopen().summary().first_sequence_id == 9_998


def test_a_closed_store_refuses(bench: Bench) -> None:
    bench.store.close()
    bench.store.close()
    for call in (
        bench.store.summary,
        lambda: bench.store.commit(Transaction()),
        lambda: bench.store.read(0, 1),
        lambda: bench.store.write_checkpoint_chunk(1, 0, b"x"),
        lambda: bench.store.read_checkpoint_chunk(1, 0),
        lambda: bench.store.trim(keep_checkpoints=1),
    ):
        with pytest.raises(LogError, match="closed"):
            call()
    bench.reopen()


def test_memory_a_failed_commit_leaves_nothing_and_refuses_more() -> None:
    store = MemoryLogStore(COMMITTER_ID)
    store.commit(records(0, 1))
    store.backend.fails_next = LogSyncError("no")
    for _ in range(2):
        with pytest.raises(LogSyncError, match="no"):
            store.commit(records(1, 2))
    assert store.crash().summary().last_sequence_id == 0


def test_memory_a_crash_leaves_the_disk_as_it_is() -> None:
    store = MemoryLogStore(COMMITTER_ID)
    store.free_bytes = 5
    after = store.crash()
    assert (after.free_bytes, after.backend.space().free_bytes) == (5, 5)


def test_memory_damage_is_found() -> None:
    store = MemoryLogStore(COMMITTER_ID)
    store.commit(records(0, 3))
    write_checkpoint(store, 1, -1, [b"blob"])
    write_checkpoint(store, 2, -1, [b"blob"])
    damage_record(store, 1, 30)
    damage_chunk(store, 2, 0)
    assert len(store.read(0, 1 << 20)) == 1
    with pytest.raises(DamagedLogError, match="record 1 is damaged") as caught:
        store.read(1, 1 << 20)
    assert caught.value.sequence_id == 1
    with pytest.raises(DamagedCheckpointError):
        store.read_checkpoint_chunk(2, 0)
    trim_all(store, 1)
    assert read_blob(store, 1) == b"blob"


# --- LMDB only ---


def in_process(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def send_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


HOLD = """
import sys
from immortal.log import open_log
store = open_log(sys.argv[1], "alice", map_size_bytes=1 << 20)
print("open", flush=True)
sys.stdin.readline()
"""


def new_log(folder: Path, **options: int) -> RowLogStore:
    return create_log(folder, "alice", committer_id=COMMITTER_ID, **{"map_size_bytes": MAP_SIZE_BYTES, **options})


def test_a_second_coordinator_is_kept_out(tmp_path: Path) -> None:
    new_log(tmp_path).close()
    process = in_process(HOLD, tmp_path)
    assert read_line(process) == "open"
    with pytest.raises(LogLockedError) as caught:
        open_small(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert f"process {process.pid}:" in str(caught.value)
    process.kill()
    process.wait()
    process.communicate()
    open_small(tmp_path).close()  # the kernel dropped the dead process's lock


def test_one_process_cannot_open_a_log_twice(tmp_path: Path) -> None:
    store = new_log(tmp_path)
    with pytest.raises(LogLockedError):
        open_small(tmp_path)
    with pytest.raises(LogLockedError, match="in this process"):
        open_reader(tmp_path)
    store.commit(records(0, 1))
    store.close()


WRITE_ON_DEMAND = """
import sys
from immortal.coordinator.core.interfaces import Transaction
from immortal.log import open_log
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import Trailer, encode_trailer
store = open_log(sys.argv[1], "alice", map_size_bytes=1 << 20)
print("open", flush=True)
for number in range(1000):
    if not sys.stdin.readline():
        break
    record = encode_record(77, number, bytes(400_000))
    trailer = encode_trailer(Trailer(0), int.from_bytes(record[8:16], "little"))
    store.commit(Transaction(records=[(number, record + trailer)]))
    print(number, flush=True)
"""


def test_a_reader_beside_a_live_writer_follows_its_growth(tmp_path: Path) -> None:
    new_log(tmp_path).close()
    process = in_process(WRITE_ON_DEMAND, tmp_path)
    assert read_line(process) == "open"
    with open_reader(tmp_path) as reader:
        assert reader.identity.instance_name == "alice"
        scan = reader.records(0)
        for number in range(12):  # 12 * 400 kB do not fit into the first map of 1 MiB
            send_line(process)
            assert read_line(process) == str(number)
            logged = next(scan)
            assert (logged.sequence_id, logged.problem) == (number, None)
            assert reader.summary().last_sequence_id == number
            assert len(reader.read(number, 1)) == 1
        assert next(scan, None) is None
    assert verify_log(tmp_path).findings().__next__().message.startswith("a coordinator writes this log")
    process.communicate()


def test_a_reader_shows_ranges(tmp_path: Path) -> None:
    store = new_log(tmp_path)
    store.commit(records(0, 10_000, b""))
    write_checkpoint(store, 1, 4, [b"one ", b"blob"])
    trim_all(store, 1)
    store.close()
    with open_reader(tmp_path, "alice") as reader:
        assert [logged.sequence_id for logged in reader.records()] == list(range(5, 10_000))
        assert [logged.sequence_id for logged in reader.records(3, 7)] == [5, 6, 7]
        assert [logged.sequence_id for logged in reader.records(9_998)] == [9_998, 9_999]
        assert b"".join(reader.checkpoint_chunks(1)) == b"one blob"
        with pytest.raises(DamagedLogError, match="record 4 is missing"):
            reader.read(4, 1)
    with pytest.raises(LogIdentityError, match="'alice', not to 'bob'"):
        open_reader(tmp_path, "bob")


def test_a_reader_gives_values_without_a_gap(tmp_path: Path) -> None:
    store = new_log(tmp_path)
    store.commit(records(0, 10_000, b""))
    write_checkpoint(store, 1, 4, [b"one"])
    trim_all(store, 1)
    store.close()
    with open_reader(tmp_path, "alice") as reader:
        assert reader.last_sequence_id() == 9_999
        assert list(reader.values(5)) == [make_value(number, b"") for number in range(5, 10_000)]
        assert list(reader.values(9_997, 9_998)) == [make_value(9_997, b""), make_value(9_998, b"")]
        assert list(reader.values(9_999, 20_000)) == [make_value(9_999, b"")]
        assert list(reader.values(10_000)) == list(reader.values(7, 6)) == []
        for first, last in ((4, None), (0, 9), (1, 3)):
            with pytest.raises(TrimmedError, match=f"record {first} is not in the log .* begins with record 5"):
                next(reader.values(first, last))
        with pytest.raises(TrimmedError, match="checkpoint 2 is not in the log"):
            next(reader.checkpoint_chunks(2))


TRIM_ON_DEMAND = """
import sys
from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.log import open_log
from immortal.protocol.checksum import crc64
store = open_log(sys.argv[1], "alice", map_size_bytes=1 << 20)
print("open", flush=True)
for checkpoint_id, sequence_id in ((2, 4999), (3, 5001)):
    sys.stdin.readline()
    store.write_checkpoint_chunk(checkpoint_id, 0, b"blob")
    header = CheckpointHeader(checkpoint_id, sequence_id, 4, crc64(b"blob"), 0)
    store.commit(Transaction(checkpoint=header))
    while store.trim(keep_checkpoints=1):
        pass
    print("trimmed", flush=True)
"""


def test_a_scan_calls_nothing_missing_that_was_trimmed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "SCAN_ROWS_MAX", 1)
    log = "memory:trimmed-meanwhile"  # which is written and read in one process
    store = create_log(log, "alice", committer_id=COMMITTER_ID)
    store.commit(records(0, 10))
    with open_reader(log) as reader:
        scan = reader.records()
        assert next(scan).sequence_id == 0
        write_checkpoint(store, 1, 4, [b"one"])
        trim_all(store, 1)
        assert [(logged.sequence_id, logged.problem) for logged in scan] == [(number, None) for number in range(5, 10)]
    place_of(log).remove()


def mapped_bytes(path: Path) -> int:
    """How much of the file is in this process's memory, by its mappings."""
    size_bytes, is_its = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_its = line.split()[4] == str(path.stat().st_ino)
        elif is_its and line.startswith("Rss:"):
            size_bytes += int(line.split()[1]) * 1024
    return size_bytes


def test_what_reading_has_mapped_is_given_back(tmp_path: Path) -> None:
    store = new_log(tmp_path)
    store.commit(records(0, 30, bytes(50_000)))  # of a file below 1 MiB nothing is given back
    path = tmp_path / "data.mdb"
    assert len(store.read(0, 2 << 20)) == 30
    assert mapped_bytes(path) > 1_200_000
    store.backend.release()
    assert mapped_bytes(path) == 0
    store.close()
    with open_reader(tmp_path) as reader:
        assert len(list(reader.values(0))) == 30
        assert mapped_bytes(path) > 1_200_000
        reader.release()
        assert mapped_bytes(path) == 0


def test_a_reader_beside_a_trimming_writer_says_what_is_gone(tmp_path: Path) -> None:
    store = new_log(tmp_path)
    for first in range(0, 10_000, 1000):
        store.commit(records(first, first + 1000, b""))
    write_checkpoint(store, 1, -1, [b"one", b"two"])
    store.close()
    process = in_process(TRIM_ON_DEMAND, tmp_path)
    assert read_line(process) == "open"
    with open_reader(tmp_path) as reader:
        values, chunks = reader.values(0), reader.checkpoint_chunks(1)
        assert (next(values), next(chunks)) == (make_value(0, b""), b"one")
        send_line(process)
        assert read_line(process) == "trimmed"
        with pytest.raises(TrimmedError, match="checkpoint 1 is not in the log"):
            next(chunks)
        with pytest.raises(TrimmedError, match="begins with record 5000"):
            list(values)
        values = reader.values(5_000)
        assert next(values) == make_value(5_000, b"")
        send_line(process)
        assert read_line(process) == "trimmed"
        assert len(list(values)) == 4_999, "what was read in one go before it was trimmed may still be given"
        assert [header.checkpoint_id for header in reader.summary().checkpoints] == [3]
    process.communicate()


def test_the_map_grows_during_commits(tmp_path: Path) -> None:
    store = new_log(tmp_path)
    content = os.urandom(300_000)
    for number in range(20):
        store.commit(records(number, number + 1, content))
        assert store.read(number, 1) == [make_value(number, content)]
    store.close()
    store = open_small(tmp_path)
    assert len(store.read(0, 1 << 30)) == 20
    store.close()


def test_the_map_grows_during_chunks_and_for_one_large_record(tmp_path: Path) -> None:
    store = new_log(tmp_path)
    write_checkpoint(store, 1, -1, [bytes((index,)) * 500_000 for index in range(10)])
    store.commit(records(0, 1, bytes(20_000_000)))
    assert len(read_blob(store, 1)) == 5_000_000
    assert store.read(0, 1) == [make_value(0, bytes(20_000_000))]
    store.close()


def commit_until_full(store: RowLogStore, record_count: int, size_bytes: int, message: str) -> int:
    """Commit until LogFullError; the last sequence ID that was committed."""
    committed = -1
    while True:
        transaction = records(committed + 1, committed + 1 + record_count, bytes(size_bytes))
        try:
            store.commit(transaction)
        except LogFullError as error:
            return committed if message in str(error) else -2
        committed += record_count


def test_the_limit_of_the_log(tmp_path: Path) -> None:
    store = new_log(tmp_path, map_size_bytes_max=3 << 20)
    number = commit_until_full(store, 1, 100_000, "has reached its limit of 3145728 bytes") + 1
    assert 20 < number < 31
    for call in (store.summary, lambda: store.commit(Transaction(epoch=1)), lambda: store.read(0, 1)):
        with pytest.raises(LogFullError):
            call()
    store.close()
    store = open_small(tmp_path)
    assert store.summary().last_sequence_id == number - 1
    assert len(store.read(0, 1 << 30)) == number
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "immortal-test", str(folder)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs root and the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # lazy: a failed test leaves its files open


@pytest.mark.parametrize("size_bytes", [100, 3_500, 100_000, 1_000_003])
def test_a_full_disk(small_disk: Path, size_bytes: int) -> None:
    folder = small_disk / "log"
    store = new_log(folder)
    committed = commit_until_full(store, 20, size_bytes, "is full")
    with pytest.raises(LogFullError):
        store.commit(Transaction(epoch=3))
    store.close()
    store = open_small(folder)  # also with a full disk, a log can be read
    assert store.summary().last_sequence_id == committed
    if committed >= 0:
        assert len(store.read(0, 1 << 30)) == committed + 1
    store.close()


def test_a_failed_sync_is_never_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lmdb

    store = new_log(tmp_path)
    store.commit(records(0, 1))
    attempts = []

    class FailingEnvironment:
        def begin(self, **_: object) -> object:
            attempts.append(1)
            raise lmdb.Error("mdb_txn_commit", 5)

        def close(self) -> None: ...

    real = store.backend.environment
    monkeypatch.setattr(store.backend, "environment", FailingEnvironment())
    with pytest.raises(LogSyncError, match="what is on disk is unknown"):
        store.commit(Transaction(epoch=2))
    monkeypatch.setattr(store.backend, "environment", real)
    for call in (lambda: store.commit(records(1, 2)), store.summary, lambda: store.trim(keep_checkpoints=1)):
        with pytest.raises(LogSyncError):
            call()
    assert len(attempts) == 1
    store.close()


def test_the_folder_of_another_instance(tmp_path: Path) -> None:
    new_log(tmp_path).close()
    with pytest.raises(LogIdentityError, match="belongs to instance 'alice', not to 'bob'"):
        open_log(tmp_path, "bob", map_size_bytes=MAP_SIZE_BYTES)
    open_small(tmp_path).close()  # nothing stays locked after an error


def test_a_newer_format(tmp_path: Path) -> None:
    store = new_log(tmp_path)
    store.backend.flush()
    with store.backend.environment.begin(write=True) as transaction:
        value = log_format.seal(b"meta", log_format.META_FORMAT, 9)
        transaction.put(log_format.META_FORMAT, value, db=store.backend.tables["meta"])
    store.close()
    with pytest.raises(
        LogFormatError, match=f"format version 9, this program reads version {log_format.ENCRYPTED_VERSION}"
    ):
        open_small(tmp_path)
    with pytest.raises(LogFormatError, match="use the newer version"):
        open_reader(tmp_path)


def test_a_log_of_the_first_format(tmp_path: Path) -> None:
    """It lacks a database that this one has: that must not be taken for a log that was not made to the end."""
    store = new_log(tmp_path)
    store.backend.flush()
    with store.backend.environment.begin(write=True) as transaction:
        value = log_format.seal(b"meta", log_format.META_FORMAT, 1)
        transaction.put(log_format.META_FORMAT, value, db=store.backend.tables["meta"])
        transaction.drop(store.backend.tables["versions"])
    store.close()
    for opener in (open_small, open_reader):
        with pytest.raises(LogFormatError, match=r"format version 1, this program reads .*: no release wrote it"):
            opener(tmp_path)


def test_no_log(tmp_path: Path) -> None:
    for opener in (open_small, open_reader):
        with pytest.raises(LogFormatError, match="there is no log in"):
            opener(tmp_path / "nothing")
        with pytest.raises(LogFormatError, match="there is no log in"):
            opener(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size_bytes", [1, 4096, 100_000])
def test_a_file_that_is_no_log(tmp_path: Path, size_bytes: int) -> None:
    (tmp_path / "data.mdb").write_bytes(b"garbage!" * (size_bytes // 8 + 1))
    for opener in (open_small, open_reader, lambda folder: create_log(folder, "alice")):
        with pytest.raises(LogFormatError, match="not an LMDB file"):
            opener(tmp_path)


def changed_file(folder: Path, at: int, number: int) -> None:
    """A log's file with another number at this byte of its first page."""
    new_log(folder).close()
    path = folder / "data.mdb"
    data = bytearray(path.read_bytes())
    data[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("page_size_bytes", [0, 128, 3000, 1 << 17])
def test_a_file_with_pages_of_another_size(tmp_path: Path, page_size_bytes: int) -> None:
    changed_file(tmp_path, 16 + 24, page_size_bytes)  # behind its header: magic, version, address and size of the map
    for opener in (open_small, open_reader):
        with pytest.raises(LogFormatError, match="not an LMDB file of this kind of machine"):
            opener(tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "a bad disk"), lmdb.Error("a bad file")])
def test_a_log_that_cannot_be_opened_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    new_log(tmp_path).close()

    def fail(folder: Path) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(lmdb_backend, "sync_names", fail)
        with pytest.raises(LogError, match="a bad"):
            open_small(tmp_path)
    open_small(tmp_path).close()


def test_a_file_of_another_version_of_lmdb(tmp_path: Path) -> None:
    changed_file(tmp_path, 16 + 4, 2)
    for opener in (open_small, open_reader):
        with pytest.raises(LogFormatError, match="has LMDB data version 2, this program reads 1"):
            opener(tmp_path)


def test_a_file_that_ends_in_its_meta_pages(tmp_path: Path) -> None:
    new_log(tmp_path).close()
    os.truncate(tmp_path / "data.mdb", 4096)
    for opener in (open_small, open_reader):
        with pytest.raises(LogFormatError, match="it has not even LMDB's two meta pages"):
            opener(tmp_path)


def file_findings(folder: Path) -> list[tuple[Severity, str]]:
    return [(one.severity, one.message) for one in verify_log(folder).findings() if one.place == "file"]


def test_what_is_not_looked_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_log(tmp_path).close()
    assert file_findings(tmp_path) == []
    with monkeypatch.context() as patched:
        patched.setattr(lmdb_backend, "first_unreadable", lambda path: "a page is gone")
        patched.setattr(lmdb_backend, "structure_problems", lambda path: ["which is why nothing more is looked at"])
        assert file_findings(tmp_path) == [(Severity.FATAL, "a page is gone")]
    monkeypatch.setattr(lmdb_backend, "structure_problems", lambda path: None)
    cannot = (Severity.NOTE, "the installed py-lmdb cannot check the structure of the pages")
    assert file_findings(tmp_path) == [cannot]
    process = in_process(WRITE_ON_DEMAND, tmp_path)
    assert read_line(process) == "open"
    is_written = (Severity.NOTE, "a coordinator writes this log: the structure of its pages is not checked")
    assert file_findings(tmp_path) == [is_written]
    process.communicate()


def open_descriptors() -> list[str]:
    """What this process has open, by name."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(found)


def test_a_log_that_is_closed_leaves_nothing_open(tmp_path: Path) -> None:
    before = open_descriptors()
    store = new_log(tmp_path / "log")
    store.commit(records(0, 10))
    write_checkpoint(store, 1, 4, [b"one"])
    trim_all(store, 1)
    store.close()
    back_up(tmp_path / "log", "alice", tmp_path / "backup")
    with LogCutter(tmp_path / "log", "alice") as cutter:
        cutter.cut(cutter.plan(7, force=True))
    with open_reader(tmp_path / "log") as reader:
        assert len(list(reader.values(5))) == 2
    assert open_descriptors() == before


def test_that_a_log_was_made_is_a_point_for_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[FaultPoint] = []
    monkeypatch.setattr(lmdb_backend, "reach", reached.append)
    new_log(tmp_path).close()
    open_small(tmp_path).close()
    assert reached == [FaultPoint.LOG_CREATED]


def test_trimming_leaves_the_high_water_mark(tmp_path: Path) -> None:
    store = new_log(tmp_path)
    store.commit(records(0, 10))
    write_checkpoint(store, 1, 8, [b"one"])
    before = (tmp_path / MARK_FILE_NAME).read_bytes()
    trim_all(store, 1)
    assert store.summary().first_sequence_id == 9
    assert (tmp_path / MARK_FILE_NAME).read_bytes() == before
    store.close()


def test_creating_twice_and_after_a_cut(tmp_path: Path) -> None:
    import lmdb

    lmdb.open(str(tmp_path), max_dbs=3, **({"lib_version": 0} if lmdb.__version__ >= "3" else {})).close()
    with pytest.raises(LogFormatError, match="there is no log in"):
        open_small(tmp_path)
    new_log(tmp_path).close()  # a start that was cut off is begun again
    with pytest.raises(LogFormatError, match="there is a log in"):
        new_log(tmp_path)
    store = open_small(tmp_path)
    assert store.identity.committer_id == COMMITTER_ID
    store.close()


COMMIT_FOREVER = """
import sys
from immortal.coordinator.core.interfaces import SourcePosition, Transaction
from immortal.log import create_log
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchSource, Trailer, encode_trailer
store = create_log(sys.argv[1], "alice", committer_id=77, map_size_bytes=1 << 20)
for number in range(1_000_000):
    record = encode_record(77, number, bytes(number * 37 % 9000))
    trailer = Trailer(0, [BatchSource(0, "bob", number + 1, 1, 0)])
    value = record + encode_trailer(trailer, int.from_bytes(record[8:16], "little"))
    store.commit(Transaction(records=[(number, value)], sources={"bob": SourcePosition(5, 1, number + 1)}))
    print(number, flush=True)
"""


@pytest.mark.parametrize("kill_after", [1, 57, 400])
def test_what_was_reported_as_committed_survives_a_kill(tmp_path: Path, kill_after: int) -> None:
    process = in_process(COMMIT_FOREVER, tmp_path)
    for number in range(kill_after):
        assert read_line(process) == str(number)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    reported = kill_after - 1 + len(output.splitlines())  # what it said between our last look and its end
    store = open_small(tmp_path)
    summary = store.summary()
    assert summary.last_sequence_id >= reported - 1
    assert summary.last_sequence_id >= kill_after - 1
    assert summary.sources["bob"].position == summary.last_sequence_id + 1
    assert len(store.read(0, 1 << 30)) == summary.last_sequence_id + 1
    store.close()
    verification = verify_log(tmp_path)
    assert [finding.message for finding in verification.findings()] == ["there is no checkpoint yet"]
    assert verification.is_sound


def test_a_trim_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "STEP_ROWS_MAX", 3)
    store = new_log(tmp_path)
    store.commit(records(0, 20))
    for checkpoint_id in range(1, 5):
        write_checkpoint(store, checkpoint_id, checkpoint_id * 4, [b"a", b"b"])
    steps = 0
    while True:
        more = store.trim(keep_checkpoints=1)
        steps += 1
        store.close()
        verification = verify_log(tmp_path)
        assert [finding for finding in verification.findings() if finding.severity.value != "note"] == []
        store = open_small(tmp_path)
        if not more:
            break
    assert steps > 5
    assert [header.checkpoint_id for header in store.summary().checkpoints] == [4]
    assert store.summary().first_sequence_id == 17
    store.close()


def test_reads_beside_commits_that_grow_the_map(tmp_path: Path) -> None:
    from threading import Thread

    store = new_log(tmp_path)
    store.commit(records(0, 1, bytes(50_000)))
    done = []

    def commit_many() -> None:
        for number in range(1, 300):
            store.commit(records(number, number + 1, bytes(50_000)))
        done.append(True)

    thread = Thread(target=commit_many)
    thread.start()
    reads = 0
    while not done and thread.is_alive():
        last = store.summary().last_sequence_id
        assert store.read(max(0, last - 3), 1 << 20)
        reads += 1
    thread.join()
    assert done
    assert reads
    assert store.summary().last_sequence_id == 299
    store.close()


def test_a_new_log_is_synced_with_the_names_of_all_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's name is in the folder above: without a sync there a loss of power takes all that is below."""
    synced: list[Path] = []
    monkeypatch.setattr("immortal.coordinator.log.backends.lmdb.files.sync_folder", synced.append)
    create_log(tmp_path / "made" / "on the way" / "log", "alice").close()
    assert synced[:4] == [
        tmp_path / "made" / "on the way" / "log",
        tmp_path / "made" / "on the way",
        tmp_path / "made",
        tmp_path,
    ]
