"""Spilled outputs in both stores: what is there, read back, cut, acknowledged, removed; and damage to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from immortal.coordinator.core.errors import DamagedLogError, InvariantError
from immortal.coordinator.core.interfaces import (
    CheckpointHeader,
    ImpulseBatch,
    LogStore,
    OutputBatch,
    OutputMark,
    SpilledBatch,
    SpilledExtent,
    Transaction,
)
from immortal.coordinator.fault_points import FaultPoint
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import store as log_store
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.log.verify import verify_log
from immortal.log import RowLogStore, create_log, open_log
from immortal.protocol.messages import decode_messages, encode_incoming_rpc

COMMITTER_ID = 77
LARGE = 1 << 20


def messages(first: int, count: int, size_bytes: int = 0) -> bytes:
    return b"".join(
        encode_incoming_rpc(3, 1, number.to_bytes(4, "little") + bytes(size_bytes))
        for number in range(first, first + count)
    )


def row(destination: str, first: int, count: int, size_bytes: int = 0) -> SpilledBatch:
    return SpilledBatch(first, count, messages(first, count, size_bytes), destination)


def numbers(batches: list[OutputBatch]) -> list[int]:
    """The positions that ``batches`` hold, by their contents; their own positions must say the same."""
    found = []
    for batch in batches:
        inside = [
            int.from_bytes(batch.payload[end - 4 : end], "little") for _, _, end in decode_messages(batch.payload)
        ]
        assert inside == list(range(batch.first_position, batch.last_position + 1))
        found += inside
    return found


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogStore]:
    made: LogStore = MemoryLogStore(COMMITTER_ID)
    if request.param == "lmdb":
        made = create_log(tmp_path / "log", "alice", committer_id=COMMITTER_ID, map_size_bytes=LARGE)
    yield made
    made.close()


def test_what_is_spilled_is_told_and_read_back(store: LogStore) -> None:
    assert not store.summary().spilled
    store.commit(Transaction(spilled=[row("bob", 10, 5), row("bob", 15, 3), row("bo", 1, 2), row("bob", 30, 2)]))
    spilled = store.summary().spilled
    assert set(spilled) == {"bo", "bob"}
    eight, two = len(messages(10, 8)), len(messages(30, 2))
    assert list(spilled["bob"]) == [SpilledExtent(10, 17, eight), SpilledExtent(30, 31, two)]
    assert numbers(store.read_spilled("bob", 10, 17, LARGE)) == list(range(10, 18))
    assert numbers(store.read_spilled("bob", 12, 12, LARGE)) == list(range(10, 15)), "the row that has it"
    assert numbers(store.read_spilled("bob", 10, 40, LARGE)) == list(range(10, 18)), "no further than a gap"
    assert numbers(store.read_spilled("bob", 10, 17, 1)) == list(range(10, 15)), "one row at least"
    assert numbers(store.read_spilled("bo", 1, 9, LARGE)) == [1, 2]


def test_impulses_are_read_in_their_places(store: LogStore) -> None:
    impulses = [ImpulseBatch(3, 2, messages(3, 2), "bob"), ImpulseBatch(7, 1, messages(7, 1), "bob")]
    store.commit(Transaction(spilled=[row("bob", 1, 2), row("bob", 5, 2)], impulses=impulses))
    assert numbers(store.read_spilled("bob", 1, 7, LARGE)) == list(range(1, 8))
    assert numbers(store.read_spilled("bob", 4, 7, LARGE)) == list(range(3, 8))


@pytest.mark.parametrize(("destination", "position"), [("bob", 9), ("bob", 15), ("bo", 10), ("bobby", 10), ("a", 1)])
def test_what_is_not_there_is_an_error(store: LogStore, destination: str, position: int) -> None:
    store.commit(Transaction(spilled=[row("bob", 10, 5)]))
    with pytest.raises(DamagedLogError, match=f"the message {position} to '{destination}' waits to be sent and is not"):
        store.read_spilled(destination, position, position, LARGE)


def test_what_is_acknowledged_goes_whole_rows_at_a_time(store: LogStore) -> None:
    store.commit(Transaction(spilled=[row("bob", 1, 5), row("bob", 6, 5), row("carol", 1, 2)]))
    store.commit(Transaction(acknowledged={"bob": 7}))
    assert list(store.summary().spilled["bob"]) == [SpilledExtent(6, 10, len(messages(6, 5)))]
    assert numbers(store.read_spilled("bob", 1, 1, LARGE)) == list(range(1, 6)), "not trimmed yet"
    while store.trim(keep_checkpoints=None):
        pass
    assert numbers(store.read_spilled("bob", 8, 10, LARGE)) == list(range(6, 11))
    with pytest.raises(DamagedLogError):
        store.read_spilled("bob", 5, 5, LARGE)
    assert numbers(store.read_spilled("carol", 1, 2, LARGE)) == [1, 2]
    store.commit(Transaction(acknowledged={"bob": 10, "carol": 2}))
    while store.trim(keep_checkpoints=2):
        pass
    assert not store.summary().spilled


@pytest.mark.parametrize(("position", "count"), [(0, 1), (1, 0), (-1, 1)])
def test_a_row_without_a_message_or_before_the_first_is_a_bug(store: LogStore, position: int, count: int) -> None:
    for transaction in (
        Transaction(spilled=[SpilledBatch(position, count, b"", "bob")]),
        Transaction(impulses=[ImpulseBatch(position, count, b"", "bob")]),
    ):
        with pytest.raises(InvariantError, match=f"{count} (spilled|impulses) at {position}"):
            store.commit(transaction)
    assert not store.summary().spilled


def test_the_fault_points_of_trimming_what_is_spilled_are_its_alone(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(Transaction(spilled=[row("bob", 1, 5)], acknowledged={"bob": 5}))
    reached: list[FaultPoint] = []
    monkeypatch.setattr(log_store, "reach", reached.append)
    store.trim(keep_checkpoints=1)
    assert reached == [FaultPoint.AFTER_SPILL_TRIM]
    store.trim(keep_checkpoints=1)
    assert reached == [FaultPoint.AFTER_SPILL_TRIM]


def test_impulses_that_wait_outlive_the_checkpoint_before_which_they_were_made(store: LogStore) -> None:
    store.commit(Transaction(impulses=[ImpulseBatch(3, 2, messages(3, 2), "bob")]))
    header = CheckpointHeader(1, -1, 0, 0, 1, {"bob": OutputMark(9, 1)})
    store.commit(Transaction(checkpoint=header))
    while store.trim(keep_checkpoints=1):
        pass
    assert numbers(store.read_spilled("bob", 3, 4, LARGE)) == [3, 4]
    store.commit(Transaction(acknowledged={"bob": 4}))
    while store.trim(keep_checkpoints=1):
        pass
    assert not store.summary().impulses


@pytest.mark.parametrize("end", [0, 3, 5, 7, 10, 99])
def test_the_end_of_what_a_cut_has_left(store: LogStore, end: int) -> None:
    store.commit(Transaction(spilled=[row("bob", 1, 5), row("bob", 6, 5), row("carol", 1, 9), row("bo", 8, 3)]))
    store.commit(Transaction(spilled_ends={"bob": end}, spilled=[row("bob", 200, 1)]))
    if end:
        kept = min(end, 10)
        assert numbers(store.read_spilled("bob", 1, 10, LARGE)) == list(range(1, kept + 1))
    with pytest.raises(DamagedLogError):
        store.read_spilled("bob", end + 1, end + 1, LARGE)
    assert numbers(store.read_spilled("bob", 200, 200, LARGE)) == [200]
    assert numbers(store.read_spilled("carol", 1, 9, LARGE)) == list(range(1, 10))
    assert numbers(store.read_spilled("bo", 8, 10, LARGE)) == [8, 9, 10]


def test_joined_transactions_cut_before_they_spill(store: LogStore) -> None:
    joined = Transaction(spilled=[row("bob", 1, 5)])
    joined.absorb(Transaction(spilled_ends={"bob": 5}))
    joined.absorb(Transaction(spilled=[row("bob", 6, 2)]))
    store.commit(joined)
    assert numbers(store.read_spilled("bob", 1, 7, LARGE)) == list(range(1, 8))


def test_many_rows_are_told_as_few(store: LogStore) -> None:
    store.commit(Transaction(spilled=[row("bob", number, 1, 60_000) for number in range(1, 41)]))
    extents = list(store.summary().spilled["bob"])
    assert len(extents) == 3
    assert [extent.first_position for extent in extents[1:]] == [extent.last_position + 1 for extent in extents[:-1]]
    assert sum(extent.size_bytes for extent in extents) == len(messages(1, 40, 60_000))


def test_of_impulses_that_wait_only_so_many_are_loaded(store: LogStore) -> None:
    assert isinstance(store, RowLogStore)
    store.impulses_loaded_size_bytes_max = 100
    payloads = [messages(number, 1, 30) for number in range(1, 6)]
    store.commit(Transaction(impulses=[ImpulseBatch(n, 1, payload, "bob") for n, payload in enumerate(payloads, 1)]))
    store.commit(Transaction(acknowledged={"bob": 1}))
    size_bytes = len(payloads[0])
    assert [(batch.payload, batch.left_size_bytes) for batch in store.summary().impulses] == [
        (b"", 0),
        (payloads[1], 0),
        (payloads[2], 0),
        (b"", size_bytes),
        (b"", size_bytes),
    ]


def test_the_room_that_a_log_takes_and_gives_back(store: LogStore) -> None:
    empty = store.space()
    assert empty.free_bytes > 0
    store.commit(Transaction(spilled=[row("bob", number, 1, 100_000) for number in range(1, 31)]))
    full = store.space()
    assert 3_000_000 <= full.used_bytes - empty.used_bytes < 4_000_000
    store.commit(Transaction(acknowledged={"bob": 30}))
    while store.trim(keep_checkpoints=None):
        pass
    assert store.space().used_bytes - empty.used_bytes < 100_000


# --- on disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log with two rows."""
    store = create_log(tmp_path / "log", "alice", committer_id=COMMITTER_ID)
    store.commit(Transaction(spilled=[row("bob", 1, 5), row("bob", 6, 5)]))
    store.close()
    return tmp_path / "log"


def change(folder: Path, first_position: int, at: int) -> None:
    environment = lmdb.open(str(folder), max_dbs=32, map_size=1 << 30, lib_version=0)
    table = environment.open_db(b"spilled", create=False)
    with environment.begin(write=True) as transaction:
        key = log_format.batch_key("bob", first_position)
        value = bytearray(transaction.get(key, db=table))
        value[at] ^= 1
        transaction.put(key, bytes(value), db=table)
    environment.close()


@pytest.mark.parametrize(
    ("at", "starts"),
    [(0, False), (8, False), (12, False), (25, True)],
    ids=["CRC", "count", "payload's CRC", "payload"],
)
def test_damage_is_found(folder: Path, at: int, starts: bool) -> None:
    change(folder, 6, at)
    findings = list(verify_log(folder, "alice").findings())
    assert [finding.place for finding in findings if "calls that wait for a peer may be lost" in finding.message] == [
        "spilled"
    ]
    store = open_log(folder, "alice")
    if starts:
        store.summary()
    else:
        with pytest.raises(DamagedLogError, match="'spilled' is damaged"):
            store.summary()
    assert numbers(store.read_spilled("bob", 1, 5, LARGE)) == [1, 2, 3, 4, 5]
    with pytest.raises(DamagedLogError, match=r"damaged.*'immortal recover alice'"):
        store.read_spilled("bob", 6, 10, LARGE)
    store.close()


def test_two_rows_with_the_same_message(folder: Path) -> None:
    store = open_log(folder, "alice")
    store.commit(Transaction(spilled=[row("bob", 8, 1)]))
    store.close()
    assert any("two rows hold the message 8 spilled to 'bob'" in one.message for one in verify_log(folder).findings())
