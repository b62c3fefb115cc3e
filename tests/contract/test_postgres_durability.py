"""What is acknowledged stays, whatever becomes of the settings of the server, and of the server, meanwhile."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import FencedError, LogLostError, LogUnavailableError
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log.store import RowLogStore
from immortal.log import create_log, open_log
from tests.contract.test_postgres_log import COMMITTER_ID, Appending, appender, begin, records, until, waits
from tests.helpers.postgres import Postgres, binaries, user_of_servers

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

from immortal.coordinator.log.backends.postgres import writer  # noqa: E402  # which needs it
from immortal.coordinator.log.backends.postgres.durability import Durability  # noqa: E402


@pytest.fixture
def url(postgres: Postgres, request: pytest.FixtureRequest) -> str:
    return postgres.url(request.node.name)


@pytest.fixture
def store(url: str) -> Iterator[RowLogStore]:
    store = create_log(url, "alice", committer_id=COMMITTER_ID, lease_s=0.5)
    yield store
    store.close()
    place_of(url).remove()


def reload(postgres: Postgres, *settings: str) -> None:
    for setting in settings:
        postgres.execute(f"ALTER SYSTEM {setting}")
    postgres.execute("SELECT pg_reload_conf()")


@contextlib.contextmanager
def altered(postgres: Postgres, name: str, value: str) -> Iterator[None]:
    before = postgres.execute(f"SHOW {name}")
    reload(postgres, f"SET {name} = '{value}'")
    until(lambda: postgres.execute(f"SHOW {name}") == [(value,)])
    try:
        yield
    finally:
        reload(postgres, f"RESET {name}")
        until(lambda: postgres.execute(f"SHOW {name}") == before)


# --- synchronous_commit -----------------------------------------------------------------------------------------------


@pytest.fixture
def switched_off(postgres: Postgres) -> Iterator[list[str]]:
    """What was switched off here is as before again."""
    switched: list[str] = []
    yield switched
    for what in switched:
        postgres.execute(f"ALTER {what} RESET synchronous_commit")
    postgres.execute("SELECT pg_reload_conf()")


@pytest.mark.parametrize("what", ["SYSTEM", "ROLE owner", "DATABASE postgres"])
def test_synchronous_commit_that_is_switched_off_has_no_part_in_it(
    store: RowLogStore, postgres: Postgres, switched_off: list[str], what: str
) -> None:
    """Neither in the session that appends, nor in one that is made since."""
    store.commit(records(0), 1)
    switched_off.append(what)
    postgres.execute(f"ALTER {what} SET synchronous_commit = off")
    postgres.execute("SELECT pg_reload_conf()")
    until(lambda: postgres.execute("SHOW synchronous_commit") == [("off",)])
    backend = store.backend

    def of_session() -> str:
        return Durability.read(backend._connection).synchronous_commit  # type: ignore[attr-defined]

    store.commit(records(1), 2)
    assert of_session() == "on"
    postgres.execute("SELECT pg_terminate_backend(%s, 10000)", appender(store))
    with pytest.raises(LogUnavailableError):
        store.commit(records(2), 3)
    assert store.tail() == (2, 1)
    assert of_session() == "on"
    store.commit(records(2), 3)


def test_a_crash_of_a_server_that_is_switched_off_meanwhile_loses_nothing(
    store: RowLogStore, postgres: Postgres, switched_off: list[str]
) -> None:
    switched_off += ["SYSTEM", "ROLE owner"]
    for what in switched_off:
        postgres.execute(f"ALTER {what} SET synchronous_commit = off")
    postgres.execute("SELECT pg_reload_conf()")
    postgres.execute("SELECT pg_terminate_backend(%s, 10000)", appender(store))
    with pytest.raises(LogUnavailableError):
        store.commit(records(0), 1)
    assert store.tail() == (0, -1)
    for number in range(20):
        store.commit(records(number), number + 1)
    postgres.stop(signal.SIGQUIT)
    postgres.start()
    with pytest.raises(LogUnavailableError):
        store.commit(records(20), 21)
    assert store.tail() == (20, 19)


def test_a_log_that_is_made_while_it_is_off_is_as_safe(postgres: Postgres, url: str, switched_off: list[str]) -> None:
    switched_off.append("ROLE owner")
    postgres.execute("ALTER ROLE owner SET synchronous_commit = off")
    store = create_log(url, "alice", committer_id=COMMITTER_ID)
    assert not any("can be lost" in line for line in place_of(url).durability())
    store.close()
    place_of(url).remove()


# --- standbys ---------------------------------------------------------------------------------------------------------


class Standby:
    """A receiver of the write-ahead log, which says what it has on its disk."""

    def __init__(self, postgres: Postgres) -> None:
        programs = binaries()
        assert programs is not None
        self._folder = postgres.folder / "received"
        self._folder.mkdir()
        if (user := user_of_servers()) is not None:
            shutil.chown(self._folder, user)
        place = ["-D", str(self._folder), "-d", f"host={postgres.folder} user=owner application_name=copy"]
        self._process = subprocess.Popen(
            [programs / "pg_receivewal", *place, "--synchronous", "--no-loop"], cwd=postgres.folder, user=user
        )

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder)


@pytest.fixture
def standby(postgres: Postgres) -> Iterator[Standby]:
    """Commits wait for it."""
    standby = Standby(postgres)
    try:
        until(lambda: postgres.execute("SELECT 1 FROM pg_stat_replication WHERE application_name = 'copy'"))
        with altered(postgres, "synchronous_standby_names", "ANY 1 (copy)"):
            until(lambda: postgres.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'quorum'"))
            yield standby
    finally:
        standby.end()


@pytest.mark.parametrize("how", ["commit", "begin", "parts"])
def test_a_commit_whose_standby_is_let_go_of_is_not_acknowledged(
    standby: Standby, store: RowLogStore, postgres: Postgres, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a standby that is silent, and somebody says that commits wait for none any more."""
    if how == "parts":
        monkeypatch.setattr(writer, "armed", True)
    store.commit(records(0), 1)
    standby.send(signal.SIGSTOP)
    if how == "begin":
        begin(store, 1, 2)
    else:
        appending = Appending(store, records(1), 2)
    until(lambda: waits(postgres, appender(store), "SyncRep"))
    reload(postgres, "SET synchronous_standby_names = ''")
    if how == "begin":
        with pytest.raises(LogUnavailableError, match="synchronous_standby_names is ''"):
            store.finish_oldest(wait=True)
    else:
        assert "synchronous_standby_names is ''" in str(appending.ended())
    with pytest.raises(LogUnavailableError, match="commits wait for 0 standbys, and had to wait for 1"):
        store.tail()
    reload(postgres, "SET synchronous_standby_names = 'FIRST 1 (copy, another)'")
    standby.send(signal.SIGCONT)
    until(lambda: postgres.execute("SHOW synchronous_standby_names") == [("FIRST 1 (copy, another)",)])
    done = 3 if how == "begin" else 2
    assert store.tail() == (done, done - 1)
    store.commit(records(done), done + 1)


def test_a_log_whose_commits_waited_for_a_standby_is_not_opened_where_they_do_not(
    standby: Standby, store: RowLogStore, postgres: Postgres, url: str
) -> None:
    """By whoever takes it over, or starts it again: it waits until that is set right, or is told."""
    store.commit(records(0), 1)
    store.close()
    reload(postgres, "SET synchronous_standby_names = ''")
    until(lambda: postgres.execute("SHOW synchronous_standby_names") == [("",)])
    with pytest.raises(LogUnavailableError, match=r"had to wait for 1 .*start it once with --allow-data-loss"):
        open_log(url, "alice")
    open_log(url, "alice", allow_data_loss=True).close()
    open_log(url, "alice").close()


@pytest.mark.parametrize(
    ("names", "count"),
    [
        ("", 0),
        ("a", 1),
        ("a, b", 1),
        ("*", 1),
        ("2 (a, b, c)", 2),
        ("FIRST 3 (*)", 3),
        ("any 2(a,b)", 2),
        ('"2 (x"', 1),
    ],
)
def test_how_many_standbys_a_commit_waits_for(names: str, count: int) -> None:
    assert Durability("on", "on", "on", names).standbys_count == count


# --- settings that change meanwhile -----------------------------------------------------------------------------------


def test_a_setting_that_makes_it_unsafe_is_noticed_while_connected(store: RowLogStore, postgres: Postgres) -> None:
    """Within the time between two renewals of the lease, also where nothing is appended."""
    store.commit(records(0), 1)
    with altered(postgres, "full_page_writes", "off"):
        until(lambda: "full_page_writes is off" in store.backend.problem)
        with pytest.raises(LogUnavailableError, match="full_page_writes is off"):
            store.commit(records(1), 2)
        with pytest.raises(LogUnavailableError, match="input waits until that is set right"):
            store.tail()
    assert store.tail() == (1, 0)
    store.commit(records(1), 2)
    until(lambda: not store.backend.problem)


def test_a_setting_is_looked_at_after_a_reconnect(store: RowLogStore, postgres: Postgres) -> None:
    with altered(postgres, "full_page_writes", "off"):
        postgres.execute("SELECT pg_terminate_backend(%s, 10000)", appender(store))
        with pytest.raises(LogUnavailableError):
            store.commit(records(0), 1)
        with pytest.raises(LogUnavailableError, match="full_page_writes is off"):
            store.tail()
    assert store.tail() == (0, -1)


# --- a server that lacks the last commits -----------------------------------------------------------------------------


@pytest.fixture
def older(tmp_path: Path) -> Iterator[Older]:
    programs = binaries()
    assert programs is not None
    older = Older(programs, tmp_path)
    yield older
    older.server.stop(signal.SIGQUIT)
    older.server.remove()


class Older:
    """A server, and its state of some moment: as a standby has it that was sent no more, and is promoted."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.server = Postgres(programs)
        self._data, self._copy = self.server.folder / "data", folder / "copy"

    def keep(self) -> None:
        self.server.stop(signal.SIGQUIT)
        subprocess.run(["cp", "-a", self._data, self._copy], check=True)
        self.server.start()

    def promote(self) -> None:
        self.server.stop(signal.SIGQUIT)
        shutil.rmtree(self._data)
        subprocess.run(["cp", "-a", self._copy, self._data], check=True)
        self.server.start()


def test_a_server_that_lacks_the_last_commits_is_not_gone_on_with(older: Older) -> None:
    """Neither by who has written them, nor by who takes the log over, nor by a start."""
    url = {name: older.server.url(name) for name in ("appended", "idle", "taken", "shared", "overtaken", "read")}
    stores = {name: create_log(one, "alice", committer_id=COMMITTER_ID, lease_s=0.5) for name, one in url.items()}
    for store in stores.values():
        store.commit(records(0), 1)
    for name in ("taken", "shared", "read"):
        stores[name].close()
    older.keep()
    for name in ("appended", "idle", "overtaken"):
        with pytest.raises(LogUnavailableError):  # its server was restarted
            stores[name].commit(records(1), 2)
        assert stores[name].tail() == (1, 0)
        stores[name].commit(records(1), 2)
    for name in ("taken", "shared", "read"):
        stores[name] = open_log(url[name], "alice", lease_s=0.5)
    stores["read"].commit(records(1), 1)
    stores["read"].close()
    older.promote()
    older.server.execute("UPDATE immortal.leases SET process = '{}', until = '-infinity' WHERE instance = 'overtaken'")

    with pytest.raises(LogUnavailableError):
        stores["appended"].commit(records(2), 3)
    with pytest.raises(LogLostError, match="has lost acknowledged input"):
        stores["appended"].tail()
    with pytest.raises(LogLostError):
        stores["appended"].commit(records(2), 3)
    until(lambda: "may have lost acknowledged input" in stores["idle"].backend.problem)
    with pytest.raises(LogUnavailableError, match="may have lost"):
        stores["idle"].commit(records(2), 3)
    with pytest.raises(LogLostError):
        stores["idle"].tail()
    with pytest.raises(LogUnavailableError):
        stores["taken"].commit(records(1), 2)
    with pytest.raises(LogLostError, match="of epoch"):  # that it was taken is not known there
        stores["taken"].tail()
    # Another one takes it first, and goes on: who has written more tells all who have to do with it.
    second = open_log(url["overtaken"], "alice", lease_s=0.5)
    second.commit(records(1), 1)
    with pytest.raises(LogUnavailableError):
        stores["overtaken"].commit(records(2), 3)
    with pytest.raises(
        LogLostError, match="it was taken over with 1 appends of epoch 2, and 1 of epoch 3 were acknowledged"
    ):
        stores["overtaken"].tail()
    until(lambda: "has lost acknowledged input" in second.backend.problem)
    with pytest.raises(LogUnavailableError):
        second.commit(records(2), 2)
    with pytest.raises(LogLostError):
        second.tail()
    second.close()

    # Another one has taken it since, in the same epoch.
    taken = "UPDATE immortal.heads SET epoch = epoch + 1, appends_count = 0, holder = 'b (process 1)'"
    older.server.execute(f"{taken} WHERE instance = 'shared'")
    with pytest.raises(LogUnavailableError):
        stores["shared"].commit(records(1), 2)
    with pytest.raises(FencedError, match=r"fenced by b \(process 1\)"):
        stores["shared"].tail()
    stores["shared"].close()
    for name in ("appended", "idle", "taken", "overtaken"):
        stores[name].close()
        with pytest.raises(LogLostError, match="--allow-data-loss"):
            open_log(url[name], "alice")

    place = place_of(url["read"])
    place.sequence_id_required_min = 1  # as who follows it has read
    for again in (place, url["read"]):
        with pytest.raises(LogLostError, match="ends with record 0, and had record 1"):
            open_log(again, "alice")
    open_log(url["read"], "alice", allow_data_loss=True).close()
    store = open_log(url["read"], "alice")
    store.commit(records(1), 1)
    store.close()


def test_who_wrote_a_log_that_was_removed_is_fenced(store: RowLogStore, postgres: Postgres, url: str) -> None:
    store.commit(records(0), 1)
    postgres.execute("UPDATE immortal.leases SET process = '{}', until = '-infinity' WHERE instance ~ 'removed'")
    place_of(url).remove()
    postgres.execute("SELECT pg_terminate_backend(%s, 10000)", appender(store))
    with pytest.raises(LogUnavailableError):
        store.commit(records(1), 2)
    with pytest.raises(FencedError, match="fenced by whoever has removed it"):
        store.tail()
