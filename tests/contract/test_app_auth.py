"""Who may be the app: who proves to know the secret, those who don't, and those who say nothing at all.

What a false coordinator gets, and what an attacker tries at the handshake, is in tests/security/test_app_port.py.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from immortal.appsdk.running.transport import authenticate, read_secret
from immortal.cli import main
from immortal.coordinator.app import authenticator as app_gate
from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.app.authenticator import UNAUTHENTICATED_MAX
from immortal.coordinator.config import AppAuth, ConfigError, InstanceSettings, override
from immortal.coordinator.config.socket_addresses import UNIX_PATH_SIZE_BYTES_MAX, is_loopback
from immortal.coordinator.core import events as ev
from immortal.coordinator.instances.registry import HOME_VARIABLE, Registry
from immortal.coordinator.notices import Notices
from immortal.coordinator.notices.sinks import RateLimitedSink
from immortal.coordinator.operator.unregister import unregister
from immortal.errors import ConnectError
from immortal.protocol.app_handshake import encode_challenge
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.safe_output import BURST, INTERVAL_NS
from tests.helpers.app_port import (
    NONCE,
    OTHER_SECRET,
    REFUSED,
    Endpoint,
    all_that_came,
    hello,
    only_refusal,
    secret_of,
    stranger,
)
from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.notices import Told
from tests.helpers.processes import DEADLINE_S, CoordinatorProcess, House, SocketApp


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def guarded(house: House) -> CoordinatorProcess:
    """An instance whose app must prove that it knows the secret; at a port as well, where strangers come in."""
    house.register("alice", app_auth="challenge", app_port=0)
    return house.start("alice")


def own_app(house: House, **options: Any) -> SocketApp:
    secret = secret_of(house.settings("alice"))
    return house.app("alice", extended=True, secret=secret, **options).ready()


# --- the secret ------------------------------------------------------------------------------------------------------


def test_the_secret_is_for_its_owner_alone_and_opens_the_door(house: House) -> None:
    process = guarded(house)
    path = app_secret.path(process.settings.folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(secret_of(process.settings)) == 64
    app = own_app(house)
    app.impulse(1)
    app.until(lambda: app.accepted == 1)
    assert process.count(REFUSED) == 0
    process.terminate()
    app.until_closed()
    assert app.goodbye
    assert process.ended()[0] == 0
    assert not path.exists(), "a secret that opens nothing is left"


def test_each_start_has_a_new_secret_in_a_new_file(house: House, tmp_path: Path) -> None:
    process = guarded(house)
    first = secret_of(process.settings)
    process.kill()
    path = app_secret.path(process.settings.folder)
    assert path.exists(), "kill -9 leaves the file"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("untouched")
    path.unlink()
    path.symlink_to(elsewhere)
    process = house.start("alice")
    assert not path.is_symlink()
    assert elsewhere.read_text() == "untouched"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_of(process.settings) != first
    with stranger(process.settings, hello(first)) as old:
        assert "must not send it" in only_refusal(all_that_came(old))
    with stranger(process.settings) as old, pytest.raises(ConnectError, match="does not know the secret"):
        authenticate(old, first, "alice's address")
    own_app(house)


def test_a_second_coordinator_leaves_the_secret_of_the_first(house: House) -> None:
    process = guarded(house)
    before = secret_of(process.settings)
    assert "is in use by process" in house.start("alice", started=False).failed()
    assert secret_of(process.settings) == before
    own_app(house)


def test_without_the_secret_nothing_is_told(house: House) -> None:
    process = guarded(house)
    own = secret_of(process.settings)
    nothing = "must prove that it knows its secret, and did not; start the app with 'immortal run', or let "
    plain = (
        """must not send it: use an SDK that answers a challenge (docs/WIRE.md, part 5), or say app_auth = "secret\""""
    )
    sent = "it sent a secret itself, instead of a proof that it knows it"
    cases = [
        (b"", nothing, "it proved nothing"),
        (OTHER_SECRET, plain, sent),
        (own, plain, sent),
        (b"\0", plain, sent),
    ]
    for count, (secret, reason, line) in enumerate(cases, 1):
        with stranger(process.settings, hello(secret)) as one:
            assert reason in only_refusal(all_that_came(one))
        assert process.line(REFUSED, count).endswith(f"  {REFUSED}: {line}")
    assert process.status()["epoch"] == 0, "a stranger was taken for the app"
    own_app(house)
    assert process.status()["epoch"] == 1


def test_an_app_that_sends_its_secret_where_the_settings_permit_it(house: House) -> None:
    """In other languages than the SDK's, which proves that it knows it here as well."""
    house.register("alice", app_auth="secret", app_port=0)
    process = house.start("alice")
    with stranger(process.settings, hello(OTHER_SECRET)) as one:
        assert "is not the one that came: a coordinator makes a new one" in only_refusal(all_that_came(one))
    process.line(f"{REFUSED}: it showed another secret")
    app = house.app("alice", extended=False)
    app.extended = True
    app.send(hello(secret_of(process.settings)))
    app.ready().close()
    process.line("the app disconnected")
    own_app(house)


def test_who_says_much_behind_a_wrong_hello_can_still_read_why(house: House) -> None:
    process = guarded(house)
    with stranger(process.settings) as one:
        one.sendall(hello(OTHER_SECRET) + bytes(300_000))
        one.shutdown(socket.SHUT_WR)
        assert only_refusal(all_that_came(one))


def test_an_app_that_does_not_know_refusals_is_only_closed(house: House) -> None:
    process = guarded(house)
    with stranger(process.settings, hello(b"", frozenset())) as one:
        assert all_that_came(one) == b""
    process.line(f"{REFUSED}: it proved nothing")


def test_a_client_of_the_base_protocol_is_told_of_in_the_log(house: House) -> None:
    process = guarded(house)
    with stranger(process.settings, encode_message(MessageType.TAKE_CHECKPOINT)) as one:
        assert all_that_came(one) == b""
    assert """needs app_auth = "none" in the settings of 'alice'""" in process.line(REFUSED)


def test_strangers_do_not_disturb_the_app(house: House) -> None:
    process = guarded(house)
    app = own_app(house)
    right = encode_challenge(NONCE)
    for number, said in enumerate((b"", hello(OTHER_SECRET), right), 1):
        with stranger(process.settings, said) as one:
            assert all_that_came(one) == b""
        process.line("a second app was turned away", number)
        app.impulse(number)
        app.until(lambda number=number: app.accepted == number)  # type: ignore[misc]
    assert process.status()["epoch"] == 1
    assert process.count("the app disconnected") == 0


def test_the_silent_do_not_keep_the_app_out(house: House) -> None:
    process = guarded(house)
    silent = [stranger(process.settings, said) for said in (b"", b"\x40", hello(OTHER_SECRET)[:-1])]
    app = own_app(house)
    for one in silent:
        assert all_that_came(one) == b"", "they are closed once the app is there"
        one.close()
    app.impulse(1)
    app.until(lambda: app.accepted == 1)


class DrippingSocket(socket.socket):
    """Sends each byte by itself."""

    def sendall(self, data: Any, flags: int = 0) -> None:
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(data)):
            super().sendall(data[at : at + 1])


class DrippingApp(SocketApp):
    def connected(self, settings: InstanceSettings) -> socket.socket:
        return DrippingSocket(fileno=super().connected(settings).detach())


def test_a_handshake_byte_by_byte(house: House) -> None:
    process = guarded(house)
    app = own_app(house, kind=DrippingApp)
    app.impulse(1)
    app.until(lambda: app.accepted == 1)
    assert process.count(REFUSED) == 0


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
def test_over_ipv6(house: House) -> None:
    process = guarded(house)
    with stranger(process.settings, hello(OTHER_SECRET), "::1") as one:
        assert only_refusal(all_that_came(one))
    settings = structs.replace(process.settings, app_host="::1")
    app = SocketApp(settings, house._apps, extended=True, secret=secret_of(settings)).ready()
    app.impulse(1)
    app.until(lambda: app.accepted == 1)


# --- many of them ----------------------------------------------------------------------------------------------------


def open_files(process: CoordinatorProcess) -> int:
    return len(os.listdir(f"/proc/{process.process.pid}/fd"))


def test_a_flood_while_the_app_works(house: House) -> None:
    process = guarded(house)
    app = own_app(house)
    before = open_files(process)
    for number in range(1, 201):
        one = stranger(process.settings, hello(OTHER_SECRET) if number % 2 else b"")
        app.impulse(number)
        if number % 2:
            assert all_that_came(one) == b""
        one.close()
    app.until(lambda: app.accepted == 200)
    assert app.state["forwarded"] == list(range(1, 201))
    assert process.status()["epoch"] == 1
    process.line("a second app was turned away", BURST)
    assert process.count("a second app was turned away") <= 4 * BURST, "a line for each fills the disk"
    assert open_files(process) <= before + 8


def test_a_flood_of_the_silent_before_the_app(house: House) -> None:
    process = guarded(house)
    before = open_files(process)
    silent = [stranger(process.settings) for _ in range(200)]
    process.line(f"{UNAUTHENTICATED_MAX} wait there", BURST)
    assert open_files(process) <= before + UNAUTHENTICATED_MAX + 8
    app = own_app(house)
    app.impulse(1)
    app.until(lambda: app.accepted == 1)
    for one in silent:
        assert all_that_came(one) == b""
        one.close()
    assert process.count("wait there") <= 4 * BURST


# --- the gate and its clock ------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    made = Endpoint(tmp_path / "home")
    yield made
    made.close()


@pytest.mark.parametrize("said", [b"", hello(b"1" * 64)[:-1]])
def test_silence_has_an_end(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(app_gate, "HELLO_TIMEOUT_S", 0.2)
    begun_s = time.monotonic()
    with stranger(endpoint.settings, said) as one:
        while not endpoint.log.lines:
            assert endpoint.turn() == []
        assert time.monotonic() - begun_s >= 0.2
        assert endpoint.log.lines == [("warning", f"{REFUSED}: it came to no Hello within 0.2 s", {})]
        assert all_that_came(one) == b""
        assert endpoint.endpoint.next_deadline_ns() is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "it ended before it had said Hello"),
        (hello(b"1" * 64)[:-1], "it ended before it had said Hello"),
        (
            encode_message(MessageType.INITIAL_MESSAGE, b"begin"),
            "something else than a Challenge or a Hello",
        ),
        (b"\x04\x08\x12", "something else than a Challenge or a Hello"),
        (b"GET / HTTP/1.1\r\n\r\n", "a message gives its size as -36"),
        (b"\xfe\xff\xff\xff\x0f", "2147483647 bytes, at most"),
        (b"\xff\xff\xff\xff\xff\xff", "is longer than 5 bytes"),
        (b"\0", "gives its size as 0"),
        (encode_message(MessageType.HELLO, b"\x09"), "a Hello of version 9"),
        (encode_message(MessageType.HELLO, bytes(5000)), "a message of 5001 bytes, at most 4096"),
    ],
)
def test_who_says_something_else_is_closed(endpoint: Endpoint, said: bytes, why: str) -> None:
    with stranger(endpoint.settings, said) as one:
        one.shutdown(socket.SHUT_WR)
        while not endpoint.log.lines:
            assert endpoint.turn() == []
        assert all_that_came(one) == b""
    ((_, line, values),) = endpoint.log.lines
    assert endpoint.log.notices[0].kind() is not None, "a stranger can write as many lines as it likes"
    assert (line.startswith(REFUSED), values) == (True, {})
    assert why in line


def test_who_was_refused_and_stays_is_closed(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_gate, "REFUSAL_TIMEOUT_S", 0.1)
    with stranger(endpoint.settings, hello(OTHER_SECRET)) as one:
        assert endpoint.turn() == []
        while endpoint.endpoint.next_deadline_ns() is not None:
            assert endpoint.turn() == []
        assert only_refusal(all_that_came(one))


def test_what_comes_with_the_hello_is_the_apps(endpoint: Endpoint) -> None:
    said = hello(b"") + encode_message(MessageType.TAKE_CHECKPOINT)
    with stranger(endpoint.settings) as one:
        one.sendall(endpoint.proof_for(one) + said)
        assert endpoint.turn() == [ev.AppConnected(), ev.AppData(said)]
        one.sendall(b"more")
        assert endpoint.turn() == [ev.AppData(b"more")]
        one.close()
        assert endpoint.turn() == [ev.AppClosed()]


def test_an_app_at_the_unix_socket_is_not_driven_out_by_strangers(tmp_path: Path) -> None:
    path = tmp_path / "app.sock"
    if len(os.fsencode(path)) > UNIX_PATH_SIZE_BYTES_MAX:
        pytest.skip("the folder of the tests is too deep for a Unix socket")
    made = Endpoint(tmp_path / "home", app_socket=f"unix:{path}")
    strangers = []
    try:
        with socket.socket(socket.AF_UNIX) as app:
            app.connect(str(path))
            assert made.turn() == []
            for _ in range(2 * UNAUTHENTICATED_MAX):
                strangers.append(stranger(made.settings))
                assert made.turn() == []
            said = hello(b"")
            app.sendall(made.proof_for(app) + said)
            assert made.turn() == [ev.AppConnected(), ev.AppData(said)]
            for one in strangers:
                assert all_that_came(one) == b""
    finally:
        for one in strangers:
            one.close()
        made.close()


def test_a_socket_that_others_reach_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.coordinator.app.endpoint.is_loopback", lambda host: False)  # tests stay on loopback
    made = Endpoint(tmp_path / "home", app_host="127.0.0.1")
    made.close()
    ((_, line, _),) = made.log.lines
    assert "the app's socket at 127.0.0.1 is open to others than this machine, though only the app gets in" in line


def test_few_lines_for_many_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    told = Told()
    limited = RateLimitedSink(told)
    log = Notices("counter", limited)
    for _ in range(BURST):
        log.warning("it happened", kind="it")
    assert limited.next_deadline_ns() is None
    for _ in range(100):
        log.warning("it happened again", kind="it")
    limited.process()
    assert told.lines == [("warning", "it happened", {})] * BURST
    due_ns = limited.next_deadline_ns()
    assert due_ns == 10**9 + INTERVAL_NS
    now_ns = due_ns
    limited.process()
    assert told.lines[BURST:] == [("warning", "it happened again", {"left_out": 99})]
    assert limited.next_deadline_ns() is None
    now_ns += INTERVAL_NS
    log.warning("and once more", kind="it")
    assert told.lines[-1] == ("warning", "and once more", {})


# --- the SDK ---------------------------------------------------------------------------------------------------------

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lives.py").write_text(APP)
    return tmp_path


def start_app(folder: Path, settings: InstanceSettings, *options: str, **variables: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != app_secret.SECRET_FILE_VARIABLE}
    environment |= {"IMMORTAL_APP_ADDRESS": settings.app_address, **variables}
    command = [sys.executable, "-m", "immortal.appsdk", "lives:Counter", *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("how", ["variable", "option"])
def test_an_app_that_is_started_by_hand(house: House, folder: Path, how: str) -> None:
    process = guarded(house)
    path = str(app_secret.path(process.settings.folder))
    if how == "variable":
        app = start_app(folder, process.settings, IMMORTAL_APP_SECRET_FILE=path)
    else:  # the option counts for more than the variable
        app = start_app(folder, process.settings, "--secret-file", path, IMMORTAL_APP_SECRET_FILE="/nowhere")
    try:
        assert app.stdout is not None
        assert app.stdout.readline() == "lives: 1\n"
        process.terminate()
        assert app.communicate(timeout=DEADLINE_S)[1] == ""
        assert app.returncode == 0
    finally:
        app.kill()
        app.wait()


def test_an_app_without_the_secret_says_so_in_one_line(house: House, folder: Path) -> None:
    process = guarded(house)
    wrong = folder / "wrong"
    wrong.write_bytes(OTHER_SECRET)
    (folder / "empty").write_text("\n")
    cases: list[tuple[list[str], str]] = [
        ([], "refuses: the app of 'alice' must prove that it knows its secret, and did not"),
        (
            ["--secret-file", str(wrong)],
            "does not know the secret that this app was given",
        ),
        (["--secret-file", str(folder / "absent")], "absent: No such file or directory"),
        (["--secret-file", str(folder / "empty")], "has 0 bytes, 1 to 1024 were expected"),
    ]
    for options, words in cases:
        app = start_app(folder, process.settings, *options)
        _, said = app.communicate(timeout=DEADLINE_S)
        assert app.returncode == 1, said
        assert words in said
        assert said.count("\n") == 1


def test_reading_a_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"abc\n")
    assert read_secret(str(tmp_path / "secret")) == b"abc"
    with pytest.raises(ConnectError, match="Is a directory"):
        read_secret(str(tmp_path))


@pytest.mark.parametrize("auth", ["challenge", "secret", "none"])
def test_a_restarted_coordinator_and_its_restarted_app(folder: Path, auth: str) -> None:
    """Also where the settings ask for less: the apps of `immortal run` know the secret, and prove it."""
    immortal(folder, "register", "counter", "--peer", "tcp://127.0.0.1:*", "--app-auth", auth)
    instance = folder / HOME / "counter"
    run = Run(folder, "counter", "lives:Counter", "--restart")
    try:
        secrets = []
        for life in (1, 2, 3):
            run.line(f"lives: {life}")
            secrets.append(app_secret.path(instance).read_bytes())
            pids = dict(field.split("=") for field in run.line("  coordinator_pid=", life).split() if "=" in field)
            if life < 3:
                os.kill(int(pids["coordinator_pid"]), signal.SIGKILL)
        assert len(set(secrets)) == 3
        assert run.count(REFUSED) == 0
        assert run.stop() == 0
        assert not app_secret.path(instance).exists()
    finally:
        run.kill()


# --- settings and the command line -----------------------------------------------------------------------------------


def test_nobody_else_is_let_in_by_default(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    assert registry.register("a", "tcp://127.0.0.1:*").app_auth is AppAuth.CHALLENGE
    assert "app_auth" not in registry.path("a").read_text()
    two_ports = registry.register("b", "tcp://127.0.0.1:*", app_send_port=0)
    assert two_ports.app_auth is AppAuth.NONE, "a client with two ports has no Hello"
    assert registry.register("c", "tcp://127.0.0.1:*", app_auth="none").app_auth is AppAuth.NONE
    assert 'app_auth = "none"' in registry.path("c").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"app_auth": "never"}, 'got "never", expected "challenge", "secret" or "none"'),
        ({"app_auth": "secret", "app_send_port": 0}, """got "secret", expected "none" beside an 'app_send_port'"""),
        ({"app_auth": "challenge", "app_send_port": 0}, """got "challenge", expected "none" beside an"""),
        ({"app_socket": "unix:/a", "app_send_port": 0}, "it goes without an 'app_send_port'"),
        ({"app_auth": "none", "app_host": "0.0.0.0"}, "whoever reaches 0.0.0.0 could be the app of this instance"),
        ({"app_auth": "none", "app_host": "::"}, "take a loopback address"),
        ({"app_auth": "none", "app_host": "localhost.example"}, "if it is meant, say app_insecure = true"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    options = {"app_port": 7002, **options}
    with pytest.raises(ConfigError, match="field 'app_") as caught:
        Registry(tmp_path).register("a", "tcp://127.0.0.1:*", **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        ("localhost", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
    ],
)
def test_what_only_this_machine_reaches(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "localhost"])
def test_on_loopback_nothing_need_be_shown(tmp_path: Path, host: str) -> None:
    settings = Registry(tmp_path).register("a", "tcp://127.0.0.1:*", app_port=7002, app_host=host, app_auth="none")
    assert settings.app_auth is AppAuth.NONE


def test_what_is_meant_is_permitted(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.register("a", "tcp://127.0.0.1:*", app_host="0.0.0.0")
    path = registry.path("a")
    path.write_text(path.read_text() + 'app_auth = "none"\napp_insecure = true\n')
    assert Registry(tmp_path).load("a").app_insecure


def test_a_coordinator_that_is_told_to_ask_for_nothing(house: House) -> None:
    house.register("alice", app_auth="challenge", app_port=0)
    settings = house.settings("alice")
    app_secret.create(settings.folder)  # of an earlier life
    assert override(settings, app_auth=AppAuth.NONE).app_auth is AppAuth.NONE
    environment = {**os.environ, HOME_VARIABLE: str(house.home)}
    command = [sys.executable, "-m", "immortal", "coordinator", "alice", "--app-auth", "none"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "coordinator started" in process.stderr.readline()
        house.app("alice").ready()
        assert not app_secret.path(settings.folder).exists()
    finally:
        process.kill()
        process.communicate()


def test_two_ports_can_have_no_secret_at_the_command_line(house: House) -> None:
    house.register("alice", app_send_port=0)
    result = CliRunner().invoke(main, ["--home", str(house.home), "coordinator", "alice", "--app-auth", "secret"])
    assert result.exit_code == 1
    assert """expected "none" beside an 'app_send_port'""" in result.output


def test_unregister_takes_the_secret_away(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    settings = registry.register("a", "tcp://127.0.0.1:*")
    app_secret.create(settings.folder)
    unregister(registry, "a")
    assert not settings.folder.exists()


def test_a_folder_that_takes_no_secret(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(app_secret.AppSecretError, match="can't be written to"):
        app_secret.create(tmp_path / "file")


def test_the_log_does_not_tell_the_secret(house: House) -> None:
    process = guarded(house)
    secret = secret_of(process.settings).decode()
    own_app(house)
    with stranger(process.settings, hello(OTHER_SECRET)) as one:
        all_that_came(one)
    assert secret not in "\n".join(process.lines)
