"""What a log keeps of clients: the same in both stores; and what the one on disk shows of damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.core.interfaces import ClientPosition, LogStore, StoredClients, Transaction
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.log.verify import verify_log
from immortal.log import RowLogStore, create_log, open_log
from immortal.protocol.client_frames import caller_of
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer

COMMITTER_ID = 77
MAP_SIZE_BYTES = 1 << 20


def value(sequence_id: int, *batches: BatchSource) -> bytes:
    record = encode_record(COMMITTER_ID, sequence_id, b"content")
    return record + encode_trailer(Trailer(1, list(batches)), int.from_bytes(record[8:16], "little"))


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


def test_a_new_log_knows_of_no_client(store: LogStore) -> None:
    assert store.clients() == StoredClients({}, {}, 0)


def test_what_is_committed_is_there_again(store: LogStore, tmp_path: Path) -> None:
    store.commit(
        Transaction(
            records=[(0, value(0, BatchSource(BatchKind.CLIENT, caller_of("ann"), 1, 3, 5)))],
            clients={"ann": ClientPosition(3, 0, 100, "web"), "bob": ClientPosition(1, 0, 90)},
            replies={("ann", 1): b"\1one", ("ann", 2): b"\0", ("bob", 1): b"\2"},
            acknowledged={"~": 3},
        )
    )
    store = reopened(store, tmp_path)
    assert store.clients() == StoredClients(
        {"ann": ClientPosition(3, 0, 100, "web"), "bob": ClientPosition(1, 0, 90)},
        {("ann", 1): b"\1one", ("ann", 2): b"\0", ("bob", 1): b"\2"},
    )
    assert store.summary().acknowledged == {"~": 3}
    store.commit(
        Transaction(
            clients={"ann": ClientPosition(4, 2, 110), "bob": None},
            replies={("ann", 1): None, ("ann", 2): None, ("bob", 1): None, ("ann", 4): b"\1four"},
            clients_forgotten_ns=90,
        )
    )
    store = reopened(store, tmp_path)
    assert store.clients() == StoredClients({"ann": ClientPosition(4, 2, 110)}, {("ann", 4): b"\1four"}, 90)
    store.close()


def test_joined_transactions_leave_what_the_last_says(store: LogStore) -> None:
    joined = Transaction(
        clients={"ann": ClientPosition(1, 0, 1), "bob": ClientPosition(1, 0, 1)},
        replies={("ann", 1): b"\1one", ("bob", 1): b"\1one"},
        clients_forgotten_ns=5,
    )
    joined.absorb(Transaction(clients={"ann": None}, replies={("ann", 1): None}))
    joined.absorb(Transaction(clients={"ann": ClientPosition(1, 0, 9)}, clients_forgotten_ns=7))
    store.commit(joined)
    assert store.clients() == StoredClients(
        {"ann": ClientPosition(1, 0, 9), "bob": ClientPosition(1, 0, 1)}, {("bob", 1): b"\1one"}, 7
    )


# --- on disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    store = create_log(tmp_path / "log", "alice", committer_id=COMMITTER_ID, map_size_bytes=MAP_SIZE_BYTES)
    for sequence_id in range(3):
        number = sequence_id + 1
        store.commit(
            Transaction(
                records=[(sequence_id, value(sequence_id, BatchSource(BatchKind.CLIENT, "~ann", number, 1, 5)))],
                clients={"ann": ClientPosition(number, 0, number)},
                replies={("ann", number): b"\1the reply"},
            )
        )
    store.close()
    return tmp_path / "log"


def change(log: Path, table: str, key: bytes, changed: bytes | None) -> None:
    environment = lmdb.open(str(log), max_dbs=32, map_size=MAP_SIZE_BYTES, lib_version=0)
    database = environment.open_db(table.encode(), create=False)
    with environment.begin(write=True) as transaction:
        if changed is None:
            data = bytearray(transaction.get(key, db=database))
            data[-1] ^= 1
            changed = bytes(data)
        transaction.put(key, changed, db=database)
    environment.close()


def findings(log: Path) -> list[tuple[Severity, str, str]]:
    return [(each.severity, each.place, each.message) for each in verify_log(log, "alice").findings()]


def severe(log: Path) -> list[tuple[Severity, str, str]]:
    return [each for each in findings(log) if each[0] is not Severity.NOTE]


def opened(log: Path) -> RowLogStore:
    return open_log(log, "alice", map_size_bytes=MAP_SIZE_BYTES)


def test_a_sound_log(log: Path) -> None:
    assert severe(log) == []


def test_a_damaged_reply_is_not_kept_any_more(log: Path) -> None:
    change(log, "replies", log_format.batch_key("ann", 2), None)
    ((severity, place, message),) = severe(log)
    assert (severity, place) == (Severity.DAMAGE, "replies")
    assert "request 2 of client 'ann'" in message
    store = opened(log)
    assert store.clients().replies == {("ann", 1): b"\1the reply", ("ann", 2): b"\0", ("ann", 3): b"\1the reply"}
    assert len(store.problems) == 1
    store.close()


def test_a_reply_under_another_number_is_found(log: Path) -> None:
    key = log_format.batch_key("ann", 2)
    change(log, "replies", key, log_format.seal_chunk(log_format.batch_key("ann", 1), b"\1the reply"))
    assert [place for _, place, _ in severe(log)] == ["replies"]


def test_a_damaged_position_stops_the_start(log: Path) -> None:
    change(log, "clients", log_format.name_key("ann"), None)
    assert {(severity, place) for severity, place, _ in severe(log)} >= {(Severity.FATAL, "clients")}
    store = opened(log)
    with pytest.raises(DamagedLogError, match="'clients' is damaged at key 'ann'"):
        store.clients()
    store.close()


def test_a_position_that_does_not_fit_the_records(log: Path) -> None:
    key = log_format.name_key("ann")
    change(log, "clients", key, log_format.encode_client(key, ClientPosition(2, 0, 2)))
    ((severity, place, message),) = severe(log)
    assert (severity, place) == (Severity.FATAL, "clients")
    assert "the requests of client 'ann': table 'clients' says 2, the trailers end at 3" in message


def test_a_client_that_was_forgotten_is_no_finding(log: Path) -> None:
    store = opened(log)
    store.commit(Transaction(clients={"ann": None}, replies={("ann", number): None for number in (1, 2, 3)}))
    store.close()
    assert severe(log) == []
