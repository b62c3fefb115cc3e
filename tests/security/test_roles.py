"""Keys have roles: a client's key is no peer, an instance's no client, and a client's ID is nobody else's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from immortal.cli import main as command
from immortal.client import NotConnectable, connect
from immortal.coordinator.config import ConfigError
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.messenger.security import connect_with
from immortal.coordinator.peers import keys
from immortal.coordinator.peers.keys import KeysError
from immortal.coordinator.peers.security import PeerSecurity
from immortal.log import create_log, open_log
from immortal.messenger import ClientRoute, KeyPair, Messenger, Received, Role, Security
from immortal.protocol.client_frames import ClientCode, ClientFrame, ClientFrameType, encode_client_frame
from immortal.protocol.messages import RpcKind, encode_outgoing_rpc
from immortal.protocol.peer_frames import FrameType, PeerFrame, encode_frame
from tests.helpers.clients import call, request, said
from tests.helpers.core import Driven, attach
from tests.helpers.processes import DEADLINE_S, House

HELLO = encode_client_frame(ClientFrame(ClientFrameType.HELLO, "c", "bob"))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.001)


class Server:
    """A messenger that lets in one key for each role; and who has these keys."""

    def __init__(self) -> None:
        self.own = KeyPair.new()
        self.pairs = {role: KeyPair.new() for role in Role}
        self.messages: list[str | None] = []
        self.frames: list[str | None] = []
        callers = {pair.public: role.value for role, pair in self.pairs.items()}
        roles = {pair.public: role for role, pair in self.pairs.items()}
        self.messenger = Messenger(security=Security(self.own, callers, lambda endpoint: (), roles))
        self.messenger.start()
        self.endpoint = self.messenger.listen("tcp://127.0.0.1:*", self._message, client_loop=self._frame)
        self._senders: list[Messenger] = []
        self._context = zmq.Context()

    def _message(self, received: Received) -> None:
        self.messages.append(received.peer)
        received.reply(b"taken")

    def _frame(self, route: ClientRoute, data: bytes) -> None:
        self.frames.append(route.peer)

    @property
    def refused(self) -> int:
        return self.messenger.counters().roles_refused

    def send_as_peer(self, role: Role) -> None:
        security = Security(self.pairs[role], {}, lambda endpoint: (self.own.public,))
        sender = Messenger(security=security)
        sender.start()
        self._senders.append(sender)
        sender.send_message(self.endpoint, b"as a peer")

    def send_as_client(self, role: Role) -> None:
        with self._context.socket(zmq.DEALER) as socket:
            connect_with(socket, self.pairs[role], self.own.public)
            socket.setsockopt(zmq.LINGER, int(DEADLINE_S * 1000))
            socket.connect(self.endpoint)
            socket.send(HELLO)

    def close(self) -> None:
        for messenger in (*self._senders, self.messenger):
            messenger.close()
        self._context.term()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.CLIENT, Role.OWNER, Role.OPERATOR])
def test_such_a_key_cannot_send_a_peers_messages(server: Server, role: Role, caplog: pytest.LogCaptureFixture) -> None:
    server.send_as_peer(role)
    until(lambda: server.refused >= 2)  # it goes on trying
    server.send_as_peer(Role.INSTANCE)
    until(lambda: server.messages)
    assert server.messages == ["instance"]
    told = [record.getMessage() for record in caplog.records if "whose role is" in record.getMessage()]
    assert len(told) == 1, "one line for all of them"
    assert f"a peer's message came with the key of '{role}', whose role is {role}" in told[0]


@pytest.mark.parametrize("role", [Role.INSTANCE, Role.OPERATOR])
def test_such_a_key_cannot_send_a_clients_frames(server: Server, role: Role) -> None:
    server.send_as_client(role)
    until(lambda: server.refused == 1)
    server.send_as_client(Role.CLIENT)
    server.send_as_client(Role.OWNER)
    until(lambda: len(server.frames) == 2)
    assert sorted(map(str, server.frames)) == ["client", "owner"]


def test_a_clients_key_cannot_greet_as_an_instance(house: House) -> None:
    """Whatever name it gives, be it its own: the process at the other end learns nothing, and answers nothing."""
    house.register("bob")
    keys.create(house.settings("bob").folder)
    (web,) = keys.create(house.home / "web", Role.CLIENT)
    process, _ = house.both("bob")
    settings = house.settings("bob")
    messenger = Messenger(security=Security(web, {}, lambda endpoint: keys.read_public_keys(settings.folder)))
    messenger.start()
    answers: list[list[bytes]] = []
    for name in ("web", "alice"):
        frame = PeerFrame(FrameType.HELLO, name, "bob", 7, 1, 0)
        messenger.send_message(settings.peer, encode_frame(frame), answers.append)
    try:
        status = process.until(lambda status: status["security"]["roles_refused"] >= 2)
    finally:
        messenger.close()
    assert (answers, status["inputs"]) == ([], {})


def test_a_client_is_told_at_once_that_an_instances_key_is_none_for_it(registry: Registry) -> None:
    with (
        pytest.raises(NotConnectable, match="'bob' is an instance, whose keys no client may show"),
        connect("alice", home=registry.home, identity="bob"),
    ):
        pass


# --- what a key is ----------------------------------------------------------------------------------------------------


def roles_at(registry: Registry, name: str, warnings: list[str] | None = None) -> dict[str, Role]:
    """By name, of all who may call it."""
    told = [] if warnings is None else warnings
    security = PeerSecurity(registry.load(name), registry, lambda endpoint: [endpoint], told.append).security
    assert security is not None
    return {caller: security.roles[key] for key, caller in security.callers.items()}


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    registry = Registry(tmp_path / "home")
    for name in ("alice", "bob"):
        registry.register(name, "tcp://127.0.0.1:*")
        keys.create(registry.home / name)
    return registry


def test_roles_are_those_of_the_registry_and_the_settings(registry: Registry) -> None:
    keys.create(registry.home / "web", Role.CLIENT)
    keys.create(registry.home / "old")  # by an earlier version's --make --client, which wrote no role down
    keys.create(registry.home / "ann", Role.OPERATOR)
    elsewhere = registry.home.parent / "elsewhere"
    for name, role in (("far", Role.INSTANCE), ("script", Role.CLIENT)):  # only their public files were copied here
        keys.create(elsewhere / name, role)
        (registry.home / name).mkdir()
        keys.public_path(registry.home / name).write_bytes(keys.public_path(elsewhere / name).read_bytes())
    path = registry.path("alice")
    tables = f"[peer_keys]\npeer = '{'x' * 40}'\n[client_keys]\nreports = '{'y' * 40}'\n"
    path.write_text(f"{path.read_text()}\n{tables}")
    assert roles_at(registry, "alice") == {
        "alice": Role.OWNER,
        "bob": Role.INSTANCE,
        "web": Role.CLIENT,
        "old": Role.CLIENT,
        "ann": Role.OPERATOR,
        "far": Role.INSTANCE,
        "script": Role.CLIENT,
        "peer": Role.INSTANCE,
        "reports": Role.CLIENT,
    }
    settings = registry.remember_app("alice", "module:Class")
    assert settings.client_keys == {"reports": ("y" * 40,)}


def test_a_role_is_kept_when_keys_change(registry: Registry) -> None:
    folder = registry.home / "web"
    keys.create(folder, Role.CLIENT)
    keys.rotate(folder)
    keys.retire(folder)
    assert keys.read_public_file(folder).role is Role.CLIENT
    keys.public_path(folder).write_text("; role: king\n" + "x" * 40)
    with pytest.raises(KeysError, match="gives the role 'king', one of these was expected: instance, client, operator"):
        keys.read_public_file(folder)


def test_a_name_cannot_be_an_instances_and_a_clients(registry: Registry) -> None:
    path = registry.path("alice")
    path.write_text(f"{path.read_text()}\n[peer_keys]\nx = '{'x' * 40}'\n[client_keys]\nx = '{'y' * 40}'\n")
    with pytest.raises(ConfigError, match=r"field 'client_keys.x': it stands under \[peer_keys\] too"):
        registry.load("alice")


def test_the_command_makes_keys_of_a_role(registry: Registry) -> None:
    from click.testing import CliRunner

    def run(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(command, ["--home", str(registry.home), *arguments])
        assert result.exit_code == status, result.output
        return result.output

    run("keys", "web", "--make", "--client")
    run("keys", "ann", "--make", "--operator")
    shown = run("keys", "alice")
    assert "  web (client): " in shown
    assert "  ann (operator): " in shown
    assert "  bob: " in shown
    assert "omit --operator" in run("keys", "bob", "--make", "--operator", status=2)
    assert "--client and --operator can't be combined" in run("keys", "x", "--make", "--operator", "--client", status=2)


# --- a client's ID ----------------------------------------------------------------------------------------------------


def by(caller: str, event: ev.ClientFrameReceived) -> ev.ClientFrameReceived:
    return ev.ClientFrameReceived(event.token, event.frame, caller)


def hello(token: object) -> ev.ClientFrameReceived:
    return ev.ClientFrameReceived(token, ClientFrame(ClientFrameType.HELLO, "c", "a"))


def ping(token: object, acknowledged: int = 0) -> ev.ClientFrameReceived:
    frame = ClientFrame(
        ClientFrameType.PING, "c", "a", acknowledged=acknowledged, count=1, payload=(1).to_bytes(8, "little")
    )
    return ev.ClientFrameReceived(token, frame)


def answered(number: int, value: object) -> bytes:
    return encode_outgoing_rpc("~", 3, 0, msgspec.msgpack.encode(("~c", number, value)), RpcKind.RETURNED_VALUE)


def started() -> Driven:
    driven = Driven.started()
    driven.data(attach("~"))
    return driven


REFUSED = [("theirs", "REFUSED", ClientCode.NOT_YOURS)]


def test_a_client_cannot_ask_for_anothers_replies_or_use_up_its_numbers() -> None:
    driven = started()
    driven.handle(by("web", request("mine", 1, call(7))))
    for attempt in (hello("theirs"), ping("theirs"), ping("theirs", 1), request("theirs", 2, call(8))):
        assert said(driven.handle(by("mallory", attempt))) == REFUSED
    reply = [("mine", "REPLY", {1: (1, msgspec.msgpack.encode("seven"))})]
    assert said(driven.data(answered(1, "seven"))) == reply, "it goes where its owner was last heard"
    assert said(driven.handle(by("mallory", request("theirs", 1, call(7))))) == REFUSED
    assert said(driven.handle(by("web", request("mine", 1, call(7))))) == reply


def test_an_id_stays_its_owners_over_a_restart() -> None:
    driven = started()
    driven.handle(by("web", request("mine", 1, call(7))))
    again = Driven(driven.store)
    assert said(again.handle(by("mallory", ping("theirs")))) == REFUSED
    assert [kind for _, kind, _ in said(again.handle(by("web", ping("mine"))))] == ["PONG"]


def test_an_id_of_before_there_were_keys_becomes_that_of_who_uses_it_first() -> None:
    """A script goes on under the ID that it had; from then on it is nobody else's."""
    driven = started()
    driven.handle(request("mine", 1, call(7)))
    assert [kind for _, kind, _ in said(driven.handle(by("web", request("mine", 1, call(7)))))] == []
    assert said(driven.handle(by("mallory", hello("theirs")))) == REFUSED
    driven.handle(by("web", request("mine", 2, call(8))))
    assert driven.store.clients().positions["c"].owner == "web"


def test_an_owner_is_in_the_log(tmp_path: Path) -> None:
    from immortal.coordinator.core.interfaces import ClientPosition, Transaction

    store = create_log(tmp_path / "log", "a")
    positions = {"c": ClientPosition(3, 1, 9, "web"), "d": ClientPosition(1, 0, 9)}
    store.commit(Transaction(clients=dict(positions)))
    store.close()
    store = open_log(tmp_path / "log", "a")
    assert store.clients().positions == positions
    store.close()


def test_without_keys_a_clients_id_never_makes_it_a_peer() -> None:
    """Nor does a peer's name make it a client: their names are told apart by a character that no instance's has."""
    driven = started()
    driven.handle(request("t", 1, call(7), client_id="b"))
    status = driven.machine.view.status(0)
    assert (status["inputs"], status["clients"]["known"]) == ({}, 1)  # type: ignore[index]
    for sender in ("~b", "~", ""):
        frame = PeerFrame(FrameType.HELLO, sender, "a", 7, 1, 0)
        (reply,) = [
            effect for effect in driven.handle(ev.PeerFrameReceived("t", frame)) if isinstance(effect, ef.ReplyToPeer)
        ]
        assert (reply.frame.frame_type, reply.frame.reason) == (
            FrameType.REFUSED,
            f"no peer can be called {sender!r}",
        )
