"""Queries that are not logged, as the core has them: who is asked when, what is told when, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.client.queries import CONCURRENCY_MIN
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.permissions import Permission
from immortal.protocol.client_frames import (
    ClientCode,
    ClientFrame,
    ClientFrameType,
    Reply,
    ReplyKind,
    decode_replies,
    encode_request,
)
from immortal.protocol.extensions import QUERIES, AppDescription, Hello, encode_app_description, encode_hello
from immortal.protocol.messages import MessageType, decode_messages
from immortal.protocol.queries import QueryAnswer, QueryQuestion, decode_query, encode_query_answer
from immortal.protocol.verdicts import Verdict, VerdictKind, encode_verdict
from tests.helpers.clients import call, request
from tests.helpers.core import EXTENSIONS, NOW_NS, Driven, checkpoint, first_start, records, rpc

DESCRIPTION = AppDescription(1, {("", 3): "Counter.add", ("", 4): "Counter.total", (QUERIES, 4): "Counter.total"})
NO_ARGUMENTS = b"\x90"


def working(extensions: frozenset[int] = EXTENSIONS, **more: Any) -> Driven:
    driven = Driven(**more)
    driven.connect(encode_hello(Hello(extensions, "test")) + encode_app_description(DESCRIPTION))
    driven.data(first_start())
    driven.settle()
    return driven


def query(
    token: object, number: int, *, method_id: int = 4, client_id: str = "c", caller: str = "", **fields: Any
) -> ev.ClientFrameReceived:
    values: dict[str, Any] = {"count": 1, "payload": encode_request(method_id, NO_ARGUMENTS)} | fields
    frame = ClientFrame(ClientFrameType.QUERY, client_id, "a", number=number, **values)
    return ev.ClientFrameReceived(token, frame, caller)


def asked(driven: Driven) -> list[QueryQuestion]:
    """What the app was asked since the last look."""
    found = []
    for record in records(bytes(driven.app_bytes)):
        for message_type, start, end in decode_messages(record.content):
            if message_type == MessageType.QUERY_ASKED:
                found.append(decode_query(record.content[start:end]))
    driven.app_bytes.clear()
    return found


def answer(question: QueryQuestion, value: Any = 5, **more: Any) -> bytes:
    return encode_query_answer(QueryAnswer(question.ticket, ReplyKind.VALUE, msgspec.msgpack.encode(value), **more))


def told(effects: list[ef.Effect]) -> list[tuple[object, int, Any]]:
    """(token, number of the query, its value or why it was refused)."""
    found: list[tuple[object, int, Any]] = []
    for effect in effects:
        if isinstance(effect, ef.ReplyToClient):
            frame = effect.frame
            what: Any = frame.code
            if frame.frame_type is ClientFrameType.ANSWER:
                (reply,) = decode_replies(frame.payload, frame.count)
                assert isinstance(reply, Reply)
                assert reply.number == frame.number
                what = msgspec.msgpack.decode(reply.value)
            found.append((effect.token, frame.number, what))
    return found


def test_a_query_goes_to_the_app_and_its_answer_to_who_asked_and_nothing_to_the_log() -> None:
    driven = working()
    before = driven.machine.view.status(NOW_NS)["sequence_id"]
    driven.handle(query("t", 7))
    assert driven.machine.view.status(NOW_NS)["clients"]["open_queries"] == 1  # type: ignore[index]
    (question,) = asked(driven)
    assert (question.method_id, question.arguments, question.time_ns) == (4, NO_ARGUMENTS, NOW_NS)
    assert told(driven.data(answer(question))) == [("t", 7, 5)]
    assert not driven.of(ef.Commit)
    assert driven.machine.view.status(NOW_NS)["sequence_id"] == before


def test_one_that_is_asked_twice_is_answered_once_where_it_was_asked_last() -> None:
    driven = working()
    driven.handle(query("t", 7))
    driven.handle(query("u", 7))
    (question,) = asked(driven)
    assert told(driven.data(answer(question))) == [("u", 7, 5)]
    driven.handle(query("u", 7))
    assert len(asked(driven)) == 1, "its answer may have been lost"


def test_an_answer_behind_a_verdict_waits_until_that_is_durable() -> None:
    """Before it is, a crash would leave the next app free to come to another verdict, and to another state."""
    driven = working()
    driven.handle(request("t", 1, call(7)))
    driven.auto = False
    driven.handle(query("t", 1))
    (question,) = asked(driven)
    verdict = Verdict(1, 0, VerdictKind.UNDONE, "ValueError", "no", message=rpc(1), trace="Traceback")
    assert told(driven.data(encode_verdict(verdict) + answer(question))) == []
    assert told(driven.disk_all()) == [("t", 1, 5)]
    driven.handle(query("t", 2))
    (question,) = asked(driven)
    assert told(driven.data(answer(question))) == [("t", 2, 5)], "nothing is on its way to the log any more"


def test_what_is_not_durable_is_not_seen() -> None:
    """A request that is on its way to the disk is behind the query that comes then."""
    driven = working()
    driven.auto = False
    driven.handle(request("t", 1, call(7)))
    driven.handle(query("t", 1))
    (question,) = asked(driven)
    assert told(driven.data(answer(question))) == [("t", 1, 5)]
    assert driven.jobs, "the request is not durable yet, and the app has nothing of it"


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.REPLAYING, Phase.BECOMING_PRIMARY])
def test_an_app_that_does_not_work_is_not_asked(phase: Phase) -> None:
    driven = working()
    driven.close()
    if phase is not Phase.WAITING:  # one that has not said Hello gets no record
        driven.connect(encode_hello(Hello(EXTENSIONS, "test")) if phase is Phase.BECOMING_PRIMARY else b"")
    assert driven.phase is phase
    driven.forget()
    assert told(driven.handle(query("t", 7))) == [("t", 7, ClientCode.NOT_READY)]
    assert asked(driven) == []


def test_one_that_is_paused_answers_as_it_is() -> None:
    driven = working()
    driven.handle(ev.InstancePaused("ann", "p"))
    driven.handle(request("t", 1, call(7)))
    driven.handle(query("t", 7))
    (question,) = asked(driven)
    assert told(driven.data(answer(question))) == [("t", 7, 5)]


def test_one_that_takes_a_checkpoint_answers_behind_it() -> None:
    driven = working()
    driven.handle(ev.CheckpointRequested())
    driven.handle(query("t", 7))
    (question,) = asked(driven)
    assert told(driven.data(checkpoint(b"state two") + answer(question))) == [("t", 7, 5)]


def test_one_that_stops_refuses() -> None:
    driven = working()
    driven.handle(ev.StopRequested())
    assert told(driven.handle(query("t", 7))) == [("t", 7, ClientCode.NOT_READY)]


def test_an_app_that_goes_leaves_nobody_waiting() -> None:
    driven = working(limits=Limits(queries_at_app_max=1))
    driven.handle(query("t", 1), query("t", 2))
    (question,) = asked(driven)
    refused = told(driven.close())
    assert refused == [("t", 1, ClientCode.NOT_READY), ("t", 2, ClientCode.NOT_READY)]
    driven.recover()
    assert asked(driven) == [], "they are asked again by those who still wait"
    driven.data(answer(question))
    assert any("which" in text or "expected" in text for _, text in driven.reports), "of an app before this one"


def test_an_app_that_knows_no_such_queries_gets_logged_calls() -> None:
    driven = working(EXTENSIONS - {MessageType.QUERY_ASKED})
    assert told(driven.handle(query("t", 7))) == [("t", 7, ClientCode.LOGGED_ONLY)]
    assert asked(driven) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method_id": 3}, "'add' of 'a' is no query"),
        ({"method_id": 9}, "'method 9' of 'a' is no query"),
        ({"payload": encode_request(4, NO_ARGUMENTS) * 2}, "exactly one call"),
        ({"payload": b"\x00"}, "at least 1 was expected"),
        ({"payload": encode_request(-2, NO_ARGUMENTS)}, "negative ones"),
        ({"payload": encode_request(4, b"\x05")}, "no MessagePack array"),
    ],
)
def test_what_is_no_query_is_refused(changes: dict[str, Any], reason: str) -> None:
    driven = working()
    effects = driven.handle(query("t", 7, **changes))
    assert told(effects) == [("t", 7, ClientCode.MALFORMED)]
    (said,) = driven.of(ef.ReplyToClient)
    assert reason in said.frame.reason
    assert asked(driven) == []


def test_permissions_are_those_of_the_call() -> None:
    given = {"reports": Permission(frozenset({QUERIES})), "shop": Permission(frozenset({"add"}))}
    driven = working(permissions=given)
    assert told(driven.handle(query("t", 7, client_id="s", caller="shop"))) == [("t", 7, ClientCode.MALFORMED)]
    (said,) = driven.of(ef.ReplyToClient)
    assert said.frame.reason == "'shop' may not call 'total' of 'a'"
    assert driven.machine.view.forbidden == {"shop": 1}
    driven.handle(query("t", 8, client_id="r", caller="reports"))
    assert len(asked(driven)) == 1


def test_a_rate_and_a_limit_of_open_calls_count_queries() -> None:
    driven = working(permissions={"fast": Permission(rate=4), "many": Permission(concurrent=1)})
    codes = [told(driven.handle(query("t", number, caller="fast", client_id="f"))) for number in range(1, 7)]
    assert codes[:4] == [[]] * 4
    assert codes[4:] == [[("t", 5, ClientCode.BUSY)], [("t", 6, ClientCode.BUSY)]]
    assert told(driven.handle(query("t", 1, caller="many", client_id="m"))) == []
    assert told(driven.handle(query("t", 2, caller="many", client_id="m"))) == [("t", 2, ClientCode.BUSY)]


def test_a_flood_has_a_limit_and_the_others_have_their_turn() -> None:
    driven = working(limits=Limits(queries_at_app_max=1, caller_queries_max=3, queries_open_max=5))
    flood = [query("t", number, client_id="flood") for number in range(1, 5)]
    assert told(driven.handle(*flood)) == [("t", 4, ClientCode.BUSY)]
    assert told(driven.handle(query("u", 1, client_id="one"), query("v", 1, client_id="other"))) == []
    assert told(driven.handle(query("w", 1, client_id="late"))) == [("w", 1, ClientCode.BUSY)]
    order = []
    while questions := asked(driven):
        (question,) = questions  # no more than one at the app
        order += [token for token, _, _ in told(driven.data(answer(question)))]
    assert order == ["t", "t", "u", "v", "t"]
    assert told(driven.handle(query("w", 1, client_id="late"))) == []


def test_an_app_that_answers_soon_is_asked_more_at_once() -> None:
    driven = working(limits=Limits(caller_queries_max=1000))
    driven.handle(*(query("t", number) for number in range(1, 301)))
    questions, rooms = asked(driven), []
    assert len(questions) == CONCURRENCY_MIN
    for took_ms in (1, 1, 1, 1, 6, 1):
        driven.now_ns += took_ms * 1_000_000
        for question in questions:
            driven.data(answer(question))
        questions = asked(driven)
        rooms.append(len(questions))
    assert rooms[:4] == sorted(rooms[:4])
    assert rooms[3] == Limits().queries_at_app_max
    assert rooms[4] == CONCURRENCY_MIN, "a record that comes is not to wait for many that take long"
    assert rooms[5] > CONCURRENCY_MIN


def test_one_after_the_other_makes_no_room_for_a_burst() -> None:
    driven = working()
    for number in range(1, 50):
        driven.handle(query("t", number))
        (question,) = asked(driven)
        driven.data(answer(question))
    driven.handle(*(query("t", number) for number in range(50, 60)))
    assert len(asked(driven)) == CONCURRENCY_MIN


def test_one_that_has_changed_the_state_is_not_asked_again_for_a_while() -> None:
    """Each time costs the app a replay."""
    driven = working()
    driven.handle(query("t", 1))
    (question,) = asked(driven)
    assert told(driven.data(answer(question, changed=True))) == [("t", 1, 5)]
    assert any("Counter.total" in text or "total" in text for _, text in driven.reports)
    assert told(driven.handle(query("t", 2))) == [("t", 2, ClientCode.MALFORMED)]
    driven.now_ns += Limits().query_barred_ns + 1
    driven.handle(query("t", 3))
    assert len(asked(driven)) == 1


def test_an_answer_that_nobody_asked_for_breaks_the_protocol() -> None:
    driven = working()
    driven.data(answer(QueryQuestion(5, 4, b"", 0)))
    assert driven.of(ef.CloseApp)
    assert any("QueryAnswered (94)" in text for _, text in driven.reports)
