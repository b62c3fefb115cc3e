"""Messages that fail alone: what becomes of the state, of the calls that were made, and of who waits."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

import immortal
from immortal import CalleeFailed, CallRefused, Immortal, impulse, initial, peer, rpc, upgrades
from immortal.appsdk.calls.failures import FAILED_IN_A_ROW_MAX
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID, EFFECT_METHOD_ID, INITIAL_METHOD_ID
from immortal.appsdk.handlers.log import FailureReporter
from immortal.errors import DefinitionError, HandlerError, RecoveryNeeded
from immortal.protocol.batch import encode_batch
from immortal.protocol.extensions import encode_record_time
from immortal.protocol.messages import MessageType, RpcKind, RpcType, encode_incoming_rpc
from immortal.protocol.record import CONTROL_SEQUENCE_ID, encode_record
from immortal.protocol.verdicts import (
    Careful,
    Cause,
    Handling,
    Verdict,
    VerdictKind,
    decode_handling,
    encode_careful,
    encode_handling,
)
from tests.helpers.sdk import (
    COMMITTER_ID,
    TAKE,
    TAKE_FIRST,
    Life,
    first_start,
    first_start_with_verdicts,
    recover,
    upgrade_record,
    verdicts_record,
)
from tests.helpers.wire import START_TIME_NS, answer, call, checkpoint_record, control, initial_record, logged


class Declared(Exception):  # noqa: N818
    pass


class Shelf(Immortal):
    items: list[str]

    def __init__(self) -> None:
        self.items = []

    @rpc(id=1)
    def put(self, item: str, times: int = 1) -> int:
        for _ in range(times):
            self.items.append(item)
            self.other.put.fork(item)
        if item == "bad":
            raise ValueError(f"no {item} here")
        return len(self.items)

    @rpc(id=2, on_error="keep")
    def push(self, item: str) -> None:
        self.items.append(item)
        raise ValueError("pushed all the same")

    @rpc(id=3, on_error="stop")
    def strict(self) -> None:
        raise ValueError("stop here")

    @rpc(id=4, raises=[Exception])
    def anything(self) -> None:
        self.items.append("anything")
        raise KeyError("x")

    @rpc(id=5)
    def wrong(self) -> int:
        self.items.append("wrong")
        return "text"  # type: ignore[return-value]

    @impulse(id=6)
    def arrive(self, item: str) -> None:
        self.put(item)

    other = peer(lambda: Shelf, "other")


class Async(Immortal):
    log: list[str]

    def __init__(self) -> None:
        self.log = []

    @rpc(id=1)
    def note(self, text: str) -> int:
        self.log.append(text)
        if text == "bad":
            raise ValueError("no bad notes")
        return len(self.log)

    @rpc(id=2)
    async def run(self, texts: list[str]) -> str:
        for text in texts:
            try:
                await immortal.step(self.note, text)
            except CalleeFailed as error:
                await immortal.step(self.note, f"caught {error.type_name}: {error.message}")
        return "done"

    @rpc(id=3)
    async def careless(self, text: str) -> None:
        await immortal.step(self.note, text)

    @rpc(id=4)
    async def ask(self, item: str) -> str:
        try:
            return str(await self.shelf.put(item))
        except (CallRefused, CalleeFailed) as error:
            return f"{type(error).__name__}: {error}"

    @rpc(id=5)
    async def forgetful(self) -> None:
        self.shelf.put("never")

    @rpc(id=6)
    async def raising(self) -> None:
        raise LookupError("nothing here")

    shelf = peer(Shelf, "shelf")


def ask(method_id: int, *arguments: Any, caller: str = "peer", number: int = 1) -> bytes:
    return call(method_id, caller, number, *arguments, rpc_type=RpcType.ASYNC)


def sent(life: Life) -> list[tuple[str, int, list[Any]]]:
    return [(to, method_id, list(arguments)) for to, method_id, arguments in life.output.calls]


def by_destination(life: Life) -> dict[str, list[list[Any]]]:
    """Only the order of those to one destination means something."""
    return {to: [arguments for other, _, arguments in sent(life) if other == to] for to, _, _ in sent(life)}


def test_a_call_that_raises_fails_alone() -> None:
    life = first_start_with_verdicts(Shelf, "shelf")
    life.give(logged(1, [call(1, "a"), call(1, "bad", 3), call(1, "b")]))
    assert life.dispatcher.instance.items == ["a", "b"]
    assert sent(life) == [("other", 1, ["a"]), ("other", 1, ["b"])]  # nothing of what the failed one had called
    (verdict,) = life.verdicts
    assert (verdict.sequence_id, verdict.message_index, verdict.kind) == (1, 1, VerdictKind.UNDONE)
    assert (verdict.type_name, verdict.text, verdict.method) == ("ValueError", "no bad here", "Shelf.put")
    assert verdict.caller is None
    assert verdict.message == call(1, "bad", 3)
    assert "no bad here" in verdict.trace
    assert verdict.is_dead_letter


def test_the_verdict_goes_before_what_follows_from_it() -> None:
    life = first_start_with_verdicts(Shelf)
    life.give(logged(1, [call(1, "bad"), call(1, "b")]))
    types = life.sent_types
    assert types.index(MessageType.VERDICT) < types.index(MessageType.STREAM_BATCH)


def test_a_replay_passes_it_over_and_makes_the_same_calls() -> None:
    records = [
        logged(1, [call(1, "a"), ask(1, "bad", caller="~web", number=4), call(1, "b")]),
        logged(2, [call(1, "bad"), ask(99), call(1, "c")]),
    ]
    life = first_start_with_verdicts(Shelf, "shelf")
    life.give(b"".join(records))
    again = recover(
        Shelf,
        life.output.blobs[0],
        initial_record(life.output.initial_message, "shelf"),
        *records,
        verdicts=life.verdicts,
    )
    assert again.dispatcher.instance.items == life.dispatcher.instance.items == ["a", "b", "c"]
    assert by_destination(again) == by_destination(life)
    assert again.verdicts == []


@pytest.mark.parametrize("failing", [0, 1, 2, 4, 5])
def test_a_record_of_several_batches(failing: int) -> None:
    calls = [call(1, "bad" if index == failing else str(index)) for index in range(6)]
    content = encode_record_time(START_TIME_NS + 1)
    for first, count in ((0, 2), (2, 1), (3, 3)):
        payload = b"".join(calls[first : first + count])
        content += payload if count == 1 else encode_batch(payload, count) + payload
    record = encode_record(COMMITTER_ID, 1, content)
    life = first_start_with_verdicts(Shelf, "shelf")
    life.give(record)
    assert [verdict.message_index for verdict in life.verdicts] == [failing]
    initial = initial_record(life.output.initial_message, "shelf")
    again = recover(Shelf, life.output.blobs[0], initial, record, verdicts=life.verdicts)
    left = [str(index) for index in range(6) if index != failing]
    assert again.dispatcher.instance.items == life.dispatcher.instance.items == left


def test_who_waits_is_told_how_it_failed() -> None:
    life = first_start_with_verdicts(Shelf, "shelf")
    life.give(logged(1, [ask(1, "bad"), ask(1, "bad", caller="~web", number=9), ask(1, "bad", caller="", number=7)]))
    failed = ["~failed", ["ValueError", "no bad here", "shelf record 1:0"], {}]
    assert sent(life)[0] == ("peer", 1, [1, *failed])
    assert sent(life)[1][:2] == ("~", 1)
    assert sent(life)[1][2][:3] == ["~web", 9, "~failed"]
    assert sent(life)[2][:2] == ("", 1)
    assert [verdict.caller for verdict in life.verdicts] == ["peer", "~web", ""]
    assert not any(verdict.is_dead_letter or verdict.message for verdict in life.verdicts)


def test_many_failures_among_many_calls() -> None:
    life = first_start_with_verdicts(Shelf)
    expected = []
    for sequence_id in range(1, 40):
        items = [f"{sequence_id}.{index}" if (sequence_id * index) % 7 else "bad" for index in range(11)]
        life.give(logged(sequence_id, [call(1, item) for item in items]))
        expected += [item for item in items if item != "bad"]
        if sequence_id % 10 == 0:
            life.give(TAKE)
    assert life.dispatcher.instance.items == expected
    assert [arguments[0] for _, _, arguments in sent(life)] == expected


def test_outputs_that_were_sent_before_are_not_sent_twice_however_often_it_is_rewound() -> None:
    """Each record is taken by the coordinator before the next: what is made once more was sent long ago."""
    life = first_start_with_verdicts(Shelf)
    for sequence_id, item in enumerate(["a", "b", "bad", "c", "bad", "bad", "d"], 1):
        life.give(logged(sequence_id, [call(1, item, 2), call(1, "bad"), call(1, f"{item}2")]))
    assert [arguments[0] for _, _, arguments in sent(life)] == life.dispatcher.instance.items


def test_an_on_primary_hook_keeps_the_object_that_it_knows() -> None:
    life = first_start_with_verdicts(Shelf)
    held = life.dispatcher.instance
    life.give(logged(1, [call(1, "a"), call(1, "bad"), call(1, "b")]))
    assert life.dispatcher.instance is held
    assert held.items == ["a", "b"]
    life.give(logged(2, [call(6, "c")]))
    assert held.items == ["a", "b", "c"]


def test_keep_leaves_the_state_as_the_handler_left_it() -> None:
    life = first_start_with_verdicts(Shelf)
    life.give(logged(1, [call(2, "a"), ask(2, "b")]))
    assert life.dispatcher.instance.items == ["a", "b"]
    assert [verdict.kind for verdict in life.verdicts] == [VerdictKind.KEPT] * 2
    assert [verdict.is_dead_letter for verdict in life.verdicts] == [True, False]
    assert sent(life)[-1][2][:2] == [1, "~failed"]
    again = recover(
        Shelf,
        life.output.blobs[0],
        initial_record(life.output.initial_message),
        logged(1, [call(2, "a"), ask(2, "b")]),
        verdicts=life.verdicts,
    )
    assert again.dispatcher.instance.items == ["a", "b"]  # it runs again, and fails again
    assert again.verdicts == []
    assert sent(again) == sent(life)


def test_stop_stops_the_app() -> None:
    life = first_start_with_verdicts(Shelf)
    with pytest.raises(HandlerError, match="stop here"):
        life.give(logged(1, [call(3)]))
    assert life.verdicts == []


def test_a_coordinator_that_keeps_no_verdicts_means_stop() -> None:
    with pytest.raises(HandlerError, match="no bad here"):
        first_start(Shelf).give(logged(1, [call(1, "bad")]))


def test_any_exception_can_be_declared() -> None:
    life = first_start_with_verdicts(Shelf)
    life.give(logged(1, [ask(4)]))
    assert sent(life) == [("peer", 4, [1, "Exception", ["x"], {}])]
    assert life.verdicts == []
    assert life.dispatcher.instance.items == ["anything"]


def test_a_result_that_is_not_what_it_says_is_the_callees_failure() -> None:
    life = first_start_with_verdicts(Shelf)
    life.give(logged(1, [ask(5), ask(1, "a", number=2)]))
    assert life.dispatcher.instance.items == ["a"]
    (to, _, (number, name, (type_name, text, _), _)), *_ = sent(life)
    assert (to, number, name, type_name) == ("peer", 1, "~failed", "TypeError")
    assert "Expected `int`, got `str`" in text


@pytest.mark.parametrize(
    ("message", "cause", "words"),
    [
        (call(99, 1), Cause.METHOD, "Shelf has no method 99 (it has: anything, arrive, push, put, strict, wrong)"),
        (call(1, 5), Cause.ARGUMENTS, "Shelf.put: parameter 'item': Expected `str`, got `int`"),
        (call(1, "a", "b"), Cause.ARGUMENTS, "Shelf.put: parameter 'times': Expected `int`, got `str`"),
        (call(1), Cause.ARGUMENTS, "Shelf.put takes 1 to 2 arguments (item, times), 0 came"),
        (call(3, 1), Cause.ARGUMENTS, "Shelf.strict takes 0 arguments (none), 1 came"),
        (encode_incoming_rpc(1, RpcType.FORK, b"\xc1"), Cause.ARGUMENTS, "can't be read"),
        (encode_incoming_rpc(1, RpcType.FORK, b""), Cause.ARGUMENTS, "can't be read"),
        (encode_incoming_rpc(1, 9, b"\x90"), Cause.UNREADABLE, "an RPC has type 9"),
        (encode_incoming_rpc(1, RpcType.FORK, b"\x90", 7), Cause.UNREADABLE, "an RPC's first byte is 7"),
        (encode_incoming_rpc(INITIAL_METHOD_ID, RpcType.FORK, b"\x90"), Cause.METHOD, "method -1 is the SDK's own"),
        (encode_incoming_rpc(CLOCK_METHOD_ID, RpcType.FORK, b"\x91\x01"), Cause.METHOD, "method -2 is the SDK's own"),
        (encode_incoming_rpc(EFFECT_METHOD_ID, RpcType.ASYNC, b"\x90"), Cause.METHOD, "method -3 is the SDK's own"),
        (encode_incoming_rpc(EFFECT_METHOD_ID, RpcType.IMPULSE, b"\x90"), Cause.UNUSABLE, "can't be read"),
        (encode_incoming_rpc(1, RpcType.ASYNC, b"\xc1", RpcKind.RAISED), Cause.UNUSABLE, "an answer that can't"),
        (encode_incoming_rpc(1, RpcType.ASYNC, b"\x91\xa1x", RpcKind.RETURNED_VALUE), Cause.UNUSABLE, "can't be"),
    ],
)
def test_what_can_not_be_delivered_is_refused_and_the_app_goes_on(message: bytes, cause: Cause, words: str) -> None:
    records = [logged(1, [call(1, "a"), message, call(1, "b")])]
    life = first_start_with_verdicts(Shelf)
    life.give(records[0])
    assert life.dispatcher.instance.items == ["a", "b"]
    (verdict,) = life.verdicts
    assert (verdict.kind, verdict.cause, verdict.message) == (VerdictKind.REFUSED, cause, message)
    assert words in verdict.text
    again = recover(
        Shelf,
        life.output.blobs[0],
        initial_record(life.output.initial_message),
        *records,
        verdicts=life.verdicts,
    )
    assert again.dispatcher.instance.items == ["a", "b"]
    assert again.verdicts == []


def test_who_waits_for_a_call_that_is_refused_is_told_why() -> None:
    life = first_start_with_verdicts(Shelf)
    life.give(logged(1, [ask(1, 5), ask(99, caller="~web", number=3)]))
    assert sent(life) == [
        ("peer", 1, [1, "~refused", ["Shelf.put: parameter 'item': Expected `str`, got `int`"], {}]),
        (
            "~",
            99,
            [
                "~web",
                3,
                "~refused",
                ["Shelf has no method 99 (it has: anything, arrive, push, put, strict, wrong)"],
                {},
            ],
        ),
    ]


class Later(Shelf, formerly=("Shelf",)):
    @rpc(id=99)
    def since(self, number: int) -> None:
        self.items.append(f"since {number}")


def test_what_was_refused_stays_so_when_code_that_would_take_it_is_deployed() -> None:
    records = [logged(1, [call(1, "a"), call(99, 1), call(1, "b")])]
    life = first_start_with_verdicts(Shelf)
    life.give(records[0])
    again = recover(
        Later,
        life.output.blobs[0],
        initial_record(life.output.initial_message),
        *records,
        verdicts=life.verdicts,
    )
    assert again.dispatcher.instance.items == ["a", "b"]


# --- async handlers ---------------------------------------------------------------------------------------------------


def test_a_step_that_raises_is_undone_and_its_handler_can_catch_it() -> None:
    life = first_start_with_verdicts(Async, "flow")
    life.give(logged(1, [ask(2, ["a", "bad", "b"])]))
    assert life.dispatcher.instance.log == ["a", "caught ValueError: no bad notes", "b"]
    assert sent(life) == [("peer", 2, [1, "done"])]
    (verdict,) = life.verdicts
    assert (verdict.kind, verdict.task, verdict.step) == (VerdictKind.UNDONE, 1, 2)
    assert not verdict.is_dead_letter


def test_a_step_that_raised_is_not_called_again_by_a_replay() -> None:
    record = logged(1, [ask(2, ["a", "bad", "b", "bad"])])
    life = first_start_with_verdicts(Async, "flow")
    life.give(record)
    again = recover(
        Async,
        life.output.blobs[0],
        initial_record(life.output.initial_message, "flow"),
        record,
        verdicts=life.verdicts,
    )
    assert len(life.verdicts) == 2
    assert again.dispatcher.instance.log == life.dispatcher.instance.log
    assert sent(again) == sent(life)
    assert again.verdicts == []


def test_an_async_handler_that_raises_ends_and_its_caller_is_told() -> None:
    life = first_start_with_verdicts(Async, "flow")
    life.give(logged(1, [ask(6), call(6), ask(2, ["a"], number=2)]))
    assert sent(life)[0] == ("peer", 6, [1, "~failed", ["LookupError", "nothing here", "flow record 1:0"], {}])
    assert sent(life)[1] == ("peer", 2, [2, "done"])
    told, letter = life.verdicts
    assert (told.kind, told.caller, told.is_dead_letter) == (VerdictKind.KEPT, "peer", False)
    assert (letter.is_dead_letter, letter.message) == (True, call(6))
    assert life.dispatcher.tasks.count == 0


def test_an_async_handler_that_does_not_catch_what_its_step_raised_fails_with_it() -> None:
    life = first_start_with_verdicts(Async, "flow")
    life.give(logged(1, [ask(3, "bad")]))
    assert life.dispatcher.instance.log == []
    ((_, _, (number, name, (type_name, text, _), _)),) = sent(life)
    assert (number, name, type_name) == (1, "~failed", "CalleeFailed")
    assert "Async.note failed (flow record 1:0): ValueError: no bad notes" in text


def test_what_is_never_awaited_fails_its_handler_alone() -> None:
    life = first_start_with_verdicts(Async)
    life.give(logged(1, [ask(5), ask(2, ["a"], number=2)]))
    assert sent(life)[0][2][1] == "~failed"
    assert "never awaited" in sent(life)[0][2][2][1]
    assert sent(life)[1] == ("peer", 2, [2, "done"])


@pytest.mark.parametrize(
    ("kind", "rest", "words"),
    [
        (RpcKind.RETURNED_VALUE, ("text",), "CalleeFailed: Shelf.put failed: ValidationError: what came does not fit"),
        (RpcKind.RAISED, ("Surprise", [1], {}), "CalleeFailed: Shelf.put failed: LookupError: what came does not fit"),
        (RpcKind.RAISED, ("~refused", ["no such method"], {}), "CallRefused: Shelf.put was refused: no such method"),
        (
            RpcKind.RAISED,
            ("~failed", ["ValueError", "no", "x record 1:2"], {}),
            "(x record 1:2): ValueError: no",
        ),
    ],
)
def test_an_answer_that_is_a_failure_is_raised_where_it_is_awaited(
    kind: RpcKind, rest: tuple[Any, ...], words: str
) -> None:
    life = first_start_with_verdicts(Async, "flow")
    life.give(logged(1, [ask(4, "x")]))
    life.give(logged(2, [answer(1, kind, 2, *rest)]))
    assert words in sent(life)[1][2][1]
    assert life.verdicts == []


def test_a_handler_that_waits_outlives_a_rewind() -> None:
    life = first_start_with_verdicts(Async, "flow")
    life.give(logged(1, [ask(4, "x")]))
    life.give(logged(2, [call(1, "a"), call(1, "bad"), call(1, "b")]))
    life.give(logged(3, [answer(1, RpcKind.RETURNED_VALUE, 2, 5)]))
    assert life.dispatcher.instance.log == ["a", "b"]
    assert sent(life) == [("shelf", 1, ["flow", 2, "x", 1]), ("peer", 4, [1, "5"])]


@pytest.mark.parametrize("kind", [VerdictKind.KILLED, VerdictKind.SKIPPED])
def test_who_waits_for_an_answer_that_is_passed_over_finds_that_it_failed(kind: VerdictKind) -> None:
    first = first_start_with_verdicts(Async, "flow")
    first.give(logged(1, [ask(4, "x")]))
    records = [logged(1, [ask(4, "x")]), logged(2, [answer(1, RpcKind.RETURNED_VALUE, 2, 5), call(1, "a")])]
    verdict = Verdict(2, 0, kind, "ProcessEnded" if kind is VerdictKind.KILLED else "", "it ended the process")
    initial = initial_record(first.output.initial_message, "flow")
    life = recover(Async, first.output.blobs[0], initial, *records, verdicts=[verdict])
    assert life.dispatcher.tasks.count == 0
    name = "ProcessEnded" if kind is VerdictKind.KILLED else "Skipped"
    (_, _, (number, text)) = sent(life)[-1]
    assert (number, text) == (1, f"CalleeFailed: Shelf.put failed (flow record 2:0): {name}: it ended the process")
    assert life.dispatcher.instance.log == ["a"]


class Sleeper(Immortal):
    log: list[str]

    def __init__(self) -> None:
        self.log = []

    @rpc(id=1)
    def note(self, text: str) -> None:
        self.log.append(text)

    @rpc(id=2)
    async def nap(self) -> str:
        try:
            await immortal.sleep(timedelta(seconds=5))
        except CalleeFailed as error:
            return error.type_name
        return "slept"


def test_a_timer_that_kills_is_not_told_again_and_again() -> None:
    first = first_start_with_verdicts(Sleeper, "sleeper")
    time_ns = START_TIME_NS + 20_000_000_000
    records = [logged(1, [ask(2)]), logged(2, [call(CLOCK_METHOD_ID, time_ns, rpc_type=RpcType.IMPULSE)])]
    verdict = Verdict(2, 0, VerdictKind.KILLED, "ProcessEnded", "it ended the process")
    initial = initial_record(first.output.initial_message, "sleeper")
    life = recover(Sleeper, first.output.blobs[0], initial, *records, verdicts=[verdict])
    assert sent(life) == [("peer", 2, [1, "ProcessEnded"])]
    assert life.dispatcher.next_due_ns is None


# --- copies, and doing without one ------------------------------------------------------------------------------------


class Heavy(Shelf):
    ballast: bytes

    def __init__(self) -> None:
        super().__init__()
        self.ballast = bytes(2 << 20)


def test_a_large_state_is_recovered_from_its_checkpoint_the_first_time() -> None:
    life = first_start_with_verdicts(Heavy)
    with pytest.raises(RecoveryNeeded, match="record 1, message 1"):
        life.give(logged(1, [call(1, "a"), call(1, "bad"), call(1, "b")]))
    for chunk in life.dispatcher.data_to_send():
        life.output.receive_data(bytes(chunk))
    assert [verdict.kind for verdict in life.verdicts] == [VerdictKind.UNDONE]
    assert sent(life) == []  # what the first had called is made again by the recovery
    again = recover(
        Heavy,
        life.output.blobs[0],
        initial_record(life.output.initial_message),
        logged(1, [call(1, "a"), call(1, "bad"), call(1, "b")]),
        verdicts=life.verdicts,
        keeps_large_copies=True,
    )
    again.give(logged(2, [call(1, "c"), call(1, "bad"), call(1, "d")]))  # and from then on a copy is kept
    assert again.dispatcher.instance.items == ["a", "b", "c", "d"]
    assert [arguments[0] for _, _, arguments in sent(again)] == ["a", "b", "c", "d"]


def test_a_method_that_fails_again_and_again_is_not_called_any_more() -> None:
    life = first_start_with_verdicts(Shelf)
    for sequence_id in range(1, FAILED_IN_A_ROW_MAX + 1):
        life.give(logged(sequence_id, [call(1, "bad"), call(6, "fine")]))
    life.give(logged(FAILED_IN_A_ROW_MAX + 1, [call(1, "a"), call(6, "fine"), call(1, "bad")]))
    causes = [verdict.cause for verdict in life.verdicts]
    assert causes == [Cause.NONE] * FAILED_IN_A_ROW_MAX + [Cause.TRIPPED] * 2
    assert life.dispatcher.instance.items == ["fine"] * (FAILED_IN_A_ROW_MAX + 1)
    assert "Shelf.put has failed so often in a row" in life.verdicts[-1].text


def test_a_success_in_between_begins_the_count_anew() -> None:
    life = first_start_with_verdicts(Shelf)
    for sequence_id in range(1, FAILED_IN_A_ROW_MAX + 20):
        life.give(logged(sequence_id, [call(1, "bad"), call(1, "fine")]))
    assert {verdict.cause for verdict in life.verdicts} == {Cause.NONE}


def test_what_was_called_before_it_was_called_no_more_is_called_by_a_rewind() -> None:
    life = first_start_with_verdicts(Shelf)
    life.give(logged(1, [call(1, "first")]))
    for sequence_id in range(2, FAILED_IN_A_ROW_MAX + 3):
        life.give(logged(sequence_id, [call(1, "bad")]))
    assert life.verdicts[-1].cause is Cause.TRIPPED
    life.give(logged(FAILED_IN_A_ROW_MAX + 3, [ask(5)]))  # another method fails, and the app is rewound
    assert life.dispatcher.instance.items == ["first"]


# --- careful runs -----------------------------------------------------------------------------------------------------


def careful(last_sequence_id: int, suspect: int = -1) -> bytes:
    return encode_record(COMMITTER_ID, CONTROL_SEQUENCE_ID, encode_careful(Careful(last_sequence_id, suspect)))


def test_a_careful_app_says_what_it_is_about_to_handle() -> None:
    life = first_start_with_verdicts(Shelf)
    life.give(careful(3, 2))
    for sequence_id in range(1, 5):
        life.give(logged(sequence_id, [call(1, "a"), ask(1, "b", caller="shop")]))
    notes = [decode_handling(one.data) for one in life.output.messages if one.message_type == MessageType.HANDLING]
    assert [(note.sequence_id, note.message_index) for note in notes] == [
        (1, -1),
        (2, -1),
        (2, 0),
        (2, 1),
        (3, -1),
        (-1, -1),
    ]
    assert (notes[3].method, notes[3].caller, notes[3].message) == ("Shelf.put", "shop", ask(1, "b", caller="shop"))
    assert life.dispatcher.instance.items == ["a", "b"] * 4


def test_what_is_said_is_on_its_way_before_the_handler_begins() -> None:
    order: list[str] = []

    class Watched(Immortal):
        @rpc(id=1)
        def handle(self) -> None:
            order.append("handled")

    life = first_start_with_verdicts(Watched)
    life.give(careful(1, 1))
    life.dispatcher.receive_data(logged(1, [call(1)]))
    while (event := life.dispatcher.next_event()) is not None:
        order.append(type(event).__name__)
    assert order[:3] == ["Flush", "Flush", "handled"]


def test_that_the_careful_records_are_over_is_on_its_way_before_another_begins() -> None:
    # Found by the simulation: the app died in the next record, and the last message of the one before was blamed.
    order: list[str] = []

    class Watched(Immortal):
        @rpc(id=1)
        def handle(self) -> None:
            order.append("handled")

    life = first_start_with_verdicts(Watched)
    life.give(careful(1, 1))
    life.dispatcher.receive_data(logged(1, [call(1)]) + logged(2, [call(1)]))
    while (event := life.dispatcher.next_event()) is not None:
        said = b"".join(map(bytes, life.dispatcher.data_to_send()))
        order.append(f"{type(event).__name__} {'over' if encode_handling(Handling(-1)) in said else 'next'}")
    assert order[:5] == ["Flush next", "Flush next", "handled", "Flush over", "handled"]


@upgrades(Shelf, retry_refused=True)
class Shelf2(Immortal):
    items: list[str]

    @classmethod
    def upgrade(cls, old: Shelf) -> Shelf2:
        new = cls()
        new.items = old.items
        return new

    @rpc(id=99)
    def since(self, number: int) -> None:
        if number < 0:
            raise ValueError(number)
        self.items.append(f"since {number}")


def test_an_upgrade_asks_for_what_was_refused_once_it_is_confirmed() -> None:
    first = first_start_with_verdicts(Shelf)
    life = Life.of(Shelf2)
    life.give(checkpoint_record(first.output.blobs[0]) + verdicts_record())
    life.give(initial_record(first.output.initial_message) + logged(1, [call(1, "a"), call(99, 1)]))
    life.give(upgrade_record(2) + TAKE)
    assert life.sent_types[-3:] == [MessageType.CHECKPOINT, MessageType.CHECKPOINT, MessageType.RETRY_REFUSED]
    life.give(logged(2, [call(99, 1), call(99, -1), call(99, 2)]))
    assert life.dispatcher.instance.items == ["a", "since 1", "since 2"]


def test_a_what_if_of_an_upgrade_undoes_too() -> None:
    first = first_start_with_verdicts(Shelf)
    life = Life.of(Shelf2)
    life.give(checkpoint_record(first.output.blobs[0]) + verdicts_record())
    life.give(upgrade_record(2, MessageType.UPGRADE_SERVICE) + initial_record(first.output.initial_message))
    life.give(logged(1, [call(99, 1), call(99, -1), call(99, 2)]))
    assert life.dispatcher.instance.items == ["since 1", "since 2"]


# --- what the class says ----------------------------------------------------------------------------------------------


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(DefinitionError, match="on_error='ignore': 'undo', 'keep' or 'stop' were expected"):

        class Ignoring(Immortal, on_error="ignore"):  # type: ignore[call-arg, arg-type]
            pass

    with pytest.raises(DefinitionError, match=r"handle: @rpc: on_error='x'"):

        class Wrong(Immortal):
            @rpc(on_error="x")  # type: ignore[call-overload]
            def handle(self) -> None: ...

    with pytest.raises(DefinitionError, match="handler_time_limit=5: a timedelta was expected"):

        class Limited(Immortal, handler_time_limit=5):  # type: ignore[arg-type]
            pass


class Stopping(Immortal, on_error="stop", handler_time_limit=timedelta(seconds=3)):
    @rpc(id=1)
    def fail(self) -> None:
        raise ValueError("stop")

    @rpc(id=2, on_error="undo")
    def undo(self) -> None:
        raise ValueError("undo")


class Inheriting(Stopping):
    pass


@pytest.mark.parametrize("app", [Stopping, Inheriting])
def test_a_handlers_word_goes_before_the_class_s(app: type) -> None:
    life = first_start_with_verdicts(app)
    life.give(logged(1, [call(2)]))
    with pytest.raises(HandlerError, match="stop"):
        life.give(logged(2, [call(1)]))
    assert life.dispatcher.definition.handler_time_limit == timedelta(seconds=3)


class Beginning(Immortal):
    @initial
    def begin(self) -> None:
        raise ValueError("not even begun")


def test_a_first_start_that_fails_stops() -> None:
    with pytest.raises(HandlerError, match="not even begun"):
        first_start_with_verdicts(Beginning)


@pytest.mark.parametrize("is_known", [True, False])
def test_an_app_that_becomes_primary_tells_what_no_other_app_has(
    capsys: pytest.CaptureFixture[str], is_known: bool
) -> None:
    """One that follows comes to the same failures as the one that it follows."""
    life = first_start_with_verdicts(Shelf, "shelf")
    again = Life.of(Shelf)
    again.dispatcher.context.reporter = FailureReporter("Shelf")
    record = logged(1, [call(1, "bad")])
    life.give(record)
    known = verdicts_record() + initial_record(life.output.initial_message, "shelf")
    again.give(checkpoint_record(life.output.blobs[0]) + known + record)
    if is_known:
        again.give(verdicts_record(*life.verdicts))
    assert capsys.readouterr().err == ""
    again.give(TAKE_FIRST)
    assert capsys.readouterr().err.count("Shelf.put raised ValueError: no bad here") == (not is_known)


class Desk(Immortal):
    names: list[str]

    def __init__(self) -> None:
        self.names = []

    @rpc(id=1, raises=[LookupError])
    async def look(self, name: str, password: str) -> str:
        if name == "declared":
            raise LookupError(name)
        return await immortal.step(self.step, name)

    @rpc(id=2)
    def step(self, name: str) -> str:
        self.names.append(name)
        raise ValueError(name)

    @rpc(id=3, raises=[LookupError])
    def find(self, where: dict[str, str]) -> None:
        raise LookupError(str(len(where)))


def test_each_failure_is_told_of_once_and_in_no_replay(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever waits: an async handler's, a step's, and at a lower level what is declared."""
    records = (
        logged(1, [ask(1, "a", "hunter2"), call(1, "declared", "hunter2")]),
        logged(2, [call(3, {"api_key": "hunter2", "x": "y"}), call(2, "later")]),
    )
    life = first_start_with_verdicts(Desk, "desk")
    life.dispatcher.context.reporter = FailureReporter("Desk")
    for record in records:
        life.give(record)
    told = capsys.readouterr().err
    assert re.findall(r" (error|info) +desk> (\S+ raised \w+).* arguments=(.*) caller=(.*?) record=(\S+)", told) == [
        ("error", "Desk.step raised ValueError", "('a')", '"the handler that awaits it"', "1:0"),
        ("error", "Desk.look raised CalleeFailed", """"('a', ***)\"""", "peer", "1:0"),
        ("info", "Desk.look raised LookupError", """"('declared', ***)\"""", '"nobody waits"', "1:1"),
        ("info", "Desk.find raised LookupError", """"({'api_key': ***, 'x': 'y'})\"""", '"nobody waits"', "2:0"),
        ("error", "Desk.step raised ValueError", "('later')", '"nobody waits"', "2:1"),
    ]
    assert "hunter2" not in told
    assert told.count("Traceback") == 3
    again = Life.of(Desk)
    again.dispatcher.context.reporter = FailureReporter("Desk")
    known = verdicts_record(*life.verdicts) + initial_record(life.output.initial_message, "desk")
    again.give(checkpoint_record(life.output.blobs[0]) + known + b"".join(records) + TAKE_FIRST)
    assert again.dispatcher.is_primary
    assert capsys.readouterr().err == ""


def test_what_differs_from_run_to_run_is_left_out_of_the_text() -> None:
    class Addressed(Immortal):
        @rpc(id=1)
        def fail(self) -> None:
            raise ValueError(object())

    life = first_start_with_verdicts(Addressed)
    life.give(logged(1, [call(1)]))
    assert life.verdicts[0].text == "<object object at 0x...>"


def test_a_goodbye_is_still_heard() -> None:
    life = first_start_with_verdicts(Shelf)
    life.give(logged(1, [call(1, "bad")]) + control(MessageType.GOODBYE, b"x"))
    assert type(life.events[-1]).__name__ == "Goodbye"


class Open(Immortal, share_tracebacks=True):
    @rpc(id=1)
    def fail(self) -> None:
        raise ValueError("in the open")

    @rpc(id=2)
    async def fail_later(self) -> None:
        raise ValueError("later")


@pytest.mark.parametrize(("method_id", "words"), [(1, "in the open"), (2, "later")])
def test_callers_see_a_traceback_where_the_class_shares_it(method_id: int, words: str) -> None:
    life = first_start_with_verdicts(Open)
    life.give(logged(1, [ask(method_id)]))
    ((_, _, (_, name, (type_name, text, _), _)),) = sent(life)
    assert (name, type_name) == ("~failed", "ValueError")
    assert text.startswith(f"{words}\n")
    assert f'raise ValueError("{words}")' in text
