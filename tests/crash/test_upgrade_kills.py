"""kill -9 around each step of an upgrade: the old version whole, or the new one, and never anything between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from immortal.coordinator.fault_points import VARIABLE, FaultPoint
from immortal.coordinator.instances import upgrade_mark
from immortal.coordinator.instances.upgrade_mark import UpgradeMark
from immortal.log import open_reader
from immortal.protocol.messages import MessageType, RpcType, encode_checkpoint, encode_message
from tests.helpers.processes import House
from tests.helpers.stepping import SteppingApp

OLD, UPGRADED, NEW = b"the old state", b"upgraded, not confirmed", b"the new state"


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
        process.line("the app disconnected")
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


@pytest.mark.parametrize("point", [FaultPoint.BEFORE_VERSION, FaultPoint.AFTER_VERSION])
def test_a_kill_around_the_commit_of_an_upgrade(
    house: House, point: FaultPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_an_old_version(house)
    plan = house.home / "plan"
    plan.write_text(f"1 kill {point.value}")
    monkeypatch.setenv(VARIABLE, str(plan))
    process = house.start("a")
    app = SteppingApp(process)
    confirmed(app)
    assert process.ended()[0] == -9
    app.socket.close()
    assert version(house) == (1 if point is FaultPoint.BEFORE_VERSION else 2)
    process = house.start("a")
    again = SteppingApp(process)
    if point is FaultPoint.BEFORE_VERSION:
        confirmed(again)
    else:
        again.until(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)
        assert (again.blob, again.logged) == (NEW, [])
        again.checkpoint(NEW)
    process.until(lambda status: status["phase"] == "normal" and status["version"] == 2)
    assert upgrade_mark.read(process.settings.folder) is None
    again.socket.close()
