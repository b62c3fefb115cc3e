"""An app that clients call: to whom it answers, and that nothing that they send stops it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import immortal
from immortal import Immortal, rpc
from immortal.errors import HandlerError
from immortal.protocol.messages import MessageType, RpcKind, RpcType, encode_incoming_rpc
from tests.helpers.sdk import Life, first_start, first_start_with_verdicts, recover
from tests.helpers.wire import answer, call, initial_record, logged


class Wrong(Exception):  # noqa: N818
    pass


class Desk(Immortal):
    notes: list[str]

    def __init__(self) -> None:
        self.notes = []

    @rpc(id=1, raises=[Wrong])
    def note(self, text: str, times: int = 1) -> int:
        if not text:
            raise Wrong("no text", times)
        self.notes.append(text * times)
        return len(self.notes)

    @rpc(id=2)
    def clear(self) -> None:
        self.notes.clear()

    @rpc(id=3)
    async def relay(self, text: str) -> int:
        return await self.other(text)

    @rpc(id=4)
    async def other(self, text: str) -> int:
        return await immortal.step(self.note, text)

    @rpc(id=5)
    def fail(self) -> None:
        raise RuntimeError("a bug")


def asked(method_id: int, *arguments: Any, number: int = 1, caller: str = "~ann") -> bytes:
    return call(method_id, caller, number, *arguments, rpc_type=RpcType.ASYNC)


def answers(life: Life) -> list[tuple[str, int, list[Any]]]:
    """(destination, method ID, arguments) of all calls sent."""
    return [(to, method_id, list(arguments)) for to, method_id, arguments in life.output.calls]


def test_the_answer_goes_to_all_clients_and_names_the_caller() -> None:
    life = first_start(Desk)
    life.give(logged(1, [asked(1, "a"), asked(2, number=2), asked(1, "", number=3), asked(1, "b", caller="~bob")]))
    assert answers(life) == [
        ("~", 1, ["~ann", 1, 1]),
        ("~", 2, ["~ann", 2]),
        ("~", 1, ["~ann", 3, "Wrong", ["no text", 1], {}]),
        ("~", 1, ["~bob", 1, 1]),
    ]
    assert [sent.data for sent in life.output.messages if sent.message_type == MessageType.ATTACH_TO] == [b"~"]


def test_an_async_handler_answers_a_client_when_it_is_done() -> None:
    life = first_start(Desk)
    life.give(logged(1, [asked(3, "a", number=7)]))
    ((destination, method_id, arguments),) = answers(life)
    assert (destination, method_id) == ("", 4)
    blob_before = life.dispatcher.tasks.save()
    assert blob_before is not None
    assert (blob_before.tasks[0].caller, blob_before.tasks[0].call_number) == ("~ann", 7)
    life.give(logged(2, [call(4, *arguments, rpc_type=RpcType.ASYNC)]))
    life.give(logged(3, [answer(4, RpcKind.RETURNED_VALUE, arguments[1], 1)]))
    assert answers(life)[-1] == ("~", 3, ["~ann", 7, 1])


@pytest.mark.parametrize(
    ("method_id", "arguments", "reason"),
    [
        (1, (5,), "Desk.note: parameter 'text': Expected `str`, got `int`"),
        (1, (), "Desk.note takes 1 to 2 arguments (text, times), 0 came"),
        (2, ("x", "y"), "Desk.clear takes 0 arguments (none), 2 came"),
        (3, (None,), "Desk.relay: parameter 'text': Expected `str`, got `None`"),
        (999, (1, 2), "Desk has no method 999 (it has: clear, fail, note, other, relay)"),
    ],
)
def test_a_call_that_can_not_be_made_is_refused_and_the_app_goes_on(
    method_id: int, arguments: tuple[Any, ...], reason: str
) -> None:
    life = first_start_with_verdicts(Desk)
    life.give(logged(1, [asked(1, "a"), asked(method_id, *arguments, number=2), asked(1, "b", number=3)]))
    assert life.dispatcher.instance.notes == ["a", "b"]
    refusal = answers(life)[1]
    assert refusal[:2] == ("~", method_id)
    caller, number, name, (text,), attributes = refusal[2]
    assert (caller, number, name, attributes) == ("~ann", 2, "~refused", {})
    assert text == reason


def test_arguments_that_are_damaged_are_refused_too() -> None:
    life = first_start_with_verdicts(Desk)
    front = msgspec.msgpack.encode(("~ann", 2))[1:]
    for index, rest in enumerate((b"", b"\xc1", b"\xa5ab")):
        life.give(logged(index + 1, [encode_incoming_rpc(1, RpcType.ASYNC, b"\x93" + front + rest)]))
    assert [name for _, _, (_, _, name, *_) in answers(life)] == ["~refused"] * 3


def test_a_replay_refuses_again_what_was_refused() -> None:
    records = [logged(1, [asked(1, 5)]), logged(2, [asked(999, number=2)]), logged(3, [asked(1, "a", number=3)])]
    life = first_start_with_verdicts(Desk)
    life.give(b"".join(records))
    initial = initial_record(life.output.initial_message)
    again = recover(Desk, life.output.blobs[0], initial, *records, verdicts=life.verdicts)
    assert answers(again) == answers(life)


def test_beside_a_coordinator_that_keeps_no_verdicts_such_a_call_stops_the_app() -> None:
    with pytest.raises(HandlerError, match="Expected `str`"):
        first_start(Desk).give(logged(1, [asked(1, 5, caller="peer")]))
    with pytest.raises(HandlerError, match="method 999"):
        first_start(Desk).give(logged(1, [asked(999, caller="peer")]))


def test_a_bug_in_a_handler_stops_the_app_whoever_calls() -> None:
    with pytest.raises(HandlerError, match="a bug"):
        first_start(Desk).give(logged(1, [asked(5)]))
