"""A log in PostgreSQL where its server, its connections or its settings are not as one would wish."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from immortal.coordinator.core.errors import (
    DamagedLogError,
    FencedError,
    LogError,
    LogFormatError,
    LogLockedError,
    LogUnavailableError,
)
from immortal.coordinator.core.interfaces import StreamStart, Transaction
from immortal.coordinator.log.authentication import LogKey
from immortal.coordinator.log.backend import Append, Options, Place, Row, Span, View
from immortal.coordinator.log.backends.postgres import statements
from immortal.coordinator.log.format import FORMAT_VERSION, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id
from immortal.coordinator.log.open import Log, place_of
from immortal.coordinator.log.store import RowLogStore
from immortal.coordinator.log.verify import BackupError, back_up
from immortal.log import create_log, open_log, open_reader
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import Trailer, encode_trailer
from tests.faults.sample_log import NAME, read_contents, write_log
from tests.helpers.postgres import Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

from immortal.coordinator.log.backends.postgres import connections, schema, standby  # noqa: E402
from immortal.coordinator.log.backends.postgres import statements as written  # noqa: E402
from immortal.coordinator.log.backends.postgres.connections import Address  # noqa: E402

COMMITTER_ID = 77
WAIT_S = 20.0
IDENTITY = LogIdentity(FORMAT_VERSION, "alice", COMMITTER_ID, 1)


@pytest.fixture
def url(postgres: Postgres, request: pytest.FixtureRequest) -> str:
    return postgres.url(request.node.name)


@pytest.fixture
def store(url: str) -> Iterator[RowLogStore]:
    store = create_log(url, "alice", committer_id=COMMITTER_ID)
    yield store
    store.close()
    place_of(url).remove()


def value(sequence_id: int, content: bytes = b"hi") -> bytes:
    record = encode_record(COMMITTER_ID, sequence_id, content)
    return record + encode_trailer(Trailer(1, []), int.from_bytes(record[8:16], "little"))


def records(first: int, count: int = 1, content: bytes = b"hi") -> Transaction:
    return Transaction(records=[(number, value(number, content)) for number in range(first, first + count)])


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.005)


class Appending:
    """One commit, in a thread of its own."""

    def __init__(self, store: RowLogStore, transaction: Transaction, ticket: int) -> None:
        self.error: Exception | None = None
        self._work = store, transaction, ticket
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        store, transaction, ticket = self._work
        try:
            store.commit(transaction, ticket)
        except LogError as error:
            self.error = error

    def ended(self) -> Exception | None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.error


def appender(store: RowLogStore) -> int:
    """The server's process that its appends go to."""
    pid: int = store.backend._connection.info.backend_pid  # type: ignore[attr-defined]
    return pid


def waits(postgres: Postgres, pid: int, event: str) -> bool:
    query = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
    return postgres.execute(query, pid) == [(event,)]


def is_settling(postgres: Postgres, before: int) -> bool:
    """Whether a writer waits for what it was not told, on another connection than the one with this process."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name ~ 'immortal' AND pid <> %s AND wait_event IN"
    return bool(postgres.execute(f"{query} ('SyncRep', 'transactionid', 'tuple')", before))


@contextlib.contextmanager
def head_held(postgres: Postgres) -> Iterator[None]:
    """No append gets past the heads of logs."""
    with psycopg.connect(postgres.url()) as other:
        other.execute("SELECT FROM immortal.heads FOR UPDATE")
        yield


@contextlib.contextmanager
def standby_missing(postgres: Postgres) -> Iterator[None]:
    """Commits are done, and wait for a standby that never answers."""
    postgres.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    postgres.execute("SELECT pg_reload_conf()")
    until(lambda: postgres.execute("SHOW synchronous_standby_names") == [("nobody",)])
    try:
        yield
    finally:
        postgres.execute("ALTER SYSTEM RESET synchronous_standby_names")
        postgres.execute("SELECT pg_reload_conf()")
        until(lambda: postgres.execute("SHOW synchronous_standby_names") == [("",)])


def test_a_connection_that_breaks_before_the_commit(store: RowLogStore, postgres: Postgres) -> None:
    store.commit(records(0), 1)
    pid = appender(store)
    with head_held(postgres):
        appending = Appending(store, records(1), 2)
        until(lambda: waits(postgres, pid, "transactionid"))
        postgres.execute("SELECT pg_terminate_backend(%s)", pid)
        assert isinstance(appending.ended(), LogUnavailableError)
    assert store.tail() == (1, 0)
    store.commit(records(1), 2)
    assert store.tail() == (2, 1)


@pytest.mark.parametrize("how", ["terminate", "cancel"])
def test_a_wait_for_standbys_that_is_cut_off_leaves_it_unknown(
    store: RowLogStore, postgres: Postgres, how: str
) -> None:
    """The append is there, and was not acknowledged by any standby: the tail is told once it was."""
    store.commit(records(0), 1)
    pid = appender(store)
    with standby_missing(postgres):
        appending = Appending(store, records(1), 2)
        until(lambda: waits(postgres, pid, "SyncRep"))
        postgres.execute(f"SELECT pg_{how}_backend(%s)", pid)
        assert isinstance(appending.ended(), LogUnavailableError)
        tail: list[tuple[int, int]] = []
        asking = threading.Thread(target=lambda: tail.append(store.tail()))
        asking.start()
        resolving = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name ~ 'immortal'"
        until(lambda: postgres.execute(resolving))
        assert tail == []
    asking.join(WAIT_S)
    assert tail == [(2, 1)]
    store.commit(records(2), 3)
    assert [len(store.read(0, 1 << 20)), store.tail()] == [3, (3, 2)]


def test_settling_that_is_cut_off_is_done_again(store: RowLogStore, postgres: Postgres) -> None:
    """Its own wait for standbys, and its connection as it commits: the tail is told once a standby has it."""
    store.commit(records(0), 1)
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name ~ 'immortal'"

    def cut_off(how: str) -> None:
        until(lambda: postgres.execute(waiting))
        postgres.execute(f"SELECT pg_{how}_backend(pid) FROM ({waiting}) AS waiting")

    with standby_missing(postgres):
        appending = Appending(store, records(1), 2)
        cut_off("cancel")
        assert isinstance(appending.ended(), LogUnavailableError)
        with ThreadPoolExecutor() as pool:
            for how in ("cancel", "terminate", "cancel"):
                settling = pool.submit(store.tail)
                cut_off(how)
                with pytest.raises(LogUnavailableError):
                    settling.result(WAIT_S)
    assert store.tail() == (2, 1)
    store.commit(records(2), 3)
    assert [len(store.read(0, 1 << 20)), store.tail()] == [3, (3, 2)]


def test_an_append_that_the_server_is_still_at_is_waited_for(store: RowLogStore, postgres: Postgres) -> None:
    """The road is cut off while it waits for a lock."""
    store.commit(records(0), 1)
    pid = appender(store)
    with head_held(postgres):
        appending = Appending(store, records(1), 2)
        until(lambda: waits(postgres, pid, "transactionid"))
        cut_road(store)
        assert isinstance(appending.ended(), LogUnavailableError)
        tail: list[tuple[int, int]] = []
        asking = threading.Thread(target=lambda: tail.append(store.tail()))
        asking.start()
        until(lambda: is_settling(postgres, pid))
    asking.join(WAIT_S)
    assert tail == [(2, 1)]
    store.commit(records(2), 3)


def begin(store: RowLogStore, first: int, count: int) -> None:
    """Of one record each, with tickets from ``first`` + 1 on."""
    for number in range(first, first + count):
        assert store.begin_commit(records(number), number + 1)


def go_on(store: RowLogStore, until_ticket: int) -> int:
    """Settle what is open, and write the rest up to that ticket; the ticket that the tail had."""
    done, last = store.tail()
    assert last == done - 1
    for number in range(done, until_ticket):
        store.commit(records(number), number + 1)
    assert store.read(0, 1 << 20) == [value(number) for number in range(until_ticket)]
    assert store.tail() == (until_ticket, until_ticket - 1)
    return done


def cut_road(store: RowLogStore) -> None:
    """The server does not know, and goes on with what it has."""
    road = socket.socket(fileno=os.dup(store.backend._connection.fileno()))  # type: ignore[attr-defined]
    road.shutdown(socket.SHUT_RDWR)
    road.close()


def test_several_appends_are_under_way_on_one_connection(store: RowLogStore, postgres: Postgres) -> None:
    store.commit(records(0), 1)
    with head_held(postgres):
        begin(store, 1, 3)
        until(lambda: waits(postgres, appender(store), "transactionid"))
        assert store.finish_oldest(wait=False) is False
    assert store.tail() == (1, 0), "as far as it is known"
    assert [store.finish_oldest(wait=True) for _ in range(3)] == [True] * 3
    assert store.tail() == (4, 3)
    store.commit(records(4), 5)
    begin(store, 5, 1)
    fd, events = store.backend.poll_target()
    waiting = select.poll()
    waiting.register(fd, events)
    while not store.finish_oldest(wait=False):
        assert waiting.poll(WAIT_S * 1000)
    assert store.tail() == (6, 5)


@pytest.mark.parametrize("how", ["terminate", "cancel"])
def test_a_connection_that_breaks_with_several_under_way(store: RowLogStore, postgres: Postgres, how: str) -> None:
    """Where the first one is only cancelled, the others are not done either: each expects the one before it."""
    store.commit(records(0), 1)
    with head_held(postgres):
        begin(store, 1, 3)
        until(lambda: waits(postgres, appender(store), "transactionid"))
        postgres.execute(f"SELECT pg_{how}_backend(%s)", appender(store))
        with pytest.raises(LogUnavailableError):
            store.finish_oldest(wait=True)
        with pytest.raises(LogUnavailableError, match="is not known yet"):
            store.begin_commit(records(4), 5)
        with pytest.raises(LogUnavailableError, match="is not known yet"):
            store.finish_oldest(wait=True)
    assert go_on(store, 5) == 1


def test_a_connection_that_breaks_between_two_that_are_under_way(store: RowLogStore, postgres: Postgres) -> None:
    begin(store, 0, 3)
    assert store.finish_oldest(wait=True)
    postgres.execute("SELECT pg_terminate_backend(%s)", appender(store))
    begun, finished = 3, 1
    with contextlib.suppress(LogUnavailableError):
        while True:
            begun += 1
            begin(store, begun - 1, 1)
            store.finish_oldest(wait=True)
            finished += 1
    assert finished <= go_on(store, begun + 1) <= begun


def test_of_several_that_the_server_is_still_at_the_tail_says_how_many_it_did(
    store: RowLogStore, postgres: Postgres
) -> None:
    store.commit(records(0), 1)
    with head_held(postgres):
        begin(store, 1, 3)
        before = appender(store)
        until(lambda: waits(postgres, before, "transactionid"))
        cut_road(store)
        with pytest.raises(LogUnavailableError):
            store.finish_oldest(wait=True)
        settled: list[int] = []
        settling = threading.Thread(target=lambda: settled.append(go_on(store, 6)))
        settling.start()
        until(lambda: is_settling(postgres, before))
    settling.join(WAIT_S)
    assert settled[0] in (2, 3, 4), "the first one held the head before the writer took it from itself"


@pytest.mark.parametrize("how", ["terminate", "cancel"])
def test_a_wait_for_standbys_that_is_cut_off_leaves_all_under_way_unknown(
    store: RowLogStore, postgres: Postgres, how: str
) -> None:
    store.commit(records(0), 1)
    with standby_missing(postgres):
        begin(store, 1, 3)
        until(lambda: waits(postgres, appender(store), "SyncRep"))
        before = appender(store)
        postgres.execute(f"SELECT pg_{how}_backend(%s)", before)
        with pytest.raises(LogUnavailableError):
            store.finish_oldest(wait=True)
        settled: list[int] = []
        settling = threading.Thread(target=lambda: settled.append(go_on(store, 6)))
        settling.start()
        until(lambda: is_settling(postgres, before))
        assert settled == []
    settling.join(WAIT_S)
    assert settled[0] in (2, 3, 4)


def test_of_several_that_are_fenced_none_is_done(store: RowLogStore, postgres: Postgres, url: str) -> None:
    store.commit(records(0), 1)
    with head_held(postgres):
        begin(store, 1, 2)
        until(lambda: waits(postgres, appender(store), "transactionid"))
        cut_road(store)
    with pytest.raises(LogUnavailableError):
        store.finish_oldest(wait=True)
    done = store.tail()[0]
    postgres.execute("UPDATE immortal.leases SET process = '{}', until = '-infinity'")
    second = open_log(url, "alice")
    try:
        assert store.begin_commit(records(done), done + 1)
        assert store.begin_commit(records(done + 1), done + 2)
        for _ in range(2):
            with pytest.raises(FencedError, match=r"at epoch \d+: it writes the log"):
                store.finish_oldest(wait=True)
        second.commit(records(done), 1)
    finally:
        second.close()


def test_behind_one_that_the_server_refuses_none_is_done(
    store: RowLogStore, postgres: Postgres, request: pytest.FixtureRequest
) -> None:
    postgres.execute("ALTER TABLE immortal.rows ADD CONSTRAINT no_carol CHECK (table_name <> 'peers') NOT VALID")
    try:
        begin(store, 0, 1)
        assert store.begin_commit(Transaction(peers={"carol": 7}), 2)
        begin(store, 1, 1)
        assert store.finish_oldest(wait=True)
        for _ in range(2):
            with pytest.raises(LogError, match=r"refuses it: .*no_carol"):
                store.finish_oldest(wait=True)
        query = "SELECT last_sequence_id, appends_count FROM immortal.heads WHERE instance = %s"
        assert postgres.execute(query, request.node.name) == [(0, 1)]
    finally:
        postgres.execute("ALTER TABLE immortal.rows DROP CONSTRAINT no_carol")


def test_one_that_is_large_or_depends_on_the_log_is_not_begun(
    store: RowLogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not store.begin_commit(Transaction(stream_starts={"bob": StreamStart(1)}), 1)
    monkeypatch.setattr(written, "ROWS_MAX", 1)
    assert not store.begin_commit(Transaction(peers={"bob": 1, "carol": 2}), 1)
    store.commit(Transaction(peers={"bob": 1, "carol": 2}), 1)
    begin(store, 0, 1)
    assert store.finish_oldest(wait=True)
    assert [store.tail(), store.summary().peers] == [(1, 0), {"bob": 1, "carol": 2}]


def test_arguments_arrive_at_the_server_as_they_were_given(postgres: Postgres) -> None:
    """Those of immortal.append, in the order of its types."""
    types = written.PREPARE.partition("(")[2].partition(")")[0]
    names = ", ".join(f"${number + 1}" for number in range(16))
    rows = [["a", "é", ""], [b"", b"\0\xff"], [None, b"x", None], [], [7, -1, 2**40]]
    for texts, keys, ends, empty, numbers in (rows, [[], [], [], [], []]):
        given = ["né", 1, 2**62, -1, 0, texts, keys, ends, -5, 5, numbers, [3, 2**31 - 1], keys, texts, empty, keys]
        with psycopg.connect(postgres.url().partition("#")[0]) as connection:
            connection.execute(f"PREPARE same ({types}) AS SELECT {names}".encode())
            sent = written.encoded(given)
            result = connection.pgconn.exec_prepared(b"same", sent, [1] * 16, 1)
            assert result.status == psycopg.pq.ExecStatus.TUPLES_OK, result.error_message
            taken = psycopg.adapt.Transformer(connection)
            taken.set_pgresult(result)
            assert list(taken.load_row(0, tuple) or ()) == given


def test_a_server_that_has_restarted_fails_one_read_and_one_append(store: RowLogStore, postgres: Postgres) -> None:
    store.commit(records(0), 1)
    with store.backend.view(), store.backend.view():  # two connections that wait
        pass
    postgres.stop()
    postgres.start()
    with pytest.raises(LogUnavailableError, match="does not answer"):
        store.read(0, 100)
    assert len(store.read(0, 100)) == 1
    with pytest.raises(LogUnavailableError, match="does not answer"):
        store.commit(records(1), 2)
    assert store.tail() == (1, 0)
    store.commit(records(1), 2)
    assert store.tail() == (2, 1)


def test_of_several_hosts_the_one_that_takes_writes_is_used(postgres: Postgres, tmp_path: Path) -> None:
    url = f"postgresql://owner@/postgres?host={tmp_path},{postgres.folder}"
    assert place_of(f"{url}#several").exists() is False
    readonly = f"{postgres.url()}&options=-c%20default_transaction_read_only%3Don#several"
    with pytest.raises(LogUnavailableError, match="session is read-only"):
        place_of(readonly).exists()


def test_a_late_append_of_the_same_writer_is_fenced(store: RowLogStore) -> None:
    """What was on its way when the tail was asked for comes too late."""
    backend: Any = store.backend
    store.commit(records(0), 1)
    late = Append(0, backend.fence, records(1).records)
    arguments = [backend._instance, late.fence, backend._appends_count + 1, 0, 1, *next(written.statements(late))]
    backend._outcome_unknown = True
    assert backend.resolve() == 0
    backend._sender.send(arguments)
    while (answer := backend._sender.answer()) is None:
        backend._sender.wait()
    assert answer == (False, late.fence + 1, 0, 0, connections.process_name())
    store.commit(records(1), 2)
    assert store.tail() == (2, 1)


def test_a_writer_whose_lease_has_run_out_is_fenced_by_the_next(
    store: RowLogStore, postgres: Postgres, url: str
) -> None:
    store.commit(records(0), 1)
    with pytest.raises(LogLockedError, match=rf"in use by {socket.gethostname()} \(process {os.getpid()}\)"):
        open_log(url, "alice")
    postgres.execute("UPDATE immortal.leases SET process = '{}', until = '-infinity'")
    second = open_log(url, "alice")
    try:
        with pytest.raises(FencedError, match=rf"fenced by {socket.gethostname()} \(process \d+\) at epoch 3:"):
            store.commit(records(1), 2)
        second.commit(records(1), 1)
        assert second.tail() == (1, 1)
    finally:
        second.close()


def test_a_writer_that_appends_nothing_sees_that_it_has_lost_the_log(
    store: RowLogStore, postgres: Postgres, url: str
) -> None:
    assert store.backend.fenced_by is None
    postgres.execute("UPDATE immortal.leases SET process = '{}', until = '-infinity'")
    second = open_log(url, "alice")
    try:
        until(lambda: store.backend.fenced_by is not None)
        with pytest.raises(FencedError, match=rf"fenced by {socket.gethostname()} \(process \d+\) at epoch 3: "):
            raise store.backend.fenced_by or AssertionError
        assert second.backend.fenced_by is None
    finally:
        second.close()


def test_a_lease_is_void_where_its_process_is_known_to_be_gone() -> None:
    """On this machine; of another one nobody knows until it has run out."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = connections.current_process()
    gone = msgspec.structs.replace(own, pid=ended.pid)
    elsewhere = msgspec.structs.replace(gone, space="another boot")
    later = msgspec.structs.replace(own, pid=os.getppid(), process_start_ticks=own.process_start_ticks + 1)
    living = msgspec.structs.replace(own, pid=os.getppid(), process_start_ticks=0)

    def is_gone(process: connections.Process) -> bool:
        return connections.has_process_ended(msgspec.json.encode(process).decode())

    assert [is_gone(one) for one in (gone, later, elsewhere, living)] == [True, True, False, False]
    assert is_gone(own), "this process holds no such lease"
    assert not connections.has_process_ended("of a later version")


def test_who_follows_is_known_and_told_at_once_that_the_log_is_given_up(store: RowLogStore, url: str) -> None:
    place, nudges = place_of(url), threading.Semaphore(0)
    follower = place.follow(Options(endpoint="tcp://10.0.0.2:7001"), nudges.release)
    assert follower is not None
    try:
        assert nudges.acquire(timeout=WAIT_S), "it may have been given up before"
        with psycopg.connect(url.partition("#")[0]) as connection:
            instance = url.partition("#")[2]
            # One of this process's name does not count for the writer, which is this process, too.
            until(
                lambda: (
                    connection.execute(
                        "SELECT is_ready FROM immortal.standbys WHERE instance = %s", [instance]
                    ).fetchall()
                    == [(False,)]
                )
            )
            connection.execute("UPDATE immortal.standbys SET name = 'b (process 7)', host = 'b'")
            connection.commit()
            until(
                lambda: [(one.host, one.endpoint) for one in store.backend.standbys] == [("b", "tcp://10.0.0.2:7001")]
            )
        assert place.holder() is not None
        while nudges.acquire(blocking=False):
            pass
        store.backend.release_lease()
        assert nudges.acquire(timeout=WAIT_S)
        assert place.holder() is None
    finally:
        follower.close(WAIT_S)
        place.remove()


def test_a_log_that_is_left_to_one_standby_is_not_for_others(
    store: RowLogStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.backend.successor = "b (process 7)"
    store.close()
    assert place_of(url).holder() == "b (process 7)"
    with pytest.raises(LogLockedError, match=r"is in use by b \(process 7\)"):
        open_log(url, "alice")
    monkeypatch.setattr(connections, "process_name", lambda: "b (process 7)")
    successor = open_log(url, "alice", endpoint="tcp://10.0.0.2:7001")
    successor.commit(records(0), 1)
    assert place_of(url).endpoint() == "tcp://10.0.0.2:7001"
    successor.close()


def test_a_log_that_its_heir_does_not_take_is_for_others_again(
    store: RowLogStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDOVER_TIMEOUT_S", 0.05)
    store.backend.successor = "b (process 7)"
    store.close()
    until(lambda: place_of(url).holder() is None)
    open_log(url, "alice").close()


def test_a_renewal_that_comes_late_does_not_take_the_lease_back(store: RowLogStore, url: str) -> None:
    store.backend.release_lease()
    until(lambda: store.backend.fenced_by is not None)
    assert place_of(url).holder() is None


def test_a_lease_whose_connection_breaks_as_it_is_made_is_renewed_by_the_next_one(
    store: RowLogStore, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[int] = []
    really_connect = connections.connect

    def connect(address: Address) -> psycopg.Connection[tuple[Any, ...]]:
        connection = really_connect(address)
        if len(broken) < 2:
            broken.append(connection.info.backend_pid)
            postgres.execute("SELECT pg_terminate_backend(%s, 10000)", connection.info.backend_pid)
        return connection

    monkeypatch.setattr(connections, "connect", connect)
    address = Address.parse(postgres.url("another").removeprefix("postgresql:"))
    held = connections.Lease(address, 0.1, "")
    with really_connect(address) as connection, connection.transaction():
        held.take_over(connection)

    def left_s() -> float:
        query = "SELECT extract(epoch FROM until - clock_timestamp()) FROM immortal.leases WHERE instance = 'another'"
        return float(postgres.execute(query)[0][0])

    until(lambda: left_s() < 0)
    held.start_renewing()
    try:
        until(lambda: left_s() > 0)
        assert len(broken) == 2
    finally:
        held.end()


def test_who_watches_hears_where_the_instance_is(store: RowLogStore, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "POLL_INTERVAL_S", 10 * WAIT_S)  # by news alone
    watching = place_of(url).watch()
    assert watching is not None
    try:
        store.close()
        later = open_log(url, "alice", endpoint="tcp://10.0.0.3:7001")
        until(lambda: watching.endpoint == "tcp://10.0.0.3:7001")
        later.close()
        assert watching.endpoint == "tcp://10.0.0.3:7001", "where it was last"
    finally:
        watching.close(WAIT_S)


def test_what_the_next_one_has_trimmed_is_not_damage(store: RowLogStore, postgres: Postgres, url: str) -> None:
    """A writer that has slept reads on, and does not know yet that the log was taken."""
    store.commit(records(0, 3), 1)
    postgres.execute("UPDATE immortal.leases SET process = '{}', until = '-infinity'")
    second = open_log(url, "alice")
    try:
        second.backend.append(Append(2, second.backend.fence, deletes=[Span("records", end=SEQUENCE_KEY.pack(2))]))
        with pytest.raises(FencedError, match=r"fenced by .* at epoch \d+"):
            store.read(0, 1 << 20)
        with pytest.raises(DamagedLogError, match=r"record 0 is missing: .*immortal recover"):
            second.read(0, 1 << 20)
    finally:
        second.close()


def test_a_writer_is_fenced_where_all_but_the_epoch_is_as_it_was(postgres: Postgres, url: str) -> None:
    place = place_of(url)
    first = place.create(IDENTITY, IDENTITY.rows(), Options())
    postgres.execute("UPDATE immortal.leases SET until = '-infinity'")
    second = place.open("alice", Options())
    try:
        with pytest.raises(FencedError):
            first.append(Append(-1, first.fence, puts=[("peers", b"a", b"of the first")]))
        with second.view() as view:
            assert view.get("peers", b"a") is None
    finally:
        first.close()
        second.close()
        place.remove()


def test_a_reader_sees_packs_in_part(store: RowLogStore, url: str) -> None:
    """Trimmed at its beginning; large ones are read in slices."""
    large = records(0, 6, bytes(40_000))
    store.commit(large, 1)
    store.commit(records(6, 2), 2)
    backend = store.backend
    backend.append(Append(7, backend.fence, deletes=[Span("records", end=SEQUENCE_KEY.pack(4))]))
    with open_reader(url) as reader, reader.view() as view:
        assert first_and_last_sequence_id(view) == (4, 7)
        numbers = [SEQUENCE_KEY.unpack(key)[0] for key, _ in view.scan("records")]
        assert numbers == [4, 5, 6, 7]
        assert [SEQUENCE_KEY.unpack(key)[0] for key, _ in view.scan_back("records")] == numbers[::-1]
        for sequence_id, value in large.records[4:]:
            assert bytes(view.get("records", SEQUENCE_KEY.pack(sequence_id)) or b"") == value
        assert view.get("records", SEQUENCE_KEY.pack(3)) is None
        assert [bytes(value) for _, value in view.scan("records")][:2] == [value for _, value in large.records[4:]]


# --- what is refused, and how -----------------------------------------------------------------------------------------


def test_a_server_that_may_lose_what_it_acknowledged_is_refused(postgres: Postgres) -> None:
    url = postgres.url("unsafe", options="-c synchronous_commit=off")
    with pytest.raises(LogError, match=r"could be lost.*synchronous_commit is off.*--allow-data-loss"):
        create_log(url, "alice")
    assert not place_of(url).exists()
    store = create_log(url, "alice", allow_data_loss=True)
    store.close()
    with pytest.raises(LogError, match="could be lost"):
        open_log(url, "alice")
    assert any("synchronous_commit is off" in line for line in place_of(url).durability())
    place_of(url).remove()
    assert "waits for no standby" not in place_of(postgres.url("x")).durability()[1]
    assert "commits wait for no standby" in place_of(postgres.url("x")).durability()[1]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://me:secret@localhost/db#a", "a password in the URL"),
        ("postgresql://localhost/db?nonsense=1#a", "is no URL of a database"),
    ],
)
def test_a_url_that_makes_no_sense(url: str, says: str) -> None:
    with pytest.raises(LogError, match=says) as raised:
        place_of(url)
    assert "secret" not in str(raised.value)


def test_a_database_is_no_log(postgres: Postgres) -> None:
    with pytest.raises(LogFormatError, match=r"may hold the logs of many instances: write .*#NAME"):
        open_reader(postgres.url())


def test_a_server_that_is_not_there(postgres: Postgres, tmp_path: Path) -> None:
    with pytest.raises(LogUnavailableError, match="does not answer"):
        place_of(f"postgresql:///db?host={tmp_path}#a").exists()


def test_a_log_that_is_made_again_goes_on_with_its_epochs(postgres: Postgres) -> None:
    """Else a writer of the one before could write it."""
    place = place_of(postgres.url("again"))
    first = place.create(IDENTITY, IDENTITY.rows(), Options())
    with pytest.raises(LogLockedError, match="in use by"):
        place.remove()
    first.close()
    place.remove()
    second = place.create(IDENTITY, IDENTITY.rows(), Options())
    assert second.fence > first.fence + 1
    second.close()
    place.remove()


def test_a_program_without_psycopg_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from immortal.coordinator.core.errors import LogError\n"
        "from immortal.coordinator.log.open import place_of\n"
        "try: place_of('postgresql://localhost/db#a')\n"
        "except LogError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'immortal-services[postgres]'" in done.stdout, done


# --- the schema and who may do what -----------------------------------------------------------------------------------


@pytest.fixture
def database(postgres: Postgres) -> Iterator[str]:
    postgres.execute("CREATE DATABASE empty")
    yield "empty"
    postgres.execute("DROP DATABASE empty WITH (FORCE)")


def made(place: Place) -> None:
    place.create(IDENTITY, IDENTITY.rows(), Options()).close()


def test_a_schema_of_before_is_brought_forward_with_what_is_in_it(
    postgres: Postgres, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.url("alice", database)
    store = create_log(url, "alice", committer_id=COMMITTER_ID)
    store.commit(records(0, 3))
    store.close()
    old, new = schema.VERSION, schema.VERSION + 1
    assert postgres.execute("SELECT version FROM immortal.schema_version", database=database) == [(old,)]
    more = "ALTER TABLE immortal.leases ADD COLUMN more text"
    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, more))
        newer.setattr(schema, "VERSION", new)
        needs = f"has version {old}, this program needs version {new}: 'immortal log upgrade"
        with pytest.raises(LogFormatError, match=needs):
            open_log(url, "alice")
        said: list[str] = []
        both = [threading.Thread(target=lambda: said.append(place_of(url).migrate())) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert [words.partition(" of ")[0] for words in said] == ["the schema"] * 2
        assert sorted(f"had version {old}, and has version {new} now" in words for words in said) == [False, True]
        with open_reader(url) as reader:
            assert reader.last_sequence_id() == 2
    with pytest.raises(LogFormatError, match=f"has version {new}, this program knows version {old}: use the newer"):
        open_log(url, "alice")


def test_a_schema_that_was_never_released_is_refused(postgres: Postgres, database: str) -> None:
    place = place_of(postgres.url("alice", database))
    made(place)
    postgres.execute("UPDATE immortal.schema_version SET version = 2", database=database)
    for way in (place.exists, place.migrate):
        with pytest.raises(LogFormatError, match=r"has version 2, which was never released: .* a new database"):
            way()


def test_a_migration_is_done_whole_or_not_at_all(
    postgres: Postgres, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(postgres.url("alice", database))
    made(place)
    broken = "CREATE TABLE immortal.half (a int); ALTER TABLE immortal.schema_version RENAME COLUMN version TO other"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, broken))
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    with pytest.raises(LogError, match="refuses it: column"):
        place.migrate()
    before = [(schema.VERSION - 1,)]
    assert postgres.execute("SELECT version FROM immortal.schema_version", database=database) == before
    assert postgres.execute("SELECT to_regclass('immortal.half')", database=database) == [(None,)]


def test_who_comes_while_the_schema_is_made_sees_nothing_of_it_yet(
    postgres: Postgres, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two coordinators that start at once with new logs: the second one saw a version between, and gave up."""
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "SELECT pg_advisory_xact_lock(7)"))
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    places = [place_of(postgres.url(name, database)) for name in ("alice", "bob")]
    with psycopg.connect(postgres.url(database=database)) as other:
        other.execute("SELECT pg_advisory_lock(7)")
        making = [threading.Thread(target=made, args=(place,)) for place in places]
        making[0].start()
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: postgres.execute(waiting) == [(1,)])
        assert not places[1].exists()
        making[1].start()
        until(lambda: postgres.execute(waiting) == [(2,)])
        other.execute("SELECT pg_advisory_unlock(7)")
        for thread in making:
            thread.join(WAIT_S)
    assert [place.exists() for place in places] == [True, True]


def test_a_coordinator_needs_the_rights_of_immortal_writer_and_no_more(postgres: Postgres, database: str) -> None:
    url = postgres.url("alice", database)
    made(place_of(url))
    postgres.execute("CREATE ROLE service LOGIN")
    try:
        as_service = url.replace("owner@", "service@")
        with pytest.raises(LogError, match="GRANT immortal_writer TO"):
            open_log(as_service, "alice")
        postgres.execute("GRANT immortal_writer TO service")
        store = open_log(as_service, "alice")
        store.commit(Transaction(epoch=1), 1)
        store.close()
        postgres.execute("CREATE DATABASE bare")
        with pytest.raises(LogError, match="can't be made or changed"):
            made(place_of(postgres.url("alice", "bare").replace("owner@", "service@")))
    finally:
        postgres.execute("DROP DATABASE IF EXISTS bare WITH (FORCE)")
        postgres.execute("REVOKE immortal_writer FROM service")
        postgres.execute("DROP ROLE service")


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_log_goes_into_the_database_and_back_and_says_the_same(url: str, tmp_path: Path) -> None:
    keys = [LogKey(b"k" * 32)]
    write_log(tmp_path / "log", keys=keys)
    there = back_up(tmp_path / "log", NAME, url, keys)
    assert (there.first_sequence_id, there.last_sequence_id, there.records_copied, there.checkpoints) == (
        0,
        119,
        120,
        2,
    )
    store = open_log(url, NAME, keys=keys)  # for writing, with its key: authentic, and it ends where it ended
    store.commit(Transaction(epoch=3))
    store.close()
    back_up(url, NAME, tmp_path / "back", keys)
    for table in ("records", "checkpoints", "chunks", "outputs", "impulses", "sources", "versions"):
        assert rows(url, table, keys) == rows(tmp_path / "back", table, keys), table
    place_of(url).remove()


def rows(log: Log, table: str, keys: Sequence[LogKey]) -> list[tuple[bytes, bytes]]:
    with open_reader(log, NAME, keys=keys) as reader, reader.view() as view:
        return [(bytes(key), bytes(value)) for key, value in view.scan(table)]


def test_a_copy_into_the_database_is_there_whole_or_not_at_all(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "log")
    whole = statements._rows

    def cut_off(source: View) -> Iterator[Row]:
        for number, row in enumerate(whole(source)):
            if number == 50:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(statements, "_rows", cut_off)
    with pytest.raises(KeyboardInterrupt):
        back_up(tmp_path / "log", NAME, url)
    assert not place_of(url).exists()
    monkeypatch.undo()
    back_up(tmp_path / "log", NAME, url)
    with pytest.raises(BackupError, match=r"there is a log .* already, and a copy is a new one: choose another name"):
        back_up(tmp_path / "log", NAME, url)
    back_up(url, NAME, tmp_path / "back")
    assert read_contents(tmp_path / "back") == read_contents(tmp_path / "log")
    place_of(url).remove()
