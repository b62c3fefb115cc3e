"""Large checkpoints of a log in PostgreSQL, in a store: what is read is what was written, whatever the store does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("psycopg", reason="psycopg is not installed")
pytest.importorskip("obstore", reason="obstore is not installed")

from immortal.coordinator.core.errors import DamagedCheckpointError, LogUnavailableError
from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.coordinator.log.authentication import LogKey
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.backends.postgres import chunks
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log.verify import back_up, verify_log
from immortal.log import RowLogStore, create_log, open_log, open_reader
from immortal.protocol.checksum import crc64
from tests.contract.test_postgres_log import COMMITTER_ID, records, until
from tests.helpers.postgres import Postgres

MIB = 1 << 20


@pytest.fixture
def url(postgres: Postgres, request: pytest.FixtureRequest) -> str:
    return postgres.url(request.node.name)


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def store(url: str, objects: Path) -> Iterator[RowLogStore]:
    store = create_log(url, "alice", committer_id=COMMITTER_ID, checkpoints_to=f"file://{objects}")
    store.commit(records(0, 9))
    yield store
    store.close()


def pieces(checkpoint_id: int, count: int) -> list[bytes]:
    """``count`` whole chunks, and a smaller one."""
    return [bytes([checkpoint_id, index]) * (MIB // 2) for index in range(count)] + [b"rest" * 100]


def put(store: RowLogStore, checkpoint_id: int, sequence_id: int, count: int) -> list[bytes]:
    made = pieces(checkpoint_id, count)
    for index, piece in enumerate(made):
        store.write_checkpoint_chunk(checkpoint_id, index, piece)
    commit(store, checkpoint_id, sequence_id, made)
    return made


def commit(store: RowLogStore, checkpoint_id: int, sequence_id: int, made: list[bytes]) -> None:
    blob = b"".join(made)
    store.commit(
        Transaction(checkpoint=CheckpointHeader(checkpoint_id, sequence_id, len(blob), crc64(blob), 9, {}, {}))
    )


def read(url: str | Path, checkpoint_id: int) -> list[bytes]:
    with open_reader(url, "alice") as reader:
        found: list[bytes] = []
        while piece := reader.read_checkpoint_chunk(checkpoint_id, len(found)):
            found.append(piece)
        return found


def folder(objects: Path) -> Path:
    (found,) = objects.iterdir()
    return found


def names(objects: Path) -> list[str]:
    return sorted(path.name for path in objects.glob("*/*")) if objects.is_dir() else []


def rows(url: str, table: str) -> int:
    with open_reader(url, "alice") as reader, reader.view() as view:
        return view.size(table).rows_count


def test_whole_chunks_are_in_the_store_and_read_like_others(url: str, objects: Path, store: RowLogStore) -> None:
    made = put(store, 1, 3, 20)
    assert read(url, 1) == made
    found = names(objects)
    assert len(found) == 20
    assert all(name.startswith("0" * 19 + "1-") for name in found)
    assert f"-e{store.backend.fence}-" in found[0]
    assert rows(url, chunks.ELSEWHERE) == 20
    assert rows(url, "chunks") == 1
    assert store.backend.problem == ""
    put(store, 2, 5, 0)
    assert len(names(objects)) == 20, "a small one is in the database alone"
    verification = verify_log(place_of(url), "alice")
    assert not [one for one in verification.findings() if one.severity is not Severity.NOTE]


def test_what_is_trimmed_goes_from_the_store(url: str, objects: Path, store: RowLogStore) -> None:
    for number in range(1, 5):
        put(store, number, number, 3)
    assert len(names(objects)) == 12
    while store.trim(keep_checkpoints=2):
        pass
    until(lambda: len(names(objects)) == 6)
    assert {name[19] for name in names(objects)} == {"3", "4"}
    assert rows(url, chunks.ELSEWHERE) == 6
    assert read(url, 3) == pieces(3, 3)
    with pytest.raises(DamagedCheckpointError, match="checkpoint 1 is not in the log"):
        read(url, 1)


def test_a_store_that_is_away_loses_and_stops_nothing(url: str, objects: Path, store: RowLogStore) -> None:
    objects.rename(objects.parent / "away")
    objects.write_text("a file, where the store's folder was")
    made = put(store, 1, 3, 20)
    assert rows(url, chunks.ELSEWHERE) == 0
    assert rows(url, "chunks") == 21
    assert read(url, 1) == made
    assert "checkpoints go into the database, in place of file://" in store.backend.problem
    store.commit(records(9))
    objects.unlink()
    (objects.parent / "away").rename(objects)
    assert read(url, 1) == made
    second = put(store, 2, 9, 2)
    assert store.backend.problem == ""
    assert len(names(objects)) == 2
    assert read(url, 2) == second


def test_a_store_that_fails_in_the_middle_of_a_checkpoint(
    url: str, objects: Path, store: RowLogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    send = chunks.ChunkUploads._send

    def send_and_tell(uploads: chunks.ChunkUploads, name: str, value: bytes) -> None:
        send(uploads, name, value)
        taken.append(name)

    monkeypatch.setattr(chunks.ChunkUploads, "_send", send_and_tell)
    made = pieces(1, 6)
    for index, piece in enumerate(made):
        if index == 3:
            until(lambda: len(taken) == 3)  # an object is there before the store says that it has it
            objects.rename(objects.parent / "away")
            objects.write_text("no folder")
        store.write_checkpoint_chunk(1, index, piece)
    commit(store, 1, 3, made)
    assert rows(url, chunks.ELSEWHERE) == 3
    assert rows(url, "chunks") == 4
    with pytest.raises(LogUnavailableError, match="does not do it"):
        read(url, 1)
    objects.unlink()
    (objects.parent / "away").rename(objects)
    assert read(url, 1) == made


def test_a_header_that_is_committed_again_has_what_the_store_did_not_take(
    url: str, objects: Path, store: RowLogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its first append got no answer, and had not been done."""
    objects.rename(objects.parent / "away")
    objects.write_text("no folder")
    made = pieces(1, 2)
    for index, piece in enumerate(made):
        store.write_checkpoint_chunk(1, index, piece)
    backend = store.backend

    def unanswered(*of: object) -> None:
        raise LogUnavailableError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_send", unanswered)
        with pytest.raises(LogUnavailableError):
            commit(store, 1, 3, made)
    commit(store, 1, 3, made)
    assert read(url, 1) == made


def test_what_a_writer_left_is_removed_by_the_next_one(url: str, objects: Path, store: RowLogStore) -> None:
    kept = put(store, 1, 3, 2)
    for index, piece in enumerate(pieces(2, 3)[:3]):
        store.write_checkpoint_chunk(2, index, piece)  # cut off: no header comes
    until(lambda: len(names(objects)) == 5)
    foreign = folder(objects) / "notes.txt"
    foreign.write_text("not ours")
    of_the_future = folder(objects) / f"{7:020}-{0:08}-e{store.backend.fence + 9}-{'0' * 16}"
    of_the_future.write_bytes(b"x")
    store.close()
    again = open_log(url, "alice", checkpoints_to=f"file://{objects}")
    until(lambda: len(names(objects)) == 4)
    again.close()
    assert foreign.exists()
    assert of_the_future.exists(), "an object of a writer that is not older is not ours to judge"
    assert read(url, 1) == kept


def test_objects_go_without_the_setting_too(url: str, objects: Path, store: RowLogStore) -> None:
    put(store, 1, 1, 2)
    store.close()
    again = open_log(url, "alice")
    put(again, 2, 3, 2)
    put(again, 3, 4, 2)
    assert len(names(objects)) == 2
    while again.trim(keep_checkpoints=1):
        pass
    until(lambda: names(objects) == [])
    again.close()


def test_a_missing_object_is_a_damaged_checkpoint(url: str, objects: Path, store: RowLogStore) -> None:
    put(store, 1, 3, 2)
    (folder(objects) / names(objects)[1]).unlink()
    with pytest.raises(DamagedCheckpointError, match=r"chunk 1 of checkpoint 1 is missing; it has 3"):
        read(url, 1)
    (folder(objects) / names(objects)[0]).write_bytes(b"not what was written")
    with pytest.raises(DamagedCheckpointError, match="chunk 0 of checkpoint 1 is damaged"):
        read(url, 1)


def test_copies_have_the_chunks_themselves(url: str, objects: Path, store: RowLogStore, tmp_path: Path) -> None:
    made = put(store, 1, 3, 4)
    store.close()
    back_up(url, "alice", tmp_path / "copy")
    shutil.rmtree(objects)
    assert read(tmp_path / "copy", 1) == made


def test_a_log_that_is_removed_takes_its_objects_along(url: str, objects: Path, store: RowLogStore) -> None:
    put(store, 1, 3, 4)
    store.close()
    place_of(url).remove()
    assert names(objects) == []


def test_a_log_with_a_key(url: str, objects: Path) -> None:
    key = LogKey(bytes(range(32)))
    store = create_log(url, "alice", committer_id=COMMITTER_ID, checkpoints_to=f"file://{objects}", keys=[key])
    store.commit(records(0, 9))
    made = put(store, 1, 3, 3)
    store.close()
    path = folder(objects) / names(objects)[2]
    with open_reader(url, "alice", keys=[key]) as reader:
        assert reader.read_checkpoint_chunk(1, 2) == made[2]
    other = made[2].replace(b"\x01", b"\x07")
    sealed = path.read_bytes()
    from immortal.coordinator.log.format import CHUNK_KEY, seal_chunk

    path.write_bytes(seal_chunk(CHUNK_KEY.pack(1, 2), other))
    assert len(path.read_bytes()) == len(sealed)
    with open_reader(url, "alice", keys=[key]) as reader, pytest.raises(DamagedCheckpointError):
        reader.read_checkpoint_chunk(1, 2)


def test_an_encrypted_log_says_nothing_to_the_database_and_the_store(
    postgres: Postgres, url: str, objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("KEY", "11" * 32)
    place = place_of(url)
    place.encryption_key = "env:KEY"
    store = create_log(place, "alice", committer_id=COMMITTER_ID, checkpoints_to=f"file://{objects}")
    store.commit(records(0, 5))
    assert store.begin_commit(records(5, 5), 2), "a pipeline works as for any log"
    store.finish_oldest(wait=True)
    made = put(store, 1, 3, 3)
    plain = store.read(0, 1 << 20)
    store.close()
    assert len(plain) == 10
    assert all(b"\x01\x01" * 9 not in path.read_bytes() for path in folder(objects).iterdir())
    name = url.partition("#")[2]
    for column, table in (("pack", "records"), ("value", "rows")):
        found = postgres.execute(f"SELECT {column} FROM immortal.{table} WHERE instance = '{name}'")
        stored = b"".join(bytes(row[0]) for row in found)
        assert stored
        assert plain[0][16:] not in stored
        assert made[-1] not in stored
    with open_reader(place, "alice") as reader:
        assert list(reader.values(0)) == plain
        assert [reader.read_checkpoint_chunk(1, index) for index in range(4)] == made
    store = open_log(place, "alice")
    store.commit(records(10, 3))
    store.close()
