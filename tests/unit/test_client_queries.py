"""A client's queries that are not logged, frame by frame, with a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from immortal.appsdk.client.connection import BUSY_S, QUERIES_SENT_MAX, QUERY_POLL_S
from immortal.appsdk.client.errors import CallRefused, ClientClosed
from immortal.appsdk.client.session import Call
from immortal.protocol.client_frames import ClientCode, ClientFrame, Reply, ReplyKind, encode_replies
from tests.unit.test_client_connection import T, Talk, opened

FIVE = Reply(1, ReplyKind.VALUE, b"\x05")


def ask(talk: Talk, method: int | str = 4) -> Call:
    made = Call(method, b"\x90", lambda call: None)
    talk.connection.query(made)
    return made


def asked(talk: Talk) -> list[ClientFrame]:
    return [frame for frame in talk.sent if frame.frame_type is T.QUERY]


def answer(talk: Talk, number: int, **fields: Any) -> None:
    reply = Reply(number, ReplyKind.VALUE, b"\x05")
    talk.say(T.ANSWER, number=number, count=1, payload=encode_replies((reply,)), **fields)


def refuse(talk: Talk, number: int, code: ClientCode) -> None:
    talk.say(T.REFUSED, number=number, code=code, reason="so")


def test_each_is_a_frame_of_its_own_and_has_a_number_of_its_own() -> None:
    talk = opened()
    calls = [ask(talk), ask(talk), talk.call()]
    frames = talk.sent
    assert [(frame.frame_type, frame.number) for frame in frames] == [(T.REQUEST, 1), (T.QUERY, 1), (T.QUERY, 2)]
    answer(talk, 2)
    answer(talk, 1)
    answer(talk, 1)
    assert [call.outcome and call.outcome.number for call in calls[:2]] == [1, 2]  # type: ignore[union-attr]
    assert calls[2].outcome is None


def test_one_that_is_not_answered_is_asked_again_and_a_ping_says_whether_there_is_somebody() -> None:
    talk = opened()
    call = ask(talk)
    assert [frame.number for frame in asked(talk)] == [1]
    assert talk.types == []
    talk.now_s += QUERY_POLL_S
    assert talk.connection.next_deadline_s() <= talk.now_s
    assert talk.types == ["PING", "QUERY"]
    answer(talk, 1)
    assert call.outcome == FIVE
    talk.now_s += QUERY_POLL_S
    assert talk.types == []


@pytest.mark.parametrize("code", [ClientCode.BUSY, ClientCode.NOT_READY])
def test_one_that_can_not_be_asked_now_is_asked_again_and_nothing_else_suffers(code: ClientCode) -> None:
    talk = opened()
    call = ask(talk)
    assert len(asked(talk)) == 1
    refuse(talk, 1, code)
    assert (call.outcome, talk.connection.is_talking, talk.connection.problem) == (None, True, "so")
    assert asked(talk) == []
    talk.now_s += BUSY_S
    assert [frame.number for frame in asked(talk)] == [1]
    answer(talk, 1)
    assert call.outcome == FIVE


@pytest.mark.parametrize("code", [ClientCode.MALFORMED, ClientCode.NOT_YOURS])
def test_one_that_can_never_be_asked_fails(code: ClientCode) -> None:
    talk = opened()
    call, plain = ask(talk), talk.call()
    assert len(talk.sent) == 2
    refuse(talk, 1, code)
    assert isinstance(call.outcome, CallRefused)
    assert plain.outcome is None, "a refusal with a number is of a query"


def test_an_app_that_takes_none_gets_a_logged_call() -> None:
    talk = opened()
    call, other = ask(talk), ask(talk)
    assert len(asked(talk)) == 2
    refuse(talk, 1, ClientCode.LOGGED_ONLY)
    assert talk.types == ["REQUEST"]
    talk.reply(FIVE)
    answer(talk, 2)
    assert (call.outcome, other.outcome and other.outcome.number) == (FIVE, 2)  # type: ignore[union-attr]


def test_names_of_queries() -> None:
    talk = opened()
    talk.welcome(methods={3: "A.add", 4: "A.total"}, queries=[4])
    query, no_query = ask(talk, "@query.total"), ask(talk, "@query.add")
    assert len(asked(talk)) == 1
    assert query.method == 4
    assert "'add' of 'a' is no query" in str(no_query.outcome)


def test_another_life_of_the_instance_is_asked_anew() -> None:
    talk = opened()
    ask(talk)
    assert len(asked(talk)) == 1
    talk.connection.reopened(talk.now_s)
    assert talk.types == ["HELLO"]
    talk.welcome()
    assert [frame.number for frame in asked(talk)] == [1]


def test_who_waits_no_more_asks_no_more() -> None:
    talk = opened()
    sent, waiting = ask(talk), ask(talk, "@query.unknown")
    assert len(asked(talk)) == 1
    for call in (sent, waiting):
        talk.connection.withdraw(call)
    talk.now_s += 10 * QUERY_POLL_S
    assert "QUERY" not in talk.types
    answer(talk, 1)
    assert sent.outcome is None


def test_as_many_are_sent_as_an_instance_takes_of_a_caller() -> None:
    talk = opened()
    calls = [ask(talk) for _ in range(QUERIES_SENT_MAX + 5)]
    assert len(asked(talk)) == QUERIES_SENT_MAX
    answer(talk, 1)
    assert [frame.number for frame in asked(talk)] == [QUERIES_SENT_MAX + 1]
    talk.connection.close(ClientClosed("closed"))
    assert all(call.outcome is not None for call in calls)
