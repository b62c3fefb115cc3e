"""What a user can get wrong at the command line and in the registry: one clear line, non-zero status, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from immortal.cli.options import progress_bar
from immortal.coordinator.operator import control
from tests.helpers import commands

GOOD = ("register", "counter", "--peer", "tcp://127.0.0.1:*")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def immortal(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(home.parent, *arguments, home=str(home))


def error_of(home: Path, *arguments: str) -> str:
    """The one line of a command that fails with status 1."""
    result = immortal(home, *arguments)
    assert result.returncode == 1, result
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("error: ").rstrip()


def usage_error_of(home: Path, *arguments: str) -> str:
    """The last line of a command that was called wrongly."""
    result = immortal(home, *arguments)
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def register(home: Path, name: str = "counter") -> Path:
    assert immortal(home, "register", name, "--peer", "tcp://127.0.0.1:*").returncode == 0
    return home / f"{name}.toml"


@pytest.mark.parametrize(
    "command",
    [
        ("run", "conter", "wordcount:Counter"),
        ("coordinator", "conter"),
        ("status", "conter"),
        ("log", "show", "conter"),
        ("log", "verify", "conter"),
        ("unregister", "conter"),
        ("stop", "conter"),
        ("restart", "conter"),
    ],
)
def test_unknown_name(home: Path, command: tuple[str, ...]) -> None:
    register(home)
    register(home, "reader")
    expected = f"there is no instance 'conter': did you mean 'counter'? registered in {home}: counter, reader"
    assert error_of(home, *command) == expected


def test_unknown_name_in_an_empty_registry(home: Path) -> None:
    line = error_of(home, "status", "counter")
    assert line.startswith(f"there is no instance 'counter': nothing is registered in {home}")
    assert "immortal register counter --peer tcp://127.0.0.1:*" in line


def test_duplicate_name(home: Path) -> None:
    path = register(home)
    before = path.read_bytes()
    assert error_of(home, *GOOD) == (
        f"the instance 'counter' is registered already, in {path}: 'immortal status counter' shows it,"
        " 'immortal unregister counter' removes it"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", [("run", "counter", "a:B"), ("coordinator", "counter"), ("status", "counter")])
def test_a_typo_in_the_settings(home: Path, command: tuple[str, ...]) -> None:
    path = register(home)
    path.write_text(path.read_text() + "ap_port = 7002\n")
    expected = f"{path}, line 3, field 'ap_port': unknown field: did you mean 'app_port'?"
    if command[0] == "status":
        result = immortal(home, "status")  # the others are shown all the same
        assert (result.returncode, result.stdout.splitlines()[-1]) == (1, f"counter: {expected}")
    assert error_of(home, *command) == expected


def test_a_wrong_value_in_the_settings(home: Path) -> None:
    path = register(home)
    path.write_text('peer = "tcp://127.0.0.1:7001"\napp_port = "many"\n')
    expected = f"{path}, line 2, field 'app_port': got \"many\", expected a whole number from 1 to 65535"
    assert error_of(home, "coordinator", "counter") == expected


def test_settings_that_are_no_toml(home: Path) -> None:
    path = register(home)
    path.write_text("peer = tcp://127.0.0.1:7001\n")
    line = error_of(home, "coordinator", "counter")
    assert line.startswith(f"{path}, line 1, column 8: no valid TOML: ")


def test_a_broken_neighbour_disturbs_nobody(home: Path) -> None:
    register(home).write_text("nonsense")
    register(home, "reader")
    assert "not started yet" in immortal(home, "status", "reader").stdout


@pytest.mark.parametrize("name", ["../counter", "-x", "a b", "", "x" * 65])
def test_an_impossible_name(home: Path, name: str) -> None:
    line = usage_error_of(home, "register", "--peer", "tcp://127.0.0.1:*", "--", name)
    assert "instance name" in line
    assert not home.exists()


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("127.0.0.1:7001", 'got "127.0.0.1:7001", expected an endpoint such as'),
        ("tcp://127.0.0.1", "expected an endpoint such as"),
        ("tcp://*:7001", "expected an endpoint such as"),
        ("tcp://127.0.0.1:70000", "expected an endpoint such as"),
        ("inproc://x", "expected an endpoint such as"),
        ("ipc://" + "x" * 200, "expected a path of at most 107 bytes"),
        ("tcp://no.such.host.invalid:*", "the address 'no.such.host.invalid' cannot be used here"),
    ],
)
def test_an_impossible_endpoint(home: Path, endpoint: str, said: str) -> None:
    assert said in error_of(home, "register", "counter", "--peer", endpoint)
    assert not (home / "counter.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("staus",), "there is no command 'staus': did you mean 'status'?"),
        (("log", "shwo", "counter"), "there is no command 'shwo': did you mean 'show'?"),
        (("register", "counter"), "Missing option '--peer'"),
        ((*GOOD, "--app-port", "x"), "Invalid value for '--app-port': 'x' is not a valid integer"),
        ((*GOOD, "--app-port", "0"), "0 is not in the range 1<=x<=65535, and is not '*' either"),
        ((*GOOD, "--keep-checkpoints", "0"), "and is not 'all' either"),
        ((*GOOD, "--log-trigger-mb", "-1"), "-1 is not in the range"),
        (("run", "counter", "wordcount"), "'wordcount' names no app: expected \"module:Class\""),
        (("run", "counter", "a:B", "--log-level", "loud"), "'loud' is not one of"),
    ],
)
def test_wrong_usage(home: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in usage_error_of(home, *arguments)


def test_run_without_an_app(home: Path) -> None:
    register(home)
    assert error_of(home, "run", "counter") == (
        "'counter' has not been run yet: give its app ('immortal run counter MODULE:CLASS')"
    )


@pytest.mark.parametrize("command", ["show", "verify"])
def test_the_log_of_one_that_never_ran(home: Path, command: str) -> None:
    register(home)
    assert error_of(home, "log", command, "counter") == (
        f"'counter' has not been started yet: there is no log in {home / 'counter' / 'log'}"
    )


def test_log_show_backwards(home: Path) -> None:
    register(home)
    assert "--from 5 is after --to 3" in usage_error_of(home, "log", "show", "counter", "--from", "5", "--to", "3")


def test_what_runs_is_neither_run_again_nor_unregistered(home: Path) -> None:
    path = register(home)
    control.announce(home / "counter", Path("/there/is/none"))  # as if this process were it
    pid = os.getpid()
    expected = f"'counter' runs, as process {pid}: 'immortal stop counter' stops it"
    assert error_of(home, "run", "counter", "a:B") == expected
    assert error_of(home, "unregister", "counter") == expected
    assert path.exists()


def test_a_home_that_is_a_file(home: Path) -> None:
    home.write_text("x")
    assert "is a file" in usage_error_of(home, *GOOD)


def test_a_closed_pipe_is_quiet(home: Path) -> None:
    register(home)
    command = [sys.executable, "-m", "immortal", "--home", str(home), "status", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writer)
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["--help", "status"])
def test_output_that_cannot_be_written(home: Path, command: str) -> None:
    """`--help` ended with a traceback."""
    register(home)
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-m", "immortal", "--home", str(home), command]
        result = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (1, "error: the output can't be written: No space left on device\n")


@pytest.mark.parametrize("command", [("log", "show"), ("recover",), ("log", "verify")])
def test_a_file_in_place_of_a_log_folder(home: Path, command: tuple[str, ...]) -> None:
    """It was taken for a log that was never begun."""
    register(home)
    (home / "counter").mkdir(exist_ok=True)
    (home / "counter" / "log").touch()
    result = immortal(home, *command, "counter")
    assert result.returncode == 1
    assert "log is a file: the folder of a log was expected" in result.stderr


def test_a_progress_bar_needs_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as by 2>&-
    with progress_bar("replaying") as advance:
        advance(1, 2)


def test_a_file_that_is_no_log(home: Path) -> None:
    register(home)
    log = home / "counter" / "log"
    log.mkdir(parents=True)
    (log / "data.mdb").write_bytes(b"this is no database" * 1000)
    assert str(log) in error_of(home, "log", "show", "counter")
    result = immortal(home, "log", "verify", "counter")
    assert result.returncode == 1
    assert "fatal: " in result.stdout
    assert result.stderr == ""
    result = immortal(home, "status")
    assert result.returncode == 1
    assert str(log) in result.stdout
