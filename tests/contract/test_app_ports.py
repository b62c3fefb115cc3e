"""How an app and its coordinator find each other: one port or two, who connects to whom, IPv4 and IPv6."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from immortal.cli import main
from immortal.coordinator.app import sockets as app_dialer
from immortal.coordinator.app import sockets as app_listener
from immortal.coordinator.app.sockets import RETRY_PAUSE_S_MAX, AppDialer
from immortal.coordinator.config import AppSendMode, InstanceSettings
from immortal.coordinator.config.socket_addresses import hosts_of
from immortal.coordinator.notices import Notices
from immortal.protocol.messages import RpcType, encode_outgoing_rpc
from tests.helpers.processes import DEADLINE_S, TOLD, CoordinatorProcess, House, SocketApp

CONNECT, LISTEN = AppSendMode.CONNECT, AppSendMode.LISTEN
MODES = pytest.mark.parametrize("mode", [CONNECT, LISTEN])
NOT_LISTENING = "the app is not listening yet"
TURNED_AWAY = "a second app was turned away"


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def epoll() -> Iterator[select.epoll]:
    made = select.epoll()
    yield made
    made.close()


class TwoPortApp(SocketApp):
    """Sends on one connection and is sent to on another.

    ``send_port_first``: it is at its second port before it connects to the first; otherwise the coordinator has to wait
    for it. ``drip``: it sends each byte by itself.
    """

    outgoing: socket.socket | None = None

    def __init__(
        self,
        process: CoordinatorProcess,
        house: House,
        *,
        send_port_first: bool = False,
        host: str = "127.0.0.1",
        listening_host: str = "",
        drip: bool = False,
        **options: Any,
    ) -> None:
        self.drip = drip
        self.settings = structs.replace(process.settings, app_host=host)
        self.listening: socket.socket | None = None
        self.listening_host = listening_host or host
        incoming = None
        if send_port_first:
            incoming = self.at_second_port()
        unlistened = process.count(NOT_LISTENING)
        super().__init__(self.settings, house._apps, **options)
        self.outgoing = self.socket
        self.outgoing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not send_port_first:
            if self.settings.app_send_mode is LISTEN:
                process.line(NOT_LISTENING, unlistened + 1)
            incoming = self.at_second_port()
        if self.listening is not None:
            incoming, _ = self.listening.accept()
        assert incoming is not None
        incoming.settimeout(DEADLINE_S)
        self.socket = incoming

    def at_second_port(self) -> socket.socket | None:
        port = self.settings.app_send_port
        assert port is not None
        if self.settings.app_send_mode is CONNECT:
            return socket.create_connection((self.settings.app_host, port), timeout=DEADLINE_S)
        self.listening = listen_at(self.listening_host, port)
        return None

    def send(self, data: bytes) -> None:
        out = self.outgoing or self.socket
        for piece in [data[at : at + 1] for at in range(len(data))] if self.drip else [data]:
            out.sendall(piece)

    def close(self) -> None:
        super().close()
        for one in (self.outgoing, self.listening):
            if one is not None:
                one.close()


def listen_at(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    listening.listen()
    listening.settimeout(DEADLINE_S)
    return listening


def started(house: House, mode: AppSendMode, *names: str) -> list[CoordinatorProcess]:
    house.register(*names, app_send_port=0, app_send_mode=mode.value)
    return [house.start(name) for name in names]


def is_closed(connection: socket.socket) -> bool:
    """The coordinator has closed it: what it sent before is skipped. Waits for that."""
    connection.settimeout(DEADLINE_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


# --- two ports -------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("send_port_first", [False, True], ids=["receive port first", "send port first"])
def test_two_ports_in_either_order(house: House, mode: AppSendMode, send_port_first: bool) -> None:
    alice_process, bob_process = started(house, mode, "alice", "bob")
    alice = TwoPortApp(alice_process, house, peer="bob", send_port_first=send_port_first).ready()
    bob = TwoPortApp(bob_process, house, send_port_first=send_port_first, fixed_width=True).ready()
    numbers = list(range(1, 51))
    for number in numbers:
        alice.impulse(number)
    bob.until(lambda: len(bob.state["told"]) == len(numbers))
    assert (alice.state["forwarded"], bob.state["told"]) == (numbers, numbers)
    late = mode is LISTEN and not send_port_first
    assert [one.count(NOT_LISTENING) for one in (alice_process, bob_process)] == [late, late]
    alice_process.terminate()
    alice.until_closed()
    assert alice_process.ended()[0] == 0
    again = house.start("alice")
    assert TwoPortApp(again, house, peer="bob").ready().restored_from == alice.state


@MODES
def test_an_app_that_sends_and_reads_single_bytes(house: House, mode: AppSendMode) -> None:
    (process,) = started(house, mode, "alice")
    app = TwoPortApp(process, house, drip=True, extended=True).ready()
    for number in range(1, 21):
        app.impulse(number, TOLD)
    app.until(lambda: app.accepted == 20)
    assert app.state["told"] == list(range(1, 21))


@MODES
@pytest.mark.parametrize("which", ["outgoing", "socket"])
def test_a_lost_connection_takes_the_other_one_with_it(house: House, mode: AppSendMode, which: str) -> None:
    (process,) = started(house, mode, "alice")
    for life in range(1, 4):
        app = TwoPortApp(process, house).ready()
        app.impulse(life)
        app.until(lambda: len(app.state["forwarded"]) == life)  # noqa: B023
        assert app.outgoing is not None
        lost, other = (app.outgoing, app.socket) if which == "outgoing" else (app.socket, app.outgoing)
        lost.close()
        assert is_closed(other)
        process.line("the app disconnected; waiting for the next one", life)
        app.close()
    app = TwoPortApp(process, house).ready()
    assert app.state["forwarded"] == [1, 2, 3]


@MODES
def test_a_second_app_is_turned_away(house: House, mode: AppSendMode) -> None:
    (process,) = started(house, mode, "alice")
    app = TwoPortApp(process, house, send_port_first=True).ready()
    settings = process.settings
    ports = [settings.app_port, *([settings.app_send_port] if mode is CONNECT else [])]
    for count, port in enumerate(ports, 1):
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as second:
            assert is_closed(second)
        process.line(TURNED_AWAY, count)
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])
    assert process.count("the app disconnected") == 0


@MODES
def test_half_an_app_holds_its_place_and_leaves_it_when_it_dies(house: House, mode: AppSendMode) -> None:
    (process,) = started(house, mode, "alice")
    port = process.settings.app_port
    with socket.create_connection(("127.0.0.1", port)) as role:
        if mode is LISTEN:
            process.line(NOT_LISTENING)
        with socket.create_connection(("127.0.0.1", port)) as second:
            assert is_closed(second)
        process.line(TURNED_AWAY)
        role.sendall(encode_outgoing_rpc("", TOLD, RpcType.FORK, b"never read"))
    app = TwoPortApp(process, house).ready()
    assert app.state["told"] == []
    assert process.status()["epoch"] == 1, "role an app was has_app for one"


def test_half_an_app_at_the_send_port_leaves_its_place_too(house: House) -> None:
    (process,) = started(house, CONNECT, "alice")
    assert process.settings.app_send_port is not None
    for _ in range(3):
        socket.create_connection(("127.0.0.1", process.settings.app_send_port)).close()
    TwoPortApp(process, house, send_port_first=True).ready()


@MODES
def test_what_a_dead_app_left_is_not_paired_with_a_living_one(
    house: House, epoll: select.epoll, mode: AppSendMode
) -> None:
    # The backlog may hold connections of apps that died at once; both are accepted in the same turn as a living one's.
    house.register("alice", app_send_port=0, app_send_mode=mode.value)
    settings = house.settings("alice")
    assert settings.app_send_port is not None
    receive_address, send_address = (("127.0.0.1", port) for port in (settings.app_port, settings.app_send_port))
    listener = app_listener.AppListener(settings, Notices("alice"), epoll)
    listener.listen()
    living: list[socket.socket] = []
    if mode is LISTEN:
        living.append(listen_at(*send_address))
    socket.create_connection(send_address if mode is CONNECT else receive_address).close()
    living.append(socket.create_connection(receive_address))
    if mode is CONNECT:
        living.append(socket.create_connection(send_address))
    connection = None
    try:
        while connection is None:
            ready = epoll.poll(DEADLINE_S)
            assert ready, "the living one was not has_app"
            connection = listener.process(dict(ready), has_app=False)
        assert not app_listener._is_disconnected(connection._receiver)
        assert not app_listener._is_disconnected(connection._sender)
        if mode is CONNECT:
            connection.send(b"hello")
            connection.flush()
            assert living[-1].recv(5) == b"hello"
    finally:
        for one in living:
            one.close()
        if connection is not None:
            connection.close()
        listener.close()


def test_an_app_that_dies_while_it_is_connected_to_leaves_nothing(house: House, epoll: select.epoll) -> None:
    house.register("alice", app_send_port=0, app_send_mode=LISTEN.value)
    settings = house.settings("alice")
    assert settings.app_send_port is not None
    listener = app_listener.AppListener(settings, Notices("alice"), epoll)
    listener.listen()
    try:
        with listen_at("127.0.0.1", settings.app_send_port):
            with socket.create_connection(("127.0.0.1", settings.app_port)):
                assert listener.process(dict(epoll.poll(DEADLINE_S)), has_app=False) is None
                assert listener._dialer is not None
                attempt = listener._dialer._attempt
                assert attempt is not None
            while attempt.fileno() not in (ready := dict(epoll.poll(DEADLINE_S))):
                assert ready, "the connection was not made"
            assert listener.process({attempt.fileno(): select.EPOLLOUT}, has_app=False) is None
            assert listener._accepted == {}, "the next app would be paired with what the last one left"
            assert listener._dialer is None
    finally:
        listener.close()


@MODES
def test_bytes_on_the_wrong_connection_end_the_session(house: House, mode: AppSendMode) -> None:
    (process,) = started(house, mode, "alice")
    app = TwoPortApp(process, house).ready()
    app.socket.sendall(b"\4")
    process.line("the app sent something on the connection that it is only sent to")
    assert app.outgoing is not None
    assert is_closed(app.outgoing)
    app.close()
    TwoPortApp(process, house).ready()


def test_an_app_that_does_not_read_is_noticed_when_its_send_connection_ends(house: House) -> None:
    (process,) = started(house, CONNECT, "alice")
    app = TwoPortApp(process, house).ready()
    for number in range(120):  # 12 MB: more than the sockets hold
        app.impulse(number, TOLD, 100_000)
    process.until(lambda status: status["impulses"] == 120 and status["unsent_bytes"] > 0)
    app.socket.close()
    process.line("the app disconnected")
    app.close()
    again = TwoPortApp(process, house).ready()
    assert again.state["told"] == list(range(120))


# --- both loopbacks --------------------------------------------------------------------------------------------------


@needs_ipv6
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_loopbacks_serve_the_app(house: House, host: str) -> None:
    house.register("alice")
    process = house.start("alice")
    assert f"app=127.0.0.1:{process.settings.app_port}" in process.line("coordinator started")
    settings = structs.replace(process.settings, app_host=host)
    app = SocketApp(settings, house._apps).ready()
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])
    other = "::1" if host == "127.0.0.1" else "127.0.0.1"
    with socket.create_connection((other, settings.app_port)) as second:
        assert is_closed(second), "one app at a time, whatever its address"


@needs_ipv6
@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_an_address_is_that_one_alone(house: House, host: str, other: str) -> None:
    house.register("alice", app_host=host)
    process = house.start("alice")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, process.settings.app_port)).close()
    house.app("alice").ready()


@needs_ipv6
@MODES
def test_two_ports_over_ipv6(house: House, mode: AppSendMode) -> None:
    (process,) = started(house, mode, "alice")
    assert f"app_send=127.0.0.1:{process.settings.app_send_port} app_send_mode={mode}" in process.lines[0]
    TwoPortApp(process, house, host="::1").ready()


@needs_ipv6
@pytest.mark.parametrize(("host", "listening_host"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_the_app_may_listen_at_the_other_loopback(house: House, host: str, listening_host: str) -> None:
    (process,) = started(house, LISTEN, "alice")
    TwoPortApp(process, house, host=host, listening_host=listening_host, send_port_first=True).ready()


@needs_ipv6
def test_a_port_in_use_at_one_loopback_is_named(house: House) -> None:
    house.register("alice")
    port = house.settings("alice").app_port
    with listen_at("::1", port):
        line = house.start("alice", started=False).failed()
    assert f"can't listen for the app of 'alice' at [::1]:{port}" in line
    house.both("alice")


def test_a_send_port_in_use_is_named(house: House) -> None:
    house.register("alice", app_send_port=0)
    port = house.settings("alice").app_send_port
    assert port is not None
    with listen_at("127.0.0.1", port):
        line = house.start("alice", started=False).failed()
    assert f"can't listen for the app of 'alice' at 127.0.0.1:{port}" in line
    assert "app_send_port in the instance's settings" in line


def test_a_machine_without_ipv6(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.coordinator.config.socket_addresses._has_ipv6_loopback", lambda: False)
    assert hosts_of("localhost") == ("127.0.0.1",)
    house.register("alice")
    epoll = select.epoll()
    listener = app_listener.AppListener(house.settings("alice"), Notices("alice"), epoll)
    try:
        listener.listen()
        assert len(listener._listening) == 1
    finally:
        listener.close()
        epoll.close()


# --- connecting to an app that listens --------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_000_000_000
        monkeypatch.setattr(app_dialer.time, "monotonic_ns", lambda: self.now_ns)


def attempted(dialer: AppDialer, epoll: select.epoll) -> socket.socket | None:
    """Let one attempt come to its end."""
    connected = dialer.process({})
    if connected is None and dialer._attempt is not None:
        ready = dict(epoll.poll(DEADLINE_S))
        assert ready, "the attempt came to no end"
        connected = dialer.process(ready)
    return connected


def test_attempts_are_apart_and_go_on_until_the_app_listens(
    epoll: select.epoll, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        dialer = AppDialer(["127.0.0.1"], port, Notices("alice"), epoll)
        pauses_s = []
        for attempts in range(1, 10):
            assert attempted(dialer, epoll) is None
            assert dialer._attempts == attempts
            pauses_s.append((dialer.next_deadline_ns() - clock.now_ns) / 1e9)
            clock.now_ns = dialer.next_deadline_ns() - 1
            assert attempted(dialer, epoll) is None
            assert dialer._attempts == attempts, "it did not wait"
            clock.now_ns += 1
        assert pauses_s == sorted(pauses_s)
        assert 0 < pauses_s[0] < pauses_s[-1] == RETRY_PAUSE_S_MAX
        reserved.listen()
        connected = attempted(dialer, epoll)
        assert connected is not None
        connected.close()


def test_an_attempt_without_an_answer_ends(epoll: select.epoll, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with socket.socket() as full:  # a full backlog: the kernel drops what asks for a connection
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = socket.create_connection(address)
        dialer = AppDialer(["127.0.0.1"], address[1], Notices("alice"), epoll)
        assert dialer.process({}) is None
        if dialer._attempt is None or epoll.poll(0):
            pytest.skip("this kernel's backlog takes more than it is told")
        clock.now_ns = dialer.next_deadline_ns()
        assert dialer.process({}) is None
        assert (dialer._attempt, dialer._attempts) == (None, 1)
        assert dialer.next_deadline_ns() > clock.now_ns
        waiting.close()
        dialer.close()


def test_a_connection_that_met_itself_is_none() -> None:
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", 0))
        alone.connect(alone.getsockname())
        assert app_dialer._is_self_connection(alone)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pass
    assert app_dialer._is_self_connection(ours), "one that is gone already is none either"


# --- the command line ------------------------------------------------------------------------------------------------


def test_register_with_two_ports(house: House) -> None:
    runner = CliRunner()
    base = ["--home", str(house.home), "register"]
    peer = ["--peer", "tcp://127.0.0.1:7001", "--app-port", "7002"]
    result = runner.invoke(main, [*base, "alice", *peer, "--app-send-port", "7003"])
    assert result.exit_code == 0, result.output
    assert "app at 127.0.0.1:7002 (also connects at 127.0.0.1:7003)" in result.output
    assert "start it with: immortal coordinator alice" in result.output
    alice = house.settings("alice")
    assert (alice.app_port, alice.app_send_port, alice.app_send_mode) == (7002, 7003, CONNECT)
    star = [*base, "bob", "--peer", "tcp://127.0.0.1:*", "--app-send-port", "*", "--app-send-mode", "listen"]
    result = runner.invoke(main, star)
    assert result.exit_code == 0, result.output
    bob = house.settings("bob")
    assert f"(listens at 127.0.0.1:{bob.app_send_port})" in result.output
    assert bob.app_send_mode is LISTEN
    assert bob.app_send_port not in (None, 7003, bob.app_port)
    result = runner.invoke(main, [*base, "carol", *peer, "--app-send-mode", "listen"])
    assert result.exit_code == 2
    assert "--app-send-mode needs --app-send-port" in result.output
    result = runner.invoke(main, [*base, "carol", *peer, "--app-send-port", "70000"])
    assert result.exit_code == 2
    assert house.registry.names() == ["alice", "bob"]


def test_run_is_for_apps_with_one_connection(house: House) -> None:
    house.register("alice", app_send_port=0)
    result = CliRunner().invoke(main, ["--home", str(house.home), "run", "alice", "wordcount:Counter"])
    assert result.exit_code == 1
    assert "run 'immortal coordinator alice' and start the app yourself" in result.output


def test_run_gives_the_app_an_address_that_each_machine_has(house: House) -> None:
    from immortal.coordinator.service.children import APP_ADDRESS_VARIABLE, app_command

    def address(settings: InstanceSettings) -> str:
        return app_command(settings, "wordcount:Counter").environment[APP_ADDRESS_VARIABLE]

    house.register("alice", app_port=7002)
    settings = house.settings("alice")
    assert settings.app_host == "localhost"
    assert address(settings) == "127.0.0.1:7002"
    assert address(structs.replace(settings, app_host="::1")) == "[::1]:7002"
