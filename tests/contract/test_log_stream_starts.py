"""Where streams go on that were reset, as a log keeps it: in memory and in LMDB, and what `log verify` says of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.core.interfaces import LogStore, SourcePosition, StreamStart, Transaction
from immortal.coordinator.core.peers import reset_transaction
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.log.verify import verify_log
from immortal.log import RowLogStore, create_log, open_log, open_reader


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogStore]:
    made: LogStore = MemoryLogStore(7) if request.param == "memory" else create_log(tmp_path / "log", "alice")
    yield made
    made.close()


def test_starts_are_kept_one_by_one(store: LogStore) -> None:
    assert store.summary().stream_starts == {}
    store.commit(Transaction(stream_starts={"bob": StreamStart(0, pending=True), "carol": StreamStart(-3)}))
    store.commit(Transaction(epoch=2))
    store.commit(Transaction(stream_starts={"bob": StreamStart(1 << 40)}))
    assert store.summary().stream_starts == {"bob": StreamStart(1 << 40), "carol": StreamStart(-3)}


def test_the_later_of_two_joined_transactions_counts() -> None:
    first = Transaction(stream_starts={"bob": StreamStart(0, pending=True), "carol": StreamStart(1)})
    first.absorb(Transaction(stream_starts={"bob": StreamStart(4)}))
    assert first.stream_starts == {"bob": StreamStart(4), "carol": StreamStart(1)}


def test_a_reset_changes_neither_positions_nor_what_others_are(store: LogStore) -> None:
    store.commit(
        Transaction(
            sources={"bob": SourcePosition(5, 3, 9), "carol": SourcePosition(6, 1, 1)},
            acknowledged={"bob": 4},
            peers={"bob": 5, "carol": 6},
            stream_starts={"bob": StreamStart(2)},
        )
    )
    for _ in range(2):  # twice is once
        transaction = reset_transaction(store.summary(), "bob")
        assert transaction is not None
        store.commit(transaction)
        summary = store.summary()
        assert summary.sources == {"bob": SourcePosition(5, -3, 9), "carol": SourcePosition(6, 1, 1)}
        assert (summary.acknowledged, summary.peers) == ({"bob": 4}, {"bob": 5, "carol": 6})
        assert summary.stream_starts == {"bob": StreamStart(2, pending=True)}
    assert reset_transaction(store.summary(), "dave") is None


def test_a_reader_sees_them_and_damage_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    store = create_log(folder, "alice")
    store.commit(Transaction(stream_starts={"bob": StreamStart(3)}))
    store.close()
    with open_reader(folder, "alice") as reader:
        assert reader.summary().stream_starts == {"bob": StreamStart(3)}
    assert not [finding for finding in verify_log(folder, "alice").findings() if finding.place == "meta"]
    store = open_log(folder, "alice")
    flip(store)
    with pytest.raises(DamagedLogError, match="stream_starts"):
        store.summary()
    store.close()
    (finding,) = [finding for finding in verify_log(folder, "alice").findings() if finding.place == "meta"]
    assert "stream_starts" in finding.message


def flip(store: RowLogStore) -> None:
    """One bit of the value."""
    store.backend.flush()
    with store.backend.environment.begin(write=True) as transaction:
        value = bytearray(transaction.get(log_format.META_STREAM_STARTS, db=store.backend.tables["meta"]) or b"")
        value[-1] ^= 1
        transaction.put(log_format.META_STREAM_STARTS, bytes(value), db=store.backend.tables["meta"])
