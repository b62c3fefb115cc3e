"""A log in a real PostgreSQL: who may write, connections that break in the middle of an append, servers that end."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coordinator.core.errors import (
    FencedError,
    LogError,
    LogFormatError,
    LogLockedError,
    LogUnavailableError,
)
from coordinator.core.interfaces import Transaction
from coordinator.instances.registry import Registry, RegistryError
from coordinator.log import RowLogStore, create_log, open_log, open_reader
from coordinator.log.backend import Append, Options, Span
from coordinator.log.backends.postgres import PostgresBackend, PostgresPlace, schema
from coordinator.log.backends.postgres import lease as log_lease
from coordinator.log.format import SEQUENCE_KEY
from protocol.record import encode_record
from protocol.trailer import Trailer, encode_trailer
from tests.helpers.cli import DEADLINE_S, Run, immortal
from tests.helpers.postgres import Server

COMMITTER_ID = 77


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def database(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a database of the test's own."""
    name = re.sub(r"\W", "_", request.node.name.lower())[:60]
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    yield server.url.replace("/postgres?", f"/{name}?")
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


@pytest.fixture
def store(database: str) -> Iterator[RowLogStore]:
    store = create_log(f"{database}#alice", "alice", committer_id=COMMITTER_ID)
    yield store
    store.close()


def record(sequence_id: int, text: str = "") -> tuple[int, bytes]:
    data = encode_record(COMMITTER_ID, sequence_id, text.encode() or b"x")
    return sequence_id, data + encode_trailer(Trailer(5), int.from_bytes(data[8:16], "little"))


def commit(store: RowLogStore, *sequence_ids: int, epoch: int | None = None) -> None:
    store.commit(Transaction(records=[record(number) for number in sequence_ids], epoch=epoch))


def count(store_url: str) -> int:
    with open_reader(store_url) as reader:
        return reader.summary().last_sequence_id + 1


def sessions(database: str, query: str) -> int:
    with psycopg.connect(database) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE %s", (query,)
        ).fetchone()
        return 0 if row is None else int(row[0])


def end_sessions(database: str, query: str = "SELECT immortal.append%") -> None:
    with psycopg.connect(database) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND query LIKE %s",
            (query,),
        )


def until(condition: Any) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s


# --- a connection that breaks -----------------------------------------------------------------------------------------


class Held:
    """The head of a log's row is locked by another session, so an append waits in the middle."""

    def __init__(self, database: str) -> None:
        self.connection = psycopg.connect(database)
        self.connection.execute("SELECT FROM immortal.logs FOR UPDATE")

    def release(self) -> None:
        self.connection.commit()
        self.connection.close()


def in_thread(work: Any) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_an_append_that_was_cut_off_before_it_was_done(database: str, store: RowLogStore) -> None:
    commit(store, 0)
    held = Held(database)
    thread, errors = in_thread(lambda: commit(store, 1))
    until(lambda: sessions(database, "SELECT immortal.append%") == 1)
    end_sessions(database)
    thread.join()
    held.release()
    (error,) = errors
    assert isinstance(error, LogUnavailableError)
    assert store.was_done() is False
    assert count(f"{database}#alice") == 1
    commit(store, 1)
    commit(store, 2)
    assert count(f"{database}#alice") == 3


def test_an_append_that_was_done_and_not_answered(database: str, store: RowLogStore) -> None:
    commit(store, 0)
    backend = store.backend
    assert isinstance(backend, PostgresBackend)
    ask = backend._ask

    def answer_is_lost(statement: str, *parameters: object) -> Any:
        ask(statement, *parameters)
        backend._drop()
        raise LogUnavailableError("the connection is gone")

    backend._ask = answer_is_lost  # type: ignore[method-assign]
    with pytest.raises(LogUnavailableError):
        commit(store, 1, epoch=9)
    backend._ask = ask  # type: ignore[method-assign]
    assert store.was_done() is True
    assert store.was_done() is False, "it was asked for once"
    commit(store, 2)
    assert store.summary().epoch == 9
    assert count(f"{database}#alice") == 3


def test_one_that_comes_late_is_not_done(database: str, store: RowLogStore) -> None:
    """The network had it, and delivers it once the writer has given it up and goes on: of rows alone, no record."""
    backend = store.backend
    assert isinstance(backend, PostgresBackend)
    ask = backend._ask
    late: list[tuple[Any, ...]] = []

    def is_on_its_way(statement: str, *parameters: object) -> Any:
        late.append((statement, *parameters))
        raise LogUnavailableError("the connection is gone")

    backend._ask = is_on_its_way  # type: ignore[method-assign]
    with pytest.raises(LogUnavailableError):
        commit(store, epoch=5)
    backend._ask = ask  # type: ignore[method-assign]
    assert store.was_done() is False
    assert "the log ends with" in ask(*late[0])[0]
    assert store.summary().epoch == 0
    commit(store, epoch=6)
    assert "the log ends with" in ask(*late[0])[0]
    assert store.summary().epoch == 6


def test_a_step_of_trimming_that_was_cut_off_does_not_end_the_log(database: str, store: RowLogStore) -> None:
    backend = store.backend
    assert isinstance(backend, PostgresBackend)
    held = Held(database)
    thread, errors = in_thread(lambda: store._change(changes()))
    until(lambda: sessions(database, "SELECT immortal.append%") == 1)
    end_sessions(database)
    thread.join()
    held.release()
    assert isinstance(errors[0], LogUnavailableError)
    commit(store, 0)
    assert count(f"{database}#alice") == 1


def changes() -> Any:
    from coordinator.log.rows import Changes

    return Changes(deletes=[Span("replies")])


# --- who writes -------------------------------------------------------------------------------------------------------


def test_a_writer_whose_lease_runs_keeps_others_off(database: str, store: RowLogStore) -> None:
    with pytest.raises(LogLockedError, match=r"is written by .*, process"):
        open_log(f"{database}#alice", "alice")
    place = PostgresPlace(f"{database}#alice".partition(":")[2])
    assert place.is_live()
    assert ", process " in (place.holder() or "")
    commit(store, 0)
    store.close()
    assert not place.is_live(), "given up, not run out"


def test_who_comes_back_after_its_lease_writes_nothing(database: str, store: RowLogStore) -> None:
    """A process that stood still, or a machine that was cut off."""
    commit(store, 0)
    backend = store.backend
    assert isinstance(backend, PostgresBackend)
    assert backend._lease is not None
    backend._lease.close(give_up=False)  # nobody renews it
    second = open_log(f"{database}#alice", "alice")  # waits until it has run out
    commit(second, 1)
    for _ in range(2):
        with pytest.raises(FencedError, match=r"fenced by .*, process .* at epoch 2"):
            commit(store, 1)
    with pytest.raises(FencedError):
        store._change(changes())
    commit(second, 2)
    second.close()
    assert count(f"{database}#alice") == 3


def test_who_asks_for_an_answer_after_a_takeover_is_fenced(database: str, store: RowLogStore) -> None:
    backend = store.backend
    assert isinstance(backend, PostgresBackend)
    assert backend._lease is not None
    backend._lease.close(give_up=True)
    held = Held(database)
    thread, errors = in_thread(lambda: commit(store, 0))
    until(lambda: sessions(database, "SELECT immortal.append%") == 1)
    end_sessions(database)
    thread.join()
    held.release()
    assert isinstance(errors[0], LogUnavailableError)
    second = open_log(f"{database}#alice", "alice")
    with pytest.raises(FencedError, match="at epoch 2"):
        store.was_done()
    second.close()


def test_an_append_and_a_takeover_wait_for_each_other(database: str, store: RowLogStore) -> None:
    """Either the append is there when the takeover is done, or it never will be."""
    backend = store.backend
    assert isinstance(backend, PostgresBackend)
    assert backend._lease is not None
    backend._lease.close(give_up=True)
    stopped = threading.Event()

    def write() -> None:
        number = 0
        while not stopped.is_set():
            commit(store, number)
            number += 1

    thread, errors = in_thread(write)
    until(lambda: count(f"{database}#alice") > 5)
    second = open_log(f"{database}#alice", "alice")
    seen = second.summary().last_sequence_id
    thread.join(DEADLINE_S)
    assert isinstance(errors[0], FencedError)
    assert second.summary().last_sequence_id == seen
    second.close()


# --- the database -----------------------------------------------------------------------------------------------------


def test_many_logs_in_one_database(database: str, store: RowLogStore) -> None:
    other = create_log(f"{database}#bob", "bob")
    commit(store, 0, 1)
    assert other.summary().last_sequence_id == -1
    assert other.space().used_bytes < store.space().used_bytes
    other.close()
    place = PostgresPlace(f"{database}#bob".partition(":")[2])
    place.remove()
    assert not place.exists()
    commit(store, 2)


def test_records_of_one_row_are_removed_one_by_one(database: str, store: RowLogStore) -> None:
    commit(store, *range(10))
    commit(store, 10, 11)
    store.backend.append(Append(11, store.backend.fence, deletes=[Span("records", end=SEQUENCE_KEY.pack(4))]))
    with store.backend.view() as view:
        assert [SEQUENCE_KEY.unpack(bytes(key))[0] for key, _ in view.scan("records")] == [*range(4, 12)]
        assert [SEQUENCE_KEY.unpack(bytes(key))[0] for key, _ in view.scan_back("records", SEQUENCE_KEY.pack(7))] == [
            *range(7, 3, -1)
        ]
        assert view.get("records", SEQUENCE_KEY.pack(3)) is None
        assert bytes(view.get("records", SEQUENCE_KEY.pack(9)) or b"") == record(9)[1]
        assert view.size("records").rows_count == 8
    assert [len(store.read(4, 1 << 20)), len(store.read(11, 1))] == [8, 1]


def test_a_schema_of_a_newer_program_is_refused(database: str, store: RowLogStore) -> None:
    store.close()
    with psycopg.connect(database) as connection:
        connection.execute("UPDATE immortal.schema_version SET version = 99")
    with pytest.raises(LogFormatError, match=r"has version 99, this program knows \d+: use the newer"):
        open_log(f"{database}#alice", "alice")
    with pytest.raises(LogFormatError, match="version 99"):
        create_log(f"{database}#bob", "bob")


def test_a_database_without_a_schema(database: str) -> None:
    with pytest.raises(LogFormatError, match="no schema 'immortal'"):
        open_log(f"{database}#alice", "alice")
    assert not PostgresPlace(f"{database}#alice".partition(":")[2]).exists()
    with pytest.raises(LogFormatError, match="names a database, no log in it"):
        open_log(database, "alice")


def test_two_that_make_the_schema_at_once(database: str) -> None:
    made = [in_thread(lambda name=name: create_log(f"{database}#{name}", name).close()) for name in "abcd"]
    for thread, _ in made:
        thread.join()
    assert [errors for _, errors in made] == [[], [], [], []]


def test_a_role_that_writes_logs_and_no_more(database: str, server: Server) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        if not connection.execute("SELECT FROM pg_roles WHERE rolname = 'immortal_writer'").rowcount:
            connection.execute("CREATE ROLE immortal_writer NOLOGIN")
            connection.execute("CREATE ROLE worker LOGIN IN ROLE immortal_writer")
    create_log(f"{database}#alice", "alice", committer_id=COMMITTER_ID).close()
    url = database.replace("postgres@", "worker@")
    store = open_log(f"{url}#alice", "alice")
    commit(store, 0)
    store.close()
    with pytest.raises(LogError, match="permission denied"):
        create_log(f"{url}#bob", "bob")
    with psycopg.connect(url) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("DROP TABLE immortal.rows")


def test_a_server_that_would_lose_what_it_acknowledged(
    database: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_log(f"{database}#alice", "alice").close()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("ALTER ROLE postgres SET synchronous_commit = off")
    try:
        with pytest.raises(LogError, match="would lose acknowledged input: synchronous_commit is off"):
            open_log(f"{database}#alice", "alice")
        monkeypatch.setenv("IMMORTAL_ALLOW_DATA_LOSS", "1")
        open_log(f"{database}#alice", "alice").close()
    finally:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("ALTER ROLE postgres RESET synchronous_commit")


def test_secrets_of_a_url_are_not_shown(database: str) -> None:
    place = PostgresPlace("//someone:hush@127.0.0.1:1/db?sslmode=disable#alice")
    assert "hush" not in place.where
    with pytest.raises(LogUnavailableError) as raised:
        place.open("alice", Options())
    assert "hush" not in str(raised.value)
    other = PostgresPlace("//127.0.0.1:1/db?user=a&password=hush&x=1#alice")
    assert "hush" not in other.where


def test_registering_names_the_log(tmp_path: Path, database: str) -> None:
    registry = Registry(tmp_path / "home")
    assert registry.register("alice", "tcp://127.0.0.1:*", log=database).log == f"{database}#alice"
    assert registry.register("bob", "tcp://127.0.0.1:*", log=f"{database}#shared").log == f"{database}#shared"
    with pytest.raises(RegistryError, match="is the log folder of 'bob'"):
        registry.register("carol", "tcp://127.0.0.1:*", log=f"{database}#shared")


# --- instances --------------------------------------------------------------------------------------------------------

COUNTER = """
from appsdk import Immortal, rpc


class Counter(Immortal):
    n: int

    def __init__(self) -> None:
        self.n = 0

    @rpc
    def add(self, by: int) -> int:
        self.n += by
        return self.n
"""


@pytest.fixture
def folder(tmp_path: Path, database: str) -> Path:
    (tmp_path / "counter.py").write_text(COUNTER)
    immortal(tmp_path, "register", "counter", "--peer", "tcp://127.0.0.1:*", "--log", database)
    return tmp_path


def add(folder: Path) -> int:
    return int(immortal(folder, "call", "counter", "add", "1"))


@pytest.mark.kills
def test_an_instance_lives_through_the_ends_of_its_connections_and_its_server(folder: Path, database: str) -> None:
    server = Server()
    try:
        immortal(folder, "register", "other", "--peer", "tcp://127.0.0.1:*", "--log", server.url)
        run = Run(folder, "other", "counter:Counter")
        try:
            run.line("ready")
            calls = [immortal(folder, "call", "other", "add", "1").strip() for _ in range(3)]
            server.stop("immediate")
            waiting = in_thread(lambda: calls.append(immortal(folder, "call", "other", "add", "1").strip()))
            run.line("the log does not answer")
            assert "does not answer since" in immortal(folder, "status", "other")
            server.start()
            waiting[0].join()
            assert waiting[1] == []
            run.line("the log answers again")
            end_sessions(server.url, "%")
            calls.append(immortal(folder, "call", "other", "add", "1").strip())
            assert calls == ["1", "2", "3", "4", "5"]
            assert run.stop() == 0, run.text
        finally:
            run.kill()
        assert "sound" in immortal(folder, "log", "verify", "other")
    finally:
        server.close()


@pytest.mark.kills
def test_a_follower_takes_over(folder: Path) -> None:
    first = Run(folder, "counter", "counter:Counter")
    try:
        first.line("ready")
        assert [add(folder) for _ in range(3)] == [1, 2, 3]
        second = Run(folder, "counter", "--follow")
        try:
            second.line("to follow")
            second.line("following")
            first.kill()
            second.line("ready")
            assert [add(folder) for _ in range(3)] == [4, 5, 6]
            third = Run(folder, "counter", "--follow")  # and back again, at a clean stop
            try:
                third.line("following")
                assert second.stop() == 0, second.text
                third.line("ready")
                assert add(folder) == 7
                assert third.stop() == 0, third.text
            finally:
                third.kill()
        finally:
            second.kill()
    finally:
        first.kill()
    assert "sound" in immortal(folder, "log", "verify", "counter")


def test_leases_are_longer_than_what_renews_them() -> None:
    assert log_lease.LEASE_S >= 3 * log_lease.RENEW_S
    assert len(schema.MIGRATIONS) == 1
