"""Asking a coordinator: neighbours on the same machine, and processes of its own user that do not behave."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.operator import control, control_server
from immortal.coordinator.operator.control_server import ControlRequest, ControlServer
from tests.helpers.processes import DEADLINE_S, CoordinatorProcess, House
from tests.helpers.strangers import as_stranger, needs_root, open_to_all

HUGE = 3_900_000_000  # what one message held, when there was no end to it


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "home")
    house.register("alice")
    yield house
    house.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    server = ControlServer(tmp_path / "alice")
    server.listen()
    yield server
    server.close()


def connect(path: Path) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(DEADLINE_S)
    connected.connect(str(path))
    return connected


def question(verb: str = "status") -> bytes:
    return control.add_length_prefix(json.dumps({"verb": verb, "argument": {"x": 1}}).encode())


def answer_of(connected: socket.socket) -> dict[str, Any]:
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
        received = connected.recv(1 << 20)
        assert received, f"it was closed after {data!r}"
        data += received
    answer: dict[str, Any] = json.loads(data[4:])
    return answer


def is_closed(connected: socket.socket) -> bool:
    try:
        return not connected.recv(1)
    except ConnectionResetError:
        return True


def until(server: ControlServer, condition: Callable[[], object]) -> list[ControlRequest]:
    """Let the server work until then, as the coordinator's loop does."""
    asked: list[ControlRequest] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        due_ns = server.next_deadline_ns()
        wait_s = 0.02 if due_ns is None else min(0.02, max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
        select.select([server.fileno()], [], [], wait_s)
        asked += server.process()
    return asked


def one_asked(server: ControlServer) -> ControlRequest:
    found: list[ControlRequest] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while not found:
        assert time.monotonic() < deadline_s
        select.select([server.fileno()], [], [], 0.02)
        found = server.process()
    return found[0]


# --- strangers -------------------------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_may_open_the_socket_whatever_the_umask(house: House) -> None:
    before = os.umask(0)
    try:
        house.start("alice")
    finally:
        os.umask(before)
    folder = house.settings("alice").folder
    assert (mode(folder), mode(control.socket_path(folder))) == (0o700, 0o600)
    assert not list(folder.glob("*token*"))


@needs_root
def test_a_stranger_cannot_connect(house: House) -> None:
    process = house.start("alice")
    path = control.socket_path(process.settings.folder)
    assert as_stranger(lambda: connect(path)) == "PermissionError"
    open_to_all(path.parent)
    assert as_stranger(lambda: os.stat(path).st_size) == "0"  # he comes as far as the socket
    assert as_stranger(lambda: connect(path)) == "PermissionError"
    assert process.status()["name"] == "alice"


@needs_root
def test_a_stranger_who_gets_through_is_told_nothing(house: House) -> None:
    process = house.start("alice")
    path = control.socket_path(process.settings.folder)
    open_to_all(path.parent)
    path.chmod(0o666)

    def ask() -> bool:
        with connect(path) as asking:
            try:
                asking.sendall(question())
            except BrokenPipeError:
                return True
            return is_closed(asking)

    assert as_stranger(ask) == "True"
    assert process.status()["name"] == "alice"


def test_who_asks_is_what_the_kernel_says(server: ControlServer, tmp_path: Path) -> None:
    with connect(control.socket_path(tmp_path / "alice")) as asking:
        asking.sendall(question("skip"))
        asked = one_asked(server)
        assert (asked.verb, json.loads(asked.argument), asked.uid, asked.pid) == (
            *("skip", {"x": 1}),
            *(os.geteuid(), os.getpid()),
        )


# --- sizes -----------------------------------------------------------------------------------------------------------


def resident_kib(process: CoordinatorProcess) -> int:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_a_message_that_never_ends_is_not_kept(house: House) -> None:
    process = house.start("alice")
    path = control.socket_path(process.settings.folder)
    before_kib = resident_kib(process)
    for size_bytes in (HUGE, control.QUESTION_SIZE_BYTES_MAX):  # the second one says less than comes
        with connect(path) as connected:
            sent = 0
            try:
                connected.sendall(size_bytes.to_bytes(4, "little"))
                while sent < 64 << 20:
                    sent += connected.send(bytes(1 << 20))
            except (BrokenPipeError, ConnectionResetError):
                pass
            assert sent < 8 << 20  # what the kernel holds for it, and no more
    assert resident_kib(process) < before_kib + (16 << 10)
    assert process.status()["name"] == "alice"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (HUGE.to_bytes(4, "little"), "a question has at most 32768 bytes, this one has 3900000000"),
        (control.add_length_prefix(b"no JSON"), "the question can't be read: JSON is malformed"),
        (control.add_length_prefix(b'{"verb": 7}'), "the question can't be read: Expected `str`, got `int`"),
        (control.add_length_prefix(b"{}"), "the question can't be read: Object missing required field `verb`"),
        (question() + b"x", "there is one question in a connection, and something came behind it"),
        (bytes(4), "the question can't be read: Input data was truncated"),
    ],
)
def test_what_is_no_question_is_refused(server: ControlServer, tmp_path: Path, said: bytes, reason: str) -> None:
    with connect(control.socket_path(tmp_path / "alice")) as asking:
        asking.sendall(said)
        asking.setblocking(False)
        assert until(server, lambda: select.select([asking], [], [], 0)[0]) == []
        assert reason in answer_of(asking)["denied"]


def test_a_question_comes_in_pieces(server: ControlServer, tmp_path: Path) -> None:
    said = question()
    for cut in range(1, len(said)):
        with connect(control.socket_path(tmp_path / "alice")) as asking:
            asking.sendall(said[:cut])
            assert server.process() == server.process() == []
            asking.sendall(said[cut:])
            one_asked(server).answer({"cut": cut})
            assert answer_of(asking) == {"cut": cut}


def test_a_question_of_an_operator_that_is_too_long_is_not_sent(house: House) -> None:
    process = house.start("alice")
    with pytest.raises(control.ControlError, match=r"has \d+ bytes, at most 32768 are allowed: ask for less at once"):
        control.query(process.settings.folder, "letters-drop", argument={"keys": [[1, 2, 3, 4]] * 5000})


def test_a_large_answer_is_taken_in_pieces(server: ControlServer, tmp_path: Path) -> None:
    text = "x" * (8 << 20)
    with connect(control.socket_path(tmp_path / "alice")) as asking:
        asking.sendall(question())
        one_asked(server).answer({"text": text})
        asking.setblocking(False)
        data = b""
        while len(data) < 4 + len(text) + len('{"text": ""}'):
            until(server, lambda: select.select([asking], [], [], 0)[0])
            data += asking.recv(1 << 20)
    assert json.loads(data[4:]) == {"text": text}


def test_an_answer_beyond_the_limit_is_not_sent(server: ControlServer, tmp_path: Path) -> None:
    with connect(control.socket_path(tmp_path / "alice")) as asking:
        asking.sendall(question())
        one_asked(server).answer({"text": "x" * control.ANSWER_SIZE_BYTES_MAX})
        assert "more than 16777216" in answer_of(asking)["denied"]


# --- time and number -------------------------------------------------------------------------------------------------


def test_silent_connections_keep_nobody_out(house: House) -> None:
    process, app = house.both("alice")
    path = control.socket_path(process.settings.folder)
    silent = [connect(path) for _ in range(2 * control_server.CONNECTIONS_MAX)]
    for one in silent[::2]:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the oldest may be closed by now: see below
            one.sendall(question()[:7])
    assert process.status()["name"] == "alice"
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])  # nor is the app held up
    assert [is_closed(one) for one in silent[: control_server.CONNECTIONS_MAX]] == [
        True
    ] * control_server.CONNECTIONS_MAX
    for one in silent:
        one.close()


def test_a_question_that_does_not_end_has_its_time(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "QUESTION_TIMEOUT_S", 0.2)
    size_bytes = control.QUESTION_SIZE_BYTES_MAX
    with connect(control.socket_path(tmp_path / "alice")) as slow:
        slow.sendall(size_bytes.to_bytes(4, "little"))
        sent = 0

        def is_over() -> bool:
            nonlocal sent
            try:
                sent += slow.send(b" ")
            except BrokenPipeError:
                return True
            return False

        assert until(server, is_over) == []
        assert 0 < sent < size_bytes
    assert server.next_deadline_ns() is None


def test_who_does_not_take_the_answer_has_his_time(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "ANSWER_TIMEOUT_S", 0.2)
    with connect(control.socket_path(tmp_path / "alice")) as lazy:
        lazy.sendall(question())
        one_asked(server).answer({"text": "x" * (8 << 20)})  # and does not wait for him
        until(server, lambda: server.next_deadline_ns() is None)


def test_who_has_gone_is_not_answered(server: ControlServer, tmp_path: Path) -> None:
    with connect(control.socket_path(tmp_path / "alice")) as asking:
        asking.sendall(question())
        asked = one_asked(server)
    until(server, lambda: server.next_deadline_ns() is None)
    with connect(control.socket_path(tmp_path / "alice")) as other:  # perhaps with the descriptor of the first
        other.sendall(question())
        second = one_asked(server)
        asked.answer({"to": "the first"})
        second.answer({"to": "the second"})
        assert answer_of(other) == {"to": "the second"}


def test_with_all_places_taken_by_questions_the_next_is_turned_away(server: ControlServer, tmp_path: Path) -> None:
    path = control.socket_path(tmp_path / "alice")
    asking = [connect(path) for _ in range(control_server.CONNECTIONS_MAX)]
    for one in asking:
        one.sendall(question())
        one_asked(server)
    with connect(path) as late:
        late.setblocking(False)
        until(server, lambda: select.select([late], [], [], 0)[0])
        assert late.recv(1) == b""
    for one in asking:
        one.close()


# --- where it is -----------------------------------------------------------------------------------------------------


def test_a_folder_whose_name_is_too_long_for_a_socket_has_it_elsewhere(tmp_path: Path) -> None:
    house = House(tmp_path / ("h" * 100))
    try:
        house.register("alice")
        process = house.start("alice")
        path = Path(json.loads(control.path(process.settings.folder).read_text())["control"])
        assert path == control.socket_path(process.settings.folder)
        assert not path.is_relative_to(tmp_path)
        assert (mode(path.parent), mode(path)) == (0o700, 0o600)
        assert process.status()["name"] == "alice"
        process.kill()
        process = house.start("alice")
        assert process.status()["name"] == "alice", "what the killed one left was in the way"
        process.terminate()
        assert process.ended()[0] == 0
        assert not path.exists()
    finally:
        house.close()


def test_a_file_that_is_in_the_way_is_replaced_and_a_folder_is_named(house: House) -> None:
    path = control.socket_path(house.settings("alice").folder)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text("")
    process = house.start("alice")
    assert process.status()["name"] == "alice"
    process.terminate()
    assert process.ended()[0] == 0
    assert not path.exists()
    path.mkdir()
    assert f"can't be asked at {path}: Is a directory" in house.start("alice", started=False).failed()


def test_a_coordinator_that_is_killed_while_it_is_asked_is_said_to_have_stopped(house: House) -> None:
    process = house.start("alice")
    os.kill(process.process.pid, 19)  # it does not answer
    with connect(control.socket_path(process.settings.folder)) as asking:
        asking.sendall(question())
        process.kill()
        assert is_closed(asking)
    with pytest.raises(control.NotRunningError, match="the coordinator of 'alice' does not run"):
        process.status()
