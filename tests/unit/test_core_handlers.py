"""Questions about handlers that wait, and orders to them, as the core has them: what is asked when, and answered."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import AuditEntry
from immortal.coordinator.core.life_cycle.feeding import OPEN_MAX
from immortal.protocol.extensions import Hello, encode_hello
from immortal.protocol.messages import MessageType, decode_messages
from immortal.protocol.system_methods import (
    HandlersAnswer,
    HandlersQuestion,
    Order,
    decode_handlers_question,
    encode_handlers_answer,
    encode_order,
)
from tests.helpers.core import EXTENSIONS, NOW_NS, Driven, arguments, first_start, records
from tests.unit.test_core_verdicts import answers, audit

ORDER = Order("cancel", 5, "no stock", "ann")


def working(extensions: frozenset[int] = EXTENSIONS) -> Driven:
    driven = Driven()
    driven.connect(encode_hello(Hello(extensions, "test")))
    driven.data(first_start())
    driven.settle()
    driven.forget()
    driven.app_bytes.clear()
    return driven


def asked(driven: Driven) -> list[HandlersQuestion]:
    """The questions that the app was sent."""
    found = []
    for record in records(bytes(driven.app_bytes)):
        for message_type, start, end in decode_messages(record.content):
            if message_type == MessageType.HANDLERS_ASKED:
                found.append(decode_handlers_question(record.content[start:end]))
    return found


def test_a_question_goes_to_the_app_and_its_answer_to_who_asked() -> None:
    driven = working()
    driven.handle(ev.HandlersAsked(0, "one"), ev.HandlersAsked(3, "other"))
    first, second = asked(driven)
    assert (first.task, first.sequence_id) == (0, -1)
    assert (second.task, second.sequence_id) == (3, -1)
    driven.data(encode_handlers_answer(HandlersAnswer(second.ticket, {"handler": None})))
    driven.data(encode_handlers_answer(HandlersAnswer(first.ticket, {"count": 0})))
    assert answers(driven) == [("other", {"handler": None}), ("one", {"count": 0})]


def test_a_wish_to_try_an_effect_now_is_a_question_and_not_logged() -> None:
    driven = working()
    driven.handle(ev.HandlersAsked(3, "one", retries=True))
    (question,) = asked(driven)
    assert (question.task, question.retries) == (3, True)
    assert not driven.of(ef.Commit)
    driven.data(encode_handlers_answer(HandlersAnswer(question.ticket, {"retried": 1})))
    assert answers(driven) == [("one", {"retried": 1})]


def test_an_order_is_logged_and_asked_about_behind_its_record() -> None:
    driven = working()
    driven.auto = False
    driven.handle(ev.HandlerOrdered(ORDER, "t"))
    assert asked(driven) == [], "asked before it is durable"
    (commit,) = driven.of(ef.Commit)
    assert audit([commit.transaction]) == [AuditEntry(NOW_NS, "ann", "cancel of the handler 5: no stock")]
    driven.disk_all()
    assert arguments(bytes(driven.app_bytes)) == [encode_order(ORDER)]
    (question,) = asked(driven)
    assert (question.sequence_id, question.message_index) == (1, 0)
    assert answers(driven) == []
    driven.data(encode_handlers_answer(HandlersAnswer(question.ticket, {"done": True, "text": "so"})))
    assert answers(driven) == [("t", {"done": True, "text": "so", "record": 1, "message": 0})]


def test_orders_in_one_record_are_told_apart() -> None:
    driven = working()
    driven.auto = False
    driven.handle(ev.HandlerOrdered(ORDER, "first"))
    driven.handle(ev.HandlerOrdered(ORDER, "second"), ev.HandlerOrdered(ORDER, "third"))
    driven.disk_all()
    driven.disk_all()
    places = [(question.sequence_id, question.message_index) for question in asked(driven)]
    assert places == [(1, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize("event", [ev.HandlersAsked(0, "t"), ev.HandlerOrdered(ORDER, "t")])
def test_without_an_app_nobody_is_asked(event: ev.Event) -> None:
    driven = working()
    driven.close()
    driven.forget()
    driven.handle(event)
    ((_, answer),) = answers(driven)
    assert str(answer["refused"]).startswith("the app of 'a' does not work now (phase: waiting for the app)")
    assert not driven.of(ef.Commit)


@pytest.mark.parametrize("event", [ev.HandlersAsked(0, "t"), ev.HandlerOrdered(ORDER, "t")])
def test_an_app_of_another_sdk_is_not_asked(event: ev.Event) -> None:
    driven = working(EXTENSIONS - {MessageType.HANDLERS_ASKED})
    driven.handle(event)
    ((_, answer),) = answers(driven)
    assert "has an SDK that does not tell of its handlers" in str(answer["refused"])
    assert not driven.of(ef.Commit)


def test_an_app_that_goes_leaves_nobody_waiting() -> None:
    driven = working()
    driven.handle(ev.HandlersAsked(0, "asked"), ev.HandlerOrdered(ORDER, "obeyed"))
    assert len(asked(driven)) == 2
    driven.auto = False
    driven.handle(ev.HandlerOrdered(ORDER, "on its way"))
    driven.close()
    told = dict(answers(driven))
    assert "ended before it could answer" in str(told["asked"]["refused"])
    for token, record in (("obeyed", 1), ("on its way", 2)):
        assert (told[token]["done"], told[token]["record"]) == (None, record)
        assert "the next one obeys it" in str(told[token]["text"])


def test_a_busy_app_is_asked_so_much_and_no_more() -> None:
    driven = working()
    for number in range(OPEN_MAX + 1):
        driven.handle(ev.HandlersAsked(0, number))
    ((token, answer),) = answers(driven)
    assert token == OPEN_MAX
    assert "it is busy" in str(answer["refused"])
    (question, *_) = asked(driven)
    driven.data(encode_handlers_answer(HandlersAnswer(question.ticket, {})))
    driven.handle(ev.HandlersAsked(0, "again"))
    assert len(answers(driven)) == 2


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (encode_handlers_answer(HandlersAnswer(9, {})), "for the question 9, which it was not asked, or has answered"),
        (b"\x06\x5c\x91\x01", "a Handlers can't be read"),
    ],
)
def test_an_answer_that_makes_no_sense_ends_the_connection(said: bytes, problem: str) -> None:
    driven = working()
    driven.data(said)
    assert driven.of(ef.CloseApp)
    assert any(problem in text for _, text in driven.reports)
