"""The app's Unix socket: who may use it, where it is, whose file it is, and what is in its way."""

from __future__ import annotations

import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from immortal.appsdk.running.transport import connect, read_secret
from immortal.cli import main
from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.app.sockets import AppListenError, listen_unix
from immortal.coordinator.config import ConfigError, InstanceSettings
from immortal.coordinator.config.socket_addresses import (
    SOCKET_FILE_NAME,
    UNIX_PATH_SIZE_BYTES_MAX,
    secure_folder,
    socket_path,
)
from immortal.coordinator.instances.registry import Registry
from immortal.errors import ConnectError
from immortal.protocol.extensions import ALL_EXTENSIONS, Hello, encode_hello
from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.processes import DEADLINE_S, TOLD, CoordinatorProcess, House, SocketApp

APP = """
from immortal import Immortal, Impulses, impulse, on_primary

class Counter(Immortal):
    lives: int

    def __init__(self) -> None:
        self.lives = 0

    @impulse
    def began(self) -> None:
        self.lives += 1
        print("lives:", self.lives, flush=True)

    @on_primary
    def begin(self, impulses: Impulses) -> None:
        impulses.began()
        impulses.flush()
"""


class UnixApp(SocketApp):
    """Comes in by the Unix socket, and knows the secret where there is one."""

    def __init__(self, settings: InstanceSettings, house: House, *, extended: bool = True, peer: str = "") -> None:
        path = app_secret.path(settings.folder)
        secret = read_secret(str(path)) if path.exists() else b""
        super().__init__(settings, house._apps, extended=extended, peer=peer, secret=secret)

    def connected(self, settings: InstanceSettings) -> socket.socket:
        assert settings.app_socket is not None
        connection = connect(settings.app_socket)
        connection.settimeout(DEADLINE_S)
        return connection


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "app.sock"
    if len(os.fsencode(path)) > UNIX_PATH_SIZE_BYTES_MAX:
        pytest.skip("the folder of the tests is too deep for a Unix socket")
    return path


def started(house: House, path: Path, *names: str, app_auth: str = "challenge") -> list[CoordinatorProcess]:
    for name in names:
        house.register(name, app_socket=f"unix:{path}.{name}", app_auth=app_auth, app_port=0)
    return [house.start(name) for name in names]


def socket_of(process: CoordinatorProcess) -> Path:
    assert process.settings.app_socket is not None
    return Path(process.settings.app_socket.removeprefix("unix:"))


# --- in service ------------------------------------------------------------------------------------------------------


def test_two_instances_through_their_unix_sockets(house: House, path: Path) -> None:
    alice_process, bob_process = started(house, path, "alice", "bob")
    assert f"app_socket=unix:{path}.alice" in alice_process.lines[0]
    assert stat.S_IMODE(socket_of(alice_process).stat().st_mode) == 0o600
    alice = UnixApp(alice_process.settings, house, peer="bob").ready()
    bob = UnixApp(bob_process.settings, house).ready()
    numbers = list(range(1, 51))
    for number in numbers:
        alice.impulse(number)
    bob.until(lambda: bob.state["told"] == numbers)
    alice.close()
    alice_process.line("the app disconnected")
    again = UnixApp(alice_process.settings, house, peer="bob").ready()
    assert again.state["forwarded"] == numbers
    alice_process.terminate()
    again.until_closed()
    assert alice_process.ended()[0] == 0
    assert not socket_of(alice_process).exists()


def test_the_port_is_there_as_well_and_the_app_is_one(house: House, path: Path) -> None:
    (process,) = started(house, path, "alice")
    secret = read_secret(str(app_secret.path(process.settings.folder)))
    by_port = house.app("alice", extended=True, secret=secret).ready()
    with socket.socket(socket.AF_UNIX) as second:
        second.connect(str(socket_of(process)))
        assert second.recv(1) == b""
    process.line("a second app was turned away")
    by_port.close()
    process.line("the app disconnected")
    UnixApp(process.settings, house).ready()


def test_the_secret_is_asked_for_there_too(house: House, path: Path) -> None:
    (process,) = started(house, path, "alice")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(str(socket_of(process)))
        stranger.sendall(encode_hello(Hello(ALL_EXTENSIONS, "stranger")))
        assert b"must prove that it knows its secret" in stranger.recv(1 << 16)
        assert stranger.recv(1) == b""
    UnixApp(process.settings, house).ready()


def test_a_base_app_over_the_unix_socket(house: House, path: Path) -> None:
    (process,) = started(house, path, "alice", app_auth="none")
    app = UnixApp(process.settings, house, extended=False).ready()
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])


def test_more_than_the_sockets_hold(house: House, path: Path) -> None:
    (process,) = started(house, path, "alice")
    app = UnixApp(process.settings, house).ready()
    for number in range(120):  # 12 MB
        app.impulse(number, TOLD, 100_000)
    process.until(lambda status: status["impulses"] == 120 and status["unsent_bytes"] > 0)
    app.close()  # with much unread
    process.line("the app disconnected")
    again = UnixApp(process.settings, house).ready()
    assert again.state["told"] == list(range(120))


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_file_of_a_killed_coordinator_is_replaced(house: House, path: Path) -> None:
    (process,) = started(house, path, "alice")
    UnixApp(process.settings, house).ready().impulse(1)
    process.until(lambda status: status["impulses"] == 1)
    process.kill()
    assert socket_of(process).is_socket(), "kill -9 leaves it"
    process = house.start("alice")
    assert stat.S_IMODE(socket_of(process).stat().st_mode) == 0o600
    app = UnixApp(process.settings, house).ready()
    assert app.state["forwarded"] == [1]


def test_what_is_in_the_way_is_named_and_stays(house: House, path: Path) -> None:
    house.register("alice", app_socket=f"unix:{path}")
    path.write_text("precious")
    line = house.start("alice", started=False).failed()
    assert f"can't listen for the app of 'alice' at unix:{path}: File exists" in line
    assert path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        line = house.start("alice", started=False).failed()
        assert f"at unix:{path}: Address already in use; make room for it there, or choose another path" in line
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    path.unlink()
    house.start("alice")


def test_a_folder_that_is_not_there(path: Path) -> None:
    with pytest.raises(AppListenError, match=r"absent/app\.sock: No such file or directory"):
        listen_unix(path.parent / "absent" / "app.sock", "alice")


def test_a_file_that_is_another_coordinators_by_now_stays(house: House, path: Path) -> None:
    (process,) = started(house, path, "alice")
    app = UnixApp(process.settings, house).ready()
    own = socket_of(process)
    own.rename(f"{path}.gone")
    with listen_unix(own, "another"):
        process.terminate()
        app.until_closed()
        assert process.ended()[0] == 0
        assert own.is_socket()


# --- addresses -------------------------------------------------------------------------------------------------------

LONGEST = "/" + "x" * (UNIX_PATH_SIZE_BYTES_MAX - 1)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/run/app.sock", '"unix:" and an absolute path'),
        ("unix:", '"unix:" and an absolute path'),
        ("unix:app.sock", '"unix:" and an absolute path'),
        ("unix:/a\0b", '"unix:" and an absolute path'),
        (f"unix:{LONGEST}x", "a path of at most 107 bytes behind unix:, it has 108"),
        ("unix:/" + "ä" * 54, "a path of at most 107 bytes behind unix:, it has 109"),
    ],
)
def test_settings_that_are_none(tmp_path: Path, address: str, expected: str) -> None:
    with pytest.raises(ConfigError, match="field 'app_socket': got ") as caught:
        Registry(tmp_path).register("alice", "tcp://127.0.0.1:*", app_socket=address)
    assert expected in str(caught.value)


def test_the_longest_path() -> None:
    with pytest.raises(ConnectError, match=r"no coordinator at unix:/xxx.*\(No such file or directory\)"):
        connect(f"unix:{LONGEST}", timeout_s=0.01)
    for path in ("", f"{LONGEST}x", "a\0b"):
        with pytest.raises(ConnectError, match="a Unix socket's path has 1 to 107"):
            connect(f"unix:{path}")


def test_the_sdk_waits_for_the_socket(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listeners: list[socket.socket] = []
    attempts: list[float] = []

    def sleep(delay_s: float) -> None:
        attempts.append(delay_s)
        if len(attempts) == 2:  # until now there is no file; now there is one, and nobody listens
            with listen_unix(path, "alice"):
                pass
        elif len(attempts) == 4:
            listeners.append(listen_unix(path, "alice"))

    monkeypatch.setattr("time.sleep", sleep)
    connection = connect(f"unix:{path}")
    assert len(attempts) == 4
    assert not connection.getblocking()
    connection.close()
    listeners[0].close()


def test_register_makes_the_path_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    base = ["--home", str(tmp_path), "register"]
    result = CliRunner().invoke(main, [*base, "alice", "--peer", "tcp://127.0.0.1:*", "--app-socket", "unix:a.sock"])
    assert result.exit_code == 0, result.output
    settings = Registry(tmp_path).load("alice")
    assert settings.app_addresses == [settings.app_socket] == ["unix:/tmp/a.sock"]
    assert "app at unix:/tmp/a.sock\n" in result.output
    result = CliRunner().invoke(main, [*base, "carl", "--peer", "tcp://127.0.0.1:*", "--app-port", "*"])
    settings = Registry(tmp_path).load("carl")
    assert settings.app_addresses == [settings.app_unix_address, settings.app_address]
    assert f"app at {settings.app_unix_address} and {settings.app_address}\n" in result.output
    result = CliRunner().invoke(main, [*base, "bob", "--peer", "tcp://127.0.0.1:*", "--app-socket", "a.sock"])
    assert result.exit_code == 2
    assert "Invalid value for '--app-socket'" in result.output


# --- immortal run ----------------------------------------------------------------------------------------------------


def lives_of(folder: Path, name: str, path: Path) -> None:
    """Two lives of an instance under `immortal run`, both by the Unix socket at ``path``, and no trace of it behind."""
    (folder / "lives.py").write_text(APP)
    immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, name, "lives:Counter", "--restart")
    try:
        for life in (1, 2):
            run.line(f"lives: {life}")
            line = run.line("coordinator started", life)
            assert f"app_socket=unix:{path}" in line
            assert " app=" not in line, "there is no port where none was asked for"
            assert (established(path), path.is_socket()) == (1, True)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert not path.parent.stat().st_mode & 0o022, "others can put another one there"
            pids = dict(field.split("=") for field in run.line("  coordinator_pid=", life).split() if "=" in field)
            if life == 1:
                os.kill(int(pids["coordinator_pid"]), signal.SIGKILL)
        assert run.stop() == 0
        assert not path.exists()
    finally:
        run.kill()
    path.touch()
    assert "unregistered" in immortal(folder, "unregister", name, "--delete-log")
    assert not path.exists()
    assert not (folder / HOME / name).exists()


def test_run_uses_it(tmp_path: Path, path: Path) -> None:
    where = socket_path(tmp_path / HOME / "counter", SOCKET_FILE_NAME)
    if where.parent != tmp_path / HOME / "counter":
        pytest.skip("the folder of the tests is too deep for a Unix socket")
    lives_of(tmp_path, "counter", where)


def test_a_home_that_is_too_deep_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    where = socket_path(folder / HOME / "counter", SOCKET_FILE_NAME)
    assert len(os.fsencode(where)) <= UNIX_PATH_SIZE_BYTES_MAX
    assert where.parent == Path(f"/tmp/immortal-{os.geteuid()}")
    lives_of(folder, "counter", where)
    assert stat.S_IMODE(where.parent.stat().st_mode) == 0o700


def established(path: Path) -> int:
    """How many connections the Unix socket at ``path`` has, as the kernel lists its accepted ends."""
    connected = "03"
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(line[-1] == str(path) and line[5] == connected for line in lines)


# --- its folder ------------------------------------------------------------------------------------------------------


def test_a_socket_has_one_place_whatever_its_folder_is_called(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    (tmp_path / "short").symlink_to(deep)
    for name in ("app.sock", "control.sock"):
        assert socket_path(tmp_path / "short" / "a", name) == socket_path(deep / "a", name)
    paths = {socket_path(deep / folder, name) for folder in ("a", "b") for name in ("app.sock", "control.sock")}
    assert len(paths) == 4
    assert all(len(os.fsencode(path)) <= UNIX_PATH_SIZE_BYTES_MAX for path in paths)
    assert socket_path(Path("/run/a"), "app.sock") == Path("/run/a/app.sock")


def test_a_short_folder_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.coordinator.config.socket_addresses.SHORT_FOLDERS", tmp_path)
    path = socket_path(Path("/" + "deep" * 30), "app.sock")
    own = path.parent
    for _ in range(2):
        secure_folder(path)
        assert (own.parent, stat.S_IMODE(own.stat().st_mode)) == (tmp_path, 0o700)
    own.chmod(0o750)
    with pytest.raises(AppListenError, match=rf"{own} is not a folder that only user \d+ can use: remove it, or see"):
        listen_unix(path, "alice", secure=True)
    own.rmdir()
    (tmp_path / "elsewhere").mkdir(0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        secure_folder(path)
    own.unlink()
    if os.geteuid() == 0:
        own.mkdir(0o700)
        os.chown(own, 65534, -1)
        with pytest.raises(PermissionError):
            secure_folder(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_listener_of_another_user_is_not_spoken_to() -> None:
    with tempfile.TemporaryDirectory(prefix="immortal-tests-", dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        false_listener(Path(folder, "app.sock"))


def false_listener(path: Path) -> None:
    listens, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as false:
                false.bind(str(path))
                false.listen()
                os.write(listens[1], b"x")
                os.read(go[0], 1)
                false.setblocking(False)
                connection, _ = false.accept()
                os._exit(0 if connection.recv(100) == b"" else 1)  # it was told nothing
        finally:
            os._exit(2)
    try:
        assert os.read(listens[0], 1) == b"x"
        with pytest.raises(ConnectError, match=f"user 65534 listens at unix:{path} "):
            connect(f"unix:{path}")
    finally:
        os.write(go[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for descriptor in (*listens, *go):
            os.close(descriptor)
