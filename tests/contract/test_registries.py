"""What a registry promises, in a folder and in a database; and what only one of many machines can show."""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import NotConnectable
from immortal.cli import main
from immortal.coordinator.config import ConfigError
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.interfaces import Transaction
from immortal.coordinator.instances import upgrade_mark
from immortal.coordinator.instances.own_logs import OwnLogs
from immortal.coordinator.instances.registry import Registry, RegistryError, UnknownInstanceError
from immortal.coordinator.instances.upgrade_mark import UpgradeMark
from immortal.coordinator.log.open import create_log, open_log, place_of
from immortal.coordinator.operator.unregister import unregister
from immortal.coordinator.peers import keys
from immortal.coordinator.peers.keys import ensure_machine_keys
from immortal.coordinator.peers.security import Keyring
from immortal.messenger import Role
from immortal.protocol import shared_registry
from immortal.protocol.shared_registry import SharedHomeError
from tests.helpers.postgres import Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

DATABASE = "registries"
WAIT_S = 20.0
PEER = "tcp://127.0.0.1:7001"


@dataclasses.dataclass
class Fleet:
    """``url``: where the registry is; "": in a folder, which all machines share."""

    folder: Path
    url: str
    monkeypatch: pytest.MonkeyPatch

    def machine(self, name: str) -> Registry:
        if not self.url:
            return Registry(self.folder / "home")
        self.monkeypatch.setenv("IMMORTAL_LOCAL", str(self.folder / name))
        return Registry(self.url)


@pytest.fixture
def database(postgres: Postgres) -> Iterator[str]:
    postgres.execute(f"CREATE DATABASE {DATABASE}")
    yield postgres.url(database=DATABASE)
    postgres.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")


@pytest.fixture(params=["folder", "database"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    url = request.getfixturevalue("database") if request.param == "database" else ""
    return Fleet(tmp_path, url, monkeypatch)


@pytest.fixture
def shared(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(tmp_path, database, monkeypatch)


def until(condition: Callable[[], object], within_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.005)


# --- of both ----------------------------------------------------------------------------------------------------------


def test_what_one_registers_all_know(fleet: Fleet) -> None:
    registered = fleet.machine("a").register("shop", PEER, app="shop:Shop")
    other = fleet.machine("b")
    assert other.names() == ["shop"]
    settings = other.load("shop")
    assert (settings.peer, settings.app, settings.log) == (PEER, "shop:Shop", registered.log)
    with pytest.raises(RegistryError, match="'shop' is registered already"):
        other.register("shop", "tcp://127.0.0.1:7009")
    other.remember_app("shop", "shop:Other")
    assert fleet.machine("a").load("shop").app == "shop:Other"
    unregister(other, "shop")
    again = fleet.machine("a")
    assert again.names() == []
    with pytest.raises(UnknownInstanceError, match="nothing is registered"):
        again.load("shop")


def test_a_name_and_a_port_are_given_once(fleet: Fleet) -> None:
    machines = [fleet.machine(name) for name in "ab"]
    problems: list[Exception] = []

    def register(registry: Registry) -> None:
        try:
            registry.register("shop", PEER)
        except RegistryError as error:
            problems.append(error)

    threads = [threading.Thread(target=register, args=[registry]) for registry in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(problems) == 1, problems
    assert "is registered already" in str(problems[0])


def test_settings_are_replaced_whole_or_not_at_all(fleet: Fleet) -> None:
    one = fleet.machine("a")
    one.register("shop", PEER)
    text = one.path("shop").read_text()
    for wrong, problem in (("peer = ", "no valid TOML"), ('peer = "there"', "expected"), ("", "'peer' is missing")):
        with pytest.raises(ConfigError, match=problem):
            one.replace("shop", wrong)
    one.replace("shop", f'allow = ["till"]\n# of us all\n{text}')
    other = fleet.machine("b")
    assert other.load("shop").allow == ("till",)
    assert "# of us all" in other.path("shop").read_text()
    with pytest.raises(UnknownInstanceError, match="no instance 'shup'"):
        other.replace("shup", text)


def test_an_upgrade_that_is_asked_for_is_known_to_who_starts_next(fleet: Fleet) -> None:
    one = fleet.machine("a")
    one.register("shop", PEER)
    upgrade_mark.write(one.home / "shop", UpgradeMark(2, "shop:Shop"))
    other = fleet.machine("b")
    assert upgrade_mark.read(other.home / "shop") == UpgradeMark(2, "shop:Shop")
    upgrade_mark.mark_failed(other.home / "shop", "it can't be")
    one = fleet.machine("a")
    assert upgrade_mark.read(one.home / "shop") == UpgradeMark(2, "shop:Shop", "it can't be")
    upgrade_mark.clear(one.home / "shop")
    assert upgrade_mark.read(fleet.machine("b").home / "shop") is None


def test_keys_of_instances_and_clients_are_known_to_all(fleet: Fleet) -> None:
    one = fleet.machine("a")
    shop = one.register("shop", PEER)
    (pair,) = keys.create(shop.folder)
    (till,) = keys.create(one.home / "till", Role.CLIENT)
    other = fleet.machine("b")
    book, settings = Keyring(other), other.load("shop")
    assert book.keys_of(settings, "shop") == (pair.public,)
    assert book.keys_of(settings, "till") == (till.public,)
    assert book.role_of(settings, ["shop"], "till") is Role.CLIENT
    assert book.callers(settings, ["shop"]) == ["till"]
    keys.rotate(shop.folder)
    keys.retire(shop.folder)
    (now,) = keys.read_pairs(shop.folder)
    assert Keyring(fleet.machine("b")).keys_of(settings, "shop") == (now.public,)


# --- of a database alone ----------------------------------------------------------------------------------------------


def test_the_log_is_in_the_same_database_where_nothing_else_is_said(shared: Fleet) -> None:
    one = shared.machine("a")
    assert one.register("shop", PEER).log == f"{shared.url}#shop"
    kept = one.register("local", "tcp://127.0.0.1:7002", log=str(shared.folder / "log"))
    assert kept.log == str(shared.folder / "log")
    OwnLogs(kept.folder).create()
    assert ensure_machine_keys(kept, one)
    elsewhere = shared.machine("b")
    keys.create(elsewhere.home / "local")
    with pytest.raises(RegistryError, match=r"'local' is in a folder, .* of the machine where it was registered"):
        ensure_machine_keys(elsewhere.load("local"), elsewhere)


def test_each_machine_has_keys_of_its_own_which_stay_there(shared: Fleet, postgres: Postgres) -> None:
    machines = [shared.machine(name) for name in "ab"]
    machines[0].register("shop", PEER)
    made = [ensure_machine_keys(registry.load("shop"), registry) for registry in map(shared.machine, "ab")]
    assert made == [True, True]
    assert not ensure_machine_keys(machines[0].load("shop"), machines[0])
    pairs = [keys.read_pairs(registry.home / "shop")[0] for registry in machines]
    assert pairs[0] != pairs[1]
    third = shared.machine("c")
    assert {one.key for one in keys.read_public_file(third.home / "shop").keys} == {pair.public for pair in pairs}
    assert not keys.secret_path(third.home / "shop").exists()
    (rows,) = postgres.execute("SELECT string_agg(r::text, ' ') FROM immortal.registry r", database=DATABASE)
    assert all(pair.public in rows[0] and pair.secret not in rows[0] for pair in pairs)
    assert third.copy is not None
    assert third.copy.revoke_keys("shop", machines[0].copy.machine)  # type: ignore[union-attr]
    assert [one.key for one in keys.read_public_file(third.home / "shop").keys] == [pairs[1].public]
    assert not third.copy.revoke_keys("shop", "nobody")


def lease(postgres: Postgres, endpoint: str, *, tells: bool = True) -> None:
    """As who has taken the log of shop."""
    postgres.execute(
        "INSERT INTO immortal.leases (instance, process, holder, until, endpoint)"
        " VALUES ('shop', '', 'b.example (process 7)', 'infinity', %s)"
        " ON CONFLICT (instance) DO UPDATE SET endpoint = excluded.endpoint",
        endpoint,
        database=DATABASE,
    )
    if tells:
        postgres.execute("SELECT pg_notify('immortal', 'shop')", database=DATABASE)


@pytest.mark.parametrize("tells", [True, False])
def test_where_an_instance_has_gone_is_known_at_once_and_the_key_that_it_has_there(
    shared: Fleet, postgres: Postgres, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tells:
        monkeypatch.setattr(shared_registry, "POLL_S", 10 * WAIT_S)  # so it is news alone
    there = {"a": PEER, "b": "tcp://127.0.0.1:7002"}
    machines = {name: shared.machine(name) for name in there}
    machines["a"].register("shop", PEER)
    public = {}
    for name, peer in there.items():
        registry = shared.machine(name)
        keys.create(registry.load("shop").folder)
        (pair,) = keys.read_pairs(registry.home / "shop")
        public[name] = pair.public
        assert registry.copy is not None
        registry.copy.announce("shop", peer)
    keys.create(shared.machine("till").home / "till", Role.CLIENT)
    finder = Finder("shop", shared.url, identity="till")
    lease(postgres, there["a"])
    following = finder.watch_registry()
    assert following is not None
    try:
        for name in ("a", "b", "a"):
            lease(postgres, there[name], tells=tells)
            until(lambda name=name: finder.find().endpoints == (there[name],))
            assert finder.find().server_keys[0] == public[name]
            assert len(finder.find().server_keys) == 2
        known = finder.find()
        until(lambda: not following.has_moved(known))
        lease(postgres, there["b"], tells=tells)
        until(lambda: following.has_moved(known))
    finally:
        following.close()


def test_of_machines_with_one_address_the_holder_shows_its_key_first(
    shared: Fleet, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual address that goes along; each machine is the holder once, whatever its ID is."""
    hosts = ("a.example", "b.example", "c.example")
    public = {}
    shared.machine("a").register("shop", PEER)
    for host in hosts:
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        registry = shared.machine(host)
        keys.create(registry.load("shop").folder)
        public[host] = keys.read_pairs(registry.home / "shop")[0].public
        assert registry.copy is not None
        registry.copy.announce("shop", PEER)
    keys.create(shared.machine("till").home / "till", Role.CLIENT)
    finder = Finder("shop", shared.url, identity="till")
    lease(postgres, PEER)
    for host in hosts:
        holder = f"{host} (process 7)"
        postgres.execute("UPDATE immortal.leases SET holder = %s", holder, database=DATABASE)
        assert finder.find().server_keys[0] == public[host]
        assert len(finder.find().server_keys) == len(hosts)


def test_a_move_is_seen_though_another_process_of_the_machine_was_first_to_write_it(
    shared: Fleet, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_registry, "POLL_S", 10 * WAIT_S)
    one = shared.machine("a")
    keys.create(one.register("shop", PEER).folder)
    lease(postgres, PEER)
    finder = Finder("shop", shared.url)
    following = finder.watch_registry()
    assert following is not None
    try:
        until(lambda: finder.find().endpoints == (PEER,))
        known = finder.find()
        until(lambda: not following.has_moved(known))
        assert one.copy is not None
        other = shared_registry.Copy(shared.url, one.home, one.copy.machine)  # as another process has it
        lease(postgres, "tcp://127.0.0.1:7002", tells=False)
        other.refresh()
        assert finder.find().endpoints == ("tcp://127.0.0.1:7002",)
        postgres.execute("SELECT pg_notify('immortal', 'shop')", database=DATABASE)
        until(lambda: following.has_moved(known))
    finally:
        following.close()


def test_without_the_database_the_registry_is_read_as_it_was_and_not_changed(shared: Fleet, postgres: Postgres) -> None:
    one = shared.machine("a")
    one.register("shop", PEER)
    postgres.stop()
    try:
        one = shared.machine("a")
        assert one.copy is not None
        assert "does not answer" in one.copy.problem
        assert one.load("shop").peer == PEER
        with pytest.raises(SharedHomeError, match="does not answer"):
            one.remember_app("shop", "shop:Shop")
        assert one.load("shop").app is None
        with pytest.raises(SharedHomeError, match="does not answer"):
            shared.machine("new")
        with one.synchronized():
            postgres.start()
            other = shared.machine("b")
            other.remember_app("shop", "shop:Other")
            until(lambda: one.load("shop").app == "shop:Other")
    finally:
        if postgres._server is None:
            postgres.start()


def test_a_folder_is_brought_into_a_database_and_is_part_of_it_then(
    shared: Fleet, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = shared.folder / "a"
    own = Registry(home)
    shop = own.register("shop", PEER)
    (pair,) = keys.create(shop.folder)
    keys.create(home / "till", Role.CLIENT)
    upgrade_mark.write(shop.folder, UpgradeMark(2))
    with pytest.raises(SharedHomeError, match=r"is a registry of its own, with shop: .*registry copy"):
        shared.machine("a")
    assert own.share(shared.url) == ["shop", "till"]
    one, other = shared.machine("a"), shared.machine("b")
    assert one.load("shop") == shop
    assert keys.read_public_keys(other.home / "shop") == (pair.public,)
    assert upgrade_mark.read(other.home / "shop") == UpgradeMark(2)
    assert other.client_names(["shop"]) == ["till"]
    second = Registry(shared.folder / "second")
    second.register("shop", PEER)
    with pytest.raises(SharedHomeError, match="has shop already: nothing was brought there"):
        second.share(shared.url)
    assert second.copy is None
    monkeypatch.setenv("IMMORTAL_LOCAL", str(home))
    with pytest.raises(SharedHomeError, match="this machine's part of the registry"):
        Registry(postgres.url(database="postgres"))


def test_what_a_row_says_leaves_the_folder_never(shared: Fleet, postgres: Postgres) -> None:
    one = shared.machine("a")
    one.register("shop", PEER)
    insert = (
        "INSERT INTO immortal.registry (instance, part, machine, host, content) VALUES (%s, 'settings', '', '', 'x')"
    )
    for name in ("../out", "/tmp/out", "..", ".origin", "a/b", "x.toml", ""):
        postgres.execute(insert, name, database=DATABASE)
    other = shared.machine("b")
    assert other.names() == ["shop"]
    assert sorted(path.name for path in other.home.iterdir()) == [".copy_lock", ".origin", "shop.toml"]
    assert not (shared.folder / "out.toml").exists()


def test_a_role_for_a_log_in_a_database_where_the_registry_is_a_folder(
    database: str, tmp_path: Path, postgres: Postgres
) -> None:
    registry = Registry(tmp_path / "home")
    registry.register("shop", PEER, log=database)
    registry.register("local", "tcp://127.0.0.1:7002")

    def typed(*words: str, status: int) -> str:
        result = CliRunner().invoke(main, ["--home", str(registry.home), "registry", "role", *words])
        assert result.exit_code == status, result.output
        return result.output

    try:
        for _ in range(2):  # the second time the log's URL has the role, which may make none
            typed("till", "shop", "--at", database, status=0)
            log = Registry(registry.home).load("shop").log
            assert log == f"{database}#shop".replace("owner@", "till@")
        assert "has no roles" in typed("till", "local", status=1)
        create_log(log, "shop", committer_id=7).close()
        open_log(log, "shop").close()
    finally:
        postgres.execute("DROP ROLE IF EXISTS till")


def test_a_client_finds_the_lease_though_the_log_names_the_database_by_another_address(
    shared: Fleet, postgres: Postgres
) -> None:
    log = shared.url.replace("?host=", "?application_name=other&host=")
    shared.machine("a").register("shop", PEER, log=log)
    shared.machine("a").register("elsewhere", "tcp://127.0.0.1:7003", log=log.replace(DATABASE, "postgres"))
    lease(postgres, "tcp://127.0.0.1:7002")
    keys.create(shared.machine("till").home / "till", Role.CLIENT)
    assert Finder("shop", shared.url, identity="till").find().endpoints == ("tcp://127.0.0.1:7002",)
    assert Finder("elsewhere", shared.url, identity="till").find().endpoints == ("tcp://127.0.0.1:7003",)


def test_who_only_calls_may_read_and_nothing_else(
    shared: Fleet, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.machine("a").register("shop", PEER)
    postgres.execute("CREATE ROLE till LOGIN; GRANT immortal_reader TO till", database=DATABASE)
    try:
        monkeypatch.setenv("IMMORTAL_LOCAL", str(shared.folder / "till"))
        url = shared.url.replace("owner@", "till@")
        reader = Registry(url)
        assert reader.load("shop").peer == PEER
        keys.create(shared.machine("till").home / "till", Role.CLIENT)
        lease(postgres, "tcp://127.0.0.1:7002")
        monkeypatch.setenv("IMMORTAL_LOCAL", str(shared.folder / "till"))
        found = Finder("shop", url, identity="till").find()
        assert found.endpoints == ("tcp://127.0.0.1:7002",), "whoever's role the log's URL names"
        with pytest.raises(SharedHomeError, match="to change it immortal_writer"):
            reader.remember_app("shop", "shop:Shop")
        for table in ("records", "rows", "heads"):
            with psycopg.connect(url) as role, pytest.raises(psycopg.errors.InsufficientPrivilege):
                role.execute(f"SELECT FROM immortal.{table}")
    finally:
        postgres.execute("DROP ROLE till")


def test_a_role_of_one_instance_reads_and_writes_no_other(
    shared: Fleet, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = shared.machine("a")
    logs = {name: owner.register(name, "tcp://127.0.0.1:*").log for name in ("shop", "bank")}
    for name, log in logs.items():
        create_log(log, name, committer_id=7).close()

    def typed(*words: str, status: int = 0) -> str:
        result = CliRunner().invoke(main, ["--home", shared.url, "registry", "role", *words])
        assert result.exit_code == status, result.output
        return result.output

    try:
        said = typed("till", "shop")
        log = shared.machine("a").load("shop").log
        assert log == logs["shop"].replace("owner@", "till@")
        assert log in said
        assert "uses its log as" in typed("till", "shop"), "again changes nothing"
        store = open_log(log, "shop")
        store.commit(Transaction(epoch=1), 1)
        store.close()
        url = shared.url.replace("owner@", "till@")
        monkeypatch.setenv("IMMORTAL_LOCAL", str(shared.folder / "till"))
        machine = Registry(url)
        assert machine.names() == ["bank", "shop"], "where others are, it knows"
        machine.remember_app("shop", "shop:Shop")
        assert ensure_machine_keys(machine.load("shop"), machine)
        with pytest.raises(SharedHomeError, match="row-level security policy"):
            machine.remember_app("bank", "evil:Bank")
        for theirs in (log.replace("#shop", "#bank"), logs["bank"].replace("owner@", "till@")):
            with pytest.raises(LogError, match="there is no log"):
                open_log(theirs, "bank")
        with psycopg.connect(url, autocommit=True) as role:
            for table in ("heads", "records", "rows", "standbys"):
                found = role.execute(f"SELECT DISTINCT instance FROM immortal.{table}").fetchall()
                assert {name for (name,) in found} <= {"shop"}, table
            for change in (
                "DELETE FROM immortal.{} WHERE instance = 'bank'",
                "UPDATE immortal.{} SET instance = 'shop' WHERE instance = 'bank'",
            ):
                for table in ("heads", "leases", "records", "rows", "standbys", "registry"):
                    assert role.execute(change.format(table)).rowcount == 0, table
            for forbidden in (
                "INSERT INTO immortal.heads VALUES ('bonk', false, 0, 0, -1, '')",
                "INSERT INTO immortal.rows VALUES ('bank', 'meta', '', '')",
                "INSERT INTO immortal.records VALUES ('bank', 900, 900, 1, '')",
                "INSERT INTO immortal.leases VALUES ('bank', '', 'till', 'infinity', '')",
                "UPDATE immortal.heads SET instance = 'bonk'",
                "INSERT INTO immortal.writers VALUES ('till', 'bank')",
                "ALTER TABLE immortal.rows DISABLE ROW LEVEL SECURITY",
                "TRUNCATE immortal.records",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    role.execute(forbidden)
        postgres.execute("GRANT immortal_writer TO till", database=DATABASE)
        with pytest.raises(LogError, match="there is no log"):
            open_log(log.replace("#shop", "#bank"), "bank")
        postgres.execute("CREATE ROLE fleet LOGIN; GRANT immortal_writer TO fleet", database=DATABASE)
        open_log(logs["bank"].replace("owner@", "fleet@"), "bank").close()  # as before
        typed("till", "shop", "--remove")
        with pytest.raises(LogError, match="there is no log"):
            open_log(log, "shop")
        assert "whom no policy restricts" in typed("owner", "shop", status=1)
    finally:
        postgres.execute("DROP ROLE IF EXISTS till; DROP ROLE IF EXISTS fleet", database=DATABASE)


@pytest.mark.parametrize(
    ("url", "environment", "asked"),
    [
        ("postgresql://a@db.example/b", {}, "verify-full"),
        ("postgresql://a@10.0.0.5,127.0.0.1/b", {}, "verify-full"),
        ("postgresql:///b", {"PGHOST": "db.example"}, "verify-full"),
        ("postgresql://a@db.example/b?sslmode=require", {}, "require"),
        ("postgresql://a@db.example/b", {"PGSSLMODE": "disable"}, None),
        ("postgresql://a@localhost/b", {}, None),
        ("postgresql://a@127.0.0.1,[::1]/b", {}, None),
        ("postgresql:///b?host=/var/run/postgresql", {}, None),
        ("postgresql:///b", {}, None),
    ],
)
def test_a_server_elsewhere_has_to_prove_who_it_is(
    url: str, environment: dict[str, str], asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PGHOST", "PGHOSTADDR", "PGSSLMODE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert shared_registry.with_ssl_mode(psycopg.conninfo.conninfo_to_dict(url)).get("sslmode") == asked
    given: dict[str, object] = {}
    monkeypatch.setattr(psycopg, "connect", lambda **options: given.update(options) or fail("stopped"))
    with pytest.raises(LogError):
        place_of(f"{url}#shop").exists()
    assert given.get("sslmode") == asked
    with pytest.raises(SharedHomeError):
        Registry(url)
    assert given.get("sslmode") == asked


def fail(text: str) -> None:
    raise psycopg.OperationalError(text)


def test_what_is_no_registry_is_said(shared: Fleet, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SharedHomeError, match="no place of a registry"):
        Registry("mysql://there/home")
    for wrong in (f"{shared.url}#shop", shared.url.replace("owner@", "owner:secret@")):
        shared.url, right = wrong, shared.url
        with pytest.raises(SharedHomeError, match="without a password and without '#NAME'"):
            shared.machine("wrong")
        shared.url = right
    assert shared.machine("a").names() == [], "a database without a schema has nobody"
    with pytest.raises(SharedHomeError, match="has no registry yet"):
        keys.create(shared.machine("a").home / "till", Role.CLIENT)
    from immortal.coordinator.log.backends.postgres import schema

    postgres.execute("DROP SCHEMA IF EXISTS immortal CASCADE", database=DATABASE)
    place_of(f"{shared.url}#shop").migrate()
    with monkeypatch.context() as newer:
        newer.setattr(schema, "VERSION", 4)
        with pytest.raises(RegistryError, match="has version 3, this program needs version 4"):
            shared.machine("a").register("shop", PEER)
    shared.machine("a").register("shop", PEER)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SharedHomeError, match=r"pip install 'immortal-services\[postgres\]'"):
        shared.machine("other")
    with pytest.raises(NotConnectable, match=r"pip install 'immortal-services\[postgres\]'"):
        Finder("shop", shared.url).find()
