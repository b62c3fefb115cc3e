"""Key files, who has which key, and `immortal keys`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.coordinator.config import ConfigError, override
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.peers import keys
from immortal.coordinator.peers.keys import KeysError
from immortal.coordinator.peers.security import KEY_FILES_PER_POLL, Keyring, check_start, insecurity_warning, is_local
from immortal.coordinator.service.children import coordinator_command
from immortal.messenger import KeyPair, Role
from tests.helpers.watched import Watched

KEY = "x" * 40


def run(home: Path, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["--home", str(home), *arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    registry = Registry(tmp_path)
    for name in ("alice", "bob", "carol"):
        registry.register(name, "tcp://127.0.0.1:*")
        keys.create(tmp_path / name)
    return registry


def add(registry: Registry, name: str, text: str) -> None:
    path = registry.path(name)
    path.write_text(text + "\n" + path.read_text())


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_rotation_and_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "alice"
    assert (keys.read_pairs(folder), keys.read_public_keys(folder)) == ((), ())
    for change, problem in ((keys.rotate, "has no keys yet"), (keys.retire, "has no second key")):
        with pytest.raises(KeysError, match=problem):
            change(folder)
    (first,) = keys.create(folder)
    assert keys.create(folder) == (first,), "keys that are there stay"
    assert keys.rotate(folder)[0] == first
    first, second = keys.read_pairs(folder)
    assert keys.read_public_keys(folder) == (first.public, second.public)
    with pytest.raises(KeysError, match="a rotation of 'alice' is under way already"):
        keys.rotate(folder)
    assert keys.retire(folder) == (second,) == keys.read_pairs(folder)
    assert keys.read_public_keys(folder) == (second.public,)
    assert first.secret not in keys.secret_path(folder).read_text()


def test_only_the_owner_can_read_the_secret(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        keys.create(tmp_path)
        keys.rotate(tmp_path)
    finally:
        os.umask(previous)
    path = keys.secret_path(tmp_path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert keys.public_path(tmp_path).stat().st_mode & 0o777 == 0o644
    assert not [pair for pair in keys.read_pairs(tmp_path) if pair.secret in keys.public_path(tmp_path).read_text()]


@pytest.mark.parametrize(("place", "mode"), [("file", 0o640), ("file", 0o602), ("folder", 0o750), ("folder", 0o701)])
def test_what_others_may_know_is_refused(tmp_path: Path, place: str, mode: int) -> None:
    keys.create(tmp_path)
    path = keys.secret_path(tmp_path)
    (path if place == "file" else path.parent).chmod(mode)
    with pytest.raises(KeysError, match=rf"has mode {mode:04o}, expected 0[67]00.*'chmod 0[67]00 "):
        keys.read_pairs(tmp_path)


def test_a_secret_key_that_does_not_fit_its_public_one_is_refused(tmp_path: Path) -> None:
    """A flipped bit may leave a key that is one as well: nobody could then be reached, and nothing would say why."""
    (pair,) = keys.create(tmp_path)
    other = "a" if pair.secret[5] != "a" else "b"
    path = keys.secret_path(tmp_path)
    path.write_text(f"{pair.public} {pair.secret[:5]}{other}{pair.secret[6:]}\n")
    with pytest.raises(KeysError, match="holds something else than key pairs"):
        keys.read_pairs(tmp_path)


@pytest.mark.parametrize("text", ["some thing", f"{KEY} short", KEY, f"{KEY} {KEY} more", f"{KEY} {'ä' * 40}"])
def test_a_damaged_secret_file_is_refused_without_telling_it(tmp_path: Path, text: str) -> None:
    keys.create(tmp_path)
    keys.secret_path(tmp_path).write_text(text)
    with pytest.raises(KeysError) as caught:
        keys.read_pairs(tmp_path)
    assert str(keys.secret_path(tmp_path)) in str(caught.value)
    assert text not in str(caught.value)


@pytest.mark.parametrize("text", ["something", KEY + "x", "_" * 40, f"{KEY} {KEY}", f"{KEY}\n" * 200])
def test_a_public_file_that_is_none(tmp_path: Path, text: str) -> None:
    keys.public_path(tmp_path).write_text(text)
    with pytest.raises(KeysError, match="holds something else than public keys"):
        keys.read_public_keys(tmp_path)


def test_a_public_file_written_by_hand(tmp_path: Path) -> None:
    keys.public_path(tmp_path).write_text(f"; of the other house\r\n\n  {KEY}  \n//{KEY[2:]}")
    assert keys.read_public_keys(tmp_path) == (KEY, "//" + KEY[2:])


def test_nothing_shows_the_secret() -> None:
    pair = KeyPair.new()
    assert pair.secret not in f"{pair} {pair!r}"
    assert keys.is_key(pair.public)
    assert keys.is_key(pair.secret)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_come_back_as_they_were(registry: Registry) -> None:
    path = registry.path("alice")
    path.write_text(
        f"allow = ['bob']\ninsecure = true\n{path.read_text()}\n[peer_keys]\nbob = '{KEY}'\nfar = ['{KEY}', '{KEY}']\n"
    )
    settings = registry.remember_app("alice", "module:Class")
    assert (settings.allow, settings.insecure) == (("bob",), True)
    assert settings.peer_keys == {"bob": (KEY,), "far": (KEY, KEY)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("allow = 'bob'", "field 'allow': got \"bob\", expected a list of instance names"),
        ("allow = ['no name']", "expected a list of instance names"),
        ("insecure = 1", "field 'insecure': got 1, expected true or false"),
        ("peer_keys = 'x'", "expected a table \\[peer_keys\\]"),
        ("peer_keys = {bob = 'x'}", "field 'peer_keys.bob': got \"x\", expected a public key, 40 characters of Z85"),
        ("peer_keys = {bob = []}", "expected a public key"),
        ("peer_keys = {'no name' = ''}", "'no name' is no instance name"),
    ],
)
def test_settings_that_are_none(registry: Registry, text: str, problem: str) -> None:
    add(registry, "alice", text)
    with pytest.raises(ConfigError, match=problem):
        registry.load("alice")


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("ipc:///run/x", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://host.example:1", False),
        ("tcp://lo:1", False),
    ],
)
def test_what_only_this_machine_reaches(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) == local


def test_keys_are_required_where_other_machines_reach_it(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    settings = registry.register("alice", "tcp://192.0.2.1:7001")
    with pytest.raises(KeysError, match=r"'alice' is reached at tcp://192\.0\.2\.1:7001.*'immortal keys alice --make'"):
        check_start(settings)
    assert insecurity_warning(settings, None) is None
    add(registry, "alice", "insecure = true")
    settings = registry.load("alice")
    assert check_start(settings) == ()
    assert "takes input from whoever reaches it" in (insecurity_warning(settings, None) or "")


def test_run_refuses_at_once_and_hands_insecure_on(tmp_path: Path) -> None:
    settings = Registry(tmp_path).register("alice", "tcp://192.0.2.1:7001")
    output = run(tmp_path, "run", "alice", "shop:Counter", "--restart", status=1)
    assert output.startswith("error: 'alice' is reached at tcp://192.0.2.1:7001")
    for insecure in (False, True):
        command = coordinator_command(override(settings, insecure=insecure), log_format="json", log_level="info")
        assert ("--insecure" in command.argv) == insecure


# --- who has which key ------------------------------------------------------------------------------------------------


def test_callers_are_all_of_the_registry_or_those_on_the_list(registry: Registry) -> None:
    assert Watched(registry).callers == {"bob", "carol"}
    add(registry, "alice", "allow = ['carol', 'nobody', 'alice']")
    watched = Watched(registry)
    assert watched.callers == {"carol"}
    add(registry, "alice", "")
    path = registry.path("alice")
    path.write_text(path.read_text().replace("'carol', ", "'bob', "))
    assert watched.look()
    assert watched.callers == {"bob"}
    assert not watched.look(), "nothing has changed"
    assert watched.warnings == []


def test_clients_with_keys_in_the_registry_are_callers(registry: Registry) -> None:
    keys.create(registry.home / "web")
    (registry.home / "empty").mkdir()
    assert registry.client_names(registry.names()) == ["web"]
    assert Watched(registry).callers == {"bob", "carol", "web"}
    add(registry, "alice", "allow = ['bob']")
    assert Watched(registry).callers == {"bob"}


def test_the_settings_key_goes_before_that_of_the_registry(registry: Registry) -> None:
    path = registry.path("alice")
    path.write_text(f"{path.read_text()}\n[peer_keys]\nbob = '{KEY}'\nfar = ['{'y' * 40}', '{'z' * 40}']\n")
    watched = Watched(registry)
    assert watched.it.security is not None
    callers = watched.it.security.callers
    assert (callers[KEY], callers["y" * 40], callers["z" * 40]) == ("bob", "far", "far")
    assert keys.read_public_keys(registry.home / "bob")[0] not in callers
    assert watched.it.security.servers("bob") == (KEY,)


def test_a_key_that_two_claim_is_nobodys(registry: Registry) -> None:
    (stolen,) = keys.read_public_keys(registry.home / "bob")
    keys.public_path(registry.home / "carol").write_text(stolen)
    watched = Watched(registry)
    assert watched.callers == set()
    assert f"the public key {stolen} is given for several instances" in watched.warnings[0]
    watched.look()
    assert len(watched.warnings) == 1, "told once"


def test_what_disappears_or_cannot_be_read_is_never_replaced_by_plain(registry: Registry) -> None:
    watched = Watched(registry)
    own = keys.read_pairs(registry.home / "alice")[0]
    known = keys.read_public_keys(registry.home / "bob")
    for text in ("nonsense", None):
        path = keys.public_path(registry.home / "bob")
        path.unlink() if text is None else path.write_text(text)
        keys.secret_path(registry.home / "alice").parent.chmod(0o755)
        registry.path("alice").write_text("nonsense")
        watched.look()
        assert watched.it.security is not None
        assert watched.it.security.own == own
        assert tuple(watched.it.security.servers("bob")) == known
    assert "bob" not in watched.callers, "without a public file nobody calls"
    assert any("the keys of 'bob' as they were stay in use" in warning for warning in watched.warnings)
    assert any("keys and callers as they were stay in use" in warning for warning in watched.warnings)


def test_what_may_not_be_connected_to(registry: Registry) -> None:
    security = Watched(registry).it
    assert security.block_reason("bob") is None
    assert security.block_reason("tcp://127.0.0.1:1") is None
    assert "no public key of tcp://192.0.2.1:1 is known" in (security.block_reason("tcp://192.0.2.1:1") or "")
    keys.remove(registry.home / "alice")
    without = Watched(registry)
    assert without.it.security is None
    assert "bob takes only callers with keys" in (without.it.block_reason("bob") or "")
    keys.create(registry.home / "alice")
    assert without.look()
    assert without.it.block_reason("bob") is None


def large(registry: Registry, count: int = 200) -> list[str]:
    """Registers so many more instances with keys; their names."""
    names = [f"other-{number:03d}" for number in range(count)]
    for name in names:
        registry.path(name).write_text("peer = 'tcp://127.0.0.1:1'\n")
        keys.create(registry.home / name)
    return names


def test_a_look_costs_as_much_in_a_large_registry(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    large(registry)
    watched = Watched(registry)
    looked_at: list[object] = []
    stat = os.stat

    def counted(path: Any, **options: Any) -> os.stat_result:
        looked_at.append(path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", counted)
    for _ in range(20):
        assert not watched.look()
    assert len(looked_at) <= 20 * (KEY_FILES_PER_POLL + 10)


def test_a_key_that_is_made_in_a_large_registry_is_seen_at_once(registry: Registry) -> None:
    names = large(registry)
    watched = Watched(registry)
    for change in (keys.rotate, keys.remove):
        change(registry.home / names[-1])
        assert watched.look()
    assert names[-1] not in watched.callers
    keys.create(registry.home / "web", Role.CLIENT)
    assert watched.look()
    assert "web" in watched.callers


def test_a_file_that_is_changed_by_hand_in_a_large_registry_is_seen_in_its_turn(registry: Registry) -> None:
    names = large(registry)
    (registry.home / "web").mkdir()
    watched = Watched(registry)
    turns = (len(names) + 10) // KEY_FILES_PER_POLL + 1
    public = keys.public_path(registry.home / names[70])
    public.write_text(KEY)
    assert any(watched.look() for _ in range(turns))
    assert watched.it.security is not None
    assert watched.it.security.callers[KEY] == names[70]
    keys.public_path(registry.home / "web").write_text(f"; role: client\n{'y' * 40}\n")
    assert any(watched.look() for _ in range(turns))
    assert "web" in watched.callers


def test_a_rotation_is_seen(registry: Registry) -> None:
    book, settings = Keyring(registry), registry.load("alice")
    watched = Watched(registry)
    keys.rotate(registry.home / "bob")
    assert watched.look()
    both = book.keys_of(settings, "bob")
    assert watched.it.security is not None
    assert (len(both), watched.it.security.servers("bob")) == (2, both)
    assert {key for key, name in watched.it.security.callers.items() if name == "bob"} == set(both)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_makes_rotates_retires_and_shows_no_secret(tmp_path: Path) -> None:
    outputs = [run(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*") for name in ("alice", "bob")]
    folder = tmp_path / "alice"
    secrets = [keys.read_pairs(folder)[0].secret]
    outputs.append(run(tmp_path, "keys", "alice", "--rotate"))
    secrets.append(keys.read_pairs(folder)[1].secret)
    shown = json.loads(run(tmp_path, "keys", "alice", "--json"))
    assert shown["keys"] == [pair.public for pair in keys.read_pairs(folder)]
    assert shown["callers"] == [
        {
            "name": "bob",
            "role": "instance",
            "keys": list(keys.read_public_keys(tmp_path / "bob")),
            "from": str(keys.public_path(tmp_path / "bob")),
            "methods": None,
        }
    ]
    outputs += [run(tmp_path, "keys", "alice", "--retire"), run(tmp_path, "keys", "bob"), json.dumps(shown)]
    assert run(tmp_path, "keys", "alice", "--retire", status=1).startswith("error: 'alice' has no second key")
    run(tmp_path, "keys", "alice", "--retire", "--rotate", status=2)
    assert not [secret for secret in secrets if secret in "".join(outputs)]
    run(tmp_path, "unregister", "alice")
    assert not folder.exists()


def test_the_command_tells_what_is_missing(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for name in ("alice", "bob"):
        registry.register(name, "tcp://127.0.0.1:*")
    assert "alice has no keys: its connections are not encrypted ('immortal keys alice --make')" in run(
        tmp_path, "keys", "alice"
    )
    run(tmp_path, "keys", "alice", "--make")
    assert "bob: no key, so its calls are refused" in run(tmp_path, "keys", "alice")
    keys.public_path(tmp_path / "alice").write_text(KEY)
    assert "the public file differs" in run(tmp_path, "keys", "alice")
    assert "differs" not in run(tmp_path, "keys", "alice", "--make")
