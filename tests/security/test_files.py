"""Neighbours on the same machine: what they can read, lock and put in place of what is ours."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import NotConnectable
from immortal.cli import main
from immortal.coordinator.core.errors import LogLockedError
from immortal.coordinator.instances import registry
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log.backends.lmdb.files import FolderLock, is_locked
from immortal.coordinator.peers import keys
from immortal.log import open_log
from immortal.protocol.files import make_folder, opener, restrict_mode
from tests.helpers.processes import House
from tests.helpers.strangers import STRANGER, as_stranger, mode, modes, needs_root, open_to_all

SHARED = {"alice.toml", "coordinator.json", "public_keys"}


@pytest.fixture(autouse=True)
def _no_umask() -> Iterator[None]:
    """Whatever it is: the one that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "home")
    yield house
    house.close()


def run(home: Path, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["--home", str(home), *map(str, arguments)])


# --- what others can read --------------------------------------------------------------------------------------------


def lived(house: House) -> None:
    """An instance with keys, a journal, a checkpoint, records 0 to 3, secrets, sockets; running."""
    assert run(house.home, "register", "alice", "--peer", "tcp://127.0.0.1:*", "--app-auth", "none").exit_code == 0
    process, app = house.both("alice", extended=True)
    for number in (1, 2, 3):  # a record of its own each
        app.impulse(number)
        app.until(lambda number=number: app.accepted == number)
    assert process.status()["checkpoint"]["id"] == 1
    assert process.count("was open to others") == 0  # it is made so, not mended


def test_a_stranger_cannot_read_what_an_instance_writes(house: House) -> None:
    lived(house)
    assert {Path(name).name: one for name, one in modes(house.home).items()} == dict.fromkeys(SHARED, "0644")


def test_a_stranger_cannot_read_copies_of_a_log(house: House, tmp_path: Path) -> None:
    lived(house)
    out = tmp_path / "out"
    for command in (
        ["log", "export", "alice", out / "alice.rec"],
        ["log", "backup", "alice", out / "deep" / "backup"],
        ["log", "backup", "alice", out / "deep" / "backup"],
        ["dead-letters", "alice", "export", out / "letters"],
    ):
        make_folder(out)
        result = run(house.home, *command)
        assert result.exit_code == 0, result.output
    assert modes(out) == {}
    log = Path(house.settings("alice").log)
    house.close()
    result = run(house.home, "recover", "alice", "--truncate-at", "2", "--force", "--yes")
    assert result.exit_code == 0, result.output
    assert list(log.glob("cut-*/data.mdb"))
    assert modes(log) == {}


@needs_root
def test_a_stranger_reads_settings_and_public_keys_of_a_shared_registry_and_nothing_else(house: House) -> None:
    lived(house)
    folder = house.settings("alice").folder
    for path in (house.home.parent, house.home):
        open_to_all(path)
    assert as_stranger((folder / "public_keys").read_text) == "PermissionError"
    folder.chmod(0o711)  # as docs/how-to/security.md says
    assert as_stranger(lambda: len(keys.read_public_keys(folder))) == "1"
    assert as_stranger(lambda: Registry(house.home).load("alice").name) == "alice"
    for file in ("log/data.mdb", "log/journal", "log/lock", "keys/pairs"):
        assert as_stranger((folder / file).read_bytes) == "PermissionError"
    assert as_stranger(lambda: list(folder.iterdir())) == "PermissionError"


@needs_root
def test_status_of_a_shared_registry_shows_what_the_asking_user_may_see(house: House) -> None:
    import immortal.cli.status  # noqa: F401 (nobody can load it from here)

    lived(house)
    house.register("bob")
    for path in (house.home.parent, house.home):
        open_to_all(path)
    for name in ("alice", "bob"):
        make_folder(house.home / name)
        (house.home / name).chmod(0o711)
    said = as_stranger(lambda: run(house.home, "status", "--json").output)
    assert "control.sock: only the user who runs it, and root, may ask" in said
    assert "not started yet" in said
    assert "sequence_id" not in said
    house.close()
    said = as_stranger(lambda: run(house.home, "status", "--json").output)
    error = f"{house.home}/alice/keys/own_logs cannot be read: Permission denied"
    assert json.loads(said) == [
        {"name": "alice", "phase": "unknown", "error": error, "state": "unknown"},
        {"name": "bob", "phase": "not started yet", "state": "not started yet"},
    ]


def test_a_log_of_an_earlier_version_is_tightened_and_it_is_said_once(house: House) -> None:
    lived(house)
    settings = house.settings("alice")
    house.close()
    cut = Path(settings.log) / "cut-3-3-1"
    cut.mkdir()
    (cut / "data.mdb").write_bytes(b"")
    foreign = Path(settings.log) / "notes of mine"
    foreign.write_text("")
    ours = [path for path in Path(settings.log).rglob("*") if path.is_file() and path != foreign]
    for path in ours:
        path.chmod(0o644)
    foreign.chmod(0o644)
    for folder in (Path(settings.log), cut):
        folder.chmod(0o755)
    process = house.start("alice")
    line = process.line("was open to others")
    assert "data.mdb 0644" in line
    assert "log 0755" in line
    assert modes(Path(settings.log)) == {"notes of mine": "0644"}
    process.terminate()
    process.ended()
    process = house.start("alice")
    assert process.count("was open to others") == 0


def test_a_folder_that_is_open_to_all_on_purpose_and_files_of_others_stay_as_they_are(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert restrict_mode(tmp_path, 0o700) is None
    assert mode(tmp_path) == "1777"
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    assert restrict_mode(link, 0o600) is None
    tmp_path.chmod(0o700)
    with open("/dev/null", "w", opener=opener):
        pass
    assert mode(Path("/dev/null")) == "0666"


def test_a_file_that_is_written_once_more_is_tightened(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    assert mode(path) == "0666"
    with open(path, "w", opener=opener) as file:
        file.write("new")
    assert (mode(path), path.read_text()) == ("0600", "new")


# --- what others can lock --------------------------------------------------------------------------------------------

HOLD = """import fcntl, os, signal, sys
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
file = open(sys.argv[1], 'a')
fcntl.flock(file, fcntl.LOCK_EX)
print('held', flush=True)
signal.pause()"""


@pytest.fixture
def holding() -> Iterator[Callable[[Path], int]]:
    """Lets another process hold a lock; which."""
    processes = []

    def hold(path: Path) -> int:
        process = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process.pid

    yield hold
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@needs_root
def test_a_stranger_cannot_lock_a_log_or_the_registry(house: House) -> None:
    lived(house)
    log = Path(house.settings("alice").log)
    house.close()
    for path in (house.home.parent, house.home, log.parent):
        open_to_all(path)
    log.chmod(0o755)
    (log / "lock").chmod(0o644)  # as earlier versions made it
    FolderLock(log).release()
    for path in (log / "lock", house.home / ".lock"):
        assert as_stranger(lambda path=path: os.open(path, os.O_RDONLY)) == "PermissionError"


def test_a_lock_that_is_held_ends_a_registration_and_its_holder_is_named(
    house: House, monkeypatch: pytest.MonkeyPatch, holding: Callable[[Path], int]
) -> None:
    monkeypatch.setattr(registry, "LOCK_TIMEOUT_S", 0.1)
    house.register("alice")
    pid = holding(house.home / ".lock")
    result = run(house.home, "register", "bob", "--peer", "tcp://127.0.0.1:*")
    assert result.exit_code == 1
    assert f"is being changed by process {pid}, for more than 0.1 s: wait for that process, or end it" in result.output


def test_who_holds_a_log_is_named_truly(house: House, holding: Callable[[Path], int]) -> None:
    lived(house)
    log = Path(house.settings("alice").log)
    house.close()
    pid = holding(log / "lock")
    (log / "lock").write_text("1\n")  # what the last coordinator wrote, or anybody
    with pytest.raises(LogLockedError, match=f"is in use by process {pid}: two coordinators must not write one log"):
        open_log(log, "alice")
    assert is_locked(log)


@needs_root
def test_a_holder_of_another_user_is_named_with_him(house: House) -> None:
    house.register("alice")
    path = house.home / ".lock"
    for folder in (house.home.parent, house.home):
        open_to_all(folder)
    path.chmod(0o666)
    command = [sys.executable, "-c", HOLD, path, str(STRANGER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with open(path) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(path) as file:
            assert registry.describe_lock_holder(file.fileno()) == f"process {process.pid} of user {STRANGER}"
        process.kill()


# --- what others can put in place of it ------------------------------------------------------------------------------


@pytest.mark.parametrize("writable", [0o775, 0o757, 0o777, 0o1777])
def test_a_registry_folder_that_others_can_write_is_refused(house: House, writable: int) -> None:
    house.register("alice")
    house.home.chmod(writable)
    expected = f"{house.home} has mode {writable & 0o777:04o}: others could put their own keys, addresses and settings"
    for command in (
        ["status"],
        ["status", "alice"],
        ["run", "alice", "a:B"],
        ["coordinator", "alice"],
        ["register", "bob", "--peer", "tcp://127.0.0.1:*"],
        ["stop", "alice"],
        ["peers", "show", "alice"],
    ):
        result = run(house.home, *command)
        assert (result.exit_code, expected in result.output) == (1, True), result.output
    with pytest.raises(NotConnectable, match="has mode"):
        Finder("alice", house.home).find()
    house.home.chmod(0o755)
    assert run(house.home, "status", "alice").exit_code == 0
    Finder("alice", house.home, insecure=True).find()


def test_an_instance_folder_that_others_can_write_keeps_it_from_starting(house: House) -> None:
    house.register("alice")
    folder = house.settings("alice").folder
    folder.mkdir(exist_ok=True)
    folder.chmod(0o775)
    assert f"{folder} has mode 0775: others could put their own" in house.start("alice", started=False).failed()
    result = run(house.home, "run", "alice", "a:B")
    assert (result.exit_code, f"'chmod go-w {folder}' ends that" in result.output) == (1, True), result.output


def test_a_running_coordinator_goes_on_with_what_it_has(house: House) -> None:
    house.register("alice")
    process = house.start("alice")
    house.home.chmod(0o777)
    with pytest.raises(RegistryError):
        Registry(house.home).names()
    assert process.status()["name"] == "alice"
