"""A checkpoint that a standby puts into a log in PostgreSQL, beside the one that writes it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import InvariantError, LogError
from immortal.coordinator.core.interfaces import CheckpointHeader, Offer, OutputBatch, OutputMark, Transaction
from immortal.coordinator.log.backend import Options, StandbyCheckpointRequest, StandbyRegistration
from immortal.coordinator.log.checkpoints import encode_offer, sealed_chunk
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log.store import RowLogStore
from immortal.log import create_log, open_log
from immortal.protocol.checksum import crc64
from tests.helpers.postgres import Postgres

pytest.importorskip("psycopg", reason="psycopg is not installed")

from immortal.coordinator.log.backends.postgres import connections  # which needs it

COMMITTER_ID = 77
WAIT_S = 20.0
CHUNKS = (b"one" * 500_000, b"two" * 500_000, b"three")
BLOB = b"".join(CHUNKS)
OUTPUTS = {"b": OutputMark(3, 2**64 - 7)}
HEADER = CheckpointHeader(5, -1, len(BLOB), crc64(BLOB), 9, OUTPUTS, {"b": [OutputBatch(3, 1, b"call")]})


@pytest.fixture
def url(postgres: Postgres, request: pytest.FixtureRequest) -> str:
    return postgres.url(request.node.name)


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def store(url: str) -> Iterator[RowLogStore]:
    store = create_log(url, "alice", committer_id=COMMITTER_ID)
    yield store
    store.close()
    place_of(url).remove()


@pytest.fixture
def standby(url: str, store: RowLogStore) -> Iterator[StandbyRegistration]:
    following = place_of(url).follow(Options(), lambda: None)
    assert following is not None
    yield following
    following.close(WAIT_S)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.005)


def asked(store: RowLogStore, standby: StandbyRegistration) -> StandbyCheckpointRequest:
    store.backend.request_standby_checkpoint(connections.process_name(), HEADER.checkpoint_id, 3)
    until(lambda: standby.request is not None)
    assert standby.request is not None
    assert (standby.request.checkpoint_id, standby.request.epoch) == (5, 3)
    return standby.request


def put(standby: StandbyRegistration, one: StandbyCheckpointRequest, *indices: int) -> None:
    for index in indices:
        standby.put_chunk(one, index, sealed_chunk(one.checkpoint_id, index, CHUNKS[index]))


def offer(standby: StandbyRegistration, one: StandbyCheckpointRequest) -> None:
    standby.offer(one, encode_offer(Offer(one.epoch, HEADER, [(4, 0, 0, 0)])))


def read(store: RowLogStore) -> bytes:
    return b"".join(store.read_checkpoint_chunk(HEADER.checkpoint_id, index) for index in range(len(CHUNKS)))


def test_what_a_standby_has_put_is_adopted_by_a_header_alone(store: RowLogStore, standby: StandbyRegistration) -> None:
    one = asked(store, standby)
    put(standby, one, 0, 1, 2)
    assert store.poll_standby_offer() is None
    assert store.summary().checkpoints == []
    offer(standby, one)
    assert store.poll_standby_offer() == Offer(3, HEADER, [(4, 0, 0, 0)])
    assert store.poll_standby_offer() is None, "it is told once"
    store.commit(Transaction(checkpoint=HEADER, adopts=True))
    (header,) = store.summary().checkpoints
    assert (header.outputs, header.unacknowledged) == (HEADER.outputs, HEADER.unacknowledged)
    assert read(store) == BLOB


def test_another_standby_is_asked_nothing(store: RowLogStore, standby: StandbyRegistration) -> None:
    store.backend.request_standby_checkpoint("somebody else (process 1)", 5, 3)
    store.backend.request_standby_checkpoint(connections.process_name(), 6, 3)
    until(lambda: standby.request is not None)
    assert standby.request is not None
    assert standby.request.checkpoint_id == 6


def test_what_is_not_wanted_any_more_is_not_taken(store: RowLogStore, standby: StandbyRegistration) -> None:
    one = asked(store, standby)
    put(standby, one, 0)
    store.backend.cancel_standby_request()
    with pytest.raises(LogError, match="does not want it any more"):
        put(standby, one, 1)
    with pytest.raises(LogError, match="does not want it any more"):
        offer(standby, one)
    assert store.poll_standby_offer() is None


def test_a_chunk_is_put_once(store: RowLogStore, standby: StandbyRegistration) -> None:
    one = asked(store, standby)
    put(standby, one, 0)
    with pytest.raises(LogError):
        put(standby, one, 0)


def test_whoever_takes_the_log_takes_nothing_of_it(url: str, store: RowLogStore, standby: StandbyRegistration) -> None:
    one = asked(store, standby)
    put(standby, one, 0, 1, 2)
    offer(standby, one)
    store.close()
    other = open_log(url, "alice")
    try:
        with pytest.raises(LogError, match="does not want it any more"):
            put(standby, one, 2)
        assert other.poll_standby_offer() is None
        with other.backend.view() as view:
            assert not list(view.sizes("chunks"))
    finally:
        other.close()


def test_a_header_whose_chunks_are_not_there_is_no_checkpoint(store: RowLogStore, standby: StandbyRegistration) -> None:
    one = asked(store, standby)
    put(standby, one, 0, 2)
    with pytest.raises(InvariantError, match="chunk 1 of checkpoint 5 is missing"):
        store.commit(Transaction(checkpoint=HEADER, adopts=True))
    put(standby, one, 1)
    store.commit(Transaction(checkpoint=HEADER, adopts=True))
    assert read(store) == BLOB


@pytest.mark.parametrize("is_away", [False, True])
def test_large_chunks_of_a_standby_go_into_the_store_too(url: str, objects: Path, *, is_away: bool) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    where = f"file://{objects}"
    store = create_log(url, "alice", committer_id=COMMITTER_ID, checkpoints_to=where)
    standby = place_of(url).follow(Options(checkpoints_to=where), lambda: None)
    assert standby is not None
    try:
        one = asked(store, standby)
        if is_away:
            shutil.rmtree(objects, ignore_errors=True)
            objects.write_text("no folder")
        put(standby, one, 0, 1, 2)
        offer(standby, one)
        store.commit(Transaction(checkpoint=HEADER, adopts=True))
        assert read(store) == BLOB
        assert objects.is_file() if is_away else len([*objects.glob("*/*")]) == 2
    finally:
        standby.close(WAIT_S)
        store.close()
        if is_away:
            objects.unlink()
        place_of(url).remove()
