"""Attacks on the connection between an app and its coordinator, by who listens or connects there in place of either."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from immortal.appsdk.running import transport as authentication
from immortal.appsdk.running.transport import authenticate, connect
from immortal.coordinator.app import authenticator as app_gate
from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.app.authenticator import HELLO_SIZE_BYTES_MAX, HELLO_TIMEOUT_S
from immortal.coordinator.config import InstanceSettings
from immortal.errors import ConnectError
from immortal.protocol.app_handshake import (
    Answer,
    Handshake,
    Role,
    channel_of,
    encode_answer,
    encode_challenge,
    encode_proof,
)
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.record import CONTROL_SEQUENCE_ID, encode_record
from tests.helpers.app_port import (
    NONCE,
    OTHER_SECRET,
    REFUSED,
    Endpoint,
    all_that_came,
    handshake_at,
    hello,
    only_answer,
    only_refusal,
    secret_of,
    stranger,
)
from tests.helpers.processes import DEADLINE_S, CoordinatorProcess, House
from tests.helpers.sdk import TAKE_FIRST

SECRET = b"5" * 64
CHALLENGE_SIZE_BYTES = len(encode_challenge(NONCE))
APP = """
from pathlib import Path
from immortal import Immortal, impulse

class Counter(Immortal):
    def __init__(self) -> None:
        Path("handled").touch()

    @impulse
    def count(self) -> None: ...
"""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    made = Endpoint(tmp_path / "home")
    yield made
    made.close()


def started(house: House, name: str = "alice") -> CoordinatorProcess:
    house.register(name, app_auth="challenge", app_port=0)
    return house.start(name)


def control(message: bytes) -> bytes:
    return encode_record(1, CONTROL_SEQUENCE_ID, message)


# --- who listens first, in the coordinator's place --------------------------------------------------------------------


class FalseCoordinator(threading.Thread):
    """Listens, takes one app, says what ``says`` makes of its Challenge, and keeps all that the app sends."""

    def __init__(self, says: Callable[[bytes], bytes]) -> None:
        super().__init__(daemon=True)
        self._says = says
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.heard = b""
        self.start()

    def run(self) -> None:
        with self._listener, contextlib.suppress(OSError):  # the app may leave in the middle of what it is told
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(DEADLINE_S)
                while len(self.heard) < CHALLENGE_SIZE_BYTES:
                    self.heard += connection.recv(4096)
                connection.sendall(self._says(self.heard))
                connection.shutdown(socket.SHUT_WR)
                while more := connection.recv(4096):
                    self.heard += more


def wrong_proof(challenge: bytes) -> bytes:
    return control(encode_answer(Answer(bytes(32), bytes(32), "alice")))


def proof_with_a_guessed_secret(challenge: bytes) -> bytes:
    handshake = Handshake(challenge[-32:], bytes(32), "alice", "")
    return control(encode_answer(Answer(bytes(32), handshake.proof(b"", Role.COORDINATOR), "alice")))


FALSE = {
    "begins as if nothing were to be proven": (lambda challenge: TAKE_FIRST, "is something else than a Proof"),
    "says goodbye": (
        lambda challenge: control(encode_message(MessageType.GOODBYE, b"x")),
        "something else than a Proof",
    ),
    "has a wrong proof": (wrong_proof, "does not know the secret that this app was given"),
    "guesses the secret": (proof_with_a_guessed_secret, "does not know the secret that this app was given"),
    "sends the Challenge back": (lambda challenge: challenge, "who listens at ADDRESS "),
    "sends it back in a record": (lambda challenge: control(challenge), "something else than a Proof"),
    "says more than its proof": (lambda challenge: wrong_proof(challenge) + TAKE_FIRST, "something else than a Proof"),
    "never ends": (lambda challenge: b"\1\0\0\0\0\0\0\1" + bytes(1 << 20), "its answer has more than 4096 bytes"),
    "ends": (lambda challenge: b"", "went away before it had proven"),
    "refuses": (
        lambda challenge: control(encode_message(MessageType.REFUSAL, b"\x1b[2Jsend\nit")),
        "who listens at ADDRESS refuses: [2Jsendit\n",
    ),
}


@pytest.mark.parametrize("what", FALSE)
def test_a_false_coordinator_gets_no_secret_and_is_not_listened_to(what: str, tmp_path: Path) -> None:
    says, words = FALSE[what]
    (tmp_path / "lives.py").write_text(APP)
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    false = FalseCoordinator(says)
    command = [sys.executable, "-P", "-m", "immortal.appsdk", "lives:Counter", "--secret-file", "secret"]
    environment = {**os.environ, "IMMORTAL_APP_ADDRESS": false.address, "PYTHONHASHSEED": "0"}
    app = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    false.join(DEADLINE_S)
    assert words.replace("ADDRESS", false.address) in app.stderr
    assert (app.returncode, app.stderr.count("\n")) == (1, 1), app.stderr
    assert (false.heard[:3], len(false.heard)) == (encode_challenge(NONCE)[:3], CHALLENGE_SIZE_BYTES)
    assert SECRET not in false.heard
    assert not (tmp_path / "handled").exists()


def joined(answer: Callable[[bytes, socket.socket], bytes]) -> tuple[ConnectError, bytes]:
    """What an app with ``SECRET`` says of who answers its Challenge so, over TCP; and all that it has sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as app:
        false, _ = listener.accept()
        with false:
            false.settimeout(DEADLINE_S)
            heard: list[bytes] = []

            def run() -> None:
                heard.append(false.recv(CHALLENGE_SIZE_BYTES))
                false.sendall(answer(heard[0], false))

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            with pytest.raises(ConnectError) as caught:
                authenticate(app, SECRET, "there")
            app.close()
            thread.join(DEADLINE_S)
            while more := false.recv(4096):
                heard.append(more)
            return caught.value, b"".join(heard)


def test_a_false_coordinator_cannot_repeat_what_a_real_one_has_answered() -> None:
    def earlier(challenge: bytes, false: socket.socket) -> bytes:
        channel = channel_of(false.getpeername(), false.getsockname())
        handshake = Handshake(bytes(32), NONCE, "alice", channel)  # all is right, but for the app's nonce then
        return control(encode_answer(Answer(NONCE, handshake.proof(SECRET, Role.COORDINATOR), "alice")))

    error, heard = joined(earlier)
    assert "does not know the secret" in str(error)
    assert len(heard) == CHALLENGE_SIZE_BYTES, "the app has told it more"


def test_a_false_coordinator_cannot_call_itself_another_instance() -> None:
    def of_bob(challenge: bytes, false: socket.socket) -> bytes:
        channel = channel_of(false.getpeername(), false.getsockname())
        handshake = Handshake(challenge[-32:], NONCE, "bob", channel)
        return control(encode_answer(Answer(NONCE, handshake.proof(SECRET, Role.COORDINATOR), "alice")))

    error, _ = joined(of_bob)
    assert "does not know the secret" in str(error)


def test_a_false_coordinator_that_says_nothing_or_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "ANSWER_TIMEOUT_S", 0.2)
    for piece in (b"", b"\1\0\0\0"):
        error, heard = joined(lambda challenge, false, piece=piece: piece)  # type: ignore[misc]
        assert "has not proven to be the coordinator of this app within 0.2 s" in str(error)
        assert len(heard) == CHALLENGE_SIZE_BYTES


def test_a_false_coordinator_cannot_pass_on_what_the_real_one_proves(house: House) -> None:
    """It stands between the two, at another port of this machine, and passes on every byte."""
    process = started(house)
    secret = secret_of(process.settings)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as app:
        between, _ = listener.accept()
        with between, stranger(process.settings) as to_real:
            between.settimeout(DEADLINE_S)

            def pass_on() -> None:
                to_real.sendall(between.recv(4096))
                between.sendall(to_real.recv(4096))

            thread = threading.Thread(target=pass_on, daemon=True)
            thread.start()
            with pytest.raises(ConnectError, match="or something stands between the two"):
                authenticate(app, secret, "there")
            thread.join(DEADLINE_S)
            app.close()
            assert between.recv(4096) == b"", "the app has proven something to it"
    process.line(f"{REFUSED}: it ended when it had read our proof")
    assert process.status()["epoch"] == 0


def test_an_app_is_not_taken_in_by_the_coordinator_of_another_instance(house: House) -> None:
    alice, bob = started(house, "alice"), started(house, "bob")
    with stranger(bob.settings) as app, pytest.raises(ConnectError, match=r"\(it calls itself 'bob'\)"):
        authenticate(app, secret_of(alice.settings), "there")
    assert (alice.status()["epoch"], bob.status()["epoch"]) == (0, 0)


# --- who connects, in the app's place --------------------------------------------------------------------------------


def challenged(settings: InstanceSettings, nonce: bytes = NONCE) -> tuple[socket.socket, Answer]:
    """A stranger that has sent its Challenge, and the coordinator's answer."""
    made = stranger(settings, encode_challenge(nonce))
    return made, only_answer(made.recv(4096))


def refused(one: socket.socket, said: bytes) -> str:
    one.sendall(said)
    return only_refusal(all_that_came(one))


def test_a_stranger_with_another_secret_is_refused(house: House) -> None:
    process = started(house)
    one, answer = challenged(process.settings)
    with one:
        proof = handshake_at(one, answer).proof(OTHER_SECRET, Role.APP)
        assert "is wrong, so it has another secret" in refused(one, encode_proof(proof) + hello(b""))
    process.line(f"{REFUSED}: its proof is wrong")
    with stranger(process.settings) as one, pytest.raises(ConnectError, match="does not know the secret"):
        authenticate(one, OTHER_SECRET, "there")
    assert process.status()["epoch"] == 0


def test_a_stranger_cannot_send_the_coordinators_proof_back(house: House) -> None:
    process = started(house)
    one, answer = challenged(process.settings)
    with one:
        assert "is wrong" in refused(one, encode_proof(answer.proof) + hello(b""))
    one, answer = challenged(process.settings)
    with one:  # nor with the nonces the other way round: the second Challenge has the coordinator's nonce of the first
        two, other = challenged(process.settings, answer.coordinator_nonce)
        with two:
            assert "is wrong" in refused(one, encode_proof(other.proof) + hello(b""))
    assert process.status()["epoch"] == 0


def test_a_stranger_cannot_repeat_what_the_app_has_said(house: House) -> None:
    """At the Unix socket, where all connections look the same: the nonces alone make the difference."""
    process = started(house)

    def challenged_there() -> tuple[socket.socket, Answer]:
        made = connect(process.settings.app_addresses[0])
        made.settimeout(DEADLINE_S)
        made.sendall(encode_challenge(NONCE))
        return made, only_answer(made.recv(4096))

    app, answer = challenged_there()
    said = encode_proof(handshake_at(app, answer).proof(secret_of(process.settings), Role.APP)) + hello(b"")
    app.sendall(said)
    process.until(lambda status: status["epoch"] == 1)
    app.close()
    process.line("the app disconnected")
    again, other = challenged_there()
    with again:
        assert other.coordinator_nonce != answer.coordinator_nonce
        assert "is wrong" in refused(again, said)
    assert process.status()["epoch"] == 1


def test_a_stranger_cannot_do_without_a_proof(endpoint: Endpoint) -> None:
    proof, challenge = encode_proof(bytes(32)), encode_challenge(NONCE)
    for said in (
        proof,
        challenge + challenge,
        challenge + encode_message(MessageType.TAKE_CHECKPOINT),
        proof + hello(b""),
    ):
        lines = len(endpoint.log.lines)
        with stranger(endpoint.settings, said) as one:
            while len(endpoint.log.lines) == lines:
                assert endpoint.turn() == []
            assert "it began with something else than a Challenge or a Hello" in endpoint.log.lines[-1][1]
    with stranger(endpoint.settings, challenge + hello(b"")) as one:
        while endpoint.endpoint.next_deadline_ns() is None or len(endpoint.log.lines) < 5:
            assert endpoint.turn() == []
        assert b"must prove that it knows its secret, and did not" in all_that_came(one)


def let_time_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as there is for a handshake."""
    clock = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock() + int(HELLO_TIMEOUT_S * 1e9))


def test_a_stranger_cannot_stay_by_speaking_slowly(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for the whole handshake is one, however much of it comes."""
    said = encode_challenge(NONCE)
    with stranger(endpoint.settings) as one:
        assert endpoint.turn() == []
        due_ns = endpoint.endpoint.next_deadline_ns()
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(said)):
            one.sendall(said[at : at + 1])
            assert endpoint.turn() == []
            assert endpoint.endpoint.next_deadline_ns() == due_ns
        let_time_pass(monkeypatch)
        assert endpoint.turn() == []
        assert "it came to no Hello within 20 s" in endpoint.log.lines[0][1]
        only_answer(all_that_came(one))


def test_a_stranger_cannot_fill_the_memory(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    receive = app_gate.AppConnection.receive

    def watched(connection: app_gate.AppConnection, size_bytes_max: int) -> bytes | None:
        data = receive(connection, size_bytes_max)
        taken.append(len(data or b""))
        return data

    monkeypatch.setattr(app_gate.AppConnection, "receive", watched)
    with stranger(endpoint.settings) as one:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.send(
                encode_challenge(NONCE) + b"\xf8\x3f" + bytes(1 << 20)
            )  # a message of 4092 bytes, and much behind it
        while not endpoint.log.lines:
            assert endpoint.turn() == []
    assert max(taken) <= HELLO_SIZE_BYTES_MAX
    assert sum(taken) <= 2 * HELLO_SIZE_BYTES_MAX


def test_a_proven_app_without_a_hello_is_not_served(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with stranger(endpoint.settings) as one:
        one.sendall(endpoint.proof_for(one) + hello(b"")[:-1])
        assert endpoint.turn() == []
        let_time_pass(monkeypatch)
        assert endpoint.turn() == []
        assert "it came to no Hello within 20 s" in endpoint.log.lines[0][1]


def test_the_secret_is_not_on_the_wire(house: House) -> None:
    """Neither as it is in the file nor as the bytes that its digits stand for."""
    process = started(house)
    secret = secret_of(process.settings)
    sent: list[bytes] = []

    class Watched(socket.socket):
        def sendall(self, data: object, flags: int = 0) -> None:
            assert isinstance(data, bytes)
            sent.append(data)
            super().sendall(data)

    with Watched(fileno=stranger(process.settings).detach()) as app:
        app.settimeout(DEADLINE_S)
        authenticate(app, secret, "there")
        app.sendall(hello(b""))
        assert select.select([app], [], [], DEADLINE_S)[0]
    assert len(sent) == 3
    assert secret not in b"".join(sent)
    assert bytes.fromhex(secret.decode()) not in b"".join(sent)
    assert app_secret.path(process.settings.folder).stat().st_mode & 0o777 == 0o600
