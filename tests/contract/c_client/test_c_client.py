"""A client in C that knows only docs/WIRE.md, with real coordinators. It aborts at all that the base protocol lacks."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.config.socket_addresses import hosts_of
from immortal.coordinator.instances import upgrade_mark
from immortal.coordinator.instances.registry import free_port
from immortal.coordinator.operator import control
from immortal.protocol.batch import encode_batch
from immortal.protocol.extensions import encode_impulses_accepted, encode_record_time
from immortal.protocol.messages import MessageType, encode_checkpoint, encode_incoming_rpc, encode_message
from immortal.protocol.record import CHECKPOINT_SEQUENCE_ID, CONTROL_SEQUENCE_ID, encode_record
from tests.helpers.processes import BASE_TYPES, DEADLINE_S, CoordinatorProcess, House

SOURCE = Path(__file__).with_name("client.c")
GCC = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-fsanitize=undefined"]
COUNT = 400
PORTS = {
    "one port": {},
    "two ports, the client connects": {"app_send_port": 0},
    "two ports, the client listens": {"app_send_port": 0, "app_send_mode": "listen"},
}

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc to build the C client with")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("c_client") / "client"
    subprocess.run([*GCC, "-o", str(program), str(SOURCE)], check=True)
    return program


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


class Client:
    """One run of the C client; its lines as they come."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._over = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def line(self, text: str) -> str:
        """The first line that begins with ``text``, once it is there."""

        def found() -> list[str]:
            return [line for line in self.lines if line.startswith(text)]

        with self._changed:
            self._changed.wait_for(lambda: found() or self._over, DEADLINE_S)
            problem = self.process.communicate()[1] if self._over else ""
            assert found(), f"no line {text!r} came: {self.lines[-20:]} {problem}"
            return found()[0]

    def until(self, condition: Callable[[list[str]], bool]) -> None:
        """Wait until ``condition`` holds of its lines."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.lines), DEADLINE_S), self.lines[-20:]

    def ended(self) -> tuple[int, str]:
        """Its status and what it complained of, once it has ended."""
        self._reader.join(DEADLINE_S)
        _, problem = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, problem

    def kill(self) -> None:
        self.process.kill()
        self.ended()


class Clients:
    """The C clients of one test. What it starts, it stops."""

    def __init__(self, program: Path) -> None:
        self.program = program
        self.started: list[Client] = []

    def start(self, settings: InstanceSettings, peer: str, *options: str, host: str = "127.0.0.1") -> Client:
        ports = ["--port", str(settings.app_port)]
        if settings.app_send_port is not None:
            ports += ["--send-port", str(settings.app_send_port)]
            ports += ["--listen"] if settings.app_send_mode == "listen" else []
        return self.run(*ports, "--host", host, "--peer", peer, "--count", str(COUNT), *options)

    def run(self, *arguments: str) -> Client:
        self.started.append(Client([str(self.program), *arguments]))
        return self.started[-1]

    def close(self) -> None:
        for client in self.started:
            if client.process.poll() is None:
                client.kill()


@pytest.fixture
def clients(client: Path) -> Iterator[Clients]:
    made = Clients(client)
    yield made
    made.close()


def check_in_order(client: Client, coordinator: CoordinatorProcess) -> None:
    assert client.process.poll() is None, client.ended()
    assert coordinator.count(" error ") == 0, coordinator.lines


@pytest.mark.parametrize("ports", list(PORTS))
def test_two_clients_count_together_across_kills(house: House, clients: Clients, ports: str) -> None:
    house.register("alice", "bob", **PORTS[ports])
    alice_host, bob_host = hosts_of("localhost")[0], hosts_of("localhost")[-1]
    alice_settings, bob_settings = house.settings("alice"), house.settings("bob")
    alice_coordinator, bob_coordinator = house.start("alice"), house.start("bob")
    bob = clients.start(bob_settings, "alice", host=bob_host)
    bob.line("new")
    alice = clients.start(alice_settings, "bob", "--begin", host=alice_host)
    alice.line("at 100")

    alice.kill()
    alice_coordinator.line("the app disconnected")
    alice = clients.start(alice_settings, "bob", host=alice_host)
    alice.line("restored 0")
    alice.line("primary")
    alice.line("at 200")

    bob_coordinator.kill()
    assert bob.ended() == (0, "")
    bob_coordinator = house.start("bob")
    bob = clients.start(bob_settings, "alice", host=bob_host)
    bob.line("restored 0")
    alice.line("at 300")

    taken = bob_coordinator.count("checkpoint taken")
    assert control.query(bob_settings.folder, "checkpoint") == {"asked": True}
    checkpoint = bob.line("checkpoint ")
    bob_coordinator.line("checkpoint taken", taken + 1)
    bob.kill()
    bob_coordinator.line("the app disconnected")
    assert int(checkpoint.split()[1]) >= 300
    bob = clients.start(bob_settings, "alice", host=bob_host)
    bob.line(checkpoint.replace("checkpoint", "restored"))

    # Each fifth number came with a note: the even ones from bob, the odd ones from alice.
    alice.line(f"done {COUNT} notes {COUNT // 10}")
    bob.line(f"done {COUNT} notes {COUNT // 10}")
    check_in_order(alice, alice_coordinator)
    check_in_order(bob, bob_coordinator)

    alice_coordinator.terminate()
    assert alice.ended() == (0, "")
    assert alice.lines[-1] == f"checkpoint {COUNT}"
    assert alice_coordinator.ended()[0] == 0
    alice_coordinator = house.start("alice")
    alice = clients.start(alice_settings, "bob", host=alice_host)
    alice.line(f"restored {COUNT}")
    alice.line("primary")


def test_two_clients_call_negative_methods_across_kills_on_both_sides(house: House, clients: Clients) -> None:
    """Bindings that post a call use the method -1: the base protocol reserves no method ID."""
    house.register("alice", "bob")
    alice_settings, bob_settings = house.settings("alice"), house.settings("bob")
    alice_coordinator, bob_coordinator = house.start("alice"), house.start("bob")
    bob = clients.start(bob_settings, "alice", "--posts")
    bob.line("new")
    alice = clients.start(alice_settings, "bob", "--begin", "--posts")
    alice.line("at 100")

    alice.kill()
    alice_coordinator.line("the app disconnected")
    alice = clients.start(alice_settings, "bob", "--posts")
    alice.line("restored 0")
    alice.line("at 200")

    bob_coordinator.kill()
    assert bob.ended() == (0, "")
    bob_coordinator = house.start("bob")
    bob = clients.start(bob_settings, "alice", "--posts")
    alice.line(f"done {COUNT} notes {COUNT // 10}")
    bob.line(f"done {COUNT} notes {COUNT // 10}")
    check_in_order(alice, alice_coordinator)
    check_in_order(bob, bob_coordinator)


FOR_LONG = ["--count", str(1 << 40)]


def counted_on(*pair: Client) -> None:
    """Both have said a number that they had not said before."""
    said = [one.lines[-1] for one in pair]
    for one, before in zip(pair, said, strict=True):
        one.until(lambda lines, before=before: lines[-1] != before and lines[-1].startswith("at "))


@pytest.mark.parametrize("ports", list(PORTS))
def test_a_client_is_the_standby_and_the_next_one_finds_the_instances_ports(
    house: House, clients: Clients, ports: str
) -> None:
    house.register("alice", "bob", **PORTS[ports])
    alice_settings, bob_settings = house.settings("alice"), house.settings("bob")
    alice_coordinator, bob_coordinator = house.start("alice"), house.start("bob")
    bob = clients.start(bob_settings, "alice", *FOR_LONG)
    bob.line("new")
    alice = clients.start(alice_settings, "bob", "--begin", *FOR_LONG)
    alice.line("at 50")

    first, second = (free_port(hosts_of("localhost"), {alice_settings.app_port or 0}) for _ in range(2))
    at = structs.replace(alice_settings, app_port=first)
    options = ["--app-port", str(first)]
    if at.app_send_port is not None:
        at = structs.replace(at, app_send_port=second)
        options += ["--app-send-port", str(second)]
    follower = house.start("alice", "--follow", *options)
    standby = clients.start(at, "bob", *FOR_LONG)
    standby.line("restored 0")
    follower.line("recovering")
    alice.line("at 100")
    alice_coordinator.kill()
    assert alice.ended() == (0, "")
    follower.line("taking over")
    standby.line("primary")  # by TakeBecomingPrimaryCheckpoint: it knows no other message that says so
    follower.line("checkpoint taken")
    counted_on(standby, bob)

    standby.kill()
    follower.line("the app disconnected")
    alice = clients.start(alice_settings, "bob", *FOR_LONG)
    alice.line("restored ")
    alice.line("primary")
    counted_on(alice, bob)
    check_in_order(alice, follower)
    check_in_order(bob, bob_coordinator)


def test_two_clients_that_do_not_attach_and_call_themselves_with_the_time(house: House, clients: Clients) -> None:
    house.register("alice", "bob")
    alice_settings, bob_settings = house.settings("alice"), house.settings("bob")
    alice_coordinator, bob_coordinator = house.start("alice"), house.start("bob")
    bob = clients.start(bob_settings, "alice", "--no-attach", "--clock")
    bob.line("new")
    alice = clients.start(alice_settings, "bob", "--begin", "--no-attach", "--clock")
    alice.line("at 100")
    alice.line("tick 30")

    alice.kill()
    alice_coordinator.line("the app disconnected")
    alice = clients.start(alice_settings, "bob", "--no-attach", "--clock")
    alice.line("restored 0")
    alice.line("primary")
    alice.line(f"done {COUNT}")
    bob.line(f"done {COUNT}")
    alice.line(f"tick {COUNT // 2}")
    told = [line for line in alice_coordinator.lines if "does not do again what it did before" in line]
    assert ["the calls to itself" in line for line in told] == [True], told
    check_in_order(alice, alice_coordinator)
    check_in_order(bob, bob_coordinator)


def test_with_the_strict_check_the_time_ends_the_recovery(house: House, clients: Clients) -> None:
    house.register("alice", "bob", replay_check="strict")
    alice_settings, bob_settings = house.settings("alice"), house.settings("bob")
    alice_coordinator, _ = house.start("alice"), house.start("bob")
    clients.start(bob_settings, "alice").line("new")
    alice = clients.start(alice_settings, "bob", "--begin", "--clock")
    alice.line("at 100")
    alice.kill()
    alice_coordinator.line("the app disconnected")
    clients.start(alice_settings, "bob", "--clock")
    status, lines = alice_coordinator.ended()
    assert status == 3, lines


def test_a_client_that_is_upgraded_sends_impulses_at_once(house: House, clients: Clients) -> None:
    house.register("alice", "bob")
    settings = house.settings("alice")
    coordinator = house.start("alice")
    alice = clients.start(settings, "bob")
    alice.line("new")
    coordinator.line("checkpoint taken")
    coordinator.terminate()
    assert coordinator.ended()[0] == 0
    upgrade_mark.write(settings.folder, upgrade_mark.UpgradeMark(2))
    coordinator = house.start("alice")
    alice = clients.start(settings, "bob")
    alice.line("upgraded")
    alice.line("checkpoint 0")
    alice.line("woken 1")
    coordinator.line("upgraded")
    check_in_order(alice, coordinator)


def test_a_batch_of_100_mb_is_taken_and_a_call_that_is_too_large_dropped(house: House, clients: Clients) -> None:
    house.register("alice", "bob")
    settings = house.settings("alice")
    coordinator = house.start("alice")
    alice = clients.start(settings, "bob", "--flood", "100")
    alice.line("flooded 100")
    assert "a call of 68157445 bytes to 'itself', at most 64 MiB" in coordinator.line("the call is dropped")
    assert control.query(settings.folder, "checkpoint") == {"asked": True}
    alice.line("checkpoint ")
    assert alice.process.poll() is None


@pytest.mark.parametrize("ports", list(PORTS))
def test_a_client_replays_at_the_ports_that_it_has_in_service(house: House, clients: Clients, ports: str) -> None:
    house.register("alice", "bob", **PORTS[ports])
    alice_settings = house.settings("alice")
    coordinators = [house.start("alice"), house.start("bob")]
    clients.start(house.settings("bob"), "alice").line("new")
    alice = clients.start(alice_settings, "bob", "--begin")
    alice.line(f"done {COUNT}")
    for coordinator in coordinators:
        coordinator.terminate()
        assert coordinator.ended()[0] == 0

    command = [sys.executable, "-m", "immortal", "--home", str(house.home)]
    command += ["replay", "alice", "--checkpoint", "1", "--app", "-"]
    is_asked = ports == "two ports, the client listens"
    if is_asked:  # a client with a configuration of its own
        command += ["--app-port", f"{alice_settings.app_port}:{alice_settings.app_send_port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as replay:
        assert replay.stderr is not None
        waits = next(line for line in replay.stderr if line.startswith("waiting for an app of alice at "))
        (port,) = re.findall(r"127.0.0.1:(\d+)", waits)[:1]
        options = ["--port", port]
        if "app_send_port" in PORTS[ports]:
            options += ["--send-port", re.findall(r"send port (\d+)", waits)[0]]
        if PORTS[ports].get("app_send_mode") == "listen":
            options.append("--listen")
        if is_asked:
            client = clients.start(alice_settings, "bob")
        else:
            client = clients.run(*options, "--peer", "bob", "--count", str(COUNT))
        client.line(f"done {COUNT}")
        out, said = replay.communicate(timeout=DEADLINE_S)
    assert replay.returncode == 0, (out, said)
    assert client.ended() == (0, "")


# --- that the client does find what it is here to find ---------------------------------------------------------------

COMMITTER_ID = 77
PRIMARY = encode_record(COMMITTER_ID, CONTROL_SEQUENCE_ID, encode_message(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT))
INITIAL = encode_message(MessageType.INITIAL_MESSAGE, encode_incoming_rpc(32, 1, b"\0"))
CALL = encode_incoming_rpc(1, 1, (1).to_bytes(8, "little"))


def logged(sequence_id: int, content: bytes) -> bytes:
    return encode_record(COMMITTER_ID, sequence_id, content)


def controlled(content: bytes) -> bytes:
    return encode_record(COMMITTER_ID, CONTROL_SEQUENCE_ID, content)


FOREIGN = sorted(set(range(16)) - BASE_TYPES - {MessageType.UPGRADE_TAKE_CHECKPOINT}) + [
    int(one) for one in MessageType if one > 15
]


def fed(clients: Clients, data: bytes) -> tuple[int, str]:
    """How a client ends that is sent ``data``, and its coordinator's end behind it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_S)
        client = clients.run("--port", str(listening.getsockname()[1]), "--peer", "bob", "--count", "10")
        connection, _ = listening.accept()
        with connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return client.ended()


def test_what_is_right_passes(clients: Clients) -> None:
    batch = encode_batch(CALL, 1) + CALL
    assert fed(clients, PRIMARY + logged(0, INITIAL) + logged(1, b"") + logged(2, batch)) == (0, "")
    assert clients.started[-1].lines == ["new", "primary"]


@pytest.mark.parametrize("message_type", FOREIGN)
def test_a_foreign_type_aborts_the_client(clients: Clients, message_type: int) -> None:
    message = encode_message(message_type, b"")  # type: ignore[arg-type]  # some are no types at all
    for data in (PRIMARY + logged(0, INITIAL + message), PRIMARY + controlled(message)):
        status, problem = fed(clients, data)
        assert status == -signal.SIGABRT
        assert f"message of type {message_type}" in problem


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (PRIMARY[:-1] + b"\2", "the check bytes of record -1 are wrong"),
        (PRIMARY + logged(0, INITIAL)[:-1] + b"\1", "the check bytes of record 0 are wrong"),
        (PRIMARY + logged(1, INITIAL), "record 1, 0 was next"),
        (PRIMARY + logged(0, INITIAL) + logged(0, INITIAL), "record 0, 1 was next"),
        (logged(0, INITIAL), "record 0, 0 was next"),
        (PRIMARY + encode_record(78, 0, INITIAL), "the committer ID was 77 and is 78"),
        (PRIMARY + logged(0, encode_record_time(1) + INITIAL), "type 65"),
        (PRIMARY + controlled(encode_impulses_accepted(1)), "type 68"),
        (PRIMARY + logged(0, INITIAL) + logged(1, CALL + CALL), "method 1 with 1, 3 was next"),
        (PRIMARY + logged(0, INITIAL) + logged(1, encode_batch(CALL, 2) + CALL), "a batch's count is wrong"),
        (PRIMARY + encode_record(COMMITTER_ID, CHECKPOINT_SEQUENCE_ID, encode_checkpoint(9)), "a second checkpoint"),
        (encode_record(COMMITTER_ID, CHECKPOINT_SEQUENCE_ID, encode_checkpoint(9)), "a checkpoint of 9 bytes"),
    ],
)
def test_what_is_wrong_aborts_the_client(clients: Clients, data: bytes, problem: str) -> None:
    status, said = fed(clients, data)
    assert (status, problem in said) == (-signal.SIGABRT, True), said
