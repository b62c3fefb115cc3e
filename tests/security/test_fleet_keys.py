"""Keys that expire, and a fleet's keys from one file: what is made, what is found wrong, and who gets in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.coordinator.config import ConfigError
from immortal.coordinator.core.permissions import EVERYTHING, Permission
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.peers import fleet_keys, keys
from immortal.coordinator.peers.keys import KeysError, PublicFile, PublicKey
from immortal.coordinator.peers.security import PeerSecurity
from immortal.messenger import Messenger, Role, Security
from immortal.protocol.peer_frames import FrameType, PeerFrame, encode_frame
from tests.helpers.processes import House
from tests.helpers.watched import Watched

TODAY = date(2026, 11, 22)
DAY = timedelta(days=1)


def run(home: Path, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["--home", str(home), *arguments])
    assert result.exit_code == status, result.output
    return result.output


# --- dates ------------------------------------------------------------------------------------------------------------


def test_dates_are_kept_with_each_key(tmp_path: Path) -> None:
    keys.create(tmp_path, expires=TODAY)
    keys.rotate(tmp_path)
    first, second = keys.read_public_file(tmp_path).keys
    assert (first.made, first.expires) == (keys.today(), TODAY)
    assert (second.made, second.expires) == (keys.today(), None)
    keys.retire(tmp_path)
    assert keys.read_public_file(tmp_path).keys == (second,)
    keys.public_path(tmp_path).unlink()
    keys.create(tmp_path)
    assert keys.read_public_file(tmp_path).keys == (PublicKey(second.key),), "of a lost file nothing is made up"


def test_an_impossible_date_is_an_error(tmp_path: Path) -> None:
    keys.public_path(tmp_path).write_text("; expires: 2026-02-30\n" + "x" * 40)
    with pytest.raises(KeysError, match="has no valid date in '; expires: 2026-02-30'"):
        keys.read_public_file(tmp_path)


@pytest.mark.parametrize(
    ("made", "expires", "told"),
    [
        (TODAY, None, None),
        (TODAY - 366 * DAY, None, "is 366 days old: rotate it"),
        (None, TODAY + 31 * DAY, None),
        (None, TODAY + 30 * DAY, "expires in 30 days, on 2026-12-22: rotate it"),
        (None, TODAY, "expires in 0 days"),
        (None, TODAY - DAY, "expired on 2026-11-21: nobody lets it in"),
    ],
)
def test_reminders(made: date | None, expires: date | None, told: str | None) -> None:
    found = list(keys.reminders(PublicFile((PublicKey("k", made, expires),)), TODAY, 365, 30))
    assert (told is None and not found) or (told is not None and told in found[0])


def test_the_status_reminds(tmp_path: Path) -> None:
    run(tmp_path, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    soon = str(keys.today() + 3 * DAY)
    keys.remove(tmp_path / "counter")
    run(tmp_path, "keys", "counter", "--make", "--expires", soon)
    run(tmp_path, "keys", "web", "--make", "--client", "--expires", soon)
    shown = run(tmp_path, "status")
    for name in ("counter", "web"):
        (key,) = keys.read_public_keys(tmp_path / name)
        assert f"{name}: the key {key} expires in 3 days, on {soon}: rotate it" in shown
    assert "expires in 3 days" in json.loads(run(tmp_path, "status", "counter", "--json"))["key_reminders"][0]
    assert f"expires {soon}" in run(tmp_path, "keys", "counter")
    assert "--expires needs" in run(tmp_path, "keys", "counter", "--expires", soon, status=2)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    registry = Registry(tmp_path)
    for name in ("alice", "bob"):
        registry.register(name, "tcp://127.0.0.1:*")
    keys.create(tmp_path / "alice")
    keys.create(tmp_path / "bob", expires=TODAY)
    return registry


def test_an_expired_key_does_not_get_in_and_is_not_called(registry: Registry) -> None:
    watched = Watched(registry, TODAY)
    assert (watched.callers, watched.it.block_reason("bob")) == ({"bob"}, None)
    watched.today += DAY
    assert watched.look(), "open connections are looked at again"
    assert watched.callers == set()
    assert "the keys of bob have expired" in (watched.it.block_reason("bob") or "")
    assert "the keys of 'bob' have expired: it is not let in, nor called" in watched.warnings
    assert watched.it.security is not None
    assert watched.it.security.servers("bob"), "it is never called in plain instead"
    keys.rotate(registry.home / "bob")
    assert watched.look()
    assert (watched.callers, watched.it.block_reason("bob")) == ({"bob"}, None)


def test_an_expired_key_stays_out_when_its_file_becomes_unreadable(registry: Registry) -> None:
    watched = Watched(registry, TODAY + DAY)
    keys.public_path(registry.home / "bob").write_text("nonsense")
    watched.look()
    assert watched.callers == set()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


def test_a_key_that_expires_is_cut_off_on_its_open_connection(house: House) -> None:
    house.register("alice", "bob")
    for name in ("alice", "bob"):
        keys.create(house.settings(name).folder)
    process, _ = house.both("bob")
    settings, folder = house.settings("bob"), house.settings("alice").folder
    (pair,) = keys.read_pairs(folder)
    messenger = Messenger(security=Security(pair, {}, lambda endpoint: keys.read_public_keys(settings.folder)))
    messenger.start()
    answers: list[list[bytes]] = []
    hello = encode_frame(PeerFrame(FrameType.HELLO, "alice", "bob", 7, 1, 0))
    try:
        messenger.send_message(settings.peer, hello, answers.append)
        process.until(lambda status: bool(answers))
        yesterday = keys.today() - DAY
        keys.public_path(folder).write_text(keys.public_text(PublicFile((PublicKey(pair.public, None, yesterday),))))
        process.line("the keys of 'alice' have expired")
        messenger.send_message(settings.peer, hello, answers.append)
        process.until(lambda status: status["security"]["strangers_dropped"] >= 1)
    finally:
        messenger.close()
    assert len(answers) == 1


# --- a fleet ----------------------------------------------------------------------------------------------------------

FLEET = """
expires_days = 90
age_days_max = 60

[instances.counter]
home = "a"
allow = { web = ["place"], reader = "*" }

[instances.reader]
home = "b"

[instances.feeder]
home = "a"
allow = ["counter"]

[clients.web]
home = "c"

[operators.ann]
home = "c"
"""


class Made:
    """A fleet in three folders, its keys made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "fleet.toml"
        self.file.write_text(FLEET)
        for name, home in (("counter", "a"), ("reader", "b"), ("feeder", "a")):
            run(folder / home, "register", name, "--peer", "tcp://127.0.0.1:*")
            keys.remove(folder / home / name)
        self.output = self.run("--make")

    def run(self, what: str, status: int = 0) -> str:
        return run(self.folder, "keys", "--fleet", str(self.file), what, status=status)

    @property
    def problems(self) -> list[str]:
        return list(fleet_keys.problems(fleet_keys.read(self.file), keys.today()))


@pytest.fixture
def fleet(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_a_fleet_is_made_and_fits(fleet: Made) -> None:
    assert fleet.problems == []
    assert "5 members in 3 folders: all keys match" in fleet.output
    assert fleet.run("--make").splitlines() == ["5 members in 3 folders: all keys match"], "once"
    counter = Registry(fleet.folder / "a").load("counter")
    assert counter.allow == ("web", "reader")
    assert counter.permissions == {"web": Permission(frozenset({"place"})), "reader": EVERYTHING}
    assert Registry(fleet.folder / "b").load("reader").allow == ()
    assert keys.read_public_file(fleet.folder / "c" / "web").keys[0].expires == keys.today() + 90 * DAY
    copies = {
        (home, name)
        for home in "abc"
        for name in ("counter", "reader", "feeder", "web", "ann")
        if keys.public_path(fleet.folder / home / name).exists()
        and not keys.secret_path(fleet.folder / home / name).exists()
    }
    assert copies == {("a", "web"), ("a", "reader"), ("b", "counter"), ("c", "counter")}


def test_whom_the_file_names_gets_in_and_nobody_else(fleet: Made) -> None:
    registry = Registry(fleet.folder / "a")
    security = PeerSecurity(registry.load("counter"), registry, lambda endpoint: [endpoint], print).security
    assert security is not None
    found = {name: security.roles[key] for key, name in security.callers.items()}
    assert found == {"counter": Role.OWNER, "web": Role.CLIENT, "reader": Role.INSTANCE}


def test_no_secret_leaves_its_folder(fleet: Made) -> None:
    for home, name in (("a", "counter"), ("a", "feeder"), ("b", "reader"), ("c", "web"), ("c", "ann")):
        (pair,) = keys.read_pairs(fleet.folder / home / name)
        holding = [path for path in fleet.folder.rglob("*") if path.is_file() and pair.secret in path.read_text()]
        assert holding == [keys.secret_path(fleet.folder / home / name)]
        assert pair.secret not in fleet.output


def break_it(fleet: Made, how: str) -> None:
    a, b, c = (fleet.folder / home for home in "abc")
    if how == "missing":
        keys.remove(c / "web")
    elif how == "copy":
        keys.public_path(a / "web").unlink()
    elif how == "rotated":
        keys.rotate(c / "web")
    elif how == "foreign":
        keys.create(a / "mallory", Role.CLIENT)
    elif how == "shared":
        (b / "reader" / "keys" / "pairs").write_bytes((c / "web" / "keys" / "pairs").read_bytes())
        keys.create(b / "reader")
    elif how == "mode":
        keys.secret_path(c / "web").chmod(0o644)
    elif how == "secret":
        keys.create(b / "counter")
    elif how == "allow":
        path = a / "counter.toml"
        path.write_text(path.read_text().replace('["place"]', '"*"'))
    elif how == "settings":
        path = a / "counter.toml"
        path.write_text(f"{path.read_text()}\n[peer_keys]\nreader = '{'x' * 40}'\n")
    elif how == "role":
        path = keys.public_path(c / "web")
        path.write_text(path.read_text().replace("; role: client\n", ""))
    elif how in ("old", "expired"):
        path = keys.public_path(c / "web")
        today = keys.today()
        expires = today - DAY if how == "expired" else today + 89 * DAY
        (key,) = keys.read_public_keys(c / "web")
        path.write_text(keys.public_text(PublicFile((PublicKey(key, today - 61 * DAY, expires),), Role.CLIENT)))


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("missing", "web: no keys in "),
        ("copy", "web: its public keys in .*/a are missing, or not those that it has"),
        ("rotated", "web: its public keys in .*/a are missing, or not those that it has"),
        ("foreign", "mallory: it has a place in .*/a, and none in the fleet's file"),
        ("shared", "web: it has the same key as 'reader'"),
        ("mode", "web: .*pairs has mode 0644, expected 0600"),
        ("secret", "counter: secret keys of it are in .*/b too, it lives in .*/a"),
        ("allow", "counter: 'allow' in .*counter.toml is not what the fleet's file says"),
        ("settings", r"counter: \[peer_keys\] in .*counter.toml gives keys of 'reader'"),
        ("role", "web: its public file gives the role instance, expected client"),
        ("old", "web: the key .* is 61 days old: rotate it"),
        ("expired", "web: the key .* expired on "),
    ],
)
def test_what_does_not_fit_is_found(fleet: Made, how: str, problem: str) -> None:
    import re

    break_it(fleet, how)
    output = fleet.run("--check", status=1)
    assert re.search(problem, output), output


@pytest.mark.parametrize("how", ["missing", "copy", "rotated", "allow", "role"])
def test_making_mends_what_can_be_mended(fleet: Made, how: str) -> None:
    break_it(fleet, how)
    fleet.run("--make")
    assert fleet.problems == []


def test_settings_keep_their_comments(fleet: Made) -> None:
    path = fleet.folder / "a" / "counter.toml"
    text = path.read_text().replace('web = ["place"]', 'web = ["total"]')
    path.write_text(f"# mine\nallow = ['x']\n{text.partition('[allow]')[0]}\n[tuning]\npeer_buffer_mib_max = 32\n")
    fleet.run("--make")
    assert path.read_text().startswith("# mine\n")
    settings = Registry(fleet.folder / "a").load("counter")
    assert (settings.allow, settings.tuning.peer_buffer_mib_max) == (("web", "reader"), 32)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[instances.counter]\nallow = ['wbe']\n[clients.web]", "'wbe' is no other member: did you mean 'web'"),
        (
            "[instances.counter]\nallow = ['counter']",
            "line 2, field 'instances.counter.allow.counter': 'counter' is no",
        ),
        ("[instances.counter]\nhom = 'a'", "line 2, field 'instances.counter.hom': unknown field: did you mean 'home'"),
        ("[instances.x]\n[clients.x]", "'x' stands there twice, as instance and as client"),
        ("[clients.'no name']", r"table \[clients\]: 'no name' is no instance name"),
        ("expires_days = 0", "field 'expires_days': got 0, expected a whole number from 1"),
        ("expires_days = 'x'", "line 1, field 'expires_days': got \"x\", expected a whole number from 1 to 36500"),
        ("[instances", "no valid TOML"),
        (
            "[clients.web]\n[instances.x]\nallow = {web = [3]}",
            "line 3, field 'instances.x.allow.web': got .* names of methods",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        fleet_keys.read(tmp_path / "fleet.toml")
    assert run(tmp_path, "keys", "--fleet", str(tmp_path / "fleet.toml"), "--check", status=1).startswith("error: ")


def test_the_command_is_called_rightly(tmp_path: Path) -> None:
    assert "Missing argument 'NAME'" in run(tmp_path, "keys", status=2)
    assert "--fleet FILE needs --make or --check" in run(tmp_path, "keys", "--fleet", "f", status=2)
    assert "--check needs --fleet" in run(tmp_path, "keys", "x", "--check", status=2)
    assert "f cannot be read" in run(tmp_path, "keys", "--fleet", "f", "--check", status=1)


def test_everybody_of_one_folder_needs_no_copies(tmp_path: Path) -> None:
    text = FLEET
    for home in "abc":
        text = text.replace(f'home = "{home}"\n', "")
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    found: Any = fleet_keys.read(file)
    home = tmp_path.resolve() / ".immortal"
    assert found.homes == [home]
    assert found.members["counter"].allow == {"web": Permission(frozenset({"place"})), "reader": EVERYTHING}
    for name in ("counter", "reader", "feeder"):
        run(home, "register", name, "--peer", "tcp://127.0.0.1:*")
    run(home, "keys", "--fleet", str(file), "--make")
    assert list(fleet_keys.problems(found, keys.today())) == []
