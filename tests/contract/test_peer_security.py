"""Keys between coordinators: who gets in, whose name a key stands for, and keys that change while calls flow."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from immortal.coordinator.messenger import limits as messenger_limits
from immortal.coordinator.messenger.envelope import encode_message
from immortal.coordinator.messenger.security import connect_with
from immortal.coordinator.peers import keys
from immortal.messenger import KeyPair, Messenger, MessengerError, Received, Security
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode, decode_frame, encode_frame
from tests.helpers.processes import DEADLINE_S, CoordinatorProcess, House, SocketApp

# --- the messenger ----------------------------------------------------------------------------------------------------


class Parties:
    """Messengers in their own threads."""

    def __init__(self) -> None:
        self._messengers: list[Messenger] = []

    def messenger(self, security: Security | None) -> Messenger:
        messenger = Messenger(security=security)
        messenger.start()
        self._messengers.append(messenger)
        return messenger

    def server(self, pair: KeyPair, callers: dict[str, str]) -> tuple[Messenger, str, list[tuple[str | None, bytes]]]:
        """(messenger, endpoint, who sent what so far)"""
        arrived: list[tuple[str | None, bytes]] = []

        def loop(received: Received) -> None:
            arrived.append((received.peer, received.parts[0]))
            received.reply(received.parts[0])

        messenger = self.messenger(Security(pair, callers, lambda endpoint: ()))
        return messenger, messenger.listen("tcp://127.0.0.1:*", loop), arrived

    def client(self, pair: KeyPair, *servers: str) -> Messenger:
        return self.messenger(Security(pair, {}, lambda endpoint: servers))

    def close(self) -> None:
        for messenger in self._messengers:
            messenger.close()


@pytest.fixture
def parties() -> Iterator[Parties]:
    parties = Parties()
    yield parties
    parties.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.001)


def numbered(arrived: list[tuple[str | None, bytes]]) -> list[int]:
    return [int(data) for _, data in arrived]


def test_a_key_gives_its_name_to_what_it_sends(parties: Parties) -> None:
    server, alice, bob = KeyPair.new(), KeyPair.new(), KeyPair.new()
    _, endpoint, arrived = parties.server(server, {alice.public: "alice", bob.public: "bob"})
    replies: list[list[bytes]] = []
    for pair in (alice, bob):
        parties.client(pair, server.public).send_message(endpoint, pair.public.encode(), replies.append)
    until(lambda: len(replies) == 2)
    assert sorted(arrived) == sorted([("alice", alice.public.encode()), ("bob", bob.public.encode())])


@pytest.mark.parametrize("kind", ["another key", "no key"])
def test_who_is_not_among_the_callers_gets_nothing_in(
    parties: Parties, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, alice = KeyPair.new(), KeyPair.new()
    messenger, endpoint, arrived = parties.server(server, {alice.public: "alice"})
    stranger = parties.client(KeyPair.new(), server.public) if kind == "another key" else parties.messenger(None)
    stranger.send_message(endpoint, b"let me in")
    until(lambda: messenger.counters().strangers_refused >= 2)  # it goes on trying
    replies: list[list[bytes]] = []
    parties.client(alice, server.public).send_message(endpoint, b"hello", replies.append)
    until(lambda: replies)
    assert arrived == [("alice", b"hello")]
    assert not stranger.connected(endpoint)
    assert messenger.counters().malformed == 0, "a stranger's bytes were parsed"
    expected = "does not let this instance's key in" if kind == "another key" else "takes only callers with keys"

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "strangers" not in record.name]

    until(lambda: any(f"no connection to {endpoint}: it {expected}" in line for line in lines()))
    assert sum("key" in line and "refused" in line for line in lines()) == 1, "one line for all of them"


def test_nothing_is_sent_to_who_has_another_key_than_expected(parties: Parties) -> None:
    expected, other, alice = KeyPair.new(), KeyPair.new(), KeyPair.new()
    impostor, endpoint, arrived = parties.server(other, {alice.public: "alice"})
    client = parties.client(alice, expected.public)
    client.send_message(endpoint, b"secret")
    until(lambda: impostor.counters().strangers_refused >= 2)
    assert not client.connected(endpoint)
    assert (arrived, client.counters().sent) == ([], 0)


def test_a_key_that_may_no_longer_call_is_dropped_on_its_open_connection(parties: Parties) -> None:
    server, alice, bob = KeyPair.new(), KeyPair.new(), KeyPair.new()
    messenger, endpoint, arrived = parties.server(server, {alice.public: "alice", bob.public: "bob"})
    alices, bobs = parties.client(alice, server.public), parties.client(bob, server.public)
    replies: list[list[bytes]] = []
    for client in (alices, bobs):
        client.send_message(endpoint, b"1", replies.append)
    until(lambda: len(replies) == 2)
    messenger.secure(Security(server, {bob.public: "bob"}, lambda endpoint: ()))
    alices.send_message(endpoint, b"2")
    until(lambda: messenger.counters().strangers_dropped == 1)
    bobs.send_message(endpoint, b"3", replies.append)
    until(lambda: len(replies) == 3)
    assert [data for _, data in arrived if data != b"1"] == [b"3"]


def test_one_peer_cannot_speak_in_the_place_of_another(parties: Parties) -> None:
    """It knows the incarnation, the link and the routing ID of the other; the other's messages still arrive once."""
    server, alice, mallory = KeyPair.new(), KeyPair.new(), KeyPair.new()
    messenger, endpoint, arrived = parties.server(server, {alice.public: "alice", mallory.public: "mallory"})
    alices = parties.client(alice, server.public)
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        connect_with(raw, mallory, server.public)
        raw.connect(endpoint)
        for message_id in (1, 2, 3):
            raw.send_multipart([encode_message(1, alices.incarnation, message_id, 1, 0), b"%d" % message_id])
        until(lambda: len(arrived) == 3)
        replies: list[list[bytes]] = []
        for number in (1, 2, 3):
            alices.send_message(endpoint, b"%d" % (number * 10), replies.append)
        until(lambda: len(replies) == 3)
    assert [data for name, data in arrived if name == "alice"] == [b"10", b"20", b"30"]
    assert messenger.counters().duplicates_dropped == 0


@pytest.mark.parametrize("address", ["tcp", "ipc"])
def test_keys_change_under_traffic_and_nothing_is_lost(parties: Parties, address: str, tmp_path: Path) -> None:
    """Both ends go from plain to keys, then to other keys, then to others; each message arrives once, in order."""
    arrived: list[tuple[str | None, bytes]] = []

    def loop(received: Received) -> None:
        arrived.append((received.peer, received.parts[0]))
        received.reply()

    server, client = parties.messenger(None), parties.messenger(None)
    endpoint = server.listen("tcp://127.0.0.1:*" if address == "tcp" else f"ipc://{tmp_path}/socket", loop)
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for number in range(sent, sent + count):
            client.send_message(endpoint, b"%d" % number)
        sent += count

    def settled() -> None:
        send(50)
        until(lambda: client.pending_count(endpoint) == 0)

    settled()
    old: list[KeyPair] = []
    for _ in range(3):
        pairs = [KeyPair.new(), KeyPair.new()]
        send(200)
        callers = {pair.public: "client" for pair in (*old[1:], pairs[1])}
        known = [pair.public for pair in (*old[:1], pairs[0])]  # the old one first, as it is announced
        server.secure(Security(pairs[0], callers, lambda endpoint: ()))
        send(200)
        client.secure(Security(pairs[1], {}, lambda endpoint, known=known: known))
        send(200)
        settled()
        assert arrived[-1][0] == "client"
        old = pairs
    assert numbered(arrived) == list(range(sent))
    assert not [name for name, _ in arrived[-50:] if name is None]


def test_a_flood_of_strangers_is_bounded_and_peers_are_served(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(messenger_limits, "HANDSHAKE_TIMEOUT_MS", 300)
    server, alice = KeyPair.new(), KeyPair.new()
    messenger, endpoint, arrived = parties.server(server, {alice.public: "alice"})
    address = ("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
    client = parties.client(alice, server.public)
    descriptors_before = len(os.listdir("/proc/self/fd"))
    replies: list[list[bytes]] = []
    silent: list[socket.socket] = []
    with zmq.Context() as context:
        strangers = []
        for number in range(150):
            silent.append(socket.create_connection(address))  # says nothing
            if number % 5 == 0:
                stranger = context.socket(zmq.DEALER)
                stranger.linger = 0
                connect_with(stranger, KeyPair.new(), server.public)
                stranger.connect(endpoint)
                stranger.send(b"flood")
                strangers.append(stranger)
            client.send_message(endpoint, b"%d" % number, replies.append)
        until(lambda: len(replies) == 150)
        for one in silent:
            one.settimeout(DEADLINE_S)
            while one.recv(1024):
                pass  # its greeting; then the end, since nobody waits for this one any longer
            one.close()
        until(lambda: messenger.counters().strangers_refused >= 150 + 30)
        for stranger in strangers:
            stranger.close()
    assert numbered(arrived) == list(range(150))
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors_before + 10)
    assert len(caplog.records) <= 4, "the log is as long as the flood"


def test_a_context_has_one_gate() -> None:
    with zmq.Context() as context:
        pair = KeyPair.new()
        security = Security(pair, {}, lambda endpoint: ())
        first = Messenger(context=context, security=security)
        with pytest.raises(MessengerError, match="a messenger with keys needs its own context"):
            Messenger(context=context, security=security)
        first.close()


def test_a_listener_that_is_open_to_all_stays_so(parties: Parties) -> None:
    server = KeyPair.new()
    messenger, _, _ = parties.server(server, {})
    endpoint = messenger.listen("tcp://127.0.0.1:*", lambda received: received.reply(b"open"), secured=False)
    messenger.secure(Security(KeyPair.new(), {}, lambda endpoint: ()))
    replies: list[list[bytes]] = []
    parties.messenger(None).send_message(endpoint, b"hello", replies.append)
    until(lambda: replies == [[b"open"]])


# --- coordinators -----------------------------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


def register(house: House, *names: str, **options: Any) -> None:
    house.register(*names, **options)
    for name in names:
        keys.create(house.settings(name).folder)


def forward(app: SocketApp, number: int) -> None:
    """The app has called its peer; the call may wait."""
    app.impulse(number)
    app.until(lambda: number in app.state["forwarded"])


def add_settings(house: House, name: str, text: str) -> None:
    path = house.registry.path(name)
    path.write_text(text + "\n" + path.read_text())


def as_peer(parties: Parties, house: House, name: str, server: str) -> tuple[Messenger, str]:
    """A messenger with the keys of ``name``, and where ``server`` is."""
    pair = keys.read_pairs(house.settings(name).folder)[0]
    return parties.client(pair, *keys.read_public_keys(house.settings(server).folder)), house.settings(server).peer


def greeting(sender: str, receiver: str, *, committer_id: int = 7, epoch: int = 1) -> PeerFrame:
    return PeerFrame(FrameType.HELLO, sender, receiver, committer_id, epoch, 0)


def secrets_of(house: House, *names: str) -> list[str]:
    return [pair.secret for name in names for pair in keys.read_pairs(house.settings(name).folder)]


def test_keys_rotate_while_calls_flow(house: House) -> None:
    register(house, "alice", "bob")
    bob_process, bob = house.both("bob")
    alice_process, alice = house.both("alice", peer="bob")
    folders = [house.settings(name).folder for name in ("alice", "bob")]
    first = [keys.read_pairs(folder)[0] for folder in folders]
    secrets = secrets_of(house, "alice", "bob")
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for number in range(sent + 1, sent + count + 1):
            alice.impulse(number)
        sent += count

    def in_use(process: CoordinatorProcess, public: str) -> None:
        process.until(lambda status: status["security"]["key"] == public)

    send(20)
    bob.until(lambda: len(bob.state["told"]) == sent)
    for folder in folders:
        keys.rotate(folder)
        send(20)
    secrets += secrets_of(house, "alice", "bob")
    alice_process.line("keys or callers changed")
    bob_process.line("keys or callers changed")
    for folder, process in zip(folders, (alice_process, bob_process), strict=True):
        send(20)
        second = keys.retire(folder)[0]
        send(20)
        in_use(process, second.public)
    send(20)
    bob.until(lambda: len(bob.state["told"]) == sent)
    assert bob.state["told"] == list(range(1, sent + 1))
    assert not {pair.public for pair in first} & {
        process.status()["security"]["key"] for process in (alice_process, bob_process)
    }
    lines = "\n".join([*alice_process.lines, *bob_process.lines])
    assert not [secret for secret in secrets if secret in lines], "a secret key is in the log"


def test_two_that_were_killed_and_start_at_once_do_not_warn_of_each_others_keys(house: House) -> None:
    register(house, "alice", "bob")
    peers = {"alice": "bob", "bob": "alice"}
    started = {name: house.both(name, peer=peer) for name, peer in peers.items()}
    for number in (1, 2):
        for name, (_, app) in started.items():
            forward(app, number)
            started[peers[name]][1].until(lambda told=started[peers[name]][1], n=number: n in told.state["told"])
        for process, app in started.values():
            process.kill()
            app.until_closed()
        started = {name: (house.start(name), app) for name, (_, app) in started.items()}
        started = {name: (process, house.app(name, peer=peers[name]).ready()) for name, (process, _) in started.items()}
    for process, _ in started.values():
        assert not [line for line in process.lines if "refused" in line or "does not let" in line], process.lines


def test_a_key_with_another_name_is_refused(house: House, parties: Parties) -> None:
    register(house, "alice", "bob", "mallory")
    process, bob = house.both("bob")
    messenger, endpoint = as_peer(parties, house, "mallory", "bob")
    messenger.send_message(endpoint, encode_frame(greeting("alice", "bob")))
    line = process.line("a frame was dropped")
    assert "it says that 'alice' sends it, its key 'mallory'" in line
    assert process.status()["security"]["strangers_dropped"] == 1
    assert "alice" not in process.status()["inputs"]
    answers: list[list[bytes]] = []
    messenger.send_message(endpoint, encode_frame(greeting("mallory", "bob")), answers.append)
    until(lambda: answers)
    assert decode_frame(answers[0]).frame_type == FrameType.WELCOME
    assert bob.primary


def test_a_frame_of_an_earlier_epoch_is_refused_whatever_its_key(house: House, parties: Parties) -> None:
    register(house, "alice", "bob")
    house.both("bob")
    messenger, endpoint = as_peer(parties, house, "alice", "bob")
    answers: list[PeerFrame] = []

    def ask(frame: PeerFrame) -> PeerFrame:
        count = len(answers)
        messenger.send_message(endpoint, encode_frame(frame), lambda parts: answers.append(decode_frame(parts)))
        until(lambda: len(answers) > count)
        return answers[-1]

    assert ask(greeting("alice", "bob", epoch=5)).frame_type == FrameType.WELCOME
    again = ask(greeting("alice", "bob", epoch=4))
    assert (again.frame_type, again.code) == (FrameType.REFUSED, RefusedCode.STALE_EPOCH)


def test_only_who_is_on_the_list_may_call_and_the_list_may_change(house: House) -> None:
    register(house, "alice", "bob", "carol")
    add_settings(house, "bob", 'allow = ["carol"]')
    bob_process, bob = house.both("bob")
    _, carol = house.both("carol", peer="bob")
    alice_process, alice = house.both("alice", peer="bob")
    forward(alice, 1)
    assert "its key" in bob_process.line("refused")
    alice_process.line("it does not let this instance's key in")
    carol.impulse(2)
    bob.until(lambda: bob.state["told"] == [2])
    path = house.registry.path("bob")
    path.write_text(path.read_text().replace('["carol"]', '["carol", "alice"]'))
    bob.until(lambda: bob.state["told"] == [2, 1])
    assert bob_process.status()["security"]["strangers_refused"] >= 1


def test_without_keys_nothing_is_sent_to_who_has_them_until_there_are_some(house: House) -> None:
    house.register("alice")
    register(house, "bob")
    _, bob = house.both("bob")
    process, alice = house.both("alice", peer="bob")
    forward(alice, 1)
    line = process.line("nothing is sent to 'bob'")
    assert "takes only callers with keys, and 'alice' has none: 'immortal keys alice --make'" in line
    assert process.status()["security"]["key"] is None
    keys.create(house.settings("alice").folder)
    bob.until(lambda: bob.state["told"] == [1])


def test_who_has_no_keys_yet_is_called_in_plain_until_it_has_some(house: House) -> None:
    register(house, "alice")
    house.register("bob")
    bob_process, bob = house.both("bob")
    _, alice = house.both("alice", peer="bob")
    alice.impulse(1)
    bob.until(lambda: bob.state["told"] == [1])
    keys.create(house.settings("bob").folder)
    bob_process.line("keys or callers changed")
    alice.impulse(2)
    bob.until(lambda: bob.state["told"] == [1, 2])
    assert bob_process.status()["security"]["strangers_dropped"] == 0


def test_a_key_in_the_settings_counts_where_the_registry_has_none(house: House) -> None:
    register(house, "alice", "bob")
    publics = {}
    for name in ("alice", "bob"):
        folder = house.settings(name).folder
        publics[name] = keys.read_public_keys(folder)[0]
        keys.public_path(folder).unlink()
    for name, other in (("alice", "bob"), ("bob", "alice")):
        path = house.registry.path(name)
        path.write_text(f"{path.read_text()}\n[peer_keys]\n{other} = '{publics[other]}'\n")
    process, bob = house.both("bob")
    _, alice = house.both("alice", peer="bob")
    alice.impulse(1)
    bob.until(lambda: bob.state["told"] == [1])
    assert process.status()["security"]["strangers_refused"] == 0


def test_other_machines_are_talked_to_with_keys_only(house: House) -> None:
    house.register("alice")
    path = house.registry.path("alice")
    path.write_text(path.read_text().replace("127.0.0.1", "lo"))  # an interface may stand for any address
    line = house.start("alice", started=False).failed()
    assert "'alice' is reached at tcp://lo:" in line
    assert "has no keys: 'immortal keys alice --make' makes them" in line
    add_settings(house, "alice", "insecure = true")
    process = house.start("alice")
    assert "INSECURE, as asked for" in process.line(" warning ")
    process.kill()
    path.write_text(path.read_text().replace("insecure = true\n", ""))
    keys.create(house.settings("alice").folder)
    register(house, "bob")
    keys.public_path(house.settings("bob").folder).unlink()
    bob_path = house.registry.path("bob")
    bob_path.write_text(bob_path.read_text().replace("127.0.0.1", "lo"))
    process, alice = house.both("alice", peer="bob")
    forward(alice, 1)
    assert "no public key of bob is known, which tcp://lo:" in process.line("nothing is sent to 'bob'")


def test_a_secret_that_others_can_read_is_refused(house: House) -> None:
    register(house, "alice")
    path = keys.secret_path(house.settings("alice").folder)
    path.chmod(0o644)
    process = house.start("alice", started=False)
    assert f"{path} has mode 0644, expected 0600" in process.failed()
    path.chmod(0o600)
    process = house.start("alice")
    path.parent.chmod(0o755)
    assert "stay in use" in process.line(f"{path.parent} has mode 0755, expected 0700")
    assert process.status()["security"]["key"] == keys.read_public_keys(house.settings("alice").folder)[0]
