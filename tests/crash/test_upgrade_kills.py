"""kill -9 around each step of an upgrade: the old version whole, or the new one, and never anything between."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator import upgrade_mark
from coordinator.log import open_reader
from coordinator.upgrade_mark import UpgradeMark
from protocol.extensions import ALL_EXTENSIONS, AppDescription, Hello, encode_app_description, encode_hello
from protocol.messages import MessageType, RpcType, decode_messages, encode_checkpoint, encode_message
from protocol.readers import BlobData, BlobStart, RecordReader
from tests.helpers.processes import DEADLINE_S, CoordinatorProcess, House

OLD, UPGRADED, NEW = b"the old state", b"upgraded, not confirmed", b"the new state"


class SteppingApp:
    """An app whose every step is the test's: it gathers what it is sent, and says what it is told to say."""

    def __init__(self, process: CoordinatorProcess, version: int = 2) -> None:
        settings = process.settings
        self.socket = socket.create_connection(("127.0.0.1", settings.app_port), DEADLINE_S)
        self.reader = RecordReader()
        self.blob = b""
        self.types: list[int] = []
        self.logged: list[int] = []
        hello = Hello(ALL_EXTENSIONS, f"app:V{version}")
        self.socket.sendall(encode_hello(hello) + encode_app_description(AppDescription(version)))

    def until(self, message_type: MessageType) -> None:
        self.until_any(message_type)

    def until_any(self, *message_types: MessageType) -> None:
        while not any(message_type in self.types for message_type in message_types):
            data = self.socket.recv(1 << 16)
            assert data, f"the connection ended before any of {message_types}: {self.types}"
            self.reader.receive_data(data)
            while (event := self.reader.next_event()) is not None:
                if isinstance(event, BlobStart):
                    self.blob = b""
                elif isinstance(event, BlobData):
                    self.blob += event.data
                else:
                    if event.header.sequence_id >= 0:
                        self.logged.append(event.header.sequence_id)
                    self.types += [kind for kind, _, _ in decode_messages(event.content)]

    def checkpoint(self, blob: bytes) -> None:
        self.socket.sendall(encode_checkpoint(len(blob)) + blob)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


def with_an_old_version(house: House) -> None:
    """A checkpoint of version 1, two records behind it, and the wish for version 2."""
    house.register("a")
    process = house.start("a")
    app = SteppingApp(process, 1)
    app.until(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)
    app.socket.sendall(encode_message(MessageType.INITIAL_MESSAGE, b"begin"))
    app.checkpoint(OLD)
    app.until(MessageType.INITIAL_MESSAGE)
    impulse = encode_message(MessageType.RPC, bytes((0, 0, 6, RpcType.IMPULSE)))
    app.socket.sendall(impulse)
    app.until(MessageType.RPC)
    process.kill()
    app.socket.close()
    upgrade_mark.write(house.settings("a").folder, UpgradeMark(2))


def asked(app: SteppingApp) -> None:
    app.until(MessageType.UPGRADE_TAKE_CHECKPOINT)


def upgraded(app: SteppingApp) -> None:
    asked(app)
    app.checkpoint(UPGRADED)


def asked_to_confirm(app: SteppingApp) -> None:
    upgraded(app)
    app.until(MessageType.TAKE_CHECKPOINT)


def half_confirmed(app: SteppingApp) -> None:
    asked_to_confirm(app)
    app.socket.sendall(encode_checkpoint(len(NEW)) + NEW[:5])


def confirmed(app: SteppingApp) -> None:
    asked_to_confirm(app)
    app.checkpoint(NEW)


STEPS: list[Callable[[SteppingApp], None]] = [
    lambda app: None,
    asked,
    upgraded,
    asked_to_confirm,
    half_confirmed,
    confirmed,
]


def version(house: House) -> int:
    settings = house.settings("a")
    with open_reader(settings.log, "a") as reader:
        return reader.summary().versions[-1].version


@pytest.mark.parametrize("step", range(len(STEPS)))
@pytest.mark.parametrize("victim", ["coordinator", "app"])
def test_a_kill_at_any_step_leaves_one_version_whole(house: House, step: int, victim: str) -> None:
    with_an_old_version(house)
    process = house.start("a")
    app = SteppingApp(process)
    STEPS[step](app)
    if victim == "coordinator":
        process.kill()
        app.socket.close()
        process = house.start("a")
    else:
        app.socket.close()
        process.line("the app is gone")
    again = SteppingApp(process)
    again.until_any(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT, MessageType.UPGRADE_TAKE_CHECKPOINT)
    if MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT in again.types:
        assert STEPS[step] is confirmed, "an upgrade counts before it was confirmed"
        assert (again.blob, again.logged) == (NEW, [])
        again.checkpoint(NEW)
    else:
        assert (again.blob, again.logged) == (OLD, [0, 1])
        assert version(house) == 1
        again.checkpoint(UPGRADED)
        again.until(MessageType.TAKE_CHECKPOINT)
        again.checkpoint(NEW)
        process.line("upgraded")
    process.until(lambda status: status["phase"] == "normal" and status["version"] == 2)
    assert upgrade_mark.read(process.settings.folder) is None
    again.socket.close()
    process.kill()
    assert version(house) == 2


def test_the_old_version_is_whole_when_the_wish_is_withdrawn(house: House) -> None:
    with_an_old_version(house)
    process = house.start("a")
    app = SteppingApp(process)
    asked_to_confirm(app)
    process.kill()
    app.socket.close()
    upgrade_mark.clear(process.settings.folder)
    process = house.start("a")
    app = SteppingApp(process, 1)
    app.until(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)
    assert (app.blob, app.logged) == (OLD, [0, 1])
    app.socket.close()
