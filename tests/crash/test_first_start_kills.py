"""kill -9 around each step of a first start: it begins again, or checkpoint 1 and record 0 are both there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from immortal.coordinator.fault_points import VARIABLE, FaultPoint
from immortal.protocol.messages import MessageType, encode_checkpoint, encode_message
from tests.helpers.processes import House
from tests.helpers.stepping import SteppingApp

BLOB = b"the first state"
INITIAL = encode_message(MessageType.INITIAL_MESSAGE, b"begin")


def told(app: SteppingApp) -> None:
    app.until(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)


def begun(app: SteppingApp) -> None:
    told(app)
    app.socket.sendall(INITIAL)


def half_done(app: SteppingApp) -> None:
    begun(app)
    app.socket.sendall(encode_checkpoint(len(BLOB)) + BLOB[:4])


def done(app: SteppingApp) -> None:
    begun(app)
    app.checkpoint(BLOB)


def durable(app: SteppingApp) -> None:
    done(app)
    app.until(MessageType.INITIAL_MESSAGE)


STEPS: list[Callable[[SteppingApp], None]] = [told, begun, half_done, done, durable]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_leaves_nothing_or_all_of_it(house: House, step: Callable[[SteppingApp], None]) -> None:
    house.register("a")
    process = house.start("a")
    app = SteppingApp(process)
    step(app)
    process.kill()
    app.socket.close()

    process = house.start("a")
    again = SteppingApp(process)
    told(again)
    if again.blob:
        assert step in (done, durable)
        assert (again.blob, again.logged) == (BLOB, [0])
    else:
        assert step is not durable
        again.until(MessageType.APP_TIME)
        assert again.types == [
            MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT,
            *(MessageType.VERDICTS, MessageType.APP_TIME),  # these wait for the Hello
        ]
        again.socket.sendall(INITIAL)
    again.checkpoint(BLOB)
    process.until(lambda status: status["phase"] == "normal" and status["sequence_id"] == 0)
    again.socket.close()


def test_a_kill_while_the_log_is_made(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.register("a")
    plan = house.home / "plan"
    plan.write_text(f"1 kill {FaultPoint.LOG_CREATED.value}")
    monkeypatch.setenv(VARIABLE, str(plan))
    assert house.start("a", started=False).ended()[0] == -9
    process = house.start("a")
    app = SteppingApp(process)
    done(app)
    process.until(lambda status: status["phase"] == "normal" and status["sequence_id"] == 0)
    app.socket.close()
