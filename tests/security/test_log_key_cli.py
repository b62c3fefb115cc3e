"""A log with a key at the command line: made, forged, found; the key lost, changed, taken away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from immortal.cli import main
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.authentication import ForgedLogError, LogKeyError
from immortal.coordinator.notices import Notices
from immortal.coordinator.project import fleet
from immortal.coordinator.project.project import ServiceSpec
from immortal.coordinator.service.process import STATUS_NO_RECOVERY
from immortal.coordinator.service.runtime import run_coordinator
from immortal.log import create_log, open_reader
from tests.faults.sample_log import COMMITTER_ID, NAME, put_record, write_log
from tests.security import log_forger as forger


class Home:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = Registry(folder)

    @property
    def settings(self) -> InstanceSettings:
        return self.registry.load(NAME)

    def run(self, *arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(main, ["--home", str(self.folder), *arguments])
        assert result.exit_code == status, (result.output, result.exception)
        return result

    def register(self, *options: str) -> None:
        self.run("register", NAME, "--peer", "tcp://127.0.0.1:*", *options)

    def start(self) -> None:
        """What a start does with the log, and a stop. Raises LogError."""
        store = own_logs.open_log(self.settings)
        own_logs.adopt_log(self.settings, store, trust_pickle=False)
        store.close()

    def key(self, *options: str) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(self.run("log", "key", NAME, "--json", *options).stdout)
        return described

    def edit(self, old: str, new: str) -> None:
        path = self.registry.path(NAME)
        path.write_text(path.read_text().replace(old, new))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """With a key from the beginning, and records."""
    made = Home(tmp_path)
    made.register("--log-key")
    write_log(made.settings.log, keys=own_logs.add_key(made.settings))
    with open_reader(made.settings.log) as reader:
        own_logs.OwnLogs(made.settings.folder).add(reader.identity, authenticated=True)
    return made


def test_an_upgrade_says_the_format_and_changes_no_log_in_a_folder(home: Home, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (home.settings.folder / "log").glob("*.mdb")}
    says = f"the log of {NAME} has format 6 (authenticated): this program reads and writes it as it is\n"
    for options in ((), ("--check",)):
        assert home.run("log", "upgrade", NAME, *options).output == says
    assert {path: path.read_bytes() for path in before} == before
    other = Home(tmp_path / "other")
    other.register()
    assert "has no log yet: its first start" in other.run("log", "upgrade", NAME, "--check").output


def test_the_first_start_makes_the_key(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register("--log-key")
    path = home.settings.folder / "keys" / "log_key"
    assert not path.exists()
    home.start()
    assert path.stat().st_mode & 0o777 == 0o600
    described = home.key()
    assert described["authenticated_with"] == described["keys"][0]
    assert described["first_sequence_id"] == 0
    secret = path.read_text().strip()
    assert secret not in home.run("log", "key", NAME).output
    assert home.run("log", "verify", NAME).stdout.rstrip().endswith(f"authenticated with key {described['keys'][0]}")


def test_a_key_outside_the_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.register("--log-key", str(tmp_path / "vault" / "key"))
    home.start()
    assert (tmp_path / "vault" / "key").exists()
    assert not (home.settings.folder / "keys" / "log_key").exists()
    home.start()


def test_each_command_finds_a_forged_record(home: Home) -> None:
    assert "sound" in home.run("log", "verify", NAME).stdout
    forger.change_a_record(Path(home.settings.log))
    said = home.run("log", "verify", NAME, status=1).stdout
    assert "record 90 is not authentic" in said
    assert "DAMAGED" in said
    assert "stop at record 90 of 119" in home.run("recover", NAME, status=1).stdout
    assert "record 90 is not authentic" in home.run("log", "show", NAME, "--from", "90", "--to", "90").stdout
    home.run("recover", NAME, "--truncate-at", "90", "--yes")
    assert "sound" in home.run("log", "verify", NAME).stdout
    home.start()


@pytest.mark.parametrize("forgery", [forger.change_a_position, forger.forge_a_checkpoint], ids=lambda one: one.__name__)
def test_no_command_goes_on_with_a_forged_table(home: Home, forgery: Any, tmp_path: Path) -> None:
    forgery(Path(home.settings.log))
    assert run_coordinator(home.settings, home.registry, Notices(NAME)) == STATUS_NO_RECOVERY
    for command in (["replay", NAME, "--app", "m:C"], ["status", NAME], ["verify", NAME, "--app", "m:C"]):
        assert "not authentic" in home.run(*command, status=1).output, command
    assert "not authentic" in home.run("log", "verify", NAME, status=1).stdout
    assert "not authentic" in home.run("log", "backup", NAME, str(tmp_path / "backup"), status=1).stderr
    home.run("log", "key", NAME, "--accept", "--yes")
    assert "sound" in home.run("log", "verify", NAME).stdout


def test_a_forger_cannot_take_the_key_away(home: Home) -> None:
    forger.take_the_key_away(Path(home.settings.log))
    assert run_coordinator(home.settings, home.registry, Notices(NAME)) == STATUS_NO_RECOVERY
    assert "is not authenticated, but this instance had" in home.run("log", "verify", NAME, status=1).stdout
    assert "is not authenticated, but this instance had" in home.run("replay", NAME, status=1).stderr
    with pytest.raises(LogKeyError, match="is not authenticated, but this instance had"):
        home.start()


def test_a_forger_cannot_put_another_log_there(home: Home) -> None:
    shutil.rmtree(home.settings.log)
    create_log(home.settings.log, NAME, committer_id=COMMITTER_ID + 1).close()
    with pytest.raises(LogKeyError, match="is not authenticated"):
        home.start()


def test_a_lost_key_is_said_and_no_new_one_is_made(home: Home) -> None:
    before = home.key()["authenticated_with"]
    path = own_logs.key_path(home.settings)
    path.unlink()
    with pytest.raises(LogKeyError, match=f"authenticated with the key {before}, and there is none"):
        home.start()
    assert not path.exists()
    assert f"key {before} is NOT in {path}" in home.run("log", "key", NAME).stdout
    assert "there is none" in home.run("log", "verify", NAME, status=1).stdout
    home.run("log", "key", NAME, "--accept", "--yes")
    home.start()
    assert home.key()["authenticated_with"] != before


def test_without_the_setting_the_log_stays_authenticated(home: Home) -> None:
    home.edit('log_key = "file"\n', "")
    home.start()
    forger.change_a_position(Path(home.settings.log))
    with pytest.raises(ForgedLogError):
        home.start()


def test_a_new_key(home: Home) -> None:
    before = home.key()["keys"]
    after = home.key("--rotate")
    assert after["keys"][1:] == before
    assert after["authenticated_with"] == before[0]
    home.start()
    assert home.key()["authenticated_with"] == after["keys"][0]
    assert "sound" in home.run("log", "verify", NAME).stdout


def test_the_key_is_taken_away_by_its_owner(home: Home) -> None:
    assert "remove 'log_key' from" in home.run("log", "key", NAME, "--off", "--yes", status=1).stderr
    home.edit('log_key = "file"\n', "")
    assert "Aborted" in home.run("log", "key", NAME, "--off", status=1).stderr
    home.run("log", "key", NAME, "--off", "--yes")
    home.start()
    assert home.key()["authenticated_with"] is None
    home.edit("peer =", 'log_key = "file"\npeer =')
    home.start()
    assert home.key()["first_sequence_id"] == 120


def test_a_new_instance_has_a_key_unless_it_is_told_otherwise_or_its_log_is_elsewhere(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register()
    home.start()
    assert home.key()["authenticated_with"] is not None
    home.run("register", "bare", "--peer", "tcp://127.0.0.1:*", "--log-key", "none")
    assert "log_key" not in home.registry.path("bare").read_text()
    home.run("register", "kept", "--peer", "tcp://127.0.0.1:*", "--log", "memory:kept")
    assert home.registry.load("kept").log_key is None
    home.edit('log_key = "file"', 'log_key = "none"')
    assert home.settings.log_key is None
    project = ServiceSpec(name="made", app="shop:Shop", versions=(1,), files=(), calls=())
    fleet.register(home.registry, project)
    assert home.registry.load("made").log_key == "file"
    home.registry.path("made").write_text('peer = "tcp://127.0.0.1:7001"\n')
    fleet.register(home.registry, project)
    assert home.registry.load("made").log_key is None, "as it was registered before"


def test_a_log_that_was_there_gets_a_key_at_the_next_start(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register("--log-key", "none")
    write_log(home.settings.log)
    home.start()
    assert "the log of alice is not authenticated\n" in home.run("log", "key", NAME).stdout
    home.edit("peer =", 'log_key = "file"\npeer =')
    assert "the next start makes a key" in home.run("log", "key", NAME).stdout
    home.start()
    store = own_logs.open_log(home.settings)
    put_record(store, 120)
    store.close()
    assert "from record 120 on" in home.run("log", "key", NAME).stdout
    assert "records before 120 as they were when it got a key" in home.run("log", "verify", NAME).stdout


def test_a_readable_key_is_refused(home: Home) -> None:
    path = own_logs.key_path(home.settings)
    path.chmod(0o644)
    with pytest.raises(LogKeyError, match=rf"{path} has mode 0644, expected 0600.*--rotate"):
        home.start()
    path.chmod(0o600)
    path.write_text("no key\n")
    with pytest.raises(LogKeyError, match="does not hold keys of a log"):
        home.start()


def test_the_key_of_a_log_that_is_kept_stays(home: Home) -> None:
    path = own_logs.key_path(home.settings)
    home.run("unregister", NAME)
    assert path.exists()
    home.register("--log-key")
    home.start()
    home.run("unregister", NAME, "--delete-log")
    assert not path.exists()
