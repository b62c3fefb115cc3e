"""What an operator asks of a running coordinator about messages that fail, over its control port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.core import events as ev
from immortal.coordinator.operator import control
from immortal.coordinator.operator.verbs import VerbError, event_of
from immortal.protocol.messages import encode_incoming_rpc
from immortal.protocol.verdicts import Handling, Verdict, VerdictKind, encode_handling, encode_verdict
from tests.helpers.core import Driven, rpc
from tests.helpers.processes import CoordinatorProcess, House
from tests.unit.test_core_verdicts import KEY, LETTER, with_letter

FORKED = 7  # a method that the test's app only notes


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    house.register("a")
    yield house
    house.close()


def ask(process: CoordinatorProcess, verb: str, **argument: object) -> dict[str, Any]:
    return control.query(process.settings.folder, verb, argument=argument)


def test_letters_are_dropped(house: House) -> None:
    process, app = house.both("a", extended=True)
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])
    app.send(encode_verdict(Verdict(1, 0, VerdictKind.UNDONE, "ValueError", "no", message=rpc(1))))
    app.serve_until(lambda: process.status()["letters"]["count"] == 1)
    assert process.status()["verdicts"]["undone"] == 1
    assert ask(process, "letters-drop", keys=[[9, 9, 0, 0]], who="ann") == {"dropped": 0}
    assert ask(process, "letters-drop", all=True, who="ann") == {"dropped": 1}
    assert process.status()["letters"]["count"] == 0


def test_the_message_that_an_app_is_at_is_skipped(house: House) -> None:
    process, app = house.both("a", extended=True)
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])
    skip = {"sequence_id": 1, "message_index": 0, "reason": "it loops", "who": "ann"}
    with pytest.raises(control.RefusedError, match="may have handled message 0 of record 1 well"):
        ask(process, "skip", **skip)
    with pytest.raises(control.RefusedError, match="there is no record 5"):
        ask(process, "skip", **skip | {"sequence_id": 5})
    app.send(encode_handling(Handling(1, 0, 12.0, "Orders.place")))
    assert process.line("handling Orders.place for 12 s (record 1, message 0)")
    assert process.status()["handling"]["method"] == "Orders.place"
    with pytest.raises(control.RefusedError, match="record 1 has no message 1"):
        ask(process, "skip", **skip | {"message_index": 1})
    assert ask(process, "skip", **skip) == {"skipped": True}
    app.until_closed()
    assert process.line("ann skipped message 0 of record 1: it loops")


@pytest.mark.parametrize("argument", ["", "[]", '{"sequence_id": "x"}', '{"keys": [[1]]}'])
@pytest.mark.parametrize("verb", ["letters-drop", "skip"])
def test_what_makes_no_sense(verb: str, argument: str) -> None:
    with pytest.raises(VerbError, match=f"what came behind '{verb}' can't be read"):
        event_of(verb, argument, "t", Driven().store, [])


@pytest.mark.parametrize("argument", ['{"all": true, "who": "ann"}', '{"keys": [[1, 0, 0, 0]], "who": "ann"}'])
def test_letters_to_retry_come_with_what_they_are(argument: str) -> None:
    driven = with_letter()
    event = event_of("letters-retry", argument, "t", driven.store, driven.machine.view.letters)
    assert isinstance(event, ev.LettersRetried)
    assert event.operator == "ann"
    letter = event.letters[KEY]
    assert letter is not None
    assert letter.verdict == LETTER


def test_a_message_to_skip_comes_with_its_bytes() -> None:
    driven = with_letter()
    driven.batch("u", 2, rpc(2), encode_incoming_rpc(3, 1, b"three"))
    argument = json.dumps({"sequence_id": 2, "message_index": 1, "reason": "x"})
    event = event_of("skip", argument, "t", driven.store, [])
    assert isinstance(event, ev.MessageSkipped)
    assert event.message == encode_incoming_rpc(3, 1, b"three")
